"""Mutual TLS between services: who is let in, whom a certificate names, and files that change under a process."""

import asyncio
import contextlib
import logging
import os
import shutil
import ssl
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from pathlib import Path

import aiohttp
import pytest
import uvloop
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from prometheus_client import CollectorRegistry, generate_latest

from quorumlog.certificates import (
    Subject,
    create_authority,
    describe,
    issue,
    key_file,
    renew,
    revoke,
)
from quorumlog.errors import Forbidden, QuorumLogError, Unauthenticated
from quorumlog.net import listen as listen_module
from quorumlog.net import timers
from quorumlog.net import tls as tls_module
from quorumlog.net.identity import ANONYMOUS, Credentials, Identity, Role
from quorumlog.net.listen import Listener, ListenLimits, listening, problem_response
from quorumlog.net.sessions import ExpectedServer, service_session
from quorumlog.net.tls import CertificateEnds, PeerCertificate, Tls, TlsFiles, TlsUnusable
from tests.support.certificates import expired
from tests.support.waiting import until, within

LOCAL = ("127.0.0.1", "localhost")
METADATA = ExpectedServer(Role.METADATA)
BOOKIE = ExpectedServer(Role.BOOKIE, "bookie-1")
REFUSED = (aiohttp.ClientError, OSError)
"""How a client meets a server that refuses its certificate: at once, or when it reads."""


class Authority:
    """An authority in a folder, and the contexts of certificates that it makes."""

    def __init__(self, folder: Path, cluster: str = "tests") -> None:
        self.folder = folder
        self.file = create_authority(folder, cluster)

    def issue(self, role: str, name: str, hosts: Iterable[str] = LOCAL) -> Path:
        return issue(self.folder, role, name, hosts)

    def tls(self, role: str, name: str, hosts: Iterable[str] = LOCAL) -> Tls:
        return self.load(self.issue(role, name, hosts))

    def load(self, certificate: Path) -> Tls:
        return Tls(TlsFiles(certificate, key_file(certificate), self.file))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@contextlib.asynccontextmanager
async def serving(tls: Tls, limits: ListenLimits | None = None) -> AsyncIterator[Listener]:
    """A listener that answers with whom it takes the caller for."""
    authenticator = PeerCertificate(tls)

    async def who(request: web.Request) -> web.StreamResponse:
        try:
            found = authenticator.identify(request)
        except QuorumLogError as error:
            return problem_response(error, "1")
        said = {"role": found.role, "name": found.name, "hosts": sorted(found.hosts or ())}
        return web.json_response(said)

    async def socket(request: web.Request) -> web.StreamResponse:
        opened = web.WebSocketResponse()
        await opened.prepare(request)
        await opened.send_str(authenticator.identify(request).name)
        await opened.receive()
        return opened

    app = web.Application()
    app.router.add_get("/", who)
    app.router.add_get("/socket", socket)
    async with listening(
        app, host="127.0.0.1", port=0, context=tls.server, limits=limits
    ) as listener:
        yield listener


async def ask(
    listener: Listener, credentials: Credentials, expected: ExpectedServer = METADATA
) -> Identity:
    """Whom a new connection's server takes these credentials for. Raises: Forbidden."""
    async with (
        service_session(credentials) as session,
        within("the server answers or refuses"),
        session.get(f"https://127.0.0.1:{listener.port}/", ssl=expected) as answer,
    ):
        said = await answer.json(content_type=None)
    if answer.status != 200:
        raise Forbidden(said["detail"])
    return Identity(said["role"], said["name"], frozenset(said["hosts"]))


async def test_a_certificate_tells_the_role_the_name_and_the_hosts_of_a_caller(
    authority: Authority,
) -> None:
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
def test_a_request_without_a_verified_certificate_is_of_nobody(
    authority: Authority, has_transport: bool
) -> None:
    """Of a connection without TLS, or one that has ended meanwhile."""
    request = make_mocked_request("GET", "/", transport=asyncio.Transport())
    if not has_transport:
        request.protocol.transport = None

    with pytest.raises(Unauthenticated, match="needs a client certificate"):
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


async def test_a_certificate_of_another_cluster_or_of_no_service_is_forbidden(
    authority: Authority, tmp_path: Path
) -> None:
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
        with pytest.raises(Forbidden, match="of cluster others, and this is tests"):
            # One that does not mind who answers.
            await ask(listener, Credentials(client_context=lambda: bookie.client))
        with pytest.raises((Forbidden, *REFUSED)):
            await ask(listener, Credentials(client_context=lambda: ca))


async def test_a_client_refuses_a_server_that_is_not_certified_for_the_host(
    authority: Authority,
) -> None:
    gateway = authority.tls("gateway", "gateway-1").credentials

    async with serving(authority.tls("metadata", "elsewhere", ("elsewhere.example",))) as listener:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await ask(listener, gateway)


async def test_a_new_certificate_is_shown_to_new_connections_and_old_ones_go_on(
    authority: Authority,
) -> None:
    file = authority.issue("metadata", "metadata-1")
    server, gateway = authority.load(file), authority.tls("gateway", "gateway-1")

    async def shown() -> object:
        context = gateway.client
        _, writer = await asyncio.open_connection("127.0.0.1", listener.port, ssl=context)
        serial = writer.get_extra_info("peercert")["serialNumber"]
        writer.close()
        return serial

    async with (
        serving(server) as listener,
        service_session(gateway.credentials) as session,
        session.ws_connect(f"https://127.0.0.1:{listener.port}/socket", ssl=METADATA) as socket,
        within("connections are made"),
    ):
        assert await socket.receive_str() == "gateway-1"
        before = await shown()
        renew(authority.folder, file)
        server.look()
        assert await shown() == before, "the files may still change"
        server.look()
        after = await shown()
        await socket.send_str("still here")
        assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE

    assert after != before


async def test_a_new_authority_lets_its_own_in_and_the_old_one_s_out(
    authority: Authority, tmp_path: Path
) -> None:
    file, old = authority.issue("metadata", "metadata-1"), authority.tls("gateway", "gateway-1")
    server = authority.load(file)
    new = Authority(tmp_path / "new")
    gateway = new.tls("gateway", "gateway-1")

    async with serving(server) as listener:
        with pytest.raises(REFUSED):
            await ask(listener, gateway.credentials)
        made = new.issue("metadata", "metadata-1")
        for source, target in ((key_file(made), key_file(file)), (made, file)):
            target.write_bytes(source.read_bytes())
        authority.file.write_bytes(new.file.read_bytes())
        server.look()
        server.look()
        assert (await ask(listener, gateway.credentials)).name == "gateway-1"
        with pytest.raises(REFUSED):
            await ask(listener, old.credentials)
        old.look()
        old.look()
        with pytest.raises(REFUSED):
            await ask(listener, old.credentials)


async def test_a_revoked_peer_is_cut_and_refused_and_its_new_certificate_is_not(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    server = authority.tls("metadata", "metadata-1")
    old = authority.issue("bookie", "bookie-1")
    before, other = authority.load(old), authority.tls("bookie", "bookie-2")
    # The renewed certificate's file is gone; who copied it has it still.
    renew(authority.folder, old)
    after = authority.load(old)

    async with serving(server) as listener, contextlib.AsyncExitStack() as stack:
        server.watch(listener)
        sockets = []
        for tls in (before, after, other):
            session = await stack.enter_async_context(service_session(tls.credentials))
            url = f"https://127.0.0.1:{listener.port}/socket"
            sockets.append(await stack.enter_async_context(session.ws_connect(url, ssl=METADATA)))
            assert (await sockets[-1].receive_str()).startswith("bookie-")
        assert revoke(authority.folder, "bookie", "bookie-1") == 2
        server.look()
        server.look()
        async with within("both are cut"):
            for cut in sockets[:2]:
                assert (await cut.receive()).type in {
                    aiohttp.WSMsgType.CLOSED,
                    aiohttp.WSMsgType.ERROR,
                }
        for tls in (before, after):
            with pytest.raises(Forbidden, match="the certificate of bookie bookie-1 is revoked"):
                await ask(listener, tls.credentials)
        await sockets[2].send_str("still here")
        assert (await sockets[2].receive()).type is aiohttp.WSMsgType.CLOSE
        assert [record.message for record in caplog.records] == ["revoked-connections-cut"]
        # Another list that cuts nobody.
        revoke(authority.folder, "metadata", "metadata-1")
        server.look()
        server.look()
        assert len(caplog.records) == 1
        again = authority.load(renew(authority.folder, old))
        by_anybody = Credentials(client_context=lambda: again.client)
        assert (await ask(listener, by_anybody)).name == "bookie-1"


@pytest.mark.parametrize("loop_of", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_client_cuts_a_revoked_server_and_connects_to_it_no_more(
    authority: Authority, loop_of: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    server, gateway = authority.tls("bookie", "bookie-1"), authority.tls("gateway", "gateway-1")

    async def talk() -> None:
        async with (
            serving(server) as listener,
            service_session(gateway.credentials) as session,
            session.ws_connect(f"https://127.0.0.1:{listener.port}/socket", ssl=BOOKIE) as socket,
        ):
            assert await socket.receive_str() == "gateway-1"
            revoke(authority.folder, "bookie", "bookie-1")
            gateway.look()
            gateway.look()
            async with within("the client has cut the connection"):
                assert (await socket.receive()).type is not aiohttp.WSMsgType.TEXT
            with pytest.raises(aiohttp.ClientConnectorCertificateError, match="is revoked"):
                await ask(listener, gateway.credentials, BOOKIE)

    with asyncio.Runner(loop_factory=loop_of) as runner:
        runner.run(talk())


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
        with pytest.raises(aiohttp.ClientConnectorCertificateError, match="in the place of"):
            await ask(listener, gateway, expected)


async def test_a_connection_to_one_bookie_carries_nothing_for_another_one(
    authority: Authority,
) -> None:
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


async def test_who_must_answer_is_asked_in_no_session_that_verifies_nothing(
    authority: Authority,
) -> None:
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


async def test_a_client_refuses_a_server_of_another_cluster(
    authority: Authority, tmp_path: Path
) -> None:
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
        with pytest.raises(aiohttp.ClientConnectorCertificateError, match="has 0 URIs"):
            await ask(listener, gateway.credentials)


async def test_files_are_followed_without_a_call(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_module, "LOOK_S", 0.01)
    file = authority.issue("bookie", "bookie-1")
    tls = authority.load(file)
    before = tls.client
    following = asyncio.create_task(tls.follow())

    renew(authority.folder, file)

    await until(lambda: tls.client is not before, "the new certificate is taken")
    following.cancel()


async def test_lists_of_several_authorities_count_and_one_s_list_needs_no_other_s(
    authority: Authority, tmp_path: Path
) -> None:
    new = Authority(tmp_path / "new")
    file, lost = authority.issue("metadata", "metadata-1"), authority.tls("bookie", "bookie-1")
    revoke(authority.folder, "bookie", "bookie-1")
    both = tmp_path / "both.pem"
    both.write_bytes(authority.file.read_bytes() + new.file.read_bytes())
    server = Tls(TlsFiles(file, key_file(file), both))
    kept = new.issue("bookie", "bookie-2")
    bookie = Tls(TlsFiles(kept, key_file(kept), both))

    async with serving(server) as listener:
        assert (await ask(listener, bookie.credentials)).name == "bookie-2"
        with pytest.raises(Forbidden, match="is revoked"):
            await ask(listener, lost.credentials)


async def test_a_broken_list_changes_nothing(authority: Authority) -> None:
    file = authority.issue("metadata", "metadata-1")
    server, lost = authority.load(file), authority.tls("bookie", "bookie-1")
    revoke(authority.folder, "bookie", "bookie-1")
    server.look()
    server.look()
    block = b"-----BEGIN X509 CRL-----\nMIIB\n-----END X509 CRL-----\n"
    authority.file.write_bytes(authority.file.read_bytes().partition(b"-----BEGIN X509")[0] + block)
    server.look()
    server.look()

    async with serving(server) as listener:
        with pytest.raises(Forbidden, match="is revoked"):
            await ask(listener, lost.credentials)


async def test_a_broken_new_file_is_logged_once_and_the_old_certificate_kept(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    file = authority.issue("metadata", "metadata-1")
    server, gateway = authority.load(file), authority.tls("gateway", "gateway-1")
    other_key = key_file(authority.issue("bookie", "bookie-1"))
    key_file(file).write_bytes(other_key.read_bytes())

    with caplog.at_level(logging.INFO):
        for _ in range(4):
            server.look()
    async with serving(server) as listener:
        assert (await ask(listener, gateway.credentials)).name == "gateway-1"

    assert [record.message for record in caplog.records] == ["certificate-unusable"]
    assert "PRIVATE" not in caplog.text


@pytest.mark.parametrize(
    ("why", "issued"),
    [
        ("has ended at", partial(expired, role="metadata", name="metadata-1", hosts=LOCAL)),
        ("this process is quorumlog", partial(issue, role="bookie", name="bookie-1", hosts=LOCAL)),
        ("this process is quorumlog", partial(issue, role="metadata", name="other", hosts=LOCAL)),
    ],
)
async def test_a_new_certificate_that_has_ended_or_is_of_another_process_is_not_taken(
    authority: Authority,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    why: str,
    issued: Callable[[Path], Path],
) -> None:
    file = authority.issue("metadata", "metadata-1")
    server, gateway = authority.load(file), authority.tls("gateway", "gateway-1")
    # Of the same authority, made beside it.
    beside = shutil.copytree(authority.folder, tmp_path / "beside")
    for old in beside.glob("metadata-*"):
        old.unlink()
    new = issued(beside)
    for source, target in ((key_file(new), key_file(file)), (new, file)):
        target.write_bytes(source.read_bytes())

    server.look()
    server.look()

    assert [record.message for record in caplog.records] == ["certificate-unusable"]
    assert why in vars(caplog.records[0])["why"]
    async with serving(server) as listener:
        assert (await ask(listener, gateway.credentials)).name == "gateway-1"


def test_a_new_file_of_the_old_time_and_size_is_noticed_too(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy may keep the time, and a file that nobody could read becomes usable with another mode."""
    file = authority.issue("metadata", "metadata-1")
    server, found = authority.load(file), file.stat()
    file.write_bytes(b"x" * found.st_size)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))

    server.look()
    server.look()

    assert [record.message for record in caplog.records] == ["certificate-unusable"]


async def test_files_that_can_t_be_used_are_told_at_the_start(
    authority: Authority, tmp_path: Path
) -> None:
    file = authority.issue("bookie", "bookie-1")
    wrong = {
        "No such file": TlsFiles(tmp_path / "none.pem", key_file(file), authority.file),
        "key values mismatch": TlsFiles(file, key_file(authority.file), authority.file),
        "has no URI": TlsFiles(authority.file, key_file(authority.file), authority.file),
    }

    for why, files in wrong.items():
        with pytest.raises(TlsUnusable, match=why):
            Tls(files)


def test_the_event_loop_of_services_knows_callers_and_takes_new_files_too(
    authority: Authority,
) -> None:
    file = authority.issue("metadata", "metadata-1")
    server, gateway = authority.load(file), authority.tls("gateway", "gateway-1")

    async def talk() -> None:
        async with serving(server) as listener:
            assert (await ask(listener, gateway.credentials)).role == Role.GATEWAY
            renew(authority.folder, file)
            server.look()
            server.look()
            context = gateway.client
            _, writer = await asyncio.open_connection("127.0.0.1", listener.port, ssl=context)
            ends = ssl.cert_time_to_seconds(writer.get_extra_info("peercert")["notAfter"])
            writer.close()
            assert ends == describe(file).ends.timestamp()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(talk())


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


def test_the_end_of_a_certificate_is_a_gauge(authority: Authority) -> None:
    registry = CollectorRegistry()
    tls = authority.tls("bookie", "bookie-1")
    registry.register(CertificateEnds({"internal": tls}))

    [line] = [line for line in generate_latest(registry).decode().splitlines() if line[0] != "#"]

    name, _, value = line.rpartition(" ")
    assert name == 'quorumlog_certificate_end_timestamp_seconds{listener="internal"}'
    assert float(value) == tls.ends.timestamp()
