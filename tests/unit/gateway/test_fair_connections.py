"""No connection and no large body keeps the others from their turn."""

import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import pytest
from aiohttp.test_utils import make_mocked_request

from quorumlog.wire.token_bodies import TokenQuotas
from services.gateway.edge.access.quotas import Usage
from services.gateway.edge.access.scopes import Caller
from services.gateway.edge.http import arrivals, body
from services.gateway.edge.http.limits import INLINE_BYTES_MAX, Limits, Room
from tests.support.waiting import until, within
from tests.unit.gateway.conftest import Gateway, running, until_held

PING, PONG, BINARY, TEXT = 9, 10, 2, 1
SOCKETS: Final = 6
COUNT: Final = 4_000
HELLO: Final = (
    b"GET /v1/ledgers/1/ws HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


def frame(kind: int, payload: bytes = b"") -> bytes:
    return bytes([0x80 | kind, 0x80 | len(payload)]) + bytes(4) + payload


@contextlib.asynccontextmanager
async def socket_of(
    gateway: Gateway,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.listener.port)
    writer.write(HELLO)
    async with within("the handshake is answered"):
        assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    try:
        yield reader, writer
    finally:
        writer.close()


@pytest.mark.parametrize("kind", [PING, PONG])
async def test_others_have_their_turn_while_a_socket_sends_control_frames(kind: int) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with running() as gateway:
        await gateway.create()
        async with socket_of(gateway) as (reader, writer):
            other = asyncio.create_task(others())
            writer.write(frame(kind) * COUNT + frame(PING, b"last"))
            async with within("the last ping is answered"):
                await reader.readuntil(frame_of_server(PONG, b"last"))
            other.cancel()

    assert turns > COUNT / (2 * arrivals.TURN_MESSAGES)


def frame_of_server(kind: int, payload: bytes) -> bytes:
    return bytes([0x80 | kind, len(payload)]) + payload


@pytest.mark.parametrize("kind", [PING, PONG])
async def test_control_frames_are_charged(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = Usage("a token", TokenQuotas(requests_per_s=1_000_000), lambda: 0.0)
    caller = Caller("a token", ())
    caller.usage = usage
    monkeypatch.setattr(arrivals, "caller_of", lambda _request: caller)
    async with running() as gateway:
        await gateway.create()
        async with socket_of(gateway) as (reader, writer):
            writer.write(frame(kind) * 100 + frame(PING, b"last"))
            async with within("the last ping is answered"):
                await reader.readuntil(frame_of_server(PONG, b"last"))
            assert usage._requests is not None
            bucket = usage._requests

            async def is_charged() -> bool:
                return bucket._level <= 1_000_000 - 101

            await until(is_charged, "all are charged")


async def test_a_large_message_is_parsed_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining, unmasking and decoding a message of the largest size takes 40 ms."""
    turn = 0
    ended: list[int] = []
    look = arrivals.Arrivals._look

    def noting(self: arrivals.Arrivals) -> None:
        before, waiting = self._partial, self._looked
        look(self)
        if self._looked > waiting and before >= arrivals.LARGE_BYTES:
            ended.append(turn)

    async def others() -> None:
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    monkeypatch.setattr(arrivals.Arrivals, "_look", noting)
    large = large_frame(b" " * arrivals.LARGE_BYTES + b"x")
    async with running() as gateway, contextlib.AsyncExitStack() as stack:
        await gateway.create()
        talks = [await stack.enter_async_context(socket_of(gateway)) for _ in range(SOCKETS)]
        for _, writer in talks:
            writer.write(large[:-1])
            await writer.drain()
        await until_held(gateway, SOCKETS * (len(large) - 1), "all but the last bytes came")
        other = asyncio.create_task(others())
        for _, writer in talks:
            writer.write(large[-1:])
        for reader, _ in talks:
            async with within("each message is answered"):
                await reader.readexactly(2)
        other.cancel()

    assert len(ended) == SOCKETS
    # The first one is parsed as it is read, and the next one by a callback: both may be before the others' turn.
    assert max(Counter(ended).values()) <= 2


def large_frame(payload: bytes) -> bytes:
    return bytes([0x80 | TEXT, 0x80 | 127]) + len(payload).to_bytes(8) + bytes(4) + payload


async def upload(gateway: Gateway, chunks: bytes) -> bytes:
    """The first line of the answer to a body in these chunks."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.listener.port)
    try:
        writer.write(
            b"POST /v1/ledgers/1/entries HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
            b"Content-Type: application/json\r\nExpect: 100-continue\r\n\r\n"
        )
        async with within("the body is answered"):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(chunks)
            return await reader.readline()
    finally:
        writer.close()


def chunked(size: int, count: int) -> bytes:
    one = b"%x\r\n%b\r\n" % (size, b" " * size)
    return b'a\r\n{"text":""\r\n' + one * count + b"1\r\n}\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("size", "count", "expected"),
    [
        (1, 200_000, b"400"), (2, 300_000, b"400"), (4, 400_000, b"400"),
        (1, 10_000, b"201"), (32, 50_000, b"201"), (5_000, 300, b"201"),
    ],
)  # fmt: skip
async def test_a_body_in_chunks_of_a_few_bytes_is_refused(
    size: int, count: int, expected: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as gateway:
        await gateway.create()
        line = await upload(gateway, chunked(size, count))
        assert line.split()[1] == expected
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


LARGE = b"," * (INLINE_BYTES_MAX + 1)


def broken(_data: bytes, _count: int | None) -> None:
    raise ValueError("broken")


def length(data: bytes, _count: int | None) -> int:
    return len(data)


def length_slowly(data: bytes, _count: int | None) -> int:
    began_s = time.thread_time()
    while time.thread_time() - began_s < 2 * sys.getswitchinterval():
        pass
    return len(data)


async def test_a_large_body_waits_after_a_long_parse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    room, request = Room(Limits()), make_mocked_request("POST", "/")
    loop, pauses = asyncio.get_running_loop(), list[float]()
    call_later = loop.call_later

    def noted(
        delay: float, callback: Callable[..., object], *args: Any, **kwargs: Any
    ) -> asyncio.TimerHandle:
        if callback == room.parsing.release:
            pauses.append(delay)
        return call_later(delay, callback, *args, **kwargs)

    monkeypatch.setattr(loop, "call_later", noted)
    async with within("all are parsed"):
        for parse in (length_slowly, length, length_slowly):
            assert await body.in_turn(request, room, LARGE, parse) == len(LARGE)
            assert room.parsing.locked(), "the next one waits for the pause"
    assert pauses[0] >= 2 * sys.getswitchinterval()
    assert pauses[1] == 0


async def test_marks_are_counted_once_and_only_for_json() -> None:
    room, request = Room(Limits()), make_mocked_request("POST", "/")

    assert await body.in_turn(request, room, LARGE, lambda _, count: count) == len(LARGE)
    assert await body.in_turn(request, room, LARGE, lambda _, count: count, is_json=False) is None
    assert await body.in_turn(request, room, b",", lambda _, count: count) is None


async def test_a_large_body_that_cannot_be_parsed_keeps_nobody_waiting_for_ever() -> None:
    room, request = Room(Limits()), make_mocked_request("POST", "/")

    async with within("the next one is parsed"):
        with pytest.raises(ValueError, match="broken"):
            await body.in_turn(request, room, LARGE, broken)
        waiting = asyncio.create_task(body.in_turn(request, room, LARGE, length))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert await body.in_turn(request, room, LARGE, length) == len(LARGE)
