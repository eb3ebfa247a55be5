"""`make bench-compression`: what compression saves on the wire and on disk, and what processor time it costs whom.

The same records of JSON are appended by the SDK in batches and read back in pages, plain and compressed, in turns: so what
else the machine does disturbs each alike, and medians over rounds count. Bytes on the wire are counted apart from that, by
a relay before the gateway. Last, what one piece takes: the event loop waits for it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import thread_time
from typing import Final

from loadtest.bench.measure import Meter
from loadtest.cluster import Cluster, running
from quorumlog.client import Client, Log
from quorumlog.protocol import batch, packed
from quorumlog.zstd import zstd
from services.gateway.edge.http.codings import CODINGS, SLICE_BYTES, Unpacker

_AGENTS: Final = ("Mozilla/5.0 (X11; Linux x86_64)", "curl/8.5.0", "okhttp/4.12.0")
_EVENTS: Final = ("click", "view", "purchase", "login", "logout")


@dataclass(frozen=True, slots=True)
class Way:
    """How records travel, and how they are stored."""

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
    """Events as applications log them, 190 bytes each."""
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
    """Counts the bytes between a client and a gateway."""

    def __init__(self) -> None:
        self.url, self.sent, self.received = "", 0, 0

    @contextlib.asynccontextmanager
    async def to(self, url: str) -> AsyncIterator[None]:
        """Listen at `url` of the relay until the end of the block."""
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
    """Read records in pages. Raises: AssertionError unless all are there."""
    end = start + count
    while start < end:
        page = await log.read(start, limit=10_000)
        assert page.records, "all were appended"
        start = page.next


async def one(
    cluster: Cluster, way: Way, values: Sequence[bytes], size: int, number: int
) -> Mapping[str, float]:
    """One round of one way: microseconds of CPU for a record, by role."""
    pids = {
        "client": [os.getpid()],
        "gateway": [cluster.pid("gateway-1")],
        "bookies": [cluster.pid(name) for name in cluster.names if name.startswith("bookie")],
    }
    found: dict[str, float] = {}
    async with Client(cluster.gateways[0], compression=way.wire) as client:
        log = await client.create_log(f"log-{number}", batch_compression=way.stored)
        await append(log, values[:size], size)
        for work, done in (
            ("append", append(log, values, size)),
            ("read", read(log, size, len(values))),
        ):
            with Meter(pids) as meter:
                await done
            for role, seconds in meter.cpu_s.items():
                found[f"{work} {role}"] = seconds / len(values) * 1e6
        ledger = client.ledger((await log.info())["ledgers"][0]["ledger_id"])
        await log.roll()
        info = await ledger.info()
        found["stored"] = (info["length"] or 0) / (len(values) + size)
    return found


async def wire(
    cluster: Cluster, way: Way, values: Sequence[bytes], size: int
) -> tuple[float, float]:
    """Bytes on the wire for a record: of an append and of a read."""
    relay = Relay()
    async with (
        relay.to(cluster.gateways[0]),
        Client(relay.url, compression=way.wire) as client,
    ):
        log = await client.create_log(
            f"wire-{way.name.replace(' ', '-')}", batch_compression=way.stored
        )
        before = relay.sent
        await append(log, values, size)
        sent, before = relay.sent - before, relay.received
        await read(log, 0, len(values))
        return sent / len(values), (relay.received - before) / len(values)


def longest_ms(work: Callable[[], object], times: int = 20) -> float:
    """The median of the processor time of a few runs of what the event loop waits for."""
    taken = []
    for _ in range(times):
        began = thread_time()
        work()
        taken.append(thread_time() - began)
    return statistics.median(taken) * 1e3


def pieces() -> list[tuple[str, float]]:
    """What one piece takes, in milliseconds."""
    lines = b"\n".join(records(60_000, 7))
    found: list[tuple[str, float]] = []
    for coding in CODINGS:
        pack = zstd.compress if coding == "zstd" else lambda data: zlib.compress(data, 6, 31)
        for name, data in (("JSON", lines[: 8 << 20]), ("zeros", bytes(8 << 20))):
            unpacking = Unpacker(coding).pieces(pack(data))
            next(unpacking)
            taken = longest_ms(partial(next, unpacking))
            found.append((f"a piece of {name} is unpacked, {coding}", taken))
    first = lines[:SLICE_BYTES]
    found.append(("a slice of an answer, gzip", longest_ms(lambda: zlib.compress(first, 1, 31))))
    found.append(("a slice of an answer, zstd", longest_ms(lambda: zstd.compress(first, 1))))
    values = lines.split(b"\n")
    for name, size in (("40 KB", 200), ("512 KiB", 2600), ("2 MB", 10_000)):
        data = batch.encode([batch.Record(each) for each in values[:size]])
        stored = packed.pack(data)
        found.append((f"a batch of {name} is packed", longest_ms(partial(packed.pack, data))))
        found.append((f"a batch of {name} is unpacked", longest_ms(partial(packed.unpack, stored))))
    return found


def _median(rounds: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(each[name] for each in rounds)


async def main() -> None:
    """Measure, and print tables in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=20_000, help="of each round of each way")
    parser.add_argument("--batch", type=int, default=200, help="records of a request")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    values = records(given.records, 1)
    found: dict[str, list[Mapping[str, float]]] = {way.name: [] for way in WAYS}
    async with running(None, bookies=3, gateways=1) as cluster:
        crossed = {way.name: await wire(cluster, way, values, given.batch) for way in WAYS}
        for number in range(given.rounds):
            for at, way in enumerate(WAYS):
                whole = await one(cluster, way, values, given.batch, number * len(WAYS) + at)
                found[way.name].append(whole)
    payload = sum(map(len, values)) / len(values)
    print(
        f"{given.records} records of {payload:.0f} bytes, {given.batch} a request, {given.rounds} rounds"
    )
    print(
        "| | sent, B | read, B | stored, B | append: client, gateway, bookies µs | read: client, gateway µs |"
    )
    print("|---|---|---|---|---|---|")
    for way in WAYS:
        rounds = found[way.name]
        cpu = {
            work: ", ".join(f"{_median(rounds, f'{work} {role}'):.1f}" for role in roles)
            for work, roles in (
                ("append", ("client", "gateway", "bookies")),
                ("read", ("client", "gateway")),
            )
        }
        sent, received = crossed[way.name]
        print(
            f"| {way.name} | {sent:.0f} | {received:.0f} | {_median(rounds, 'stored'):.0f} |"
            f" {cpu['append']} | {cpu['read']} |"
        )
    print("\n| the event loop waits for | ms of CPU |\n|---|---|")
    for name, taken in pieces():
        print(f"| {name} | {taken:.2f} |")


if __name__ == "__main__":
    asyncio.run(main())
