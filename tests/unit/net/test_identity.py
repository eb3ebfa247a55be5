"""A cluster's secret opens what it should, and is shown by nothing."""

import sys
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, make_mocked_request

from loadtest import forked
from loadtest.ports import free_ports
from quorumlog.errors import Unauthenticated
from quorumlog.net.identity import ClusterSecret, Role
from quorumlog.net.sessions import ExpectedServer, service_session
from quorumlog.wire.secret import SecretUnusable, read_secret
from services.local.process import Program
from tests.support.waiting import until

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
def test_the_secret_is_known_whatever_the_case_of_its_scheme(
    secret: ClusterSecret, scheme: str
) -> None:
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


async def test_a_new_secret_is_taken_from_its_file_and_shown_by_sessions_that_are_open(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
