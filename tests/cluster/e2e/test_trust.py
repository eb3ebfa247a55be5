"""What somebody gets who has a bookie's certificate and wants more, from a cluster that has certificates."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest

from loadtest.cluster import Cluster
from quorumlog.certificates import renew, revoke
from quorumlog.client import Client
from quorumlog.net.identity import Role
from quorumlog.net.sessions import ExpectedServer
from tests.cluster.e2e.test_certificates import METADATA, PACE_S, certificate, session_of
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="package")

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
