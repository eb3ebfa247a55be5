"""Postgres and Redis may vanish at any byte and come back: nothing is done twice, nothing lost."""

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import aiohttp
import asyncpg
import pytest

from loadtest.ports import free_ports
from loadtest.stores import Stores, quick_postgres, scratch
from loadtest.waiting import stop
from quorumlog.errors import NOT_DONE, UNKNOWN, MetadataUnavailable
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.metadata import LedgerMetadata
from services.local.process import start
from services.metadata.database import Connection, Database
from tests.support.proxy import Direction, Proxy, proxy_to
from tests.support.waiting import until, until_sync
from tests.unit.metadata.support import DRAFT, PATIENT_S, Service, is_ready, serving, swapped

pytestmark = pytest.mark.without_tables

SEED = 20261122

CLUSTER: Final = "SELECT cluster_id::text FROM cluster"
"""What a start asks last."""


@pytest.fixture
async def postgres(stores: Stores) -> AsyncIterator[Proxy]:
    async with proxy_to(stores.postgres_dsn) as proxy:
        yield proxy


@pytest.fixture
async def proxied(stores: Stores, postgres: Proxy) -> AsyncIterator[Service]:
    """A service whose way to Postgres can be cut."""
    through = replace(stores, postgres_dsn=postgres.url(stores.postgres_dsn))
    async with serving(through) as running:
        yield running


async def change_once(client: MetadataClient, row: LedgerMetadata) -> LedgerMetadata:
    """One change; asserts that it was done exactly once."""
    border = row.last_fragment.first_entry + 10
    wanted = row.with_ensemble(border, ("b1@1", "b2@1", f"b{border}@1"))

    now = await swapped(client, wanted)
    assert now == wanted.changed_by(now.attempt, row)
    return now


# Byte positions in the exchange with Postgres: login, lock, look-up, update, token, commit.
@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_change_survives_a_cut_anywhere_on_the_way_to_the_database(
    proxied: Service, postgres: Proxy, direction: Direction
) -> None:
    row = await proxied.client.create(DRAFT)

    for count in range(300, 5000, 330):
        # Twice: the stream of changes connects anew as well, and may come first.
        postgres.cut_after = [(direction, count)] * 2
        postgres.cut_all()
        row = await change_once(proxied.client, row)

    assert postgres.cuts > 5
    assert await proxied.client.get(row.ledger_id) == row


async def test_expiry_waits_with_a_warning_while_the_database_is_away(
    stores: Stores, postgres: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    through = replace(stores, postgres_dsn=postgres.url(stores.postgres_dsn))
    async with serving(through, expiry_every_s=0.05) as service:
        postgres.is_down = True
        postgres.cut_all()

        def put_off() -> list[str]:
            return [r.why for r in caplog.records if r.message == "expiry-put-off"]  # type: ignore[attr-defined]

        await until(lambda: len(put_off()) > 3, "some rounds are put off")
        postgres.is_down = False
        await until(lambda: is_ready(service), "the database is back")

    assert all("database" in why for why in put_off())
    assert not [r for r in caplog.records if r.msg == "background-work-failed"]


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_change_survives_any_cut(service: Service, direction: Direction) -> None:
    row = await service.client.create(DRAFT)

    async with proxy_to(service.url) as proxy:
        for count in range(1, 1500, 90):
            proxy.cut_after = [(direction, count)]
            async with aiohttp.ClientSession() as session:
                client = MetadataClient([proxy.url(service.url)], session, deadline_s=PATIENT_S)
                row = await change_once(client, row)

        assert proxy.cuts > 5
    assert await service.client.get(row.ledger_id) == row


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_create_survives_a_cut_anywhere_and_makes_one_ledger(
    proxied: Service, postgres: Proxy, direction: Direction
) -> None:
    created = []

    for count in range(300, 5000, 470):
        postgres.cut_after = [(direction, count)] * 2
        postgres.cut_all()
        created.append(await proxied.client.create(DRAFT))

    listed, _ = await proxied.client.list(limit=1000)
    assert listed == created


async def test_rivals_on_bad_links_win_each_version_once(proxied: Service, postgres: Proxy) -> None:
    dice = random.Random(SEED)
    first = await proxied.client.create(DRAFT)
    won: list[int] = []

    async def rival(number: int, proxy: Proxy) -> None:
        async with aiohttp.ClientSession() as session:
            client = MetadataClient([proxy.url(proxied.url)], session, deadline_s=PATIENT_S)
            row = first
            for turn in range(12):
                proxy.cut_after = [(dice.choice(("up", "down")), dice.randrange(1, 1500))]
                proxy.cut_all()
                if number == turn % 4:
                    postgres.cut_after = [(dice.choice(("up", "down")), dice.randrange(300, 4000))]
                    postgres.cut_all()
                border = row.last_fragment.first_entry + 1 + number
                wanted = row.with_ensemble(border, ("b1@1", "b2@1", f"r{number}-{turn}@1"))
                status, now = await client.cas(wanted)
                assert now is not None
                if status is CasStatus.OK:
                    won.append(row.version + 1)
                row = now

    async with contextlib.AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(proxy_to(proxied.url)) for _ in range(4)]
        async with asyncio.TaskGroup() as tasks:
            for number, proxy in enumerate(proxies):
                tasks.create_task(rival(number, proxy))

    last = await proxied.client.get(first.ledger_id)
    assert sorted(won) == [*range(2, last.version + 1)], f"seed {SEED}"


async def test_an_unknown_change_is_repeated_until_it_is_settled(service: Service) -> None:
    row = await service.client.create(DRAFT)
    tries: list[object] = []
    traced = aiohttp.TraceConfig()

    async def counted(*request: object) -> None:
        tries.append(request)

    traced.on_request_start.append(counted)
    async with (
        proxy_to(service.url) as proxy,
        aiohttp.ClientSession(trace_configs=[traced]) as session,
    ):
        url = proxy.url(service.url)
        client = MetadataClient([url], session, deadline_s=0.01, try_s=PATIENT_S)
        proxy.cut_after, proxy.down_after_cut = [("down", 1)], True
        change = asyncio.create_task(client.cas(row.in_recovery()))
        await until(lambda: proxy.cuts == 1, "the answer was cut off")
        await until(lambda: len(tries) > 3, "it is tried again")
        assert not change.done()

        proxy.is_down = False
        status, now = await change

    assert status is CasStatus.OK
    assert now is not None
    assert now == row.in_recovery().changed_by(now.attempt, row)


async def test_a_change_that_was_never_sent_fails(service: Service) -> None:
    row = await service.client.create(DRAFT)
    nowhere = f"http://127.0.0.1:{free_ports(1)[0]}"
    async with aiohttp.ClientSession() as session:
        client = MetadataClient([nowhere], session, deadline_s=0.01, try_s=PATIENT_S)

        assert await client.cas(row.in_recovery()) == (CasStatus.UNKNOWN, None)
        with pytest.raises(MetadataUnavailable) as away:
            await client.create(DRAFT)

    assert away.value.outcome == "not-done"
    assert await service.client.get(row.ledger_id) == row


async def test_another_service_is_asked_when_one_is_away(service: Service) -> None:
    row = await service.client.create(DRAFT)
    nowhere = f"http://127.0.0.1:{free_ports(1)[0]}"
    async with aiohttp.ClientSession() as session:
        client = MetadataClient([nowhere, service.url], session, deadline_s=PATIENT_S)

        assert await client.get(row.ledger_id) == row
        assert (await client.cas(row.in_recovery()))[0] is CasStatus.OK


@pytest.mark.parametrize("how", ["refuses", "hangs"])
async def test_without_postgres_every_request_gets_an_error_and_later_ones_succeed(
    stores: Stores, postgres: Proxy, how: str
) -> None:
    through = replace(stores, postgres_dsn=postgres.url(stores.postgres_dsn))
    heartbeat = {"incarnation": 1, "url": "http://b1", "ttl_s": 60.0}
    # The deadline is the shipped one. Patience here is `until`, not the service's.
    async with serving(through, database_deadline_s=1.8, connections_max=2) as service:
        row = await service.client.create(DRAFT)
        postgres.is_down = how == "refuses"
        postgres.is_silent = how == "hangs"
        if how == "refuses":
            postgres.cut_all()

        paths = (f"/v1/ledgers/{row.ledger_id}", "/v1/ledgers", "/v1/bookies", "/health/ready")
        for status, problem in await asyncio.gather(*(service.send("GET", p) for p in paths)):
            assert (status, problem["code"]) == (503, "metadata-unavailable")
        beat = await service.send("PUT", "/v1/bookies/b1/heartbeat", heartbeat)
        assert beat == (200, {"recorded": True})

        postgres.is_down = postgres.is_silent = False
        if how == "hangs":
            postgres.cut_all()  # what was swallowed does not come back
        await until(lambda: is_ready(service), "the service is ready again")
        await change_once(service.client, row)


async def test_who_waits_long_for_a_connection_is_refused_in_time(stores: Stores) -> None:
    """In a crowd all connections were given to those who had waited longest, and cut in the middle of their work."""
    database = Database(stores.postgres_dsn, connections_max=1, deadline_s=4)
    database.is_open = True
    has_begun, may_end = asyncio.Event(), asyncio.Event()

    async def work(connection: Connection) -> int:
        has_begun.set()
        await may_end.wait()
        return int(await connection.fetchval("SELECT 1"))

    first = asyncio.create_task(database.run(work))
    await has_begun.wait()
    with pytest.raises(MetadataUnavailable) as caught:
        await database.run(work)
    may_end.set()

    assert caught.value.outcome == NOT_DONE
    # Its deadline, which is not over, is earlier than that of the one that was refused.
    assert await first == 1
    await database.close()


async def test_a_connection_cut_inside_a_statement_counts_as_an_unavailable_database(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(stores.postgres_dsn, connections_max=1, deadline_s=60)
    database.is_open = True
    prepare: Any = vars(asyncpg.Connection)["_get_statement"]

    async def cut(connection: Any, *args: Any, **kwargs: Any) -> Any:
        statement = await prepare(connection, *args, **kwargs)
        connection.terminate()
        return statement

    assert await database.run(lambda connection: connection.fetchval("SELECT 0")) == 0
    with monkeypatch.context() as patch:
        patch.setattr(asyncpg.Connection, "_get_statement", cut)
        with pytest.raises(MetadataUnavailable) as caught:
            await database.run(lambda connection: connection.fetchval("SELECT 1"))
        with pytest.raises(MetadataUnavailable) as while_connecting:
            await database.run(lambda connection: connection.fetchval("SELECT 1"))

    assert (caught.value.outcome, while_connecting.value.outcome) == (UNKNOWN, NOT_DONE)
    assert await database.run(lambda connection: connection.fetchval("SELECT 2")) == 2
    await database.close()


async def test_a_service_starts_before_its_databases(stores: Stores, postgres: Proxy) -> None:
    through = replace(stores, postgres_dsn=postgres.url(stores.postgres_dsn))
    postgres.is_down = True
    async with serving(through, wait=False) as service:
        assert (await service.send("GET", "/health/live"))[0] == 200
        status, problem = await service.send("GET", "/v1/ledgers")
        assert (status, problem["outcome"]) == (503, "not-done")

        postgres.is_down = False

        await until(lambda: is_ready(service), "the service is ready")


async def test_a_connection_cut_during_the_migration_does_not_leave_the_service_closed(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare: Any = vars(asyncpg.Connection)["_get_statement"]
    cut_at: set[str] = set()

    async def cut(connection: Any, query: str, *args: Any, **kwargs: Any) -> Any:
        statement = await prepare(connection, query, *args, **kwargs)
        if query not in cut_at and not cut_at & {CLUSTER}:
            cut_at.add(query)
            connection.terminate()
        return statement

    monkeypatch.setattr(asyncpg.Connection, "_get_statement", cut)
    async with serving(stores) as service:
        assert (await service.send("GET", "/v1/ledgers"))[0] == 200

    assert CLUSTER in cut_at, "each statement of a start was cut once, the last one too"


async def test_rows_and_the_service_survive_a_restart_of_postgres(stores: Stores) -> None:
    with scratch("ql-postgres-") as folder:
        server = quick_postgres(folder / "postgres", free_ports(1)[0])
        log = folder / "postgres.log"
        process = start(server.program, log)
        try:
            until_sync(server.is_ready, "Postgres takes connections")
            async with serving(replace(stores, postgres_dsn=server.dsn())) as service:
                row = await change_once(service.client, await service.client.create(DRAFT))
                # At once, as when the machine's Postgres crashes.
                stop(process, signal.SIGQUIT, 30)
                assert (await service.send("GET", "/health/ready"))[0] == 503
                process = start(server.program, log)

                await until(lambda: is_ready(service), "the service is ready again")

                assert await service.client.get(row.ledger_id) == row
                await change_once(service.client, row)
        finally:
            stop(process, server.program.stop_signal, 30)


async def test_services_started_concurrently_create_the_tables_once(stores: Stores) -> None:
    async with (
        serving(stores, wait=False) as one,
        serving(stores, wait=False) as two,
        serving(stores, wait=False) as three,
    ):
        for service in (one, two, three):
            await until(partial(is_ready, service), "the service is ready")

        assert len({await service.client.cluster_id() for service in (one, two, three)}) == 1
