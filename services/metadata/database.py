"""Connections to Postgres that never hang, because all work ends within a deadline.

This module has its own pool. After a timeout, asyncpg's pool asks the server to cancel the
statement, and waits for the response, which may never arrive. This pool terminates the connection
instead, and the outcome of the work is unknown.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

import asyncpg
from asyncpg.connect_utils import SessionAttribute

from quorumlog import errors
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
"""Connect only to the primary, because a standby may lack acknowledged changes (rule 18)."""
_ROLLED_BACK: Final = "ERROR"
"""Severity of the errors that roll the transaction back. A FATAL error may end a session after the
commit."""

_LISTING_WAIT_S: Final = 1.0
"""How long a listing waits for other listings (chosen by judgement). A page takes 10 to 30 ms."""

_APPLICATION: Final = "quorumlog-metadata"

_WAITING: Final = (
    "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND datname = current_database()"
    f" AND application_name = '{_APPLICATION}'"
    " AND xact_start < clock_timestamp() - make_interval(secs => $1::float8)"
)
"""Counts abandoned commits of metadata processes that still wait for a synchronous standby."""

CONTAINED: Final = "SELECT attempt::text AS attempt FROM attempts WHERE attempt = ANY($1::uuid[])"
"""Selects the given tokens that the database contains (rule 18a)."""

SERVER: Final = "SELECT pg_postmaster_start_time()::text"
"""Reads the start time of the Postgres server, which identifies the server."""


_SETTINGS: Final = "SELECT name, setting FROM pg_settings WHERE name = ANY($1::text[])"


class SettingsDropped(ConnectionError):
    """A pooler between this service and Postgres drops the connection's settings."""


class Connection(_Connection):
    """A connection to Postgres."""

    is_new = True
    settled: str | None = None
    """The attempt token that the current transaction wrote, if any."""
    counted: Counter[str]
    """The current transaction's counts, which are added to the metrics after the commit."""
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
    # A restore may drop and recreate tables that are in use.
    asyncpg.UndefinedTableError,
    asyncpg.UndefinedFunctionError,
    asyncpg.InvalidCachedStatementError,
    asyncpg.OutdatedSchemaCacheError,
    # A pooler may give each transaction another connection.
    asyncpg.InvalidSQLStatementNameError,
    asyncpg.DuplicatePreparedStatementError,
)
"""Errors of an unavailable database: shutting down, read-only, full, locked or unreachable."""


class Database:
    """A pool of connections to Postgres. The server may fail and return at any time.

    Invariants: there are at most `connections_max` connections, and listings use a tenth of them. A
    failed connection is never reused. A transaction is committed, or a proof returned, only after
    a check that the database has every change known to be acknowledged (rule 18a).
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
        """`key_ring` encrypts ledgers' keys."""
        self._dsns = dsn_of_each(dsn)
        self._deadline_s = deadline_s
        self.key_ring = key_ring or KeyRing()
        self.clock = HeardClock(clock_difference_s)
        self._idle: list[Connection] = []
        self._slots = asyncio.Semaphore(connections_max)
        self._listings = asyncio.Semaphore(max(connections_max // 10, 1))
        """Connections for listings, which read many rows. More connections would slow down other
        work and not speed up listings: this process builds one page at a time (measured)."""
        self.reach = Reach(away="database-away", there="database-there", deadline_s=deadline_s)
        self.memory = Memory()
        self.is_open = False
        """Whether the tables are migrated to this release. Until then, no statement runs."""
        self.server = ""
        """Start time of the server of the latest connection. A promoted standby has another start
        time, and so does a server that was restored from its write-ahead log."""
        self.waiting_commits = 0
        """Number of abandoned commits that may still wait, inside Postgres, for a standby."""
        self.counted = Counter[str]()
        """Counts of this process's committed transactions, for the metrics."""
        self.asked_about: str | None = None
        """The `server` about which this process last queried the bookies; None at first."""

    @property
    def has_asked(self) -> bool:
        """Whether this process has queried the bookies about the current server. Until then, it
        must not change or prove rows, because it can't detect lost changes (rule 18a).
        """
        return self.asked_about == self.server

    async def run(
        self, work: Callable[[Connection], Awaitable[T]], *, deadline: float | None = None
    ) -> T:
        """Run `work` on a connection of the pool, outside a transaction. The wait for a connection
        takes at most half of the deadline. If work began later under overload, it would exceed the
        deadline and lose its connection.

        Raises: MetadataUnavailable within the deadline. The outcome is `unknown` if the work has
        begun, unless Postgres responds with an error.
        """
        if not self.is_open:
            raise errors.MetadataUnavailable("the database is not connected yet: retry")
        now = asyncio.get_running_loop().time()
        if deadline is None:
            deadline = now + self._deadline_s
        try:
            async with asyncio.timeout_at(now + (deadline - now) / 2):
                await self._slots.acquire()
        except TimeoutError as error:
            raise errors.MetadataUnavailable("all database connections are busy: retry") from error
        try:
            connection = await self._connection(deadline)
            result = await self._run_on(connection, work, deadline)
        finally:
            self._slots.release()
        return result

    async def read(
        self, work: Callable[[Connection], Awaitable[T]], *, deadline: float | None = None
    ) -> T:
        """Like `run`, but check the request's witnesses in the snapshot that `work` reads. A
        deletion may rest on the result, so no restore may come between check and read (rule 18a).

        Raises: MetadataUnavailable; DatabaseWentBack, only if the request presents witnesses.
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
        """Like `read`, for listings, which share a tenth of the connections (at least one).

        Raises: MetadataBusy if other listings use all of these connections; the errors of `read`.
        """
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        try:
            async with asyncio.timeout(min(_LISTING_WAIT_S, self._deadline_s)):
                await self._listings.acquire()
        except TimeoutError as error:
            raise errors.MetadataBusy(
                "all connections for listings (a tenth of CONNECTIONS_MAX) are in use: retry"
            ) from error
        try:
            return await self.read(work, deadline=deadline)
        finally:
            self._listings.release()

    async def transact(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Run `work` in one transaction, which is rolled back if `work` raises.

        Raises: MetadataUnavailable like `run`, and while earlier changes wait for a standby;
        DatabaseWentBack, without a change.
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
                    # Check last, when the transaction's locks keep a restore from replacing tables.
                    seen = await self._check(connection)
            except errors.DatabaseWentBack:
                raise
            except errors.QuorumLogError:
                # Also check before an error, because clients act on the version in the error.
                await self._check(connection)
                raise
            if connection.settled is not None:
                self.memory.note_committed(connection.settled, seen)
                self._return_witnesses(PRESENTED.get())
            self.counted += connection.counted
            return result

        try:
            return await self.run(transaction)
        except errors.MetadataUnavailable as error:
            self.waiting_commits += error.outcome == errors.UNKNOWN
            raise

    async def _refuse_if_some_wait(self, connection: Connection) -> None:
        """Raise MetadataUnavailable while an abandoned change still waits on the server for its
        synchronous standby, because new changes would have to wait too.

        A waiting change keeps a connection of the server until the standby is back. Cancelling the
        wait would commit the change without the standby. Readers would then act on a change that a
        failover loses (rule 18a).
        """
        if not self.waiting_commits:
            return
        await self.count_waiting(connection)
        if self.waiting_commits:
            raise errors.MetadataUnavailable(
                f"{self.waiting_commits} changes wait for the database's synchronous standby:"
                " retry when it is back"
            )

    async def count_waiting(self, connection: Connection) -> None:
        """Count the abandoned changes that still wait on the server for a standby."""
        self.waiting_commits = await connection.fetchval(_WAITING, self._deadline_s)

    async def probe(self) -> None:
        """Check that the database responds, accepts changes, and has all known acknowledged changes.

        Raises: MetadataUnavailable, DatabaseWentBack.
        """
        await self.run(self._check)
        if (
            await self.run(lambda connection: connection.fetchval("SHOW transaction_read_only"))
            == "on"
        ):
            raise errors.MetadataUnavailable("the database is read-only: make it accept changes")

    async def learn(self, presented: Presented) -> None:
        """Check witnesses that do not come from a request, such as a bookie's witnesses.

        Raises: MetadataUnavailable, DatabaseWentBack.
        """
        await self.run(lambda connection: self._compare(connection, presented))

    async def _check(self, connection: Connection) -> set[str]:
        """Check that the database contains all known tokens, and return them."""
        had_asked = self.has_asked
        wanted = await self._compare(connection, PRESENTED.get())
        if missing := self.memory.missing:
            raise self.memory.error(missing)  # a concurrent check has found missing tokens
        # Also require `had_asked`: `_compare` lacks tokens that bookies reported while it ran.
        if not (had_asked and self.has_asked):
            raise errors.MetadataUnavailable("the check of the database is still running: retry")
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
        # Return all witnesses or none, because only all of them replace the presented witnesses.
        if asked is not None and len(witnesses) <= WITNESSES_MAX:
            asked.answer = witnesses

    async def connect(self, timeout_s: float | None = None, **settings: str) -> Connection:
        """Open a connection to the primary outside the pool. The caller closes the connection.

        Raises: asyncpg's errors; SeveralPrimaries, SettingsDropped (ConnectionErrors).
        """
        async with asyncio.timeout(self._deadline_s if timeout_s is None else timeout_s):
            if len(self._dsns) == 1:
                return await self._connect(self._dsns[0], settings)
            return await connect_to_primary(
                [self._connect(dsn, settings) for dsn in self._dsns], self._has_history
            )

    async def _connect(self, dsn: str, settings: dict[str, str]) -> Connection:
        # The limit is below the deadline, at which a terminated connection makes the outcome unknown.
        limit_ms = str(int(self._deadline_s * 750))
        lock_ms = str(int(self._deadline_s * 400))
        wanted = {
            "application_name": _APPLICATION,
            # With any other value, a crash of the database could lose acknowledged changes (I4).
            "synchronous_commit": "on",
            # The stores rely on this isolation level, whatever the database's default is. After a
            # wait for a lock, a statement sees the changes that the lock's previous holder committed.
            "default_transaction_isolation": "read committed",
            "statement_timeout": limit_ms,
            # statement_timeout does not apply to a COMMIT. A COMMIT may wait for the lock of an
            # earlier COMMIT with a notification, which in turn waits for a standby.
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
                # asyncpg raises AttributeError if a connection breaks between two steps.
                raise ConnectionError("the connection to Postgres was lost") from error
            connection.terminate()
            raise
        connection.key_ring, connection.clock = self.key_ring, self.clock
        connection.counted = Counter()
        return connection

    async def _has_history(self, connection: Connection) -> bool:
        """Whether a server has every change known to be acknowledged (rule 18a)."""
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
            raise errors.MetadataUnavailable("the database is unreachable: retry") from error
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
            # Probably all connections are broken. Close them, to avoid a timeout on each.
            await self.close()
            if isinstance(error, asyncpg.PostgresError) and error.severity_en == _ROLLED_BACK:
                raise errors.MetadataUnavailable(
                    f"the database rejected the statement: {error}"
                ) from error
            raise errors.MetadataUnavailable(
                "the database did not respond in time, or closed the connection: retry",
                outcome=errors.UNKNOWN,
            ) from error
        finally:
            watchdog.cancel()
            if is_sound and not connection.is_closed() and not connection.is_in_transaction():
                self._idle.append(connection)
            else:
                connection.terminate()


async def _check_settings(connection: Connection, wanted: Mapping[str, str]) -> None:
    """Raise SettingsDropped unless the connection has the requested settings."""
    found = {row["name"]: row["setting"] for row in await connection.fetch(_SETTINGS, list(wanted))}
    if dropped := sorted(name for name, value in wanted.items() if found.get(name) != value):
        raise SettingsDropped(
            f"the connection to Postgres lacks the settings {', '.join(dropped)}, probably because of a"
            " pooler (ignore_startup_parameters of PgBouncer): connect to Postgres directly"
        )


async def ages_count(connection: Connection) -> bool:
    """Whether rows may be deleted by age. False while Postgres' clock may be wrong (rule 26c)."""
    now_ms = await connection.fetchval("SELECT (extract(epoch FROM now()) * 1000)::float8")
    return not connection.clock.hear(now_ms)


@dataclass(eq=False)
class RowStore:
    """The base class of the stores, which keep rows in the database.

    Each decorator below wraps a store's method. A method of `Database` supplies the connection.
    """

    database: Database


S = TypeVar("S", bound=RowStore)
Method = Callable[Concatenate[S, Connection, P], Awaitable[T]]
"""A store's method as defined, with a connection as first parameter."""
ConnectedCall = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]
"""A store's method as called, without the connection."""


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
"""For reads outside a transaction. Must not change data, because no witness is checked (rule 18a)."""
proven = _connected_by("read")
"""For reads from a database that must have all of the request's witnesses."""
listing = _connected_by("list")
"""Like `proven`, but on the connections for listings."""
transactional = _connected_by("transact")
"""For changes. The method runs in one transaction."""


def _is_connection_lost(connection: Connection, error: Exception) -> bool:
    """Whether the connection failed, rather than the work.

    If a connection breaks between two steps of a statement, asyncpg raises an internal error
    (AttributeError). Therefore the connection's state decides, not the error's class.
    """
    if isinstance(error, errors.QuorumLogError):
        return False
    if connection.is_closed():
        return True
    # A ValueError means that asyncpg can't encode a value, which is a defect of this service.
    return isinstance(error, _UNAVAILABLE) and not isinstance(error, ValueError)
