"""What the gateway's operations have in common: their errors, and parameters that several take.

Each resource's operations are declared in a module beside that of its handlers.
"""

from typing import Any, Final

from quorumlog import errors, header
from quorumlog.net.operations import JSON, Content, Errors
from quorumlog.net.parameters import (
    Parameter,
    header_integer,
    header_text,
    path_id,
    path_text,
    query_choice,
    query_integer,
)
from quorumlog.protocol.ids import ID_MAX, NO_ENTRY
from quorumlog.wire.bodies import LOG_NAME
from services.gateway.edge.limits import PASSWORD_CHARS_MAX, WAIT_MS_MAX

ALWAYS: Final[Errors] = (
    errors.BadRequest,
    errors.InvalidRequest,
    errors.Forbidden,
    errors.ForeignHost,
    errors.RequestTimeout,
    errors.HeadersTooLarge,
    errors.Overloaded,
)
"""What any request may be answered with."""

ANSWERING: Final[Errors] = (errors.NotAcceptable,)
WITH_BODY: Final[Errors] = (errors.TooLarge, errors.UnsupportedMediaType)
WITH_METADATA: Final[Errors] = (errors.MetadataUnavailable,)
USUAL: Final[Errors] = (*ALWAYS, *ANSWERING, *WITH_METADATA)
OF_TRANSACTION: Final[Errors] = (
    errors.NoSuchTransaction,
    errors.TransactionAborted,
    errors.TransactionCommitted,
)
"""What else a ledger of a transaction may be answered with."""

BYTES: Final[dict[str, Any]] = {"type": "string", "format": "binary"}
NOTHING: Final = {JSON: Content({"type": "object", "additionalProperties": False}, {"nothing": {}})}
"""The body of a request that has nothing to say."""
ETAG: Final = {"ETag": "The row's version, in quotes."}

PAGE_ENTRIES: Final = 100
PAGE_BYTES: Final = 1 << 20
"""What a page has at most where a read does not say it; a stream has no such limit."""

LEDGER_ID: Final = path_id("ledger_id", "The ledger.")
NAME: Final = path_text("name", LOG_NAME, "The log.", "events")
PASSWORD: Final = header_text(
    header.LEDGER_PASSWORD, "The ledger's password, where it has one.", chars_max=PASSWORD_CHARS_MAX
)
"""Header values can't hold every character: a password that must travel should be printable."""
WAIT_MS: Final = query_integer(
    "wait_ms", 0, WAIT_MS_MAX, "At the tail: wait for that long for something new.", 0
)
ENCODINGS: Final = ("base64", "text", "json")


def encoding(what: str) -> Parameter[str]:
    """How JSON carries payloads, or values."""
    return query_choice(
        "encoding",
        ENCODINGS,
        f"How JSON carries {what}: as `data`, `text` or `json`. What is no text, or no JSON, comes as "
        "`data_base64` among the others.",
        "base64",
    )


def last_event_id(what: str) -> Parameter[int | None]:
    """Where a stream of events goes on after it was cut off."""
    return header_integer(
        "Last-Event-ID",
        f"With events: the last {what} that was seen, in place of `from`; -1: none.",
        low=NO_ENTRY,
        high=ID_MAX - 1,
    )
