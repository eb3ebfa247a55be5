"""The cost of an append to a log at a gateway that does not own the log and forwards the append.

The same requests go to the owner and to the other gateway in turn. The report has the
CPU of each gateway and of the bookies, since forwarded appends are batched differently. The result
shows whether several gateway processes behind one port would pay off, although most requests would
reach the wrong process.
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
    """A log in a cluster with two gateways. The first gateway owns the log."""

    cluster: Cluster
    session: aiohttp.ClientSession
    path: str
    payload: bytes
    seconds: float

    @classmethod
    @asynccontextmanager
    async def running(cls, _folder: Path, seconds: float) -> AsyncIterator[Self]:
        """Run a cluster with the log until the end of the block."""
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
        """The URL of the log's records at a gateway."""
        return f"{self.cluster.gateways[gateway]}{self.path}/records"

    async def ask(self, method: str, url: str, body: bytes, media: str) -> None:
        """Send a request. Raises: aiohttp.ClientError."""
        headers = {"Content-Type": media}
        async with self.session.request(method, url, data=body, headers=headers) as answer:
            await answer.read()
            answer.raise_for_status()

    async def append(self, gateway: int, in_flight: int, count: int) -> Figures:
        """Measure appends of `count` entries at the owner (gateway 0) or at gateway 1."""
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
    """Plan each way of appending at both gateways."""
    return Plan(
        _WORKS,
        {"quorumlog": Log.running},
        (Columns("medians of the rounds", _FIGURES),),
        asked.time,
        asked.rounds,
    )
