"""Answer a read in the form that the client takes: one page, or a stream of pages."""

from dataclasses import dataclass

from aiohttp import web

from services.gateway.edge.answers import json_bytes, octets
from services.gateway.edge.body import Room
from services.gateway.edge.follows import P
from services.gateway.edge.limits import READ_BYTES_MAX
from services.gateway.edge.media import EVENTS, FRAMES, NDJSON
from services.gateway.edge.operations import PAGE_BYTES, PAGE_ENTRIES
from services.gateway.edge.pages import Pages, PageStream
from services.gateway.edge.streams import send_events, send_lines
from services.gateway.logs.reading import Start


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
    page = await one_page(room, pages, wanted)
    if wanted.media == FRAMES:
        return octets(pages.frames(page), FRAMES, pages.position(page))
    return json_bytes(pages.document(page, wanted.encoding))


async def one_page(room: Room, pages: Pages[P], wanted: Wanted) -> P:
    """The one page of a read that is no stream."""
    stream = PageStream(
        pages,
        room,
        wanted.start,
        limit=wanted.limit or PAGE_ENTRIES,
        max_bytes=wanted.max_bytes or PAGE_BYTES,
    )
    return await stream.page(wanted.wait_s, bytes_max=READ_BYTES_MAX)
