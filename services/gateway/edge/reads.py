"""Read pages of a ledger or a log, and send one page or a stream of pages in the client's format.

An error before the response's first byte sets the status. A later error is sent as the last line.
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
"""Bytes that a stream reads ahead of the client (chosen by judgement)."""
WHOLE_BYTES_MAX: Final = 8 << 20
"""Maximum bytes of a page that is encoded as a whole (Arrow), even if the client requests more.
Encoding needs memory for several copies of the page (chosen by judgement).
"""
_RETRY_MS: Final = 1000, 5000
"""Range of the random delay before a disconnected reader of events reconnects. Readers must not all
reconnect at once (chosen by judgement; browsers wait 3 to 5 s by default).
"""


@dataclass(eq=False)
class PageStream(Generic[P]):
    """Reads pages in sequence, within limits. Readers of the same tail share reads.

    Invariant: the next page begins at `at`.
    """

    pages: Pages[P]
    room: Room
    at: Start
    _left: int | None = None
    _bytes_left: int | None = None
    """Remaining limits of items and bytes for all further pages together. None means no limit."""

    @property
    def is_sought(self) -> bool:
        """Whether the start is `latest`, `-N` or a time, and not yet resolved to an offset. A client
        needs the resolved offset to reconnect, because it would otherwise miss records.
        """
        return not isinstance(self.at, int) and self.at != "earliest"

    def begin(self, page: P) -> int:
        """The offset or entry id at which a page begins."""
        return next(iter(self.pages.numbers(page)), page.next)

    @property
    def is_over(self) -> bool:
        """Whether a limit or the last requested item has been reached."""
        last = self.pages.last
        is_past = last is not None and isinstance(self.at, int) and self.at > last
        return is_past or any(
            left is not None and left <= 0 for left in (self._left, self._bytes_left)
        )

    @property
    def _is_ending(self) -> bool:
        # `client_listens_only` is also true for a disconnected client, so the request ends at once.
        return self.room.is_ending or client_listens_only()

    async def page(self, wait_s: float = 0.0, *, bytes_max: int = STREAM_BYTES) -> P:
        """Read a page, possibly empty. At the end, wait up to `wait_s` for items or a close."""
        pages = self.pages
        limit = BATCH_ENTRIES_MAX if self._left is None else self._left
        max_bytes = bytes_max if self._bytes_left is None else min(bytes_max, self._bytes_left)

        def read(at: Start, wait_s: float) -> Awaitable[P]:
            return pages.read(at, limit=limit, max_bytes=max_bytes, wait_s=wait_s)

        page = await read(self.at, 0.0)
        if wait_s > 0 and not pages.has_moved(page) and not pages.is_end(page):
            # A waiting request does not count as a request in progress.
            news = await self.room.wait(read(page.next, wait_s))
            page = page if news is None else news
        self.at = page.next
        if self._left is not None:
            self._left -= pages.count(page)
        if self._bytes_left is not None:
            self._bytes_left -= pages.payload_bytes(page)
        return page

    async def tail(self) -> AsyncGenerator[SharedPage[P], None]:
        """Yield pages as items arrive, and an empty page after `comment_every_s` without an item.
        Stops at the final end, at a limit, when the client disconnects, or at shutdown.
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
    """The parameters of a read. A limit of None means no limit for a stream, or a page's default."""

    media: str
    start: Start
    encoding: str
    wait_s: float
    limit: int | None
    max_bytes: int | None
    created_at: str | None = None
    """The log's expected `created_at`. None means any log with the name."""

    @classmethod
    def of(
        cls,
        request: web.Request,
        given: Given,
        start: Start,
        created_at: str | None = None,
        *,
        is_filtered: bool = False,
    ) -> Self:
        """Parse the parameters of a read request. Raises: NotAcceptable, InvalidRequest."""
        chosen = accepted(request, op.READ_TYPES)
        arrow.check_acceptable(chosen)
        seen = given[op.LAST_EVENT_ID] if chosen == EVENTS else None
        limit = (
            given.get(op.LIMIT)
            if seen is None
            else _left(given, start, seen[0], is_filtered=is_filtered)
        )
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
        """Create the stream of pages. A read of one page gets a page's default limits."""
        limit, max_bytes = self.limit, self.max_bytes
        if self.media not in (EVENTS, NDJSON):
            limit, max_bytes = limit or op.PAGE_ENTRIES, max_bytes or op.PAGE_BYTES
        return PageStream(pages, room, self.start, limit, max_bytes)


def _left(given: Given, start: Start, seen: int, *, is_filtered: bool) -> int | None:
    """Return the rest of `limit` for a reader of events that resumes after `seen`, so that a
    reconnection does not restart the limit. Raises: InvalidRequest if the rest is unknown.
    """
    limit = given.get(op.LIMIT)
    if limit is None and given.get(op.MAX_BYTES) is None:
        return None
    if (
        limit is None
        or is_filtered
        or not isinstance(start, int)
        or given.get(op.MAX_BYTES) is not None
    ):
        raise invalid(
            op.LAST_EVENT_ID.pointer,
            "must not be combined with `max_bytes`, and can be combined with `limit` only if `from` is"
            " a number and there is no filter",
        )
    return max(0, limit - max(0, seen + 1 - start))


async def answer_read(
    request: web.Request, room: Room, pages: Pages[P], wanted: ReadRequest
) -> web.StreamResponse:
    """Respond to a read with events, NDJSON, Arrow, frames or JSON, as the client accepts."""
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
    """Read the requested page, usually in one part. An error after the first part ends the page."""
    pages = stream.pages
    room.answers.check(PEER.get(), 1)  # refuse the request before reading
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
            break  # the client's next read gets this part or the error
        if pages.count(page):
            parts.append(page)
    return parts


def _taken(request: web.Request, room: Room, pages: Pages[P], parts: list[P]) -> Iterator[P]:
    """Yield the parts of a page. Each step first frees the previous part and its budget."""
    parts.reverse()
    while parts:
        size = pages.size(parts[-1])
        yield parts.pop()
        room.let_go(request, size)


async def send_lines(
    request: web.Request, stream: PageStream[P], encoding: str, wait_s: float
) -> web.StreamResponse:
    """Send items as lines, up to the current end. An error after the head is sent as the last line.
    A read from `latest`, `-N` or a time gets the head with the resolved offset before any wait.
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
            if not pages.has_moved(page) or stream.is_over or page.next >= end:
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
    """Send each item as an event with the item's id, and follow the tail until its final end.

    If the start is `latest`, `-N` or a time, the id before the first item is sent at once, so that a
    browser can resume there. A reader that resumes at the final end gets 204, and stops retrying.
    """
    pages, is_sought = stream.pages, stream.is_sought

    def events_of(page: P) -> bytes:
        items = zip(pages.numbers(page), pages.items(page, encoding), strict=True)
        end = pages.id_end(page)
        events = [b"id: %d%b\ndata: %b\n\n" % (number, end, item) for number, item in items]
        # An id without data is no event, but the client sends the id when it reconnects.
        skipped = pages.skipped_to(page)
        events += [] if skipped is None else [b"id: %d%b\n\n" % (skipped, end)]
        return b"".join(events)

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
