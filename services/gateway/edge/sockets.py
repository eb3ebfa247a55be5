"""One WebSocket for appends, with cumulative acknowledgements, and for the tail.

Client to gateway: a binary message is frames to append; a text message is the JSON of an append,
or `{"tail":{"from":0,"encoding":"base64"}}` (encoding `frames` for binary messages). Gateway to
client, as text: a range of ids for each acknowledged run, all before it included; pages of the
tail as reads give them, and `{"end":…}` once nothing can follow; a problem object, after which the
socket ends.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final, Protocol

from aiohttp import WSCloseCode, WSMsgType, web

from quorumlog.errors import BadRequest, InvalidRequest, QuorumLogError
from quorumlog.protocol.ids import ID_MAX
from quorumlog.wire import problems, strict
from services.gateway.edge.answers import entries_frames, entries_json
from services.gateway.edge.body import Room
from services.gateway.edge.middleware import REQUEST_ID
from services.gateway.edge.params import invalid
from services.gateway.edge.payloads import from_frames, from_json
from services.gateway.edge.pipe import Pipe
from services.gateway.edge.streams import Range, Source, beside, is_end
from services.gateway.interface import Appended, EngineInterface, ReadResult

log = logging.getLogger(__name__)

_HEARTBEAT_S: Final = 20.0
"""Pings: below the 60 s after which proxies commonly cut what is silent."""
_CONTROL_BYTES_MAX: Final = 300
"""A message that asks for the tail is short; longer ones are not looked at for that."""
_ENCODINGS: Final = ("base64", "text", "json", "frames")

Message = str | bytes
Tail = AsyncGenerator[Message, None]


class Subject(Protocol):
    """What a socket appends to and follows."""

    pipe: Pipe

    def payloads(self, data: Message) -> list[bytes]:
        """What a message appends. Raises BadRequest, InvalidRequest or TooLarge."""
        ...

    def acknowledged(self, appended: Appended) -> str:
        """The message that tells of an acknowledged run."""
        ...

    def tail(self, start: Any, encoding: str) -> Tail:
        """The messages of the tail. Raises InvalidRequest where it can't start there."""
        ...


async def serve(request: web.Request, room: Room, subject: Subject) -> web.WebSocketResponse:
    """Talk until either side ends it. Raises BadRequest where the client wants no socket."""
    socket = web.WebSocketResponse(
        heartbeat=_HEARTBEAT_S, max_msg_size=room.limits.body_bytes_max, compress=False
    )
    if not socket.can_prepare(request).ok:
        raise BadRequest("this route is for WebSockets: the request asks for no upgrade")
    socket.headers["X-Request-Id"] = request[REQUEST_ID]
    await socket.prepare(request)
    talk = _Talk(socket, room, subject)
    with contextlib.suppress(ConnectionError):
        async with beside(talk.receive()), beside(talk.follow()):
            async for appended in subject.pipe.acknowledged():
                await socket.send_str(subject.acknowledged(appended))
        if subject.pipe.error is not None:
            document = problems.to_bytes(subject.pipe.error, request[REQUEST_ID])
            await socket.send_str(document.decode())
            await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=b"problem")
        await socket.close(code=WSCloseCode.GOING_AWAY)
    return socket


class _Talk:
    """What goes on beside the acknowledgements. Invariant: at most one tail."""

    def __init__(self, socket: web.WebSocketResponse, room: Room, subject: Subject) -> None:
        self._socket, self._room, self._subject = socket, room, subject
        self._tail: asyncio.Future[Tail] = asyncio.get_running_loop().create_future()

    async def receive(self) -> None:
        """Take messages until the client ends, or one of them is wrong."""
        pipe = self._subject.pipe
        try:
            while True:
                message = await self._room.wait(self._socket.receive())
                if message is None or message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                    break
                if not self._is_for_the_tail(message.data):
                    await pipe.put(self._subject.payloads(message.data))
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
        self._tail.set_result(self._subject.tail(asked.get("from", 0), encoding))
        return True

    async def follow(self) -> None:
        """Send the tail, once it was asked for."""
        tail = await self._tail
        try:
            async with contextlib.aclosing(tail):
                async for message in tail:
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


def first_of(start: Any) -> int:
    """The id at which a tail starts."""
    if type(start) is not int or not 0 <= start <= ID_MAX:
        raise bad_start(f"must be an integer from 0 to {ID_MAX}")
    return start


def bad_start(detail: str) -> InvalidRequest:
    """The error for a tail that can't start where it was asked to."""
    return invalid("/tail/from", detail)


class LedgerSubject:
    """A ledger behind a socket."""

    def __init__(
        self, engine: EngineInterface, room: Room, ledger_id: int, password: str | None
    ) -> None:
        self.pipe = Pipe(engine, room, ledger_id, password)
        self._entry_bytes_max = room.limits.entry_bytes_max
        self._source: Callable[[int], Source] = lambda first: Source(
            engine, room, Range(ledger_id, first, password=password)
        )

    def payloads(self, data: Message) -> list[bytes]:
        """Frames, or the JSON of an append."""
        if isinstance(data, bytes):
            return from_frames(data, self._entry_bytes_max)
        return from_json(data.encode(), self._entry_bytes_max)[0]

    def acknowledged(self, appended: Appended) -> str:
        """`{"first_entry","last_entry","last_add_confirmed"}`."""
        return (
            f'{{"first_entry":{appended.first},"last_entry":{appended.last},'
            f'"last_add_confirmed":{appended.last_add_confirmed}}}'
        )

    def tail(self, start: Any, encoding: str) -> Tail:
        """Pages as `{"entries","next","last_add_confirmed","closed"}`, and the end."""
        return self._follow(self._source(first_of(start)), encoding)

    async def _follow(self, source: Source, encoding: str) -> Tail:
        async with contextlib.aclosing(source.tail()) as pages:
            async for told in pages:
                page = told.page
                if page.runs:
                    yield told.form(("socket", encoding), lambda page: _page(page, encoding))
                if is_end(page):
                    yield f'{{"end":{{"last_entry":{page.last_add_confirmed}}}}}'


def _page(page: ReadResult, encoding: str) -> Message:
    if encoding == "frames":
        return entries_frames(page.runs)
    body = b'{"entries":[%b],"next":%d,"last_add_confirmed":%d,"closed":%b}' % (
        b",".join(entries_json(page.runs, encoding)),
        page.next,
        page.last_add_confirmed,
        b"true" if page.closed else b"false",
    )
    return body.decode()
