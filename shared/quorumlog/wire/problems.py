"""Converts errors to and from `application/problem+json` (RFC 9457).

A server makes the document from the error, and a client makes an error of the same class from the
document. Parsing requires only the standard library, because Spark's executors get this package as
a zip, without other packages.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import ceil
from typing import Any, Final, Protocol

from quorumlog import errors, header

CONTENT_TYPE: Final = "application/problem+json"
KNOWN: Final = ("ledger_id", "entry_id", "bookie", "log")
STANDARD: Final = frozenset(
    ("type", "title", "status", "detail", "instance", "code", "retryable", "outcome", *KNOWN)
)
"""Members of a document that are fields of an error; all others are the error's `members`."""
_NOT_PASSED_ON: Final = (429, 502, 503, 504)
"""Statuses that a load balancer sends if it can't reach a gateway, or not in time."""
_RETRY_AFTER_S_MAX: Final = 86_400
"""Maximum of a parsed `Retry-After`, above any client's deadline (chosen by judgement)."""
_DETAIL_CHARS_MAX: Final = 2000
"""Maximum length of a detail, so that no error repeats a client's megabytes (by judgement)."""


class Headers(Protocol):
    """The headers of an answer, with case-insensitive names."""

    def get(self, name: str, default: str, /) -> Any:
        """The value of a header."""


def to_document(error: errors.QuorumLogError, instance: str | None = None) -> dict[str, Any]:
    """The problem document of an error; `instance` is the request's id."""
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


def to_bytes(error: errors.QuorumLogError, instance: str | None = None) -> bytes:
    """The problem document as bytes. Members that JSON can't represent are written as text."""
    import orjson  # noqa: PLC0415  (executors lack it)

    return orjson.dumps(to_document(error, instance), default=str)


def from_document(document: Mapping[str, Any]) -> errors.QuorumLogError:
    """The error that a problem document describes.

    For an unknown code, such as a newer server's, the error has that code and the base class QuorumLogError.
    """
    code = str(document.get("code", errors.QuorumLogError.code))
    cls = errors.by_code(code)
    unknown: dict[str, Any] = {}
    if cls is errors.QuorumLogError:
        unknown = {
            "code": code,
            "title": str(document.get("title") or cls.title),
            "status": _integer(document.get("status")) or cls.status,
        }
    outcome = document.get("outcome", cls.outcome)
    return cls(str(document.get("detail") or document.get("title") or code)).replace(
        **unknown,
        retryable=document.get("retryable", cls.retryable) is True,
        outcome=errors.NOT_DONE if outcome == errors.NOT_DONE else errors.UNKNOWN,
        instance=_text(document.get("instance")),
        ledger_id=_integer(document.get("ledger_id")),
        entry_id=_integer(document.get("entry_id")),
        bookie=_text(document.get("bookie")),
        log=_text(document.get("log")),
        members={name: document[name] for name in document.keys() - STANDARD},
    )


def from_answer(
    status: int, body: bytes, headers: Headers | None = None, url: str = ""
) -> errors.QuorumLogError:
    """The error for an answer of status 300 or higher from the server at `url`. Never raises.

    If the answer is a redirect, or has a body that is not a problem document, the outcome is
    unknown. A program between client and server, such as a proxy, may have sent the answer, so its
    status proves nothing (rule 4). With a `url`, the error for such an answer is ConnectionLost if
    a load balancer reaches no gateway, otherwise NotAGateway; without one, QuorumLogError.
    """
    try:
        document = json.loads(body)
        json.dumps(document, ensure_ascii=False).encode()  # raises for lone surrogates
    except (ValueError, RecursionError):
        document = None
    found = headers or {}
    retry_after_s = _seconds(found.get(header.RETRY_AFTER, ""), found.get("Date", ""))
    if status >= 400 and isinstance(document, dict) and isinstance(document.get("code"), str):
        error = from_document(document)
    else:
        error = _undocumented(status, url, found.get("Location", "")).replace(status=status)
    return error if retry_after_s is None else error.replace(retry_after_s=retry_after_s)


def _undocumented(status: int, url: str, location: str) -> errors.QuorumLogError:
    """The error for a redirect, or for an answer without a problem document."""
    detail = f"status {status} without a problem document"
    if status < 400:
        detail = f"status {status} redirects to {location!r}, but clients follow no redirects"
    if not url:
        return errors.QuorumLogError(detail)
    if status in _NOT_PASSED_ON:
        return errors.ConnectionLost(f"{url}: {detail}: the load balancer reaches no gateway")
    return errors.NotAGateway(
        f"{url}: {detail}: use the URL of a gateway, such as http://host:port"
    )


def _seconds(retry_after: str, date: str) -> int | None:
    """The seconds of a `Retry-After`, which is a number or a date (RFC 9110, 10.2.3); None for
    other text. `date`: the time of the answer by the server's clock.
    """
    try:
        if retry_after.isascii() and retry_after.isdecimal():
            return min(int(retry_after), _RETRY_AFTER_S_MAX)
        until = parsedate_to_datetime(retry_after)
        answered = parsedate_to_datetime(date) if date else datetime.now(UTC)
        return min(max(0, ceil((until - answered).total_seconds())), _RETRY_AFTER_S_MAX)
    except (TypeError, ValueError):
        return None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
