"""Send responses to clients that may read slowly, or not at all.

aiohttp buffers a whole response until the client has read it. This module instead passes a large
response to aiohttp in slices, and charges unsent responses to the budget `Room.answers`.
"""

from collections.abc import Iterable
from typing import Final

from aiohttp import hdrs, web

from quorumlog.net.responses import REQUEST_ID
from services.gateway.edge.http.codings import Packer, begin
from services.gateway.edge.http.limits import Room

LARGE_BYTES: Final = 64 << 10
"""Responses up to this size fit in the connection's bounded buffer."""

_SLICE_BYTES: Final = 256 << 10
"""Size of the slices for aiohttp. The connection's buffer may exceed its limit by one slice."""


def large_bytes(response: web.StreamResponse) -> int:
    """Size in bytes of an unsent large response; 0 for any other response."""
    body = response.body if isinstance(response, web.Response) else None
    return len(body) if isinstance(body, bytes) and len(body) > LARGE_BYTES else 0


async def write(
    response: web.StreamResponse, room: Room, data: bytes, packer: Packer | None = None
) -> None:
    """Write a part of a streamed response at the client's pace. A compressed part is flushed, so
    that the client can decode it at once. Raises: Overloaded.
    """
    if len(data) <= LARGE_BYTES:
        await _write_slices(response, data, packer, is_flushed=True)
        return
    # Charge twice the size, because the encoded page stays in memory during the write.
    with room.kept(2 * len(data)):
        await _write_slices(response, data, packer, is_flushed=True)


async def write_end(response: web.StreamResponse, packer: Packer | None = None) -> None:
    """End a streamed response."""
    await response.write_eof(b"" if packer is None else packer.end())


async def send_whole(
    request: web.Request, room: Room, response: web.Response
) -> web.StreamResponse:
    """Send a large response at the client's pace. The caller has charged the budget."""
    assert isinstance(response.body, bytes), "a large response has a body of bytes"
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
    """Send a large response in generated parts. Only one part is in memory at a time."""
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
    """Create a streamed response and send its head."""
    response = stream_head(request, media, headers)
    await response.prepare(request)
    return response


def stream_head(
    request: web.Request, media: str, headers: dict[str, str] | None = None
) -> web.StreamResponse:
    """Create a streamed response without sending its head."""
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
