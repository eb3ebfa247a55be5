"""Guards of the metadata service, each with what finds its absence."""

import asyncio
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from asyncpg.connect_utils import SessionAttribute

from loadtest.stores import Stores
from quorumlog.errors import MetadataUnavailable, VersionConflict
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.metadata import Repair
from quorumlog.wire import bodies
from services.bookie import witnesses as bookie_witnesses
from services.bookie.collect import MetadataRows
from services.bookie.witnesses import FreshCopies, WitnessFile
from services.metadata import (
    attempts,
    cookies,
    database,
    ledgers,
    logs,
    losses,
    operator_handlers,
    servers,
    transactions,
)
from services.metadata.database import Connection, Database, plain
from services.metadata.inquiry import Inquiry
from services.metadata.memory import PRESENTED, Memory, Presented
from services.metadata.repairs import LeaseStore, RepairSettingsStore, RepairStore
from services.metadata.sql import IS_AFTER_LOSS
from services.metadata.transactions import TransactionStore
from services.metadata.witnesses import WitnessStore
from tests.mutation.mutants.guards import always, answers
from tests.mutation.mutants.hunt import Guard, Patch, applied, stand_in
from tests.support.database import connected
from tests.support.standby import dsn_of, pair
from tests.support.waiting import turns
from tests.unit.bookie import test_went_back as bookie_went_back
from tests.unit.metadata import (
    test_audit,
    test_failover,
    test_inquiry,
    test_liveness,
    test_went_back,
)
from tests.unit.metadata.support import DRAFT, played, serving, swapped
from tests.unit.metadata.test_failover import repeated_without_standby, split
from tests.unit.metadata.test_went_back import (
    World,
    cookie,
    lost_change,
    newcomer,
    refused,
    waiting,
)

# --- members, bookies that are taken out -----------------------------------------------------------


async def test_a_target_is_a_member(stores: Stores) -> None:
    """Rule 20: who is being given a fragment is found by the bookie's own list, and is not retired."""
    async with serving(stores) as service:
        client = service.client
        await client.put_cookie("b9", await cookie(client), version=None)
        closed = await swapped(client, (await client.create(DRAFT)).closed(last_entry=3, length=4))
        moving = await swapped(client, replace(closed, repairs=(Repair(0, "b1@1", "b9@1"),)))

        assert await client.list(bookie="b9") == ([moving], None)
        assert (await client.uses("b9")).ledgers == 1
        with pytest.raises(VersionConflict):
            await client.retire("b9")


async def test_who_leaves_is_a_member(stores: Stores) -> None:
    """Rule 20b: who lost a place is not retired before its successor has a copy of the row."""
    async with serving(stores) as service:
        client = service.client
        await client.put_cookie("b1", await cookie(client), version=None)
        closed = await swapped(client, (await client.create(DRAFT)).closed(last_entry=3, length=4))
        moved = await swapped(client, closed.with_member_replaced(0, "b1@1", "b9@1"))
        assert (await client.uses("b1")).ledgers == 1
        with pytest.raises(VersionConflict):
            await client.retire("b1")

        await client.cas(moved.with_leaving_released(0, "b9@1"))
        await client.retire("b1")


async def test_who_is_being_named_is_not_retired(stores: Stores) -> None:
    """A transaction that names the bookie is under way when it is to be taken out."""
    async with (
        serving(stores) as service,
        connected(stores) as connection,
        connected(
            stores
        ) as onlooker,  # its question may be cut off, which a transaction could not bear
    ):
        client = service.client
        row = await client.create(DRAFT)
        await client.put_cookie("b9", await cookie(client), version=None)
        async with connection.transaction():
            await connection.execute("SELECT * FROM hold_incarnations(ARRAY['b9@1'])")
            await connection.execute(
                "INSERT INTO ledger_members (ledger_id, name, incarnation) VALUES ($1, 'b9', 1)",
                row.ledger_id,
            )
            retiring = asyncio.ensure_future(service.send("DELETE", "/v1/bookies/b9/cookie"))
            # It waits, or is done already: both are events.
            asked = asyncio.ensure_future(waiting(onlooker, 1))
            await asyncio.wait((retiring, asked), return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            assert not retiring.done(), "it was taken out while it is being named"
        status, problem = await retiring
        assert (status, problem["first"]) == (409, [row.ledger_id])


async def is_standby(dsn: str) -> bool:
    """Whether a service with this DSN would use a standby."""
    used = Database(dsn, connections_max=1, deadline_s=30)
    used.is_open = True
    try:
        return await used.run(lambda connection: connection.fetchval("SELECT pg_is_in_recovery()"))
    finally:
        await used.close()


async def test_only_the_primary_is_used() -> None:
    """A standby knows less than was answered. Of several servers in the DSN it comes first here."""
    async with pair() as both:
        primary, standby = both.primary, both.standby
        with pytest.raises(MetadataUnavailable):
            await is_standby(standby.postgres.dsn())
        assert not await is_standby(
            dsn_of(standby.postgres.dsn(), standby.address, primary.address)
        )


async def test_the_new_primary_is_used(stores: Stores) -> None:
    """The old primary comes back as a primary, and is the first of the DSN."""
    async with pair() as both, serving(replace(stores, postgres_dsn=both.dsn)) as service:
        row, now = await split(both, service)
        assert await service.client.get(row.ledger_id) == now


async def test_a_repeat_waits_for_the_standby(stores: Stores) -> None:
    """A restarted primary has the change, and its standby has not."""
    async with (
        pair(is_synchronous=True) as both,
        serving(replace(stores, postgres_dsn=both.dsn), expiry_every_s=1000) as service,
    ):
        given = await cookie(service.client)
        await service.client.put_cookie("b1", given, version=None)
        newer = given.model_copy(update={"incarnation": 2})
        await repeated_without_standby(
            both, lambda: service.client.put_cookie("b1", newer, version=1)
        )


# --- a database that went back (rule 18a) ----------------------------------------------------------


async def test_a_process_knows(stores: Stores) -> None:
    """A lost change is known to the process that answered it."""
    async with serving(stores) as service, connected(stores) as connection:
        await lost_change(service, connection, World.change_log)
        async with newcomer(service) as nobody:
            await refused(nobody.create(DRAFT))


async def test_a_holder_tells(stores: Stores) -> None:
    """And to its client, who tells a process that knows nothing."""
    async with serving(stores) as one, serving(stores) as two, connected(stores) as connection:
        await lost_change(one, connection, World.change_log)
        two.client.witnesses = one.client.witnesses
        await refused(two.client.create(DRAFT))
        async with newcomer(two) as nobody:
            await refused(nobody.create(DRAFT))


async def test_a_holder_has_its_reads_proven(stores: Stores) -> None:
    """What is read for a deletion is of the database that its reader knows."""
    async with serving(stores) as one, serving(stores) as two, connected(stores) as connection:
        world = await lost_change(one, connection, World.change_log)
        two.client.witnesses = one.client.witnesses
        await refused(two.client.get(world.row.ledger_id, proof=True))


async def test_changes_without_a_token_count(stores: Stores) -> None:
    """An abort is asked for without an attempt."""
    async with serving(stores) as service, connected(stores) as connection:
        await lost_change(service, connection, World.abort)
        async with newcomer(service) as nobody:
            await refused(nobody.create(DRAFT))


# --- what is taken out -------------------------------------------------------------------------------


@stand_in
async def without_targets(original: Any, connection: Connection, rows: Any) -> None:
    """Only fragments are indexed."""
    bare = {item: replace(row, repairs=()) for item, row in rows.items()}
    await original(connection, bare)


def nobody_presents(_original: Any) -> Any:
    """What a request's body presents is dropped."""
    nobody: ContextVar[Presented | None] = ContextVar("nobody")
    nobody.set(Presented((), "nobody"))
    return nobody


@stand_in
async def first_primary(original: Any, connects: Sequence[Any], _has_history: Any) -> Any:
    """The first primary of the DSN is used, whatever it lacks."""
    verdicts = iter([True])

    async def is_first(_connection: Connection) -> bool:
        await turns()
        return next(verdicts, False)

    # Not a connection of its own: the original leaves none open where the deadline ends it.
    return await original(connects, is_first)


def patient(_original: Any) -> Any:
    """A process waits for all servers of the DSN, however late they answer."""
    return 60.0


def asked_once(_original: Any) -> Any:
    """Who has asked about one server believes any other."""
    return property(lambda database: database.asked_about is not None)


@stand_in
async def unlocked(_original: Any, connection: Connection, attempt: str, _target: str) -> bool:
    """An attempt is looked for without a lock, so that its transaction writes nothing."""
    found = "SELECT true FROM attempts WHERE attempt = $1"
    return await connection.fetchval(found, attempt) is not None


@stand_in
async def unproven(original: Any, self: MetadataClient, ledger_id: int, **_how: object) -> Any:
    """A read is taken as it comes."""
    return await original(self, ledger_id)


@stand_in
async def in_two_steps(_original: Any, self: Database, work: Any) -> Any:
    """A proof, and then the read."""
    if PRESENTED.get() is not None:
        await self.run(self._check)
    return await self.run(work)


@stand_in
async def looks_first(_original: Any, self: Database, work: Any) -> Any:
    """A change sees what it must find before it waits for its row."""

    async def transaction(connection: Connection) -> Any:
        connection.settled = None
        async with connection.transaction():
            seen = await self._check(connection)
            result = await work(connection)
        if connection.settled is not None:
            self.memory.note_committed(connection.settled, seen)
            self._return_witnesses(PRESENTED.get())
        return result

    return await self.run(transaction)


@stand_in
async def all_answer(original: Any, self: Inquiry) -> list[str]:
    """Who is silent is not told."""
    await original(self)
    return []


@stand_in
async def asks_nobody(original: Any, self: WitnessStore, witnesses: Any, **given: Any) -> Any:
    """What bookies hold since the start is not asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Inquiry, "ask", answers([])(None))
        return await original(self, witnesses, **given)


@stand_in
async def unasked(_original: Any, self: Database, connection: Connection) -> set[str]:
    """The bookies' answers are not waited for."""
    return await self._compare(connection, PRESENTED.get())


@stand_in
async def asked_by_now(_original: Any, self: Database, connection: Connection) -> set[str]:
    """Whether the bookies were asked is looked at last, when what they told was not looked for."""
    wanted = await self._compare(connection, PRESENTED.get())
    if not self.has_asked:
        raise MetadataUnavailable("the bookies are asked what they know of the database")
    return wanted


def without_the_loss(original: str) -> str:
    """An accepted loss is forgotten."""
    return original.replace(IS_AFTER_LOSS, "true")


def unchecked(original: Any) -> Any:
    """A change outside a transaction, as a read."""
    return plain(original.__wrapped__)


@stand_in
async def believed(_original: Any, self: MetadataRows, held: Mapping[int, object]) -> Any:
    """The bookie reads rows without a proof, and goes on where none is given."""
    return {ledger_id: await self._client.read(ledger_id) for ledger_id in held}


GUARDS: Final = (
    Patch(ledgers, "index_members", without_targets).guard(
        "who lost a place is not in the members' index", "rule 20b", test_who_leaves_is_a_member
    ),
    Patch(ledgers, "index_members", without_targets).guard(
        "a repair's target is not in the members' index", "rule 20", test_a_target_is_a_member
    ),
    Patch(cookies, "lock_name", answers(set())).guard(
        "a bookie is taken out without the lock of the members",
        "rule 15",
        test_who_is_being_named_is_not_retired,
    ),
    Patch(database, "_PRIMARY_ONLY", lambda _original: SessionAttribute.any).guard(
        "any server is taken for the primary", "rule 18a", test_only_the_primary_is_used
    ),
    Guard(
        "the first of two primaries is used",
        "rule 18a",
        (Patch(database, "connect_to_primary", first_primary), Patch(servers, "_LATE_S", patient)),
        test_the_new_primary_is_used,
    ),
    Patch(Database, "has_asked", asked_once).guard(
        "nobody asks about a standby that took over",
        "rule 18a",
        test_failover.test_an_unaware_process_asks_about_a_standby,
    ),
    Patch(cookies, "is_applied", unlocked).guard(
        "a repeat is answered although the standby lacks it",
        "rule 6",
        test_a_repeat_waits_for_the_standby,
    ),
    Patch(Database, "_check", answers(set())).guard(
        "the database is never looked at", "rule 18a", test_a_process_knows
    ),
    Patch(Memory, "note_committed", always(None)).guard(
        "a process forgets what it answered", "rule 18a", test_a_process_knows
    ),
    Patch(Memory, "presented", always(())).guard(
        "what is presented is not looked for", "rule 18a", test_a_holder_tells
    ),
    Patch(bodies, "witnesses_to_header", always("")).guard(
        "a client presents nothing", "rule 18a", test_a_holder_tells
    ),
    Patch(MetadataClient, "get", unproven).guard(
        "a read for a deletion is as good as any", "rule 18a", test_a_holder_has_its_reads_proven
    ),
    Guard(
        "a change without an attempt is no witness",
        "rule 18a",
        (
            Patch(transactions, "record_change", answers(set())),
            Patch(cookies, "record_change", answers(set())),
            Patch(attempts, "record_change", answers(set())),
        ),
        test_changes_without_a_token_count,
    ),
    Patch(Database, "read", in_two_steps).guard(
        "a row and its proof are read one after the other",
        "rule 18a",
        test_went_back.test_a_row_and_its_proof_are_of_one_moment,
    ),
    Patch(Database, "transact", looks_first).guard(
        "a change looks before it waits",
        "rule 18a",
        test_went_back.test_no_change_applies_to_a_row_restored_then,
    ),
    Patch(Inquiry, "ask", answers([])).guard(
        "a start asks nobody",
        "rule 18a",
        test_inquiry.test_after_a_dump_a_committed_transaction_stays,
    ),
    Patch(Inquiry, "_learn", answers(set())).guard(
        "what bookies tell at a start is not looked for",
        "rule 18a",
        test_inquiry.test_after_a_dump_a_committed_transaction_stays,
    ),
    Patch(Database, "_check", unasked).guard(
        "a start changes rows before the bookies were asked",
        "rule 18a",
        test_inquiry.test_a_start_changes_nothing_before_bookies_answer,
    ),
    Patch(Database, "_check", asked_by_now).guard(
        "what bookies tell while a change looks at the database is missed",
        "rule 18a",
        partial(
            test_inquiry.test_what_bookies_told_meanwhile_counts,
            is_reported=True,
        ),
    ),
    Patch(Inquiry, "_wait_for_silent", answers(set())).guard(
        "nobody waits for bookies that are yet to start",
        "rule 18a",
        test_inquiry.test_no_transaction_expires_before_bookies_started,
    ),
    Patch(Inquiry, "_skip_ids", answers(set())).guard(
        "an id that a bookie holds is assigned again",
        "rule 18a",
        test_inquiry.test_a_start_assigns_no_id_that_a_bookie_holds,
    ),
    Patch(WitnessStore, "accept", asks_nobody).guard(
        "an acceptance asks nobody",
        "rule 18a",
        test_inquiry.test_after_an_acceptance_no_held_id_is_assigned,
    ),
    Patch(Inquiry, "ask", all_answer).guard(
        "an acceptance waits for no bookie",
        "rule 18a",
        test_inquiry.test_an_acceptance_waits_for_all_bookies_not_lost,
    ),
    Patch(transactions, "EXPIRED", without_the_loss).guard(
        "what is older than an accepted loss expires",
        "rule 18a",
        test_inquiry.test_rows_older_than_an_accepted_loss_stay,
    ),
    Patch(logs, "ORPHANS", without_the_loss).guard(
        "what is older than an accepted loss is swept",
        "rule 18a",
        test_inquiry.test_rows_older_than_an_accepted_loss_stay,
    ),
    *(
        Patch(store, method, unchecked).guard(
            f"unchecked: {method}",
            "rule 18a",
            test_audit.test_no_route_changes_a_row_while_an_answered_change_is_missing,
        )
        for store, method in (
            (LeaseStore, "take"),
            (RepairSettingsStore, "change"),
            (RepairStore, "_hurry_some"),
            (TransactionStore, "_renew"),
        )
    ),
    Patch(WitnessFile, "keep", always(None)).guard(
        "a bookie forgets with its process",
        "rule 18a",
        bookie_went_back.test_a_restored_row_without_this_bookie_drops_no_copy,
    ),
    Patch(ledgers, "lost_of", answers(())).guard(
        "the database need not contain what a bookie holds a copy of",
        "rule 18c",
        bookie_went_back.test_a_bookie_keeps_ledgers_with_newer_copies,
    ),
    Patch(losses, "ACCEPTED", lambda _original: "a target of no change").guard(
        "an accepted loss counts as contained",
        "rule 18c",
        bookie_went_back.test_after_an_accepted_loss_lost_members_drop_nothing,
    ),
    Patch(FreshCopies, "note", always(None)).guard(
        "nobody is told of a copy that no witness stands for",
        "rule 18c",
        bookie_went_back.test_a_bookies_copy_reveals_what_the_database_lacks,
    ),
    Patch(bookie_witnesses, "placed_by", lambda _original: lambda _body: "").guard(
        "nobody is told of the change that placed an open ledger",
        "rule 18c",
        bookie_went_back.test_a_copy_reveals_the_lost_place_of_a_ledger,
    ),
    Patch(operator_handlers, "PRESENTED", nobody_presents).guard(
        "fresh copies are not looked for",
        "rule 18c",
        bookie_went_back.test_a_bookies_copy_reveals_what_the_database_lacks,
    ),
    Guard(
        "a bookie believes a row without a proof",
        "rule 18a",
        (Patch(MetadataRows, "read", believed), Patch(MetadataRows, "confirm", answers(set()))),
        bookie_went_back.test_a_restored_row_without_this_bookie_drops_no_copy,
    ),
    *(
        Patch(module, "ages_count", answers(True)).guard(
            f"{what} go by a wrong clock",
            "rule 26c",
            test_liveness.test_nothing_is_deleted_by_age_while_the_clock_is_wrong,
        )
        for what, module in (
            ("transactions", transactions),
            ("unnamed ledgers", logs),
            ("access tokens and audit rows", database),
        )
    ),
)


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
async def test_a_guard_that_is_taken_out_is_missed(
    guard: Guard, stores: Stores, folder: Path
) -> None:
    with applied(guard), pytest.raises((AssertionError, pytest.fail.Exception)):
        await played(guard.claim, stores, folder)
