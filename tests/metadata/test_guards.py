"""Guards of the metadata service, each with what finds its absence."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import asyncpg
import pytest
from asyncpg.connect_utils import SessionAttribute

from loadtest.stores import Stores, scratch
from quorumlog.errors import MetadataUnavailable, VersionConflict
from quorumlog.net import metadata_requests
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.protocol.metadata import Repair
from services.bookie import witnesses as bookie_witnesses
from services.bookie.collect import MetadataRows
from services.bookie.witnesses import FreshCopies, WitnessFile
from services.metadata import (
    cookies,
    database,
    ledgers,
    logs,
    losses,
    operator_handlers,
    servers,
    tokens,
    transactions,
)
from services.metadata.database import Connection, Database, plain
from services.metadata.inquiry import Inquiry
from services.metadata.memory import PRESENTED, Memory, Presented
from services.metadata.repairs import LeaseStore, RepairSettingsStore, RepairStore
from services.metadata.sql import IS_AFTER_LOSS
from services.metadata.transactions import TransactionStore
from services.metadata.witnesses import WitnessStore
from tests.bookie.test_went_back import (
    a_copy_tells_of_its_place,
    a_held_copy_keeps_its_ledger,
    a_held_copy_tells,
    an_accepted_loss_deletes_nothing,
    gives_nothing_up,
)
from tests.metadata.support import DRAFT, serving
from tests.metadata.test_clock import nothing_ages_by_a_wrong_clock
from tests.metadata.test_failover import asks_about_the_standby, repeated_without_standby, split
from tests.metadata.test_inquiry import (
    accepts_with_its_bookies,
    accepts_without_a_bookie,
    asks_first,
    assigns_no_held_id,
    commits_after_the_dump,
    hears_while_it_looks,
    keeps_what_may_have_been_named,
    starts_before_its_bookies,
)
from tests.metadata.test_unchecked import changes_nothing
from tests.metadata.test_went_back import (
    World,
    cookie,
    lost_change,
    newcomer,
    refused,
    slipped_before_a_change,
    slipped_in,
    waiting,
)
from tests.support.standby import dsn_of, pair
from tests.support.waiting import turns

Scenario = Callable[[Stores, Path], Awaitable[None]]


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch("ql-guards-") as path:
        yield path


@contextlib.asynccontextmanager
async def beside(stores: Stores) -> AsyncIterator[Any]:
    """A connection beside the service's."""
    connection = await asyncpg.connect(stores.postgres_dsn)
    try:
        yield connection
    finally:
        await connection.close()


# --- members, bookies that are taken out -----------------------------------------------------------


async def a_target_is_a_member(stores: Stores, _folder: Path) -> None:
    """Rule 20: who is being given a fragment is found by the bookie's own list, and is not retired."""
    async with serving(stores) as service:
        client = service.client
        await client.put_cookie("b9", await cookie(client), version=None)
        _, closed = await client.cas((await client.create(DRAFT)).closed(last_entry=3, length=4))
        assert closed is not None
        _, moving = await client.cas(replace(closed, repairs=(Repair(0, "b1@1", "b9@1"),)))
        assert moving is not None

        assert await client.list(bookie="b9") == ([moving], None)
        assert (await client.uses("b9")).ledgers == 1
        with pytest.raises(VersionConflict):
            await client.retire("b9")


async def who_leaves_is_a_member(stores: Stores, _folder: Path) -> None:
    """Rule 20b: who lost a place is not retired before its successor has a copy of the row."""
    async with serving(stores) as service:
        client = service.client
        await client.put_cookie("b1", await cookie(client), version=None)
        _, closed = await client.cas((await client.create(DRAFT)).closed(last_entry=3, length=4))
        assert closed is not None
        _, moved = await client.cas(closed.with_member_replaced(0, "b1@1", "b9@1"))
        assert moved is not None
        assert (await client.uses("b1")).ledgers == 1
        with pytest.raises(VersionConflict):
            await client.retire("b1")

        await client.cas(moved.with_leaving_released(0, "b9@1"))
        await client.retire("b1")


async def who_is_being_named_is_not_retired(stores: Stores, _folder: Path) -> None:
    """A transaction that names the bookie is under way when it is to be taken out."""
    async with (
        serving(stores) as service,
        beside(stores) as connection,
        beside(
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


async def only_the_primary_is_used(_stores: Stores, _folder: Path) -> None:
    """A standby knows less than was answered. Of several servers in the DSN it comes first here."""
    async with pair() as both:
        primary, standby = both.primary, both.standby
        with pytest.raises(MetadataUnavailable):
            await is_standby(standby.postgres.dsn())
        assert not await is_standby(
            dsn_of(standby.postgres.dsn(), standby.address, primary.address)
        )


async def the_new_primary_is_used(stores: Stores, _folder: Path) -> None:
    """The old primary comes back as a primary, and is the first of the DSN."""
    async with pair() as both, serving(replace(stores, postgres_dsn=both.dsn)) as service:
        row, now = await split(both, service)
        assert await service.client.get(row.ledger_id) == now


async def a_repeat_waits_for_the_standby(stores: Stores, _folder: Path) -> None:
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


async def a_process_knows(stores: Stores, _folder: Path) -> None:
    """A lost change is known to the process that answered it."""
    async with serving(stores) as service, beside(stores) as connection:
        await lost_change(service, connection, World.change_log)
        async with newcomer(service) as nobody:
            await refused(nobody.create(DRAFT))


async def a_holder_tells(stores: Stores, _folder: Path) -> None:
    """And to its client, who tells a process that knows nothing."""
    async with serving(stores) as one, serving(stores) as two, beside(stores) as connection:
        await lost_change(one, connection, World.change_log)
        two.client.witnesses = one.client.witnesses
        await refused(two.client.create(DRAFT))
        async with newcomer(two) as nobody:
            await refused(nobody.create(DRAFT))


async def a_holder_has_its_reads_proven(stores: Stores, _folder: Path) -> None:
    """What is read for a deletion is of the database that its reader knows."""
    async with serving(stores) as one, serving(stores) as two, beside(stores) as connection:
        world = await lost_change(one, connection, World.change_log)
        two.client.witnesses = one.client.witnesses
        await refused(two.client.get(world.row.ledger_id, proof=True))


async def changes_without_a_token_count(stores: Stores, _folder: Path) -> None:
    """An abort is asked for without an attempt."""
    async with serving(stores) as service, beside(stores) as connection:
        await lost_change(service, connection, World.abort)
        async with newcomer(service) as nobody:
            await refused(nobody.create(DRAFT))


async def a_proof_is_of_one_moment(stores: Stores, _folder: Path) -> None:
    async with serving(stores) as service, beside(stores) as connection:
        await slipped_in(service, connection)


async def a_change_looks_last(stores: Stores, _folder: Path) -> None:
    async with serving(stores) as service, beside(stores) as connection:
        await slipped_before_a_change(service, connection)


async def no_route_changes(stores: Stores, _folder: Path) -> None:
    await changes_nothing(stores)


# --- what is taken out -------------------------------------------------------------------------------


def nothing(_original: Any) -> Any:
    """Do nothing."""

    async def done(*_args: object, **_more: object) -> set[str]:
        await turns()
        return set()

    return done


def without_targets(original: Any) -> Any:
    """Only fragments are indexed."""

    async def index(connection: Connection, rows: Any) -> None:
        bare = {item: replace(row, repairs=()) for item, row in rows.items()}
        await original(connection, bare)

    return index


def unnoted(_original: Any) -> Any:
    """A copy that comes is not noted."""
    return lambda _self, _name: None


def nobody_presents(_original: Any) -> Any:
    """What a request's body presents is dropped."""
    nobody: ContextVar[Presented | None] = ContextVar("nobody")
    nobody.set(Presented((), "nobody"))
    return nobody


def first_primary(original: Any) -> Any:
    """The first primary of the DSN is used, whatever it lacks."""

    async def connect(connects: Sequence[Any], _has_history: Any) -> Any:
        verdicts = iter([True])

        async def is_first(_connection: Connection) -> bool:
            await turns()
            return next(verdicts, False)

        # Not a connection of its own: the original leaves none open where the deadline ends it.
        return await original(connects, is_first)

    return connect


def patient(_original: Any) -> Any:
    """A process waits for all servers of the DSN, however late they answer."""
    return 60.0


def asked_once(_original: Any) -> Any:
    """Who has asked about one server believes any other."""
    return property(lambda database: database.asked_about is not None)


def unlocked(_original: Any) -> Any:
    """An attempt is looked for without a lock, so that its transaction writes nothing."""

    async def is_applied(connection: Connection, attempt: str, _target: str) -> bool:
        found = "SELECT true FROM attempts WHERE attempt = $1"
        return await connection.fetchval(found, attempt) is not None

    return is_applied


def nothing_presented(_original: Any) -> Any:
    """What a request presents is not read."""
    return lambda _self, _presented: ()


def forgetful(_original: Any) -> Any:
    """What was answered is not remembered."""
    return lambda _self, _token, _seen: None


def silent(_original: Any) -> Any:
    """A client presents nothing."""
    return lambda _witnesses: ""


def unproven(original: Any) -> Any:
    """A read is taken as it comes."""

    async def get(self: MetadataClient, ledger_id: int, **_how: object) -> Any:
        return await original(self, ledger_id)

    return get


def in_two_steps(_original: Any) -> Any:
    """A proof, and then the read."""

    async def read(self: Database, work: Any) -> Any:
        if PRESENTED.get() is not None:
            await self.run(self._check)
        return await self.run(work)

    return read


def looks_first(_original: Any) -> Any:
    """A change sees what it must find before it waits for its row."""

    async def transact(self: Database, work: Any) -> Any:
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

    return transact


def answers_of_nobody(_original: Any) -> Any:
    """A start is over at once."""

    async def ask(_self: Inquiry) -> list[str]:
        await turns()
        return []

    return ask


def all_answer(original: Any) -> Any:
    """Who is silent is not told."""

    async def ask(self: Inquiry) -> list[str]:
        await original(self)
        return []

    return ask


def asks_nobody(original: Any) -> Any:
    """What bookies hold since the start is not asked for."""

    async def accept(self: WitnessStore, witnesses: Any, **given: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Inquiry, "ask", answers_of_nobody(None))
            return await original(self, witnesses, **given)

    return accept


def unasked(_original: Any) -> Any:
    """The bookies' answers are not waited for."""

    async def check(self: Database, connection: Connection) -> set[str]:
        return await self._compare(connection, PRESENTED.get())

    return check


def asked_by_now(_original: Any) -> Any:
    """Whether the bookies were asked is looked at last, when what they told was not looked for."""

    async def check(self: Database, connection: Connection) -> set[str]:
        wanted = await self._compare(connection, PRESENTED.get())
        if not self.has_asked:
            raise MetadataUnavailable("the bookies are asked what they know of the database")
        return wanted

    return check


def without_the_loss(original: str) -> str:
    """An accepted loss is forgotten."""
    return original.replace(IS_AFTER_LOSS, "true")


def unchecked(original: Any) -> Any:
    """A change outside a transaction, as a read."""
    return plain(original.__wrapped__)


def none_lost(_original: Any) -> Any:
    """The database contains whatever a bookie holds copies of."""

    async def lost_of(*_args: object) -> tuple[str, ...]:
        return ()

    return lost_of


def keeps_nothing(_original: Any) -> Any:
    """The bookie's file is not written."""
    return lambda _self, _witnesses: None


def any_clock_counts(_original: Any) -> Any:
    """Nobody judges the database's clock."""

    async def counts(_connection: Connection) -> bool:
        await turns()
        return True

    return counts


def believed(_original: Any) -> Any:
    """The bookie reads rows without a proof, and goes on where none is given."""

    async def read(self: MetadataRows, held: Mapping[int, object]) -> Any:
        return {ledger_id: await self._client.read(ledger_id) for ledger_id in held}

    return read


@dataclass(frozen=True, slots=True)
class Guard:
    """What is taken out, and the scenario that then fails."""

    rule: str
    name: str
    places: tuple[tuple[Any, str, Callable[[Any], Any]], ...]
    scenario: Scenario


GUARDS: Final = (
    Guard(
        "rule 20b",
        "who lost a place is not in the members' index",
        ((ledgers, "index_members", without_targets),),
        who_leaves_is_a_member,
    ),
    Guard(
        "rule 20",
        "a repair's target is not in the members' index",
        ((ledgers, "index_members", without_targets),),
        a_target_is_a_member,
    ),
    Guard(
        "rule 15",
        "a bookie is taken out without the lock of the members",
        ((cookies, "lock_name", nothing),),
        who_is_being_named_is_not_retired,
    ),
    Guard(
        "rule 18a",
        "any server is taken for the primary",
        ((database, "_PRIMARY_ONLY", lambda _original: SessionAttribute.any),),
        only_the_primary_is_used,
    ),
    Guard(
        "rule 18a",
        "the first of two primaries is used",
        ((database, "connect_to_primary", first_primary), (servers, "_LATE_S", patient)),
        the_new_primary_is_used,
    ),
    Guard(
        "rule 18a",
        "nobody asks about a standby that took over",
        ((Database, "has_asked", asked_once),),
        asks_about_the_standby,
    ),
    Guard(
        "rule 6",
        "a repeat is answered although the standby lacks it",
        ((cookies, "is_applied", unlocked),),
        a_repeat_waits_for_the_standby,
    ),
    Guard(
        "rule 18a",
        "the database is never looked at",
        ((Database, "_check", nothing),),
        a_process_knows,
    ),
    Guard(
        "rule 18a",
        "a process forgets what it answered",
        ((Memory, "note_committed", forgetful),),
        a_process_knows,
    ),
    Guard(
        "rule 18a",
        "what is presented is not looked for",
        ((Memory, "presented", nothing_presented),),
        a_holder_tells,
    ),
    Guard(
        "rule 18a",
        "a client presents nothing",
        ((metadata_requests, "witnesses_to_header", silent),),
        a_holder_tells,
    ),
    Guard(
        "rule 18a",
        "a read for a deletion is as good as any",
        ((MetadataClient, "get", unproven),),
        a_holder_has_its_reads_proven,
    ),
    Guard(
        "rule 18a",
        "a change without an attempt is no witness",
        (
            (transactions, "record_change", nothing),
            (cookies, "record_change", nothing),
            (logs, "record_change", nothing),
        ),
        changes_without_a_token_count,
    ),
    Guard(
        "rule 18a",
        "a row and its proof are read one after the other",
        ((Database, "read", in_two_steps),),
        a_proof_is_of_one_moment,
    ),
    Guard(
        "rule 18a",
        "a change looks before it waits",
        ((Database, "transact", looks_first),),
        a_change_looks_last,
    ),
    Guard(
        "rule 18a",
        "a start asks nobody",
        ((Inquiry, "ask", answers_of_nobody),),
        commits_after_the_dump,
    ),
    Guard(
        "rule 18a",
        "what bookies tell at a start is not looked for",
        ((Inquiry, "_learn", nothing),),
        commits_after_the_dump,
    ),
    Guard(
        "rule 18a",
        "a start changes rows before the bookies were asked",
        ((Database, "_check", unasked),),
        asks_first,
    ),
    Guard(
        "rule 18a",
        "what bookies tell while a change looks at the database is missed",
        ((Database, "_check", asked_by_now),),
        hears_while_it_looks,
    ),
    Guard(
        "rule 18a",
        "nobody waits for bookies that are yet to start",
        ((Inquiry, "_wait_for_silent", nothing),),
        starts_before_its_bookies,
    ),
    Guard(
        "rule 18a",
        "an id that a bookie holds is assigned again",
        ((Inquiry, "_skip_ids", nothing),),
        assigns_no_held_id,
    ),
    Guard(
        "rule 18a",
        "an acceptance asks nobody",
        ((WitnessStore, "accept", asks_nobody),),
        accepts_with_its_bookies,
    ),
    Guard(
        "rule 18a",
        "an acceptance waits for no bookie",
        ((Inquiry, "ask", all_answer),),
        accepts_without_a_bookie,
    ),
    Guard(
        "rule 18a",
        "what is older than an accepted loss expires",
        ((transactions, "EXPIRED", without_the_loss),),
        keeps_what_may_have_been_named,
    ),
    Guard(
        "rule 18a",
        "what is older than an accepted loss is swept",
        ((logs, "ORPHANS", without_the_loss),),
        keeps_what_may_have_been_named,
    ),
    *(
        Guard("rule 18a", f"unchecked: {method}", ((store, method, unchecked),), no_route_changes)
        for store, method in (
            (LeaseStore, "take"),
            (RepairSettingsStore, "change"),
            (RepairStore, "_hurry_some"),
            (TransactionStore, "_renew"),
        )
    ),
    Guard(
        "rule 18a",
        "a bookie forgets with its process",
        ((WitnessFile, "keep", keeps_nothing),),
        gives_nothing_up,
    ),
    Guard(
        "rule 18c",
        "the database need not contain what a bookie holds a copy of",
        ((ledgers, "lost_of", none_lost),),
        a_held_copy_keeps_its_ledger,
    ),
    Guard(
        "rule 18c",
        "an accepted loss counts as contained",
        ((losses, "ACCEPTED", lambda _original: "a target of no change"),),
        an_accepted_loss_deletes_nothing,
    ),
    Guard(
        "rule 18c",
        "nobody is told of a copy that no witness stands for",
        ((FreshCopies, "note", unnoted),),
        a_held_copy_tells,
    ),
    Guard(
        "rule 18c",
        "nobody is told of the change that placed an open ledger",
        ((bookie_witnesses, "placed_by", lambda _original: lambda _body: ""),),
        a_copy_tells_of_its_place,
    ),
    Guard(
        "rule 18c",
        "fresh copies are not looked for",
        ((operator_handlers, "PRESENTED", nobody_presents),),
        a_held_copy_tells,
    ),
    Guard(
        "rule 18a",
        "a bookie believes a row without a proof",
        ((MetadataRows, "read", believed), (MetadataRows, "confirm", nothing)),
        gives_nothing_up,
    ),
    *(
        Guard(
            "rule 26c",
            f"{what} go by a wrong clock",
            ((module, "ages_count", any_clock_counts),),
            nothing_ages_by_a_wrong_clock,
        )
        for what, module in (
            ("transactions", transactions),
            ("unnamed ledgers", logs),
            ("access tokens and audit rows", tokens),
        )
    ),
)


SCENARIOS: Final = dict.fromkeys(
    guard.scenario for guard in GUARDS if guard.scenario.__module__ == __name__
)
"""Those of other modules have tests there."""


@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_the_scenario_holds(scenario: Scenario, stores: Stores, folder: Path) -> None:
    await scenario(stores, folder)


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
async def test_a_guard_that_is_taken_out_is_missed(
    guard: Guard, stores: Stores, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, attribute, patch in guard.places:
        monkeypatch.setattr(owner, attribute, patch(getattr(owner, attribute)))

    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await guard.scenario(stores, folder)
