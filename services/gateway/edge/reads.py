"""Answer a read in the form that the client takes: one page, or a stream of pages."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from quorumlog.errors import QuorumLogError
from quorumlog.net.budget import PEER
from services.gateway.edge.answers import json_bytes, octets
from services.gateway.edge.follows import P
from services.gateway.edge.media import EVENTS, FRAMES, NDJSON
from services.gateway.edge.middleware import REQUEST_ID
from services.gateway.edge.operations import PAGE_BYTES, PAGE_ENTRIES
from services.gateway.edge.pages import STREAM_BYTES, Pages, PageStream
from services.gateway.edge.room import Room
from services.gateway.edge.sending import LARGE_BYTES, send_parts
from services.gateway.edge.streams import send_events, send_lines
from services.gateway.logs.reading import Start

WHOLE_BYTES_MAX: Final = 8 << 20
"""A page that is made whole (Arrow) has no more, whatever the client would take: it is in memory
several times while it is made (taste).
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a read asks for. A limit that is None is a page's default, and none for a stream."""

    media: str
    start: Start
    encoding: str
    wait_s: float
    limit: int | None
    max_bytes: int | None


async def answer_read(
    request: web.Request, room: Room, pages: Pages[P], wanted: Wanted
) -> web.StreamResponse:
    """A read as events, lines, frames or JSON."""
    if wanted.media in (EVENTS, NDJSON):
        stream = PageStream(
            pages, room, wanted.start, limit=wanted.limit, max_bytes=wanted.max_bytes
        )
        if wanted.media == EVENTS:
            return await send_events(request, stream, wanted.encoding)
        return await send_lines(request, stream, wanted.encoding, wanted.wait_s)
    parts = await _parts(request, room, pages, wanted)
    last, is_frames = parts[-1], wanted.media == FRAMES
    if len(parts) == 1:
        body = pages.frames(last) if is_frames else pages.document(last, wanted.encoding)
        room.let_go(request)  # the page; the body is counted as it is sent
        return octets(body, FRAMES, pages.position(last)) if is_frames else json_bytes(body)
    head = octets(b"", FRAMES, pages.position(last)) if is_frames else json_bytes(b"")
    head.headers["X-Request-Id"] = request[REQUEST_ID]
    taken = _taken(request, room, pages, parts)
    if is_frames:
        return await send_parts(request, head, map(pages.frames, taken))
    return await send_parts(request, head, _document(pages, last, taken, wanted.encoding))


async def one_page(room: Room, pages: Pages[P], wanted: Wanted) -> P:
    """The one page of a read whose form can't be made in parts."""
    stream = PageStream(
        pages,
        room,
        wanted.start,
        limit=wanted.limit or PAGE_ENTRIES,
        max_bytes=wanted.max_bytes or PAGE_BYTES,
    )
    return await stream.page(wanted.wait_s, bytes_max=WHOLE_BYTES_MAX)


async def _parts(request: web.Request, room: Room, pages: Pages[P], wanted: Wanted) -> list[P]:
    """What a read asks for, part by part; less of it where the room for answers ends before. Most
    reads have one part. Raises: Overloaded, and what the first part raises.
    """
    stream = PageStream(
        pages,
        room,
        wanted.start,
        limit=wanted.limit or PAGE_ENTRIES,
        max_bytes=wanted.max_bytes or PAGE_BYTES,
    )
    room.answers.check(PEER.get(), 1)  # before the work of reading what there is no room for
    page = await stream.page(wanted.wait_s)
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
            break  # it belongs to the next page, as does what went wrong with it
        if pages.count(page):
            parts.append(page)
    return parts


def _taken(request: web.Request, room: Room, pages: Pages[P], parts: list[P]) -> Iterable[P]:
    """The parts, of which each is forgotten once the next one is asked for."""
    parts.reverse()
    while parts:
        size = pages.size(parts[-1])
        yield parts.pop()
        room.let_go(request, size)


def _document(pages: Pages[P], last: P, parts: Iterable[P], encoding: str) -> Iterable[bytes]:
    """The JSON of a read, part by part."""
    before, after = pages.around(last)
    for part in parts:
        yield before + b",".join(pages.items(part, encoding))
        before = b","
    yield after
