"""Problem documents as errors, without a JSON parser: Spark's executors get this package as a zip,
without the packages that it requires elsewhere.
"""

from collections.abc import Mapping
from typing import Any, Final

from quorumlog.errors import NOT_DONE, UNKNOWN, NotAGateway, QuorumLogError, by_code

KNOWN: Final = ("ledger_id", "entry_id", "bookie", "log")
STANDARD: Final = frozenset(
    ("type", "title", "status", "detail", "instance", "code", "retryable", "outcome", *KNOWN)
)
"""Members of a document that are fields of an error; all others are the error's `members`."""


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
    status: int, document: object, retry_after: str = "", *, url: str = "", location: str = ""
) -> QuorumLogError:
    """The error of an answer of status 300 or higher: `document` is the parsed body, `retry_after` and `location` the
    headers of these names, `url` the server's.

    A redirect, or a body that is no problem document (a proxy's, say) has the outcome unknown: a bare status
    from anything between client and server proves nothing (rule 4). It is NotAGateway where the URL is given, as
    clients do, and else the base class.
    """
    if status < 400 or not isinstance(document, dict) or not isinstance(document.get("code"), str):
        detail = f"status {status} without a problem document"
        if status < 400:
            detail = f"status {status} redirects to {location!r}, and clients follow no redirect"
        if url:
            detail = f"{url}: {detail}. Is this the URL of a gateway, as http://host:port?"
        return (NotAGateway if url else QuorumLogError)(detail).replace(status=status)
    error = from_document(document)
    if retry_after.isascii() and retry_after.isdecimal():
        return error.replace(retry_after_s=int(retry_after))
    return error


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
