"""Errors as `application/problem+json` (RFC 9457), both ways.

The server makes the document from the error, the client makes the same class of error from the
document. What is no problem document (an answer from a proxy, say) becomes the base class with the
outcome unknown: a bare status from anything in between is no knowledge (architecture 2.3).
"""

from collections.abc import Mapping
from typing import Any, Final

import orjson

from quorumlog.errors import NOT_DONE, UNKNOWN, QuorumLogError, by_code

CONTENT_TYPE: Final = "application/problem+json"

_KNOWN: Final = ("ledger_id", "entry_id", "bookie", "log")
_STANDARD: Final = frozenset(
    ("type", "title", "status", "detail", "instance", "code", "retryable", "outcome", *_KNOWN)
)
_DETAIL_CHARS_MAX: Final = 2000
"""An error never repeats a client's megabytes (taste)."""


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
    for name in _KNOWN:
        value = getattr(error, name)
        if value is not None:
            document[name] = value
    return document | {
        name: value
        for name, value in error.members.items()
        if value is not None and name not in _STANDARD
    }


def to_bytes(error: QuorumLogError, instance: str | None = None) -> bytes:
    """The document as it travels. What can't be JSON in it is told as text."""
    return orjson.dumps(to_document(error, instance), default=str)


def from_document(document: Mapping[str, Any]) -> QuorumLogError:
    """The error that a document tells of.

    A code that is not known (a newer server) gives the base class, with the code as it came.
    """
    code = str(document.get("code", QuorumLogError.code))
    error = by_code(code)(str(document.get("detail") or document.get("title") or code))
    if type(error) is QuorumLogError:
        error.code = code
        error.title = str(document.get("title") or error.title)
        error.status = _integer(document.get("status")) or error.status
    error.retryable = document.get("retryable", error.retryable) is True
    outcome = document.get("outcome", error.outcome)
    error.outcome = NOT_DONE if outcome == NOT_DONE else UNKNOWN
    error.instance = _text(document.get("instance"))
    error.ledger_id = _integer(document.get("ledger_id"))
    error.entry_id = _integer(document.get("entry_id"))
    error.bookie = _text(document.get("bookie"))
    error.log = _text(document.get("log"))
    error.members = {name: document[name] for name in document.keys() - _STANDARD}
    return error


def from_answer(
    status: int, body: bytes, headers: Mapping[str, str] | None = None
) -> QuorumLogError:
    """The error that an answer of status 400 or higher tells of. Never raises."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        document = None
    if not isinstance(document, dict) or not isinstance(document.get("code"), str):
        error = QuorumLogError(f"status {status} without a problem document")
        error.status = status
        return error
    error = from_document(document)
    retry_after = (headers or {}).get("Retry-After", "")
    if retry_after.isascii() and retry_after.isdecimal():
        error.retry_after_s = int(retry_after)
    return error


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
