"""A sliding TTL on real processes: gateways die and stand still, and a stream expires only if nobody has used it.

A client knows when its last access began that was answered. It may find the stream gone only if that is the whole TTL
ago: on a slow machine that happens to the client itself, and then it makes the stream again.
"""

import asyncio
import time
from dataclasses import dataclass

import aiohttp
import asyncpg

from loadtest.cluster import running
from loadtest.stores import Stores
from services.gateway.streams.operations import log_of
from tests.support.waiting import SETTLED_S, UNHURRIED, until
from tests.unit.logs.support import Answer, Http

TEXT = {"Content-Type": "text/plain"}
KEEPER, OTHER = 0, 1
"""The first gateway makes the streams, and is their keeper."""


@dataclass
class Stream:
    """A stream and its only user."""

    http: Http
    name: str
    ttl_s: int
    used_s: float = 0.0
    """When the last access began that was answered."""
    tries: int = 0
    """How often the last request was sent."""
    asked_s: float = 0.0
    """When the last request was sent for the last time."""
    kept_s: float = 0.0
    """When the gateway that made it was last known to be its keeper (`watch`)."""

    async def settled(self, method: str, at: int, body: bytes | None = None) -> Answer:
        """The answer to a request that is sent until it gets one."""
        headers = TEXT | ({"Stream-TTL": str(self.ttl_s)} if method == "PUT" else {})
        self.tries = 0

        async def ask() -> Answer | None:
            self.tries, self.asked_s = self.tries + 1, time.monotonic()
            path = f"/v1/stream/{self.name}"
            found = await self.http.ask(method, path, at=at, headers=headers, body=body)
            return None if found.status in (429, 503, 504) else found

        what = f"{method} {self.name}"
        found = await until(ask, what, SETTLED_S, passing=(aiohttp.ClientError, OSError))
        assert found is not None
        return found

    async def make(self, at: int) -> None:
        self.used_s = time.monotonic()
        found = await self.settled("PUT", at, b"x")
        # A try without an answer may have made it.
        assert found.status == 201 or (found.status == 200 and self.tries > 1), found

    async def use(self, at: int, method: str = "GET") -> None:
        """Read or append; make it again if it is gone, which it may be once nobody has used it for its TTL."""
        found = await self.settled(method, at, b"x" if method == "POST" else None)
        if found.status == 404:
            idle_s = time.monotonic() - self.used_s
            assert idle_s >= self.ttl_s, f"{self.name} was used {idle_s:.2f} s ago, and is gone"
            await self.make(at)
        else:
            assert found.status in (200, 204), found
            self.used_s = self.asked_s

    async def use_once(self, at: int, *, must_live: bool) -> None:
        """Read the stream without a deadline. No response may say that the stream has expired, unless
        an earlier try made another gateway the keeper.
        """
        found = await self.settled("GET", at)
        assert found.status == 200 or not must_live or self.tries > 1, found
        if found.status == 200:
            self.used_s = self.asked_s

    async def use_for(self, seconds: float, at: int) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            await self.use(at)
            await asyncio.sleep(0.05)

    async def gone(self, at: int) -> None:
        """Wait until it is gone without using it, and make it again."""

        async def is_gone() -> bool:
            return (await self.settled("HEAD", at)).status == 404

        await until(is_gone, f"{self.name} is gone", SETTLED_S)
        assert time.monotonic() - self.used_s >= self.ttl_s
        await self.make(at)

    async def watch(self, dsn: str) -> None:
        """Note in `kept_s` until when the gateway that made it is its keeper."""
        asked_s, maker = time.monotonic(), f'"{self.http.urls[KEEPER]}"'
        while maker in (await row_of(dsn, log_of(self.name)))[0]:
            self.kept_s = asked_s
            await asyncio.sleep(0.1)
            asked_s = time.monotonic()


async def row_of(dsn: str, log: str) -> tuple[str, str, str]:
    """A log's row in Postgres: who keeps the log, who writes it, and the version with the transaction that made it."""
    connection = await asyncpg.connect(dsn)
    try:
        query = "SELECT body -> 'expiry', body -> 'items', version, xmin::text FROM logs WHERE name = $1"
        row = await connection.fetchrow(query, log)
        assert row is not None
        return f"{row[0]}", f"{row[1]}", f"{row[2]} {row[3]}"
    finally:
        await connection.close()


async def test_reads_through_the_other_gateway_keep_a_stream_and_write_nothing(
    stores: Stores,
) -> None:
    async with (
        running(stores, environment=UNHURRIED) as cluster,
        aiohttp.ClientSession() as session,
    ):
        stream = Stream(Http(session, cluster.gateways), "kept", 4)
        await stream.make(KEEPER)
        for _ in range(3):
            before = await row_of(stores.postgres_dsn, log_of(stream.name))
            await stream.use_for(7, OTHER)
            now = await row_of(stores.postgres_dsn, log_of(stream.name))
            # Otherwise a gateway was so slow that the others took it for dead.
            if now[:2] == before[:2]:
                assert now == before
                break
        await stream.gone(OTHER)
        await stream.use(KEEPER, "POST")
        await stream.gone(KEEPER)


async def test_a_stream_outlives_its_keeper_and_expires_when_nobody_uses_it(stores: Stores) -> None:
    async with (
        running(stores, environment=UNHURRIED) as cluster,
        aiohttp.ClientSession() as session,
    ):
        stream = Stream(Http(session, cluster.gateways), "left", 3)
        await stream.make(KEEPER)
        await stream.use(OTHER, "POST")
        await cluster.kill("gateway-1")
        is_quick = time.monotonic() - stream.used_s < stream.ttl_s
        # Nobody knows any more when it was used: whoever keeps it from now on counts from then.
        await stream.use_once(OTHER, must_live=is_quick)
        await stream.use_for(4, OTHER)
        await stream.gone(OTHER)


async def test_no_stream_expires_while_its_keeper_stands_still_nor_when_it_goes_on(
    stores: Stores,
) -> None:
    async with (
        running(stores, environment=UNHURRIED) as cluster,
        aiohttp.ClientSession() as session,
    ):
        http = Http(session, cluster.gateways)
        used, idle = Stream(http, "used", 6), Stream(http, "idle", 6)
        for stream in (used, idle):
            await stream.make(KEEPER)
        watching = asyncio.create_task(idle.watch(stores.postgres_dsn))
        cluster.pause("gateway-1")
        paused_s = time.monotonic()
        try:
            is_quick = paused_s - used.used_s < used.ttl_s / 2
            using = asyncio.create_task(used.use_once(OTHER, must_live=is_quick))
            await asyncio.sleep(10)
        finally:
            resumed_s = time.monotonic()
            cluster.resume("gateway-1")
        found = await idle.settled("HEAD", KEEPER)
        answered_s = time.monotonic()
        watching.cancel()
        # The first keeper was awake for a moment only, and another gateway counts from its appointment.
        awake_s = paused_s - idle.used_s + answered_s - resumed_s
        assert found.status == 200 or max(awake_s, answered_s - idle.kept_s) >= idle.ttl_s
        await using
        for at in (KEEPER, OTHER):
            await used.use(at)
        await used.use_for(3, KEEPER)
        await used.gone(KEEPER)
        await idle.gone(OTHER)
