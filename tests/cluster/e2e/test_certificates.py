"""A cluster whose services know each other by certificates alone: what each gets, and a renewal under load."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

from loadtest.cluster import Cluster
from quorumlog.certificates import key_file, renew
from quorumlog.cli import commands
from quorumlog.client import Client
from quorumlog.net.identity import Role
from quorumlog.net.sessions import ExpectedServer, service_session
from quorumlog.net.tls import Tls, TlsFiles
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="package")

METADATA = ExpectedServer(Role.METADATA)
PACE_S = 0.01
"""Between two appends of a client that goes on until something happens."""


def certificate(cluster: Cluster, name: str) -> Path:
    return cluster.certificates / f"{name}.pem"


def session_of(cluster: Cluster, name: str) -> aiohttp.ClientSession:
    """A session that shows the certificate of a process."""
    file = certificate(cluster, name)
    files = TlsFiles(file, key_file(file), certificate(cluster, "ca"))
    return service_session(Tls(files).credentials)


async def rows_as(cluster: Cluster, name: str, ledger_id: int) -> list[dict[str, Any]]:
    """A ledger's row, by itself and in a list, as a process gets it from the metadata service."""
    url = f"{cluster.url('metadata-1')}/v1/ledgers"
    async with session_of(cluster, name) as session:
        async with session.get(f"{url}/{ledger_id}", ssl=METADATA) as answer:
            one = await answer.json()
        listing = f"{url}?after={ledger_id - 1}&limit=1"
        async with session.get(listing, ssl=METADATA) as answer:
            [listed] = (await answer.json())["ledgers"]
    return [one, listed]


async def test_bookies_and_operators_get_rows_without_keys(cluster: Cluster) -> None:
    async with Client(cluster.gateways[0]) as client:
        ledger = await client.create_ledger(digest="hmac-sha256", password="secret")

    known = await rows_as(cluster, "gateway-gateway-1", ledger.ledger_id)
    assert all(row["mac_key"] and row["access_key"] for row in known)
    for name in ("bookie-bookie-1", "operator-local"):
        shown = await rows_as(cluster, name, ledger.ledger_id)
        hidden = {"mac_key": "", "access_key": ""}
        assert shown == [row | hidden for row in known], name


async def test_services_behind_gateways_require_tls_and_a_certificate(cluster: Cluster) -> None:
    urls = [cluster.url(name) for name in ("metadata-1", "bookie-1", "autorecovery-1")]
    urls.append(cluster.internal_url("gateway-1"))
    async with aiohttp.ClientSession(headers=cluster.headers) as stranger:
        for url in urls:
            assert url.startswith("https://")
            for tried in (url, url.replace("https://", "http://")):
                with pytest.raises((aiohttp.ClientError, OSError)):
                    await stranger.get(f"{tried}/health/live", ssl=False)


async def test_an_operators_commands_show_a_certificate(cluster: Cluster) -> None:
    shown = {
        **cluster.operator_settings,
        "QUORUMLOG_GATEWAY": ",".join(cluster.gateways),
        "METADATA_URLS": cluster.url("metadata-1"),
    }

    async def run(*words: str, **given: str) -> Any:
        runner = CliRunner(env={**shown, **given})
        # In a thread: the command has an event loop of its own.
        return await asyncio.to_thread(lambda: runner.invoke(commands.app, [*words, "--json"]))

    info = await run("bookie", "info", "bookie-2")
    assert info.exit_code == 0, info.output
    assert json.loads(info.stdout)["bookie"].startswith("bookie-2@")
    for words in (
        ("cluster", "status"),
        ("repair", "status"),
        ("bookie", "cookie", "show", "bookie-2"),
    ):
        found = await run(*words)
        assert found.exit_code == 0, found.output
    incomplete = await run("bookie", "info", "bookie-2", TLS_KEY_FILE="")
    assert incomplete.exit_code == 2
    assert "--key-file" in incomplete.output


async def test_certificates_are_renewed_under_load_and_no_append_fails(cluster: Cluster) -> None:
    async def end_of(name: str) -> str:
        async with (
            cluster.session() as session,
            session.get(f"{cluster.url(name)}/metrics") as reported,
        ):
            lines = (await reported.text()).splitlines()
        return next(line for line in lines if line.startswith("quorumlog_certificate_end"))

    names = [name for name in cluster.names if name.startswith("bookie")]
    before = {name: await end_of(name) for name in names}
    is_over = False

    async def append() -> int:
        count = 0
        async with Client(cluster.gateways[0]) as client:
            ledger = await client.create_ledger()
            while not is_over:
                await ledger.append(b"%d" % count)
                count += 1
                await asyncio.sleep(PACE_S)
            info = await ledger.close()
        assert info["last_entry"] == count - 1
        return count

    appending = asyncio.create_task(append())
    for name in names:
        renew(cluster.certificates, certificate(cluster, f"bookie-{name}"), days=300)

    async def is_taken() -> bool:
        return all([await end_of(name) != before[name] for name in names])

    await until(is_taken, "every bookie has its new certificate")
    is_over = True

    assert await appending > 0
    assert all("certificate-unusable" not in cluster.log(name) for name in names)
