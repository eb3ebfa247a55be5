"""What is measured, of any server of the protocol. The client is the same for both: wrk for appends, plain sockets for
reads, which ask for no compression.
"""

import asyncio
import http.client
import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import perf_counter as clock
from typing import Final, cast
from urllib.parse import urlsplit

import aiohttp

from loadtest.bench import wrk
from loadtest.bench.measure import KIB, Failed, Figures, Meter, payload_of
from loadtest.durable_streams.systems import System

OCTETS: Final = "application/octet-stream"
JSON: Final = "application/json"
_FILLERS: Final = 32
_RECORDS_MAX: Final = 2048
_SETTLE_S: Final = 150.0
"""For the last records to be with all readers."""
_RECORD: Final = re.compile(rb'"n":(\d+),"t":(\d+)')
_PLACE: Final = re.compile(rb'"streamNextOffset":"([^"]+)"')
_PAD: Final = "x" * 60


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is done in one measurement."""

    seconds: float
    """Of appends."""
    read_bytes: int
    """Of a stream that is read from its beginning."""
    readers: int
    """That follow one stream."""
    records: int
    """That each of them gets."""
    rate: float
    """Of those, a second."""

    def count(self, size: int) -> int:
        """Records of a stream to read: each is an append, so there are fewer bytes of small ones."""
        return min(self.read_bytes // size, _RECORDS_MAX)


class Load:
    """Measurements of one server. Streams to read are filled once."""

    def __init__(self, system: System, session: aiohttp.ClientSession, scale: Scale) -> None:
        self.system, self._session, self._scale = system, session, scale
        self._filled: dict[int, str] = {}
        self._number = 0

    async def appends(self, connections: int) -> Figures:
        """Records of 1 KiB, one a request, each connection the next one after its answer."""
        path = await self._created(OCTETS)
        meter = Meter(self.system.pids)
        return await wrk.appends(meter, self.system.url + path, connections, self._scale.seconds)

    async def catch_up(self, size: int) -> Figures:
        """The whole of a stream of such records, by one reader, again and again."""
        if size not in self._filled:
            self._filled[size] = await self._fill(size)
        path, count = self._filled[size], self._scale.count(size)
        return await asyncio.to_thread(self._read, path, count, size)

    def _read(self, path: str, count: int, size: int) -> Figures:
        buffer, rounds = bytearray(1 << 20), 0
        connection = http.client.HTTPConnection(urlsplit(self.system.url).netloc)
        try:
            _read_all(connection, path, buffer)
            with Meter(self.system.pids) as meter:
                end = clock() + self._scale.seconds
                while not rounds or clock() < end:
                    if _read_all(connection, path, buffer) != count * size:
                        raise Failed("a read had not all of the stream")
                    rounds += 1
        finally:
            connection.close()
        return meter.figures(count * rounds, size)

    async def readers(self) -> Figures:
        """So many follow one stream as events, while one client appends."""
        scale, path = self._scale, await self._created(JSON)
        host, port = urlsplit(self.system.url).netloc.split(":")
        readers = [Reader(path, host, int(port), scale.records) for _ in range(scale.readers)]
        try:
            await asyncio.gather(*(reader.connect() for reader in readers))
            await asyncio.wait([reader.ready for reader in readers], timeout=_SETTLE_S)
            if not all(reader.ready.done() for reader in readers):
                raise Failed("not all readers could begin")
            with Meter(self.system.pids) as meter:
                await self._write(path)
                done = [reader.done for reader in readers]
                await asyncio.wait(done, timeout=_SETTLE_S)
        finally:
            for reader in readers:
                reader.close()
        seen = sum(len(reader.times_s) for reader in readers)
        if any(reader.is_wrong for reader in readers) or not seen:
            raise Failed("a reader missed a record")
        missing = scale.readers * scale.records - seen
        times_s = [time for reader in readers for time in reader.times_s]
        return meter.figures(seen, KIB // 8, times_s) | {"late": float(missing)}

    async def _write(self, path: str) -> None:
        """Append at a steady rate; an append that is late does not wait for the next beat."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        for number in range(self._scale.records):
            await asyncio.sleep(start + number / self._scale.rate - loop.time())
            body = f'{{"n":{number},"t":{int(clock() * 1e9)},"pad":"{_PAD}"}}'
            await self._post(path, body.encode(), JSON)

    async def _fill(self, size: int) -> str:
        path, left = await self._created(OCTETS), self._scale.count(size)

        async def work() -> None:
            nonlocal left
            while left:
                left -= 1
                await self._post(path, payload_of(size), OCTETS)

        async with asyncio.TaskGroup() as group:
            for _ in range(_FILLERS):
                group.create_task(work())
        return path

    async def _created(self, kind: str) -> str:
        self._number += 1
        path = f"/v1/stream/bench-{os.urandom(4).hex()}-{self._number}"
        headers = {"Content-Type": kind}
        async with self._session.put(self.system.url + path, headers=headers) as answer:
            answer.raise_for_status()
        return path

    async def _post(self, path: str, body: bytes, kind: str) -> None:
        headers = {"Content-Type": kind}
        async with self._session.post(self.system.url + path, data=body, headers=headers) as answer:
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


def _future() -> "asyncio.Future[None]":
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class Reader(asyncio.Protocol):
    """One that follows a stream from its tail and looks at each record. Where the server ends the events, which it may do
    after a minute, it comes again where it was.
    """

    path: str
    host: str
    port: int
    total: int
    seen: int = 0
    is_wrong: bool = False
    times_s: list[float] = field(default_factory=list)
    ready: "asyncio.Future[None]" = field(default_factory=_future)
    """Done with the first event: the reader is at the tail."""
    done: "asyncio.Future[None]" = field(default_factory=_future)
    _offset: str = "now"
    _rest: bytes = b""
    _transport: asyncio.Transport | None = None
    _again: "asyncio.Task[None] | None" = None

    async def connect(self) -> None:
        """Ask for the events."""
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, self.host, self.port)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no class of asyncio
        self._rest = b""
        target = f"{self.path}?offset={self._offset}&live=sse"
        request = f"GET {target} HTTP/1.1\r\nHost: {self.host}\r\nAccept: text/event-stream\r\n\r\n"
        self._transport.write(request.encode())

    def data_received(self, data: bytes) -> None:
        """Look at the records of whole lines."""
        now = clock()
        whole, _, self._rest = (self._rest + data).rpartition(b"\n")
        for record in _RECORD.finditer(whole):
            number = int(record[1])
            if number < self.seen:
                continue  # the connection was lost before the place behind it was told
            self.is_wrong |= number != self.seen
            self.seen = number + 1
            self.times_s.append(now - int(record[2]) / 1e9)
        places = _PLACE.findall(whole)
        if places:
            self._offset = places[-1].decode()
            if not self.ready.done():
                self.ready.set_result(None)
        if self.seen >= self.total and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, _error: Exception | None) -> None:
        """Come again, unless all was seen."""
        if not self.done.done():
            self._again = asyncio.ensure_future(self.connect())

    def close(self) -> None:
        """Go away."""
        self.done.cancel()
        if self._transport is not None:
            self._transport.abort()


@dataclass(frozen=True, slots=True)
class Work:
    """A measurement, and what its figures are of."""

    name: str
    run: Callable[[Load], Awaitable[Figures]]
    rate: str = "entries/s"


WORKS: Final = (
    Work("append, one at a time", lambda load: load.appends(1)),
    Work("append, 64 in flight", lambda load: load.appends(64)),
    Work("catch-up, records of 1 KiB", lambda load: load.catch_up(KIB), "MB/s"),
    Work("catch-up, records of 64 KiB", lambda load: load.catch_up(64 * KIB), "MB/s"),
    Work("readers of one stream", lambda load: load.readers()),
)
