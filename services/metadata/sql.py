"""SQL shared by the stores: rows as JSON, and pages with limits on rows and bytes."""

from collections.abc import Callable, Sequence
from typing import Final

import asyncpg

from quorumlog.wire.bodies import T, codec
from services.metadata.database import Connection

PAGE_BYTES_MAX: Final = 1 << 20
"""Limit on the bodies' text in a page of more than one row. With this limit, a page takes Postgres
and this process about 30 ms, even for large rows (measured)."""
PAGE_ROWS_MAX: Final = 2500
"""Limit on the rows of one page, about as many as fit in PAGE_BYTES_MAX at typical sizes. Also limits
how many sizes Postgres adds up."""


IS_AFTER_LOSS: Final = "created_at > coalesce((SELECT loss_accepted_at FROM cluster), '-infinity')"
"""Whether a row was created after the last accepted loss of changes. The lost history may have
committed or referenced older rows, so older rows wait for an operator (rule 18a)."""


def utc(column: str) -> str:
    """Return SQL that formats a column's time as RFC 3339, in UTC."""
    return f"to_char({column} AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') AS {column}"


def is_shown(column: str, shown: str, value: Callable[[object], str]) -> str:
    """Return the SQL condition for the rows that the grants in `shown` allow in a list
    (`wire/bodies.py`, SHOWN). `column` has `logs/NAME` or `ledgers/NAMESPACE`, and is sorted by
    bytes. `value` adds a parameter to the query, and returns the parameter's placeholder.

    Each grant becomes a range, because Postgres could not use an index for a pattern.
    """
    ranges = []
    for one in filter(None, shown.split(",")):
        low = one.removesuffix("*")
        # Every text that begins with "ab" is below "ac". The only text from "ab" to "ab\x01" is
        # "ab", since no text has a zero byte.
        high = low[:-1] + chr(ord(low[-1]) + 1) if low != one else low + "\x01"
        ranges.append(f"{column} >= {value(low)} AND {column} < {value(high)}")
    return f"({' OR '.join(ranges) or 'false'})"


def json_rest(record: asyncpg.Record, body: str | None = None) -> bytes:
    """Return the rest of a row's JSON after the row's key. `body` replaces the record's body.

    Rows are not validated here, because the reader validates them, and validation is slow.
    """
    return b'"version":%d,"created_at":"%b",%b' % (
        record["version"],
        record["created_at"].encode(),
        (body or record["body"]).removeprefix("{").encode(),
    )


def value_of(cls: type[T], record: asyncpg.Record, **given: object) -> T:
    """Create a body or value from a record's columns. `given` overrides columns."""
    value: T = codec(cls).validate_python(dict(record) | given, strict=False, extra="ignore")
    return value


async def ids_of(connection: Connection, query: str, *values: object) -> tuple[int, ...]:
    """Return the ids in the first column of a query's result."""
    return tuple(record[0] for record in await connection.fetch(query, *values))


def page_of(rows: str, *, order: str, row: str, limit: str) -> str:
    """Return the query of a page. `rows` is a SELECT with `body_bytes`, without order and limit.

    `row` lists the columns to return. Postgres reads these columns only for rows of the page, to
    avoid useless reads of long bodies. The last row's `has_more` is true if another page follows.
    """
    most = f"least({limit}::bigint, {PAGE_ROWS_MAX})"
    return (
        f"SELECT {row}, has_more FROM (SELECT *,"
        " sum(body_bytes) OVER (paged ROWS UNBOUNDED PRECEDING) - body_bytes AS bytes_before,"
        " lead(true) OVER paged IS NOT NULL AS has_more"
        f" FROM ({rows} ORDER BY {order} LIMIT {most} + 1) AS wanted"
        f" WINDOW paged AS (ORDER BY {order})) AS page"
        f" WHERE bytes_before < {PAGE_BYTES_MAX} ORDER BY {order} LIMIT {most}"
    )


def has_more(records: Sequence[asyncpg.Record]) -> bool:
    """Whether another page follows these records of a `page_of` query."""
    return bool(records) and bool(records[-1]["has_more"])
