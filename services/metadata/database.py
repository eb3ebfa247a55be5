"""Connections to Postgres that never hang: every piece of work ends within one deadline.

The pool is our own: asyncpg's asks the server to cancel a statement that timed out and waits for
the answer, which hangs when the server does. Here the connection is terminated instead, and the
outcome of the work is unknown.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

import asyncpg
from asyncpg.connect_utils import SessionAttribute

from quorumlog.errors import (
    UNKNOWN,
    DatabaseWentBack,
    MetadataBusy,
    MetadataUnavailable,
    QuorumLogError,
)
from quorumlog.net.timers import HeardClock
from quorumlog.protocol.clock import CLOCK_DIFFERENCE_S
from quorumlog.wire.bodies import WITNESSES_MAX
from services.metadata.audit import keep as keep_audited
from services.metadata.memory import PRESENTED, Memory, Presented
from services.metadata.sealing import KeyRing
from services.metadata.servers import Reach, connect_to_primary, dsn_of_each

if TYPE_CHECKING:
    _Connection = asyncpg.Connection[asyncpg.Record]
else:
    _Connection = asyncpg.Connection

T = TypeVar("T")
P = ParamSpec("P")

_PRIMARY_ONLY: Final = SessionAttribute.primary
"""Of a DSN's servers use the primary: a standby may lack answered changes (rule 18)."""
_ROLLED_BACK: Final = "ERROR"
"""After an error of this severity Postgres rolls the transaction back. FATAL also ends the session, possibly after the commit."""

_LISTING_WAIT_S: Final = 1.0
"""How long a listing waits for those before it; a page takes some 10 to 30 ms (taste)."""

_APPLICATION: Final = "quorumlog-metadata"

_WAITING: Final = (
    "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND datname = current_database()"
    f" AND application_name = '{_APPLICATION}'"
    " AND xact_start < clock_timestamp() - make_interval(secs => $1::float8)"
)
"""Commits of this or another metadata process that wait for a synchronous standby, and for which nobody waits."""

CONTAINED: Final = "SELECT attempt::text AS attempt FROM attempts WHERE attempt = ANY($1::uuid[])"
"""Which of these tokens the database contains (rule 18a)."""

SERVER: Final = "SELECT pg_postmaster_start_time()::text"
"""Which server this is, since when."""


_SETTINGS: Final = "SELECT name, setting FROM pg_settings WHERE name = ANY($1::text[])"


class SettingsDropped(ConnectionError):
    """Something between this service and Postgres drops settings of the connection."""


class Connection(_Connection):
    """A connection to Postgres."""

    is_new = True
    settled: str | None = None
    """The attempt token written by the transaction on this connection, if any."""
    counted: Counter[str]
    """What the transaction on this connection has done, to be counted once it is committed."""
    key_ring = KeyRing()
    clock = HeardClock()


_UNAVAILABLE: Final = (
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
    # A restore drops tables and creates them again while they are in use.
    asyncpg.UndefinedTableError,
    asyncpg.UndefinedFunctionError,
    asyncpg.InvalidCachedStatementError,
    asyncpg.OutdatedSchemaCacheError,
    # A pooler gives each transaction another connection.
    asyncpg.InvalidSQLStatementNameError,
    asyncpg.DuplicatePreparedStatementError,
)
"""Errors of a database that cannot work now: shutting down, read-only, full, locked, gone."""


class Database:
    """Postgres, which may vanish and return at any time.

    Invariants: at most `connections_max` connections, of which listings have a tenth; a failed one is never reused; a transaction
    is committed, and a proof given, only if it saw every change known to have been answered (rule
    18a).
    """

    def __init__(
        self,
        dsn: str,
        *,
        connections_max: int,
        deadline_s: float,
        key_ring: KeyRing | None = None,
        clock_difference_s: float = CLOCK_DIFFERENCE_S,
    ) -> None:
        """`key_ring` seals the keys of ledgers."""
        self._dsns = dsn_of_each(dsn)
        self._deadline_s = deadline_s
        self.key_ring = key_ring or KeyRing()
        self.clock = HeardClock(clock_difference_s)
        self._idle: list[Connection] = []
        self._slots = asyncio.Semaphore(connections_max)
        self._listings = asyncio.Semaphore(max(connections_max // 10, 1))
        """Connections for what reads many rows. More would list no faster, since this process makes one page at a time,
        and everything else would wait for more of them (measured)."""
        self.reach = Reach(away="database-away", there="database-there", deadline_s=deadline_s)
        self.memory = Memory()
        self.is_open = False
        """Whether the tables are of this version; until then no statement runs."""
        self.server = ""
        """When the server started that was connected to last: a standby that took over is another one, and
        so is one that was restored from its write-ahead log."""
        self.waiting_commits = 0
        """Changes that waited on the server when they were counted, and those that were given up since."""
        self.counted = Counter[str]()
        """What committed transactions of this process have done."""
        self.asked_about: str | None = None
        """The server about which this process has asked the bookies what they know of it."""

    @property
    def has_asked(self) -> bool:
        """Whether this process has asked the bookies what they know of the database. Until then nothing is
        changed or proven: nobody here would notice a database that went back (rule 18a).
        """
        return self.asked_about == self.server

    async def run(
        self, work: Callable[[Connection], Awaitable[T]], *, deadline: float | None = None
    ) -> T:
        """Run `work` on a connection of its own, outside a transaction. Half the time is for the work: in a crowd
        everybody would get a connection late, be cut in the middle of the work, and cost the next one a new connection.

        Raises: MetadataUnavailable within the deadline; its outcome is `unknown` once the work has begun, unless Postgres
        answered with an error.
        """
        if not self.is_open:
            raise MetadataUnavailable("the database was not reached yet")
        now = asyncio.get_running_loop().time()
        if deadline is None:
            deadline = now + self._deadline_s
        try:
            async with asyncio.timeout_at(now + (deadline - now) / 2):
                await self._slots.acquire()
        except TimeoutError as error:
            raise MetadataUnavailable("every connection to the database is busy") from error
        try:
            connection = await self._connection(deadline)
            result = await self._run_on(connection, work, deadline)
        finally:
            self._slots.release()
        return result

    async def read(
        self, work: Callable[[Connection], Awaitable[T]], *, deadline: float | None = None
    ) -> T:
        """Like `run`. The request's witnesses are checked in the same snapshot that `work` reads,
        so that no restore comes in between: a deletion may rest on the answer (rule 18a).

        Raises: DatabaseWentBack if the request presents witnesses.
        """
        asked = PRESENTED.get()
        if asked is None or not asked.witnesses:
            return await self.run(work, deadline=deadline)

        async def proven(connection: Connection) -> T:
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                await self._check(connection)
                return await work(connection)

        return await self.run(proven, deadline=deadline)

    async def list(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Like `read`, for what reads many rows: a tenth of the connections is for that, one at least.

        Raises: MetadataBusy where others have them all.
        """
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        try:
            async with asyncio.timeout(min(_LISTING_WAIT_S, self._deadline_s)):
                await self._listings.acquire()
        except TimeoutError as error:
            raise MetadataBusy(
                "a tenth of CONNECTIONS_MAX is for listings, and all of it is in use"
            ) from error
        try:
            return await self.read(work, deadline=deadline)
        finally:
            self._listings.release()

    async def transact(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Run `work` in one transaction: all of it or, when it raises, nothing.

        Raises: MetadataUnavailable, like `run`, and while earlier changes wait for a standby; DatabaseWentBack, and
        nothing is done.
        """

        async def transaction(connection: Connection) -> T:
            connection.settled = None
            connection.counted.clear()
            await self._refuse_if_some_wait(connection)
            try:
                async with connection.transaction():
                    result = await work(connection)
                    if connection.settled is not None:
                        await keep_audited(connection)
                    # Check last: the locks now held keep the tables from being replaced.
                    seen = await self._check(connection)
            except DatabaseWentBack:
                raise
            except QuorumLogError:
                # A refusal needs the check too: a client acts on the version in it.
                await self._check(connection)
                raise
            if connection.settled is not None:
                self.memory.note_committed(connection.settled, seen)
                self._return_witnesses(PRESENTED.get())
            self.counted += connection.counted
            return result

        try:
            return await self.run(transaction)
        except MetadataUnavailable as error:
            self.waiting_commits += error.outcome == UNKNOWN
            raise

    async def _refuse_if_some_wait(self, connection: Connection) -> None:
        """Raise MetadataUnavailable while a given-up change waits on the server for its synchronous standby: this one
        would wait behind it.

        Each keeps a connection of the server until the standby is back, though it is closed here. Cancelled, it would
        be committed without the standby: readers would act on what a failover loses (rule 18a).
        """
        if not self.waiting_commits:
            return
        await self.count_waiting(connection)
        if self.waiting_commits:
            raise MetadataUnavailable(
                f"{self.waiting_commits} changes wait for the database's synchronous standby: no more are taken"
            )

    async def count_waiting(self, connection: Connection) -> None:
        """Count the changes that wait on the server for a standby, and nobody for them."""
        self.waiting_commits = await connection.fetchval(_WAITING, self._deadline_s)

    async def probe(self) -> None:
        """Check that the database answers and takes changes, with all changes known to have been answered.

        Raises: MetadataUnavailable, DatabaseWentBack.
        """
        await self.run(self._check)
        if (
            await self.run(lambda connection: connection.fetchval("SHOW transaction_read_only"))
            == "on"
        ):
            raise MetadataUnavailable("the database is read-only")

    async def learn(self, presented: Presented) -> None:
        """Check what somebody knows of the database, outside a request.

        Raises: MetadataUnavailable, DatabaseWentBack.
        """
        await self.run(lambda connection: self._compare(connection, presented))

    async def _check(self, connection: Connection) -> set[str]:
        """Check that the database contains all known tokens, and return them.

        Raises: DatabaseWentBack if it lacks one; MetadataUnavailable before the bookies were asked.
        """
        had_asked = self.has_asked
        wanted = await self._compare(connection, PRESENTED.get())
        if missing := self.memory.missing:
            raise self.memory.error(missing)  # learned while the database was looked at
        # Also before: what bookies told meanwhile was not looked for.
        if not (had_asked and self.has_asked):
            raise MetadataUnavailable("the bookies are asked what they know of the database")
        return wanted

    async def _compare(self, connection: Connection, asked: Presented | None) -> set[str]:
        wanted = {*self.memory.wanted, *self.memory.presented(asked)}
        found = await connection.fetch(CONTAINED, sorted(wanted))
        holder = "" if asked is None else asked.holder
        self.memory.compare(wanted, (record["attempt"] for record in found), holder=holder)
        self._return_witnesses(asked)
        return wanted

    def _return_witnesses(self, asked: Presented | None) -> None:
        witnesses = self.memory.witnesses
        # All or none: together they stand for what was presented.
        if asked is not None and len(witnesses) <= WITNESSES_MAX:
            asked.answer = witnesses

    async def connect(self, timeout_s: float | None = None, **settings: str) -> Connection:
        """A connection to the primary outside the pool; the caller closes it.

        Raises: as asyncpg does; SeveralPrimaries, SettingsDropped (ConnectionErrors).
        """
        async with asyncio.timeout(self._deadline_s if timeout_s is None else timeout_s):
            if len(self._dsns) == 1:
                return await self._connect(self._dsns[0], settings)
            return await connect_to_primary(
                [self._connect(dsn, settings) for dsn in self._dsns], self._has_history
            )

    async def _connect(self, dsn: str, settings: dict[str, str]) -> Connection:
        # Shorter than the deadline: at the deadline this process cuts the connection, and the outcome is unknown.
        limit_ms = str(int(self._deadline_s * 750))
        lock_ms = str(int(self._deadline_s * 400))
        wanted = {
            "application_name": _APPLICATION,
            # Without it a crash of the database loses answered changes (I4).
            "synchronous_commit": "on",
            # After waiting for a lock, a statement must see what the transaction before it
            # committed: the stores rely on that, whatever the database's default is.
            "default_transaction_isolation": "read committed",
            "statement_timeout": limit_ms,
            # A COMMIT has no timeout, but waits for the lock that an earlier COMMIT with a notification holds
            # while that waits for a standby.
            "lock_timeout": settings.get("statement_timeout", lock_ms),
            "idle_in_transaction_session_timeout": limit_ms,
        } | settings
        connection: Connection = await asyncpg.connect(
            dsn,
            connection_class=Connection,
            target_session_attrs=_PRIMARY_ONLY,
            server_settings=wanted,
        )
        try:
            await _check_settings(connection, wanted)
        except BaseException as error:
            if connection.is_closed() and isinstance(error, Exception):
                # asyncpg raises AttributeError where a connection is cut between two steps.
                raise ConnectionError("the connection was lost while it was checked") from error
            connection.terminate()
            raise
        connection.key_ring, connection.clock = self.key_ring, self.clock
        connection.counted = Counter()
        return connection

    async def _has_history(self, connection: Connection) -> bool:
        """Whether a server has every change known to have been answered (rule 18a)."""
        wanted = {*self.memory.wanted, *self.memory.presented(PRESENTED.get())}
        return not wanted or len(await connection.fetch(CONTAINED, sorted(wanted))) == len(wanted)

    async def close(self) -> None:
        """Terminate all idle connections."""
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
        except _UNAVAILABLE as error:
            self.reach.lost(error)
            raise MetadataUnavailable("the database can't be reached") from error
        return connection

    async def _run_on(
        self, connection: Connection, work: Callable[[Connection], Awaitable[T]], deadline: float
    ) -> T:
        watchdog = asyncio.get_running_loop().call_at(deadline, connection.terminate)
        is_sound = False
        try:
            if connection.is_new:
                self.server = await connection.fetchval(SERVER)
                connection.is_new = False
            result = await work(connection)
            is_sound = True
            self.reach.found()
            return result
        except Exception as error:
            if not _is_connection_lost(connection, error):
                is_sound = True
                raise
            self.reach.lost(error)
            # Probably all connections are broken: reconnect, rather than wait one deadline for
            # each.
            await self.close()
            if isinstance(error, asyncpg.PostgresError) and error.severity_en == _ROLLED_BACK:
                raise MetadataUnavailable(f"the database can't do this now: {error}") from error
            raise MetadataUnavailable(
                "the database did not answer in time or went away", outcome=UNKNOWN
            ) from error
        finally:
            watchdog.cancel()
            if is_sound and not connection.is_closed() and not connection.is_in_transaction():
                self._idle.append(connection)
            else:
                connection.terminate()


async def _check_settings(connection: Connection, wanted: Mapping[str, str]) -> None:
    """Raise SettingsDropped unless the connection has the settings that were asked for."""
    found = {row["name"]: row["setting"] for row in await connection.fetch(_SETTINGS, list(wanted))}
    if dropped := sorted(name for name, value in wanted.items() if found.get(name) != value):
        raise SettingsDropped(
            f"the connection to Postgres lacks {', '.join(dropped)}: a pooler in between drops them"
            " (ignore_startup_parameters of PgBouncer). Connect to Postgres itself"
        )


async def ages_count(connection: Connection) -> bool:
    """Whether what this transaction's `now()` makes old may be deleted for good (rule 26c)."""
    now_ms = await connection.fetchval("SELECT (extract(epoch FROM now()) * 1000)::float8")
    return not connection.clock.hear(now_ms)


@dataclass(eq=False)
class RowStore:
    """Rows in the database: the base of the stores.

    The decorators below give a store's method its connection; each says by which method of `Database`.
    """

    database: Database


S = TypeVar("S", bound=RowStore)
Method = Callable[Concatenate[S, Connection, P], Awaitable[T]]
"""A store's method as it is written, with a connection."""
ConnectedCall = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]
"""A store's method as it is called, without one."""


def _connected_by(name: str) -> Callable[[Method[S, P, T]], ConnectedCall[S, P, T]]:
    def decorated(method: Method[S, P, T]) -> ConnectedCall[S, P, T]:
        @wraps(method)
        async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            connect: Callable[[Callable[[Connection], Awaitable[T]]], Awaitable[T]]
            connect = getattr(self.database, name)
            return await connect(lambda connection: method(self, connection, *args, **kwargs))

        return call

    return decorated


plain = _connected_by("run")
"""Outside a transaction, for reads: nothing is checked (rule 18a), so nothing may be changed."""
proven = _connected_by("read")
"""The answer is checked against the request's witnesses."""
listing = _connected_by("list")
"""As `proven`, on the connections of listings."""
transactional = _connected_by("transact")
"""In one transaction."""


def _is_connection_lost(connection: Connection, error: Exception) -> bool:
    """Whether the connection failed, and not the work on it.

    A connection that is cut between two steps of a statement makes asyncpg raise an internal error
    (AttributeError), so the error's class does not tell; a closed connection does.
    """
    if isinstance(error, QuorumLogError):
        return False
    if connection.is_closed():
        return True
    # A ValueError is our own bug: asyncpg cannot encode the value.
    return isinstance(error, _UNAVAILABLE) and not isinstance(error, ValueError)
