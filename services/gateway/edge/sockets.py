"""A WebSocket for appends, with cumulative acknowledgements, and for the tail.

The client sends binary messages with frames to append, text messages with the JSON of an append, or
`{"tail":{"from":0,"encoding":"base64"}}`. With the encoding `frames`, the gateway sends the tail as
binary messages. All other messages are text:
- a range of ids for each acknowledged run, which also acknowledges all earlier runs;
- `{"tail":{"from":7}}` with the resolved offset of a tail from `latest`, `-N` or a time;
- pages of the tail in the format of reads, and `{"end":…}` at the final end;
- a problem object, after which the socket closes.

With the subprotocol `quorumlog.appends` there is no tail. Each message is one append, and gets the
same response as over HTTP before the next message is processed. A problem object answers the first
message that has no response yet. Later messages are ignored.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import orjson
from aiohttp import WSCloseCode, WSMessage, WSMsgType, web

from quorumlog import header
from quorumlog.errors import BadRequest, QuorumLogError, ShuttingDown
from quorumlog.net.connections import end_limits, wants_socket
from quorumlog.net.parameters import invalid
from quorumlog.net.responses import REQUEST_ID
from quorumlog.wire import problems, strict
from services.gateway.edge.access.scopes import Scope, caller_of, check_scope
from services.gateway.edge.http.arrivals import Arrivals
from services.gateway.edge.http.follows import P
from services.gateway.edge.http.limits import Room
from services.gateway.edge.http.pipe import Pipe, beside
from services.gateway.edge.http.sending import LARGE_BYTES
from services.gateway.edge.reads import PageStream
from services.gateway.edge.starts import created_at_of, id_of_json
from services.gateway.interface import EntriesAppended
from services.gateway.logs.values import Start

log = logging.getLogger(__name__)

_HEARTBEAT_S: Final = 20.0
"""Interval of pings. Proxies commonly close a silent connection after 60 s."""
_CONTROL_BYTES_MAX: Final = 300
"""Maximum length of a request for the tail. Longer messages are appends."""
_CONDITIONS_BYTES_MAX: Final = 8192
"""Maximum length of a request for the tail of a log, which may have conditions."""
_TAIL: Final = ("from", "encoding", "created")
_ENCODINGS: Final = ("base64", "text", "json", "frames")

T = TypeVar("T")
Message = str | bytes
"""The data of one WebSocket message: a JSON text, or binary frames."""
Tail = AsyncGenerator[Message, None]


@dataclass(frozen=True, slots=True)
class SocketTarget(Generic[T, P]):
    """The ledger or log that a socket appends to and follows."""

    pipe: Pipe[T]
    items: Callable[[WSMessage], Awaitable[list[T]]]
    """Parses a message to the items to append. `message.data` is bytes, also in text messages.

    Raises: BadRequest, InvalidRequest, TooLarge.
    """
    acknowledged: Callable[[EntriesAppended], dict[str, int]]
    """Builds the JSON members that acknowledge a run."""
    append: Callable[[list[T]], Awaitable[bytes]]
    """Appends a message's items, and returns the HTTP response's body. Raises: QuorumLogError."""
    stream: Callable[[Start, str | None, Mapping[str, Any]], PageStream[P]]
    """Creates the stream of pages from a start, a `created_at` (default: the socket's own), and the
    conditions of a request. Raises: InvalidRequest.
    """
    start: Callable[[object, str], Start] = id_of_json
    """Parses a tail's start from a JSON value and its pointer. Raises: InvalidRequest."""
    conditions: Collection[str] = ()
    """The members of a request for the tail that select items."""


async def serve(
    request: web.Request, room: Room, target: SocketTarget[T, P]
) -> web.WebSocketResponse:
    """Serve a socket until either side closes it. Raises: BadRequest without `Upgrade`."""
    socket = web.WebSocketResponse(
        heartbeat=_HEARTBEAT_S,
        max_msg_size=room.limits.body_bytes_max,
        compress=False,
        autoping=False,  # `Arrivals` answers pings
        decode_text=False,  # the JSON parser reads bytes, and refuses invalid UTF-8
        protocols=(header.APPENDS_PROTOCOL,),
    )
    if not wants_socket(socket, request):
        raise BadRequest("this route is only for WebSockets: send an Upgrade header")
    socket.headers["X-Request-Id"] = request[REQUEST_ID]
    await socket.prepare(request)
    if socket.ws_protocol == header.APPENDS_PROTOCOL:
        with contextlib.suppress(ConnectionError):
            await _Appends(request, socket, room, target).serve()
        return socket
    pipe = target.pipe
    arrivals = Arrivals(request, socket, room, pipe.finish)
    session = _Session(request, socket, room, target, arrivals)
    with contextlib.suppress(ConnectionError), contextlib.closing(arrivals):
        async with (
            contextlib.aclosing(pipe.acknowledged()) as runs,
            beside(session.receive()),
            beside(session.follow()),
        ):
            async for appended in runs:
                await session.send(orjson.dumps(target.acknowledged(appended)).decode())
        if pipe.error is not None:
            await _refuse(request, socket, pipe.error)
        await socket.close(code=WSCloseCode.GOING_AWAY)
    return socket


async def _refuse(
    request: web.Request, socket: web.WebSocketResponse, error: QuorumLogError
) -> None:
    """Send a problem and close the socket."""
    await socket.send_str(problems.to_bytes(error, request[REQUEST_ID]).decode())
    await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=b"problem")


@dataclass(eq=False)
class _Appends(Generic[T, P]):
    """A socket for appends only, which appends one message at a time. An error ends the socket."""

    _request: web.Request
    _socket: web.WebSocketResponse
    _room: Room
    _target: SocketTarget[T, P]
    _refused: QuorumLogError | None = None
    _limit: asyncio.Timeout | None = None

    def __post_init__(self) -> None:
        self._usage = caller_of(self._request).usage
        self._arrivals = Arrivals(self._request, self._socket, self._room, self._end_by)

    def _end_by(self, error: QuorumLogError) -> None:
        """Stop waiting for the next message, because the message exceeds a limit."""
        self._refused = error
        if self._limit is not None:
            end_limits([self._limit])

    async def serve(self) -> None:
        """Append messages until either side closes the socket."""
        with contextlib.closing(self._arrivals):
            try:
                check_scope(self._request, Scope.APPEND)
                while await self._append_next():
                    pass
                self._check_going_on()
            except QuorumLogError as error:
                await _refuse(self._request, self._socket, error)
            except (asyncio.CancelledError, ConnectionError):
                raise
            except Exception:
                log.exception("unhandled-error")
                await _refuse(self._request, self._socket, QuorumLogError())
            await self._socket.close(code=WSCloseCode.GOING_AWAY)

    def _check_going_on(self) -> None:
        """Raise ShuttingDown if this process shuts down."""
        if self._room.is_ending:
            raise ShuttingDown("this gateway is shutting down: use another gateway")

    async def _next(self) -> WSMessage | None:
        """Receive a message, or None at the end. Raises: Overloaded, TooLarge, ShuttingDown."""
        self._check_going_on()
        try:
            async with asyncio.timeout(None) as self._limit:
                if self._refused is None:
                    return await self._arrivals.receive()
        except TimeoutError:
            pass
        finally:
            self._limit = None
        assert self._refused is not None, "only a refusal expires the limit"
        raise self._refused

    async def _append_next(self) -> bool:
        """Append the next message. Returns False if the socket ended first."""
        message = await self._next()
        if message is None or message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
            return False
        self._arrivals.take(len(message.data))
        await self._arrivals.paced(message.data)
        answer = await self._target.append(await self._target.items(message))
        if self._usage is not None:
            self._usage.charge(len(answer))
        self._arrivals.take(0)
        await self._socket.send_str(answer.decode())
        return True


@dataclass(eq=False)
class _Session(Generic[T, P]):
    """A socket for appends, acknowledgements, and at most one tail."""

    _request: web.Request
    _socket: web.WebSocketResponse
    _room: Room
    _target: SocketTarget[T, P]
    _arrivals: Arrivals

    def __post_init__(self) -> None:
        self._usage = caller_of(self._request).usage
        self._tail: asyncio.Future[Tail] = asyncio.get_running_loop().create_future()

    async def receive(self) -> None:
        """Receive messages until the client closes the socket or sends an invalid message."""
        pipe = self._target.pipe
        with pipe.failing():
            while True:
                message = await self._arrivals.receive()
                if message is None or message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                    break
                self._arrivals.take(len(message.data))
                await self._arrivals.paced(message.data)
                if not self._is_for_the_tail(message):
                    check_scope(self._request, Scope.APPEND)
                    await pipe.put(await self._target.items(message))
                del message
                self._arrivals.take(0)
            pipe.finish()

    def _is_for_the_tail(self, message: WSMessage) -> bool:
        """Start the tail if the message requests it, or return False. Raises: InvalidRequest."""
        data = message.data
        longest = _CONDITIONS_BYTES_MAX if self._target.conditions else _CONTROL_BYTES_MAX
        if message.type != WSMsgType.TEXT or len(data) > longest or b"tail" not in data:
            return False
        value = strict.loads(data)
        if type(value) is not dict or "tail" not in value:
            return False
        asked = value["tail"]
        known = [*_TAIL, *self._target.conditions]
        if len(value) > 1 or not isinstance(asked, dict) or asked.keys() - {*known}:
            names = f"{', '.join(known[:-1])} or {known[-1]}"
            raise invalid("/tail", f"must be the only member, and an object with {names}")
        encoding = asked.get("encoding", "base64")
        if encoding not in _ENCODINGS:
            raise invalid("/tail/encoding", f"must be one of {', '.join(_ENCODINGS)}")
        check_scope(self._request, Scope.READ)
        if self._tail.done():
            raise invalid("/tail", "must be sent only once: this socket already has a tail")
        start = self._target.start(asked.get("from", 0), "/tail/from")
        created_at = asked.get("created")
        if created_at is not None:
            created_at = created_at_of(str(created_at), "/tail/created")
        chosen = {name: asked[name] for name in self._target.conditions if name in asked}
        stream = self._target.stream(start, created_at, chosen)
        self._tail.set_result(_messages(stream, encoding))
        return True

    async def follow(self) -> None:
        """Wait for a request for the tail, then send the tail."""
        tail = await self._tail
        with self._target.pipe.failing():
            async with contextlib.aclosing(tail):
                async for message in tail:
                    is_large = len(message) > LARGE_BYTES
                    # Charge twice the size, because the encoded page stays in memory during the write.
                    with self._room.kept(2 * len(message)) if is_large else nullcontext():
                        await self.send(message)

    async def send(self, message: Message) -> None:
        """Send a message, and charge its bytes to the token's quotas."""
        # aiohttp counts the bytes of responses, but not of WebSocket messages.
        if self._usage is not None:
            self._usage.charge(len(message))
        if isinstance(message, bytes):
            await self._socket.send_bytes(message)
        else:
            await self._socket.send_str(message)


async def _messages(stream: PageStream[P], encoding: str) -> Tail:
    """Yield the resolved offset of a relative start, the pages as messages, and the end."""
    pages, is_sought = stream.pages, stream.is_sought

    def message(page: P) -> Message:
        return (
            pages.frames(page) if encoding == "frames" else pages.message(page, encoding).decode()
        )

    async with contextlib.aclosing(stream.tail()) as tail:
        async for shared in tail:
            if is_sought:
                yield orjson.dumps({"tail": {"from": stream.begin(shared.page)}}).decode()
                is_sought = False
            is_shown = encoding != "frames" and pages.has_moved(shared.page)
            if is_shown or pages.count(shared.page):
                yield shared.form(("socket", encoding), message)
            if pages.is_end(shared.page):
                yield orjson.dumps({"end": pages.ending(shared.page)}).decode()
