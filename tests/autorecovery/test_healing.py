"""Real processes: what lacks copies or a writer is mended, though nobody asks for it."""

import asyncio
import shutil

from loadtest.cluster import running
from loadtest.stores import Stores
from quorumlog.client import Client, Ledger
from tests.support.waiting import until

QUICK = {"ABANDONED_S": "1", "IN_RECOVERY_S": "1", "AUDIT_S": "0.5"}
HEAL_S = 120.0
"""Deadline, not expectation: repairs that were put off come again after pauses that double."""


async def written(client: Client, count: int) -> tuple[Ledger, list[bytes]]:
    ledger = await client.create_ledger()
    payloads = [f"{ledger.ledger_id} {number}".encode() * 10 for number in range(count)]
    await ledger.append_batch(payloads)
    return ledger, payloads


async def contents(ledger: Ledger) -> list[bytes]:
    return [entry.payload async for entry in ledger.entries()]


async def test_what_a_lost_bookie_held_is_copied_and_open_ledgers_go_on(stores: Stores) -> None:
    async with (
        running(stores, bookies=4, gateways=1, environment=QUICK, lost_bookie_delay_s=1) as cluster,
        Client(*cluster.gateways) as client,
    ):
        ledgers = [await written(client, 20) for _ in range(6)]
        for ledger, _ in ledgers[:3]:
            await ledger.close()

        await cluster.kill("bookie-1")
        await asyncio.to_thread(shutil.rmtree, cluster.data / "bookie-1")

        async def nobody_names_it() -> bool:
            rows = [await ledger.info() for ledger, _ in ledgers]
            members = {m for row in rows for f in row["fragments"] for m in f["bookies"]}
            return "bookie-1@1" not in members

        await until(nobody_names_it, "every fragment has live members", HEAL_S)
        for ledger, payloads in ledgers[3:]:  # none of them was fenced
            payloads.append(b"after")
            await ledger.append(b"after")

        await cluster.kill("bookie-2")  # now one of the copies must do that repair made
        for ledger, payloads in ledgers:
            assert await contents(ledger) == payloads


async def test_a_ledger_whose_writer_died_is_closed_though_nobody_asks(stores: Stores) -> None:
    async with (
        running(stores, bookies=3, gateways=2, environment=QUICK) as cluster,
        Client(cluster.gateways[0]) as writer,
        Client(cluster.gateways[1]) as other,
    ):
        ledger, payloads = await written(writer, 20)
        living, _ = await written(other, 5)

        await cluster.kill("gateway-1")

        async def state() -> bool:
            row = await other.ledger(ledger.ledger_id).info()
            return bool(row["state"] == "CLOSED")

        await until(state, "the abandoned ledger is closed", HEAL_S)
        assert await contents(other.ledger(ledger.ledger_id)) == payloads
        assert (await living.info())["state"] == "OPEN"
