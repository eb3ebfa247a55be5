"""The repair queue of missed entries, with one item per ledger and member (rule 8). Also the leases
of workers and auditors, and operators' settings.

A worker can change an item only with the item's current version. Each claim, failure and new range
gives the item a version that was never used before. Therefore a worker can't clear entries that it
has not copied, even if its claim has expired, or the item has new ranges or was replaced.

To avoid deadlocks, a transaction locks several items in the order of ledger and member (bytewise),
or skips locked items.
"""

from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Final

import asyncpg
import orjson

from quorumlog.errors import NoSuchRepair, VersionConflict
from quorumlog.wire import repair_bodies
from quorumlog.wire.bodies import received
from services.metadata import audit
from services.metadata.database import Connection, RowStore, listing, plain, transactional
from services.metadata.sql import has_more, page_of, utc, value_of

_UNCOUNTED: Final = 32767
"""Value for "survivors not counted", which sorts last."""
_PAUSE_S_MAX: Final = 300
"""Maximum pause after failures, since a member may be down for long (chosen by judgement)."""

_ROW: Final = (
    "ledger_id, member, ranges, version, survivors, failures, detail, worker, moves, "
    + utc("created_at")
)

# MATERIALIZED is needed, because a join could rerun the subquery and lock more rows than the limit.
CLAIM: Final = (
    "WITH picked AS MATERIALIZED (SELECT ledger_id AS picked_id, member AS picked_member"
    " FROM repairs WHERE next_try_at <= clock_timestamp()"
    " ORDER BY survivors, next_try_at, ledger_id, member LIMIT $3 FOR UPDATE SKIP LOCKED)"
    " UPDATE repairs SET worker = $1, version = nextval('repair_versions'),"
    " next_try_at = clock_timestamp() + make_interval(secs => $2)"
    " FROM picked WHERE ledger_id = picked_id AND member = picked_member"
    f" RETURNING {_ROW}"
)

PAGE: Final = page_of(
    # The limit uses the stored size of the ranges, which may be compressed. 500 bytes stand for the
    # other columns.
    "SELECT *, 500 + pg_column_size(ranges) + octet_length(detail) AS body_bytes FROM repairs"
    " WHERE (ledger_id, member) > ($1, $2)",
    order="ledger_id, member",
    row=_ROW,
    limit="$3",
)

SUMMARY: Final = (
    "SELECT count(DISTINCT ledger_id) AS ledgers, count(*) AS items,"
    " count(*) FILTER (WHERE worker IS NULL AND failures > 0"
    " AND next_try_at > clock_timestamp()) AS waiting,"
    " coalesce(extract(epoch FROM clock_timestamp() - min(created_at)), 0)::float8 AS oldest_s"
    " FROM repairs"
)
_HURRIED_MAX: Final = 2000
"""Items per transaction, which must end within the deadline. 100,000 would take over 2 s."""

# now() can use the index, but clock_timestamp() can't. An item that is already due is not picked.
HURRY: Final = (
    "WITH waiting AS MATERIALIZED (SELECT ledger_id AS some_id, member AS some_member"
    " FROM repairs WHERE worker IS NULL AND next_try_at > now()"
    f" ORDER BY next_try_at LIMIT {_HURRIED_MAX}),"
    " picked AS MATERIALIZED (SELECT ledger_id AS picked_id, member AS picked_member"
    " FROM waiting JOIN repairs ON ledger_id = some_id AND member = some_member"
    " WHERE worker IS NULL AND next_try_at > now()"
    ' ORDER BY ledger_id, member COLLATE "C" FOR UPDATE OF repairs)'
    " UPDATE repairs SET next_try_at = now()"
    " FROM picked WHERE ledger_id = picked_id AND member = picked_member"
)


_MERGE: Final = (
    "ON CONFLICT (ledger_id, member) DO UPDATE SET"
    " ranges = repairs.ranges + excluded.ranges, version = nextval('repair_versions'),"
    " moves = repairs.moves OR excluded.moves,"
    # The merge ends a claim, so the item must not wait for the end of the claim's lease. A pause
    # after a failure also ends once the repair may move to another member.
    " worker = NULL, next_try_at = CASE WHEN repairs.worker IS NULL"
    " AND (repairs.moves OR NOT excluded.moves) THEN repairs.next_try_at"
    " ELSE clock_timestamp() END,"
    f" survivors = CASE WHEN excluded.survivors = {_UNCOUNTED} THEN repairs.survivors"
    " ELSE excluded.survivors END"
)
ADD: Final = (
    "INSERT INTO repairs (ledger_id, member, ranges, survivors, moves)"
    " SELECT l.ledger_id, a.member, a.ranges::int8multirange, a.survivors, a.moves"
    " FROM unnest($1::bigint[], $2::text[], $3::text[], $4::smallint[], $5::boolean[])"
    " AS a (ledger_id, member, ranges, survivors, moves)"
    " CROSS JOIN LATERAL (SELECT ledger_id FROM ledgers WHERE ledger_id = a.ledger_id"
    f" AND body IS NOT NULL FOR KEY SHARE) l {_MERGE}"
)


class RepairStore(RowStore):
    """The store of the repair queue's items."""

    @listing
    async def page(
        self, connection: Connection, *, after: tuple[int, str], limit: int
    ) -> repair_bodies.RepairList:
        """Items of the queue, by ledger and member. `after` is `ledger_id:member`."""
        records = await connection.fetch(PAGE, *after, limit)
        found = tuple(_repair_of(record) for record in records)
        last = f"{found[-1].ledger_id}:{found[-1].member}" if has_more(records) else None
        return repair_bodies.RepairList(repairs=found, next=last)

    @transactional
    async def add(self, connection: Connection, request: repair_bodies.RepairsAdd) -> None:
        """Queue entries that members lack. Deleted ledgers are skipped."""
        await add_repairs(connection, request.items)

    @listing
    async def summary(self, connection: Connection) -> repair_bodies.RepairSummary:
        """Counts of the whole queue, and the age of its oldest item."""
        record = await connection.fetchrow(SUMMARY)
        assert record is not None
        return repair_bodies.RepairSummary(**dict(record))

    async def hurry(self) -> None:
        """Let all items that failed be retried now, instead of after their pause. Idempotent."""
        while await self._hurry_some() != "UPDATE 0":
            pass

    @transactional
    async def _hurry_some(self, connection: Connection) -> str:
        return await connection.execute(HURRY)

    # Use a transaction, because no repair may rest on a database that went back in time (rule 18a).
    @transactional
    async def claim(
        self, connection: Connection, request: repair_bodies.RepairClaim
    ) -> repair_bodies.RepairList:
        """Claim due items for a worker until its lease ends. Items with fewest survivors come first."""
        records = await connection.fetch(CLAIM, request.worker, request.lease_s, request.limit)
        records.sort(key=itemgetter("survivors", "ledger_id", "member"))
        return repair_bodies.RepairList(repairs=tuple(_repair_of(record) for record in records))

    @transactional
    async def progress(
        self,
        connection: Connection,
        ledger_id: int,
        member: str,
        request: repair_bodies.RepairProgress,
    ) -> repair_bodies.RangesBody:
        """Remove repaired ranges from an item and extend its claim. An empty item is deleted.

        Raises: NoSuchRepair, VersionConflict (with `current`).
        """
        await _lock(connection, ledger_id, member, request.worker, request.version)
        record = await connection.fetchrow(
            "UPDATE repairs SET ranges = ranges - $3::text::int8multirange, failures = 0,"
            " next_try_at = clock_timestamp() + make_interval(secs => $4)"
            f" WHERE ledger_id = $1 AND member = $2 RETURNING {_ROW}",
            ledger_id,
            member,
            _multirange(request.ranges),
            request.lease_s,
        )
        remaining = _repair_of(record).ranges
        if not remaining:
            await connection.execute(
                "DELETE FROM repairs WHERE ledger_id = $1 AND member = $2", ledger_id, member
            )
        return repair_bodies.RangesBody(ranges=remaining)

    @transactional
    async def fail(
        self, connection: Connection, ledger_id: int, member: str, request: repair_bodies.RepairFail
    ) -> None:
        """Release an item after a failure. The item is due after a pause that doubles each time.

        Raises: NoSuchRepair, VersionConflict (with `current`).
        """
        await _lock(connection, ledger_id, member, request.worker, request.version)
        await connection.execute(
            "UPDATE repairs SET worker = NULL, version = nextval('repair_versions'), failures = failures + 1,"
            " detail = $3, next_try_at = clock_timestamp()"
            f" + make_interval(secs => least({_PAUSE_S_MAX}, power(2, least(failures, 20))))"
            " WHERE ledger_id = $1 AND member = $2",
            ledger_id,
            member,
            request.detail,
        )


async def add_repairs(connection: Connection, items: Iterable[repair_bodies.RepairAdd]) -> None:
    """Merge missed ranges into the queue's items, or create items. Deleted ledgers are skipped."""
    merged: dict[tuple[int, str], repair_bodies.RepairAdd] = {}
    for item in items:
        # One SQL statement can change a row only once.
        before = merged.setdefault((item.ledger_id, item.member), item)
        if before is not item:
            ranges, moves = before.ranges + item.ranges, before.moves or item.moves
            both = before.model_copy(update={"ranges": ranges, "moves": moves})
            merged[item.ledger_id, item.member] = both
    if not merged:
        return
    wanted = [merged[key] for key in sorted(merged)]
    await connection.execute(
        ADD,
        [item.ledger_id for item in wanted],
        [item.member for item in wanted],
        [_multirange(item.ranges) for item in wanted],
        [_UNCOUNTED if item.survivors is None else item.survivors for item in wanted],
        [item.moves for item in wanted],
    )


async def drop_repairs(connection: Connection, ledger_ids: Sequence[int]) -> None:
    """Delete the items of ledgers, whose rows are locked, before the ledgers' deletion."""
    await connection.execute(
        "SELECT FROM repairs WHERE ledger_id = ANY($1::bigint[])"
        ' ORDER BY ledger_id, member COLLATE "C" FOR UPDATE',
        ledger_ids,
    )
    await connection.execute("DELETE FROM repairs WHERE ledger_id = ANY($1::bigint[])", ledger_ids)


async def _lock(
    connection: Connection, ledger_id: int, member: str, worker: str, version: int
) -> None:
    record = await connection.fetchrow(
        f"SELECT {_ROW} FROM repairs WHERE ledger_id = $1 AND member = $2 FOR UPDATE",
        ledger_id,
        member,
    )
    if record is None:
        raise NoSuchRepair("the repair queue has no such item", ledger_id=ledger_id, bookie=member)
    if record["version"] != version or record["worker"] != worker:
        raise VersionConflict(
            "the claim has ended, or the item has changed since: claim the item again",
            ledger_id=ledger_id,
            bookie=member,
            current=_repair_of(record).model_dump(mode="json"),
        )


def _multirange(ranges: repair_bodies.Ranges) -> str:
    """A multirange in Postgres syntax."""
    return "{" + ",".join(f"[{first},{last}]" for first, last in ranges) + "}"


def _repair_of(record: asyncpg.Record | None) -> repair_bodies.RepairItem:
    assert record is not None
    ranges = tuple((found.lower, found.upper - 1) for found in record["ranges"])
    survivors = None if record["survivors"] == _UNCOUNTED else record["survivors"]
    return value_of(repair_bodies.RepairItem, record, ranges=ranges, survivors=survivors)


_LEFT: Final = (
    "greatest(0, extract(epoch FROM expires_at - clock_timestamp()))::float8 AS expires_in_s"
)


class LeaseStore(RowStore):
    """The store of leases, which expire by the database's clock. New holders get higher tokens.

    Leases only avoid duplicate work, such as the work of two auditors. They don't ensure safety.
    """

    @transactional
    async def take(
        self, connection: Connection, name: str, request: repair_bodies.LeaseTake
    ) -> repair_bodies.Lease:
        """Take a free lease, or renew the caller's own lease. Returns the current holder."""
        await connection.execute(
            "INSERT INTO leases AS l (name, holder, token, expires_at)"
            " VALUES ($1, $2, 1, clock_timestamp() + make_interval(secs => $3))"
            " ON CONFLICT (name) DO UPDATE SET holder = excluded.holder,"
            " token = l.token + (l.holder <> excluded.holder)::int,"
            " expires_at = clock_timestamp() + make_interval(secs => $3)"
            " WHERE l.holder = excluded.holder OR l.expires_at <= clock_timestamp()",
            name,
            request.holder,
            request.ttl_s,
        )
        record = await connection.fetchrow(
            f"SELECT holder, token, {_LEFT} FROM leases WHERE name = $1", name
        )
        assert record is not None
        return value_of(repair_bodies.Lease, record, name=name)


GET: Final = "SELECT body::text AS body, triggers FROM repair_settings WHERE is_only"
_CHANGED: Final = "changed_at = now() WHERE is_only RETURNING body::text AS body, triggers"


class RepairSettingsStore(RowStore):
    """Operators' settings for autorecovery: one row for all processes, which survives restarts."""

    @plain  # a database that went back in time refuses leases and claims, so its settings do no harm
    async def get(self, connection: Connection) -> repair_bodies.RepairSettings:
        """Operators' settings for all processes of autorecovery."""
        return _settings_of(await connection.fetchrow(GET))

    @transactional
    async def change(
        self, connection: Connection, request: repair_bodies.RepairSettingsPut
    ) -> repair_bodies.RepairSettings:
        """Change the given settings for all processes. The settings survive restarts. Concurrent
        changes of different settings both apply.
        """
        changed = _settings_of(
            await connection.fetchrow(
                f"UPDATE repair_settings SET body = body || $1::text::jsonb, {_CHANGED}",
                request.model_dump_json(),
            )
        )
        await audit.keep(connection)
        return changed

    @transactional
    async def trigger(self, connection: Connection) -> repair_bodies.RepairSettings:
        """Request a full audit from every process."""
        return _settings_of(
            await connection.fetchrow(
                f"UPDATE repair_settings SET triggers = triggers + 1, {_CHANGED}"
            )
        )


def _settings_of(record: asyncpg.Record | None) -> repair_bodies.RepairSettings:
    assert record is not None, "a migration must have inserted the row"
    fields = orjson.loads(record["body"]) | {"triggers": record["triggers"]}
    return received(repair_bodies.RepairSettings, orjson.dumps(fields))
