"""The operations of /v1/stream/{path}, from the Durable Streams protocol.

Requests that the protocol calls malformed get 400; the rest of the API uses 422.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar
from urllib.parse import unquote

from quorumlog import errors, header
from quorumlog.errors import BadRequest
from quorumlog.net.operations import JSON, Content, Reply
from quorumlog.net.parameters import Parameter, Parse
from quorumlog.protocol.batch import STREAM_SEQ_BYTES_MAX
from quorumlog.protocol.values import LOG_NAME
from services.gateway.edge import operations as op
from services.gateway.edge.access.scopes import Named, Scope, on
from services.gateway.edge.http.media import EVENTS
from services.gateway.edge.logs import WRITING
from services.gateway.edge.starts import created_of, token_of
from services.gateway.logs.values import STREAM_PREFIX, stream_name
from services.gateway.streams import config

PREFIX: Final = "/v1/stream/"
RESERVED: Final = "__ds"
"""The first segment of reserved paths, which are not streams (section 6)."""


def log_of(path: str) -> str:
    """The name of the log that backs a stream. Raises: BadRequest if the path is not UTF-8, is too
    long, or is reserved for the protocol.
    """
    try:
        name = STREAM_PREFIX + stream_name(path)
    except UnicodeEncodeError as error:
        raise BadRequest("the stream's path must be UTF-8") from error
    if path.partition("/")[0] == RESERVED:
        raise BadRequest(f"the path {RESERVED} is reserved: choose another path for the stream")
    if not re.fullmatch(LOG_NAME, name):
        raise BadRequest(
            f"the path is too long: the log's name may have at most 200 characters (got {len(name)})"
        )
    return name


def log_of_url(text: str, pointer: str) -> str:
    """The name of the log that backs the stream with this URL path. Raises: BadRequest."""
    try:
        path = unquote(text, errors="strict")
    except UnicodeDecodeError as error:
        raise BadRequest(f"{pointer}: must be UTF-8") from error
    if not path.startswith(PREFIX):
        raise BadRequest(f"{pointer}: must be a path that begins with {PREFIX}")
    return log_of(path.removeprefix(PREFIX))


@dataclass(frozen=True, slots=True)
class Place:
    """An offset that a stream returned to a client."""

    at: int
    created_at: str
    """Creation time of the stream's log. A re-created stream rejects the offset (rule 27b)."""


Position = Place | Literal["earliest", "latest"]
Live = Literal["long-poll", "sse"]
T = TypeVar("T")

PATH: Final = "/v1/stream/{path}"
_OFFSET_DIGITS: Final = 19
"""Number of digits of the largest offset. With leading zeros, offsets sort as text."""
_NUMBER_MAX: Final = 2**53 - 1
"""JavaScript's greatest safe integer (section 5.2.1)."""
_PRODUCER_BYTES_MAX: Final = 255
_OFFSET: Final = re.compile(r"([0-9]{19})_([0-9a-f]{14})", re.ASCII)
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,15}", re.ASCII)
_FIRST_OFFSET: Final = re.compile(r"0{16}_0{16}", re.ASCII)


def offset_text(offset: int, created_at: str) -> str:
    """Format a log's offset for clients (section 8). Offsets of one stream sort as text."""
    return f"{offset:0{_OFFSET_DIGITS}d}_{token_of(created_at)}"


def offset_of(text: str, pointer: str) -> Position:
    """Parse an offset that a stream returned, `-1` or `now`. Raises: BadRequest."""
    if text == "-1":
        return "earliest"
    if text == "now":
        return "latest"
    found = _OFFSET.fullmatch(text)
    if found is None:
        raise BadRequest(f"{pointer}: must be -1, now, or a Stream-Next-Offset of this stream")
    return Place(int(found[1]), created_of(found[2]))


def _fork_offset(text: str, pointer: str) -> Place | Literal[0]:
    """Parse a fork's offset. Clients may send 0 as the reference server formats it."""
    if _FIRST_OFFSET.fullmatch(text):
        return 0
    found = offset_of(text, pointer)
    if not isinstance(found, Place):
        raise BadRequest(f"{pointer}: must be a Stream-Next-Offset of the source")
    return found


def _live(text: str, pointer: str) -> Live:
    if text == "long-poll":
        return "long-poll"
    if text == "sse":
        return "sse"
    raise BadRequest(f"{pointer}: must be long-poll or sse")


def _cursor(text: str, _pointer: str) -> int | None:
    """Parse a cursor. An invalid cursor, perhaps changed by a cache, is ignored."""
    return int(text) if _NUMBER.fullmatch(text) else None


def _number(text: str, pointer: str) -> int:
    if not _NUMBER.fullmatch(text) or int(text) > _NUMBER_MAX:
        raise BadRequest(f"{pointer}: must be an integer from 0 to 2^53-1 without leading zeros")
    return int(text)


def _bytes_up_to(bytes_max: int) -> Callable[[str, str], str]:
    def parse(text: str, pointer: str) -> str:
        if not 1 <= len(text.encode()) <= bytes_max or "\0" in text:
            raise BadRequest(f"{pointer}: must have 1 to {bytes_max} bytes, none of them zero")
        return text

    return parse


def _is_true(text: str, _pointer: str) -> bool:
    return text.strip().lower() == "true"


_WORD: Final = {"type": "string"}


def _header(
    name: str, parse: Parse[T], description: str, schema: Mapping[str, Any] = _WORD
) -> Parameter[T | None]:
    return Parameter(name, "header", parse, schema, description, None)


_COUNT: Final = {"type": "integer", "format": "int64", "minimum": 0, "maximum": _NUMBER_MAX}

STREAM: Final[Parameter[str]] = Parameter(
    "path",
    "path",
    lambda text, _pointer: log_of(text),
    _WORD,
    "The stream; slashes are part of it.",
    "",
    "chat/42",
)
OFFSET: Final[Parameter[Position | None]] = Parameter(
    "offset",
    "query",
    offset_of,
    {"type": "string", "pattern": f"^(-1|now|{_OFFSET.pattern})$"},
    "Where to begin: `-1` (the start), `now` (the tail), or a `Stream-Next-Offset`.",
    None,
)
LIVE: Final[Parameter[Live | None]] = Parameter(
    "live",
    "query",
    _live,
    {"enum": ["long-poll", "sse"]},
    "Wait at the tail for new records.",
    None,
)
CURSOR: Final[Parameter[int | None]] = Parameter(
    "cursor", "query", _cursor, _WORD, "The `Stream-Cursor` of the previous response.", None
)
CONTENT_TYPE: Final = _header(
    "Content-Type",
    config.content_type,
    "The stream's content type; application/octet-stream by default.",
)
CLOSED: Final = _header(
    "Stream-Closed", _is_true, "`true`: close the stream in the same step as the body is appended."
)
TTL: Final = _header(
    "Stream-TTL",
    _number,
    "The stream expires after this many seconds without an access.",
    _COUNT,
)
EXPIRES_AT: Final = _header(
    "Stream-Expires-At", config.time, "When the stream expires, an RFC 3339 time."
)
FORKED_FROM: Final = _header(
    "Stream-Forked-From",
    log_of_url,
    "The URL path of the source: the new stream begins with the source's records, and is independent after them.",
)
FORK_OFFSET: Final = _header(
    "Stream-Fork-Offset",
    _fork_offset,
    "Requires `Stream-Forked-From`: the fork has the source's records below this offset. Default: the source's tail.",
)
FORK_SUB_OFFSET: Final = _header(
    "Stream-Fork-Sub-Offset",
    _number,
    "Requires `Stream-Forked-From`: the fork also has this many messages, or bytes, of the batch at the offset.",
    _COUNT,
)
SEQ: Final = _header(
    "Stream-Seq",
    _bytes_up_to(STREAM_SEQ_BYTES_MAX),
    "Must be above the stream's last `Stream-Seq`, compared byte by byte; else 409.",
    {"type": "string", "minLength": 1, "maxLength": STREAM_SEQ_BYTES_MAX},
)
PRODUCER_ID: Final = _header(
    header.PRODUCER_ID,
    _bytes_up_to(_PRODUCER_BYTES_MAX),
    "The producer's name; requires `Producer-Epoch` and `Producer-Seq`.",
    {"type": "string", "minLength": 1, "maxLength": _PRODUCER_BYTES_MAX},
)
PRODUCER_EPOCH: Final = _header(
    header.PRODUCER_EPOCH, _number, "A higher epoch ends the producer's lower epochs.", _COUNT
)
PRODUCER_SEQ: Final = _header(
    header.PRODUCER_SEQ, _number, "Counts this producer's requests from 0 in each epoch.", _COUNT
)
PRODUCER_SINCE: Final = _header(
    header.PRODUCER_SINCE,
    _number,
    "An extension, as for logs: the stream's end before the producer's first request.",
    _COUNT,
)
IF_NONE_MATCH: Final = _header(
    "If-None-Match",
    lambda text, _pointer: text,
    "An `ETag`: the response is 304 if its `ETag` would be the same.",
)

_NEXT: Final = {
    "Stream-Next-Offset": "The offset after the last record, where the next read continues."
}
_CLOSED: Final = {"Stream-Closed": "`true` if the stream is closed and has no further records."}
_PLACE: Final = {**_NEXT, **_CLOSED}
_ANY: Final = {"*/*": Content(op.BYTES)}
_ERRORS: Final = (
    *op.ALWAYS,
    *op.ANSWERING,
    *op.WITH_BODY,
    errors.MetadataUnavailable,
    *WRITING,
    errors.LogDeleted,
)

CREATE: Final = op.PublicOperation(
    f"PUT {PATH}",
    "createStream",
    "Durable Streams",
    "Create a stream",
    "With a body, the stream exists once the body is durable. A retry with the same settings gets 200, other settings get 409."
    " With `Stream-Forked-From` the stream is a fork, which requires the scope `read` on the source.",
    (STREAM, CONTENT_TYPE, CLOSED, TTL, EXPIRES_AT, FORKED_FROM, FORK_OFFSET, FORK_SUB_OFFSET),
    _ANY,
    {
        201: Reply("Created.", headers={**_PLACE, "Location": "The stream's URL."}),
        200: Reply("The stream exists with these settings.", headers=_PLACE),
    },
    (*_ERRORS, errors.StreamConflict),
    scope=on(Named.STREAM, Scope.MANAGE),
    ignores_unknown=True,
    is_audited=True,
)
APPEND: Final = op.PublicOperation(
    f"POST {PATH}",
    "appendToStream",
    "Durable Streams",
    "Append to a stream, or close it",
    "The body is appended as a whole or not at all. In application/json, each element of an array is a message. With"
    " `Stream-Closed: true` the stream is closed after the body; the body may then be empty.",
    (STREAM, CONTENT_TYPE, CLOSED, SEQ, PRODUCER_ID, PRODUCER_EPOCH, PRODUCER_SEQ, PRODUCER_SINCE),
    _ANY,
    {
        204: Reply("Durable, or a retry of a durable append.", headers=_PLACE),
        200: Reply(
            "Durable, from a producer.",
            headers={
                **_PLACE,
                header.PRODUCER_EPOCH: "The producer's epoch.",
                header.PRODUCER_SEQ: "The highest accepted number of the epoch.",
            },
        ),
    },
    (
        *_ERRORS,
        errors.StreamConflict,
        errors.StreamSeqRegression,
        errors.SequenceGap,
        errors.StaleProducer,
        errors.ExpiredProducer,
        errors.LogFenced,
    ),
    scope=on(Named.STREAM, Scope.APPEND),
    needs_body=True,
    ignores_unknown=True,
)
READ: Final = op.PublicOperation(
    f"GET {PATH}",
    "readStream",
    "Durable Streams",
    "Read a stream",
    "Without `live`, returns existing data, one page at a time. `live=long-poll` waits at the tail, and"
    " returns 204 if no data arrives. `live=sse` sends events for a minute. HEAD returns the stream's end.",
    (STREAM, OFFSET, LIVE, CURSOR, IF_NONE_MATCH, op.TICKET),
    scope=on(Named.STREAM, Scope.READ),
    replies={
        200: Reply(
            "The stream's data: bytes, or an array of messages.",
            {JSON: Content({"type": "array", "items": {}}), **_ANY, EVENTS: Content(_WORD)},
            {
                **_PLACE,
                "Stream-Up-To-Date": "`true` if the response reaches the tail.",
                "Stream-Cursor": "For the next request with `live`.",
                "Stream-Sse-Data-Encoding": "`base64`: the events' data is in base64.",
                "ETag": "For `If-None-Match`.",
            },
        ),
        204: Reply("A long poll timed out: there is no new data.", headers=_PLACE),
        304: Reply("The client's copy is current."),
    },
    errors=(*_ERRORS, errors.OffsetTruncated, errors.EntryLost),
    ignores_unknown=True,
)
DELETE: Final = op.PublicOperation(
    f"DELETE {PATH}",
    "deleteStream",
    "Durable Streams",
    "Delete a stream",
    scope=on(Named.STREAM, Scope.MANAGE),
    parameters=(STREAM,),
    replies={204: Reply("The stream no longer exists.")},
    errors=(*_ERRORS, errors.LogProtected),
    ignores_unknown=True,
    is_audited=True,
)
