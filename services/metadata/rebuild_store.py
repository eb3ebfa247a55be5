"""A rebuild's access to the database (rule 18d).

All statements run on one connection, which holds a lock until it is closed, so that only one rebuild
runs at a time. Witnesses are not checked, because rebuilds are for databases that went back in time.
A row is replaced only by a later version of this row.
"""

import logging
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final
from uuid import uuid4

from quorumlog.errors import InvalidRequest
from quorumlog.protocol.ids import member_name
from quorumlog.protocol.log import LogMetadata, ledgers_of
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.rebuild import (
    Action,
    Bookies,
    Decision,
    Held,
    Known,
    Registered,
    decide,
    newest_of,
)
from quorumlog.protocol.rebuild_log import (
    DeletedLogs,
    LedgerPlace,
    LogDecision,
    decide_log,
    is_opened,
)
from quorumlog.wire.bodies import STAND_IN, Cookie, json_of, token_of
from quorumlog.wire.rebuild_bodies import RebuildState
from services.metadata import audit
from services.metadata.attempts import record_attempt, record_change
from services.metadata.cookies import lock_name
from services.metadata.database import Connection, Database, RowStore, plain
from services.metadata.forks import forget_deleted, write_shared
from services.metadata.ledgers import ROW, body_of, bury, index_members, index_tags, row_of
from services.metadata.logs import ROW as LOG_ROW
from services.metadata.logs import body_of as log_body_of
from services.metadata.logs import bury_log
from services.metadata.logs import row_of as log_row_of
from services.metadata.losses import accept_tokens, lacking, note_lost
from services.metadata.sql import utc
from services.metadata.transactions import commit_placed

log = logging.getLogger(__name__)

_LOCK: Final = 0x71756F73
"""The number of an advisory lock, which no other code uses in this database."""
_STATEMENT_MS: Final = "60000"
_NO_DELETIONS: Final = DeletedLogs()
_UNWRITTEN_IDS: Final = 1000
"""How many ids are skipped, in case bookies lack copies of empty ledgers (by judgement)."""

_IS_EMPTY: Final = (
    "SELECT NOT EXISTS (SELECT FROM ledgers) AND NOT EXISTS (SELECT FROM logs)"
    " AND NOT EXISTS (SELECT FROM cookies) AND NOT EXISTS (SELECT FROM transactions)"
)

_MADE: Final = (
    "unnest($1::bigint[], $2::bigint[], $3::text[], $4::text[], $5::text[], $6::bigint[], $7::text[])"
    " AS made (id, version, attempt, body, created_at, first_offset, lineage)"
)


class RebuildStore(RowStore):
    """Reports whether the database is empty, and begins rebuilds."""

    @plain
    async def state(self, connection: Connection) -> RebuildState:
        """Whether the database is empty or has cookies of a rebuild, for bookies without a cookie."""
        return RebuildState(
            is_empty=await connection.fetchval(_IS_EMPTY),
            was_rebuilt=await connection.fetchval("SELECT rebuilt_at IS NOT NULL FROM cluster"),
        )

    @asynccontextmanager
    async def begin(self) -> AsyncIterator["RebuildTables"]:
        """Open the tables for a rebuild. Raises: InvalidRequest while another rebuild runs."""
        connection = await self.database.connect(
            statement_timeout=_STATEMENT_MS, idle_in_transaction_session_timeout=_STATEMENT_MS
        )
        try:
            if not await connection.fetchval("SELECT pg_try_advisory_lock($1)", _LOCK):
                raise InvalidRequest("another rebuild or acceptance is running: wait for its end")
            yield RebuildTables(self.database, connection)
        finally:
            connection.terminate()


@dataclass(frozen=True, slots=True)
class StandIn:
    """A cookie for an unregistered incarnation that copies of rows reference (rule 15b)."""

    incarnation: int
    is_retired: bool
    """Whether only outdated copies reference the incarnation. The bookie may be decommissioned, so
    an empty directory needs no permission to register."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A ledger, and the decision on its row."""

    ledger_id: int
    decision: Decision
    row: LedgerMetadata | None
    """The latest known row, proven or not. None for a deleted ledger."""
    has_row: bool = False
    """Whether the database has a row after the decision."""
    is_free: bool = False
    """Whether the database had neither a row nor a tombstone, so that another ledger may get the id."""


@dataclass(eq=False)
class RebuildTables:
    """The tables of one rebuild."""

    _database: Database
    _connection: Connection
    """The connection of this rebuild alone."""
    _noted: tuple[str, ...] = ()

    async def cluster_id(self) -> str:
        """The id of the database's cluster."""
        return str(await self._connection.fetchval("SELECT cluster_id::text FROM cluster"))

    async def is_empty(self) -> bool:
        """Whether the database has never had data."""
        return bool(await self._connection.fetchval(_IS_EMPTY))

    async def _take_over(self, cluster_id: str) -> None:
        """Give this empty database the cluster's id. Raises: InvalidRequest if it is not empty."""
        await self._connection.execute("LOCK TABLE ledgers, logs, cookies IN SHARE MODE")
        if not await self.is_empty():
            raise InvalidRequest("only an empty database can take over a cluster's id")
        await self._connection.execute("UPDATE cluster SET cluster_id = $1", cluster_id)

    async def registered(self) -> dict[str, Registered]:
        """The registered directories, by the bookie's name."""
        return await registered_of(self._connection, "cookies WHERE retired_at IS NULL")

    async def accept_lost(
        self, cluster_id: str, witnesses: Iterable[str], lost: Collection[str]
    ) -> None:
        """Record that changes (`witnesses`, rule 18a) and bookies (`lost`) are lost forever."""
        tokens = {token for one in witnesses if (token := token_of(cluster_id, one)) is not None}
        await note_lost(self._connection, lost)
        await accept_tokens(self._connection, tokens)

    async def put_cookies(self, cookies: Mapping[str, tuple[Cookie, int]]) -> list[str]:
        """Write bookies' own cookies if rows are missing or older. Returns the bookies' names."""
        names = []
        async with self._transaction():
            await self._lock_names(cookies)
            for name, (cookie, log_end) in sorted(cookies.items()):
                written = await self._connection.fetchval(
                    "INSERT INTO cookies AS c (name, version, cookie, log_end)"
                    " VALUES ($1, 1, $2::text::jsonb, $3) ON CONFLICT (name) DO UPDATE"
                    " SET cookie = excluded.cookie, version = c.version + 1, log_end = $3,"
                    " changed_at = now(), retired_at = NULL,"
                    " born_at = CASE WHEN c.cookie ->> 'instance' = excluded.cookie ->> 'instance'"
                    " THEN c.born_at ELSE '-infinity' END"
                    " WHERE ((c.cookie ->> 'incarnation')::bigint, (c.cookie ->> 'boots')::bigint)"
                    " < ((excluded.cookie ->> 'incarnation')::bigint, (excluded.cookie ->> 'boots')::bigint)"
                    " RETURNING true",
                    name,
                    cookie.model_dump_json(),
                    log_end,
                )
                if written:
                    names.append(name)
            await record_change(self._connection, f"rebuild {len(names)} cookies")
        return names

    async def put_stand_ins(self, cluster_id: str, added: Mapping[str, StandIn]) -> None:
        """Write the cookies of incarnations that only copies of rows reference (rule 15b)."""
        if added:
            async with self._transaction():
                await self._lock_names(added)
                await self._put_stand_ins(cluster_id, added)

    async def _lock_names(self, names: Iterable[str]) -> None:
        for name in sorted(names):
            await lock_name(self._connection, name)

    async def _put_stand_ins(self, cluster_id: str, added: Mapping[str, StandIn]) -> None:
        # The directories that these cookies stand for now wait for a rebuild, also if only an
        # acceptance wrote the cookies.
        await self._connection.execute("UPDATE cluster SET rebuilt_at = now()")
        for name, one in sorted(added.items()):
            cookie = Cookie(
                incarnation=one.incarnation,
                cluster_id=cluster_id,
                instance=STAND_IN,
                may_fix=one.is_retired,
            )
            await self._connection.execute(
                "INSERT INTO cookies AS c (name, version, cookie, retired_at)"
                " VALUES ($1, 1, $2::text::jsonb, CASE WHEN $3 THEN now() END) ON CONFLICT (name)"
                " DO UPDATE SET cookie = excluded.cookie, version = c.version + 1, log_end = 0,"
                " changed_at = now(), retired_at = excluded.retired_at, born_at = '-infinity'"
                " WHERE (c.cookie ->> 'incarnation')::bigint < $4",
                name,
                cookie.model_dump_json(),
                one.is_retired,
                one.incarnation,
            )
        await record_change(self._connection, f"rebuild {len(added)} cookies")

    async def begin_writing(
        self, highest: int, cluster_id: str, taken: str | None, added: Mapping[str, StandIn]
    ) -> int:
        """Make bookies without cookies wait from now on, and give new ledgers ids above `highest`.
        Returns the next id. The same transaction writes the cluster id `taken` to an empty database,
        and stand-in cookies, because no empty directory may register in between. Raises:
        InvalidRequest.
        """
        async with self._transaction():
            await self._lock_names(added)  # before the tables, as registrations do
            if taken is not None:
                await self._take_over(taken)
            await self._connection.execute("UPDATE cluster SET rebuilt_at = now()")
            if added:
                await self._put_stand_ins(cluster_id, added)
            await audit.keep(self._connection)
        if taken is not None:
            self._database.memory.cluster_id = taken
            log.warning("cluster-taken-over", extra={"cluster": taken})
        return 1 + int(
            await self._connection.fetchval(
                "SELECT setval('ledger_ids', greatest($1, last_value)) FROM ledger_ids",
                highest + _UNWRITTEN_IDS,
            )
        )

    async def judge(
        self, held: Mapping[int, Sequence[Held]], bookies: Bookies, *, writes: bool
    ) -> list[Judged]:
        """Decide on these ledgers, and with `writes` apply the decisions, in one transaction."""
        attempts = {row.attempt for each in held.values() for one in each for row in one.rows}
        attempts.discard("")
        async with self._transaction(writes=writes):
            # Lock the ledgers' rows before the bookies' names, in the order of a ledger's change.
            # Otherwise a change, a registration and this transaction could deadlock.
            known = await self._known(sorted(held), sorted(attempts), writes=writes)
            if writes:
                # A registration either waits until these rows are written, or is visible here.
                rows = (row for each in held.values() for one in each for row in one.rows)
                members = {member for row in rows for member in row.all_members}
                registered = await registered_of(
                    self._connection, "hold_incarnations($1)", sorted(members)
                )
                # Other registrations only affect how long an OPEN row waits, so older data is enough.
                names = set(map(member_name, members))
                others = {
                    name: one for name, one in bookies.registered.items() if name not in names
                }
                bookies = replace(bookies, registered=others | registered)
            decisions = {
                ledger_id: decide(known[ledger_id], each, bookies)
                for ledger_id, each in held.items()
            }
            if writes:
                await self._write(known, decisions, held)
        return [
            _judged(ledger_id, decisions[ledger_id], known[ledger_id], each)
            for ledger_id, each in held.items()
        ]

    async def _known(
        self, ledger_ids: Sequence[int], attempts: Sequence[str], *, writes: bool
    ) -> dict[int, Known]:
        """Read the database's data about these ledgers. With `writes`, lock their rows."""
        records = await self._connection.fetch(
            f"SELECT {ROW} FROM ledgers WHERE ledger_id = ANY($1::bigint[]) ORDER BY ledger_id"
            + (" FOR UPDATE" if writes else ""),
            ledger_ids,
        )
        found = frozenset({*attempts}.difference(await lacking(self._connection, attempts)))
        known = {ledger_id: Known(attempts=found) for ledger_id in ledger_ids}
        for record in records:
            row = None if record["body"] is None else row_of(self._connection, record)
            known[record["ledger_id"]] = Known(row, is_deleted=row is None, attempts=found)
        return known

    async def _write(
        self,
        known: Mapping[int, Known],
        decisions: Mapping[int, Decision],
        held: Mapping[int, Sequence[Held]],
    ) -> None:
        written = {
            ledger_id: decision.row
            for ledger_id, decision in decisions.items()
            if decision.row is not None
        }
        buried = [
            ledger_id
            for ledger_id, decision in decisions.items()
            if decision.action is Action.TOMBSTONE
        ]
        if not written and not buried:
            return
        new = {item: row for item, row in written.items() if known[item].row is None}
        await self._insert(new)
        await self._replace({item: row for item, row in written.items() if item not in new})
        await self._connection.execute(
            "INSERT INTO ledgers (ledger_id, version) SELECT unnest($1::bigint[]), 1"
            " ON CONFLICT DO NOTHING",
            buried,
        )
        await forget_deleted(self._connection, buried)
        await bury(self._connection, buried)
        await self._contain(
            {
                row.attempt: row
                for ledger_id in (*written, *buried)
                for one in held[ledger_id]
                for row in one.rows
                if row.attempt
            }
        )
        changed = (*written, *buried)
        await record_change(self._connection, f"rebuild ledgers {min(changed)} to {max(changed)}")

    async def _insert(self, rows: Mapping[int, LedgerMetadata]) -> None:
        """Insert rows. Raises: UniqueViolationError if a ledger was created concurrently."""
        await self._connection.execute(
            "INSERT INTO ledgers (ledger_id, version, attempt, body, created_at, first_offset, lineage)"
            " SELECT id, version, nullif(attempt, '')::uuid, body::jsonb,"
            " coalesce(nullif(created_at, '')::timestamptz, now()), first_offset, lineage::jsonb"
            f" FROM {_MADE}",
            *_columns(self._connection, rows),
        )
        await index_members(self._connection, rows)
        await index_tags(self._connection, rows)
        # Protect these ledgers from the sweep, until a log references them or an operator decides.
        await self._connection.execute(
            "INSERT INTO unnamed_ledgers (ledger_id, since) SELECT unnest($1::bigint[]), 'infinity'",
            [ledger_id for ledger_id, row in rows.items() if row.log is not None],
        )

    async def _replace(self, rows: Mapping[int, LedgerMetadata]) -> None:
        await self._connection.execute(
            "UPDATE ledgers l SET version = made.version, attempt = nullif(made.attempt, '')::uuid,"
            " body = made.body::jsonb, first_offset = made.first_offset,"
            " lineage = made.lineage::jsonb, changed_at = now()"
            f" FROM {_MADE} WHERE l.ledger_id = made.id",
            *_columns(self._connection, rows),
        )
        await self._connection.execute(
            "DELETE FROM ledger_members WHERE ledger_id = ANY($1::bigint[])", list(rows)
        )
        await index_members(self._connection, rows)

    async def _contain(self, rows: Mapping[str, LedgerMetadata]) -> None:
        """Record the tokens of the copies' changes, so that a late retry is settled (rule 6)."""
        targets = {attempt: _target_of(row) for attempt, row in rows.items()}
        for row in rows.values():
            if row.lineage is not None and row.lineage.placed_by:
                targets.setdefault(row.lineage.placed_by, f"ledger {row.ledger_id}")
        await self._connection.execute(
            "INSERT INTO attempts (attempt, target) SELECT * FROM unnest($1::uuid[], $2::text[])"
            " ON CONFLICT (attempt) DO UPDATE SET target = excluded.target"
            " WHERE attempts.target = 'accepted as lost'",
            list(targets),
            list(targets.values()),
        )

        await self._connection.execute(
            "DELETE FROM kept_ledgers WHERE attempt = ANY($1::uuid[])", list(targets)
        )

    async def log_names(self) -> set[str]:
        """The names of the logs in the database."""
        records = await self._connection.fetch("SELECT name FROM logs WHERE body IS NOT NULL")
        return {record["name"] for record in records}

    async def judge_log(
        self,
        name: str,
        ledgers: Sequence[LedgerPlace],
        buried: Collection[int],
        *,
        writes: bool,
        deletions: DeletedLogs = _NO_DELETIONS,
        shared: Collection[int] = (),
        silent: int = 0,
    ) -> LogDecision:
        """Decide on a log by its ledgers, and with `writes` apply the decision. `buried` has ids that
        get tombstones, `shared` the ledgers that forks reference, `deletions` the deleted logs of this
        name. `silent` bookies do not respond or lost their data.
        """
        async with self._transaction(writes=writes):
            record = await self._connection.fetchrow(
                f"SELECT {LOG_ROW} FROM logs WHERE name = $1" + (" FOR UPDATE" if writes else ""),
                name,
            )
            if record is not None and record["body"] is None:
                # Ledgers of a log with a later creation time belong to the later log.
                later = [one for one in ledgers if one.log_created_at > record["created_at"]]
                if not later:
                    placed = [
                        one
                        for one in ledgers
                        if one.first_offset is not None and one.ledger_id not in shared
                    ]
                    why = "the log is deleted, but some of its ledgers are not"
                    return LogDecision(Action.CONFLICT if placed else Action.SAME, why=why)
                ledgers = later
            known = None if record is None or record["body"] is None else log_row_of(record)
            decision = None if known is None else deletions.decide(known)
            if known is not None and decision is not None:
                if writes and decision.action is Action.TOMBSTONE:
                    await bury_log(self._connection, known, kept=shared)
                    # Protect the ledgers from the sweep, until their forks are rebuilt, too.
                    await self._connection.execute(
                        "UPDATE unnamed_ledgers SET since = 'infinity' WHERE ledger_id = ANY($1::bigint[])",
                        sorted(shared),
                    )
                    await record_change(self._connection, f"rebuild log {name}")
                return decision
            gone, stored = await self._tombstones_and_rows(known, ledgers)
            token = 0
            if writes and is_opened(known, ledgers):
                # No ledger ever gets this id, so no later writer gets an equal token.
                token = await self._connection.fetchval("SELECT next_ledger_id()")
            decision = decide_log(
                name,
                known,
                ledgers,
                gone | set(buried),
                now_ms=await self._connection.fetchval(
                    "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint"
                ),
                token=token,
                stored=stored,
                silent=silent,
            )
            if writes and decision.row is not None:
                await self._write_log(known, decision.row)
        return decision

    async def _tombstones_and_rows(
        self, log: LogMetadata | None, ledgers: Iterable[LedgerPlace]
    ) -> tuple[set[int], set[int]]:
        """The deleted ledgers, and the ledgers with rows, that the log or its ledgers name."""
        named = ledgers_of(() if log is None else log.items)
        named |= {ledger_id for one in ledgers for ledger_id, _ in (*one.shared, *one.before)}
        records = await self._connection.fetch(
            "SELECT ledger_id, body IS NULL AS is_deleted FROM ledgers"
            " WHERE ledger_id = ANY($1::bigint[])",
            sorted(named),
        )
        gone = {record["ledger_id"] for record in records if record["is_deleted"]}
        return gone, {record["ledger_id"] for record in records} - gone

    async def _write_log(self, known: LogMetadata | None, row: LogMetadata) -> None:
        await self._connection.execute(
            "INSERT INTO logs AS l (name, version, body, created_at, attempt) VALUES ($1, $2,"
            " $3::text::jsonb, coalesce(nullif($4, '')::timestamptz, now()), $5)"
            " ON CONFLICT (name) DO UPDATE SET version = greatest(l.version + 1, excluded.version),"
            " body = excluded.body, created_at = excluded.created_at, attempt = excluded.attempt,"
            " changed_at = now()",
            row.name,
            row.version,
            log_body_of(row),
            row.created_at,
            attempt := str(uuid4()),
        )
        named = {item.ledger_id for item in row.own}
        await write_shared(self._connection, row)
        await self._connection.execute(
            "DELETE FROM unnamed_ledgers WHERE ledger_id = ANY($1::bigint[])", sorted(named)
        )
        await commit_placed(self._connection, row)
        # Ledgers that only the log's older row referenced are protected from the sweep.
        await self._connection.execute(
            "INSERT INTO unnamed_ledgers (ledger_id, since) SELECT ledger_id, 'infinity' FROM ledgers"
            " WHERE ledger_id = ANY($1::bigint[]) AND body IS NOT NULL ON CONFLICT DO NOTHING",
            sorted(ledgers_of(known.own if known else ()) - named),
        )
        await record_attempt(self._connection, attempt, f"rebuild log {row.name}")

    @asynccontextmanager
    async def _transaction(self, *, writes: bool = True) -> AsyncIterator[None]:
        """Run the block in one transaction. A loss of the transaction is detectable (rule 18a)."""
        self._connection.settled = None
        async with self._connection.transaction(readonly=not writes):
            yield
        if (token := self._connection.settled) is not None:
            self._database.memory.note_committed(token, self._noted)
            self._noted = (token,)


async def registered_of(
    connection: Connection, source: str, *values: object
) -> dict[str, Registered]:
    """The registered directories in the cookies of `source`, a table or function, by bookie name."""
    records = await connection.fetch(
        "SELECT name, (cookie ->> 'incarnation')::bigint AS incarnation,"
        f" {utc('born_at')} FROM {source}",
        *values,
    )
    return {
        record["name"]: Registered(record["incarnation"], record["born_at"] or "")
        for record in records
    }


def _judged(ledger_id: int, decision: Decision, known: Known, held: Sequence[Held]) -> Judged:
    row = decision.row or known.row
    is_free = known.row is None and not known.is_deleted
    reported = newest_of(held) if decision.action in {Action.WAIT, Action.CONFLICT} else None
    return Judged(ledger_id, decision, reported or row, has_row=row is not None, is_free=is_free)


def _target_of(row: LedgerMetadata) -> str:
    """Return the target of the change that wrote the row, by which retries find it (rule 6)."""
    if row.deletion:
        return f"delete ledger {row.ledger_id}"
    return f"create ledger {row.ledger_id}" if row.version == 1 else f"ledger {row.ledger_id}"


def _columns(
    connection: Connection, rows: Mapping[int, LedgerMetadata]
) -> tuple[list[object], ...]:
    return (
        list(rows),
        [row.version for row in rows.values()],
        [row.attempt for row in rows.values()],
        [body_of(connection, row, ledger_id) for ledger_id, row in rows.items()],
        [row.created_at for row in rows.values()],
        [row.first_offset for row in rows.values()],
        [row.lineage and json_of(row.lineage).decode() for row in rows.values()],
    )
