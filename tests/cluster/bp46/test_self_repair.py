"""A bookie that lost something comes back as a new incarnation and fills itself from its peers, on
a whole cluster that defers syncs.
"""

import asyncio
import shutil
from typing import Any

import aiohttp

from loadtest.cluster import Cluster, running
from loadtest.stores import Stores
from quorumlog.client import Client, Ledger
from tests.support.waiting import MENDED_S, UNHURRIED, until

QUICK = {
    "ABANDONED_S": "2",
    "SILENT_S": "20",
    "IN_RECOVERY_S": "1",
    "AUDIT_S": "0.5",
    "LIMBO_S": "0.1",
    **UNHURRIED,
}


async def test_after_a_loss_a_bookie_fills_itself_and_takes_its_old_place(stores: Stores) -> None:
    async with (
        running(
            stores,
            bookies=4,
            gateways=2,
            environment=QUICK,
            durability="deferred",
            auto_fix_cookies=True,
            # A ledger may name the incarnation between, which is gone for good: it is waited for that long.
            lost_bookie_delay_s=20,
        ) as cluster,
        Client(cluster.gateways[0]) as client,
        Client(cluster.gateways[1]) as other,
        aiohttp.ClientSession() as session,
    ):
        bookies = _Bookies(cluster, session)
        closed = [await _written(client, 20) for _ in range(6)]
        for ledger, _ in closed:
            await ledger.close()
        living = [await _written(client, 20) for _ in range(3)]
        abandoned = [await _written(other, 20) for _ in range(3)]
        everything = [*closed, *living, *abandoned]

        # An unclean stop loses what was not synced, and nobody knows what that is. (Repairs that
        # meet a bookie on its way are put off for ever longer: nobody repairs meanwhile.)
        cluster.pause("autorecovery-1")
        await cluster.kill("gateway-2")
        await cluster.kill("bookie-1")
        await cluster.restart("bookie-1")
        info = await bookies.info("bookie-1")
        assert info["bookie"] == "bookie-1@2"
        # Killed before all is whole, it begins again.
        await cluster.kill("bookie-1")
        await cluster.restart("bookie-1")
        cluster.resume("autorecovery-1")
        await bookies.is_whole("bookie-1", "bookie-1@3")
        await _is_in_place(client, everything, "bookie-1@3")

        # A disk that is lost takes all with it.
        cluster.pause("autorecovery-1")
        await cluster.kill("bookie-2")
        await asyncio.to_thread(shutil.rmtree, cluster.data / "bookie-2")
        await cluster.restart("bookie-2")
        cluster.resume("autorecovery-1")
        limbo = (await bookies.is_whole("bookie-2", "bookie-2@2"))["limbo"]
        held = await bookies.get("bookie-2", "/v1/ledgers?limit=1000")
        assert limbo["copied_entries"] > 0
        assert not any(item["limbo"] for item in held["ledgers"])
        await _is_in_place(client, everything, "bookie-2@2")

        for ledger, payloads in living:  # none of them was fenced
            payloads.append(b"after")
            await ledger.append(b"after")
        # Two of three must do now, and may be those that were filled.
        await cluster.kill("bookie-3")
        for ledger, payloads in everything:
            found = client.ledger(ledger.ledger_id)
            assert [entry.payload async for entry in found.entries()] == payloads


class _Bookies:
    """What bookies say of themselves."""

    def __init__(self, cluster: Cluster, session: aiohttp.ClientSession) -> None:
        self._cluster = cluster
        self._session = session

    async def get(self, name: str, path: str) -> dict[str, Any]:
        url = self._cluster.url(name) + path
        async with self._session.get(url, headers=self._cluster.headers) as answer:
            found: dict[str, Any] = await answer.json()
            return found

    async def info(self, name: str) -> dict[str, Any]:
        return await self.get(name, "/v1/info")

    async def is_whole(self, name: str, member: str) -> dict[str, Any]:
        """Wait until nothing is in limbo at it."""

        async def is_over() -> dict[str, Any]:
            info = await self.info(name)
            is_marked = (self._cluster.data / name / "limbo").exists()
            return {} if is_marked or info["bookie"] != member else info

        return await until(is_over, f"{member} is whole", MENDED_S)


async def _written(client: Client, count: int) -> tuple[Ledger, list[bytes]]:
    ledger = await client.create_ledger()
    payloads = [f"{ledger.ledger_id} {number}".encode() * 10 for number in range(count)]
    await ledger.append_batch(payloads)
    return ledger, payloads


async def _is_in_place(
    client: Client, ledgers: list[tuple[Ledger, list[bytes]]], member: str
) -> None:
    """No older incarnation of a member is named any more, and some ledgers name it."""
    rows = [await client.ledger(ledger.ledger_id).info() for ledger, _ in ledgers]
    name = member.partition("@")[0]
    named = {m for row in rows for f in row["fragments"] for m in f["bookies"]}
    assert {m for m in named if m.partition("@")[0] == name} == {member}
