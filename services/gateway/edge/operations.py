"""What the gateway's operations have in common: their errors, the parameters that several of them take, and the
checks that follow from a declaration.

Each resource's operations are declared in a module beside that of its handlers.
"""

from dataclasses import replace
from typing import Any, Final

from aiohttp import web

from quorumlog import errors, header
from quorumlog.net.operations import JSON, Content, Errors, Route
from quorumlog.net.parameters import (
    Given,
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
from services.gateway.edge.body import expect_no_body, expect_nothing
from services.gateway.edge.limits import PASSWORD_CHARS_MAX, WAIT_MS_MAX
from services.gateway.edge.media import accepted
from services.gateway.edge.room import Room

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


def checked(route: Route, room: Room) -> Route:
    """A route that first refuses what its operation does not declare: a form of answer other than JSON where
    all successes are JSON, and a body where the operation has none.
    """
    operation = route.operation
    is_json = {media for reply in operation.replies.values() for media in reply.content} == {JSON}
    is_empty, is_delete = operation.body is NOTHING, operation.method == "DELETE"
    if not (is_json or is_empty or is_delete):
        return route

    async def handle(request: web.Request, given: Given) -> web.StreamResponse:
        if is_json:
            accepted(request)
        if is_empty:
            await expect_nothing(request, room)
        elif is_delete:
            expect_no_body(request)
        return await route.handler(request, given)

    return replace(route, handler=handle)
