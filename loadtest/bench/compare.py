"""The rates of quorumlog, JetStream and BookKeeper in one run.

Each round runs all measurements of all systems on one machine, and the medians of the rounds are
reported. Entries have 1 KiB by default and three copies, and a majority acknowledges them after
fsync. If a measurement of JetStream or BookKeeper fails in a round, the round goes on without it.
Compared measurements run one after the other.
"""

import argparse
import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter as clock
from typing import Any, Final, Self

from loadtest.bench.goals import GOALS
from loadtest.bench.measure import KIB, ROLES, Figures, during, percentiles
from loadtest.bench.ours import JSON, Ours
from loadtest.bench.plan import ROUNDS, TIME, Columns, Plan, Work
from loadtest.bookkeeper.peer import BookKeeper
from loadtest.jetstream import JetStream
from loadtest.program import Teller, is_set
from quorumlog.client.records import FRAMES

_SMALL: Final = 100
_LARGE: Final = 64 * KIB
_COPIES: Final = 3
_FILE_BYTES: Final = 64 << 20
"""Bytes of each writer's file. At the end of the file, the writer starts again at its beginning."""
_RATES: Final = (
    *("entries/s", "least", "most", "MB/s"),
    *("p50 ms", "p99 ms", "p99.9 ms", "ms", "gap ms", "failed"),
)
_CPU: Final = (
    *(f"{role} us" for role in (*ROLES, "all")),
    *(f"{role} ms/MB" for role in ROLES[:3]),
)

OPTIONS: Final = {
    "time": TIME,
    "rounds": ROUNDS,
    "tls": (
        is_set("TLS"),
        "use mutual TLS between the gateways and the bookies; this program itself connects without TLS",
    ),
}


@dataclass(frozen=True, slots=True)
class Disk:
    """Measures the disk alone, whose rate limits every system that syncs before it responds."""

    folder: Path
    seconds: float

    @classmethod
    @asynccontextmanager
    async def running(cls, folder: Path, seconds: float) -> AsyncIterator[Self]:
        """Measure in this folder; nothing needs to be started."""
        yield cls(folder, seconds)

    async def write(self, size: int, writers: int = _COPIES) -> Figures:
        """Let each writer write and sync `size` bytes repeatedly. MB/s is the rate of one writer."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(asyncio.to_thread(self._write, self.folder / f"writer-{number}", size))
                for number in range(writers)
            ]  # fmt: skip
        times_s = [time for task in tasks for time in task.result()]
        return {"MB/s": len(times_s) / writers * size / self.seconds / 1e6, **percentiles(times_s)}

    def _write(self, file: Path, size: int) -> list[float]:
        data, times_s = os.urandom(size), []
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
        try:
            os.posix_fallocate(descriptor, 0, _FILE_BYTES)
            os.fsync(descriptor)
            at = 0
            for began in during(self.seconds):
                os.pwrite(descriptor, data, at)
                os.fdatasync(descriptor)
                times_s.append(clock() - began)
                at = (at + size) % (_FILE_BYTES - size)
        finally:
            os.close(descriptor)
            file.unlink()
        return times_s


def _ours(what: str, method: Callable[..., Awaitable[Figures]], *given: Any) -> Work:
    return Work("quorumlog", what, method, given)


def _jetstream(what: str, method: Callable[..., Awaitable[Figures]], *given: Any) -> Work:
    return Work("JetStream", what, method, given)


def _bookkeeper(what: str, method: Callable[..., Awaitable[Figures]], *given: Any) -> Work:
    return Work("BookKeeper", what, method, given)


def _single() -> Iterator[Work]:
    """Measurements of one call per entry, with a growing number of concurrent calls."""
    for count in (1, 64, 256, 2000):
        yield _ours(f"Ledger.append, {count}", Ours.ledger, count)
        yield _ours(f"Log.append, {count}", Ours.log, count)
        if count <= 256:
            yield _ours(f"HTTP, {count}", Ours.http, count)
            yield _ours(f"wrk, {count}", Ours.wrk, count)
        if count == 1:
            yield _ours("tail of one reader", Ours.tail)
        yield _jetstream(f"publish, {count}", JetStream.publish, count)
        yield _jetstream(f"nats bench, {count}", JetStream.nats_bench, count)
        yield _bookkeeper(f"asyncAddEntry, {count}", BookKeeper.append, count)


def _sizes() -> Iterator[Work]:
    for name, size in (("100 B", _SMALL), ("64 KiB", _LARGE)):
        yield _ours(f"Ledger.append, 64, of {name}", Ours.ledger, 64, size)
        yield _ours(f"raw batches of 100, of {name}", Ours.raw_batches, 100, size)
        yield _jetstream(f"publish, 64, of {name}", JetStream.publish, 64, size)
        yield _bookkeeper(f"asyncAddEntry, 64, of {name}", BookKeeper.append, 64, size)


WORKS: Final = (
    Work("disk", "three writers of 128 KiB", Disk.write, (128 * KIB,)),
    Work("disk", "one writer of 8 KiB", Disk.write, (8 * KIB, 1)),
    *_single(),
    _ours("submit, sync client", Ours.submit),
    _ours("NDJSON stream", Ours.lines),
    _ours("WebSocket stream", Ours.socket),
    _ours("JSON batches of 100", Ours.json_batches, 100),
    _ours("JSON batches of 1000", Ours.json_batches, 1000),
    _ours("raw batches of 100", Ours.raw_batches, 100),
    _ours("raw batches of 1000", Ours.raw_batches, 1000),
    _jetstream("nats bench 4 x 500", JetStream.nats_bench, 500, "async", 4),
    _jetstream("nats bench atomic, 4 x 1000", JetStream.nats_bench, 1000, "atomic", 4),
    _jetstream("nats bench fast, 1000", JetStream.nats_bench, 1000, "fast"),
    *_sizes(),
    _ours("the largest load", Ours.largest_load),
    _ours("1 open ledger", Ours.ledgers, 1),
    _ours("100 open ledgers", Ours.ledgers, 100),
    _ours("10000 open ledgers", Ours.ledgers, 10_000),
    _ours("read in order, JSON", Ours.read, JSON),
    _ours("read in order, raw", Ours.read, FRAMES),
    _ours("read in order, Ledger.entries", Ours.entries),
    _jetstream("read in order", JetStream.read),
    _jetstream("read in order, nats bench", JetStream.nats_bench_read),
    _bookkeeper("read in order, ranges of 100", BookKeeper.read, "ranges", 100),
    _bookkeeper("read in order, batched", BookKeeper.read, "batched", 1000),
    _ours("recovery of 10000", Ours.recovery, 10_000),
    _bookkeeper("recovery of 10000", BookKeeper.recovery, 10_000),
    _ours("recovery of 100000", Ours.recovery, 100_000),
    _bookkeeper("recovery of 100000", BookKeeper.recovery, 100_000),
    _ours("a bookie is killed", Ours.death),
    _bookkeeper("a bookie is killed", BookKeeper.death),
)


def plan(asked: argparse.Namespace, _teller: Teller) -> Plan:
    """Plan all measurements."""
    return Plan(
        WORKS,
        {
            "disk": Disk.running,
            "quorumlog": partial(Ours.running, tls=asked.tls),
            "JetStream": JetStream.running,
            "BookKeeper": BookKeeper.running,
        },
        (Columns("medians of the rounds", _RATES), Columns("CPU", _CPU)),
        asked.time,
        asked.rounds,
        "mutual TLS inside" if asked.tls else "no TLS inside",
        GOALS,
        ("JetStream", "BookKeeper"),
        is_tls=asked.tls,
    )
