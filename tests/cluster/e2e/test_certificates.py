"""A cluster whose services know each other by certificates alone: what each gets, renewals, and a thief's certificate."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from typer.testing import CliRunner

from loadtest.cluster import Cluster
from quorumlog.certificates import key_file, renew, revoke
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


REFUSED = (aiohttp.ClientError, OSError)


class Thief:
    """Speaks to the metadata service with the certificate of bookie-1."""

    def __init__(self, session: aiohttp.ClientSession, metadata: str) -> None:
        self._session, self._metadata = session, metadata

    async def asks(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        async with self._session.request(
            method, self._metadata + path, json=body, ssl=METADATA
        ) as answer:
            return answer.status, orjson.loads(await answer.read() or b"null")

    async def joins(self, name: str, url: str) -> set[tuple[int, str]]:
        """What it gets for registering as a bookie at a URL, and for its heartbeat."""
        _, cluster = await self.asks("GET", "/v1/cluster-id")
        cookie = {
            "incarnation": 1,
            "cluster_id": cluster["cluster_id"],
            "instance": str(uuid.uuid4()),
            "url": url,
        }
        sent = {
            "cookie": {"cookie": cookie, "attempt": str(uuid.uuid4())},
            "heartbeat": {"incarnation": 1, "url": url, "free_bytes": 2**62},
        }
        answers = [
            await self.asks("PUT", f"/v1/bookies/{name}/{what}", body)
            for what, body in sent.items()
        ]
        return {(status, reported["code"]) for status, reported in answers}


@asynccontextmanager
async def thief(cluster: Cluster) -> AsyncIterator[Thief]:
    async with session_of(cluster, "bookie-bookie-1") as session:
        yield Thief(session, cluster.url("metadata-1"))


async def test_one_bookies_certificate_makes_no_three_bookies(cluster: Cluster) -> None:
    async with thief(cluster) as stolen, Client(cluster.gateways[0]) as client:
        for name in ("fake-1", "fake-2", "fake-3", "bookie-2"):
            refused = await stolen.joins(name, cluster.url("bookie-1"))
            assert refused == {(403, "caller-refused")}

        listed = {bookie["id"].partition("@")[0] for bookie in await client.bookies()}
    assert listed == {name for name in cluster.names if name.startswith("bookie")}


async def test_a_bookie_registers_no_url_beyond_its_certificate(cluster: Cluster) -> None:
    plain = cluster.url("bookie-1").replace("https://", "http://")

    async with thief(cluster) as stolen:
        for url in ("https://store.example:3181", plain):
            assert await stolen.joins("bookie-1", url) == {(403, "caller-refused")}


async def test_a_lost_bookie_is_cut_off_and_let_in_with_a_new_certificate(cluster: Cluster) -> None:
    lost, others = "bookie-6", ("gateway-1", "metadata-1")
    metadata = cluster.url("metadata-1")
    is_over = False

    def counts(event: str, names: tuple[str, ...]) -> list[int]:
        return [cluster.log(name).count(event) for name in names]

    cut, loaded = (counts("revoked-connections-cut", others), counts("certificate-loaded", (lost,)))

    async def append() -> int:
        count = 0
        async with Client(cluster.gateways[0]) as client:
            ledger = await client.create_ledger(ensemble_size=6, write_quorum=3, ack_quorum=2)
            while not is_over:
                await ledger.append(b"%d" % count)
                count += 1
                await asyncio.sleep(PACE_S)
            await ledger.close()
        return count

    appending = asyncio.create_task(append())
    async with session_of(cluster, f"bookie-{lost}") as stolen:
        changes = await stolen.get(f"{metadata}/v1/changes", ssl=METADATA)
        async with Client(cluster.gateways[0]) as client:
            # Whose channel is open then.
            on_all = await client.create_ledger(ensemble_size=6, write_quorum=6, ack_quorum=6)
            await on_all.append(b"")

        revoke(cluster.certificates, "bookie", lost)

        def are_cut() -> bool:
            now = counts("revoked-connections-cut", others)
            return all(count > before for count, before in zip(now, cut, strict=True))

        await until(are_cut, "its connections are cut, whoever opened them")
        with pytest.raises(REFUSED):
            await changes.read()
        async with stolen.get(f"{metadata}/v1/cluster-id", ssl=METADATA) as answer:
            assert answer.status == 403
            assert "the certificate of bookie bookie-6 is revoked" in await answer.text()
    async with session_of(cluster, "gateway-gateway-1") as gateway:
        with pytest.raises(aiohttp.ClientConnectorCertificateError, match="is revoked"):
            await gateway.get(
                f"{cluster.url(lost)}/v1/ledgers/1", ssl=ExpectedServer(Role.BOOKIE, lost)
            )

    renew(cluster.certificates, certificate(cluster, f"bookie-{lost}"))
    await until(lambda: counts("certificate-loaded", (lost,)) > loaded, "it has a new certificate")
    async with session_of(cluster, "gateway-gateway-1") as gateway:

        async def answers() -> bool:
            async with gateway.get(
                f"{cluster.url(lost)}/v1/ledgers/1", ssl=ExpectedServer(Role.BOOKIE, lost)
            ) as answer:
                return answer.status < 500

        await until(answers, "the new certificate counts", passing=(aiohttp.ClientError,))
    is_over = True

    assert await appending > 0
