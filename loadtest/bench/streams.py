"""The cost of many small streams of the Durable Streams protocol, with one message each.

The streams are opened, appended to, closed and read; each step runs for all streams before the next
step. For each step the benchmark measures the rate and the CPU of an idle second. It also measures
the memory (RSS) that a stream adds to the gateways, the bookies and the metadata service. The
client runs on the same machine.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import aiohttp

from loadtest.bench.idle import IDLE_S, TABLES, opened
from loadtest.bench.measure import Figures
from loadtest.bench.plan import Plan, Work
from loadtest.cluster import Cluster, running
from loadtest.program import Teller

_DONE: Final = (200, 201, 204)
_AGAIN: Final = (429, 503, 504)
"""Status codes of a busy cluster, after which the request is sent again."""
_PAUSE_S: Final = 0.1
_TYPE: Final = {"Content-Type": "application/json"}
_MESSAGE: Final = b'{"user":42,"text":"a small message of some hundred bytes, as a chat or the answer of a model has them"}'
_STEPS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "opened": ("PUT", {"headers": _TYPE}),
    "appended to once": ("POST", {"headers": _TYPE, "data": _MESSAGE}),
    "closed": ("POST", {"headers": {"Stream-Closed": "true"}}),
    "read": ("GET", {}),
}


@dataclass(frozen=True, slots=True)
class Streams:
    """A cluster with two gateways, which serves the streams."""

    cluster: Cluster
    session: aiohttp.ClientSession
    seconds: float

    @classmethod
    @asynccontextmanager
    async def running(cls, _folder: Path, seconds: float) -> AsyncIterator[Self]:
        """Run a cluster with one stream until the end of the block."""
        async with (
            running(None, bookies=3, gateways=2) as cluster,
            aiohttp.ClientSession() as session,
        ):
            streams = cls(cluster, session, seconds)
            for step in ("opened", "appended to once"):
                await streams._ask(-1, *_STEPS[step])
            yield streams

    async def step(self, count: int, name: str = "") -> Figures:
        """Measure one step for all streams. `name`: the step; empty for none."""
        return await opened(
            self.cluster, self.seconds, count, lambda number: self._ask(number, *_STEPS[name])
        )

    async def _ask(self, number: int, method: str, more: dict[str, Any]) -> None:
        # Streams are spread over the gateways, and each stream always uses the same gateway.
        gateway = self.cluster.gateways[number % len(self.cluster.gateways)]
        url = f"{gateway}/v1/stream/bench/{number}"
        while True:
            async with self.session.request(method, url, **more) as answer:
                if answer.status in _DONE:
                    return
                assert answer.status in _AGAIN, (answer.status, await answer.text())
            await asyncio.sleep(_PAUSE_S)


OPTIONS: Final = {"streams": (10_000, "number of streams"), "time": IDLE_S}


def plan(asked: argparse.Namespace, _teller: Teller) -> Plan:
    """Plan all steps, after a measurement without streams."""
    count: int = asked.streams
    steps = [
        Work("streams", f"{count:,} {name}", Streams.step, (count, name)) for name in _STEPS
    ]  # fmt: skip
    return Plan(
        [Work("streams", "nothing is there", Streams.step, (0,)), *steps],
        {"streams": Streams.running},
        TABLES,
        asked.time,
    )
