"""Crowds: more connections than there is room for, many open ledgers, large listings, large messages."""

import asyncio
import contextlib
import resource
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

import orjson

from quorumlog.errors import QuorumLogError
from quorumlog.net.connections import ListenLimits
from tests.outside.attack import raw
from tests.outside.attack.arena import Arena
from tests.outside.attack.report import Kind
from tests.outside.attack.slow import message, upgrade

BEYOND: Final = 200
"""Connections above the limit."""
OWN_DESCRIPTORS: Final = 500
"""Of the attackers' process, for all else."""
OPENERS: Final = 100
LEDGERS: Final = 400
CUSTOM_KEYS: Final = 15
CUSTOM_BYTES: Final = 1000
"""15 KB of metadata a ledger, of 16 KiB that are allowed."""
LISTED: Final = 1500
LISTERS: Final = 12
LISTINGS: Final = 3
"""Of each lister, one after another."""
MESSAGES: Final = 60
MESSAGE_BYTES: Final = (16 << 20) - 1024
ENTRIES: Final = 16
ENTRY_CHARS: Final = (1 << 20) - 256
"""The length of each entry in Base64: `ENTRIES` of them make a message of about `MESSAGE_BYTES`."""
PIECE_BYTES: Final = 256 << 10
FLOOD_S: Final = 60.0


async def connections(arena: Arena) -> None:
    """Connections to one gateway to the limit and beyond: who comes too late gets the promised 429."""
    limit = ListenLimits().connections_max
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = min(limit + BEYOND, hard - OWN_DESCRIPTORS)
    room = asyncio.Semaphore(OPENERS)
    refused: list[raw.Answer] = []
    async with AsyncExitStack() as stack:

        async def one() -> None:
            async with room:
                answer = await _opened(arena, stack)
                if answer is not None:
                    refused.append(answer)

        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(one())
        # The last ones may be answered a little later than they are taken.
        for _ in range(BEYOND // 10):
            answer = await arena.send("gateway-1", _LIVE, may_end=True)
            if answer is not None and answer.status == 429:
                refused.append(answer)
        is_full = count > limit or count > hard - OWN_DESCRIPTORS
        if is_full and not any(answer.status == 429 for answer in refused):
            arena.find(
                Kind.ANSWER, f"gateway-1 took or dropped {count} connections, and said no 429"
            )
        for answer in refused:
            arena.report.statuses[str(answer.status)] += 1


_LIVE: Final = b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


async def _opened(arena: Arena, stack: AsyncExitStack) -> raw.Answer | None:
    """A connection that stays and says nothing; an answer where there is one at once."""
    peer = arena.peer()
    arena.report.requests += 1
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(FLOOD_S):
            reader, _ = await stack.enter_async_context(
                raw.connected(arena.address("gateway-1"), peer)
            )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                return await raw.answer_of(reader)
    return None


async def ledgers(arena: Arena) -> None:
    """Many open ledgers, each with an entry, from a few peers."""
    made: list[int] = []

    async def one(number: int) -> None:
        name = f"gateway-{1 + number % 2}"
        create = b"POST /v1/ledgers HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n"
        answer = await arena.send(name, arena.signed(name, create))
        if answer is None or answer.status != 201:
            return
        made.append(orjson.loads(answer.body)["ledger_id"])
        await arena.send(
            name,
            f"POST /v1/ledgers/{made[-1]}/entries HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\n"
            "Content-Type: application/octet-stream\r\n\r\nx".encode(),
        )

    await arena.crowd(partial(one, number) for number in range(LEDGERS))
    await _delete(arena, made)


async def _delete(arena: Arena, made: list[int]) -> None:
    async def gone(ledger_id: int) -> None:
        with contextlib.suppress(QuorumLogError):
            await client.delete_ledger(ledger_id)

    async with arena.client(deadline_s=60) as client:
        await arena.crowd(partial(gone, ledger_id) for ledger_id in made)


async def listings(arena: Arena) -> None:
    """Many who list ledgers with much metadata: a listing comes, and others make ledgers meanwhile."""
    made: list[int] = []
    custom = {f"key-{number}": "x" * CUSTOM_BYTES for number in range(CUSTOM_KEYS)}

    async def create() -> None:
        # A crowd may be refused; that the bystander makes ledgers all the while is what counts.
        with contextlib.suppress(QuorumLogError):
            made.append((await client.create_ledger(metadata=custom)).ledger_id)

    async with arena.client(deadline_s=60) as client:
        await arena.crowd(create for _ in range(LISTED))
    arena.report.requests += len(made)

    async def lister(number: int) -> None:
        for page in range(LISTINGS):
            name = f"gateway-{1 + (number + page) % 2}"
            path = ("/v1/ledgers?limit=5000", "/v1/logs?limit=1000")[number % 4 == 3]
            if not await _came(arena, name, path):
                arena.find(Kind.HANG, f"{name} has no answer to GET {path} within {FLOOD_S:g} s")

    async with asyncio.TaskGroup() as group:
        for number in range(LISTERS):
            group.create_task(lister(number))
    await _delete(arena, made)


async def _came(arena: Arena, name: str, path: str) -> bool:
    """Whether an answer comes, where those that say so are asked for again."""
    head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
    loop = asyncio.get_running_loop()
    end = loop.time() + FLOOD_S
    while loop.time() < end:
        answer = await arena.send(name, arena.signed(name, head))
        if answer is None or answer.status == 200:
            return answer is not None
        await asyncio.sleep(float(answer.headers.get("retry-after", "1")))
    return False


async def honest_messages(arena: Arena) -> None:
    """As many messages as in `messages`, as large, which are batches to append."""
    batch = orjson.dumps({"entries": [{"data": "x" * ENTRY_CHARS}] * ENTRIES})
    await _large_messages(arena, batch, _first_message)


async def messages(arena: Arena) -> None:
    """Large WebSocket messages that are all but complete: what is not yet taken counts as well."""
    # Each message is no JSON: a problem comes, and the end.
    await _large_messages(arena, b" " * MESSAGE_BYTES + b"x", raw.ended)


async def _large_messages(
    arena: Arena, data: bytes, answered: Callable[[asyncio.StreamReader], Awaitable[None]]
) -> None:
    """Send `MESSAGES` messages at the same time, whose last bytes come together, and wait until all are `answered`."""
    whole = message(data)
    async with AsyncExitStack() as stack:
        talks = []
        for number in range(MESSAGES):
            arena.report.requests += 1
            address = arena.address(f"gateway-{1 + number % 2}")
            with contextlib.suppress(OSError):
                talks.append(await stack.enter_async_context(raw.connected(address, arena.peer())))
        hello = upgrade(f"/v1/ledgers/{arena.ledger_id}/ws")
        most = memoryview(arena.signed("gateway-1", hello) + whole[:-1])
        await asyncio.gather(*(_sent(writer, most) for _, writer in talks))
        for _, writer in talks:
            writer.write(whole[-1:])
        for number, (reader, _) in enumerate(talks):
            try:
                async with asyncio.timeout(arena.hang_s):
                    await answered(reader)
            except TimeoutError:
                name = f"gateway-{1 + number % 2}"
                arena.find(Kind.HANG, "has no end for a large message", name, hello, "127.0.0.2")


async def _first_message(reader: asyncio.StreamReader) -> None:
    """Read to the first message that comes, or to the connection's end."""
    if await raw.answer_of(reader) is not None:
        await reader.read(1)


async def _sent(writer: asyncio.StreamWriter, data: memoryview) -> None:
    """Send all, as long as it goes on at all; the attacker holds a piece of it only."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(FLOOD_S):
            for start in range(0, len(data), PIECE_BYTES):
                writer.write(data[start : start + PIECE_BYTES])
                await writer.drain()
