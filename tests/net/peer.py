"""A bookie's channel that misbehaves as a test tells it to. Real sockets, no storage."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

from aiohttp import WSMsgType, web

from loadtest.ports import free_ports
from quorumlog.protocol.messages import Status
from quorumlog.protocol.record import Run
from quorumlog.wire.frames import (
    ChannelAnswer,
    Request,
    encode_absent,
    encode_answers,
    parse_request,
)

Behave = Callable[[Request, web.WebSocketResponse], Awaitable[bytes | None]]
"""What to send back for a request; None is silence. May close the connection itself."""


def ok(request: Request, status: Status = Status.OK, lac: int = -1, body: bytes = b"") -> bytes:
    """The answer of a bookie that behaves."""
    return encode_answers(
        request.member,
        [
            ChannelAnswer(
                request.op,
                status,
                request.request_id,
                request.ledger_id,
                request.first,
                request.last,
                lac,
                body,
            )
        ],
    )


def read_body(run: Run | bytes | None, absent: Iterable[tuple[int, int]] = ()) -> bytes:
    """The body of a READ's answer; a run may be given as its stored bytes."""
    return encode_absent(absent) + (run.body if isinstance(run, Run) else run or b"")


async def well(request: Request, _socket: web.WebSocketResponse) -> bytes:
    """Answer OK at once."""
    return ok(request)


class Peer:
    """One listening bookie."""

    def __init__(self) -> None:
        self.behave: Behave = well
        self.seen: list[Request] = []
        self.connections = 0
        self.refusal: dict[str, str] | None = None
        """Headers with which each handshake is refused."""
        self.sockets: set[web.WebSocketResponse] = set()
        self.port = free_ports(1)[0]
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/channel", self._channel)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self.cut()
            await self._runner.cleanup()
            self._runner = None

    async def cut(self) -> None:
        """Break all connections without a goodbye."""
        for socket in list(self.sockets):
            transport = socket._req.transport if socket._req is not None else None
            if transport is not None:
                transport.abort()

    async def _channel(self, request: web.Request) -> web.StreamResponse:
        if self.refusal is not None:
            return web.Response(status=400, headers=self.refusal)
        socket = web.WebSocketResponse(max_msg_size=1 << 30)
        await socket.prepare(request)
        self.connections += 1
        self.sockets.add(socket)
        try:
            async for message in socket:
                if message.type is WSMsgType.BINARY:
                    asked = parse_request(message.data)
                    self.seen.append(asked)
                    answer = await self.behave(asked, socket)
                    if answer is not None and not socket.closed:
                        await socket.send_bytes(answer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.sockets.discard(socket)
        return socket


@asynccontextmanager
async def peer() -> AsyncIterator[Peer]:
    """A peer that listens."""
    one = Peer()
    await one.start()
    try:
        yield one
    finally:
        await one.stop()
