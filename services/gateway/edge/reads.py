"""Answer a read in the form that the client takes: one page, or a stream of pages."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, Self

from aiohttp import web

from quorumlog.errors import QuorumLogError
from quorumlog.net.budget import PEER
from quorumlog.net.parameters import Given, invalid
from services.gateway.edge import arrow
from services.gateway.edge.http.follows import P
from services.gateway.edge.http.media import (
    ARROW,
    EVENTS,
    FRAMES,
    NDJSON,
    accepted,
    json_bytes,
    octets,
)
from services.gateway.edge.http.middleware import REQUEST_ID
from services.gateway.edge.http.room import Room
from services.gateway.edge.http.sending import LARGE_BYTES, send_parts
from services.gateway.edge.operations import (
    ENCODING,
    LAST_EVENT_ID,
    LIMIT,
    MAX_BYTES,
    PAGE_BYTES,
    PAGE_ENTRIES,
    WAIT_MS,
)
from services.gateway.edge.pages import STREAM_BYTES, Pages, PageStream
from services.gateway.edge.streams import send_events, send_lines
from services.gateway.logs.values import Start

WHOLE_BYTES_MAX: Final = 8 << 20
"""The most of a page that is made whole (Arrow), whatever the client would take: the page is in memory
several times while it is made (taste).
"""


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
        cls,
        request: web.Request,
        given: Given,
        media: tuple[str, ...],
        start: Start,
        created_at: str | None = None,
    ) -> Self:
        """A request that may be answered in one of `media`. Raises: NotAcceptable."""
        chosen = accepted(request, media)
        arrow.check_acceptable(chosen)
        seen = given[LAST_EVENT_ID] if chosen == EVENTS else None
        limit = given.get(LIMIT) if seen is None else _left(given, start, seen[0])
        if seen is not None:
            start, created_at = seen[0] + 1, seen[1] or created_at
        return cls(
            chosen,
            start,
            given[ENCODING],
            given[WAIT_MS] / 1000,
            limit,
            given.get(MAX_BYTES),
            created_at,
        )

    def stream(self, room: Room, pages: Pages[P]) -> PageStream[P]:
        """The pages of a stream."""
        return PageStream(pages, room, self.start, limit=self.limit, max_bytes=self.max_bytes)

    def as_page(self) -> Self:
        """The same read of one page, with a page's limits."""
        limit, max_bytes = self.limit or PAGE_ENTRIES, self.max_bytes or PAGE_BYTES
        return replace(self, limit=limit, max_bytes=max_bytes)


def _left(given: Given, start: Start, seen: int) -> int | None:
    """What is left of the limit of a reader of events that goes on after `seen`: each connection would have the whole
    limit again. Raises: InvalidRequest where that can't be counted.
    """
    limit = given.get(LIMIT)
    if limit is None and given.get(MAX_BYTES) is None:
        return None
    if limit is None or not isinstance(start, int) or given.get(MAX_BYTES) is not None:
        raise invalid(
            LAST_EVENT_ID.pointer,
            "goes with limit only where from is a number, and not with max_bytes: what came before can't be counted",
        )
    return max(0, limit - max(0, seen + 1 - start))


async def answer_read(
    request: web.Request, room: Room, pages: Pages[P], wanted: ReadRequest
) -> web.StreamResponse:
    """A read as events, lines, Arrow, frames or JSON."""
    if wanted.media == EVENTS:
        events = wanted.stream(room, pages)
        if events.is_over:
            return web.Response(status=204)
        return await send_events(request, events, wanted.encoding)
    if wanted.media == NDJSON:
        stream = wanted.stream(room, pages)
        return await send_lines(request, stream, wanted.encoding, wanted.wait_s)
    if wanted.media == ARROW:
        page = (
            await wanted.as_page()
            .stream(room, pages)
            .page(wanted.wait_s, bytes_max=WHOLE_BYTES_MAX)
        )
        return octets(pages.arrow(page), ARROW, pages.position(page))
    parts = await _parts(request, room, wanted.as_page().stream(room, pages), wanted.wait_s)
    last, is_frames, is_whole = parts[-1], wanted.media == FRAMES, len(parts) == 1
    taken = _taken(request, room, pages, parts)
    if is_frames:
        body: Iterable[bytes] = map(pages.frames, taken)
    else:
        body = pages.document(taken, pages.document_members(last), wanted.encoding)
    data = b"".join(body) if is_whole else b""
    head = octets(data, FRAMES, pages.position(last)) if is_frames else json_bytes(data)
    if is_whole:
        return head
    head.headers["X-Request-Id"] = request[REQUEST_ID]
    return await send_parts(request, room, head, body)


async def _parts(request: web.Request, room: Room, stream: PageStream[P], wait_s: float) -> list[P]:
    """What a read asks for, part by part; less of it where the room for answers ends before. Most
    reads have one part. Raises: Overloaded, and what the first part raises.
    """
    pages = stream.pages
    room.answers.check(PEER.get(), 1)  # before the work of reading what there is no room for
    page = await stream.page(wait_s)
    size = pages.size(page)
    if size > LARGE_BYTES:
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
