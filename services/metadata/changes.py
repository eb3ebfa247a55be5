"""Ledger changes as they are committed: one LISTEN for the process, a bounded queue a follower.

A follower first gets `hello`, or `gap` once the database is back: from there on it misses
nothing without being told `gap`.
Invariant: a queue that overflows is emptied and holds one `gap` in place of what was in it.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Final

import asyncpg

from quorumlog.protocol.metadata import State
from quorumlog.wire.bodies import Change
from services.metadata.database import Connection, Database

log = logging.getLogger(__name__)

CHANNEL: Final = "ledger_changes"
_QUEUE_MAX: Final = 10_000
_RETRY_S: Final = 0.5
_PROBE_S: Final = 2.0
"""How often the listening connection is asked whether it lives: a dead peer sends nothing."""


class ChangeHub:
    """Fans the database's notifications out to followers."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._followers: set[asyncio.Queue[Change]] = set()
        self._listening = asyncio.Event()
        self.is_over = False
        """Whether streams are to end now."""

    @property
    def follower_count(self) -> int:
        """How many streams are open."""
        return len(self._followers)

    async def run(self) -> None:
        """Listen for ever; a connection that is lost is made anew, and followers are told."""
        while True:
            try:
                await self._listen()
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                log.warning("not-listening", extra={"error": repr(error)})
            except Exception:
                # Followers must go on to be told, whatever this was.
                log.exception("not-listening")
            await asyncio.sleep(_RETRY_S)

    async def end(self) -> None:
        """Let every stream end: the process is about to."""
        self.is_over = True
        self._tell(Change(kind="heartbeat"))

    @contextlib.asynccontextmanager
    async def follow(self) -> AsyncIterator[asyncio.Queue[Change]]:
        """A queue that gets `hello` once the database is listened to, then every change."""
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
            await connection.add_listener(CHANNEL, self._notified)
            self._listening.set()
            log.info("listening", extra={"channel": CHANNEL})
            # Followers that waited for the database hear their `hello`; the others a `gap`.
            self._tell(Change(kind="gap"))
            while not lost.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_PROBE_S):
                        await lost.wait()
                await _probe(connection)
        finally:
            self._listening.clear()
            connection.terminate()

    def _notified(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        ledger_id, version, state = str(payload).split(" ")
        self._tell(
            Change(
                kind="change",
                ledger_id=int(ledger_id),
                version=int(version),
                state=None if state == "deleted" else State(state),
                deleted=state == "deleted",
            )
        )

    def _tell(self, change: Change) -> None:
        for queue in self._followers:
            if queue.full():
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(Change(kind="gap"))
            queue.put_nowait(change)


async def _probe(connection: Connection) -> None:
    """Cut the connection unless it answers in time."""
    watchdog = asyncio.get_running_loop().call_later(_PROBE_S, connection.terminate)
    try:
        await connection.fetchval("SELECT 1")
    finally:
        watchdog.cancel()
