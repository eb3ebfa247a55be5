"""The operations of /v1/logs on the records of one log."""

from typing import Final

from quorumlog import errors, header
from quorumlog.net.operations import Content, Operation, Reply
from quorumlog.net.parameters import (
    Parameter,
    header_integer,
    int64,
    invalid,
)
from quorumlog.protocol.ids import ID_MAX
from services.gateway.edge import log_models as models
from services.gateway.edge.log_operations import CREATED, TAKING_OVER
from services.gateway.edge.media import NDJSON
from services.gateway.edge.operations import (
    ALWAYS,
    ENCODING,
    EXPECT,
    LAST_EVENT_ID,
    LIMIT,
    MAX_BYTES,
    NAME,
    NOTHING_FOLLOWS,
    TICKET,
    USUAL,
    WAIT_MS,
    WITH_METADATA,
    WRITER_TOKEN,
    append_forms,
    gives,
    read_forms,
)
from services.gateway.edge.starts import NAMED, start_of
from services.gateway.logs.values import Start

_PRODUCER_BYTES_MAX: Final = 255
"""A producer's id is stored with its length in one byte."""


def _producer(text: str, pointer: str) -> str:
    if not 1 <= len(text.encode()) <= _PRODUCER_BYTES_MAX or "\0" in text:
        raise invalid(pointer, f"must have 1 to {_PRODUCER_BYTES_MAX} bytes")
    return text


PRODUCER_ID: Final[Parameter[str | None]] = Parameter(
    header.PRODUCER_ID,
    "header",
    _producer,
    {"type": "string", "minLength": 1, "maxLength": _PRODUCER_BYTES_MAX},
    "Who sends; goes with `Producer-Epoch` and `Producer-Seq`.",
    None,
)
PRODUCER_SINCE: Final = header_integer(
    header.PRODUCER_SINCE,
    "The log's `next_offset`, as it was read before this producer (id and epoch) had sent "
    "anything; the same in all of its requests. Without it, or below the offset up to which the log has "
    "forgotten producers, an unknown producer is 409 `expired-producer`; beyond the log's end 422.",
)
PRODUCER_EPOCH: Final = header_integer(
    header.PRODUCER_EPOCH, "A higher epoch ends the lower ones of this producer."
)
PRODUCER_SEQ: Final = header_integer(
    header.PRODUCER_SEQ, "Counts this producer's requests from 0 in each epoch."
)
FROM: Final[Parameter[Start]] = Parameter(
    "from",
    "query",
    start_of,
    {
        "anyOf": [
            {"enum": list(NAMED)},
            int64(-ID_MAX),
            {"type": "string", "format": "date-time"},
        ],
        "default": "earliest",
    },
    "The first offset; `-N` is N offsets before the end, or where the log begins. A time (RFC 3339) is the first "
    "record that was appended then or later, by the log's append times: before the log's first record that is where "
    "the log begins, after its last record (in the future too) its end. A `+` is `%2B` in a query: a time with a "
    "space is 422.",
    "earliest",
)

APPEND: Final = Operation(
    "POST",
    "/v1/logs/{name}/entries",
    "appendRecords",
    "Logs",
    "Append records",
    "One request is one atomic record batch. With the `Producer-` headers a repeat is harmless, "
    "through any gateway and for ever: it gets the first answer, or 409 `expired-producer` once that "
    "answer is forgotten.",
    (
        NAME,
        EXPECT,
        CREATED,
        PRODUCER_ID,
        PRODUCER_SINCE,
        PRODUCER_EPOCH,
        PRODUCER_SEQ,
        WRITER_TOKEN,
    ),
    append_forms(
        Content(
            {
                "anyOf": [
                    models.RecordData,
                    models.RecordText,
                    models.RecordJson,
                    models.RecordBatch,
                ]
            },
            {
                "text": {"text": "hello", "key": "k", "headers": {"h": "v"}},
                "batch": {"entries": [{"text": "a"}, {"data": "Yg=="}]},
            },
        ),
        "record",
        "the column `value` (binary or string), and maybe `key`, `headers` (map of strings) and `timestamp` "
        "(with a zone).",
    ),
    {
        200: Reply(
            "For NDJSON: a line for each acknowledged batch, all before it included; an error is "
            "the last line, a problem object.",
            {NDJSON: Content({"type": "string"})},
        ),
        **gives(
            "All records are durable.",
            models.LogAppendedModel,
            {
                "two": {
                    "log": "events",
                    "first_offset": 8,
                    "last_offset": 9,
                    "ledger_id": 2,
                    "entry_id": 3,
                }
            },
            {header.PRODUCER_DUPLICATE: "true: this is the answer that the first request got."},
            status=201,
        ),
    },
    (
        *TAKING_OVER,
        errors.LogClosed,
        errors.LogFenced,
        errors.SequenceGap,
        errors.StaleProducer,
        errors.ExpiredProducer,
        errors.UnexpectedOffset,
        errors.TooLarge,
        errors.NotTheOwner,
        errors.WriterLost,
        errors.QuorumTimeout,
    ),
    needs_body=True,
)
READ: Final = Operation(
    "GET",
    "/v1/logs/{name}/entries",
    "readRecords",
    "Logs",
    "Read records",
    "Sees every record that was acknowledged before the read began. At the end the list is empty; "
    "`next` is where to go on.",
    (NAME, FROM, CREATED, LIMIT, MAX_BYTES, ENCODING, WAIT_MS, LAST_EVENT_ID, TICKET),
    replies={
        200: Reply(
            "Records, maybe none.",
            read_forms(
                Content(
                    models.LogEntries,
                    {
                        "one": {
                            "log": "events",
                            "entries": [
                                {
                                    "offset": 0,
                                    "timestamp": "2026-01-02T03:04:05.678Z",
                                    "ledger_id": 1,
                                    "entry_id": 0,
                                    "key": None,
                                    "headers": {},
                                    "data": "aGVsbG8=",
                                }
                            ],
                            "next": 1,
                            "first_offset": 0,
                            "closed": False,
                            "created_at": "2026-01-02T03:04:05.678901Z",
                        }
                    },
                ),
                "record",
                "offset",
                "`offset`, `timestamp`, `key`, `headers`, `value`, `ledger_id`, `entry_id`",
                "`event: end` once the log is closed. From `latest`, `-N` or a time the id before the first record "
                "comes at once, without an event.",
            ),
            {
                header.NEXT_OFFSET: "With frames and Arrow: where to go on; with NDJSON where that was when "
                "the head was sent.",
                "First-Offset": "With frames, Arrow and NDJSON: the log's first offset.",
                "Log-Closed": "With frames, Arrow and NDJSON: true or false.",
                "Log-Created-At": "With frames, Arrow and NDJSON: the log's `created_at`, to be sent as `created`.",
            },
        ),
        204: NOTHING_FOLLOWS,
    },
    errors=(
        *USUAL,
        errors.NoSuchLog,
        errors.LogReplaced,
        errors.OffsetBeyondEnd,
        errors.OffsetTruncated,
        errors.EntryLost,
        errors.EntryUnavailable,
        errors.RecoveryBlocked,
    ),
)
SOCKET: Final = Operation(
    "GET",
    "/v1/logs/{name}/ws",
    "logSocket",
    "Logs",
    "Append and follow the tail over one WebSocket",
    "Send frames as binary messages, or the JSON of an append as text. The answer has the offsets of each acknowledged "
    'batch, all earlier ones included. `{"tail":{"from":0,"encoding":"base64"}}` asks for the tail. Its `from` may be '
    "`earliest`, `latest`, -N or a time, as in a read; `created` may name the log; encoding `frames` gives binary "
    'messages. From `latest`, -N or a time, the first answer is `{"tail":{"from":7}}`, the offset where the tail begins. '
    "A problem object ends the socket. With the subprotocol `quorumlog.appends` there is no tail, and each message is "
    "one append with the answer of HTTP.",
    (NAME, WRITER_TOKEN, TICKET),
    replies={101: Reply("The socket is open.")},
    errors=(*ALWAYS, *WITH_METADATA, errors.NoSuchLog),
)
