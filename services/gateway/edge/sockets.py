"""One WebSocket for appends, with cumulative acknowledgements, and for the tail.

Client to gateway: a binary message is frames to append; a text message is the JSON of an append,
or `{"tail":{"from":0,"encoding":"base64"}}` (encoding `frames` for binary messages). Gateway to
client, as text: a range of ids for each acknowledged run, all before it included; where the tail begins,
in the form of the question, if that is at the end; pages of the tail as reads give them, and `{"end":…}` once nothing can follow; a problem object, after which the
socket ends.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import orjson
from aiohttp import WSCloseCode, WSMsgType, web

from quorumlog.errors import BadRequest, QuorumLogError
from quorumlog.net.listen import wants_socket
from quorumlog.net.parameters import invalid
from quorumlog.protocol.ids import ID_MAX
from quorumlog.wire import problems, strict
from services.gateway.edge.arrivals import Arrivals
from services.gateway.edge.follows import P
from services.gateway.edge.middleware import REQUEST_ID
from services.gateway.edge.pages import PageStream
from services.gateway.edge.pipe import Pipe
from services.gateway.edge.room import Room
from services.gateway.edge.sending import LARGE_BYTES
from services.gateway.edge.streams import beside
from services.gateway.interface import Appended
from services.gateway.logs.reading import Start

log = logging.getLogger(__name__)

_HEARTBEAT_S: Final = 20.0
"""Pings: below the 60 s after which proxies commonly cut what is silent."""
_CONTROL_BYTES_MAX: Final = 300
"""A message that asks for the tail is short; longer ones are not looked at for that."""
_ENCODINGS: Final = ("base64", "text", "json", "frames")

T = TypeVar("T")
Message = str | bytes
Tail = AsyncGenerator[Message, None]


@dataclass(frozen=True, slots=True)
class Subject(Generic[T, P]):
    """What a socket appends to and follows."""

    pipe: Pipe[T]
    items: Callable[[Message], list[T]]
    """What a message appends. Raises BadRequest, InvalidRequest or TooLarge."""
    acknowledged: Callable[[Appended], dict[str, int]]
    """What tells of an acknowledged run."""
    stream: Callable[[Start], PageStream[P]]
    """The pages from a position on."""
    named_starts: tuple[str, ...] = ()
    """Positions that are no numbers."""


async def serve(request: web.Request, room: Room, subject: Subject[T, P]) -> web.WebSocketResponse:
    """Talk until either side ends it. Raises BadRequest where the client wants no socket."""
    socket = web.WebSocketResponse(
        heartbeat=_HEARTBEAT_S, max_msg_size=room.limits.body_bytes_max, compress=False
    )
    if not wants_socket(socket, request):
        raise BadRequest("this route is for WebSockets: the request asks for no upgrade")
    socket.headers["X-Request-Id"] = request[REQUEST_ID]
    await socket.prepare(request)
    arrivals = Arrivals(request, socket, room, subject.pipe.finish)
    talk = _Talk(socket, room, subject, arrivals)
    with contextlib.suppress(ConnectionError), contextlib.closing(arrivals):
        async with beside(talk.receive()), beside(talk.follow()):
            async for appended in subject.pipe.acknowledged():
                await socket.send_str(orjson.dumps(subject.acknowledged(appended)).decode())
        if subject.pipe.error is not None:
            document = problems.to_bytes(subject.pipe.error, request[REQUEST_ID])
            await socket.send_str(document.decode())
            await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=b"problem")
        await socket.close(code=WSCloseCode.GOING_AWAY)
    return socket


class _Talk(Generic[T, P]):
    """What goes on beside the acknowledgements. Invariant: at most one tail."""

    def __init__(
        self,
        socket: web.WebSocketResponse,
        room: Room,
        subject: Subject[T, P],
        arrivals: Arrivals,
    ) -> None:
        self._socket, self._room, self._subject = socket, room, subject
        self._arrivals = arrivals
        self._tail: asyncio.Future[Tail] = asyncio.get_running_loop().create_future()

    async def receive(self) -> None:
        """Take messages until the client ends, or one of them is wrong."""
        pipe = self._subject.pipe
        try:
            while True:
                message = await self._room.wait(self._socket.receive())
                if message is None or message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                    break
                self._arrivals.take(len(message.data))
                if not self._is_for_the_tail(message.data):
                    await pipe.put(self._subject.items(message.data))
                del message
                self._arrivals.take(0)
        except QuorumLogError as error:
            pipe.finish(error)
        except Exception:
            log.exception("unhandled-error")
            pipe.finish(QuorumLogError())
        else:
            pipe.finish()

    def _is_for_the_tail(self, data: Message) -> bool:
        """Whether a message asks for the tail, which then starts."""
        if isinstance(data, bytes) or len(data) > _CONTROL_BYTES_MAX or "tail" not in data:
            return False
        value = strict.loads(data.encode())
        if type(value) is not dict or "tail" not in value:
            return False
        asked = value["tail"]
        if len(value) > 1 or not isinstance(asked, dict) or asked.keys() - {"from", "encoding"}:
            raise invalid("/tail", "must be an object with from and encoding, and stand alone")
        encoding = asked.get("encoding", "base64")
        if encoding not in _ENCODINGS:
            raise invalid("/tail/encoding", f"must be one of {', '.join(_ENCODINGS)}")
        if self._tail.done():
            raise invalid("/tail", "this socket has a tail already")
        self._tail.set_result(_messages(self._subject.stream(self._start(asked)), encoding))
        return True

    def _start(self, asked: dict[str, Any]) -> Start:
        """Where the tail starts. Raises: InvalidRequest."""
        start: Start = asked.get("from", 0)
        is_id = type(start) is int and 0 <= start <= ID_MAX
        if not is_id and start not in self._subject.named_starts:
            raise invalid("/tail/from", f"must be an integer from 0 to {ID_MAX}")
        return start

    async def follow(self) -> None:
        """Send the tail, once it was asked for."""
        tail = await self._tail
        try:
            async with contextlib.aclosing(tail):
                async for message in tail:
                    is_large = len(message) > LARGE_BYTES
                    # Twice: the page of which it was made is held as long.
                    with self._room.kept(2 * len(message)) if is_large else nullcontext():
                        if isinstance(message, bytes):
                            await self._socket.send_bytes(message)
                        else:
                            await self._socket.send_str(message)
        except QuorumLogError as error:
            self._subject.pipe.finish(error)
        except ConnectionError:
            self._subject.pipe.finish()
        except Exception:
            log.exception("unhandled-error")
            self._subject.pipe.finish(QuorumLogError())


async def _messages(stream: PageStream[P], encoding: str) -> Tail:
    """Pages as they are read, and the end; before them where they begin, if that is the end."""
    pages, begins_at_end = stream.pages, stream.begins_at_end

    def message(page: P) -> Message:
        return (
            pages.frames(page) if encoding == "frames" else pages.message(page, encoding).decode()
        )

    async with contextlib.aclosing(stream.tail()) as tail:
        async for told in tail:
            if begins_at_end:
                yield orjson.dumps({"tail": {"from": stream.begin(told.page)}}).decode()
                begins_at_end = False
            if pages.count(told.page):
                yield told.form(("socket", encoding), message)
            if pages.is_end(told.page):
                yield orjson.dumps({"end": pages.ending(told.page)}).decode()
