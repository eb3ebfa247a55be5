"""CORS: which web pages may read this gateway's answers.

The headers are added when an answer is about to be sent, so that every answer has them: errors, and streams
and sockets, whose handlers send the head.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import hdrs, web

from quorumlog import header

EXPOSED: Final = (
    hdrs.ALLOW,
    "ETag",
    "First-Offset",
    "Lac-Source",
    header.LAST_ADD_CONFIRMED,
    header.LEDGER_CLOSED,
    hdrs.LOCATION,
    "Log-Closed",
    "Log-Created-At",
    header.NEXT_ENTRY_ID,
    header.NEXT_OFFSET,
    header.PRODUCER_DUPLICATE,
    header.PRODUCER_EPOCH,
    header.PRODUCER_EXPECTED_SEQ,
    header.PRODUCER_SEQ,
    "Producer-Received-Seq",
    hdrs.RETRY_AFTER,
    header.REQUEST_ID,
    "Stream-Closed",
    "Stream-Cursor",
    "Stream-Expires-At",
    "Stream-Next-Offset",
    "Stream-Sse-Data-Encoding",
    "Stream-Up-To-Date",
    hdrs.WWW_AUTHENTICATE,
)
"""The headers that a page may read besides those that browsers always show."""

_EXPOSED: Final = ", ".join(EXPOSED)
_MAX_AGE_S: Final = "600"


def allow_origins(
    origins: frozenset[str],
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """A handler of `on_response_prepare` that lets pages of some origins, or of all (`*`), read."""

    async def allow(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or not ("*" in origins or origin in origins):
            return
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED
        asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
        if request.method == hdrs.METH_OPTIONS and asked is not None:
            _answer_preflight(request, response)

    return allow


def _answer_preflight(request: web.Request, response: web.StreamResponse) -> None:
    """Allow a page to send whatever the path takes."""
    response.headers[hdrs.ACCESS_CONTROL_ALLOW_METHODS] = response.headers.get(hdrs.ALLOW, "")
    wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS)
    if wanted:
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = wanted
    response.headers[hdrs.ACCESS_CONTROL_MAX_AGE] = _MAX_AGE_S
