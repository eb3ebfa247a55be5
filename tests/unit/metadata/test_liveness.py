"""Liveness on a Redis that works by half: it refuses writes, lacks commands, forgets, or has few connections."""

import asyncio
import logging
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from loadtest.ports import free_ports
from loadtest.waiting import stop
from quorumlog.wire.bodies import BookieHeartbeat, BookieList, Cookie, CookieRow, ServiceHeartbeat
from services.local.embedded import Redis as Server
from services.local.embedded import set_up_redis
from services.local.process import Process, start
from services.metadata.liveness import Liveness
from tests.support.proxy import proxy_to
from tests.support.waiting import until, until_sync

COOKIES = [
    CookieRow(
        name=name,
        version=1,
        cookie=Cookie(incarnation=1, cluster_id="c", instance="i", process="p"),
    )
    for name in ("b1", "b2")
]
LONG_S = 3600.0


@pytest.fixture
def start_redis(tmp_path: Path) -> Iterator[Callable[[], Server]]:
    """Starts servers; all have one password."""
    running: list[Process] = []

    def started() -> Server:
        folder = tmp_path / f"redis-{len(running)}"
        folder.mkdir()
        (folder / "password").write_text("a" * 64)
        server = set_up_redis(folder, free_ports(1)[0])
        running.append(start(server.program, tmp_path / f"{folder.name}.log"))
        until_sync(server.is_ready, "Redis takes connections")
        return server

    yield started
    for process in running:
        stop(process, signal.SIGTERM, 30)


@pytest.fixture
def server(start_redis: Callable[[], Server]) -> Server:
    return start_redis()


@pytest.fixture
async def admin(server: Server) -> AsyncIterator[Any]:
    async with Redis.from_url(server.url()) as client:
        yield client


@pytest.fixture
async def made() -> AsyncIterator[Callable[[str], Liveness]]:
    """Makes the liveness of processes."""
    async with AsyncExitStack() as stack:

        def make(url: str) -> Liveness:
            process = Liveness(url, prefix="q", deadline_s=30.0)
            stack.push_async_callback(process.close)
            return process

        yield make


def beat(ttl_s: float = LONG_S) -> BookieHeartbeat:
    return BookieHeartbeat(incarnation=1, url="http://b", process="p", ttl_s=ttl_s)


def states(listed: BookieList) -> list[str]:
    return [bookie.state for bookie in listed.bookies]


async def _is_replica(admin: Any, *, begins: bool) -> None:
    await admin.execute_command("REPLICAOF", *(("127.0.0.1", "1") if begins else ("NO", "ONE")))


async def _is_full(admin: Any, *, begins: bool) -> None:
    await admin.config_set("maxmemory", "1" if begins else "0")


async def _lacks_replicas(admin: Any, *, begins: bool) -> None:
    await admin.config_set("min-replicas-to-write", "1" if begins else "0")


async def _can_not_save(admin: Any, *, begins: bool) -> None:
    await admin.config_set("save", "3600 1" if begins else "")
    if not begins:
        return
    shutil.rmtree((await admin.config_get("dir"))["dir"])
    await admin.bgsave()

    async def has_failed() -> bool:
        return bool((await admin.info("persistence"))["rdb_last_bgsave_status"] == "err")

    await until(has_failed, "Redis can't save")


@pytest.mark.parametrize("refuse", [_is_replica, _is_full, _lacks_replicas, _can_not_save])
async def test_while_redis_refuses_writes_the_list_is_stale_and_what_is_remembered_counts(
    server: Server,
    admin: Any,
    made: Callable[[str], Liveness],
    caplog: pytest.LogCaptureFixture,
    refuse: Callable[..., Awaitable[None]],
) -> None:
    caplog.set_level(logging.INFO)
    heard, other = made(server.url()), made(server.url())
    assert (await heard.bookie_lives("b1", beat())).recorded
    assert (
        await heard.service_lives("gateway", "g", ServiceHeartbeat(url="http://g", ttl_s=LONG_S))
    ).recorded
    assert states(await other.bookies(COOKIES)) == ["writable", "lost"]
    await admin.delete("q:bookie:b1:p", "q:service:gateway:g")  # as if their time were over
    await refuse(admin, begins=True)

    assert not (await heard.bookie_lives("b2", beat())).recorded, "it is refused"

    before = len(caplog.records)
    for process, expected in ((heard, ["writable", "writable"]), (other, ["writable", "lost"])):
        for _ in range(3):
            listed = await process.bookies(COOKIES)
            assert (states(listed), listed.stale, listed.liveness_age_s) == (expected, True, None)
            assert not process.reach.is_up
    services = await heard.services()
    assert ([found.id for found in services.services], services.stale) == (["g"], True)
    assert [r.message for r in caplog.records[before:]] == ["redis-away"], "the other's, once"

    await refuse(admin, begins=False)
    assert (await heard.bookie_lives("b1", beat())).recorded
    listed = await other.bookies(COOKIES)
    assert (states(listed), listed.stale) == (["writable", "lost"], False)


async def test_after_a_failover_the_new_primary_gets_the_heartbeats(
    start_redis: Callable[[], Server], made: Callable[[str], Liveness]
) -> None:
    old, new = start_redis(), start_redis()
    admin: Any
    async with proxy_to(old.url()) as proxy, Redis.from_url(old.url()) as admin:
        process = made(proxy.url(old.url()))
        assert (await process.bookie_lives("b1", beat())).recorded
        await _is_replica(admin, begins=True)
        proxy.port_up = new.port

        assert not (await process.bookie_lives("b1", beat())).recorded, "it was sent to the old one"

        assert (await process.bookie_lives("b1", beat())).recorded
        assert states(await process.bookies(COOKIES)) == ["writable", "lost"]


async def test_a_crowd_waits_for_connections_and_nobody_is_refused(
    server: Server, made: Callable[[str], Liveness]
) -> None:
    process = made(server.url())

    recorded = await asyncio.gather(*(process.bookie_lives(f"b{n}", beat()) for n in range(128)))
    lists = await asyncio.gather(*(process.bookies(COOKIES) for _ in range(128)))

    assert all(taken.recorded for taken in recorded)
    assert not any(listed.stale for listed in lists)


@pytest.mark.parametrize(
    ("grants", "refused"),
    [
        ("+@all -@dangerous", ["INFO"]),
        ("+@all -@scripting", []),
        ("+@all -info -pttl -hdel", ["PTTL", "INFO", "HDEL"]),
    ],
)
async def test_the_age_of_liveness_is_known_without_the_commands_that_redis_refuses(
    server: Server,
    admin: Any,
    made: Callable[[str], Liveness],
    caplog: pytest.LogCaptureFixture,
    grants: str,
    refused: list[str],
) -> None:
    await admin.execute_command("ACL", "SETUSER", "q", "on", ">x", "~*", *grants.split())
    process = made(f"redis://q:x@127.0.0.1:{server.port}/0")

    await process.check_commands()
    assert (await process.bookie_lives("b1", beat())).recorded

    async def is_old() -> bool:
        listed = await process.bookies(COOKIES)
        assert not listed.stale
        return (listed.liveness_age_s or 0.0) > 0.05

    await until(is_old, "liveness has an age")
    said = [r.commands for r in caplog.records if r.message == "redis-refuses-commands"]  # type: ignore[attr-defined]
    assert said == ([refused] if refused else [])


async def test_the_age_of_liveness_is_known_though_redis_forgets_since_when(
    server: Server, admin: Any, made: Callable[[str], Liveness]
) -> None:
    process = made(server.url())

    async def is_old() -> bool:
        await admin.delete("q:since")
        return ((await process.bookies(COOKIES)).liveness_age_s or 0.0) > 0.05

    await until(is_old, "liveness has an age")
    await admin.set("q:since", "rubbish")
    assert await is_old()


async def test_another_process_counts_on_from_when_redis_began_to_record(
    server: Server, made: Callable[[str], Liveness]
) -> None:
    first = made(server.url())

    async def is_old() -> bool:
        return ((await first.bookies(COOKIES)).liveness_age_s or 0.0) >= 1.0

    await until(is_old, "liveness has an age")

    assert ((await made(server.url()).bookies(COOKIES)).liveness_age_s or 0.0) >= 1.0


async def test_a_flushed_redis_begins_anew_and_what_a_process_heard_still_counts(
    server: Server, admin: Any, made: Callable[[str], Liveness]
) -> None:
    heard, other = made(server.url()), made(server.url())
    await heard.bookie_lives("b1", beat())
    await heard.service_lives("gateway", "g", ServiceHeartbeat(url="http://g", ttl_s=LONG_S))
    assert states(await other.bookies(COOKIES)) == ["writable", "lost"]

    async def is_old() -> bool:
        return ((await heard.bookies(COOKIES)).liveness_age_s or 0.0) > 0.5

    await until(is_old, "liveness has an age")
    await admin.flushdb()

    listed = await heard.bookies(COOKIES)
    assert (states(listed), listed.stale) == (["writable", "lost"], False)
    assert (listed.liveness_age_s or 0.0) < 0.5
    assert [found.id for found in (await heard.services()).services] == ["g"]
    assert states(await other.bookies(COOKIES)) == ["lost", "lost"]
    assert (await other.services()).services == ()
