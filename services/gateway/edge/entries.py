"""The resource /v1/ledgers/{ledger_id}/entries: append and read."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from aiohttp import web

from quorumlog.errors import (
    EntryConflict,
    EntryLost,
    EntryUnavailable,
    LedgerClosed,
    LedgerFenced,
    NoSuchEntry,
    NoSuchLedger,
    NotEnoughBookies,
    NotYetConfirmed,
    OwnedByLog,
    QuorumTimeout,
    ReadOnly,
    UnexpectedEntryId,
    WriterLost,
    WrongPassword,
)
from quorumlog.protocol.ids import ID_MAX, NO_ENTRY
from services.gateway.edge import arrow, body, models, params
from services.gateway.edge import operations as op
from services.gateway.edge.answers import (
    entries_frames,
    entries_json,
    json_bytes,
    json_value,
    octets,
)
from services.gateway.edge.ledgers import OF_TRANSACTION, password_of
from services.gateway.edge.limits import BATCH_ENTRIES_MAX, READ_BYTES_MAX, WAIT_MS_MAX
from services.gateway.edge.params import ARROW, EVENTS, FRAMES, JSON, NDJSON, OCTETS
from services.gateway.edge.payloads import encoded, entry_too_large, from_frames, from_json
from services.gateway.edge.pipe import Pipe
from services.gateway.edge.record_bodies import read_records
from services.gateway.edge.sockets import LedgerSubject, serve
from services.gateway.edge.streams import (
    Range,
    Source,
    append_lines,
    last_event_id,
    position,
    send_events,
    send_lines,
)
from services.gateway.interface import EngineInterface
from services.gateway.logs.transactions import Transactions

_APPEND_TYPES: Final = (JSON, OCTETS, FRAMES, NDJSON, ARROW)
_READ_TYPES: Final = (JSON, FRAMES, NDJSON, EVENTS, ARROW)
_EXPECT: Final = frozenset(("expect",))
_READ: Final = frozenset(("from", "to", "limit", "max_bytes", "encoding", "wait_ms"))
_LAC: Final = frozenset(("after", "wait_ms"))
_ENCODINGS: Final = ("base64", "text", "json")
_ENCODING: Final = frozenset(("encoding",))
_LIMIT: Final = 100
_MAX_BYTES: Final = 1 << 20
_IMMUTABLE: Final = {"Cache-Control": "private, max-age=31536000, immutable"}


class Entries:
    """Handlers of a ledger's entries."""

    def __init__(
        self,
        engine: EngineInterface,
        room: body.Room,
        transactions: Transactions | None = None,
    ) -> None:
        self._engine = engine
        self._room = room
        self._transactions = transactions

    async def append(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/ledgers/{ledger_id}/entries."""
        ledger_id = params.path_id(request, "ledger_id")
        expect = None
        if request.query_string:
            query = params.query(request, _EXPECT)
            expect = params.query_integer(query, "expect", low=0, high=ID_MAX)
        media = body.media_type(request, _APPEND_TYPES)
        arrow.check_supported(media)
        password = password_of(request)
        if media == NDJSON:
            params.accepted(request, (NDJSON,))
            return await append_lines(
                request, self._room, Pipe(self._engine, self._room, ledger_id, password, expect)
            )
        params.accepted(request)
        transaction = await self._engine.transaction_of(ledger_id)
        if transaction is not None and self._transactions is not None:
            records = await read_records(request, self._room, media)
            done = await self._transactions.append(transaction, ledger_id, records, expect=expect)
            return json_bytes(
                b'{"ledger_id":%d,"entry_id":%d,"last_add_confirmed":%d}'
                % (ledger_id, done.first, done.last_add_confirmed),
                201,
            )
        payloads, is_batch = await self._payloads(request, media)
        appended = await self._engine.append(ledger_id, payloads, password=password, expect=expect)
        if is_batch:
            return json_bytes(
                b'{"ledger_id":%d,"first_entry":%d,"last_entry":%d,"last_add_confirmed":%d}'
                % (ledger_id, appended.first, appended.last, appended.last_add_confirmed),
                201,
            )
        return json_bytes(
            b'{"ledger_id":%d,"entry_id":%d,"last_add_confirmed":%d}'
            % (ledger_id, appended.first, appended.last_add_confirmed),
            201,
        )

    async def _payloads(self, request: web.Request, media: str) -> tuple[list[bytes], bool]:
        """What to append, and whether it came as a batch."""
        limits = self._room.limits
        if media == JSON:
            data = await body.read(request, self._room, limits.body_bytes_max)
            return from_json(data or b"{}", limits.entry_bytes_max)
        if media == OCTETS:
            length = request.content_length or 0
            if length > limits.entry_bytes_max:
                raise entry_too_large(length, limits.entry_bytes_max, "")
            return [await body.read(request, self._room, limits.entry_bytes_max)], False
        data = await body.read(request, self._room, limits.frames_bytes_max)
        if media == ARROW:
            return arrow.payloads(data, limits.entry_bytes_max), True
        return from_frames(data, limits.entry_bytes_max), True

    async def read(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/ledgers/{ledger_id}/entries."""
        ledger_id = params.path_id(request, "ledger_id")
        query = params.query(request, _READ)
        media = params.accepted(request, _READ_TYPES)
        arrow.check_acceptable(media)
        encoding = params.query_choice(query, "encoding", _ENCODINGS) or "base64"
        wait_ms = params.query_integer(query, "wait_ms", low=0, high=WAIT_MS_MAX) or 0
        wanted = _range_of(query, ledger_id, password_of(request))
        seen = last_event_id(request) if "Last-Event-ID" in request.headers else None
        if media == EVENTS:
            if seen is not None:
                wanted = replace(wanted, first=seen + 1)
            return await send_events(request, Source(self._engine, self._room, wanted), encoding)
        source = Source(self._engine, self._room, wanted)
        result = await source.page(
            limit=wanted.limit or _LIMIT,
            max_bytes=wanted.max_bytes or _MAX_BYTES,
            wait_s=wait_ms / 1000,
        )
        if media == NDJSON:
            return await send_lines(request, source, result, encoding)
        if media == FRAMES:
            return octets(entries_frames(result.runs), FRAMES, position(result))
        if media == ARROW:
            return octets(arrow.entries_stream(result.runs), ARROW, position(result))
        return json_bytes(
            b'{"ledger_id":%d,"entries":[%b],"next":%d,"last_add_confirmed":%d,"closed":%b,'
            b'"lac_source":"%b"}'
            % (
                ledger_id,
                b",".join(entries_json(result.runs, encoding)),
                result.next,
                result.last_add_confirmed,
                b"true" if result.closed else b"false",
                result.lac_source.encode(),
            )
        )

    async def entry(self, request: web.Request) -> web.Response:
        """GET /v1/ledgers/{ledger_id}/entries/{entry_id}."""
        ledger_id = params.path_id(request, "ledger_id")
        entry_id = params.path_id(request, "entry_id")
        query = params.query(request, _ENCODING)
        encoding = params.query_choice(query, "encoding", _ENCODINGS) or "base64"
        media = params.accepted(request, (JSON, OCTETS))
        result = await self._engine.entry(ledger_id, entry_id, password=password_of(request))
        headers = _IMMUTABLE if result.closed else None
        if media == OCTETS:
            return octets(result.payload, OCTETS, headers)
        member = encoded(result.payload, encoding, entry_id)
        return json_bytes(
            b'{"ledger_id":%d,"entry_id":%d,%b}' % (ledger_id, entry_id, member), headers=headers
        )

    async def last_add_confirmed(self, request: web.Request) -> web.Response:
        """GET /v1/ledgers/{ledger_id}/last-add-confirmed."""
        ledger_id = params.path_id(request, "ledger_id")
        query = params.query(request, _LAC)
        params.accepted(request)
        after = params.query_integer(query, "after", low=NO_ENTRY, high=ID_MAX)
        wait_ms = params.query_integer(query, "wait_ms", low=0, high=WAIT_MS_MAX) or 0
        password = password_of(request)
        found = None
        if wait_ms and after is not None:
            found = await self._room.wait(
                self._engine.last_add_confirmed(
                    ledger_id, after=after, wait_s=wait_ms / 1000, password=password
                )
            )
        if found is None:
            found = await self._engine.last_add_confirmed(ledger_id, password=password)
        return json_value(
            {
                "ledger_id": ledger_id,
                "last_add_confirmed": found.last_add_confirmed,
                "closed": found.closed,
            }
        )

    async def socket(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/ledgers/{ledger_id}/ws."""
        ledger_id = params.path_id(request, "ledger_id")
        params.query(request)
        password = password_of(request)
        await self._engine.get(ledger_id)
        subject = LedgerSubject(self._engine, self._room, ledger_id, password)
        return await serve(request, self._room, subject)

    def routes(self) -> list[op.Route]:
        """The operations with their handlers."""
        return [
            (APPEND, self.append),
            (READ, self.read),
            (ENTRY, self.entry),
            (LAST_ADD_CONFIRMED, self.last_add_confirmed),
            (SOCKET, self.socket),
        ]


def _range_of(query: Mapping[str, str], ledger_id: int, password: str | None) -> Range:
    """The range that a query names."""
    first = params.query_integer(query, "from", low=0, high=ID_MAX) or 0
    last = params.query_integer(query, "to", low=0, high=ID_MAX)
    if last is not None and last < first:
        raise params.invalid("/query/to", f"must not be below from, {first}")
    return Range(
        ledger_id,
        first,
        last,
        params.query_integer(query, "limit", low=1, high=BATCH_ENTRIES_MAX),
        params.query_integer(query, "max_bytes", low=1, high=READ_BYTES_MAX),
        password,
    )


_READING: Final = (
    *op.ALWAYS,
    *op.ANSWERING,
    *op.WITH_METADATA,
    WrongPassword,
    NoSuchLedger,
    EntryLost,
    EntryUnavailable,
)
_POSITION_HEADERS: Final = {
    "Next-Entry-Id": "With frames and Arrow: where to go on.",
    "Last-Add-Confirmed": "With frames and Arrow: how far the ledger is confirmed.",
    "Ledger-Closed": "With frames and Arrow: true or false.",
    "Lac-Source": "With frames and Arrow: who said how far it is confirmed.",
}
_WAIT: Final = op.query_integer(
    "wait_ms", 0, WAIT_MS_MAX, "At the tail: wait for that long for something new.", 0
)
_ENCODING_PARAMETER: Final = op.Parameter(
    "encoding",
    "query",
    {"enum": list(_ENCODINGS), "default": "base64"},
    "How JSON carries payloads: as `data`, `text` or `json`.",
)
_EITHER: Final[dict[str, Any]] = {
    "anyOf": [models.AppendedEntry, models.AppendedBatch],
}

APPEND: Final = op.Operation(
    "POST",
    "/v1/ledgers/{ledger_id}/entries",
    "appendEntries",
    "Entries",
    "Append an entry or a batch",
    "The answer comes when everything is durable on Qa bookies. A batch gets contiguous ids; after "
    "an unknown outcome a prefix of it may be there.",
    (
        op.LEDGER_ID,
        op.query_integer(
            "expect",
            0,
            ID_MAX,
            "The id that the first entry must get; else 412, nothing written. The entries of a "
            "stream must follow on without a gap.",
        ),
        op.PASSWORD,
    ),
    {
        JSON: op.Content(
            {
                "anyOf": [
                    models.EntryData,
                    models.EntryText,
                    models.EntryJson,
                    models.Batch,
                ]
            },
            {
                "text": {"text": "hello"},
                "bytes": {"data": "aGVsbG8="},
                "json": {"json": {"hello": "world"}},
                "batch": {"entries": [{"text": "a"}, {"data": "Yg=="}]},
            },
        ),
        OCTETS: op.Content(op.BYTES | {"description": "The body is one entry."}),
        FRAMES: op.Content(
            op.BYTES | {"description": "A batch: (u32 length, payload) repeated, big-endian."}
        ),
        NDJSON: op.Content(
            {"type": "string", "description": "One JSON entry a line, streamed."},
        ),
        ARROW: op.Content(
            op.BYTES
            | {
                "description": "A batch: an Arrow stream, not compressed, of the column `value` "
                "(binary or string)."
            }
        ),
    },
    {
        200: op.Answer(
            "For NDJSON: a line for each acknowledged run, all before it included; an error is the "
            "last line, a problem object.",
            {NDJSON: op.Content({"type": "string"})},
        ),
        201: op.Answer(
            "Acknowledged.",
            {
                JSON: op.Content(
                    _EITHER,
                    {
                        "one": {"ledger_id": 1, "entry_id": 7, "last_add_confirmed": 7},
                        "batch": {
                            "ledger_id": 1,
                            "first_entry": 8,
                            "last_entry": 107,
                            "last_add_confirmed": 107,
                        },
                    },
                )
            },
        ),
    },
    (
        *op.ALWAYS,
        *op.ANSWERING,
        *op.WITH_BODY,
        *op.WITH_METADATA,
        WrongPassword,
        NoSuchLedger,
        LedgerClosed,
        LedgerFenced,
        OwnedByLog,
        *OF_TRANSACTION,
        WriterLost,
        EntryConflict,
        UnexpectedEntryId,
        NotEnoughBookies,
        ReadOnly,
        QuorumTimeout,
    ),
    needs_body=True,
)
READ: Final = op.Operation(
    "GET",
    "/v1/ledgers/{ledger_id}/entries",
    "readEntries",
    "Entries",
    "Read confirmed entries",
    "Sees every entry that was acknowledged before the read began. At or beyond the end the list is "
    "empty. `next` is where to go on; the end is `closed` and a `next` above the last entry.",
    (
        op.LEDGER_ID,
        op.query_integer("from", 0, ID_MAX, "The first entry.", 0),
        op.query_integer("to", 0, ID_MAX, "The last entry, inclusive."),
        op.query_integer("limit", 1, BATCH_ENTRIES_MAX, "Entries at most.", 100),
        op.query_integer(
            "max_bytes",
            1,
            READ_BYTES_MAX,
            "Payload bytes, roughly; the first entry always comes.",
            _MAX_BYTES,
        ),
        _ENCODING_PARAMETER,
        _WAIT,
        op.PASSWORD,
        op.Parameter(
            "Last-Event-ID",
            "header",
            op.int64(0, ID_MAX - 1),
            "With events: the last entry that was seen, in place of `from`.",
        ),
    ),
    answers={
        200: op.Answer(
            "Entries, maybe none.",
            {
                JSON: op.Content(
                    models.Entries,
                    {
                        "one": {
                            "ledger_id": 1,
                            "entries": [{"entry_id": 0, "data": "aGVsbG8="}],
                            "next": 1,
                            "last_add_confirmed": 0,
                            "closed": False,
                            "lac_source": "writer",
                        }
                    },
                ),
                FRAMES: op.Content(
                    op.BYTES
                    | {"description": "(u64 id, u32 length, payload) repeated, big-endian."}
                ),
                ARROW: op.Content(
                    op.BYTES | {"description": "An Arrow stream of `entry_id` and `value`."}
                ),
            },
            _POSITION_HEADERS,
        )
    },
    errors=_READING,
)
ENTRY: Final = op.Operation(
    "GET",
    "/v1/ledgers/{ledger_id}/entries/{entry_id}",
    "readEntry",
    "Entries",
    "Read one entry",
    parameters=(
        op.LEDGER_ID,
        op.path_id("entry_id", "The entry."),
        _ENCODING_PARAMETER,
        op.PASSWORD,
    ),
    answers={
        200: op.Answer(
            "The entry.",
            {
                JSON: op.Content(
                    {"anyOf": [models.OneEntryData, models.OneEntryText, models.OneEntryJson]},
                    {"bytes": {"ledger_id": 1, "entry_id": 0, "data": "aGVsbG8="}},
                ),
                OCTETS: op.Content(op.BYTES | {"description": "The payload alone."}),
            },
            {"Cache-Control": "`private, immutable` where the ledger is closed, else `no-store`."},
        )
    },
    errors=(*_READING, NoSuchEntry, NotYetConfirmed),
)
LAST_ADD_CONFIRMED: Final = op.Operation(
    "GET",
    "/v1/ledgers/{ledger_id}/last-add-confirmed",
    "lastAddConfirmed",
    "Entries",
    "How far a ledger is confirmed",
    "With `after` and `wait_ms`: answers as soon as it is above `after`, or the ledger is closed.",
    (
        op.LEDGER_ID,
        op.query_integer("after", NO_ENTRY, ID_MAX, "The LAC that is known already."),
        _WAIT,
        op.PASSWORD,
    ),
    answers={
        200: op.Answer(
            "The last add confirmed; -1: nothing yet.",
            {
                JSON: op.Content(
                    models.LastAddConfirmed,
                    {"seven": {"ledger_id": 1, "last_add_confirmed": 7, "closed": False}},
                )
            },
        )
    },
    errors=_READING,
)
SOCKET: Final = op.Operation(
    "GET",
    "/v1/ledgers/{ledger_id}/ws",
    "ledgerSocket",
    "Entries",
    "Append and follow the tail over one WebSocket",
    "Send frames as binary messages, or the JSON of an append as text: each acknowledged run is "
    'told, all before it included. `{"tail":{"from":0,"encoding":"base64"}}` asks for the tail '
    "(encoding `frames` for binary messages). A problem object ends the socket.",
    (op.LEDGER_ID, op.PASSWORD),
    answers={101: op.Answer("The socket is open.")},
    errors=(*op.ALWAYS, *op.WITH_METADATA, NoSuchLedger),
)
