"""Problem documents as errors, without a JSON parser: Spark's executors get this package as a zip,
without the packages that it requires elsewhere.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from math import ceil
from typing import Any, Final, Protocol

from quorumlog import header
from quorumlog.errors import (
    NOT_DONE,
    UNKNOWN,
    ConnectionLost,
    NotAGateway,
    QuorumLogError,
    by_code,
)

KNOWN: Final = ("ledger_id", "entry_id", "bookie", "log")
STANDARD: Final = frozenset(
    ("type", "title", "status", "detail", "instance", "code", "retryable", "outcome", *KNOWN)
)
"""Members of a document that are fields of an error; all others are the error's `members`."""
_NOT_PASSED_ON: Final = (429, 502, 503, 504)
"""Statuses by which a load balancer says that it reaches no gateway now, or not in time."""
_RETRY_AFTER_S_MAX: Final = 86_400
"""No deadline of a client is as long; chosen by judgement."""


class Headers(Protocol):
    """The headers of an answer; names in any case."""

    def get(self, name: str, default: str, /) -> Any:
        """The value of a header."""
        ...


def from_document(document: Mapping[str, Any]) -> QuorumLogError:
    """The error of a document.

    An unknown code (of a newer server) gives the base class, with the document's code.
    """
    code = str(document.get("code", QuorumLogError.code))
    cls = by_code(code)
    unknown: dict[str, Any] = {}
    if cls is QuorumLogError:
        unknown = {
            "code": code,
            "title": str(document.get("title") or cls.title),
            "status": _integer(document.get("status")) or cls.status,
        }
    outcome = document.get("outcome", cls.outcome)
    return cls(str(document.get("detail") or document.get("title") or code)).replace(
        **unknown,
        retryable=document.get("retryable", cls.retryable) is True,
        outcome=NOT_DONE if outcome == NOT_DONE else UNKNOWN,
        instance=_text(document.get("instance")),
        ledger_id=_integer(document.get("ledger_id")),
        entry_id=_integer(document.get("entry_id")),
        bookie=_text(document.get("bookie")),
        log=_text(document.get("log")),
        members={name: document[name] for name in document.keys() - STANDARD},
    )


def from_status(
    status: int, document: object, headers: Headers | None = None, *, url: str = ""
) -> QuorumLogError:
    """The error of an answer of status 300 or higher: `document` is the parsed body, `url` the server's.

    A redirect, or a body that is no problem document (a proxy's, say) has the outcome unknown: a bare status
    from anything between client and server proves nothing (rule 4). Where the URL is given, as clients do, it is
    ConnectionLost if a load balancer reaches no gateway, else NotAGateway; without the URL it is the base class.
    """
    found = headers or {}
    retry_after_s = _seconds(found.get(header.RETRY_AFTER, ""), found.get("Date", ""))
    if status >= 400 and isinstance(document, dict) and isinstance(document.get("code"), str):
        error = from_document(document)
    else:
        error = _undocumented(status, url, found.get("Location", "")).replace(status=status)
    return error if retry_after_s is None else error.replace(retry_after_s=retry_after_s)


def _undocumented(status: int, url: str, location: str) -> QuorumLogError:
    """The error of a redirect, or of an answer without a problem document."""
    detail = f"status {status} without a problem document"
    if status < 400:
        detail = f"status {status} redirects to {location!r}, and clients follow no redirect"
    if not url:
        return QuorumLogError(detail)
    if status in _NOT_PASSED_ON:
        return ConnectionLost(f"{url}: {detail}: a load balancer answers, and no gateway")
    return NotAGateway(f"{url}: {detail}. Is this the URL of a gateway, as http://host:port?")


def _seconds(retry_after: str, date: str) -> int | None:
    """Seconds of a `Retry-After`, which is a number or a date (RFC 9110, 10.2.3); None: neither. `date`: when the server
    answered, by its own clock.
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
