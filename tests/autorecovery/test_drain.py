"""Real processes: a bookie is emptied while it lives, then stopped and decommissioned."""

import aiohttp

from loadtest.cluster import running
from loadtest.stores import Stores
from quorumlog.client import Client
from tests.autorecovery.test_healing import contents, written
from tests.support.waiting import until

PATIENT = {"ABANDONED_S": "3600", "IN_RECOVERY_S": "3600", "AUDIT_S": "0.5"}
"""No gateway counts as gone, however slow it is: a ledger is fenced only by mistake."""
DRAIN_S = 120.0


async def test_a_drained_bookie_is_named_by_nothing_and_can_be_decommissioned(
    stores: Stores,
) -> None:
    # Nobody counts as lost here: what moves is moved by the drain.
    async with (
        running(
            stores, bookies=4, gateways=1, environment=PATIENT, lost_bookie_delay_s=3600
        ) as cluster,
        Client(*cluster.gateways) as client,
        aiohttp.ClientSession() as session,
    ):
        ledgers = [await written(client, 20) for _ in range(6)]
        ledgers.append((await client.create_ledger(), []))
        for ledger, _ in ledgers[:3]:
            await ledger.close()
        drain = f"{cluster.url('autorecovery-1')}/v1/drains/bookie-1"
        bookie = f"{cluster.url('autorecovery-1')}/v1/bookies/bookie-1"

        async with session.delete(bookie) as answer:
            assert answer.status == 409  # it lives
        state = {"state": "draining"}
        async with session.put(f"{cluster.url('bookie-1')}/v1/state", json=state) as answer:
            assert answer.status == 200

        async def is_done() -> bool:
            async with session.get(drain) as answer:
                return answer.status == 200 and bool((await answer.json())["done"])

        async def is_draining() -> bool:
            states = {found["id"]: found["state"] for found in await client.bookies()}
            return bool(states.get("bookie-1@1") == "draining")

        await until(is_draining, "the cluster knows that it is drained", DRAIN_S)
        for ledger, payloads in ledgers[3:]:
            payloads.append(b"while it is drained")
            await ledger.append(payloads[-1])
        await until(is_done, "nothing names the bookie", DRAIN_S)
        for ledger, payloads in ledgers[3:]:  # none of them was fenced
            payloads.append(b"after")
            await ledger.append(payloads[-1])

        await cluster.kill("bookie-1")

        async def is_decommissioned() -> bool:
            async with session.delete(bookie) as answer:
                return answer.status == 204

        await until(is_decommissioned, "its heartbeat ends, and it is decommissioned", DRAIN_S)
        assert "bookie-1@1" not in {found["id"] for found in await client.bookies()}
        for ledger, payloads in ledgers:
            row = await ledger.info()
            assert "bookie-1@1" not in {m for f in row["fragments"] for m in f["bookies"]}
            assert await contents(ledger) == payloads
