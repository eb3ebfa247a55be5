"""Bodies and answers of the handlers, and the parameters that several of them take."""

from collections.abc import Sequence
from typing import Final

import orjson
from aiohttp import web

from quorumlog.errors import UnsupportedMediaType
from quorumlog.net import bodies
from quorumlog.net.bodies import T
from quorumlog.net.parameters import (
    header_version,
    path_id,
    path_text,
    query_integer,
    query_text,
)
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.values import BOOKIE_NAME
from quorumlog.wire.bodies import SHOWN as SHOWN_PATTERN
from quorumlog.wire.bodies import CookieRow


async def parsed(request: web.Request, model: type[T]) -> T:
    """The request's JSON body. Raises: what `bodies.read` raises, InvalidRequest,
    UnsupportedMediaType.
    """
    if request.content_type not in {"application/json", "application/octet-stream"}:
        raise UnsupportedMediaType("send application/json (curl: -H 'Content-Type: …')")
    return bodies.parsed(await bodies.read(request), model)


def row_answer(
    row: LedgerMetadata | LogMetadata | CookieRow, status: int = 200, **headers: str
) -> web.Response:
    """A row, and its version as its ETag."""
    return bodies.answer(row, status, ETag=f'"{row.version}"', **headers)


def page_answer(name: str, rows: Sequence[bytes], following: int | str | None) -> web.Response:
    """A page of rows that are JSON already, and the `after` of the next page."""
    return web.Response(
        body=b'{"%b":[%b],"next":%b}' % (name.encode(), b",".join(rows), orjson.dumps(following)),
        content_type="application/json",
    )


LEDGER_ID: Final = path_id("ledger_id", "The ledger.")
BOOKIE: Final = path_text(
    "name", BOOKIE_NAME, "The bookie's name, without an incarnation.", "bookie-1"
)
LIMIT: Final = query_integer("limit", 1, 10_000, "Maximum number of rows in the page.", 100)
SHOWN: Final = query_text("shown", SHOWN_PATTERN, "Only what these grants name; empty: nothing.")
IF_MATCH: Final = header_version("The version of the row in the body, in quotes.")
