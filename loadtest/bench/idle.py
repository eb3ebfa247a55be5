"""The cost of open but unused ledgers, logs and connections at one gateway.

Each ledger and log has one record. Memory is the RSS of all processes of a kind. CPU is that of the
gateway, the bookies and the metadata service in an idle second. These processes send each other
periodic requests even if nothing is open.
"""

import argparse
import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter as clock
from typing import Final, Self
from urllib.parse import urlsplit

from loadtest.bench.measure import Figures, Meter, for_each
from loadtest.bench.plan import Columns, Plan, Work
from loadtest.cluster import Cluster, running
from loadtest.program import Teller
from quorumlog.client import Client, Ledger

_OPENED_IN_FLIGHT: Final = 8
_SETTLE_S: Final = 3.0
_GET: Final = b"GET /v1/ledgers/%d HTTP/1.1\r\nHost: %s\r\n\r\n"
KINDS: Final = ("gateway", "bookie", "metadata")
IDLE_S: Final = (10.0, "seconds of an idle time")
TABLES: Final = (
    Columns("memory of all processes of a kind", ("each/s", *(f"{kind} {what}" for kind in KINDS for what in ("KB each", "MB")))),
    Columns("% of a core while idle", [f"{kind} %" for kind in KINDS]),
)  # fmt: skip


async def opened(
    cluster: Cluster, seconds: float, count: int, begin: Callable[[int], Awaitable[object]]
) -> Figures:
    """Call `begin` with 0 to `count` - 1, a few at once. Measures memory, and an idle time."""
    meter = Meter(cluster.pids({kind: kind for kind in KINDS}))
    before, began = meter.memory(sum), clock()
    await for_each(range(count), begin, _OPENED_IN_FLIGHT)
    took = clock() - began
    await asyncio.sleep(_SETTLE_S)
    with meter:
        await asyncio.sleep(seconds)
    figures = {"each/s": count / took} if count else {}
    for kind, after in meter.memory(sum).items():
        figures[f"{kind} MB"] = after
        if count:
            figures[f"{kind} KB each"] = (after - before[kind]) / count * 1e3
    return figures | meter.shares()


@dataclass(slots=True)
class Gateway:
    """A gateway without requests, at which ledgers, logs or connections are opened."""

    cluster: Cluster
    client: Client
    first: Ledger
    seconds: float
    _connections: AsyncExitStack
    _run_id: str = field(default_factory=lambda: os.urandom(4).hex())

    @classmethod
    @asynccontextmanager
    async def running(cls, _folder: Path, seconds: float) -> AsyncIterator[Self]:
        """Run a cluster with one ledger and one log until the end of the block."""
        async with (
            running(None, bookies=3, gateways=1) as cluster,
            Client(*cluster.gateways) as client,
            AsyncExitStack() as connections,
        ):
            first = await client.create_ledger()
            await first.append(b"open")
            gateway = cls(cluster, client, first, seconds, connections)
            await gateway._log(-1)
            yield gateway
            await first.append(b"still there")

    async def nothing(self) -> Figures:
        """Measure the gateway without opening anything else."""
        return await opened(self.cluster, self.seconds, 0, self._ledger)

    async def ledgers(self, count: int) -> Figures:
        """Measure the cost of open ledgers."""
        return await opened(self.cluster, self.seconds, count, self._ledger)

    async def logs(self, count: int) -> Figures:
        """Measure the cost of open logs."""
        return await opened(self.cluster, self.seconds, count, self._log)

    async def connections(self, count: int) -> Figures:
        """Measure the cost of connections that have sent one request and stay open."""
        return await opened(self.cluster, self.seconds, count, self._connect)

    async def _ledger(self, _number: int) -> None:
        await (await self.client.create_ledger()).append(b"open")

    async def _log(self, number: int) -> None:
        await (await self.client.create_log(f"{self._run_id}-{number}")).append(b"open")

    async def _connect(self, _number: int) -> None:
        at = urlsplit(self.cluster.gateways[0])
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        self._connections.callback(writer.close)
        writer.write(_GET % (self.first.ledger_id, at.netloc.encode()))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head


OPTIONS: Final = {
    "ledgers": (10_000, "number of open ledgers"),
    "logs": (10_000, "number of open logs"),
    "connections": (1000, "number of open connections"),
    "time": IDLE_S,
}


def plan(asked: argparse.Namespace, _teller: Teller) -> Plan:
    """Plan measurements without anything open, and then of ledgers, logs and connections."""
    return Plan(
        (
            Work("gateway", "nothing is open", Gateway.nothing),
            Work("gateway", f"{asked.ledgers:,} ledgers", Gateway.ledgers, (asked.ledgers,)),
            Work("gateway", f"{asked.logs:,} logs", Gateway.logs, (asked.logs,)),
            Work("gateway", f"{asked.connections:,} connections", Gateway.connections, (asked.connections,)),
        ),
        {"gateway": Gateway.running},
        TABLES,
        asked.time,
    )  # fmt: skip
