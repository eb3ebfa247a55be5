"""Transactions: their ledgers become part of a log in one database transaction, or not at all.

Rows are locked in one order: the log, the transaction, the app, the ledgers. A commit or an abort
locks the transaction's row, so that a concurrent commit or abort sees the result. Unpublished ledgers
become unnamed ledgers, which gateways recover and delete (rule 22).
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Final

import asyncpg
import orjson

from quorumlog.errors import (
    InvalidRequest,
    LogClosed,
    NoSuchLog,
    NoSuchTransaction,
    TransactionAborted,
    TransactionCommitted,
)
from quorumlog.protocol.changes import published_by
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.log import LogItem, LogMetadata, LogState
from quorumlog.protocol.metadata import State
from quorumlog.protocol.transaction import Sealed, Transaction, TransactionLedger, TransactionState
from quorumlog.wire import log_bodies
from services.metadata.attempts import is_applied, record_attempt, record_change
from services.metadata.database import (
    Connection,
    RowStore,
    ages_count,
    plain,
    proven,
    transactional,
)
from services.metadata.forks import NOT_SHARED
from services.metadata.ledgers import check_row
from services.metadata.logs import change_row, read_log, release_unpublished
from services.metadata.sql import IS_AFTER_LOSS, utc, value_of

_WRITTEN: Final = (
    "(SELECT coalesce(jsonb_agg(jsonb_build_object('ledger_id', w.ledger_id,"
    " 'partition', w.partition, 'attempt', w.attempt) ORDER BY w.ledger_id), '[]')"
    " FROM transaction_ledgers w WHERE w.transaction = transactions.id)"
)
_ROW: Final = (
    "id, log, app, app_version, state, is_duplicate, requested,"
    f" CASE WHEN state = 'OPEN' THEN {_WRITTEN} ELSE published END::text AS ledgers, "
    f"{utc('created_at')}, {utc('expires_at')}"
)
"""One statement reads state and ledgers, so that they are consistent. With two statements, a
transaction that ended in between would seem to be OPEN and without ledgers."""
_RENEWED: Final = "now() + make_interval(secs => ttl_s)"
_KEPT_S: Final = 7 * 24 * 3600
"""How long ended transactions are kept (by judgement). An app's last transaction stays for ever."""

EXPIRED: Final = (
    "SELECT id FROM transactions WHERE state = 'OPEN' AND expires_at < now()"
    f" AND {IS_AFTER_LOSS} ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED"
)


@dataclass(eq=False)
class TransactionStore(RowStore):
    """The store of transactions."""

    open: int = 0
    """The number of OPEN transactions at the last count."""
    orphans: int = 0
    """The number of ledgers that waited for deletion at the last count."""

    @transactional
    async def begin(
        self, connection: Connection, request: log_bodies.TransactionBeginBody
    ) -> Transaction:
        """Begin a transaction, or return the existing transaction of this app and version.

        A version that is not above the app's last version gets a COMMITTED transaction, because
        nothing is left to do. Raises: NoSuchLog, LogClosed; InvalidRequest if the id is in use.
        """
        await _lock_log_shared(connection, request.log)
        known = await _find_earlier_try(connection, request)
        if known is not None:
            return known
        if request.app is not None:
            done = await _last_version(connection, request.log, request.app)
            if done is not None and done["version"] >= (request.version or 0):
                return await _answer_old_version(connection, request, done)
        while True:
            made = await _insert(connection, request, state=TransactionState.OPEN)
            if made is not None:
                await record_change(connection, f"begin transaction {request.id}")
                return _row(made)
            known = await _find_earlier_try(connection, request)
            if known is not None:
                # A concurrent copy of this request has just begun the transaction.
                return known
            shared = await connection.fetchrow(
                f"UPDATE transactions SET expires_at = greatest(expires_at, {_RENEWED})"
                " WHERE log = $1 AND app = $2 AND app_version = $3 AND state = 'OPEN'"
                f" RETURNING {_ROW}",
                request.log,
                request.app,
                request.version,
            )
            # None means that the other transaction of this version has ended, so try again.
            if shared is not None:
                return _row(shared)

    @proven
    async def get(self, connection: Connection, transaction_id: str) -> Transaction:
        """A transaction, read from the primary. Raises: NoSuchTransaction."""
        return _row(await _get(connection, transaction_id))

    async def renew(self, transaction_id: str) -> log_bodies.TransactionAlive:
        """Postpone a transaction's expiry, and return its state. Raises: NoSuchTransaction."""
        state, is_due = await self._state(transaction_id)
        if state is TransactionState.OPEN and is_due:
            await self._renew(transaction_id)
        return log_bodies.TransactionAlive(state=state)

    # Use a plain read, because appends wait for the result, and no data is changed.
    @plain
    async def _state(
        self, connection: Connection, transaction_id: str
    ) -> tuple[TransactionState, bool]:
        record = await connection.fetchrow(
            "SELECT state, expires_at < now() + make_interval(secs => ttl_s * 0.75) AS is_due"
            " FROM transactions WHERE id = $1",
            transaction_id,
        )
        if record is None:
            raise _missing(transaction_id)
        return TransactionState(record["state"]), record["is_due"]

    @transactional
    async def _renew(self, connection: Connection, transaction_id: str) -> None:
        await connection.execute(
            f"UPDATE transactions SET expires_at = {_RENEWED} WHERE id = $1 AND state = 'OPEN'",
            transaction_id,
        )

    @transactional
    async def abort(self, connection: Connection, transaction_id: str) -> Transaction:
        """Abort a transaction and release its ledgers. Idempotent.

        Raises: NoSuchTransaction, TransactionCommitted.
        """
        record = await _get(connection, transaction_id, lock=True)
        if record["state"] == TransactionState.COMMITTED:
            raise TransactionCommitted(log=record["log"])
        if record["state"] == TransactionState.OPEN:
            await end_aborted(connection, [transaction_id])
            connection.counted["aborted"] += 1
        return _row(await _get(connection, transaction_id))

    @transactional
    async def commit(
        self, connection: Connection, transaction_id: str, request: log_bodies.TransactionCommitBody
    ) -> log_bodies.TransactionDone:
        """Publish ledgers onto the log and end the transaction, atomically and once.

        Raises: NoSuchTransaction, TransactionAborted, NoSuchLog, VersionConflict (with the log's
        row as `current`), InvalidRequest; TransactionCommitted if other ledgers were published.
        """
        seen = await _get(connection, transaction_id)
        if seen["state"] != TransactionState.OPEN:
            return await _answer_ended(connection, seen, request)
        log = await read_log(connection, seen["log"], "FOR UPDATE")
        record = await _get(connection, transaction_id, lock=True)
        if record["state"] != TransactionState.OPEN:
            return await _answer_ended(connection, record, request)
        asked = [sealed.ledger_id for sealed in request.ledgers]
        if record["app"] is not None:
            last = await _last_version(connection, record["log"], record["app"])
            if last is not None and last["version"] >= record["app_version"]:
                ended = await _end_committed(connection, record, asked, (), is_duplicate=True)
                await record_change(connection, f"transaction {transaction_id}")
                return log_bodies.TransactionDone(transaction=ended, row=None)
        await _check_sealed(
            connection, transaction_id, request.ledgers, must_be_empty=not request.row
        )
        row: LogMetadata | None = None
        published: tuple[LogItem, ...] = ()
        if request.row is not None:
            check_row(log, request.row)
            published = await _check_published(connection, log, request.row, request.ledgers)
            row = await change_row(
                connection,
                log,
                request.row,
                attempt=request.attempt,
                published=[item.ledger_id for item in published],
                transaction=transaction_id,
            )
        ended = await _end_committed(connection, record, asked, published, is_duplicate=False)
        await record_attempt(connection, request.attempt, f"transaction {transaction_id}")
        connection.counted["committed"] += 1
        return log_bodies.TransactionDone(transaction=ended, row=row)

    @transactional
    async def expire(self, connection: Connection, limit: int) -> int:
        """Abort expired transactions, and delete old ended ones. Returns how many were aborted."""
        if not await ages_count(connection):
            return 0
        records = await connection.fetch(EXPIRED, limit)
        await end_aborted(connection, [record["id"] for record in records])
        await connection.execute(
            "DELETE FROM transactions WHERE id IN (SELECT t.id FROM transactions t"
            " WHERE t.ended_at < now() - make_interval(secs => $1) AND NOT EXISTS"
            " (SELECT FROM app_versions a WHERE a.transaction = t.id)"
            " LIMIT $2 FOR UPDATE SKIP LOCKED)",
            _KEPT_S,
            limit,
        )
        connection.counted["expired"] += len(records)
        return len(records)

    @plain  # only gauges use the counts
    async def count(self, connection: Connection) -> None:
        """Count the OPEN transactions, and the ledgers that wait for deletion."""
        record = await connection.fetchrow(
            "SELECT (SELECT count(*) FROM transactions WHERE state = 'OPEN') AS open,"
            f" (SELECT count(*) FROM unnamed_ledgers WHERE {NOT_SHARED}) AS orphans"
        )
        assert record is not None
        self.open, self.orphans = record["open"], record["orphans"]


async def end_aborted(connection: Connection, ids: Sequence[str]) -> None:
    """Abort transactions, whose rows are locked, without publishing any of their ledgers."""
    if not ids:
        return
    await connection.execute(
        "UPDATE transactions SET state = 'ABORTED', ended_at = now() WHERE id = ANY($1::text[])",
        list(ids),
    )
    await release_unpublished(connection, ids)
    await record_change(connection, f"abort transaction {ids[0]}")


async def _answer_ended(
    connection: Connection, record: asyncpg.Record, request: log_bodies.TransactionCommitBody
) -> log_bodies.TransactionDone:
    """Return the response to a commit of an ended transaction. A retry also gets the log's row."""
    row: LogMetadata | None = None
    target = f"transaction {record['id']}"
    if await is_applied(connection, request.attempt, target) and request.row is not None:
        # The log may have been deleted since, but the transaction is still committed.
        with contextlib.suppress(NoSuchLog):
            row = await read_log(connection, record["log"], "FOR UPDATE")
    return log_bodies.TransactionDone(transaction=_repeated(record, request), row=row)


def _repeated(record: asyncpg.Record, request: log_bodies.TransactionCommitBody) -> Transaction:
    """Return the response to a repeated commit. Raises: TransactionAborted, TransactionCommitted."""
    if record["state"] == TransactionState.ABORTED:
        raise TransactionAborted(log=record["log"])
    row = _row(record)
    asked = tuple(sealed.ledger_id for sealed in request.ledgers)
    if asked == row.requested or row.is_duplicate:
        return row
    if row.app is None:
        raise TransactionCommitted("the transaction was committed with other ledgers", log=row.log)
    # Another process of the app committed the same version first.
    return replace(row, is_duplicate=True)


async def _end_committed(
    connection: Connection,
    record: asyncpg.Record,
    requested: Sequence[int],
    published: Sequence[LogItem],
    *,
    is_duplicate: bool,
) -> Transaction:
    """Commit a transaction with a locked row, and its published items. Returns the transaction."""
    written = {
        ledger["ledger_id"]: ledger
        for ledger in await connection.fetch(
            "DELETE FROM transaction_ledgers WHERE transaction = $1 AND ledger_id ="
            " ANY($2::bigint[]) RETURNING ledger_id, partition, attempt",
            record["id"],
            [item.ledger_id for item in published],
        )
    }
    await release_unpublished(connection, [record["id"]])
    ended = await connection.fetchrow(
        "UPDATE transactions SET state = 'COMMITTED', ended_at = now(), is_duplicate = $2,"
        f" requested = $3::bigint[], published = $4::text::jsonb WHERE id = $1 RETURNING {_ROW}",
        record["id"],
        is_duplicate,
        list(requested),
        orjson.dumps(
            [
                TransactionLedger(
                    **written[item.ledger_id],
                    first_offset=item.first_offset,
                    last_offset=item.last_offset,
                )
                for item in published
            ]
        ).decode(),
    )
    if record["app"] is not None and not is_duplicate:
        await connection.execute(
            "INSERT INTO app_versions (log, app, version, transaction) VALUES ($1, $2, $3, $4)"
            " ON CONFLICT (log, app) DO UPDATE SET version = excluded.version,"
            " transaction = excluded.transaction",
            record["log"],
            record["app"],
            record["app_version"],
            record["id"],
        )
    assert ended is not None, "a transaction with a locked row exists"
    return _row(ended)


async def commit_placed(connection: Connection, log: LogMetadata) -> None:
    """Commit OPEN transactions whose ledgers are part of a rebuilt log. The lost history committed
    these transactions, and an abort would delete the log's ledgers.
    """
    items = await _with_replaced(connection, log)
    records = await connection.fetch(
        f"SELECT {_ROW} FROM transactions WHERE state = 'OPEN' AND id IN (SELECT transaction"
        " FROM transaction_ledgers WHERE ledger_id = ANY($1::bigint[]))"
        " ORDER BY app_version FOR UPDATE",
        [item.ledger_id for item in items],
    )
    for record in records:
        written = {ledger["ledger_id"] for ledger in orjson.loads(record["ledgers"])}
        published = [item for item in items if item.ledger_id in written]
        ids = [item.ledger_id for item in published]
        await _end_committed(connection, record, ids, published, is_duplicate=False)


async def _with_replaced(connection: Connection, log: LogMetadata) -> Sequence[LogItem]:
    """Return the log's items, each after the items that its ledger has replaced (rule 27c)."""
    records = await connection.fetch(
        "SELECT ledger_id, lineage -> 'replaced' AS replaced FROM ledgers"
        " WHERE ledger_id = ANY($1::bigint[]) AND lineage -> 'replaced' <> '[]'",
        [item.ledger_id for item in log.own],
    )
    replaced = {record["ledger_id"]: orjson.loads(record["replaced"]) for record in records}
    found: list[LogItem] = []
    for item in log.items:
        places = sorted(replaced.get(item.ledger_id, ()), key=itemgetter(1))
        firsts = sorted({first for _, first in places})
        ends = dict(zip(firsts, [first - 1 for first in firsts[1:]], strict=False))
        found += [
            LogItem(ledger_id, first, ends.get(first, item.last_offset))
            for ledger_id, first in places
        ]
        found.append(item)
    return found


async def _check_sealed(
    connection: Connection, transaction_id: str, ledgers: Sequence[Sealed], *, must_be_empty: bool
) -> None:
    """Raise InvalidRequest unless these are CLOSED ledgers of the transaction, with these ends."""
    ids = [sealed.ledger_id for sealed in ledgers]
    records = await connection.fetch(
        "SELECT l.ledger_id, l.state, (l.body ->> 'last_entry')::bigint AS last_entry"
        " FROM ledgers l JOIN transaction_ledgers t USING (ledger_id)"
        " WHERE t.transaction = $1 AND l.ledger_id = ANY($2::bigint[])"
        " ORDER BY l.ledger_id FOR NO KEY UPDATE OF l",
        transaction_id,
        ids,
    )
    ends = {record["ledger_id"]: record for record in records}
    errors = []
    for index, sealed in enumerate(ledgers):
        found, problem = ends.get(sealed.ledger_id), ""
        if found is None:
            problem = "is not a ledger of this transaction"
        elif found["state"] != State.CLOSED:
            problem = "is not CLOSED: close it first"
        elif sealed.last_entry not in (None, found["last_entry"]):
            problem = f"ends at {found['last_entry']}, not at {sealed.last_entry}"
        elif must_be_empty and found["last_entry"] != NO_ENTRY:
            problem = "has records, so the request must have the log's row"
        if problem:
            errors.append({"pointer": f"/ledgers/{index}", "detail": problem})
    if len(set(ids)) != len(ids):
        errors.append({"pointer": "/ledgers", "detail": "must not have a ledger twice"})
    if errors:
        detail = "; ".join(f"{error['pointer']} {error['detail']}" for error in errors[:10])
        raise InvalidRequest(detail, errors=errors)


async def _check_published(
    connection: Connection, old: LogMetadata, new: LogMetadata, ledgers: Sequence[Sealed]
) -> tuple[LogItem, ...]:
    """Return the published items if `old` may change to `new` (rule 28). Raises: InvalidRequest."""
    published = published_by(old, new, ledgers)
    ended = [item.ledger_id for item in old.unsealed]
    ended += [item.ledger_id for item in published]
    unsealed = await connection.fetchval(
        "SELECT min(ledger_id) FROM ledgers WHERE ledger_id = ANY($1::bigint[])"
        " AND state IS DISTINCT FROM 'CLOSED'",
        ended,
    )
    if unsealed is not None:
        raise InvalidRequest(
            f"/row: ledger {unsealed} must be CLOSED", log=old.name, ledger_id=unsealed
        )
    return published


async def _lock_log_shared(connection: Connection, name: str) -> None:
    state = await connection.fetchval(
        "SELECT body ->> 'state' FROM logs WHERE name = $1 AND body IS NOT NULL FOR SHARE", name
    )
    if state is None:
        raise NoSuchLog(f"there is no log {name}", log=name)
    if state == LogState.CLOSED:
        raise LogClosed(log=name)


async def _find_earlier_try(
    connection: Connection, request: log_bodies.TransactionBeginBody
) -> Transaction | None:
    """Find the transaction that an earlier copy of this request began. Raises: InvalidRequest."""
    found = await _find(connection, request.id)
    if found is None:
        return None
    begun = (found["log"], found["app"], found["app_version"])
    if begun != (request.log, request.app, request.version):
        raise InvalidRequest("another transaction has this id: choose a new id")
    return _row(found)


async def _insert(
    connection: Connection, request: log_bodies.TransactionBeginBody, *, state: TransactionState
) -> asyncpg.Record | None:
    """Insert a row. Returns None if the id is in use, or an OPEN transaction has this version."""
    return await connection.fetchrow(
        "INSERT INTO transactions (id, log, app, app_version, state, is_duplicate, ttl_s,"
        " expires_at, ended_at) VALUES ($1, $2, $3, $4, $5, $5 <> 'OPEN', $6::int,"
        " now() + make_interval(secs => $6::int), CASE WHEN $5 = 'OPEN' THEN NULL ELSE now() END)"
        f" ON CONFLICT DO NOTHING RETURNING {_ROW}",
        request.id,
        request.log,
        request.app,
        request.version,
        state.value,
        request.expires_in_s,
    )


async def _answer_old_version(
    connection: Connection, request: log_bodies.TransactionBeginBody, done: asyncpg.Record
) -> Transaction:
    """Return the response to the begin of a version that is not above the app's last version."""
    if done["version"] == request.version:
        return _row(await _get(connection, done["transaction"]))
    made = await _insert(connection, request, state=TransactionState.COMMITTED)
    if made is not None:
        return _row(made)
    known = await _find_earlier_try(connection, request)
    assert known is not None, "the insert must have failed because of an equal id"
    return known


async def _last_version(connection: Connection, log: str, app: str) -> asyncpg.Record | None:
    """Return the app's last version, which can't change while the log's row is locked."""
    return await connection.fetchrow(
        "SELECT version, transaction FROM app_versions WHERE log = $1 AND app = $2", log, app
    )


async def _find(
    connection: Connection, transaction_id: str, *, lock: bool = False
) -> asyncpg.Record | None:
    return await connection.fetchrow(
        f"SELECT {_ROW} FROM transactions WHERE id = $1 {'FOR UPDATE' if lock else ''}",
        transaction_id,
    )


async def _get(
    connection: Connection, transaction_id: str, *, lock: bool = False
) -> asyncpg.Record:
    """Read a transaction's record, and lock its row with `lock`. Raises: NoSuchTransaction."""
    found = await _find(connection, transaction_id, lock=lock)
    if found is None:
        raise _missing(transaction_id)
    return found


def _missing(transaction_id: str) -> NoSuchTransaction:
    # The transaction may have existed, but its outcome is now unknown.
    return NoSuchTransaction(
        f"there is no transaction {transaction_id}, or it ended more than {_KEPT_S // 86_400} days ago"
    )


def _row(record: asyncpg.Record) -> Transaction:
    """The transaction from a database record."""
    ledgers = orjson.loads(record["ledgers"])
    return value_of(Transaction, record, version=record["app_version"], ledgers=ledgers)
