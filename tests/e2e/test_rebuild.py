"""A cluster whose Postgres is gone without a backup comes back with all that was acknowledged (rule 18d)."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from loadtest.cluster import Cluster, running
from loadtest.stores import scratch
from quorumlog.cli.commands import app as cli
from quorumlog.client import Client, Ledger
from quorumlog.errors import NoSuchLedger, QuorumLogError, WrongPassword
from tests.support.waiting import UNHURRIED, until

SETTINGS = {**UNHURRIED, "COLLECT_S": "1", "COLLECT_GRACE_S": "1"}


async def append(ledger: Ledger, count: int = 20) -> list[bytes]:
    payloads = [f"{ledger.ledger_id}:{number}".encode() for number in range(count)]
    await ledger.append_batch(payloads)
    return payloads


async def contents(ledger: Ledger) -> list[bytes]:
    return [entry.payload async for entry in ledger.entries()]


async def knows_deletion(cluster: Cluster, ledger_id: int) -> bool:
    """Whether some bookie keeps the id as a deleted ledger's."""
    async with cluster.session() as session:
        for name in cluster.names:
            if not name.startswith("bookie"):
                continue
            async with session.get(f"{cluster.url(name)}/v1/rows?limit=10000") as answer:
                rows = (await answer.json())["ledgers"]
            if any(row["deleted"] and row["ledger_id"] == ledger_id for row in rows):
                return True
    return False


def cli_rebuild(cluster: Cluster, *options: str) -> dict[str, Any]:
    done = CliRunner(env={"CLUSTER_SECRET_FILE": str(cluster.secret_file)}).invoke(
        cli,
        ["metadata", "rebuild", "--metadata", cluster.url("metadata-1"), "--json", *options],
    )
    assert done.exit_code == 0, done.output
    report: dict[str, Any] = orjson.loads(done.stdout)
    return report


async def test_a_cluster_without_its_postgres_comes_back_with_every_acknowledged_entry() -> None:
    with scratch("ql-rebuild-") as folder:
        settings: dict[str, Any] = {
            "gateways": 1,
            "data": folder,
            "environment": SETTINGS,
            "tls": True,
        }
        async with running(None, **settings) as cluster:
            async with Client(*cluster.gateways) as client:
                opened, moved, closed, deleted, gone = [
                    await client.create_ledger() for _ in range(5)
                ]
                sealed = await client.create_ledger(digest="hmac-sha256", password="secret")
                sent = {each.ledger_id: await append(each) for each in (opened, moved, closed)}
                secrets = await append(sealed)
                await append(deleted)
                await append(gone)
                await closed.close()
                await sealed.close()
                await deleted.close()
                await client.delete_ledger(deleted.ledger_id)
                await until(lambda: knows_deletion(cluster, deleted.ledger_id), "a bookie knows it")
                victim = (await moved.info())["fragments"][-1]["bookies"][0].partition("@")[0]
                await cluster.kill(victim)
                sent[moved.ledger_id] += await append(moved)

                async def is_moved() -> bool:
                    return len((await moved.info())["fragments"]) == 2

                await until(is_moved, "its writer replaces the bookie")
                sent[moved.ledger_id] += await append(moved)
                await gone.close()
                # No bookie drops it before it has looked twice.
                await client.delete_ledger(gone.ledger_id)
            await cluster.kill_all()
        shutil.rmtree(Path(folder) / "postgres")

        async with (
            running(None, **settings, rebuild_metadata=True) as cluster,
            Client(*cluster.gateways) as client,
        ):
            for ledger_id, payloads in sent.items():
                ledger = client.ledger(ledger_id)

                async def recovered(ledger: Ledger = ledger) -> bool:
                    return bool((await ledger.recover())["state"] == "CLOSED")

                await until(recovered, "its end is found", passing=(QuorumLogError,))
                assert await contents(ledger) == payloads
            found = client.ledger(sealed.ledger_id, password="secret")
            with pytest.raises(WrongPassword):
                await contents(client.ledger(sealed.ledger_id, password="other"))
            # Recovery checks digests, so it needs the key that only the password gives.
            assert (await found.recover())["state"] == "CLOSED"
            assert await contents(found) == secrets
            for each in (deleted, gone):
                with pytest.raises(NoSuchLedger):
                    await client.ledger(each.ledger_id).info()
            fresh = await client.create_ledger()
            assert fresh.ledger_id > max(each.ledger_id for each in (opened, moved, closed, sealed))
            assert await append(fresh) == await contents(fresh)


async def test_a_log_comes_back_in_its_order() -> None:
    with scratch("ql-rebuild-") as folder:
        async with running(None, gateways=1, data=folder, environment=SETTINGS) as cluster:
            async with Client(*cluster.gateways) as client:
                log = await client.create_log("events", roll_entries=3)
                for number in range(10):
                    await log.append(b"%d" % number)
            await cluster.kill_all()
        shutil.rmtree(Path(folder) / "postgres")

        async with (
            running(
                None, gateways=1, data=folder, environment=SETTINGS, rebuild_metadata=True
            ) as cluster,
            Client(*cluster.gateways) as client,
        ):
            log = client.log("events")

            async def appended() -> bool:
                await log.append(b"10")
                return True

            await until(appended, "somebody takes the log over", passing=(QuorumLogError,))
            found = [record.value async for record in log.records()]

            assert found == [b"%d" % number for number in range(len(found))]
            assert len(found) == 11


async def test_the_command_tells_what_is_there_and_changes_nothing_of_it() -> None:
    async with (
        running(None, gateways=1, environment=SETTINGS) as cluster,
        Client(*cluster.gateways) as client,
    ):
        ledger = await client.create_ledger()
        await append(ledger)
        before = await ledger.info()

        told = await asyncio.to_thread(cli_rebuild, cluster, "--dry-run")
        done = await asyncio.to_thread(cli_rebuild, cluster)
        again = await asyncio.to_thread(cli_rebuild, cluster, "--after", str(ledger.ledger_id))

        assert told["ledgers"] == done["ledgers"] == again["ledgers"] == {"same": 1}
        assert (told["dry_run"], done["dry_run"]) == (True, False)
        assert len(done["bookies"]) == 4
        assert await ledger.info() == before
