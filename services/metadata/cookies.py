"""Cookies: which data a bookie's name stands for (rule 15), changed by compare-and-swap."""

from typing import Final

import asyncpg
import orjson

from quorumlog.errors import InvalidRequest, RouteNotFound, VersionConflict
from quorumlog.wire.bodies import CookiePut, CookieRow
from services.metadata.database import Connection, Database
from services.metadata.ledgers import is_settled, settle

_ROW: Final = "name, version, cookie::text AS cookie"


class CookieStore:
    """The cookies' rows, and the cluster's id that each of them carries."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def cluster_id(self) -> str:
        """Drawn when the database was made; another database is another cluster (rule 18)."""
        found = await self._database.run(
            lambda connection: connection.fetchval("SELECT cluster_id::text FROM cluster")
        )
        return str(found)

    async def get(self, name: str) -> CookieRow:
        """One cookie. Raises: RouteNotFound, which names the bookie."""
        record = await self._database.run(
            lambda connection: connection.fetchrow(
                f"SELECT {_ROW} FROM cookies WHERE name = $1", name
            )
        )
        if record is None:
            raise RouteNotFound("no bookie of this name is registered", bookie=name)
        return _row_of(record)

    async def list(self) -> list[CookieRow]:
        """All registered bookies, by name. There are as many as machines: one page."""
        records = await self._database.run(
            lambda connection: connection.fetch(f"SELECT {_ROW} FROM cookies ORDER BY name")
        )
        return [_row_of(record) for record in records]

    async def put(self, name: str, request: CookiePut) -> CookieRow:
        """Create (no version) or compare-and-swap a cookie.

        Raises: VersionConflict (with `current`), InvalidRequest.
        """

        async def work(connection: Connection) -> CookieRow:
            # A row to lock need not exist yet, so the name itself is locked.
            await connection.execute(
                "SELECT pg_advisory_xact_lock(hashtextextended('cookie ' || $1, 0))", name
            )
            record = await connection.fetchrow(f"SELECT {_ROW} FROM cookies WHERE name = $1", name)
            old = None if record is None else _row_of(record)
            target = f"cookie {name}"
            if old is not None and await is_settled(connection, request.attempt, target):
                return old
            if (None if old is None else old.version) != request.version:
                raise VersionConflict(
                    f"the cookie of {name} "
                    + ("does not exist" if old is None else f"has version {old.version}"),
                    bookie=name,
                    current=None if old is None else old.model_dump(mode="json"),
                )
            await self._check(connection, name, old, request)
            changed = await connection.fetchrow(
                "INSERT INTO cookies (name, version, cookie) VALUES ($1, 1, $2::text::jsonb)"
                " ON CONFLICT (name) DO UPDATE SET cookie = excluded.cookie,"
                " version = cookies.version + 1, changed_at = now()"
                f" RETURNING {_ROW}",
                name,
                request.cookie.model_dump_json(),
            )
            await settle(connection, request.attempt, target)
            assert changed is not None
            return _row_of(changed)

        return await self._database.transact(work)

    async def _check(
        self, connection: Connection, name: str, old: CookieRow | None, request: CookiePut
    ) -> None:
        new = request.cookie
        problems: list[tuple[str, str]] = []
        cluster_id = await connection.fetchval("SELECT cluster_id::text FROM cluster")
        if new.cluster_id != cluster_id:
            problems.append(("/cookie/cluster_id", f"this is cluster {cluster_id} (rule 18)"))
        if old is not None:
            before = old.cookie
            if new.incarnation < before.incarnation:
                problems.append(("/cookie/incarnation", "never goes back (rule 15)"))
            if new.incarnation == before.incarnation and new.instance != before.instance:
                problems.append(("/cookie/instance", "other data is a new incarnation (rule 15)"))
            if new.instance == before.instance and new.boots < before.boots:
                problems.append(("/cookie/boots", "never goes back (rule 15)"))
        if problems:
            raise InvalidRequest(
                "; ".join(f"{pointer}: {detail}" for pointer, detail in problems),
                bookie=name,
                errors=[{"pointer": pointer, "detail": detail} for pointer, detail in problems],
            )


def _row_of(record: asyncpg.Record) -> CookieRow:
    return CookieRow.model_validate_json(
        orjson.dumps(
            {
                "name": record["name"],
                "version": record["version"],
                "cookie": orjson.loads(record["cookie"]),
            }
        )
    )
