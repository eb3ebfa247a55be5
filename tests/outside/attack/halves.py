"""Halves: stores that fail by half while strangers ask, and clients that end their half of a connection."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Final

import asyncpg
from redis.asyncio import Redis

from loadtest.waiting import DeadlineMissed, until
from quorumlog.client import Client
from services.local.embedded import USER
from tests.outside.attack.api import Operation, operations
from tests.outside.attack.arena import Arena
from tests.outside.attack.hostile import Maker, Request, meant, turns_of
from tests.outside.attack.report import Kind

TROUBLE_REQUESTS: Final = 100
"""Requests that are sent during each failure."""
JSON: Final = (("Content-Type", "application/json"),)
MENDED_S: Final = 30.0
"""How long it may take after a failure until a ledger can be created."""
SPOOFED: Final = (
    "X-Forwarded-For: 127.0.0.1, 192.0.2.9",
    'Forwarded: for="[2001:db8::1]";proto=https',
    "X-Forwarded-For: " + ",".join(["10.0.0.1"] * 500),
    "X-Forwarded-For: unknown, [::1]:99999, \xff",
)
_FULL: Final = """
CREATE OR REPLACE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END $$;
CREATE TRIGGER no_room BEFORE INSERT OR UPDATE ON ledgers FOR EACH ROW EXECUTE FUNCTION no_room();
"""


@asynccontextmanager
async def _redis(arena: Arena) -> AsyncIterator[Any]:
    password = (arena.cluster.data / "redis" / "password").read_text()
    async with Redis.from_url(f"redis://:{password}@{arena.cluster.url('redis')}/0") as client:
        yield client


@asynccontextmanager
async def _postgres(arena: Arena) -> AsyncIterator[Any]:
    password = (arena.cluster.data / "postgres" / "password").read_text()
    where = arena.cluster.url("postgres")
    connection = await asyncpg.connect(f"postgresql://{USER}:{password}@{where}/postgres")
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def _meanwhile(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


@asynccontextmanager
async def redis_is_full(arena: Arena) -> AsyncIterator[None]:
    """Redis answers reads and has no memory for a write."""
    async with _redis(arena) as redis:
        await redis.config_set("maxmemory", "1")
        yield
        await redis.config_set("maxmemory", "0")


@asynccontextmanager
async def redis_is_a_replica(arena: Arena) -> AsyncIterator[None]:
    """Redis answers reads and is read-only, as after a failover."""
    async with _redis(arena) as redis:
        await redis.execute_command("REPLICAOF", "127.0.0.1", "1")
        yield
        await redis.execute_command("REPLICAOF", "NO", "ONE")


@asynccontextmanager
async def redis_is_emptied(arena: Arena) -> AsyncIterator[None]:
    """Redis forgets everything again and again."""
    async with _redis(arena) as redis:

        async def empty() -> None:
            while True:
                await redis.flushall()
                await asyncio.sleep(0.2)

        async with _meanwhile(empty()):
            yield


@asynccontextmanager
async def postgres_is_read_only(arena: Arena) -> AsyncIterator[None]:
    """Postgres answers reads and takes no change."""
    async with _postgres(arena) as postgres:
        await postgres.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        await postgres.execute("SELECT pg_reload_conf()")
        yield
        await postgres.execute("SET default_transaction_read_only = off")
        await postgres.execute("ALTER SYSTEM RESET default_transaction_read_only")
        await postgres.execute("SELECT pg_reload_conf()")


@asynccontextmanager
async def postgres_is_full(arena: Arena) -> AsyncIterator[None]:
    """Postgres answers reads and has no room for a ledger's row."""
    async with _postgres(arena) as postgres:
        await postgres.execute(_FULL)
        yield
        await postgres.execute("DROP TRIGGER no_room ON ledgers; DROP FUNCTION no_room()")


@asynccontextmanager
async def postgres_waits(arena: Arena) -> AsyncIterator[None]:
    """Postgres answers reads, and changes wait for a lock most of the time."""
    async with _postgres(arena) as postgres:

        async def lock() -> None:
            while True:
                async with postgres.transaction():
                    await postgres.execute("LOCK TABLE ledgers IN EXCLUSIVE MODE")
                    await asyncio.sleep(1.5)
                await asyncio.sleep(0.5)

        async with _meanwhile(lock()):
            yield


TROUBLES: Final[tuple[Callable[[Arena], AbstractAsyncContextManager[None]], ...]] = (
    redis_is_full, redis_is_a_replica, redis_is_emptied,
    postgres_is_read_only, postgres_is_full, postgres_waits,
)  # fmt: skip


ORDINARY: Final = (
    ("POST", "/v1/ledgers", "{}"),
    ("POST", "/v1/ledgers", '{"metadata":{"namespace":"halves"}}'),
    ("PUT", "/v1/logs/halves-%d", "{}"),
    ("POST", "/v1/logs/halves-%d/records", '{"text":"a"}'),
    ("PUT", "/v1/logs/halves-%d/consumers/c", '{"offset":0}'),
    ("POST", "/v1/logs/halves-%d/consumers/c/lease", '{"holder":"w"}'),
    ("DELETE", "/v1/logs/halves-%d", ""),
    ("POST", "/v1/transactions", '{"log":"halves-1"}'),
    ("GET", "/v1/ledgers?limit=5", ""),
    ("GET", "/v1/logs?limit=5", ""),
    ("GET", "/v1/cluster", ""),
    ("GET", "/v1/logs/halves-%d/records?from=0", ""),
)
"""Valid requests of ordinary clients."""


async def stores(arena: Arena) -> None:
    """Ordinary requests while a store fails by half: documented answers, and what needs no store goes on."""
    found = await operations(arena.cluster)
    dice = arena.dice
    async with Client(arena.cluster.gateways[0], token=arena.token or None) as client:
        ledger_id = (await client.create_ledger()).ledger_id

    async def one() -> None:
        method, path, text = dice.choice(ORDINARY)
        body = text.encode()
        made = Request(
            method, path.replace("%d", str(dice.randrange(9))), JSON if body else (), body
        )
        name = f"gateway-{dice.randint(1, 2)}"
        data = arena.signed(name, made.bytes(arena.address(name)))
        await arena.send(name, data, operation=meant(found, "gateway", made), method=method)

    for trouble in TROUBLES:
        name = trouble.__name__
        async with trouble(arena):
            jobs = [one for _ in range(min(arena.requests, TROUBLE_REQUESTS))]
            await arena.crowd([*jobs, *[partial(_works, arena, name, ledger_id)] * 5])
        await _mended(arena, name)


async def _works(arena: Arena, trouble: str, ledger_id: int) -> None:
    """An append to an open ledger and a read need no store."""
    entries = f"/v1/ledgers/{ledger_id}/entries"
    for made in (
        Request("POST", entries, (("Content-Type", "application/octet-stream"),), b"x"),
        Request("GET", f"{entries}?limit=1", (), b""),
    ):
        data = arena.signed("gateway-1", made.bytes(arena.address("gateway-1")))
        answer = await arena.send("gateway-1", data, method=made.method)
        if answer is not None and answer.status >= 300:
            arena.find(
                Kind.ANSWER, f"{trouble}: {answer.status} {answer.body[:300]!r}", "gateway-1", data
            )


async def _mended(arena: Arena, trouble: str) -> None:
    made = Request("POST", "/v1/ledgers", JSON, b"{}")
    data = arena.signed("gateway-1", made.bytes(arena.address("gateway-1")))

    async def is_mended() -> bool:
        answer = await arena.send("gateway-1", data)
        return answer is not None and answer.status == 201

    try:
        await until(is_mended, f"a ledger is created after {trouble}", MENDED_S)
    except DeadlineMissed as missed:
        arena.find(Kind.HANG, str(missed))


async def half_closed(arena: Arena) -> None:
    """Hostile requests under false addresses, whose client then sends no more: each gets its answer."""
    found = await operations(arena.cluster)
    dice = arena.dice
    maker = Maker(arena, dice)

    async def one(name: str, operation: Operation) -> None:
        made = maker.request(operation)
        first, end, rest = made.bytes(arena.address(name)).partition(b"\r\n")
        data = first + end + dice.choice(SPOOFED).encode() + end + rest
        # A WebSocket needs both directions.
        is_socket = b"upgrade" in data.lower()
        await arena.send(
            name, data, operation=meant(found, operation.kind, made), method=made.method,
            may_end=is_socket, ends=True,
        )  # fmt: skip

    await arena.crowd(partial(one, *turn) for turn in turns_of(found, dice, arena.requests))
