"""Secrets of real services, whose databases and peers refuse them, are in nothing that the services say."""

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

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from loadtest.ports import free_ports
from loadtest.stores import Stores
from quorumlog.certificates import create_authority, issue, key_file
from tests.support.waiting import until_sync

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
def test_a_service_that_is_refused_everywhere_says_nothing_of_its_secrets(
    stores: Stores, tmp_path: Path, module: str
) -> None:
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
