"""What is known of live processes while Redis fails, and what is deleted by age while the clock is wrong."""

import asyncio
import contextlib
import logging
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from loadtest.ports import free_ports
from loadtest.stores import Stores
from loadtest.waiting import stop
from quorumlog.net.gateway_clients import LogClient, TransactionClient
from quorumlog.wire.bodies import BookieHeartbeat, BookieList, Cookie, CookieRow, ServiceHeartbeat
from quorumlog.wire.log_bodies import LedgerIds
from services.local.embedded import Redis as Server
from services.local.embedded import set_up_redis
from services.local.process import Process, start
from services.metadata.database import Database
from services.metadata.liveness import Liveness
from services.metadata.logs import LogStore
from services.metadata.tokens import AuditStore
from services.metadata.transactions import TransactionStore
from tests.support.database import connected, sql
from tests.support.once import once
from tests.support.proxy import proxy_to
from tests.support.shadowed_clock import move, shadow
from tests.support.waiting import until, until_sync
from tests.unit.metadata.support import DRAFT, PATIENT_S, Service, serving
from tests.unit.metadata.test_audit import make_token
from tests.unit.metadata.test_logs import LOG

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


TABLES = ("transactions", "audit", "access_tokens")


async def counts(stores: Stores) -> list[int]:
    async with connected(stores) as connection:
        return [await connection.fetchval(f"SELECT count(*) FROM {name}") for name in TABLES]


async def filled(service: Service) -> str:
    """One of each that is deleted by age; returns the open transaction."""
    logs, transactions = LogClient(service.client), TransactionClient(service.client)
    await logs.create(LOG)
    await make_token(service)
    begun, _ = await transactions.begin("a-log", app=None, version=None, expires_in_s=3600)
    done, _ = await transactions.begin("a-log", app=None, version=None, expires_in_s=3600)
    await transactions.abort(done.id)
    await service.client.create(replace(DRAFT, log="a-log"))
    return begun.id


async def test_nothing_is_deleted_by_age_while_the_clock_is_wrong(stores: Stores) -> None:
    """Rule 26c."""
    await shadow(stores)
    database = Database(stores.postgres_dsn, connections_max=1, deadline_s=PATIENT_S)
    async with (
        contextlib.AsyncExitStack() as at_exit,
        serving(stores, expiry_every_s=1000) as service,
    ):
        at_exit.push_async_callback(database.close)
        open_one = await filled(service)
        made = await service.client.create(DRAFT, once=once("key"))
        await sql(stores, "UPDATE access_tokens SET expires_at = now() + interval '1 hour'")
        database.is_open = True
        expiry, audit = TransactionStore(database), AuditStore(database, days=7, rows_max=1000)
        orphans = LogStore(database).orphans
        await database.run(lambda connection: connection.fetchval("SELECT 1"))
        database.asked_about = database.server
        assert await expiry.expire(100) == 0, "it hears the clock"
        before = await counts(stores)

        await move(stores, "300 days")
        assert await expiry.expire(100) == 0
        await audit.trim()
        assert await orphans(older_than_s=300, after=-1, limit=10) == LedgerIds(ledgers=())
        again = await service.client.create(DRAFT, once=once("key"))
        await make_token(service)

        assert again == made
        assert await counts(stores) == [before[0], before[1] + 1, before[2] + 1]
        assert "jumped" in database.clock.doubt

        await move(stores, "0")
        await sql(stores, "UPDATE transactions SET expires_at = now() - interval '1 s'")
        assert await expiry.expire(100) == 1
        assert (await TransactionClient(service.client).get(open_one)).state.value == "ABORTED"
        assert database.clock.doubt == ""
