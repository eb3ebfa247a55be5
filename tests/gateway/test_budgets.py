"""What one client takes of the room for bodies and requests, and what is left for the others."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from services.gateway.edge.limits import Limits
from services.gateway.interface import LedgerOptions
from tests.gateway.conftest import Gateway, running
from tests.gateway.test_slow_and_many import ENTRIES, answer
from tests.support.waiting import until

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
            pair = await asyncio.open_connection(
                "127.0.0.1", gateway.listener.port, local_addr=(STRANGER, 0)
            )
            stack.callback(pair[1].close)
            pair[1].write(sent)
            opened.append(pair)
        yield opened


def head(length: int, media: str = OCTETS["Content-Type"]) -> bytes:
    return (
        f"POST {ENTRIES} HTTP/1.1\r\nHost: h\r\nContent-Type: {media}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


async def until_gauge(gateway: Gateway, name: str, wanted: int, what: str) -> None:
    """Wait until a gauge of the edge, which this request itself may be part of, has a value."""

    async def is_there() -> bool:
        text = (await gateway.ask("GET", "/metrics")).body.decode()
        return f"\nquorumlog_http_{name} {float(wanted)}\n" in text

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
