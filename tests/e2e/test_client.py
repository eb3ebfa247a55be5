"""The Python client and the command line against a whole cluster."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from loadtest.cluster import Cluster, running
from loadtest.stores import Stores
from quorumlog.client import Client
from quorumlog.errors import LedgerClosed, NoSuchLedger, WrongPassword


@pytest.fixture
async def cluster(stores: Stores) -> AsyncIterator[Cluster]:
    async with running(stores, bookies=3, gateways=2) as started:
        yield started


async def run(cluster: Cluster, *arguments: str, given: str = "") -> tuple[int, str, str]:
    """The command line: exit status, output, errors."""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "quorumlog.cli", *arguments],
        env={**os.environ, "QUORUMLOG_GATEWAY": ",".join(cluster.gateways)},
        input=given,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


async def test_a_ledger_from_its_creation_to_its_end(cluster: Cluster) -> None:
    async with Client(*cluster.gateways) as one, Client(cluster.gateways[1]) as two:
        ledger = await one.create_ledger(metadata={"for": "a test"}, password="secret")
        reader = two.ledger(ledger.ledger_id, password="secret")
        with pytest.raises(WrongPassword):
            await two.ledger(ledger.ledger_id).append(b"x")

        assert await ledger.append(b"\x00first") == 0
        assert (await reader.append_batch([b"", b"third"], expect=1)).last_entry == 2
        tailing = asyncio.ensure_future(anext(reader.tail(3)))
        assert await ledger.append(b"fourth") == 3
        assert (await tailing).payload == b"fourth"
        assert await reader.last_add_confirmed() == 3
        assert (await ledger.close())["state"] == "CLOSED"

        with pytest.raises(LedgerClosed):
            await reader.append(b"x")
        assert [e.payload async for e in reader.tail()] == [b"\x00first", b"", b"third", b"fourth"]
        assert [entry["ledger_id"] async for entry in one.ledgers(metadata={"for": "a test"})] == [
            ledger.ledger_id
        ]
        await one.delete_ledger(ledger.ledger_id, password="secret")
        with pytest.raises(NoSuchLedger):
            await ledger.info()


async def test_the_command_line_does_what_it_says(cluster: Cluster) -> None:
    status, out, _ = await run(cluster, "ledger", "create")
    assert status == 0
    ledger = out.strip()

    assert await run(cluster, "ledger", "append", ledger, "one", "two") == (0, "0..1\n", "")
    assert await run(cluster, "ledger", "append", ledger, given="three\nfour\n") == (
        0,
        "2..3\n",
        "",
    )
    assert (await run(cluster, "ledger", "read", ledger))[1] == "one\ntwo\nthree\nfour\n"
    shown = json.loads((await run(cluster, "ledger", "show", ledger, "--json"))[1])
    assert shown["state"] == "OPEN"
    assert (await run(cluster, "ledger", "close", ledger))[0] == 0
    assert (await run(cluster, "ledger", "tail", ledger, "--from", "3"))[1] == "four\n"
    _, listed, _ = await run(cluster, "bookie", "list", "--json")
    assert {json.loads(line)["id"] for line in listed.splitlines()} == {
        "bookie-1@1",
        "bookie-2@1",
        "bookie-3@1",
    }
    assert (await run(cluster, "cluster", "status", "--json"))[0] == 0


async def test_the_exit_status_tells_what_became_of_it(cluster: Cluster) -> None:
    missing, _, said = await run(cluster, "ledger", "read", "999999")
    usage, _, _ = await run(cluster, "ledger", "read")
    refused, _, _ = await run(cluster, "ledger", "create", "--digest", "hmac-sha256")

    assert (missing, usage, refused) == (4, 2, 1)
    assert said.startswith("no-such-ledger")
