"""What requests do to each other in the database: each test holds a row of theirs until all wait for it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import asyncpg
import pytest

from loadtest.stores import Stores, StoreServers
from quorumlog.errors import VersionConflict
from quorumlog.net.gateway_clients import LogClient, TransactionClient
from quorumlog.net.metadata_requests import new_attempt
from quorumlog.net.repair_client import RepairClient
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings
from quorumlog.protocol.quorum import Quorum
from quorumlog.wire.bodies import document_of
from quorumlog.wire.repair_bodies import RepairAdd
from services.metadata.database import Connection
from tests.metadata.support import DRAFT, WAITING, Service, serving
from tests.metadata.test_bookies import cookie
from tests.support.waiting import until

LOG = LogMetadata(name="a-log", settings=LogSettings(quorum=Quorum(3, 3, 2)))
LONG_S = 3600.0


@pytest.fixture
async def database(stores: Stores) -> AsyncIterator[Connection]:
    """A connection beside the service's."""
    connection = await asyncpg.connect(stores.postgres_dsn, connection_class=Connection)
    yield connection
    await connection.close()


async def waiting(database: Connection, count: int) -> None:
    """Until so many transactions of the service wait for locks."""

    async def are_there() -> bool:
        return bool(await database.fetchval(WAITING) >= count)

    await until(are_there, f"{count} wait")


@contextlib.asynccontextmanager
async def uncommitted(database: Connection, query: str, *values: object) -> AsyncIterator[None]:
    """A statement that others wait for until the end of the block, where it is committed."""
    async with database.transaction():
        await database.execute(query, *values)
        yield


async def test_waiters_in_another_database_of_the_server_are_not_counted(
    database: Connection, servers: StoreServers
) -> None:
    dsn = servers.fresh().postgres_dsn
    holder, waiter = [await asyncpg.connect(dsn, connection_class=Connection) for _ in range(2)]
    async with holder.transaction():
        await holder.execute("SELECT pg_advisory_xact_lock(1)")
        asked = asyncio.ensure_future(waiter.execute("SELECT pg_advisory_xact_lock(1)"))
        await waiting(holder, 1)
        assert await database.fetchval(WAITING) == 0
    await asked
    for connection in (holder, waiter):
        await connection.close()


@pytest.mark.parametrize(("app", "is_done"), [(None, False), ("app", False), ("app", True)])
async def test_a_begin_repeated_during_its_first_try_gets_the_same_transaction(
    service: Service, database: Connection, app: str | None, *, is_done: bool
) -> None:
    await LogClient(service.client).create(LOG)
    if is_done:
        transactions = TransactionClient(service.client)
        done, _ = await transactions.begin("a-log", app=app, version=9, expires_in_s=3600)
        await transactions.commit(done.id, (), None)
    drawn = new_attempt()
    version = None if app is None else 7
    body = {"id": drawn, "log": "a-log", "expires_in_s": 3600}
    state = "COMMITTED" if is_done else "OPEN"
    async with uncommitted(
        database,
        "INSERT INTO transactions (id, log, app, app_version, state, ttl_s, expires_at)"
        " VALUES ($1, 'a-log', $2, $3, $4, 3600, now() + interval '1 hour')",
        drawn,
        app,
        version,
        state,
    ):
        asked = asyncio.ensure_future(
            service.send("POST", "/v1/transactions", body | {"app": app, "version": version})
        )
        await waiting(database, 1)

    status, found = await asked

    assert (status, found.get("id"), found.get("state")) == (200, drawn, state)


async def test_an_id_taken_by_another_transaction_meanwhile_is_refused(
    service: Service, database: Connection
) -> None:
    await LogClient(service.client).create(LOG)
    drawn = new_attempt()
    async with uncommitted(
        database,
        "INSERT INTO transactions (id, log, ttl_s, expires_at)"
        " VALUES ($1, 'another-log', 3600, now() + interval '1 hour')",
        drawn,
    ):
        body = {"id": drawn, "log": "a-log", "expires_in_s": 3600}
        asked = asyncio.ensure_future(service.send("POST", "/v1/transactions", body))
        await waiting(database, 1)

    status, problem = await asked

    assert (status, problem["code"]) == (422, "invalid")


@pytest.mark.parametrize("rival", ["add", "delete", "delete its log"])
async def test_hurrying_all_repairs_locks_items_in_the_common_order(
    service: Service, database: Connection, rival: str
) -> None:
    """Each would hold what the other one waits for, and Postgres would end one of them."""
    has_log = rival == "delete its log"
    row = await service.client.create(replace(DRAFT, log="a-log") if has_log else DRAFT)
    _, closed = await service.client.cas(row.closed(last_entry=NO_ENTRY, length=0))
    assert closed is not None
    items = [
        {"ledger_id": row.ledger_id, "member": member, "ranges": [[0, 9]]}
        for member in ("b1@1", "b2@1", "b3@1")
    ]
    for number, item in enumerate((items[2], items[0], items[1])):
        assert (await service.send("POST", "/v1/repairs", {"items": [item]}))[0] == 204
        await database.execute(
            "UPDATE repairs SET next_try_at = now() + make_interval(hours => $2) WHERE member = $1",
            item["member"],
            number + 1,
        )
    hurry = service.send("POST", "/v1/repairs/hurry")
    if rival == "add":
        asked = (service.send("POST", "/v1/repairs", {"items": items}), hurry)
    else:
        path, version = f"/v1/ledgers/{row.ledger_id}", closed.version
        if has_log:
            named = replace(LOG, items=(LogItem(row.ledger_id, 0, None),))
            log, _ = await LogClient(service.client).create(named)
            path, version = "/v1/logs/a-log", log.version
        body = {"version": version, "attempt": new_attempt()}
        asked = (hurry, service.send("DELETE", path, body))
    asking = []
    async with uncommitted(database, "UPDATE repairs SET detail = 'x' WHERE member = 'b2@1'"):
        for count, one in enumerate(asked, 1):
            asking.append(asyncio.ensure_future(one))
            await waiting(database, count)

    assert [status for status, _ in await asyncio.gather(*asking)] == [204, 204]


async def test_a_claim_of_a_finished_item_clears_nothing_of_a_later_one(
    service: Service,
) -> None:
    """A try that was late, or a worker that was: the same process, and the next item of the place."""
    worker = RepairClient(service.client, "worker-1")
    row = await service.client.create(DRAFT)
    gap = RepairAdd(ledger_id=row.ledger_id, member="b1@1", ranges=((0, 9),))
    await worker.add([gap])
    (first,) = await worker.claim(lease_s=LONG_S)
    assert await worker.progress(first, first.ranges, lease_s=LONG_S) == ()
    await worker.add([gap])
    (second,) = await worker.claim(lease_s=LONG_S)

    with pytest.raises(VersionConflict):
        await worker.progress(first, first.ranges, lease_s=LONG_S)
    with pytest.raises(VersionConflict):
        await worker.fail(first, "too late")

    assert (await worker.list())[0] == (second,)


async def test_concurrent_decommissions_of_a_bookie_both_succeed(
    service: Service, database: Connection
) -> None:
    await service.client.put_cookie("b1", await cookie(service), version=None)
    asking = []
    async with uncommitted(
        database, "SELECT pg_advisory_xact_lock(hashtextextended('cookie b1', 0))"
    ):
        for count in (1, 2):
            asking.append(asyncio.ensure_future(service.send("DELETE", "/v1/bookies/b1/cookie")))
            await waiting(database, count)

    assert [status for status, _ in await asyncio.gather(*asking)] == [204, 204]
    assert (await service.client.bookies()).bookies == ()


async def test_a_bookie_that_ledgers_name_is_refused_its_decommission_without_a_lock_on_the_table(
    service: Service, database: Connection
) -> None:
    """Creates and ensemble changes write that table: they would wait for the count."""
    await service.client.put_cookie("b1", await cookie(service), version=None)
    row = await service.client.create(DRAFT)
    async with uncommitted(
        database,
        "UPDATE ledger_members SET incarnation = 2 WHERE ledger_id = $1 AND name = 'b3'",
        row.ledger_id,
    ):
        status, problem = await service.send("DELETE", "/v1/bookies/b1/cookie")

    assert (status, problem["ledgers"], problem["first"]) == (409, 1, [row.ledger_id])


async def test_the_loser_of_a_race_gets_the_row_under_any_default_isolation(
    stores: Stores, database: Connection
) -> None:
    name = await database.fetchval("SELECT current_database()")
    await database.execute(
        f"ALTER DATABASE \"{name}\" SET default_transaction_isolation TO 'repeatable read'"
    )
    async with serving(stores) as strict:
        row = await strict.client.create(DRAFT)
        body = {"row": document_of(row.in_recovery())}
        asking = []
        async with uncommitted(
            database, "SELECT FROM ledgers WHERE ledger_id = $1 FOR UPDATE", row.ledger_id
        ):
            for count in (1, 2):
                sent = strict.send(
                    "PUT", f"/v1/ledgers/{row.ledger_id}", body | {"attempt": new_attempt()}
                )
                asking.append(asyncio.ensure_future(sent))
                await waiting(database, count)

        answers = await asyncio.gather(*asking)

    assert sorted(status for status, _ in answers) == [200, 412]


async def test_a_bookie_that_starts_while_it_is_decommissioned_stays(
    service: Service, database: Connection
) -> None:
    client = service.client
    row = await client.put_cookie("b1", await cookie(service), version=None)
    async with uncommitted(
        database, "SELECT pg_advisory_xact_lock(hashtextextended('cookie b1', 0))"
    ):
        asked = asyncio.ensure_future(service.send("DELETE", "/v1/bookies/b1/cookie"))
        await waiting(database, 1)
        # It registers, as it does at each start, between the look at its liveness and the end.
        await database.execute("UPDATE cookies SET version = version + 1 WHERE name = 'b1'")

    status, problem = await asked

    assert (status, problem["bookie"]) == (409, "b1")
    assert [bookie.id for bookie in (await client.bookies()).bookies] == ["b1@1"]
    left = await client.cookie("b1")
    assert left == row.model_copy(update={"version": 2})
