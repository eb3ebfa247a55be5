"""One bookie, without a gateway, filled with the entries of interleaved ledgers. ENTRIES= sets
their number.

Runs of 100 entries arrive over the channel, for thousands of ledgers in turn. One long ledger gets
every twentieth run, so its entries are scattered over the whole log. The benchmark measures the
rate of appends, the resident memory during appends, and a restart after SIGKILL until the bookie is
ready. It also measures reads from the disk rather than its cache, at a small size and at the full
size, and the disk's own rate.

Then further bookies get entries of 100 B, 1 KiB and 10 KiB. The long ledger is read through the
channel and from the store alone, before and after a compaction, which sorts by ledger. The report
has the share of the disk's rate and the CPU time per MB, which depends less on the machine's other
load.
"""

import argparse
import asyncio
import random
import shutil
import statistics
import sys
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter as clock
from time import process_time
from typing import Final

from loadtest.bench.measure import Absent, Figures, medians
from loadtest.bench.one_bookie import (
    LONG_EVERY,
    MB,
    READ_BYTES,
    RUN_ENTRIES,
    Filler,
    LoneBookie,
    disk_mb_s,
    drop_cache,
    lone_bookie,
    read_in_order,
)
from loadtest.bench.plan import Columns, Plan, Work
from loadtest.program import Teller
from quorumlog.protocol.record import Run
from quorumlog.protocol.replica import ReadAsked
from services.bookie.config import StoreOptions
from services.bookie.space import Space
from services.bookie.store import ReadAnswer, Store

SMALL_ENTRIES: Final = 1_000_000
"""Number of entries at which reads are measured for the first time, for comparison."""

ORDERED_BYTES_LEAST: Final = 64 * MB
ORDERED_ROUNDS_MAX: Final = 10
"""A short ledger is read repeatedly, so that the start of a read does not distort the result."""

SIZES: Final = (100, 1024, 10 * 1024)
"""Sizes of the entries that are read before and after a compaction."""

SIZES_BYTES: Final = 200 * MB
"""Bytes of the log for each of these sizes. The long ledger has a twentieth of them."""

SIZES_ROUNDS: Final = 5

ENTRY_OVERHEAD: Final = 34
"""Bytes of an entry in the log beyond its payload, including its share of runs and batches."""

INDEX_SHARE: Final = 0.02
SPARE_BYTES: Final = 2 * 10**9
"""Bytes that stay free when the log is longest, for other programs and for the bookie's reserve."""

TENTHS: Final = 10


@dataclass(frozen=True, slots=True)
class Scale:
    """The amount of data that the benchmark writes."""

    entries: int
    entry_bytes: int
    ledgers: int
    in_flight_mb: int

    @property
    def needed_bytes(self) -> int:
        """Disk space for the longest log, plus the spare bytes."""
        log = self.entries * (self.entry_bytes + ENTRY_OVERHEAD)
        # Twice the size, because a compaction writes a new log before it deletes the old one.
        return max(int(log * (1 + INDEX_SHARE)), 2 * SIZES_BYTES) + SPARE_BYTES


@dataclass(slots=True)
class Filled:
    """A bookie, with the program that fills it."""

    bookie: LoneBookie
    filler: Filler
    entries: int
    """Number of entries that the bookie has in the end."""
    teller: Teller
    appending_s: float = 0.0
    samples: list[tuple[int, float]] = field(default_factory=list)
    """Samples, one per second of appending: acknowledged entries, and resident memory in MB."""

    @classmethod
    @asynccontextmanager
    async def running(
        cls, folder: Path, _seconds: float, *, scale: Scale, entry_bytes: int, teller: Teller
    ) -> AsyncIterator["Filled"]:
        """Run an empty bookie during the block. Raises: Absent if the disk is too small."""
        needed, free = scale.needed_bytes, shutil.disk_usage(folder).free
        if free < needed:
            raise Absent(
                f"the benchmark needs {needed:,} bytes in {folder}, where {free:,} are free"
            )
        async with lone_bookie(folder) as bookie:
            filler = Filler(
                bookie.client(),
                bookie.member,
                range(1, 1 + scale.ledgers),
                entry_bytes=entry_bytes,
                in_flight_mb=scale.in_flight_mb,
            )
            yield cls(bookie, filler, scale.entries, teller)
            await filler.client.close()

    # Measurements of a growing bookie.

    async def grow(self, entries: int) -> Figures:
        """Append this many entries, and sample the memory each second."""
        bookie, filler, samples = self.bookie, self.filler, self.samples

        async def watch() -> None:
            while True:
                samples.append((filler.acknowledged, round(bookie.rss_mb, 1)))
                await asyncio.sleep(1)

        def show(done: int) -> None:
            rss = samples[-1][1] if samples else 0.0
            self.teller.show(f"append, RSS {rss:.0f} MB", done, entries)

        watching = asyncio.create_task(watch())
        began = clock()
        try:
            await filler.fill(entries, show)
        finally:
            watching.cancel()
        took = clock() - began
        self.appending_s += took
        samples.append((filler.acknowledged, round(bookie.rss_mb, 1)))
        is_whole = filler.acknowledged == self.entries
        return {
            "entries/s": entries / took,
            "entries/s so far": filler.acknowledged / self.appending_s,
            "log MB": bookie.log_bytes / MB,
            "RSS MB at most": max(rss for _, rss in samples),
            **(_tenths(samples, self.entries) if is_whole else {}),
            **{f"RSS MB at {at}": rss for at, rss in samples},
        }

    async def read(self) -> Figures:
        """Measure reads in order and at random."""
        bookie, filler, rss_max = self.bookie, self.filler, 0.0
        disk = await asyncio.to_thread(disk_mb_s, bookie.data)
        count = size = rounds = 0
        took = cpu_s = 0.0
        while size < ORDERED_BYTES_LEAST and rounds < ORDERED_ROUNDS_MAX:
            await asyncio.to_thread(drop_cache, bookie.data)
            before = bookie.cpu_s
            some, some_bytes, some_s = await filler.ordered()
            cpu_s += bookie.cpu_s - before
            count, size, took, rounds = count + some, size + some_bytes, took + some_s, rounds + 1
            rss_max = max(rss_max, bookie.rss_mb)
        await asyncio.to_thread(drop_cache, bookie.data)
        per_s, times_s = await filler.random(random.Random(1))
        times_s.sort()
        return {
            "disk MB/s": disk,
            **_rate("in order", disk, size, took, cpu_s),
            "in order per s": count / took,
            "random per s": per_s,
            "random p50 ms": times_s[len(times_s) // 2] * 1000,
            "random p99 ms": times_s[len(times_s) * 99 // 100] * 1000,
            "reading RSS MB at most": max(rss_max, bookie.rss_mb),
        }

    async def restart(self) -> Figures:
        """Measure a restart after SIGKILL, until the bookie is ready."""
        await self.filler.client.close()
        await self.bookie.kill()
        began = clock()
        await self.bookie.restart()
        self.filler.client = self.bookie.client()
        return {"restart s": clock() - began}

    # Measurements of reads of one ledger among thousands.

    async def scattered(self) -> Figures:
        """Fill the log, and measure reads of the long ledger in order."""
        count = SIZES_BYTES // (self.filler.entry_bytes + ENTRY_OVERHEAD)
        count = count // RUN_ENTRIES * RUN_ENTRIES
        await self.filler.fill(count, lambda done: self.teller.show("append", done, count))
        return await self._places()

    async def compacted(self) -> Figures:
        """Compact the whole log, and measure reads of the long ledger in order."""
        store = self._store()
        try:
            await Space(store, live_share_min=1.0, bytes_per_s=1 << 40).free()
        finally:
            await store.stop()
        await self.bookie.restart()
        return await self._places()

    async def _places(self) -> Figures:
        """Measure reads through the channel and from the store alone, in rounds, with the disk's
        rate in each round. Returns the medians. Stops the bookie.
        """
        filler, bookie = self.filler, self.bookie

        async def through_channel() -> tuple[int, float, float]:
            before = bookie.cpu_s
            _, size, took = await filler.ordered()
            return size, took, bookie.cpu_s - before

        channel = await self._rounds("channel", through_channel)
        await filler.client.close()
        await bookie.stop()
        filler.client = bookie.client()
        store = self._store()

        async def from_store() -> tuple[int, float, float]:
            began, before = clock(), process_time()
            size = await _read_store(store, filler.long, filler.next[filler.long])
            return size, clock() - began, process_time() - before

        try:
            alone = await self._rounds("store", from_store)
        finally:
            await store.stop()
        disk = statistics.median(each["disk MB/s"] for each in (*channel, *alone))
        return medians(alone) | medians(channel) | {"disk MB/s": disk}

    def _store(self) -> Store:
        store = Store(self.bookie.data, self.bookie.member, StoreOptions())
        store.start(_fatal)
        return store

    async def _rounds(
        self, name: str, once: Callable[[], Awaitable[tuple[int, float, float]]]
    ) -> list[Figures]:
        """Measure the disk and the read in turn, because a shared machine's load may change."""
        found = []
        for _ in range(SIZES_ROUNDS):
            disk = await asyncio.to_thread(disk_mb_s, self.bookie.data)
            await asyncio.to_thread(drop_cache, self.bookie.data)
            size, took, cpu_s = await once()
            found.append({"disk MB/s": disk, **_rate(name, disk, size, took, cpu_s)})
        return found


def _tenths(samples: list[tuple[int, float]], entries: int) -> Figures:
    """The memory at the end of each tenth of the entries, which shows whether it grows."""
    counts = [count for count, _ in samples]
    found = {}
    for tenth in range(1, TENTHS + 1):
        end = entries * tenth // TENTHS
        found[f"RSS MB at {tenth}/{TENTHS}"] = samples[bisect_right(counts, end) - 1][1]
    return found


def _rate(name: str, disk_mb_s: float, size: int, took_s: float, cpu_s: float) -> Figures:
    """The rate of a read, its share of the disk's rate, and the reader's CPU time per MB."""
    mb_s = size / MB / took_s
    return {
        f"{name} MB/s": mb_s,
        f"{name} % of disk": 100 * mb_s / disk_mb_s,
        f"{name} CPU ms/MB": cpu_s * 1000 / (size / MB),
    }


def _fatal(error: BaseException) -> None:
    sys.stderr.write(f"the store can't write any more: {error!r}\n")


async def _read_store(store: Store, ledger_id: int, end: int) -> int:
    """Read a ledger in order from a store, without a network. Returns the bytes of the runs."""
    loop = asyncio.get_running_loop()

    async def read(first: int, last: int) -> Run:
        answered: asyncio.Future[ReadAnswer] = loop.create_future()
        asked = ReadAsked(store.me, first, last)
        store.read(ledger_id, asked, READ_BYTES * 2, answered.set_result)
        body = (await answered).run
        assert body is not None, f"entry {first} is missing"
        return Run(body)

    _, size = await read_in_order(read, end, store.ledger(ledger_id).row().stored_bytes // end)
    return size


OPTIONS: Final = {
    "entries": (5_000_000, "entries of the bookie that grows"),
    "entry_bytes": (100, "bytes of each of these entries"),
    "ledgers": (3000, "ledgers that are filled in turn"),
    "in_flight_mb": (4, "MB of adds in flight; a value far above the disk's rate causes overload"),
    "growth_only": (
        False,
        "measure only the growing bookie: no other sizes of entries, and no compaction",
    ),
}
_GROWTH: Final = (
    *("entries/s", "entries/s so far", "log MB", "RSS MB at most", "restart s"),
    *(f"RSS MB at {tenth}/{TENTHS}" for tenth in range(1, TENTHS + 1)),
)
_READS: Final = (
    *("disk MB/s", "in order MB/s", "in order % of disk", "in order CPU ms/MB", "in order per s"),
    *("random per s", "random p50 ms", "random p99 ms", "reading RSS MB at most"),
)
_PLACES: Final = (
    "disk MB/s",
    *(f"{way} {what}" for way in ("store", "channel") for what in ("MB/s", "% of disk", "CPU ms/MB")),
)  # fmt: skip


def plan(asked: argparse.Namespace, teller: Teller) -> Plan:
    """Plan a bookie that grows, and then a bookie for each size of entries."""
    if asked.ledgers < 2:
        raise SystemExit("--ledgers must be at least 2: a long ledger and one other")
    least = 5 * RUN_ENTRIES * max(asked.ledgers, LONG_EVERY)
    if asked.entries < least:
        raise SystemExit(f"--entries must be at least {least:,} for {asked.ledgers} ledgers")
    entries = asked.entries // RUN_ENTRIES * RUN_ENTRIES
    small = min(SMALL_ENTRIES, entries // 5) // RUN_ENTRIES * RUN_ENTRIES
    scale = Scale(entries, asked.entry_bytes, asked.ledgers, asked.in_flight_mb)
    sizes = {"growing": asked.entry_bytes}
    works = [
        Work("growing", f"append {small:,}", Filled.grow, (small,)),
        Work("growing", f"read at {small:,}", Filled.read),
        Work("growing", f"append {entries - small:,} more", Filled.grow, (entries - small,)),
        Work("growing", f"read at {entries:,}", Filled.read),
        Work("growing", "a restart after SIGKILL", Filled.restart),
    ]
    for size in () if asked.growth_only else SIZES:
        sizes[name := f"entries of {size:,} B"] = size
        works += [
            Work(name, "scattered", Filled.scattered),
            Work(name, "compacted", Filled.compacted),
        ]
    starts = {
        name: partial(Filled.running, scale=scale, entry_bytes=size, teller=teller)
        for name, size in sizes.items()
    }
    tables = (
        Columns("one bookie that grows", _GROWTH, "growing", is_turned=True),
        Columns("reads from it", _READS, "growing"),
        Columns("one ledger read in order, from the disk", _PLACES, "entries of"),
    )
    said = f"entries of {asked.entry_bytes:,} B, {asked.ledgers:,} ledgers in turn"
    return Plan(works, starts, tables, conditions=said, is_apart=True)
