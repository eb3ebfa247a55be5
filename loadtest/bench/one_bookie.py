"""A bookie without gateways, for measurements, and a program that fills and reads it."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter as clock
from typing import Final

import aiohttp
import psutil

from loadtest.bench.measure import for_each
from loadtest.cluster import Cluster, running
from quorumlog.net.bookie_client import BookieClient, ChannelLimits
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import DigestKind
from quorumlog.protocol.record import Codec, Run, make

RUN_ENTRIES: Final = 100
LONG_EVERY: Final = 20
ORDERED_BYTES_MAX: Final = 1 << 28
READ_BYTES: Final = 1 << 20
READS_IN_FLIGHT: Final = 8
RANDOM_READS: Final = 2000
RANDOM_IN_FLIGHT: Final = 16

KEY: Final = b"k" * 32
MB: Final = 1_000_000


Show = Callable[[int], None]
"""Called with the number of entries that are done so far."""


class LoneBookie:
    """The measured bookie, which is the only bookie of its cluster."""

    name: Final = "bookie-1"
    member: Final = "bookie-1@1"

    def __init__(self, cluster: Cluster, session: aiohttp.ClientSession) -> None:
        self._cluster = cluster
        self._session = session
        self.data = cluster.data / self.name

    async def restart(self) -> None:
        """Start the bookie again, and wait until it accepts requests."""
        await self._cluster.restart(self.name)

    async def kill(self) -> None:
        """Kill the bookie (SIGKILL)."""
        await self._cluster.kill(self.name)

    async def stop(self) -> None:
        """Shut the bookie down in order (SIGTERM)."""
        await self._cluster.stop(self.name)

    def client(self) -> BookieClient:
        """Make a client with a channel to the bookie."""
        limits = ChannelLimits(quick_s=60, slow_s=60, in_flight_bytes_max=1 << 30)
        return BookieClient(self._cluster.url, self._session, limits)

    @property
    def rss_mb(self) -> float:
        """Resident memory of the bookie in MB."""
        return psutil.Process(self._cluster.pid(self.name)).memory_info().rss / MB

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the bookie's threads, from the scheduler, not from clock ticks."""
        tasks = Path(f"/proc/{self._cluster.pid(self.name)}/task").glob("*/schedstat")
        return sum(int(task.read_text(encoding="ascii").split()[0]) for task in tasks) / 1e9

    @property
    def log_bytes(self) -> int:
        """Total size of the bookie's log files."""
        return sum(path.stat().st_size for path in (self.data / "log").glob("*.log"))


@asynccontextmanager
async def lone_bookie(folder: Path) -> AsyncIterator[LoneBookie]:
    """Run a bookie without gateways and autorecovery. Deletes the data after the block."""
    # The metadata service does not know the bookie's ledgers, so the bookie must not collect them.
    environment = {"COLLECT_S": "86400"}
    with TemporaryDirectory(prefix="bookie-", dir=folder, ignore_cleanup_errors=True) as own:
        async with running(
            None,
            bookies=1,
            gateways=1,
            data=Path(own),
            environment=environment,
            log_level="WARNING",
        ) as cluster:
            for name in cluster.names:
                if name.startswith(("gateway", "autorecovery")):
                    await cluster.stop(name)
            async with aiohttp.ClientSession(headers=cluster.headers) as session:
                yield LoneBookie(cluster, session)


def drop_cache(data: Path) -> None:
    """Drop a bookie's log from the kernel's page cache, so that reads go to the disk."""
    for path in (data / "log").glob("*.log"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def disk_mb_s(data: Path) -> float:
    """The rate of reading the bookie's log files in order, in calls of READ_BYTES."""
    drop_cache(data)
    began, size = clock(), 0
    buffer = bytearray(READ_BYTES)
    paths = sorted((data / "log").glob("*.log"))
    # Skip the last file, which is not full yet: holes are read without the disk.
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


class Filler:
    """Appends runs to ledgers of a bookie, and reads them back."""

    def __init__(
        self,
        client: BookieClient,
        member: str,
        ledgers: range,
        *,
        entry_bytes: int,
        in_flight_mb: int,
    ) -> None:
        """`ledgers`: ids of the ledgers; the first one becomes the long ledger."""
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
        self.acknowledged = 0

    @property
    def long(self) -> int:
        """The id of the long ledger, which is read in order."""
        return self._ledgers[0]

    async def fill(self, entries: int, show: Show) -> None:
        """Append this many entries; returns when all are acknowledged."""
        loop = asyncio.get_running_loop()

        async def add(number: int) -> Status:
            answered: asyncio.Future[Status] = loop.create_future()
            self.client.add(self._member, KEY, self._run(), answered.set_result)
            status = await answered
            self.acknowledged += RUN_ENTRIES
            if number % 100 == 0:
                show(number * RUN_ENTRIES)
            return status

        statuses = await for_each(range(entries // RUN_ENTRIES), add, self._in_flight_max)
        if failed := len(statuses) - statuses.count(Status.OK):
            raise SystemExit(f"{failed} runs were not stored")

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

    async def ordered(self) -> tuple[int, int, float]:
        """Read the long ledger from its beginning. Returns entries, bytes of runs, and seconds."""
        end, long = self.next[self.long], self.long
        began = clock()

        async def read(first: int, last: int) -> Run:
            return await self._read(long, first, last, READ_BYTES * 2)

        count, size = await read_in_order(read, end, self.entry_bytes)
        return count, size, clock() - began

    async def random(self, chance: random.Random) -> tuple[float, list[float]]:
        """Read single random entries. Returns reads per second, and seconds of each read."""
        filled = [ledger for ledger in self._ledgers if self.next[ledger]]
        places = [
            (ledger, chance.randrange(self.next[ledger]))
            for ledger in chance.choices(filled, k=RANDOM_READS)
        ]

        async def read(place: tuple[int, int]) -> float:
            ledger, entry = place
            began = clock()
            run = await self._read(ledger, entry, entry, READ_BYTES)
            assert run.first == run.last == entry
            assert not run.invalid(self._codec)
            return clock() - began

        began = clock()
        times_s = await for_each(places, read, RANDOM_IN_FLIGHT)
        return RANDOM_READS / (clock() - began), times_s

    async def _read(self, ledger: int, first: int, last: int, bytes_max: int) -> Run:
        answered: asyncio.Future[Run | None] = asyncio.get_running_loop().create_future()

        def done(status: Status, run: Run | None, _: object) -> None:
            assert status is Status.OK, status
            answered.set_result(run)

        self.client.read(self._member, ledger, first, last, done, bytes_max=bytes_max)
        run = await answered
        assert run is not None, f"ledger {ledger} lacks entry {first}"
        return run


async def read_in_order(
    read: Callable[[int, int], Awaitable[Run]], end: int, entry_bytes: int
) -> tuple[int, int]:
    """Read a ledger with `end` entries from its beginning, up to ORDERED_BYTES_MAX. Returns entries
    and bytes of runs.

    Concurrent reads request consecutive ranges of the ledger, as a gateway's readers do.
    """
    end = min(end, ORDERED_BYTES_MAX // entry_bytes)
    # Each range consists of whole runs, because a bookie's answer ends at the end of a run.
    stretch = max(1, READ_BYTES // entry_bytes // RUN_ENTRIES) * RUN_ENTRIES
    size = 0

    async def read_stretch(low: int) -> None:
        nonlocal size
        at, high = low, min(end, low + stretch) - 1
        while at <= high:
            run = await read(at, high)
            assert run.first == at, f"entry {at} is missing"
            assert run.count == run.last - at + 1
            at = run.last + 1
            size += len(run.body)

    await for_each(range(0, end, stretch), read_stretch, READS_IN_FLIGHT)
    return end, size
