"""Liveness: heartbeats in Redis with a time to live. Advice only (I31): no decision rests on it.

While Redis is away, the last known list stays valid, with heartbeats that this process got since;
and heartbeats still succeed, since the bookie did nothing wrong.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar, cast

from pydantic import ValidationError
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from quorumlog.protocol.ids import member_of
from quorumlog.wire.bodies import (
    Body,
    BookieHeartbeat,
    BookieInfo,
    BookieList,
    CookieRow,
    ServiceHeartbeat,
    ServiceInfo,
    ServiceList,
    received,
)
from services.metadata.reach import Reach

log = logging.getLogger(__name__)
T = TypeVar("T")
B = TypeVar("B", bound=Body)

_REMEMBERED_MAX: Final = 10_000
"""Heartbeats that one process keeps for times without Redis; the oldest are dropped first."""

# How long liveness has been recorded without a break, in milliseconds; a flushed Redis starts anew.
_AGE_SCRIPT: Final = """
local now = redis.call('TIME')
now = now[1] * 1000 + math.floor(now[2] / 1000)
redis.call('SET', KEYS[1], now, 'NX')
return now - redis.call('GET', KEYS[1])
"""


class Liveness:
    """Heartbeats of bookies and services. Invariant: no method raises because Redis is away."""

    def __init__(self, url: str, *, prefix: str, deadline_s: float) -> None:
        self._redis = Redis.from_url(
            url,
            socket_timeout=deadline_s,
            socket_connect_timeout=deadline_s,
            max_connections=16,
            retry=Retry(NoBackoff(), 0),
        )
        self._prefix = prefix
        self._deadline_s = deadline_s
        self._remembered: dict[str, bytes] = {}
        self.reach = Reach(away="redis-away", there="redis-there", deadline_s=deadline_s)

    async def bookie_lives(self, name: str, heartbeat: BookieHeartbeat) -> bool:
        """Store a heartbeat; returns whether Redis has it."""
        key = self._bookie_key(name, heartbeat.process)
        body = heartbeat.model_dump_json().encode()
        self._remember(key, body)

        async def record() -> bool:
            await self._set(key, body, heartbeat.ttl_s)
            await _result(self._redis.hset(self._key("bookie-urls"), name, heartbeat.url))
            return True

        return await self._query(record, False)

    async def service_lives(self, kind: str, name: str, heartbeat: ServiceHeartbeat) -> bool:
        """Store a heartbeat; returns whether Redis has it."""
        info = ServiceInfo(
            kind=kind,
            id=name,
            url=heartbeat.url,
            internal_url=heartbeat.internal_url,
            state=heartbeat.state,
        )
        key = self._key("service", kind, name)
        body = info.model_dump_json().encode()
        self._remember(key, body)

        async def record() -> bool:
            await self._set(key, body, heartbeat.ttl_s)
            await _result(self._redis.sadd(self._key("services"), key))
            return True

        return await self._query(record, False)

    async def bookies(self, cookies: Sequence[CookieRow]) -> BookieList:
        """Registered bookies with their liveness. Heartbeats of another incarnation or process than
        the cookie's are ignored.
        """
        keys = [self._bookie_key(cookie.name, cookie.cookie.process) for cookie in cookies]
        found = await self._query(lambda: self._fetch(keys), None)
        bodies = [self._remembered.get(key) for key in keys] if found is None else found
        age_s = await self._query(self._age_s, 0.0)
        return BookieList(
            bookies=tuple(
                _bookie(cookie, body) for cookie, body in zip(cookies, bodies, strict=True)
            ),
            stale=found is None,
            liveness_age_s=age_s,
        )

    async def bookie_urls(self) -> dict[str, str]:
        """The URL of each bookie's last heartbeat, however long ago, by name; empty while Redis is away."""
        index = self._key("bookie-urls")
        away: dict[bytes, bytes] = {}
        found = await self._query(lambda: _result(self._redis.hgetall(index)), away)
        return {
            name.decode(errors="replace"): url.decode(errors="replace")
            for name, url in found.items()
        }

    async def forget_bookie(self, name: str) -> None:
        """Forget the URL of a bookie that is decommissioned; while Redis is away it stays, and a repeat forgets it."""
        index = self._key("bookie-urls")
        await self._query(lambda: _result(self._redis.hdel(index, name)), 0)

    async def services(self) -> ServiceList:
        """Services with a recent heartbeat, by kind and id."""
        found = await self._query(self._fetch_services, None)
        mine = [body for key, body in self._remembered.items() if ":service:" in key]
        bodies = mine if found is None else found
        infos = [info for body in bodies if (info := _parsed(ServiceInfo, body)) is not None]
        return ServiceList(
            services=tuple(sorted(infos, key=lambda info: (info.kind, info.id))),
            stale=found is None,
        )

    async def close(self) -> None:
        """Close the connections to Redis."""
        await self._redis.aclose()

    def _bookie_key(self, name: str, process: str) -> str:
        # Two processes under one name must not overwrite each other's heartbeats (rule 15a).
        return self._key("bookie", name, process) if process else self._key("bookie", name)

    def _key(self, *parts: str) -> str:
        return ":".join((self._prefix, *parts))

    def _remember(self, key: str, body: bytes) -> None:
        self._remembered.pop(key, None)
        self._remembered[key] = body
        while len(self._remembered) > _REMEMBERED_MAX:
            self._remembered.pop(next(iter(self._remembered)))

    async def _set(self, key: str, body: bytes, ttl_s: float) -> bool:
        await _result(self._redis.set(key, body, px=max(int(ttl_s * 1000), 1)))
        return True

    async def _fetch(self, keys: list[str]) -> list[bytes | None]:
        if not keys:
            return []
        bodies = cast("list[bytes | None]", await _result(self._redis.mget(keys)))
        for key, body in zip(keys, bodies, strict=True):
            if body is None:
                self._remembered.pop(key, None)
            else:
                self._remember(key, body)
        return bodies

    async def _fetch_services(self) -> list[bytes | None]:
        index = self._key("services")
        members = cast("set[bytes]", await _result(self._redis.smembers(index)))
        keys = sorted(member.decode() for member in members)
        bodies = await self._fetch(keys)
        gone = [key for key, body in zip(keys, bodies, strict=True) if body is None]
        if gone:
            await _result(self._redis.srem(index, *gone))
        return bodies

    async def _age_s(self) -> float:
        milliseconds = await _result(self._redis.eval(_AGE_SCRIPT, 1, self._key("since")))
        server = cast("dict[str, Any]", await _result(self._redis.info("server")))
        return min(int(milliseconds) / 1000, float(server.get("uptime_in_seconds", 0)))

    async def _query(self, ask: Callable[[], Awaitable[T]], away: T) -> T:
        """Query Redis within the deadline, or answer `away`."""
        try:
            async with asyncio.timeout(self._deadline_s):
                answer = await ask()
        except (RedisError, OSError, TimeoutError) as error:
            self.reach.lost(error)
            return away
        self.reach.found()
        return answer


def _bookie(cookie: CookieRow, body: bytes | None) -> BookieInfo:
    incarnation = cookie.cookie.incarnation
    heartbeat = _parsed(BookieHeartbeat, body)
    if heartbeat is None:
        return BookieInfo.lost(cookie.name, incarnation)
    if heartbeat.incarnation != incarnation:
        return BookieInfo.lost(cookie.name, incarnation, heartbeat.url)
    return BookieInfo(
        id=member_of(cookie.name, incarnation),
        state=heartbeat.state,
        url=heartbeat.url,
        zone=heartbeat.zone,
        free_bytes=heartbeat.free_bytes,
    )


def _parsed(model: type[B], body: bytes | None) -> B | None:
    """The body under a key, or None if it is unreadable: Redis may be shared (I31)."""
    try:
        return None if body is None else received(model, body)
    except ValidationError:
        log.warning("unreadable-liveness", extra={"of": model.__name__})
        return None


async def _result(answer: Any) -> Any:
    """The answer of redis-py, whose types leave open whether it is awaitable."""
    return await answer if inspect.isawaitable(answer) else answer
