"""Read pages of a ledger or a log one after another, and answer in the form that the client takes: one page, or a stream of pages.

Until the first byte of a response an error is a status; after that it is the stream's last line.
"""

import random
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Generic, Self

import orjson
from aiohttp import web

from quorumlog.errors import QuorumLogError
from quorumlog.net.budget import PEER
from quorumlog.net.connections import client_listens_only
from quorumlog.net.parameters import Given, invalid
from quorumlog.net.responses import REQUEST_ID
from quorumlog.wire import problems
from services.gateway.edge import arrow
from services.gateway.edge import operations as op
from services.gateway.edge.http import sending
from services.gateway.edge.http.codings import begin
from services.gateway.edge.http.follows import P, SharedPage, shared_tail
from services.gateway.edge.http.limits import BATCH_ENTRIES_MAX, Room
from services.gateway.edge.http.media import (
    ARROW,
    EVENTS,
    FRAMES,
    NDJSON,
    accepted,
    json_bytes,
    octets,
)
from services.gateway.edge.pages import Pages
from services.gateway.logs.values import Start

STREAM_BYTES: Final = 1 << 20
"""What a stream reads ahead of its client (taste)."""
WHOLE_BYTES_MAX: Final = 8 << 20
"""The most of a page that is made whole (Arrow), whatever the client would take: the page is in memory
several times while it is made (taste).
"""
_RETRY_MS: Final = 1000, 5000
"""When readers of events come again after a disconnect: each at another time, not all at once with the rest (chosen by
judgement; browsers wait 3 to 5 s by themselves).
"""


class PageStream(Generic[P]):
    """Reads pages one after another, within limits, and follows the tail together with its other readers.

    Invariant: `at` is the next position that the caller was not given.
    """

    def __init__(
        self,
        pages: Pages[P],
        room: Room,
        at: Start,
        *,
        limit: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        """A limit that is None never ends the pages."""
        self.pages, self.room, self.at = pages, room, at
        self._left, self._bytes_left = limit, max_bytes

    @property
    def is_sought(self) -> bool:
        """Whether the next page is where the log's end, or a time, is now. A client must learn the place early: if
        it is cut off before, it begins again at a later end, and misses the records in between.
        """
        return not isinstance(self.at, int) and self.at != "earliest"

    def begin(self, page: P) -> int:
        """The position at which a page begins."""
        return next(iter(self.pages.numbers(page)), page.next)

    @property
    def is_over(self) -> bool:
        """Whether a limit is reached, or the last position that was asked for."""
        last = self.pages.last
        is_past = last is not None and isinstance(self.at, int) and self.at > last
        return is_past or any(
            left is not None and left <= 0 for left in (self._left, self._bytes_left)
        )

    @property
    def _is_ending(self) -> bool:
        # A client that is gone also looks like one that only listens: its place is given back at once.
        return self.room.is_ending or client_listens_only()

    async def page(self, wait_s: float = 0.0, *, bytes_max: int = STREAM_BYTES) -> P:
        """The next page, maybe empty. At the end waits for news, or for the end to be final."""
        pages = self.pages
        limit = BATCH_ENTRIES_MAX if self._left is None else self._left
        max_bytes = bytes_max if self._bytes_left is None else min(bytes_max, self._bytes_left)

        def read(at: Start, wait_s: float) -> Awaitable[P]:
            return pages.read(at, limit=limit, max_bytes=max_bytes, wait_s=wait_s)

        page = await read(self.at, 0.0)
        if wait_s > 0 and not pages.count(page) and not pages.is_end(page):
            # Without a place among the requests in work.
            news = await self.room.wait(read(page.next if self.is_sought else self.at, wait_s))
            page = page if news is None else news
        self.at = page.next
        if self._left is not None:
            self._left -= pages.count(page)
        if self._bytes_left is not None:
            self._bytes_left -= pages.payload_bytes(page)
        return page

    async def tail(self) -> AsyncGenerator[SharedPage[P], None]:
        """Pages without an end, an empty one whenever nothing came for a while. Ends after the page
        that nothing can follow, at the limits, when the client sends no more, or when this process is about to end.
        """
        wait_s = 0.0
        is_limited = (self._left, self._bytes_left, self.pages.last) != (None, None, None)
        while is_limited or not isinstance(self.at, int) or self.pages.key is None:
            page = await self.page(wait_s)
            yield SharedPage(page)
            wait_s = self.room.limits.comment_every_s
            if self.pages.is_end(page) or self.is_over or self._is_ending:
                return
        tail = shared_tail(
            self.room.follows,
            self.pages.key,
            self.pages,
            self.at,
            wait_s=self.room.limits.comment_every_s,
            waited=self.room.wait,
        )
        async with aclosing(tail):
            async for shared in tail:
                yield shared
                if self._is_ending:
                    return


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What a read asks for. A limit that is None is a page's default, and none for a stream."""

    media: str
    start: Start
    encoding: str
    wait_s: float
    limit: int | None
    max_bytes: int | None
    created_at: str | None = None
    """Of the log that is meant; None: whichever has the name."""

    @classmethod
    def of(
        cls, request: web.Request, given: Given, start: Start, created_at: str | None = None
    ) -> Self:
        """What a request asks for. Raises: NotAcceptable."""
        chosen = accepted(request, op.READ_TYPES)
        arrow.check_acceptable(chosen)
        seen = given[op.LAST_EVENT_ID] if chosen == EVENTS else None
        limit = given.get(op.LIMIT) if seen is None else _left(given, start, seen[0])
        if seen is not None:
            start, created_at = seen[0] + 1, seen[1] or created_at
        return cls(
            chosen,
            start,
            given[op.ENCODING],
            given[op.WAIT_MS] / 1000,
            limit,
            given.get(op.MAX_BYTES),
            created_at,
        )

    def stream(self, room: Room, pages: Pages[P]) -> PageStream[P]:
        """The pages of a stream, or of one page with a page's limits."""
        limit, max_bytes = self.limit, self.max_bytes
        if self.media not in (EVENTS, NDJSON):
            limit, max_bytes = limit or op.PAGE_ENTRIES, max_bytes or op.PAGE_BYTES
        return PageStream(pages, room, self.start, limit=limit, max_bytes=max_bytes)


def _left(given: Given, start: Start, seen: int) -> int | None:
    """What is left of the limit of a reader of events that goes on after `seen`: each connection would have the whole
    limit again. Raises: InvalidRequest where that can't be counted.
    """
    limit = given.get(op.LIMIT)
    if limit is None and given.get(op.MAX_BYTES) is None:
        return None
    if limit is None or not isinstance(start, int) or given.get(op.MAX_BYTES) is not None:
        raise invalid(
            op.LAST_EVENT_ID.pointer,
            "goes with limit only where from is a number, and not with max_bytes: what came before can't be counted",
        )
    return max(0, limit - max(0, seen + 1 - start))


async def answer_read(
    request: web.Request, room: Room, pages: Pages[P], wanted: ReadRequest
) -> web.StreamResponse:
    """A read as events, lines, Arrow, frames or JSON."""
    stream = wanted.stream(room, pages)
    if wanted.media == EVENTS:
        if stream.is_over:
            return web.Response(status=204)
        return await send_events(request, stream, wanted.encoding)
    if wanted.media == NDJSON:
        return await send_lines(request, stream, wanted.encoding, wanted.wait_s)
    if wanted.media == ARROW:
        page = await stream.page(wanted.wait_s, bytes_max=WHOLE_BYTES_MAX)
        return octets(pages.arrow(page), ARROW, pages.position(page))
    parts = await _parts(request, room, stream, wanted.wait_s)
    last, is_frames, is_whole = parts[-1], wanted.media == FRAMES, len(parts) == 1
    taken = _taken(request, room, pages, parts)
    if is_frames:
        body: Iterable[bytes] = map(pages.frames, taken)
    else:
        body = pages.document(taken, last, wanted.encoding)
    data = b"".join(body) if is_whole else b""
    head = octets(data, FRAMES, pages.position(last)) if is_frames else json_bytes(data)
    if is_whole:
        return head
    head.headers["X-Request-Id"] = request[REQUEST_ID]
    return await sending.send_parts(request, room, head, body)


async def _parts(request: web.Request, room: Room, stream: PageStream[P], wait_s: float) -> list[P]:
    """What a read asks for, part by part; less of it where the room for answers ends before. Most
    reads have one part. Raises: Overloaded, and what the first part raises.
    """
    pages = stream.pages
    room.answers.check(PEER.get(), 1)  # before the work of reading what there is no room for
    page = await stream.page(wait_s)
    size = pages.size(page)
    if size > sending.LARGE_BYTES:
        room.keep(request, size)
    parts = [page]
    while size >= STREAM_BYTES // 2 and not stream.is_over:
        try:
            page = await stream.page()
            size = pages.size(page)
            room.keep(request, size)
        except QuorumLogError:
            break  # the next read gets this part, or the error
        if pages.count(page):
            parts.append(page)
    return parts


def _taken(request: web.Request, room: Room, pages: Pages[P], parts: list[P]) -> Iterator[P]:
    """The parts. Each is forgotten, and its room given back, once the next one is asked for."""
    parts.reverse()
    while parts:
        size = pages.size(parts[-1])
        yield parts.pop()
        room.let_go(request, size)


async def send_lines(
    request: web.Request, stream: PageStream[P], encoding: str, wait_s: float
) -> web.StreamResponse:
    """Send items as lines, up to the end as it is now; an error in between is the last line. For a read from
    the end the head is sent before any wait, since it says where the end is.
    """
    pages = stream.pages
    later_s, wait_s = (wait_s, 0.0) if stream.is_sought else (0.0, wait_s)

    def lines_of(page: P) -> bytes:
        return b"".join(item + b"\n" for item in pages.items(page, encoding))

    page = await stream.page(wait_s)
    lines = lines_of(page)
    end = await pages.end(page)
    response = sending.stream_head(request, NDJSON, pages.position(page))
    is_all = not later_s and page.next >= end
    packer = begin(request, stream.room, response, size=len(lines) if is_all else None)
    await response.prepare(request)
    if request.method == "HEAD":
        return response
    try:
        if later_s and not lines and not pages.is_end(page):
            page = await stream.page(later_s)
            lines, end = lines_of(page), await pages.end(page)
        while True:
            if lines:
                await sending.write(response, stream.room, lines, packer)
            if not pages.count(page) or stream.is_over or page.next >= end:
                break
            page = await stream.page()
            lines = lines_of(page)
    except QuorumLogError as error:
        problem = problems.to_bytes(error, request[REQUEST_ID]) + b"\n"
        await sending.write(response, stream.room, problem, packer)
    await sending.write_end(response, packer)
    return response


async def send_events(
    request: web.Request, stream: PageStream[P], encoding: str
) -> web.StreamResponse:
    """Send each item as an event whose id is the item's; follow the tail until its end is final. For a tail from
    the end the id before its first item is sent at once: a browser resumes there. A reader that resumes at a final end
    gets 204, which ends a browser's attempts.
    """
    pages, is_sought = stream.pages, stream.is_sought

    def events_of(page: P) -> bytes:
        items = zip(pages.numbers(page), pages.items(page, encoding), strict=True)
        end = pages.id_end(page)
        return b"".join(b"id: %d%b\ndata: %b\n\n" % (number, end, item) for number, item in items)

    response: web.StreamResponse | None = None
    try:
        async with aclosing(stream.tail()) as tail:
            async for shared in tail:
                events = shared.form(("events", encoding), events_of)
                is_end = pages.is_end(shared.page)
                if response is None:
                    if is_end and not events and "Last-Event-ID" in request.headers:
                        return web.Response(status=204)
                    response = await sending.opened(request, EVENTS)
                    if request.method == "HEAD":
                        return response
                    await response.write(b"retry: %d\n" % random.randint(*_RETRY_MS))  # noqa: S311
                    if is_sought:
                        before = stream.begin(shared.page) - 1
                        events = b"id: %d%b\n\n" % (before, pages.id_end(shared.page)) + events
                if events or not is_end:
                    await sending.write(response, stream.room, events or b": \n\n")
                if is_end:
                    end = orjson.dumps(pages.ending(shared.page))
                    await response.write(b"event: end\ndata: " + end + b"\n\n")
    except QuorumLogError as error:
        if response is None:
            raise
        document = problems.to_bytes(error, request[REQUEST_ID])
        await response.write(b"event: problem\ndata: " + document + b"\n\n")
    assert response is not None, "a tail has at least one page"
    await response.write_eof()
    return response
