"""Ledger rows in Postgres: create, read, compare-and-swap, delete, list.

Each change is one transaction that writes the row, the attempt's token (rule 6), missed entries
(rule 8) and the index of members. A trigger announces the change. The transaction locks the row
before it looks up the token, so that a concurrent retry of the attempt finds the token.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import asyncpg
import orjson

from quorumlog import errors
from quorumlog.protocol import changes
from quorumlog.protocol.heads import LedgerHead
from quorumlog.protocol.ids import member_incarnation, member_name
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.transaction import TransactionState
from quorumlog.wire.bodies import (
    HeldBody,
    LedgerChange,
    LedgerCreateBody,
    LedgerHeads,
    LedgerHeadsAsk,
    LedgerProof,
    RowDelete,
    document_of,
    json_of,
    received,
)
from quorumlog.wire.log_bodies import ATTEMPT_TAG, PARTITION_TAG, TRANSACTION_TAG, LedgerIds
from quorumlog.wire.position_bodies import OWN_LOGS
from quorumlog.wire.repair_bodies import repairs_of
from services.metadata.attempts import (
    found_once,
    is_applied,
    record_attempt,
    target_of,
    try_once,
    try_record,
    used_otherwise,
)
from services.metadata.cookies import hold_members
from services.metadata.database import Connection, RowStore, listing, proven, transactional
from services.metadata.forks import shared_among
from services.metadata.losses import HeldCopies, check_end, lost_of
from services.metadata.repairs import add_repairs, drop_repairs
from services.metadata.sql import has_more, ids_of, is_shown, json_rest, page_of, utc, value_of

ROW: Final = (
    "ledger_id, version, attempt::text AS attempt, first_offset, lineage::text AS lineage,"
    " body::text AS body,"
    f" {utc('created_at')}"
)
_HEADS: Final = (
    "SELECT ledger_id, version, state, body -> 'writer' ->> 'id' AS writer_id FROM ledgers"
    " WHERE ledger_id = ANY($1::bigint[]) ORDER BY ledger_id"
)
_CREATE: Final = "create ledger "


@dataclass(frozen=True, slots=True)
class LedgerFilter:
    """Conditions for the ledgers of a list. None matches all ledgers."""

    state: State | None = None
    bookie: str | None = None
    """A member (`name@incarnation`), or a bookie's name, for any incarnation."""
    log: str | None = None
    metadata: Mapping[str, str] | None = None
    shown: str | None = None
    """The grants that limit the list (`wire/bodies.py`, SHOWN)."""


class LedgerStore(RowStore):
    """The store of ledgers' rows."""

    @proven
    async def get(self, connection: Connection, ledger_id: int) -> LedgerMetadata:
        """A ledger's row, read from the primary. Raises: NoSuchLedger."""
        return await read_ledger(connection, ledger_id)

    @proven
    async def proofs(
        self, connection: Connection, holder: str, asked: Sequence[HeldBody]
    ) -> Sequence[LedgerProof]:
        """Return the metadata of the ledgers that a bookie (`holder`) requests, in the order of `asked`.

        For each ledger, the bookie reports which changes (`attempts`) made its copies of the metadata. If the
        database lacks one of these changes, its row may be older than the bookie's copy. The proof then has the
        missing changes instead of the row, and the bookie must not delete the ledger (rule 18c).
        """
        attempts = tuple(attempt for each in asked for attempt in each.attempts)
        held = HeldCopies(holder, attempts)
        lost = set(await lost_of(connection, self.database.memory, held))
        records = await connection.fetch(
            f"SELECT {ROW} FROM ledgers WHERE ledger_id = ANY($1::bigint[])",
            sorted({each.ledger_id for each in asked}),
        )
        found = {record["ledger_id"]: record for record in records}
        return [
            _proof(connection, each, found.get(each.ledger_id), lost.intersection(each.attempts))
            for each in asked
        ]

    @proven
    async def heads(self, connection: Connection, request: LedgerHeadsAsk) -> LedgerHeads:
        """The versions and writers of many ledgers, present or deleted, read from the primary."""
        # Write handles and log owners may end because of the response. Therefore the database must
        # have the caller's witnesses (rule 18a).
        records = await connection.fetch(_HEADS, sorted(set(request.ledgers)))
        return LedgerHeads(ledgers=tuple(value_of(LedgerHead, record) for record in records))

    async def create(self, request: LedgerCreateBody) -> LedgerMetadata:
        """Create a ledger, or return the ledger that an earlier copy of the request created.

        Raises: InvalidRequest, LedgerExists, StaleMember; NoSuchLedger if the ledger was deleted.
        """
        changes.check_new_ledger(request.row)
        try:
            return await self.database.transact(lambda connection: _create(connection, request))
        except _AlreadyCreated as repeated:
            ledger_id = repeated.ledger_id
            # A plain read isn't enough: a synchronous standby may lack the first copy's change.
            return await self.database.transact(
                lambda connection: lock_ledger(connection, ledger_id)
            )

    @transactional
    async def change(
        self,
        connection: Connection,
        request: LedgerChange,
        held: Sequence[HeldCopies] | None = None,
    ) -> LedgerMetadata:
        """Compare-and-swap a ledger's row on `row.version`, and return the changed row. `held` has
        the bookies' copies of the row; None if they were not requested.

        Raises: NoSuchLedger, VersionConflict and AlreadyDone (with `current`), InvalidRequest,
        StaleMember; RowUnproven if copies must be requested; CopyLost if a bookie has a lost version.
        """
        row = request.row
        old = await lock_ledger(connection, row.ledger_id)
        target = f"ledger {row.ledger_id}"
        if await is_applied(connection, request.attempt, target):
            return old
        if await found_once(connection, request.once) is not None:
            raise errors.AlreadyDone(ledger_id=row.ledger_id, current=document_of(old))
        check_row(old, row)
        changes.check_ledger(old, row)
        await hold_members(connection, changes.added_members(old, row), ledger_id=row.ledger_id)
        await check_end(connection, old, row, held)
        changed = await write_row(connection, row.changed_by(request.attempt, old))
        await try_once(connection, request.once)
        await record_attempt(connection, request.attempt, target)
        if (row.fragments, row.repairs) != (old.fragments, old.repairs):
            await connection.execute(
                "DELETE FROM ledger_members WHERE ledger_id = $1", row.ledger_id
            )
            await index_members(connection, {row.ledger_id: row})
        gaps = ((gap.member, gap.first, gap.last) for gap in request.missed)
        await add_repairs(connection, repairs_of(row.ledger_id, gaps))
        return changed

    @transactional
    async def delete(self, connection: Connection, ledger_id: int, request: RowDelete) -> None:
        """Replace a CLOSED ledger's row by a tombstone.

        A ledger that a log references is deleted only with the log. A ledger that was created for a
        log without becoming part of it may be deleted while open, since its writer never wrote (rule
        22). Raises: NoSuchLedger, VersionConflict, OwnedByLog, InvalidRequest if the ledger is not
        CLOSED.
        """
        target = f"delete ledger {ledger_id}"
        try:
            old = await lock_ledger(connection, ledger_id)
        except errors.NoSuchLedger:
            if await is_applied(connection, request.attempt, target):
                return
            raise
        check_deleted(old, request)
        if old.log is None and old.state is not State.CLOSED:
            raise errors.InvalidRequest(
                "only a CLOSED ledger can be deleted: recover the ledger first", ledger_id=ledger_id
            )
        await leave_tombstone(connection, old)
        await record_attempt(connection, request.attempt, target)

    @listing
    async def naming(
        self, connection: Connection, bookie: str, *, after: int = -1, limit: int
    ) -> LedgerIds:
        """Ascending ids above `after` of the ledgers that reference a bookie in any incarnation."""
        return LedgerIds(ledgers=await ids_of(connection, NAMING, bookie, after, limit))

    @listing
    async def list(
        self, connection: Connection, wanted: LedgerFilter, *, after: int | None, limit: int
    ) -> tuple[list[bytes], int | None]:
        """One page of rows as JSON, in order of ledger ids, and the `after` of the next page."""
        query, values = list_query(wanted, after=after, limit=limit)
        records = await connection.fetch(query, *values)
        rows = [_json_of(connection, record) for record in records if record["is_match"]]
        return rows, records[-1]["ledger_id"] if has_more(records) else None


NAMING: Final = (
    "SELECT DISTINCT ledger_id FROM ledger_members WHERE name = $1 AND ledger_id > $2"
    " ORDER BY ledger_id LIMIT $3"
)


def list_query(wanted: LedgerFilter, *, after: int | None, limit: int) -> tuple[str, list[Any]]:
    """The SQL query of a page, and the values of its parameters."""
    values: list[Any] = [-1 if after is None else after]
    is_match = "true"
    conditions = ["l.ledger_id > $1", "l.body IS NOT NULL"]

    def value(given: object) -> str:
        values.append(given)
        return f"${len(values)}"

    if wanted.state is not None:
        conditions.append(f"l.state = {value(wanted.state.value)}")
    if wanted.log is not None:
        conditions.append(f"l.log = {value(wanted.log)}")
    if wanted.metadata:
        conditions += [
            f"l.ledger_id IN (SELECT t.ledger_id FROM ledger_tags t WHERE t.tag = {value(tag)}"
            " AND t.ledger_id > $1)"
            for tag in map(_tag, wanted.metadata.items())
        ]
        # Different pairs may have equal hashes, so compare the bodies of the page's rows.
        text = orjson.dumps(dict(wanted.metadata)).decode()
        is_match = f"body -> 'custom' @> {value(text)}::text::jsonb"
    if wanted.bookie is not None:
        name, at, incarnation = wanted.bookie.rpartition("@")
        member = f"m.name = {value(name if at else wanted.bookie)}"
        if at:
            member += f" AND m.incarnation = {value(int(incarnation))}"
        conditions.append(
            "l.ledger_id IN (SELECT m.ledger_id FROM ledger_members m"
            f" WHERE {member} AND m.ledger_id > $1)"
        )
    if wanted.shown is not None:
        # Hidden rows must not count towards the page's end, which would reveal that they exist.
        conditions.append(is_shown("l.owner", wanted.shown, value))
        names = ", ".join(f"'{name}'" for name in sorted(OWN_LOGS))
        conditions.append(f"(l.log IS NULL OR l.log NOT IN ({names}))")
    rows = (
        "SELECT ledger_id, version, attempt, first_offset, lineage, body, created_at, body_bytes FROM ledgers l"
        f" WHERE {' AND '.join(conditions)}"
    )
    row = f"{ROW}, {is_match} AS is_match"
    return page_of(rows, order="ledger_id", row=row, limit=value(limit)), values


def _json_of(connection: Connection, record: asyncpg.Record) -> bytes:
    """A row as JSON with decrypted keys. Raises: MetadataUnavailable if KEY_FILE lacks the key."""
    attempt, offset = (record["attempt"] or "").encode(), record["first_offset"]
    return b'{"ledger_id":%d,"attempt":"%b","first_offset":%b,"lineage":%b,%b' % (
        record["ledger_id"],
        attempt,
        b"null" if offset is None else b"%d" % offset,
        (record["lineage"] or "null").encode(),
        json_rest(record, connection.key_ring.opened(record["ledger_id"], record["body"])),
    )


def row_of(
    connection: Connection, record: asyncpg.Record | None, ledger_id: int | None = None
) -> LedgerMetadata:
    """The ledger's row from a database record. Raises: NoSuchLedger (with `deleted`)."""
    if record is None or record["body"] is None:
        is_deleted = record is not None
        detail = (
            f"ledger {ledger_id} is deleted" if is_deleted else f"there is no ledger {ledger_id}"
        )
        raise errors.NoSuchLedger(detail, ledger_id=ledger_id, deleted=is_deleted)
    return received(LedgerMetadata, _json_of(connection, record))


def _proof(
    connection: Connection, held: HeldBody, record: asyncpg.Record | None, lost: Collection[str]
) -> LedgerProof:
    row = None
    if record is not None and record["body"] is not None and not lost:
        row = row_of(connection, record)
    return LedgerProof(
        ledger_id=held.ledger_id,
        row=row,
        deleted=record is not None and record["body"] is None and not lost,
        lost=tuple(sorted(lost)),
    )


def body_of(connection: Connection, row: LedgerMetadata, ledger_id: int) -> str:
    """The content of the column `body`: all fields that a change may set, with encrypted keys."""
    return connection.key_ring.sealed(ledger_id, json_of(row, without=row.STORE_FIELDS).decode())


def check_row(current: changes.Row, changed: changes.Row) -> None:
    """Raise VersionConflict (with `current`) unless `changed` was made from the current row."""
    if not changes.is_made_from(current, changed):
        raise _conflict(current)


def check_deleted(current: changes.Row, request: RowDelete) -> None:
    """Raise VersionConflict (with `current`) if a deletion is for another version of the row."""
    if not changes.is_row(current, version=request.version, attempt=request.row_attempt):
        raise _conflict(current)


def _conflict(current: changes.Row) -> errors.VersionConflict:
    reported = {
        "detail": f"the current version is {current.version}",
        "current": document_of(current),
    }
    if isinstance(current, LedgerMetadata):
        return errors.VersionConflict(**reported, ledger_id=current.ledger_id)
    return errors.VersionConflict(**reported, log=current.name)


class _AlreadyCreated(Exception):
    """Another attempt of this creation has created the ledger with this id."""

    def __init__(self, ledger_id: int) -> None:
        super().__init__(ledger_id)
        self.ledger_id = ledger_id


async def _create(connection: Connection, request: LedgerCreateBody) -> LedgerMetadata:
    await _raise_if_created(connection, request)
    await hold_members(connection, changes.added_members(None, request.row))
    record = await _insert(connection, request)
    row = row_of(connection, record)
    # If two copies of the request run concurrently, the later copy waits here for the earlier copy.
    if not await try_once(connection, request.once, row.ledger_id):
        await _raise_if_created(connection, request)
    if not await try_record(connection, request.attempt, f"{_CREATE}{row.ledger_id}"):
        await _raise_if_created(connection, request)
    await index_members(connection, {row.ledger_id: row})
    tags = dict(row.extra)
    if TRANSACTION_TAG in tags:
        await _join_transaction(connection, row, tags)
    elif row.log is not None:
        await connection.execute(
            "INSERT INTO unnamed_ledgers (ledger_id) VALUES ($1)", row.ledger_id
        )
    await index_tags(connection, {row.ledger_id: row})
    return row


async def _join_transaction(
    connection: Connection, row: LedgerMetadata, tags: Mapping[str, str]
) -> None:
    """Add a new ledger to an OPEN transaction, and renew the transaction."""
    name = tags[TRANSACTION_TAG]
    # The row lock keeps the transaction from ending before the ledger is added.
    log = await connection.fetchval(
        "UPDATE transactions SET expires_at = now() + make_interval(secs => ttl_s)"
        " WHERE id = $1 AND state = 'OPEN' RETURNING log",
        name,
    )
    if log is None:
        state = await connection.fetchval("SELECT state FROM transactions WHERE id = $1", name)
        raise _ENDED_ERRORS.get(state, errors.NoSuchTransaction)(f"transaction {name}", log=row.log)
    if log != row.log:
        raise errors.InvalidRequest(
            f"the transaction is for the log {log}: begin one for {row.log}"
        )
    await connection.execute(
        "INSERT INTO transaction_ledgers (ledger_id, transaction, partition, attempt)"
        " VALUES ($1, $2, $3::text::bigint, $4::text::bigint)",
        row.ledger_id,
        name,
        tags.get(PARTITION_TAG),
        tags.get(ATTEMPT_TAG),
    )


_ENDED_ERRORS: Final[dict[str | None, type[errors.QuorumLogError]]] = {
    TransactionState.COMMITTED: errors.TransactionCommitted,
    TransactionState.ABORTED: errors.TransactionAborted,
}


async def _insert(connection: Connection, request: LedgerCreateBody) -> asyncpg.Record:
    chosen = request.row.ledger_id
    while True:
        ledger_id = chosen
        if chosen < 0:
            ledger_id = await connection.fetchval("SELECT next_ledger_id()")
        record = await connection.fetchrow(
            "INSERT INTO ledgers (ledger_id, version, body, attempt)"
            " VALUES ($1, 1, $2::text::jsonb, $3)"
            f" ON CONFLICT DO NOTHING RETURNING {ROW}",
            ledger_id,
            body_of(connection, replace(request.row, ancestors=()), ledger_id),
            request.attempt,
        )
        if record is not None:
            return record
        if chosen >= 0:
            await _raise_if_created(connection, request)
            raise errors.LedgerExists(ledger_id=chosen)


async def _raise_if_created(connection: Connection, request: LedgerCreateBody) -> None:
    """Raise _AlreadyCreated if an earlier copy of the attempt or request created a ledger."""
    target = await target_of(connection, request.attempt)
    if target is not None:
        if not target.startswith(_CREATE):
            raise used_otherwise(target)
        raise _AlreadyCreated(int(target.removeprefix(_CREATE)))
    ledger_id = await found_once(connection, request.once)
    if ledger_id is not None:
        raise _AlreadyCreated(int(ledger_id))


async def lock_ledger(connection: Connection, ledger_id: int) -> LedgerMetadata:
    """A ledger's row, locked until the transaction ends. Raises: NoSuchLedger."""
    return await read_ledger(connection, ledger_id, "FOR UPDATE")


async def read_ledger(connection: Connection, ledger_id: int, lock: str = "") -> LedgerMetadata:
    """A ledger's row, which `lock` (such as FOR UPDATE) locks. Raises: NoSuchLedger."""
    record = await connection.fetchrow(
        f"SELECT {ROW} FROM ledgers WHERE ledger_id = $1 {lock}", ledger_id
    )
    return row_of(connection, record, ledger_id)


async def write_row(connection: Connection, row: LedgerMetadata) -> LedgerMetadata:
    """Replace the locked row by the next version. Returns the new row."""
    # The condition on the version ensures safety. The lock only saves the useless work of
    # transactions that lose a race.
    record = await connection.fetchrow(
        "UPDATE ledgers SET version = $2, attempt = $4, body = $3::text::jsonb,"
        " changed_at = now() WHERE ledger_id = $1 AND version = $2 - 1 AND body IS NOT NULL"
        f" RETURNING {ROW}",
        row.ledger_id,
        row.version,
        body_of(connection, row, row.ledger_id),
        row.attempt,
    )
    return row_of(connection, record, row.ledger_id)


async def index_members(connection: Connection, rows: Mapping[int, LedgerMetadata]) -> None:
    """Add the members in these rows (by ledger id) to the index of members."""
    # A repair's target is a member even before its first copy (rule 20). The replaced member stays a
    # member until the target has a copy of the row (rule 20b).
    found = [
        (ledger_id, member) for ledger_id, row in rows.items() for member in sorted(row.all_members)
    ]
    await connection.execute(
        "INSERT INTO ledger_members (ledger_id, name, incarnation)"
        " SELECT * FROM unnest($1::bigint[], $2::text[], $3::bigint[])",
        [ledger_id for ledger_id, _ in found],
        [member_name(member) for _, member in found],
        [member_incarnation(member) for _, member in found],
    )


async def index_tags(connection: Connection, rows: Mapping[int, LedgerMetadata]) -> None:
    """Add the custom metadata of new rows (by ledger id) to the index of tags."""
    found = [(ledger_id, _tag(pair)) for ledger_id, row in rows.items() for pair in row.custom]
    if found:
        await connection.execute(
            "INSERT INTO ledger_tags (ledger_id, tag) SELECT * FROM unnest($1::bigint[], $2::bytea[])",
            [ledger_id for ledger_id, _ in found],
            [tag for _, tag in found],
        )


def _tag(pair: tuple[str, str]) -> bytes:
    key, value = pair
    return hashlib.blake2b(f"{len(key)} {key}{value}".encode(), digest_size=16).digest()


async def leave_tombstone(connection: Connection, row: LedgerMetadata) -> None:
    """Replace a locked row by a tombstone.

    No log can add the ledger before the transaction ends: the addition requires the row's lock.
    Raises: OwnedByLog if a log references the ledger.
    """
    if row.log is not None:
        if await shared_among(connection, [row.ledger_id]):
            raise errors.OwnedByLog(
                "a fork references the ledger: delete the fork first",
                ledger_id=row.ledger_id,
                log=row.log,
            )
        released = await connection.fetchval(
            "DELETE FROM unnamed_ledgers WHERE ledger_id = $1 RETURNING ledger_id", row.ledger_id
        )
        if released is None:
            raise errors.OwnedByLog(ledger_id=row.ledger_id, log=row.log)
    await bury(connection, [row.ledger_id])


async def leave_tombstones(connection: Connection, ledgers: Collection[int]) -> set[int]:
    """Replace the rows of CLOSED ledgers by tombstones, unless forks reference the ledgers. The
    ledgers' own log no longer references them. Returns the ids of the deleted ledgers.
    """
    closed = {
        *await ids_of(
            connection,
            "SELECT ledger_id FROM ledgers WHERE ledger_id = ANY($1::bigint[]) AND state = 'CLOSED'"
            " ORDER BY ledger_id FOR UPDATE",
            sorted(ledgers),
        )
    }
    # Use a separate statement, because the locking statement may have waited and sees older rows.
    deleted = closed - await shared_among(connection, closed)
    await bury(connection, sorted(deleted))
    return deleted


async def bury(connection: Connection, ledger_ids: Sequence[int]) -> None:
    """Replace locked rows by tombstones, and delete the ledgers' members, tags and repairs."""
    for table in ("ledger_members", "ledger_tags", "unproven_ledgers"):
        await connection.execute(
            f"DELETE FROM {table} WHERE ledger_id = ANY($1::bigint[])", ledger_ids
        )
    await drop_repairs(connection, ledger_ids)
    await connection.execute(
        "UPDATE ledgers SET version = version + 1, body = NULL, changed_at = now()"
        " WHERE ledger_id = ANY($1::bigint[])",
        ledger_ids,
    )
