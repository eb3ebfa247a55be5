"""Streams over HTTP: NDJSON both ways, and Server-Sent Events that follow a tail.

Until the first byte of an answer an error is a status; after that it is the stream's last line.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Final, TypeVar

import orjson
from aiohttp import web

from quorumlog.errors import QuorumLogError, RequestTimeout, TooLarge
from quorumlog.net.awake import awake, awake_timeout
from quorumlog.net.budget import PEER
from quorumlog.wire import problems
from services.gateway.edge.http import codings
from services.gateway.edge.http.body import in_turn, send_continue
from services.gateway.edge.http.follows import P
from services.gateway.edge.http.limits import BATCH_ENTRIES_MAX, INLINE_BYTES_MAX
from services.gateway.edge.http.media import EVENTS, NDJSON
from services.gateway.edge.http.middleware import REQUEST_ID
from services.gateway.edge.http.packing import begin
from services.gateway.edge.http.pipe import Pipe
from services.gateway.edge.http.room import Room
from services.gateway.edge.http.sending import write, write_end
from services.gateway.edge.pages import PageStream

_LINE_OVERHEAD: Final = 1024
_LINE_WORK: Final = 100
"""A line's own work, as bytes of a body."""
_ESCAPED: Final = 6
"""Bytes of JSON for one byte of a payload, at most: \\u0000."""

_RETRY_MS: Final = 1000, 5000
"""When readers of events come again after a disconnect: each at another time, not all at once with the rest (chosen by
judgement; browsers wait 3 to 5 s by themselves).
"""

T = TypeVar("T")
ParseLine = Callable[[bytes, int, int], T]
"""The item of a line, of its text, its number, and the most bytes that a payload may have."""


async def opened(
    request: web.Request, media: str, headers: dict[str, str] | None = None
) -> web.StreamResponse:
    """A streamed answer whose head is sent."""
    response = _head(request, media, headers)
    await response.prepare(request)
    return response


def _head(
    request: web.Request, media: str, headers: dict[str, str] | None = None
) -> web.StreamResponse:
    return web.StreamResponse(
        headers={
            "Content-Type": media,
            "Cache-Control": "no-store",
            "Vary": "Accept",
            "X-Accel-Buffering": "no",
            "X-Request-Id": request[REQUEST_ID],
            **(headers or {}),
        }
    )


@contextlib.asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run work beside a block, and end it with the block."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


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
    response = _head(request, NDJSON, pages.position(page))
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
                await write(response, stream.room, lines, packer)
            if not pages.count(page) or stream.is_over or page.next >= end:
                break
            page = await stream.page()
            lines = lines_of(page)
    except QuorumLogError as error:
        problem = problems.to_bytes(error, request[REQUEST_ID]) + b"\n"
        await write(response, stream.room, problem, packer)
    await write_end(response, packer)
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
                    response = await opened(request, EVENTS)
                    if request.method == "HEAD":
                        return response
                    await response.write(b"retry: %d\n" % random.randint(*_RETRY_MS))  # noqa: S311
                    if is_sought:
                        before = stream.begin(shared.page) - 1
                        events = b"id: %d%b\n\n" % (before, pages.id_end(shared.page)) + events
                if events or not is_end:
                    await write(response, stream.room, events or b": \n\n")
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


async def append_lines(
    request: web.Request,
    room: Room,
    pipe: Pipe[T],
    *,
    parse: ParseLine[T],
    names: tuple[str, str],
) -> web.StreamResponse:
    """Append one item a line; answer one line for each acknowledged run, cumulative. `names` are the members
    for a run's first and last item.
    """
    response: web.StreamResponse | None = None
    async with (
        aclosing(pipe.acknowledged()) as runs,
        beside(_put_lines(request, room, pipe, parse)),
    ):
        async for appended in runs:
            if response is None:
                response = await opened(request, NDJSON)
            await response.write(
                f'{{"{names[0]}":{appended.first},"{names[1]}":{appended.last}}}\n'.encode()
            )
    if response is None:
        if pipe.error is not None:
            raise pipe.error
        response = await opened(request, NDJSON)
    if pipe.error is not None:
        await response.write(problems.to_bytes(pipe.error, request[REQUEST_ID]) + b"\n")
    await response.write_eof()
    return response


async def _put_lines(request: web.Request, room: Room, pipe: Pipe[T], parse: ParseLine[T]) -> None:
    """Put the item of each line of the body into the pipe."""
    number = turn = 0

    def item(line: bytes) -> T:
        return parse(line, number, room.limits.entry_bytes_max)

    with pipe.failing():
        await send_continue(request)
        async with aclosing(_lines(request, room)) as chunks:
            async for lines in chunks:
                items: list[T] = []
                try:
                    for line in lines:
                        if line and not line.isspace():
                            items.append(await in_turn(request, room, line, item))
                            number += 1
                            turn += len(line) + _LINE_WORK
                        if turn > INLINE_BYTES_MAX:
                            turn = 0
                            await asyncio.sleep(0)
                finally:
                    for start in range(0, len(items), BATCH_ENTRIES_MAX):
                        await pipe.put(items[start : start + BATCH_ENTRIES_MAX])
        pipe.finish()


async def _lines(request: web.Request, room: Room) -> AsyncGenerator[list[bytes], None]:
    """The lines of a body, as many as come at once. The room counts what has come of the next line.

    Raises: RequestTimeout, TooLarge, Overloaded.
    """
    held, peer = 0, PEER.get()
    try:
        async for lines, rest_bytes in _split(request, room):
            room.bodies.give(peer, held)
            held = 0
            room.bodies.take(peer, rest_bytes)
            held = rest_bytes
            if lines:
                yield lines
    finally:
        room.bodies.give(peer, held)


async def _split(request: web.Request, room: Room) -> AsyncIterator[tuple[list[bytes], int]]:
    """Whole lines, and how many bytes of what follows are kept: of the next line, and of a decoder.

    A line that has begun must be complete in time; between lines a stream may rest for longer. Both in
    time awake: bytes that came while this process stood still came in time.
    """
    limits, clock, unpacker = room.limits, awake(), codings.unpacker(request)
    line_bytes_max = _ESCAPED * limits.entry_bytes_max + _LINE_OVERHEAD
    rest, deadline, came = bytearray(), clock.time() + limits.stream_idle_s, 0
    while True:
        try:
            async with awake_timeout(deadline - clock.time()):
                chunk = await room.wait(request.content.readany())
        except TimeoutError as error:
            raise RequestTimeout("the next line was not complete in time") from error
        if chunk is None:
            raise RequestTimeout("this gateway is about to end")
        if not chunk:
            if unpacker is not None:
                unpacker.finish()
            if rest:
                yield [bytes(rest)], 0
            return
        came += len(chunk)
        async for part in _parts(request, unpacker, chunk):
            if unpacker is not None:
                codings.check_expansion(request, came, limits.body_bytes_max)
            *lines, last = part.split(b"\n")
            if lines:
                lines[0] = bytes(rest) + lines[0]
                rest.clear()
            if not last:
                if lines:
                    deadline = clock.time() + limits.stream_idle_s
            elif not rest:
                deadline = clock.time() + limits.body_timeout_s
            else:
                deadline += len(part) / limits.body_rate_bytes_s_min
            rest += last
            if len(rest) > line_bytes_max:
                raise TooLarge(f"a line of more than {line_bytes_max} bytes")
            yield lines, len(rest) + (0 if unpacker is None else unpacker.kept_bytes)


async def _parts(
    request: web.Request, unpacker: codings.Unpacker | None, chunk: bytes
) -> AsyncIterator[bytes]:
    """A chunk of a body, unpacked."""
    if unpacker is None:
        yield chunk
        return
    async for piece in codings.unpacked(request, unpacker, chunk):
        yield piece
