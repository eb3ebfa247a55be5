"""Answers for services of releases that refuse each field that they do not know: those from before answers were read by
`wire.bodies.received`. Such a release says nothing of itself, shows no credentials, and is upgraded from by way of this
one (docs/guides/upgrades.md), so this module goes with the release after it.
"""

from typing import Any, Final

import orjson
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from quorumlog import header
from quorumlog.net.service import AUTHENTICATOR

_LATER: Final = frozenset(
    (
        "lineage",
        "internal_url",
        "has_place",
        "leaves",
        "published_ms",
        "batch_compression",
        "stream_seq",
        "expiry",
        "forked_at",
    )
)
"""Fields that these releases lack. `attempt` of a log's row is one too; a ledger's row had it before."""
_LIBRARY: Final = "aiohttp"
"""Services name it as their user agent; people's tools name others."""
_OF_LOG: Final = "writer_token"
"""Only a log's row has it."""
_USERS: Final = "metadata"
"""What users named."""


@web.middleware
async def answers_older_services(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Leave out what the caller's release does not know."""
    response = await handler(request)
    is_service = _LIBRARY in request.headers.get(hdrs.USER_AGENT, "")
    if header.RELEASE in request.headers or AUTHENTICATOR in request.app or not is_service:
        return response
    if isinstance(response, web.Response) and "json" in response.headers.get(hdrs.CONTENT_TYPE, ""):
        assert isinstance(response.body, bytes)
        response.body = orjson.dumps(without_later(orjson.loads(response.body)))
    return response


def without_later(value: Any) -> Any:
    """A body without the fields that these releases refuse."""
    if isinstance(value, list):
        return [without_later(item) for item in value]
    if not isinstance(value, dict):
        return value
    is_log = _OF_LOG in value
    return {
        name: item if name == _USERS else without_later(item)
        for name, item in value.items()
        if name not in _LATER and not (is_log and name == "attempt")
    }
