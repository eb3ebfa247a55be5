"""Responses: JSON, bytes, and none."""

from collections.abc import Mapping
from typing import Any, Final

import orjson
from aiohttp import web

from quorumlog.net.operations import JSON

_JSON_HEADERS: Final = {"Content-Type": JSON, "Vary": "Accept", "Cache-Control": "no-store"}


def json_bytes(
    body: bytes, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """A response whose body is JSON already."""
    return web.Response(
        body=body,
        status=status,
        headers=_JSON_HEADERS if headers is None else {**_JSON_HEADERS, **headers},
    )


def json_value(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """A response with a JSON value."""
    return json_bytes(orjson.dumps(value), status, headers)


def no_content() -> web.Response:
    """The response to a DELETE that is done."""
    return web.Response(status=204, headers={"Cache-Control": "no-store"})


def octets(body: bytes, media: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """A response with bytes that browsers must not guess about."""
    return web.Response(
        body=body,
        headers={
            "Content-Type": media,
            "Vary": "Accept",
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            **(headers or {}),
        },
    )
