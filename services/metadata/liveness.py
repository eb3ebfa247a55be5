"""Liveness: heartbeats in Redis with a time to live. Liveness is only a hint, on which no safety
decision rests (I31).

A heartbeat that this process received counts for its time to live, even if Redis loses it. While
Redis is unavailable or refuses writes, the last known list stays valid and is marked as stale.
Heartbeats still succeed, since the bookie is not at fault.
"""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pydantic import ValidationError
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, ReadOnlyError, RedisError

from quorumlog.net.timers import awake
from quorumlog.protocol.ids import member_of
from quorumlog.wire.bodies import (
    Body,
    BookieHeartbeat,
    BookieInfo,
    BookieList,
    CookieRow,
    HeartbeatTaken,
    ServiceHeartbeat,
    ServiceInfo,
    ServiceList,
    received,
)
from services.metadata.servers import Reach

log = logging.getLogger(__name__)
T = TypeVar("T")
B = TypeVar("B", bound=Body)

_REMEMBERED_MAX: Final = 10_000
"""Maximum heartbeats that a process keeps for outages of Redis. Older heartbeats are dropped."""
_CONNECTIONS_MAX: Final = 16
_SINCE_MS: Final = 10 * 365 * 24 * 3600 * 1000
"""Time to live of a key that is as old as Redis' records of liveness. The key's age is this value
minus the remaining time to live."""
_CHECK_RETRY_S: Final = 1.0


@dataclass(slots=True)
class _Remembered:
    """The last known heartbeat under a key of Redis."""

    body: bytes
    until: float = 0.0
    """Expiry by the event loop's clock; 0 unless this process recorded the heartbeat."""


@dataclass(frozen=True, slots=True)
class _Look:
    """The heartbeats that a query of Redis returned."""

    bodies: list[bytes | None]
    age_s: float | None
    """For how long Redis has recorded liveness. None if unknown."""


class Liveness:
    """Heartbeats of bookies and services. Invariant: no method raises if Redis is unavailable."""

    def __init__(self, url: str, *, prefix: str, deadline_s: float) -> None:
        # Queries wait for a connection, because a bookie with a failed heartbeat would seem lost.
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=_CONNECTIONS_MAX,
            timeout=deadline_s,
            socket_timeout=deadline_s,
            socket_connect_timeout=deadline_s,
            retry=Retry(NoBackoff(), 0),
        )
        self._redis = Redis.from_pool(pool)
        self._prefix = prefix
        self._deadline_s = deadline_s
        self._remembered: dict[str, _Remembered] = {}
        self._unbroken_since: float | None = None
        """Since this time (`awake`), no query of Redis has failed and no heartbeat was lost."""
        self.reach = Reach(away="redis-away", there="redis-there", deadline_s=deadline_s)

    async def bookie_lives(self, name: str, request: BookieHeartbeat) -> HeartbeatTaken:
        """Record a bookie's heartbeat. Succeeds even while Redis is unavailable."""
        urls = self._key("bookie-urls")
        return await self._record(
            self._bookie_key(name, request.process),
            request,
            request.ttl_s,
            lambda _key: self._redis.hset(urls, name, request.url),
        )

    async def service_lives(
        self, kind: str, name: str, request: ServiceHeartbeat
    ) -> HeartbeatTaken:
        """Record the heartbeat of any other service. Succeeds even while Redis is unavailable."""
        info = ServiceInfo(kind=kind, id=name, **request.model_dump(exclude={"ttl_s"}))
        return await self._record(
            self._key("service", kind, name),
            info,
            request.ttl_s,
            lambda key: self._redis.sadd(self._key("services"), key),
        )

    async def bookies(self, cookies: Sequence[CookieRow]) -> BookieList:
        """Registered bookies with their liveness. Heartbeats of an incarnation or process other than
        the cookie's are ignored.
        """
        keys = [self._bookie_key(cookie.name, cookie.cookie.process) for cookie in cookies]
        found = await self._query(lambda: self._look(keys), None)
        bodies = self._known(keys) if found is None else found.bodies
        return BookieList(
            bookies=tuple(
                _bookie(cookie, body) for cookie, body in zip(cookies, bodies, strict=True)
            ),
            stale=found is None,
            liveness_age_s=self._age_s(found),
        )

    async def bookie_urls(self) -> dict[str, str]:
        """The last known URL of each bookie, by name. Empty while Redis is unavailable."""
        index = self._key("bookie-urls")
        away: dict[bytes, bytes] = {}
        found = await self._query(lambda: _result(self._redis.hgetall(index)), away)
        return {
            name.decode(errors="replace"): url.decode(errors="replace")
            for name, url in found.items()
        }

    async def forget_bookie(self, name: str) -> None:
        """Forget the URL of a decommissioned bookie. No effect while Redis is unavailable."""
        index = self._key("bookie-urls")
        await self._query(lambda: _result(self._redis.hdel(index, name)), 0)

    async def services(self) -> ServiceList:
        """Services with a recent heartbeat, sorted by kind and id."""
        found = await self._query(self._look_at_services, None)
        bodies = self._known(self._service_keys()) if found is None else found.bodies
        infos = [info for body in bodies if (info := _parsed(ServiceInfo, body)) is not None]
        return ServiceList(
            services=tuple(sorted(infos, key=lambda info: (info.kind, info.id))),
            stale=found is None,
        )

    async def check_commands(self) -> None:
        """Wait until Redis responds, and log the commands that Redis denies to this service."""
        key = self._key("check")
        commands = (
            ("SET", key, "", "PX", "1", "NX"), ("MGET", key), ("PTTL", key), ("INFO", "server"),
            ("HSET", f"{key}-hash", "a", "b"), ("HGETALL", f"{key}-hash"), ("HDEL", f"{key}-hash", "a"),
            ("SADD", f"{key}-set", "a"), ("SMEMBERS", f"{key}-set"), ("SREM", f"{key}-set", "a"),
        )  # fmt: skip

        async def ask() -> list[Any]:
            pipe: Any = self._redis.pipeline(transaction=False)
            for command in commands:
                pipe.execute_command(*command)
            answers: list[Any] = await pipe.execute(raise_on_error=False)
            return answers

        answers = await self._query(ask, None)
        while answers is None:
            await asyncio.sleep(_CHECK_RETRY_S)
            answers = await self._query(ask, None)
        refused = [
            name
            for (name, *_), answer in zip(commands, answers, strict=True)
            if _is_refusal(answer)
        ]
        if refused:
            log.error("redis-refuses-commands", extra={"commands": refused})

    async def close(self) -> None:
        """Close the connections to Redis."""
        await self._redis.aclose()

    def _bookie_key(self, name: str, process: str) -> str:
        # Two processes with the same name must not overwrite each other's heartbeats (rule 15a).
        return self._key("bookie", name, process) if process else self._key("bookie", name)

    def _key(self, *parts: str) -> str:
        return ":".join((self._prefix, *parts))

    async def _record(
        self, key: str, alive: Body, ttl_s: float, index: Callable[[str], Any]
    ) -> HeartbeatTaken:
        """Record a heartbeat under a key. `index` adds the key, or a URL, to an index in Redis."""
        body = alive.model_dump_json().encode()

        async def record() -> bool:
            await _result(self._redis.set(key, body, px=max(int(ttl_s * 1000), 1)))
            await _result(index(key))
            return True

        until = asyncio.get_running_loop().time() + ttl_s
        self._remember(key, _Remembered(body))
        is_recorded = await self._query(record, False)
        # Set the expiry only now, because a heartbeat that Redis never had can't count as lost.
        self._remember(key, _Remembered(body, until))
        return HeartbeatTaken(recorded=is_recorded)

    def _remember(self, key: str, known: _Remembered) -> None:
        self._remembered.pop(key, None)
        self._remembered[key] = known
        while len(self._remembered) > _REMEMBERED_MAX:
            self._remembered.pop(next(iter(self._remembered)))

    def _known(self, keys: Iterable[str]) -> list[bytes | None]:
        """The heartbeats under these keys that this process keeps."""
        return [
            None if (known := self._remembered.get(key)) is None else known.body for key in keys
        ]

    def _service_keys(self) -> list[str]:
        return [key for key in self._remembered if key.startswith(self._key("service", ""))]

    async def _look(self, keys: list[str]) -> _Look:
        """Query the heartbeats under some keys. The query includes a write, so that it fails if
        Redis refuses writes, and so lacks heartbeats of live processes. Raises: RedisError.
        """
        since = self._key("since")
        pipe: Any = self._redis.pipeline(transaction=False)
        pipe.set(since, "", px=_SINCE_MS, nx=True)
        pipe.pttl(since)
        pipe.info("server")
        if keys:
            pipe.mget(keys)
        written, left_ms, server, *found = await pipe.execute(raise_on_error=False)
        for answer in (written, *found):
            if isinstance(answer, Exception):
                raise answer
        bodies: list[bytes | None] = found[0] if keys else []
        is_age_known = isinstance(left_ms, int) and left_ms >= 0 and isinstance(server, dict)
        age_s = None
        if is_age_known:
            age_s = min((_SINCE_MS - left_ms) / 1000, float(server.get("uptime_in_seconds", 0)))
        return _Look(self._merged(keys, bodies), age_s)

    def _merged(self, keys: Sequence[str], bodies: Iterable[bytes | None]) -> list[bytes | None]:
        """Add the heartbeats that Redis lost within their time to live to the heartbeats in Redis."""
        now, merged = asyncio.get_running_loop().time(), list(bodies)
        for at, (key, body) in enumerate(zip(keys, merged, strict=True)):
            known = self._remembered.get(key)
            if body is not None:
                self._remember(key, _Remembered(body, 0.0 if known is None else known.until))
            elif known is not None and now < known.until:
                merged[at] = known.body
                self._unbroken_since = None
            else:
                self._remembered.pop(key, None)
        return merged

    async def _look_at_services(self) -> _Look:
        index = self._key("services")
        members: set[bytes] = await _result(self._redis.smembers(index))
        keys = sorted({*(member.decode() for member in members), *self._service_keys()})
        found = await self._look(keys)
        gone = [key for key, body in zip(keys, found.bodies, strict=True) if body is None]
        if gone:
            await _result(self._redis.srem(index, *gone))
        return found

    def _age_s(self, found: _Look | None) -> float | None:
        """For how long Redis or this process has recorded liveness. None if Redis is unavailable."""
        now = awake().time()
        if found is None:
            self._unbroken_since = None
            return None
        if self._unbroken_since is None:
            self._unbroken_since = now
        return max(found.age_s or 0.0, now - self._unbroken_since)

    async def _query(self, ask: Callable[[], Awaitable[T]], away: T) -> T:
        """Query Redis within the deadline. Returns `away` if the query fails."""
        try:
            async with asyncio.timeout(self._deadline_s):
                answer = await ask()
        except (RedisError, OSError, TimeoutError) as error:
            self.reach.lost(error)
            if isinstance(error, ReadOnlyError):
                # After a failover, only new connections use the new address of the server's name.
                await self._redis.connection_pool.disconnect(inuse_connections=False)
            return away
        self.reach.found()
        return answer


def _bookie(cookie: CookieRow, body: bytes | None) -> BookieInfo:
    incarnation = cookie.cookie.incarnation
    heartbeat = _parsed(BookieHeartbeat, body)
    if heartbeat is None or heartbeat.incarnation != incarnation:
        return BookieInfo.lost(cookie.name, incarnation, heartbeat.url if heartbeat else "")
    return BookieInfo(
        id=member_of(cookie.name, incarnation),
        state=heartbeat.state,
        url=heartbeat.url,
        zone=heartbeat.zone,
        free_bytes=heartbeat.free_bytes,
    )


def _is_refusal(answer: Any) -> bool:
    """Whether Redis does not have a command, or does not allow this user to run the command."""
    is_unknown = isinstance(answer, RedisError) and "unknown command" in str(answer).lower()
    return is_unknown or isinstance(answer, NoPermissionError)


def _parsed(model: type[B], body: bytes | None) -> B | None:
    """Parse the body under a key. None if missing, or unreadable, as in a shared Redis (I31)."""
    try:
        return None if body is None else received(model, body)
    except ValidationError:
        log.warning("unreadable-liveness", extra={"of": model.__name__})
        return None


async def _result(answer: Any) -> Any:
    """Await a result of redis-py, whose type annotations don't show whether it is awaitable."""
    return await answer if inspect.isawaitable(answer) else answer
