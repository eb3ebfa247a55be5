"""The bytes that compression saves on the wire and on disk, and its CPU cost in each process.

The SDK appends the same JSON records in batches and reads them back in pages. Each round runs all
variants, plain and compressed, so that other work on the machine affects them equally; the medians
of the rounds are reported. A relay in front of the gateway counts bytes on the wire in separate
runs. Finally, the benchmark measures how long single calls of the compressors block the event
loop.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from time import thread_time
from typing import Final

from loadtest.bench.measure import Figures, Meter
from loadtest.bench.plan import ROUNDS, Columns, Plan, Work, itself
from loadtest.cluster import Cluster, running
from loadtest.program import Teller
from quorumlog.client import Client, Log
from quorumlog.protocol import batch, packed
from quorumlog.zstd import zstd
from services.gateway.edge.http.codings import CODINGS, SLICE_BYTES, Unpacker

_AGENTS: Final = ("Mozilla/5.0 (X11; Linux x86_64)", "curl/8.5.0", "okhttp/4.12.0")
_EVENTS: Final = ("click", "view", "purchase", "login", "logout")


@dataclass(frozen=True, slots=True)
class Way:
    """A variant of the benchmark: the compression on the wire and in the stored batches."""

    name: str
    wire: str | None = None
    stored: str = "none"


WAYS: Final = (
    Way("plain"),
    Way("gzip on the wire", "gzip"),
    Way("zstd on the wire", "zstd"),
    Way("zstd on disk", None, "zstd"),
    Way("zstd on both", "zstd", "zstd"),
)


def records(count: int, seed: int) -> list[bytes]:
    """Random events like those that applications log, with 190 bytes each."""
    drawn = random.Random(seed)
    return [
        json.dumps(
            {
                "id": f"{drawn.getrandbits(64):016x}",
                "user": f"user-{drawn.randrange(5000)}",
                "event": drawn.choice(_EVENTS),
                "at": f"2026-11-23T10:{number // 60 % 60:02}:{number % 60:02}.{drawn.randrange(1000):03}Z",
                "amount": round(drawn.random() * 1000, 2),
                "ip": f"10.0.{drawn.randrange(256)}.{drawn.randrange(256)}",
                "agent": drawn.choice(_AGENTS),
            }
        ).encode()
        for number in range(count)
    ]


class Relay:
    """A relay that counts the bytes between a client and a gateway."""

    def __init__(self) -> None:
        self.url, self.sent, self.received = "", 0, 0

    @contextlib.asynccontextmanager
    async def to(self, url: str) -> AsyncIterator[None]:
        """Relay connections to the gateway at `url` during the block. Sets `self.url`."""
        host, port = url.removeprefix("http://").split(":")

        async def carry(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_sent: bool
        ) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 16):
                    self.sent += len(data) if is_sent else 0
                    self.received += 0 if is_sent else len(data)
                    writer.write(data)
                    await writer.drain()
            writer.close()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection(host, int(port))
            await asyncio.gather(
                carry(reader, back, is_sent=True), carry(there, writer, is_sent=False)
            )

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            server.close()


async def append(log: Log, values: Sequence[bytes], size: int) -> None:
    """Append in requests of `size` records."""
    for start in range(0, len(values), size):
        await log.append(*values[start : start + size])


async def read(log: Log, start: int, count: int) -> None:
    """Read `count` records in pages. Raises: AssertionError if records are missing."""
    end = start + count
    while start < end:
        page = await log.read(start, limit=10_000)
        assert page.records, "no record may be missing"
        start = page.next


@dataclass(frozen=True, slots=True)
class System:
    """A cluster with one gateway, and the records to append."""

    cluster: Cluster
    values: Sequence[bytes]
    batch: int
    """Records per request."""
    _numbers: "count[int]" = field(default_factory=count)

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, _folder: Path, _seconds: float, *, values: Sequence[bytes], batch: int
    ) -> "AsyncIterator[System]":
        """Run a cluster until the end of the block."""
        async with running(None, bookies=3, gateways=1) as cluster:
            yield cls(cluster, values, batch)

    async def wire(self, way: Way) -> Figures:
        """Measure the bytes on the wire per record, for appends and for reads."""
        relay, values = Relay(), self.values
        async with (
            relay.to(self.cluster.gateways[0]),
            Client(relay.url, compression=way.wire) as client,
        ):
            log = await self._new_log(client, way)
            before = relay.sent
            await append(log, values, self.batch)
            sent, before = relay.sent - before, relay.received
            await read(log, 0, len(values))
            received = relay.received - before
        return {"sent, B": sent / len(values), "read, B": received / len(values)}

    async def cpu(self, way: Way) -> Figures:
        """Measure the CPU per record of each role, in microseconds."""
        values, size = self.values, self.batch
        pids = {
            "client": [os.getpid()],
            **self.cluster.pids({"gateway": "gateway", "bookie": "bookies"}),
        }
        found: Figures = {}
        async with Client(self.cluster.gateways[0], compression=way.wire) as client:
            log = await self._new_log(client, way)
            await append(log, values[:size], size)
            for work, done in (
                ("append", append(log, values, size)),
                ("read", read(log, size, len(values))),
            ):
                with Meter(pids) as meter:
                    await done
                for role, seconds in meter.cpu_s.items():
                    found[f"{work}: {role} us"] = seconds / len(values) * 1e6
            ledger = client.ledger((await log.info())["ledgers"][0]["ledger_id"])
            await log.roll()
            info = await ledger.info()
            found["stored, B"] = (info["length"] or 0) / (len(values) + size)
        return found

    async def _new_log(self, client: Client, way: Way) -> Log:
        return await client.create_log(f"log-{next(self._numbers)}", batch_compression=way.stored)


def longest_ms(work: Callable[[], object], times: int = 20) -> float:
    """The median CPU time in milliseconds of `times` calls that block the event loop."""
    taken = []
    for _ in range(times):
        began = thread_time()
        work()
        taken.append(thread_time() - began)
    return statistics.median(taken) * 1e3


async def pieces(_: object) -> Figures:
    """Measure single calls of the compressors that block the event loop, in milliseconds."""
    lines = b"\n".join(records(60_000, 7))
    found: Figures = {}
    for coding in CODINGS:
        pack = zstd.compress if coding == "zstd" else lambda data: zlib.compress(data, 6, 31)
        for name, data in (("JSON", lines[: 8 << 20]), ("zeros", bytes(8 << 20))):
            unpacking = Unpacker(coding).pieces(pack(data))
            next(unpacking)
            taken = longest_ms(partial(next, unpacking))
            found[f"a piece of {name} is unpacked, {coding}"] = taken
    first = lines[:SLICE_BYTES]
    found["a slice of an answer, gzip"] = longest_ms(lambda: zlib.compress(first, 1, 31))
    found["a slice of an answer, zstd"] = longest_ms(lambda: zstd.compress(first, 1))
    values = lines.split(b"\n")
    for name, size in (("40 KB", 200), ("512 KiB", 2600), ("2 MB", 10_000)):
        data = batch.encode([batch.Record(each) for each in values[:size]])
        stored = packed.pack(data)
        found[f"a batch of {name} is packed"] = longest_ms(partial(packed.pack, data))
        found[f"a batch of {name} is unpacked"] = longest_ms(partial(packed.unpack, stored))
    return found


OPTIONS: Final = {
    "records": (20_000, "records of each variant in each round"),
    "batch": (200, "records per request"),
    "rounds": (5, ROUNDS[1]),
}
_CPU: Final = (
    *(f"append: {role} us" for role in ("client", "gateway", "bookies")),
    *(f"read: {role} us" for role in ("client", "gateway", "bookies")),
    "stored, B",
)


def plan(asked: argparse.Namespace, _teller: Teller) -> Plan:
    """Plan rounds of all variants, the bytes on the wire, and calls that block the event loop."""
    values = records(asked.records, 1)
    payload = sum(map(len, values)) / len(values)
    return Plan(
        [
            *(Work("quorumlog", way.name, System.cpu, (way,)) for way in WAYS),
            *(
                Work("quorumlog", f"{way.name}, bytes", System.wire, (way,), is_once=True)
                for way in WAYS
            ),
            Work("event loop", "pieces", pieces, is_once=True),
        ],
        {
            "quorumlog": partial(System.running, values=values, batch=asked.batch),
            "event loop": itself,
        },
        (
            Columns("a record, medians of the rounds", _CPU),
            Columns("bytes on the wire", ("sent, B", "read, B")),
            Columns("the event loop waits for, ms of CPU", (), "event loop", is_turned=True),
        ),
        rounds=asked.rounds,
        conditions=f"{asked.records:,} records of {payload:.0f} bytes, {asked.batch} a request",
        loop=asyncio.new_event_loop,
        is_apart=True,
    )
