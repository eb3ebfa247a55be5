"""A ledger over one WebSocket: appends with cumulative acknowledgements, and the tail.

Client to gateway: a binary message is frames to append; a text message is the JSON of an append,
or `{"tail":{"from":0,"encoding":"base64"}}` (encoding `frames` for binary messages). Gateway to
client, as text: `{"first_entry","last_entry","last_add_confirmed"}` for each acknowledged run, all
before it included; pages of the tail as `{"entries","next","last_add_confirmed","closed"}`, and
`{"end":{"last_entry"}}` once the ledger is closed; a problem object, after which the socket ends.
"""

import asyncio
import contextlib
from typing import Any, Final

from aiohttp import WSCloseCode, WSMsgType, web

from quorumlog.errors import BadRequest, QuorumLogError
from quorumlog.protocol.ids import ID_MAX
from quorumlog.wire import problems
from services.gateway.edge import strict
from services.gateway.edge.answers import entries_frames, entries_json
from services.gateway.edge.body import Room
from services.gateway.edge.middleware import REQUEST_ID
from services.gateway.edge.params import invalid
from services.gateway.edge.payloads import from_frames, from_json
from services.gateway.edge.pipe import Pipe
from services.gateway.edge.streams import Range, Source, beside, is_end
from services.gateway.interface import EngineInterface, ReadResult

_HEARTBEAT_S: Final = 20.0
"""Pings: below the 60 s after which proxies commonly cut what is silent."""
_CONTROL_BYTES_MAX: Final = 300
"""A message that asks for the tail is short; longer ones are not looked at for that."""
_ENCODINGS: Final = ("base64", "text", "json", "frames")


class LedgerSocket:
    """One client's socket on one ledger. Invariant: one stream of appends, at most one tail."""

    def __init__(
        self, engine: EngineInterface, room: Room, ledger_id: int, password: str | None
    ) -> None:
        self._engine = engine
        self._room = room
        self._ledger_id = ledger_id
        self._password = password
        self._pipe = Pipe(engine, room, ledger_id, password)
        self._tail: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        self._socket = web.WebSocketResponse(
            heartbeat=_HEARTBEAT_S, max_msg_size=room.limits.body_bytes_max, compress=False
        )

    async def serve(self, request: web.Request) -> web.WebSocketResponse:
        """Talk until either side ends it. Raises BadRequest where the client wants no socket."""
        socket = self._socket
        if not socket.can_prepare(request).ok:
            raise BadRequest("this route is for WebSockets: the request asks for no upgrade")
        socket.headers["X-Request-Id"] = request[REQUEST_ID]
        await socket.prepare(request)
        with contextlib.suppress(ConnectionError):
            async with beside(self._receive()), beside(self._follow()):
                async for appended in self._pipe.acknowledged():
                    await socket.send_str(
                        f'{{"first_entry":{appended.first},"last_entry":{appended.last},'
                        f'"last_add_confirmed":{appended.last_add_confirmed}}}'
                    )
            if self._pipe.error is not None:
                document = problems.to_bytes(self._pipe.error, request[REQUEST_ID])
                await socket.send_str(document.decode())
                await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=b"problem")
            await socket.close(code=WSCloseCode.GOING_AWAY)
        return socket

    async def _receive(self) -> None:
        """Take messages until the client ends, or one of them is wrong."""
        try:
            while True:
                message = await self._room.wait(self._socket.receive())
                if message is None or message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                    break
                await self._take(message.data)
        except QuorumLogError as error:
            self._pipe.finish(error)
        else:
            self._pipe.finish()

    async def _take(self, data: str | bytes) -> None:
        entry_bytes_max = self._room.limits.entry_bytes_max
        if isinstance(data, bytes):
            await self._pipe.put(from_frames(data, entry_bytes_max))
            return
        text = data.encode()
        if len(text) <= _CONTROL_BYTES_MAX and b"tail" in text:
            value = strict.loads(text)
            if type(value) is dict and "tail" in value:
                self._start_tail(value)
                return
        payloads, _ = from_json(text, entry_bytes_max)
        await self._pipe.put(payloads)

    def _start_tail(self, value: dict[str, Any]) -> None:
        asked = value["tail"]
        if len(value) > 1 or not isinstance(asked, dict) or asked.keys() - {"from", "encoding"}:
            raise invalid("/tail", "must be an object with from and encoding, and stand alone")
        first, encoding = asked.get("from", 0), asked.get("encoding", "base64")
        if type(first) is not int or not 0 <= first <= ID_MAX:
            raise invalid("/tail/from", f"must be an integer from 0 to {ID_MAX}")
        if encoding not in _ENCODINGS:
            raise invalid("/tail/encoding", f"must be one of {', '.join(_ENCODINGS)}")
        if self._tail.done():
            raise invalid("/tail", "this socket has a tail already")
        self._tail.set_result((first, encoding))

    async def _follow(self) -> None:
        """Send the tail, once it was asked for."""
        first, encoding = await self._tail
        source = Source(
            self._engine,
            self._room,
            Range(self._ledger_id, first, password=self._password),
        )
        try:
            async for page in source.tail():
                if page.runs:
                    await self._send_page(page, encoding)
                if is_end(page):
                    await self._socket.send_str(
                        f'{{"end":{{"last_entry":{page.last_add_confirmed}}}}}'
                    )
        except QuorumLogError as error:
            self._pipe.finish(error)
        except ConnectionError:
            self._pipe.finish()

    async def _send_page(self, page: ReadResult, encoding: str) -> None:
        if encoding == "frames":
            await self._socket.send_bytes(entries_frames(page.runs))
            return
        body = b'{"entries":[%b],"next":%d,"last_add_confirmed":%d,"closed":%b}' % (
            b",".join(entries_json(page.runs, encoding)),
            page.next,
            page.last_add_confirmed,
            b"true" if page.closed else b"false",
        )
        await self._socket.send_str(body.decode())
