"""What a benchmark does: it starts systems, and runs measurements of them in rounds.

A module of a benchmark has `OPTIONS`, and `plan(asked, teller)`, which makes the plan of a run from these options.
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

Start = Callable[[Path, float], AbstractAsyncContextManager[Any]]
"""Runs a system in a folder; gets the seconds of a measurement."""

TIME: Final = (3.0, "seconds of a measurement")
ROUNDS: Final = (3, "rounds, of which medians count")


@dataclass(frozen=True, slots=True)
class Work:
    """A measurement of a system."""

    system: str
    what: str
    method: Callable[..., Awaitable[Figures]]
    """Measures for one round; gets the system and `given`."""
    given: tuple[Any, ...] = ()
    is_once: bool = False
    """Measured in the last round only."""

    @property
    def name(self) -> str:
        """The measurement's name in tables and for `--only`."""
        return f"{self.system}: {self.what}"

    async def run(self, system: Any) -> Figures:
        """Measure for one round."""
        return await self.method(system, *self.given)


@dataclass(frozen=True, slots=True)
class Columns:
    """A table of the report: some figures of the measurements that have one of them."""

    title: str
    figures: Sequence[str] = ()
    """Names of figures, or all. `least` and `most` are the extremes of `entries/s` over the rounds."""
    system: str = ""
    """Measurements of systems whose names begin so."""
    is_turned: bool = False
    """Figures are rows, and measurements are columns."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of a benchmark."""

    works: Sequence[Work]
    """In the order of a round."""
    starts: Mapping[str, Start]
    """By the name of a system."""
    tables: Sequence[Columns]
    seconds: float = 0.0
    """Of one measurement. Zero: measurements end by themselves."""
    rounds: int = 1
    conditions: str = ""
    """What the report says of the run besides its time and its rounds."""
    goals: Sequence[Goal] = ()
    may_fail: Collection[str] = ()
    """Systems that may fail: what they do not measure in a round is left out of it."""
    is_apart: bool = False
    """Systems run one after another; else all of them run until the end."""
    takes_turns: bool = False
    """Every other round begins with the last measurement."""
    is_tls: bool = False
    loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    """The event loop of the client."""


@asynccontextmanager
async def itself(_folder: Path, _seconds: float) -> AsyncIterator[None]:
    """A system that needs no start: what is measured runs in this process."""
    yield
