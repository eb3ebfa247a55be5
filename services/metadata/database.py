"""Connections to Postgres that never hang: every piece of work ends within one deadline.

This module has its own pool. After a timeout, asyncpg's pool asks the server to cancel the
statement, and waits for the answer, which hangs if the server hangs. This pool terminates the
connection instead, and the outcome of the work is unknown.
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
"""Connect only to the primary of a DSN: a standby may lack acknowledged changes (rule 18)."""
_ROLLED_BACK: Final = "ERROR"
"""Errors of this severity roll the transaction back. A FATAL error may end a session after the
commit."""

_LISTING_WAIT_S: Final = 1.0
"""How long a listing waits for earlier ones. Chosen by judgement: a page takes 10 to 30 ms."""

_APPLICATION: Final = "quorumlog-metadata"

_WAITING: Final = (
    "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND datname = current_database()"
    f" AND application_name = '{_APPLICATION}'"
    " AND xact_start < clock_timestamp() - make_interval(secs => $1::float8)"
)
"""Counts commits that metadata processes gave up, and that wait for a synchronous standby."""

CONTAINED: Final = "SELECT attempt::text AS attempt FROM attempts WHERE attempt = ANY($1::uuid[])"
"""Selects those of the given tokens that the database contains (rule 18a)."""

SERVER: Final = "SELECT pg_postmaster_start_time()::text"
"""Reads the start time of the Postgres server, which identifies the server."""


_SETTINGS: Final = "SELECT name, setting FROM pg_settings WHERE name = ANY($1::text[])"


class SettingsDropped(ConnectionError):
    """A pooler between this service and Postgres drops settings of the connection."""


class Connection(_Connection):
    """A connection to Postgres."""

    is_new = True
    settled: str | None = None
    """The attempt token that the current transaction wrote, if any."""
    counted: Counter[str]
    """What the current transaction did, to be added to the metrics once it is committed."""
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
    # A restore may drop tables and create them again while they are in use.
    asyncpg.UndefinedTableError,
    asyncpg.UndefinedFunctionError,
    asyncpg.InvalidCachedStatementError,
    asyncpg.OutdatedSchemaCacheError,
    # A pooler may give each transaction another connection.
    asyncpg.InvalidSQLStatementNameError,
    asyncpg.DuplicatePreparedStatementError,
)
"""Errors of a database that can't work now: shutting down, read-only, full, locked or gone."""


class Database:
    """A pool of connections to Postgres, a server that may vanish and return at any time.

    Invariants: there are at most `connections_max` connections, and listings use a tenth of them. A
    failed connection is never reused. A transaction is committed, and a proof returned, only if it
    saw every change that is known to be acknowledged (rule 18a).
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
        """`key_ring` encrypts the keys of ledgers."""
        self._dsns = dsn_of_each(dsn)
        self._deadline_s = deadline_s
        self.key_ring = key_ring or KeyRing()
        self.clock = HeardClock(clock_difference_s)
        self._idle: list[Connection] = []
        self._slots = asyncio.Semaphore(connections_max)
        self._listings = asyncio.Semaphore(max(connections_max // 10, 1))
        """Connections for listings, which read many rows. More connections would not list faster,
        since this process builds one page at a time, and would delay all other work (measured)."""
        self.reach = Reach(away="database-away", there="database-there", deadline_s=deadline_s)
        self.memory = Memory()
        self.is_open = False
        """Whether the tables were migrated to this release. Until then no statement runs."""
        self.server = ""
        """Start time of the server that was last connected to. A promoted standby has another start
        time, as has a server that was restored from its write-ahead log."""
        self.waiting_commits = 0
        """Given-up changes that waited on the server when last counted, plus those since."""
        self.counted = Counter[str]()
        """What committed transactions of this process did, for the metrics."""
        self.asked_about: str | None = None
        """The `server` about which this process last asked the bookies; None if it never asked."""

    @property
    def has_asked(self) -> bool:
        """Whether this process has asked the bookies about the current server. Until then the
        process changes and proves nothing: it could not notice lost changes (rule 18a).
        """
        return self.asked_about == self.server

    async def run(
        self, work: Callable[[Connection], Awaitable[T]], *, deadline: float | None = None
    ) -> T:
        """Run `work` on a connection of the pool, outside a transaction. The wait for a connection
        takes at most half the time: under overload, work that begins later would be cut off with
        its connection.

        Raises: MetadataUnavailable within the deadline, with the outcome `unknown` if the work had
        begun, unless Postgres answered with an error.
        """
        if not self.is_open:
            raise errors.MetadataUnavailable("the database was not reached yet")
        now = asyncio.get_running_loop().time()
        if deadline is None:
            deadline = now + self._deadline_s
        try:
            async with asyncio.timeout_at(now + (deadline - now) / 2):
                await self._slots.acquire()
        except TimeoutError as error:
            raise errors.MetadataUnavailable("every connection to the database is busy") from error
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
        deletion may rest on the answer, so no restore may come between check and read (rule 18a).

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
        """Like `read`, for listings, which share a tenth of the connections, at least one.

        Raises: MetadataBusy if other listings use all of these connections, and what `read` raises.
        """
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        try:
            async with asyncio.timeout(min(_LISTING_WAIT_S, self._deadline_s)):
                await self._listings.acquire()
        except TimeoutError as error:
            raise errors.MetadataBusy(
                "all connections for listings, a tenth of CONNECTIONS_MAX, are in use: retry"
            ) from error
        try:
            return await self.read(work, deadline=deadline)
        finally:
            self._listings.release()

    async def transact(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Run `work` in one transaction, which is rolled back if `work` raises.

        Raises: MetadataUnavailable like `run`, and while earlier changes wait for a standby;
        DatabaseWentBack, after which nothing was changed.
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
                    # Check last: the locks held now keep a restore from replacing the tables.
                    seen = await self._check(connection)
            except errors.DatabaseWentBack:
                raise
            except errors.QuorumLogError:
                # Check before a refusal too, because a client acts on the version in the error.
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
        """Raise MetadataUnavailable while a given-up change still waits on the server for its
        synchronous standby: a new change would wait behind it.

        A waiting change keeps a connection of the server until the standby is back. Cancelling the
        wait would commit the change without the standby: readers would act on what a failover loses
        (rule 18a).
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
        """Count the given-up changes that still wait on the server for a standby."""
        self.waiting_commits = await connection.fetchval(_WAITING, self._deadline_s)

    async def probe(self) -> None:
        """Check that the database answers, accepts changes, and has all known acknowledged changes.

        Raises: MetadataUnavailable, DatabaseWentBack.
        """
        await self.run(self._check)
        if (
            await self.run(lambda connection: connection.fetchval("SHOW transaction_read_only"))
            == "on"
        ):
            raise errors.MetadataUnavailable("the database is read-only")

    async def learn(self, presented: Presented) -> None:
        """Check witnesses that no request presents, such as those that a bookie reports.

        Raises: MetadataUnavailable, DatabaseWentBack.
        """
        await self.run(lambda connection: self._compare(connection, presented))

    async def _check(self, connection: Connection) -> set[str]:
        """Check that the database contains all known tokens, and return them."""
        had_asked = self.has_asked
        wanted = await self._compare(connection, PRESENTED.get())
        if missing := self.memory.missing:
            raise self.memory.error(missing)  # another check found them missing meanwhile
        # Require `had_asked` too: tokens that bookies reported since then were not compared.
        if not (had_asked and self.has_asked):
            raise errors.MetadataUnavailable("the bookies are being asked about the database")
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
        # Return all or none, because only all together stand for the presented witnesses.
        if asked is not None and len(witnesses) <= WITNESSES_MAX:
            asked.answer = witnesses

    async def connect(self, timeout_s: float | None = None, **settings: str) -> Connection:
        """Open a connection to the primary outside the pool. The caller closes the connection.

        Raises: what asyncpg raises; SeveralPrimaries, SettingsDropped (ConnectionErrors).
        """
        async with asyncio.timeout(self._deadline_s if timeout_s is None else timeout_s):
            if len(self._dsns) == 1:
                return await self._connect(self._dsns[0], settings)
            return await connect_to_primary(
                [self._connect(dsn, settings) for dsn in self._dsns], self._has_history
            )

    async def _connect(self, dsn: str, settings: dict[str, str]) -> Connection:
        # Below the deadline: a connection that is cut at the deadline leaves the outcome unknown.
        limit_ms = str(int(self._deadline_s * 750))
        lock_ms = str(int(self._deadline_s * 400))
        wanted = {
            "application_name": _APPLICATION,
            # With another value, a crash of the database loses acknowledged changes (I4).
            "synchronous_commit": "on",
            # The stores rely on this isolation level, whatever the database's default is: after
            # waiting for a lock, a statement sees what the lock's previous holder committed.
            "default_transaction_isolation": "read committed",
            "statement_timeout": limit_ms,
            # statement_timeout does not apply to a COMMIT, which waits for the lock of an earlier
            # COMMIT with a notification while the earlier one waits for a standby.
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
                # asyncpg raises AttributeError if a connection is cut between two steps.
                raise ConnectionError("the connection was lost while it was checked") from error
            connection.terminate()
            raise
        connection.key_ring, connection.clock = self.key_ring, self.clock
        connection.counted = Counter()
        return connection

    async def _has_history(self, connection: Connection) -> bool:
        """Whether a server has every change that is known to be acknowledged (rule 18a)."""
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
            raise errors.MetadataUnavailable("the database can't be reached") from error
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
            # Probably all connections are broken: close them, instead of losing a deadline on each.
            await self.close()
            if isinstance(error, asyncpg.PostgresError) and error.severity_en == _ROLLED_BACK:
                raise errors.MetadataUnavailable(
                    f"the database can't do this now: {error}"
                ) from error
            raise errors.MetadataUnavailable(
                "the database did not answer in time or went away", outcome=errors.UNKNOWN
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
    """Whether rows may be deleted by age: False while Postgres' clock is doubted (rule 26c)."""
    now_ms = await connection.fetchval("SELECT (extract(epoch FROM now()) * 1000)::float8")
    return not connection.clock.hear(now_ms)


@dataclass(eq=False)
class RowStore:
    """The base of the stores, which keep rows in the database.

    Each decorator below passes a connection to a store's method, by a method of `Database`.
    """

    database: Database


S = TypeVar("S", bound=RowStore)
Method = Callable[Concatenate[S, Connection, P], Awaitable[T]]
"""A store's method as it is written, with a connection as its first parameter."""
ConnectedCall = Callable[Concatenate[S, P], Coroutine[Any, Any, T]]
"""A store's method as it is called, without the connection."""


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
"""For reads outside a transaction. No witness is checked (rule 18a), so nothing may be changed."""
proven = _connected_by("read")
"""For reads whose answer must come from a database with all of the request's witnesses."""
listing = _connected_by("list")
"""Like `proven`, on the connections that are reserved for listings."""
transactional = _connected_by("transact")
"""For changes: the method runs in one transaction."""


def _is_connection_lost(connection: Connection, error: Exception) -> bool:
    """Whether the connection failed, and not the work on it.

    If a connection is cut between two steps of a statement, asyncpg raises an internal error
    (AttributeError). So a closed connection decides, not the error's class.
    """
    if isinstance(error, errors.QuorumLogError):
        return False
    if connection.is_closed():
        return True
    # A ValueError means that asyncpg can't encode a value, which is a defect of this service.
    return isinstance(error, _UNAVAILABLE) and not isinstance(error, ValueError)
