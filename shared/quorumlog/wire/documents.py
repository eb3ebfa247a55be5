"""Problem documents as errors, for those who have no JSON parser but Python's own: Spark's workers
get this package as a zip, without the packages that it stands on elsewhere.
"""

from collections.abc import Mapping
from typing import Any, Final

from quorumlog.errors import NOT_DONE, UNKNOWN, QuorumLogError, by_code

KNOWN: Final = ("ledger_id", "entry_id", "bookie", "log")
STANDARD: Final = frozenset(
    ("type", "title", "status", "detail", "instance", "code", "retryable", "outcome", *KNOWN)
)
"""Members of a document that an error has as fields; all others are its `members`."""


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
    error.members = {name: document[name] for name in document.keys() - STANDARD}
    return error


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
