"""Send answers to clients that may read slowly, or not at all.

aiohttp takes an answer whole and keeps it until the client has read it. Here aiohttp gets a large answer in
slices, and the answer counts in `Room.answers` until it is sent.
"""

from collections.abc import Iterable
from typing import Final

from aiohttp import hdrs, web

from quorumlog.net.responses import REQUEST_ID
from services.gateway.edge.http.codings import Packer, begin
from services.gateway.edge.http.limits import Room

LARGE_BYTES: Final = 64 << 10
"""Up to this size an answer costs no more than its connection's buffer, which is bounded anyway."""

_SLICE_BYTES: Final = 256 << 10
"""Of an answer that aiohttp gets at once: the connection's buffer has one slice at most besides what it bounds itself."""


def large_bytes(response: web.StreamResponse) -> int:
    """The bytes of a large answer that is not yet sent; 0 for any other answer."""
    body = response.body if isinstance(response, web.Response) else None
    return len(body) if isinstance(body, bytes) and len(body) > LARGE_BYTES else 0


async def write(
    response: web.StreamResponse, room: Room, data: bytes, packer: Packer | None = None
) -> None:
    """Write a part of a streamed answer, at the client's pace; compressed it can be read before more comes.

    Raises: Overloaded.
    """
    if len(data) <= LARGE_BYTES:
        await _write_slices(response, data, packer, is_flushed=True)
        return
    # Twice: the page from which these bytes were made is held as long.
    with room.kept(2 * len(data)):
        await _write_slices(response, data, packer, is_flushed=True)


async def write_end(response: web.StreamResponse, packer: Packer | None = None) -> None:
    """End a streamed answer."""
    await response.write_eof(b"" if packer is None else packer.end())


async def send_whole(
    request: web.Request, room: Room, response: web.Response
) -> web.StreamResponse:
    """Send a large answer, for which there is room, at the client's pace."""
    assert isinstance(response.body, bytes), "it is large"
    sent = web.StreamResponse(status=response.status, headers=response.headers)
    packer = begin(request, room, sent, size=len(response.body), sample=response.body)
    if packer is None:
        sent.content_length = len(response.body)
    await sent.prepare(request)
    if request.method != hdrs.METH_HEAD:
        await _write_slices(sent, response.body, packer)
        await write_end(sent, packer)
    return sent


async def send_parts(
    request: web.Request, room: Room, head: web.Response, parts: Iterable[bytes]
) -> web.StreamResponse:
    """Send a large answer whose parts are made while it is sent; each part is held until it is sent."""
    sent = web.StreamResponse(status=head.status, headers=head.headers)
    sent.headers.popall(hdrs.CONTENT_LENGTH, None)
    rest = iter(parts)
    first = next(rest, b"")
    packer = begin(request, room, sent, sample=first)
    await sent.prepare(request)
    if request.method != hdrs.METH_HEAD:
        await _write_slices(sent, first, packer)
        del first
        for part in rest:
            await _write_slices(sent, part, packer)
        await write_end(sent, packer)
    return sent


async def _write_slices(
    response: web.StreamResponse,
    data: bytes,
    packer: Packer | None = None,
    *,
    is_flushed: bool = False,
) -> None:
    if packer is not None:
        async for packed in packer.parts(data, is_flushed=is_flushed):
            await response.write(packed)
        return
    view = memoryview(data)
    for start in range(0, len(view), _SLICE_BYTES):
        await response.write(view[start : start + _SLICE_BYTES])


async def opened(
    request: web.Request, media: str, headers: dict[str, str] | None = None
) -> web.StreamResponse:
    """A streamed answer whose head is sent."""
    response = stream_head(request, media, headers)
    await response.prepare(request)
    return response


def stream_head(
    request: web.Request, media: str, headers: dict[str, str] | None = None
) -> web.StreamResponse:
    """A streamed answer whose head is not sent yet."""
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
