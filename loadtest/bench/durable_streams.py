"""Streams of a gateway, with three synced copies, compared with streams of the Durable Streams server
from npm, with one copy.

Both systems get the same requests from the same client. Each round runs every measurement of both,
and the medians of the rounds are reported. The client is wrk for appends, and reads have no
compression. Times in seconds are unreliable on a shared machine; the servers' CPU per record
depends least on other work. The server from npm is left out if this machine has no Node, or can't
reach npm's registry.
"""

import argparse
import asyncio
import http.client
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter as clock
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from loadtest import npm
from loadtest.bench.measure import (
    KIB,
    Failed,
    Figures,
    Meter,
    Pids,
    at_a_rate,
    by_wrk,
    during,
    for_each,
    payload_of,
)
from loadtest.bench.plan import ROUNDS, TIME, Columns, Plan, Work
from loadtest.cluster import running
from loadtest.ports import free_ports
from loadtest.program import Teller
from loadtest.waiting import stop, until
from services.local.config import ROOT
from services.local.process import Program, start

SERVER: Final = ROOT / "loadtest" / "durable_streams"
_ROLES: Final = {"gateway": "gateway", "bookie": "servers"}
_SETTINGS: Final = {"QUORUM_TIMEOUT_S": "50"}
"""A long timeout, so that a busy machine fails no append: the other server has no such timeout."""
_STOP_S: Final = 20.0
OCTETS: Final = "application/octet-stream"
JSON: Final = "application/json"
_FILLERS: Final = 32
_RECORDS_MAX: Final = 2048
_SETTLE_S: Final = 150.0
"""Deadline for all readers to get the last records."""
_RECORD: Final = re.compile(rb'"n":(\d+),"t":(\d+)')
_PLACE: Final = re.compile(rb'"streamNextOffset":"([^"]+)"')
_PAD: Final = "x" * 60


@asynccontextmanager
async def ours(folder: Path) -> AsyncIterator[tuple[str, Pids]]:
    """Run a gateway and three bookies, two of which sync an append before its acknowledgement."""
    data = folder / "cluster"
    data.mkdir()
    async with running(None, bookies=3, gateways=1, data=data, environment=_SETTINGS) as cluster:
        pids = {"client": [os.getpid()], **cluster.pids(_ROLES, "others")}
        yield cluster.gateways[0], pids


@asynccontextmanager
async def theirs(folder: Path) -> AsyncIterator[tuple[str, Pids]]:
    """Run the Durable Streams server in Node, with its file-backed store and default settings. An
    append is acknowledged when its file is synced (`fdatasync` for each append). Raises: Absent.
    """
    packages = npm.installed(SERVER)
    program = packages / "server.mjs"
    program.write_bytes((SERVER / "server.mjs").read_bytes())
    data = folder / "theirs"
    data.mkdir()
    (port,) = free_ports(1)
    argv = ("node", str(program), str(port), str(data))
    process = start(Program("durable-streams", argv, os.environ), folder / "theirs.log")
    url = f"http://127.0.0.1:{port}"

    async def answers() -> bool:
        assert process.poll() is None, (folder / "theirs.log").read_text()
        async with session.get(f"{url}/v1/stream/none") as answer:
            return answer.status == 404

    try:
        async with aiohttp.ClientSession() as session:
            await until(answers, "the server answers", passing=(aiohttp.ClientError, OSError))
        yield url, {"client": [os.getpid()], "servers": [process.pid]}
    finally:
        stop(process, signal.SIGTERM, _STOP_S)


SYSTEMS: Final = {"quorumlog": ours, "their server": theirs}


@dataclass(frozen=True, slots=True)
class Scale:
    """The amount of work in one measurement."""

    read_bytes: int
    """Bytes of a stream that is read from its beginning."""
    readers: int
    """Readers that follow one stream."""
    records: int
    """Records that each of these readers gets."""
    rate: float
    """Records per second that these readers get."""

    def count(self, size: int) -> int:
        """Number of records in a stream to read. It is bounded, since each needs an append."""
        return min(self.read_bytes // size, _RECORDS_MAX)


@dataclass(slots=True)
class Load:
    """Measurements of one system. Streams for reads are filled only once."""

    url: str
    """URL of the server, or of the first gateway; streams are below `/v1/stream/`."""
    pids: Pids
    session: aiohttp.ClientSession
    seconds: float
    """Duration of appends, and of reads from the beginning."""
    scale: Scale
    _filled: dict[int, str] = field(default_factory=dict)
    _number: int = 0

    @classmethod
    @asynccontextmanager
    async def running(
        cls, folder: Path, seconds: float, *, name: str, scale: Scale
    ) -> "AsyncIterator[Load]":
        """Run a server until the end of the block. Raises: Absent."""
        async with (
            SYSTEMS[name](folder) as (url, pids),
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            ) as session,
        ):
            yield cls(url, pids, session, seconds, scale)

    async def measure(self, work: Callable[["Load"], Awaitable[Figures]]) -> Figures:
        """Run one measurement, and add the CPU of all processes except the client."""
        figures = await work(self)
        return figures | {"all but client us": figures["all us"] - figures["client us"]}

    async def appends(self, connections: int) -> Figures:
        """Measure appends of 1 KiB, one per request, on a number of connections."""
        path = await self._created(OCTETS)
        meter = Meter(self.pids)
        return await by_wrk(meter, self.url + path, connections, self.seconds)

    async def catch_up(self, size: int) -> Figures:
        """Measure one reader that reads a whole stream of records of `size` bytes, repeatedly."""
        if size not in self._filled:
            self._filled[size] = await self._fill(size)
        path, count = self._filled[size], self.scale.count(size)
        return await asyncio.to_thread(self._read, path, count, size)

    def _read(self, path: str, count: int, size: int) -> Figures:
        buffer, rounds = bytearray(1 << 20), 0
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc)
        try:
            _read_all(connection, path, buffer)
            with Meter(self.pids) as meter:
                for _ in during(self.seconds):
                    if _read_all(connection, path, buffer) != count * size:
                        raise Failed("a read did not return the whole stream")
                    rounds += 1
        finally:
            connection.close()
        return meter.figures(count * rounds, size)

    async def readers(self) -> Figures:
        """Measure readers that follow one stream as events, while one client appends."""
        scale, path = self.scale, await self._created(JSON)
        readers = [Reader(scale.records) for _ in range(scale.readers)]
        url = self.url + path
        following = [asyncio.ensure_future(one.follow(self.session, url)) for one in readers]
        try:
            try:
                async with asyncio.timeout(_SETTLE_S):
                    await asyncio.gather(*(reader.ready.wait() for reader in readers))
            except TimeoutError:
                raise Failed("not all readers could begin to follow the stream") from None
            with Meter(self.pids) as meter:
                await self._write(path)
                await asyncio.wait(following, timeout=_SETTLE_S)
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
        seen = sum(len(reader.times_s) for reader in readers)
        if any(reader.is_wrong for reader in readers) or not seen:
            raise Failed("a reader missed a record")
        missing = scale.readers * scale.records - seen
        times_s = [time for reader in readers for time in reader.times_s]
        return meter.figures(seen, KIB // 8, times_s) | {"late": float(missing)}

    async def _write(self, path: str) -> None:
        """Append the records for the readers at a steady rate."""
        async for number in at_a_rate(self.scale.records, self.scale.rate):
            body = f'{{"n":{number},"t":{int(clock() * 1e9)},"pad":"{_PAD}"}}'
            await self._post(path, body.encode(), JSON)

    async def _fill(self, size: int) -> str:
        path = await self._created(OCTETS)

        async def post(_number: int) -> None:
            await self._post(path, payload_of(size), OCTETS)

        await for_each(range(self.scale.count(size)), post, _FILLERS)
        return path

    async def _created(self, kind: str) -> str:
        self._number += 1
        path = f"/v1/stream/bench-{os.urandom(4).hex()}-{self._number}"
        headers = {"Content-Type": kind}
        async with self.session.put(self.url + path, headers=headers) as answer:
            answer.raise_for_status()
        return path

    async def _post(self, path: str, body: bytes, kind: str) -> None:
        headers = {"Content-Type": kind}
        async with self.session.post(self.url + path, data=body, headers=headers) as answer:
            answer.raise_for_status()


def _read_all(connection: http.client.HTTPConnection, path: str, buffer: bytearray) -> int:
    """Read a stream from its beginning to its end. Returns its bytes."""
    offset, found = "-1", 0
    while True:
        connection.request("GET", f"{path}?offset={offset}")
        with connection.getresponse() as answer:
            if answer.status != 200:
                raise Failed(f"a read got {answer.status}")
            while count := answer.readinto(buffer):
                found += count
            offset = answer.headers["Stream-Next-Offset"]
            if "Stream-Up-To-Date" in answer.headers:
                return found


@dataclass(eq=False, slots=True)
class Reader:
    """A reader that follows a stream from its tail and checks each record. If the server ends the
    event stream, which it may do after a minute, the reader connects again at its last offset.
    """

    total: int
    seen: int = 0
    is_wrong: bool = False
    times_s: list[float] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set after the first event, when the reader is at the tail."""
    _offset: str = "now"
    _rest: bytes = b""

    async def follow(self, session: aiohttp.ClientSession, url: str) -> None:
        """Read until all records were seen."""
        headers = {"Accept": "text/event-stream", "Accept-Encoding": "identity"}
        while self.seen < self.total:
            self._rest = b""
            target = f"{url}?offset={self._offset}&live=sse"
            with suppress(aiohttp.ClientError):
                async with session.get(target, headers=headers) as answer:
                    async for chunk in answer.content.iter_any():
                        self._take(chunk, clock())
                        if self.seen >= self.total:
                            break

    def _take(self, data: bytes, now: float) -> None:
        """Check the records in all complete lines."""
        whole, _, self._rest = (self._rest + data).rpartition(b"\n")
        for record in _RECORD.finditer(whole):
            number = int(record[1])
            if number < self.seen:
                continue  # seen before the last connection broke
            self.is_wrong |= number != self.seen
            self.seen = number + 1
            self.times_s.append(now - int(record[2]) / 1e9)
        if places := _PLACE.findall(whole):
            self._offset = places[-1].decode()
            self.ready.set()


WORKS: Final[dict[str, Callable[[Load], Awaitable[Figures]]]] = {
    "append, one at a time": lambda load: load.appends(1),
    "append, 64 in flight": lambda load: load.appends(64),
    "catch-up, records of 1 KiB": lambda load: load.catch_up(KIB),
    "catch-up, records of 64 KiB": lambda load: load.catch_up(64 * KIB),
    "readers of one stream": lambda load: load.readers(),
}
OPTIONS: Final = {
    "time": TIME,
    "rounds": ROUNDS,
    "read_mib": (32, "MiB of the streams that are read"),
    "readers": (500, "number of readers that follow one stream"),
    "records": (60, "records that each reader gets"),
    "rate": (20.0, "records per second that each reader gets"),
}
_FIGURES: Final = (
    *("entries/s", "MB/s", "p50 ms", "p99 ms", "gateway us", "servers us", "others us"),
    *("all but client us", "gateway RSS", "servers RSS"),
)


def plan(asked: argparse.Namespace, _teller: Teller) -> Plan:
    """Plan each measurement for both systems."""
    scale = Scale(asked.read_mib << 20, asked.readers, asked.records, asked.rate)
    return Plan(
        [
            Work(system, what, Load.measure, (work,))
            for what, work in WORKS.items()
            for system in SYSTEMS
        ],
        {name: partial(Load.running, name=name, scale=scale) for name in SYSTEMS},
        (Columns("medians of the rounds", _FIGURES),),
        asked.time,
        asked.rounds,
        # On a busy machine, requests to quorumlog may time out too.
        may_fail=tuple(SYSTEMS),
        takes_turns=True,
    )
