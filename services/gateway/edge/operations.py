"""Shared parts of the gateway's operations: common errors and parameters, checks derived from
declarations, and idempotency keys, which identify retries (rule 6a).

Each operation is declared above its handler (`operation`, `Handlers`). `streams/operations.py`
declares the operations of streams.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, ClassVar, Final, Literal, TypeVar
from uuid import UUID

import orjson
from aiohttp import web
from pydantic import BaseModel

from quorumlog import errors, header
from quorumlog.errors import MetadataUnavailable
from quorumlog.net import parameters
from quorumlog.net.operations import JSON, Content, Errors, Operation, Reply, Route, Schema
from quorumlog.protocol.ids import ID_MAX
from quorumlog.protocol.once import Once
from quorumlog.protocol.values import LOG_NAME
from quorumlog.wire.position_bodies import OWN_LOGS
from services.gateway.edge.access import callers
from services.gateway.edge.access.scopes import OPEN, Access, caller_of
from services.gateway.edge.http import limits
from services.gateway.edge.http.body import expect_no_body, expect_nothing
from services.gateway.edge.http.media import ARROW, EVENTS, FRAMES, NDJSON, OCTETS, accepted
from services.gateway.edge.starts import EVENT_ID, event_id_of


@dataclass(frozen=True, slots=True)
class PublicOperation(Operation):
    """An operation of the public API."""

    scope: Access = field(kw_only=True)
    """The access that a token must grant, if tokens are required."""


class Handlers:
    """Base class of a resource's handlers. Each handler stands below its operation's declaration.

    `operations` maps the handlers' names to operations, in the order of the OpenAPI document.
    """

    operations: ClassVar[Mapping[str, PublicOperation]]

    def __init_subclass__(cls, *, tag: str) -> None:
        """`tag` is the resource's name in the OpenAPI document."""
        declared = ((name, getattr(each, _DECLARED, None)) for name, each in vars(cls).items())
        cls.operations = {name: replace(one, tag=one.tag or tag) for name, one in declared if one}

    def routes(self) -> list[Route]:
        """Pair each operation with its handler."""
        return [Route(one, getattr(self, name)) for name, one in self.operations.items()]


_DECLARED: Final = "declared"
_H = TypeVar("_H", bound=Callable[..., Awaitable[web.StreamResponse]])

ALWAYS: Final[Errors] = (
    errors.BadRequest,
    errors.CodingUnknown,
    errors.InvalidRequest,
    errors.Forbidden,
    errors.ForeignHost,
    errors.RequestTimeout,
    errors.HeadersTooLarge,
    errors.Overloaded,
)
"""Errors that every operation may return."""

ANSWERING: Final[Errors] = (errors.NotAcceptable,)
WITH_BODY: Final[Errors] = (errors.TooLarge, errors.UnsupportedMediaType)
OF_TRANSACTION: Final[Errors] = (
    errors.NoSuchTransaction,
    errors.TransactionAborted,
    errors.TransactionCommitted,
)
"""Additional errors of operations on a ledger of a transaction."""

BYTES: Final[dict[str, Any]] = {"type": "string", "format": "binary"}
NOTHING: Final = {JSON: Content({"type": "object", "additionalProperties": False}, {"nothing": {}})}
"""The body of a request without input: no body, or `{}`."""
ETAG: Final = {"ETag": "The metadata's version, in quotes."}
IF_MATCH: Final = parameters.header_version("The expected version of the metadata, its `ETag`.")

PAGE_ENTRIES: Final = 100
PAGE_BYTES: Final = 1 << 20
"""Default limits of a page, in entries and in bytes. A stream has no default limit."""

LEDGER_ID: Final = parameters.path_id("ledger_id", "The ledger.")


def _log_name(text: str, pointer: str) -> str:
    if parameters.matching(text, pointer, LOG_NAME) in OWN_LOGS:
        raise parameters.invalid(pointer, "is reserved for the cluster: choose another name")
    return text


NAME: Final = replace(parameters.path_text("name", LOG_NAME, "The log.", "events"), parse=_log_name)
PASSWORD: Final = parameters.header_text(
    header.LEDGER_PASSWORD,
    "The ledger's password, if it has one.",
    chars_max=limits.PASSWORD_CHARS_MAX,
)
"""Passwords should be printable, because headers can't contain every character."""
WAIT_MS: Final = parameters.query_integer(
    "wait_ms", 0, limits.WAIT_MS_MAX, "How long to wait for new data at the tail.", 0
)
LIMIT: Final = parameters.query_integer(
    "limit", 1, limits.BATCH_ENTRIES_MAX, "Maximum number of entries or records.", PAGE_ENTRIES
)
MAX_BYTES: Final = parameters.query_integer(
    "max_bytes",
    1,
    limits.READ_BYTES_MAX,
    "Approximate maximum of bytes. The first entry or record is always returned.",
    PAGE_BYTES,
)
ENCODING: Final = parameters.query_choice(
    "encoding",
    ("base64", "text", "json"),
    "How JSON represents payloads: base64 in `data`, or as `text` or `json`. A payload that isn't "
    "valid text or JSON is returned as `data_base64`.",
    "base64",
)
LAST_EVENT_ID: Final[parameters.Parameter[tuple[int, str | None] | None]] = parameters.Parameter(
    "Last-Event-ID",
    "header",
    event_id_of,
    {"type": "string", "pattern": f"^{EVENT_ID}$"},
    "With events, instead of `from`: the id of the last event that the client has received, or -1 "
    "for none. The id of a log's event identifies the log: if the log has been deleted and "
    "created again, the response is 409 `log-replaced`.",
    None,
)
"""The event after which a stream resumes when the client reconnects."""
NOTHING_FOLLOWS: Final = Reply(
    "With events and `Last-Event-ID`: no event follows, so a browser stops reconnecting."
)
CONTENT_ENCODING: Final[parameters.Parameter[str]] = parameters.Parameter(
    "Content-Encoding",
    "header",
    lambda text, _pointer: text,
    {"enum": ["zstd", "gzip", "identity"]},
    "How the body is compressed. Size limits apply to the decompressed body. Any other coding, or "
    "several, get a 415 with `Accept-Encoding`.",
    "identity",
)
"""Parameter of each operation with a body. `edge/http/body.py` evaluates the header."""
EXPECT: Final = parameters.query_integer(
    "expect",
    0,
    ID_MAX,
    "The entry id or offset that the first item must get; otherwise 412, and nothing is written. "
    "The other items of a stream must follow without a gap.",
)
WRITER_TOKEN: Final = parameters.header_integer(
    header.WRITER_TOKEN, "The token from `open`; required if the log is open for one writer."
)

TICKET: Final = parameters.query_text(
    "ticket",
    callers.TICKET,
    "A ticket from `POST /v1/tickets`, for browsers, which can't send the header `Authorization` "
    "here.",
)


def takes(schema: Schema, examples: dict[str, Any]) -> dict[str, Content]:
    """Declare a JSON request body."""
    return {JSON: Content(schema, examples)}


def gives(
    description: str,
    schema: Schema,
    examples: dict[str, Any],
    headers: Mapping[str, str] | None = None,
    *,
    status: int = 200,
) -> dict[int | Literal["default"], Reply]:
    """Declare a successful response whose body is JSON."""
    return {status: Reply(description, {JSON: Content(schema, examples)}, headers or {})}


def operation(
    key: str,
    given: tuple[parameters.Parameter[Any], ...] = (),
    *,
    scope: Access,
    replies: Mapping[int | Literal["default"], Reply],
    body: Mapping[str, Content] | None = None,
    errors: Errors = (),
    tag: str | None = None,
    needs_body: bool = False,
    is_audited: bool = False,
    ignores_unknown: bool = False,
) -> Callable[[_H], _H]:
    """Declare the operation of the handler below. The handler's name determines the operation's
    name. The first line of the handler's docstring is the summary, and the rest the description.
    `errors` are the errors that do not follow from the declaration.
    """
    regular = ALWAYS if scope is OPEN else (*ALWAYS, MetadataUnavailable)
    if any(JSON in reply.content for reply in replies.values()):
        regular = (*regular, *ANSWERING)
    if body:
        regular = (*regular, *WITH_BODY)

    def declared(handler: _H) -> _H:
        first, *rest = handler.__name__.split("_")
        summary, _, description = (handler.__doc__ or "").partition("\n")
        assert summary.endswith("."), f"{key}: the first line of the docstring must be a sentence"
        vars(handler)[_DECLARED] = PublicOperation(
            key,
            first + "".join(map(str.title, rest)),
            tag,
            summary.rstrip("."),
            " ".join(description.split()),
            given,
            body or {},
            replies,
            (*regular, *errors),
            needs_body,
            is_audited=is_audited,
            ignores_unknown=ignores_unknown,
            scope=scope,
        )
        return handler

    return declared


APPEND_TYPES: Final = (JSON, OCTETS, FRAMES, NDJSON, ARROW)
"""Media types of an append's body, the default first."""


def append_forms(json: Content, item: str, arrow: str) -> dict[str, Content]:
    """Declare the request bodies of an append of entries or records."""
    return {
        JSON: json,
        OCTETS: Content(BYTES | {"description": f"The body is one {item}."}),
        FRAMES: Content(
            BYTES | {"description": "A batch: (u32 length, payload) repeated, big-endian."}
        ),
        NDJSON: Content({"type": "string", "description": f"One JSON {item} per line, streamed."}),
        ARROW: Content(
            BYTES | {"description": f"A batch: an uncompressed Arrow stream with {arrow}"}
        ),
    }


READ_TYPES: Final = (JSON, FRAMES, ARROW, NDJSON, EVENTS)
"""Media types of a read's response, the default first."""


def read_forms(
    json: Content, item: str, number: str, arrow: str, events: str
) -> dict[str, Content]:
    """Declare the response bodies of a read of entries or records: a page or a stream."""
    return {
        JSON: json,
        FRAMES: Content(
            BYTES | {"description": f"(u64 {number}, u32 length, payload) repeated, big-endian."}
        ),
        ARROW: Content(BYTES | {"description": f"An Arrow stream of {arrow}."}),
        NDJSON: Content(
            {"type": "string", "description": f"One {item} per line; an error is the last line."}
        ),
        EVENTS: Content(
            {
                "type": "string",
                "description": f"One event per {item}, `id`: {number}; follows the tail, {events}",
            }
        ),
    }


def checked(route: Route, room: limits.Room) -> Route:
    """Wrap a route to reject requests with an undeclared body. If all successful responses are
    JSON, requests that don't accept JSON are rejected, too.
    """
    operation = route.operation
    is_json = {media for reply in operation.replies.values() for media in reply.content} == {JSON}
    is_empty, is_delete = operation.body is NOTHING, operation.method == "DELETE"
    if not (is_json or is_empty or is_delete):
        return route

    async def handle(request: web.Request, given: parameters.Given) -> web.StreamResponse:
        if is_json:
            accepted(request)
        if is_empty:
            await expect_nothing(request, room)
        elif is_delete:
            expect_no_body(request)
        return await route.handler(request, given)

    return replace(route, handler=handle)


_KEY: Final = "[!-~]{1,255}"
IDEMPOTENCY_KEY: Final[parameters.Parameter[str | None]] = parameters.Parameter(
    header.IDEMPOTENCY_KEY,
    "header",
    lambda text, pointer: parameters.matching(text, pointer, _KEY),
    {"type": "string", "pattern": f"^{_KEY}$"},
    "Identifies the request. Requests with the same key are carried out once. Keys of different "
    "callers are independent. The same key with another body gets 422.",
    None,
)


def once_of(request: web.Request, given: parameters.Given, *asked: Any) -> Once | None:
    """Derive a request's identity from its `Idempotency-Key`; None without a key. `asked` has all
    inputs of the request except method and path.
    """
    key = given[IDEMPOTENCY_KEY]
    if key is None:
        return None
    named = orjson.dumps([caller_of(request).identity, request.method, request.path, key])
    token = UUID(bytes=blake2b(named, digest_size=16).digest())
    # The hash is keyed, so that a password in a body can't be guessed from the stored digest.
    secret = blake2b(key.encode()).digest()
    data = orjson.dumps(asked, default=_fields, option=orjson.OPT_SORT_KEYS)
    content = blake2b(data, digest_size=16, key=secret).hexdigest()
    return Once(str(token), content)


def _fields(asked: Any) -> Any:
    assert isinstance(asked, BaseModel)
    return asked.model_dump(mode="json", exclude_unset=True)
