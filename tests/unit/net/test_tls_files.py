"""Files of certificates that change under a process: new ones, lists of revoked ones, and what can't be used."""

import asyncio
import contextlib
import logging
import os
import shutil
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path

import aiohttp
import pytest
import uvloop
from prometheus_client import CollectorRegistry, generate_latest

from quorumlog.certificates import describe, issue, key_file, renew, revoke
from quorumlog.errors import Forbidden
from quorumlog.net import identity
from quorumlog.net.identity import Credentials, Role
from quorumlog.net.sessions import service_session
from quorumlog.net.tls import CertificateEnds, Tls, TlsFiles, TlsUnusable
from tests.support.certificates import expired
from tests.support.waiting import until, within
from tests.unit.net.mutual_tls import BOOKIE, LOCAL, METADATA, REFUSED, Authority, ask, serving


async def test_new_connections_get_the_new_certificate_and_old_go_on(authority: Authority) -> None:
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


async def test_a_new_authority_replaces_the_old_one(authority: Authority, tmp_path: Path) -> None:
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


async def test_files_are_followed_without_a_call(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "LOOK_S", 0.01)
    file = authority.issue("bookie", "bookie-1")
    tls = authority.load(file)
    before = tls.client
    following = asyncio.create_task(tls.follow())

    renew(authority.folder, file)

    await until(lambda: tls.client is not before, "the new certificate is taken")
    following.cancel()


async def test_each_authority_has_its_own_list(authority: Authority, tmp_path: Path) -> None:
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
        ("expired at", partial(expired, role="metadata", name="metadata-1", hosts=LOCAL)),
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


async def test_unusable_files_are_told_at_the_start(authority: Authority, tmp_path: Path) -> None:
    file = authority.issue("bookie", "bookie-1")
    wrong = {
        "No such file": TlsFiles(tmp_path / "none.pem", key_file(file), authority.file),
        "key values mismatch": TlsFiles(file, key_file(authority.file), authority.file),
        "has no URI": TlsFiles(authority.file, key_file(authority.file), authority.file),
    }

    for why, files in wrong.items():
        with pytest.raises(TlsUnusable, match=why):
            Tls(files)


def test_the_services_event_loop_knows_callers_and_new_files(authority: Authority) -> None:
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


def test_the_end_of_a_certificate_is_a_gauge(authority: Authority) -> None:
    registry = CollectorRegistry()
    tls = authority.tls("bookie", "bookie-1")
    registry.register(CertificateEnds({"internal": tls}))

    [line] = [line for line in generate_latest(registry).decode().splitlines() if line[0] != "#"]

    name, _, value = line.rpartition(" ")
    assert name == 'quorumlog_certificate_end_timestamp_seconds{listener="internal"}'
    assert float(value) == tls.ends.timestamp()
