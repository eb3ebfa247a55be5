"""The hot path: one WebSocket per peer, with many pipelined requests.

There is no task per request. A request is judged when it is parsed; its answer is queued once the
disk has what the answer rests on. One task per connection sends all queued answers in one message.
The bookie stops reading from a peer that does not read its answers or has too much in flight, so
that TCP applies back-pressure.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from aiohttp import WSCloseCode, WSMsgType, web

from quorumlog.errors import Overloaded
from quorumlog.protocol.messages import Status
from quorumlog.protocol.replica import (
    AddAsked,
    FenceAsked,
    LacAsked,
    LacTold,
    ReadAsked,
    RowTold,
    Verdict,
)
from quorumlog.wire import frames
from quorumlog.wire.frames import BadFrame, ChannelAnswer, Op, Request
from services.bookie.store import ReadAnswer, Store

log = logging.getLogger(__name__)

MESSAGE_BYTES_MAX: Final = 80 * 1024 * 1024
"""Above the largest run (64 MiB of payload) with its columns."""

OUT_BYTES_MAX: Final = 16 * 1024 * 1024
"""Queued answers to a slow peer; above this limit the bookie stops reading from it."""

IN_FLIGHT_BYTES_MAX: Final = 128 * 1024 * 1024
IN_FLIGHT_MAX: Final = 16_384
"""Per peer. Above either limit the bookie stops reading until some requests are answered."""

SEND_BYTES_MAX: Final = 2 * 1024 * 1024
"""A message that has reached this size takes no further answer."""

_ANSWER_BYTES: Final = 64


class Peer:
    """One connection."""

    def __init__(self, store: Store, socket: web.WebSocketResponse) -> None:
        """Serve `store` over `socket`."""
        self._store = store
        self._socket = socket
        self._out: deque[tuple[str, ChannelAnswer]] = deque()
        self._out_bytes = 0
        self._in_flight = 0
        self._in_flight_bytes = 0
        self._wake: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()

    async def serve(self) -> None:
        """Handle requests until the peer disconnects, or answers can't be sent any more: then the
        connection breaks, so that the peer knows that nothing comes.
        """
        both = [asyncio.create_task(work) for work in (self._receive_all(), self._send_all())]
        try:
            await asyncio.wait(both, return_when="FIRST_COMPLETED")
        finally:
            for task in both:
                task.cancel()
            for result in await asyncio.gather(*both, return_exceptions=True):
                if isinstance(result, Exception):
                    log.error("channel-broke", exc_info=result)

    async def _receive_all(self) -> None:
        while True:
            message = await self._socket.receive()
            if message.type is not WSMsgType.BINARY:
                return
            try:
                request = frames.parse_request(message.data)
            except BadFrame as error:
                log.warning("channel-bad-frame", extra={"why": str(error)})
                await self._socket.close(code=WSCloseCode.PROTOCOL_ERROR)
                return
            # A read counts with the answer that it may get, which nobody has read yet.
            self._receive(request, len(message.data) + min(request.bytes_max, OUT_BYTES_MAX))
            while self._is_full():
                self._room = self._loop.create_future()
                await self._room
            if self._store.pending.is_crowded:
                # The disk is behind: TCP slows the peer down before adds have to be refused.
                await self._store.pending.wait_for_room()

    def _is_full(self) -> bool:
        return (
            self._out_bytes > OUT_BYTES_MAX
            or self._in_flight > IN_FLIGHT_MAX
            or self._in_flight_bytes > IN_FLIGHT_BYTES_MAX
        )

    def _receive(self, request: Request, size: int) -> None:
        self._in_flight += 1
        self._in_flight_bytes += size
        # Release the run of an add: its payload must not stay in memory until the answer.
        asked = request._replace(run=None, row=None)

        def answer(status: Status, lac: int, body: bytes = b"", rest: bytes = b"") -> None:
            self._answer(asked, size, status, lac, body, rest)

        try:
            dispatch(self._store, request, answer)
        except Overloaded:
            answer(Status.UNKNOWN, -1)
        except Exception:
            # An unexpected error is no knowledge of what is stored.
            log.exception("request-failed", extra={"ledger": request.ledger_id})
            answer(Status.UNKNOWN, -1)

    def _answer(
        self, request: Request, size: int, status: Status, lac: int, body: bytes, rest: bytes
    ) -> None:
        self._in_flight -= 1
        self._in_flight_bytes -= size
        op, request_id, ledger_id, first, last, member = request[:6]
        # A request to an older incarnation is answered in that one's name (rule 15).
        name = self._store.me if status is Status.NOT_MINE else member
        answer = ChannelAnswer(op, status, request_id, ledger_id, first, last, lac, body, rest)
        self._out.append((name, answer))
        self._out_bytes += _size(answer)
        wake = self._wake
        if wake is not None and not wake.done():
            wake.set_result(None)

    async def _send_all(self) -> None:
        out = self._out
        while True:
            while out:
                name = out[0][0]
                answers: list[ChannelAnswer] = []
                size = 0
                while out and out[0][0] == name and size < SEND_BYTES_MAX:
                    answer = out.popleft()[1]
                    answers.append(answer)
                    size += _size(answer)
                message = frames.encode_answers(name, answers)
                try:
                    await self._socket.send_bytes(message)
                except (ConnectionError, RuntimeError):
                    return  # the peer has gone
                self._out_bytes -= size
            room = self._room
            if room is not None and not room.done() and not self._is_full():
                room.set_result(None)
            self._wake = self._loop.create_future()
            await self._wake


def _size(answer: ChannelAnswer) -> int:
    return _ANSWER_BYTES + len(answer.body) + len(answer.rest)


def dispatch(
    store: Store, request: Request, answer: Callable[[Status, int, bytes, bytes], None]
) -> None:
    """Pass a request to the store; `answer(status, lac, body, rest)` is called once."""

    def verdict(given: Verdict) -> None:
        answer(given.status, given.last_add_confirmed, b"", b"")

    def found(given: ReadAnswer) -> None:
        if given.status is not Status.OK:
            answer(given.status, given.last_add_confirmed, b"", b"")
            return
        absent = frames.encode_absent(given.absent)
        answer(Status.OK, given.last_add_confirmed, absent, given.run or b"")

    member, ledger_id = request.member, request.ledger_id
    match request.op:
        case Op.ADD:
            assert request.run is not None
            store.add(
                AddAsked(
                    member,
                    request.run,
                    request.ledger_key,
                    request.recovery,
                    named_by=request.named_by,
                    row=request.row,
                ),
                verdict,
            )
        case Op.READ:
            store.read(
                ledger_id,
                ReadAsked(
                    member,
                    request.first,
                    request.last,
                    request.fence,
                    request.ledger_key,
                    request.from_disk,
                ),
                request.bytes_max,
                found,
            )
        case Op.FENCE:
            store.ask(ledger_id, FenceAsked(member, request.ledger_key), verdict)
        case Op.READ_LAC:
            store.ask(ledger_id, LacAsked(member), verdict)
        case Op.WRITE_LAC:
            store.ask(ledger_id, LacTold(member, request.last, request.ledger_key), verdict)
        case Op.KEEP_ROW:
            assert request.row is not None
            store.ask(ledger_id, RowTold(member, request.row, request.ledger_key), verdict)
