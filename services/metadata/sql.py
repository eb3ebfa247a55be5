"""SQL fragments shared by the stores."""

from typing import Final

UTC_CREATED_AT: Final = (
    "to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') AS created_at"
)
"""A row's time of creation, as RFC 3339 in UTC."""
