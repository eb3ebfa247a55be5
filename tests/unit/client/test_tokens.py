"""A cluster that requires tokens, as a team uses it: the guide's commands, the clients, and what must not be seen."""

import asyncio
import contextlib
import os
import re
import secrets
import traceback
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import aiohttp
import pytest
import pytest_asyncio
import typer

from loadtest.cluster import Cluster, running
from loadtest.stores import StoreServers
from quorumlog.cli.session import _token_of
from quorumlog.client import Client
from quorumlog.errors import Forbidden, QuorumLogError, Unauthenticated
from quorumlog.spark.http import Gateways
from quorumlog.spark.options import ClusterAccess
from tests.outside.attack import doors
from tests.outside.attack.arena import Arena, attack, made_token
from tests.outside.attack.meters import Meters
from tests.outside.attack.report import Report
from tests.support.commands import path_with_quorumlog, quick, words
from tests.support.issuer import AUDIENCE, NAME, Issuer
from tests.support.tools import needs
from tests.support.waiting import UNHURRIED
from tests.unit.client.test_guides import BLOCK, ROOT, output_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

_GUIDE: Final = ROOT / "docs" / "guides" / "tokens.md"


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    return Issuer(tmp_path_factory.mktemp("issuer") / "keys.json", "RS256")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(servers: StoreServers, issuer: Issuer) -> AsyncIterator[Cluster]:
    settings = {
        **UNHURRIED,
        "REQUIRE_TOKENS": "1",
        "JWT_KEYS_FILE": str(issuer.file),
        "JWT_ISSUER": NAME,
        "JWT_AUDIENCE": AUDIENCE,
        "LOG_LEVEL": "DEBUG",
    }
    async with running(
        servers.fresh(), bookies=3, gateways=2, environment=settings, log_level="DEBUG"
    ) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def admin(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The cluster's first token."""
    made = quick("token", "create", "first", "admin:*", "--metadata", cluster.url("metadata-1"))
    folder = tmp_path_factory.mktemp("first")
    return (await output_of(made, folder, CLUSTER_SECRET_FILE=str(cluster.secret_file))).strip()


@needs("curl")
async def test_the_token_guides_commands_print_so(cluster: Cluster, tmp_path: Path) -> None:
    found_blocks = BLOCK.finditer(_GUIDE.read_text())
    blocks = [(found[2], found[3]) for found in found_blocks if found[1] == "sh"]
    path = path_with_quorumlog(tmp_path)

    assert blocks
    for text, printed in blocks:
        source = text.replace("http://127.0.0.1:8080", cluster.gateways[0])
        source = source.replace("http://127.0.0.1:8082", cluster.url("metadata-1"))
        found = await output_of(
            ["sh", "-ec", source], tmp_path, PATH=path,
            QUORUMLOG_GATEWAY=cluster.gateways[0], QUORUMLOG_TIMEOUT="60",
            CLUSTER_SECRET_FILE=str(cluster.secret_file),
        )  # fmt: skip

        assert [line.rstrip() for line in found.splitlines()] == printed.splitlines(), source


async def test_clients_send_the_token_and_tell_what_it_lacks(cluster: Cluster, admin: str) -> None:
    async with Client(*cluster.gateways, token=admin) as client:
        await client.create_log("clients")
        reader = (await client.create_token("reader", ["read:logs/clients"]))["token"]
        await client.log("clients").append(b"a record")

    async with Client(*cluster.gateways, token=reader) as client:
        found = [record.value async for record in client.log("clients").records()]
        with pytest.raises(Forbidden, match="has no grant of append"):
            await client.log("clients").append(b"another")
        with pytest.raises(Forbidden):
            await client.tokens()
    async with Client(*cluster.gateways) as client:
        with pytest.raises(Unauthenticated, match="an access token is required"):
            await client.log("clients").append(b"another")
    with Gateways(cluster.gateways[1], token=reader) as gateways:
        shown = await asyncio.to_thread(gateways.pages, "/v1/logs", "logs")

    assert found == [b"a record"]
    assert [log["name"] for log in shown] == ["clients"]


async def test_without_the_right_token_nothing_is_given(cluster: Cluster, admin: str) -> None:
    """A short share of `make attack`."""
    report = Report(seed=1)
    arena = Arena(
        cluster,
        Meters(cluster),
        report,
        requests=300,
        seconds=600.0,
        token=admin,
        bystanders_token=await made_token(cluster, "append:*", "read:*", "manage:*"),
    )
    campaigns = {"strangers": doors.strangers, "guesses": doors.guesses}

    await attack(arena, campaigns, before_s=0.5)

    assert not report.findings, report.page()
    assert report.requests > 600
    assert report.bystander["appends"] > 0


async def test_the_clients_take_a_jwt_as_they_take_a_token(
    cluster: Cluster, issuer: Issuer, tmp_path: Path
) -> None:
    token = issuer.jwt("manage:logs/by-jwt", "append:logs/by-jwt", "read:logs/by-jwt")
    (tmp_path / "jwt").write_text(token + "\n")

    async with Client(*cluster.gateways, token=token) as client:
        await client.create_log("by-jwt")
        await client.log("by-jwt").append(b"a record")
        with pytest.raises(Forbidden, match="the JWT of ann has no grant of admin"):
            await client.tokens()
    with Gateways(cluster.gateways[1], token=token) as gateways:
        shown = await asyncio.to_thread(gateways.pages, "/v1/logs", "logs")
    read = quick("log", "read", "by-jwt", "--token-file", "jwt", "--gateway", cluster.gateways[0])

    assert [log["name"] for log in shown] == ["by-jwt"]
    assert (await output_of(read, tmp_path)).strip() == "a record"


async def test_a_token_that_is_replaced_in_its_file_is_used_from_then_on(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one\n")
    present = _token_of(None, file)

    assert callable(present)
    assert present() == "one"
    file.write_text("two\n")
    assert present() == "two"
    for text in (b"", b"\xff"):
        file.write_bytes(text)
        assert present() == "two"
    with pytest.raises(typer.BadParameter, match="is not ASCII"):
        _token_of(None, file)
    file.write_bytes(b"")
    with pytest.raises(typer.BadParameter, match="is empty"):
        _token_of(None, file)
    file.unlink()
    assert present() == "two"


async def test_an_argument_with_a_token_is_refused_unseen(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *words("log", "list", "--token", "qlt_canary"),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()

    assert process.returncode == 2
    assert b"QUORUMLOG_TOKEN" in said
    assert b"canary" not in said


async def test_no_token_no_password_and_no_secret_is_in_a_log_an_error_a_metric_or_a_list_of_processes(
    cluster: Cluster, admin: str, issuer: Issuer, tmp_path: Path
) -> None:
    password, unknown = f"pw{secrets.token_hex(16)}", f"qlt_{secrets.token_hex(20)}"
    secret = cluster.secret_file.read_text().strip()
    issued, refused = issuer.jwt("admin:*"), issuer.jwt("admin:*", aud="another")
    canaries = [admin.removeprefix("qlt_"), password, unknown.removeprefix("qlt_"), secret]
    canaries += [part for text in (issued, refused) for part in text.split(".")]
    seen: list[str] = []

    for token, given in (
        (admin, password),
        (admin, f"{password}x"),
        (issued, f"{password}x"),
        (unknown, password),
        (refused, password),
    ):
        async with Client(*cluster.gateways, token=token) as client:
            with contextlib.suppress(QuorumLogError):
                seen += [repr(client), repr(vars(client))]
                ledger = await client.create_ledger(password=password)
                seen.append(repr(ledger))
                await client.ledger(ledger.ledger_id, password=given).append(b"an entry")
        with Gateways(cluster.gateways[0], token=token) as gateways:
            seen += [repr(gateways), repr(ClusterAccess.of({"token": token}))]
            try:
                await asyncio.to_thread(gateways.get, "/v1/logs/none")
            except QuorumLogError as error:
                seen += [repr(error), "".join(traceback.format_exception(error))]
    (tmp_path / "jwt").write_text(refused)
    for command, token in (
        (("log", "list"), unknown),
        (("log", "read", "none", "--json"), unknown),
        (("log", "list", "--token-file", "jwt"), ""),
        (("log", "read", "none"), issued),
    ):
        environment = {"QUORUMLOG_TOKEN": token, "QUORUMLOG_GATEWAY": cluster.gateways[0]}
        process = await asyncio.create_subprocess_exec(
            *words(*command),
            cwd=tmp_path,
            env={**os.environ, **environment},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        seen += _command_lines()
        seen.append((await process.communicate())[0].decode())
        assert process.returncode
    async with aiohttp.ClientSession() as session:
        for token in (admin, issued, unknown, refused, secret):
            headers = {"Authorization": f"Bearer {token}", "Ledger-Password": password}
            for path in (
                "/metrics",
                "/openapi.json",
                "/docs",
                "/v1/tokens",
                "/v1/none",
                "/v1/ledgers/x",
            ):
                url = cluster.gateways[0] + path
                async with session.get(url, headers=headers) as answer:
                    seen.append(f"{answer.headers} {await answer.text()}")
    async with aiohttp.ClientSession() as session:
        path = "/v1/logs/none/records"
        for token in (admin, issued):
            url, headers = cluster.gateways[0], {"Authorization": f"Bearer {token}"}
            async with session.post(
                f"{url}/v1/tickets", json={"path": path}, headers=headers
            ) as answer:
                canaries.append((await answer.json())["ticket"])
            async with session.get(f"{url}{path}?ticket={canaries[-1]}") as answer:
                assert answer.status == 404
                seen.append(f"{answer.headers} {await answer.text()}")
    seen += [cluster.log(name) for name in cluster.names]
    seen += _command_lines()

    text = "\n".join(seen)
    assert "/v1/tokens" in text, "something was looked at"
    assert [number for number, canary in enumerate(canaries) if canary in text] == []


def _command_lines() -> Iterator[str]:
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield re.sub("\0", " ", file.read_text(errors="replace"))
