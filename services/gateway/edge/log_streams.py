"""Logs as streams: NDJSON both ways, Server-Sent Events that follow the tail, and WebSockets.

A stream of appends is cut into record batches as it comes: one while the one before it is in
flight. So a producer's sequence, which counts requests, has no place in it.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

import orjson
from aiohttp import web

from quorumlog.errors import QuorumLogError
from quorumlog.protocol import batch
from quorumlog.protocol.batch import BATCH_BYTES_MAX, Record
from quorumlog.wire import problems
from services.gateway.edge.body import Room
from services.gateway.edge.follows import Told, told_tail
from services.gateway.edge.limits import BATCH_ENTRIES_MAX
from services.gateway.edge.log_payloads import (
    check_size,
    record_of_line,
    records_frames,
    records_from_json,
    records_json,
)
from services.gateway.edge.middleware import REQUEST_ID
from services.gateway.edge.params import EVENTS, NDJSON
from services.gateway.edge.payloads import from_frames
from services.gateway.edge.pipe import Pipe
from services.gateway.edge.sockets import Message, Tail, first_of
from services.gateway.edge.streams import PAGE_BYTES, TAIL_BYTES, append_lines, opened
from services.gateway.interface import Appended
from services.gateway.logs.manager import LogManager
from services.gateway.logs.ports import Append, LogBatches, LogRead
from services.gateway.logs.reading import Start

_RECORD_BYTES: Final = 64
"""What a record takes besides its value."""
_NAMED: Final = ("earliest", "latest")
"""Starts that are no offset yet."""


class _Lane:
    """A log in the engine's place: each payload is a batch of one record, as its line made it."""

    def __init__(self, logs: LogManager, name: str, token: int | None) -> None:
        self._logs, self._name, self._token = logs, name, token

    async def append(
        self,
        ledger_id: int,
        payloads: Sequence[bytes],
        *,
        password: str | None = None,
        expect: int | None = None,
    ) -> Appended:
        """Append the records as one batch; what is told are offsets."""
        del ledger_id, password
        records = tuple(record for data in payloads for record in batch.decode(data)[1])
        done = await self._logs.append(
            self._name, Append(records, expect=expect, token=self._token)
        )
        return Appended(done.first_offset, done.last_offset, done.last_offset)


async def append_records(
    request: web.Request,
    room: Room,
    logs: LogManager,
    name: str,
    *,
    expect: int | None,
    token: int | None,
) -> web.StreamResponse:
    """Append one record a line; answer one line for each acknowledged batch, cumulative."""
    pipe = Pipe(_Lane(logs, name, token), room, 0, None, expect)
    return await append_lines(
        request, room, pipe, parse=record_of_line, names=("first_offset", "last_offset")
    )


class LogSource:
    """Reads a log page by page. Invariant: `start` is the next offset that nobody was given."""

    def __init__(
        self,
        logs: LogManager,
        room: Room,
        name: str,
        start: Start,
        *,
        limit: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self._logs, self._room, self._name = logs, room, name
        self.start = start
        self._left, self._bytes_left = limit, max_bytes

    @property
    def is_over(self) -> bool:
        """Whether the limits are reached."""
        return any(left is not None and left <= 0 for left in (self._left, self._bytes_left))

    async def end(self) -> int:
        """The offset after the last acknowledged record."""
        return await self._logs.end(self._name)

    async def page(self, wait_s: float = 0.0) -> LogRead:
        """The next records, maybe none; at the tail waits for some, or for the log's end."""
        limit = BATCH_ENTRIES_MAX if self._left is None else self._left
        max_bytes = PAGE_BYTES if self._bytes_left is None else min(PAGE_BYTES, self._bytes_left)
        page = await self._read(limit, max_bytes)
        if wait_s > 0 and not page.records and not page.closed:
            waited = await self._room.wait(self._read(limit, max_bytes, wait_s))
            page = page if waited is None else waited
        self.start = page.next
        if self._left is not None:
            self._left -= len(page.records)
        if self._bytes_left is not None:
            self._bytes_left -= sum(len(found.record.value) for found in page.records)
        return page

    async def batches(self, wait_s: float = 0.0) -> LogBatches:
        """The first page, with its records as they are stored."""
        limit, max_bytes = self._left or BATCH_ENTRIES_MAX, self._bytes_left or PAGE_BYTES
        page = await self._logs.batches(self._name, self.start, limit=limit, max_bytes=max_bytes)
        if wait_s > 0 and not page.batches and not page.closed:
            start = page.next if self.start == "latest" else self.start
            waited = await self._room.wait(
                self._logs.batches(
                    self._name, start, limit=limit, max_bytes=max_bytes, wait_s=wait_s
                )
            )
            page = page if waited is None else waited
        return page

    async def _read(self, limit: int, max_bytes: int, wait_s: float = 0.0) -> LogRead:
        page = await self._logs.read(
            self._name, self.start, limit=limit, max_bytes=max_bytes, wait_s=wait_s
        )
        self.start = page.next if self.start == "latest" else self.start
        return page

    async def read(self, at: int, wait_s: float) -> LogRead:
        """As a follow reads."""
        return await self._logs.read(
            self._name, at, limit=BATCH_ENTRIES_MAX, max_bytes=TAIL_BYTES, wait_s=wait_s
        )

    def size(self, page: LogRead) -> int:
        """Bytes of a page."""
        return sum(len(found.record.value) + _RECORD_BYTES for found in page.records)

    def rest(self, page: LogRead, at: int) -> LogRead:
        """The records from `at` on."""
        return replace(page, records=tuple(found for found in page.records if found.offset >= at))

    def is_end(self, page: LogRead) -> bool:
        """Whether nothing ever follows a page."""
        return page.closed

    async def tail(self) -> AsyncGenerator[Told[LogRead], None]:
        """Pages without an end, an empty one whenever nothing came for a while. Ends with the log,
        with the limits, or when this process is about to end.
        """
        wait_s = 0.0
        while self._left is not None or self._bytes_left is not None or self.start in _NAMED:
            page = await self.page(wait_s)
            yield Told(page)
            wait_s = self._room.limits.comment_every_s
            if page.closed or self.is_over or self._room.is_ending:
                return
        assert isinstance(self.start, int)
        shared = told_tail(
            self._room.follows,
            ("log", self._name),
            self,
            self.start,
            wait_s=self._room.limits.comment_every_s,
            waited=self._room.wait,
        )
        async with aclosing(shared):
            async for told in shared:
                yield told
                if self._room.is_ending:
                    return


class LogSubject:
    """A log behind a socket."""

    def __init__(self, logs: LogManager, room: Room, name: str, token: int | None) -> None:
        self.pipe = Pipe(_Lane(logs, name, token), room, 0, None)
        self._source: Callable[[Start], LogSource] = lambda start: LogSource(
            logs, room, name, start
        )

    def payloads(self, data: Message) -> list[bytes]:
        """Frames, or the JSON of an append, as batches of one record."""
        if isinstance(data, bytes):
            records = tuple(Record(value) for value in from_frames(data, BATCH_BYTES_MAX))
            check_size(records)
        else:
            records = records_from_json(data.encode())
        return [batch.encode((record,), append_time_ms=0, records_before=0) for record in records]

    def acknowledged(self, appended: Appended) -> str:
        """`{"first_offset","last_offset"}`."""
        return f'{{"first_offset":{appended.first},"last_offset":{appended.last}}}'

    def tail(self, start: Any, encoding: str) -> Tail:
        """Pages as `{"entries","next","first_offset","closed"}`, and the end."""
        if start not in ("earliest", "latest"):
            start = first_of(start)
        return self._follow(self._source(start), encoding)

    async def _follow(self, source: LogSource, encoding: str) -> Tail:
        async with aclosing(source.tail()) as pages:
            async for told in pages:
                if told.page.records:
                    yield told.form(("socket", encoding), lambda page: _page(page, encoding))
                if told.page.closed:
                    yield f'{{"end":{{"next_offset":{told.page.next}}}}}'


def _page(page: LogRead, encoding: str) -> Message:
    if encoding == "frames":
        return records_frames(page.records)
    body = b'{"entries":[%b],"next":%d,"first_offset":%d,"closed":%b}' % (
        b",".join(records_json(page.records, encoding)),
        page.next,
        page.first_offset,
        b"true" if page.closed else b"false",
    )
    return body.decode()


def position(found: LogRead | LogBatches) -> dict[str, str]:
    """Where a read stands, for forms that have no room for it in the body."""
    return {
        "Next-Offset": str(found.next),
        "First-Offset": str(found.first_offset),
        "Log-Closed": "true" if found.closed else "false",
    }


async def send_lines(
    request: web.Request, source: LogSource, encoding: str, wait_s: float
) -> web.StreamResponse:
    """Records as lines, up to what is acknowledged now; an error in between is the last line."""
    page = await source.page(wait_s)
    lines = _lines_of(page, encoding)
    end = await source.end()
    response = await opened(request, NDJSON, position(page))
    if request.method == "HEAD":
        return response
    try:
        while True:
            if lines:
                await response.write(lines)
            if not page.records or source.is_over or page.next >= end:
                break
            page = await source.page()
            lines = _lines_of(page, encoding)
    except QuorumLogError as error:
        await response.write(problems.to_bytes(error, request[REQUEST_ID]) + b"\n")
    await response.write_eof()
    return response


def _lines_of(page: LogRead, encoding: str) -> bytes:
    return b"".join(record + b"\n" for record in records_json(page.records, encoding))


async def send_events(request: web.Request, source: LogSource, encoding: str) -> web.StreamResponse:
    """Each record as an event whose id is its offset; follows the tail until the log is closed."""
    response: web.StreamResponse | None = None
    try:
        async with aclosing(source.tail()) as pages:
            async for told in pages:
                page = told.page
                events = told.form(("events", encoding), lambda page: _events_of(page, encoding))
                if response is None:
                    response = await opened(request, EVENTS)
                    if request.method == "HEAD":
                        return response
                if events or not page.closed:
                    await response.write(events or b": \n\n")
                if page.closed:
                    end = orjson.dumps({"next_offset": page.next})
                    await response.write(b"event: end\ndata: " + end + b"\n\n")
    except QuorumLogError as error:
        if response is None:
            raise
        document = problems.to_bytes(error, request[REQUEST_ID])
        await response.write(b"event: problem\ndata: " + document + b"\n\n")
    assert response is not None, "a tail has at least one page"
    await response.write_eof()
    return response


def _events_of(page: LogRead, encoding: str) -> bytes:
    return b"".join(
        b"id: %d\ndata: %b\n\n" % (found.offset, record)
        for found, record in zip(page.records, records_json(page.records, encoding), strict=True)
    )
