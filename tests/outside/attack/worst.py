"""Requests that ask for as much work as their bytes can: worst bodies on every route, and floods of small things."""

import asyncio
from functools import partial
from typing import Final

from quorumlog.zstd import zstd
from tests.outside.attack import raw
from tests.outside.attack.api import Operation, operations
from tests.outside.attack.arena import JSON, Arena
from tests.outside.attack.hostile import Maker, Request
from tests.outside.attack.report import Kind
from tests.outside.attack.slow import message, upgrade
from tests.support.worst_bodies import VALUES

BODIES: Final = 150
BODY_BYTES: Final = 4 << 20
FLOOD_S: Final = 5.0
PIECE: Final = 2_000
"""Frames or chunks of one write."""
FLOODS: Final[dict[str, bytes]] = {
    "pings": message(b"", 9),
    "pongs": message(b"", 10),
    "pings of 125 bytes": message(b"p" * 125, 9),
    "empty messages": message(b"", 2),
    "empty texts": message(b"", 1),
    "fragments": message(b"x", 2).replace(b"\x82", b"\x02", 1),
    "chunks": b"1\r\nx\r\n",
    "blank lines": b"1\r\n\n\r\n",
}


async def bodies(arena: Arena) -> None:
    """Bodies that would become millions of values, as they are and compressed, on every operation that takes JSON."""
    found = [
        one
        for one in await operations(arena.cluster)
        if one.kind == "gateway" and JSON in one.bodies
    ]
    dice = arena.dice
    maker = Maker(arena, dice)

    async def one(operation: Operation, kind: str) -> None:
        fields = sorted(
            {name for body in operation.bodies[JSON].values() for name in body} | {"json"}
        )
        value = VALUES[kind](BODY_BYTES)
        data = dice.choice((value, b'{"%b":%b}' % (dice.choice(fields).encode(), value)))
        headers = [("Content-Type", JSON)]
        if dice.random() < 0.7:
            data = zstd.compress(data, 1)
            headers.append(("Content-Encoding", "zstd"))
        made = Request(operation.method, maker.path(operation), tuple(headers), data)
        name = dice.choice(("gateway-1", "gateway-2"))
        sent = made.bytes(arena.address(name))
        await arena.send(name, sent, operation=operation, method=operation.method)

    await arena.crowd(
        partial(one, dice.choice(found), dice.choice(list(VALUES))) for _ in range(BODIES)
    )


async def floods(arena: Arena) -> None:
    """One connection each that sends small things without a pause: control frames, empty messages, chunks of a byte."""
    for what, unit in FLOODS.items():
        name = arena.dice.choice(("gateway-1", "gateway-2"))
        path = f"/v1/ledgers/{arena.ledger_id}"
        if unit.endswith(b"\r\n"):
            hello = (
                f"POST {path}/entries HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/x-ndjson\r\n"
                "Transfer-Encoding: chunked\r\n\r\n"
            ).encode()
        else:
            hello = upgrade(f"{path}/ws")
        arena.report.requests += 1
        async with raw.connected(arena.address(name), arena.peer()) as (reader, writer):
            writer.write(arena.signed(name, hello))
            both = [
                asyncio.create_task(_read(reader)),
                asyncio.create_task(_flood(writer, unit * PIECE)),
            ]
            await asyncio.wait(both, timeout=FLOOD_S, return_when=asyncio.FIRST_COMPLETED)
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
        if not (await _answers(arena, name)):
            arena.find(Kind.HANG, f"{name} answers nobody after {what}", name, hello)


async def _read(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass


async def _flood(writer: asyncio.StreamWriter, data: bytes) -> None:
    while True:
        writer.write(data)
        await writer.drain()


async def _answers(arena: Arena, name: str) -> bool:
    asked = b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    answer = await arena.send(name, asked)
    return answer is not None and answer.status == 200
