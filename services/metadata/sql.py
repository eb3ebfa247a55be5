"""SQL shared by the stores: rows as JSON, and pages that end by rows and by bytes."""

from collections.abc import Callable, Sequence
from typing import Final

import asyncpg

from quorumlog.wire.bodies import T, codec
from services.metadata.database import Connection

PAGE_BYTES_MAX: Final = 1 << 20
"""Bodies of one page, by their text: a page takes Postgres and this process some 30 ms (measured), whatever clients
keep in the rows. A page has one row at least."""
PAGE_ROWS_MAX: Final = 2500
"""Rows of one page: about as many of the usual size as PAGE_BYTES_MAX lets in. Postgres adds up no more."""


IS_AFTER_LOSS: Final = "created_at > coalesce((SELECT loss_accepted_at FROM cluster), '-infinity')"
"""Whether a row is younger than the last accepted loss of changes. The lost history may have committed or
named what is older: that waits for an operator (rule 18a)."""


def utc(column: str) -> str:
    """The SQL of a column's time, as RFC 3339 in UTC."""
    return f"to_char({column} AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') AS {column}"


def is_shown(column: str, shown: str, value: Callable[[object], str]) -> str:
    """The condition that a list may show a row (`wire/bodies.py`, SHOWN). `column` has `logs/NAME` or `ledgers/NAMESPACE`,
    in the order of bytes; `value` adds a parameter to the query and returns its placeholder.

    Each grant becomes one range, for which Postgres uses an index. It would match a pattern against every row.
    """
    ranges = []
    for one in filter(None, shown.split(",")):
        low = one.removesuffix("*")
        # All that begins with "ab" is below "ac". "ab" is the only text from "ab" to "ab\x01", since no text has a zero byte.
        high = low[:-1] + chr(ord(low[-1]) + 1) if low != one else low + "\x01"
        ranges.append(f"{column} >= {value(low)} AND {column} < {value(high)}")
    return f"({' OR '.join(ranges) or 'false'})"


def json_rest(record: asyncpg.Record, body: str | None = None) -> bytes:
    """The JSON of a row with a body, behind the row's key. `body`: in place of the record's.

    No model checks the rows of a page here: their reader does, and that takes most of a page's time.
    """
    return b'"version":%d,"created_at":"%b",%b' % (
        record["version"],
        record["created_at"].encode(),
        (body or record["body"]).removeprefix("{").encode(),
    )


def value_of(cls: type[T], record: asyncpg.Record, **given: object) -> T:
    """The body or value whose fields are a record's columns; `given` fields count in place of columns."""
    value: T = codec(cls).validate_python(dict(record) | given, strict=False, extra="ignore")
    return value


async def ids_of(connection: Connection, query: str, *values: object) -> tuple[int, ...]:
    """The ids in a query's first column."""
    return tuple(record[0] for record in await connection.fetch(query, *values))


def page_of(rows: str, *, order: str, row: str, limit: str) -> str:
    """The query of a page: `rows` is a SELECT with the column `body_bytes`, without order and limit.

    `row` lists the columns of the page's rows only: Postgres reads no long body to leave it out. The last row's
    `has_more` tells whether a page follows.
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
    """Whether a page follows these records of a `page_of`."""
    return bool(records) and bool(records[-1]["has_more"])
