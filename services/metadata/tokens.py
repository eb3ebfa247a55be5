"""Stores users' access tokens, and reads and trims the audit log (docs/adr/0022-audit-log.md).
Gateways read the list of tokens.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Final

import asyncpg
import orjson

from quorumlog.errors import InvalidRequest, NoSuchToken
from quorumlog.wire.token_bodies import (
    AuditList,
    AuditRow,
    TokenCreate,
    TokenList,
    TokenRevoke,
    TokenRow,
)
from services.metadata import database
from services.metadata.attempts import is_applied, record_attempt
from services.metadata.sql import utc, value_of

TOKENS_MAX: Final = 2000
"""Maximum tokens (chosen by judgement). Gateways read the list, 700 KB in 20 ms, after a change."""

_ROW: Final = f"id, hash, body::text AS body, {utc('created_at')}, {utc('expires_at')}"
_FORGET: Final = "DELETE FROM access_tokens WHERE expires_at < now() - interval '7 days'"
"""Expired tokens stay in lists for a week, so that their owners can see why they are rejected."""


class TokenStore(database.RowStore):
    """The store of access tokens. Invariant: each change of tokens gives the list a new version."""

    @database.transactional
    async def create(self, connection: database.Connection, request: TokenCreate) -> TokenRow:
        """Store an access token by its secret's hash. A retry gets the first response.

        Raises: InvalidRequest; NoSuchToken for a retry after the token was revoked.
        """
        token, target = request.token, f"create token {request.token.id}"
        # Lock the list against other changes, because the limit applies to all tokens together.
        await connection.execute("UPDATE access_token_list SET version = gen_random_uuid()")
        if await is_applied(connection, request.attempt, target):
            return _row_of(
                await connection.fetchrow(
                    f"SELECT {_ROW} FROM access_tokens WHERE id = $1", token.id
                ),
                token.id,
            )
        if await database.ages_count(connection):
            await connection.execute(_FORGET)
        if await connection.fetchval("SELECT count(*) FROM access_tokens") >= TOKENS_MAX:
            raise InvalidRequest(f"there are already {TOKENS_MAX} access tokens: revoke some first")
        record = await connection.fetchrow(
            "INSERT INTO access_tokens (id, hash, body, expires_at)"
            " VALUES ($1, $2, $3::text::jsonb, now() + make_interval(secs => $4))"
            f" ON CONFLICT DO NOTHING RETURNING {_ROW}",
            token.id,
            token.hash,
            token.model_dump_json(exclude={"id", "hash"}),
            request.expires_in_s,
        )
        if record is None:
            raise InvalidRequest("the id or the secret is already in use: generate new values")
        await record_attempt(connection, request.attempt, target)
        return _row_of(record, token.id)

    @database.transactional
    async def revoke(
        self, connection: database.Connection, token_id: str, request: TokenRevoke
    ) -> None:
        """Delete an access token. A repeat of the attempt succeeds. Raises: NoSuchToken."""
        target = f"revoke token {token_id}"
        await connection.execute("UPDATE access_token_list SET version = gen_random_uuid()")
        if await is_applied(connection, request.attempt, target):
            return
        if not await connection.fetchval(
            "DELETE FROM access_tokens WHERE id = $1 RETURNING true", token_id
        ):
            raise no_such_token(token_id)
        await record_attempt(connection, request.attempt, target)

    @database.proven  # a database that went back in time may have revoked tokens (rule 18a)
    async def list(self, connection: database.Connection, *, known: str | None = None) -> TokenList:
        """All access tokens in order of creation, or none if `known` is the current version."""
        records = await connection.fetch(
            f"SELECT version::text, ticket_key, {_ROW} FROM access_token_list LEFT JOIN access_tokens"
            " ON version IS DISTINCT FROM $1::uuid ORDER BY access_tokens.created_at, id",
            known,
        )
        version = records[0]["version"]
        rows = tuple(_row_of(record, "") for record in records if record["id"] is not None)
        return TokenList(
            version=version,
            tokens=None if version == known else rows,
            ticket_key=records[0]["ticket_key"],
        )


def no_such_token(token_id: str) -> NoSuchToken:
    """Create the error for an unknown access token id."""
    return NoSuchToken(f"there is no access token {token_id}")


def _row_of(record: asyncpg.Record | None, token_id: str) -> TokenRow:
    if record is None:
        raise no_such_token(token_id)
    return value_of(TokenRow, record, **orjson.loads(record["body"]))


_PAGE: Final = (
    f"SELECT number, id::text AS id, {utc('at')}, who, remote, via, operation, target FROM audit"
    " WHERE number > $1 AND ($2::timestamptz IS NULL OR at >= $2)"
    " AND ($3::text IS NULL OR target = $3) ORDER BY number LIMIT $4 + 1"
)
_TRIMMED_AT_ONCE: Final = 1000
"""Rows that one transaction deletes, in about 10 ms (chosen by judgement)."""
_NEVER_DAYS: Final = 365_000
"""An age in days that is above the age of any row."""
_TRIM: Final = (
    f"WITH oldest AS (SELECT number, at FROM audit ORDER BY number LIMIT {_TRIMMED_AT_ONCE})"
    " DELETE FROM audit WHERE number IN (SELECT number FROM oldest"
    " WHERE at < now() - make_interval(days => $1)"
    " OR number <= (SELECT max(number) FROM audit) - $2)"
)


@dataclass(eq=False)
class AuditStore(database.RowStore):
    """The store of audited requests."""

    days: int
    """Rows older than this number of days are deleted."""
    rows_max: int
    """Only this number of the latest rows is kept."""

    @database.listing
    async def page(
        self,
        connection: database.Connection,
        *,
        after: int,
        since: datetime | None = None,
        target: str | None = None,
        limit: int,
    ) -> AuditList:
        """Audited requests with changes and with numbers above `after`, ascending."""
        records = await connection.fetch(_PAGE, after, since, target, limit)
        rows = tuple(AuditRow.model_validate(dict(record)) for record in records[:limit])
        return AuditList(audit=rows, next=rows[-1].number if len(records) > limit else None)

    async def trim(self) -> None:
        """Delete all rows beyond the limits `days` and `rows_max`."""
        while await self._trim_some() == _TRIMMED_AT_ONCE:
            pass

    @database.transactional
    async def _trim_some(self, connection: database.Connection) -> int:
        """Delete a batch of the oldest rows beyond the limits. Returns the number of deleted rows."""
        days = self.days if await database.ages_count(connection) else _NEVER_DAYS
        done = await connection.execute(_TRIM, days, self.rows_max)
        return int(done.removeprefix("DELETE "))
