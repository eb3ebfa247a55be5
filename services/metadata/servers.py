"""Finds the primary among a DSN's servers.

All servers are tried at once, because an unreachable server does not respond, and would use up the
time for the other servers. If there are two primaries (a standby was promoted, and the old primary
is back), only the primary with the known history is used (rule 18a).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit, urlunsplit

import asyncpg

_LINES_OF_OUTAGE: Final = 10
"""How many different errors of an outage are logged (chosen by judgement)."""


class Reach:
    """Tracks whether a server responds. Invariant: each of an outage's first errors is logged once."""

    def __init__(self, *, away: str, there: str, deadline_s: float) -> None:
        """`away` and `there` are the names of the log events for the start and end of an outage."""
        self._away, self._there, self._deadline_s = away, there, deadline_s
        self._reported: set[str] = set()
        self.is_up = False
        """Whether the last query reached the server."""

    def lost(self, error: BaseException) -> None:
        """Record that a query failed."""
        is_late = isinstance(error, TimeoutError) and not str(error)
        # Use str, because the repr of redis-py's errors has no text.
        text = f"{type(error).__name__}: {error}"
        if is_late:
            text = f"no response within {self._deadline_s:g} s"
        self.is_up = False
        if text not in self._reported and len(self._reported) < _LINES_OF_OUTAGE:
            self._reported.add(text)
            log.warning(self._away, extra={"error": text})

    def found(self) -> None:
        """Record that a query succeeded."""
        if self.is_up:
            return
        log.info(self._there)
        self.is_up = True
        self._reported.clear()


log = logging.getLogger(__name__)

C = TypeVar("C", bound="asyncpg.Connection[Any]")

_LATE_S: Final = 0.2
"""How long the other servers may take once a primary has responded (chosen by judgement)."""


class SeveralPrimaries(ConnectionError):
    """Several servers are primaries, and the known history does not identify exactly one."""


def dsn_of_each(dsn: str) -> tuple[str, ...]:
    """One DSN for each server that the DSN lists."""
    parts = urlsplit(dsn)
    login, at, servers = parts.netloc.rpartition("@")
    return tuple(
        urlunsplit(parts._replace(netloc=f"{login}{at}{server}")) for server in servers.split(",")
    )


async def connect_to_primary(
    connects: Sequence[Coroutine[Any, Any, C]], has_history: Callable[[C], Awaitable[bool]]
) -> C:
    """Connect to all servers, and keep only the connection to the primary.

    Each of `connects` must fail if its server is not a primary. Raises: SeveralPrimaries; the error
    of the first of `connects` if no server is a primary.
    """
    tries = [asyncio.create_task(connect) for connect in connects]
    chosen: C | None = None
    try:
        await _ended(tries)
        primaries = _connected(tries)
        if len(primaries) > 1:
            log.error("several-primaries", extra={"servers": len(primaries)})
            primaries = [found for found in primaries if await has_history(found)]
            if len(primaries) != 1:
                raise SeveralPrimaries("several servers of the DSN are primaries: stop all but one")
        chosen = primaries[0] if primaries else tries[0].result()
        return chosen
    finally:
        for task in tries:
            task.cancel()
        for connection in _connected(tries):
            if connection is not chosen:
                connection.terminate()


async def _ended(tries: "Sequence[asyncio.Task[C]]") -> None:
    """Wait until all attempts have ended, or for `_LATE_S` after the first primary responded."""
    pending = set(tries)
    while pending and not _connected(tries):
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    if pending:
        await asyncio.wait(pending, timeout=_LATE_S)


def _connected(tries: "Sequence[asyncio.Task[C]]") -> list[C]:
    ended = (task for task in tries if task.done() and not task.cancelled())
    return [task.result() for task in ended if task.exception() is None]
