"""`make bench-bookie ENTRIES=…`: one bookie, without a gateway, filled with interleaved ledgers.

Runs of 100 entries come over the channel, thousands of ledgers in turn, and one long ledger gets
every twentieth run: what is read in order lies scattered over the whole log. Measured are the rate
of appends, the resident memory while they go on, a restart after SIGKILL until the bookie is ready,
and reads at a small size and at the full one, from the disk and not from its cache, beside what the
disk itself gives in the same run.
"""

import argparse
import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter as clock
from typing import Final

import aiohttp
import orjson
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from loadtest.ports import free_ports
from loadtest.stores import Stores, store_servers
from loadtest.waiting import until
from quorumlog.net.bookie_client import BookieClient, ChannelLimits
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import DigestKind
from quorumlog.protocol.record import Codec, Run, make
from services.local.config import ROOT, inherited_environment
from services.local.process import Program, start, stop

RUN_ENTRIES: Final = 100
LONG_EVERY: Final = 20
LONG_LEDGER: Final = 1
ORDERED_BYTES_MAX: Final = 1 << 30
READ_BYTES: Final = 1 << 20
READS_IN_FLIGHT: Final = 8
RANDOM_READS: Final = 2000
RANDOM_IN_FLIGHT: Final = 16
OTHER_SIZES: Final = (1024, 10 * 1024)
OTHER_BYTES: Final = 400_000_000
"""Of the long ledgers of larger entries, with what lies between them."""

MEMBER: Final = "b1@1"
KEY: Final = b"k" * 32
_MB: Final = 1_000_000


@dataclass(slots=True)
class Reads:
    """How reads went at one size."""

    entries: int
    entry_bytes: int
    disk_mb_s: float
    ordered_mb_s: float
    """Of the log's bytes, as the disk's rate is."""
    ordered_entries_s: float
    random_s: float
    random_p50_ms: float
    random_p99_ms: float

    @property
    def share(self) -> float:
        """Of the disk's own rate."""
        return self.ordered_mb_s / self.disk_mb_s


@dataclass(slots=True)
class Report:
    """What was measured."""

    entries: int
    entry_bytes: int
    ledgers: int
    in_flight_mb: int
    entries_s: float = 0.0
    rss_mb_max: float = 0.0
    rss_mb: list[float] = field(default_factory=list)
    """At equal distances while entries were appended."""
    log_mb: float = 0.0
    restart_s: float = 0.0
    replayed_clean: bool = False
    reads: list[Reads] = field(default_factory=list)


class Bookie:
    """The process that is measured."""

    def __init__(self, folder: Path, metadata_url: str, session: aiohttp.ClientSession) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self._metadata_url = metadata_url
        self._session = session
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; does not wait."""
        environment = {
            "BOOKIE_NAME": "b1",
            "DATA_DIR": str(self.data),
            # Nobody else knows these ledgers: their rows are not to be asked for.
            "COLLECT_S": "86400",
            "METADATA_URLS": self._metadata_url,
        }
        self._process = start(_program("bookie", self.port, environment), self.folder / "log.txt")

    async def ready(self) -> None:
        """Wait until it takes requests."""
        assert self._process is not None
        await _until_ready(self._session, self.url, self._process)

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it, in order where it can be."""
        if self._process is not None:
            stop(self._process, signal.SIGTERM, 30)

    @property
    def rss_mb(self) -> float:
        """Resident memory."""
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024 / _MB

    def drop_cache(self) -> None:
        """Have the kernel forget what it has of the log, so that reads mean the disk."""
        for path in (self.data / "log").glob("*.log"):
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    @property
    def log_bytes(self) -> int:
        """Of the log's files."""
        return sum(path.stat().st_size for path in (self.data / "log").glob("*.log"))

    def disk_mb_s(self) -> float:
        """What the disk gives one who reads the same files one after another."""
        self.drop_cache()
        began, size = clock(), 0
        buffer = bytearray(1 << 20)
        paths = sorted((self.data / "log").glob("*.log"))
        # The last one is not full yet: holes cost no disk.
        for path in paths[:-1] or paths:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                while got := os.readv(fd, [buffer]):
                    size += got
            finally:
                os.close(fd)
            if size > ORDERED_BYTES_MAX:
                break
        return size / _MB / (clock() - began)


class Filler:
    """Appends runs, and knows what must be there."""

    def __init__(
        self, client: BookieClient, ledgers: range, entry_bytes: int, in_flight_mb: int
    ) -> None:
        self._client = client
        self._ledgers = ledgers
        self.entry_bytes = entry_bytes
        self._in_flight_max = max(2, in_flight_mb * _MB // (entry_bytes * RUN_ENTRIES))
        payload = os.urandom(entry_bytes * RUN_ENTRIES)
        self._payloads = [
            payload[at : at + entry_bytes] for at in range(0, len(payload), entry_bytes)
        ]
        self._codec = Codec(DigestKind.CRC32C)
        self.next: dict[int, int] = dict.fromkeys(ledgers, 0)
        self._turn = 0
        self._in_flight = 0
        self._room: asyncio.Future[None] | None = None
        self.failed = 0
        self.acknowledged = 0

    @property
    def long(self) -> int:
        """The ledger that is read in order."""
        return self._ledgers[0]

    async def fill(self, entries: int, progress: "Bar") -> None:
        """Append so many entries; returns when all are acknowledged."""
        loop = asyncio.get_running_loop()
        for number in range(entries // RUN_ENTRIES):
            while self._in_flight >= self._in_flight_max:
                self._room = loop.create_future()
                await self._room
            self._client.add(MEMBER, KEY, self._run(), self._done)
            self._in_flight += 1
            if number % 100 == 0:
                progress.advance(100 * RUN_ENTRIES)
                await asyncio.sleep(0)
        while self._in_flight:
            self._room = loop.create_future()
            await self._room
        if self.failed:
            raise SystemExit(f"{self.failed} runs were not stored")

    def _done(self, status: Status) -> None:
        self._in_flight -= 1
        self.failed += status is not Status.OK
        self.acknowledged += RUN_ENTRIES
        room = self._room
        if room is not None and not room.done():
            room.set_result(None)

    def _run(self) -> Run:
        self._turn += 1
        others = len(self._ledgers) - 1
        ledger = (
            self.long if self._turn % LONG_EVERY == 0 else self._ledgers[1 + self._turn % others]
        )
        first = self.next[ledger]
        self.next[ledger] = first + RUN_ENTRIES
        return make(
            ledger_id=ledger,
            first_entry=first,
            last_add_confirmed=first - 1,
            length_before=first * self.entry_bytes,
            payloads=self._payloads,
            codec=self._codec,
        )

    async def ordered(self, progress: "Bar") -> tuple[int, int, float]:
        """Read the long ledger from its beginning: entries, bytes of runs, and seconds."""
        end = min(self.next[self.long], ORDERED_BYTES_MAX // self.entry_bytes)
        began = clock()
        # Reads in flight ask for stretches that follow one another, as a gateway's reader does.
        step = max(1, READ_BYTES // self.entry_bytes)
        firsts = iter(range(0, end, step))
        size = 0

        async def work() -> None:
            nonlocal size
            for low in firsts:
                at, high = low, min(end, low + step) - 1
                while at <= high:
                    run = await self._read(self.long, at, high, READ_BYTES * 2)
                    assert run.first == at, f"entry {at} is not there"
                    assert run.count == run.last - at + 1
                    at = run.last + 1
                    size += len(run.body)
                progress.advance(high - low + 1)

        async with asyncio.TaskGroup() as group:
            for _ in range(READS_IN_FLIGHT):
                group.create_task(work())
        return end, size, clock() - began

    async def random(self, chance: random.Random) -> tuple[float, list[float]]:
        """Read single entries anywhere: a second's worth of them, and times."""
        filled = [ledger for ledger in self._ledgers if self.next[ledger]]
        places = iter(
            [
                (ledger, chance.randrange(self.next[ledger]))
                for ledger in chance.choices(filled, k=RANDOM_READS)
            ]
        )
        times = []

        async def work() -> None:
            for ledger, entry in places:
                began = clock()
                run = await self._read(ledger, entry, entry, READ_BYTES)
                assert run.first == run.last == entry
                assert not run.invalid(self._codec)
                times.append(clock() - began)

        began = clock()
        async with asyncio.TaskGroup() as group:
            for _ in range(RANDOM_IN_FLIGHT):
                group.create_task(work())
        return RANDOM_READS / (clock() - began), sorted(times)

    async def _read(self, ledger: int, first: int, last: int, bytes_max: int) -> Run:
        answered: asyncio.Future[Run | None] = asyncio.get_running_loop().create_future()

        def done(status: Status, run: Run | None, _: object) -> None:
            assert status is Status.OK, status
            answered.set_result(run)

        self._client.read(MEMBER, ledger, first, last, done, bytes_max=bytes_max)
        run = await answered
        assert run is not None, f"ledger {ledger} lacks entry {first}"
        return run


class Bar:
    """One line of progress, on standard error."""

    def __init__(self, progress: Progress, name: str, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task(name, total=total)

    def advance(self, count: int) -> None:
        """So much more is done."""
        self._progress.advance(self._task, count)


class Bench:
    """The measurement from its beginning to its end."""

    def __init__(self, report: Report, progress: Progress, session: aiohttp.ClientSession) -> None:
        self.report = report
        self._progress = progress
        self._session = session

    async def run(self, bookie: Bookie) -> None:
        """Measure all there is."""
        report = self.report
        bookie.start()
        await bookie.ready()
        client = self._client(bookie)
        filler = Filler(
            client,
            range(LONG_LEDGER, LONG_LEDGER + report.ledgers),
            report.entry_bytes,
            report.in_flight_mb,
        )
        small = min(1_000_000, report.entries // 5) // RUN_ENTRIES * RUN_ENTRIES
        took = await self._filled(filler, bookie, small)
        report.reads.append(await self._read(filler, bookie))
        took += await self._filled(filler, bookie, report.entries - small)
        report.entries_s = filler.acknowledged / took
        report.log_mb = bookie.log_bytes / _MB
        report.reads.append(await self._read(filler, bookie))
        await client.close()
        bookie.kill()
        began = clock()
        bookie.start()
        await bookie.ready()
        report.restart_s = clock() - began
        client = self._client(bookie)
        for number, size in enumerate(OTHER_SIZES, start=1):
            low = number * 1_000_000
            other = Filler(client, range(low, low + report.ledgers), size, report.in_flight_mb)
            count = OTHER_BYTES // size // RUN_ENTRIES * RUN_ENTRIES
            await self._filled(other, bookie, count)
            report.reads.append(await self._read(other, bookie))
        await client.close()

    async def _filled(self, filler: Filler, bookie: Bookie, entries: int) -> float:
        bar = Bar(self._progress, f"append {entries:,}", entries)
        watching = asyncio.create_task(self._watch(bookie))
        began = clock()
        try:
            await filler.fill(entries, bar)
        finally:
            watching.cancel()
        return clock() - began

    async def _watch(self, bookie: Bookie) -> None:
        while True:
            rss = bookie.rss_mb
            self.report.rss_mb.append(round(rss, 1))
            self.report.rss_mb_max = max(self.report.rss_mb_max, rss)
            await asyncio.sleep(1)

    async def _read(self, filler: Filler, bookie: Bookie) -> Reads:
        entries = sum(filler.next.values())
        bar = Bar(self._progress, "read in order", filler.next[filler.long])
        disk = await asyncio.to_thread(bookie.disk_mb_s)
        await asyncio.to_thread(bookie.drop_cache)
        watching = asyncio.create_task(self._watch(bookie))
        count, size, took = await filler.ordered(bar)
        await asyncio.to_thread(bookie.drop_cache)
        per_s, times = await filler.random(random.Random(1))
        watching.cancel()
        return Reads(
            entries,
            filler.entry_bytes,
            disk,
            size / _MB / took,
            count / took,
            per_s,
            times[len(times) // 2] * 1000,
            times[len(times) * 99 // 100] * 1000,
        )

    def _client(self, bookie: Bookie) -> BookieClient:
        limits = ChannelLimits(quick_s=60, slow_s=60, in_flight_bytes_max=1 << 30)
        return BookieClient(lambda _: bookie.url, self._session, limits)


def _program(service: str, port: int, environment: dict[str, str]) -> Program:
    env = inherited_environment() | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'shared'}",
        "HOST": "127.0.0.1",
        "PORT": str(port),
        "LOG_LEVEL": "WARNING",
    }
    return Program(service, (sys.executable, "-m", f"services.{service}"), env | environment, ROOT)


async def _until_ready(
    session: aiohttp.ClientSession, url: str, process: subprocess.Popen[bytes]
) -> None:
    async def is_ready() -> bool:
        if process.poll() is not None:
            raise SystemExit(f"a service ended with status {process.returncode}")
        async with session.get(f"{url}/health/ready") as answer:
            return answer.status == 200

    await until(is_ready, f"{url} is ready", 120, passing=(aiohttp.ClientError,))


@asynccontextmanager
async def _metadata(
    stores: Stores, folder: Path, session: aiohttp.ClientSession
) -> AsyncIterator[str]:
    port = free_ports(1)[0]
    url = f"http://127.0.0.1:{port}"
    environment = {"POSTGRES_DSN": stores.postgres_dsn, "REDIS_URL": stores.redis_url}
    process = start(_program("metadata", port, environment), folder / "metadata.txt")
    try:
        await _until_ready(session, url, process)
        yield url
    finally:
        stop(process, signal.SIGTERM, 30)


async def _measured(report: Report, stores: Stores, folder: Path, console: Console) -> None:
    columns = (
        TextColumn("{task.description:>20}"),
        BarColumn(40),
        TextColumn("{task.completed:,.0f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    async with aiohttp.ClientSession() as session, _metadata(stores, folder, session) as url:
        bookie = Bookie(folder, url, session)
        try:
            with Progress(*columns, console=console) as progress:
                await Bench(report, progress, session).run(bookie)
        except BaseException:
            log = folder / "log.txt"
            if log.exists():
                sys.stderr.write(log.read_text(errors="replace")[-4000:])
            raise
        finally:
            bookie.stop()


def _print(report: Report, console: Console) -> None:
    table = Table(title=f"one bookie, {report.ledgers:,} ledgers in turn, {report.log_mb:,.0f} MB")
    for name in (
        "entries",
        "bytes",
        "disk\nMB/s",
        "in order\nMB/s",
        "of\ndisk",
        "\nper s",
        "random\nper s",
        "p50\nms",
        "p99\nms",
    ):
        table.add_column(name, justify="right")
    for reads in report.reads:
        table.add_row(
            f"{reads.entries:,}",
            f"{reads.entry_bytes:,}",
            f"{reads.disk_mb_s:,.0f}",
            f"{reads.ordered_mb_s:,.0f}",
            f"{reads.share:.0%}",
            f"{reads.ordered_entries_s:,.0f}",
            f"{reads.random_s:,.0f}",
            f"{reads.random_p50_ms:.1f}",
            f"{reads.random_p99_ms:.1f}",
        )
    console.print(table)
    tenth = max(1, len(report.rss_mb) // 10)
    means = [
        sum(part) / len(part)
        for part in (report.rss_mb[at : at + tenth] for at in range(0, len(report.rss_mb), tenth))
    ]
    console.print("RSS in MB, a tenth of the time each:", " ".join(f"{m:.0f}" for m in means))


def main() -> None:
    """Measure, print, and end with one line for programs."""
    parser = argparse.ArgumentParser(prog="make bench-bookie", description=__doc__)
    parser.add_argument("--entries", type=int, default=5_000_000)
    parser.add_argument("--entry-bytes", type=int, default=100)
    parser.add_argument("--ledgers", type=int, default=3000)
    parser.add_argument(
        "--in-flight-mb", type=int, default=4, help="of adds; far more than a disk takes: overload"
    )
    parser.add_argument("--json", action="store_true", help="all figures, and the samples of RSS")
    asked = parser.parse_args()
    least = 5 * RUN_ENTRIES * asked.ledgers
    if asked.entries < least:
        parser.error(f"{asked.ledgers} ledgers need {least:,} entries at least")
    report = Report(
        asked.entries // RUN_ENTRIES * RUN_ENTRIES,
        asked.entry_bytes,
        asked.ledgers,
        asked.in_flight_mb,
    )
    console = Console(stderr=asked.json)
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    with ExitStack() as stack:
        servers = stack.enter_context(store_servers())
        # On the disk that the clone is on, not in memory.
        folder = Path(tempfile.mkdtemp(prefix="bench-bookie-", dir=build))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        uvloop.run(_measured(report, servers.fresh(), folder, console))
    _print(report, console)
    if asked.json:
        print(orjson.dumps(asdict(report)).decode())
    print(
        f"bench-bookie: {report.entries} entries, {report.entries_s:.0f}/s,"
        f" RSS {report.rss_mb_max:.0f} MB, restart {report.restart_s:.1f} s"
    )


if __name__ == "__main__":
    main()
