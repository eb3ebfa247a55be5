"""One bookie process with its metadata service, for measurements: started, filled, read, killed."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter as clock
from typing import Final, Self

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from loadtest.ports import free_ports
from loadtest.stores import Stores
from loadtest.waiting import until
from quorumlog.net.bookie_client import BookieClient, ChannelLimits
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import DigestKind
from quorumlog.protocol.record import Codec, Run, make
from services.local.config import ROOT, inherited_environment
from services.local.process import Program, start, stop

RUN_ENTRIES: Final = 100
LONG_EVERY: Final = 20
ORDERED_BYTES_MAX: Final = 1 << 28
READ_BYTES: Final = 1 << 20
READS_IN_FLIGHT: Final = 8
RANDOM_READS: Final = 2000
RANDOM_IN_FLIGHT: Final = 16

LINE_EVERY_S: Final = 10.0
"""Between lines of progress where there is no terminal."""

KEY: Final = b"k" * 32
MB: Final = 1_000_000


class Steps:
    """How far it is: a bar for each step on a terminal, else a line now and then. On stderr."""

    def __init__(self, console: Console) -> None:
        """Used as a context manager."""
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:>28}"),
            BarColumn(40),
            TextColumn("{task.completed:,.0f}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._began = self._told = clock()

    def __enter__(self) -> Self:
        """Begin to show."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the terminal as it was."""
        self._progress.stop()

    def step(self, name: str, total: int) -> "Step":
        """A step of so many."""
        return Step(self, name, total)

    def say(self, text: str) -> None:
        """A line where there is no terminal."""
        if self._progress.disable:
            self._told = clock()
            self._console.print(f"{self._told - self._began:6.0f} s  {text}", highlight=False)

    @property
    def is_line_due(self) -> bool:
        """Whether it is time for another line."""
        return self._progress.disable and clock() - self._told >= LINE_EVERY_S

    @property
    def bars(self) -> Progress:
        """For a terminal."""
        return self._progress


class Step:
    """One of them."""

    def __init__(self, steps: Steps, name: str, total: int) -> None:
        self._steps, self._name, self._total = steps, name, total
        self._task = steps.bars.add_task(name, total=total)
        self._done = 0
        self._began = clock()
        self.note = ""
        """What a line says beside how far it is."""
        steps.say(name)

    def advance(self, count: int) -> None:
        """So much more is done."""
        self._done += count
        self._steps.bars.advance(self._task, count)
        if self._steps.is_line_due:
            rate = self._done / (clock() - self._began)
            self._steps.say(f"{self._name}: {self._done:,}, {rate:,.0f}/s{self.note}")


class BookieProcess:
    """The process that is measured."""

    def __init__(
        self, name: str, folder: Path, metadata_url: str, session: aiohttp.ClientSession
    ) -> None:
        """`folder` gets its data and its log."""
        self.member = f"{name}@1"
        self.folder = folder
        self.data = folder / "data"
        self.url = ""
        self._name = name
        self._metadata_url = metadata_url
        self._session = session
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; does not wait."""
        self.folder.mkdir(exist_ok=True)
        port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{port}"
        environment = {
            "BOOKIE_NAME": self._name,
            "DATA_DIR": str(self.data),
            # Nobody else knows these ledgers: their rows are not to be asked for.
            "COLLECT_S": "86400",
            "METADATA_URLS": self._metadata_url,
        }
        self._process = start(_program("bookie", port, environment), self.folder / "log.txt")

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

    def client(self) -> BookieClient:
        """A channel to it."""
        limits = ChannelLimits(quick_s=60, slow_s=60, in_flight_bytes_max=1 << 30)
        return BookieClient(lambda _: self.url, self._session, limits)

    @property
    def rss_mb(self) -> float:
        """Resident memory."""
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024 / MB

    @property
    def cpu_s(self) -> float:
        """CPU time of its threads, by the scheduler's count (finer than the clock's ticks)."""
        assert self._process is not None
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text(encoding="ascii").split()[0]) for task in tasks) / 1e9

    @property
    def log_bytes(self) -> int:
        """Of the log's files."""
        return sum(path.stat().st_size for path in (self.data / "log").glob("*.log"))


def drop_cache(data: Path) -> None:
    """Have the kernel forget what it has of a bookie's log, so that reads mean the disk."""
    for path in (data / "log").glob("*.log"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def disk_mb_s(data: Path) -> float:
    """What the disk gives one who reads the same files one after another, a piece of READ_BYTES with
    each call.
    """
    drop_cache(data)
    began, size = clock(), 0
    buffer = bytearray(READ_BYTES)
    paths = sorted((data / "log").glob("*.log"))
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
    return size / MB / (clock() - began)


def stretch_of(entry_bytes: int) -> int:
    """Entries that one read asks for: whole runs, since a bookie's answers end where runs do and
    a reader goes on there.
    """
    return max(1, READ_BYTES // entry_bytes // RUN_ENTRIES) * RUN_ENTRIES


class Filler:
    """Appends runs, and knows what must be there."""

    def __init__(
        self,
        client: BookieClient,
        member: str,
        ledgers: range,
        *,
        entry_bytes: int,
        in_flight_mb: int,
    ) -> None:
        """The first of the ledgers is the long one."""
        self.client = client
        self._member = member
        self._ledgers = ledgers
        self.entry_bytes = entry_bytes
        self._in_flight_max = max(2, in_flight_mb * MB // (entry_bytes * RUN_ENTRIES))
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

    async def fill(self, entries: int, step: Step) -> None:
        """Append so many entries; returns when all are acknowledged."""
        loop = asyncio.get_running_loop()
        for number in range(entries // RUN_ENTRIES):
            while self._in_flight >= self._in_flight_max:
                self._room = loop.create_future()
                await self._room
            self.client.add(self._member, KEY, self._run(), self._done)
            self._in_flight += 1
            if number % 100 == 0:
                step.advance(100 * RUN_ENTRIES)
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

    async def ordered(self, step: Step) -> tuple[int, int, float]:
        """Read the long ledger from its beginning: entries, bytes of runs, and seconds."""
        end = min(self.next[self.long], ORDERED_BYTES_MAX // self.entry_bytes)
        began = clock()
        # Reads in flight ask for stretches that follow one another, as a gateway's readers do.
        stretch = stretch_of(self.entry_bytes)
        firsts = iter(range(0, end, stretch))
        size = 0

        async def work() -> None:
            nonlocal size
            for low in firsts:
                at, high = low, min(end, low + stretch) - 1
                while at <= high:
                    run = await self._read(self.long, at, high, READ_BYTES * 2)
                    assert run.first == at, f"entry {at} is not there"
                    assert run.count == run.last - at + 1
                    at = run.last + 1
                    size += len(run.body)
                step.advance(high - low + 1)

        async with asyncio.TaskGroup() as group:
            for _ in range(READS_IN_FLIGHT):
                group.create_task(work())
        return end, size, clock() - began

    async def random(self, chance: random.Random) -> tuple[float, list[float]]:
        """Read single entries anywhere: how many a second, and times."""
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

        self.client.read(self._member, ledger, first, last, done, bytes_max=bytes_max)
        run = await answered
        assert run is not None, f"ledger {ledger} lacks entry {first}"
        return run


@asynccontextmanager
async def metadata_service(
    stores: Stores, folder: Path, session: aiohttp.ClientSession
) -> AsyncIterator[str]:
    """Its URL while it runs."""
    port = free_ports(1)[0]
    url = f"http://127.0.0.1:{port}"
    environment = {"POSTGRES_DSN": stores.postgres_dsn, "REDIS_URL": stores.redis_url}
    process = start(_program("metadata", port, environment), folder / "metadata.txt")
    try:
        await _until_ready(session, url, process)
        yield url
    finally:
        stop(process, signal.SIGTERM, 30)


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
