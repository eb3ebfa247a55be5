"""What services hear of changes, and which answers the client of the metadata service believes."""

import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import cast

import aiohttp
import pytest
from aiohttp import web

from loadtest.stores import Stores
from quorumlog.errors import MetadataUnavailable, NoSuchLedger
from quorumlog.net.gateway_clients import LogClient
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.messages import CasStatus
from quorumlog.wire.bodies import Change
from services.metadata.changes import ChangeHub
from services.metadata.database import Database
from tests.support.answering import answering
from tests.support.database import sql
from tests.support.proxy import Proxy, proxy_to
from tests.unit.metadata.support import DRAFT, PATIENT_S, Service, serving, swapped
from tests.unit.metadata.test_logs import LOG


@pytest.fixture
async def postgres(stores: Stores) -> AsyncIterator[Proxy]:
    async with proxy_to(stores.postgres_dsn) as proxy:
        yield proxy


async def test_every_change_is_announced_in_order(service: Service) -> None:
    async with contextlib.aclosing(service.client.changes()) as stream:
        assert (await anext(stream)).kind == "gap"

        row = await service.client.create(DRAFT)
        row2 = await swapped(service.client, row.in_recovery())
        await service.client.cas(row)  # a conflict: no change
        row3 = await swapped(service.client, row2.closed(last_entry=-1, length=0))
        await service.client.delete(row.ledger_id, version=row3.version)

        seen: list[tuple[object, ...]] = []
        while len(seen) < 4:
            change = await anext(stream)
            if change.kind == "change":
                seen.append((change.ledger_id, change.version, change.state, change.deleted))
    assert seen == [
        (row.ledger_id, 1, "OPEN", False),
        (row.ledger_id, 2, "IN_RECOVERY", False),
        (row.ledger_id, 3, "CLOSED", False),
        (row.ledger_id, 4, None, True),
    ]


async def test_every_change_of_a_log_is_announced(service: Service) -> None:
    logs = LogClient(service.client)
    async with contextlib.aclosing(service.client.changes()) as stream:
        assert (await anext(stream)).kind == "gap"

        async def announced() -> None:
            while (await anext(stream)).log != LOG.name:
                pass

        row, _ = await logs.create(LOG)
        await announced()
        _, row = await logs.cas(replace(row, deletion_protection=True))
        await announced()
        _, row = await logs.cas(replace(row, deletion_protection=False))
        await announced()
        await logs.delete(row)
        await announced()


async def test_a_broken_database_connection_is_a_gap(stores: Stores, postgres: Proxy) -> None:
    through = replace(stores, postgres_dsn=postgres.url(stores.postgres_dsn))
    async with (
        serving(through) as service,
        contextlib.aclosing(service.client.changes()) as stream,
    ):
        assert (await anext(stream)).kind == "gap"
        row = await service.client.create(DRAFT)
        while (await anext(stream)).ledger_id != row.ledger_id:
            pass

        postgres.cut_all()

        assert (await anext(stream)).kind == "gap"
        row = await service.client.create(DRAFT)
        while (await anext(stream)).ledger_id != row.ledger_id:
            pass


async def test_a_client_that_loses_its_service_gets_a_gap(service: Service) -> None:
    async with proxy_to(service.url) as proxy:
        client = type(service.client)([proxy.url(service.url)], service.session)
        async with contextlib.aclosing(client.changes()) as stream:
            assert (await anext(stream)).kind == "gap"

            proxy.cut_all()

            assert (await anext(stream)).kind == "gap"


async def test_a_quiet_stream_sends_heartbeats(stores: Stores) -> None:
    async with (
        serving(stores, change_heartbeat_s=0.01) as service,
        service.session.get(f"{service.url}/v1/changes") as response,
    ):
        async for line in response.content:
            if Change.model_validate_json(line).kind == "heartbeat":
                break


async def test_a_slow_follower_gets_a_gap() -> None:
    hub = ChangeHub(Database("postgresql://nowhere", connections_max=1, deadline_s=1.0))
    async with hub.follow() as queue:
        for version in range(1, queue.maxsize + 2):
            hub._broadcast(Change(kind="change", ledger_id=1, version=version))

        kinds = [queue.get_nowait() for _ in range(queue.qsize())]

    assert kinds == [
        Change(kind="gap"),
        Change(kind="change", ledger_id=1, version=queue.maxsize + 1),
    ]
    assert hub.follower_count == 0


async def test_an_unreadable_notification_is_a_gap(caplog: pytest.LogCaptureFixture) -> None:
    hub = ChangeHub(cast(Database, None))
    async with hub.follow() as queue:
        hub._on_notification(None, 0, "channel", "what is this")

        assert (await queue.get()).kind == "gap"
    assert "notification-unknown" in caplog.text


LIES = [
    (404, "text/html", b"<h1>Not Found</h1>"),
    (404, "application/problem+json", b'{"code":"not-found","status":404}'),
    (200, "text/html", b"<h1>Welcome</h1>"),
    (200, "application/json", b"{}"),
    (200, "application/json", b""),
    (412, "text/plain", b"precondition failed"),
    (500, "application/problem+json", b'{"code":"internal-error","status":500}'),
    (502, "text/plain", b"bad gateway"),
    (429, "application/problem+json", b'{"code":"overloaded","status":429,"retryable":true}'),
    # Of a service that does not know this process: nothing is said of whoever asked this process.
    (401, "application/problem+json", b'{"code":"unauthenticated","status":401}'),
    (403, "application/problem+json", b'{"code":"forbidden","status":403}'),
]


def liar(status: int, kind: str, body: bytes) -> AbstractAsyncContextManager[str]:
    """A server that answers everything in the same way."""

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(status=status, content_type=kind, body=body)

    return answering(answer)


async def test_an_answer_of_another_service_is_no_verdict(service: Service) -> None:
    async with aiohttp.ClientSession() as session:
        for lie in LIES:
            row = await service.client.create(DRAFT)
            async with liar(*lie) as url:
                urls = [url, service.url]
                client = MetadataClient(urls, session, deadline_s=PATIENT_S)
                assert await client.get(row.ledger_id) == row, lie
                client = MetadataClient(urls, session, deadline_s=PATIENT_S)
                assert (await client.cas(row.in_recovery()))[0] is CasStatus.OK, lie

                closed = await swapped(
                    client, (await client.get(row.ledger_id)).closed(last_entry=-1, length=0)
                )
                client = MetadataClient(urls, session, deadline_s=PATIENT_S)
                await client.delete(row.ledger_id, version=closed.version)
                gone = await service.client.read(row.ledger_id)
                assert gone == (CasStatus.MISSING, None), lie

                alone = MetadataClient([url], session, deadline_s=0.01)
                assert await alone.read(row.ledger_id) == (CasStatus.UNKNOWN, None), lie
                with pytest.raises(MetadataUnavailable):
                    await alone.bookies()


async def test_a_row_without_a_tombstone_is_not_deleted(service: Service, stores: Stores) -> None:
    row = await service.client.create(DRAFT)
    await sql(stores, "TRUNCATE ledgers CASCADE")

    assert await service.client.read(row.ledger_id) == (CasStatus.UNKNOWN, None)
    assert await service.client.cas(row.in_recovery()) == (CasStatus.UNKNOWN, None)


async def test_a_row_of_another_ledger_is_no_answer(service: Service) -> None:
    row = await service.client.create(DRAFT)
    async with service.session.get(f"{service.url}/v1/ledgers/{row.ledger_id}") as response:
        body = await response.read()

    async with liar(200, "application/json", body) as url, aiohttp.ClientSession() as session:
        client = MetadataClient([url], session, deadline_s=PATIENT_S, try_s=PATIENT_S)
        assert await client.read(row.ledger_id) == (CasStatus.OK, row)
        assert await client.read(row.ledger_id + 1) == (CasStatus.UNKNOWN, None)


async def test_only_the_service_itself_denies_a_ledger(service: Service) -> None:
    with pytest.raises(NoSuchLedger) as missing:
        await service.client.get(404)

    assert missing.value.ledger_id == 404
    assert missing.value.outcome == "not-done"
