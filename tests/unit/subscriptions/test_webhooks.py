"""Webhooks: the URLs that are allowed, and deliveries to receivers that are slow, huge, broken or elsewhere."""

import asyncio
import socket
import threading
from base64 import urlsafe_b64decode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from aiohttp import web
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from loadtest.ports import free_ports
from quorumlog.errors import WakeTokenInvalid, WebhookUrlRejected
from quorumlog.net.listen import listening
from services.gateway.logs.subscriptions import DeliveryFailed
from services.gateway.streams import webhooks
from services.gateway.streams.webhooks import (
    ANSWER_BYTES_MAX,
    URL_CHARS_MAX,
    Keys,
    Webhooks,
    check_url,
    is_allowed,
)
from tests.support.waiting import until, within

LOOPBACK = (ip_network("127.0.0.0/8"),)
KEYS = Keys(b"secret")
WAKE = {"wake_id": "w_1"}

PRIVATE = (
    *("10.0.0.1", "172.16.0.1", "192.168.1.1", "127.0.0.1", "0.0.0.0", "169.254.169.254"),
    *("100.64.0.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff02::1"),
    "fec0::1",
    *(
        "::ffff:10.0.0.1",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "2002:7f00:1::",
        "2002:0a00:0001::1",
    ),
)
PUBLIC = ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")


@pytest.mark.parametrize("address", PRIVATE)
def test_a_private_address_is_allowed_only_if_its_network_is(address: str) -> None:
    found = ip_address(address)
    assert not is_allowed(found, (), is_public=True)
    everything = (ip_network("0.0.0.0/0"), ip_network("::/0"))
    assert is_allowed(found, everything, is_public=False)


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_allowed_with_https(address: str) -> None:
    assert is_allowed(ip_address(address), (), is_public=True)
    assert not is_allowed(ip_address(address), LOOPBACK, is_public=False)


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1/hook",
        "https://10.0.0.1/hook",
        "http://worker.example/hook",
        "ftp://worker.example/hook",
        "https://localhost/hook",
        "https://a.localhost./hook",
        "https://2130706433/",  # 127.0.0.1 as one number
        "https://0x7f.1/",
        "https://0177.0.0.1/",
        "https://127.1/",
        "https://0127.0.0.09/",
        "https://9999999999999/",
        "https://[fec0::1]/",
        "https://[::ffff:127.0.0.1]/",
        "https://[fe80::1%25eth0]/",
        "https://169.254.169.254/latest/meta-data",
        "https://user:word@worker.example/",
        "https:///hook",
        "https://worker.example:99999/",
        "worker.example/hook",
        "https://worker.example/" + "a" * URL_CHARS_MAX,
    ],
)
def test_an_unsafe_url_is_rejected(url: str) -> None:
    with pytest.raises(WebhookUrlRejected):
        check_url(url, ())


def test_a_url_is_allowed_with_https_or_in_a_network_that_is_allowed() -> None:
    for url in (
        "https://worker.example/hook?a=b",
        "https://8.8.8.8:8443/",
        "https://[2606:4700::1]/",
    ):
        check_url(url, ())
    for url in ("http://127.0.0.1:8000/hook", "http://localhost:1/", "https://127.0.0.2/"):
        check_url(url, LOOPBACK)
    with pytest.raises(WebhookUrlRejected):
        check_url("http://10.0.0.1/", LOOPBACK)


Answering = Callable[[web.Request], Any]


@asynccontextmanager
async def receiver(answer: Answering) -> AsyncIterator[tuple[str, list[Any]]]:
    """A receiver's URL, and what it got."""
    got: list[Any] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        got.append((request.headers, await request.read()))
        found: web.StreamResponse = await answer(request)
        return found

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    async with listening(app, host="127.0.0.1", port=free_ports(1)[0]) as listener:
        yield f"http://127.0.0.1:{listener.port}/hook", got


@asynccontextmanager
async def sender(networks: Any = LOOPBACK) -> AsyncIterator[Webhooks]:
    found = Webhooks(networks)
    try:
        yield found
    finally:
        await found.close()
        for resolver in found._resolvers:
            assert resolver._threads._shutdown, "threads of a closed sender end"


def answering(status: int = 200, body: bytes = b"", **headers: str) -> Answering:
    async def answer(_request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers=headers)

    return answer


async def test_a_delivery_is_signed_over_its_time_and_its_bytes() -> None:
    async with receiver(answering(body=b'{"done":true}')) as (url, got), sender() as webhooks:
        assert await webhooks.send(url, WAKE, KEYS)
    ((headers, body),) = got
    assert headers["Content-Type"] == "application/json"
    parts = dict(part.split("=", 1) for part in headers["Webhook-Signature"].split(","))
    jwk = KEYS.jwk
    assert parts["kid"] == jwk["kid"]
    key = Ed25519PublicKey.from_public_bytes(urlsafe_b64decode(jwk["x"] + "="))
    signature = urlsafe_b64decode(parts["ed25519"] + "==")
    key.verify(signature, parts["t"].encode() + b"." + body)
    with pytest.raises(InvalidSignature):
        key.verify(signature, parts["t"].encode() + b"." + body + b" ")


@pytest.mark.parametrize(
    ("body", "is_done"),
    [
        (b'{"done":true}', True),
        (b'{"done":1}', False),
        (b"[true]", False),
        (b"", False),
        (b"\xff", False),
        (b"[" * 10_000, False),
        (b'{"done":true}' + b" " * ANSWER_BYTES_MAX, False),
    ],
)
async def test_a_response_is_done_only_if_it_says_so_in_a_few_bytes(
    body: bytes, is_done: bool
) -> None:
    async with receiver(answering(body=body)) as (url, _), sender() as webhooks:
        assert await webhooks.send(url, WAKE, KEYS) is is_done


@pytest.mark.parametrize("status", [301, 302, 307, 308, 400, 404, 429, 500, 503])
async def test_a_redirect_or_an_error_is_a_failure_and_is_not_followed(status: int) -> None:
    answer = answering(status, b'{"done":true}', Location="/elsewhere")
    async with receiver(answer) as (url, got), sender() as webhooks:
        with pytest.raises(DeliveryFailed, match=str(status)):
            await webhooks.send(url, WAKE, KEYS)
    assert len(got) == 1


async def test_a_receiver_without_an_end_is_read_up_to_the_bound() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 10_000)

    async with receiver(endless) as (url, _), sender() as webhooks, within("the answer is cut"):
        assert not await webhooks.send(url, WAKE, KEYS)


async def test_a_slow_receiver_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "DELIVERY_S", 0.2)

    async def drips(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(100):
            await response.write(b" ")
            await asyncio.sleep(0.05)
        return response

    async with receiver(drips) as (url, _), sender() as sending:
        with pytest.raises(DeliveryFailed, match="Timeout"):
            await sending.send(url, WAKE, KEYS)


async def test_a_receiver_that_is_gone_is_a_failure() -> None:
    async with sender() as webhooks:
        with pytest.raises(DeliveryFailed):
            await webhooks.send(f"http://127.0.0.1:{free_ports(1)[0]}/", WAKE, KEYS)


async def test_a_name_that_resolves_to_a_private_address_is_not_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with receiver(answering(body=b'{"done":true}')) as (url, got):
        port = int(url.rpartition(":")[2].partition("/")[0])
        asked = []

        def resolve(host: str, port: int, *_: Any) -> Any:
            asked.append(host)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        for networks in ((), (ip_network("10.0.0.0/8"),)):
            async with sender(networks) as webhooks:
                with pytest.raises(DeliveryFailed, match="no address that is allowed"):
                    await webhooks.send(f"https://rebinding.example:{port}/", WAKE, KEYS)
        assert not got
        async with sender() as webhooks:
            assert await webhooks.send(f"http://worker.example:{port}/", WAKE, KEYS)
    assert asked == ["rebinding.example", "rebinding.example", "worker.example"]


async def test_names_that_are_never_resolved_keep_no_other_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never, asked = threading.Event(), list[str]()

    def resolve(host: str, port: int, *_: Any) -> Any:
        asked.append(host)
        if host.startswith("hostile"):
            never.wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(webhooks, "_SLOW_S", 0.05)
    monkeypatch.setattr(webhooks, "RESOLVERS_MAX", 2)
    resolver = webhooks._Resolver(LOOPBACK, is_public=False)
    lookups = [asyncio.ensure_future(resolver.resolve("hostile", 1)) for _ in range(9)]
    try:
        await until(lambda: bool(asked), "the lookup begins")
        await asyncio.sleep(0.2)
        assert asked == ["hostile"], "one lookup serves all"
        for each in lookups:
            each.cancel()  # as their deliveries end
        again = asyncio.ensure_future(resolver.resolve("hostile", 1))
        (found,) = await resolver.resolve("good", 2)
        assert (found["host"], asked) == ("127.0.0.1", ["hostile", "good"])
        never.set()
        await again
        asked.clear()
        never.clear()
        lookups = [asyncio.ensure_future(resolver.resolve("hostile", at)) for at in range(9)]
        await resolver.resolve("good", 2)
        assert asked.count("hostile") == webhooks.SLOW_RESOLVERS_MAX, (
            "a slow name has its own threads"
        )
    finally:
        never.set()
        await asyncio.gather(*lookups, return_exceptions=True)
        await resolver.close()


async def test_an_address_that_is_no_longer_allowed_gets_no_delivery() -> None:
    async with receiver(answering()) as (url, got), sender(()) as webhooks:
        with pytest.raises(DeliveryFailed, match="https"):
            await webhooks.send(url, WAKE, KEYS)
    assert not got


def test_a_token_is_of_one_subscription_and_generation() -> None:
    token = KEYS.token("sub", "0123456789abcdefrest", 7)
    assert KEYS.generation_of("sub", token) == (7, "0123456789abcdef")
    for name, wrong in (
        ("other", token),
        ("sub", token.replace("7.", "8.", 1)),
        ("sub", token[:-1]),
        ("sub", ""),
        ("sub", "é"),
    ):
        with pytest.raises(WakeTokenInvalid):
            KEYS.generation_of(name, wrong)
    with pytest.raises(WakeTokenInvalid):
        Keys(b"another").generation_of("sub", token)
