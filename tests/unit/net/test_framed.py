"""Connections of frames: what is sent comes whole, in pieces of any size, and nothing else is taken for it."""

import asyncio
import os
import resource
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import google_crc32c
import pytest
import uvloop
from aiohttp import web

from quorumlog.certificates import revoke
from quorumlog.net import framed as framed_module
from quorumlog.net.connections import UPGRADES, Listener, ListenLimits
from quorumlog.net.framed import Framed, InPlace, accept, connect
from quorumlog.net.hosts import Hosts
from quorumlog.net.identity import ANONYMOUS, Credentials, Role
from quorumlog.net.listen import listening
from quorumlog.net.service import HOSTS, answers_problems
from quorumlog.net.sessions import ExpectedServer, service_session
from quorumlog.net.tls import Tls
from quorumlog.wire import frames
from quorumlog.wire.frames import BadFrame, Message
from tests.support.framed import Line
from tests.support.waiting import until, within
from tests.unit.net.mutual_tls import Authority

NAME = "quorumlog-channel/1"
BOOKIE = ExpectedServer(Role.BOOKIE)
MIB = 1 << 20
LOOPS = (asyncio.new_event_loop, uvloop.new_event_loop)
MESSAGES = [
    Message(b"a"),
    Message(b"fields", b"run"),
    Message(b"", b"only a run"),
    Message(os.urandom(300), os.urandom(700)),
    Message(b""),
]


class Heard:
    """Takes messages. Implements `framed.Speaker`."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def received(self, fields: bytes, run: bytes) -> None:
        self.messages.append(Message(fields, run))

    def to_send(self) -> tuple[bytes, ...]:
        return ()


def stream(messages: list[Message]) -> bytes:
    return b"".join(b"".join(frames.frame_of(message)) for message in messages)


def feed(framed: Framed, data: bytes, most: int = 1 << 30) -> None:
    """What a transport does."""
    while data:
        room = framed.get_buffer(-1)
        count = min(len(room), len(data), most)
        room[:count] = data[:count]
        framed.buffer_updated(count)
        data = data[count:]


async def test_messages_come_whole_wherever_their_bytes_are_cut() -> None:
    data = stream(MESSAGES)
    for cut in range(len(data) + 1):
        heard = Heard()
        framed = Framed(heard)
        feed(framed, data[:cut])
        feed(framed, data[cut:])
        assert heard.messages == MESSAGES, cut


@pytest.mark.parametrize("most", [1, 7, 11, 12, 13, 4096, 1 << 30])
async def test_messages_come_whole_in_pieces_of_any_size(most: int) -> None:
    size = 1000 if most < 4096 else 300_000
    messages = [*MESSAGES, Message(os.urandom(size), os.urandom(size)), *MESSAGES * 2]
    heard = Heard()

    feed(Framed(heard), stream(messages), most)

    assert heard.messages == messages


async def test_several_connections_are_read_in_turn_without_a_mixture() -> None:
    """All of a thread read into one buffer."""
    ends = [(heard, Framed(heard), stream(MESSAGES)) for heard in (Heard(), Heard(), Heard())]
    for at in range(0, len(ends[0][2]), 5):
        for _, framed, data in ends:
            feed(framed, data[at : at + 5])

    assert [heard.messages for heard, _, _ in ends] == [MESSAGES] * 3


async def test_a_small_message_keeps_no_large_buffer_and_a_large_one_only_itself() -> None:
    heard = Heard()
    run = os.urandom(5 * MIB)
    framed = Framed(heard)

    feed(framed, stream([Message(b"small", b"run"), Message(b"large", run)]))

    assert all(type(piece) is bytes for message in heard.messages for piece in message)
    assert heard.messages[1].run == run


def test_a_large_message_is_not_copied_once_it_has_come() -> None:
    """While an event loop holds a view of the buffer, as it does when it calls the protocol."""
    size = 16 << 20
    piece = InPlace(size)
    held = piece.room()
    held[:] = bytes(size)
    piece.advance(size)
    tracemalloc.start()
    try:
        assert piece.value() == bytes(held)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[1]
        value = piece.value()
        taken = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert len(value) == size
    assert taken < size // 16


async def test_a_size_that_is_announced_takes_memory_only_as_its_bytes_come() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    sizes = struct.pack(">II", 100, frames.MESSAGE_BYTES_MAX - 100)
    head = sizes + struct.pack(">I", google_crc32c.value(sizes))
    before = resident()

    announced = [Framed(Heard()) for _ in range(5)]
    for framed in announced:
        feed(framed, head + bytes(1000))

    assert resident() - before < 20 * MIB


ANNOUNCING = """
import asyncio, ctypes, resource, struct
from pathlib import Path
import google_crc32c
from quorumlog.net.framed import Framed
from quorumlog.net.memory import keep_freed
from tests.unit.net.test_framed import Heard, feed

MIB = 1 << 20

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

async def main():
    keep_freed()
    # Each with something above it, so that it can't join with what is free there.
    used = [(bytes([1]) * (16 * MIB), bytes([1]) * MIB) for _ in range(5)]
    kept = [above for _, above in used]
    del used
    ctypes.CDLL(None).malloc_trim(0)
    sizes = struct.pack(">II", 100, 15 * MIB)
    head = sizes + struct.pack(">I", google_crc32c.value(sizes))
    before = resident()
    announced = [Framed(Heard()) for _ in range(5)]
    for framed in announced:
        feed(framed, head + bytes(1000))
    print((resident() - before) // MIB)

asyncio.run(main())
"""


def test_a_size_that_is_announced_takes_nothing_of_memory_that_was_in_use_before() -> None:
    """In a process of its own, whose heap no other test has used."""
    command = (sys.executable, "-c", ANNOUNCING)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 10


@asynccontextmanager
async def serving(
    tls: Tls | None = None, wait: Callable[[], Awaitable[Any]] | None = None
) -> AsyncIterator[tuple[Listener, list[Line]]]:
    """A listener whose connections of frames are given."""
    lines: list[Line] = []

    async def open_line(request: web.Request) -> web.StreamResponse:
        if wait is not None:
            await wait()
        line = Line()
        line.framed, answer = await accept(request, line, NAME)
        lines.append(line)
        await asyncio.wait([line.framed.closed])
        return answer

    app = web.Application(middlewares=[answers_problems])
    app[HOSTS] = Hosts()
    app[UPGRADES] = True
    app.router.add_get("/line", open_line)
    limits = ListenLimits(drain_timeout_s=0.1)
    context = None if tls is None else tls.server
    async with listening(app, host="127.0.0.1", port=0, context=context, limits=limits) as listener:
        if tls is not None:
            tls.watch(listener)
        yield listener, lines
        for line in lines:
            line.framed.close()


@asynccontextmanager
async def connected(
    listener: Listener, lines: list[Line], credentials: Credentials = ANONYMOUS
) -> AsyncIterator[tuple[Line, Line]]:
    """Both ends of a new connection: the client's, and the server's."""
    scheme = "http" if credentials is ANONYMOUS else "https"
    line = Line()
    async with service_session(credentials) as session, within("it is all done"):
        url = f"{scheme}://127.0.0.1:{listener.port}/line"
        line.framed = await connect(session, url, line, [NAME], BOOKIE)
        await until(lambda: lines, "the server has it")
        yield line, lines.pop()
        line.framed.abort()
        await asyncio.wait([line.framed.closed])
        line.framed.closed.exception()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.mark.parametrize("has_tls", [False, True])
@pytest.mark.parametrize("loop_of", LOOPS)
def test_messages_of_all_sizes_cross_a_socket_both_ways(
    authority: Authority, loop_of: Callable[[], asyncio.AbstractEventLoop], *, has_tls: bool
) -> None:
    """Larger than what a socket takes, and many small ones at once."""
    messages = [*MESSAGES * 30, Message(b"large", os.urandom(3 * MIB)), *MESSAGES * 30]

    async def talk() -> None:
        tls = authority.tls("bookie", "bookie-1") if has_tls else None
        mine = authority.tls("gateway", "gateway-1").credentials if has_tls else ANONYMOUS
        async with (
            serving(tls) as (listener, lines),
            connected(listener, lines, mine) as (near, far),
        ):
            for one, other in ((near, far), (far, near)):
                for message in messages:
                    one.send(message)
                assert [await other.receive() for _ in messages] == messages

    with asyncio.Runner(loop_factory=loop_of) as runner:
        runner.run(talk())


class Endless(Line):
    """Has always more to send."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def to_send(self) -> tuple[bytes, ...]:
        self.sent += 1
        return frames.frame_of(Message(b"fields", bytes(MIB)))


@pytest.mark.parametrize("has_tls", [False, True])
@pytest.mark.parametrize("loop_of", LOOPS)
def test_to_an_end_that_does_not_read_little_is_sent_until_it_reads_on(
    authority: Authority, loop_of: Callable[[], asyncio.AbstractEventLoop], *, has_tls: bool
) -> None:
    async def talk() -> None:
        tls = authority.tls("bookie", "bookie-1") if has_tls else None
        mine = authority.tls("gateway", "gateway-1").credentials if has_tls else ANONYMOUS
        async with (
            serving(tls) as (listener, lines),
            connected(listener, lines, mine) as (near, far),
        ):
            far.framed.pause()
            near.framed._speaker = endless = Endless()
            endless.framed = near.framed
            near.framed.announce()
            await until(lambda: near.framed._is_writing_paused, "the system takes no more")
            # The buffers of two sockets, and of TLS.
            assert endless.sent < 64
            before = endless.sent
            far.framed.resume()
            await until(lambda: endless.sent > before, "it reads on")

    with asyncio.Runner(loop_factory=loop_of) as runner:
        runner.run(talk())


@pytest.mark.parametrize("loop_of", LOOPS)
def test_an_end_that_pauses_keeps_what_has_come_and_takes_it_in_order(
    loop_of: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    class Choosy(Line):
        """Takes one message at a time."""

        def received(self, fields: bytes, run: bytes) -> None:
            super().received(fields, run)
            self.framed.pause()

    async def talk() -> None:
        async with serving() as (listener, lines), connected(listener, lines) as (near, far):
            far.framed._speaker = choosy = Choosy()
            choosy.framed = far.framed
            messages = MESSAGES * 20 + [Message(b"large", bytes(200_000))] + MESSAGES
            for message in messages:
                near.send(message)
            for message in messages:
                assert await choosy.receive() == message
                assert choosy._came.empty()
                far.framed.resume()

    with asyncio.Runner(loop_factory=loop_of) as runner:
        runner.run(talk())


@pytest.mark.parametrize("data", [b"\0" * 12, b"GET / HTTP/1.1\r\n\r\n", bytes(range(100, 200))])
@pytest.mark.parametrize("loop_of", LOOPS)
def test_an_end_that_sends_no_frames_is_cut(
    data: bytes, loop_of: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def talk() -> None:
        async with serving() as (listener, lines), connected(listener, lines) as (near, far):
            near.write(data)
            with pytest.raises(BadFrame, match="damaged"):
                await far.framed.closed
            assert await near.receive() is None

    with asyncio.Runner(loop_factory=loop_of) as runner:
        runner.run(talk())


async def test_an_end_that_goes_in_the_middle_of_a_message_ends_the_connection() -> None:
    async with serving() as (listener, lines), connected(listener, lines) as (near, far):
        near.write(stream([Message(b"whole"), Message(b"cut", bytes(MIB))])[:1000])
        assert await far.receive() == Message(b"whole")
        near.framed.close()
        assert await far.receive() is None
        await far.framed.closed
        await until(lambda: not listener.server.connections, "the connection counts no more")


async def test_a_defect_of_who_takes_messages_ends_the_connection_and_is_told() -> None:
    class Broken(Line):
        def received(self, *_message: bytes) -> None:
            raise RuntimeError("unforeseen")

    async with serving() as (listener, lines), connected(listener, lines) as (near, far):
        far.framed._speaker = Broken()
        near.send(Message(b"fields"))
        with pytest.raises(RuntimeError, match="unforeseen"):
            await far.framed.closed
        assert await near.receive() is None


async def test_what_was_sent_comes_first_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framed_module, "_GOODBYE_S", 0.05)
    async with serving() as (listener, lines), connected(listener, lines) as (near, far):
        near.send(Message(b"last words"))
        await until(lambda: not near.framed._is_flush_due, "they are written")
        near.framed.close()
        assert await far.receive() == Message(b"last words")
        assert await far.receive() is None
    async with serving() as (listener, lines), connected(listener, lines) as (near, far):
        near.framed.pause()
        far.send(Message(b"unread", bytes(30 * MIB)))
        await until(lambda: far.framed._is_writing_paused, "the system takes no more")
        far.framed.close()
        await asyncio.wait([far.framed.closed])


async def test_the_end_of_a_listener_ends_upgraded_connections() -> None:
    async with serving() as (listener, lines), connected(listener, lines) as (near, _):
        await listener.runner.cleanup()
        assert await near.receive() is None


HEAD = (
    b"GET /line HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\n"
    b"Upgrade: quorumlog-channel/1\r\n\r\n"
)


@pytest.mark.parametrize(
    "pieces",
    [
        (HEAD + stream([Message(b"early")]),),
        (HEAD + b"GET /line HTTP/1.1\r\nHost: 127.0.0.1\r\n",),
        (HEAD, stream([Message(b"early")])),
        (HEAD, b"\r"),
    ],
)
async def test_bytes_behind_an_upgrade_request_are_refused(pieces: tuple[bytes, ...]) -> None:
    """They would be lost: a caller waits for the answer."""
    all_came = asyncio.Event()
    async with within("it is refused"), serving(wait=all_came.wait) as (listener, lines):
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        for piece in pieces:
            writer.write(piece)
            await until(partial(has_come, listener, piece), "it has come")
        all_came.set()
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        assert not lines
        writer.close()


async def test_a_head_in_pieces_is_no_reason_for_a_refusal() -> None:
    async with within("it is answered"), serving() as (listener, lines):
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        for at in range(len(HEAD)):
            writer.write(HEAD[at : at + 1])
            await writer.drain()
            await asyncio.sleep(0)
        assert (await reader.readline()).startswith(b"HTTP/1.1 101")
        await until(lambda: lines, "the connection is upgraded")
        writer.close()


def has_come(listener: Listener, data: bytes) -> bool:
    connections: list[Any] = listener.server.connections
    return bool(connections) and connections[0]._ending.endswith(data[-1:])


@pytest.mark.parametrize("loop_of", LOOPS)
@pytest.mark.parametrize("is_server", [False, True])
def test_a_revoked_peers_upgraded_connection_is_cut(
    authority: Authority, loop_of: Callable[[], asyncio.AbstractEventLoop], *, is_server: bool
) -> None:
    server, gateway = authority.tls("bookie", "bookie-1"), authority.tls("gateway", "gateway-1")

    async def talk() -> None:
        async with (
            serving(server) as (listener, lines),
            connected(listener, lines, gateway.credentials) as (near, far),
        ):
            near.send(Message(b"before"))
            assert await far.receive() == Message(b"before")
            role, judge = ("bookie", gateway) if is_server else ("gateway", server)
            revoke(authority.folder, role, f"{role}-1")
            judge.look()
            judge.look()
            assert await near.receive() is None
            assert await far.receive() is None

    with asyncio.Runner(loop_factory=loop_of) as runner:
        runner.run(talk())


async def test_an_answer_that_is_no_upgrade_or_one_to_something_else_is_told() -> None:
    async def other(_request: web.Request) -> web.StreamResponse:
        return web.Response(text="here is a page")

    app = web.Application()
    app.router.add_get("/line", other)
    async with (
        listening(app, host="127.0.0.1", port=0) as listener,
        service_session() as session,
        within("it is told"),
    ):
        url = f"http://127.0.0.1:{listener.port}/line"
        with pytest.raises(aiohttp.ClientError, match="no upgrade to quorumlog-channel/1: 200"):
            await connect(session, url, Heard(), [NAME], BOOKIE)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"101 X\r\nConnection: Upgrade\r\nUpgrade: websocket", "upgraded to websocket, not to"),
        (b"101 X\r\nConnection: Upgrade\r\nUpgrade: quorumlog-channel/1", "sent 5 bytes before"),
    ],
)
async def test_an_answer_that_a_bookie_does_not_give_is_refused(answer: bytes, why: str) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 " + answer + b"\r\n\r\nearly")
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    async with server, service_session() as session, within("it is refused"):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/line"
        with pytest.raises(aiohttp.ClientError, match=why):
            await connect(session, url, Heard(), [NAME], BOOKIE)
