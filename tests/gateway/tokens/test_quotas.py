"""What a token may use of a gateway, and what it gets beyond."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from loadtest.stores import StoreServers
from quorumlog.errors import Overloaded
from quorumlog.wire.token_bodies import TokenQuotas
from services.gateway.edge.quotas import Usage
from tests.gateway.tokens.support import LOG, NAMESPACE, Guarded, guarded
from tests.logs.support import Answer
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateways(servers: StoreServers) -> AsyncIterator[Guarded]:
    async with guarded(servers.fresh()) as found:
        await found.log(LOG)
        yield found


def is_beyond(answer: Answer, quota: str) -> bool:
    if answer.status != 429:
        return False
    assert answer.json["code"] == "overloaded"
    assert f"may use {quota} of this gateway" in answer.json["detail"]
    assert int(answer.headers["Retry-After"]) >= 1
    return True


async def test_requests_and_bytes_come_at_the_rate_of_the_quota_and_a_debt_is_waited_for() -> None:
    now = 100.0
    usage = Usage("a token", TokenQuotas(requests_per_s=2, bytes_per_s=1000), lambda: now)

    usage.begin(0)
    usage.begin(3500)
    with pytest.raises(Overloaded, match="1000 bytes per second") as refused:
        usage.begin(0)
    assert refused.value.retry_after_s == 3
    now += 2.6
    usage.begin(0)
    usage.begin(0)
    with pytest.raises(Overloaded, match="2 requests per second") as refused:
        usage.begin(0)
    assert refused.value.retry_after_s == 1
    now += 0.5
    usage.begin(0)
    now += 3600
    for _ in range(2):
        usage.begin(0)
    with pytest.raises(Overloaded, match="2 requests per second"):
        usage.begin(0)


async def test_bytes_count_of_bodies_streams_and_answers_and_of_one_token_only(
    gateways: Guarded,
) -> None:
    quotas = TokenQuotas(bytes_per_s=500)
    path, entries = f"/v1/logs/{LOG}/entries", f"/v1/logs/{LOG}/entries?encoding=text"
    large = "x" * 20_000
    other, _ = await gateways.token("read:*", "append:*", quotas=quotas)

    async def beyond_after(method: str, where: str, **more: object) -> bool:
        secret, _ = await gateways.token("read:*", "append:*", quotas=quotas)
        first = await gateways.ask(secret, method, where, **more)
        assert first.status < 300, first
        return is_beyond(await gateways.ask(secret, "GET", "/v1/logs"), "500 bytes per second")

    assert await beyond_after("POST", path, json={"text": large})
    assert await beyond_after("GET", entries)
    assert await beyond_after("GET", entries, headers={"Accept": "application/x-ndjson"})
    secret, _ = await gateways.token("read:*", "append:*", quotas=quotas)
    headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/x-ndjson"}

    async def lines() -> AsyncIterator[bytes]:
        yield b'{"text":"%b"}\n' % large.encode()

    url = gateways.http.urls[0] + path
    async with gateways.http.session.post(url, data=lines(), headers=headers) as streamed:
        assert streamed.status == 200
        await streamed.read()
    assert is_beyond(await gateways.ask(secret, "GET", "/v1/logs"), "500 bytes per second")
    assert (await gateways.ask(other, "HEAD", path)).status == 200


async def test_connections_beyond_the_quota_are_refused_until_one_ends(gateways: Guarded) -> None:
    secret, _ = await gateways.token("read:*", quotas=TokenQuotas(connections=1))
    headers = {"Authorization": f"Bearer {secret}", "Accept": "text/event-stream"}
    url = f"{gateways.http.urls[0]}/v1/logs/{LOG}/entries"

    async with gateways.http.session.get(url, headers=headers) as tail:
        await tail.content.readline()
        answer = await gateways.ask(secret, "GET", "/v1/logs")
        elsewhere = await gateways.ask(secret, "GET", "/v1/logs", at=1)

    assert is_beyond(answer, "1 connections with requests under way")
    assert elsewhere.status == 200, "each gateway counts for itself"

    async def is_taken() -> bool:
        return (await gateways.ask(secret, "GET", "/v1/logs")).status == 200

    await until(is_taken, "the tail's place is free")


async def test_open_ledgers_beyond_the_quota_are_refused_until_one_is_closed(
    gateways: Guarded,
) -> None:
    secret, _ = await gateways.token("append:*", quotas=TokenQuotas(open_ledgers=1))
    body = {"metadata": {"namespace": NAMESPACE}}
    made = await gateways.ask(secret, "POST", "/v1/ledgers", body)

    refused = await gateways.ask(secret, "POST", "/v1/ledgers", body)
    closed = await gateways.ask(secret, "POST", f"/v1/ledgers/{made.json['ledger_id']}/close")
    again = await gateways.ask(secret, "POST", "/v1/ledgers", body)

    assert is_beyond(refused, "1 open ledgers")
    assert (made.status, closed.status, again.status) == (201, 200, 201)
