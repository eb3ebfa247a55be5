"""What the SDK sends again, and what it must not."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web

from loadtest.ports import free_ports
from quorumlog.client import Client, ConnectionLost
from quorumlog.client.transport import GatewayAnswer, Transport
from quorumlog.errors import (
    NOT_DONE,
    UNKNOWN,
    LedgerClosed,
    LogFull,
    MetadataUnavailable,
    NotAGateway,
    Overloaded,
    QuorumLogError,
    QuorumTimeout,
)
from quorumlog.spark.http import Gateways
from quorumlog.wire import problems

_OPEN = {"ledger_id": 7, "state": "OPEN"}
_APPENDED = {"ledger_id": 7, "entry_id": 0, "last_add_confirmed": 0}


@dataclass(frozen=True)
class Balancer:
    """A load balancer's own answer."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)


Reply = QuorumLogError | Mapping[str, object] | bytes | tuple[int, str] | Balancer | None
"""An error, a body, a page as a proxy makes it, a redirect to another server, a load balancer's own error, or None: the
connection is cut.
"""


class Gateway:
    """Says what it is told to say, one reply a request, the last one for ever."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)
        self.paths: list[str] = []
        self.authorizations: list[str | None] = []
        self.keys: list[str | None] = []
        """The `Idempotency-Key` of each request."""

    async def handle(self, request: web.Request) -> web.Response:
        await request.read()
        self.paths.append(request.path)
        self.authorizations.append(request.headers.get("Authorization"))
        self.keys.append(request.headers.get("Idempotency-Key"))
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, QuorumLogError):
            return web.Response(
                status=reply.status,
                body=problems.to_bytes(reply),
                headers=reply.headers,
                content_type=problems.CONTENT_TYPE,
            )
        if isinstance(reply, bytes):
            return web.Response(body=reply)
        if isinstance(reply, Balancer):
            text = "<html>No server is available</html>"
            return web.Response(status=reply.status, headers=reply.headers, text=text)
        if isinstance(reply, tuple):
            return web.Response(status=reply[0], headers={"Location": reply[1] + request.path_qs})
        if reply is None:
            assert request.transport
            request.transport.close()
            return web.Response()
        return web.json_response(reply)


@asynccontextmanager
async def serving(gateway: Gateway) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", gateway.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_ports(1)[0]
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


async def test_all_tries_of_a_repeatable_change_have_one_key_and_no_other_call_has_it() -> None:
    gateway = Gateway(None, None, {"name": "x"})

    async with serving(gateway) as url, Client(url) as client:
        log = client.log("x")
        await log.change(retention_seconds=1)
        await log.change(retention_seconds=1)
        await log.info()

    first, second, third, of_the_second_call, of_a_read = gateway.keys
    assert first == second == third is not None
    assert of_the_second_call not in (None, first)
    assert of_a_read is None


async def test_an_append_has_no_key_of_its_own() -> None:
    gateway = Gateway(_APPENDED | {"first_offset": 0, "last_offset": 0})

    async with serving(gateway) as url, Client(url) as client:
        await client.log("x").append(b"r")
        await client.log("x").producer("p", epoch=1).append(b"r")

    assert gateway.keys == [None, None]


@pytest.mark.parametrize("error", [Overloaded(retry_after_s=0), MetadataUnavailable()])
async def test_what_was_not_done_is_sent_again(error: QuorumLogError) -> None:
    gateway = Gateway(error, _APPENDED)

    async with serving(gateway) as url, Client(url) as client:
        assert await client.ledger(7).append(b"x") == 0

    assert len(gateway.paths) == 2


@pytest.mark.parametrize("reply", [QuorumTimeout("late"), Balancer(503), None])
async def test_an_append_of_unknown_outcome_is_never_sent_again(reply: Reply) -> None:
    gateway = Gateway(reply, _APPENDED)

    async with serving(gateway) as url, Client(url) as client:
        with pytest.raises(QuorumLogError) as caught:
            await client.ledger(7).append(b"x")

    assert caught.value.outcome == UNKNOWN
    assert len(gateway.paths) == 1


async def test_a_read_is_sent_again_when_the_connection_breaks() -> None:
    gateway = Gateway(None, _OPEN)

    async with serving(gateway) as url, Client(url) as client:
        assert await client.ledger(7).info() == _OPEN

    assert len(gateway.paths) == 2


async def test_the_server_s_error_is_raised_as_its_own_class() -> None:
    gateway = Gateway(LedgerClosed("ends at 3", ledger_id=7, last_entry=3))

    async with serving(gateway) as url, Client(url) as client:
        with pytest.raises(LedgerClosed, match="ends at 3") as caught:
            await client.ledger(7).append(b"x")

    assert caught.value.members == {"last_entry": 3}
    assert len(gateway.paths) == 1


async def test_a_page_of_something_in_between_is_no_answer() -> None:
    for page in (b"", b"<h1>Welcome</h1>"):
        gateway = Gateway(page)
        async with serving(gateway) as url, Client(url) as client:
            for ask in (client.ledger(7).append(b"x"), client.delete_ledger(7)):
                with pytest.raises(ConnectionLost) as caught:
                    await ask
                assert caught.value.outcome == UNKNOWN


def test_only_a_204_may_be_without_a_body() -> None:
    assert GatewayAnswer(204, {}, b"").json() == {}
    with pytest.raises(ValueError):  # noqa: PT011 — the parser's own class
        GatewayAnswer(200, {}, b"").json()


async def test_the_next_gateway_is_asked_when_one_refuses() -> None:
    gateway = Gateway(_APPENDED)
    nobody = f"http://127.0.0.1:{free_ports(1)[0]}"

    async with serving(gateway) as url, Client(nobody, url) as client:
        await client.ledger(7).append(b"x")
        await client.ledger(7).append(b"y")

    assert len(gateway.paths) == 2


async def test_nobody_to_ask_means_not_done() -> None:
    nobody = f"http://127.0.0.1:{free_ports(1)[0]}"

    async with Client(nobody, deadline_s=0.2) as client:
        with pytest.raises(ConnectionLost) as caught:
            await client.ledger(7).append(b"x")

    assert caught.value.outcome == NOT_DONE


async def test_a_deadline_before_anything_was_sent_means_not_done() -> None:
    with socket.create_server(("127.0.0.1", free_ports(1)[0]), backlog=0) as full:
        address = full.getsockname()
        with socket.create_connection(address):  # takes the only place; nobody is let in any more
            async with Client(f"http://127.0.0.1:{address[1]}", deadline_s=0.2) as client:
                with pytest.raises(ConnectionLost) as caught:
                    await client.ledger(7).append(b"x")

    assert caught.value.outcome == NOT_DONE


@pytest.mark.parametrize(
    "last", [MetadataUnavailable(retry_after_s=3600), LedgerClosed("over", last_entry=3)]
)
async def test_a_repetition_not_done_leaves_the_first_try_unknown(last: QuorumLogError) -> None:
    gateway = Gateway(None, last)

    async with serving(gateway) as url, Client(url) as client:
        with pytest.raises(type(last)) as caught:
            await client.create_ledger()
        assert caught.value.outcome == UNKNOWN
        # Of what changes nothing the answer is the whole truth.
        gateway.replies = [None, LedgerClosed("over", last_entry=3)]
        with pytest.raises(LedgerClosed) as read:
            await client.ledger(7).info()
        assert read.value.outcome == NOT_DONE


async def test_a_function_gives_each_request_and_each_repeat_the_present_token() -> None:
    gateway = Gateway(MetadataUnavailable(), _OPEN, _OPEN)
    tokens = iter(("one", "two", "three", "with\nline"))

    async with serving(gateway) as url, Client(url, token=lambda: next(tokens)) as client:
        for _ in range(2):
            await client.ledger(7).info()
        with pytest.raises(ValueError, match="token must be non-empty ASCII") as refused:
            await client.ledger(7).info()

    assert gateway.authorizations == ["Bearer one", "Bearer two", "Bearer three"]
    assert "with" not in str(refused.value).split()


@pytest.mark.parametrize("status", [300, 301, 302, 303, 307, 308])
async def test_no_redirect_is_followed_and_the_error_names_where_it_leads(status: int) -> None:
    other = Gateway(_APPENDED)
    async with serving(other) as elsewhere, serving(Gateway((status, elsewhere))) as url:
        async with Client(url) as client:
            ledger = client.ledger(7, password="secret")
            for ask in (ledger.append(b"x"), client.log("log").delete(), ledger.info()):
                with pytest.raises(
                    NotAGateway, match=f"{status} redirects to '{elsewhere}/v1"
                ) as reported:
                    await ask
                assert url in reported.value.detail
                assert reported.value.outcome == UNKNOWN

        def spark() -> None:
            with Gateways(url, headers={"Ledger-Password": "secret"}) as gateways:
                gateways.request("POST", "/v1/ledgers/7/entries", value={}, is_repeatable=True)

        with pytest.raises(NotAGateway, match=f"redirects to '{elsewhere}/v1"):
            await asyncio.to_thread(spark)
        transport = Transport([url], deadline_s=5)
        async with transport:
            with pytest.raises(aiohttp.ClientError):
                async with transport.socket("/v1/ws", transport.way({}), ()):
                    pass

    assert other.paths == []


async def test_a_server_that_is_no_gateway_is_named_with_its_url() -> None:
    async with serving(Gateway((404, ""))) as url, Client(url) as client:
        with pytest.raises(NotAGateway, match=rf"^{url}: status 404 .* URL of a gateway"):
            await client.log("log").info()


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_repeatable_requests_are_sent_again_after_a_balancers_error(status: int) -> None:
    """It reaches no gateway while all of them are started again."""
    away, record = Balancer(status), {"first_offset": 0, "last_offset": 0}
    gateway = Gateway(away, away, _OPEN, away, _APPENDED | record, away, _OPEN)

    def spark(url: str) -> None:
        with Gateways(url) as gateways:
            assert gateways.get("/v1/ledgers/7") == _OPEN

    async with serving(gateway) as url, Client(url) as client:
        assert await client.ledger(7).info() == _OPEN
        producer = client.log("x").producer("p", epoch=1)
        assert (await producer.append(b"r")).first_offset == 0
        await asyncio.to_thread(spark, url)

    assert len(gateway.paths) == 7


@pytest.mark.parametrize(
    "headers",
    [
        {"Retry-After": "3600"},
        {
            "Retry-After": "Fri, 01 Jan 2100 01:00:00 GMT",
            "Date": "Fri, 01 Jan 2100 00:00:00 GMT",
        },
    ],
)
async def test_a_gateway_is_spared_for_its_retry_after(headers: dict[str, str]) -> None:
    away, other = Gateway(Balancer(503, headers)), Gateway(_OPEN)

    def spark(*urls: str) -> None:
        with Gateways(",".join(urls)) as gateways:
            gateways._at = 0
            assert gateways.get("/v1/ledgers/7") == _OPEN

    async with serving(away) as url, serving(other) as another:
        async with Client(url, another) as client:
            assert await client.ledger(7).info() == _OPEN
        await asyncio.to_thread(spark, url, another)
        async with Client(url) as client:
            with pytest.raises(ConnectionLost) as caught:  # the deadline is earlier
                await client.ledger(7).info()
        with pytest.raises(ConnectionLost):
            await asyncio.to_thread(spark, url)

    assert caught.value.retry_after_s == 3600
    assert (len(away.paths), len(other.paths)) == (4, 2)


async def test_a_full_log_fails_a_call_at_once_in_the_sdk_and_in_spark() -> None:
    gateway = Gateway(LogFull("the log has 10000 ledgers: truncate it"))

    def spark(url: str) -> None:
        with Gateways(url) as gateways:
            gateways.request("POST", "/v1/transactions/t/commit", value={}, is_repeatable=True)

    async with serving(gateway) as url, Client(url) as client:
        with pytest.raises(LogFull, match="truncate it") as caught:
            await client.log("log").roll()
        with pytest.raises(LogFull, match="truncate it"):
            await asyncio.to_thread(spark, url)

    assert caught.value.outcome == NOT_DONE
    assert len(gateway.paths) == 2


async def test_the_first_failed_try_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    gateway = Gateway(MetadataUnavailable("away"), MetadataUnavailable("away"), _OPEN)

    async with serving(gateway) as url, Client(url) as client:
        with caplog.at_level("INFO", "quorumlog.client"):
            assert await client.ledger(7).info() == _OPEN

    reported = [record for record in caplog.records if record.name == "quorumlog.client.transport"]
    assert [record.levelname for record in reported] == ["WARNING", "INFO"]
    assert reported[0].getMessage().startswith("metadata-unavailable: away; retrying for ")
