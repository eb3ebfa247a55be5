"""What happens to Postgres and Redis in a storm, beside their deaths."""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

import asyncpg
import orjson
from asyncpg.connect_utils import SessionAttribute
from redis.asyncio import Redis
from redis.exceptions import RedisError

from loadtest.cluster import Cluster
from loadtest.ports import free_ports
from loadtest.waiting import DeadlineMissed, until
from tests.cluster.chaos.failovers import Failovers
from tests.support.proxy import Proxy, proxy_to
from tests.support.standby import dsn_of

_FOREVER_MS: Final = 60_000
"""How long a lie stands, if the truth does not replace it a heartbeat later."""

_END_ALL: Final = (
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
    " WHERE application_name = 'quorumlog-metadata' AND random() < $1"
)

_GARBAGE: Final = b"\xff{not json"
# Statements are prepared once in a session, so that their words are seldom said.
_WORDS: Final = (*[b"COMMIT"] * 4, b"UPDATE", b"INSERT")

_CHANGE_S: Final = 5.0
"""How long a change is waited for."""


class OutOfReach(Exception):
    """The store did not let us do it: nothing was done."""


class StoreHands:
    """The stores of one cluster: `reach` is told of them, services come through our proxy."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._dsn = ""
        self._redis_url = ""
        self._standby_port = 0
        self._proxies: tuple[Proxy, ...] = ()
        self._failovers: Failovers | None = None

    async def reach(self, url: str) -> str:
        """The way for the services to a store: to Postgres, and to a standby that comes later."""
        if urlsplit(url).scheme != "postgresql":
            self._redis_url = url
            return url
        self._stack.push_async_callback(self._end)
        self._standby_port = free_ports(1)[0]
        address = urlsplit(url).netloc.rpartition("@")[2]
        addresses = (address, f"127.0.0.1:{self._standby_port}")
        self._dsn = dsn_of(url, *addresses)
        proxies = [
            await self._stack.enter_async_context(proxy_to(dsn_of(url, each))) for each in addresses
        ]
        self._proxies = tuple(proxies)
        return dsn_of(url, *(f"127.0.0.1:{proxy.port}" for proxy in proxies))

    async def follow(self, cluster: Cluster) -> Failovers:
        """Add the standby."""
        self._failovers = await Failovers.of(cluster, self._dsn, self._standby_port)
        return self._failovers

    async def _end(self) -> None:
        """After the cluster, which may have the standby for its primary."""
        if self._failovers is not None:
            await self._failovers.end()

    async def end_backends(self, dice: random.Random) -> None:
        """End sessions of the metadata service, in whatever they are."""
        try:
            connection = await asyncpg.connect(
                self._dsn, timeout=20, target_session_attrs=SessionAttribute.primary
            )
            try:
                await connection.fetchval(_END_ALL, dice.choice((0.3, 1.0)), timeout=20)
            finally:
                connection.terminate()
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise OutOfReach from error

    async def cut_in_a_change(self, dice: random.Random) -> None:
        """Cut the next connection that says something of a change: before the server has heard it,
        or after it. Returns when that has happened, at the latest after a while.
        """
        proxies = self._proxies
        plan = (dice.choice(_WORDS), dice.random() < 0.7)
        for proxy in proxies:
            proxy.cut_around.append(plan)
        try:
            await until(
                lambda: any(plan not in proxy.cut_around for proxy in proxies),
                "a change was cut",
                _CHANGE_S,
            )
        except DeadlineMissed as error:
            raise OutOfReach from error
        finally:
            for proxy in proxies:
                proxy.cut_around.clear()

    async def flush(self, _dice: random.Random) -> None:
        """Redis forgets all."""
        async with self._redis() as redis:
            await redis.flushdb()

    async def lie(self, dice: random.Random) -> None:
        """Redis says of living bookies that they are dead, of dead ones that they live, gives them
        other states and incarnations, and says what nobody understands.
        """
        async with self._redis() as redis:
            keys = sorted([key async for key in redis.scan_iter("*:bookie:*")])
            for key in keys:
                if dice.random() < 0.5:
                    continue
                lie = _lie(dice, await redis.get(key))
                if lie is None:
                    await redis.delete(key)
                else:
                    await redis.set(key, lie, px=_FOREVER_MS)

    @asynccontextmanager
    async def _redis(self) -> AsyncIterator["Redis"]:
        redis = Redis.from_url(self._redis_url, socket_timeout=20, socket_connect_timeout=20)
        try:
            yield redis
        except (OSError, RedisError) as error:
            raise OutOfReach from error
        finally:
            await redis.aclose()


def _lie(dice: random.Random, body: bytes | str | None) -> bytes | None:
    """What to say in place of the truth; None: nothing."""
    kind = dice.choice(("dead", "alive", "full", "older", "garbage"))
    if body is None or body == _GARBAGE or kind == "dead":
        return None
    if kind == "garbage":
        return _GARBAGE
    said = orjson.loads(body)
    if kind == "full":
        said["state"] = "read-only"
    if kind == "older":
        said["incarnation"] += dice.choice((-1, 1))
    return orjson.dumps(said)
