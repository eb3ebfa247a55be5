"""The tests' way of waiting; it lives beside the cluster library, which waits too."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import MappingProxyType
from typing import Final

from loadtest.waiting import DEADLINE_S, DeadlineMissed, until, until_sync

__all__ = [
    "DEADLINE_S", "MENDED_S", "SETTLED_S", "UNHURRIED", "DeadlineMissed", "turns", "until", "until_sync",
    "within",
]  # fmt: skip

SETTLED_S: Final = 4 * DEADLINE_S
"""For work through deaths and takeovers."""
MENDED_S: Final = 6 * DEADLINE_S
"""For what autorecovery mends: a repair that fails is put off for ever longer, at last for 300 s."""
LOST_WORKER: Final = "Python worker failed to connect back"
"""Spark gives a Python process 10 s to start, and has no setting for that (SPARK-45245)."""

UNHURRIED: Final = MappingProxyType({"QUORUM_TIMEOUT_S": "50"})
"""Settings of a cluster on which no append fails for the machine's being slow; below the deadline of a
client's call."""


@contextlib.asynccontextmanager
async def within(what: str, deadline_s: float = DEADLINE_S) -> AsyncIterator[None]:
    """A block that awaits an event instead of polling for it."""
    limit = asyncio.timeout(deadline_s)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise DeadlineMissed(what, None, deadline_s) from error


async def turns(count: int = 1) -> None:
    """Let the other tasks run for so many turns of the event loop: in a test on one loop, which has no other
    processes, that is how far they have come, and no time passes.
    """
    for _ in range(count):
        await asyncio.sleep(0)
