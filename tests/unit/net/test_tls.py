"""Mutual TLS between services, and the sessions in which services ask each other."""

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path

import aiohttp
import pytest
import uvloop
from aiohttp import web
from aiohttp.test_utils import TestServer, make_mocked_request

from quorumlog.certificates import Subject, issue, key_file
from quorumlog.errors import Forbidden, Unauthenticated
from quorumlog.net import listen as listen_module
from quorumlog.net import timers
from quorumlog.net import tls as tls_module
from quorumlog.net.connections import ListenLimits
from quorumlog.net.identity import ANONYMOUS, Credentials, Identity, Role
from quorumlog.net.sessions import ExpectedServer, service_session
from quorumlog.net.tls import PeerCertificate, Tls, TlsFiles
from tests.support.certificates import expired
from tests.support.waiting import until, within
from tests.unit.net.mutual_tls import BOOKIE, LOCAL, METADATA, REFUSED, Authority, ask, serving


async def test_a_certificate_tells_a_callers_role_name_and_hosts(authority: Authority) -> None:
    bookie = authority.tls("bookie", "bookie-1", ("127.0.0.1", "::1", "Store.example"))

    async with serving(authority.tls("metadata", "metadata-1")) as listener:
        found = await ask(listener, bookie.credentials)

    hosts = frozenset(("127.0.0.1", "::1", "store.example"))
    assert found == Identity(Role.BOOKIE, "bookie-1", hosts)


@pytest.mark.parametrize(
    "names",
    [
        (("DNS", "quorumlog://tests/operator/anna"),),
        (("URI", "quorumlog://tests/king/arthur"),),
        (("URI", "quorumlog://tests/bookie/"),),
        (("URI", "quorumlog://tests/bookie/a"), ("URI", "quorumlog://tests/operator/a")),
        (("URI", "https://tests/bookie/a"),),
    ],
)
def test_names_that_tell_no_role_are_of_no_service(names: tuple[tuple[str, str], ...]) -> None:
    with pytest.raises(Forbidden):
        tls_module._identity_of(names)


@pytest.mark.parametrize("has_transport", [True, False])
def test_an_unverified_certificate_is_of_nobody(authority: Authority, has_transport: bool) -> None:
    """Of a connection without TLS, or one that has ended meanwhile."""
    request = make_mocked_request("GET", "/", transport=asyncio.Transport())
    if not has_transport:
        request.protocol.transport = None

    with pytest.raises(Unauthenticated, match="a client certificate of the cluster is required"):
        PeerCertificate(authority.tls("metadata", "metadata-1")).identify(request)


async def test_a_socket_is_opened_with_the_same_certificate(authority: Authority) -> None:
    gateway = authority.tls("gateway", "gateway-1")

    async with (
        serving(authority.tls("bookie", "bookie-1")) as listener,
        service_session(gateway.credentials) as session,
        within("the socket says a name"),
        session.ws_connect(f"https://127.0.0.1:{listener.port}/socket", ssl=BOOKIE) as socket,
    ):
        assert await socket.receive_str() == "gateway-1"


async def test_strangers_are_refused(authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "stranger").tls("bookie", "bookie-1")
    trusting = ssl.create_default_context(cafile=authority.file)
    without = Credentials(client_context=lambda: trusting)
    other = Authority(tmp_path / "mixed")
    # It trusts the server, and shows what an authority made that the server does not know.
    mixed = issue(other.folder, "bookie", "bookie-1", LOCAL)
    unknown = Tls(TlsFiles(mixed, key_file(mixed), authority.file))

    async with serving(authority.tls("metadata", "metadata-1")) as listener:
        for credentials in (stranger.credentials, without, unknown.credentials):
            with pytest.raises(REFUSED):
                await ask(listener, credentials)


async def test_an_expired_certificate_counts_at_neither_end(authority: Authority) -> None:
    old = authority.load(expired(authority.folder, "gateway", "gateway-1", LOCAL))
    current = authority.tls("metadata", "metadata-1")

    for server, client in ((current, old), (old, current)):
        async with serving(server) as listener:
            with pytest.raises(REFUSED):
                await ask(listener, client.credentials)


async def test_a_strangers_certificate_is_forbidden(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other", "others")
    both = tmp_path / "both.pem"
    both.write_bytes(authority.file.read_bytes() + other.file.read_bytes())
    file = authority.issue("metadata", "metadata-1")
    server = Tls(TlsFiles(file, key_file(file), both))
    theirs = other.issue("bookie", "bookie-1")
    bookie = Tls(TlsFiles(theirs, key_file(theirs), both))
    ca = ssl.create_default_context(cafile=both)
    # An authority's own certificate has no URI of a service.
    ca.load_cert_chain(other.file, key_file(other.file))

    async with serving(server) as listener:
        with pytest.raises(Forbidden, match="must be of cluster tests, but is of others"):
            # One that does not mind who answers.
            await ask(listener, Credentials(client_context=lambda: bookie.client))
        with pytest.raises((Forbidden, *REFUSED)):
            await ask(listener, Credentials(client_context=lambda: ca))


async def test_a_client_refuses_a_server_not_certified_for_its_host(authority: Authority) -> None:
    gateway = authority.tls("gateway", "gateway-1").credentials

    async with serving(authority.tls("metadata", "elsewhere", ("elsewhere.example",))) as listener:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await ask(listener, gateway)


@pytest.mark.parametrize(
    ("role", "name", "expected"),
    [
        ("bookie", "bookie-1", ExpectedServer(Role.METADATA)),
        ("bookie", "bookie-1", ExpectedServer(Role.GATEWAY)),
        ("gateway", "bookie-1", ExpectedServer(Role.BOOKIE, "bookie-1")),
        ("bookie", "bookie-2", ExpectedServer(Role.BOOKIE, "bookie-1")),
        ("operator", "anna", ExpectedServer(Role.METADATA)),
    ],
)
async def test_a_client_refuses_a_server_that_is_not_who_was_asked(
    authority: Authority, role: str, name: str, expected: ExpectedServer
) -> None:
    """A service that was taken over answers at the address of another one of its host."""
    gateway = authority.tls("gateway", "gateway-1").credentials

    async with serving(authority.tls(role, name)) as listener:
        with pytest.raises(aiohttp.ClientConnectorCertificateError, match="answers instead of"):
            await ask(listener, gateway, expected)


async def test_a_connection_to_one_bookie_serves_no_other(authority: Authority) -> None:
    """Of two bookies that registered one address, the certificate decides who listens there."""
    gateway = authority.tls("gateway", "gateway-1").credentials

    async with (
        serving(authority.tls("bookie", "bookie-1")) as listener,
        service_session(gateway) as session,
        within("the answers arrive"),
    ):
        url = f"https://127.0.0.1:{listener.port}/"
        for expected in (BOOKIE, ExpectedServer(Role.BOOKIE)):
            async with session.get(url, ssl=expected) as answer:
                assert answer.status == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError, match="bookie bookie-2 of"):
            await session.get(url, ssl=ExpectedServer(Role.BOOKIE, "bookie-2"))


async def test_no_unverifying_session_asks_who_must_answer(authority: Authority) -> None:
    """aiohttp verifies no certificate of a request with a fingerprint."""
    async with (
        serving(authority.tls("metadata", "metadata-1")) as listener,
        aiohttp.ClientSession() as session,
    ):
        with pytest.raises(REFUSED):
            await session.get(f"https://127.0.0.1:{listener.port}/", ssl=METADATA)


async def test_a_process_without_a_certificate_verifies_who_answers(authority: Authority) -> None:
    file = authority.issue("metadata", "metadata-1")
    # As a proxy with a certificate that the system's authorities don't know.
    async with serving(Tls(TlsFiles(file, key_file(file)))) as listener:
        with pytest.raises(aiohttp.ClientConnectorCertificateError, match="verify failed"):
            await ask(listener, ANONYMOUS)


async def test_a_client_refuses_another_cluster(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other", "others")
    both = tmp_path / "both.pem"
    both.write_bytes(authority.file.read_bytes() + other.file.read_bytes())
    theirs, mine = other.issue("bookie", "bookie-1"), authority.issue("gateway", "gateway-1")
    gateway = Tls(TlsFiles(mine, key_file(mine), both))

    async with serving(Tls(TlsFiles(theirs, key_file(theirs), both))) as listener:
        with pytest.raises(aiohttp.ClientConnectorCertificateError, match="of cluster others"):
            await ask(listener, gateway.credentials, BOOKIE)


async def test_a_client_refuses_a_server_whose_certificate_names_no_service(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = authority.tls("gateway", "gateway-1")
    with monkeypatch.context() as patch:
        patch.setattr(Subject, "uri", "https://quorumlog.example")
        plain = authority.issue("bookie", "bookie-1")
    # As a public listener, which asks for no certificate.
    server = Tls(TlsFiles(plain, key_file(plain)))

    async with serving(server) as listener:
        with pytest.raises(aiohttp.ClientConnectorCertificateError, match="got 0"):
            await ask(listener, gateway.credentials)


async def test_a_connection_beyond_the_limit_is_answered_over_tls_too(authority: Authority) -> None:
    gateway = authority.tls("gateway", "gateway-1").credentials
    limits = ListenLimits(connections_max=1)

    async with (
        serving(authority.tls("bookie", "bookie-1"), limits) as listener,
        service_session(gateway) as session,
        session.ws_connect(f"https://127.0.0.1:{listener.port}/socket", ssl=BOOKIE),
        within("the other connection is answered"),
        session.get(f"https://127.0.0.1:{listener.port}/", ssl=BOOKIE) as answer,
    ):
        assert answer.status == 429


@pytest.mark.parametrize("loop_of", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_connections_that_say_nothing_count_and_are_cut_beyond_the_limit(
    authority: Authority, loop_of: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    server, gateway = authority.tls("bookie", "bookie-1"), authority.tls("gateway", "gateway-1")
    limits = ListenLimits(connections_max=16, head_timeout_s=3600)

    async def end_of(reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()

    async def talk() -> None:
        async with serving(server, limits) as listener:
            silent = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(100)]
            ends = [asyncio.create_task(end_of(reader)) for reader, _ in silent]
            await until(lambda: sum(end.done() for end in ends) >= 80, "most are cut at once")
            assert listener.connections.used == 16
            for _, writer in silent:
                writer.close()
            await asyncio.gather(*ends)
            await until(lambda: listener.connections.used == 0, "all places are given back")
            assert (await ask(listener, gateway.credentials, BOOKIE)).name == "gateway-1"
            await until(lambda: listener.connections.used == 0, "all places are given back")
            assert listener.refused_count == 0

    with asyncio.Runner(loop_factory=loop_of) as runner:
        runner.run(talk())


async def test_a_listener_goes_on_after_an_error_that_nobody_foresaw(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(timers, "_RESTART_S", 0.0)
    gateway = authority.tls("gateway", "gateway-1").credentials

    async with serving(authority.tls("bookie", "bookie-1")) as listener:
        with monkeypatch.context() as patch:
            patch.setattr(listen_module, "peer_of", None)
            _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            await until(lambda: bool(caplog.records), "the error is logged")
            writer.close()
        assert (await ask(listener, gateway, BOOKIE)).name == "gateway-1"


async def test_a_handshake_has_a_deadline(authority: Authority) -> None:
    limits = ListenLimits(head_timeout_s=0.05)

    async with serving(authority.tls("bookie", "bookie-1"), limits) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        async with within("the connection is cut"):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()


BOOKIE_1 = ExpectedServer(Role.BOOKIE, "bookie-1")
BURST = 8


async def test_requests_one_after_another_use_one_connection_of_those_that_a_burst_opened() -> None:
    ports: set[object] = set()
    all_are_there = asyncio.Barrier(BURST)

    async def at_once(_request: web.Request) -> web.Response:
        await all_are_there.wait()
        return web.Response()

    async def one(request: web.Request) -> web.Response:
        assert request.transport is not None
        ports.add(request.transport.get_extra_info("peername"))
        return web.Response()

    app = web.Application()
    app.router.add_get("/at-once", at_once)
    app.router.add_get("/one", one)
    async with TestServer(app) as server, service_session() as session:

        async def ask(path: str) -> None:
            async with session.get(server.make_url(path), ssl=BOOKIE_1) as answer:
                await answer.read()

        async with within("the burst is answered"):
            await asyncio.gather(*(ask("/at-once") for _ in range(BURST)))
        for _ in range(2 * BURST):
            await ask("/one")

    assert len(ports) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("method", ["GET", "POST", "socket"])
async def test_a_service_that_redirects_sends_nobody_elsewhere(method: str, status: int) -> None:
    """A bookie that was taken over could have a gateway ask others, with the gateway's certificate."""
    reached: list[str] = []

    async def redirect(_request: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": "/elsewhere"})

    async def elsewhere(request: web.Request) -> web.Response:
        reached.append(request.path)
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/here", redirect)
    app.router.add_route("*", "/elsewhere", elsewhere)
    async with TestServer(app) as server, service_session() as session:
        url = server.make_url("/here")
        is_socket = method == "socket"
        asked = session.ws_connect if is_socket else partial(session.request, method)
        with pytest.raises(aiohttp.ClientResponseError) as refused:
            await asked(url, ssl=BOOKIE_1)

    assert refused.value.status == status
    assert reached == []


async def test_a_request_that_does_not_say_who_must_answer_is_not_sent() -> None:
    async with service_session() as session:
        with pytest.raises(TypeError, match="expected service"):
            await session.get("http://127.0.0.1:1/")
