"""Copies of rows at a bookie: kept before an entry is acknowledged (rule 18b), told for a rebuild (rule 18d)."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from quorumlog.protocol.messages import Status
from quorumlog.protocol.replica import (
    AddAsked,
    FenceAsked,
    RowKept,
    RowReported,
    RunStored,
    Verdict,
)
from quorumlog.protocol.row_copy import RowCopy, RowName
from services.bookie import holdings, pending
from services.bookie.space import Space
from services.bookie.store import Store
from tests.support.replicas import ask, memory_replica
from tests.support.waiting import until
from tests.unit.bookie.support import KEY, ME, SMALL, add, again, keep_row, opened, run_of, started

FIRST = RowName(1, b"a" * 16)
SECOND = RowName(4, b"b" * 16)
FORK = RowName(4, b"c" * 16)


def named(name: RowName, entry_id: int = 0, *, brings: bool = True) -> AddAsked:
    """An add of one entry by a writer whose row has this name."""
    row = RowCopy(name, b"row %d" % name.version) if brings else None
    return AddAsked(ME, run_of(7, [entry_id]), KEY, named_by=name, row=row)


async def verdict_of(store: Store, asked: AddAsked) -> Verdict:
    answered: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
    store.add(asked, answered.set_result)
    return await answered


def test_an_add_whose_row_was_never_brought_is_no_knowledge() -> None:
    replica = memory_replica(ME)

    refused = ask(replica, named(FIRST, brings=False))

    assert refused.status is Status.UNKNOWN
    assert not refused.records
    assert not replica.holdings.row_names


def test_a_copy_is_recorded_before_the_entries_that_it_came_with() -> None:
    replica = memory_replica(ME)

    verdict = ask(replica, named(FIRST))

    assert [type(record) for record in verdict.records] == [RowKept, RunStored]
    assert verdict.after == 2, "the answer waits for both"


def test_a_copy_is_recorded_once() -> None:
    replica = memory_replica(ME)
    ask(replica, named(FIRST))

    again = ask(replica, named(FIRST, 1))
    without = ask(replica, named(FIRST, 2, brings=False))

    assert [type(record) for record in again.records] == [RunStored]
    assert without.status is Status.OK


def test_a_repeated_add_still_brings_its_row() -> None:
    replica = memory_replica(ME)
    ask(replica, AddAsked(ME, run_of(7, [0]), KEY, recovery=True))

    repeated = ask(replica, named(SECOND))

    assert [type(record) for record in repeated.records] == [RowKept]
    assert repeated.after == 2


def test_a_member_of_an_older_row_only_is_no_member() -> None:
    replica = memory_replica(ME)
    ask(replica, named(FIRST))

    refused = ask(replica, named(SECOND, 1, brings=False))

    assert refused.status is Status.UNKNOWN


def test_a_recovery_add_needs_no_copy() -> None:
    forced = replace(named(FIRST, brings=False), recovery=True, named_by=None)

    assert ask(memory_replica(ME), forced).status is Status.OK


def test_a_refused_add_leaves_no_copy() -> None:
    replica = memory_replica(ME)

    refused = ask(replica, replace(named(FIRST), read_only=True))

    assert refused.status is Status.READ_ONLY
    assert not replica.holdings.row_names


def test_copies_of_two_lines_of_history_stand_beside_each_other() -> None:
    replica = memory_replica(ME)

    ask(replica, named(SECOND))
    ask(replica, named(FORK, 1))

    assert replica.holdings.row_names == (SECOND, FORK)


def test_a_copy_is_told_without_an_add_once() -> None:
    replica = memory_replica(ME)
    reported = RowReported(ME, RowCopy(FIRST, b"row"), KEY)

    verdict = replica.step(reported)
    again = replica.step(reported)

    assert (verdict.status, verdict.after) == (Status.OK, 1)
    assert [type(record) for record in verdict.records] == [RowKept]
    assert (again.status, again.after, again.records) == (Status.OK, 1, ())


@pytest.mark.parametrize(
    ("member", "key", "status"),
    [("b2@1", KEY, Status.NOT_MINE), (ME, b"o" * 32, Status.WRONG_KEY)],
)
def test_a_copy_for_another_member_is_refused(member: str, key: bytes, status: Status) -> None:
    replica = memory_replica(ME)
    ask(replica, named(FIRST))

    refused = replica.step(RowReported(member, RowCopy(SECOND, b"row"), key))

    assert refused.status is status
    assert replica.holdings.row_names == (FIRST,)


def test_a_copy_for_an_older_incarnation_is_refused() -> None:
    """Rule 18b: whoever sends it counts the member that the row names as a holder of the copy."""
    replica = memory_replica("b1@2")

    refused = replica.step(RowReported("b1@1", RowCopy(FIRST, b"row"), KEY))

    assert refused.status is Status.NOT_MINE
    assert replica.holdings.row_names == ()


def test_a_fenced_member_still_keeps_copies_and_a_deleted_ledger_does_not() -> None:
    replica = memory_replica(ME)
    ask(replica, FenceAsked(ME, KEY))

    fenced = replica.step(RowReported(ME, RowCopy(FIRST, b"row"), KEY))
    replica.delete()
    deleted = replica.step(RowReported(ME, RowCopy(SECOND, b"row"), KEY))

    assert fenced.status is Status.OK
    assert deleted.status is Status.UNKNOWN
    assert replica.holdings.row_names == ()


@pytest.mark.parametrize("has_checkpoint", [False, True])
async def test_copies_outlast_restarts(store: Store, *, has_checkpoint: bool) -> None:
    await verdict_of(store, named(FIRST))
    await verdict_of(store, named(SECOND, 1))
    if has_checkpoint:
        await store.checkpoint()
    store = await again(store)
    held = store.ledger(7)

    assert held.row_names == (FIRST, SECOND)
    assert held.row_copy(SECOND).body == b"row 4"
    assert (await verdict_of(store, named(SECOND, 2, brings=False))).status is Status.OK


async def test_copies_outlast_the_segment_that_they_came_in(root: Path) -> None:
    store = started(root / "d", replace(SMALL, segment_bytes=4096))
    await verdict_of(store, named(FIRST))
    for entry_id in range(1, 40):
        asked = AddAsked(ME, run_of(8, [entry_id], "x" * 40), KEY, recovery=True)
        assert (await verdict_of(store, asked)).status is Status.OK
    store.drop(7, keep_stub=True)
    await Space(store, live_share_min=0.9).free()
    assert store.counters["removed_segments"] > 0
    await store.stop()

    (root / "d" / "index" / "CURRENT").unlink()
    store = started(root / "d")

    assert store.ledger(7).row_names == (FIRST,)
    assert store.ledger(7).row_copy(FIRST).body == b"row 1"


async def test_copies_go_with_a_ledger_that_is_deleted(store: Store) -> None:
    await verdict_of(store, named(FIRST))
    await store.checkpoint()
    store.drop(7, keep_stub=False)
    await store.checkpoint()
    assert not list(store.index.copies(7))
    store = await again(store)

    assert store.ledger(7).row_names == ()
    assert store.holdings.is_deleted(7)


async def test_a_quiet_bookie_keeps_no_copies(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of large metadata would stay until as many bytes are written as `CHECKPOINT_BYTES` says."""
    monkeypatch.setattr(pending, "CHECKPOINT_S", 0.05)
    store = started(root / "d")
    await keep_row(store, 7, FIRST, b"x" * 15_000)
    ledger = store.holdings.ledger(7)

    await until(lambda: not ledger._copies, "they are in the index")

    assert ledger.row_copy(FIRST).body == b"x" * 15_000


async def report(store: Store, ledger_id: int, *versions: int) -> None:
    for version in versions:
        answered: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        copy = RowCopy(RowName(version, b"a" * 16), b"row %d of %d" % (version, ledger_id))
        store.ask(ledger_id, RowReported(ME, copy, KEY), answered.set_result)
        await answered


async def reported(store: Store, after: int = -1, limit: int = 100) -> dict[int, object]:
    """By ledger: its copies, or None where it is deleted."""
    found, _ = await store.holdings.rows_page(after, limit)
    return {held.ledger_id: None if held.deleted else held.copies for held in found}


async def test_copies_keys_and_deletions_are_told_across_restarts(root: Path, store: Store) -> None:
    await report(store, 3, 1, 2)
    await report(store, 5, 1)
    await add(store, run_of(9, [0, 1]))
    store.drop(5, keep_stub=False)
    await store.checkpoint()
    await report(store, 3, 4)
    await report(store, 7, 1)
    await report(store, 8, 1)
    store.drop(8, keep_stub=False)
    expected = {
        3: ("row 1 of 3", "row 2 of 3", "row 4 of 3"),
        5: None,
        7: ("row 1 of 7",),
        8: None,
        9: (),
    }

    live = await reported(store)
    page, _ = await store.holdings.rows_page(-1, 100)
    await store.stop()
    waiting = opened(root / "d")
    replayed = await reported(waiting)
    waiting.close()

    assert live == replayed == expected
    assert {held.ledger_key for held in page if not held.deleted} == {KEY}
    assert page[-1].highest_entry == 1


async def test_pages_go_on_behind_the_last_ledger(store: Store) -> None:
    for ledger_id in range(5):
        await report(store, ledger_id, 1)
    store.drop(2, keep_stub=False)

    first, following = await store.holdings.rows_page(-1, 2)
    rest = await reported(store, following or 0)
    _, end = await store.holdings.rows_page(following or 0, 3)

    assert ([held.ledger_id for held in first], following) == ([0, 1], 1)
    assert list(rest) == [2, 3, 4]
    assert end is None


async def test_a_page_ends_by_bytes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "ROWS_BYTES_MAX", 15)
    store = started(root / "d")
    for ledger_id in range(4):
        await report(store, ledger_id, 1)

    found, following = await store.holdings.rows_page(-1, 100)

    assert ([held.ledger_id for held in found], following) == ([0, 1], 1)
