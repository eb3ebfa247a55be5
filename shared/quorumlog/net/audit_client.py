"""A gateway's clients for the audit log and for access tokens in the metadata service, and the parameters of a page."""

from datetime import datetime
from typing import Final

from quorumlog.net.metadata_requests import MetadataRequests, new_attempt, query_of
from quorumlog.net.parameters import Parameter, invalid, query_integer, query_text, time_of
from quorumlog.protocol.ids import ID_MAX
from quorumlog.wire.audit_bodies import TARGET_CHARS_MAX, AuditList
from quorumlog.wire.bodies import Body
from quorumlog.wire.token_bodies import TokenCreate, TokenFields, TokenList, TokenRevoke, TokenRow


def _time(text: str, pointer: str) -> datetime:
    try:
        return time_of(text)
    except ValueError as error:
        raise invalid(pointer, "must be a time like 2026-01-02T03:04:05Z") from error


SINCE: Final[Parameter[datetime | None]] = Parameter(
    "since",
    "query",
    _time,
    {"type": "string", "format": "date-time"},
    "Only what was done at this time or later.",
    None,
)
TARGET: Final = query_text(
    "target",
    rf"[^\x00]{{1,{TARGET_CHARS_MAX}}}",
    "Only what was done to this: `logs/NAME`, `ledgers/ID`, `tokens/ID`, `bookies/NAME`.",
)
AFTER: Final = query_integer("after", 0, ID_MAX, "Only rows with numbers above this one.", 0)
LIMIT: Final = query_integer("limit", 1, 1000, "Rows of a page.", 100)


class AuditClient:
    """Reads the audit log. Raises MetadataUnavailable."""

    def __init__(self, client: MetadataRequests) -> None:
        self._client = client

    async def page(
        self, *, after: int, since: datetime | None, target: str | None, limit: int
    ) -> AuditList:
        """Rows with numbers above `after`, ascending."""
        when = None if since is None else since.isoformat()
        query = query_of(after=after, since=when, target=target, limit=limit)
        return await self._client.ask("GET", "/v1/audit", gives=AuditList, query=query)


class TokenClient:
    """Reads and changes access tokens. All methods may raise MetadataUnavailable."""

    def __init__(self, client: MetadataRequests) -> None:
        self._client = client

    async def create(self, token: TokenFields, *, expires_in_s: int | None) -> TokenRow:
        """Store a token. Raises: InvalidRequest."""
        body = TokenCreate(token=token, expires_in_s=expires_in_s, attempt=new_attempt())
        return await self._client.ask("POST", "/v1/tokens", body, gives=TokenRow, settles=True)

    async def revoke(self, token_id: str) -> None:
        """Delete a token. Raises: NoSuchToken."""
        body = TokenRevoke(attempt=new_attempt())
        path = f"/v1/tokens/{token_id}"
        await self._client.ask("DELETE", path, body, gives=Body, settles=True)

    async def list(self, known: str | None = None) -> TokenList:
        """All tokens, unless `known` is the list's version. Proven: a database that went back may have tokens
        that were revoked since (rule 18a).
        """
        query = query_of(known=known)
        return await self._client.ask("GET", "/v1/tokens", gives=TokenList, query=query, proof=True)
