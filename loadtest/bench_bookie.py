"""`make bench-bookie ENTRIES=…`: one bookie, without a gateway, filled with interleaved ledgers.

Runs of 100 entries come over the channel, thousands of ledgers in turn, and one long ledger gets
every twentieth run: what is read in order lies scattered over the whole log. Measured are the rate
of appends, the resident memory while they go on, a restart after SIGKILL until the bookie is ready,
and reads at a small size and at the full one, from the disk and not from its cache, beside what the
disk itself gives in the same run.

Then bookies of their own with entries of 100 B, 1 KiB and 10 KiB: the long ledger is read through
the channel and from the store alone, before and after a compaction that sorts by ledger. Beside the
share of the disk's rate stands the CPU time per MB, which other work on the machine changes less
than it does times.
"""

import argparse
import asyncio
import random
import shutil
import signal
import statistics
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter as clock
from time import process_time
from typing import Final

import aiohttp
import orjson
import uvloop
from rich.console import Console
from rich.table import Table

from loadtest.one_bookie import (
    MB,
    ORDERED_BYTES_MAX,
    READ_BYTES,
    READS_IN_FLIGHT,
    RUN_ENTRIES,
    BookieProcess,
    Filler,
    Step,
    Steps,
    disk_mb_s,
    drop_cache,
    metadata_service,
    stretch_of,
)
from loadtest.stores import Stores, store_servers
from quorumlog.protocol.record import Run
from quorumlog.protocol.replica import ReadAsked
from services.bookie.config import StoreOptions
from services.bookie.space import Space
from services.bookie.store import ReadAnswer, Store
from services.local.config import ROOT

SMALL_ENTRIES: Final = 1_000_000
"""Reads are measured there too, for comparison."""

ORDERED_BYTES_LEAST: Final = 64 * MB
ORDERED_ROUNDS_MAX: Final = 10
"""A short ledger is read again, from the disk again, until a start no longer shows."""

SIZES: Final = (100, 1024, 10 * 1024)
"""Of the entries that are read before and after a compaction."""

SIZES_BYTES: Final = 200 * MB
"""Of each of them in the log; the long ledger has a twentieth of it."""

SIZES_ROUNDS: Final = 5

ENTRY_OVERHEAD: Final = 34
"""Bytes of an entry in the log beside its payload, with its part of what a run and a batch have."""

INDEX_SHARE: Final = 0.02
SPARE_BYTES: Final = 2 * 10**9
"""Left for others when the log is as long as it gets, and for what a bookie keeps in reserve."""

TENTHS: Final = 10


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast bytes came, and what each MB cost."""

    mb_s: float
    cpu_ms_mb: float
    """CPU time of who reads the disk: the bookie's process, or the store's."""


@dataclass(slots=True)
class Reads:
    """How reads went at one size of the log."""

    entries: int
    disk_mb_s: float
    ordered: Rate
    """Of the log's bytes, as the disk's rate is."""
    ordered_entries_s: float
    random_s: float
    random_p50_ms: float
    random_p99_ms: float


@dataclass(slots=True)
class Place:
    """Reads in order of one ledger among thousands: medians over rounds, each beside the disk."""

    entry_bytes: int
    is_compacted: bool
    disk_mb_s: float
    store: Rate
    store_share: float
    """Of the disk's rate in the same round."""
    channel: Rate
    channel_share: float


@dataclass(slots=True)
class Report:
    """What was measured."""

    entries: int
    entry_bytes: int
    ledgers: int
    in_flight_mb: int
    entries_s: float = 0.0
    rss_mb: list[tuple[int, float]] = field(default_factory=list)
    """Each second while entries were appended: how many there were, and the resident memory."""
    rss_reading_mb_max: float = 0.0
    log_mb: float = 0.0
    restart_s: float = 0.0
    reads: list[Reads] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)

    @property
    def rss_mb_max(self) -> float:
        """The most that was seen at any time."""
        return max([self.rss_reading_mb_max, *(rss for _, rss in self.rss_mb)])

    def rss_tenths(self) -> list[float]:
        """What was seen last before each tenth of the entries was full: flat, or not."""
        ends = [self.entries * tenth // TENTHS for tenth in range(1, TENTHS + 1)]
        counts = [entries for entries, _ in self.rss_mb]
        return [self.rss_mb[bisect_right(counts, end) - 1][1] for end in ends]


class Bench:
    """The measurement of one bookie as it grows."""

    def __init__(self, report: Report, steps: Steps) -> None:
        self.report = report
        self._steps = steps

    async def run(self, bookie: BookieProcess) -> None:
        """Fill, read, kill, start again."""
        report = self.report
        bookie.start()
        await bookie.ready()
        filler = Filler(
            bookie.client(),
            bookie.member,
            range(1, 1 + report.ledgers),
            entry_bytes=report.entry_bytes,
            in_flight_mb=report.in_flight_mb,
        )
        small = min(SMALL_ENTRIES, report.entries // 5) // RUN_ENTRIES * RUN_ENTRIES
        took = await self._filled(filler, bookie, small)
        report.reads.append(await self._read(filler, bookie))
        took += await self._filled(filler, bookie, report.entries - small)
        report.entries_s = filler.acknowledged / took
        report.log_mb = bookie.log_bytes / MB
        report.reads.append(await self._read(filler, bookie))
        await filler.client.close()
        bookie.kill()
        began = clock()
        bookie.start()
        await bookie.ready()
        report.restart_s = clock() - began
        self._steps.say(f"ready {report.restart_s:.1f} s after a start that followed SIGKILL")

    async def _filled(self, filler: Filler, bookie: BookieProcess, entries: int) -> float:
        step = self._steps.step(f"append {entries:,}", entries)
        samples = self.report.rss_mb

        async def watch() -> None:
            while True:
                rss = round(bookie.rss_mb, 1)
                samples.append((filler.acknowledged, rss))
                step.note = f", RSS {rss:.0f} MB"
                await asyncio.sleep(1)

        watching = asyncio.create_task(watch())
        began = clock()
        try:
            await filler.fill(entries, step)
        finally:
            watching.cancel()
        took = clock() - began
        samples.append((filler.acknowledged, round(bookie.rss_mb, 1)))
        return took

    async def _read(self, filler: Filler, bookie: BookieProcess) -> Reads:
        disk = await asyncio.to_thread(disk_mb_s, bookie.data)
        step = self._steps.step("read in order", filler.next[filler.long])
        count = size = rounds = 0
        took = cpu_s = 0.0
        while size < ORDERED_BYTES_LEAST and rounds < ORDERED_ROUNDS_MAX:
            await asyncio.to_thread(drop_cache, bookie.data)
            before = bookie.cpu_s
            some, some_bytes, some_s = await filler.ordered(step)
            cpu_s += bookie.cpu_s - before
            count, size, took, rounds = count + some, size + some_bytes, took + some_s, rounds + 1
            self._note_reading(bookie)
        await asyncio.to_thread(drop_cache, bookie.data)
        self._steps.say("read at random")
        per_s, times = await filler.random(random.Random(1))
        self._note_reading(bookie)
        return Reads(
            sum(filler.next.values()),
            disk,
            Rate(size / MB / took, cpu_s * 1000 / (size / MB)),
            count / took,
            per_s,
            times[len(times) // 2] * 1000,
            times[len(times) * 99 // 100] * 1000,
        )

    def _note_reading(self, bookie: BookieProcess) -> None:
        self.report.rss_reading_mb_max = max(self.report.rss_reading_mb_max, bookie.rss_mb)


class Scattered:
    """A bookie with entries of one size: reads in order before and after a compaction."""

    def __init__(
        self, report: Report, steps: Steps, bookie: BookieProcess, entry_bytes: int
    ) -> None:
        self._report = report
        self._steps = steps
        self._bookie = bookie
        self._entry_bytes = entry_bytes

    async def run(self) -> None:
        """Measure, compact, measure."""
        bookie, size = self._bookie, self._entry_bytes
        bookie.start()
        await bookie.ready()
        filler = Filler(
            bookie.client(),
            bookie.member,
            range(1, 1 + self._report.ledgers),
            entry_bytes=size,
            in_flight_mb=self._report.in_flight_mb,
        )
        count = SIZES_BYTES // (size + ENTRY_OVERHEAD) // RUN_ENTRIES * RUN_ENTRIES
        step = self._steps.step(f"append {count:,} of {size:,} B", count)
        await filler.fill(count, step)
        for is_compacted in (False, True):
            if is_compacted:
                bookie.start()
                await bookie.ready()
            channel = await self._through_channel(filler)
            await filler.client.close()
            await asyncio.to_thread(bookie.stop)
            filler.client = bookie.client()
            store = await self._in_store(filler)
            disk = [each for each, _ in (*channel, *store)]
            self._report.places.append(
                Place(
                    size,
                    is_compacted,
                    statistics.median(disk),
                    _median(store),
                    statistics.median(rate.mb_s / disk for disk, rate in store),
                    _median(channel),
                    statistics.median(rate.mb_s / disk for disk, rate in channel),
                )
            )
            if not is_compacted:
                await self._compact()
        await filler.client.close()

    async def _through_channel(self, filler: Filler) -> list[tuple[float, Rate]]:
        step = self._steps.step("read through the channel", filler.next[filler.long])

        async def once() -> tuple[int, float, float]:
            before = self._bookie.cpu_s
            _, size, took = await filler.ordered(step)
            return size, took, self._bookie.cpu_s - before

        return await self._rounds(once)

    async def _in_store(self, filler: Filler) -> list[tuple[float, Rate]]:
        step = self._steps.step("read from the store", filler.next[filler.long])
        store = Store(self._bookie.data, self._bookie.member, StoreOptions())
        store.start(_fatal)

        async def once() -> tuple[int, float, float]:
            began, before = clock(), process_time()
            size = await _ordered(store, filler.long, filler.next[filler.long], step)
            return size, clock() - began, process_time() - before

        try:
            return await self._rounds(once)
        finally:
            await store.stop()

    async def _rounds(
        self, once: Callable[[], Awaitable[tuple[int, float, float]]]
    ) -> list[tuple[float, Rate]]:
        """The disk's rate and the read's, in turn: the machine may be shared."""
        found = []
        for _ in range(SIZES_ROUNDS):
            disk = await asyncio.to_thread(disk_mb_s, self._bookie.data)
            await asyncio.to_thread(drop_cache, self._bookie.data)
            size, took, cpu_s = await once()
            found.append((disk, Rate(size / MB / took, cpu_s * 1000 / (size / MB))))
        return found

    async def _compact(self) -> None:
        """Move all there is, as compaction moves what is left of segments."""
        self._steps.say("compact")
        store = Store(self._bookie.data, self._bookie.member, StoreOptions())
        store.start(_fatal)
        try:
            await Space(store, live_share_min=1.0, bytes_per_s=1 << 40).free()
        finally:
            await store.stop()


def _median(found: list[tuple[float, Rate]]) -> Rate:
    return Rate(
        statistics.median(rate.mb_s for _, rate in found),
        statistics.median(rate.cpu_ms_mb for _, rate in found),
    )


def _fatal(error: BaseException) -> None:
    sys.stderr.write(f"the store can't write any more: {error!r}\n")


async def _ordered(store: Store, ledger_id: int, end: int, step: Step) -> int:
    """Read a ledger in pieces from a store without a network: bytes of runs."""
    loop = asyncio.get_running_loop()
    entry_bytes = store.ledger(ledger_id).row().stored_bytes // end
    stretch = stretch_of(entry_bytes)
    firsts = iter(range(0, min(end, ORDERED_BYTES_MAX // entry_bytes), stretch))
    size = 0

    async def work() -> None:
        nonlocal size
        for low in firsts:
            at, high = low, min(end, low + stretch) - 1
            while at <= high:
                answered: asyncio.Future[ReadAnswer] = loop.create_future()
                asked = ReadAsked(store.me, at, high)
                store.read(ledger_id, asked, READ_BYTES * 2, answered.set_result)
                body = (await answered).run
                assert body is not None, f"entry {at} is not there"
                size += len(body)
                at += Run(body).count
            step.advance(high - low + 1)

    async with asyncio.TaskGroup() as group:
        for _ in range(READS_IN_FLIGHT):
            group.create_task(work())
    return size


async def _measured(
    report: Report, stores: Stores, folder: Path, out: Console, *, sizes: tuple[int, ...]
) -> None:
    """All of it; a part's figures are printed when it is done."""
    console = Console(stderr=True)
    # Bookies and gigabytes must not stay behind: `finally` and the like run after a SIGTERM too.
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with (
        aiohttp.ClientSession() as session,
        metadata_service(stores, folder, session) as url,
    ):
        bookie = BookieProcess("b1", folder / "b1", url, session)
        with _ended(bookie), Steps(console) as steps:
            await Bench(report, steps).run(bookie)
        _print_growth(report, out)
        for number, size in enumerate(sizes, start=2):
            bookie = BookieProcess(f"b{number}", folder / f"b{number}", url, session)
            with _ended(bookie), Steps(console) as steps:
                await Scattered(report, steps, bookie, size).run()
        if sizes:
            _print_places(report, out)


@contextmanager
def _ended(bookie: BookieProcess) -> Iterator[None]:
    """Stop a bookie and give its disk space back; say what it logged where it failed."""
    try:
        yield
    except BaseException:
        log = bookie.folder / "log.txt"
        if log.exists():
            sys.stderr.write(log.read_text(errors="replace")[-4000:])
        raise
    finally:
        bookie.stop()
        shutil.rmtree(bookie.folder, ignore_errors=True)


def _print_growth(report: Report, console: Console) -> None:
    growing = Table(
        title=f"one bookie, {report.ledgers:,} ledgers in turn, {report.log_mb:,.0f} MB"
    )
    for name in (
        "entries of\n" + f"{report.entry_bytes:,} B",
        "disk\nMB/s",
        "in order\nMB/s",
        "of\ndisk",
        "CPU\nms/MB",
        "\nper s",
        "random\nper s",
        "p50\nms",
        "p99\nms",
    ):
        growing.add_column(name, justify="right")
    for reads in report.reads:
        growing.add_row(
            f"{reads.entries:,}",
            f"{reads.disk_mb_s:,.0f}",
            f"{reads.ordered.mb_s:,.0f}",
            f"{reads.ordered.mb_s / reads.disk_mb_s:.0%}",
            f"{reads.ordered.cpu_ms_mb:.2f}",
            f"{reads.ordered_entries_s:,.0f}",
            f"{reads.random_s:,.0f}",
            f"{reads.random_p50_ms:.1f}",
            f"{reads.random_p99_ms:.1f}",
        )
    console.print(growing)
    tenths = " ".join(f"{rss:.0f}" for rss in report.rss_tenths())
    console.print(
        f"RSS in MB at each tenth of the entries: {tenths};"
        f" while they were read: {report.rss_reading_mb_max:.0f};"
        f" restart after SIGKILL: {report.restart_s:.1f} s"
    )


def _print_places(report: Report, console: Console) -> None:
    places = Table(title=f"one ledger of {report.ledgers:,} read in order, from the disk")
    for name in ("entry\nB", "\nplaces", "disk\nMB/s", "store\nMB/s", "of\ndisk", "CPU\nms/MB"):
        places.add_column(name, justify="right")
    for name in ("channel\nMB/s", "of\ndisk", "CPU\nms/MB"):
        places.add_column(name, justify="right")
    for place in report.places:
        places.add_row(
            f"{place.entry_bytes:,}",
            "compacted" if place.is_compacted else "scattered",
            f"{place.disk_mb_s:,.0f}",
            f"{place.store.mb_s:,.0f}",
            f"{place.store_share:.0%}",
            f"{place.store.cpu_ms_mb:.2f}",
            f"{place.channel.mb_s:,.0f}",
            f"{place.channel_share:.0%}",
            f"{place.channel.cpu_ms_mb:.2f}",
        )
    console.print(places)


def _needed_bytes(asked: argparse.Namespace) -> int:
    """Disk that the longest log takes, and what is left to others."""
    log = asked.entries * (asked.entry_bytes + ENTRY_OVERHEAD)
    # A compaction writes all of a log anew before the old one goes.
    return max(int(log * (1 + INDEX_SHARE)), 2 * SIZES_BYTES) + SPARE_BYTES


def main() -> None:
    """Measure, print, and end with one line for programs."""
    parser = argparse.ArgumentParser(prog="make bench-bookie", description=__doc__)
    parser.add_argument("--entries", type=int, default=5_000_000)
    parser.add_argument("--entry-bytes", type=int, default=100)
    parser.add_argument("--ledgers", type=int, default=3000)
    parser.add_argument(
        "--in-flight-mb", type=int, default=4, help="of adds; far more than a disk takes: overload"
    )
    parser.add_argument(
        "--growth-only", action="store_true", help="leave the other sizes and compaction out"
    )
    parser.add_argument("--json", action="store_true", help="all figures, and the samples of RSS")
    asked = parser.parse_args()
    least = 5 * RUN_ENTRIES * asked.ledgers
    if asked.entries < least:
        parser.error(f"{asked.ledgers} ledgers need {least:,} entries at least")
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    needed, free = _needed_bytes(asked), shutil.disk_usage(build).free
    if free < needed:
        parser.error(f"it takes {needed:,} bytes in {build}, where {free:,} are free")
    report = Report(
        asked.entries // RUN_ENTRIES * RUN_ENTRIES,
        asked.entry_bytes,
        asked.ledgers,
        asked.in_flight_mb,
    )
    with ExitStack() as stack:
        servers = stack.enter_context(store_servers())
        # On the disk that the clone is on, not in memory.
        folder = Path(tempfile.mkdtemp(prefix="bench-bookie-", dir=build))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        out = Console(stderr=asked.json)
        sizes = () if asked.growth_only else SIZES
        try:
            uvloop.run(_measured(report, servers.fresh(), folder, out, sizes=sizes))
        except asyncio.CancelledError:
            raise SystemExit(143) from None
    if asked.json:
        print(orjson.dumps(asdict(report)).decode())
    print(
        f"bench-bookie: {report.entries} entries, {report.entries_s:.0f}/s,"
        f" RSS {report.rss_mb_max:.0f} MB, restart {report.restart_s:.1f} s"
    )


if __name__ == "__main__":
    main()
