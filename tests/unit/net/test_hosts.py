"""For which host a request is meant, and which client a proxy names."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import nullcontext
from ipaddress import ip_network
from pathlib import Path
from typing import Final

import pytest
from aiohttp import HttpVersion, web
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from quorumlog.errors import BadRequest, Forbidden, ForeignHost
from quorumlog.net.connections import Listener, ListenLimits, as_sent
from quorumlog.net.hosts import Hosts
from quorumlog.net.listen import listening
from quorumlog.net.proxies import Proxies, ProxiesSend
from quorumlog.net.service import ServiceSettings
from tests.support.waiting import within
from tests.unit.net.mutual_tls import Authority


def is_known(hosts: Hosts, host: str) -> bool:
    request = make_mocked_request("GET", "/", headers={"Host": host})
    try:
        hosts.check(request)
    except ForeignHost:
        return False
    return True


def test_the_advertised_host_and_the_settings_names_are_known() -> None:
    settings = ServiceSettings.read(
        {
            "PORT": "8080",
            "ADVERTISED_URL": "http://Gateway-1:8080",
            "ALLOWED_HOSTS": "log.example, lb",
        }
    )

    for host in ("gateway-1", "GATEWAY-1:8080", "gateway-1.:9", "log.example:443", "lb"):
        assert is_known(settings.hosts, host), host
    for host in ("gateway-2", "a.log.example", "example", "1.2.3", "0x7f.1", "[lb]", "*", "a b"):
        assert not is_known(settings.hosts, host), host


def test_a_star_lets_every_host_in() -> None:
    assert is_known(Hosts(allowed=["*"]), "evil.example")


def test_a_host_beyond_those_that_are_remembered_is_known_or_refused_all_the_same() -> None:
    hosts = Hosts()

    for port in range(1, 1200):
        assert is_known(hosts, f"127.0.0.1:{port}")
    for _ in range(2):
        assert is_known(hosts, "127.0.0.1:1")
        assert is_known(hosts, "127.0.0.1:1199")
        assert not is_known(hosts, "evil.example")


@pytest.mark.parametrize("version", [(0, 9), (2, 0), (1, 0), (1, 1)])
def test_versions_of_http_that_are_not_1_are_refused(version: tuple[int, int]) -> None:
    request = make_mocked_request("GET", "/", version=HttpVersion(*version))

    with pytest.raises(BadRequest) if version[0] != 1 else nullcontext():
        Hosts().check(request)


@pytest.mark.parametrize(
    ("origin", "is_own"),
    [
        ("http://127.0.0.1:8080", True),
        ("https://127.0.0.1:8080", False),
        ("http://127.0.0.1", False),
        ("https://log.example", True),
        ("http://log.example", False),
        ("null", False),
        ("", False),
    ],
)
def test_an_origin_is_own_by_scheme_host_and_port(origin: str, *, is_own: bool) -> None:
    """A proxy may speak TLS for the advertised URL."""
    hosts = Hosts("https://log.example")
    request = make_mocked_request("POST", "/", headers={"Host": "127.0.0.1:8080", "Origin": origin})

    if is_own:
        hosts.check_origin(request)
    else:
        with pytest.raises(Forbidden):
            hosts.check_origin(request)


@pytest.mark.parametrize(
    ("host", "is_one"),
    [
        ("[::1]", True),
        ("[::1]:8080", True),
        ("[::1", False),
        ("[::1]8080", False),
        ("[localhost]", False),
        ("one.localhost", True),
        ("localhost.evil.example", False),
        ("evillocalhost", False),
    ],
)
def test_a_host_is_read_as_a_browser_writes_it(host: str, *, is_one: bool) -> None:
    assert is_known(Hosts(), host) is is_one


PAGE = "https://page.example"


@pytest.mark.parametrize(
    ("method", "more", "allowed", "is_let_in"),
    [
        ("GET", {}, (), True),
        ("POST", {}, (), False),
        ("GET", {"Upgrade": "websocket"}, (), False),
        ("POST", {}, (PAGE,), True),
        ("POST", {}, ("*",), True),
        ("POST", {}, ("https://other.example",), False),
    ],
)
def test_a_page_changes_nothing_and_opens_no_socket_unless_it_is_allowed(
    method: str, more: dict[str, str], allowed: tuple[str, ...], *, is_let_in: bool
) -> None:
    given = {"Host": "127.0.0.1:8080", "Origin": PAGE, **more}
    request = make_mocked_request(method, "/", headers=given)

    with nullcontext() if is_let_in else pytest.raises(Forbidden):
        Hosts().check_origin(request, allowed)


PROXY: Final = "10.1.2.3"
TRUSTED: Final = (ip_network("10.0.0.0/8"), ip_network("2001:db8:1::/48"), ip_network("127.0.0.1"))


@pytest.mark.parametrize(
    ("said", "client"),
    [
        (["192.0.2.7"], "192.0.2.7"),
        (["192.0.2.7:4711"], "192.0.2.7"),
        (["[2001:db8::7]:4711"], "2001:db8::7"),
        (["2001:db8::7"], "2001:db8::7"),
        # What a client writes stands on the left of what the proxies add.
        (["203.0.113.1, 192.0.2.7, 10.9.9.9"], "192.0.2.7"),
        (["203.0.113.1", "192.0.2.7"], "192.0.2.7"),
        (["10.5.5.5, 10.9.9.9"], "10.5.5.5"),
        (["192.0.2.7, unknown"], PROXY),
        (["192.0.2.7, unknown, 10.9.9.9"], "10.9.9.9"),
        ([""], PROXY),
        (["a" * 8000], PROXY),
        ([","], PROXY),
        ([], PROXY),
    ],
)
def test_the_last_address_that_is_no_proxy_s_is_the_client_s(said: list[str], client: str) -> None:
    proxies = Proxies(TRUSTED, "x-forwarded-for")
    headers = CIMultiDict([("X-Forwarded-For", one) for one in said])
    headers["Forwarded"] = "for=198.51.100.1"

    assert proxies.client_of(headers, PROXY) == client
    assert proxies.client_of(headers, "192.0.2.99") == "192.0.2.99"
    assert proxies.client_of(headers, "") == ""


@pytest.mark.parametrize(
    ("said", "client"),
    [
        (["for=192.0.2.7"], "192.0.2.7"),
        (['For="192.0.2.7:4711";proto=https;by=10.1.1.1'], "192.0.2.7"),
        (['proto=http;for="[2001:db8::7]:4711"'], "2001:db8::7"),
        (["for=203.0.113.1, for=192.0.2.7;proto=http, for=10.9.9.9"], "192.0.2.7"),
        (["for=203.0.113.1", "for=192.0.2.7"], "192.0.2.7"),
        (["for=192.0.2.7, for=_hidden"], PROXY),
        (['for="192.0.2.7, for=203.0.113.1"'], PROXY),
        (["notfor=192.0.2.7"], PROXY),
        (["for="], PROXY),
    ],
)
def test_rfc_7239_names_the_client_too(said: list[str], client: str) -> None:
    proxies = Proxies(TRUSTED, "forwarded")
    headers = CIMultiDict([("Forwarded", one) for one in said])
    headers["X-Forwarded-For"] = "198.51.100.1"

    assert proxies.client_of(headers, PROXY) == client
    assert proxies.client_of(headers, f"::ffff:{PROXY}") in (client, f"::ffff:{PROXY}")


def v2(kind: int, family: int, addresses: bytes) -> bytes:
    head = b"\r\n\r\n\x00\r\nQUIT\n" + bytes((kind, family))
    return head + len(addresses).to_bytes(2) + addresses


IPV4: Final = socket.inet_aton("192.0.2.7") + socket.inet_aton("10.0.0.1") + bytes(4)
IPV6: Final = 2 * socket.inet_pton(socket.AF_INET6, "2001:db8::7") + bytes(4)
HEADERS: Final = [
    (b"PROXY TCP4 192.0.2.7 10.0.0.1 4711 8080\r\n", "192.0.2.7"),
    (b"PROXY TCP6 2001:db8::7 2001:db8::1 4711 8080\r\n", "2001:db8::7"),
    (b"PROXY UNKNOWN\r\n", "127.0.0.1"),
    (b"PROXY UNKNOWN ffff::1 ffff::2 1 2\r\n", "127.0.0.1"),
    (v2(0x21, 0x11, IPV4), "192.0.2.7"),
    (v2(0x21, 0x11, IPV4 + b"\x03\x00\x04\x00\x00\x00\x00"), "192.0.2.7"),
    (v2(0x21, 0x21, IPV6), "2001:db8::7"),
    (v2(0x20, 0x00, b""), "127.0.0.1"),
    (v2(0x21, 0x31, bytes(216)), "127.0.0.1"),
]
BROKEN: Final = [
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"PROXY TCP4 192.0.2.7\r\n",
    b"PROXY TCP4 nobody 10.0.0.1 4711 8080\r\n",
    b"PROXY TCP4 192.0.2.7 10.0.0.1 4711 " + b"8" * 200 + b"\r\n",
    b"PROXY \xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\r\n",
    v2(0x31, 0x11, IPV4),
    v2(0x21, 0x11, IPV4[:7]),
    b"PROXY TCP4 192.0",
]


@contextlib.asynccontextmanager
async def served(
    send: ProxiesSend, *, tls: ssl.SSLContext | None = None, peer_connections_max: int = 10_000
) -> AsyncIterator[Listener]:
    """A listener that answers with the address of the client."""

    async def notify(request: web.Request) -> web.Response:
        return web.Response(text=as_sent(request).remote)

    app = web.Application()
    app.router.add_get("/", notify)
    limits = ListenLimits(
        connections_max=16,
        peer_connections_max=peer_connections_max,
        head_timeout_s=5.0,
        drain_timeout_s=0.5,
        proxies=Proxies(TRUSTED, send),
    )
    async with listening(app, host="127.0.0.1", port=0, limits=limits, context=tls) as listener:
        yield listener


async def reported(
    listener: Listener, before: bytes = b"", lines: bytes = b"", address: str = "127.0.0.1"
) -> bytes:
    """What a connection gets that begins with some bytes."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", listener.port, local_addr=(address, 0)
    )
    writer.write(before + b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + lines)
    writer.write(b"\r\n")
    try:
        async with within("the connection is answered and ends"):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(("header", "client"), HEADERS)
async def test_the_proxy_protocol_names_the_client(header: bytes, client: str) -> None:
    async with served("proxy-protocol") as listener:
        answer = await reported(listener, header, b"X-Forwarded-For: 198.51.100.1\r\n")
        assert answer.endswith(b"\r\n\r\n" + client.encode())


async def test_a_connection_without_its_header_ends_and_holds_no_place() -> None:
    async with served("proxy-protocol") as listener:
        for header in BROKEN:
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            writer.write(header)
            writer.write_eof()
            with contextlib.suppress(ConnectionResetError):
                async with within("the connection ends"):
                    assert await reader.read() == b""
            writer.close()
        assert listener.connections.used == 0
        assert (await reported(listener, HEADERS[0][0])).endswith(b"192.0.2.7")


async def test_who_is_no_trusted_proxy_speaks_http_at_once() -> None:
    async with served("proxy-protocol") as listener:
        assert (await reported(listener, address="127.0.0.2")).endswith(b"\r\n\r\n127.0.0.2")
        assert b" 400 " in await reported(listener, HEADERS[0][0], address="127.0.0.2")


async def test_the_header_comes_before_the_handshake_of_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = authority.tls("gateway", "gateway-1").server
    client = authority.tls("gateway", "gateway-2").client
    async with served("proxy-protocol", tls=server) as listener:
        loop = asyncio.get_running_loop()
        raw = socket.create_connection(("127.0.0.1", listener.port))
        raw.setblocking(False)
        await loop.sock_sendall(raw, HEADERS[4][0])
        reader, writer = await asyncio.open_connection(
            sock=raw, ssl=client, server_hostname="localhost"
        )
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        async with within("the answer comes"):
            assert (await reader.read()).endswith(b"\r\n\r\n192.0.2.7")
        writer.close()


async def asked(listener: Listener, stack: contextlib.AsyncExitStack, before: bytes = b"") -> None:
    """A connection that has had an answer and stands until the stack's end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    stack.callback(writer.close)
    writer.write(before + b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    async with within("the answer comes"):
        await reader.readuntil(b"\r\n\r\n")


async def test_the_connections_of_a_proxy_have_no_share() -> None:
    async with (
        served("x-forwarded-for", peer_connections_max=1) as listener,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(15):
            await asked(listener, stack)
        assert b"200 OK" in await reported(listener)


async def test_a_client_that_the_proxy_protocol_names_has_a_share_of_the_connections() -> None:
    async with (
        served("proxy-protocol", peer_connections_max=1) as listener,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(14):
            await asked(listener, stack, HEADERS[0][0])
        assert b" 429 " in await reported(listener, HEADERS[0][0])
        assert b"200 OK" in await reported(listener, HEADERS[1][0])
