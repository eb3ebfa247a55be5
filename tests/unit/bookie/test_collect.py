"""Collection of garbage: what proves that a ledger may be dropped, and which copies are presented meanwhile."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from quorumlog.protocol.messages import CasStatus, Status
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.row_copy import COPIES_KEPT, RowCopy, RowName
from quorumlog.wire.bodies import PROOFS_MAX
from services.bookie.collect import Found
from services.bookie.store import Store
from services.bookie.witnesses import FRESH_MAX, FreshCopies
from tests.unit.bookie.collecting import (
    AWAY,
    GONE,
    ROW,
    Rows,
    collector_of,
    copy_of,
    filled,
    rounds,
)
from tests.unit.bookie.support import (
    add,
    again,
    assert_right,
    ids_of,
    image,
    keep_row,
    opened,
    read,
    read_lac,
    run_of,
)


async def test_a_deleted_ledger_is_dropped_at_the_second_look(root: Path) -> None:
    store = await filled(root / "d")
    rows = Rows({7: GONE, 8: GONE})
    collector = collector_of(store, rows)
    before = len(store.segments.numbers())

    await collector.round()
    assert ids_of(await read(store, 7, 0, 500)) == list(range(120))
    await collector.round()

    assert store.holdings.row(7) is None
    assert [ledger for ledger, _ in store.holdings.ledgers()] == [9]
    assert len(store.segments.numbers()) < before
    assert ids_of(await read(store, 9, 0, 5)) == [0, 1, 2]
    for lost_index in (False, True):
        store = await again(store, lost_index=lost_index)
        assert_right(await read(store, 9, 0, 5), 9)
        assert ids_of(await read(store, 9, 0, 5)) == [0, 1, 2]
        assert (await read_lac(store, 9)).last_add_confirmed == 1
        assert (await add(store, run_of(9, [3]))).status is Status.FENCED
        assert ids_of(await read(store, 7, 0, 500)) == []


@pytest.mark.parametrize(
    "seen", [(CasStatus.UNKNOWN, None), (CasStatus.OK, ROW), (CasStatus.OK, None)]
)
async def test_nothing_is_dropped_without_proof(
    root: Path, seen: tuple[CasStatus, LedgerMetadata | None]
) -> None:
    store = await filled(root / "d")
    rows = Rows(dict.fromkeys((7, 8, 9), seen))
    collector = collector_of(store, rows)

    await rounds(collector, 3)

    assert [ledger for ledger, _ in store.holdings.ledgers()] == [7, 8, 9]


async def test_a_tombstone_missing_at_the_second_look_is_no_proof(root: Path) -> None:
    store = await filled(root / "d")
    rows = Rows()
    collector = collector_of(store, rows)
    for _ in range(3):
        rows.rows = {7: GONE}
        await collector.round()
        rows.rows = {}
        await collector.round()

    assert ids_of(await read(store, 7, 0, 500)) == list(range(120))


async def test_the_database_of_another_cluster_deletes_nothing(root: Path) -> None:
    store = await filled(root / "d")
    rows = Rows({7: GONE})
    rows.cluster = "another"
    collector = collector_of(store, rows)

    await rounds(collector, 3)

    assert rows.reads == 0
    assert store.holdings.row(7) is not None


async def test_a_dropped_copy_of_a_closed_ledger_keeps_its_fence(root: Path) -> None:
    store = await filled(root / "d")
    rows = Rows({7: (CasStatus.OK, AWAY), 9: (CasStatus.OK, replace(AWAY, ledger_id=9))})
    collector = collector_of(store, rows)
    await rounds(collector, 2)

    for lost_index in (False, True):
        store = await again(store, lost_index=lost_index)
        for ledger in (7, 9):
            assert ids_of(await read(store, ledger, 0, 500)) == []
            assert (await add(store, run_of(ledger, [500]))).status is Status.FENCED
        assert ids_of(await read(store, 8, 0, 500)) == list(range(120))
    # A repair may bring it back.
    assert (await add(store, run_of(9, range(3)), recovery=True)).status is Status.OK
    assert ids_of(await read(store, 9, 0, 5)) == [0, 1, 2]


async def test_a_repair_that_names_this_bookie_at_the_last_look_keeps_its_copy(root: Path) -> None:
    store = await filled(root / "d")
    rows = Rows({9: (CasStatus.OK, replace(AWAY, ledger_id=9))})
    collector = collector_of(store, rows)
    await collector.round()
    last_look = rows.reads + 2
    answers: list[Status] = []

    async def read_row(ledger_id: int, held: Sequence[RowName]) -> Found:
        del held
        rows.reads += 1
        if rows.reads == last_look:
            answers.append((await read(store, 9, 0, 5)).status)
            answers.append((await add(store, run_of(9, range(3)), recovery=True)).status)
            return CasStatus.OK, replace(ROW, ledger_id=9)
        return rows.rows.get(ledger_id, (CasStatus.OK, ROW))

    rows.listed = {7, 8}
    rows.read_one = read_row  # type: ignore[method-assign]
    await collector.round()

    assert answers == [Status.UNKNOWN, Status.UNKNOWN]
    assert ids_of(await read(store, 9, 0, 5)) == [0, 1, 2]


async def test_an_announced_tombstone_is_a_first_look_and_drops_nothing(root: Path) -> None:
    store = await filled(root / "d")
    rows = Rows({7: GONE})
    collector = collector_of(store, rows)

    await collector.deletions_announced([7])
    await collector.deletions_announced([7])
    await collector.deletions_announced([12345, 7])
    assert ids_of(await read(store, 7, 0, 500)) == list(range(120))

    await collector.recheck()
    assert store.holdings.row(7) is None
    assert [ledger for ledger, _ in store.holdings.ledgers()] == [8, 9]


async def test_many_deleted_ledgers_are_asked_about_in_pages(store: Store) -> None:
    """One question for each page and look: three pages at first, then two, as two ledgers stay, and a last look at both."""
    ledgers = range(7, 7 + 2 * PROOFS_MAX + 1)
    for ledger in ledgers:
        await add(store, run_of(ledger, [0]))
    rows = Rows(dict.fromkeys(ledgers, GONE))
    rows.rows[8] = (CasStatus.UNKNOWN, None)
    rows.rows[9] = (CasStatus.OK, replace(ROW, ledger_id=9))
    collector = collector_of(store, rows)

    await collector.deletions_announced(ledgers)
    await collector.recheck()

    assert [ledger for ledger, _ in store.holdings.ledgers()] == [8, 9]
    assert rows.questions == 3 + 2 + 2
    assert store.counters["dropped_ledgers"] == len(ledgers) - 2
    # What was withheld meanwhile is taken again.
    assert (await add(store, run_of(8, [1]))).status is Status.OK


async def test_what_a_page_does_not_tell_of_stays(root: Path) -> None:
    """Rules 4 and 18: an answer that leaves a ledger out says nothing about it."""
    store = await filled(root / "d")
    rows = Rows()

    async def read_all(held: Mapping[int, Sequence[RowName]]) -> Mapping[int, Found]:
        return dict.fromkeys(set(held) - {8}, GONE)

    rows.read = read_all  # type: ignore[method-assign]
    collector = collector_of(store, rows)
    await rounds(collector, 3)

    assert [ledger for ledger, _ in store.holdings.ledgers()] == [8]


async def test_a_copy_that_comes_during_a_page_keeps_its_ledger_only(root: Path) -> None:
    """Rule 18c: its change was not asked about; what was asked about the others holds."""
    store = await filled(root / "d")
    rows = Rows()
    count = 0

    async def read_all(held: Mapping[int, Sequence[RowName]]) -> Mapping[int, Found]:
        nonlocal count
        if 8 in held:
            count += 1
            await keep_row(store, 8, copy_of(count))
        return dict.fromkeys(held, GONE)

    rows.read = read_all  # type: ignore[method-assign]
    collector = collector_of(store, rows)
    await rounds(collector, 3)

    assert count >= 3
    assert [ledger for ledger, _ in store.holdings.ledgers()] == [8]


async def test_a_database_that_lacks_a_held_copys_change_drops_nothing(root: Path) -> None:
    store = await filled(root / "d")
    rows = Rows({7: GONE, 8: (CasStatus.OK, AWAY)})
    rows.contained = {copy_of(1)}
    for ledger_id in (7, 8):
        for version in (1, 2):
            await keep_row(store, ledger_id, copy_of(version))
    collector = collector_of(store, rows)

    await rounds(collector, 3)
    assert ids_of(await read(store, 7, 0, 500)) == list(range(120))
    assert ids_of(await read(store, 8, 0, 500)) == list(range(120))

    rows.contained.add(copy_of(2))
    await rounds(collector, 2)
    assert store.holdings.row(7) is None
    assert ids_of(await read(store, 8, 0, 500)) == []
    assert store.ledger(8).row_names == (copy_of(1), copy_of(2)), "the stub keeps its copies"


async def test_a_copy_that_comes_while_the_database_is_asked_keeps_the_ledger(root: Path) -> None:
    store = await filled(root / "d")
    rows = Rows()
    collector = collector_of(store, rows)
    count = 0

    async def read_row(ledger_id: int, held: Sequence[RowName]) -> Found:
        nonlocal count
        del ledger_id, held
        count += 1
        await keep_row(store, 7, copy_of(count))
        return GONE

    rows.read_one = read_row  # type: ignore[method-assign]
    rows.listed = {8, 9}
    await rounds(collector, 3)

    assert count >= 3
    assert ids_of(await read(store, 7, 0, 500)) == list(range(120))


async def test_copies_are_forgotten_once_the_database_contains_them(root: Path) -> None:
    store = await filled(root / "d")
    rows = Rows()
    versions = range(1, COPIES_KEPT + 4)
    for version in versions:
        await keep_row(store, 7, copy_of(version))
    collector = collector_of(store, rows)
    await store.checkpoint()

    # A later version proves no descent: nothing is forgotten while the database lacks any of them.
    for lacking in (versions[0], versions[-1]):
        rows.contained = {copy_of(version) for version in versions if version != lacking}
        for rows.listed in ({7, 8, 9}, {8, 9}):
            await collector.round()
        assert len(store.ledger(7).row_names) == len(versions)

    rows.contained = set(map(copy_of, versions))
    rows.listed = {7, 8, 9}
    await collector.round()

    left = tuple(map(copy_of, versions[-COPIES_KEPT:]))
    assert store.ledger(7).row_names == left
    reads = rows.reads
    await collector.round()
    assert rows.reads == reads, (
        "nobody is asked about a ledger with few copies that names this bookie"
    )
    store = await again(store)
    assert store.ledger(7).row_names == left
    assert [copy.body for copy in store.index.copies(7)] == [
        b"row %d" % name.version for name in left
    ]
    # A log from which the index is made anew has them still: right copies, which go once more.
    store = await again(store, lost_index=True)
    assert set(left) <= set(store.ledger(7).row_names)
    await collector_of(store, rows).round()
    assert store.ledger(7).row_names == left


@pytest.mark.parametrize("is_clean", [True, False])
async def test_copies_are_fresh_until_they_are_confirmed_also_over_restarts(
    root: Path, store: Store, *, is_clean: bool
) -> None:
    first, second, third = map(copy_of, (1, 2, 3))
    await keep_row(store, 7, first)
    await keep_row(store, 8, second)
    await keep_row(store, 8, RowName(4, bytes(16)))
    fresh = store.holdings.fresh
    assert fresh.newest(10) == [second.attempt, first.attempt], "and none without a token"
    assert fresh.newest(1) == [second.attempt]

    fresh.confirmed([first.attempt])
    await store.checkpoint()
    await keep_row(store, 9, third)
    if is_clean:
        await store.stop()
        left = root / "d"
    else:
        left = image(store, root / "image")
        await store.stop()
    store = opened(left)
    assert set(store.holdings.fresh.newest(10)) == {second.attempt, third.attempt}
    store.close()

    shutil.rmtree(left / "index")
    store = opened(left)
    assert len(store.holdings.fresh.newest(10)) == 3, (
        "a new index knows of none that it was confirmed"
    )
    store.close()


def test_the_oldest_fresh_copies_go_where_there_are_too_many() -> None:
    fresh = FreshCopies()
    for version in range(1, FRESH_MAX + 3):
        fresh.note(RowCopy(copy_of(version), b""))

    left = fresh.newest(FRESH_MAX + 1)
    assert len(left) == FRESH_MAX
    assert left[-1] == copy_of(3).attempt
    assert FreshCopies(fresh.encode()).newest(FRESH_MAX + 1) == left
