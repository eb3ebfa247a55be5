"""A whole cluster over a database that was restored from an older dump (rule 18a): every process is real."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import asyncpg
import pytest
from typer.testing import CliRunner, Result

from loadtest.cluster import Cluster, running
from loadtest.stores import Stores, scratch
from quorumlog.cli.commands import app as cli
from quorumlog.client import Client
from quorumlog.client.ledger import Ledger
from quorumlog.errors import DatabaseWentBack
from tests.support.waiting import UNHURRIED, until
from tests.unit.metadata.restores import dump, restore

SETTINGS: Final = {
    **UNHURRIED,
    "COLLECT_S": "0.1",
    "COLLECT_GRACE_S": "0.01",
    "EXPIRY_EVERY_S": "0.05",
}
METADATA: Final = "metadata-1"
GATEWAY: Final = "gateway-1"
SILENT: Final = "these bookies do not respond: "
"""Metadata services give a bookie 2 s."""


class OtherChange(Exception):
    """A process has presented another missing change since the missing ones were listed."""


@dataclass(frozen=True, slots=True)
class World:
    """The cluster, and who asks its processes."""

    cluster: Cluster
    stores: Stores
    folder: Path
    session: aiohttp.ClientSession
    database: Any

    @property
    def bookies(self) -> list[str]:
        return [name for name in self.cluster.names if name.startswith("bookie")]

    async def got(self, name: str, path: str) -> tuple[int, Any]:
        url = self.cluster.url(name) + path
        async with self.session.get(url, headers=self.cluster.headers) as answer:
            return answer.status, await answer.json()

    async def restart(self, name: str) -> None:
        """Killed, and started again; it may not become ready."""
        if self.cluster.is_alive(name):
            await self.cluster.kill(name)
        self.cluster.start(name)

        async def is_alive() -> bool:
            return (await self.got(name, "/health/live"))[0] == 200

        await until(is_alive, f"{name} runs", passing=(aiohttp.ClientError,))

    async def until_told(self) -> None:
        async def is_reported() -> bool:
            status, problem = await self.got(METADATA, "/health/ready")
            return (status, problem.get("code")) == (503, "database-went-back")

        await until(is_reported, "`ready` tells it", passing=(aiohttp.ClientError,))

    async def run(self, *command: str, status: int = 0) -> str:
        """Run a command, and repeat it while a bookie is too slow to answer. Returns what it prints.

        Raises: OtherChange.
        """
        secret = {"CLUSTER_SECRET_FILE": str(self.cluster.secret_file)}

        async def answered() -> Result | None:
            done = await asyncio.to_thread(CliRunner(env=secret).invoke, cli, command)
            return None if SILENT in done.output else done

        done = await until(answered, f"every bookie answers `{' '.join(command[:2])}`")
        assert done is not None
        if done.output.startswith("database-went-back: "):
            raise OtherChange(done.output)
        assert done.exit_code == status, done.output
        return done.stdout if status == 0 else done.output

    async def run_rebuild(self, *options: str) -> str:
        """The report of a rebuild."""
        url = self.cluster.url(METADATA)
        return await self.run("metadata", "rebuild", "--metadata", url, "--json", *options)

    async def missing(self) -> list[str]:
        _, state = await self.got(METADATA, "/v1/witnesses")
        return [found["witness"] for found in state["missing"]]

    async def accept(self, *, rebuilds: bool = True) -> None:
        """As an operator, until nobody tells of anything more. Rows are rebuilt first (rule 18d)."""
        url = self.cluster.url(METADATA)

        async def is_over() -> bool:
            if missing := await self.missing():
                if rebuilds:
                    await self.run_rebuild()
                await self.run("cluster", "accept", *missing, "--metadata", url)
            return (await self.got(METADATA, "/health/ready"))[0] == 200

        await until(is_over, "the loss is accepted", passing=(OtherChange,))


@contextlib.asynccontextmanager
async def world_of(stores: Stores, *, bookies: int) -> AsyncIterator[World]:
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(scratch("ql-restored-"))
        enter = stack.enter_async_context
        cluster = await enter(running(stores, bookies=bookies, gateways=1, environment=SETTINGS))
        session = await enter(aiohttp.ClientSession())
        database = await asyncpg.connect(stores.postgres_dsn)
        stack.push_async_callback(database.close)
        yield World(cluster, stores, folder, session, database)


@pytest.fixture
async def world(stores: Stores) -> AsyncIterator[World]:
    async with world_of(stores, bookies=3) as made:
        yield made


async def test_a_restored_database_under_a_metadata_process_that_starts(world: World) -> None:
    """D4 and D5: the transaction was committed, and the ledgers created, after the dump."""
    cluster, database = world.cluster, world.database
    async with Client(*cluster.gateways) as client:
        await client.create_log("a-log")
        transaction = await client.begin("a-log")
        ledger = await client.create_ledger()
        await ledger.append(b"one")
        old = await dump(world.stores, world.folder / "old")
        known = {str(r["attempt"]) for r in await database.fetch("SELECT attempt FROM attempts")}
        written = await client.create_ledger()
        await written.append(b"two")
        await written.close()
        await transaction.commit()

        async def has_heard() -> bool:
            reported = (await world.got("bookie-1", "/v1/witnesses"))[1]["witnesses"]
            return not {witness[:36] for witness in reported} <= known

        await until(has_heard, "a bookie knows of a change that the dump lacks")

    # Only bookies know of it any more.
    for name in (GATEWAY, "autorecovery-1", METADATA):
        await cluster.kill(name)
    await restore(world.stores, old)
    await database.execute("UPDATE transactions SET expires_at = now() - interval '1 hour'")
    await world.restart(METADATA)
    await world.until_told()

    async def state() -> object:
        return await database.fetchval("SELECT state FROM transactions")

    await until(lambda: "expiry-put-off" in cluster.log(METADATA), "it would have expired by now")
    assert await state() == "OPEN"
    await world.restart(GATEWAY)
    shown = await world.run("cluster", "status", "--gateway", cluster.gateways[0])
    reported = re.findall(r"THE DATABASE WENT BACK: it lacks (\S+), held by \S", shown)
    shown = await world.run("cluster", "status", "--json", "--gateway", cluster.gateways[0])
    missing = [found["witness"] for found in json.loads(shown)["missing_witnesses"]]
    assert set(reported) <= set(missing)
    assert reported

    await world.accept()
    note = "INSERT INTO kept_ledgers SELECT $1, gen_random_uuid(), unnest($2::text[])"
    await database.execute(note, written.ledger_id, world.bookies)
    shown = await world.run("cluster", "status", "--gateway", cluster.gateways[0])
    assert (
        f"database lacks their metadata: 1 ({written.ledger_id} at bookie-1, bookie-2, bookie-3)"
        in shown
    )

    async with Client(*cluster.gateways) as client:
        await until(lambda: cluster.is_up(GATEWAY), "the gateway is ready")
        another = await client.create_ledger()
        assert another.ledger_id > written.ledger_id


async def test_a_deleted_ledger_restored_by_a_dump_is_unknown_to_readers(world: World) -> None:
    """D6. Bookies keep the ids of deleted ledgers (rule 16a), and neither have its entries nor deny them:
    no reader is told of an empty ledger, or of a lost entry.
    """
    cluster = world.cluster
    async with Client(*cluster.gateways) as client:
        ledger = await client.create_ledger()
        await ledger.append(b"one")
        await ledger.close()
        old = await dump(world.stores, world.folder / "old")
        await client.delete_ledger(ledger.ledger_id)
        path = f"/v1/ledgers/{ledger.ledger_id}"

        async def is_dropped() -> bool:
            found = [await world.got(name, path) for name in world.bookies]
            return all(status == 404 and held.get("deleted") for status, held in found)

        await until(is_dropped, "every bookie has dropped it")
    await restore(world.stores, old)
    await world.until_told()
    await world.restart(GATEWAY)  # the one before remembers the deletion

    for accepts in (False, True):
        if accepts:
            await world.accept(rebuilds=False)  # a rebuild would put the tombstone back
            await until(lambda: cluster.is_up(GATEWAY), "the gateway is ready")
        _, row = await world.got(GATEWAY, path)
        assert (row["state"], row["last_entry"]) == ("CLOSED", 0)
        status, problem = await world.got(GATEWAY, f"{path}/entries?from=0&to=0")
        assert (status, problem["code"]) == (503, "entry-unavailable")
        assert problem["detail"].count("unknown") == 3

    async with Client(*cluster.gateways) as client:
        await client.delete_ledger(ledger.ledger_id)
    status, problem = await world.got(GATEWAY, path)
    assert (status, problem["code"], problem["deleted"]) == (404, "no-such-ledger", True)


async def test_a_ledger_whose_members_all_changed_ends_where_it_ended(stores: Stores) -> None:
    """D3: the restored rows are OPEN and name two members that know of the first entries only. The loss is not
    accepted before the rows are rebuilt, so that nobody recovers by them. The writer lives through all of it.
    """
    async with world_of(stores, bookies=4) as world, Client(*world.cluster.gateways) as client:
        cluster = world.cluster
        ledger, kept, former = await twins(client)
        payloads = [b"%d" % number for number in range(40)]
        for each in (ledger, kept):
            await each.append_batch(payloads[:10])
        old = await dump(stores, world.folder / "old")

        for number, member in enumerate(former):
            await cluster.kill(member.partition("@")[0])
            for each in (ledger, kept):
                await each.append_batch(payloads[10 + 10 * number : 20 + 10 * number])
        await ledger.append_batch(payloads[30:])
        await ledger.close()
        for member in former:
            cluster.start(member.partition("@")[0])
        for member in former:
            await cluster.until_up(member.partition("@")[0])
        await restore(stores, old)
        await world.restart(METADATA)
        await world.until_told()
        # Appends to open ledgers go on; nothing new begins.
        await kept.append_batch(payloads[30:35])
        with pytest.raises(DatabaseWentBack):
            await client.create_ledger()

        async def acceptance() -> str:
            missing = await world.missing()
            accept = ["cluster", "accept", *missing, "--metadata", cluster.url(METADATA)]
            return await world.run(*accept, status=1)

        refused = await until(acceptance, "it is refused for the rows", passing=(OtherChange,))
        assert "rows of 2 ledgers are missing, or older than the bookies' copies" in refused
        assert "quorumlog metadata rebuild" in refused
        assert (await world.got(METADATA, "/health/ready"))[0] == 503
        row = json.loads(await world.run_rebuild("--dry-run"))
        assert row["ledgers"]["write"] == 2

        await world.accept()
        await until(lambda: cluster.is_up(GATEWAY), "the gateway is ready")

        reported = await ledger.recover()
        assert (reported["state"], reported["last_entry"]) == ("CLOSED", 39)
        assert [entry.payload async for entry in ledger.entries()] == payloads
        await kept.append_batch(payloads[35:])
        assert (await kept.close())["last_entry"] == 39
        assert [entry.payload async for entry in kept.entries()] == payloads


async def twins(client: Client) -> tuple[Ledger, Ledger, list[str]]:
    """Two ledgers with the same members, and these: of seven there are two, as four bookies make six pairs."""
    made: dict[frozenset[str], Ledger] = {}
    while True:
        ledger = await client.create_ledger(ensemble_size=2, write_quorum=2, ack_quorum=2)
        members = (await ledger.info())["fragments"][0]["bookies"]
        if twin := made.get(frozenset(members)):
            return twin, ledger, members
        made[frozenset(members)] = ledger
