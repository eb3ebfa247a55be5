"""Guards of the rows that no other test would miss; `make mutate` found them."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import asyncpg
import pytest

from loadtest.stores import Stores
from quorumlog.errors import InvalidRequest, NoSuchLedger
from quorumlog.net.gateway_clients import LogClient
from quorumlog.net.metadata_requests import new_attempt
from quorumlog.net.repair_client import RepairClient
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.log import LogItem, LogMetadata
from quorumlog.protocol.metadata import Fragment, Repair
from quorumlog.wire.bodies import document_of
from quorumlog.wire.repair_bodies import RepairAdd
from services.autorecovery.drains import drain_of
from services.metadata.database import Connection
from tests.metadata.support import DRAFT, WAITING, Service
from tests.metadata.test_at_once import LOG, LONG_S, uncommitted, waiting
from tests.metadata.test_bookies import beat, cookie
from tests.support.waiting import until


@pytest.fixture
async def database(stores: Stores) -> AsyncIterator[Connection]:
    """A connection beside the service's."""
    connection = await asyncpg.connect(stores.postgres_dsn, connection_class=Connection)
    yield connection
    await connection.close()


def gap(ledger_id: int, member: str) -> RepairAdd:
    return RepairAdd(ledger_id=ledger_id, member=member, ranges=((0, 9),))


# --- bookies ---------------------------------------------------------------------------------


async def test_of_two_bookies_that_register_at_once_under_one_name_one_is_refused(
    service: Service, database: Connection
) -> None:
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


async def test_a_bookie_that_lives_is_not_decommissioned_though_nothing_names_it(
    service: Service,
) -> None:
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
    _, marked = await client.cas(other.in_recovery())
    assert marked is not None
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


async def test_a_drain_says_whether_a_member_waits_for_a_repair_or_for_its_successors_copy(
    service: Service,
) -> None:
    client = service.client
    for name in ("b1", "b4"):
        await client.put_cookie(name, await cookie(service), version=None)
    await client.create(DRAFT)
    row = await client.create(DRAFT)
    _, closed = await client.cas(row.closed(last_entry=4, length=9))
    assert closed is not None
    _, marked = await client.cas(closed.with_repair(Repair(0, "b1@1", "b4@1")))
    assert marked is not None
    waits = [await drain_of(name, client) for name in ("b1", "b4")]
    _, placed = await client.cas(marked.with_member_replaced(0, "b1@1", "b4@1"))
    assert placed is not None
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
    why = "its place is given away; kept until its successor has a copy of the row"
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
        _, now = await client.cas(made.closed(last_entry=NO_ENTRY, length=0))
        assert now is not None
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


async def test_a_ledger_that_is_being_deleted_is_not_named_by_a_log(
    service: Service, database: Connection
) -> None:
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
