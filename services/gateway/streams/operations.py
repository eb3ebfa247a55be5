"""The operations of /v1/stream/{path}: those of the Durable Streams protocol, in its words.

What the protocol calls malformed is 400, where the rest of the API has 422.
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
from services.gateway.logs.values import STREAM_PREFIX
from services.gateway.streams import config

PREFIX: Final = "/v1/stream/"
_ESCAPED: Final = re.compile(rb"[^A-Za-z0-9.-]")


def log_of(path: str) -> str:
    """The name of a stream's log: each byte of the path's UTF-8 but letters, digits, `.` and `-` is `_` and two
    hexadecimal digits. Raises: BadRequest for a path that is too long for a name.
    """
    try:
        data = path.encode()
    except UnicodeEncodeError as error:
        raise BadRequest("the stream's path is not UTF-8") from error
    name = STREAM_PREFIX + _ESCAPED.sub(lambda found: b"_%02X" % found[0][0], data).decode()
    if not re.fullmatch(LOG_NAME, name):
        raise BadRequest(
            f"the stream's path is too long: its log's name would have {len(name)} characters, of 200"
        )
    return name


def log_of_url(text: str, pointer: str) -> str:
    """The name of the log of a stream whose URL's path is given. Raises: BadRequest."""
    try:
        path = unquote(text, errors="strict")
    except UnicodeDecodeError as error:
        raise BadRequest(f"{pointer}: is not UTF-8") from error
    if not path.startswith(PREFIX):
        raise BadRequest(f"{pointer}: must be a path that begins with {PREFIX}")
    return log_of(path.removeprefix(PREFIX))


@dataclass(frozen=True, slots=True)
class Place:
    """An offset as a stream has given it out."""

    at: int
    created_at: str
    """Of the stream's log: the offset means nothing in a later stream of the name (rule 27b)."""


Position = Place | Literal["earliest", "latest"]
Live = Literal["long-poll", "sse"]
T = TypeVar("T")

PATH: Final = "/v1/stream/{path}"
_OFFSET_DIGITS: Final = 19
"""Of the greatest offset: with leading zeros offsets sort as text."""
_NUMBER_MAX: Final = 2**53 - 1
"""JavaScript's greatest safe integer (section 5.2.1)."""
_PRODUCER_BYTES_MAX: Final = 255
_OFFSET: Final = re.compile(r"([0-9]{19})_([0-9a-f]{14})", re.ASCII)
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,15}", re.ASCII)
_FIRST_OFFSET: Final = re.compile(r"0{16}_0{16}", re.ASCII)


def offset_text(offset: int, created_at: str) -> str:
    """An offset of a log as clients see it (section 8): offsets of one stream sort as text."""
    return f"{offset:0{_OFFSET_DIGITS}d}_{token_of(created_at)}"


def _offset(text: str, pointer: str) -> Position:
    if text == "-1":
        return "earliest"
    if text == "now":
        return "latest"
    found = _OFFSET.fullmatch(text)
    if found is None:
        raise BadRequest(f"{pointer}: must be -1, now, or an offset that this stream has given out")
    return Place(int(found[1]), created_of(found[2]))


def _fork_offset(text: str, pointer: str) -> Place | Literal[0]:
    """The first offset may be written as the protocol's own server has it: clients send that without being told."""
    if _FIRST_OFFSET.fullmatch(text):
        return 0
    found = _offset(text, pointer)
    if not isinstance(found, Place):
        raise BadRequest(f"{pointer}: must be an offset that the source has given out")
    return found


def _live(text: str, pointer: str) -> Live:
    if text == "long-poll":
        return "long-poll"
    if text == "sse":
        return "sse"
    raise BadRequest(f"{pointer}: must be long-poll or sse")


def _cursor(text: str, _pointer: str) -> int | None:
    """Whatever else a cache made of it starts anew."""
    return int(text) if _NUMBER.fullmatch(text) else None


def _number(text: str, pointer: str) -> int:
    if not _NUMBER.fullmatch(text) or int(text) > _NUMBER_MAX:
        raise BadRequest(f"{pointer}: must be an integer from 0 to 2^53-1 in its shortest form")
    return int(text)


def _bytes_up_to(bytes_max: int) -> Callable[[str, str], str]:
    def parse(text: str, pointer: str) -> str:
        if not 1 <= len(text.encode()) <= bytes_max or "\0" in text:
            raise BadRequest(f"{pointer}: must have 1 to {bytes_max} bytes")
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
    _offset,
    {"type": "string", "pattern": f"^(-1|now|{_OFFSET.pattern})$"},
    "Where to begin: `-1` (the start), `now` (the tail), or a `Stream-Next-Offset`.",
    None,
)
LIVE: Final[Parameter[Live | None]] = Parameter(
    "live", "query", _live, {"enum": ["long-poll", "sse"]}, "Wait at the tail for what comes.", None
)
CURSOR: Final[Parameter[int | None]] = Parameter(
    "cursor", "query", _cursor, _WORD, "The `Stream-Cursor` of the answer before.", None
)
CONTENT_TYPE: Final = _header(
    "Content-Type", config.content_type, "Of the stream; application/octet-stream if left out."
)
CLOSED: Final = _header(
    "Stream-Closed", _is_true, "`true`: nothing follows, in one step with the body."
)
TTL: Final = _header(
    "Stream-TTL",
    _number,
    "The stream ends to exist after so many seconds without an access.",
    _COUNT,
)
EXPIRES_AT: Final = _header(
    "Stream-Expires-At", config.time, "When the stream ends to exist, an RFC 3339 time."
)
FORKED_FROM: Final = _header(
    "Stream-Forked-From",
    log_of_url,
    "The path of a stream's URL: the new stream begins with that one's records, and goes on by itself.",
)
FORK_OFFSET: Final = _header(
    "Stream-Fork-Offset",
    _fork_offset,
    "Goes with `Stream-Forked-From`: the records below this offset are the fork's; the source's tail if left out.",
)
FORK_SUB_OFFSET: Final = _header(
    "Stream-Fork-Sub-Offset",
    _number,
    "Goes with `Stream-Forked-From`: so many messages, or bytes, of what was appended at the offset are the fork's too.",
    _COUNT,
)
SEQ: Final = _header(
    "Stream-Seq",
    _bytes_up_to(STREAM_SEQ_BYTES_MAX),
    "Must be above the last one of the stream, compared byte by byte; else 409.",
    {"type": "string", "minLength": 1, "maxLength": STREAM_SEQ_BYTES_MAX},
)
PRODUCER_ID: Final = _header(
    header.PRODUCER_ID,
    _bytes_up_to(_PRODUCER_BYTES_MAX),
    "Who sends; goes with `Producer-Epoch` and `Producer-Seq`.",
    {"type": "string", "minLength": 1, "maxLength": _PRODUCER_BYTES_MAX},
)
PRODUCER_EPOCH: Final = _header(
    header.PRODUCER_EPOCH, _number, "A higher epoch ends the lower ones of this producer.", _COUNT
)
PRODUCER_SEQ: Final = _header(
    header.PRODUCER_SEQ, _number, "Counts this producer's requests from 0 in each epoch.", _COUNT
)
PRODUCER_SINCE: Final = _header(
    header.PRODUCER_SINCE,
    _number,
    "An extension: as for logs, the stream's end before the producer's first request.",
    _COUNT,
)
IF_NONE_MATCH: Final = _header(
    "If-None-Match",
    lambda text, _pointer: text,
    "An `ETag`: 304 where the answer would be the same.",
)

_NEXT: Final = {"Stream-Next-Offset": "The offset after the last record; where to go on reading."}
_CLOSED: Final = {"Stream-Closed": "`true` where the stream is closed and nothing follows."}
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
    "With a body the stream exists once that is durable. A repeat with the same settings is 200, other settings 409."
    " With `Stream-Forked-From` it is a fork, which needs `read` on the source.",
    (STREAM, CONTENT_TYPE, CLOSED, TTL, EXPIRES_AT, FORKED_FROM, FORK_OFFSET, FORK_SUB_OFFSET),
    _ANY,
    {
        201: Reply("Created.", headers={**_PLACE, "Location": "The stream's URL."}),
        200: Reply("It exists with these settings.", headers=_PLACE),
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
    "The body is appended as one, or not at all. Of application/json an array's elements are the messages. With"
    " `Stream-Closed: true` the stream ends with the body, or without one as it is.",
    (STREAM, CONTENT_TYPE, CLOSED, SEQ, PRODUCER_ID, PRODUCER_EPOCH, PRODUCER_SEQ, PRODUCER_SINCE),
    _ANY,
    {
        204: Reply("Durable, or a repeat of what is.", headers=_PLACE),
        200: Reply(
            "Durable, of a producer.",
            headers={
                **_PLACE,
                header.PRODUCER_EPOCH: "The producer's epoch.",
                header.PRODUCER_SEQ: "The highest number of the epoch that was taken.",
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
    "Without `live` what there is, a part at a time. `live=long-poll` waits at the tail, 204 if nothing came;"
    " `live=sse` sends events for a minute. HEAD tells where the stream ends.",
    (STREAM, OFFSET, LIVE, CURSOR, IF_NONE_MATCH, op.TICKET),
    scope=on(Named.STREAM, Scope.READ),
    replies={
        200: Reply(
            "The stream's data: bytes, or an array of messages.",
            {JSON: Content({"type": "array", "items": {}}), **_ANY, EVENTS: Content(_WORD)},
            {
                **_PLACE,
                "Stream-Up-To-Date": "`true` where the answer reaches the tail.",
                "Stream-Cursor": "For the next request with `live`.",
                "Stream-Sse-Data-Encoding": "`base64`: so the events carry data.",
                "ETag": "For `If-None-Match`.",
            },
        ),
        204: Reply("A long poll: nothing came.", headers=_PLACE),
        304: Reply("The answer is the one that the client has."),
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
    replies={204: Reply("It exists no more.")},
    errors=(*_ERRORS, errors.LogProtected),
    ignores_unknown=True,
    is_audited=True,
)
