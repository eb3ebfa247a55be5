"""The resource /v1/logs: named logs, their records, and who writes them."""

import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from quorumlog.errors import (
    BadRequest,
    EntryLost,
    EntryUnavailable,
    ExpiredProducer,
    InvalidRequest,
    LogClosed,
    LogExists,
    LogFenced,
    NoSuchLog,
    NotEnoughBookies,
    NotTheOwner,
    OffsetTruncated,
    QuorumTimeout,
    RecoveryBlocked,
    SequenceGap,
    StaleProducer,
    TooLarge,
    UnexpectedOffset,
    VersionConflict,
    WriterLost,
)
from quorumlog.protocol.batch import ProducerSeq
from quorumlog.protocol.ids import ID_MAX
from quorumlog.wire.bodies import LOG_NAME
from services.gateway.edge import arrow, body, log_models, params
from services.gateway.edge import operations as op
from services.gateway.edge.answers import json_bytes, json_value, octets
from services.gateway.edge.ledgers import invalid_of
from services.gateway.edge.limits import BATCH_ENTRIES_MAX, READ_BYTES_MAX, WAIT_MS_MAX
from services.gateway.edge.log_payloads import (
    records_frames,
    records_json,
    view_json,
)
from services.gateway.edge.log_streams import (
    LogSource,
    LogSubject,
    append_records,
    position,
    send_events,
    send_lines,
)
from services.gateway.edge.params import ARROW, EVENTS, FRAMES, JSON, NDJSON, OCTETS
from services.gateway.edge.record_bodies import read_records
from services.gateway.edge.sockets import serve
from services.gateway.edge.streams import last_event_id
from services.gateway.logs.manager import LogManager
from services.gateway.logs.ports import Append
from services.gateway.logs.reading import Start

M = TypeVar("M", bound=BaseModel)

_NAME: Final = re.compile(LOG_NAME, re.ASCII)
_LIST: Final = frozenset(("limit", "after"))
_EXPECT: Final = frozenset(("expect",))
_READ: Final = frozenset(("from", "limit", "max_bytes", "encoding", "wait_ms"))
_ENCODINGS: Final = ("base64", "text", "json")
_LIMIT: Final = 100
_MAX_BYTES: Final = 1 << 20
_PRODUCER_BYTES_MAX: Final = 255
"""A producer's id is stored with its length in one byte."""


class Logs:
    """Handlers of logs."""

    def __init__(self, logs: LogManager, room: body.Room) -> None:
        self._logs = logs
        self._room = room

    # --- the log as a whole ------------------------------------------------------------------

    async def put(self, request: web.Request) -> web.Response:
        """PUT /v1/logs/{name}."""
        name = self._plain(request)
        wanted = await self._body(request, log_models.LogCreate)
        view, is_new = await self._logs.put(name, wanted.settings())
        headers = {"ETag": f'"{view.log.version}"'}
        if is_new:
            headers["Location"] = f"/v1/logs/{name}"
        return json_value(view_json(view), 201 if is_new else 200, headers)

    async def get(self, request: web.Request) -> web.Response:
        """GET /v1/logs/{name}."""
        view = await self._logs.get(self._plain(request))
        return json_value(view_json(view), headers={"ETag": f'"{view.log.version}"'})

    async def page(self, request: web.Request) -> web.Response:
        """GET /v1/logs."""
        query = params.query(request, _LIST)
        params.accepted(request)
        after = query.get("after")
        if after is not None and not _NAME.fullmatch(after):
            raise params.invalid("/query/after", "is not a name")
        limit = params.query_integer(query, "limit", low=1, high=BATCH_ENTRIES_MAX) or 100
        views, following = await self._logs.page(after=after, limit=limit)
        return json_value({"logs": [view_json(view) for view in views], "next": following})

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /v1/logs/{name}."""
        name = _name(request)
        params.query(request)
        if request.body_exists:
            raise BadRequest("DELETE takes no body")
        await self._logs.delete(name)
        return web.Response(status=204, headers={"Cache-Control": "no-store"})

    async def close(self, request: web.Request) -> web.Response:
        """POST /v1/logs/{name}/close."""
        name = self._plain(request)
        await body.expect_nothing(request, self._room)
        return json_value(view_json(await self._logs.close(name)))

    async def roll(self, request: web.Request) -> web.Response:
        """POST /v1/logs/{name}/roll."""
        name = self._plain(request)
        await body.expect_nothing(request, self._room)
        return json_value(view_json(await self._logs.roll(name)))

    async def truncate(self, request: web.Request) -> web.Response:
        """POST /v1/logs/{name}/truncate."""
        name = self._plain(request)
        wanted = await self._body(request, log_models.LogTruncate)
        return json_value(view_json(await self._logs.truncate(name, wanted.before)))

    async def archived(self, request: web.Request) -> web.Response:
        """POST /v1/logs/{name}/archived."""
        name = self._plain(request)
        wanted = await self._body(request, log_models.LogArchived)
        view = await self._logs.archived(name, wanted.through, expect=wanted.expect)
        return json_value(view_json(view))

    async def open(self, request: web.Request) -> web.Response:
        """POST /v1/logs/{name}/open."""
        name = self._plain(request)
        wanted = await self._body(request, log_models.LogOpen)
        token, next_offset = await self._logs.open(name, wanted.owner)
        return json_value({"writer_token": token, "next_offset": next_offset})

    def _plain(self, request: web.Request) -> str:
        """The name of a request without parameters that is answered with JSON."""
        params.query(request)
        params.accepted(request)
        return _name(request)

    async def _body(self, request: web.Request, model: type[M]) -> M:
        value = await body.read_object(request, self._room)
        try:
            return model.model_validate(value)
        except ValidationError as error:
            raise invalid_of(error) from error

    # --- records -----------------------------------------------------------------------------

    async def append(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/logs/{name}/entries."""
        name = _name(request)
        query = params.query(request, _EXPECT)
        expect = params.query_integer(query, "expect", low=0, high=ID_MAX)
        media = body.media_type(request, (JSON, OCTETS, FRAMES, NDJSON, ARROW))
        arrow.check_supported(media)
        producer, token = producer_of(request), token_of(request)
        since = since_of(request, producer)
        if media == NDJSON:
            params.accepted(request, (NDJSON,))
            if producer is not None:
                raise params.invalid(
                    "/header/Producer-Seq", "counts requests, not what is streamed"
                )
            return await append_records(
                request, self._room, self._logs, name, expect=expect, token=token
            )
        params.accepted(request)
        records = await read_records(request, self._room, media)
        call = Append(records, producer, expect, token, since)
        done = await self._logs.append(name, call)
        return json_bytes(
            b'{"log":"%b","first_offset":%d,"last_offset":%d,"ledger_id":%d,"entry_id":%d}'
            % (
                name.encode(),
                done.first_offset,
                done.last_offset,
                done.ledger_id,
                done.entry_id,
            ),
            201,
            {"Producer-Duplicate": "true"} if done.is_duplicate else None,
        )

    async def read(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/logs/{name}/entries."""
        name = _name(request)
        query = params.query(request, _READ)
        media = params.accepted(request, (JSON, FRAMES, NDJSON, EVENTS, ARROW))
        arrow.check_acceptable(media)
        encoding = params.query_choice(query, "encoding", _ENCODINGS) or "base64"
        wait_ms = params.query_integer(query, "wait_ms", low=0, high=WAIT_MS_MAX) or 0
        source = self._source(query, name, is_stream=media in (NDJSON, EVENTS))
        seen = last_event_id(request) if "Last-Event-ID" in request.headers else None
        if media == EVENTS and seen is not None:
            source.start = seen + 1
        if media == EVENTS:
            return await send_events(request, source, encoding)
        if media == NDJSON:
            return await send_lines(request, source, encoding, wait_ms / 1000)
        if media == ARROW:
            stored = await source.batches(wait_ms / 1000)
            return octets(arrow.records_stream(stored.batches), ARROW, position(stored))
        found = await source.page(wait_ms / 1000)
        if media == FRAMES:
            return octets(records_frames(found.records), FRAMES, position(found))
        return json_bytes(
            b'{"log":"%b","entries":[%b],"next":%d,"first_offset":%d,"closed":%b}'
            % (
                name.encode(),
                b",".join(records_json(found.records, encoding)),
                found.next,
                found.first_offset,
                b"true" if found.closed else b"false",
            )
        )

    def _source(self, query: Mapping[str, str], name: str, *, is_stream: bool) -> LogSource:
        start = start_of(query.get("from"))
        limit = params.query_integer(query, "limit", low=1, high=BATCH_ENTRIES_MAX)
        max_bytes = params.query_integer(query, "max_bytes", low=1, high=READ_BYTES_MAX)
        if not is_stream:
            limit, max_bytes = limit or _LIMIT, max_bytes or _MAX_BYTES
        return LogSource(self._logs, self._room, name, start, limit=limit, max_bytes=max_bytes)

    async def socket(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/logs/{name}/ws."""
        name = _name(request)
        params.query(request)
        token = token_of(request)
        await self._logs.get(name)
        return await serve(request, self._room, LogSubject(self._logs, self._room, name, token))

    def routes(self) -> list[op.Route]:
        """The operations with their handlers."""
        return [
            (LIST, self.page),
            (PUT, self.put),
            (GET, self.get),
            (DELETE, self.delete),
            (APPEND, self.append),
            (READ, self.read),
            (SOCKET, self.socket),
            (OPEN, self.open),
            (ROLL, self.roll),
            (TRUNCATE, self.truncate),
            (ARCHIVED, self.archived),
            (CLOSE, self.close),
        ]


def _name(request: web.Request) -> str:
    name = request.match_info["name"]
    if not _NAME.fullmatch(name):
        raise params.invalid("/path/name", f"must match {LOG_NAME}")
    return name


def start_of(text: str | None) -> Start:
    """Where a read begins."""
    if text is None or text == "earliest":
        return "earliest"
    return "latest" if text == "latest" else params.integer(text, "/query/from", 0, ID_MAX)


def producer_of(request: web.Request) -> ProducerSeq | None:
    """The headers `Producer-Id`, `Producer-Epoch` and `Producer-Seq`: all, or none."""
    name = params.header_text(request, "Producer-Id", _PRODUCER_BYTES_MAX)
    epoch = _header_integer(request, "Producer-Epoch")
    seq = _header_integer(request, "Producer-Seq")
    if name is None and epoch is None and seq is None:
        return None
    for header, value in (("Id", name), ("Epoch", epoch), ("Seq", seq)):
        if value is None:
            raise params.invalid(
                f"/header/Producer-{header}", "is missing: the three Producer- headers go together"
            )
    assert name is not None
    assert epoch is not None
    assert seq is not None
    if not 1 <= len(name.encode()) <= _PRODUCER_BYTES_MAX or "\0" in name:
        raise params.invalid("/header/Producer-Id", f"must have 1 to {_PRODUCER_BYTES_MAX} bytes")
    return ProducerSeq(name, epoch, seq)


def since_of(request: web.Request, producer: ProducerSeq | None) -> int:
    """The header `Producer-Since`, which goes with the three others; 0 without it."""
    since = _header_integer(request, "Producer-Since")
    if since is not None and producer is None:
        raise params.invalid(
            "/header/Producer-Since", "says since when a producer is: Producer-Id is missing"
        )
    return since or 0


def token_of(request: web.Request) -> int | None:
    """The header `Writer-Token`."""
    return _header_integer(request, "Writer-Token")


def _header_integer(request: web.Request, name: str) -> int | None:
    text = params.header_text(request, name, 40)
    return None if text is None else params.integer(text, f"/header/{name}", 0, ID_MAX)


_EXAMPLE: Final[dict[str, Any]] = {
    "name": "events",
    "settings": {
        "ensemble_size": 3,
        "write_quorum": 3,
        "ack_quorum": 2,
        "digest": "crc32c",
        "metadata": {},
        "roll_bytes": 268435456,
        "roll_entries": 0,
        "roll_seconds": 0,
        "retention_bytes": 0,
        "retention_seconds": 0,
    },
    "state": "OPEN",
    "first_offset": 0,
    "next_offset": 8,
    "archived_through": None,
    "ledgers": [
        {"ledger_id": 1, "first_offset": 0, "last_offset": 4, "state": "CLOSED"},
        {"ledger_id": 2, "first_offset": 5, "last_offset": None, "state": "OPEN"},
    ],
    "owner": {"id": "b1946ac9", "url": "http://127.0.0.1:8080"},
    "version": 4,
    "created_at": "2026-01-02T03:04:05.678901Z",
}
_LOG: Final = {JSON: op.Content(log_models.Log, {"a log": _EXAMPLE})}
_NOTHING: Final = {
    JSON: op.Content({"type": "object", "additionalProperties": False}, {"nothing": {}})
}
_NAME_PARAMETER: Final = op.Parameter(
    "name", "path", {"type": "string", "pattern": f"^{LOG_NAME}$"}, "The log.", "events"
)
_ERRORS: Final = (*op.ALWAYS, *op.ANSWERING, *op.WITH_METADATA)
_TAKING_OVER: Final = (
    *_ERRORS,
    *op.WITH_BODY,
    NoSuchLog,
    NotEnoughBookies,
    RecoveryBlocked,
    EntryUnavailable,
)


def _number(header: str, text: str) -> op.Parameter:
    return op.Parameter(header, "header", op.int64(0), text)


def _order(verb: str, name: str, summary: str, text: str = "", **more: Any) -> op.Operation:
    """A POST to a log that answers with the log."""
    return op.Operation(
        "POST",
        f"/v1/logs/{{name}}/{verb}",
        name,
        "Logs",
        summary,
        text,
        (_NAME_PARAMETER,),
        more.get("body", _NOTHING),
        {200: op.Answer("Done.", more.get("content", _LOG))},
        (*_TAKING_OVER, *more.get("errors", ())),
        needs_body="body" in more,
    )


LIST: Final = op.Operation(
    "GET",
    "/v1/logs",
    "listLogs",
    "Logs",
    "List logs",
    "By name. `next` is the next `after`, null at the end.",
    (
        op.query_integer("limit", 1, BATCH_ENTRIES_MAX, "Logs of a page.", 100),
        op.Parameter(
            "after",
            "query",
            {"type": "string", "pattern": f"^{LOG_NAME}$"},
            "Logs after this name.",
        ),
    ),
    answers={
        200: op.Answer(
            "A page of logs.",
            {
                JSON: op.Content(
                    log_models.LogList, {"last page": {"logs": [_EXAMPLE], "next": None}}
                )
            },
        )
    },
    errors=(*_ERRORS, EntryUnavailable, RecoveryBlocked),
)
PUT: Final = op.Operation(
    "PUT",
    "/v1/logs/{name}",
    "putLog",
    "Logs",
    "Create a log",
    "With the same settings again it is the same log; with others 409.",
    (_NAME_PARAMETER,),
    {JSON: op.Content(log_models.LogCreate, {"default": {}, "small": {"roll_entries": 1000}})},
    {
        201: op.Answer("The new log.", _LOG, {"Location": "The log's path."}),
        200: op.Answer("The log that was there.", _LOG),
    },
    (*_TAKING_OVER, LogExists),
)
GET: Final = op.Operation(
    "GET",
    "/v1/logs/{name}",
    "getLog",
    "Logs",
    "Look at a log",
    parameters=(_NAME_PARAMETER,),
    answers={200: op.Answer("The log.", _LOG, {"ETag": "The row's version, in quotes."})},
    errors=(*_ERRORS, NoSuchLog, EntryUnavailable, RecoveryBlocked),
)
DELETE: Final = op.Operation(
    "DELETE",
    "/v1/logs/{name}",
    "deleteLog",
    "Logs",
    "Delete a log with its ledgers",
    parameters=(_NAME_PARAMETER,),
    answers={204: op.Answer("It is deleted, and the name is free.")},
    errors=(*op.ALWAYS, *op.WITH_METADATA, NoSuchLog, RecoveryBlocked),
)
OPEN: Final = _order(
    "open",
    "openLog",
    "Open a log for one writer",
    "Whoever wrote it is fenced off. From then on appends need `Writer-Token`.",
    body={JSON: op.Content(log_models.LogOpen, {"me": {"owner": "me"}})},
    content={
        JSON: op.Content(log_models.LogOpened, {"first": {"writer_token": 1, "next_offset": 0}})
    },
    errors=(LogClosed, NotTheOwner, WriterLost),
)
ROLL: Final = _order(
    "roll",
    "rollLog",
    "Go on in a new ledger",
    errors=(LogClosed, NotTheOwner, QuorumTimeout, WriterLost),
)
TRUNCATE: Final = _order(
    "truncate",
    "truncateLog",
    "Drop old ledgers",
    "Whole ledgers that end below `before`; `first_offset` tells the result.",
    body={JSON: op.Content(log_models.LogTruncate, {"ten": {"before": 10}})},
)
ARCHIVED: Final = _order(
    "archived",
    "markLogArchived",
    "Say that records are archived",
    "By compare-and-swap on `archived_through`. From then on retention keeps what is not archived.",
    body={JSON: op.Content(log_models.LogArchived, {"first": {"through": 10, "expect": None}})},
    errors=(VersionConflict, InvalidRequest),
)
CLOSE: Final = _order("close", "closeLog", "Close a log for good", errors=(NotTheOwner, WriterLost))
_WRITER_TOKEN: Final = _number(
    "Writer-Token", "From `open`, where the log was opened for one writer."
)
APPEND: Final = op.Operation(
    "POST",
    "/v1/logs/{name}/entries",
    "appendRecords",
    "Logs",
    "Append records",
    "One request is one atomic record batch. With the `Producer-` headers a repeat is harmless, "
    "through any gateway and for ever: it gets the first answer, or 409 `expired-producer` where "
    "that is no longer known.",
    (
        _NAME_PARAMETER,
        op.query_integer(
            "expect",
            0,
            ID_MAX,
            "The offset that the first record must get; else 412, nothing written. The records of "
            "a stream must follow on without a gap.",
        ),
        op.Parameter(
            "Producer-Id",
            "header",
            {"type": "string", "minLength": 1, "maxLength": _PRODUCER_BYTES_MAX},
            "Who sends; goes with `Producer-Epoch` and `Producer-Seq`.",
        ),
        _number(
            "Producer-Since",
            "The log's `next_offset`, as it was read before this producer (id and epoch) had sent "
            "anything; the same in all of its requests. Without it, or below what the log has "
            "forgotten, a producer that is not known is 409 `expired-producer`; beyond the log's "
            "end 422.",
        ),
        _number("Producer-Epoch", "A higher epoch ends the lower ones of this producer."),
        _number("Producer-Seq", "Counts this producer's requests from 0 in each epoch."),
        _WRITER_TOKEN,
    ),
    {
        JSON: op.Content(
            {
                "anyOf": [
                    log_models.RecordData,
                    log_models.RecordText,
                    log_models.RecordJson,
                    log_models.RecordBatch,
                ]
            },
            {
                "text": {"text": "hello", "key": "k", "headers": {"h": "v"}},
                "batch": {"entries": [{"text": "a"}, {"data": "Yg=="}]},
            },
        ),
        OCTETS: op.Content(op.BYTES | {"description": "The body is one record."}),
        FRAMES: op.Content(
            op.BYTES | {"description": "A batch: (u32 length, value) repeated, big-endian."}
        ),
        NDJSON: op.Content(
            {"type": "string", "description": "One JSON record a line, streamed."},
        ),
        ARROW: op.Content(
            op.BYTES
            | {
                "description": "An Arrow stream, not compressed: the column `value` (binary or "
                "string), and maybe `key`, `headers` (map of strings) and `timestamp` (with a zone)."
            }
        ),
    },
    {
        200: op.Answer(
            "For NDJSON: a line for each acknowledged batch, all before it included; an error is "
            "the last line, a problem object.",
            {NDJSON: op.Content({"type": "string"})},
        ),
        201: op.Answer(
            "All records are durable.",
            {
                JSON: op.Content(
                    log_models.LogAppendedModel,
                    {
                        "two": {
                            "log": "events",
                            "first_offset": 8,
                            "last_offset": 9,
                            "ledger_id": 2,
                            "entry_id": 3,
                        }
                    },
                )
            },
            {"Producer-Duplicate": "true: this is the answer that the first request got."},
        ),
    },
    (
        *_TAKING_OVER,
        LogClosed,
        LogFenced,
        SequenceGap,
        StaleProducer,
        ExpiredProducer,
        UnexpectedOffset,
        TooLarge,
        NotTheOwner,
        WriterLost,
        QuorumTimeout,
    ),
    needs_body=True,
)
READ: Final = op.Operation(
    "GET",
    "/v1/logs/{name}/entries",
    "readRecords",
    "Logs",
    "Read records by offset",
    "Sees every record that was acknowledged before the read began. At the end the list is empty; "
    "`next` is where to go on.",
    (
        _NAME_PARAMETER,
        op.Parameter(
            "from",
            "query",
            {"anyOf": [{"enum": ["earliest", "latest"]}, op.int64(0)], "default": "earliest"},
            "The first offset.",
        ),
        op.query_integer("limit", 1, BATCH_ENTRIES_MAX, "Records at most.", 100),
        op.query_integer(
            "max_bytes", 1, READ_BYTES_MAX, "Bytes, roughly; one record always comes.", _MAX_BYTES
        ),
        op.Parameter(
            "encoding",
            "query",
            {"enum": list(_ENCODINGS), "default": "base64"},
            "How JSON carries values: as `data`, `text` or `json`.",
        ),
        op.query_integer(
            "wait_ms", 0, WAIT_MS_MAX, "At the tail: wait for that long for something new.", 0
        ),
        op.Parameter(
            "Last-Event-ID",
            "header",
            op.int64(0, ID_MAX - 1),
            "With events: the last offset that was seen, in place of `from`.",
        ),
    ),
    answers={
        200: op.Answer(
            "Records, maybe none.",
            {
                JSON: op.Content(
                    log_models.LogEntries,
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
                        }
                    },
                ),
                FRAMES: op.Content(
                    op.BYTES
                    | {"description": "(u64 offset, u32 length, value) repeated, big-endian."}
                ),
                ARROW: op.Content(
                    op.BYTES
                    | {
                        "description": "An Arrow stream of `offset`, `timestamp`, `key`, `headers`, "
                        "`value`, `ledger_id`, `entry_id`."
                    }
                ),
                NDJSON: op.Content(
                    {"type": "string", "description": "One record a line; an error is the last."}
                ),
                EVENTS: op.Content(
                    {
                        "type": "string",
                        "description": "One record an event, `id` its offset; follows the tail, "
                        "`event: end` once the log is closed.",
                    }
                ),
            },
            {
                "Next-Offset": "With frames, Arrow and NDJSON: where to go on.",
                "First-Offset": "With frames, Arrow and NDJSON: the log's first offset.",
                "Log-Closed": "With frames, Arrow and NDJSON: true or false.",
            },
        )
    },
    errors=(*_ERRORS, NoSuchLog, OffsetTruncated, EntryLost, EntryUnavailable, RecoveryBlocked),
)
SOCKET: Final = op.Operation(
    "GET",
    "/v1/logs/{name}/ws",
    "logSocket",
    "Logs",
    "Append and follow the tail over one WebSocket",
    "Send frames as binary messages, or the JSON of an append as text: each acknowledged batch is "
    'told by its offsets, all before it included. `{"tail":{"from":0,"encoding":"base64"}}` asks '
    "for the tail (from `earliest` and `latest` too, encoding `frames` for binary messages). A "
    "problem object ends the socket.",
    (_NAME_PARAMETER, _WRITER_TOKEN),
    answers={101: op.Answer("The socket is open.")},
    errors=(*op.ALWAYS, *op.WITH_METADATA, NoSuchLog),
)
