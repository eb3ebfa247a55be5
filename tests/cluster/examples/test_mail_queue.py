"""The mail sender: each good mail is sent, each bad one is a dead letter with its reason."""

import asyncio
import sys

import pytest

from loadtest.cluster import Cluster
from quorumlog.client import Client
from tests.cluster.examples.support import ROOT
from tests.support.waiting import SETTLED_S, until

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def ran(cluster: Cluster, *words: str) -> list[str]:
    program = str(ROOT / "examples" / "mail_queue.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, program, "--gateways", *cluster.gateways, *words, stdout=-1
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode().splitlines()


async def test_mails_are_sent_and_bad_ones_are_dead_letters(cluster: Cluster) -> None:
    good = [f"guest{at}@example.org" for at in range(20)]
    await ran(cluster, "--put", *good, "bob@nowhere")
    two = (ran(cluster, "--workers", "3", "--wait", "3") for _ in range(2))
    lines = [line for found in await asyncio.gather(*two) for line in found]
    assert sorted(line.rpartition(" ")[2] for line in lines) == sorted(good)
    async with Client(*cluster.gateways) as client:
        queue = client.log("mails").queue("mail")

        async def is_done() -> bool:
            return (await queue.info())["depth"] == 0

        await until(is_done, "the bad mail is a dead letter", SETTLED_S)
        (dead,) = [record async for record in client.log("mails.dead").records()]
        assert (dead.value, dead.headers["Dead-Letter-Attempts"]) == (b"bob@nowhere", "3")
        assert dead.headers["Dead-Letter-Reason"] == "no such host in the address bob@nowhere"
