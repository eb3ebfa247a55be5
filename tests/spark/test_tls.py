"""Spark's connection over TLS, and tokens that are renewed: a server of TLS answers as a gateway does."""

import http.server
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quorumlog.certificates import create_authority, issue, key_file
from quorumlog.client import Client
from quorumlog.errors import NOT_DONE, UntrustedServer
from quorumlog.spark.options import BadOption, ClusterAccess

Serve = Callable[..., tuple[str, list[str | None]]]


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Refused handshakes."""


class _Answer(http.server.BaseHTTPRequestHandler):
    seen: list[str | None]

    def do_GET(self) -> None:
        self.seen.append(self.headers["Authorization"])
        body = b'{"state":"fine"}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    create_authority(tmp_path / "own", "tried")
    create_authority(tmp_path / "foreign", "tried")
    return tmp_path


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers; each has a list of the tokens that it was sent."""
    servers: list[http.server.ThreadingHTTPServer] = []

    def start(
        certificate: Path | None, clients: Path | None = None
    ) -> tuple[str, list[str | None]]:
        seen: list[str | None] = []
        handler = type("Handler", (_Answer,), {"seen": seen})
        server = _Server(("127.0.0.1", 0), handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key_file(certificate))
            if clients is not None:
                context.load_verify_locations(clients)
                context.verify_mode = ssl.CERT_REQUIRED
            server.socket = context.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        scheme = "http" if certificate is None else "https"
        return f"{scheme}://127.0.0.1:{server.server_port}", seen

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def asked(url: str, **options: Any) -> Any:
    """What a server answers, by the options with `_` for `.`."""
    given = {name.replace("_", "."): str(value) for name, value in options.items()}
    with ClusterAccess.of({"gateway.url": url, **given}).connect() as gateways:
        return gateways.get("/v1/cluster")


def test_a_server_that_is_not_trusted_is_an_error_at_once(folder: Path, serve: Serve) -> None:
    """A retry would go on for two minutes, until ConnectionLost."""
    url, seen = serve(issue(folder / "foreign", "gateway", "g", ["127.0.0.1"]))
    other_host, _ = serve(issue(folder / "own", "gateway", "g", ["elsewhere.test"]))
    plain, _ = serve(None)
    own = folder / "own" / "ca.pem"

    for wrong in (url, other_host, plain.replace("http:", "https:")):
        with pytest.raises(UntrustedServer, match=rf"{wrong}: .*the options tls\.ca") as refused:
            asked(wrong, tls_ca=own)
        assert (refused.value.outcome, refused.value.retryable) == (NOT_DONE, False)
    assert seen == []
    assert asked(url, tls_ca=folder / "foreign" / "ca.pem") == {"state": "fine"}


async def test_so_it_is_in_the_sdk(folder: Path, serve: Serve) -> None:
    url, _ = serve(issue(folder / "foreign", "gateway", "g", ["127.0.0.1"]))

    async with Client(url) as client:
        with pytest.raises(UntrustedServer, match=url):
            await client.cluster()


def test_a_client_shows_its_certificate_where_the_server_asks_for_one(
    folder: Path, serve: Serve
) -> None:
    own = folder / "own" / "ca.pem"
    url, _ = serve(issue(folder / "own", "gateway", "g", ["127.0.0.1"]), own)
    certificate = issue(folder / "own", "operator", "spark")
    files = {"tls_ca": own, "tls_certificate": certificate}

    assert asked(url, **files, tls_key=key_file(certificate)) == {"state": "fine"}
    stranger = issue(folder / "foreign", "operator", "spark")
    unknown = {"tls_certificate": stranger, "tls_key": key_file(stranger)}
    for refused in ({}, unknown):
        with pytest.raises(UntrustedServer, match=r"option tls\.certificate"):
            asked(url, tls_ca=own, **refused)
    with pytest.raises(BadOption, match=r"tls\.certificate, which is missing"):
        asked(url, tls_ca=own, tls_key=key_file(certificate))
    for wrong in (files, {"tls_ca": folder / "absent.pem"}):
        with pytest.raises(BadOption, match="can't load tls"):
            asked(url, **wrong)


def test_a_token_is_read_again_for_each_request(
    folder: Path, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    url, seen = serve(None)
    file = folder / "token"
    file.write_text("first\n")
    access = ClusterAccess.of({"gateway.url": url, "token.file": str(file)})
    with access.connect() as gateways:
        gateways.get("/")
        file.write_text("second\n")
        gateways.get("/")
    assert not caplog.messages
    file.unlink()
    # A task on a host without the file sends what the driver found, and warns.
    with access.connect() as gateways:
        gateways.get("/")
    assert seen == ["Bearer first", "Bearer second", "Bearer first"]
    assert f"this host has no {file}" in caplog.text


def _present() -> str:
    _present.asked += 1  # type: ignore[attr-defined]
    return f"token-{_present.asked}"  # type: ignore[attr-defined]


def test_a_function_is_asked_for_the_token_of_each_request(serve: Serve) -> None:
    url, seen = serve(None)
    _present.asked = 0  # type: ignore[attr-defined]
    given = {"gateway.url": url, "token.function": f"{__name__}:_present"}
    with ClusterAccess.of(given).connect() as gateways:
        gateways.get("/")
        gateways.get("/")
    # The driver asks once to find a function that does not work.
    assert seen == ["Bearer token-2", "Bearer token-3"]

    for wrong in ("absent_module:it", f"{__name__}:absent", "no name"):
        with pytest.raises(BadOption, match="returned no token"):
            ClusterAccess.of({"token.function": wrong})
    with pytest.raises(BadOption, match="one of token, token"):
        ClusterAccess.of({"token.function": f"{__name__}:_present", "token": "a"})
    with pytest.raises(BadOption, match="returned no token"):
        ClusterAccess.of({"token.file": "/absent/token"})
