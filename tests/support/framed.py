"""The channel's other end in tests: what a bookie or a gateway says, message by message."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from quorumlog.net.framed import Framed, connect
from quorumlog.net.identity import Role
from quorumlog.net.sessions import ExpectedServer
from quorumlog.wire import frames, versions
from quorumlog.wire.frames import Message


class Line:
    """One end of a connection of frames. Implements `framed.Speaker`."""

    framed: Framed

    def __init__(self) -> None:
        self._sent: deque[Message] = deque()
        self._came: asyncio.Queue[Message] = asyncio.Queue()

    def received(self, fields: bytes, run: bytes) -> None:
        self._came.put_nowait(Message(fields, run))

    def to_send(self) -> tuple[bytes, ...]:
        return frames.frame_of(self._sent.popleft()) if self._sent else ()

    def send(self, message: Message) -> None:
        """Send a message together with other queued messages."""
        self._sent.append(message)
        self.framed.announce()

    def write(self, data: bytes) -> None:
        """Send bytes that need not be a frame."""
        transport = self.transport
        if transport is not None:
            transport.write(data)

    @property
    def transport(self) -> asyncio.Transport | None:
        return self.framed._transport

    async def receive(self) -> Message | None:
        """The next message; None at the connection's end."""
        came: asyncio.Future[Message] = asyncio.ensure_future(self._came.get())
        both: list[asyncio.Future[Any]] = [came, self.framed.closed]
        await asyncio.wait(both, return_when="FIRST_COMPLETED")
        if came.done():
            return came.result()
        came.cancel()
        return None


@asynccontextmanager
async def channel(session: aiohttp.ClientSession, url: str, *names: str) -> AsyncIterator[Line]:
    """A channel to a bookie at this URL, by default of the version that this release speaks."""
    line = Line()
    offered = names or versions.upgrades(versions.CHANNEL)
    line.framed = await connect(
        session, f"{url}/v1/channel", line, offered, ExpectedServer(Role.BOOKIE)
    )
    try:
        yield line
    finally:
        line.framed.abort()
        await asyncio.wait([line.framed.closed])
        line.framed.closed.exception()
