"""WebSockets over a ledger: appends, the tail, and the room that messages take."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web_ws
from aiohttp._websocket.reader import WebSocketDataQueue

from services.gateway.edge.http.arrivals import TURN_MESSAGES
from services.gateway.edge.http.limits import Limits
from tests.support.waiting import until, within
from tests.unit.gateway.conftest import Gateway, received, running, until_held, until_nothing_held
from tests.unit.gateway.conftest import gateway_with_ledger as gateway

__all__ = ("gateway",)

ENTRIES = "/v1/ledgers/1/entries"
CLOSE = b"\x88\x80" + bytes(4)


async def test_a_socket_appends_and_tells_what_is_acknowledged(gateway: Gateway) -> None:
    async with gateway.session.ws_connect(gateway.url + "/v1/ledgers/1/ws") as socket:
        await socket.send_str('{"text":"a"}')
        first = await received(socket)
        await socket.send_bytes(struct.pack(">I", 1) + b"b" + struct.pack(">I", 0))
        await socket.send_str('{"entries":[{"data":"ZA=="},{"json":[1]}]}')
        last = first["last_entry"]
        while last < 4:
            acknowledged = await received(socket)
            assert acknowledged["first_entry"] == last + 1
            last = acknowledged["last_entry"]

    assert first == {"first_entry": 0, "last_entry": 0, "last_add_confirmed": 0}
    assert gateway.engine.entries[1] == [b"a", b"b", b"", b"d", b"[1]"]


async def test_a_socket_follows_the_tail(gateway: Gateway) -> None:
    gateway.engine.entries[1] = [b"a", b"b"]

    async with gateway.session.ws_connect(gateway.url + "/v1/ledgers/1/ws") as socket:
        await socket.send_str('{"tail":{"from":1,"encoding":"text"}}')
        assert await received(socket) == {
            "entries": [{"entry_id": 1, "text": "b"}],
            "next": 2,
            "last_add_confirmed": 1,
            "closed": False,
        }
        await until(lambda: gateway.engine.waiting == 1, "the tail waits")
        await gateway.ask("POST", ENTRIES, json={"text": "c"})
        assert (await received(socket))["entries"] == [{"entry_id": 2, "text": "c"}]
        await gateway.ask("POST", "/v1/ledgers/1/close")
        assert await received(socket) == {"end": {"last_entry": 2}}


async def test_a_socket_follows_the_tail_as_frames(gateway: Gateway) -> None:
    gateway.engine.entries[1] = [b"a", b""]

    async with gateway.session.ws_connect(gateway.url + "/v1/ledgers/1/ws") as socket:
        await socket.send_str('{"tail":{"encoding":"frames"}}')

        expected = struct.pack(">QI", 0, 1) + b"a" + struct.pack(">QI", 1, 0)
        assert await received(socket) == expected


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("nonsense", "bad-request"),
        ("{}", "invalid"),
        ('{"text":1}', "invalid"),
        ('{"tail":1}', "invalid"),
        ('{"tail":{"from":-1}}', "invalid"),
        ('{"tail":{"from":1.0}}', "invalid"),
        ('{"tail":{"encoding":"x"}}', "invalid"),
        ('{"tail":{"to":1}}', "invalid"),
        ('{"tail":{},"text":"a"}', "invalid"),
        ('{"tail":{},"tail":{}}', "bad-request"),
        (b"", "invalid"),
        (b"\0\0\0\1", "bad-request"),
        (b"\xff\xff\xff\xff", "too-large"),
    ],
)
async def test_a_wrong_message_is_a_problem_that_ends_the_socket(
    gateway: Gateway, message: str | bytes, code: str
) -> None:
    async with gateway.session.ws_connect(gateway.url + "/v1/ledgers/1/ws") as socket:
        if isinstance(message, str):
            await socket.send_str(message)
        else:
            await socket.send_bytes(message)

        assert (await received(socket))["code"] == code
        assert await received(socket) == aiohttp.WSCloseCode.POLICY_VIOLATION
    assert gateway.engine.entries[1] == []


@pytest.mark.parametrize("text", [b'{"text":"\xff"}', b'{"tail":{"from":"\xff"}}'])
async def test_text_that_is_no_utf8_is_a_problem(gateway: Gateway, text: bytes) -> None:
    async with gateway.session.ws_connect(gateway.url + "/v1/ledgers/1/ws") as socket:
        await socket.send_frame(text, aiohttp.WSMsgType.TEXT)

        assert (await received(socket))["code"] == "bad-request"
        assert await received(socket) == aiohttp.WSCloseCode.POLICY_VIOLATION
    assert gateway.engine.entries[1] == []


async def test_an_error_of_the_ledger_ends_the_socket(gateway: Gateway) -> None:
    await gateway.engine.close(1)

    async with gateway.session.ws_connect(gateway.url + "/v1/ledgers/1/ws") as socket:
        await socket.send_str('{"text":"a"}')

        assert (await received(socket))["code"] == "ledger-closed"
        assert await received(socket) == aiohttp.WSCloseCode.POLICY_VIOLATION


async def test_only_ledgers_that_are_there_have_sockets(gateway: Gateway) -> None:
    plain = await gateway.ask("GET", "/v1/ledgers/1/ws")
    missing = await gateway.ask("GET", "/v1/ledgers/9/ws")

    assert (plain.status, plain.code) == (400, "bad-request")
    assert (missing.status, missing.code) == (404, "no-such-ledger")


@pytest.mark.parametrize("name", [b"Upgrade", b"Connection", b"Sec-WebSocket-Version"])
async def test_a_handshake_that_is_not_utf8_is_refused(gateway: Gateway, name: bytes) -> None:
    handshake = {
        b"Host": b"localhost",
        b"Connection": b"Upgrade",
        b"Upgrade": b"websocket",
        b"Sec-WebSocket-Version": b"13",
        b"Sec-WebSocket-Key": b"AAAAAAAAAAAAAAAAAAAAAA==",
        name: b"\xff\xfe",
    }

    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.listener.port)
    lines = [b"%b: %b\r\n" % pair for pair in handshake.items()]
    writer.write(b"GET /v1/ledgers/1/ws HTTP/1.1\r\n" + b"".join(lines) + b"\r\n")
    async with within("it is answered"):
        reported = await reader.readline()
    writer.close()

    assert b" 400 " in reported


async def test_sockets_end_when_the_gateway_is_about_to_end(gateway: Gateway) -> None:
    async with gateway.session.ws_connect(gateway.url + "/v1/ledgers/1/ws") as socket:
        await socket.send_str('{"text":"a"}')
        assert (await received(socket))["last_entry"] == 0
        await gateway.drain()

        assert await received(socket) == aiohttp.WSCloseCode.GOING_AWAY


@contextlib.asynccontextmanager
async def raw_socket(gateway: Gateway, frames: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """A socket over which these bytes came after the handshake, and no more come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.listener.port)
    try:
        writer.write(
            b"GET /v1/ledgers/1/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
            b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        async with within("the socket opens"):
            assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(frames)
        yield reader
    finally:
        writer.close()


def message_under_way(
    gateway: Gateway, count: int
) -> contextlib.AbstractAsyncContextManager[asyncio.StreamReader]:
    """A socket over which so many bytes of a message of 8 MiB came, and no more come."""
    head = b"\x82\xff" + struct.pack(">Q", 8 << 20) + bytes(4)
    return raw_socket(gateway, head + bytes(count))


async def test_what_came_of_a_message_is_counted_until_its_socket_ends(gateway: Gateway) -> None:
    async with message_under_way(gateway, 3 << 20), message_under_way(gateway, 3 << 20):
        await until_held(gateway, 6 << 20, "what came of both is counted")
    await until_nothing_held(gateway)


async def test_pings_between_fragments_do_not_hide_what_came(gateway: Gateway) -> None:
    ping = b"\x89\x84" + bytes(4) + b"ping"
    first, later = (kind + b"\xff" + struct.pack(">Q", 1 << 20) for kind in (b"\x02", b"\x00"))
    fragments = [start + bytes(4) + bytes(1 << 20) + ping for start in (first, later, later)]

    async with raw_socket(gateway, b"".join(fragments)):
        await until_held(gateway, 3 << 20, "all fragments are counted")
    await until_nothing_held(gateway)


async def test_pings_alone_hold_nothing(gateway: Gateway) -> None:
    pings = b"".join(b"\x89" + bytes([0x80 | size]) + bytes(4 + size) for size in range(126))
    one = b"\x82\x85" + bytes(4) + b"\0\0\0\1x"

    async with raw_socket(gateway, pings + one) as reader:
        async with within("the append after them is acknowledged"):
            await reader.readuntil(b"last_add_confirmed")
        await until_nothing_held(gateway)


async def test_pings_that_wait_to_be_parsed_are_not_taken_for_a_message() -> None:
    async with running(limits=Limits(body_bytes_max=1 << 10)) as gateway:
        await gateway.create()
        pings = (b"\x89\xfd" + bytes(4 + 125)) * 10_000
        one = b"\x82\x85" + bytes(4) + b"\0\0\0\1x"

        async with raw_socket(gateway, pings + one) as reader:
            async with within("the append after them is acknowledged"):
                while b"last_add_confirmed" not in await reader.read(1 << 16):
                    assert not reader.at_eof()
            await until_nothing_held(gateway)


async def test_a_message_of_empty_fragments_without_end_is_refused() -> None:
    async with running(limits=Limits(body_bytes_max=1 << 20)) as gateway:
        await gateway.create()
        fragments = b"\x02\x80" + bytes(4) + (b"\x00\x80" + bytes(4)) * 600_000

        async with raw_socket(gateway, fragments) as reader, within("the socket is told"):
            await reader.readuntil(b'"status":413')


async def test_a_socket_that_was_refused_and_sends_on_leaves_others_their_turn(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = most = 0

    class Counted(WebSocketDataQueue):
        async def read(self) -> Any:
            nonlocal taken, most
            taken += 1
            most = max(most, taken)
            return await super().read()

    async def watch() -> None:
        nonlocal taken
        while True:
            await asyncio.sleep(0)
            taken = 0

    monkeypatch.setattr(web_ws, "WebSocketDataQueue", Counted)
    watching = asyncio.create_task(watch())
    sent = (b"\x82\x80" + bytes(4)) * 20_000 + CLOSE
    async with raw_socket(gateway, sent) as reader, within("the socket is closed"):
        await reader.read()
    watching.cancel()

    assert 1 < most <= 2 * TURN_MESSAGES


async def test_a_message_beyond_the_room_ends_its_socket_before_it_is_whole() -> None:
    async with running(limits=Limits(held_bytes_max=4 << 20)) as gateway:
        await gateway.create()
        octets = {"Content-Type": "application/octet-stream"}

        async with message_under_way(gateway, 7 << 20) as reader:
            async with within("the socket is told"):
                reported = await reader.readuntil(b'"status":429')
            # The socket is still open: what came of its message is freed at once.
            done = await gateway.ask("POST", ENTRIES, b"x" * (1 << 20), headers=octets)

        assert b"/problems/overloaded" in reported
        assert done.status == 201


async def test_a_message_is_counted_until_its_stream_takes_it() -> None:
    async with running() as gateway:
        await gateway.create()
        gateway.engine.gate = asyncio.Event()
        entries = b"".join([struct.pack(">I", 1 << 20) + bytes(1 << 20)] * 3)

        async with gateway.session.ws_connect(gateway.url + "/v1/ledgers/1/ws") as socket:
            for _ in range(3):
                await socket.send_bytes(entries)
            # One run of at most 2 MiB is the engine's, the rest of 9 MiB waits.
            await until_held(
                gateway, (10 << 20) + 1, "what waits is counted, and the message that it came in"
            )
            gateway.engine.gate.set()
