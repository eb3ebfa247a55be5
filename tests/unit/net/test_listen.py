"""Slow, broken and too many clients: each is answered or cut, and the others go on."""

import asyncio
import contextlib
import dataclasses
import functools
import gc
import socket
import struct
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from loadtest.ports import free_ports
from quorumlog.net import connections
from quorumlog.net.connections import Listener, ListenLimits
from quorumlog.net.listen import listening
from quorumlog.net.responses import request_id
from tests.support.waiting import DEADLINE_S, until, within

HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
Start = Callable[..., Awaitable[Listener]]
Handler = Callable[[web.Request], Awaitable[web.Response]]


@functools.cache
def _port() -> int:
    """One lease for all these tests: they run one after another."""
    return free_ports(1)[0]


async def _hello(request: web.Request) -> web.Response:
    return web.Response(body=await request.read())


async def _unread(_request: web.Request) -> web.Response:
    return web.Response(status=413)


async def _broken(_request: web.Request) -> web.Response:
    raise ConnectionResetError("a connection of the handler's own")


async def _large(_request: web.Request) -> web.Response:
    return web.Response(body=bytes(32 << 20))


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with contextlib.AsyncExitStack() as stack:

        async def started(large: Handler = _large, **limits: Any) -> Listener:
            app = web.Application()
            app.router.add_route("*", "/", _hello)
            app.router.add_get("/large", large)
            app.router.add_post("/unread", _unread)
            app.router.add_get("/broken", _broken)
            app.router.add_get("/message", _one_message)
            return await stack.enter_async_context(
                listening(
                    app,
                    host="127.0.0.1",
                    port=_port(),
                    limits=dataclasses.replace(ListenLimits(drain_timeout_s=0.5), **limits),
                )
            )

        yield started


@contextlib.asynccontextmanager
async def connection(
    listener: Listener, address: str = "127.0.0.1"
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", listener.port, local_addr=(address, 0)
    )
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    async with within("the server answers"):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers["content-length"]))
    return int(head[0].split()[1]), headers, body


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Everything until the server closes the connection."""
    async with within("the server answers"):
        with contextlib.suppress(ConnectionError):
            return await reader.read()
    return b""


async def test_a_head_that_comes_in_drips_is_cut_with_a_408(start: Start) -> None:
    listener = await start(head_timeout_s=0.2)

    async with connection(listener) as (reader, writer):
        writer.write(HEAD)
        # The client means to go on, a header at a time; it does not get that far.
        status, headers, body = await answer(reader)

        assert (status, orjson.loads(body)["code"]) == (408, "request-timeout")
        assert headers["content-type"] == "application/problem+json"
        assert await ended(reader) == b""


async def test_a_second_head_that_comes_in_drips_is_cut_too(start: Start) -> None:
    listener = await start(head_timeout_s=0.2)

    async with connection(listener) as (reader, writer):
        writer.write(HEAD + b"\r\n")
        assert (await answer(reader))[0] == 200
        writer.write(b"G")

        assert (await answer(reader))[0] == 408
        assert await ended(reader) == b""


async def test_a_head_that_begins_before_its_handler_runs_is_cut_too(start: Start) -> None:
    listener = await start(head_timeout_s=0.2)
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=theirs)
    taken = listener.connection()

    # In one turn, as uvloop does: the task that waits for requests has not run yet.
    transport.set_protocol(taken)
    taken.connection_made(transport)
    taken.data_received(HEAD)

    assert (await answer(reader))[0] == 408
    assert await ended(reader) == b""
    writer.close()


async def test_an_idle_connection_is_closed(start: Start) -> None:
    listener = await start(idle_timeout_s=0.2)

    async with connection(listener) as (reader, _writer):
        assert await ended(reader) == b""


async def test_an_idle_connection_keeps_no_response_body(start: Start) -> None:
    made: list[web.Response] = []

    async def large(request: web.Request) -> web.Response:
        made.append(await _large(request))
        return made[-1]

    listener = await start(large=large)
    async with connection(listener) as (reader, writer):
        writer.write(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await answer(reader))[0] == 200

        await until(lambda: made[0].body is None, "the response has no body any more")


async def test_a_connection_whose_last_head_was_long_is_closed(start: Start) -> None:
    listener = await start()
    lines = b"".join(b"X-%d: %s\r\n" % (n, b"x" * 8000) for n in range(3))

    async with connection(listener) as (reader, writer):
        writer.write(HEAD + lines + b"\r\n")
        status, headers, _ = await answer(reader)

        assert (status, headers["connection"]) == (200, "close")
        assert await ended(reader) == b""


async def test_a_request_behind_one_with_a_long_head_is_answered(start: Start) -> None:
    listener = await start()
    lines = b"".join(b"X-%d: %s\r\n" % (n, b"x" * 8000) for n in range(3))

    async with connection(listener) as (reader, writer):
        writer.write(HEAD + lines + b"\r\n" + HEAD + b"\r\n")

        assert (await answer(reader))[0] == 200
        assert (await answer(reader))[0] == 200


async def test_a_head_in_two_pieces_within_the_time_is_served(start: Start) -> None:
    listener = await start(head_timeout_s=DEADLINE_S * 2)

    async with connection(listener) as (reader, writer):
        writer.write(HEAD)
        await writer.drain()
        await until(lambda: listener.connections.used == 1, "the connection is taken")
        writer.write(b"\r\n")

        assert (await answer(reader))[0] == 200


async def test_a_client_that_never_reads_its_answer_is_cut(start: Start) -> None:
    listener = await start(stalled_answer_timeout_s=0.2)

    async with connection(listener) as (reader, writer):
        writer.write(HEAD + b"\r\n")
        assert (await answer(reader))[0] == 200
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")

        await until(lambda: listener.connections.used == 0, "the connection is cut")


async def test_one_address_does_not_get_the_last_connections(start: Start) -> None:
    listener = await start(connections_max=8, peer_connections_max=1)

    async with contextlib.AsyncExitStack() as stack:
        for _ in range(7):
            await stack.enter_async_context(connection(listener, "127.0.0.2"))
        await until(lambda: listener.connections.used == 7, "seven are taken")
        async with connection(listener, "127.0.0.2") as (reader, writer):
            writer.write(HEAD + b"\r\n")
            status, _, body = await answer(reader)
            assert (status, orjson.loads(body)["code"]) == (429, "overloaded")
            assert b"PEER_CONNECTIONS_MAX" in body
        async with connection(listener) as (reader, writer):
            writer.write(HEAD + b"\r\n")
            assert (await answer(reader))[0] == 200
    await until(lambda: listener.connections.used == 0, "all are gone")


async def test_one_connection_too_many_is_refused_and_the_others_go_on(start: Start) -> None:
    listener = await start(connections_max=1)

    async with connection(listener) as (reader, writer):
        await until(lambda: listener.connections.used == 1, "the connection is taken")
        async with connection(listener) as (second, asking):
            # More than the server reads at once: what it leaves unread would reset the connection.
            asking.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
            asking.write(bytes(1_000_000))
            status, headers, body = await answer(second)
            assert (status, orjson.loads(body)["code"]) == (429, "overloaded")
            assert headers["retry-after"] == "1"
            assert await ended(second) == b""
        writer.write(HEAD + b"\r\n")
        assert (await answer(reader))[0] == 200

    await until(lambda: listener.connections.used == 0, "the first one is gone")
    async with connection(listener) as (reader, writer):
        writer.write(HEAD + b"\r\n")
        assert (await answer(reader))[0] == 200


async def test_one_connection_too_many_that_asks_nothing_is_told_and_closed(start: Start) -> None:
    listener = await start(connections_max=1)

    async with connection(listener):
        await until(lambda: listener.connections.used == 1, "the connection is taken")
        async with connection(listener) as (reader, _):
            assert (await answer(reader))[0] == 429
            assert await ended(reader) == b""
        await until(lambda: listener.refused_count == 0, "the refused one is forgotten")


async def test_a_client_of_aiohttp_gets_the_429_of_a_refused_connection(start: Start) -> None:
    listener = await start(connections_max=1)
    url = f"http://127.0.0.1:{listener.port}/"

    async with (
        connection(listener),
        within("it is answered"),
        aiohttp.ClientSession() as session,
    ):
        await until(lambda: listener.connections.used == 1, "the connection is taken")
        async with session.get(url) as response:
            assert (response.status, (await response.json(content_type=None))["code"]) == (
                429,
                "overloaded",
            )
        async with session.post(url, data=bytes(100_000)) as response:
            assert response.status == 429


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/", b"Content-Length: 1000000\r\n\r\nx"),
        ("/", b"Transfer-Encoding: chunked\r\n\r\n10\r\nx"),
        ("/unread", b"Content-Length: 1000000\r\n\r\nx"),
        ("/large", b"\r\n"),
    ],
)
async def test_a_client_that_goes_away_is_no_error_of_ours(
    start: Start, path: str, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    listener = await start(head_timeout_s=0.2)  # also for the rest of a body that nobody reads
    method = b"GET" if path == "/large" else b"POST"
    tasks = len(asyncio.all_tasks())

    async with connection(listener) as (reader, writer):
        writer.write(method + b" " + path.encode() + b" HTTP/1.1\r\nHost: localhost\r\n" + body)
        await until(lambda: listener.connections.used == 1, "the connection is taken")
        if path != "/":
            async with within("the answer begins"):
                assert await reader.read(1)
        peer = writer.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    await until(lambda: listener.connections.used == 0, "the client is gone")
    await until(lambda: len(asyncio.all_tasks()) <= tasks, "its handler has ended")

    assert not [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")]


async def test_another_connection_that_breaks_is_an_error_of_ours(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    listener = await start()

    async with connection(listener) as (reader, writer):
        writer.write(b"GET /broken HTTP/1.1\r\nHost: localhost\r\n\r\n")
        status, _, body = await answer(reader)

    assert (status, orjson.loads(body)["code"]) == (500, "internal-error")
    assert [record.msg for record in caplog.records if record.levelname == "ERROR"]


MALFORMED = {
    "no http": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "http 9": (b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", 400),
    "no colon": (HEAD + b"nonsense\r\n\r\n", 400),
    "space before colon": (HEAD + b"A : b\r\n\r\n", 400),
    "bare line feed in a header": (HEAD + b"A: b\nC: d\r\n\r\n", 400),
    "nul in a header": (HEAD + b"A: b\x00\r\n\r\n", 400),
    "two lengths": (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
    "negative length": (HEAD + b"Content-Length: -1\r\n\r\n", 400),
    "length in words": (HEAD + b"Content-Length: ten\r\n\r\n", 400),
    "unicode length": (HEAD + "Content-Length: \u0661\r\n\r\n".encode(), 400),
    "length and chunks": (
        HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "chunks that are not last": (HEAD + b"Transfer-Encoding: chunked, gzip\r\n\r\n", 400),
    "broken chunk size": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n\r\n", 400),
    "long header": (HEAD + b"A: " + b"x" * 20_000 + b"\r\n\r\n", 431),
    "long target": (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
    "many headers": (HEAD + b"".join(b"A%d: b\r\n" % n for n in range(500)) + b"\r\n", 431),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_http_is_a_problem_document(
    start: Start, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    listener = await start()
    sent, expected = MALFORMED[name]

    async with connection(listener) as (reader, writer):
        writer.write(sent)
        status, headers, body = await answer(reader)

        assert status == expected, body
        problem = orjson.loads(body)
        assert problem["code"] == {400: "bad-request", 431: "headers-too-large"}[expected]
        assert headers["content-type"] == "application/problem+json"
        assert headers["x-request-id"] == problem["instance"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("expected", [b"miracles", b"\xff\xfe"])
async def test_an_unknown_expectation_is_a_problem_document(start: Start, expected: bytes) -> None:
    listener = await start()

    async with connection(listener) as (reader, writer):
        writer.write(HEAD + b"Expect: " + expected + b"\r\n\r\n")
        status, headers, _body = await answer(reader)

        assert (status, headers["content-type"]) == (400, "application/problem+json")


def test_request_ids_of_clients_are_kept_only_where_they_are_harmless() -> None:
    for good in ("a", "A-b_c.9", "x" * 64):
        assert request_id(good) == good
    for bad in ("", "x" * 65, "a b", "a\n", "é", "\u0661", None):
        assert request_id(bad) != bad


async def test_a_body_that_follows_its_head_at_once_is_not_taken_for_a_late_head(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Head and body in two pieces, both there before the handler runs."""
    made: list[Any] = []
    real = Listener.connection

    def recorded(self: Listener) -> Any:
        made.append(real(self))
        return made[-1]

    monkeypatch.setattr(Listener, "connection", recorded)
    listener = await start()
    async with connection(listener) as (reader, writer):
        writer.write(HEAD + b"\r\n")  # the connection has a handler that waits for the next one
        await answer(reader)
        await until(lambda: made[0]._waiter is not None, "the connection is idle")

        made[0].data_received(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nab")
        made[0].data_received(b"cd")

        assert made[0]._head_timer is None
        status, _, body = await answer(reader)
        assert (status, body) == (200, b"abcd")


async def _one_message(request: web.Request) -> web.StreamResponse:
    ws = web.WebSocketResponse(max_msg_size=0)
    await ws.prepare(request)
    message = await ws.receive()
    await ws.send_str(str(len(message.data)))
    return ws


async def test_others_have_their_turn_after_each_full_read_of_a_connection(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libuv would read up to 32 times from one connection before it looks at the next one."""
    loop, turns = asyncio.get_running_loop(), [0]
    reads: list[tuple[int, int]] = []
    take = connections.Connection._take

    def noted(connection: connections.Connection, data: bytes) -> None:
        reads.append((len(data), len(turns)))
        loop.call_soon(turns.append, 0)
        take(connection, data)

    monkeypatch.setattr(connections, "_TURN_BYTES", 1024)
    monkeypatch.setattr(connections.Connection, "_take", noted)
    await start()
    async with (
        within("the message comes"),
        aiohttp.ClientSession() as session,
        session.ws_connect(f"http://127.0.0.1:{_port()}/message") as socket,
    ):
        await socket.send_bytes(bytes(16 << 20))
        assert await socket.receive_str() == str(16 << 20)

    full = [place for place, (size, _) in enumerate(reads[:-1]) if size >= connections._TURN_BYTES]
    assert full, "it comes in full reads"
    assert all(reads[place][1] < reads[place + 1][1] for place in full)


@pytest.mark.parametrize("turns", range(5))
def test_a_connection_that_is_accepted_while_the_server_stops_is_closed(turns: int) -> None:
    """asyncio accepts a connection some turns of the event loop before its protocol knows of it."""
    client = socket.socket()

    async def stop() -> None:
        (port,) = free_ports(1)
        async with listening(web.Application(), host="127.0.0.1", port=port):
            client.connect(("127.0.0.1", port))
            for _ in range(turns):
                await asyncio.sleep(0)

    with client, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", ResourceWarning)
        asyncio.run(stop())
        gc.collect()

    assert [str(each.message) for each in seen if "unclosed" in str(each.message)] == []
