"""A TCP proxy that cuts connections where a test says: after so many bytes, either way."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

from loadtest.ports import free_ports
from tests.support.waiting import turns

Direction = Literal["up", "down"]
"""`up` is from the client to the server."""

_CHUNK_BYTES = 1 << 16

_ACCEPT_TURNS = 10
"""Of the loop: from the accept of a connection until it is handed over there are three."""


@dataclass(slots=True)
class Proxy:
    """Forwards 127.0.0.1:port to a server.

    `cut_after` is a plan for the next connections: each takes one item, the direction and the
    number of its bytes that are let through before both ends are reset; those without an item
    live. `is_down` resets every new connection at once; `down_after_cut` sets it with a cut.
    """

    port: int
    host_up: str
    port_up: int
    cut_after: list[tuple[Direction, int]] = field(default_factory=list)
    is_down: bool = False
    down_after_cut: bool = False
    is_silent: bool = False
    """Takes connections and bytes, and forwards nothing: a server that hangs."""
    cut_around: list[tuple[bytes, bool]] = field(default_factory=list)
    """Plans for what is said to the server, on any connection: the next piece that has these bytes
    in it is the connection's last. True: the server still gets it."""
    held: set[Direction] = field(default_factory=set)
    """Bytes of these directions wait, as over a link that is cut and sends them again later."""
    cuts: int = 0
    _freed: asyncio.Event = field(default_factory=asyncio.Event)
    _generation: int = 0
    _open: set[asyncio.StreamWriter] = field(default_factory=set)
    _serving: set[asyncio.Task[None]] = field(default_factory=set)

    def url(self, url_up: str) -> str:
        """The same URL (or DSN) by way of the proxy."""
        parts = urlsplit(url_up)
        login, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{login}{at}127.0.0.1:{self.port}"))

    def cut_all(self) -> None:
        """Reset every connection that is open now, or about to be."""
        self._generation += 1
        for writer in list(self._open):
            _reset(writer)

    def hold(self, *directions: Direction) -> None:
        """Hold these directions from now on, and no others."""
        self.held = set(directions)
        self._freed.set()
        self._freed = asyncio.Event()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection came."""
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def end(self) -> None:
        """Close the listener and all connections, also those that were accepted last."""
        self.hold()
        await turns(_ACCEPT_TURNS)
        while self._serving:
            self.cut_all()
            await asyncio.wait(self._serving)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        plan = self.cut_after.pop(0) if self.cut_after else None
        if self.is_down:
            _reset(writer)
            return
        generation = self._generation
        try:
            up_reader, up_writer = await asyncio.open_connection(self.host_up, self.port_up)
        except OSError:
            _reset(writer)
            return
        if generation != self._generation:  # cut_all came while we connected
            _reset(writer)
            _reset(up_writer)
            return
        both = (writer, up_writer)
        self._open.update(both)
        try:
            await asyncio.gather(
                self._pump(reader, up_writer, _left(plan, "up"), both, is_up=True),
                self._pump(up_reader, writer, _left(plan, "down"), both),
            )
        finally:
            self._open.difference_update(both)
            for end in both:
                end.close()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        left: int | None,
        both: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
        *,
        is_up: bool = False,
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_CHUNK_BYTES):
                if self.is_silent:
                    continue
                while ("up" if is_up else "down") in self.held:
                    await self._freed.wait()
                if is_up and self.cut_around and self.cut_around[0][0] in data:
                    _, is_let_through = self.cut_around.pop(0)
                    if is_let_through:
                        writer.write(data)
                        await writer.drain()
                    self.cuts += 1
                    self.is_down = self.is_down or self.down_after_cut
                    for end in both:
                        end.close() if end is writer and is_let_through else _reset(end)
                    return
                if left is not None and len(data) >= left:
                    writer.write(data[:left])
                    # What was let through is to arrive: the reset comes after it was sent.
                    await writer.drain()
                    self.cuts += 1
                    self.is_down = self.is_down or self.down_after_cut
                    for end in both:
                        end.close() if end is writer else _reset(end)
                    return
                if left is not None:
                    left -= len(data)
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError, RuntimeError):
            if writer.can_write_eof():
                writer.write_eof()


def _left(plan: tuple[Direction, int] | None, direction: Direction) -> int | None:
    return plan[1] if plan is not None and plan[0] == direction else None


def _reset(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


@contextlib.asynccontextmanager
async def proxy_to(url_up: str, host: str = "127.0.0.1") -> AsyncIterator[Proxy]:
    """A proxy in front of the server that a URL (or DSN) names; `host` is where it listens."""
    parts = urlsplit(url_up)
    assert parts.hostname is not None
    assert parts.port is not None
    proxy = Proxy(free_ports(1)[0], parts.hostname, parts.port)
    server = await asyncio.start_server(proxy.accept, host, proxy.port)
    try:
        yield proxy
    finally:
        server.close()
        await server.wait_closed()
        await proxy.end()
