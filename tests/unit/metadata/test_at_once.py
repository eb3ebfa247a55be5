"""What requests do to each other in the database: each test holds a row of theirs until all wait for it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import asyncpg
import pytest

from loadtest.stores import Stores, StoreServers
from quorumlog.errors import InvalidRequest, NoSuchLedger, VersionConflict
from quorumlog.net.gateway_clients import LogClient, TransactionClient
from quorumlog.net.metadata_client import RepairClient
from quorumlog.net.metadata_requests import new_attempt
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings
from quorumlog.protocol.metadata import Fragment, Repair
from quorumlog.protocol.quorum import Quorum
from quorumlog.wire.bodies import document_of
from quorumlog.wire.repair_bodies import RepairAdd
from services.autorecovery.drains import drain_of
from services.metadata.database import Connection
from tests.support.database import connected
from tests.support.waiting import until
from tests.unit.metadata.support import DRAFT, WAITING, Service, serving, swapped
from tests.unit.metadata.test_bookies import beat, cookie

LOG = LogMetadata(name="a-log", settings=LogSettings(quorum=Quorum(3, 3, 2)))
LONG_S = 3600.0


@pytest.fixture
async def database(stores: Stores) -> AsyncIterator[Connection]:
    """A connection beside the service's."""
    async with connected(stores) as connection:
        yield connection


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


async def test_an_id_taken_meanwhile_is_refused(service: Service, database: Connection) -> None:
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
    closed = await swapped(service.client, row.closed(last_entry=NO_ENTRY, length=0))
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


async def test_a_claim_of_a_finished_item_clears_nothing_of_a_later_one(service: Service) -> None:
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


async def test_a_races_loser_gets_the_row_anyhow(stores: Stores, database: Connection) -> None:
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


async def test_a_starting_bookie_stays(service: Service, database: Connection) -> None:
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


# --- guards that no other test would miss: `make mutate` found them ------------------------------


def gap(ledger_id: int, member: str) -> RepairAdd:
    return RepairAdd(ledger_id=ledger_id, member=member, ranges=((0, 9),))


# --- bookies ---------------------------------------------------------------------------------


async def test_of_two_equal_names_one_is_refused(service: Service, database: Connection) -> None:
    """Rule 15: neither finds a row that it could compare with, so they take turns."""
    body = {"cookie": (await cookie(service)).model_dump(mode="json")}
    asking = []
    transaction = database.transaction()
    await transaction.start()
    await database.execute("INSERT INTO cookies (name, version, cookie) VALUES ('b1', 1, '{}')")
    for count in (1, 2):
        sent = service.send("PUT", "/v1/bookies/b1/cookie", body | {"attempt": new_attempt()})
        asking.append(asyncio.ensure_future(sent))
        await waiting(database, count)
    await transaction.rollback()

    answers = await asyncio.gather(*asking)

    assert sorted(status for status, _ in answers) == [200, 412]
    row = await service.client.cookie("b1")
    assert row is not None
    assert row.version == 1


async def test_a_living_bookie_that_nothing_names_is_not_decommissioned(service: Service) -> None:
    row = await service.client.put_cookie("b1", await cookie(service), version=None)
    await service.client.send_bookie_heartbeat("b1", beat())

    status, problem = await service.send("DELETE", "/v1/bookies/b1/cookie")

    assert (status, problem["bookie"]) == (409, "b1")
    assert await service.client.cookie("b1") == row


async def test_what_names_a_bookie_is_told_of_that_bookie_only(service: Service) -> None:
    client, worker = service.client, RepairClient(service.client, "worker")
    for name in ("b1", "b4"):
        await client.put_cookie(name, await cookie(service), version=None)
    one = await client.create(DRAFT)
    other = await client.create(replace(DRAFT, fragments=(Fragment(0, ("b4@1", "b2@1", "b3@1")),)))
    await swapped(client, other.in_recovery())
    await worker.add([gap(one.ledger_id, "b2@1"), gap(one.ledger_id, "b1@1")])
    await worker.add([gap(other.ledger_id, "b4@1")])
    for item in await worker.claim(lease_s=LONG_S, limit=9):
        await worker.fail(item, f"{item.member} of {item.ledger_id}")

    unharmed = await client.create(DRAFT)

    for name, row, state in (("b1", one, "OPEN"), ("b4", other, "IN_RECOVERY")):
        uses = await client.uses(name)
        assert (uses.ledgers, uses.repairs) == (2 if name == "b1" else 1, 1)
        use, *others = uses.first
        assert [(o.ledger_id, o.failures) for o in others] == (
            [(unharmed.ledger_id, 0)] if name == "b1" else []
        )
        assert (use.ledger_id, use.member, use.state) == (row.ledger_id, f"{name}@1", state)
        assert (use.failures, use.detail) == (1, f"{name}@1 of {row.ledger_id}")


async def test_a_drain_says_what_each_member_waits_for(service: Service) -> None:
    client = service.client
    for name in ("b1", "b4"):
        await client.put_cookie(name, await cookie(service), version=None)
    await client.create(DRAFT)
    row = await client.create(DRAFT)
    closed = await swapped(client, row.closed(last_entry=4, length=9))
    marked = await swapped(client, closed.with_repair(Repair(0, "b1@1", "b4@1")))
    waits = [await drain_of(name, client) for name in ("b1", "b4")]
    await swapped(client, marked.with_member_replaced(0, "b1@1", "b4@1"))
    kept = await drain_of("b1", client)
    worker = RepairClient(client, "worker")
    await worker.add([gap(row.ledger_id, "b1@1")])
    (item,) = await worker.claim(lease_s=LONG_S, limit=9)
    await worker.fail(item, "b4 is down")
    failed = await drain_of("b1", client)

    assert [left.reason for left in waits[0].first] == [
        "waits for its writer to replace the bookie",
        "waits for a worker",
    ]
    assert [left.reason for left in waits[1].first] == [
        "is the target of a repair that is under way"
    ]
    why = "it was replaced, and is kept until its successor has a copy of the metadata"
    assert kept.first[1].reason == why
    assert failed.first[1].reason == f"{why}: b4 is down (1 tries)"
    assert not failed.done


# --- repairs ---------------------------------------------------------------------------------


async def test_of_two_items_of_one_ledger_each_is_claimed_by_itself(service: Service) -> None:
    worker = RepairClient(service.client, "worker-1")
    row = await service.client.create(DRAFT)
    await worker.add([gap(row.ledger_id, "b1@1"), gap(row.ledger_id, "b2@1")])

    first = await worker.claim(lease_s=LONG_S, limit=1)
    second = await RepairClient(service.client, "worker-2").claim(lease_s=LONG_S, limit=1)

    assert [item.member for item in first + second] == ["b1@1", "b2@1"]
    assert [item.worker for item in (await worker.list())[0]] == ["worker-1", "worker-2"]


async def test_what_is_claimed_is_neither_hurried_nor_waiting(service: Service) -> None:
    """Else two workers would copy the same, and the first one's work be lost."""
    worker, other = (RepairClient(service.client, f"worker-{n}") for n in (1, 2))
    row = await service.client.create(DRAFT)
    await worker.add([gap(row.ledger_id, "b1@1"), gap(row.ledger_id, "b2@1")])
    for _ in range(3):  # the pauses become longer than a test
        for item in await until(lambda: worker.claim(lease_s=LONG_S, limit=9), "both are free"):
            await worker.fail(item, "away")
        await worker.hurry()
    (_, second) = await worker.claim(lease_s=LONG_S, limit=9)
    await worker.fail(second, "away")
    assert (await worker.summary()).waiting == 1

    await worker.hurry()

    claimed = await other.claim(lease_s=LONG_S, limit=9)
    assert [item.member for item in claimed] == [second.member]
    assert (await worker.summary()).waiting == 0


# --- logs ------------------------------------------------------------------------------------


async def test_each_log_has_a_row_of_its_own(service: Service) -> None:
    logs = LogClient(service.client)
    names = ("a-log", "b-log", "c-log")
    for name in names:
        await logs.create(LogMetadata(name=name, settings=LOG.settings))

    assert [(await logs.get(name)).name for name in names] == list(names)
    won, now = await logs.cas((await logs.get("b-log")).opened("me"))
    assert won
    assert [(await logs.get(name)).version for name in names] == [1, 2, 1]
    assert now is not None
    assert now.name == "b-log"


async def test_a_change_of_a_log_names_one_version_and_not_two(service: Service) -> None:
    logs = LogClient(service.client)
    row, _ = await logs.create(LOG)
    body = {
        "row": document_of(row.opened("me")),
        "attempt": new_attempt(),
    }

    status, problem = await service.send("PUT", "/v1/logs/a-log", body, headers={"If-Match": '"9"'})

    assert (status, problem["code"]) == (422, "invalid")
    assert (await logs.get("a-log")).version == 1
    status, _ = await service.send("PUT", "/v1/logs/a-log", body, headers={"If-Match": '"1"'})
    assert status == 200


async def test_what_one_worker_finishes_or_fails_is_its_own_item(service: Service) -> None:
    worker = RepairClient(service.client, "worker")
    row = await service.client.create(DRAFT)
    await worker.add([gap(row.ledger_id, f"b{number}@1") for number in (1, 2, 3)])
    first, second, third = await worker.claim(lease_s=LONG_S, limit=9)

    assert await worker.progress(first, first.ranges, lease_s=LONG_S) == ()
    await worker.fail(second, "away")

    left, _ = await worker.list()
    assert [(item.member, item.failures) for item in left] == [("b2@1", 1), ("b3@1", 0)]
    assert left[1] == third


async def test_a_deleted_log_takes_no_ledger_with_it_that_is_not_its_own(service: Service) -> None:
    client, logs = service.client, LogClient(service.client)
    worker = RepairClient(client, "worker")
    row, _ = await logs.create(LOG)
    closed = []
    for log in ("a-log", None):
        made = await client.create(replace(DRAFT, log=log))
        now = await swapped(client, made.closed(last_entry=NO_ENTRY, length=0))
        await worker.add([gap(now.ledger_id, "b1@1")])
        closed.append(now)
    own, other = closed
    _, row_now = await logs.cas(replace(row, items=(LogItem(own.ledger_id, 0, -1),)))
    assert row_now is not None

    assert await logs.delete(row_now) is None

    assert await client.get(other.ledger_id) == other
    assert (await client.list(bookie="b1", metadata={"colour": "red"}))[0] == [other]
    assert [item.ledger_id for item in (await worker.list())[0]] == [other.ledger_id]
    with pytest.raises(NoSuchLedger):
        await client.get(own.ledger_id)


async def test_no_log_names_a_ledger_being_deleted(service: Service, database: Connection) -> None:
    """Rule 22: the row that names it waits for the deletion, and then finds none."""
    logs = LogClient(service.client)
    row, _ = await logs.create(LOG)
    made = await service.client.create(replace(DRAFT, log="a-log"))
    async with uncommitted(
        database, "UPDATE ledgers SET body = NULL WHERE ledger_id = $1", made.ledger_id
    ):
        named = logs.cas(replace(row, items=(LogItem(made.ledger_id, 0),)))
        naming = asyncio.ensure_future(named)

        async def is_decided() -> bool:
            return naming.done() or bool(await database.fetchval(WAITING))

        await until(is_decided, "it waits, or is done")

    with pytest.raises((InvalidRequest, NoSuchLedger)):
        await naming
    assert (await logs.get("a-log")).items == ()
