"""The measurements of a quorumlog cluster with three bookies, two gateways, and three copies of
each entry.

All load goes to the first gateway. The second gateway recovers ledgers that the first one still
writes, and is idle otherwise.
"""

import asyncio
import base64
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from pathlib import Path
from time import perf_counter as clock
from typing import Final, Self

import aiohttp
import orjson

from loadtest.bench import tail
from loadtest.bench.measure import (
    KIB,
    Figures,
    Meter,
    Pids,
    appends,
    by_wrk,
    during,
    for_each,
    payload_of,
    to_read,
)
from loadtest.cluster import Cluster, running
from quorumlog.client import Client, Ledger, sync
from quorumlog.client.records import FRAMES, frames
from quorumlog.errors import QuorumLogError

JSON: Final = "application/json"
_OCTETS: Final = "application/octet-stream"
_NDJSON: Final = "application/x-ndjson"
_FRAME: Final = 12 + KIB
"""Bytes of one entry in a page of frames."""
_ROLES: Final = {"gateway": "gateway", "bookie": "servers"}
_UNANSWERED_MAX: Final = 2000
"""Maximum entries of a stream that are sent but not yet acknowledged."""
_LINES: Final = 100
_TAIL_RATE: Final = 100.0
"""Appends per second while a reader follows the ledger."""
_BATCHES_IN_FLIGHT: Final = 4
_BATCHED_BYTES: Final = 2000 * KIB
"""Bytes in flight in batches, as many as `nats bench` has with four clients; at least
_BATCHES_IN_FLIGHT requests."""
_LOAD_PARTS: Final = 5
_CREATES_IN_FLIGHT: Final = 8
_SETTINGS: Final = {"COLLECT_S": "10", "COLLECT_GRACE_S": "1"}
"""Settings for a quick collection of deleted ledgers. Otherwise the rounds would fill the disk."""


@dataclass(slots=True)
class Ours:
    """A quorumlog cluster, with a method for each measurement."""

    cluster: Cluster
    client: Client
    second: Client
    """A client of the second gateway."""
    session: aiohttp.ClientSession
    seconds: float
    """Duration of one measurement."""
    _open_ledgers: dict[int, Sequence[Ledger]] = field(default_factory=dict)
    """Groups of ledgers that stay open, by the size of the group."""
    _filled: Ledger | None = None

    @classmethod
    @asynccontextmanager
    async def running(cls, folder: Path, seconds: float, *, tls: bool) -> AsyncIterator[Self]:
        """Run a cluster until the end of the block."""
        async with AsyncExitStack() as stack:
            data = folder / "cluster"
            data.mkdir()
            cluster = await stack.enter_async_context(
                running(None, bookies=3, gateways=2, data=data, environment=_SETTINGS, tls=tls)
            )
            first, second = [
                await stack.enter_async_context(Client(url)) for url in cluster.gateways
            ]
            connector = aiohttp.TCPConnector(limit=0)
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            yield cls(cluster, first, second, session, seconds)

    # Appends of an application, with one call per entry.

    async def ledger(self, in_flight: int, size: int = KIB) -> Figures:
        """Measure `Ledger.append` of the SDK, with `in_flight` concurrent calls."""
        payload = payload_of(size)
        async with self._new_ledger() as ledger:
            return await self._appends(lambda: ledger.append(payload), in_flight, size)

    async def log(self, in_flight: int) -> Figures:
        """Measure `Log.append` of the SDK, with `in_flight` concurrent calls."""
        log, payload = await self.client.create_log(f"b-{os.urandom(8).hex()}"), payload_of(KIB)
        figures = await self._appends(lambda: log.append(payload), in_flight)
        await log.delete()
        return figures

    async def submit(self) -> Figures:
        """Measure `Ledger.submit` of the sync client in one thread."""
        return await asyncio.to_thread(self._submit)

    def _submit(self) -> Figures:
        payload, count = payload_of(KIB), 0
        with sync.Client(self.cluster.gateways[0]) as client:
            ledger = client.create_ledger()
            last = ledger.submit(payload)
            last.result()
            with Meter(self.pids) as meter:
                for _ in during(self.seconds):
                    last = ledger.submit(payload)
                    count += 1
                last.result()
            client.delete_ledger(ledger.ledger_id)
        return meter.figures(count, KIB)

    # Plain HTTP.

    async def http(self, in_flight: int) -> Figures:
        """Measure requests with one entry each, sent by aiohttp's client."""
        return await self._requests(payload_of(KIB), _OCTETS, in_flight, KIB)

    async def ledgers(self, count: int) -> Figures:
        """Measure 64 concurrent requests, to `count` ledgers in turn, so nothing is batched."""
        following = cycle([self._url(ledger) for ledger in await self._open(count)])
        payload = payload_of(KIB)
        return await self._appends(lambda: self._post(next(following), payload, _OCTETS), 64)

    async def _open(self, count: int) -> Sequence[Ledger]:
        """Create `count` ledgers with one entry each, which stay open in all rounds."""
        if count not in self._open_ledgers:

            async def opened(_number: int) -> Ledger:
                ledger = await self.client.create_ledger()
                await ledger.append(b"open")
                return ledger

            self._open_ledgers[count] = await for_each(range(count), opened, _CREATES_IN_FLIGHT)
        return self._open_ledgers[count]

    async def wrk(self, connections: int) -> Figures:
        """Measure requests with one entry each, sent by wrk, which takes little CPU."""
        async with self._new_ledger() as ledger:
            await ledger.append(b"open")
            return await by_wrk(Meter(self.pids), self._url(ledger), connections, self.seconds)

    async def json_batches(self, count: int) -> Figures:
        """Measure batches of `count` entries in JSON."""
        entry = {"data": base64.b64encode(payload_of(KIB)).decode()}
        body = orjson.dumps({"entries": [entry] * count})
        return await self._requests(body, JSON, _in_flight(count * KIB), KIB, count)

    async def raw_batches(self, count: int, size: int = KIB) -> Figures:
        """Measure batches of `count` entries as frames."""
        body = frames([payload_of(size)] * count)
        return await self._requests(body, FRAMES, _in_flight(count * size), size, count)

    async def largest_load(self) -> Figures:
        """Measure whether memory grows during raw batches of 1000, to one ledger after another, for
        longer than other measurements.

        The bookies' and the gateway's caches are filled before the measurement.
        """
        await self.raw_batches(1000)
        with Meter(self.pids) as meter:
            parts = [await self.raw_batches(1000) for _ in range(_LOAD_PARTS)]
        entries = sum(part["entries/s"] * self.seconds for part in parts)
        return meter.figures(round(entries), KIB)

    async def _requests(
        self, body: bytes, media: str, in_flight: int, size: int, count: int = 1
    ) -> Figures:
        async with self._new_ledger() as ledger:
            url = self._url(ledger)
            return await self._appends(lambda: self._post(url, body, media), in_flight, size, count)

    async def _post(self, url: str, body: bytes, media: str) -> None:
        async with self.session.post(url, data=body, headers={"Content-Type": media}) as answer:
            await answer.read()
            answer.raise_for_status()

    async def _appends(
        self,
        append: Callable[[], Awaitable[object]],
        in_flight: int,
        size: int = KIB,
        count: int = 1,
    ) -> Figures:
        return await appends(
            Meter(self.pids),
            append,
            in_flight=in_flight,
            seconds=self.seconds,
            size=size,
            count=count,
        )

    # Streams.

    async def lines(self) -> Figures:
        """Measure one request whose body has a line for each entry, sent in chunks of 100 lines."""
        window = _Window()
        piece = orjson.dumps({"data": base64.b64encode(payload_of(KIB)).decode()}) + b"\n"
        piece *= _LINES

        async def body() -> AsyncIterator[bytes]:
            for _ in during(self.seconds):
                await window.send(_LINES)
                yield piece

        async with self._new_ledger() as ledger:
            with Meter(self.pids) as meter:
                async with self.session.post(
                    self._url(ledger), data=body(), headers={"Content-Type": _NDJSON}
                ) as answer:
                    answer.raise_for_status()
                    async for line in answer.content:
                        window.acknowledge(orjson.loads(line)["last_entry"] + 1)
        return meter.figures(window.sent, KIB)

    async def socket(self) -> Figures:
        """Measure a WebSocket with one message for each entry."""
        window, message = _Window(), frames([payload_of(KIB)])
        async with (
            self._new_ledger() as ledger,
            self.session.ws_connect(self._url(ledger).removesuffix("entries") + "ws") as socket,
        ):

            async def receive() -> None:
                while True:
                    window.acknowledge((await socket.receive_json())["last_entry"] + 1)

            with Meter(self.pids) as meter:
                async with asyncio.TaskGroup() as group:
                    receiving = group.create_task(receive())
                    for _ in during(self.seconds):
                        await window.send(1)
                        await socket.send_bytes(message)
                    await window.drained()
                    receiving.cancel()
        return meter.figures(window.sent, KIB)

    async def tail(self) -> Figures:
        """Measure the time from just before an append until a reader at the tail has the entry."""
        records = max(1, round(_TAIL_RATE * self.seconds))
        scale = tail.Scale(1, 1, records, _TAIL_RATE, is_log=False)
        figures = await tail.run(scale, self.cluster)
        assert not figures["wrong readers"], figures
        return {name: each for name, each in figures.items() if name.endswith(" ms")}

    # Reads, recoveries, deaths.

    async def read(self, media: str) -> Figures:
        """Measure reads of a ledger in order, page by page, in the media type `media`."""
        times_s, count, first = [], 0, 0
        url, total = self._url(await self._to_read()), to_read(self.seconds)
        with Meter(self.pids) as meter:
            for began in during(self.seconds):
                params = {"from": first, "limit": 1000, "max_bytes": 4 << 20}
                async with self.session.get(
                    url, params=params, headers={"Accept": media}
                ) as answer:
                    answer.raise_for_status()
                    body = await answer.read()
                got = len(orjson.loads(body)["entries"]) if media == JSON else len(body) // _FRAME
                times_s.append(clock() - began)
                first = (first + got) % total
                count += got
        return meter.figures(count, KIB, times_s)

    async def entries(self) -> Figures:
        """Measure reads of a ledger in order, by `Ledger.entries` of the SDK."""
        ledger, count = await self._to_read(), 0
        with Meter(self.pids) as meter:
            for _ in during(self.seconds):
                async for _ in ledger.entries():
                    count += 1
        return meter.figures(count, KIB)

    async def _to_read(self) -> Ledger:
        if self._filled is None:
            self._filled = await self.client.create_ledger()
            await _fill(self._filled, to_read(self.seconds))
        return self._filled

    async def recovery(self, count: int) -> Figures:
        """Measure the recovery of a ledger that another gateway still writes."""
        async with self._new_ledger() as ledger:
            await _fill(ledger, count)
            began = clock()
            row = await self.second.ledger(ledger.ledger_id).recover()
            ended = clock()
            assert row["last_entry"] == count - 1, row
        return {"ms": (ended - began) * 1e3}

    async def death(self) -> Figures:
        """Measure 64 concurrent appends while a bookie is killed, and a fourth one replaces it."""
        ends: list[float] = []
        failed, payload = 0, payload_of(KIB)

        async def append() -> None:
            nonlocal failed
            try:
                await ledger.append(payload)
                ends.append(clock())
            except QuorumLogError:
                failed += 1

        async def kill() -> None:
            row = await ledger.info()
            await asyncio.sleep(self.seconds / 2)
            await cluster.kill(row["fragments"][0]["bookies"][0].partition("@")[0])

        data = self.cluster.data.with_name("death")
        async with (
            running(None, bookies=4, gateways=1, data=data) as cluster,
            Client(*cluster.gateways) as client,
        ):
            ledger = await client.create_ledger()
            killing = asyncio.ensure_future(kill())
            figures = await appends(Meter({}), append, in_flight=64, seconds=self.seconds, size=KIB)
            await killing
        shutil.rmtree(data)
        gap_s = max(later - earlier for earlier, later in pairwise(ends))
        return {**figures, "gap ms": gap_s * 1e3, "failed": failed}

    @asynccontextmanager
    async def _new_ledger(self) -> AsyncIterator[Ledger]:
        """Create a ledger, and delete it after the block."""
        ledger = await self.client.create_ledger()
        yield ledger
        await self.client.delete_ledger(ledger.ledger_id)

    def _url(self, ledger: Ledger) -> str:
        return f"{self.cluster.gateways[0]}/v1/ledgers/{ledger.ledger_id}/entries"

    @property
    def pids(self) -> Pids:
        """The process ids of each role. This process is the client."""
        return {"client": [os.getpid()], **self.cluster.pids(_ROLES, "others")}


def _in_flight(batch_bytes: int) -> int:
    """The number of concurrent requests with a batch of `batch_bytes` each."""
    return max(_BATCHES_IN_FLIGHT, _BATCHED_BYTES // batch_bytes)


async def _fill(ledger: Ledger, count: int) -> None:
    batch = [payload_of(KIB)] * 1000
    for _ in range(count // 1000):
        await ledger.append_batch(batch)


class _Window:
    """Limits the entries of a stream that are sent but not yet acknowledged."""

    def __init__(self) -> None:
        self.sent = 0
        self._acknowledged = 0
        self._changed = asyncio.Event()

    async def send(self, count: int) -> None:
        """Wait until `count` more entries may be sent, and count them as sent."""
        await self._until_at_most(_UNANSWERED_MAX - count)
        self.sent += count

    async def drained(self) -> None:
        """Wait until all sent entries are acknowledged."""
        await self._until_at_most(0)

    def acknowledge(self, total: int) -> None:
        """Note that `total` entries of the stream are acknowledged."""
        self._acknowledged = total
        self._changed.set()

    async def _until_at_most(self, most: int) -> None:
        while self.sent - self._acknowledged > most:
            self._changed.clear()
            await self._changed.wait()
