"""Connections to Postgres that never hang: every piece of work ends within one deadline.

A small pool of our own: asyncpg's asks the server to cancel a statement that ran out of time and
waits for that, which is one more thing that hangs when the server does. Here the connection is
cut instead, and what became of the work is unknown.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, TypeVar

import asyncpg
from asyncpg.connect_utils import SessionAttribute

from quorumlog.errors import UNKNOWN, DatabaseWentBack, MetadataUnavailable, QuorumLogError
from quorumlog.wire.witnesses import WITNESSES_MAX
from services.metadata.memory import PRESENTED, Memory

if TYPE_CHECKING:
    _Connection = asyncpg.Connection[asyncpg.Record]
else:
    _Connection = asyncpg.Connection

T = TypeVar("T")

_SERVER: Final = SessionAttribute.primary
"""Of those that a DSN names: a standby knows less than was answered (rule 18)."""

CONTAINED: Final = "SELECT attempt::text AS attempt FROM attempts WHERE attempt = ANY($1::uuid[])"
"""Which of these tokens the database contains (rule 18a)."""


class Connection(_Connection):
    """A connection to Postgres."""

    settled: str | None = None
    """The attempt token that the transaction on it has written, if any."""


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
    # A restore takes tables away and brings them again, under whoever uses them.
    asyncpg.UndefinedTableError,
    asyncpg.UndefinedFunctionError,
    asyncpg.InvalidCachedStatementError,
    asyncpg.OutdatedSchemaCacheError,
)
"""What says that the database can't do it now: shutting down, read-only, full, locked, gone."""


class Database:
    """Postgres, which may vanish and come back at any time.

    Invariants: at most `connections_max` connections; one that failed is never used again; no
    transaction is committed, and no proof given, that did not see all that is known to have been
    answered (rule 18a).
    """

    def __init__(self, dsn: str, *, connections_max: int, deadline_s: float) -> None:
        self._dsn = dsn
        self._deadline_s = deadline_s
        self._idle: list[Connection] = []
        self._slots = asyncio.Semaphore(connections_max)
        self.is_up = False
        """Whether the last piece of work found the database there."""
        self.memory = Memory()
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

    async def read(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """As `run`. What a request presents is looked for in the very snapshot that `work` reads, so
        that no restore comes in between: a deletion may rest on the answer (rule 18a).

        Raises: DatabaseWentBack, where the request presents witnesses.
        """
        asked = PRESENTED.get()
        if asked is None or not asked.witnesses:
            return await self.run(work)

        async def proven(connection: Connection) -> T:
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                await self._check(connection)
                return await work(connection)

        return await self.run(proven)

    async def transact(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Do `work` in one transaction: all of it or, when it raises, nothing.

        Raises: MetadataUnavailable, as `run` does; DatabaseWentBack, and nothing is done.
        """

        async def transaction(connection: Connection) -> T:
            connection.settled = None
            try:
                async with connection.transaction():
                    result = await work(connection)
                    # Last: with the locks that it holds by now nothing is put in the tables' place.
                    seen = await self._check(connection)
            except DatabaseWentBack:
                raise
            except QuorumLogError:
                # A refusal is acted upon as well: who hears of another version gives up its own.
                await self._check(connection)
                raise
            if connection.settled is not None:
                self.memory.answered(connection.settled, seen)
                self._hand_back()
            return result

        return await self.run(transaction)

    async def look(self) -> None:
        """See whether the database is there, with all that it is known to have answered.

        Raises: MetadataUnavailable, DatabaseWentBack.
        """
        await self.run(self._check)

    async def _check(self, connection: Connection) -> set[str]:
        """The tokens that the database was found to contain, all that are known of.

        Raises: DatabaseWentBack where it lacks one.
        """
        asked = PRESENTED.get()
        presented = self.memory.presented(asked)
        wanted = {*self.memory.wanted, *presented}
        found = await connection.fetch(CONTAINED, sorted(wanted))
        holder = "" if asked is None else asked.holder
        self.memory.compare(wanted, (record["attempt"] for record in found), holder=holder)
        self._hand_back()
        return wanted

    def _hand_back(self) -> None:
        asked = PRESENTED.get()
        witnesses = self.memory.witnesses
        # Not some of them: they stand for what was presented as a whole.
        if asked is not None and len(witnesses) <= WITNESSES_MAX:
            asked.answer = witnesses

    async def connect(self, timeout_s: float | None = None, **settings: str) -> Connection:
        """A connection outside the pool; the caller closes it. Raises as asyncpg does."""
        limit_ms = str(int(self._deadline_s * 1000))
        return await asyncpg.connect(
            self._dsn,
            connection_class=Connection,
            timeout=self._deadline_s if timeout_s is None else timeout_s,
            target_session_attrs=_SERVER,
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
        return connection

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
