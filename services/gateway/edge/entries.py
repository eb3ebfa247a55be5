"""The resource /v1/ledgers/{ledger_id}/entries: append entries to a ledger and read them."""

from collections.abc import Sequence
from typing import Final

from aiohttp import WSMessage, WSMsgType, web

from quorumlog import errors, header
from quorumlog.net.operations import JSON, Content, Reply
from quorumlog.net.parameters import Given, invalid, path_id, query_integer
from quorumlog.protocol import batch
from quorumlog.protocol.batch import BATCH_BYTES_MAX
from quorumlog.protocol.ids import ID_MAX, NO_ENTRY
from services.gateway.edge import arrow, models, payloads
from services.gateway.edge import operations as op
from services.gateway.edge.access.scopes import Named, Scope, on
from services.gateway.edge.http import body
from services.gateway.edge.http.limits import BATCH_ENTRIES_MAX, Room
from services.gateway.edge.http.media import (
    ARROW,
    NDJSON,
    OCTETS,
    accepted,
    json_bytes,
    json_value,
    octets,
)
from services.gateway.edge.http.pipe import Pipe, append_lines
from services.gateway.edge.log_payloads import read_records
from services.gateway.edge.pages import LedgerPages
from services.gateway.edge.reads import PageStream, ReadRequest, answer_read
from services.gateway.edge.sockets import SocketTarget, serve
from services.gateway.engine import Engine
from services.gateway.interface import EntriesAppended
from services.gateway.logs.transactions import Transactions

ENTRY_ID: Final = path_id("entry_id", "The entry.")
FROM: Final = query_integer("from", 0, ID_MAX, "The first entry to read.", 0)
TO: Final = query_integer("to", 0, ID_MAX, "The last entry to read, inclusive.")
AFTER: Final = query_integer("after", NO_ENTRY, ID_MAX, "The LAC that the client already has.")

_READING: Final = (
    errors.WrongPassword,
    errors.NoSuchLedger,
    errors.EntryLost,
    errors.EntryUnavailable,
)
_POSITION_HEADERS: Final = {
    header.NEXT_ENTRY_ID: "With frames, Arrow and NDJSON: the next entry to read.",
    header.LAST_ADD_CONFIRMED: "With frames, Arrow and NDJSON: the ledger's LAC.",
    header.LEDGER_CLOSED: "With frames, Arrow and NDJSON: true or false.",
    "Lac-Source": "With frames, Arrow and NDJSON: the source of the LAC.",
}


FORWARDED: Final = web.RequestKey("forwarded", bool)
"""Request key: set if another gateway forwarded the request."""
_IMMUTABLE: Final = {"Cache-Control": "private, max-age=31536000, immutable"}


class EntryRoutes(op.Handlers, tag="Entries"):
    """HTTP handlers for the entries of a ledger."""

    def __init__(
        self, engine: Engine, room: Room, transactions: Transactions | None = None
    ) -> None:
        self._engine, self._appends, self._reads = engine, engine.appends, engine.reads
        self._room = room
        self._transactions = transactions

    @op.operation(
        "POST /v1/ledgers/{ledger_id}/entries",
        (op.LEDGER_ID, op.EXPECT, op.PASSWORD),
        body=op.append_forms(
            Content(
                {"anyOf": [models.EntryData, models.EntryText, models.EntryJson, models.Batch]},
                {
                    "text": {"text": "hello"},
                    "bytes": {"data": "aGVsbG8="},
                    "json": {"json": {"hello": "world"}},
                    "batch": {"entries": [{"text": "a"}, {"data": "Yg=="}]},
                },
            ),
            "entry",
            "the column `value` (binary or string).",
        ),
        replies={
            200: Reply(
                "For NDJSON: one line per acknowledged run. Each line also acknowledges all earlier "
                "runs. An error is the last line, as a problem object.",
                {NDJSON: Content({"type": "string"})},
            ),
            **op.gives(
                "Acknowledged.",
                {"anyOf": [models.AppendedEntry, models.AppendedBatch]},
                {
                    "one": {"ledger_id": 1, "entry_id": 7, "last_add_confirmed": 7},
                    "batch": {
                        "ledger_id": 1,
                        "first_entry": 8,
                        "last_entry": 107,
                        "last_add_confirmed": 107,
                    },
                },
                status=201,
            ),
        },
        errors=(
            errors.WrongPassword,
            errors.NoSuchLedger,
            errors.LedgerClosed,
            errors.LedgerFenced,
            errors.OwnedByLog,
            *op.OF_TRANSACTION,
            errors.WriterLost,
            errors.EntryConflict,
            errors.UnexpectedEntryId,
            errors.NotEnoughBookies,
            errors.ReadOnly,
            errors.QuorumTimeout,
        ),
        scope=on(Named.LEDGER, Scope.APPEND),
        needs_body=True,
    )
    async def append_entries(self, request: web.Request, given: Given) -> web.StreamResponse:
        """Append an entry or a batch.

        The gateway responds when all entries are durable on Qa bookies. The entries of a batch get
        contiguous ids. After an unknown outcome, a prefix of the batch may be stored.
        """
        ledger_id, expect, password = given[op.LEDGER_ID], given[op.EXPECT], given[op.PASSWORD]
        media = body.media_type(request, op.APPEND_TYPES)
        arrow.check_supported(media)
        if media == NDJSON:
            accepted(request, (NDJSON,))
            pipe = self._pipe(ledger_id, password, expect)
            names = ("first_entry", "last_entry")
            return await append_lines(
                request, self._room, pipe, parse=payloads.from_line, names=names
            )
        accepted(request)
        transaction = await self._appends.transaction_of(ledger_id)
        if not self._engine.writes(ledger_id):
            return await self._forward(request, given, media, transaction)
        if transaction is not None and self._transactions is not None:
            records = await read_records(request, self._room, media, payloads.ENTRIES)
            data = batch.encode(records)
            done = await self._transactions.append(transaction, ledger_id, data, expect=expect)
            return json_bytes(appended_body(ledger_id, done, is_batch=False), 201)
        found, is_batch = await self._payloads(request, media)
        done = await self._appends.append(ledger_id, found, password=password, expect=expect)
        return json_bytes(appended_body(ledger_id, done, is_batch=is_batch), 201)

    async def _forward(
        self, request: web.Request, given: Given, media: str, transaction: str | None
    ) -> web.Response:
        """Forward an append to the ledger's writer, which parses the body."""
        ledger_id, expect, password = given[op.LEDGER_ID], given[op.EXPECT], given[op.PASSWORD]
        bytes_max = self._room.limits.entry_bytes_max if transaction is None else BATCH_BYTES_MAX
        data = await self._data(request, media, bytes_max)
        try:
            reported = await self._appends.forward(
                ledger_id, media, data, password=password, expect=expect
            )
        except (errors.Superseded, errors.NotFound, errors.QuorumTimeout):
            if transaction is not None and self._transactions is not None:
                # An ended transaction's ledgers are fenced or deleted, so report the end instead.
                await self._transactions.check(transaction)
            raise
        return json_bytes(reported, 201)

    async def _data(self, request: web.Request, media: str, entry_bytes_max: int) -> bytes:
        """Read the body of an append without parsing it."""
        limits = self._room.limits
        if media == JSON:
            return await body.read(request, self._room, limits.body_bytes_max) or b"{}"
        if media == OCTETS:
            length = request.content_length or 0
            if length > entry_bytes_max:
                raise payloads.too_large(length, entry_bytes_max, "")
            return await body.read(request, self._room, entry_bytes_max)
        bytes_max = limits.frames_bytes_max
        if FORWARDED in request:
            # A gateway forwards the payloads of a stream or socket as frames with lengths.
            bytes_max = max(bytes_max, limits.body_bytes_max) + 4 * BATCH_ENTRIES_MAX
        return await body.read(request, self._room, bytes_max)

    async def _payloads(self, request: web.Request, media: str) -> tuple[list[bytes], bool]:
        """Read the payloads of an append; also returns whether the body is a batch."""
        bytes_max = self._room.limits.entry_bytes_max
        data = await self._data(request, media, bytes_max)
        if media == JSON:
            return await self._from_json(request, data)
        if media == OCTETS:
            return [data], False
        if media == ARROW:
            found = await body.in_turn(
                request,
                self._room,
                data,
                lambda stream, _: arrow.payloads(stream, bytes_max),
                is_json=False,
            )
            return found, True
        return payloads.from_frames(data, bytes_max), True

    async def _from_json(self, request: web.Request, data: bytes) -> tuple[list[bytes], bool]:
        bytes_max = self._room.limits.entry_bytes_max
        return await body.in_turn(
            request,
            self._room,
            data,
            lambda text, count: payloads.from_json(text, bytes_max, count=count),
        )

    @op.operation(
        "GET /v1/ledgers/{ledger_id}/entries",
        (
            op.LEDGER_ID,
            FROM,
            TO,
            op.LIMIT,
            op.MAX_BYTES,
            op.ENCODING,
            op.WAIT_MS,
            op.PASSWORD,
            op.LAST_EVENT_ID,
            op.TICKET,
        ),
        replies={
            200: Reply(
                "Entries; the list may be empty.",
                op.read_forms(
                    Content(
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
                    "entry",
                    "entry id",
                    "`entry_id` and `value`",
                    "`event: end` once the ledger is closed.",
                ),
                _POSITION_HEADERS,
            ),
            204: op.NOTHING_FOLLOWS,
        },
        errors=_READING,
        scope=on(Named.LEDGER, Scope.READ),
    )
    async def read_entries(self, request: web.Request, given: Given) -> web.StreamResponse:
        """Read confirmed entries.

        A read returns every entry that was acknowledged before the read began. At or beyond the end
        the list is empty. The next read begins at `next`. The ledger's end is reached if the ledger
        is `closed` and `next` is above the last entry.
        """
        first, last = given[FROM], given[TO]
        if last is not None and last < first:
            raise invalid(TO.pointer, f"must be at least `from` ({first})")
        wanted = ReadRequest.of(request, given, first)
        if wanted.created_at is not None:
            raise invalid(op.LAST_EVENT_ID.pointer, "is a log's event id: send a ledger's event id")
        pages = LedgerPages(
            self._reads, given[op.LEDGER_ID], last=last, password=given[op.PASSWORD]
        )
        return await answer_read(request, self._room, pages, wanted)

    @op.operation(
        "GET /v1/ledgers/{ledger_id}/entries/{entry_id}",
        (op.LEDGER_ID, ENTRY_ID, op.ENCODING, op.PASSWORD),
        replies={
            200: Reply(
                "The entry.",
                {
                    JSON: Content(
                        models.OneEntry,
                        {"bytes": {"ledger_id": 1, "entry_id": 0, "data": "aGVsbG8="}},
                    ),
                    OCTETS: Content(op.BYTES | {"description": "Only the payload."}),
                },
                {"Cache-Control": "`private, immutable` if the ledger is closed, else `no-store`."},
            )
        },
        errors=(*_READING, errors.NoSuchEntry, errors.NotYetConfirmed),
        scope=on(Named.LEDGER, Scope.READ),
    )
    async def read_entry(self, request: web.Request, given: Given) -> web.Response:
        """Read one entry."""
        ledger_id, entry_id = given[op.LEDGER_ID], given[ENTRY_ID]
        media = accepted(request, (JSON, OCTETS))
        page = await self._reads.entry(ledger_id, entry_id, password=given[op.PASSWORD])
        headers, payload = _IMMUTABLE if page.closed else None, bytes(page.runs[0].payload(0))
        if media == OCTETS:
            return octets(payload, OCTETS, headers)
        member = payloads.encoded(payload, given[op.ENCODING])
        return json_bytes(
            b'{"ledger_id":%d,"entry_id":%d,%b}' % (ledger_id, entry_id, member), headers=headers
        )

    @op.operation(
        "GET /v1/ledgers/{ledger_id}/last-add-confirmed",
        (op.LEDGER_ID, AFTER, op.WAIT_MS, op.PASSWORD),
        replies=op.gives(
            "The last-add-confirmed; -1 if no entry is confirmed yet.",
            models.LastAddConfirmed,
            {"seven": {"ledger_id": 1, "last_add_confirmed": 7, "closed": False}},
        ),
        errors=_READING,
        scope=on(Named.LEDGER, Scope.READ, Scope.APPEND),
    )
    async def last_add_confirmed(self, request: web.Request, given: Given) -> web.Response:
        """Get a ledger's last-add-confirmed (LAC).

        With `after` and `wait_ms`, waits until the LAC is above `after` or the ledger is closed.
        """
        accepted(request)
        ledger_id, after, password = given[op.LEDGER_ID], given[AFTER], given[op.PASSWORD]
        found = None
        if given[op.WAIT_MS] and after is not None:
            found = await self._room.wait(
                self._reads.last_add_confirmed(
                    ledger_id, after=after, wait_s=given[op.WAIT_MS] / 1000, password=password
                )
            )
        if found is None:
            found = await self._reads.last_add_confirmed(ledger_id, password=password)
        return json_value(
            {
                "ledger_id": ledger_id,
                "last_add_confirmed": found.last_add_confirmed,
                "closed": found.closed,
            }
        )

    @op.operation(
        "GET /v1/ledgers/{ledger_id}/ws",
        (op.LEDGER_ID, op.PASSWORD, op.TICKET),
        replies={101: Reply("The socket is open.")},
        errors=(errors.NoSuchLedger,),
        # The handler checks the required scope for each message.
        scope=on(Named.LEDGER, Scope.READ, Scope.APPEND),
    )
    async def ledger_socket(self, request: web.Request, given: Given) -> web.StreamResponse:
        """Append and follow the tail over one WebSocket.

        Send frames as binary messages, or the JSON of an append as text. An acknowledgement of a run
        also acknowledges all earlier runs. `{"tail":{"from":0,"encoding":"base64"}}` requests the
        tail; the encoding `frames` selects binary messages. After a problem object the socket
        closes. With the subprotocol `quorumlog.appends` there is no tail, and each message is one
        append with the same response as over HTTP.
        """
        ledger_id, password = given[op.LEDGER_ID], given[op.PASSWORD]
        await self._engine.get(ledger_id)
        pages = LedgerPages(self._reads, ledger_id, password=password)

        async def append(items: list[bytes]) -> bytes:
            done = await self._appends.append(ledger_id, items, password=password)
            return appended_body(ledger_id, done, is_batch=True)

        target = SocketTarget(
            self._pipe(ledger_id, password),
            lambda message: self._payloads_of(request, message),
            lambda done: {
                "first_entry": done.first,
                "last_entry": done.last,
                "last_add_confirmed": done.last_add_confirmed,
            },
            append,
            lambda start, *_: PageStream(pages, self._room, start),
        )
        return await serve(request, self._room, target)

    async def _payloads_of(self, request: web.Request, message: WSMessage) -> list[bytes]:
        """Parse the payloads of a WebSocket message: frames, or the JSON of an append."""
        if message.type == WSMsgType.BINARY:
            return payloads.from_frames(message.data, self._room.limits.entry_bytes_max)
        return (await self._from_json(request, message.data))[0]

    def _pipe(self, ledger_id: int, password: str | None, expect: int | None = None) -> Pipe[bytes]:
        async def append(items: Sequence[bytes], expect: int | None) -> EntriesAppended:
            return await self._appends.append(ledger_id, items, password=password, expect=expect)

        return Pipe(append, self._room, len, expect)


def appended_body(ledger_id: int, done: EntriesAppended, *, is_batch: bool) -> bytes:
    """Build the JSON response to an append."""
    first, last, lac = done.first, done.last, done.last_add_confirmed
    if is_batch:
        form = b'{"ledger_id":%d,"first_entry":%d,"last_entry":%d,"last_add_confirmed":%d}'
        return form % (ledger_id, first, last, lac)
    return b'{"ledger_id":%d,"entry_id":%d,"last_add_confirmed":%d}' % (ledger_id, first, lac)
