"""The plan of a benchmark: the systems that it starts, and the measurements that it runs in rounds.

The module of a benchmark has `OPTIONS` and a function `plan(asked, teller)`, which makes a plan
from the options.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvloop

from loadtest.bench.goals import Goal
from loadtest.bench.measure import Figures
from loadtest.cluster import Cluster, running

Start = Callable[[Path, float], AbstractAsyncContextManager[Any]]
"""Starts a system. Arguments: the folder for its data, and the seconds of a measurement."""

TIME: Final = (3.0, "seconds of a measurement")
ROUNDS: Final = (3, "rounds, whose medians are reported")


@dataclass(frozen=True, slots=True)
class Work:
    """A measurement of a system."""

    system: str
    what: str
    method: Callable[..., Awaitable[Figures]]
    """Measures for one round. Arguments: the system, and the values of `given`."""
    given: tuple[Any, ...] = ()
    is_once: bool = False
    """Whether the measurement runs in the last round only."""

    @property
    def name(self) -> str:
        """The measurement's name in tables and for `--only`."""
        return f"{self.system}: {self.what}"

    async def run(self, system: Any) -> Figures:
        """Measure for one round."""
        return await self.method(system, *self.given)


@dataclass(frozen=True, slots=True)
class Columns:
    """A table of the report. It shows the measurements that have at least one of the figures."""

    title: str
    figures: Sequence[str] = ()
    """Names of figures; empty for all. `least` and `most` are extremes of `entries/s`."""
    system: str = ""
    """Shows only measurements of systems whose names begin with this."""
    is_turned: bool = False
    """Whether figures are rows and measurements are columns."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of a benchmark."""

    works: Sequence[Work]
    """The measurements, in the order of a round."""
    starts: Mapping[str, Start]
    """Functions that start the systems, by the system's name."""
    tables: Sequence[Columns]
    seconds: float = 0.0
    """Seconds of one measurement. With 0, measurements end by themselves."""
    rounds: int = 1
    conditions: str = ""
    """Text for the report about the run, in addition to its time and its rounds."""
    goals: Sequence[Goal] = ()
    may_fail: Collection[str] = ()
    """Systems that may fail. If their measurement fails, the round goes on without it."""
    is_apart: bool = False
    """Whether systems run one after another. Otherwise all systems run until the end."""
    takes_turns: bool = False
    """Whether every other round reverses the order of the systems in each measurement."""
    is_tls: bool = False
    loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    """The event loop of the client."""


def cluster_of(**settings: Any) -> Start:
    """Starts a cluster with these settings, whose data is in memory if there is room."""

    @asynccontextmanager
    async def start(_folder: Path, _seconds: float) -> AsyncIterator[Cluster]:
        async with running(None, **settings) as started:
            yield started

    return start


@asynccontextmanager
async def itself(_folder: Path, _seconds: float) -> AsyncIterator[None]:
    """A system that needs no start, because the measured code runs in this process."""
    yield
