"""The resource /v1/logs/{name}/entries: append records to a log and read them."""

from collections.abc import Sequence
from typing import Final

from aiohttp import WSMessage, WSMsgType, web

from quorumlog import header
from quorumlog.net.operations import Route
from quorumlog.net.parameters import Given, invalid
from quorumlog.protocol.batch import BATCH_BYTES_MAX, ProducerSeq, Record
from services.gateway.edge import arrow, body
from services.gateway.edge import record_operations as op
from services.gateway.edge.answers import json_bytes, octets
from services.gateway.edge.log_operations import CREATED
from services.gateway.edge.log_pages import LogPages, log_position
from services.gateway.edge.log_payloads import (
    check_size,
    record_of_line,
    records_from_json,
)
from services.gateway.edge.media import ARROW, NDJSON, accepted
from services.gateway.edge.operations import EXPECT, NAME, WRITER_TOKEN
from services.gateway.edge.pages import PageStream, page_or_news
from services.gateway.edge.payloads import from_frames
from services.gateway.edge.pipe import Pipe
from services.gateway.edge.reads import WHOLE_BYTES_MAX, ReadRequest, answer_read
from services.gateway.edge.record_bodies import read_records
from services.gateway.edge.room import Room
from services.gateway.edge.sockets import SocketTarget, serve
from services.gateway.edge.starts import start_of_json
from services.gateway.edge.streams import append_lines
from services.gateway.interface import EntriesAppended
from services.gateway.logs.manager import LogManager
from services.gateway.logs.values import Append, LogBatches, RecordsAppended, Start

_APPEND_TYPES: Final = tuple(op.APPEND.body)
_READ_TYPES: Final = tuple(op.READ.replies[200].content)


class RecordRoutes:
    """Handlers of a log's records."""

    def __init__(self, logs: LogManager, room: Room) -> None:
        self._logs = logs
        self._room = room

    async def append(self, request: web.Request, given: Given) -> web.StreamResponse:
        """POST /v1/logs/{name}/entries."""
        name, expect, token = given[NAME], given[EXPECT], given[WRITER_TOKEN]
        media = body.media_type(request, _APPEND_TYPES)
        arrow.check_supported(media)
        producer = _producer_of(given)
        if media == NDJSON:
            accepted(request, (NDJSON,))
            if producer is not None:
                raise invalid(op.PRODUCER_SEQ.pointer, "counts requests, not what is streamed")
            created_at = given[CREATED] or (await self._logs.row(name)).created_at
            pipe = self._pipe(name, created_at, token, expect)
            names = ("first_offset", "last_offset")
            return await append_lines(request, self._room, pipe, parse=record_of_line, names=names)
        accepted(request)
        records = await read_records(request, self._room, media)
        since = given[op.PRODUCER_SINCE] or 0
        call = Append.of(
            records,
            producer,
            expect=expect,
            token=token,
            since=since,
            created_at=given[CREATED],
        )
        done = await self._logs.append(name, call)
        return json_bytes(
            _appended(name, done),
            201,
            {header.PRODUCER_DUPLICATE: "true"} if done.is_duplicate else None,
        )

    async def read(self, request: web.Request, given: Given) -> web.StreamResponse:
        """GET /v1/logs/{name}/entries."""
        name = given[NAME]
        wanted = ReadRequest.of(request, given, _READ_TYPES, given[op.FROM], given[CREATED])
        if wanted.media == ARROW:
            stored = await self._batches(name, wanted.as_page())
            return octets(arrow.records_stream(stored.batches), ARROW, log_position(stored))
        pages = LogPages(self._logs, name, wanted.created_at)
        return await answer_read(request, self._room, pages, wanted)

    async def _batches(self, name: str, wanted: ReadRequest) -> LogBatches:
        """The page of a read, without decoding its records."""
        assert wanted.limit is not None, "a page has limits"
        assert wanted.max_bytes is not None, "a page has limits"
        limit, max_bytes = wanted.limit, min(wanted.max_bytes, WHOLE_BYTES_MAX)
        created_at = wanted.created_at

        async def read(at: Start, wait_s: float) -> LogBatches:
            nonlocal created_at
            page = await self._logs.batches(
                name,
                at,
                limit=limit,
                max_bytes=max_bytes,
                wait_s=wait_s,
                created_at=created_at,
            )
            created_at = page.created_at
            return page

        def is_news(page: LogBatches) -> bool:
            return bool(page.batches) or page.closed

        return await page_or_news(self._room, read, wanted.start, wanted.wait_s, is_news)

    async def socket(self, request: web.Request, given: Given) -> web.StreamResponse:
        """GET /v1/logs/{name}/ws."""
        name, token = given[NAME], given[WRITER_TOKEN]
        created_at = (await self._logs.get(name)).log.created_at
        target = SocketTarget(
            self._pipe(name, created_at, token),
            lambda message: self._records_of(request, message),
            lambda done: {"first_offset": done.first, "last_offset": done.last},
            lambda message: self._append_message(request, name, token, message),
            lambda start, created: PageStream(
                LogPages(self._logs, name, created or created_at), self._room, start
            ),
            start_of_json,
        )
        return await serve(request, self._room, target)

    async def _append_message(
        self, request: web.Request, name: str, token: int | None, message: WSMessage
    ) -> bytes:
        records = await self._records_of(request, message)
        call = Append.of(records, None, token=token)
        return _appended(name, await self._logs.append(name, call))

    async def _records_of(self, request: web.Request, message: WSMessage) -> list[Record]:
        """The records of a socket's message: frames, or the JSON of an append."""
        if message.type == WSMsgType.TEXT:
            made = await body.in_turn(request, self._room, message.data, records_from_json)
            return list(made)
        records = [Record(value) for value in from_frames(message.data, BATCH_BYTES_MAX, "record")]
        check_size(records)
        return records

    def _pipe(
        self, name: str, created_at: str, token: int | None, expect: int | None = None
    ) -> Pipe[Record]:
        """The pipe of a stream, all of whose records go to one log. Its batches depend on timing, so a producer's sequence,
        which counts requests, has no place in a stream.
        """

        async def append(records: Sequence[Record], expect: int | None) -> EntriesAppended:
            call = Append.of(records, expect=expect, token=token, created_at=created_at)
            done = await self._logs.append(name, call)
            return EntriesAppended(done.first_offset, done.last_offset, done.last_offset)

        return Pipe(append, self._room, size=lambda record: record.size, expect=expect)

    def routes(self) -> list[Route]:
        """The operations with their handlers."""
        return [
            Route(op.APPEND, self.append),
            Route(op.READ, self.read),
            Route(op.SOCKET, self.socket),
        ]


def _appended(name: str, done: RecordsAppended) -> bytes:
    return b'{"log":"%b","first_offset":%d,"last_offset":%d,"ledger_id":%d,"entry_id":%d}' % (
        name.encode(),
        done.first_offset,
        done.last_offset,
        done.ledger_id,
        done.entry_id,
    )


def _producer_of(given: Given) -> ProducerSeq | None:
    """The headers `Producer-Id`, `Producer-Epoch` and `Producer-Seq`: all, or none; with them
    `Producer-Since`.
    """
    name, epoch, seq = given[op.PRODUCER_ID], given[op.PRODUCER_EPOCH], given[op.PRODUCER_SEQ]
    if name is None and epoch is None and seq is None:
        if given[op.PRODUCER_SINCE] is not None:
            detail = "says since when a producer is: Producer-Id is missing"
            raise invalid(op.PRODUCER_SINCE.pointer, detail)
        return None
    if name is None or epoch is None or seq is None:
        three = ((op.PRODUCER_ID, name), (op.PRODUCER_EPOCH, epoch), (op.PRODUCER_SEQ, seq))
        missing = next(header for header, value in three if value is None)
        detail = "is missing: the three Producer- headers go together"
        raise invalid(missing.pointer, detail)
    return ProducerSeq(name, epoch, seq)
