"""Guards of what forks share, each with the scenario that finds its absence (rule 27a)."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final

import pytest

from loadtest.stores import Stores
from quorumlog.errors import LogDeleted, QuorumLogError
from quorumlog.protocol.log import LogMetadata
from services.metadata import forks, ledgers, logs
from services.metadata.database import Connection
from services.metadata.forks import NOT_SHARED
from tests.metadata.support import serving
from tests.metadata.test_forks import (
    SETTINGS,
    SOURCE,
    Logs,
    by_truncation,
    delete_row,
    ids,
    logs_of,
    refusal,
    the_log,
)
from tests.mutants.hunt import Guard, Patch, applied, stand_in
from tests.support.waiting import until

Scenario = Callable[[Logs], Awaitable[None]]


# --- scenarios ---------------------------------------------------------------------------------


async def a_deleted_source_leaves_what_a_fork_names(found: Logs) -> None:
    source = await found.source()
    fork = await found.fork(source, 20)

    await the_log(found, source, 0)

    assert await found.exists(*ids(fork)) == [True, True]


async def a_truncated_source_leaves_what_a_fork_names(found: Logs) -> None:
    source = await found.source()
    fork = await found.fork(source, 20)

    await refusal(by_truncation(found, source, ids(source)[0]))

    assert await found.exists(*ids(fork)) == [True, True]


async def the_sweep_is_told_of_nothing_that_a_fork_names(found: Logs) -> None:
    source = await found.source()
    await found.fork(source, 20)
    await found.swapped(source.truncated(20))

    assert await found.client.orphans(older_than_s=0) == ()


async def a_deletion_that_waits_for_a_fork_sees_it(found: Logs) -> None:
    source = await found.source()
    first, second, _ = ids(source)
    transaction = found.database.transaction()
    await transaction.start()
    await found.database.execute(
        "SELECT FROM ledgers WHERE ledger_id = ANY($1::bigint[]) FOR SHARE", [first, second]
    )
    await found.database.execute(
        "INSERT INTO shared_ledgers (ledger_id, log) SELECT unnest($1::bigint[]), 'fork'",
        [first, second],
    )
    deleting = asyncio.ensure_future(the_log(found, source, 0))
    try:
        await until(lambda: found.is_waiting(deleting), "it waits, or is done")
    finally:
        await transaction.commit()
    await deleting

    assert await found.exists(first, second) == [True, True]


async def a_fork_waits_for_a_deletion(found: Logs) -> None:
    source = await found.source()
    transaction = found.database.transaction()
    await transaction.start()
    await delete_row(found, ids(source)[0])
    forking = asyncio.ensure_future(found.client.fork(LogMetadata("fork", SETTINGS), source, 20))
    try:
        await until(lambda: found.is_waiting(forking), "it waits, or is done")
    finally:
        await transaction.commit()

    answer = (await asyncio.gather(forking, return_exceptions=True))[0]
    assert isinstance(answer, QuorumLogError), "it names what is deleted"


async def the_last_fork_lets_go(found: Logs) -> None:
    source = await found.source()
    fork = await found.fork(source, 20)
    await found.client.delete(source)

    await found.client.delete(fork)

    assert await found.client.orphans(older_than_s=0) == tuple(ids(source))


async def a_truncated_fork_lets_go(found: Logs) -> None:
    source = await found.source()
    fork = await found.fork(source, 20)
    await found.client.delete(source)

    await found.swapped(fork.truncated(10))

    assert ids(source)[0] in await found.client.orphans(older_than_s=0)


async def a_deleted_name_is_taken_while_something_came_of_it(found: Logs) -> None:
    source = await found.source()
    middle = await found.fork(source, 0, "middle")
    await found.fork(middle, 0, "last")
    await found.client.delete(middle)
    await found.client.delete(source)

    answer = await asyncio.gather(
        found.client.create(LogMetadata("source", SETTINGS)), return_exceptions=True
    )

    assert isinstance(answer[0], LogDeleted)


async def a_name_that_is_given_again_is_no_fork(found: Logs) -> None:
    source = await found.source()
    middle = await found.fork(source, 0, "middle")
    last = await found.fork(middle, 0, "last")
    await found.client.delete(middle)
    await found.client.delete(last)
    await found.client.create(LogMetadata("middle", SETTINGS))
    await found.client.delete(source)

    answer = await asyncio.gather(found.client.create(SOURCE), return_exceptions=True)

    assert not isinstance(answer[0], BaseException), "no fork of it is there"


# --- what is taken out -------------------------------------------------------------------------


@stand_in
async def none_shared(
    _original: Any, _connection: Connection, _ledgers: Collection[int]
) -> set[int]:
    """No ledger is looked up among those that forks name."""
    return set()


@stand_in
async def looked_up_first(
    _original: Any, connection: Connection, wanted: Collection[int]
) -> set[int]:
    """Forks are asked for in the statement that locks, whose snapshot is of before its wait."""
    records = await connection.fetch(
        "SELECT ledger_id FROM ledgers l WHERE ledger_id = ANY($1::bigint[]) AND state = 'CLOSED'"
        " AND NOT EXISTS (SELECT FROM shared_ledgers s WHERE s.ledger_id = l.ledger_id)"
        " ORDER BY ledger_id FOR UPDATE",
        sorted(wanted),
    )
    deleted = {record["ledger_id"] for record in records}
    await ledgers.bury(connection, sorted(deleted))
    return deleted


@stand_in
async def unlocked(_original: Any, connection: Connection, fork: LogMetadata) -> None:
    """A fork names ledgers without a look at their rows."""
    await connection.execute(
        "INSERT INTO shared_ledgers (ledger_id, log) SELECT unnest($1::bigint[]), $2",
        [item.ledger_id for item in fork.shared],
        fork.name,
    )


@stand_in
async def nothing(_original: Any, *_given: object) -> None:
    return None


@stand_in
async def only_added(original: Any, connection: Connection, name: str, source: str | None) -> None:
    """What a name was forked from before is not forgotten."""
    if source is not None:
        await original(connection, name, source)


def one_level(_original: Any) -> Any:
    """Only forks of the log itself keep its name."""
    return "SELECT EXISTS (SELECT FROM forks JOIN logs ON name = fork WHERE source = $1 AND body IS NOT NULL)"


def whatever_is_shared(original: Any) -> Any:
    return original.replace(NOT_SHARED, "true")


GUARDS: Final = (
    Patch(ledgers, "shared_among", none_shared).guard(
        "a deleted log takes along what forks name",
        "rule 27a",
        a_deleted_source_leaves_what_a_fork_names,
    ),
    Patch(ledgers, "shared_among", none_shared).guard(
        "a ledger that its log let go of is deleted though a fork names it",
        "rule 27a",
        a_truncated_source_leaves_what_a_fork_names,
    ),
    Patch(logs, "ORPHANS", whatever_is_shared).guard(
        "the sweep is told of ledgers that forks name",
        "rule 27a",
        the_sweep_is_told_of_nothing_that_a_fork_names,
    ),
    Patch(logs, "leave_tombstones", looked_up_first).guard(
        "forks are looked for before the ledgers are locked",
        "rule 27a",
        a_deletion_that_waits_for_a_fork_sees_it,
    ),
    Patch(logs, "share", unlocked).guard(
        "a fork names ledgers whose rows it has not locked", "rule 27a", a_fork_waits_for_a_deletion
    ),
    Patch(logs, "let_go", nothing).guard(
        "a deleted fork goes on naming ledgers", "rule 27a", the_last_fork_lets_go
    ),
    Patch(logs, "let_go", nothing).guard(
        "a truncated fork goes on naming ledgers", "rule 27a", a_truncated_fork_lets_go
    ),
    Patch(logs, "check_name_free", nothing).guard(
        "a deleted log's name is free while forks of it are there",
        "rule 27a",
        a_deleted_name_is_taken_while_something_came_of_it,
    ),
    Patch(forks, "KEPT", one_level).guard(
        "a deleted log's name is free while forks of its forks are there",
        "rule 27a",
        a_deleted_name_is_taken_while_something_came_of_it,
    ),
    Patch(logs, "note_source", only_added).guard(
        "a name that was a fork's stays one", "rule 27a", a_name_that_is_given_again_is_no_fork
    ),
)


async def played(scenario: Scenario, stores: Stores) -> None:
    async with serving(stores) as service, logs_of(service, stores) as found:
        await scenario(found)


@pytest.mark.parametrize(
    "scenario",
    dict.fromkeys(guard.claim for guard in GUARDS),
    ids=lambda scenario: scenario.__name__,
)
async def test_the_scenario_holds(scenario: Scenario, stores: Stores) -> None:
    await played(scenario, stores)


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
async def test_a_guard_that_is_taken_out_is_missed(guard: Guard, stores: Stores) -> None:
    with applied(guard), pytest.raises(AssertionError):
        await played(guard.claim, stores)
