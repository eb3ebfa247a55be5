"""Cookies, which identify a bookie's data and change by compare-and-swap (rules 15 and 15b)."""

from collections.abc import Collection
from typing import Final

import asyncpg

from quorumlog.errors import InvalidRequest, NoSuchBookie, VersionConflict
from quorumlog.protocol.changes import check_members, check_new_incarnation
from quorumlog.wire.bodies import (
    BookieUses,
    Cookie,
    CookiePut,
    CookieRow,
    LedgerUse,
    LogEnd,
    received,
)
from services.metadata.attempts import is_applied, record_attempt, record_change
from services.metadata.database import Connection, RowStore, listing, proven, transactional
from services.metadata.losses import forget_holder
from services.metadata.sql import value_of

_ROW: Final = "name, version, cookie::text AS cookie, log_end"

_USES_MAX: Final = 10

USES: Final = (
    "SELECT m.ledger_id, m.name || '@' || m.incarnation AS member, l.state,"
    " coalesce(l.body -> 'fragments' @> jsonb_build_array(jsonb_build_object('bookies',"
    " jsonb_build_array(m.name || '@' || m.incarnation))), true) AS has_place,"
    " coalesce(l.body -> 'repairs' @> jsonb_build_array(jsonb_build_object('leaving',"
    " m.name || '@' || m.incarnation)), false) AS leaves,"
    " coalesce(r.failures, 0) AS failures, coalesce(r.detail, '') AS detail"
    " FROM ledger_members m JOIN ledgers l ON l.ledger_id = m.ledger_id LEFT JOIN repairs r"
    " ON r.ledger_id = m.ledger_id AND r.member = m.name || '@' || m.incarnation"
    " WHERE m.name = $1 ORDER BY m.ledger_id, m.incarnation LIMIT $2"
)
USES_COUNT: Final = "SELECT count(DISTINCT ledger_id) FROM ledger_members WHERE name = $1"
_NAMED: Final = (
    "SELECT greatest((SELECT max(incarnation) FROM ledger_members WHERE name = $1),"
    " (SELECT max(split_part(member, '@', 2)::bigint) FROM repairs"
    " WHERE split_part(member, '@', 1) = $1), -1)"
)
_HELD: Final = (
    "SELECT name, (cookie ->> 'incarnation')::bigint AS incarnation FROM hold_incarnations($1)"
)
REPAIRS_COUNT: Final = "SELECT count(*) FROM repairs WHERE split_part(member, '@', 1) = $1"


class StillNamed(VersionConflict):
    """A live bookie, or a bookie that a ledger or a repair references, can't be decommissioned."""

    status = 409
    title = "The bookie is still needed"


class CookieStore(RowStore):
    """The store of the cookies' rows, and of the cluster's id, which each cookie contains."""

    @proven
    async def cluster_id(self, connection: Connection) -> str:
        """The cluster's id, chosen at random when the database was created (rule 18)."""
        return await _cluster_id(connection)

    @proven
    async def get(self, connection: Connection, name: str) -> CookieRow:
        """A bookie's cookie, read from the primary. Raises: NoSuchBookie with the bookie's name."""
        return await _get(connection, name)

    @proven
    async def list(self, connection: Connection) -> list[CookieRow]:
        """The cookies of all bookies that are not decommissioned, sorted by name, in one page."""
        records = await connection.fetch(
            f"SELECT {_ROW} FROM cookies WHERE retired_at IS NULL ORDER BY name"
        )
        return [_row_of(record) for record in records]

    @transactional
    async def put(self, connection: Connection, name: str, request: CookiePut) -> CookieRow:
        """Register a bookie, or compare-and-swap its cookie if the request has a version.

        Raises: VersionConflict (with `current`), InvalidRequest; IncarnationUsed (with `named`) if
        a ledger or a repair references the incarnation of a new directory, or a later incarnation.
        """
        await lock_name(connection, name)
        record = await connection.fetchrow(f"SELECT {_ROW} FROM cookies WHERE name = $1", name)
        old = None if record is None else _row_of(record)
        target = f"cookie {name}"
        if old is not None and await is_applied(connection, request.attempt, target):
            return old
        if (None if old is None else old.version) != request.version:
            raise VersionConflict(
                f"the cookie of bookie {name} "
                + ("does not exist" if old is None else f"has version {old.version}"),
                bookie=name,
                current=None if old is None else old.model_dump(mode="json"),
            )
        check_cookie(
            name, None if old is None else old.cookie, request.cookie, await _cluster_id(connection)
        )
        is_new = old is None or request.cookie.instance != old.cookie.instance
        if is_new:
            named = await connection.fetchval(_NAMED, name)
            check_new_incarnation(name, request.cookie.incarnation, named)
        changed = await connection.fetchrow(
            "INSERT INTO cookies AS c (name, version, cookie, born_at)"
            " VALUES ($1, 1, $2::text::jsonb, now())"
            " ON CONFLICT (name) DO UPDATE SET cookie = excluded.cookie,"
            " version = c.version + 1, changed_at = now(), retired_at = NULL,"
            # A new instance is a new directory with a new log.
            " log_end = CASE WHEN $3 THEN 0 ELSE c.log_end END,"
            " born_at = CASE WHEN $3 THEN now() ELSE c.born_at END"
            f" RETURNING {_ROW}",
            name,
            request.cookie.model_dump_json(),
            is_new,
        )
        if old is not None and request.cookie.incarnation > old.cookie.incarnation:
            await forget_holder(connection, name)
        await record_attempt(connection, request.attempt, target)
        assert changed is not None
        return _row_of(changed)

    @transactional
    async def note_log_end(self, connection: Connection, name: str, request: LogEnd) -> CookieRow:
        """Store how far a bookie's log is on disk, as reported by the registered process. The value
        never decreases. The cookie's version is unchanged, so the report causes no conflicts.

        Raises: VersionConflict (with `current`), NoSuchBookie.
        """
        await connection.execute(
            "UPDATE cookies SET log_end = $3"
            " WHERE name = $1 AND cookie->>'process' = $2 AND log_end < $3",
            name,
            request.process,
            request.log_end,
        )
        registered = await _get(connection, name)
        if registered.cookie.process != request.process:
            raise VersionConflict(
                f"another process has registered as bookie {name}: stop this process",
                bookie=name,
                current=registered.model_dump(mode="json"),
            )
        return registered

    @listing
    async def uses(self, connection: Connection, name: str, *, limit: int) -> BookieUses:
        """The ledgers and repairs that reference a bookie. Raises: NoSuchBookie."""
        await _get(connection, name)
        return await _uses(connection, name, limit)

    @transactional
    async def retire(self, connection: Connection, name: str, *, version: int) -> None:
        """Decommission a bookie that no ledger and no repair references. Idempotent. The bookie may
        return as a later incarnation. `version` is the version of the dead bookie's cookie.

        Raises: StillNamed.
        """
        # Count first without the lock, for which changes that add the bookie would have to wait. If
        # no ledger is left, the second count is quick.
        await _check_unused(connection, name)
        await lock_name(connection, name)
        now = await connection.fetchrow(
            "SELECT version, retired_at FROM cookies WHERE name = $1", name
        )
        if now is not None and now["retired_at"] is not None:
            return
        if now is None or now["version"] != version:
            raise StillNamed(f"bookie {name} has just registered: stop the bookie", bookie=name)
        await _check_unused(connection, name)
        await connection.execute(
            # No ledger references the bookie, so the bookie may return with an empty directory.
            "UPDATE cookies SET retired_at = now(), version = version + 1,"
            " cookie = cookie || '{\"may_fix\": true}'"
            " WHERE name = $1",
            name,
        )
        await forget_holder(connection, name)
        await record_change(connection, f"retire {name}")


def check_cookie(name: str, old: Cookie | None, new: Cookie, cluster_id: str) -> None:
    """Raise InvalidRequest unless a cookie may change from `old` to `new` (rules 15 and 18)."""
    problems: list[tuple[str, str]] = []
    if new.cluster_id != cluster_id:
        problems.append(
            ("/cookie/cluster_id", f"the database belongs to cluster {cluster_id} (rule 18)")
        )
    if old is not None:
        if new.incarnation < old.incarnation:
            problems.append(("/cookie/incarnation", "must not decrease (rule 15)"))
        if new.incarnation == old.incarnation and new.instance != old.instance:
            problems.append(("/cookie/instance", "requires a higher incarnation (rule 15)"))
        if new.instance == old.instance and new.boots < old.boots:
            problems.append(("/cookie/boots", "must not decrease (rule 15)"))
    if problems:
        raise InvalidRequest(
            "; ".join(f"{pointer}: {detail}" for pointer, detail in problems),
            bookie=name,
            errors=[{"pointer": pointer, "detail": detail} for pointer, detail in problems],
        )


async def _get(connection: Connection, name: str) -> CookieRow:
    record = await connection.fetchrow(f"SELECT {_ROW} FROM cookies WHERE name = $1", name)
    if record is None:
        raise NoSuchBookie(f"no bookie {name} is registered", bookie=name)
    return _row_of(record)


async def _cluster_id(connection: Connection) -> str:
    return str(await connection.fetchval("SELECT cluster_id::text FROM cluster"))


async def lock_name(connection: Connection, name: str) -> None:
    """Lock a bookie's registration until the transaction ends."""
    # Lock the name, because there might be no row yet. Changes that add the bookie to a ledger wait
    # for this lock.
    await connection.execute(
        "SELECT pg_advisory_xact_lock(hashtextextended('cookie ' || $1, 0))", name
    )


async def hold_members(
    connection: Connection, members: Collection[str], *, ledger_id: int | None = None
) -> None:
    """Check that a change may add these members, and lock their bookies' registrations until the
    transaction ends. Raises: StaleMember.
    """
    if members:
        # Registrations wait for this lock, so that phase one of limbo sees every row with an older
        # incarnation.
        records = await connection.fetch(_HELD, sorted(members))
        registered = {record["name"]: record["incarnation"] for record in records}
        check_members(sorted(members), registered, ledger_id=ledger_id)


async def _check_unused(connection: Connection, name: str) -> None:
    """Raise StillNamed if a ledger or a repair references the bookie."""
    found = await _uses(connection, name, _USES_MAX)
    if found.ledgers or found.repairs:
        some = ", ".join(dict.fromkeys(str(use.ledger_id) for use in found.first))
        raise StillNamed(
            f"{found.ledgers} ledgers and {found.repairs} items of the repair queue reference"
            f" bookie {name} (first ledgers: {some or 'none'}): retry when all are repaired",
            bookie=name,
            ledgers=found.ledgers,
            repairs=found.repairs,
            first=[use.ledger_id for use in found.first],
        )


async def _uses(connection: Connection, name: str, limit: int) -> BookieUses:
    records = await connection.fetch(USES, name, limit)
    return BookieUses(
        bookie=name,
        ledgers=await connection.fetchval(USES_COUNT, name),
        repairs=await connection.fetchval(REPAIRS_COUNT, name),
        first=tuple(LedgerUse.model_validate(dict(record), strict=False) for record in records),
    )


def _row_of(record: asyncpg.Record) -> CookieRow:
    return value_of(CookieRow, record, cookie=received(Cookie, record["cookie"]))
