"""Read request bodies: check the media type, limit the time, and charge the budget for bodies.

Requests with invalid headers are refused before any byte of the body is read.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from aiohttp import hdrs, web
from pydantic import BaseModel, ValidationError

from quorumlog.errors import BadRequest, RequestTimeout, TooLarge, UnsupportedMediaType
from quorumlog.net.bodies import invalid_of
from quorumlog.net.budget import PEER
from quorumlog.net.operations import JSON
from quorumlog.net.parameters import escaped, invalid
from quorumlog.net.timers import awake_timeout
from quorumlog.wire import strict
from services.gateway.edge.http import codings, limits
from services.gateway.edge.http.media import check_charset

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

_PAUSE_S_MAX: Final = 0.5
"""Maximum pause in seconds after a long parse of a large body."""
_MARK_BYTES: Final = 80
"""Maximum memory of a JSON value per mark that `strict.marks` counts in the text (measured)."""
_PLAIN_BYTES_MAX: Final = 2 << 20
"""Maximum JSON body that is parsed inline if it has at most _PLAIN_MARKS_MAX values. Parsing the
strings takes less than 15 ms, whatever the content (measured)."""
_PLAIN_MARKS_MAX: Final = 1 << 14
_EXPANDED_BYTES_MAX: Final = 1 << 20
"""Decompressed size beyond which `codings.check_expansion` limits the compression ratio."""
_MEMBERS_MAX: Final = 100
"""Maximum members of a JSON object: more than any operation has, but few enough to list errors."""
_FORM: Final = "application/x-www-form-urlencoded"


def media_type(request: web.Request, known: tuple[str, ...]) -> str:
    """Return the body's media type: one of `known`, or the first of `known` if there is no body.

    Raises: UnsupportedMediaType, also for an unknown content coding.
    """
    codings.coding_of(request)
    given = request.headers.get(hdrs.CONTENT_TYPE)
    if given == known[0]:
        return given
    media = (given or "").partition(";")[0].strip().lower()
    if media in known:
        check_charset(given or "")
        return media
    if not request.body_exists or request.content_length == 0:
        return known[0]
    hint = f"add -H 'Content-Type: {known[0]}'"
    if media == _FORM:
        hint = f"curl -d sends {_FORM} by itself; {hint}"
    elif not media:
        hint = f"the request has no Content-Type; {hint}"
    raise UnsupportedMediaType(
        f"this route accepts {', '.join(known)}: {hint}", headers={"Accept": ", ".join(known)}
    )


async def read(request: web.Request, room: limits.Room, bytes_max: int) -> bytes:
    """Read and decompress the whole body. `bytes_max` bounds both the received and the decompressed
    bytes. Raises: TooLarge, RequestTimeout, Overloaded, BadRequest, UnsupportedMediaType.
    """
    length = request.content_length
    if length is not None and length > bytes_max:
        raise TooLarge(f"the body has {length} bytes, but the limit is {bytes_max}")
    if not request.body_exists:
        return b""
    content, unpacker = request.content, codings.unpacker(request)
    if unpacker is None and content.is_eof():
        # The body arrived with the headers, so there is no need to wait.
        data = content.read_nowait(-1)
        if length is None:
            _check_total(len(data), bytes_max)
        room.hold(request, len(data))
        return data
    # The announced bytes may never arrive, so the budget is checked, but not charged.
    room.bodies.check(PEER.get(), length or 0)
    return await _read_slowly(request, room, bytes_max, unpacker)


async def _read_slowly(
    request: web.Request, room: limits.Room, bytes_max: int, unpacker: codings.Unpacker | None
) -> bytes:
    await send_continue(request)
    bounds = room.limits
    chunks: list[bytes] = []
    total = 0
    try:
        # The timeout does not count time during which this process was suspended.
        async with awake_timeout(bounds.body_timeout_s) as limit:
            while chunk := await request.content.readany():
                room.hold(request, len(chunk))
                total += len(chunk)
                _check_total(total, bytes_max)
                limit.extend(len(chunk) / bounds.body_rate_bytes_s_min)
                if unpacker is None:
                    chunks.append(chunk)
                    continue
                async for piece in codings.unpacked(request, unpacker, chunk):
                    _check_total(request[codings.UNPACKED], bytes_max, "decompresses to")
                    codings.check_expansion(request, total, _EXPANDED_BYTES_MAX)
                    room.hold(request, len(piece))
                    limit.extend(len(piece) / bounds.body_rate_bytes_s_min)
                    chunks.append(piece)
                room.drop(request, len(chunk))
    except TimeoutError as error:
        raise RequestTimeout(
            f"the body was incomplete after {bounds.body_timeout_s:g} s: only {total} bytes arrived"
        ) from error
    except web.RequestPayloadError as error:
        raise BadRequest("the body is truncated or badly encoded: send it again") from error
    if unpacker is not None:
        unpacker.finish()
    return b"".join(chunks)


async def in_turn(
    request: web.Request,
    room: limits.Room,
    data: bytes,
    use: Callable[[bytes, int | None], T],
    *,
    is_json: bool = True,
) -> T:
    """Parse a body with `use`, and return the result. The second argument of `use` is the number of
    `strict.marks`, or None if not counted. A large body with many values is parsed in a thread, so
    that the event loop can serve other requests. Only one body is parsed at a time, to bound the
    memory, with a pause after a long parse. Raises: Overloaded, and the errors of `use`.
    """
    if len(data) <= limits.INLINE_BYTES_MAX:
        return use(data, None)
    count = strict.marks(data) if is_json else None
    if count is not None and count <= _PLAIN_MARKS_MAX and len(data) <= _PLAIN_BYTES_MAX:
        return use(data, count)
    took_s = 0.0

    def parse(count: int | None) -> T:
        nonlocal took_s
        began_s = time.thread_time()
        try:
            return use(data, count)
        finally:
            took_s = time.thread_time() - began_s

    await room.parsing.acquire()
    try:
        held = _MARK_BYTES * min(count or 0, strict.MARKS_MAX)
        room.hold(request, held)
        try:
            return await asyncio.to_thread(parse, count)
        finally:
            room.drop(request, held)
    finally:
        # Pause as long as the parse took, because it may have held the interpreter lock throughout.
        # No pause is needed after a parse that is shorter than the lock's switch interval.
        pause_s = took_s if took_s > sys.getswitchinterval() else 0
        asyncio.get_running_loop().call_later(min(pause_s, _PAUSE_S_MAX), room.parsing.release)


def _check_total(total: int, bytes_max: int, does: str = "has") -> None:
    if total > bytes_max:
        raise TooLarge(f"the body {does} more than {bytes_max} bytes")


async def send_continue(request: web.Request) -> None:
    """Send `100 Continue` if the client waits for it before sending the body."""
    if request.headers.get(hdrs.EXPECT, "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # The interim response must not count as a part of the response.
        request.writer.output_size = 0


async def ignore_expect(_request: web.Request) -> None:
    """Ignore the header `Expect` for now. `send_continue` responds when the body is read."""


async def read_object(
    request: web.Request, room: limits.Room, bytes_max: int = limits.CONTROL_BYTES_MAX
) -> dict[str, Any]:
    """Read the body as a JSON object. A missing body is read as `{}`. Raises: the errors of `read`."""
    media_type(request, (JSON,))
    data = await read(request, room, min(room.limits.body_bytes_max, bytes_max))
    if not data:
        return {}
    value: Any = await in_turn(
        request,
        room,
        data,
        lambda text, count: strict.loads(text, limits.CONTROL_MARKS_MAX, count=count),
    )
    if not isinstance(value, dict):
        raise invalid("", "must be a JSON object")
    return value


async def expect_nothing(request: web.Request, room: limits.Room) -> None:
    """Refuse a JSON body with any member. A missing body and `{}` are allowed."""
    if request.body_exists:
        for name in await read_object(request, room):
            raise invalid(f"/{escaped(name)}", "is not a field of this request")


def expect_no_body(request: web.Request) -> None:
    """Refuse a DELETE request that has a body. Raises: BadRequest."""
    if request.body_exists:
        raise BadRequest("DELETE accepts no body: send the request without a body")


async def read_model(request: web.Request, room: limits.Room, model: type[M]) -> M:
    """Read the body as `model`. A missing body is `{}`. Raises: InvalidRequest, errors of `read`."""
    return parsed(await read_object(request, room), model)


def parsed(value: dict[str, Any], model: type[M]) -> M:
    """Validate a JSON object as `model`. Raises: InvalidRequest with the list of pydantic's errors."""
    if len(value) > _MEMBERS_MAX:
        raise invalid("", f"must have at most {_MEMBERS_MAX} members")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_of(error) from error
