"""Slow and silent peers: they announce and do not send, ask and do not read, connect and say nothing."""

import asyncio
import base64
import contextlib
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final

from quorumlog import header
from tests.outside.attack import raw
from tests.outside.attack.api import KINDS
from tests.outside.attack.arena import Arena
from tests.outside.attack.report import Kind

OCTETS: Final = "application/octet-stream"
LARGE: Final = 64 << 20
ENTRY: Final = 1 << 20
LARGE_ENTRIES: Final = 62
READERS: Final = 24
SENDERS: Final = 3
"""Of each kind, at each place."""
ANNOUNCED: Final = {LARGE: 12, ENTRY: 70, 32 << 10: 40, 64: 40}
"""Bytes of a body: so many of these, large ones first, until nothing fits any more."""
WAVES: Final = 2
IDLE: Final = 40
"""At each port, of each kind."""
ABORT_S: Final = 0.05
DRIP_S: Final = 1.0
DEADLINE_S: Final = 45.0
"""For a head or a body that does not come: 10 s are promised, and more at a fair rate only."""


@dataclass(frozen=True, slots=True)
class Place:
    """A route that takes bodies."""

    name: str
    path: str
    media: str
    headers: str = ""
    method: str = "POST"
    length: int = LARGE

    def head(self, framing: str) -> bytes:
        """A request's head with this framing."""
        return (
            f"{self.method} {self.path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{self.headers}"
            f"Content-Type: {self.media}\r\n{framing}\r\n\r\n"
        ).encode()


def places(arena: Arena) -> list[Place]:
    """Where bodies are taken, in public and inside the cluster."""
    ledger = f"/v1/ledgers/{arena.ledger_id}"
    instance = f"{header.FORWARDED_WRITER}: {arena.instance}\r\n"
    secret = arena.secret_line
    instance += secret
    key = f"X-Ledger-Key: {base64.b64encode(bytes(32)).decode()}\r\n{secret}"
    return [
        Place("gateway-1", f"{ledger}/entries", "application/vnd.quorumlog.frames"),
        Place("gateway-2", f"{ledger}/entries", OCTETS, length=ENTRY),
        Place("gateway-1", "/v1/ledgers", "application/json", length=1 << 20),
        Place("gateway-1", f"/v1/logs/{arena.log}/records", "application/vnd.quorumlog.frames"),
        Place(
            "internal-1",
            f"/internal{ledger}/entries",
            "application/vnd.quorumlog.frames",
            instance,
        ),
        Place("internal-1", f"/internal/logs/{arena.log}/forwarded?call=append", OCTETS, instance),
        Place("bookie-1", f"{ledger}/entries", OCTETS, key, length=1 << 20),
        Place(
            "bookie-1", "/v1/maintenance", "application/json", secret, method="PUT", length=1 << 20
        ),
        Place("metadata-1", "/v1/ledgers", "application/json", secret, length=1 << 20),
        Place("metadata-1", "/v1/ledger-heads", "application/json", secret, length=1 << 20),
        Place(
            "autorecovery-1",
            "/v1/settings",
            "application/json",
            secret,
            method="PATCH",
            length=1 << 16,
        ),
    ]


def ways(place: Place) -> Iterator[tuple[bytes, bytes]]:
    """How a body does not come: what is sent at once, and what then drips, a byte a second."""
    length = f"Content-Length: {place.length}"
    yield place.head(length), b""
    yield place.head(length), b" "
    yield place.head("Transfer-Encoding: chunked") + b"fffff\r\n", b" "
    yield place.head(length)[:-4] + b"\r\nX: ", b"x"


async def senders(arena: Arena) -> None:
    """Bodies and heads that are announced, and come a byte a second or not at all."""
    async with asyncio.TaskGroup() as group:
        for place in places(arena):
            for first, drip in ways(place):
                for _ in range(SENDERS):
                    group.create_task(_send(arena, place.name, first, drip))


async def aborts(arena: Arena) -> None:
    """Uploads whose client goes away in the middle, with a word and without one."""

    async def one(place: Place, first: bytes, *, is_reset: bool) -> None:
        arena.report.requests += 1
        with contextlib.suppress(OSError):
            async with raw.connected(arena.address(place.name), arena.peer()) as (_, writer):
                writer.write(arena.signed(place.name, first) + b"{")
                await writer.drain()
                # The server is to see the head before the end.
                await asyncio.sleep(ABORT_S)
                if not is_reset:
                    writer.close()
                    await writer.wait_closed()

    await arena.crowd(
        partial(one, place, first, is_reset=is_reset)
        for place in places(arena)
        for first, _ in ways(place)
        for is_reset in (False, True)
    )


async def announced(arena: Arena) -> None:
    """Bodies that are announced and never come, of all sizes: they take the room of what does come."""
    path = f"/v1/ledgers/{arena.ledger_id}/entries"
    for _ in range(WAVES):
        async with asyncio.TaskGroup() as group:
            for name in ("gateway-1", "gateway-2"):
                for length, count in ANNOUNCED.items():
                    place = Place(name, path, "application/vnd.quorumlog.frames", length=length)
                    for _ in range(count):
                        head = place.head(f"Content-Length: {length}")
                        group.create_task(_send(arena, name, head, b""))


async def _send(arena: Arena, name: str, first: bytes, drip: bytes) -> None:
    """One slow request: it is answered or ended while it still comes."""
    peer = arena.peer()
    arena.report.requests += 1
    limit_s = min(DEADLINE_S, arena.hang_s)
    try:
        async with asyncio.timeout(limit_s):
            async with raw.connected(arena.address(name), peer) as (reader, writer):
                writer.write(arena.signed(name, first))
                answer = await _dripped(reader, writer, drip)
                if answer is not None:
                    arena.report.statuses[str(answer.status)] += 1
                    await raw.ended(reader)
    except TimeoutError:
        what = f"waits {limit_s:g} s for a body that does not come ({len(drip)} byte a second)"
        arena.find(Kind.HANG, what, name, first, peer)
    except OSError:
        return


async def _dripped(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, drip: bytes
) -> raw.Answer | None:
    """Send on, a piece at a time, until there is an answer."""
    answer = asyncio.ensure_future(raw.answer_of(reader))
    try:
        while not (await asyncio.wait([answer], timeout=DRIP_S))[0]:
            if drip:
                writer.write(drip)
        return answer.result()
    finally:
        answer.cancel()
        await asyncio.wait([answer])


async def large_ledger(arena: Arena) -> int:
    """A closed ledger whose page is as large as a page may be."""
    entries = [os.urandom(ENTRY - 1) for _ in range(LARGE_ENTRIES)]
    async with arena.client(deadline_s=120) as client:
        ledger = await client.create_ledger()
        # A few at a time: a batch has its limit, and in base64 a third more.
        for start in range(0, LARGE_ENTRIES, 8):
            await ledger.append_batch(entries[start : start + 8])
        await ledger.close()
    return ledger.ledger_id


def reads(ledger_id: int) -> list[bytes]:
    """Requests with large answers, one for each form."""
    path = f"/v1/ledgers/{ledger_id}/entries"
    page = f"{path}?max_bytes={LARGE}&limit=10000"
    forms = (
        (page, "application/vnd.quorumlog.frames"),
        (page, "application/json"),
        (path, "application/x-ndjson"),
        (path, "text/event-stream"),
    )
    return [
        f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: {media}\r\n\r\n".encode()
        for target, media in forms
    ]


async def readers(arena: Arena) -> None:
    """Large answers that nobody reads, and streams and sockets whose reader never reads."""
    ledger_id = await large_ledger(arena)
    asked = [one for one in reads(ledger_id) for _ in range(READERS // 4)]
    asked += [reads(ledger_id)[0]] * READERS
    async with AsyncExitStack() as stack:
        peers = [
            await _unread(arena, stack, f"gateway-{1 + number % 2}", data)
            for number, data in enumerate(asked)
        ]
        sockets = await _unread_sockets(arena, stack, ledger_id)
        await arena.let_go("answers that nobody reads", [*peers, *sockets])
    await _forget(arena, ledger_id)


async def _forget(arena: Arena, ledger_id: int) -> None:
    async with arena.client(deadline_s=60) as client:
        await client.delete_ledger(ledger_id)


async def _unread(arena: Arena, stack: AsyncExitStack, name: str, data: bytes) -> str:
    """Ask, and never read; the address that asked."""
    peer = arena.peer()
    arena.report.requests += 1
    try:
        reader, writer = await stack.enter_async_context(raw.connected(arena.address(name), peer))
    except OSError:
        return peer
    transport = writer.transport
    assert isinstance(transport, asyncio.ReadTransport)
    transport.pause_reading()
    del reader
    writer.write(arena.signed(name, data))
    return peer


def upgrade(path: str) -> bytes:
    """The head that asks for a WebSocket."""
    return (
        f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
    ).encode()


def message(data: bytes, opcode: int = 1) -> bytes:
    """A client's message: masked, with a mask that changes nothing."""
    size = len(data)
    if size < 126:
        head = bytes((0x80 | opcode, 0x80 | size))
    elif size < 1 << 16:
        head = bytes((0x80 | opcode, 0xFE)) + size.to_bytes(2, "big")
    else:
        head = bytes((0x80 | opcode, 0xFF)) + size.to_bytes(8, "big")
    return head + bytes(4) + data


async def _unread_sockets(arena: Arena, stack: AsyncExitStack, ledger_id: int) -> list[str]:
    """WebSockets that follow a large ledger and read nothing, not even a ping."""
    follow = message(b'{"tail":{"from":0,"encoding":"frames"}}')
    data = upgrade(f"/v1/ledgers/{ledger_id}/ws") + follow
    return [
        await _unread(arena, stack, f"gateway-{1 + number % 2}", data) for number in range(READERS)
    ]


HALVES: Final = (
    b"",
    b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n",
    b"POST /v1/ledgers HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{",
    b"POST /v1/ledgers HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
)
"""What was sent before a side was closed, or before silence."""


async def silent(arena: Arena) -> None:
    """Connections at rest, before a request and after one, half-closed ones, sockets that never pong."""
    upgrades = (
        ("gateway-1", f"/v1/ledgers/{arena.ledger_id}/ws"),
        ("gateway-2", f"/v1/logs/{arena.log}/ws"),
    )
    async with AsyncExitStack() as stack:
        names = [f"{kind}-1" for kind in KINDS]
        peers = [
            await _rest(arena, stack, name, HALVES[number % len(HALVES)], is_half=number % 2 == 1)
            for name in names
            for number in range(IDLE)
        ]
        for name, path in upgrades:
            peers += [await _unread(arena, stack, name, upgrade(path)) for _ in range(IDLE // 4)]
        await arena.let_go("silent connections", peers)


async def _rest(
    arena: Arena, stack: AsyncExitStack, name: str, first: bytes, *, is_half: bool
) -> str:
    """Say something and no more; with `is_half` say that no more will come."""
    peer = arena.peer()
    arena.report.requests += 1
    with contextlib.suppress(OSError):
        reader, writer = await stack.enter_async_context(raw.connected(arena.address(name), peer))
        writer.write(first)
        if is_half and writer.can_write_eof():
            writer.write_eof()
        del reader
    return peer
