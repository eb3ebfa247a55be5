"""What somebody gets who reaches the ports of a cluster and does not have its secret (docs/reference/security.md)."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from loadtest.cluster import Cluster
from loadtest.ports import free_ports
from quorumlog.client import Client
from services.local.config import ROOT
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="package")

KEY = {"X-Ledger-Key": "A" * 43 + "="}
UPGRADE = {"Connection": "Upgrade", "Upgrade": "quorumlog-channel/1"}
WRONG = {"Authorization": f"Bearer {'0' * 64}"}
FUTURE = 20
"""Ledgers that are fenced before they are created."""


def internal_url(cluster: Cluster, name: str) -> str:
    return cluster.internal_url(name) or cluster.url(name)


def internal_listeners(cluster: Cluster) -> Iterator[str]:
    """One of each kind of service."""
    for name in ("bookie-1", "metadata-1", "autorecovery-1", "gateway-1"):
        yield internal_url(cluster, name)


async def operations(url: str, headers: dict[str, str]) -> list[tuple[str, str]]:
    """Method and path of each operation, for some ledger, bookie or log."""
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(f"{url}/openapi.json") as answer,
    ):
        paths = (await answer.json())["paths"]
    return [
        (method.upper(), re.sub(r"{\w+}", "1", path))
        for path, one in paths.items()
        for method in one
    ]


async def status_of(
    session: aiohttp.ClientSession, method: str, url: str, **options: Any
) -> tuple[int, Any]:
    async with session.request(method, url, **options) as answer:
        return answer.status, orjson.loads(await answer.read() or b"null")


@pytest.mark.parametrize("shown", [{}, WRONG], ids=["nothing", "another secret"])
async def test_routes_behind_gateways_are_closed(cluster: Cluster, shown: dict[str, str]) -> None:
    async with aiohttp.ClientSession(headers=shown) as session:
        for url in internal_listeners(cluster):
            routes = await operations(url, cluster.headers)
            assert len(routes) >= 8
            about = [("GET", path) for path in ("/metrics", "/docs", "/openapi.json", "/nothing")]
            for method, path in [*routes, *about, ("OPTIONS", "/v1/ledgers")]:
                status, reported = await status_of(session, method, url + path)
                assert (status, reported["code"]) == (401, "unauthenticated"), (url, method, path)
            for path in ("/health/live", "/health/ready"):
                assert (await status_of(session, "GET", url + path))[0] == 200


async def test_nothing_internal_answers_on_the_public_port(cluster: Cluster) -> None:
    url = cluster.gateways[0]
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{url}/internal/instance") as reported,
    ):
        assert reported.status == 404
    routes = await operations(internal_url(cluster, "gateway-1"), cluster.headers)
    assert ("GET", "/internal/instance") in routes
    async with Client(url) as client:
        ledger = await client.create_ledger()
        info = await ledger.info()
    writer = info["writer"]
    assert writer is not None
    async with aiohttp.ClientSession(headers=cluster.headers) as session:
        inside = await status_of(session, "GET", f"{writer['internal_url']}/internal/instance")
        assert inside == (200, {"id": writer["id"]})
        for method, path in routes:
            here = url + path.replace("/1", f"/{ledger.ledger_id}")
            shown = {"X-Forwarded-Writer": writer["id"]}
            async with session.request(method, here, headers=shown) as answer:
                assert (answer.status, (await answer.json())["code"]) == (404, "not-found"), path
                # It handed out the value that it asked for.
                assert "X-Forwarded-Writer" not in answer.headers


async def test_a_stranger_at_a_bookies_port_fences_no_future_ledger(cluster: Cluster) -> None:
    async with Client(cluster.gateways[0]) as client, aiohttp.ClientSession() as session:
        last = await client.create_ledger()
        for name in (name for name in cluster.names if name.startswith("bookie")):
            url = cluster.url(name)
            for ledger_id in range(last.ledger_id, last.ledger_id + FUTURE):
                fence = f"{url}/v1/ledgers/{ledger_id}/fence"
                assert (await status_of(session, "POST", fence, headers=KEY))[0] == 401
            channel = f"{url}/v1/channel"
            assert (await status_of(session, "GET", channel, headers=UPGRADE))[0] == 401
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await session.ws_connect(channel)
            assert refused.value.status == 401

        await last.append(b"not fenced")
        for _ in range(FUTURE):
            await (await client.create_ledger()).append(b"not fenced")


async def test_a_stranger_reads_no_rows_and_no_keys(cluster: Cluster) -> None:
    async with Client(cluster.gateways[0]) as client, aiohttp.ClientSession() as session:
        ledger = await client.create_ledger(digest="hmac-sha256", password="secret")
        await ledger.append(b"entry")
        row = f"{cluster.url('metadata-1')}/v1/ledgers/{ledger.ledger_id}"
        for url in (row, f"{cluster.url('bookie-1')}/v1/rows"):
            status, reported = await status_of(session, "GET", url)
            assert status == 401
            assert "mac_key" not in str(reported)

        _, known = await status_of(session, "GET", row, headers=cluster.headers)
        assert known["mac_key"]


async def test_a_stranger_registers_no_bookies(cluster: Cluster) -> None:
    metadata = cluster.url("metadata-1")
    async with Client(cluster.gateways[0]) as client, aiohttp.ClientSession() as session:
        _, about = await status_of(session, "GET", f"{metadata}/v1/cluster-id")
        for name in ("fake-1", "fake-2", "fake-3"):
            cluster_id = about.get("cluster_id", "unknown")
            cookie = {"incarnation": 1, "cluster_id": cluster_id, "instance": name}
            body = {"cookie": cookie, "attempt": "6f1b0f0e-3b5c-4a55-8a3e-1d6f0d4d4d10"}
            alive = {"incarnation": 1, "url": "http://127.0.0.1:9"}
            for path, sent in (("cookie", body), ("heartbeat", alive)):
                url = f"{metadata}/v1/bookies/{name}/{path}"
                assert (await status_of(session, "PUT", url, json=sent))[0] == 401

        listed = {bookie["id"].partition("@")[0] for bookie in await client.bookies()}
    assert listed == {name for name in cluster.names if name.startswith("bookie")}


async def test_a_page_in_a_browser_can_not_speak_for_a_service(cluster: Cluster) -> None:
    """Without a preflight that allows it a page sends no Authorization; what it sends without one is refused."""
    async with aiohttp.ClientSession() as session:
        for url in internal_listeners(cluster):
            asked = {
                "Origin": url,
                "Access-Control-Request-Method": "GET",
                "Access-Control-Request-Headers": "authorization",
            }
            for path in ("/v1/ledgers", "/internal/instance"):
                async with session.options(url + path, headers=asked) as answer:
                    assert answer.status == 401
                    assert "Access-Control-Allow-Origin" not in answer.headers
                assert (await status_of(session, "GET", url + path))[0] == 401


@pytest.mark.parametrize("name", ["bookie-1", "metadata-1", "autorecovery-1"])
async def test_a_strangers_page_cannot_send_without_preflight(cluster: Cluster, name: str) -> None:
    """A browser sends these to any address: a request without a typed body, and the handshake of a WebSocket."""
    url, page = cluster.url(name), {"Origin": "https://page.example"}
    async with aiohttp.ClientSession(headers=page) as session:
        channel = f"{url}/v1/channel"
        assert (await status_of(session, "GET", channel, headers=UPGRADE))[0] == 403
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(channel)
        assert refused.value.status == 403
        for path in ("/v1/ledgers", "/v1/ledgers/1/fence", "/v1/repairs"):
            assert (await status_of(session, "POST", url + path))[0] == 403, path


async def test_the_secret_is_a_file_of_its_user_and_stands_nowhere_else(cluster: Cluster) -> None:
    secret = cluster.secret_file.read_text().strip()
    assert cluster.secret_file.stat().st_mode & 0o777 == 0o600
    assert len(secret) == 64

    for name in cluster.names:
        process = Path("/proc") / str(cluster.pid(name))
        for what in ("cmdline", "environ"):
            assert secret.encode() not in (process / what).read_bytes(), (name, what)
        assert secret not in repr(cluster.program(name))  # a forked process shows its parent's
        assert secret not in cluster.log(name)


async def test_a_gateway_tells_the_others_the_port_that_the_system_chose(cluster: Cluster) -> None:
    async with a_gateway(cluster) as (url, session):
        _, reported = await status_of(session, "GET", f"{url}/v1/cluster")
        writer = reported["writer"]
        listed = {one["id"]: one.get("internal_url") for one in reported["services"]}
        assert listed[writer["id"]] == writer["internal_url"]
        # One that the local cluster starts keeps its port.
        assert set(map(cluster.internal_url, ("gateway-1", "gateway-2"))) < set(listed.values())
        inside = f"{writer['internal_url']}/internal/instance"
        assert (await status_of(session, "GET", inside))[0] == 401
        answer = await status_of(session, "GET", inside, headers=cluster.headers)
        assert answer == (200, {"id": writer["id"]})
        async with Client(url) as client, Client(cluster.gateways[0]) as other:
            ledger = await client.create_ledger()
            await other.ledger(ledger.ledger_id).append(b"by its internal listener")


@asynccontextmanager
async def a_gateway(cluster: Cluster) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    """One beside those of the cluster, with as few settings as there may be."""
    port = free_ports(1)[0]
    url = f"http://127.0.0.1:{port}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.gateway"),
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT / "shared"), str(ROOT))),
            "PORT": str(port),
            "METADATA_URLS": cluster.url("metadata-1"),
            "CLUSTER_SECRET_FILE": str(cluster.secret_file),
        },
        stderr=subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession() as session:

            async def is_listed() -> bool:
                _, reported = await status_of(session, "GET", f"{url}/v1/cluster")
                return any(one["url"] == url for one in reported["services"])

            await until(is_listed, "the gateway lives", passing=(aiohttp.ClientError, KeyError))
            yield url, session
    finally:
        process.terminate()
        assert await process.wait() == 0
