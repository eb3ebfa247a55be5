"""Many readers follow one ledger (LOG=1: one log) through one gateway.

Every reader checks that its records have consecutive offsets, and the same bytes as a later read of
the whole ledger. Latency is measured from just before an append is sent until a reader has the
record. If records arrive together, the latency of the oldest one is used. The client and all
servers share one machine.
"""

import argparse
import asyncio
import base64
import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns as clock_ns
from typing import Final

import aiohttp
import orjson

from loadtest.bench.measure import Figures, Meter, Wrong, at_a_rate, percentiles
from loadtest.bench.plan import Columns, Plan, Work, cluster_of
from loadtest.cluster import Cluster
from loadtest.program import Teller, is_set

_RECORD_BYTES: Final = 100
_HEAD: Final = struct.Struct(">qii")
"""Head of a record: the time at which it was sent, its writer, and its number."""
_SETTLE_S: Final = 120.0
_WATCH_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Scale:
    """The numbers of readers, writers and records of a run."""

    readers: int
    writers: int
    records: int
    """Records of each writer."""
    rate: float
    """Records per second of each writer."""
    is_log: bool

    @property
    def total(self) -> int:
        """Records that each reader must see."""
        return self.writers * self.records


@dataclass(slots=True)
class Reader:
    """A reader that follows the tail as Server-Sent Events."""

    total: int
    seen: int = 0
    is_wrong: bool = False
    times_s: list[float] = field(default_factory=list)
    _rest: bytes = b""
    _digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)

    async def follow(
        self, session: aiohttp.ClientSession, url: str, ready: Callable[[], None]
    ) -> None:
        """Read until all records were seen."""
        async with session.get(url, headers={"Accept": "text/event-stream"}) as answer:
            answer.raise_for_status()
            await answer.content.readline()  # skip the line `retry:`
            ready()
            async for chunk in answer.content.iter_any():
                self._take(chunk, clock_ns())
                if self.seen >= self.total:
                    return

    def _take(self, chunk: bytes, now_ns: int) -> None:
        whole, separator, self._rest = (self._rest + chunk).rpartition(b"\n\n")
        events = [e for e in (whole + separator).split(b"\n\n") if e.startswith(b"id: ")]
        for event in events:
            head, _, data = event.partition(b"\ndata: ")
            at, _, _ = head[4:].partition(
                b"."
            )  # the record's number; after the dot, the log's creation
            self.is_wrong |= int(at) != self.seen
            self._digest.update(data)
            self.seen += 1
        if events:
            sent_ns = _HEAD.unpack_from(_data_of(events[0]))[0]
            self.times_s.append((now_ns - sent_ns) / 1e9)

    def has_seen(self, expected: bytes) -> bool:
        """Whether the reader saw all records in order, with the expected digest of their bytes."""
        return not self.is_wrong and self.seen == self.total and self._digest.digest() == expected


def _data_of(event: bytes) -> bytes:
    return base64.b64decode(orjson.loads(event.partition(b"data: ")[2])["data"])


async def _write(
    session: aiohttp.ClientSession, url: str, writer: int, scale: Scale, appends_s: list[float]
) -> None:
    """Append the records of one writer at a steady rate, and note how long each append takes."""
    begin_s = writer / scale.writers / scale.rate
    async for number in at_a_rate(scale.records, scale.rate, begin_s):
        began_ns = clock_ns()
        body = _HEAD.pack(began_ns, writer, number).ljust(_RECORD_BYTES, b".")
        async with session.post(
            url, data=body, headers={"Content-Type": "application/octet-stream"}
        ) as answer:
            answer.raise_for_status()
            await answer.read()
        appends_s.append((clock_ns() - began_ns) / 1e9)


async def _created(session: aiohttp.ClientSession, gateway: str, scale: Scale) -> str:
    if scale.is_log:
        async with session.put(f"{gateway}/v1/logs/tails", json={}) as answer:
            answer.raise_for_status()
        return f"{gateway}/v1/logs/tails/records"
    async with session.post(f"{gateway}/v1/ledgers", json={}) as answer:
        answer.raise_for_status()
        return f"{gateway}/v1/ledgers/{(await answer.json())['ledger_id']}/entries"


async def _expected(session: aiohttp.ClientSession, url: str, scale: Scale) -> bytes:
    """Read the whole ledger, and return the digest of its records in the form of events.

    Raises: Wrong unless every record is in the ledger exactly once.
    """
    name = b"offset" if scale.is_log else b"entry_id"
    digest, sent = hashlib.sha256(), set()
    async with session.get(url, headers={"Accept": "application/x-ndjson"}) as answer:
        answer.raise_for_status()
        lines = (await answer.read()).splitlines()
    for number, line in enumerate(lines):
        if b'"%b":%d,' % (name, number) not in line:
            raise Wrong(f"the read of the whole ledger lacks record {number}")
        sent.add(_HEAD.unpack_from(_data_of(b"data: " + line))[1:])
        digest.update(line)
    if len(lines) != scale.total or len(sent) != scale.total:
        raise Wrong(f"{len(lines)} records were read, {scale.total} appended")
    return digest.digest()


async def run(scale: Scale, cluster: Cluster) -> Figures:
    """Let readers follow the tail while writers append. Latencies last from just before an append
    until a reader has the record, and in `append p50 ms` until the append's response. A reader is
    wrong if it missed a record, or got a wrong one.
    """
    gateway = cluster.gateways[0]
    meter = Meter({"gateway": [cluster.pid("gateway-1")]})
    before = peak = meter.memory(max)["gateway"]

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, meter.memory(max)["gateway"])
            await asyncio.sleep(_WATCH_S)

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as session:
        with meter:
            url = await _created(session, gateway, scale)
            appends_s = list[float]()
            readers = [Reader(scale.total) for _ in range(scale.readers)]
            ready = asyncio.Semaphore(0)
            watching = asyncio.ensure_future(watch())
            following = [
                asyncio.ensure_future(reader.follow(session, url, ready.release))
                for reader in readers
            ]
            try:
                for _ in readers:
                    await asyncio.wait_for(ready.acquire(), _SETTLE_S)
                async with asyncio.TaskGroup() as group:
                    for writer in range(scale.writers):
                        group.create_task(_write(session, url, writer, scale, appends_s))
                await asyncio.wait(following, timeout=_SETTLE_S)
            finally:
                watching.cancel()
                for task in following:
                    task.cancel()
                await asyncio.gather(watching, *following, return_exceptions=True)
            expected = await _expected(session, url, scale)
    times_s = [time for reader in readers for time in reader.times_s]
    cpu_s = meter.cpu_s["gateway"]
    return percentiles(times_s) | {
        "append p50 ms": percentiles(appends_s)["p50 ms"],
        "latencies": len(times_s),
        "wrong readers": sum(not reader.has_seen(expected) for reader in readers),
        "gateway CPU s": cpu_s,
        "gateway us": cpu_s * 1e6 / (scale.total * scale.readers),
        "gateway MB before": before,
        "gateway MB at most": peak,
    }


async def _follow(cluster: Cluster, scale: Scale) -> Figures:
    """Measure readers that follow the tail. Raises: Wrong if a reader saw wrong records."""
    figures = await run(scale, cluster)
    if wrong := figures["wrong readers"]:
        raise Wrong(f"{wrong} of {scale.readers} readers were wrong: {figures}")
    return figures


OPTIONS: Final = {
    "readers": (500, "number of readers of one ledger or log"),
    "writers": (5, "number of writers"),
    "records": (400, "records of each writer"),
    "rate": (20.0, "records per second of each writer"),
    "log": (is_set("LOG"), "follow a log instead of a ledger"),
}
_FIGURES: Final = (
    *("p50 ms", "append p50 ms", "p99 ms", "p99.9 ms", "wrong readers", "gateway CPU s"),
    *("gateway us",),
    *("gateway MB before", "gateway MB at most"),
)


def plan(asked: argparse.Namespace, _teller: Teller) -> Plan:
    """Plan one measurement. `gateway us` is the gateway's CPU per record and reader."""
    scale = Scale(asked.readers, asked.writers, asked.records, asked.rate, asked.log)
    followed = "log" if asked.log else "ledger"
    what = f"{scale.readers} readers of one {followed}, {scale.total} records each"
    return Plan(
        (Work("quorumlog", what, _follow, (scale,)),),
        {"quorumlog": cluster_of(bookies=3, gateways=1)},
        (Columns("the tail", _FIGURES),),
        conditions=f"{scale.writers} writers of {scale.rate:g} records/s",
    )
