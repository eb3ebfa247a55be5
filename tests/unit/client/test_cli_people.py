"""What the command line does for people: questions, hints, and where it finds a cluster."""

import asyncio
import os
import subprocess
from pathlib import Path
from uuid import uuid4

import aiohttp
import pytest

from loadtest.cluster import Cluster
from quorumlog import __version__
from quorumlog.client import Client
from quorumlog.errors import LogExists
from tests.support.commands import quick
from tests.support.waiting import within
from tests.unit.client.test_cli import environment, run, started

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def on_terminal(cluster: Cluster, answer: str, *arguments: str) -> tuple[int, str]:
    """The command line whose standard input is a terminal, on which somebody types: status and errors."""
    ours, theirs = os.openpty()
    try:
        os.write(ours, answer.encode())
        done = await asyncio.to_thread(
            subprocess.run,
            quick(*arguments),
            env=environment(cluster),
            stdin=theirs,
            capture_output=True,
            timeout=240,
            check=False,
        )
    finally:
        os.close(ours)
        os.close(theirs)
    return done.returncode, done.stderr.decode()


async def test_a_deletion_asks_on_a_terminal_and_not_in_a_script(cluster: Cluster) -> None:
    log = f"people-{uuid4().hex}"
    async with Client(*cluster.gateways) as client:
        made = await client.create_log(log)
        await made.append(b"a", b"b")
        ledger = await client.create_ledger()

        status, asked = await on_terminal(cluster, "n\n", "log", "delete", log)
        assert (status, f"{log} with 2 records for ever?" in asked) == (1, True)
        number = str(ledger.ledger_id)
        status, asked = await on_terminal(cluster, "n\n", "ledger", "delete", number)
        assert (status, f"ledger {number} with its entries for ever?" in asked) == (1, True)
        assert ((await made.info())["next_offset"], (await ledger.info())["state"]) == (2, "OPEN")

        assert await on_terminal(cluster, "", "ledger", "delete", number, "--yes") == (0, "")
        assert (await on_terminal(cluster, "y\n", "log", "delete", log))[0] == 0
        await client.create_log(log)
        assert (await run(cluster, "log", "delete", log))[0] == 0


async def test_a_deletion_is_of_the_log_that_was_asked_about(cluster: Cluster) -> None:
    log = f"people-{uuid4().hex}"
    async with Client(*cluster.gateways) as client:
        made = await client.create_log(log)
        ours, theirs = os.openpty()
        asking = await asyncio.create_subprocess_exec(
            *quick("log", "delete", log),
            env=environment(cluster),
            stdin=theirs,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            assert asking.stderr is not None
            async with within("it asks"):
                await asking.stderr.readuntil(b"for ever?")
            await made.delete()
            await client.create_log(log)
            os.write(ours, b"y\n")
            _, said = await asking.communicate()
        finally:
            os.close(ours)
            os.close(theirs)

        assert asking.returncode != 0
        assert f"the log {log} was deleted" in said.decode()
        assert (await made.info())["state"] == "OPEN"


async def test_all_gateways_of_the_folders_cluster_serve(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / ".quorumlog").mkdir()
    urls = ["http://127.0.0.1:1", *cluster.gateways]
    (tmp_path / ".quorumlog" / "gateways").write_text("".join(f"{url}\n" for url in urls))
    given = environment(cluster)
    del given["QUORUMLOG_GATEWAY"]

    done = await asyncio.to_thread(
        subprocess.run,
        quick("cluster", "status", "--json"),
        cwd=tmp_path,
        env=given,
        capture_output=True,
        timeout=240,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert b"gateway" in done.stdout


async def test_json_may_stand_before_the_command(cluster: Cluster) -> None:
    before = await run(cluster, "--json", "log", "show", "nowhere")
    after = await run(cluster, "log", "show", "nowhere", "--json")

    assert before == after
    assert before[2].startswith('{"code":"no-such-log"')


async def test_a_read_may_begin_so_long_ago_and_beyond_the_end_is_said(cluster: Cluster) -> None:
    log = f"people-{uuid4().hex}"
    async with Client(*cluster.gateways) as client:
        await (await client.create_log(log)).append(b"a")

    assert (await run(cluster, "log", "read", log, "--from", "2h"))[1] == b"a\n"
    for more in ((), ("--follow",)):
        status, output, errors = await run(cluster, "log", "read", log, "--from", "10", *more)
        assert (status, output) == (1, b"")
        assert errors.startswith("offset-beyond-end: ")
    assert await run(cluster, "log", "read", log, "--from", "1") == (0, b"", "")
    assert (await run(cluster, "log", "read", log, "--from", "5x"))[0] == 2


async def test_a_worker_that_waits_for_the_lease_says_so(cluster: Cluster) -> None:
    log = f"people-{uuid4().hex}"
    async with Client(*cluster.gateways) as client:
        made = await client.create_log(log)
        await made.append(b"a")
        await made.close()
        async with (
            made.consumer("mail", holder="me", lease_s=600),
            started(cluster, "log", "consume", log, "mail") as process,
        ):
            assert process.stderr is not None
            async with within("the wait is told"):
                reported = await process.stderr.readline()
            assert reported == b"mail waits for its lease, which me holds\n"


async def test_log_exists_says_which_settings_differ(cluster: Cluster) -> None:
    log = f"people-{uuid4().hex}"
    async with Client(*cluster.gateways) as client:
        await client.create_log(log, roll_bytes=1 << 20)

        with pytest.raises(LogExists) as caught:
            await client.create_log(log, roll_bytes=1 << 21, deletion_protection=True)

    assert caught.value.detail == (
        f"the log {log} exists with other settings: roll_bytes is 1048576, not 2097152;"
        " deletion_protection is false, not true"
    )


async def test_the_root_of_a_gateway_leads_a_person_on(cluster: Cluster) -> None:
    async with aiohttp.ClientSession() as session, session.get(cluster.gateways[0]) as answer:
        page = await answer.text()
        assert (answer.status, answer.content_type) == (200, "text/html")
        for path in ("/docs", "/v1/cluster"):
            assert f'href="{path}"' in page
            async with session.get(cluster.gateways[0] + path) as found:
                assert found.status == 200


async def test_the_version_is_that_of_the_package(cluster: Cluster) -> None:
    assert await run(cluster, "--version") == (0, f"quorumlog {__version__}\n".encode(), "")
