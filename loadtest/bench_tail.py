"""`make bench-tail`: many readers follow one ledger (LOG=1: one log) through one gateway.

Every reader checks every record: its place, without a gap, and that the bytes of all are the bytes
that a read gives afterwards. Latency is from just before an append is sent until the record is with
a reader; of the records that arrive together the oldest counts. All of it, client and servers,
shares one machine.
"""

import argparse
import asyncio
import base64
import contextlib
import hashlib
import os
import statistics
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns as clock_ns
from typing import Final

import aiohttp
import orjson
import psutil
import uvloop

from loadtest.cluster import Cluster, running

_RECORD_BYTES: Final = 100
_HEAD: Final = struct.Struct(">qii")
"""Of a record: when it was sent, by which writer, as its how manyth."""
_SETTLE_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run."""

    readers: int
    writers: int
    records: int
    """Of each writer."""
    rate: float
    """Records a second, of each writer."""
    is_log: bool

    @property
    def total(self) -> int:
        """Records that each reader must see."""
        return self.writers * self.records


@dataclass(slots=True)
class Reader:
    """One that follows the tail as Server-Sent Events."""

    total: int
    seen: int = 0
    is_wrong: bool = False
    times_ms: list[float] = field(default_factory=list)
    _rest: bytes = b""
    _digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)

    async def follow(
        self, session: aiohttp.ClientSession, url: str, ready: Callable[[], None]
    ) -> None:
        """Read until all records were seen."""
        async with session.get(url, headers={"Accept": "text/event-stream"}) as answer:
            answer.raise_for_status()
            await answer.content.readline()  # `retry:`
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
            at, _, _ = head[4:].partition(b".")  # behind the number of a record: the log's mark
            self.is_wrong |= int(at) != self.seen
            self._digest.update(data)
            self.seen += 1
        if events:
            sent_ns = _HEAD.unpack_from(_data_of(events[0]))[0]
            self.times_ms.append((now_ns - sent_ns) / 1e6)

    def has_seen(self, expected: bytes) -> bool:
        """Whether it saw all records, in order, with the bytes that are there."""
        return not self.is_wrong and self.seen == self.total and self._digest.digest() == expected


def _data_of(event: bytes) -> bytes:
    return base64.b64decode(orjson.loads(event.partition(b"data: ")[2])["data"])


async def _write(session: aiohttp.ClientSession, url: str, writer: int, plan: Plan) -> None:
    """Append at a steady rate; one that is late does not wait for the next beat."""
    loop = asyncio.get_running_loop()
    start = loop.time() + writer / plan.writers / plan.rate
    for number in range(plan.records):
        await asyncio.sleep(start + number / plan.rate - loop.time())
        body = _HEAD.pack(clock_ns(), writer, number).ljust(_RECORD_BYTES, b".")
        async with session.post(
            url, data=body, headers={"Content-Type": "application/octet-stream"}
        ) as answer:
            answer.raise_for_status()
            await answer.read()


async def _created(session: aiohttp.ClientSession, gateway: str, plan: Plan) -> str:
    if plan.is_log:
        async with session.put(f"{gateway}/v1/logs/tails", json={}) as answer:
            answer.raise_for_status()
        return f"{gateway}/v1/logs/tails/records"
    async with session.post(f"{gateway}/v1/ledgers", json={}) as answer:
        answer.raise_for_status()
        return f"{gateway}/v1/ledgers/{(await answer.json())['ledger_id']}/entries"


async def _expected(session: aiohttp.ClientSession, url: str, plan: Plan) -> bytes:
    """The digest of all events' data, made of what a plain read gives; every record is there once."""
    name = b"offset" if plan.is_log else b"entry_id"
    digest, sent = hashlib.sha256(), set()
    async with session.get(url, headers={"Accept": "application/x-ndjson"}) as answer:
        answer.raise_for_status()
        lines = (await answer.read()).splitlines()
    for number, line in enumerate(lines):
        if b'"%b":%d,' % (name, number) not in line:
            raise SystemExit(f"bench-tail: the read itself is wrong at {number}")
        sent.add(_HEAD.unpack_from(_data_of(b"data: " + line))[1:])
        digest.update(line)
    if len(lines) != plan.total or len(sent) != plan.total:
        raise SystemExit(f"bench-tail: {len(lines)} records were read, {plan.total} appended")
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Followed:
    """What the readers saw, and what it cost."""

    plan: Plan
    wrong: int
    """Readers that missed something, or saw what is not there."""
    times_ms: Sequence[float]
    """From just before an append until a reader has the record."""
    gateway_s: float
    """The gateway's CPU."""
    before_bytes: int
    """The gateway's memory before the readers came."""
    peak_bytes: int

    def __str__(self) -> str:
        """For people."""
        plan = self.plan
        cuts = statistics.quantiles(self.times_ms, n=100) if len(self.times_ms) > 1 else [0.0] * 99
        return (
            f"{'log' if plan.is_log else 'ledger'}: {plan.writers} writers of {plan.rate:g}/s; the gateway used"
            f" {self.gateway_s:.1f} s of a core, {self.gateway_s * 1e6 / plan.total / plan.readers:.1f} us a record"
            f" and reader; {self.before_bytes >> 20} MB before\n"
            f"bench-tail: {plan.readers} readers, {plan.total} records each, {self.wrong} wrong,"
            f" p50 {cuts[49]:.3g} ms, p99 {cuts[98]:.3g} ms, gateway {self.peak_bytes >> 20} MB"
        )


async def _watch(pid: int, seen: Callable[[int], None]) -> None:
    process = psutil.Process(pid)
    while True:
        seen(process.memory_info().rss)
        await asyncio.sleep(0.2)


async def run(plan: Plan, cluster: Cluster) -> Followed:
    """Let readers follow the tail while writers append."""
    gateway = cluster.gateways[0]
    pid = int((cluster.data / "run" / "gateway-1.pid").read_text())
    peak, before = 0, psutil.Process(pid).memory_info().rss
    cpu_before = psutil.Process(pid).cpu_times()

    def saw(rss: int) -> None:
        nonlocal peak
        peak = max(peak, rss)

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as session:
        url = await _created(session, gateway, plan)
        readers = [Reader(plan.total) for _ in range(plan.readers)]
        ready = asyncio.Semaphore(0)
        watching = asyncio.ensure_future(_watch(pid, saw))
        following = [
            asyncio.ensure_future(reader.follow(session, url, ready.release)) for reader in readers
        ]
        try:
            for _ in readers:
                await asyncio.wait_for(ready.acquire(), _SETTLE_S)
            async with asyncio.TaskGroup() as group:
                for writer in range(plan.writers):
                    group.create_task(_write(session, url, writer, plan))
            await asyncio.wait(following, timeout=_SETTLE_S)
        finally:
            watching.cancel()
            for task in following:
                task.cancel()
            await asyncio.gather(watching, *following, return_exceptions=True)
        expected = await _expected(session, url, plan)
    cpu = psutil.Process(pid).cpu_times()
    busy_s = cpu.user + cpu.system - cpu_before.user - cpu_before.system
    times_ms = [time for reader in readers for time in reader.times_ms]
    wrong = sum(not reader.has_seen(expected) for reader in readers)
    return Followed(plan, wrong, times_ms, busy_s, before, peak)


async def _main(plan: Plan) -> int:
    async with running(None, bookies=3, gateways=1) as cluster:
        followed = await run(plan, cluster)
    print(followed)
    return 0 if not followed.wrong else 1


def main() -> int:
    """Run it; status 1 where a reader missed something."""
    parser = argparse.ArgumentParser(prog="make bench-tail", description=__doc__)
    parser.add_argument("--readers", type=int, default=500)
    parser.add_argument("--writers", type=int, default=5)
    parser.add_argument("--records", type=int, default=400, help="of each writer")
    parser.add_argument("--rate", type=float, default=20.0, help="of each writer, a second")
    parser.add_argument("--log", action="store_true", default=bool(os.environ.get("LOG")))
    given = parser.parse_args()
    plan = Plan(given.readers, given.writers, given.records, given.rate, given.log)
    with (
        contextlib.suppress(KeyboardInterrupt),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_main(plan))
    return 130


if __name__ == "__main__":
    sys.exit(main())
