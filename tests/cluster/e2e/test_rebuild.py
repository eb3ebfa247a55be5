"""A cluster whose Postgres is gone without a backup comes back with all that was acknowledged (rule 18d)."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from typer.testing import CliRunner

from loadtest.cluster import Cluster, running
from loadtest.stores import scratch
from quorumlog.cli.commands import app as cli
from quorumlog.client import Client, Ledger
from quorumlog.errors import NoSuchLedger, QuorumLogError, WrongPassword
from tests.support.waiting import SETTLED_S, UNHURRIED, until
from tests.unit.logs.support import Answer, Http

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
    done = CliRunner(env=cluster.operator_settings).invoke(
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


async def test_the_command_tells_what_is_there_and_changes_nothing_of_it() -> None:
    async with (
        running(None, gateways=1, environment=SETTINGS) as cluster,
        Client(*cluster.gateways) as client,
    ):
        ledger = await client.create_ledger()
        await append(ledger)
        before = await ledger.info()

        reported = await asyncio.to_thread(cli_rebuild, cluster, "--dry-run")
        done = await asyncio.to_thread(cli_rebuild, cluster)
        again = await asyncio.to_thread(cli_rebuild, cluster, "--after", str(ledger.ledger_id))

        assert reported["ledgers"] == done["ledgers"] == again["ledgers"] == {"same": 1}
        assert (reported["dry_run"], done["dry_run"]) == (True, False)
        assert len(done["bookies"]) == 4
        assert await ledger.info() == before


JSON = {"Content-Type": "application/json"}
TEXT = {"Content-Type": "text/plain"}
EXPIRES = {"Stream-Expires-At": "2999-01-01T00:00:00Z"}


class Streams:
    """Requests to streams, sent until somebody answers for the stream's log."""

    def __init__(self, http: Http) -> None:
        self._http = http

    async def ask(
        self, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b""
    ) -> Answer:
        async def once() -> Answer | None:
            answer = await self._http.ask(
                method, f"/v1/stream/{path}", headers=headers, body=body or None
            )
            return None if answer.status in (429, 503, 504) else answer

        found = await until(
            once, f"{method} {path}", SETTLED_S, passing=(aiohttp.ClientError, OSError)
        )
        assert found is not None
        return found


async def record_times(client: Client, name: str) -> list[tuple[bytes, str]]:
    """The records of a log, each with its append time."""
    return [(record.value, record.timestamp) async for record in client.log(name).records()]


async def test_streams_positions_and_settings_of_logs_come_back_with_their_records() -> None:
    with scratch("ql-rebuild-") as folder:
        settings: dict[str, Any] = {"gateways": 1, "data": folder, "environment": SETTINGS}
        async with (
            running(None, **settings) as cluster,
            Client(*cluster.gateways) as client,
            aiohttp.ClientSession() as session,
        ):
            streams = Streams(Http(session, cluster.gateways))
            assert (await streams.ask("PUT", "chat/1", JSON)).status in (200, 201)
            said = await streams.ask("POST", "chat/1", {**JSON, "Stream-Seq": "b"}, b'[{"n":1},2]')
            assert said.status in (204, 409)  # a repeat is not above its first try
            assert (await streams.ask("PUT", "done", TEXT | EXPIRES, b"all")).status in (200, 201)
            ended = await streams.ask("POST", "done", {"Stream-Closed": "true"})
            assert (ended.status, ended.headers["Stream-Closed"]) == (204, "true")

            orders = await client.create_log("orders", batch_compression="zstd", roll_entries=3)
            for number in range(4):
                await orders.append(b"%d" % number * 100)
            async with orders.consumer("billing") as consumer:
                await consumer.commit(3)

            jobs = await client.create_log("jobs", metadata={"team": "reports"})
            task = await client.begin("jobs", app="nightly", version=1)
            written = await task.ledger()
            await written.append(b"written first")
            await written.close()
            await jobs.append(b"appended first")
            await task.commit(written.ledger_id)
            times = await record_times(client, "jobs")
            assert [value for value, _ in times] == [b"appended first", b"written first"]
            # Its last ledger has no batch that tells the sequence: who takes over refuses the only request.
            await cluster.kill("gateway-1")
            cluster.start("gateway-1")
            again = await streams.ask("POST", "chat/1", {**JSON, "Stream-Seq": "b"}, b"3")
            assert (again.status, again.json["code"]) == (409, "stream-seq-regression")
            await cluster.kill_all()
        shutil.rmtree(Path(folder) / "postgres")

        async with (
            running(None, **settings, rebuild_metadata=True) as cluster,
            Client(*cluster.gateways) as client,
            aiohttp.ClientSession() as session,
        ):
            streams = Streams(Http(session, cluster.gateways))
            head, chat = await streams.ask("HEAD", "done"), await streams.ask("GET", "chat/1")
            assert (chat.headers["Content-Type"], chat.body) == ("application/json", b'[{"n":1},2]')
            assert head.headers["Stream-Closed"] == "true"
            assert head.headers["Content-Type"] == "text/plain"
            assert head.headers["Stream-Expires-At"] == EXPIRES["Stream-Expires-At"]
            done = await streams.ask("GET", "done")
            assert done.body == b"all"
            end = await streams.ask("GET", f"done?offset={done.headers['Stream-Next-Offset']}")
            assert end.headers["Stream-Closed"] == "true"
            late = await streams.ask("POST", "done", TEXT, b"more")
            assert (late.status, late.headers["Stream-Closed"]) == (409, "true")
            stale = await streams.ask("POST", "chat/1", {**JSON, "Stream-Seq": "b"}, b"3")
            assert (stale.status, stale.json["code"]) == (409, "stream-seq-regression")
            fresh = await streams.ask("POST", "chat/1", {**JSON, "Stream-Seq": "c"}, b"3")
            assert fresh.status in (204, 409)
            chat = await streams.ask("GET", "chat/1")
            assert chat.body == b'[{"n":1},2,3]'

            orders = client.log("orders")
            found = [record.value async for record in orders.records()]
            assert found == [b"%d" % number * 100 for number in range(4)]
            assert (await orders.info())["settings"]["batch_compression"] == "zstd"
            assert (await orders.consumer_info("billing"))["offset"] == 3
            assert (await orders.append(b"4")).first_offset == 4
            assert await record_times(client, "jobs") == times
            assert (await client.log("jobs").info())["settings"]["metadata"] == {"team": "reports"}
            assert (await client.log("jobs").append(b"next")).first_offset == len(times)
