"""The audit log in the database: its pages, and its end (docs/adr/0022-audit-log.md)."""

from datetime import datetime
from typing import Final

from quorumlog.wire.token_bodies import AuditList, AuditRow
from services.metadata.database import (
    Connection,
    Database,
    RowStore,
    ages_count,
    listing,
    transactional,
)
from services.metadata.sql import utc

_PAGE: Final = (
    f"SELECT number, id::text AS id, {utc('at')}, who, remote, via, operation, target FROM audit"
    " WHERE number > $1 AND ($2::timestamptz IS NULL OR at >= $2)"
    " AND ($3::text IS NULL OR target = $3) ORDER BY number LIMIT $4 + 1"
)
_TRIMMED_AT_ONCE: Final = 1000
"""Rows of one transaction: some 10 ms (taste)."""
_NEVER_DAYS: Final = 365_000
"""Nothing is so old."""
_TRIM: Final = (
    f"WITH oldest AS (SELECT number, at FROM audit ORDER BY number LIMIT {_TRIMMED_AT_ONCE})"
    " DELETE FROM audit WHERE number IN (SELECT number FROM oldest"
    " WHERE at < now() - make_interval(days => $1)"
    " OR number <= (SELECT max(number) FROM audit) - $2)"
)


class AuditStore(RowStore):
    """The rows of audited requests."""

    def __init__(self, database: Database, *, days: int, rows_max: int) -> None:
        """What is older than `days`, and all but the last `rows_max`, is deleted."""
        super().__init__(database)
        self._days, self._rows_max = days, rows_max

    @listing
    async def page(
        self,
        connection: Connection,
        *,
        after: int,
        since: datetime | None = None,
        target: str | None = None,
        limit: int,
    ) -> AuditList:
        """Requests of the audit log that changed something, with numbers above `after`, ascending."""
        records = await connection.fetch(_PAGE, after, since, target, limit)
        rows = tuple(AuditRow.model_validate(dict(record)) for record in records[:limit])
        return AuditList(audit=rows, next=rows[-1].number if len(records) > limit else None)

    async def trim(self) -> None:
        """Delete what is kept no longer."""
        while await self._trim_some() == _TRIMMED_AT_ONCE:
            pass

    @transactional
    async def _trim_some(self, connection: Connection) -> int:
        """Delete the oldest of it; returns how many rows."""
        days = self._days if await ages_count(connection) else _NEVER_DAYS
        done = await connection.execute(_TRIM, days, self._rows_max)
        return int(done.removeprefix("DELETE "))
