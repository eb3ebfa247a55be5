"""Reads of a stream: catch-up, long polls, and events (sections 5.6 to 5.8, 8 and 10)."""

import asyncio
import contextlib
import random
import re
from collections import OrderedDict
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final, Literal

import orjson
import pybase64
from aiohttp import hdrs, web

from quorumlog.errors import BadRequest, OffsetBeyondEnd, QuorumLogError
from quorumlog.net.parameters import Given
from quorumlog.protocol.log import LogMetadata
from services.gateway.edge.http.follows import SharedPage
from services.gateway.edge.http.limits import BATCH_ENTRIES_MAX, Room
from services.gateway.edge.http.sending import opened, write
from services.gateway.edge.operations import TICKET
from services.gateway.edge.pages import LogPages
from services.gateway.edge.reads import PageStream
from services.gateway.logs.manager import LogManager
from services.gateway.logs.values import LogBatches, Start
from services.gateway.streams import operations as op
from services.gateway.streams.config import StreamConfig
from services.gateway.streams.messages import body_of

KEPT_BYTES_MAX: Final = 64 << 20
"""Total size of cached bodies, chosen by judgement."""

_PAGE_BYTES: Final = 1 << 10
"""Memory overhead of a page besides its body, in bytes."""

Page = tuple[LogBatches, bytes]
"""A page, and its body. The page may lack its batches."""


class KeptPages:
    """A cache of the bodies of catch-up reads, keyed by their first offset. Evicts the least
    recently used page first.

    A page of 1 MiB in records of 64 KiB costs a gateway and its bookies 2.2 ms. A cached page costs
    a quarter of that (docs/internals/performance.md).

    Invariant: each cached page is full, so neither its records nor its end ever change. A log's
    records are immutable, and only a page that is not full can grow. Callers pass log metadata read
    for the request or just before. Therefore, pages of logs that were deleted, re-created or
    truncated earlier are not found.
    """

    def __init__(self, bytes_max: int = KEPT_BYTES_MAX) -> None:
        """Starts with an empty cache."""
        self._bytes_max = bytes_max
        self.bytes_kept = 0
        """Size of all cached pages."""
        self._pages: OrderedDict[tuple[str, str, int], Page] = OrderedDict()

    def find(self, row: LogMetadata, start: Start) -> Page | None:
        """The cached page that begins at an offset, or at the log's first offset."""
        at = row.first_offset if start == "earliest" else start
        if not isinstance(at, int) or at < row.first_offset:
            return None
        key = (row.name, row.created_at, at)
        found = self._pages.get(key)
        if found is not None:
            self._pages.move_to_end(key)
        return found

    def keep(self, row: LogMetadata, page: LogBatches, body: bytes) -> None:
        """Cache a page if it is full. Other pages may change."""
        if not page.is_full:
            return
        key = (row.name, row.created_at, page.first)
        replaced = self._pages.pop(key, None)
        if replaced is not None:
            self.bytes_kept -= _size(replaced)
        self._pages[key] = replace(page, batches=()), body  # the body has the records
        self.bytes_kept += _size(self._pages[key])
        while self.bytes_kept > self._bytes_max:
            self.bytes_kept -= _size(self._pages.popitem(last=False)[1])


def _size(page: Page) -> int:
    return len(page[1]) + _PAGE_BYTES


CHUNK_BYTES: Final = 1 << 20
"""Approximate maximum size of a response to a read, chosen by judgement."""
LONG_POLL_S: Final = 20.0
"""Maximum wait of a long poll, which is the default that the protocol's clients expect."""
EVENTS_S: Final = 60.0
"""Time for which a response sends events. Clients then reconnect, so that caches can collapse their
requests (section 10.2)."""
_CURSOR_S: Final = 20
_CURSOR_EPOCH_S: Final = 1_728_432_000
"""9 October 2024, the protocol's epoch for cursors (section 10.1)."""
_JITTER_S: Final = 3600
_CACHED: Final = "max-age=60, stale-while-revalidate=300"
_LINES: Final = re.compile(rb"\r\n|\r|\n")
_NO_STORE: Final = "no-store"


@dataclass(frozen=True, slots=True)
class Found:
    """A stream: its settings, and its log's metadata, read for the request or just before."""

    row: LogMetadata
    config: StreamConfig

    def at(self, place: op.Place | Literal[0]) -> int:
        """Convert an offset that a client sent to the log's offset. Offsets of a fork's source are
        valid in the fork up to the fork's beginning.

        Raises: LogReplaced.
        """
        if place == 0:
            return 0
        forked = self.config.forked
        if forked is None or place.created_at != forked.created_at or place.at > forked.offset:
            self.row.check_created(place.created_at)
        return place.at

    def start(self, given: op.Position | None) -> int | Literal["earliest", "latest"]:
        """The offset where a read of this stream begins. Raises: LogReplaced."""
        if given is None:
            return "earliest"
        return self.at(given) if isinstance(given, op.Place) else given


_Start = int | Literal["earliest", "latest"]


def is_catch_up(given: Given) -> bool:
    """Whether a read returns existing data from a known offset: no `live`, and not `now`."""
    return given[op.LIVE] is None and given[op.OFFSET] != "latest"


class StreamReads:
    """Serves reads of all streams at this gateway."""

    def __init__(self, logs: LogManager, room: Room) -> None:
        """Keeps no state except cached pages for catch-up reads."""
        self._logs, self._room = logs, room
        self._kept = KeptPages()

    async def answer(self, request: web.Request, given: Given, found: Found) -> web.StreamResponse:
        """The response to a GET."""
        live, start = given[op.LIVE], given[op.OFFSET]
        if live is not None and start is None:
            raise BadRequest(
                "/query/offset: is required with `live`: send -1, now or a Stream-Next-Offset"
            )
        at = found.start(start)
        if live == "sse":
            return await self._events(request, given, found, at)
        if live == "long-poll":
            return await self._long_poll(given, found, at)
        return await self._page_answer(request, given, found, *await self._whole(found, at))

    async def _page(self, found: Found, at: _Start, wait_s: float = 0.0) -> LogBatches:
        try:
            return await self._logs.reader.read(
                found.row.name,
                at,
                limit=BATCH_ENTRIES_MAX,
                max_bytes=CHUNK_BYTES,
                wait_s=wait_s,
                row=found.row,
            )
        except OffsetBeyondEnd as error:
            raise _not_given_out(error) from error

    async def by_recent(
        self, request: web.Request, given: Given, found: Found
    ) -> web.Response | None:
        """The response to a catch-up read with recent metadata, or None if the page is not full. A
        full page never changes, so it may be as old as a response in a cache may be (ADR 45).
        """
        at = found.start(given[op.OFFSET])
        kept = self._kept.find(found.row, at)
        if kept is None:
            start = at if isinstance(at, int) else found.row.first_offset
            page = await self._logs.reader.full_page(
                found.row, start, limit=BATCH_ENTRIES_MAX, max_bytes=CHUNK_BYTES
            )
            if page is None:
                return None
            kept = self._with_body(found, page)
        return await self._page_answer(request, given, found, *kept)

    async def _page_answer(
        self, request: web.Request, given: Given, found: Found, page: LogBatches, body: bytes
    ) -> web.Response:
        at = given[op.OFFSET]
        is_now = at == "latest"
        headers = {"Content-Type": found.config.content_type} | await self._place(found, page)
        if is_now or page.is_empty:
            # A response at the tail must not be cached, because the next record may follow at once.
            headers["Cache-Control"] = _NO_STORE
        else:
            headers["Cache-Control"] = self._cache(request, found.config)
        if not is_now:
            tag = _tag(found, page)
            headers["ETag"] = tag
            if _has_it(given[op.IF_NONE_MATCH], tag):
                return web.Response(status=304, headers=headers)
        return web.Response(body=body, headers=headers)

    async def _whole(self, found: Found, at: _Start) -> Page:
        """A page and its body. A cached page has no batches."""
        kept = self._kept.find(found.row, at)
        if kept is not None:
            return kept
        return self._with_body(found, await self._page(found, at))

    def _with_body(self, found: Found, page: LogBatches) -> Page:
        """A page with its body. A full page is cached."""
        body = body_of(page, is_json=found.config.is_json)
        self._kept.keep(found.row, page, body)
        return page, body

    def _cache(self, request: web.Request, config: StreamConfig) -> str:
        """The `Cache-Control` of a response with records. The records never change."""
        is_for_one = hdrs.AUTHORIZATION in request.headers or TICKET.name in request.query
        who = "private" if is_for_one else "public"
        if config.ttl_s is not None:
            # A response from a cache doesn't count as an access to the stream.
            left_s = config.ttl_s // 2
        elif config.expires_ms is not None:
            left_s = max(0, (config.expires_ms - self._logs.now_ms()) // 1000)
        else:
            return f"{who}, {_CACHED}"
        return f"{who}, max-age={min(60, left_s)}"

    def _cursor(self, given: int | None) -> int:
        """The cursor of a live response, greater than the client's last cursor (section 10.1)."""
        now = (self._logs.now_ms() // 1000 - _CURSOR_EPOCH_S) // _CURSOR_S
        if given is None or given < now:
            return now
        return given + max(1, random.randint(1, _JITTER_S) // _CURSOR_S)  # noqa: S311

    async def _place(self, found: Found, page: LogBatches) -> dict[str, str]:
        """Headers with the page's next offset, and marks for the tail and the stream's end."""
        row = found.row
        headers = {"Stream-Next-Offset": op.offset_text(page.next, row.created_at)}
        is_closed = page.closed
        if not is_closed and page.is_at_end and page.is_empty:
            end, is_over = await self._logs.reader.tail(row.name, created_at=row.created_at)
            is_closed = is_over and end == page.next
        if is_closed or page.is_at_end:
            headers["Stream-Up-To-Date"] = "true"
        if is_closed:
            headers["Stream-Closed"] = "true"
        return headers

    async def _long_poll(self, given: Given, found: Found, at: _Start) -> web.Response:
        page = await self._page(found, at)
        if page.is_empty and not page.closed:
            news = await self._room.wait(self._page(found, page.next, LONG_POLL_S))
            page = page if news is None else news
        headers = await self._place(found, page)
        if "Stream-Closed" not in headers:
            headers["Stream-Cursor"] = str(self._cursor(given[op.CURSOR]))
        headers["Cache-Control"] = _NO_STORE
        if page.is_empty:
            return web.Response(status=204, headers=headers)
        headers["Content-Type"] = found.config.content_type
        headers["ETag"] = _tag(found, page)
        body = body_of(page, is_json=found.config.is_json)
        return web.Response(body=body, headers=headers)

    async def _events(
        self, request: web.Request, given: Given, found: Found, at: _Start
    ) -> web.StreamResponse:
        """Send events for a minute or until the stream closes. Readers at the tail share reads."""
        row = found.row
        stream = PageStream(LogPages(self._logs, row.name, row.created_at), self._room, at)
        headers = {"Cache-Control": "no-cache"}
        if not found.config.is_text:
            headers["Stream-Sse-Data-Encoding"] = "base64"
        cursor = given[op.CURSOR]
        # The first page is read before the response's head is sent, so that errors get a status.
        try:
            page = await stream.page(bytes_max=CHUNK_BYTES)
        except OffsetBeyondEnd as error:
            raise _not_given_out(error) from error
        response = await opened(request, "text/event-stream", headers)
        is_over, reported = False, dict[str, str]()
        # After the head, an error can only end the events. The client reconnects and gets a status.
        with contextlib.suppress(TimeoutError, QuorumLogError):
            is_over = await self._event(response, found, SharedPage(page), cursor, reported)
            async with asyncio.timeout(EVENTS_S), aclosing(stream.tail()) as pages:
                while not is_over and (shared := await anext(pages, None)) is not None:
                    is_over = await self._event(response, found, shared, cursor, reported)
        await response.write_eof()
        return response

    async def _event(
        self,
        response: web.StreamResponse,
        found: Found,
        shared: SharedPage[LogBatches],
        cursor: int | None,
        reported: dict[str, str],
    ) -> bool:
        """Send a page's data and the next offset. Returns whether the stream is closed at that
        offset. `reported` has the control data that was sent last, so that it isn't repeated.
        """
        page = shared.page
        data = b""
        if not page.is_empty:
            data = shared.form("durable-streams", lambda page: _data_of(page, found.config))
        place = await self._place(found, page)
        if not data and place == reported:
            await write(response, self._room, b":\n\n")  # keeps the connection open
            return False
        reported.clear()
        reported.update(place)
        control: dict[str, str | bool] = {"streamNextOffset": place["Stream-Next-Offset"]}
        is_closed = "Stream-Closed" in place
        if is_closed:
            control["streamClosed"] = True
        else:
            control["streamCursor"] = str(self._cursor(cursor))
        if "Stream-Up-To-Date" in place:
            control["upToDate"] = True
        tail = b"event: control\ndata:" + orjson.dumps(control) + b"\n\n"
        await write(response, self._room, data + tail)
        return is_closed


def _not_given_out(error: OffsetBeyondEnd) -> BadRequest:
    """The protocol's error for an offset beyond the tail."""
    return BadRequest(f"/query/offset: {error.detail}")


def _data_of(page: LogBatches, config: StreamConfig) -> bytes:
    """A page as one event. Each line of the data becomes a `data:` line of the event."""
    data = body_of(page, is_json=config.is_json)
    if not config.is_text:
        return b"event: data\ndata:" + pybase64.b64encode(data) + b"\n\n"
    # A client removes one leading space from each line.
    spaced = (b" " + line if line.startswith(b" ") else line for line in _LINES.split(data))
    return b"event: data\n" + b"".join(b"data:%b\n" % line for line in spaced) + b"\n"


def _has_it(known: str | None, tag: str) -> bool:
    """Whether `If-None-Match` names the response's ETag (RFC 9110, 13.1.2)."""
    given = [each.strip().removeprefix("W/") for each in (known or "").split(",")]
    return given == ["*"] or tag in given


def _tag(found: Found, page: LogBatches) -> str:
    """A page's ETag: the log's creation time, the page's offsets, and a mark at the log's end."""
    end = ":c" if page.closed else ""
    return f'"{found.row.created_at}:{page.first}:{page.next}{end}"'
