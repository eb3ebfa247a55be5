"""Errors as `application/problem+json` (RFC 9457), both ways.

A server makes the document from the error, and a client makes an error of the same class from the
document.
"""

from collections.abc import Mapping
from typing import Any, Final

import orjson

from quorumlog.errors import QuorumLogError
from quorumlog.wire.documents import KNOWN, STANDARD, from_document, from_status

__all__ = ["CONTENT_TYPE", "from_answer", "from_document", "to_bytes", "to_document"]

CONTENT_TYPE: Final = "application/problem+json"

_DETAIL_CHARS_MAX: Final = 2000
"""Longer details are cut: an error never repeats a client's megabytes (taste)."""


def to_document(error: QuorumLogError, instance: str | None = None) -> dict[str, Any]:
    """The document of an error; `instance` is the request's id."""
    document: dict[str, Any] = {
        "type": f"/problems/{error.code}",
        "title": error.title,
        "status": error.status,
        "detail": error.detail[:_DETAIL_CHARS_MAX],
        "instance": instance or error.instance,
        "code": error.code,
        "retryable": error.retryable,
        "outcome": error.outcome,
    }
    if document["instance"] is None:
        del document["instance"]
    for name in KNOWN:
        value = getattr(error, name)
        if value is not None:
            document[name] = value
    return document | {
        name: value
        for name, value in error.members.items()
        if value is not None and name not in STANDARD
    }


def to_bytes(error: QuorumLogError, instance: str | None = None) -> bytes:
    """The document as bytes. Members that have no JSON form are written as text."""
    return orjson.dumps(to_document(error, instance), default=str)


def from_answer(
    status: int, body: bytes, headers: Mapping[str, str] | None = None, url: str = ""
) -> QuorumLogError:
    """The error of an answer of status 300 or higher, of the server at `url`. Never raises."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    return from_status(status, document, headers, url=url)
