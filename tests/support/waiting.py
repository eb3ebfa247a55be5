"""The tests' way of waiting; it lives beside the cluster library, which waits too."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from loadtest.waiting import DEADLINE_S, DeadlineMissed, until, until_sync

__all__ = ["DEADLINE_S", "DeadlineMissed", "until", "until_sync", "within"]


@contextlib.asynccontextmanager
async def within(what: str, deadline_s: float = DEADLINE_S) -> AsyncIterator[None]:
    """A block that awaits an event rather than asking for it again and again."""
    limit = asyncio.timeout(deadline_s)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise DeadlineMissed(what, None, deadline_s) from error
