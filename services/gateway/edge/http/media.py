"""Negotiate media types, and create JSON, binary and empty responses."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import orjson
from aiohttp import hdrs, web

from quorumlog.errors import NotAcceptable, UnsupportedMediaType
from quorumlog.net.operations import JSON
from services.gateway import interface

OCTETS: Final = "application/octet-stream"
FRAMES: Final = interface.FRAMES
ARROW: Final = "application/vnd.apache.arrow.stream"
NDJSON: Final = "application/x-ndjson"
EVENTS: Final = "text/event-stream"
HTML: Final = "text/html"
_JSON_ONLY: Final = (JSON,)


def check_charset(content_type: str) -> None:
    """Raise UnsupportedMediaType if JSON declares a charset other than UTF-8 (RFC 8259, 8.1)."""
    media, *parameters = content_type.lower().split(";")
    for name, _, value in (each.partition("=") for each in parameters):
        is_other = name.strip() == "charset" and value.strip().strip('"') != "utf-8"
        if is_other and media.strip() in (JSON, NDJSON):
            detail = f"charset={value.strip()[:100]} is not supported: send JSON as UTF-8"
            raise UnsupportedMediaType(detail)


def accepted(request: web.Request, offers: tuple[str, ...] = _JSON_ONLY) -> str:
    """Choose the response's media type: the first of `offers` unless the client prefers another.

    Raises: NotAcceptable.
    """
    accept = request.headers.get(hdrs.ACCEPT)
    if accept is None or accept == "*/*":
        return offers[0]
    chosen = _negotiated(accept, offers)
    if chosen is None:
        raise NotAcceptable(
            f"the header Accept allows no media type of this route: accept {' or '.join(offers)}"
        )
    return chosen


@lru_cache(maxsize=256)
def _negotiated(accept: str, offers: tuple[str, ...]) -> str | None:
    """Choose an offer by RFC 9110, 12.5.1: by the most specific range, then the highest quality."""
    best, best_quality = None, 0.0
    ranges = [weighted(part) for part in accept.split(",") if part.strip()]
    if not ranges:
        return offers[0]
    for offer in offers:
        kind = offer.partition("/")[0]
        quality = 0.0
        for wanted in (offer, f"{kind}/*", "*/*"):
            found = [q for media, q in ranges if media == wanted]
            if found:
                quality = max(found)
                break
        if quality > best_quality:
            best, best_quality = offer, quality
    return best


def weighted(part: str) -> tuple[str, float]:
    """Parse a member of `Accept` or `Accept-Encoding`: its name and quality, 0 if malformed."""
    media, *parameters = part.split(";")
    quality = 1.0
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            try:
                quality = float(value)
            except ValueError:
                quality = 0.0
    return media.strip().lower(), quality if 0.0 <= quality <= 1.0 else 0.0


_JSON_HEADERS: Final = {"Content-Type": JSON, "Vary": "Accept", "Cache-Control": "no-store"}


def json_bytes(
    body: bytes, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Create a response from a body that is already JSON."""
    return web.Response(
        body=body,
        status=status,
        headers=_JSON_HEADERS if headers is None else {**_JSON_HEADERS, **headers},
    )


def json_value(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Create a response with a value encoded as JSON."""
    return json_bytes(orjson.dumps(value), status, headers)


def no_content() -> web.Response:
    """Create the 204 response to a successful DELETE."""
    return web.Response(status=204, headers={"Cache-Control": "no-store"})


def octets(body: bytes, media: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """Create a response with bytes. Browsers must not guess another media type."""
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
