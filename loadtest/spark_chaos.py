"""`make chaos-spark TIME=…`: Spark writes and copies logs while its drivers and the gateways are
killed.

Each round writes ROWS numbers to a log, with tasks that fail. A gateway is killed while rows are
being written. The first successful answer to the commit is lost; the second one is held back, and
the driver is killed before it gets the answer. The job runs again, and must add nothing. Then a
stream copies the log to another log. Its driver is killed RESTARTS times: at random points, or
between a commit and the entry in Spark's own commit log. Meanwhile gateways are killed and answers
are lost.

In the end each number must be in both logs exactly once, and every ledger must belong to a log. The
kills end after TIME. Then the stream runs to its end, and the records are counted. Another round
begins if there is time for one more.

With EVERY, there are no rounds. One stream commits numbers to a log each EVERY seconds until TIME is
over. After the first minute gateways, bookies and the driver are killed. The run reports how long
commits took, and how many ledgers the log had at most.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

import aiohttp
import pyarrow as pa
from rich.console import Console

from loadtest.cluster import Cluster, running
from loadtest.ports import free_ports
from loadtest.program import Seconds, Teller, arguments
from loadtest.stores import Stores, scratch
from loadtest.waiting import DeadlineMissed, until
from quorumlog.errors import QuorumLogError
from quorumlog.spark.http import Gateways
from quorumlog.wire.columns import MEDIA
from services.local.config import ROOT
from services.local.process import Program, start

_WAIT_S: Final = 900.0
"""Deadline of a driver that is not killed, on a machine that may be shared and slow."""

_SETTLED_S: Final = 600.0
"""Deadline for the deletion of unpublished ledgers: the transaction must expire, or an orphaned
ledger must reach ORPHAN_AGE_S. Then the next sweep deletes the ledger."""

_ORPHAN_AGE_S: Final = 60
"""Shorter than the default of five minutes, to end a run soon, but longer than a roll."""

_ASK_S: Final = 5.0
"""Deadline of a request of this program, which repeats requests anyway."""

_TELL_EVERY_S: Final = 15.0
"""Interval between two lines of progress."""

_FIRST_S: Final = 60.0
"""Time before the first kill of a run with EVERY. Its commits are compared with the later ones."""
_KILL_EVERY_S: Final = 30.0
"""Interval between two kills of a run with EVERY."""
_KILLS_OF_A_DRIVER: Final = 20
"""Kills of bookies and gateways between two kills of the driver."""
_RECOVERED_S: Final = 20.0
"""Commits that begin this long after a kill, or later, count as undisturbed."""
_STEADY_PARTITIONS: Final = 4

_COMMIT: Final = re.compile(rb"POST /v1/transactions/[^ /]+/commit ")
_DONE: Final = re.compile(rb"HTTP/1\.1 2\d\d ")
_PARTITIONS: Final = 8

What = Literal["lose", "hold"]
_LOSES: Final[tuple[What, ...]] = ("lose",)


@dataclass(slots=True)
class Counts:
    """Counters of the run's actions, and of the errors that it found."""

    rows: int = 0
    lost: int = 0
    doubled: int = 0
    orphans: int = 0
    gateway_kills: int = 0
    driver_kills: int = 0
    kills_after_commit: int = 0
    """Kills of drivers that had not yet received the answer to their commit."""
    answers_lost: int = 0
    bookie_kills: int = 0
    commits: list[tuple[float, float]] = field(default_factory=list)
    """When each commit began, by the monotonic clock, and its duration, both in seconds."""
    kills_at: list[float] = field(default_factory=list)
    """Times of the kills of a run with EVERY, by the monotonic clock."""
    ledgers_max: int = 0
    """The most ledgers that the log of a run with EVERY had."""
    stage: str = "a cluster starts"
    """The current stage of the run."""
    spent: dict[str, float] = field(default_factory=dict)
    """Seconds spent in each stage."""
    broken_off: str = ""
    """Why the run ended early; empty if it did not."""

    @property
    def is_right(self) -> bool:
        """Whether the run found no error and did not end early."""
        return not (self.lost or self.doubled or self.orphans or self.broken_off)

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Make `what` the current stage, and add the block's time to it."""
        began = time.monotonic()
        self.stage = what
        try:
            yield
        finally:
            self.spent[what] = self.spent.get(what, 0) + time.monotonic() - began

    @property
    def progress(self) -> str:
        """The progress of the run, in one line."""
        return (
            f"{self.stage}: {self.driver_kills} driver kills, {self.gateway_kills} gateway kills, "
            f"{self.answers_lost} answers lost"
        )

    @property
    def steady(self) -> str:
        """The durations of the commits of a run with EVERY, in several lines."""
        if not self.commits:
            return "no commits"
        start = self.commits[0][0] + _FIRST_S
        first = median(took for at, took in self.commits if at < start)
        last = median(took for _, took in self.commits[-60:])
        calm = max(
            took
            for at, took in self.commits
            if not any(at - _RECOVERED_S < kill < at + took for kill in self.kills_at)
        )
        return (
            f"{len(self.commits)} commits in {self.commits[-1][0] - self.commits[0][0]:.0f} s,"
            f" {self.bookie_kills} bookie kills, at most {self.ledgers_max} ledgers\n"
            f"medians: first minute {first * 1e3:.0f} ms, last 60 commits {last * 1e3:.0f} ms\n"
            f"longest: without a kill {calm * 1e3:.0f} ms ({calm / first:.1f} x),"
            f" of all {max(took for _, took in self.commits) * 1e3:.0f} ms"
        )

    @property
    def page(self) -> str:
        """The details of the result, in several lines."""
        spent = ", ".join(f"{what} {seconds:.0f} s" for what, seconds in self.spent.items())
        return "\n".join(
            [
                spent,
                f"answers of commits that were lost: {self.answers_lost}",
                f"drivers killed before they got the answer to a commit: {self.kills_after_commit}",
                *([f"BROKEN OFF: {self.broken_off}"] if self.broken_off else []),
            ]
        )

    def __str__(self) -> str:
        """The summary, which is the last line of output."""
        return (
            f"chaos-spark: {self.rows} rows, {self.lost} lost, {self.doubled} doubled, "
            f"{self.orphans} orphans, {self.gateway_kills} gateway kills, "
            f"{self.driver_kills} driver kills"
        )


class Answers:
    """The plan for the next answers that confirm a commit: pass, lose or hold them."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._plan: list[What] = []
        self.held = asyncio.Event()
        """Set while an answer is held back: the commit is done, and its driver waits."""

    def plan(self, *what: What) -> None:
        """Lose or hold the next answers, in this order. Replaces the earlier plan."""
        self._plan = list(what)
        self.held.clear()

    def next(self, began: float) -> What | None:
        """Return the action for an answer that has arrived to a commit that began then."""
        self._counts.commits.append((began, time.monotonic() - began))
        if not self._plan:
            return None
        what = self._plan.pop(0)
        if what == "lose":
            self._counts.answers_lost += 1
        else:
            self.held.set()
        return what


class LossyProxy:
    """A proxy in front of a gateway, which passes, loses or holds answers as planned."""

    def __init__(self, url: str, answers: Answers) -> None:
        self._host, port = url.removeprefix("http://").split(":")
        self._port, self._answers = int(port), answers

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Listen until the end of the block. Yields the proxy's URL."""
        port = free_ports(1)[0]
        server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with (
            contextlib.closing(writer),
            contextlib.suppress(OSError, asyncio.IncompleteReadError),
        ):
            up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
            state: dict[str, float | None] = {"commits": None}
            back = asyncio.ensure_future(self._back(up_reader, writer, state))
            try:
                while chunk := await reader.read(1 << 16):
                    # Each request begins a chunk, because clients wait for each answer.
                    if _COMMIT.match(chunk):
                        state["commits"] = time.monotonic()
                    up_writer.write(chunk)
                    await up_writer.drain()
            finally:
                up_writer.close()
                back.cancel()
                await asyncio.wait({back})

    async def _back(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        state: dict[str, float | None],
    ) -> None:
        is_held = False
        with contextlib.suppress(OSError):
            while chunk := await reader.read(1 << 16):
                if (began := state["commits"]) is not None:
                    state["commits"] = None
                    what = self._answers.next(began) if _DONE.match(chunk) else None
                    if what == "lose":
                        break
                    is_held = what == "hold"
                if not is_held:
                    writer.write(chunk)
                    await writer.drain()
        writer.close()


@dataclass(slots=True)
class Chaos:
    """One run against one cluster."""

    cluster: Cluster
    answers: Answers
    urls: str
    """URLs of the proxies, separated by commas."""
    folder: Path
    rows: int
    """The rows of a round, or of the log that was counted last."""
    partitions: int
    restarts: int
    end: float
    """The end of the kills, in the event loop's time."""
    chance: random.Random
    counts: Counts
    say: Callable[[str], None]
    http: Gateways = field(init=False)
    _at: int = 0
    """The last known end of the log that is being written."""

    def __post_init__(self) -> None:
        """Send this program's own requests to the gateways directly, not through the proxies."""
        self.http = Gateways(",".join(self.cluster.gateways), deadline_s=_ASK_S)

    async def round(self, number: int) -> None:
        """Write a log, copy it, and count the records of both logs."""
        source, target = f"source-{number}", f"target-{number}"
        for log in (source, target):
            await self._ask("PUT", f"/v1/logs/{log}", {"roll_bytes": 8 << 20})
        asked = {
            "urls": self.urls,
            "rows": self.rows,
            # Small enough that the stream has batches left when the last driver is killed.
            "rows_per_batch": max(1, self.rows // (4 * self.restarts + 4)),
            "partitions": self.partitions,
            "seed": self.chance.randrange(1 << 30),
            "source": source,
            "target": "",
            "writes": True,
            "checkpoint": str(self.folder / f"checkpoint-{number}"),
            "folder": str(self.folder),
        }
        with self.counts.timed("the batch"):
            await self._batch(asked, source)
        with self.counts.timed("the stream"):
            await self._stream(asked | {"target": target}, target)
        with self.counts.timed("counting"):
            for log in (source, target):
                await asyncio.to_thread(self._count, log)
        self.counts.rows += self.rows
        self.say(f"round {number}: {self.counts}")

    async def steady(self, every_s: float) -> None:
        """Commit numbers to a log at this interval until the end, and kill processes meanwhile."""
        loop, log = asyncio.get_running_loop(), "steady"
        await self._ask("PUT", f"/v1/logs/{log}", {})
        asked = {
            "urls": self.urls,
            "partitions": _STEADY_PARTITIONS,
            "target": log,
            "writes": False,
            "every_s": every_s,
            "checkpoint": str(self.folder / "checkpoint"),
            "folder": str(self.folder),
        }
        with self.counts.timed("the stream"):
            while loop.time() < self.end:
                async with self._driver(asked) as driver:
                    if not self.counts.commits:
                        await until(lambda: bool(self.counts.commits), "the first commit", _WAIT_S)
                        await asyncio.sleep(_FIRST_S - _KILL_EVERY_S)
                    await self._disturb(driver, log)
        self.rows = 0
        with self.counts.timed("counting"):
            await asyncio.to_thread(self._count, log)
        self.counts.rows = self.rows

    async def _disturb(self, driver: "subprocess.Popen[bytes]", log: str) -> None:
        """Kill a bookie and a gateway in turn, and after some time the driver."""
        loop, kills_at = asyncio.get_running_loop(), self.counts.kills_at
        for number in range(_KILLS_OF_A_DRIVER):
            await asyncio.sleep(min(_KILL_EVERY_S, max(0.0, self.end - loop.time())))
            found = await self._ask("GET", f"/v1/logs/{log}")
            self.counts.ledgers_max = max(self.counts.ledgers_max, len(found["ledgers"]))
            if loop.time() >= self.end:
                return
            self._check_alive(driver)
            kills_at.append(time.monotonic())
            await (self._hurt_a_gateway() if number % 2 else self._hurt_a_bookie())
            kills_at.append(time.monotonic())
        kills_at.append(time.monotonic())
        self._kill(driver)

    async def _batch(self, asked: dict[str, Any], log: str) -> None:
        """Kill a gateway while rows are being written, and the driver once its commit is done."""
        before = await self._ledgers()
        self.answers.plan("lose", "hold")
        async with self._driver(asked) as driver:
            await until(
                lambda: self._has_more(before, driver), "tasks write", _WAIT_S, passing=_PASSING
            )
            await self._hurt_a_gateway()
            await self._kill_after_commit(driver)
        await until(
            lambda: self._is_at(log, self.rows, driver), "the batch is there", passing=_PASSING
        )

    async def _stream(self, asked: dict[str, Any], log: str) -> None:
        """Kill the driver repeatedly, after one or two more batches. Then let it finish."""
        loop = asyncio.get_running_loop()
        self._at = 0
        for number in range(self.restarts):
            if loop.time() >= self.end:
                self.say(f"the time is over after {number} of {self.restarts} restarts")
                break
            self.counts.stage = f"the stream, until kill {number + 1} of {self.restarts}"
            # The first driver also reruns the batch job whose driver was killed.
            async with self._driver(asked | {"writes": number == 0}) as driver:
                at = self._at + asked["rows_per_batch"] * self.chance.randrange(1, 3)
                self.answers.plan(*_LOSES if number % 4 == 2 else ())
                await until(
                    lambda: self._is_at(log, at, driver),  # noqa: B023 - awaited here
                    f"the stream is at {at}",
                    _WAIT_S,
                    passing=_PASSING,
                )
                if number % 4 == 1:
                    await self._hurt_a_gateway()
                if number % 3 == 0:
                    self.answers.plan("hold")
                    await self._kill_after_commit(driver)
                else:
                    await asyncio.sleep(self.chance.uniform(0, 0.5))
                    self._kill(driver)
        self.counts.stage = "the stream, to its end"
        self.answers.plan()
        async with self._driver(asked | {"writes": self.restarts == 0}) as driver:
            await until(lambda: driver.poll() is not None, "the stream ends", _WAIT_S)
            if driver.returncode:
                raise RuntimeError(f"the driver failed:\n{self._log().read_text()[-3000:]}")

    async def _kill_after_commit(self, driver: "subprocess.Popen[bytes]") -> None:
        """Kill the driver when its commit is done, but the driver has not received the answer."""

        def is_held() -> bool:
            self._check_alive(driver)
            return self.answers.held.is_set() or driver.poll() is not None

        await until(is_held, "a commit is done", _WAIT_S)
        if self.answers.held.is_set():
            self.counts.kills_after_commit += driver.poll() is None
            self._kill(driver)

    @contextlib.asynccontextmanager
    async def _driver(self, asked: dict[str, Any]) -> AsyncIterator["subprocess.Popen[bytes]"]:
        argv = (sys.executable, "-m", "loadtest.spark_driver", json.dumps(asked))
        path = os.pathsep.join((str(ROOT / "shared"), str(ROOT)))
        process = start(
            Program("driver", argv, {**os.environ, "PYTHONPATH": path}, ROOT), self._log()
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _kill(self, driver: "subprocess.Popen[bytes]") -> None:
        """Kill the driver with its JVM and Python workers (SIGKILL)."""
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
            self.counts.driver_kills += 1

    def _log(self) -> Path:
        return self.folder / "driver.log"

    async def _hurt_a_gateway(self) -> None:
        """Kill a gateway and start it again. Meanwhile clients use the other gateway."""
        name = f"gateway-{self.chance.randrange(1, 3)}"
        await self.cluster.kill(name)
        self.counts.gateway_kills += 1
        await self.cluster.restart(name)

    async def _hurt_a_bookie(self) -> None:
        """Kill a bookie and start it again."""
        name = f"bookie-{self.chance.randrange(1, 5)}"
        await self.cluster.kill(name)
        self.counts.bookie_kills += 1
        await self.cluster.restart(name)

    async def _has_more(self, before: set[int], driver: "subprocess.Popen[bytes]") -> bool:
        self._check_alive(driver)
        return len(await self._ledgers() - before) > 1

    async def _is_at(self, log: str, offset: int, driver: "subprocess.Popen[bytes]") -> bool:
        found = await self._ask("GET", f"/v1/logs/{log}")
        self._at = int(found["next_offset"])
        if self._at >= min(offset, self.rows):
            return True
        self._check_alive(driver)
        return False

    def _check_alive(self, driver: "subprocess.Popen[bytes]") -> None:
        if driver.poll() not in (None, 0):
            raise RuntimeError(f"the driver failed:\n{self._log().read_text()[-3000:]}")

    async def _ask(self, method: str, path: str, value: Any = None) -> Any:
        answer = await asyncio.to_thread(
            self.http.request, method, path, value=value, is_repeatable=True
        )
        return answer.json()

    async def _ledgers(self) -> set[int]:
        found = await asyncio.to_thread(self.http.pages, "/v1/ledgers", "ledgers")
        return {int(ledger["ledger_id"]) for ledger in found}

    def _count(self, log: str) -> None:
        """Count the numbers that a log lacks, and those that it has twice."""
        seen = bytearray(self.rows)
        at, is_end = 0, False
        http = Gateways(",".join(self.cluster.gateways))
        while not is_end:
            answer = http.request(
                "GET",
                f"/v1/logs/{log}/records",
                params={"from": at, "limit": 10_000, "max_bytes": 8 << 20},
                headers={"Accept": MEDIA},
                is_repeatable=True,
            )
            page = pa.ipc.open_stream(answer.body).read_all()
            for value in page.column("value").to_pylist():
                number = int(value)
                seen.extend(bytes(max(0, number + 1 - len(seen))))
                self.counts.doubled += seen[number]
                seen[number] = 1
            at, is_end = int(answer.headers["Next-Offset"]), page.num_rows == 0
        http.close()
        self.counts.lost += seen.count(0)
        self.rows = len(seen)

    async def settle(self, *, all_ledgers: bool) -> None:
        """Wait until all unpublished ledgers are deleted. Ledgers that remain are counted as
        orphans.

        `all_ledgers`: include ledgers that a log has dropped, which are kept as long as a roll
        might still reference them (rule 22). Otherwise only ledgers of transactions count.
        """

        async def is_clean() -> bool:
            left = await self._left(all_ledgers=all_ledgers)
            self.counts.stage = f"waiting for the deletion of {len(left)} orphaned ledgers"
            return not left

        with self.counts.timed("cleaning up"):
            with contextlib.suppress(DeadlineMissed):
                await until(
                    is_clean,
                    "all unpublished ledgers are deleted",
                    _SETTLED_S,
                    passing=_PASSING,
                )
            self.counts.orphans += len(await self._left(all_ledgers=all_ledgers))

    async def _left(self, *, all_ledgers: bool) -> set[int]:
        """The ids of ledgers that no log references."""
        found = await asyncio.to_thread(self.http.pages, "/v1/ledgers", "ledgers")
        logs = await asyncio.to_thread(self.http.pages, "/v1/logs", "logs")
        named = {int(item["ledger_id"]) for log in logs for item in log["ledgers"]}
        mine = {int(f["ledger_id"]) for f in found if all_ledgers or "transaction" in f}
        return mine - named


_PASSING: Final = (QuorumLogError, aiohttp.ClientError, OSError)


async def storm(
    stores: Stores | None,
    counts: Counts,
    *,
    rows: int,
    restarts: int,
    time_s: float,
    seed: int,
    every_s: float = 0.0,
    partitions: int = _PARTITIONS,
    waits_for_all: bool = False,
    say: Callable[[str], None] = lambda _line: None,
) -> None:
    """Run rounds while there is time for one more, but at least one. With `every_s`, run one stream
    that commits at this interval instead.

    `waits_for_all`: also wait until ledgers that a log dropped are deleted. If the run is
    cancelled, it ends the cluster and sets `counts.broken_off`.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(scratch("ql-spark-"))
        environment = {"ORPHAN_AGE_S": str(_ORPHAN_AGE_S)}
        cluster = await stack.enter_async_context(
            running(stores, bookies=4, gateways=2, environment=environment)
        )
        answers = Answers(counts)
        proxies = [LossyProxy(url, answers) for url in cluster.gateways]
        urls = [await stack.enter_async_context(proxy.listening()) for proxy in proxies]
        chaos = Chaos(
            cluster,
            answers,
            ",".join(urls),
            Path(tempfile.mkdtemp(dir=folder)),
            rows,
            partitions,
            restarts,
            began + time_s,
            random.Random(seed),
            counts,
            say,
        )
        stack.callback(chaos.http.close)
        try:
            number, longest_s = 0, 0.0
            if every_s:
                await chaos.steady(every_s)
            while not every_s and (number == 0 or loop.time() + longest_s < chaos.end):
                at = loop.time()
                await chaos.round(number)
                longest_s = max(longest_s, loop.time() - at)
                number += 1
            await chaos.settle(all_ledgers=waits_for_all)
        except asyncio.CancelledError:
            # Handled here, so that the cluster shuts down in order, without printing its logs.
            counts.broken_off = f"interrupted in {counts.stage}"


async def _reported(counts: Counts, teller: Teller) -> None:
    """Print the progress at an interval until cancelled."""
    while True:
        teller.say(counts.progress)
        await asyncio.sleep(_TELL_EVERY_S)


async def _run(asked: argparse.Namespace, counts: Counts) -> None:
    teller = Teller(Console(stderr=True))
    run = asyncio.ensure_future(
        storm(
            None,
            counts,
            rows=asked.rows,
            restarts=asked.restarts,
            time_s=asked.time,
            seed=asked.seed,
            every_s=asked.every,
            waits_for_all=True,
            say=teller.say,
        )
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, run.cancel)
    reporting = asyncio.ensure_future(_reported(counts, teller))
    try:
        await run
    finally:
        reporting.cancel()
        await asyncio.wait({reporting})


def main() -> None:
    """Run the chaos test from the command line, and print a summary as the last line."""
    options = {
        "time": (Seconds("60s"), "how long processes are killed: 90s, 2m, 1h"),
        "rows": (1_000_000, "rows of each round"),
        "restarts": (20, "how often the stream's driver is killed in each round"),
        "every": (Seconds("0s"), "interval of the commits of one stream, instead of rounds"),
        "seed": (1, "seed of all random choices"),
    }
    asked = arguments("make chaos-spark", __doc__, options)
    print(f"seed {asked.seed}, {asked.rows} rows, {asked.restarts} restarts a round", flush=True)
    counts = Counts()
    try:
        asyncio.run(_run(asked, counts))
    except asyncio.CancelledError:
        # Cancelled before the cluster was ready.
        counts.broken_off = f"interrupted while {counts.stage}"
    except DeadlineMissed as error:
        counts.broken_off = str(error)
    print(counts.page if not asked.every else f"{counts.page}\n{counts.steady}")
    print(counts)
    raise SystemExit(130 if counts.broken_off.startswith("interrupted") else not counts.is_right)


if __name__ == "__main__":
    main()
