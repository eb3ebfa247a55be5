"""Connections to Postgres that never hang: every piece of work ends within one deadline.

A small pool of our own: asyncpg's asks the server to cancel a statement that ran out of time and
waits for that, which is one more thing that hangs when the server does. Here the connection is
cut instead, and what became of the work is unknown.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias, TypeVar

import asyncpg
from asyncpg.connect_utils import SessionAttribute

from quorumlog.errors import UNKNOWN, MetadataUnavailable, QuorumLogError

log = logging.getLogger(__name__)

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
T = TypeVar("T")

_AWAY: Final = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.InvalidTransactionStateError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.ObjectNotInPrerequisiteStateError,
    asyncpg.TransactionRollbackError,
    asyncpg.PostgresSystemError,
    asyncpg.InternalServerError,
    asyncpg.TargetServerAttributeNotMatched,
)
"""What says that the database can't do it now: shutting down, read-only, full, locked, gone."""


class Database:
    """Postgres, which may vanish and come back at any time.

    Invariants: at most `connections_max` connections; one that failed is never used again; once
    the database has lost a change that it had answered, nothing is changed any more (rule 18).
    """

    def __init__(self, dsn: str, *, connections_max: int, deadline_s: float) -> None:
        self._dsn = dsn
        self._deadline_s = deadline_s
        self._idle: list[Connection] = []
        self._slots = asyncio.Semaphore(connections_max)
        self.is_up = False
        """Whether the last piece of work found the database there."""
        self._witness: tuple[int, int] | None = None
        """The last change that was answered: a ledger and its version."""
        self._lost = ""
        """What the database lost of what it had answered, if it did."""
        self.is_open = False
        """Whether the tables are of this version; until then nothing is asked of them."""

    async def run(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Do `work` on a connection of its own, outside a transaction.

        Raises: MetadataUnavailable within the deadline; its outcome is `unknown` once the work
        had begun.
        """
        if not self.is_open:
            raise MetadataUnavailable("the database was not reached yet")
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        try:
            async with asyncio.timeout_at(deadline):
                await self._slots.acquire()
        except TimeoutError as error:
            raise MetadataUnavailable("every connection to the database is busy") from error
        try:
            connection = await self._connection(deadline)
            result = await self._on(connection, work, deadline)
        finally:
            self._slots.release()
        return result

    async def transact(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Do `work` in one transaction: all of it or, when it raises, nothing.

        Raises: MetadataUnavailable, as `run` does.
        """

        async def transaction(connection: Connection) -> T:
            self.check()
            async with connection.transaction():
                return await work(connection)

        return await self.run(transaction)

    def remember(self, ledger_id: int, version: int) -> None:
        """A change was committed: a database that comes back without it has gone back."""
        self._witness = (ledger_id, version)

    def check(self) -> None:
        """Raise MetadataUnavailable if the database has gone back."""
        if self._lost:
            raise MetadataUnavailable(self._lost, retryable=False)

    async def connect(self, timeout_s: float | None = None, **settings: str) -> Connection:
        """A connection outside the pool; the caller closes it. Raises as asyncpg does."""
        limit_ms = str(int(self._deadline_s * 1000))
        return await asyncpg.connect(
            self._dsn,
            timeout=self._deadline_s if timeout_s is None else timeout_s,
            # A standby knows less than was answered; a DSN may name several servers.
            target_session_attrs=SessionAttribute.primary,
            server_settings={
                "application_name": "quorumlog-metadata",
                # Without it a crash of the database takes back what was answered (I4).
                "synchronous_commit": "on",
                # What a statement sees after it waited for a lock is what the one before it left:
                # the stores rest on that, whatever the database's default is.
                "default_transaction_isolation": "read committed",
                "statement_timeout": limit_ms,
                "idle_in_transaction_session_timeout": limit_ms,
            }
            | settings,
        )

    async def close(self) -> None:
        """Cut all idle connections."""
        while self._idle:
            self._idle.pop().terminate()

    async def _connection(self, deadline: float) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        left_s = deadline - asyncio.get_running_loop().time()
        try:
            connection = await self.connect(max(left_s, 0.01))
        except _AWAY as error:
            self.is_up = False
            raise MetadataUnavailable("the database can't be reached") from error
        try:
            await self._compare(connection, deadline)
        except Exception as error:
            if not _has_gone(connection, error):
                raise
            self.is_up = False
            raise MetadataUnavailable("the database can't be reached") from error
        return connection

    async def _compare(self, connection: Connection, deadline: float) -> None:
        """See whether the database that is there now has what the one before it answered."""
        if self._witness is None:
            return
        ledger_id, version = self._witness
        watchdog = asyncio.get_running_loop().call_at(deadline, connection.terminate)
        is_sound = False
        try:
            found = await connection.fetchval(
                "SELECT version FROM ledgers WHERE ledger_id = $1", ledger_id
            )
            is_sound = True
        finally:
            watchdog.cancel()
            if not is_sound:
                connection.terminate()
        if (found is None or found < version) and not self._lost:
            self._lost = (
                f"the database lost a change that it had answered: version {version} of ledger"
                f" {ledger_id}. Nothing is changed until a person has looked at it"
            )
            log.error("database-went-back", extra={"ledger_id": ledger_id, "version": version})

    async def _on(
        self, connection: Connection, work: Callable[[Connection], Awaitable[T]], deadline: float
    ) -> T:
        watchdog = asyncio.get_running_loop().call_at(deadline, connection.terminate)
        is_sound = False
        try:
            result = await work(connection)
            self.is_up = is_sound = True
            return result
        except Exception as error:
            if not _has_gone(connection, error):
                is_sound = True
                raise
            self.is_up = False
            # What broke this connection has most likely broken the others: find out anew, not by
            # one deadline each.
            await self.close()
            raise MetadataUnavailable(
                "the database did not answer in time or went away", outcome=UNKNOWN
            ) from error
        finally:
            watchdog.cancel()
            if is_sound and not connection.is_closed() and not connection.is_in_transaction():
                self._idle.append(connection)
            else:
                connection.terminate()


def _has_gone(connection: Connection, error: Exception) -> bool:
    """Whether it is the connection that failed, not what was asked of it.

    One that is cut between two steps of a statement makes asyncpg fail with an error of its own
    code (AttributeError), so what was raised does not tell; that it is closed does.
    """
    if isinstance(error, QuorumLogError):
        return False
    if connection.is_closed():
        return True
    # A ValueError is our own bug: a value that asyncpg can't encode.
    return isinstance(error, _AWAY) and not isinstance(error, ValueError)
