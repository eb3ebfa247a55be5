"""A gateway's client for the audit log in the metadata service, and the parameters of a page."""

from datetime import datetime
from typing import Final

from quorumlog.net.metadata_requests import MetadataRequests, query_of
from quorumlog.net.parameters import Parameter, invalid, query_integer, query_text, time_of
from quorumlog.protocol.ids import ID_MAX
from quorumlog.wire.audit_bodies import TARGET_CHARS_MAX, AuditList


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
