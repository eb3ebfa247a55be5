"""Real processes: a bookie is emptied while it lives, then stopped and decommissioned."""

import asyncio
import os
import subprocess
import sys
from typing import Any

import orjson

from loadtest.cluster import Cluster, running
from loadtest.stores import Stores
from quorumlog.client import Client
from services.local.config import ROOT
from tests.autorecovery.test_healing import contents, written
from tests.support.waiting import until

PATIENT = {"ABANDONED_S": "3600", "IN_RECOVERY_S": "3600", "AUDIT_S": "0.5"}
"""No gateway counts as gone, however slow it is: a ledger is fenced only by mistake."""
DRAIN_S = 120.0


async def quorumlog(cluster: Cluster, *words: str) -> tuple[int, Any]:
    """What an operator's command ends with, and the JSON that it prints."""
    command = (sys.executable, "-m", "quorumlog.cli", *words, "--json")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT / "shared"),
        "QUORUMLOG_GATEWAY": cluster.gateways[0],
    }
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        env=environment,
        stdout=subprocess.PIPE,
        timeout=2 * DRAIN_S,
        check=False,
    )
    return done.returncode, orjson.loads(done.stdout) if done.stdout else None


async def test_a_drained_bookie_is_named_by_nothing_and_can_be_decommissioned(
    stores: Stores,
) -> None:
    # Nobody counts as lost here: what moves is moved by the drain.
    async with (
        running(
            stores, bookies=4, gateways=1, environment=PATIENT, lost_bookie_delay_s=3600
        ) as cluster,
        Client(*cluster.gateways) as client,
    ):
        ledgers = [await written(client, 20) for _ in range(6)]
        ledgers.append((await client.create_ledger(), []))
        for ledger, _ in ledgers[:3]:
            await ledger.close()
        # It lives, and ledgers name it.
        assert (await quorumlog(cluster, "bookie", "decommission", "bookie-1"))[0] != 0
        assert (await quorumlog(cluster, "bookie", "info", "bookie-9"))[0] == 4

        async def is_told() -> bool:
            return (await quorumlog(cluster, "bookie", "drain", "bookie-1"))[0] == 0

        await until(is_told, "the bookie is told", DRAIN_S)

        async def is_draining() -> bool:
            states = {found["id"]: found["state"] for found in await client.bookies()}
            return bool(states.get("bookie-1@1") == "draining")

        await until(is_draining, "the cluster knows that it is drained", DRAIN_S)
        for ledger, payloads in ledgers[3:]:
            payloads.append(b"while it is drained")
            await ledger.append(payloads[-1])

        async def has(verb: str) -> bool:
            # Again, where a machine is so slow that a command finds a service silent.
            wait = ("--wait", "--timeout", "20")
            status, left = await quorumlog(cluster, "bookie", verb, "bookie-1", *wait)
            return status == 0 and left["done"] is True and left["ledgers"] == 0

        await until(lambda: has("drain"), "nothing names the bookie", DRAIN_S)
        for ledger, payloads in ledgers[3:]:  # none of them was fenced
            payloads.append(b"after")
            await ledger.append(payloads[-1])

        await cluster.kill("bookie-1")

        await until(lambda: has("decommission"), "it is decommissioned", DRAIN_S)
        assert "bookie-1@1" not in {found["id"] for found in await client.bookies()}
        for ledger, payloads in ledgers:
            row = await ledger.info()
            assert "bookie-1@1" not in {m for f in row["fragments"] for m in f["bookies"]}
            assert await contents(ledger) == payloads
