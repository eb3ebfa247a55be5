"""Read a request's body: the right type, in time, and never more than there is room for.

Everything that can be refused by the headers alone is refused before a byte of the body is read.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Coroutine, Iterator
from typing import Any, Final, TypeVar

from aiohttp import hdrs, web
from pydantic import ValidationError

from quorumlog.errors import (
    BadRequest,
    Overloaded,
    RequestTimeout,
    TooLarge,
    UnsupportedMediaType,
)
from quorumlog.net.awake import awake_timeout
from quorumlog.net.budget import PEER, Budget
from quorumlog.net.json_bodies import M, invalid_of
from quorumlog.net.operations import JSON
from quorumlog.net.parameters import invalid
from quorumlog.wire import strict
from services.gateway.edge.follows import Follows
from services.gateway.edge.limits import Limits

T = TypeVar("T")

_FORM: Final = "application/x-www-form-urlencoded"
HELD: Final = web.RequestKey("held_bytes", int)
"""The request's key for what its body takes of the room; the middleware gives it back."""
KEPT: Final = web.RequestKey("kept_bytes", int)
"""The same for what its answer takes."""


class Room:
    """What is in work now, and whose it is. Each take is given back once."""

    __slots__ = ("_waits", "answers", "bodies", "follows", "is_ending", "limits", "requests")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.follows = Follows()
        self.requests = Budget(
            "requests in work", "REQUESTS_MAX", limits.requests_max, limits.peer_requests_max
        )
        self.bodies = Budget(
            "bytes being appended",
            "HELD_BYTES_MAX",
            limits.held_bytes_max,
            limits.peer_held_bytes_max,
        )
        self.answers = Budget(
            "bytes of answers that nobody has read yet",
            "ANSWERS_BYTES_MAX",
            limits.answers_bytes_max,
            limits.peer_answers_bytes_max,
        )
        self.is_ending = False
        self._waits: set[asyncio.Timeout] = set()

    async def wait(self, work: Awaitable[T]) -> T | None:
        """What `work` gives, which only waits and so takes no place among the requests in work;
        None where it was cut short because this process is about to end. Raises Overloaded.
        """
        if len(self._waits) >= self.limits.waiters_max:
            if isinstance(work, Coroutine):
                work.close()
            raise Overloaded("too many long polls and tails (WAITERS_MAX)")
        limit = asyncio.timeout(0 if self.is_ending else None)
        peer = PEER.get()
        self._waits.add(limit)
        self.requests.give(peer)
        try:
            async with limit:
                return await work
        except TimeoutError:
            if limit.expired():
                return None
            raise
        finally:
            self._waits.discard(limit)
            self.requests.back(peer)

    @property
    def waiters(self) -> int:
        """Requests that only wait."""
        return len(self._waits)

    def end_waits(self) -> None:
        """This process is about to end: nobody waits any more."""
        self.is_ending = True
        now = asyncio.get_running_loop().time()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(now)

    def hold(self, request: web.Request, count: int) -> None:
        """Take room for `count` bytes of a body that have come. Raises Overloaded."""
        self.bodies.take(PEER.get(), count)
        request[HELD] = request.get(HELD, 0) + count

    def release(self, request: web.Request) -> None:
        """Give back what a request's body took."""
        if count := request.get(HELD, 0):
            self.bodies.give(PEER.get(), count)

    def keep(self, request: web.Request, count: int) -> None:
        """Take room for `count` bytes of an answer. Raises Overloaded."""
        self.answers.take(PEER.get(), count)
        request[KEPT] = request.get(KEPT, 0) + count

    def let_go(self, request: web.Request, count: int | None = None) -> None:
        """Give back what a request's answer took: all of it, or a part that was read."""
        if self.answers.used and KEPT in request:
            count = request[KEPT] if count is None else count
            self.answers.give(PEER.get(), count)
            request[KEPT] -= count

    @contextlib.contextmanager
    def kept(self, count: int) -> Iterator[None]:
        """Take room for bytes of an answer while a block writes them. Raises Overloaded."""
        peer = PEER.get()
        self.answers.take(peer, count)
        try:
            yield
        finally:
            self.answers.give(peer, count)


def media_type(request: web.Request, known: tuple[str, ...]) -> str:
    """The body's media type without its parameters, one of `known`; the first one where there is
    no body.

    Raises: UnsupportedMediaType, whose detail says what to add to a curl command.
    """
    if request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() != "identity":
        raise UnsupportedMediaType(
            "the body has a Content-Encoding; send it as it is",
            headers={"Accept-Encoding": "identity"},
        )
    given = request.headers.get(hdrs.CONTENT_TYPE)
    if given == known[0]:
        return given
    media = (given or "").partition(";")[0].strip().lower()
    if media in known:
        return media
    if not request.body_exists or request.content_length == 0:
        return known[0]
    hint = f"add -H 'Content-Type: {known[0]}'"
    if media == _FORM:
        hint = f"curl -d sends {_FORM} by itself; {hint}"
    elif not media:
        hint = f"the request has no Content-Type; {hint}"
    raise UnsupportedMediaType(
        f"this route takes {', '.join(known)}: {hint}", headers={"Accept": ", ".join(known)}
    )


async def read(request: web.Request, room: Room, bytes_max: int) -> bytes:
    """The whole body. Raises TooLarge, RequestTimeout, Overloaded or BadRequest."""
    length = request.content_length
    if length is not None and length > bytes_max:
        raise TooLarge(f"the body has {length} bytes; the limit is {bytes_max}")
    if not request.body_exists:
        return b""
    content = request.content
    if content.is_eof():
        # It came together with the headers: nothing to wait for.
        data = content.read_nowait(-1)
        if length is None:
            _check_total(len(data), bytes_max)
        room.hold(request, len(data))
        return data
    # What is announced takes no room: it may never come. But what would not fit is refused at once.
    room.bodies.check(PEER.get(), length or 0)
    return await _read_slowly(request, room, bytes_max)


async def _read_slowly(request: web.Request, room: Room, bytes_max: int) -> bytes:
    await send_continue(request)
    limits = room.limits
    chunks: list[bytes] = []
    total = 0
    try:
        # In time awake: what came while this process stood still came in time.
        async with awake_timeout(limits.body_timeout_s) as limit:
            while chunk := await request.content.readany():
                total += len(chunk)
                _check_total(total, bytes_max)
                room.hold(request, len(chunk))
                chunks.append(chunk)
                limit.extend(len(chunk) / limits.body_rate_bytes_s_min)
    except TimeoutError as error:
        raise RequestTimeout(
            f"the body was not complete within {limits.body_timeout_s:g} s: {total} bytes came"
        ) from error
    except web.RequestPayloadError as error:
        raise BadRequest("the body's transfer encoding is broken, or it was cut short") from error
    return b"".join(chunks)


def _check_total(total: int, bytes_max: int) -> None:
    if total > bytes_max:
        raise TooLarge(f"the body has more than {bytes_max} bytes")


async def send_continue(request: web.Request) -> None:
    """Ask for the body, where the client waits to be asked."""
    if request.headers.get(hdrs.EXPECT, "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # The interim answer is not part of the answer, which has not begun.
        request.writer.output_size = 0


async def ignore_expect(_request: web.Request) -> None:
    """A route's `Expect` handler: the body is asked for when it is read, not before."""


async def read_object(request: web.Request, room: Room) -> dict[str, Any]:
    """A JSON object; no body is `{}`."""
    media_type(request, (JSON,))
    data = await read(request, room, room.limits.body_bytes_max)
    if not data:
        return {}
    value = strict.loads(data)
    if not isinstance(value, dict):
        raise invalid("", "must be a JSON object")
    return value


async def expect_nothing(request: web.Request, room: Room) -> None:
    """Refuse a body that has a member: no body and `{}` say the same."""
    if request.body_exists:
        for name in await read_object(request, room):
            raise invalid(f"/{name}", "is not a field of this request")


def expect_no_body(request: web.Request) -> None:
    """Refuse any body: DELETE has none."""
    if request.body_exists:
        raise BadRequest("DELETE takes no body")


async def read_model(request: web.Request, room: Room, model: type[M]) -> M:
    """A JSON object as a model; no body is `{}`. Raises: InvalidRequest."""
    return parsed(await read_object(request, room), model)


def parsed(value: object, model: type[M]) -> M:
    """A JSON value as a model. Raises: InvalidRequest, which lists all that pydantic found."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid_of(error) from error
