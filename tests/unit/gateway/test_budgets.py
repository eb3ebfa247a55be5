"""Bounds on what clients may hold of a gateway at once, and what is given back when."""

import asyncio
import base64
import contextlib
import gc
import socket
import struct
import tracemalloc
from collections.abc import AsyncIterator

import pytest

from quorumlog.net.connections import Connection, ListenLimits
from services.gateway.edge.http.limits import Limits
from services.gateway.interface import LedgerOptions
from tests.support.waiting import until
from tests.unit.gateway.conftest import Gateway, running
from tests.unit.gateway.test_slow_and_many import ENTRIES, answer

OCTETS = {"Content-Type": "application/octet-stream"}
FRAMES = "application/vnd.quorumlog.frames"
STRANGER = "127.0.0.2"


@contextlib.asynccontextmanager
async def strangers(
    gateway: Gateway, count: int, sent: bytes
) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    """Connections of another address, each of which has sent the same."""
    async with contextlib.AsyncExitStack() as stack:
        opened = []
        for _ in range(count):
            raw = socket.socket()
            # The kernel would take megabytes of an answer that nobody reads.
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.setblocking(False)
            raw.bind((STRANGER, 0))
            address = ("127.0.0.1", gateway.listener.port)
            await asyncio.get_running_loop().sock_connect(raw, address)
            pair = await asyncio.open_connection(sock=raw, limit=4096)
            stack.callback(pair[1].close)
            pair[1].write(sent)
            opened.append(pair)
        yield opened


def head(length: int, media: str = OCTETS["Content-Type"]) -> bytes:
    return (
        f"POST {ENTRIES} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {media}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


async def gauge(gateway: Gateway, name: str) -> float:
    text = (await gateway.ask("GET", "/metrics")).body.decode()
    return float(text.split(f"\nquorumlog_http_{name} ")[1].split("\n")[0])


async def until_gauge(gateway: Gateway, name: str, wanted: int, what: str) -> None:
    """Wait until a gauge of the edge, which this request itself may be part of, has a value."""

    async def is_there() -> bool:
        return await gauge(gateway, name) == wanted

    await until(is_there, what)


async def test_bytes_that_are_announced_and_do_not_come_take_no_room() -> None:
    async with running() as gateway:
        await gateway.create()
        async with strangers(gateway, 10, head(64 << 20, FRAMES)):
            await until_gauge(gateway, "requests_in_work", 11, "all ten are in work")
            await until_gauge(gateway, "held_bytes", 0, "nothing is held")
            body = await gateway.ask("POST", ENTRIES, b"x" * 1000, headers=OCTETS)

            assert body.status == 201, body


async def test_one_address_does_not_get_the_last_room_for_bodies() -> None:
    limits = Limits(held_bytes_max=800_000, peer_held_bytes_max=100_000)
    async with running(limits=limits) as gateway:
        await gateway.engine.create(LedgerOptions())
        unfinished = head(100_000) + b"x" * 99_999
        async with strangers(gateway, 7, unfinished):
            await until_gauge(gateway, "held_bytes", 7 * 99_999, "seven bodies have nearly come")
            async with strangers(gateway, 1, unfinished) as ((reader, _),):
                status, problem = await answer(reader)

            assert (status, problem["code"]) == (429, "overloaded")
            assert "PEER_HELD_BYTES_MAX" in str(problem["detail"])
            fair = await gateway.ask("POST", ENTRIES, b"x" * 90_000, headers=OCTETS)
            assert fair.status == 201, fair
        await until_gauge(gateway, "held_bytes", 0, "what was cut off holds nothing")


async def test_one_address_does_not_get_the_last_places_of_requests() -> None:
    async with running(limits=Limits(requests_max=16, peer_requests_max=2)) as gateway:
        await gateway.create()
        async with strangers(gateway, 14, head(10)):
            await until_gauge(gateway, "requests_in_work", 15, "fourteen are in work")
            async with strangers(gateway, 1, head(10)) as ((reader, _),):
                status, problem = await answer(reader)

            assert (status, problem["code"]) == (429, "overloaded")
            assert "PEER_REQUESTS_MAX" in str(problem["detail"])
            fair = await gateway.ask("POST", ENTRIES, b"x", headers=OCTETS)
            assert fair.status == 201, fair


async def test_one_address_does_not_get_the_last_places_of_long_polls() -> None:
    path = f"{ENTRIES}?wait_ms=60000"
    async with running(limits=Limits(waiters_max=8, peer_waiters_max=1)) as gateway:
        await gateway.create()
        gateway.engine.wait_s_min = 3600.0  # no wait of these ends by itself
        async with strangers(gateway, 7, ask(path)):
            await until_gauge(gateway, "waiters", 7, "seven wait")
            gateway.engine.wait_s_min = 0.0
            async with strangers(gateway, 1, ask(path)) as ((reader, _),):
                status, problem = await answer(reader)

            assert (status, problem["code"]) == (429, "overloaded")
            assert "PEER_WAITERS_MAX" in str(problem["detail"])
            fair = await gateway.ask("GET", f"{ENTRIES}?wait_ms=10")
            assert fair.status == 200, fair
        await until_gauge(gateway, "waiters", 0, "who went away waits no more")


PAGE = f"{ENTRIES}?limit=10000&max_bytes={64 << 20}"
SCARCE = Limits(answers_bytes_max=32 << 20, peer_answers_bytes_max=2 << 20)


async def _holds(gateway: Gateway, count: int) -> bool:
    return await gauge(gateway, "answers_bytes") > count


def ask(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


async def with_entries(gateway: Gateway, count: int) -> list[bytes]:
    """A ledger of entries of 1 MB."""
    await gateway.engine.create(LedgerOptions())
    payloads = [bytes([n]) * 1_000_000 for n in range(count)]
    await gateway.engine.append(1, payloads)
    return payloads


@pytest.mark.parametrize("accept", ["application/json", FRAMES])
async def test_unread_answers_are_bounded_and_others_still_get_theirs(accept: str) -> None:
    async with running(limits=SCARCE) as gateway:
        await with_entries(gateway, 40)
        async with strangers(gateway, 12, ask(PAGE, f"Accept: {accept}")):
            await until(lambda: _holds(gateway, 20 << 20), "the answers fill the room")
            assert await gauge(gateway, "answers_bytes") <= 32 << 20

            fair = await gateway.ask("GET", ENTRIES + "?limit=1")

            assert fair.status == 200, fair
        await until_gauge(gateway, "answers_bytes", 0, "what was cut off takes no room")


@pytest.mark.parametrize("path", [ENTRIES, "/v1/ledgers/1/entries/0"])
async def test_any_large_answer_counts_until_it_is_read(path: str) -> None:
    async with running(limits=Limits(answers_bytes_max=48 << 20)) as gateway:
        await gateway.engine.create(LedgerOptions())
        await gateway.engine.append(1, [bytes(16 << 20)])
        async with strangers(gateway, 6, ask(path)):
            await until(lambda: _holds(gateway, 16 << 20), "the answers fill the room")
            assert await gauge(gateway, "answers_bytes") <= 48 << 20
        await until_gauge(gateway, "answers_bytes", 0, "what was cut off takes no room")


async def test_a_large_page_is_sent_in_parts_and_is_what_it_would_be_in_one() -> None:
    async with running() as gateway:
        payloads = await with_entries(gateway, 5)

        page = await gateway.ask("GET", PAGE)
        frames = await gateway.ask("GET", PAGE, headers={"Accept": FRAMES})
        head = await gateway.ask("HEAD", PAGE)

        found = page.json
        assert [base64.b64decode(entry["data"]) for entry in found.pop("entries")] == payloads
        assert found == {
            "ledger_id": 1,
            "next": 5,
            "last_add_confirmed": 4,
            "closed": False,
            "lac_source": "writer",
        }
        assert [payload for _, payload in unframed(frames.body)] == payloads
        assert frames.headers["Next-Entry-Id"] == "5"
        assert (head.status, head.body) == (200, b"")
        await until_gauge(gateway, "answers_bytes", 0, "what was read takes no room")


def unframed(data: bytes) -> list[tuple[int, bytes]]:
    found = []
    while data:
        entry_id, size = struct.unpack_from(">QI", data)
        found.append((entry_id, data[12 : 12 + size]))
        data = data[12 + size :]
    return found


@pytest.mark.parametrize(
    "accept", ["application/json", FRAMES, "application/x-ndjson", "text/event-stream"]
)
async def test_a_connection_that_takes_nothing_ends_and_frees_all(
    accept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled: set[Connection] = set()
    pause = Connection.pause_writing

    def paused(connection: Connection) -> None:
        stalled.add(connection)
        pause(connection)

    monkeypatch.setattr(Connection, "pause_writing", paused)
    async with running(listen=ListenLimits(stalled_answer_timeout_s=0.3)) as gateway:
        await with_entries(gateway, 20)
        async with strangers(gateway, 3, ask(PAGE, f"Accept: {accept}")):
            await until(lambda: len(stalled) == 3, "all three answers are stalled")

            await until(
                lambda: gateway.listener.connections.used == 0, "all connections have ended"
            )

            await until_gauge(gateway, "answers_bytes", 0, "nothing is held")


@pytest.mark.parametrize("accept", ["application/json", "application/x-ndjson"])
async def test_a_broken_connection_frees_all_without_a_garbage_collection(accept: str) -> None:
    async with running() as gateway:
        await with_entries(gateway, 20)
        await gauge(gateway, "answers_bytes")
        gc.collect()
        gc.disable()
        tracemalloc.start(1)
        try:
            before, _ = tracemalloc.get_traced_memory()
            async with strangers(gateway, 2, ask(PAGE, f"Accept: {accept}")):
                await until(lambda: _holds(gateway, 1 << 20), "the answers wait")
            await until_gauge(gateway, "answers_bytes", 0, "they are given up")
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            gc.enable()

        assert after - before < 1 << 20


MESSAGE = "{" + " " * (4 << 20) + "x"
FREE_BYTES = 1 << 20
"""Less than one form of one message."""


@contextlib.asynccontextmanager
async def counted(gateway: Gateway) -> AsyncIterator[None]:
    """All memory that a block takes is free after it, although nothing collects cycles."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield
        await until(
            lambda: tracemalloc.get_traced_memory()[0] - before < FREE_BYTES, "all is free", 10
        )
        assert gateway.engine.entries[1] == []
    finally:
        tracemalloc.stop()
        gc.enable()


@pytest.mark.parametrize("is_text", [True, False])
async def test_a_refused_socket_message_is_free_at_once(gateway: Gateway, *, is_text: bool) -> None:
    await gateway.create()

    async with (
        counted(gateway),
        gateway.session.ws_connect(f"{gateway.url}/v1/ledgers/1/ws") as socket,
    ):
        if is_text:
            await socket.send_str(MESSAGE)
        else:
            await socket.send_bytes(b"\0\0\0\2" + MESSAGE.encode())
        assert (await socket.receive_json())["status"] in (400, 413)


async def test_a_refused_line_of_a_stream_is_free_at_once(gateway: Gateway) -> None:
    await gateway.create()

    async with counted(gateway):
        answer = await gateway.ask(
            "POST",
            "/v1/ledgers/1/entries",
            MESSAGE.encode(),
            headers={"Content-Type": "application/x-ndjson"},
        )
        assert answer.status == 400
        del answer
