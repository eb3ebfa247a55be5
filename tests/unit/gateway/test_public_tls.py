"""A gateway's public listener with a certificate, and settings of certificates that do not fit."""

import ssl
from pathlib import Path

import aiohttp
import pytest

from loadtest.ports import free_ports
from quorumlog.certificates import create_authority, issue, key_file
from quorumlog.net.listen import listening
from quorumlog.net.service import ServiceSettings
from services.gateway.app import create_apps
from services.gateway.config import GatewaySettings


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
        ({"ADVERTISED_URL": "http://store.example"}, "the listener speaks https"),
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
    with pytest.raises(SystemExit, match="PUBLIC_TLS_CERT_FILE and PUBLIC_TLS_KEY_FILE go"):
        GatewaySettings.read(plain | public(authority) | {"PUBLIC_TLS_KEY_FILE": ""})
    with pytest.raises(SystemExit, match=r"ADVERTISED_URL=https.* speaks http, without"):
        ServiceSettings.read({"PORT": "80", "ADVERTISED_URL": "https://store.example"})
    behind_a_proxy = {"HSTS_S": "60", "ADVERTISED_URL": "https://edge.example"}
    assert GatewaySettings.read(plain | behind_a_proxy).hsts_s == 60
