"""Committed changes of ledgers and logs: one LISTEN per process, one bounded queue per follower.

A follower first gets `hello`, or `gap` if the follower had to wait for the database. Later, a `gap`
announces missed changes. Invariant: an overflowing queue is emptied, and gets one `gap` instead.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Final

import asyncpg

from quorumlog.wire.bodies import Change, received
from services.metadata.database import Connection, Database

log = logging.getLogger(__name__)

CHANNEL: Final = "ledger_changes"
_QUEUE_MAX: Final = 10_000
_RETRY_S: Final = 0.5
_PROBE_S: Final = 2.0
"""Interval of probes on the listening connection, which may break without an error."""


class ChangeHub:
    """Passes the database's notifications of changes on to all followers."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._followers: set[asyncio.Queue[Change]] = set()
        self._listening = asyncio.Event()
        self.is_over = False
        """Whether all streams must end because the process is shutting down."""

    @property
    def follower_count(self) -> int:
        """The number of open streams."""
        return len(self._followers)

    async def run(self) -> None:
        """Listen for ever. After a lost connection, reconnect and send all followers a `gap`."""
        while True:
            try:
                await self._listen()
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                log.warning("not-listening", extra={"error": repr(error)})
            await asyncio.sleep(_RETRY_S)

    async def end(self) -> None:
        """End every stream, because the process is shutting down."""
        self.is_over = True
        self._broadcast(Change(kind="heartbeat"))

    @contextlib.asynccontextmanager
    async def follow(self) -> AsyncIterator[asyncio.Queue[Change]]:
        """Yield a queue of changes that begins with `hello`, or with `gap` after a wait."""
        queue: asyncio.Queue[Change] = asyncio.Queue(_QUEUE_MAX)
        self._followers.add(queue)
        if self._listening.is_set():
            queue.put_nowait(Change(kind="hello"))
        try:
            yield queue
        finally:
            self._followers.discard(queue)

    async def _listen(self) -> None:
        connection = await self._database.connect()
        lost = asyncio.Event()
        connection.add_termination_listener(lambda _: lost.set())
        try:
            await connection.add_listener(CHANNEL, self._on_notification)
            self._listening.set()
            log.info("listening", extra={"channel": CHANNEL})
            # Followers may have missed changes while the hub was not listening.
            self._broadcast(Change(kind="gap"))
            while not lost.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PROBE_S):
                        await lost.wait()
                await _probe(connection)
        finally:
            self._listening.clear()
            connection.terminate()

    def _on_notification(
        self, _connection: object, _pid: int, _channel: str, payload: object
    ) -> None:
        try:
            change = received(Change, str(payload))
        except Exception:
            # It is unknown which row changed. After a `gap`, followers read all rows again.
            log.exception("notification-unknown")
            change = Change(kind="gap")
        self._broadcast(change)

    def _broadcast(self, change: Change) -> None:
        for queue in self._followers:
            if queue.full():
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(Change(kind="gap"))
            queue.put_nowait(change)


async def _probe(connection: Connection) -> None:
    """Terminate the connection unless Postgres responds in time."""
    watchdog = asyncio.get_running_loop().call_later(_PROBE_S, connection.terminate)
    try:
        await connection.fetchval("SELECT 1")
    finally:
        watchdog.cancel()
