"""The command line against a whole cluster."""

import asyncio
import json
import os
import subprocess
import sys

import pytest

from loadtest.cluster import Cluster

pytestmark = pytest.mark.asyncio(loop_scope="package")


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
