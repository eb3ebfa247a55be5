"""The resource /v1/logs/{name}/records: append records to a log, and read its records."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from aiohttp import WSMessage, WSMsgType, web

from quorumlog import errors, header
from quorumlog.net.operations import Content, Reply
from quorumlog.net.parameters import (
    Given,
    Parameter,
    escaped,
    header_integer,
    int64,
    invalid,
    query_integer,
    query_pairs,
)
from quorumlog.protocol.batch import BATCH_BYTES_MAX, TTL_S_MAX, ProducerSeq, Record
from quorumlog.protocol.ids import ID_MAX
from quorumlog.protocol.log.messages import Append, RecordsAppended
from services.gateway.edge import arrow
from services.gateway.edge import log_models as models
from services.gateway.edge import operations as op
from services.gateway.edge.access.scopes import Named, Scope, on
from services.gateway.edge.http import body
from services.gateway.edge.http.limits import Room
from services.gateway.edge.http.media import NDJSON, accepted, json_bytes
from services.gateway.edge.http.pipe import Pipe, append_lines
from services.gateway.edge.log_payloads import (
    read_records,
    record_of_line,
    records_from_json,
    with_ttl,
)
from services.gateway.edge.logs import CREATED, WRITING
from services.gateway.edge.pages import LogPages
from services.gateway.edge.payloads import RECORDS, check_size, from_frames
from services.gateway.edge.reads import PageStream, ReadRequest, answer_read
from services.gateway.edge.sockets import SocketTarget, serve
from services.gateway.edge.starts import NAMED, start_of, start_of_json
from services.gateway.interface import EntriesAppended
from services.gateway.logs.filters import Filter
from services.gateway.logs.manager import LogManager
from services.gateway.logs.values import Start

_PRODUCER_BYTES_MAX: Final = 255
"""Maximum bytes of a producer's id, whose length is stored in one byte."""


def _producer(text: str, pointer: str) -> str:
    if not 1 <= len(text.encode()) <= _PRODUCER_BYTES_MAX or "\0" in text:
        raise invalid(pointer, f"must have 1 to {_PRODUCER_BYTES_MAX} bytes")
    return text


PRODUCER_ID: Final[Parameter[str | None]] = Parameter(
    header.PRODUCER_ID,
    "header",
    _producer,
    {"type": "string", "minLength": 1, "maxLength": _PRODUCER_BYTES_MAX},
    "The producer's id; required with `Producer-Epoch` and `Producer-Seq`.",
    None,
)
PRODUCER_SINCE: Final = header_integer(
    header.PRODUCER_SINCE,
    "The log's `next_offset`, read before this producer (id and epoch) sent its first request; "
    "the same in all of its requests. If it is missing, or below the offset up to which the log "
    "has forgotten producers, an unknown producer gets 409 `expired-producer`. Beyond the log's "
    "end: 422.",
)
PRODUCER_EPOCH: Final = header_integer(
    header.PRODUCER_EPOCH, "A higher epoch ends this producer's lower epochs."
)
PRODUCER_SEQ: Final = header_integer(
    header.PRODUCER_SEQ, "Counts this producer's requests from 0 in each epoch."
)
FROM: Final[Parameter[Start]] = Parameter(
    "from",
    "query",
    start_of,
    {
        "anyOf": [{"enum": list(NAMED)}, int64(-ID_MAX), {"type": "string", "format": "date-time"}],
        "default": "earliest",
    },
    "Where to begin: an offset; `-N`, which is N offsets before the end, or the first offset if "
    "the log is shorter; or an RFC 3339 time. A time means the first record whose append time is "
    "equal or later: the log's beginning if the time is before the first record, its end if the "
    "time is after the last record or in the future. Write `+` as `%2B` in a query: a time with a "
    "space is 422.",
    "earliest",
)


def utf8(text: str, _pointer: str) -> bytes:
    """Convert a parameter with a key, or the beginning of a key, to bytes."""
    return text.encode()


TTL_S: Final = query_integer(
    "ttl_s",
    1,
    TTL_S_MAX,
    "Seconds after their append when the records expire: no read returns them from then on. Not "
    "for logs that are compacted. A record's own `ttl_s` takes precedence.",
)
KEY: Final[Parameter[bytes | None]] = Parameter(
    "key", "query", utf8, {"type": "string"}, "Only records with this key (UTF-8).", None
)
KEY_PREFIX: Final[Parameter[bytes | None]] = Parameter(
    "key_prefix",
    "query",
    utf8,
    {"type": "string"},
    "Only records whose key begins with this text.",
    None,
)
HEADER: Final = query_pairs(
    "header", "Only records with this header: `header[name]=value`. Several must all match."
)


class RecordRoutes(op.Handlers, tag="Records"):
    """HTTP handlers for the records of a log."""

    def __init__(self, logs: LogManager, room: Room) -> None:
        self._logs = logs
        self._room = room

    @op.operation(
        "POST /v1/logs/{name}/records",
        (
            op.NAME,
            op.EXPECT,
            TTL_S,
            CREATED,
            PRODUCER_ID,
            PRODUCER_SINCE,
            PRODUCER_EPOCH,
            PRODUCER_SEQ,
            op.WRITER_TOKEN,
        ),
        body=op.append_forms(
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
                    "batch": {"records": [{"text": "a"}, {"data": "Yg=="}]},
                },
            ),
            "record",
            "the column `value` (binary or string), and optionally `key`, `headers` (map of "
            "strings) and `timestamp` (with a zone).",
        ),
        replies={
            200: Reply(
                "For NDJSON: one line per acknowledged batch. Each line also acknowledges all "
                "earlier batches. An error is the last line, as a problem object.",
                {NDJSON: Content({"type": "string"})},
            ),
            **op.gives(
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
                {header.PRODUCER_DUPLICATE: "true: a retry; this is the first request's response."},
                status=201,
            ),
        },
        errors=(
            *WRITING,
            errors.KeyRequired,
            errors.LogFenced,
            errors.SequenceGap,
            errors.StaleProducer,
            errors.ExpiredProducer,
            errors.UnexpectedOffset,
        ),
        scope=on(Named.LOG, Scope.APPEND),
        needs_body=True,
    )
    async def append_records(self, request: web.Request, given: Given) -> web.StreamResponse:
        """Append records.

        One request is one atomic record batch. With the `Producer-` headers, a retry through any
        gateway and at any time never appends again. The retry gets the first response, or 409
        `expired-producer` once the log has forgotten the first response.
        """
        name, expect, token = given[op.NAME], given[op.EXPECT], given[op.WRITER_TOKEN]
        media = body.media_type(request, op.APPEND_TYPES)
        arrow.check_supported(media)
        producer = _producer_of(given)
        if media == NDJSON:
            accepted(request, (NDJSON,))
            if producer is not None:
                raise invalid(PRODUCER_SEQ.pointer, "is not allowed with NDJSON: send a batch")
            created_at = given[CREATED] or (await self._logs.rows.row(name)).created_at
            pipe = self._pipe(name, created_at, token, expect, given[TTL_S])
            names = ("first_offset", "last_offset")
            return await append_lines(request, self._room, pipe, parse=record_of_line, names=names)
        accepted(request)
        records = with_ttl(await read_records(request, self._room, media), given[TTL_S])
        since = given[PRODUCER_SINCE] or 0
        call = Append.of(
            records, producer, expect=expect, token=token, since=since, created_at=given[CREATED]
        )
        done = await self._logs.append(name, call)
        return json_bytes(
            _appended(name, done),
            201,
            {header.PRODUCER_DUPLICATE: "true"} if done.is_duplicate else None,
        )

    @op.operation(
        "GET /v1/logs/{name}/records",
        (
            op.NAME,
            FROM,
            CREATED,
            op.LIMIT,
            op.MAX_BYTES,
            KEY,
            KEY_PREFIX,
            HEADER,
            op.ENCODING,
            op.WAIT_MS,
            op.LAST_EVENT_ID,
            op.TICKET,
        ),
        replies={
            200: Reply(
                "Records; the list may be empty.",
                op.read_forms(
                    Content(
                        models.LogRecords,
                        {
                            "one": {
                                "log": "events",
                                "records": [
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
                    "`event: end` once the log is closed. A read from `latest`, `-N` or a time "
                    "first gets the id before the first record, without an event.",
                ),
                {
                    header.NEXT_OFFSET: "With frames and Arrow: the next offset to read. With "
                    "NDJSON: the next offset when the head was sent.",
                    "First-Offset": "With frames, Arrow and NDJSON: the log's first offset.",
                    "Log-Closed": "With frames, Arrow and NDJSON: true or false.",
                    "Log-Created-At": "With frames, Arrow and NDJSON: the log's `created_at`, to "
                    "send as `created`.",
                },
            ),
            204: op.NOTHING_FOLLOWS,
        },
        errors=(
            errors.NoSuchLog,
            errors.LogReplaced,
            errors.OffsetBeyondEnd,
            errors.OffsetTruncated,
            errors.EntryLost,
            errors.EntryUnavailable,
            errors.RecoveryBlocked,
        ),
        scope=on(Named.LOG, Scope.READ),
    )
    async def read_records(self, request: web.Request, given: Given) -> web.StreamResponse:
        """Read records.

        A read returns every record that was acknowledged before the read began. At the log's end
        the list is empty. `next` is the offset at which the next read begins.

        With `key`, `key_prefix` or `header`, the gateway returns only matching records. A page
        covers at most 16 MiB of records, so it may be empty before the log's end. Continue from
        `next`, until `next` equals `from`. In a stream of events, an id without data reports how far
        the gateway has searched.
        """
        chosen = Filter(given[KEY], given[KEY_PREFIX], given[HEADER])
        is_filtered = chosen != Filter()
        wanted = ReadRequest.of(
            request, given, given[FROM], given[CREATED], is_filtered=is_filtered
        )
        pages = LogPages(
            self._logs, given[op.NAME], wanted.created_at, chosen if is_filtered else None
        )
        return await answer_read(request, self._room, pages, wanted)

    @op.operation(
        "GET /v1/logs/{name}/ws",
        (op.NAME, op.WRITER_TOKEN, op.TICKET),
        replies={101: Reply("The socket is open.")},
        errors=(errors.NoSuchLog,),
        scope=on(Named.LOG, Scope.READ, Scope.APPEND),
    )
    async def log_socket(self, request: web.Request, given: Given) -> web.StreamResponse:
        """Append and follow the tail over one WebSocket.

        Send frames as binary messages, or the JSON of an append as text. The response has the
        offsets of each acknowledged batch, and also acknowledges all earlier batches. After a
        problem object the socket closes. With the subprotocol `quorumlog.appends` there is no tail,
        and each message is one append with the same response as over HTTP.

        `{"tail":{"from":0,"encoding":"base64"}}` requests the tail. The parameters `from`,
        `created`, `key`, `key_prefix` and `header` (an object) are those of a read. The encoding
        `frames` selects binary messages. If `from` is `latest`, -N or a time, the first message has
        the resolved offset: `{"tail":{"from":7}}`. If no record matches, a message without records
        reports in `next` how far the gateway has searched.
        """
        name, token = given[op.NAME], given[op.WRITER_TOKEN]
        created_at = (await self._logs.get(name)).log.created_at

        async def append(records: list[Record]) -> bytes:
            return _appended(name, await self._logs.append(name, Append.of(records, token=token)))

        target = SocketTarget(
            self._pipe(name, created_at, token),
            lambda message: self._records_of(request, message),
            lambda done: {"first_offset": done.first, "last_offset": done.last},
            append,
            lambda start, created, chosen: PageStream(
                LogPages(self._logs, name, created or created_at, _filter_of(chosen)),
                self._room,
                start,
            ),
            start_of_json,
            ("key", "key_prefix", "header"),
        )
        return await serve(request, self._room, target)

    async def _records_of(self, request: web.Request, message: WSMessage) -> list[Record]:
        """Parse the records of a WebSocket message: frames, or the JSON of an append."""
        if message.type == WSMsgType.TEXT:
            made = await body.in_turn(
                request,
                self._room,
                message.data,
                lambda text, count: records_from_json(text, count=count),
            )
            return list(made)
        records = [Record(value) for value in from_frames(message.data, BATCH_BYTES_MAX, RECORDS)]
        check_size(sum(record.size for record in records))
        return records

    def _pipe(
        self,
        name: str,
        created_at: str,
        token: int | None,
        expect: int | None = None,
        ttl_s: int | None = None,
    ) -> Pipe[Record]:
        """Create a pipe that appends a stream of records to one log. A stream can't have a producer's
        sequence, which counts requests, because timing decides how a stream is divided into batches.
        """

        async def append(records: Sequence[Record], expect: int | None) -> EntriesAppended:
            lasting = with_ttl(records, ttl_s)
            call = Append.of(lasting, expect=expect, token=token, created_at=created_at)
            done = await self._logs.append(name, call)
            return EntriesAppended(done.first_offset, done.last_offset, done.last_offset)

        return Pipe(append, self._room, lambda record: record.size, expect)


def _appended(name: str, done: RecordsAppended) -> bytes:
    return b'{"log":"%b","first_offset":%d,"last_offset":%d,"ledger_id":%d,"entry_id":%d}' % (
        name.encode(),
        done.first_offset,
        done.last_offset,
        done.ledger_id,
        done.entry_id,
    )


def _filter_of(chosen: Mapping[str, Any]) -> Filter | None:
    """Parse the filter of a request for the tail. Raises: InvalidRequest."""
    headers = chosen.get("header", {})
    texts = {name: value for name, value in chosen.items() if name != "header"}
    if isinstance(headers, dict):
        texts |= {f"header/{escaped(name)}": value for name, value in headers.items()}
    else:
        raise invalid("/tail/header", "must be an object")
    for name, value in texts.items():
        if not isinstance(value, str):
            raise invalid(f"/tail/{name}", "must be a string")
    key, prefix = (chosen.get(name) for name in ("key", "key_prefix"))
    if not chosen:
        return None
    return Filter(
        None if key is None else key.encode(),
        None if prefix is None else prefix.encode(),
        tuple(headers.items()),
    )


def _producer_of(given: Given) -> ProducerSeq | None:
    """Parse the `Producer-…` headers: id, epoch and sequence must be sent together."""
    name, epoch, seq = given[PRODUCER_ID], given[PRODUCER_EPOCH], given[PRODUCER_SEQ]
    if name is None and epoch is None and seq is None:
        if given[PRODUCER_SINCE] is not None:
            detail = "requires Producer-Id, Producer-Epoch and Producer-Seq"
            raise invalid(PRODUCER_SINCE.pointer, detail)
        return None
    if name is None or epoch is None or seq is None:
        three = ((PRODUCER_ID, name), (PRODUCER_EPOCH, epoch), (PRODUCER_SEQ, seq))
        missing = next(header for header, value in three if value is None)
        detail = "is required: send Producer-Id, Producer-Epoch and Producer-Seq together"
        raise invalid(missing.pointer, detail)
    return ProducerSeq(name, epoch, seq)
