"""Space is given up on proof, by whole segments, and crashes on the way lose nothing."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quorumlog.protocol.messages import CasStatus, Status
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.row_copy import COPIES_KEPT, RowCopy, RowName
from quorumlog.wire.bodies import PROOFS_MAX
from services.bookie import scan, space
from services.bookie.collect import Collector, Found
from services.bookie.fresh import FRESH_MAX, FreshCopies
from services.bookie.log import Kind, LogDamaged
from services.bookie.segments import Segments
from services.bookie.store import Store
from tests.bookie.support import (
    add,
    assert_right,
    batches_of,
    fence,
    ids_of,
    image,
    keep_row,
    large_run,
    opened,
    read,
    read_lac,
    run_of,
    started,
)

ROW = LedgerMetadata(
    ledger_id=7,
    quorum=Quorum(1, 1, 1),
    digest=DigestKind.CRC32C,
    fragments=(Fragment(0, ("b1@1",)),),
)
AWAY = replace(ROW, fragments=(Fragment(0, ("b2@1",)),)).closed(last_entry=99, length=1000)
GONE = (CasStatus.MISSING, None)


class Rows:
    """The rows that a test says there are."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[CasStatus, LedgerMetadata | None]] = {}
        self.cluster = "cluster"
        self.reads = self.questions = 0
        self.listed: set[int] = set()
        self.contained: set[RowName] = set()
        """Copies of rows whose changes the database contains."""

    async def read(self, held: Mapping[int, Sequence[RowName]]) -> Mapping[int, Found]:
        self.questions += 1
        return {ledger_id: await self.read_one(ledger_id, held[ledger_id]) for ledger_id in held}

    async def read_one(self, ledger_id: int, held: Sequence[RowName]) -> Found:
        self.reads += 1
        if not self.contained.issuperset(held):
            return CasStatus.UNKNOWN, None
        return self.rows.get(ledger_id, (CasStatus.OK, ROW))

    async def cluster_id(self) -> str:
        return self.cluster

    async def confirm(self) -> None:
        return

    async def ledgers_naming(self, bookie: str) -> set[int]:
        assert bookie == "b1"
        return self.listed


class Counted:
    """Notes the arguments of each call of a method."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.calls: list[tuple[Any, ...]] = []
        original = getattr(owner, name)

        def counted(*args: Any) -> Any:
            self.calls.append(args)
            return original(*args)

        monkeypatch.setattr(owner, name, counted)


def collector_of(store: Store, rows: Rows) -> Collector:
    return Collector(store, rows, "cluster", grace_s=0.0)


async def filled(directory: Path) -> Store:
    """Three ledgers over several segments: 7 and 8 big, 9 with an entry and a fence in the first."""
    store = started(directory)
    await add(store, run_of(9, range(3)))
    await fence(store, 9)
    for number in range(12):
        await add(store, run_of(7, range(number * 10, number * 10 + 10), "w" * 200))
        await add(store, run_of(8, range(number * 10, number * 10 + 10), "w" * 200))
    assert len(store.segments.numbers()) > 3
    return store


async def test_a_deleted_ledger_is_dropped_at_the_second_look_and_its_segments_are_removed(
    root: Path,
) -> None:
    store = await filled(root / "d")
    rows = Rows()
    rows.rows = {7: GONE, 8: GONE}
    collector = collector_of(store, rows)
    before = len(store.segments.numbers())

    await collector.round()
    assert ids_of(await read(store, 7, 0, 500)) == list(range(120))
    await collector.round()

    assert store.row(7) is None
    assert [ledger for ledger, _ in store.ledgers()] == [9]
    assert len(store.segments.numbers()) < before
    assert ids_of(await read(store, 9, 0, 5)) == [0, 1, 2]
    for lost_index in (False, True):
        await store.stop()
        if lost_index:
            shutil.rmtree(root / "d" / "index")
        store = started(root / "d")
        assert_right(await read(store, 9, 0, 5), 9)
        assert ids_of(await read(store, 9, 0, 5)) == [0, 1, 2]
        assert (await read_lac(store, 9)).last_add_confirmed == 1
        assert (await add(store, run_of(9, [3]))).status is Status.FENCED
        assert ids_of(await read(store, 7, 0, 500)) == []
    await store.stop()


@pytest.mark.parametrize(
    "seen", [(CasStatus.UNKNOWN, None), (CasStatus.OK, ROW), (CasStatus.OK, None)]
)
async def test_nothing_is_dropped_without_proof(
    root: Path, seen: tuple[CasStatus, LedgerMetadata | None]
) -> None:
    store = await filled(root / "d")
    rows = Rows()
    rows.rows = dict.fromkeys((7, 8, 9), seen)
    collector = collector_of(store, rows)

    for _ in range(3):
        await collector.round()

    assert [ledger for ledger, _ in store.ledgers()] == [7, 8, 9]
    await store.stop()


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
    await store.stop()


async def test_the_database_of_another_cluster_deletes_nothing(root: Path) -> None:
    store = await filled(root / "d")
    rows = Rows()
    rows.rows = {7: GONE}
    rows.cluster = "another"
    collector = collector_of(store, rows)

    for _ in range(3):
        await collector.round()

    assert rows.reads == 0
    assert store.row(7) is not None
    await store.stop()


async def test_a_dropped_copy_of_a_closed_ledger_keeps_its_fence(root: Path) -> None:
    store = await filled(root / "d")
    rows = Rows()
    rows.rows = {7: (CasStatus.OK, AWAY), 9: (CasStatus.OK, replace(AWAY, ledger_id=9))}
    collector = collector_of(store, rows)
    for _ in range(2):
        await collector.round()

    for lost_index in (False, True):
        await store.stop()
        if lost_index:
            shutil.rmtree(root / "d" / "index")
        store = started(root / "d")
        for ledger in (7, 9):
            assert ids_of(await read(store, ledger, 0, 500)) == []
            assert (await add(store, run_of(ledger, [500]))).status is Status.FENCED
        assert ids_of(await read(store, 8, 0, 500)) == list(range(120))
    # A repair may bring it back.
    assert (await add(store, run_of(9, range(3)), recovery=True)).status is Status.OK
    assert ids_of(await read(store, 9, 0, 5)) == [0, 1, 2]
    await store.stop()


async def test_a_repair_that_names_this_bookie_at_the_last_look_keeps_its_copy(
    root: Path,
) -> None:
    store = await filled(root / "d")
    rows = Rows()
    rows.rows = {9: (CasStatus.OK, replace(AWAY, ledger_id=9))}
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
    await store.stop()


async def test_a_crash_at_any_step_of_removing_a_segment_loses_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await filled(root / "d")
    rows = Rows()
    rows.rows = {7: GONE}
    collector = collector_of(store, rows)
    images: list[Path] = []

    def snapshot() -> None:
        images.append(image(store, root / f"image-{len(images)}"))

    for owner, name in (
        (store, "checkpoint"),
        (store.moves, "rewrite_state"),
        (store.moves, "move"),
    ):
        step = getattr(owner, name)

        async def watched(*args: object, step: object = step) -> object:
            result = await step(*args)  # type: ignore[operator]
            snapshot()
            return result

        monkeypatch.setattr(owner, name, watched)
    for _ in range(2):
        await collector.round()
    snapshot()
    await store.stop()

    assert len(images) > 3
    for crashed in images:
        for lost_index in (False, True):
            if lost_index:
                shutil.rmtree(crashed / "index")
            again = started(crashed)
            assert ids_of(await read(again, 8, 0, 500)) == list(range(120))
            assert ids_of(await read(again, 9, 0, 500)) == [0, 1, 2]
            assert (await add(again, run_of(9, [3]))).status is Status.FENCED
            await again.stop()


async def test_a_deleted_ledger_stays_deleted_after_the_index_is_rebuilt(root: Path) -> None:
    """Its entries lie in an old segment that stays; what said that they are gone was compacted."""
    store = started(root / "d")
    for number in range(8):
        # Much of ledger 9 keeps the segments that hold 7 in use.
        await add(store, run_of(7, range(number * 2, number * 2 + 2)))
        await add(store, run_of(9, range(number * 20, number * 20 + 20), "w" * 20))
    for number in range(12):
        await add(store, run_of(8, range(number * 20, number * 20 + 20), "w" * 200))
        if number == 0:  # its segment is full, so this begins the next one
            store.moves.drop(7, keep_stub=False)
    rows = Rows()
    rows.rows = {8: GONE}
    rows.listed = {9}
    collector = collector_of(store, rows)
    before = set(store.segments.numbers())
    for _ in range(2):
        await collector.round()
    assert before - set(store.segments.numbers())
    assert 1 in store.segments.numbers()
    await store.stop()

    shutil.rmtree(root / "d" / "index")
    store = started(root / "d")

    assert [ledger for ledger, _ in store.ledgers()] == [9]
    assert ids_of(await read(store, 7, 0, 500)) == []
    assert ids_of(await read(store, 9, 0, 500)) == list(range(160))
    await store.stop()


async def test_dropped_copies_stay_dropped_after_the_index_is_rebuilt(root: Path) -> None:
    store = started(root / "d")
    for number in range(8):
        await add(store, run_of(7, range(number * 2, number * 2 + 2)))
        await add(store, run_of(9, range(number * 20, number * 20 + 20), "w" * 20))
    store.moves.drop(7, keep_stub=True)
    for number in range(12):
        await add(store, run_of(8, range(number * 20, number * 20 + 20), "w" * 200))
    rows = Rows()
    rows.rows = {8: GONE}
    rows.listed = {7, 9}
    collector = collector_of(store, rows)
    for _ in range(2):
        await collector.round()
    await store.stop()

    shutil.rmtree(root / "d" / "index")
    store = started(root / "d")

    assert ids_of(await read(store, 7, 0, 500)) == []
    assert (await add(store, run_of(7, [500]))).status is Status.FENCED
    await store.stop()


async def test_a_broken_segment_does_not_block_the_removal_of_others(root: Path) -> None:
    store = await filled(root / "d")
    await store.checkpoint()
    rows = Rows()
    rows.rows = {7: GONE}
    # A share of 1: what 8 has is moved out of every segment, but one can't be read.
    collector = Collector(store, rows, "cluster", grace_s=0.0, live_share_min=1.0)
    broken = store.segments.path(2)
    data = bytearray(broken.read_bytes())
    record = next(r for b in batches_of(broken) for r in b.records if r.ledger_id == 8)
    data[record.offset + 700] ^= 1
    broken.write_bytes(data)
    before = set(store.segments.numbers())

    for _ in range(2):
        await collector.round()

    left = set(store.segments.numbers())
    assert 2 in left
    assert {1, 3} <= before - left
    answer = await read(store, 8, 0, 500)
    assert answer.absent == ((120, 500),)
    assert len(ids_of(answer)) == 110
    await store.stop()


async def test_a_segment_with_a_broken_head_or_batch_loses_no_fence(
    root: Path,
) -> None:
    """What can't be read may have been anybody's fence: all that is known is written again."""
    store = await filled(root / "d")
    await store.checkpoint()
    first = store.segments.path(1)
    data = bytearray(first.read_bytes())
    fences = [b for b in batches_of(first) if any(r.kind is Kind.FENCE for r in b.records)]
    data[fences[0].offset + 4] ^= 1
    first.write_bytes(data)
    rows = Rows()
    rows.rows = {7: GONE}
    collector = Collector(store, rows, "cluster", grace_s=0.0, live_share_min=1.0)

    for _ in range(2):
        await collector.round()

    assert 1 not in store.segments.numbers()
    await store.stop()
    shutil.rmtree(root / "d" / "index")
    store = started(root / "d")
    assert (await add(store, run_of(9, [3]))).status is Status.FENCED
    assert ids_of(await read(store, 9, 0, 5)) == [0, 1, 2]
    await store.stop()


async def test_an_announced_tombstone_is_a_first_look_and_drops_nothing(root: Path) -> None:
    store = await filled(root / "d")
    rows = Rows()
    rows.rows = {7: GONE}
    collector = collector_of(store, rows)

    await collector.deletions_announced([7])
    await collector.deletions_announced([7])
    await collector.deletions_announced([12345, 7])
    assert ids_of(await read(store, 7, 0, 500)) == list(range(120))

    await collector.recheck()
    assert store.row(7) is None
    assert [ledger for ledger, _ in store.ledgers()] == [8, 9]
    await store.stop()


async def test_many_deleted_ledgers_are_asked_about_in_pages(root: Path) -> None:
    """One question for each page and look: three pages at first, then two, as two ledgers stay, and a last look at both."""
    store = started(root / "d")
    ledgers = range(7, 7 + 2 * PROOFS_MAX + 1)
    for ledger in ledgers:
        await add(store, run_of(ledger, [0]))
    rows = Rows()
    rows.rows = dict.fromkeys(ledgers, GONE)
    rows.rows[8] = (CasStatus.UNKNOWN, None)
    rows.rows[9] = (CasStatus.OK, replace(ROW, ledger_id=9))
    collector = collector_of(store, rows)

    await collector.deletions_announced(ledgers)
    await collector.recheck()

    assert [ledger for ledger, _ in store.ledgers()] == [8, 9]
    assert rows.questions == 3 + 2 + 2
    assert store.counters["dropped_ledgers"] == len(ledgers) - 2
    # What was withheld meanwhile is taken again.
    assert (await add(store, run_of(8, [1]))).status is Status.OK
    await store.stop()


async def test_what_a_page_does_not_tell_of_stays(root: Path) -> None:
    """Rules 4 and 18: an answer that leaves a ledger out says nothing about it."""
    store = await filled(root / "d")
    rows = Rows()

    async def read_all(held: Mapping[int, Sequence[RowName]]) -> Mapping[int, Found]:
        return dict.fromkeys(set(held) - {8}, GONE)

    rows.read = read_all  # type: ignore[method-assign]
    collector = collector_of(store, rows)
    for _ in range(3):
        await collector.round()

    assert [ledger for ledger, _ in store.ledgers()] == [8]
    await store.stop()


async def test_a_copy_that_comes_while_a_page_is_asked_about_keeps_its_ledger_only(
    root: Path,
) -> None:
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
    for _ in range(3):
        await collector.round()

    assert count >= 3
    assert [ledger for ledger, _ in store.ledgers()] == [8]
    await store.stop()


async def test_compaction_orders_moved_parts_by_ledger(root: Path) -> None:
    store = await filled(root / "d")
    collector = Collector(store, Rows(), "cluster", grace_s=0.0, live_share_min=1.0)

    await collector.free_segments()
    await store.checkpoint()

    places = [(part.segment, part.offset) for _, part in store.index.all_parts()]
    old = [place for place in places if place[0] < store.position.segment - 1]
    assert len(old) > 10
    by_ledger = [
        (part.segment, part.offset)
        for ledger, part in store.index.all_parts()
        if ledger == 7
        if (part.segment, part.offset) in old
    ]
    assert by_ledger == sorted(by_ledger)
    await store.stop()


async def test_however_many_segments_are_empty_few_looks_at_the_index_free_them(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "SEGMENTS_AT_ONCE", 1)
    store = await filled(root / "d")
    rows = Rows()
    rows.rows = {7: GONE, 8: GONE}
    before = set(store.segments.numbers())
    looks = Counted(monkeypatch, store.index, "_all_parts")
    collector = collector_of(store, rows)
    for _ in range(2):
        await collector.round()
    looks.calls.clear()
    # The entries of 9 are all that is left, in the first segment.
    await collector.free_segments()
    assert len(before - set(store.segments.numbers())) > 3
    assert len(looks.calls) <= 2
    assert ids_of(await read(store, 9, 0, 5)) == [0, 1, 2]
    await store.stop()


async def test_segments_that_go_together_have_each_ledgers_state_written_once(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = started(root / "d")
    for number in range(12):
        await add(store, run_of(7, range(number * 10, number * 10 + 10), "w" * 200))
        await add(store, run_of(8, [number]))
    await fence(store, 8)
    await add(store, run_of(7, range(120, 140), "w" * 200))
    rows = Rows()
    rows.rows = {7: GONE}
    rewritten = Counted(monkeypatch, store.moves, "rewrite_state")
    before = set(store.segments.numbers())
    collector = collector_of(store, rows)
    for _ in range(2):
        await collector.round()
    assert len(before - set(store.segments.numbers())) > 3
    assert rewritten.calls.count((8,)) <= 2, (
        "of the empty ones together, and of those with a part in use"
    )
    await store.stop()
    shutil.rmtree(root / "d" / "index")
    store = started(root / "d")
    assert (await add(store, run_of(8, [30]))).status is Status.FENCED
    assert ids_of(await read(store, 8, 0, 20)) == list(range(12))
    await store.stop()


async def test_what_a_segment_records_is_found_without_reading_its_entries(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = started(root / "d")
    for number in range(6):
        await add(store, large_run(7, number, 400_000))
        await fence(store, 20 + number)
    await store.checkpoint()
    read_bytes = 0
    original = scan._read

    def counted(fd: int, at: int, size: int, end: int) -> bytes:
        nonlocal read_bytes
        data = original(fd, at, size, end)
        read_bytes += len(data)
        return data

    monkeypatch.setattr(scan, "_read", counted)
    numbers = [n for n in store.segments.numbers() if n < store.position.segment]
    states = [scan.state_of(store.segments, number) for number in numbers]
    found = set().union(*(state.ledgers for state in states))
    assert all(state.is_whole for state in states)
    assert {7, 20, 21, 22, 23, 24} <= found
    assert read_bytes < 400_000 * len(numbers) / 2
    await store.stop()


async def test_after_long_looks_at_the_index_segments_are_freed_later_unless_room_is_short(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await filled(root / "d")
    rows = Rows()
    collector = collector_of(store, rows)
    freed = 0

    async def free() -> None:
        nonlocal freed
        freed += 1
        collector._space.scan_s = 1000.0

    monkeypatch.setattr(collector._space, "free", free)
    await collector.round()
    assert freed == 1
    rows.rows = {7: GONE}
    for _ in range(3):
        await collector.round()
    assert store.row(7) is None
    assert freed == 1
    store.is_closed_to_adds = True
    await collector.round()
    assert freed == 2
    await store.stop()


async def test_removed_leading_segments_leave_no_files(root: Path) -> None:
    store = await filled(root / "d")
    rows = Rows()
    rows.rows = dict.fromkeys((7, 8, 9), GONE)
    for _ in range(2):
        await collector_of(store, rows).round()
    collector = collector_of(store, rows)
    for _ in range(2):
        await collector.round()
    await store.stop()

    names = {path.name for path in (root / "d" / "log").iterdir()}
    store = started(root / "d")

    assert len([name for name in names if name.endswith(".log")]) <= 2
    assert not [name for name in names if name.endswith((".gone", ".new"))]
    assert list(store.ledgers()) == []
    await store.stop()
    store.segments._first.unlink()
    shutil.rmtree(root / "d" / "index")
    with pytest.raises(LogDamaged, match="is missing"):
        started(root / "d")


async def test_the_next_start_finishes_an_interrupted_removal(root: Path) -> None:
    store = await filled(root / "d")
    rows = Rows()
    rows.rows = {7: GONE}
    collector = Collector(store, rows, "cluster", grace_s=0.0, live_share_min=1.0)
    image_before = image(store, root / "before")
    for _ in range(2):
        await collector.round()
    removed = set(Segments(image_before / "log", 0).numbers()) - set(store.segments.numbers())
    await store.stop()
    for number in removed:
        # As if the file's own removal had not reached the disk.
        path = Segments(image_before / "log", 0).path(number)
        shutil.copy(path, root / "d" / "log" / path.name)

    store = started(root / "d")

    assert not removed & set(store.segments.numbers())
    assert ids_of(await read(store, 8, 0, 500)) == list(range(120))
    await store.stop()


def copy_of(version: int) -> RowName:
    """A copy of a row's version, by its change."""
    return RowName(version, b"%16d" % version)


async def test_nothing_is_dropped_by_a_database_that_lacks_the_change_of_a_held_copy(
    root: Path,
) -> None:
    store = await filled(root / "d")
    rows = Rows()
    rows.rows = {7: GONE, 8: (CasStatus.OK, AWAY)}
    rows.contained = {copy_of(1)}
    for ledger_id in (7, 8):
        for version in (1, 2):
            await keep_row(store, ledger_id, copy_of(version))
    collector = collector_of(store, rows)

    for _ in range(3):
        await collector.round()
    assert ids_of(await read(store, 7, 0, 500)) == list(range(120))
    assert ids_of(await read(store, 8, 0, 500)) == list(range(120))

    rows.contained.add(copy_of(2))
    for _ in range(2):
        await collector.round()
    assert store.row(7) is None
    assert ids_of(await read(store, 8, 0, 500)) == []
    assert store.row_names(8) == (copy_of(1), copy_of(2)), "the stub keeps its copies"
    await store.stop()


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
    for _ in range(3):
        await collector.round()

    assert count >= 3
    assert ids_of(await read(store, 7, 0, 500)) == list(range(120))
    await store.stop()


async def test_copies_are_forgotten_when_the_database_contains_them_and_enough_later_ones(
    root: Path,
) -> None:
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
        assert len(store.row_names(7)) == len(versions)

    rows.contained = set(map(copy_of, versions))
    rows.listed = {7, 8, 9}
    await collector.round()

    left = tuple(map(copy_of, versions[-COPIES_KEPT:]))
    assert store.row_names(7) == left
    reads = rows.reads
    await collector.round()
    assert rows.reads == reads, (
        "nobody is asked about a ledger with few copies that names this bookie"
    )
    await store.stop()
    store = started(root / "d")
    assert store.row_names(7) == left
    assert [copy.body for copy in store.index.copies(7)] == [
        b"row %d" % name.version for name in left
    ]
    # A log from which the index is made anew has them still: right copies, which go once more.
    await store.stop()
    shutil.rmtree(root / "d" / "index")
    store = started(root / "d")
    assert set(left) <= set(store.row_names(7))
    await collector_of(store, rows).round()
    assert store.row_names(7) == left
    await store.stop()


@pytest.mark.parametrize("is_clean", [True, False])
async def test_copies_are_fresh_until_they_are_confirmed_also_over_restarts(
    root: Path, *, is_clean: bool
) -> None:
    store = started(root / "d")
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
