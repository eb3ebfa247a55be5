"""A bookie's channel that misbehaves as a test tells it to. Real sockets, no storage."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from loadtest.ports import free_ports
from quorumlog.net.framed import accept
from quorumlog.protocol.messages import Status
from quorumlog.protocol.record import Run
from quorumlog.wire import versions
from quorumlog.wire.frames import (
    ChannelAnswer,
    Message,
    Request,
    encode_absent,
    encode_answers,
    parse_request,
)
from tests.support.framed import Line

Behave = Callable[[Request, Line], Awaitable[Message | None]]
"""What to send back for a request; None is silence. May close the connection itself."""


def ok(request: Request, status: Status = Status.OK, lac: int = -1, body: bytes = b"") -> Message:
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


async def well(request: Request, _line: Line) -> Message:
    """Answer OK at once."""
    return ok(request)


class Peer:
    """One listening bookie."""

    def __init__(self) -> None:
        self.behave: Behave = well
        self.seen: list[Request] = []
        self.connections = 0
        self.refusal: web.Response | None = None
        """The answer to each handshake."""
        self.version = versions.upgrades(versions.CHANNEL)[0]
        self.lines: set[Line] = set()
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
        for line in list(self.lines):
            line.framed.abort()

    async def _channel(self, request: web.Request) -> web.StreamResponse:
        if self.refusal is not None:
            return self.refusal
        line = Line()
        line.framed, answer = await accept(request, line, self.version)
        self.connections += 1
        self.lines.add(line)
        try:
            while (message := await line.receive()) is not None:
                asked = parse_request(*message)
                self.seen.append(asked)
                reported = await self.behave(asked, line)
                if reported is not None:
                    line.send(reported)
        finally:
            self.lines.discard(line)
            line.framed.abort()
        with suppress(OSError):
            await line.framed.closed
        return answer


@asynccontextmanager
async def peer() -> AsyncIterator[Peer]:
    """A peer that listens."""
    one = Peer()
    await one.start()
    try:
        yield one
    finally:
        await one.stop()
