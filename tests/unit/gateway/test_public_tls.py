"""How clients reach a gateway: over TLS, and through a proxy."""

import logging
import ssl
from ipaddress import ip_network
from pathlib import Path

import aiohttp
import pytest

from loadtest.ports import free_ports
from quorumlog.certificates import create_authority, issue, key_file
from quorumlog.net.connections import ListenLimits
from quorumlog.net.listen import listening
from quorumlog.net.proxies import Proxies
from quorumlog.net.service import ServiceSettings
from services.gateway.app import create_apps
from services.gateway.config import GatewaySettings
from services.gateway.edge.http.limits import Limits
from tests.support.waiting import within
from tests.unit.gateway.conftest import received, running
from tests.unit.gateway.test_budgets import OCTETS, ask, strangers, until_gauge


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    return create_authority(tmp_path / "certificates", "tests")


def issued(authority: Path, role: str) -> dict[str, str]:
    """The settings of a new certificate."""
    file = issue(authority.parent, role, "one", ["127.0.0.1"])
    return {
        "TLS_CERT_FILE": str(file),
        "TLS_KEY_FILE": str(key_file(file)),
        "TLS_CA_FILE": str(authority),
    }


def public(authority: Path) -> dict[str, str]:
    own = issued(authority, "gateway")
    return {
        "PUBLIC_TLS_CERT_FILE": own["TLS_CERT_FILE"],
        "PUBLIC_TLS_KEY_FILE": own["TLS_KEY_FILE"],
    }


async def test_clients_speak_tls_with_a_gateway_and_need_no_certificate(authority: Path) -> None:
    settings = GatewaySettings.read(
        {
            "PORT": str(free_ports(1)[0]),
            "METADATA_URLS": "http://127.0.0.1:1",
            "HSTS_S": "86400",
            **public(authority),
        }
    )
    internal, part = await create_apps(settings)
    assert part.tls is not None
    assert internal.tls is None
    async with (
        listening(internal.app, host=internal.host, port=0, bound=internal.bound),
        listening(part.app, host=part.host, port=part.port, context=part.tls.server),
        aiohttp.ClientSession() as session,
    ):
        assert settings.url == f"https://127.0.0.1:{part.port}"
        trusting = ssl.create_default_context(cafile=authority)
        for path, status in (("/health/live", 200), ("/v1/nothing", 404)):
            async with session.get(settings.url + path, ssl=trusting) as answer:
                assert answer.status == status
                assert answer.headers["Strict-Transport-Security"] == "max-age=86400"
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await session.get(f"{settings.url}/health/live")
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"http://127.0.0.1:{part.port}/health/live")


def test_a_listener_that_other_machines_reach_may_have_a_certificate(authority: Path) -> None:
    settings = {"PORT": "443", "HOST": "0.0.0.0", **issued(authority, "bookie")}

    read = ServiceSettings.read(settings)

    assert read.url.startswith("https://")
    assert read.authenticator is not None
    assert read.credentials.client_context is not None


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"TLS_CA_FILE": ""}, "TLS_CERT_FILE, TLS_KEY_FILE and TLS_CA_FILE go together"),
        ({"TLS_KEY_FILE": "/none"}, "No such file"),
        ({"ADVERTISED_URL": "http://store.example"}, "must begin with https"),
    ],
)
def test_a_certificate_that_does_not_fit_ends_the_start_with_a_sentence(
    changed: dict[str, str], why: str, authority: Path
) -> None:
    with pytest.raises(SystemExit, match=why):
        ServiceSettings.read({"PORT": "80", **issued(authority, "bookie"), **changed})


def test_what_needs_a_certificate_is_not_promised_without_one(authority: Path) -> None:
    plain = {"PORT": "80", "METADATA_URLS": "http://metadata"}

    with pytest.raises(SystemExit, match="HSTS_S needs PUBLIC_TLS_CERT_FILE"):
        GatewaySettings.read(plain | {"HSTS_S": "60"})
    with pytest.raises(
        SystemExit, match="PUBLIC_TLS_CERT_FILE and PUBLIC_TLS_KEY_FILE must be set together"
    ):
        GatewaySettings.read(plain | public(authority) | {"PUBLIC_TLS_KEY_FILE": ""})
    with pytest.raises(
        SystemExit, match=r"ADVERTISED_URL=https.* must begin with http://, because"
    ):
        ServiceSettings.read({"PORT": "80", "ADVERTISED_URL": "https://store.example"})
    behind_a_proxy = {"HSTS_S": "60", "ADVERTISED_URL": "https://edge.example"}
    assert GatewaySettings.read(plain | behind_a_proxy).hsts_s == 60


ENTRIES = "/v1/ledgers/1/entries"
LISTEN = ListenLimits(
    drain_timeout_s=0.5,
    proxies=Proxies([ip_network("127.0.0.0/8")], "x-forwarded-for"),
)


def by(client: str) -> dict[str, str]:
    return {"X-Forwarded-For": client}


async def test_each_client_of_a_proxy_has_its_own_share() -> None:
    limits = Limits(
        waiters_max=8, peer_waiters_max=1, held_bytes_max=800_000, peer_held_bytes_max=1
    )
    path = f"{ENTRIES}?wait_ms=60000"
    async with running(limits=limits, listen=LISTEN) as gateway:
        await gateway.create()
        gateway.engine.wait_s_min = 3600.0
        one = ask(path).replace(b"\r\n\r\n", b"\r\nX-Forwarded-For: 192.0.2.1\r\n\r\n")
        async with strangers(gateway, 7, one):
            await until_gauge(gateway, "waiters", 7, "seven of one client wait")
            gateway.engine.wait_s_min = 0.0

            greedy = await gateway.ask("GET", f"{ENTRIES}?wait_ms=10", headers=by("192.0.2.1"))
            fair = await gateway.ask("GET", f"{ENTRIES}?wait_ms=10", headers=by("192.0.2.2"))

        assert (greedy.status, greedy.code) == (429, "overloaded")
        assert fair.status == 200
        # What is answered without a task is counted by the client's address too.
        done = await gateway.ask("POST", ENTRIES, b"x", headers={**OCTETS, **by("192.0.2.3")})
        assert done.status == 201
        await until_gauge(gateway, "held_bytes", 0, "all is given back")
        assert gateway.listener.connections.of("127.0.0.1") == 0


async def test_streams_and_sockets_pass_a_proxy() -> None:
    async with running(listen=LISTEN) as gateway:
        ledger_id = await gateway.create()
        path = f"{gateway.url}/v1/ledgers/{ledger_id}"
        lines = {"Content-Type": "application/x-ndjson", **by("192.0.2.1")}
        streamed = await gateway.ask("POST", ENTRIES, b'{"json":1}\n{"json":2}\n', headers=lines)
        async with gateway.session.ws_connect(f"{path}/ws", headers=by("192.0.2.2")) as sent:
            await sent.send_str('{"text":"a"}')
            acknowledged = await received(sent)
        accept = {"Accept": "text/event-stream", **by("192.0.2.3")}
        async with (
            within("an event comes"),
            gateway.session.get(f"{path}/entries", headers=accept) as tail,
        ):
            event = await tail.content.readuntil(b"\n\n")

    assert (streamed.status, acknowledged["last_entry"]) == (200, 2)
    assert b"data: " in event


async def test_the_audit_log_names_the_client_s_address(caplog: pytest.LogCaptureFixture) -> None:
    async with running(listen=LISTEN) as gateway:
        ledger_id = await gateway.create()
        with caplog.at_level(logging.INFO, "audit"):
            path = f"/v1/ledgers/{ledger_id}"
            said = by("203.0.113.1, 192.0.2.7")
            assert (await gateway.ask("POST", f"{path}/close", headers=said)).status == 200
            assert (await gateway.ask("DELETE", path, headers=said)).status == 204

    found = [line.__dict__["remote"] for line in caplog.records if line.name == "audit"]
    assert found
    assert set(found) == {"192.0.2.7"}
