"""The client believes the service only: what a proxy or another server says is no verdict."""

from contextlib import AbstractAsyncContextManager

import aiohttp
import pytest
from aiohttp import web

from loadtest.stores import Stores
from quorumlog.errors import MetadataUnavailable, NoSuchLedger
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.messages import CasStatus
from tests.support.answering import answering
from tests.support.database import sql
from tests.unit.metadata.support import DRAFT, PATIENT_S, Service, swapped

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


async def test_a_row_missing_without_a_tombstone_is_not_reported_as_deleted(
    service: Service, stores: Stores
) -> None:
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
