"""The cluster's secret: who has it, where it is shown, and that no service says anything of it."""

import contextlib
import os
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, make_mocked_request
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from loadtest import forked
from loadtest.ports import free_ports
from loadtest.stores import Stores
from quorumlog.certificates import create_authority, issue, key_file
from quorumlog.errors import Unauthenticated
from quorumlog.net.identity import ClusterSecret, Role
from quorumlog.net.sessions import ExpectedServer, service_session
from quorumlog.wire.secret import SecretUnusable, read_secret
from services.local.process import Program
from tests.support.waiting import until, until_sync

TOKEN = "0123456789abcdef" * 4
NEW = "fedcba9876543210" * 4


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "secret"


@pytest.fixture
def secret(file: Path) -> ClusterSecret:
    file.write_text(TOKEN + "\n")
    return ClusterSecret(read_secret(file))


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_the_secret_is_known_in_any_case_of_scheme(secret: ClusterSecret, scheme: str) -> None:
    given = {"Authorization": f"{scheme} {TOKEN}"}

    assert secret.identify(make_mocked_request("GET", "/", given)).role is None


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer ", f"Basic {TOKEN}", f"Bearer {TOKEN}x", TOKEN, "Bearer é"]
)
def test_nothing_but_the_secret_is_accepted(secret: ClusterSecret, given: str) -> None:
    headers = {"Authorization": given} if given else {}

    with pytest.raises(Unauthenticated) as refused:
        secret.identify(make_mocked_request("GET", "/", headers))

    assert refused.value.headers["WWW-Authenticate"].startswith("Bearer")
    assert TOKEN not in str(refused.value.__dict__)


def test_nothing_prints_the_secret(secret: ClusterSecret) -> None:
    assert secret.credentials.headers == {"Authorization": f"Bearer {TOKEN}"}
    assert TOKEN not in repr(secret) + repr(secret.credentials)


async def test_a_session_prints_no_secret(secret: ClusterSecret) -> None:
    async with service_session(secret.credentials) as session:
        assert TOKEN not in repr(vars(session))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "short",
        f"two {TOKEN}",
        f"{TOKEN}\n\n{NEW}",
        f"{TOKEN}\n{NEW}\n{TOKEN}",
        f"{TOKEN}\nshort",
        TOKEN + "é",
    ],
)
def test_an_unusable_secret_is_refused_without_being_shown(file: Path, text: str) -> None:
    file.write_text(text)

    with pytest.raises(SecretUnusable) as refused:
        read_secret(file)

    assert str(file) in str(refused.value)
    assert not text or text not in str(refused.value)


def test_a_missing_file_is_named(file: Path) -> None:
    with pytest.raises(SecretUnusable, match="secret: No such file"):
        read_secret(file)


def write(file: Path, text: str) -> None:
    file.write_text(text)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def accepts(secret: ClusterSecret, token: str) -> bool:
    try:
        secret.identify(make_mocked_request("GET", "/", bearer(token)))
    except Unauthenticated:
        return False
    return True


def test_of_two_secrets_the_first_is_shown_and_both_are_accepted(file: Path) -> None:
    file.write_text(f"{NEW}\n{TOKEN}\n")
    secret = ClusterSecret(file.read_text())

    assert read_secret(file) == NEW
    assert secret.credentials.headers == bearer(NEW)
    assert accepts(secret, NEW)
    assert accepts(secret, TOKEN)
    assert not accepts(secret, f"{NEW}\n{TOKEN}")


async def test_a_new_secret_is_used_at_once(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(file, TOKEN)
    secret, seen = ClusterSecret(TOKEN, file), []

    async def note(request: web.Request) -> web.Response:
        seen.append(request.headers["Authorization"])
        return web.Response()

    app = web.Application()
    app.router.add_get("/", note)
    async with TestServer(app) as server, service_session(secret.credentials) as session:
        for text in (TOKEN, f"{TOKEN}\n{NEW}", f"{NEW}\n{TOKEN}", NEW, "half of a se", ""):
            write(file, text)
            secret.look()
            secret.look()
            await session.get(server.make_url("/"), ssl=ExpectedServer(Role.BOOKIE))

    shown = [TOKEN, TOKEN, NEW, NEW, NEW, NEW]
    assert seen == [f"Bearer {token}" for token in shown]
    assert accepts(secret, NEW)
    assert not accepts(secret, TOKEN)
    assert TOKEN not in caplog.text
    assert NEW not in caplog.text
    unusable = [record.message for record in caplog.records]
    assert unusable == ["secret-unusable", "secret-unusable"]


async def test_a_service_takes_a_new_secret_without_a_restart(file: Path, tmp_path: Path) -> None:
    write(file, TOKEN)
    [port] = free_ports(1)
    settings = {"PORT": str(port), "METADATA_URLS": "http://127.0.0.1:1"}
    settings["CLUSTER_SECRET_FILE"] = str(file)
    program = Program("secret", (sys.executable, "-m", "services.autorecovery"), settings, tmp_path)
    process = forked.start(program, tmp_path / "log")
    try:
        async with aiohttp.ClientSession() as session:

            async def lets_in(token: str) -> bool:
                url = f"http://127.0.0.1:{port}/metrics"
                async with session.get(url, headers=bearer(token)) as answer:
                    return answer.status == 200

            waits = (aiohttp.ClientConnectionError,)
            await until(lambda: lets_in(TOKEN), "it has started", passing=waits)
            assert not await lets_in(NEW)
            write(file, f"{TOKEN}\n{NEW}")
            await until(lambda: lets_in(NEW), "it has the new one too")
            assert await lets_in(TOKEN)
    finally:
        process.kill()
        process.wait(60)


SECRET: Final = "canary-0123456789abcdef-0123456789abcdef"
PATHS: Final = (
    "/health/live", "/health/ready", "/metrics", "/openapi.json", "/docs", "/v1/info", "/v1/bookies",
    "/v1/status", "/v1/services", "/v1/cluster", "/v1/drains/bookie-1", "/v1/none",
)  # fmt: skip
NOWHERE: Final = "http://127.0.0.1:1"


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def says(self, *words: str) -> bool:
        return all(word in self.log.read_text() for word in words)


@contextlib.contextmanager
def service(module: str, folder: Path, settings: Mapping[str, str]) -> Iterator[Running]:
    [port] = free_ports(1)
    argv = [sys.executable, "-m", f"services.{module}"]
    log = folder / f"{module}.log"
    environ = {**os.environ, "PORT": str(port), "LOG_LEVEL": "DEBUG", **settings}
    with log.open("wb") as out:
        process = subprocess.Popen(argv, env=environ, stdout=out, stderr=subprocess.STDOUT)
    scheme = "https" if "PUBLIC_TLS_CERT_FILE" in settings else "http"
    try:
        yield Running(process, f"{scheme}://127.0.0.1:{port}", log)
    finally:
        process.kill()
        process.wait()


def asked(url: str, trusting: ssl.SSLContext, secret: str = "") -> bytes:
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60, context=trusting) as answer:
            return bytes(answer.headers) + bytes(answer.read())
    except urllib.error.HTTPError as refused:
        return bytes(refused.headers) + refused.read()


def of_module(module: str, stores: Stores, folder: Path, authority: Path) -> dict[str, str]:
    """Settings with which the databases refuse the secret, and the peers are away."""
    secret = folder / "secret"
    secret.write_text(SECRET + "\n")
    settings = {"CLUSTER_SECRET_FILE": str(secret), "METADATA_URLS": NOWHERE}
    match module:
        case "metadata":
            dsn = urlsplit(stores.postgres_dsn)
            user = f"{dsn.username}@{dsn.hostname}:{dsn.port}"
            return settings | {
                "POSTGRES_DSN": f"postgresql://{user}{dsn.path}",
                "POSTGRES_PASSWORD_FILE": str(secret),
                "REDIS_URL": f"redis://:{SECRET}@127.0.0.1:1",
            }
        case "bookie":
            return settings | {"BOOKIE_NAME": "bookie-1", "DATA_DIR": str(folder / "data")}
        case "gateway":
            certificate = issue(authority.parent, "gateway", "one", ["127.0.0.1"])
            key = load_pem_private_key(key_file(certificate).read_bytes(), None)
            locked = BestAvailableEncryption(SECRET.encode())
            (folder / "key.pem").write_bytes(
                key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked)
            )
            return settings | {
                "PUBLIC_TLS_CERT_FILE": str(certificate),
                "PUBLIC_TLS_KEY_FILE": str(folder / "key.pem"),
                "PUBLIC_TLS_KEY_PASSWORD_FILE": str(secret),
            }
        case _:
            return settings


@pytest.mark.parametrize("module", ["metadata", "bookie", "gateway", "autorecovery"])
def test_a_refused_service_shows_no_secret(stores: Stores, tmp_path: Path, module: str) -> None:
    authority = create_authority(tmp_path / "certificates", "tests")
    trusting = ssl.create_default_context(cafile=authority)
    settings = of_module(module, stores, tmp_path, authority)
    with service(module, tmp_path, settings) as running:

        def lives() -> bool:
            assert running.process.poll() is None, running.log.read_text()
            return b"live" in asked(f"{running.url}/health/live", trusting)

        until_sync(lives, "it lives", passing=(OSError,))
        questions = [(running.url + path, trusting, key) for path in PATHS for key in ("", SECRET)]
        # At once: what asks the metadata service answers only after its deadline.
        with ThreadPoolExecutor(len(questions)) as pool:
            answers = list(pool.map(lambda question: asked(*question), questions))
        if module == "metadata":
            until_sync(lambda: running.says("redis-away", "database-away"), "both refused")
        arguments = Path(f"/proc/{running.process.pid}/cmdline").read_bytes()
        running.process.send_signal(signal.SIGTERM)
        running.process.wait(120)

    logged = running.log.read_text()
    assert SECRET not in logged
    assert '"ended"' in logged
    if module == "metadata":
        assert "password authentication failed" in logged
        assert "connecting to 127.0.0.1:1" in logged
    assert not [answer for answer in answers if SECRET.encode() in answer]
    assert SECRET.encode() not in arguments
