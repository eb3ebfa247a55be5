"""Rows of logs: create, compare-and-swap, delete, list; and ledgers that no log references.

One transaction locks a log and the ledgers that are added to the log, so that a ledger is never both part of a log
and deleted as unnamed (rule 22). A fork also references ledgers of other logs (`forks.py`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import asyncpg
import orjson

from quorumlog.errors import AlreadyDone, InvalidRequest, LogExists, NoSuchLog
from quorumlog.protocol.changes import check_log, check_unprotected
from quorumlog.protocol.log import LOG_LEDGERS_MAX, LogItem, LogMetadata, ledgers_of
from quorumlog.protocol.metadata import ANCESTORS_KEPT, REPLACED_MAX
from quorumlog.protocol.once import Once
from quorumlog.wire.bodies import RowDelete, document_of, json_of, received
from quorumlog.wire.log_bodies import (
    DELETED_WITH_LOG_MAX,
    Done,
    ForkBody,
    LedgerIds,
    LogChange,
    LogCreateBody,
    LogRead,
    SharedAsk,
)
from services.metadata import attempts, forks, sql
from services.metadata.database import (
    Connection,
    RowStore,
    ages_count,
    listing,
    proven,
    transactional,
)
from services.metadata.ledgers import (
    check_deleted,
    check_row,
    leave_tombstone,
    leave_tombstones,
    lock_ledger,
)

_READ_MS: Final = "(extract(epoch FROM now()) * 1000)::bigint AS read_ms"
ROW: Final = (
    "name, version, attempt::text AS attempt, body::text AS body,"
    f" {sql.utc('created_at')}, {_READ_MS}"
)
"""`read_ms` is the time of the read by the database's clock. The age of records is determined by
this clock, and never by a gateway's clock (rule 26a)."""
_OWNER: Final = "('logs/' || name) COLLATE \"C\""
"""The expression of the index `logs_by_owner`."""


class LogStore(RowStore):
    """The store of logs' rows."""

    @proven
    async def get(
        self,
        connection: Connection,
        name: str,
        *,
        known: str | None = None,
        created_at: str | None = None,
    ) -> LogRead:
        """A log's row, read from the primary. `known` and `created_at` name a version (`LogRead`).
        The creation time is compared too, because after the database went back, a repeated attempt
        may have created another log. Raises: NoSuchLog.
        """
        if known is not None:
            record = await connection.fetchrow(
                f"SELECT {sql.utc('created_at')}, {_READ_MS} FROM logs"
                " WHERE name = $1 AND attempt = $2 AND body IS NOT NULL",
                name,
                known,
            )
            if record is not None and record["created_at"] == created_at:
                return LogRead(row=None, read_ms=record["read_ms"])
        row = await read_log(connection, name)
        return LogRead(row=row, read_ms=row.read_ms)

    @listing
    async def page(
        self,
        connection: Connection,
        *,
        after: str,
        limit: int,
        prefix: str = "",
        shown: str | None = None,
    ) -> tuple[list[bytes], str | None]:
        """One page of logs as JSON, sorted by name, and the `after` of the next page. The page has
        the logs with names that begin with `prefix`, as far as the grants in `shown` allow.
        """
        query, values = page_query(prefix, shown, after=after, limit=limit)
        records = await connection.fetch(query, *values)
        return [_json_of(record) for record in records], records[-1]["name"] if sql.has_more(
            records
        ) else None

    @proven
    async def shared(self, connection: Connection, request: SharedAsk) -> LedgerIds:
        """The given ledgers that forks reference, ascending, read from the primary."""
        found = await forks.shared_among(connection, set(request.ledgers))
        return LedgerIds(ledgers=tuple(sorted(found)))

    @transactional
    async def is_done(self, connection: Connection, token: str, *, content: str = "0" * 32) -> Done:
        """Whether a client's request was applied. Raises: InvalidRequest if `content` differs."""
        return Done(done=await attempts.found_once(connection, Once(token, content)) is not None)

    async def create(self, request: LogCreateBody) -> LogMetadata:
        """Create a log, or return the log that an earlier copy of the request created.

        Raises: LogExists (with `current`), LogDeleted, InvalidRequest; NoSuchLog if the log was
        deleted since the earlier copy, or if the log to fork does not exist.
        """
        row, is_new = await self._create(request)
        if not is_new:
            raise LogExists(log=row.name, current=document_of(row))
        return row

    @transactional
    async def _create(
        self, connection: Connection, request: LogCreateBody
    ) -> tuple[LogMetadata, bool]:
        """Create the log unless the name is taken. Returns the log's row, and whether this attempt
        created the log. A client's request that finds an existing log is also recorded, so that a
        late copy of the request creates no log (rule 6a).
        """
        row = request.row
        # Insert the row first, to lock the name before any lookup.
        fresh = await connection.fetchval(
            "INSERT INTO logs (name, version) VALUES ($1, 1) ON CONFLICT DO NOTHING"
            " RETURNING version",
            row.name,
        )
        old = await connection.fetchrow(
            f"SELECT {ROW} FROM logs WHERE name = $1 FOR UPDATE", row.name
        )
        target = f"create log {row.name}"
        if await attempts.is_applied(connection, request.attempt, target):
            # Exclude a later log of this name. `created_at` and `at` are equal only if the same
            # transaction wrote both.
            is_it = await connection.fetchval(
                "SELECT l.created_at = a.at FROM logs l, attempts a"
                " WHERE l.name = $1 AND a.attempt = $2",
                row.name,
                request.attempt,
            )
            return row_of(old if is_it else None, row.name), True
        is_late = await attempts.found_once(connection, request.once) is not None
        if is_late or (old is not None and old["body"] is not None):
            current = row_of(old, row.name)
            await attempts.try_once(connection, request.once)
            return current, False
        await forks.check_name_free(connection, row.name)
        if request.fork is None and row.forked_at is not None:
            raise InvalidRequest("/row/forked_at: requires /fork", log=row.name)
        if request.fork is not None:
            row = await _forked(connection, row, request.fork)
        source = None if request.fork is None else request.fork.source
        await forks.note_source(connection, row.name, source)
        named = ledgers_of(row.own)
        await _require_all(connection, row.name, _LOCKED, named, row.name)
        await _require_all(connection, row.name, _CLAIMED, named)
        record = await connection.fetchrow(
            "UPDATE logs SET version = version + $3, attempt = $4, body = $2::text::jsonb,"
            f" created_at = now(), changed_at = now() WHERE name = $1 RETURNING {ROW}",
            row.name,
            body_of(row),
            0 if fresh else 1,
            request.attempt,
        )
        created = row_of(record, row.name)
        await _place_ledgers(connection, created, _places_of(created), request.attempt)
        await attempts.try_once(connection, request.once)
        await attempts.record_attempt(connection, request.attempt, target)
        return created, True

    @transactional
    async def change(self, connection: Connection, request: LogChange) -> LogMetadata:
        """Compare-and-swap a log's row on `row.version`, and return the changed row.

        Raises: NoSuchLog, VersionConflict and AlreadyDone (with `current`), InvalidRequest.
        """
        row = request.row
        old = await read_log(connection, row.name, "FOR UPDATE")
        target = f"log {row.name}"
        if await attempts.is_applied(connection, request.attempt, target):
            return old
        if await attempts.found_once(connection, request.once) is not None:
            raise AlreadyDone(log=row.name, current=document_of(old))
        check_row(old, row)
        changed = await change_row(connection, old, row, attempt=request.attempt)
        await attempts.try_once(connection, request.once)
        await attempts.record_attempt(connection, request.attempt, target)
        return changed

    @transactional
    async def delete(self, connection: Connection, name: str, request: RowDelete) -> None:
        """Delete a log and free its name. The log's CLOSED ledgers are deleted too, so that a reader
        with the old row can't find them under a new log. The other ledgers become unnamed.

        Raises: NoSuchLog, VersionConflict (with `current`), LogProtected.
        """
        target = f"delete log {name}"
        try:
            old = await read_log(connection, name, "FOR UPDATE")
        except NoSuchLog:
            if await attempts.is_applied(connection, request.attempt, target):
                return
            raise
        if await attempts.is_applied(connection, request.attempt, target):
            return  # another log with this name was created after the first copy of the request
        check_deleted(old, request)
        check_unprotected(old)
        await bury_log(connection, old)
        await attempts.record_attempt(connection, request.attempt, target)

    @listing
    async def orphans(
        self,
        connection: Connection,
        *,
        older_than_s: int,
        after: int = -1,
        limit: int,
        log: str | None = None,
    ) -> LedgerIds:
        """Ascending ids above `after` of ledgers that no log has referenced for `older_than_s`
        seconds. With `log`, only ledgers that were once part of a log of this name.
        """
        if older_than_s and not await ages_count(connection):
            return LedgerIds(ledgers=())
        query, of_log = (ORPHANS, ()) if log is None else (ORPHANS_OF_LOG, (log,))
        found = await sql.ids_of(connection, query, older_than_s, after, limit, *of_log)
        return LedgerIds(ledgers=found)

    @transactional
    async def delete_orphan(self, connection: Connection, ledger_id: int) -> None:
        """Delete a ledger that was created for a log, but that the log does not reference.

        The ledger may also be open: no writer appends to it, because no log references it.
        Raises: NoSuchLedger, OwnedByLog; InvalidRequest if the ledger was not created for a log.
        """
        row = await lock_ledger(connection, ledger_id)
        if row.log is None:
            raise InvalidRequest("the ledger was not created for a log", ledger_id=ledger_id)
        await leave_tombstone(connection, row)
        await attempts.record_change(connection, f"delete ledger {ledger_id}")


async def bury_log(connection: Connection, row: LogMetadata, kept: Collection[int] = ()) -> None:
    """Delete a log, whose row is locked, with its ledgers, except ledgers that forks reference.
    `kept` has the ledgers of forks that a rebuild has not written yet.
    """
    # Abort the transactions, which a later log of this name must not inherit.
    ended = await connection.fetch(
        "UPDATE transactions SET state = 'ABORTED', ended_at = now()"
        " WHERE log = $1 AND state = 'OPEN' RETURNING id",
        row.name,
    )
    await release_unpublished(connection, [record["id"] for record in ended])
    await connection.execute("DELETE FROM app_versions WHERE log = $1", row.name)
    ledgers = {item.ledger_id for item in row.own}
    # Readers with an older row may still reference ledgers that were replaced since (rule 27c).
    replaced = await sql.ids_of(connection, ORPHANS_OF_LOG, 0, -1, LOG_LEDGERS_MAX, row.name)
    latest = sorted({*ledgers, *replaced} - {*kept})[-DELETED_WITH_LOG_MAX:]
    deleted = await leave_tombstones(connection, latest)
    await connection.execute(
        "DELETE FROM unnamed_ledgers WHERE ledger_id = ANY($1::bigint[])", sorted(deleted)
    )
    await _release_ledgers(connection, ledgers_of(row.own) - deleted)
    await forks.let_go(connection, row.name, ledgers_of(row.shared))
    await forks.forget_source(connection, row.name)
    await connection.execute(
        "UPDATE logs SET version = version + 1, body = NULL, changed_at = now() WHERE name = $1",
        row.name,
    )


_LOCKED: Final = (
    "SELECT ledger_id FROM ledgers WHERE ledger_id = ANY($1::bigint[]) AND log = $2"
    " AND body IS NOT NULL ORDER BY ledger_id FOR NO KEY UPDATE"
)
"""Locks ledgers that a log references or adds."""
_CLAIMED: Final = (
    "DELETE FROM unnamed_ledgers WHERE ledger_id = ANY($1::bigint[]) RETURNING ledger_id"
)
"""Removes locked ledgers from `unnamed_ledgers` when a log adds them (rule 22). The table has no
ledgers of transactions, which only the transaction's commit adds to the log (`_PUBLISHED`)."""
_PUBLISHED: Final = (
    "SELECT ledger_id FROM transaction_ledgers"
    " WHERE ledger_id = ANY($1::bigint[]) AND transaction = $2"
)
"""Selects the ledgers of a transaction that the commit adds to a log."""
_CLOSED: Final = (
    "SELECT ledger_id FROM ledgers WHERE ledger_id = ANY($1::bigint[]) AND state = 'CLOSED'"
)
"""Selects locked ledgers that may replace other ledgers (rule 27c) or be indexes (rule 27e)."""
_WHOLE: Final = (
    "SELECT ledger_id FROM ledgers WHERE ledger_id = ANY($1::bigint[]) AND state = 'CLOSED'"
    " AND NOT coalesce((body ->> 'may_lack_entries')::boolean, false)"
)
"""Selects ledgers that a rewrite may replace without hiding lost entries."""
_REPLACED: Final = (
    "SELECT ledger_id, lineage -> 'replaced' AS replaced FROM ledgers"
    " WHERE ledger_id = ANY($1::bigint[]) AND lineage IS NOT NULL"
)
"""Selects the ledgers that the given ledgers have replaced, a list that no longer changes."""
ORPHANS: Final = (
    "SELECT ledger_id FROM unnamed_ledgers WHERE since < now() - make_interval(secs => $1::int)"
    f" AND ledger_id > $2 AND {forks.NOT_SHARED} AND EXISTS (SELECT FROM ledgers l"
    f" WHERE l.ledger_id = unnamed_ledgers.ledger_id AND {sql.IS_AFTER_LOSS})"
    " ORDER BY ledger_id LIMIT $3"
)
ORPHANS_OF_LOG: Final = (
    "SELECT ledger_id FROM ledgers l JOIN unnamed_ledgers USING (ledger_id)"
    " WHERE log = $4 AND ledger_id > $2 AND first_offset IS NOT NULL"
    f" AND since < now() - make_interval(secs => $1::int) AND {forks.NOT_SHARED} AND {sql.IS_AFTER_LOSS}"
    " ORDER BY ledger_id LIMIT $3"
)


def page_query(
    prefix: str, shown: str | None, *, after: str, limit: int
) -> tuple[str, list[object]]:
    """The SQL query of a page, and the values of its parameters."""
    values: list[object] = [after, limit, prefix]

    def value(given: object) -> str:
        values.append(given)
        return f"${len(values)}"

    allowed = "true" if shown is None else sql.is_shown(_OWNER, shown, value)
    rows = (
        "SELECT name, version, attempt, body, created_at, body_bytes FROM logs"
        " WHERE body IS NOT NULL AND name > $1 AND name >= $3 AND starts_with(name, $3)"
        f" AND {allowed}"
    )
    return sql.page_of(rows, order="name", row=ROW, limit="$2"), values


def row_of(record: asyncpg.Record | None, name: str = "") -> LogMetadata:
    """The log's row from a database record. Raises: NoSuchLog."""
    if record is None or record["body"] is None:
        raise NoSuchLog(f"there is no log {name}", log=name)
    return received(LogMetadata, _json_of(record))


def _json_of(record: asyncpg.Record) -> bytes:
    """A log's row as JSON."""
    return b'{"name":"%b","read_ms":%d,"attempt":"%b",%b' % (
        record["name"].encode(),
        record["read_ms"],
        (record["attempt"] or "").encode(),
        sql.json_rest(record),
    )


def body_of(row: LogMetadata) -> str:
    """The content of the column `body`: all fields that a change may set."""
    return json_of(row, without=row.STORE_FIELDS).decode()


async def read_log(connection: Connection, name: str, lock: str = "") -> LogMetadata:
    """A log's row, which `lock` (such as FOR UPDATE) locks. Raises: NoSuchLog, LogDeleted."""
    record = await connection.fetchrow(f"SELECT {ROW} FROM logs WHERE name = $1 {lock}", name)
    if record is None or record["body"] is None:
        await forks.check_name_free(connection, name)
    return row_of(record, name)


async def _forked(connection: Connection, wanted: LogMetadata, fork: ForkBody) -> LogMetadata:
    """Lock the source's row and create the row of a new fork. Raises: NoSuchLog, InvalidRequest."""
    source = await read_log(connection, fork.source, "FOR SHARE")
    source.check_created(fork.created_at)
    if fork.at < source.first_offset or not source.is_sealed_below(fork.at):
        raise InvalidRequest(
            f"/fork/at: the log {fork.source} begins at {source.first_offset} and has no sealed ledger up to {fork.at}",
            log=fork.source,
        )
    return await forks.share(connection, source.forked(wanted, fork.at))


async def change_row(
    connection: Connection,
    old: LogMetadata,
    new: LogMetadata,
    *,
    attempt: str,
    published: Collection[int] = (),
    transaction: str = "",
) -> LogMetadata:
    """Replace `old`, whose row is locked, by `new` of the same version, as the change `attempt`.

    `published` has the ledgers of `transaction` that the log adds. Raises: InvalidRequest.
    """
    rewritten = check_log(old, new)
    before, after = ledgers_of(old.items), ledgers_of(new.items)
    shared = ledgers_of(old.shared)
    indexes = after - before - {item.ledger_id for item in new.items}
    places = _places_of(new) - _places_of(old)
    locked = after - before | {ledger_id for ledger_id, _ in places}
    await _require_all(connection, new.name, _LOCKED, locked, new.name)
    await _require_all(connection, new.name, _CLAIMED, after - before - set(published))
    await _require_all(connection, new.name, _PUBLISHED, published, transaction)
    await _require_all(connection, new.name, _CLOSED, {*rewritten, *indexes})
    for items in rewritten.values():
        await _require_all(connection, new.name, _WHOLE, [item.ledger_id for item in items])
    replaced = {at: await _replaced(connection, items) for at, items in rewritten.items()}
    placing = replace(new, created_at=old.created_at, attempt=attempt)
    await _place_ledgers(connection, placing, places, attempt, replaced)
    await _release_ledgers(connection, before - after - shared)
    await forks.let_go(connection, new.name, shared - after)
    record = await connection.fetchrow(
        "UPDATE logs SET version = version + 1, attempt = $4, body = $3::text::jsonb,"
        " changed_at = now() WHERE name = $1 AND version = $2 AND body IS NOT NULL"
        f" RETURNING {ROW}",
        new.name,
        old.version,
        body_of(new),
        attempt,
    )
    return row_of(record, new.name)


async def _require_all(
    connection: Connection, name: str, query: str, ledgers: Iterable[int], *values: object
) -> None:
    """Run a query for ledgers of a log. Raises: InvalidRequest unless all are found."""
    wanted = sorted(ledgers)
    found = await sql.ids_of(connection, query, wanted, *values) if wanted else ()
    if missing := sorted({*wanted} - {*found}):
        raise InvalidRequest(
            f"ledger {missing[0]} does not exist, or was not created for this log",
            log=name,
            ledger_id=missing[0],
        )


def _places_of(log: LogMetadata) -> set[tuple[int, int]]:
    """Ids and first offsets of the log's own ledgers with known first offsets."""
    own = log.own
    return {(i.ledger_id, i.first_offset) for i in own if i.first_offset is not None}


async def _replaced(
    connection: Connection, items: Sequence[LogItem]
) -> tuple[tuple[int, int], ...]:
    """Ids and first offsets of these items' ledgers, and of all ledgers that they have replaced.
    Raises: InvalidRequest if a ledger has replaced too many ledgers.
    """
    records = await connection.fetch(_REPLACED, [item.ledger_id for item in items])
    earlier = {record["ledger_id"]: orjson.loads(record["replaced"] or "[]") for record in records}
    found: list[tuple[int, int]] = []
    for item in items:
        found += [(ledger_id, first) for ledger_id, first in earlier.get(item.ledger_id, ())]
        found.append((item.ledger_id, item.first_offset or 0))
    if len(found) > REPLACED_MAX:
        raise InvalidRequest(f"a ledger may replace at most {REPLACED_MAX} ledgers")
    return tuple(found)


_WITH_ANCESTORS: Final = (
    "jsonb_set(body, '{ancestors}', jsonb_path_query_array("
    "coalesce(body -> 'ancestors', '[]') || to_jsonb(coalesce(attempt::text, '')),"
    f" '$[last - {ANCESTORS_KEPT - 1} to last]'))"
)
"""A ledger's body for a next version, as `LedgerMetadata.changed_by` makes it."""


async def _place_ledgers(
    connection: Connection,
    log: LogMetadata,
    places: Collection[tuple[int, int]],
    attempt: str,
    replaced: Mapping[int, tuple[tuple[int, int], ...]] = MappingProxyType({}),
) -> None:
    """Write the first offsets and lineages of locked ledgers from the log's row (`log`).

    A CLOSED ledger's row gets a new version, because members have copies of the row, and two copies
    of one version must not differ (rule 18f). An open ledger's row keeps its version, because the
    writer sends the first copy, and appends, only after this change (rule 23).
    """
    if not places:
        return
    lineages = log.lineages({ledger_id for ledger_id, _ in places}, replaced)
    await connection.execute(
        "UPDATE ledgers l SET first_offset = p.first_offset, lineage = p.lineage::jsonb,"
        " version = CASE WHEN state = 'CLOSED' THEN version + 1 ELSE version END,"
        " attempt = CASE WHEN state = 'CLOSED' THEN $4 ELSE attempt END,"
        f" body = CASE WHEN state = 'CLOSED' THEN {_WITH_ANCESTORS} ELSE body END, changed_at = now()"
        " FROM unnest($1::bigint[], $2::bigint[], $3::text[]) AS p (ledger_id, first_offset, lineage)"
        " WHERE l.ledger_id = p.ledger_id",
        [ledger_id for ledger_id, _ in places],
        [first_offset for _, first_offset in places],
        [json_of(lineages[at]).decode() for at, _ in places],
        attempt,
    )


async def _release_ledgers(connection: Connection, ledgers: Iterable[int]) -> None:
    await connection.execute(
        # Select from `ledgers`, because a rebuilt log may have ledgers without a row (rule 18f).
        "INSERT INTO unnamed_ledgers (ledger_id) SELECT ledger_id FROM ledgers"
        " WHERE ledger_id = ANY($1::bigint[]) ORDER BY ledger_id ON CONFLICT DO NOTHING",
        sorted(ledgers),
    )


async def release_unpublished(connection: Connection, ids: Sequence[str]) -> None:
    """Queue ended transactions' unpublished ledgers for immediate deletion, which also fences them."""
    await connection.execute(
        "WITH gone AS (DELETE FROM transaction_ledgers WHERE transaction = ANY($1::text[])"
        " RETURNING ledger_id)"
        " INSERT INTO unnamed_ledgers (ledger_id, since) SELECT ledger_id, 'epoch' FROM gone",
        list(ids),
    )
