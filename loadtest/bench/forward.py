"""What an append to a log costs that comes to another gateway than the log's owner.

The same requests go to the owner and to the other one of two gateways by turns; CPU is of both gateways together, and the
bookies' besides, since forwarded appends are batched differently. It says whether several processes behind one port, of
which most requests reach the wrong one, would gain anything.
"""

import argparse
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Self

import aiohttp

from loadtest.bench.measure import KIB, Figures, Meter, appends, payload_of
from loadtest.bench.plan import ROUNDS, TIME, Columns, Plan, Work
from loadtest.cluster import Cluster, running
from loadtest.program import Teller
from quorumlog.client.records import FRAMES, frames

_OCTETS: Final = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Log:
    """A log of a cluster whose owner is the first gateway."""

    cluster: Cluster
    session: aiohttp.ClientSession
    path: str
    payload: bytes
    seconds: float

    @classmethod
    @asynccontextmanager
    async def running(cls, _folder: Path, seconds: float) -> AsyncIterator[Self]:
        """Run the cluster until the end of the block."""
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            running(None, bookies=3, gateways=2) as cluster,
            aiohttp.ClientSession(connector=connector) as session,
        ):
            path = f"/v1/logs/forward-{os.urandom(4).hex()}"
            log = cls(cluster, session, path, payload_of(KIB), seconds)
            await log.ask("PUT", cluster.gateways[0] + path, b"{}", "application/json")
            await log.ask("POST", log.url(0), log.payload, _OCTETS)
            yield log

    def url(self, gateway: int) -> str:
        """The records at a gateway."""
        return f"{self.cluster.gateways[gateway]}{self.path}/records"

    async def ask(self, method: str, url: str, body: bytes, media: str) -> None:
        """Send a request. Raises: aiohttp.ClientError."""
        headers = {"Content-Type": media}
        async with self.session.request(method, url, data=body, headers=headers) as answer:
            await answer.read()
            answer.raise_for_status()

    async def append(self, gateway: int, in_flight: int, count: int) -> Figures:
        """Appends of so many entries to the owner (0), or to the other gateway (1)."""
        pids = {
            "owner": [self.cluster.pid("gateway-1")],
            "other": [self.cluster.pid("gateway-2")],
            **self.cluster.pids({"bookie": "bookies"}),
        }
        media = FRAMES if count > 1 else _OCTETS
        body = frames([self.payload] * count) if count > 1 else self.payload
        return await appends(
            Meter(pids),
            partial(self.ask, "POST", self.url(gateway), body, media),
            in_flight=in_flight,
            seconds=self.seconds,
            size=KIB,
            count=count,
        )


_WORKS: Final = [
    Work("quorumlog", f"{in_flight} in flight, {count} a call, {how}", Log.append, (gateway, in_flight, count))
    for in_flight, count in ((1, 1), (64, 1), (4, 100))
    for gateway, how in enumerate(("at its owner", "forwarded"))
]  # fmt: skip
OPTIONS: Final = {"time": TIME, "rounds": ROUNDS}
_FIGURES: Final = ("entries/s", "p50 ms", "owner us", "other us", "bookies us")


def plan(asked: argparse.Namespace, _teller: Teller) -> Plan:
    """Each way of writing at both gateways."""
    return Plan(
        _WORKS,
        {"quorumlog": Log.running},
        (Columns("medians of the rounds", _FIGURES),),
        asked.time,
        asked.rounds,
    )
