"""Ids, query parameters and headers, each with one spelling; anything else is refused.

400 where a text is no number at all, 422 where it is one that is not allowed (docs/guides/http.md).
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from aiohttp import hdrs, web

from quorumlog.errors import BadRequest, InvalidRequest, NotAcceptable
from quorumlog.protocol.ids import ID_MAX

_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)", re.ASCII)
_SHOWN_MAX: Final = 100


def invalid(pointer: str, detail: str) -> InvalidRequest:
    """A 422 for one place in the request: a JSON pointer into the body, or /query/…, /header/…,
    /path/….
    """
    where = pointer or "the body"
    return InvalidRequest(f"{where}: {detail}", errors=[{"pointer": pointer, "detail": detail}])


def integer(text: str, pointer: str, low: int, high: int) -> int:
    """A canonical decimal number between two bounds, both inclusive."""
    if not _INTEGER.fullmatch(text) or text == "-0":
        shown = ascii(text[:_SHOWN_MAX])
        raise BadRequest(f"{pointer}: {shown} is not a decimal integer in its shortest form")
    if len(text) > 20 or not low <= (value := int(text)) <= high:
        raise invalid(pointer, f"must be an integer from {low} to {high}")
    return value


def path_id(request: web.Request, name: str) -> int:
    """A ledger or entry id of the path."""
    text = request.match_info[name]
    # The common case at once: few digits, ASCII, no leading zero.
    if len(text) < 19 and text.isascii() and text.isdecimal() and (text[0] != "0" or text == "0"):
        return int(text)
    return integer(text, f"/path/{name}", 0, ID_MAX)


_NO_QUERY: Final[Mapping[str, str]] = {}


def query(
    request: web.Request, allowed: frozenset[str] = frozenset(), *, prefix: str | None = None
) -> Mapping[str, str]:
    """The query's parameters by name. Those that are unknown or repeated are refused; a name that
    begins with `prefix` and ends with `]` is known.
    """
    if not request.query_string:
        return _NO_QUERY
    found: dict[str, str] = {}
    for name, value in request.query.items():
        _encodable(name)
        _encodable(value)
        if name in found:
            raise BadRequest(f"the query parameter {name[:_SHOWN_MAX]} is repeated")
        known = name in allowed or (
            prefix is not None and name.startswith(prefix) and name.endswith("]")
        )
        if not known:
            raise invalid(f"/query/{name[:_SHOWN_MAX]}", "is not a parameter of this route")
        found[name] = value
    return found


def _encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest("the query is not UTF-8") from error


def query_integer(params: Mapping[str, str], name: str, *, low: int, high: int) -> int | None:
    """An integer parameter, or None where it is not given."""
    text = params.get(name)
    return None if text is None else integer(text, f"/query/{name}", low, high)


def query_choice(params: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str | None:
    """A parameter that is one of a few words, or None where it is not given."""
    text = params.get(name)
    if text is not None and text not in choices:
        raise invalid(f"/query/{name}", f"must be one of {', '.join(choices)}")
    return text


def header_text(request: web.Request, name: str, chars_max: int) -> str | None:
    """A header's value, or None where it is not given. Once only, valid UTF-8, not too long."""
    values = request.headers.getall(name, None)
    if values is None:
        return None
    if len(values) > 1:
        raise BadRequest(f"the header {name} is repeated")
    try:
        values[0].encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"the header {name} is not UTF-8") from error
    if len(values[0]) > chars_max:
        raise invalid(f"/header/{name}", f"must have at most {chars_max} characters")
    return values[0]


JSON: Final = "application/json"
OCTETS: Final = "application/octet-stream"
FRAMES: Final = "application/vnd.quorumlog.frames"
ARROW: Final = "application/vnd.apache.arrow.stream"
NDJSON: Final = "application/x-ndjson"
EVENTS: Final = "text/event-stream"
_JSON_ONLY: Final = (JSON,)


def accepted(request: web.Request, offers: tuple[str, ...] = _JSON_ONLY) -> str:
    """The media type to answer with: the first of `offers` unless the client prefers another.

    Raises: NotAcceptable.
    """
    accept = request.headers.get(hdrs.ACCEPT)
    if accept is None or accept == "*/*":
        return offers[0]
    chosen = _negotiated(accept, offers)
    if chosen is None:
        raise NotAcceptable(
            f"this route answers with {', '.join(offers)}, and the header Accept takes none of them"
        )
    return chosen


@lru_cache(maxsize=256)
def _negotiated(accept: str, offers: tuple[str, ...]) -> str | None:
    """RFC 9110, 12.5.1: the most specific range of each type decides, then the highest quality."""
    best, best_quality = None, 0.0
    ranges = [_range(part) for part in accept.split(",") if part.strip()]
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


def _range(part: str) -> tuple[str, float]:
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
