"""The consumer of the example: each record counts once, whatever dies when, and whatever is delivered again."""

import asyncio
import contextlib
import signal
import sqlite3
import sys
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import orjson
import pytest
import pytest_asyncio

from loadtest.cluster import Cluster
from quorumlog.client import Client, Log
from tests.cluster.examples.support import ROOT, Running
from tests.support.waiting import SETTLED_S, until

pytestmark = pytest.mark.asyncio(loop_scope="package")

CONSUMER: Final = "balances"
KILLS: Final = 4


def payment(number: int) -> bytes:
    """Its amount is a power of two among its account's: one that counts twice, or not at all, shows in the sum."""
    return orjson.dumps({"account": f"a{number // 30}", "cents": 1 << number % 30})


def sums(count: int) -> dict[str, int]:
    """What so many payments amount to."""
    found: dict[str, int] = {}
    for number in range(count):
        shown = orjson.loads(payment(number))
        found[shown["account"]] = found.get(shown["account"], 0) + shown["cents"]
    return found


class File:
    """The file that a worker writes, as others read it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self, query: str) -> list[Any]:
        """The rows of a query; none as long as the file is not made."""
        with contextlib.closing(sqlite3.connect(self.path, timeout=60)) as database:
            tables = database.execute("SELECT name FROM sqlite_master").fetchall()
            return database.execute(query).fetchall() if ("progress",) in tables else []

    @property
    def following(self) -> int:
        """How far the log is counted."""
        rows = self.rows("SELECT following FROM progress")
        return int(rows[0][0]) if rows else 0

    @property
    def balances(self) -> dict[str, int]:
        """The sum of each account."""
        return dict(self.rows("SELECT account, cents FROM balances"))


class Workers:
    """Starts workers on one log and one file, and ends them."""

    def __init__(self, cluster: Cluster, log: Log, folder: Path) -> None:
        self.log, self.file = log, File(folder / "balances.db")
        self._gateways, self._folder = cluster.gateways, folder
        self._started: list[Running] = []

    def start(self, name: str = "worker", *, lease_s: float = 5.0) -> Running:
        """Run a worker of a name."""
        argv = (
            sys.executable, str(ROOT / "examples" / "exactly_once.py"), "--file", str(self.file.path),
            "--log", self.log.name, "--consumer", CONSUMER, "--holder", name, "--lease", str(lease_s),
            "--gateways", *self._gateways,
        )  # fmt: skip
        self._started.append(Running(f"{name}-{len(self._started)}", argv, self._folder))
        return self._started[-1]

    async def reach(self, offset: int, *workers: Running) -> None:
        """Wait until the file has all records below an offset."""

        def has_reached() -> bool:
            for worker in workers:
                worker.check()
            return self.file.following >= offset

        await until(has_reached, f"{offset} records are counted", SETTLED_S)

    def kill_all(self) -> None:
        """End what still runs."""
        for worker in self._started:
            worker.process.send_signal(signal.SIGCONT)
            worker.kill()


@contextmanager
def killed_in_the_end(workers: Workers) -> Iterator[Workers]:
    try:
        yield workers
    finally:
        workers.kill_all()


@pytest_asyncio.fixture(loop_scope="package")
async def workers(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Workers]:
    async with Client(*cluster.gateways) as client:
        log = await client.create_log(f"payments-{uuid.uuid4().hex}")
        with killed_in_the_end(Workers(cluster, log, tmp_path)) as started:
            yield started


async def append(log: Log, numbers: Sequence[int]) -> None:
    """Append payments one after another, so that a worker gets them in many pages."""
    producer = log.producer()
    for number in numbers:
        await producer.append(payment(number))


async def test_a_worker_killed_repeatedly_loses_and_repeats_nothing(workers: Workers) -> None:
    each = 60
    total = each * (KILLS + 1)
    appending = asyncio.ensure_future(append(workers.log, range(total)))
    for kills in range(1, KILLS + 1):
        worker = workers.start()
        # Somewhere in the middle of its work: while records come, are counted, or are committed.
        await workers.reach(kills * each - each // 2, worker)
        worker.kill()
    worker = workers.start()
    await appending
    await workers.reach(total, worker)

    assert workers.file.following == total
    assert workers.file.balances == sums(total)


async def test_what_is_delivered_again_counts_once(workers: Workers) -> None:
    await append(workers.log, range(40))
    worker = workers.start()
    await workers.reach(40, worker)
    worker.kill()

    # As if no commit had come to the cluster: all of it is delivered again.
    await workers.log.reset_consumer(CONSUMER, "earliest")
    again = workers.start()
    await append(workers.log, range(40, 60))
    await workers.reach(60, again)

    assert workers.file.balances == sums(60)
    assert (await workers.log.consumer_info(CONSUMER))["offset"] >= 40


async def test_a_worker_that_hung_during_a_takeover_repeats_nothing(workers: Workers) -> None:
    await append(workers.log, range(20))
    hung = workers.start("one", lease_s=2.0)
    await workers.reach(20, hung)
    hung.process.send_signal(signal.SIGSTOP)
    await append(workers.log, range(20, 40))
    other = workers.start("two", lease_s=2.0)
    await workers.reach(40, other)

    hung.process.send_signal(signal.SIGCONT)
    await append(workers.log, range(40, 80))
    await workers.reach(80, hung, other)

    assert workers.file.balances == sums(80)


async def test_a_worker_that_is_ended_lets_its_lease_go(workers: Workers) -> None:
    await append(workers.log, [0])
    first = workers.start("one", lease_s=600.0)
    await workers.reach(1, first)

    first.process.terminate()
    await until(lambda: first.process.poll() is not None, "the worker ends")
    second = workers.start("two", lease_s=600.0)
    await append(workers.log, [1])
    await workers.reach(2, second)

    assert first.process.returncode == 0, first.said
    assert workers.file.balances == sums(2)


async def test_a_record_that_is_no_payment_stops_nothing_and_is_kept(workers: Workers) -> None:
    odd = [b"\xff", b"[1]", b'{"account": 1, "cents": 1}', b'{"account": "a0"}',
           b'{"account": "a0", "cents": true}', b'{"account": "a0", "cents": 1000000000001}']  # fmt: skip
    for value in odd:
        await workers.log.append(value)
    await append(workers.log, [0])
    worker = workers.start()
    await workers.reach(len(odd) + 1, worker)

    assert workers.file.balances == sums(1)
    refused = workers.file.rows("SELECT offset, reason FROM refused ORDER BY offset")
    assert [offset for offset, _ in refused] == list(range(len(odd)))
    assert all(reason for _, reason in refused)


async def test_a_file_that_lacks_committed_records_is_refused(workers: Workers) -> None:
    await append(workers.log, range(10))
    worker = workers.start()
    await workers.reach(10, worker)

    async def has_committed() -> bool:
        worker.check()
        return bool((await workers.log.consumer_info(CONSUMER))["offset"] == 10)

    await until(has_committed, "the position is committed")
    worker.kill()
    # An older copy of the file.
    with contextlib.closing(sqlite3.connect(workers.file.path)) as database:
        database.execute("UPDATE progress SET following = 4")
        database.commit()

    refused = workers.start()
    await until(lambda: refused.process.poll() is not None, "the worker ends")

    assert refused.process.returncode == 1
    assert "the committed offset is 10" in refused.said
    assert workers.file.following == 4
