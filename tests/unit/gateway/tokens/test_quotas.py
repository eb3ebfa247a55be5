"""What a token may use of a gateway, and what it gets beyond."""

import asyncio
import zlib
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from loadtest.stores import StoreServers
from quorumlog.errors import Overloaded
from quorumlog.wire.token_bodies import TokenQuotas
from services.gateway.edge.access.quotas import Usage
from tests.support.waiting import until
from tests.unit.gateway.tokens.support import LOG, NAMESPACE, Guarded, guarded
from tests.unit.logs.support import Answer

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateways(servers: StoreServers) -> AsyncIterator[Guarded]:
    async with guarded(servers.fresh(), follow=(0,)) as found:
        await found.log(LOG)
        yield found


def is_beyond(answer: Answer, quota: str) -> bool:
    if answer.status != 429:
        return False
    assert answer.json["code"] == "overloaded"
    assert f"exceeds its quota ({quota}): retry later" in answer.json["detail"]
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


async def test_bodies_streams_and_answers_count_for_one_token_only(gateways: Guarded) -> None:
    quotas = TokenQuotas(bytes_per_s=500)
    path, entries = f"/v1/logs/{LOG}/records", f"/v1/logs/{LOG}/records?encoding=text"
    large = "x" * 20_000
    other, _ = await gateways.token("read:*", "append:*", quotas=quotas)

    async def beyond_after(method: str, where: str, **more: object) -> bool:
        secret, _ = await gateways.token("read:*", "append:*", quotas=quotas)
        first = await gateways.ask(secret, method, where, **more)
        assert first.status < 300, first
        return is_beyond(await gateways.ask(secret, "GET", "/v1/logs"), "500 bytes per second")

    assert await beyond_after("POST", path, json={"text": large})
    packed = zlib.compress(b'{"text":"%b"}' % large.encode(), 9, 31)
    assert len(packed) < 200
    coded = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert await beyond_after("POST", path, body=packed, headers=coded), "it is charged unpacked"
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


@pytest.mark.parametrize("through", ["events", "socket"])
async def test_bytes_of_a_tail_count_while_it_goes_on(gateways: Guarded, through: str) -> None:
    await gateways.log(through)
    entries = f"/v1/logs/{through}/records"
    await gateways.done("POST", entries, {"text": "x" * 1_000_000})
    secret, _ = await gateways.token("read:*", quotas=TokenQuotas(bytes_per_s=10_000))
    headers = {"Authorization": f"Bearer {secret}"}
    session, gateway = gateways.http.session, gateways.http.urls[0]

    async def is_refused() -> bool:
        answer = await gateways.ask(secret, "GET", f"{entries}?from=2")
        return is_beyond(answer, "10000 bytes per second")

    assert not await is_refused()
    if through == "events":
        headers["Accept"] = "text/event-stream"
        async with session.get(gateway + entries, headers=headers) as tail:
            await tail.content.readexactly(1_000_000)
            await until(is_refused, "the bytes count")
            assert not tail.content.is_eof()
    else:
        async with session.ws_connect(f"{gateway}/v1/logs/{through}/ws", headers=headers) as socket:
            await socket.send_str('{"tail":{"from":0}}')
            assert "records" in await socket.receive_json()
            await until(is_refused, "the bytes count")


async def test_a_body_that_is_refused_for_its_size_is_no_debt_of_years(gateways: Guarded) -> None:
    secret, _ = await gateways.token("append:*", quotas=TokenQuotas(bytes_per_s=1 << 40))
    port = int(gateways.http.urls[0].rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"POST /v1/logs/{LOG}/records HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {1 << 60}\r\n"
        f"Content-Type: application/json\r\nAuthorization: Bearer {secret}\r\n\r\n".encode()
    )
    assert b"413" in await reader.readline()
    writer.close()

    answer = await gateways.ask(secret, "POST", f"/v1/logs/{LOG}/records", {"text": "a"})

    assert answer.status == 201


async def test_connections_beyond_the_quota_are_refused_until_one_ends(gateways: Guarded) -> None:
    secret, _ = await gateways.token("read:*", quotas=TokenQuotas(connections=1))
    headers = {"Authorization": f"Bearer {secret}", "Accept": "text/event-stream"}
    url = f"{gateways.http.urls[0]}/v1/logs/{LOG}/records"

    async with gateways.http.session.get(url, headers=headers) as tail:
        await tail.content.readline()
        answer = await gateways.ask(secret, "GET", "/v1/logs")
        elsewhere = await gateways.ask(secret, "GET", "/v1/logs", at=1)

    assert is_beyond(answer, "1 connections with requests in progress")
    assert elsewhere.status == 200, "each gateway counts for itself"

    async def is_taken() -> bool:
        return (await gateways.ask(secret, "GET", "/v1/logs")).status == 200

    await until(is_taken, "the tail's place is free")
    async with aiohttp.ClientSession(headers=headers) as another:
        async with another.get(f"{url}?limit=1", headers={"Accept": "application/json"}) as idle:
            await idle.read()
        assert await is_taken(), "a connection without a request counts no more"


async def test_open_ledgers_over_quota_are_refused_until_one_is_closed(gateways: Guarded) -> None:
    secret, _ = await gateways.token("append:*", quotas=TokenQuotas(open_ledgers=1))
    body = {"metadata": {"namespace": NAMESPACE}}
    made = await gateways.ask(secret, "POST", "/v1/ledgers", body)

    refused = await gateways.ask(secret, "POST", "/v1/ledgers", body)
    closed = await gateways.ask(secret, "POST", f"/v1/ledgers/{made.json['ledger_id']}/close")
    again = await gateways.ask(secret, "POST", "/v1/ledgers", body)

    assert is_beyond(refused, "1 open ledgers")
    assert (made.status, closed.status, again.status) == (201, 200, 201)


async def test_ledgers_created_at_once_keep_to_the_quota(gateways: Guarded) -> None:
    secret, _ = await gateways.token("append:*", quotas=TokenQuotas(open_ledgers=2))
    path = "/v1/ledgers"

    refused = await gateways.ask(secret, "POST", path, {"ensemble_size": 0})
    answers = await asyncio.gather(*(gateways.ask(secret, "POST", path, {}) for _ in range(10)))

    assert refused.status == 422
    assert sorted(answer.status for answer in answers) == [201] * 2 + [429] * 8
