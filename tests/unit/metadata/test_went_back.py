"""A database that went back is noticed by whoever knows more, and nothing is deleted by it (rule 18a).

The servers and the dumps are real. What each test asserts is what a bookie, a gateway or a second
metadata process rests on.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import pytest

from loadtest.stores import Stores
from quorumlog import header
from quorumlog.errors import DatabaseWentBack, NoSuchLedger, QuorumLogError
from quorumlog.net import metadata_requests
from quorumlog.net.gateway_clients import LogClient, TransactionClient
from quorumlog.net.metadata_client import MetadataClient, RepairClient
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.row_copy import RowName, name_of
from quorumlog.wire.bodies import HELD_MAX, WITNESSES_MAX, Cookie, LedgerProof, witness_of
from services.metadata import memory as memory_module
from services.metadata.memory import Memory
from tests.support.database import connected
from tests.support.waiting import until
from tests.unit.metadata.restores import Copy, dump, restore
from tests.unit.metadata.support import (
    DRAFT,
    PATIENT_S,
    WAITING,
    Service,
    is_ready,
    serving,
    swapped,
)

LOG = LogMetadata(name="a-log", settings=LogSettings(quorum=Quorum(3, 3, 2)))
NOBODY: Final = "00000000-0000-4000-8000-000000000000"
MEMBERS: Final = ("b1", "b2", "b3")
"""Of DRAFT: no process has their names, so an operator names them as lost where that matters."""


@pytest.fixture
async def database(stores: Stores) -> AsyncIterator[Any]:
    """A connection beside the service's."""
    async with connected(stores) as connection:
        yield connection


@contextlib.asynccontextmanager
async def newcomer(service: Service) -> AsyncIterator[MetadataClient]:
    """A client that knows nothing."""
    async with contextlib.AsyncExitStack() as stack:
        client = MetadataClient([service.url], service.session, deadline_s=PATIENT_S)
        stack.push_async_callback(client.close)
        yield client


async def cookie(client: MetadataClient) -> Cookie:
    return Cookie(incarnation=1, cluster_id=await client.cluster_id(), instance="data")


async def closed(client: MetadataClient, draft: LedgerMetadata = DRAFT) -> LedgerMetadata:
    """A CLOSED ledger."""
    row = await client.create(draft)
    return await swapped(client, row.closed(last_entry=-1, length=0))


async def is_reported(service: Service) -> bool:
    """Whether `ready` says what happened."""
    status, problem = await service.send("GET", "/health/ready")
    return (status, problem.get("code")) == (503, "database-went-back")


async def refused(what: Awaitable[object]) -> None:
    with pytest.raises(DatabaseWentBack) as caught:
        await what
    assert not caught.value.retryable
    assert caught.value.status == 503


async def all_refused(client: MetadataClient, row: LedgerMetadata) -> None:
    """All on which a deletion rests, and all that changes."""
    logs, repairs = LogClient(client), RepairClient(client, "worker")
    transactions = TransactionClient(client)
    await refused(client.get(row.ledger_id, proof=True))
    await refused(logs.orphans(older_than_s=0))
    await refused(client.create(DRAFT))
    await refused(client.delete(row.ledger_id, version=row.version))
    await refused(logs.create(LOG))
    await refused(logs.delete_unnamed(row.ledger_id))
    await refused(transactions.begin("a-log", app=None, version=None, expires_in_s=60))
    await refused(client.put_cookie("b9", await cookie(client), version=None))
    await refused(repairs.claim(lease_s=1))
    await refused(repairs.take_lease("auditor", ttl_s=1))
    await refused(client.confirm())
    assert await client.cas(row) == (CasStatus.UNKNOWN, None)


async def test_a_restore_into_the_live_database_stops_all_deletions(
    service: Service, stores: Stores, folder: Path
) -> None:
    client = service.client
    row = await client.create(DRAFT)
    old = await dump(stores, folder / "old")
    status, now = await client.cas(row.with_ensemble(10, ("b1@1", "b2@1", "b4@1")))
    assert status is CasStatus.OK
    new = await dump(stores, folder / "new")

    # No connection breaks.
    await restore(stores, old)

    await until(lambda: is_reported(service), "`ready` tells it")
    async with newcomer(service) as other:
        for asked in (client, other):
            await all_refused(asked, row)
    assert await client.get(row.ledger_id) == row, "reads on which nothing rests go on"
    assert [found.ledger_id for found in (await client.list())[0]] == [row.ledger_id]
    async with service.session.get(f"{service.url}/metrics") as response:
        assert "quorumlog_metadata_missing_witnesses 1.0" in await response.text()

    await restore(stores, new)

    await until(lambda: is_ready(service), "the newest dump is back")
    assert await client.get(row.ledger_id, proof=True) == now
    await client.create(DRAFT)


async def test_a_witness_tells_a_start_of_a_restore(stores: Stores, folder: Path) -> None:
    async with serving(stores) as before:
        row = await closed(before.client)
        old = await dump(stores, folder / "old")
        await before.client.create(DRAFT)
        witnesses = before.client.witnesses
    await restore(stores, old)
    async with serving(stores) as service:
        assert await is_ready(service), "nobody has told it yet"
        service.client.witnesses = witnesses

        await all_refused(service.client, row)

        async with newcomer(service) as other:
            await all_refused(other, row)
        await until(lambda: is_reported(service), "`ready` tells it")


async def test_a_witness_tells_another_service_of_a_restore(stores: Stores, folder: Path) -> None:
    async with serving(stores) as one, serving(stores) as two:
        row = await closed(one.client)
        old = await dump(stores, folder / "old")
        holder = MetadataClient([one.url], one.session, deadline_s=PATIENT_S)
        await holder.create(DRAFT)
        assert not two.client.witnesses
        await restore(stores, old)

        holder.urls = [two.url]
        await all_refused(holder, row)
        await until(lambda: is_reported(two), "the second service tells it")


async def test_a_lost_witness_goes_to_each_service_in_turn(stores: Stores, folder: Path) -> None:
    async with serving(stores) as one, serving(stores) as two:
        old = await dump(stores, folder / "old")
        holder = MetadataClient([one.url, two.url], one.session, deadline_s=PATIENT_S)
        await holder.create(DRAFT)
        await restore(stores, old)

        for _ in range(2):
            await refused(holder.confirm())

        await until(lambda: is_reported(one), "the first service tells it")
        await until(lambda: is_reported(two), "the second service tells it")


async def test_who_learns_of_a_lost_change_tells_the_others(stores: Stores, folder: Path) -> None:
    async with serving(stores) as one, serving(stores) as two:
        old = await dump(stores, folder / "old")
        await one.client.create(DRAFT)
        await restore(stores, old)
        await until(lambda: is_reported(one), "the first service noticed it by itself")
        assert await is_ready(two)

        other = MetadataClient([one.url, two.url], one.session, deadline_s=PATIENT_S)
        for _ in range(2):
            await refused(other.create(DRAFT))

        await until(lambda: is_reported(two), "the second service tells it")


@dataclass(frozen=True)
class World:
    """What there is before the dump."""

    service: Service
    logs: LogClient
    transactions: TransactionClient
    row: LedgerMetadata
    closed: LedgerMetadata
    log: LogMetadata
    unnamed: LedgerMetadata
    begun: str

    async def create(self) -> None:
        await self.service.client.create(DRAFT)

    async def change(self) -> None:
        await self.service.client.cas(self.row.in_recovery())

    async def delete(self) -> None:
        await self.service.client.delete(self.closed.ledger_id, version=self.closed.version)

    async def create_log(self) -> None:
        await self.logs.create(replace(LOG, name="another"))

    async def change_log(self) -> None:
        named = replace(self.log, items=(LogItem(self.unnamed.ledger_id, 0),))
        assert (await self.logs.cas(named))[0]

    async def delete_log(self) -> None:
        assert await self.logs.delete(self.log) is None

    async def delete_unnamed(self) -> None:
        await self.logs.delete_unnamed(self.unnamed.ledger_id)

    async def begin(self) -> None:
        await self.transactions.begin("a-log", app=None, version=None, expires_in_s=60)

    async def commit(self) -> None:
        await self.transactions.commit(self.begun, (), None)

    async def abort(self) -> None:
        await self.transactions.abort(self.begun)

    async def put_cookie(self) -> None:
        client = self.service.client
        await client.put_cookie("b9", await cookie(client), version=None)

    async def retire(self) -> None:
        await self.service.client.retire("b8")


async def world_of(service: Service) -> World:
    client = service.client
    logs, transactions = LogClient(client), TransactionClient(client)
    log, _ = await logs.create(LOG)
    begun, _ = await transactions.begin("a-log", app=None, version=None, expires_in_s=3600)
    await client.put_cookie("b8", await cookie(client), version=None)
    return World(
        service,
        logs,
        transactions,
        await client.create(DRAFT),
        await closed(client),
        log,
        await client.create(replace(DRAFT, log="a-log")),
        begun.id,
    )


CHANGES: Final = (
    World.create,
    World.change,
    World.delete,
    World.create_log,
    World.change_log,
    World.delete_log,
    World.delete_unnamed,
    World.begin,
    World.commit,
    World.abort,
    World.put_cookie,
    World.retire,
)


async def lost_change(
    service: Service, database: Any, change: Callable[[World], Awaitable[None]]
) -> World:
    """A change that was answered is taken back. The process and its client both know of it."""
    world = await world_of(service)
    copy = await Copy.of(database)
    await change(world)
    async with database.transaction():
        await copy.put_back()
    return world


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
async def test_the_loss_of_any_change_is_detected_by_the_process_and_by_its_client(
    service: Service, stores: Stores, database: Any, change: Callable[[World], Awaitable[None]]
) -> None:
    await lost_change(service, database, change)

    async with serving(stores) as fresh, newcomer(service) as nobody:
        holder = MetadataClient([fresh.url], service.session, deadline_s=PATIENT_S)
        holder.witnesses = service.client.witnesses
        for client in (nobody, holder):
            await refused(client.confirm())
            await refused(client.create(DRAFT))


async def test_a_restored_expired_transaction_is_noticed(stores: Stores, database: Any) -> None:
    async with serving(stores, expiry_every_s=0.05) as service:
        await LogClient(service.client).create(LOG)
        transactions = TransactionClient(service.client)
        begun, _ = await transactions.begin("a-log", app=None, version=None, expires_in_s=3600)
        copy = await Copy.of(database)
        await database.execute("UPDATE transactions SET expires_at = now()")

        async def is_over() -> bool:
            return (await transactions.get(begun.id)).state.value == "ABORTED"

        await until(is_over, "it expires")
        async with database.transaction():
            await copy.put_back()

        await until(lambda: is_reported(service), "the process tells it")


async def test_a_ledger_whose_naming_was_lost_stays(stores: Stores, database: Any) -> None:
    async with serving(stores) as service:
        world = await lost_change(service, database, World.change_log)
        witnesses = service.client.witnesses
    # Started anew: only the gateway that was answered knows.
    async with serving(stores) as service:
        gateway = MetadataClient([service.url], service.session, deadline_s=PATIENT_S)
        gateway.witnesses = witnesses
        logs = LogClient(gateway)

        await refused(logs.orphans(older_than_s=0))
        await refused(logs.delete_unnamed(world.unnamed.ledger_id))
        # And by now a sweeper that knows nothing is refused as well.
        async with newcomer(service) as other:
            await refused(LogClient(other).delete_unnamed(world.unnamed.ledger_id))
        assert await gateway.get(world.unnamed.ledger_id) == world.unnamed


async def waiting(database: Any, count: int) -> None:
    async def are_there() -> bool:
        return bool(await database.fetchval(WAITING) >= count)

    await until(are_there, f"{count} wait")


async def test_a_row_and_its_proof_are_of_one_moment(service: Service, database: Any) -> None:
    """A restore between the two questions of a proof, which waits for the rows."""
    row = await service.client.create(DRAFT)
    copy = await Copy.of(database)
    _, now = await service.client.cas(row.in_recovery())
    async with database.transaction():
        await database.execute("LOCK TABLE ledgers IN ACCESS EXCLUSIVE MODE")
        asked = asyncio.create_task(service.client.get(row.ledger_id, proof=True))
        await waiting(database, 1)
        await copy.put_back(by_rows=True)
    is_deleted = False
    try:
        assert await asked == now, "an older row was proven"
    except DatabaseWentBack:
        pass
    except NoSuchLedger as error:
        is_deleted = error.members.get("deleted") is True
    assert not is_deleted


async def test_no_change_applies_to_a_row_restored_then(service: Service, database: Any) -> None:
    """A restore under a change that waits for its row."""
    row = await service.client.create(DRAFT)
    copy = await Copy.of(database)
    await swapped(service.client, row.in_recovery())
    async with newcomer(service) as other, database.transaction():
        await database.execute("LOCK TABLE ledgers IN ACCESS EXCLUSIVE MODE")
        # One that is from the restored version, and would win there.
        asked = asyncio.create_task(other.cas(row.closed(last_entry=7, length=7)))
        await waiting(database, 1)
        await copy.put_back(by_rows=True)
        late = asyncio.create_task(other.create(DRAFT))
    with contextlib.suppress(QuorumLogError):
        await late
    assert await asked == (CasStatus.UNKNOWN, None)
    assert await database.fetchval("SELECT version FROM ledgers") == row.version


async def test_an_operator_may_accept_the_loss(service: Service, database: Any) -> None:
    world = await lost_change(service, database, World.create)
    await until(lambda: is_reported(service), "`ready` tells it")
    _, state = await service.send("GET", "/v1/witnesses")
    (missing,) = state["missing"]
    assert missing["holder"] == "this process"

    for wrong in (witness_of("another cluster", NOBODY), "nonsense"):
        status, _ = await service.send("POST", "/v1/witnesses/accept", {"witnesses": [wrong]})
        assert status == 422
    assert await is_reported(service)
    status, state = await service.send(
        "POST",
        "/v1/witnesses/accept",
        {"witnesses": [missing["witness"]], "lost": ["b8", *MEMBERS]},
    )

    assert (status, state["missing"]) == (200, [])
    assert await is_ready(service)
    assert (await service.client.cas(world.row.in_recovery()))[0] is CasStatus.OK


@pytest.mark.parametrize("given", ["nonsense", witness_of("another cluster", NOBODY)])
async def test_an_invalid_witness_proves_nothing_quietly(service: Service, given: str) -> None:
    row = await service.client.create(DRAFT)

    for method, path in (("GET", f"/v1/ledgers/{row.ledger_id}"), ("POST", "/v1/witnesses")):
        status, problem = await service.send(method, path, headers={header.WITNESSES: given})
        assert (status, problem["code"]) == (503, "database-went-back")

    assert await is_ready(service)
    await service.client.create(DRAFT)


async def test_a_known_loss_stops_all_until_it_is_accepted(service: Service) -> None:
    row = await service.client.create(DRAFT)
    lost = witness_of(await service.client.cluster_id(), NOBODY)
    repairs = RepairClient(service.client, "worker")
    service.client.witnesses = (lost,)

    await refused(service.client.get(row.ledger_id, proof=True))
    async with newcomer(service) as other:
        await refused(other.create(DRAFT))
        await refused(other.delete(row.ledger_id, version=row.version + 1))
        await refused(other.confirm())
        assert await other.cas(row.in_recovery()) == (CasStatus.UNKNOWN, None)
        assert await other.get(row.ledger_id) == row, "reads on which nothing rests go on"
        await refused(other.heads([row.ledger_id]))
    await refused(service.client.heads([row.ledger_id]))
    await refused(repairs.claim(lease_s=1))
    await refused(repairs.take_lease("auditor", ttl_s=1))
    assert await is_reported(service)

    _, state = await service.send("GET", "/v1/witnesses")
    assert [missing["witness"] for missing in state["missing"]] == [lost]
    await service.send("POST", "/v1/witnesses/accept", {"witnesses": [lost], "lost": MEMBERS})

    assert await is_ready(service)
    assert await service.client.get(row.ledger_id, proof=True) == row
    assert (await service.client.cas(row.in_recovery()))[0] is CasStatus.OK


async def test_a_row_is_proven_if_the_database_contains_its_changes(service: Service) -> None:
    client = service.client
    first = await client.create(DRAFT)
    now = await swapped(client, first.in_recovery())
    contained = (name_of(first), name_of(now))
    lost = RowName(9, UUID(NOBODY).bytes)

    async def proven(*held: RowName) -> LedgerProof:
        return (await client.proofs({now.ledger_id: held}, "b1"))[now.ledger_id]

    assert (await proven(*contained)).row == now
    assert (await proven(RowName(1, bytes(16)))).row == now, "a copy without a token says nothing"

    # Nobody knew: from now on everybody does.
    await refused(proven(*contained, lost))
    await refused(client.create(DRAFT))
    _, state = await service.send("GET", "/v1/witnesses")
    (missing,) = state["missing"]
    assert missing["witness"] == witness_of(await client.cluster_id(), NOBODY)

    accept = {"witnesses": [missing["witness"]], "lost": MEMBERS}
    await service.send("POST", "/v1/witnesses/accept", accept)

    # The cluster goes on, and yet nothing that the lost history named is given up.
    assert (await proven(*contained)).row == now
    for held in ((*contained, lost), (RowName(3, b"another " * 2), *contained)):
        reported = await proven(*held)
        assert (reported.row, bool(reported.lost)) == (None, True)
    await client.cas(now.closed(last_entry=-1, length=0))
    await client.delete(now.ledger_id, version=now.version + 1)
    assert (await proven(lost)).lost
    assert (await proven(*contained)).deleted
    many = [RowName(version, contained[0].attempt) for version in range(HELD_MAX)]
    assert (await proven(lost, *many)).lost


async def test_proofs_of_many_ledgers_say_what_one_by_one_would(service: Service) -> None:
    """Rules 18, 18a and 18c, each ledger of a page for itself; the tokens of all, or none, are known."""
    client = service.client
    here, gone = [await client.create(DRAFT) for _ in range(2)]
    closed = await swapped(client, gone.closed(last_entry=-1, length=0))
    await client.delete(gone.ledger_id, version=closed.version)
    never = gone.ledger_id + 1000
    lost = RowName(9, UUID(NOBODY).bytes)
    known = (name_of(here), RowName(1, bytes(16)))

    async def proofs(**more: RowName) -> Mapping[int, LedgerProof]:
        of_gone = [name_of(gone), name_of(closed), *more.values()]
        held = {gone.ledger_id: of_gone, never: (), here.ledger_id: known}
        return await client.proofs(held, "b1")

    def is_right(found: LedgerProof, row: LedgerMetadata | None, *, is_deleted: bool) -> bool:
        reported = found.row
        return (reported, found.deleted, found.lost) == (row, is_deleted, ())

    found = await proofs()
    assert is_right(found[here.ledger_id], here, is_deleted=False)
    assert is_right(found[gone.ledger_id], None, is_deleted=True)
    assert is_right(found[never], None, is_deleted=False)

    # Nobody knew of the loss: from now on everybody does, and nothing is proven.
    await refused(proofs(more=lost))
    await refused(client.create(DRAFT))
    await refused(proofs())
    _, state = await service.send("GET", "/v1/witnesses")
    accept = [missing["witness"] for missing in state["missing"]]
    await service.send("POST", "/v1/witnesses/accept", {"witnesses": accept, "lost": MEMBERS})

    found = await proofs(more=lost)
    assert found[gone.ledger_id].lost == (NOBODY,)
    assert (found[gone.ledger_id].row, found[gone.ledger_id].deleted) == (None, False)
    assert is_right(found[here.ledger_id], here, is_deleted=False)
    # With more copies than a question names at once, wherever the lacking one is.
    many = [RowName(version, known[0].attempt) for version in range(HELD_MAX)]
    for names in ((lost, *many), (*many, lost)):
        reported = await client.proofs({here.ledger_id: names, never: ()}, "b1")
        assert reported[here.ledger_id].lost == (NOBODY,)
        assert is_right(reported[never], None, is_deleted=False)


async def test_copies_that_a_bookie_presents_are_looked_for(service: Service) -> None:
    client = service.client
    row = await client.create(DRAFT)
    cluster_id = await client.cluster_id()
    held = [witness_of(cluster_id, row.attempt)]

    await client.confirm_copies(held, "b1")

    await refused(client.confirm_copies([*held, witness_of(cluster_id, NOBODY)], "b1"))
    assert await is_reported(service)


async def test_a_client_without_witnesses_gets_one_and_then_a_proof(service: Service) -> None:
    async with newcomer(service) as client:
        row = await client.create(DRAFT)
        client.witnesses = ()

        assert await client.get(row.ledger_id, proof=True) == row

        assert client.witnesses
        with pytest.raises(NoSuchLedger):
            await client.get(12345, proof=True)


async def test_few_witnesses_stand_for_many_changes(service: Service) -> None:
    clients = [
        MetadataClient([service.url], service.session, deadline_s=PATIENT_S) for _ in range(4)
    ]

    for client in clients:
        await asyncio.gather(*(client.create(DRAFT) for _ in range(30)))
    for _ in range(3):
        for client in clients:
            await client.confirm()

    assert all(1 <= len(client.witnesses) <= 10 for client in clients)


async def test_witnesses_beyond_one_request_are_presented_in_turn(service: Service) -> None:
    async with newcomer(service) as other:
        held: list[str] = []
        for _ in range(WITNESSES_MAX + 5):
            await other.create(DRAFT)
            held += other.witnesses
        client = service.client
        client.witnesses = tuple(held)

        for _ in range(3):
            await client.confirm()

        assert len(client.witnesses) < WITNESSES_MAX


async def test_a_witness_beyond_those_that_a_client_holds_stays_with_the_service(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later change, whose witness the client holds, stands for it too."""
    monkeypatch.setattr(metadata_requests, "_WITNESSES_MAX", 1)
    held = set()
    for _ in range(3):
        await service.client.create(DRAFT)
        assert len(service.client.witnesses) == 1
        held |= set(service.client.witnesses)
    assert len(held) == 3

    await service.client.confirm()
    assert set(service.client.witnesses) <= held


# --- the bookie's collector, whose drops rest on it --------------------------------------------------


def test_a_memory_drops_only_tokens_that_a_later_change_stands_for() -> None:
    memory = Memory()
    memory.note_committed("late", ())
    memory.note_committed("early", ())
    assert memory.wanted == {"early", "late"}, "they were under way at once"

    seen = memory.wanted
    memory.compare({"meanwhile"}, ["meanwhile"], holder="somebody")
    memory.note_committed("next", seen)

    assert memory.wanted == {"meanwhile", "next"}


def test_a_memory_keeps_unlisted_tokens_that_are_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator accepts the loss of those that are told; the next one must then be told."""
    monkeypatch.setattr(memory_module, "_MISSING_MAX", 1)
    memory = Memory()
    memory.note_committed("a", ())
    memory.note_committed("b", ())
    for _ in range(2):
        with pytest.raises(DatabaseWentBack):
            memory.compare(memory.wanted, (), holder="somebody")
    assert set(memory.missing) == {"a"}

    with pytest.raises(DatabaseWentBack):
        memory.compare(memory.wanted, ["a"], holder="somebody")
    assert memory.wanted == {"a", "b"}
    with pytest.raises(DatabaseWentBack):
        memory.compare(memory.wanted, ["a"], holder="somebody")
    assert set(memory.missing) == {"b"}
