"""Forks in the database: whatever deletes ledgers leaves those that a fork names, in every order (rule 27a)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import pytest

from loadtest.stores import Stores
from quorumlog.errors import (
    InvalidRequest,
    LogDeleted,
    LogReplaced,
    NoSuchLedger,
    NoSuchLog,
    OwnedByLog,
    QuorumLogError,
)
from quorumlog.net.gateway_clients import LogClient, TransactionClient
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings
from quorumlog.protocol.metadata import LedgerMetadata, Lineage
from quorumlog.protocol.quorum import Quorum
from services.gateway.logs.store import MetadataLogs
from services.metadata import forks, ledgers
from services.metadata import logs as stored
from services.metadata.database import Connection
from services.metadata.forks import NOT_SHARED
from tests.mutation.mutants.guards import answers
from tests.mutation.mutants.hunt import Guard, Patch, applied, stand_in
from tests.support.database import connected
from tests.support.waiting import until
from tests.unit.metadata.support import DRAFT, WAITING, Service, swapped

SETTINGS = LogSettings(Quorum(3, 3, 2))
SOURCE = LogMetadata("source", SETTINGS)


@dataclass(frozen=True, slots=True)
class Logs:
    """A log of three ledgers of ten records each, the last of which is open, and what is done to it."""

    service: Service
    client: LogClient
    database: Connection
    """Beside the service's."""

    async def ledger(self, log: str = "source", *, is_open: bool = False) -> LedgerMetadata:
        row = await self.service.client.create(replace(DRAFT, log=log))
        if is_open:
            return row
        return await swapped(self.service.client, row.closed(last_entry=9, length=100))

    async def source(self) -> LogMetadata:
        row, _ = await self.client.create(SOURCE)
        sealed = [await self.ledger(), await self.ledger()]
        last = await self.ledger(is_open=True)
        items = [
            LogItem(one.ledger_id, 10 * at, 10 * at + 9, bytes=100) for at, one in enumerate(sealed)
        ]
        return await self.swapped(replace(row, items=(*items, LogItem(last.ledger_id, 20))))

    async def swapped(self, row: LogMetadata) -> LogMetadata:
        is_done, now = await self.client.cas(row)
        assert is_done
        return now

    async def fork(self, source: LogMetadata, at: int, name: str = "fork") -> LogMetadata:
        row, is_new = await self.client.fork(LogMetadata(name, SETTINGS), source, at)
        assert is_new
        return row

    async def exists(self, *ledgers: int) -> list[bool]:
        found = []
        for ledger_id in ledgers:
            try:
                await self.service.client.get(ledger_id)
            except NoSuchLedger:
                found.append(False)
            else:
                found.append(True)
        return found

    async def is_waiting(self, task: asyncio.Future[Any]) -> bool:
        """Whether a transaction waits for a lock, or the task is done."""
        return task.done() or bool(await self.database.fetchval(WAITING))


@pytest.fixture
async def logs(service: Service, stores: Stores) -> AsyncIterator[Logs]:
    async with connected(stores) as database:
        yield Logs(service, LogClient(service.client), database)


def ids(row: LogMetadata) -> list[int]:
    return [item.ledger_id for item in row.items]


def places(row: LogMetadata) -> list[tuple[int, int | None, int | None]]:
    return [(item.ledger_id, item.first_offset, item.last_offset) for item in row.items]


async def test_a_fork_shares_ranges_of_the_sources_closed_ledgers(logs: Logs) -> None:
    source = await logs.source()
    first, second, _ = ids(source)

    fork = await logs.fork(source, 13)

    assert places(fork) == [(first, 0, 9), (second, 10, 12)]
    assert (fork.forked_at, fork.end_offset, fork.shared) == (13, 13, fork.items)
    assert await logs.client.get("source") == source
    assert await logs.client.get("fork") == fork
    assert await logs.client.orphans(older_than_s=0) == ()


@pytest.mark.parametrize(("at", "count"), [(0, 0), (1, 1), (10, 1), (11, 2), (20, 2)])
async def test_a_fork_begins_at_any_offset_that_is_sealed(logs: Logs, at: int, count: int) -> None:
    source = await logs.source()

    fork = await logs.fork(source, at)

    assert (len(fork.items), fork.end_offset, fork.first_offset) == (count, at, 0)


async def test_what_is_not_sealed_or_dropped_is_in_no_fork(logs: Logs) -> None:
    source = await logs.source()
    with pytest.raises(InvalidRequest):
        await logs.fork(source, 21)
    source = await logs.swapped(source.truncated(10))
    with pytest.raises(InvalidRequest):
        await logs.fork(source, 9)
    with pytest.raises(LogReplaced):
        await logs.fork(replace(source, created_at="2020-01-01T00:00:00.000000Z"), 20)

    fork = await logs.fork(source, 20)

    assert (fork.first_offset, places(fork)) == (10, places(source)[:1])
    with pytest.raises(NoSuchLog):
        await logs.fork(replace(source, name="nothing"), 0, "other")


async def test_a_fork_goes_on_in_ledgers_of_its_own_and_keeps_what_it_shares(logs: Logs) -> None:
    source = await logs.source()
    fork = await logs.fork(source, 13)
    mine = await logs.ledger("fork", is_open=True)

    grown = await logs.swapped(
        fork.with_ledger(mine.ledger_id).with_ends({}, producers=(), now_ms=1)
    )

    assert places(grown) == [*places(fork), (mine.ledger_id, 13, None)]
    placed = await logs.service.client.get(mine.ledger_id)
    shared = tuple((item.ledger_id, item.first_offset or 0) for item in fork.items)
    assert placed.lineage == Lineage(
        fork.created_at, shared, placed_by=grown.attempt, forked_at=13, shared=shared
    )


async def test_what_a_log_shares_is_what_it_began_with(logs: Logs) -> None:
    source = await logs.source()
    fork = await logs.fork(source, 13)

    with pytest.raises(InvalidRequest):
        await logs.client.create(replace(fork, name="another"))
    for wrong in (
        replace(fork, forked_at=14),
        replace(fork, forked_at=None),
        replace(fork, items=(LogItem(ids(source)[2], 0, 12),)),
        replace(source.truncated(20), items=(), next_offset=20, forked_at=0),
    ):
        with pytest.raises(QuorumLogError):
            await logs.client.cas(wrong)

    assert await logs.client.get("fork") == fork
    assert await logs.client.get("source") == source


Delete = Callable[[Logs, LogMetadata, int], Awaitable[object]]
"""Lets go of the source's ledgers below offset 20, of which one id is given; may be refused."""


async def the_log(logs: Logs, source: LogMetadata, _ledger_id: int) -> None:
    await logs.client.delete(source)


async def by_truncation(logs: Logs, source: LogMetadata, ledger_id: int) -> None:
    await logs.swapped(source.truncated(20))
    await logs.client.delete_unnamed(ledger_id)


async def by_a_new_generation(logs: Logs, source: LogMetadata, ledger_id: int) -> None:
    item = source.items[-1]
    await logs.swapped(replace(source, items=(item,), first_offset=20))
    await logs.client.delete_unnamed(ledger_id)


async def the_ledger(logs: Logs, source: LogMetadata, ledger_id: int) -> None:
    """By the API of ledgers, once its log has let go of it."""
    await logs.swapped(source.truncated(20))
    row = await logs.service.client.get(ledger_id)
    await logs.service.client.delete(ledger_id, version=row.version)


async def delete_row(logs: Logs, ledger_id: int) -> None:
    """Delete a ledger's row as the metadata service does."""
    await logs.database.execute(
        "UPDATE ledgers SET version = version + 1, body = NULL WHERE ledger_id = $1", ledger_id
    )


async def refusal(asked: Awaitable[object]) -> bool:
    """Whether a deletion is refused, since a fork names the ledger."""
    try:
        await asked
    except OwnedByLog:
        return True
    return False


WAYS: tuple[Delete, ...] = (
    the_log,
    by_truncation,
    by_a_new_generation,
    the_ledger,
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", [5, 10, 20], ids=["within", "at-its-end", "after"])
async def test_what_releases_a_ledger_spares_a_forks(logs: Logs, way: Delete, at: int) -> None:
    source = await logs.source()
    first = ids(source)[0]
    fork = await logs.fork(source, at)

    refused = await refusal(way(logs, source, first))

    assert refused is (way is not the_log)
    assert await logs.exists(*ids(fork)) == [True] * len(fork.items)
    assert await logs.client.get("fork") == fork
    swept = await logs.client.orphans(older_than_s=0)
    assert set(swept).isdisjoint(ids(fork))


@pytest.mark.parametrize("way", WAYS[:2])
async def test_the_last_fork_releases_what_its_own_log_released(logs: Logs, way: Delete) -> None:
    source = await logs.source()
    first, second, _ = ids(source)
    forks = [await logs.fork(source, 20, name) for name in ("a", "b")]
    inner = await logs.fork(forks[0], 10, "c")
    assert await refusal(way(logs, source, first)) is (way is by_truncation)

    kept = []
    for row in (*forks, inner):
        await logs.client.delete(row)
        swept = await logs.client.orphans(older_than_s=0)
        kept.append(sorted({first, second} - set(swept)))

    assert kept == [[first, second], [first], []]
    for ledger_id in (first, second):
        await logs.client.delete_unnamed(ledger_id)
    assert await logs.exists(first, second) == [False, False]


async def test_a_fork_that_is_truncated_lets_go_of_whole_ranges(logs: Logs) -> None:
    source = await logs.source()
    first, second, _ = ids(source)
    fork = await logs.fork(source, 15)
    await logs.client.delete(source)

    fork = await logs.swapped(fork.truncated(10))

    assert places(fork) == [(second, 10, 14)]
    await logs.client.delete_unnamed(first)
    with pytest.raises(OwnedByLog):
        await logs.client.delete_unnamed(second)
    assert await logs.exists(first, second) == [False, True]


async def test_a_fork_and_its_end_change_nothing_of_a_source_that_lives(logs: Logs) -> None:
    source = await logs.source()
    fork = await logs.fork(source, 20)

    await logs.client.delete(fork)

    assert await logs.exists(*ids(source)) == [True] * 3
    assert await logs.client.orphans(older_than_s=0) == ()
    with pytest.raises(OwnedByLog):
        await logs.client.delete_unnamed(ids(source)[0])
    assert await logs.client.get("source") == source


async def test_the_name_of_a_deleted_log_is_taken_while_forks_of_it_are_there(logs: Logs) -> None:
    source = await logs.source()
    middle = await logs.fork(source, 0, "middle")
    last = await logs.fork(middle, 0, "last")

    await logs.client.delete(source)
    await logs.client.delete(middle)

    for name in ("source", "middle"):
        with pytest.raises(LogDeleted):
            await logs.client.get(name)
        with pytest.raises(LogDeleted):
            await logs.client.create(LogMetadata(name, SETTINGS))
    with pytest.raises(LogDeleted):
        await logs.client.delete(source)
    with pytest.raises(LogDeleted):
        await logs.fork(middle, 0, "another")
    await logs.client.delete(last)
    for name in ("source", "middle", "last"):
        with pytest.raises(NoSuchLog) as missing:
            await logs.client.get(name)
        assert not isinstance(missing.value, LogDeleted)
        assert (await logs.client.create(LogMetadata(name, SETTINGS)))[1]


@pytest.mark.parametrize("had_a_fork", [False, True])
async def test_a_former_forks_name_is_free_of_its_source(logs: Logs, *, had_a_fork: bool) -> None:
    source = await logs.source()
    fork = await logs.fork(source, 0)
    last = [await logs.fork(fork, 0, "last")] if had_a_fork else []
    for row in (fork, *last):
        await logs.client.delete(row)
    await logs.client.create(LogMetadata("fork", SETTINGS))

    await logs.client.delete(source)

    assert (await logs.client.create(SOURCE))[1]


async def test_a_repeat_of_a_forks_creation_gets_the_fork(logs: Logs) -> None:
    source = await logs.source()
    fork = await logs.fork(source, 10)

    again, is_new = await logs.client.fork(LogMetadata("fork", SETTINGS), source, 20)

    assert (again, is_new) == (fork, False)


async def test_bookies_are_told_of_no_deletion_of_what_a_fork_names(logs: Logs) -> None:
    """What a gateway asks before it tells them (rule 18e)."""
    store = MetadataLogs(logs.client, TransactionClient(logs.service.client))
    source = await logs.source()
    rows = [await logs.service.client.get(ledger_id) for ledger_id in ids(source)]
    assert await store.unshared(rows) == rows

    await logs.fork(source, 11)

    assert await store.unshared(rows) == rows[2:]


# --- at once -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_a_fork_and_concurrent_releases_agree(logs: Logs, way: Delete) -> None:
    """Either the fork is there with all that it names, or it was refused."""
    for _ in range(8):
        source = await logs.source()

        forked, _ = await asyncio.gather(
            logs.client.fork(LogMetadata("fork", SETTINGS), source, 20),
            way(logs, source, ids(source)[0]),
            return_exceptions=True,
        )

        if isinstance(forked, BaseException):
            assert isinstance(forked, NoSuchLog | InvalidRequest), forked
        else:
            fork, _ = forked
            # Where the truncation came first it begins where that let go, with nothing to share.
            assert await logs.exists(*ids(fork)) == [True] * len(fork.items)
            assert len(fork.items) == 2 or fork.first_offset == 20
            await logs.client.delete(fork)
        if way is not the_log:
            await logs.client.delete(await logs.client.get("source"))


async def test_a_ledger_that_is_being_deleted_is_in_no_fork(logs: Logs) -> None:
    """The fork waits for the deletion, and then finds that it shares nothing that is there."""
    source = await logs.source()
    transaction = logs.database.transaction()
    await transaction.start()
    await delete_row(logs, ids(source)[0])
    forking = asyncio.ensure_future(logs.client.fork(LogMetadata("fork", SETTINGS), source, 20))
    try:
        await until(lambda: logs.is_waiting(forking), "it waits, or is done")
    finally:
        await transaction.commit()

    with pytest.raises(InvalidRequest):
        await forking
    with pytest.raises(NoSuchLog):
        await logs.client.get("fork")


@pytest.mark.parametrize("way", WAYS)
async def test_a_deletion_that_waits_for_a_fork_sees_it(logs: Logs, way: Delete) -> None:
    """What it asks of forks before it has the lock of the ledger's row would be of before the fork."""
    source = await logs.source()
    first, second, _ = ids(source)
    if way is not the_log:
        await logs.swapped(source.truncated(20))
        source = await logs.client.get("source")
    transaction = logs.database.transaction()
    await transaction.start()
    # As a fork's creation does, which is about to be committed.
    await logs.database.execute(
        "SELECT FROM ledgers WHERE ledger_id = ANY($1::bigint[]) FOR SHARE", [first, second]
    )
    await logs.database.execute(
        "INSERT INTO shared_ledgers (ledger_id, log) SELECT unnest($1::bigint[]), 'fork'",
        [first, second],
    )
    deleting = asyncio.ensure_future(
        way(logs, source, first)
        if way in (the_log, the_ledger)
        else logs.client.delete_unnamed(first)
    )
    try:
        await until(lambda: logs.is_waiting(deleting), "it waits, or is done")
    finally:
        await transaction.commit()

    assert await refusal(deleting) is (way is not the_log)
    assert await logs.exists(first, second) == [True, True]


async def test_of_forks_that_end_at_once_the_later_one_lets_the_ledgers_go(logs: Logs) -> None:
    source = await logs.source()
    forks = [await logs.fork(source, 20, f"fork-{number}") for number in range(4)]
    await logs.client.delete(source)

    await asyncio.gather(*(logs.client.delete(fork) for fork in forks))

    assert await logs.client.orphans(older_than_s=0) == tuple(ids(source))
    assert (await logs.client.create(SOURCE))[1]


# --- guards that are taken out one by one: a claim above must fail -------------------------------


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
async def unlocked(_original: Any, connection: Connection, fork: LogMetadata) -> LogMetadata:
    """A fork names ledgers without a look at their rows."""
    await connection.execute(
        "INSERT INTO shared_ledgers (ledger_id, log) SELECT unnest($1::bigint[]), $2",
        [item.ledger_id for item in fork.shared],
        fork.name,
    )
    return fork


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
    Patch(ledgers, "shared_among", answers(set())).guard(
        "a deleted log takes along what forks name",
        "rule 27a",
        partial(test_what_releases_a_ledger_spares_a_forks, way=the_log, at=20),
    ),
    Patch(ledgers, "shared_among", answers(set())).guard(
        "a ledger that its log let go of is deleted though a fork names it",
        "rule 27a",
        partial(test_what_releases_a_ledger_spares_a_forks, way=by_truncation, at=20),
    ),
    Patch(stored, "ORPHANS", whatever_is_shared).guard(
        "the sweep is told of ledgers that forks name",
        "rule 27a",
        partial(test_what_releases_a_ledger_spares_a_forks, way=by_truncation, at=20),
    ),
    Patch(stored, "leave_tombstones", looked_up_first).guard(
        "forks are looked for before the ledgers are locked",
        "rule 27a",
        partial(test_a_deletion_that_waits_for_a_fork_sees_it, way=the_log),
    ),
    Patch(forks, "share", unlocked).guard(
        "a fork names ledgers whose rows it has not locked",
        "rule 27a",
        test_a_ledger_that_is_being_deleted_is_in_no_fork,
    ),
    Patch(forks, "let_go", answers(None)).guard(
        "a deleted fork goes on naming ledgers",
        "rule 27a",
        test_of_forks_that_end_at_once_the_later_one_lets_the_ledgers_go,
    ),
    Patch(forks, "let_go", answers(None)).guard(
        "a truncated fork goes on naming ledgers",
        "rule 27a",
        test_a_fork_that_is_truncated_lets_go_of_whole_ranges,
    ),
    Patch(forks, "check_name_free", answers(None)).guard(
        "a deleted log's name is free while forks of it are there",
        "rule 27a",
        test_the_name_of_a_deleted_log_is_taken_while_forks_of_it_are_there,
    ),
    Patch(forks, "KEPT", one_level).guard(
        "a deleted log's name is free while forks of its forks are there",
        "rule 27a",
        test_the_name_of_a_deleted_log_is_taken_while_forks_of_it_are_there,
    ),
    Patch(forks, "note_source", only_added).guard(
        "a name that was a fork's stays one",
        "rule 27a",
        partial(test_a_former_forks_name_is_free_of_its_source, had_a_fork=True),
    ),
)


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
async def test_a_guard_that_is_taken_out_is_missed(guard: Guard, logs: Logs) -> None:
    with (
        applied(guard),
        pytest.raises((AssertionError, pytest.fail.Exception, OwnedByLog, NoSuchLog)),
    ):
        await guard.claim(logs)
