"""A metadata process that starts asks the bookies what they know of the database (rule 18a).

Services, bookies' processes, servers and dumps are real.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from redis.asyncio import Redis
from typer.testing import CliRunner

from loadtest.stores import Stores
from loadtest.waiting import stop
from quorumlog.cli.commands import app as cli
from quorumlog.errors import DatabaseWentBack, MetadataUnavailable
from quorumlog.net.gateway_clients import LogClient, TransactionClient
from quorumlog.protocol.ids import ASSIGNED_ID_END
from quorumlog.wire.bodies import BookieWitnesses, witness_of
from services.metadata import inquiry
from services.metadata.database import Connection, Database
from tests.support.database import connected
from tests.support.waiting import until
from tests.unit.bookie.support import run_of
from tests.unit.bookie.test_process import Process
from tests.unit.metadata.restores import dump, restore
from tests.unit.metadata.support import DRAFT, PATIENT_S, Service, await_bookies, is_ready, serving
from tests.unit.metadata.test_bookies import cookie
from tests.unit.metadata.test_went_back import LOG, NOBODY, is_reported, newcomer, refused

RARELY: Final = "60"
"""The interval at which a bookie tells by itself what it knows: later than all that a test looks at."""


@contextlib.asynccontextmanager
async def bookie_at(service: Service, folder: Path) -> AsyncIterator[Process]:
    """A bookie that is registered, and goes on when the service ends."""
    async with aiohttp.ClientSession() as session:
        bookie = Process(service, folder, session)
        try:
            bookie.start(HEARTBEAT_S=RARELY)
            await bookie.ready()
            yield bookie
        finally:
            assert bookie.process is not None
            stop(bookie.process, signal.SIGKILL, 30)


async def told_by(bookie: Process) -> BookieWitnesses:
    async with bookie.session.get(f"{bookie.url}/v1/witnesses") as answer:
        return BookieWitnesses.model_validate_json(await answer.read())


async def hold(bookie: Process, ledger_id: int) -> None:
    """Give the bookie an entry of a ledger."""
    url = f"{bookie.url}/v1/ledgers/{ledger_id}/entries"
    async with bookie.session.post(url, data=run_of(ledger_id, [0]).body) as answer:
        assert answer.status == 200, await answer.text()


async def tokens(database: Any) -> set[str]:
    return {
        str(record["attempt"]) for record in await database.fetch("SELECT attempt FROM attempts")
    }


async def learns(bookie: Process, old: set[str]) -> None:
    """The bookie starts anew, and keeps a witness that is not among these tokens."""
    await bookie.kill()
    bookie.start(HEARTBEAT_S=RARELY)
    await bookie.ready()

    def has_kept() -> bool:
        kept = bookie.data / "witnesses"
        return kept.exists() and not {line[:36] for line in kept.read_text().split()} <= old

    await until(has_kept, "the bookie keeps a witness that the dump lacks")


@contextlib.asynccontextmanager
async def restored(
    stores: Stores, folder: Path, change: Callable[[Service, Process], Awaitable[None]]
) -> AsyncIterator[tuple[Process, int]]:
    """A bookie that knows of a change, over a database that was dumped before it; and the port of the
    metadata service, which has ended.
    """
    async with contextlib.AsyncExitStack() as stack:
        async with serving(stores) as service:
            bookie = await stack.enter_async_context(bookie_at(service, folder))
            await LogClient(service.client).create(LOG)
            await TransactionClient(service.client).begin(
                "a-log", app=None, version=None, expires_in_s=3600
            )
            old = await dump(stores, folder / "old")
            async with connected(stores) as database:
                known = await tokens(database)
            await change(service, bookie)
            await learns(bookie, known)
        await restore(stores, old)
        yield bookie, int(service.url.rpartition(":")[2])


async def creates(service: Service, bookie: Process) -> None:
    """Two ledgers, of which the bookie holds the first one."""
    row = await service.client.create(DRAFT)
    await service.client.create(DRAFT)
    await hold(bookie, row.ledger_id)


# --- a start --------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def committed(
    stores: Stores, folder: Path
) -> AsyncIterator[tuple[Process, int, Callable[[], Awaitable[object]]]]:
    """D4: committed after the dump, and expired by the clock when the restored database is served; the
    bookie that knows it, the service's port, and the transaction's state.
    """

    async def commit(service: Service, _bookie: Process) -> None:
        async with connected(stores) as database:
            begun = await database.fetchval("SELECT id FROM transactions")
        await TransactionClient(service.client).commit(begun, (), None)

    async with restored(stores, folder, commit) as (bookie, port), connected(stores) as database:
        await database.execute("UPDATE transactions SET expires_at = now() - interval '1 hour'")

        async def state() -> object:
            return await database.fetchval("SELECT state FROM transactions")

        yield bookie, port, state


async def test_after_a_dump_a_committed_transaction_stays(stores: Stores, folder: Path) -> None:
    """At another port: there the bookie can be asked, and cannot present its witnesses before that."""
    async with (
        committed(stores, folder) as (_, _, state),
        serving(stores, wait=False, expiry_every_s=0.01) as service,
    ):

        async def is_settled() -> bool:
            return await is_reported(service) or await state() != "OPEN"

        await until(is_settled, "`ready` tells it", passing=(aiohttp.ClientError,))
        async with newcomer(service) as client:
            await refused(client.create(DRAFT))
        assert await state() == "OPEN", "a committed transaction was expired"


async def test_no_transaction_expires_before_bookies_started(stores: Stores, folder: Path) -> None:
    """D4 after a power cut: the bookies are up later than the metadata service."""
    async with committed(stores, folder) as (bookie, port, state):
        await bookie.kill()
        async with serving(stores, port=port, expiry_every_s=0.01) as service:
            await service.client.create(DRAFT)
            bookie.start(HEARTBEAT_S=RARELY)

            async def is_settled() -> bool:
                return await is_reported(service) or await state() != "OPEN"

            await until(is_settled, "`ready` tells it")
            assert await state() == "OPEN", "a committed transaction was expired"


async def test_a_bookie_that_stays_away_keeps_no_transaction_alive(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inquiry, "_WAIT_S", 0.1)
    monkeypatch.setattr(inquiry, "_AGAIN_S", 0.01)
    async with serving(stores) as service:
        await service.client.put_cookie("b1", await cookie(service), version=None)
    async with serving(stores, expiry_every_s=0.01) as service, connected(stores) as database:
        await LogClient(service.client).create(LOG)
        transactions = TransactionClient(service.client)
        begun, _ = await transactions.begin("a-log", app=None, version=None, expires_in_s=3600)
        await database.execute("UPDATE transactions SET expires_at = now() - interval '1 hour'")

        async def is_over() -> bool:
            return not (await transactions.get(begun.id)).is_open

        await until(is_over, "it expires")


async def test_a_start_changes_nothing_before_bookies_answer(stores: Stores, folder: Path) -> None:
    """Nothing is changed or proven while a bookie is asked; plain reads go on."""
    async with contextlib.AsyncExitStack() as stack:
        await_bookies(stack.enter_context(pytest.MonkeyPatch.context()))
        async with serving(stores) as service:
            bookie = await stack.enter_async_context(bookie_at(service, folder))
            row = await service.client.create(DRAFT)
        assert bookie.process is not None
        bookie.process.send_signal(signal.SIGSTOP)
        async with serving(stores, wait=False) as service, connected(stores) as database:

            async def is_read() -> bool:
                status, _ = await service.send("GET", f"/v1/ledgers/{row.ledger_id}")
                return status == 200

            await until(is_read, "rows are read", passing=(aiohttp.ClientError,))
            known = await tokens(database)
            for method, path in (
                ("GET", "/health/ready"),
                ("POST", "/v1/witnesses"),
                ("POST", "/v1/repairs/hurry"),
            ):
                status, problem = await service.send(method, path)
                assert (status, problem.get("code")) == (503, "metadata-unavailable"), path
            assert await tokens(database) == known

            bookie.process.send_signal(signal.SIGCONT)
            await until(lambda: is_ready(service), "the bookie has answered")
            await service.client.create(DRAFT)


async def test_a_silent_bookie_delays_a_start_and_does_not_prevent_it(
    stores: Stores, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(inquiry, "_ASK_S", 0.1)
    async with contextlib.AsyncExitStack() as stack:
        async with serving(stores) as service:
            bookie = await stack.enter_async_context(bookie_at(service, folder))
        assert bookie.process is not None
        bookie.process.send_signal(signal.SIGSTOP)
        async with serving(stores) as service:
            await service.client.create(DRAFT)

    assert "bookies-silent" in {record.message for record in caplog.records}


async def test_a_bookie_waiting_for_metadata_tells_witnesses(stores: Stores, folder: Path) -> None:
    """After a power cut both start at once, and neither may wait for the other."""
    async with contextlib.AsyncExitStack() as stack:
        async with serving(stores) as service, connected(stores) as database:
            bookie = await stack.enter_async_context(bookie_at(service, folder))
            await hold(bookie, 7)
            known = await tokens(database)
            await service.client.create(DRAFT)
            await learns(bookie, known)
        await bookie.kill()
        bookie.start(HEARTBEAT_S=RARELY)

        async def has_told() -> bool:
            reported = await told_by(bookie)
            return reported.highest_ledger == 7 and set(reported.witnesses) == set(
                (bookie.data / "witnesses").read_text().split()
            )

        await until(has_told, "it tells", passing=(aiohttp.ClientError,))
        async with bookie.session.get(f"{bookie.url}/health/ready") as ready:
            assert ready.status == 503


async def test_unnamed_bookies_are_found_by_their_heartbeats(stores: Stores, folder: Path) -> None:
    """Registered after the dump. Redis keeps the URLs, however long the service was away."""
    async with contextlib.AsyncExitStack() as stack:
        async with serving(stores) as service:
            old = await dump(stores, folder / "old")
            bookie = await stack.enter_async_context(bookie_at(service, folder))
            await learns(bookie, set())
            async with Redis.from_url(stores.redis_url) as redis:
                for key in await redis.keys("quorumlog:bookie:*"):
                    await redis.delete(key)
        await restore(stores, old)
        port = int(service.url.rpartition(":")[2])
        async with serving(stores, port=port, wait=False) as service:
            await until(lambda: is_reported(service), "it tells", passing=(aiohttp.ClientError,))
            _, state = await service.send("GET", "/v1/witnesses")
            assert {missing["holder"] for missing in state["missing"]} == {"b1"}


async def test_rubbish_where_a_bookie_should_be_prevents_no_start(stores: Stores) -> None:
    async with serving(stores) as service:
        url = service.url  # somebody else answers there
        for name, where in (("b1", url), ("b2", "rubbish"), ("b3", "http://127.0.0.1:1")):
            wanted = await cookie(service, url=where)
            await service.client.put_cookie(name, wanted, version=None)
        async with Redis.from_url(stores.redis_url) as redis:
            await redis.hset("quorumlog:bookie-urls", b"\xff", b"\xff")
        async with serving(stores) as another:
            await another.client.create(DRAFT)
        async with Redis.from_url(stores.redis_url) as redis:
            await redis.set("quorumlog:bookie-urls", "no hash")
        async with serving(stores) as another:
            await another.client.create(DRAFT)


# --- ids of ledgers that bookies hold ---------------------------------------------------------


async def test_a_start_assigns_no_id_that_a_bookie_holds(stores: Stores, folder: Path) -> None:
    """Ids that clients chose, up to the last one, exhaust no sequence."""
    async with contextlib.AsyncExitStack() as stack:
        async with serving(stores) as service:
            bookie = await stack.enter_async_context(bookie_at(service, folder))
            for ledger_id in (41, ASSIGNED_ID_END, ASSIGNED_ID_END + 1):
                await hold(bookie, ledger_id)
        async with serving(stores) as service:
            assert (await service.client.create(DRAFT)).ledger_id == 42


async def test_the_sequence_of_ids_never_goes_back(stores: Stores, folder: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with serving(stores) as service:
            bookie = await stack.enter_async_context(bookie_at(service, folder))
            await hold(bookie, 1)
        async with serving(stores) as service:
            # Of an unused sequence the last value is the next one.
            first = [(await service.client.create(DRAFT)).ledger_id for _ in range(3)]
        async with serving(stores) as service:
            assert first == [2, 3, 4]
            assert (await service.client.create(DRAFT)).ledger_id == 5


async def test_an_acceptance_waits_for_all_bookies_not_lost(stores: Stores, folder: Path) -> None:
    """D5: what a silent bookie holds is not known, so that its ids would be assigned again."""
    async with restored(stores, folder, creates) as (bookie, port):
        held = (await told_by(bookie)).highest_ledger
        assert held is not None
        async with serving(stores, port=port, wait=False) as service:
            await until(lambda: is_reported(service), "it tells", passing=(aiohttp.ClientError,))
            _, state = await service.send("GET", "/v1/witnesses")
            missing = [found["witness"] for found in state["missing"]]
            await bookie.kill()

            accept = {"witnesses": missing}
            status, problem = await service.send("POST", "/v1/witnesses/accept", accept)
            assert (status, problem.get("code")) == (503, "not-enough-bookies")
            assert problem["bookies"] == ["b1"]
            assert await is_reported(service)

            accept = {"witnesses": missing, "lost": ["b2"]}
            status, _ = await service.send("POST", "/v1/witnesses/accept", accept)
            assert status == 503
            command = ["cluster", "accept", *missing, "--metadata", service.url]
            done = await asyncio.to_thread(CliRunner().invoke, cli, [*command, "--lost", "b1@1"])
            assert (done.exit_code, done.stdout) == (
                0,
                f"accepted as lost: {len(missing)}; still missing: 0\n",
            )
            assert await is_ready(service)


async def test_after_an_acceptance_no_held_id_is_assigned(stores: Stores, folder: Path) -> None:
    """D5: the bookie was asked at the start, and holds another ledger since."""
    async with (
        restored(stores, folder, creates) as (bookie, port),
        serving(stores, port=port, wait=False) as service,
    ):
        await until(lambda: is_reported(service), "it tells", passing=(aiohttp.ClientError,))
        await hold(bookie, 23)
        _, state = await service.send("GET", "/v1/witnesses")
        accept = {"witnesses": [found["witness"] for found in state["missing"]]}
        status, state = await service.send("POST", "/v1/witnesses/accept", accept)
        assert (status, state["missing"]) == (200, [])
        async with newcomer(service) as client:
            assert (await client.create(DRAFT)).ledger_id == 24


# --- what an acceptance leaves ------------------------------------------------------------------


async def test_rows_older_than_an_accepted_loss_stay(stores: Stores) -> None:
    """The lost history may have committed the open transaction, and put the unnamed ledger onto its log."""
    async with serving(stores, expiry_every_s=0.05) as service, connected(stores) as database:
        logs, transactions = LogClient(service.client), TransactionClient(service.client)
        await logs.create(LOG)
        made = []

        async def make() -> None:
            begun, _ = await transactions.begin("a-log", app=None, version=None, expires_in_s=3600)
            unnamed = await service.client.create(replace(DRAFT, log="a-log"))
            made.append((begun.id, unnamed.ledger_id))

        await make()
        lost = witness_of(await service.client.cluster_id(), NOBODY)
        service.client.witnesses = (lost,)
        await refused(service.client.confirm())
        status, _ = await service.send("POST", "/v1/witnesses/accept", {"witnesses": [lost]})
        assert status == 200
        await make()
        await database.execute("UPDATE transactions SET expires_at = now() - interval '1 hour'")
        await database.execute("UPDATE unnamed_ledgers SET since = now() - interval '1 hour'")

        async def is_expired() -> bool:
            return not (await transactions.get(made[1][0])).is_open

        await until(is_expired, "a transaction that is younger than the acceptance expires")
        assert (await transactions.get(made[0][0])).is_open
        assert await logs.orphans(older_than_s=60) == (made[1][1],)
        await transactions.abort(made[0][0])
        assert not (await transactions.get(made[0][0])).is_open, "by request it ends"


@pytest.mark.parametrize("is_reported", [True, False])
async def test_what_bookies_told_meanwhile_counts(stores: Stores, *, is_reported: bool) -> None:
    """A change looks at the database, and bookies tell what it lacks before it has seen."""
    async with serving(stores):  # which makes the tables
        pass
    database = Database(stores.postgres_dsn, connections_max=2, deadline_s=PATIENT_S)
    database.is_open = True
    memory = database.memory
    compare = memory.compare

    def meanwhile(wanted: Collection[str], found: Iterable[str], *, holder: str) -> None:
        if is_reported:
            with contextlib.suppress(DatabaseWentBack):
                compare({"a token that the database lacks"}, (), holder="b1")
        database.asked_about = database.server
        compare(wanted, found, holder=holder)

    memory.compare = meanwhile  # type: ignore[method-assign]

    async def change(connection: Connection) -> None:
        await connection.execute("CREATE TABLE changed ()")

    try:
        with pytest.raises(DatabaseWentBack if is_reported else MetadataUnavailable):
            await database.transact(change)
        async with connected(stores) as connection:
            assert await connection.fetchval("SELECT to_regclass('changed')") is None
    finally:
        await database.close()
