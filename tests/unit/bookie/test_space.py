"""Space is given up by whole segments: what lives in them is moved before, and crashes on the way lose nothing."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from quorumlog.protocol.messages import Status
from services.bookie import replay, space
from services.bookie.log import Kind, LogDamaged
from services.bookie.segments import Segments
from services.bookie.store import Store
from tests.unit.bookie.collecting import GONE, Rows, collector_of, filled, rounds
from tests.unit.bookie.support import (
    add,
    again,
    batches_of,
    fence,
    ids_of,
    image,
    images_at,
    large_run,
    read,
    run_of,
    started,
)


class Counted:
    """Notes the arguments of each call of a method."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.calls: list[tuple[Any, ...]] = []
        original = getattr(owner, name)

        def counted(*args: Any) -> Any:
            self.calls.append(args)
            return original(*args)

        monkeypatch.setattr(owner, name, counted)


async def shared(directory: Path) -> Store:
    """Little of ledger 7 in segments that much of ledger 9 keeps in use."""
    store = started(directory)
    for number in range(8):
        await add(store, run_of(7, range(number * 2, number * 2 + 2)))
        await add(store, run_of(9, range(number * 20, number * 20 + 20), "w" * 20))
    return store


async def test_a_crash_at_any_step_of_removing_a_segment_loses_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await filled(root / "d")
    rows = Rows({7: GONE})
    collector = collector_of(store, rows)
    steps = ((store, "checkpoint"), (store, "rewrite_state"), (store, "move"))
    images = images_at(monkeypatch, store, steps, root)
    await rounds(collector, 2)
    images.append(image(store, root / "image"))
    await store.stop()
    monkeypatch.undo()

    assert len(images) > 3
    for crashed in images:
        for lost_index in (False, True):
            if lost_index:
                shutil.rmtree(crashed / "index")
            after = started(crashed)
            assert ids_of(await read(after, 8, 0, 500)) == list(range(120))
            assert ids_of(await read(after, 9, 0, 500)) == [0, 1, 2]
            assert (await add(after, run_of(9, [3]))).status is Status.FENCED
            await after.stop()


async def test_a_deleted_ledger_stays_deleted_after_the_index_is_rebuilt(root: Path) -> None:
    """Its entries lie in an old segment that stays; what said that they are gone was compacted."""
    store = await shared(root / "d")
    for number in range(12):
        await add(store, run_of(8, range(number * 20, number * 20 + 20), "w" * 200))
        if number == 0:  # its segment is full, so this begins the next one
            store.drop(7, keep_stub=False)
    rows = Rows({8: GONE})
    rows.listed = {9}
    collector = collector_of(store, rows)
    before = set(store.segments.numbers())
    await rounds(collector, 2)
    assert before - set(store.segments.numbers())
    assert 1 in store.segments.numbers()
    store = await again(store, lost_index=True)

    assert [ledger for ledger, _ in store.holdings.ledgers()] == [9]
    assert ids_of(await read(store, 7, 0, 500)) == []
    assert ids_of(await read(store, 9, 0, 500)) == list(range(160))


async def test_dropped_copies_stay_dropped_after_the_index_is_rebuilt(root: Path) -> None:
    store = await shared(root / "d")
    store.drop(7, keep_stub=True)
    for number in range(12):
        await add(store, run_of(8, range(number * 20, number * 20 + 20), "w" * 200))
    rows = Rows({8: GONE})
    rows.listed = {7, 9}
    collector = collector_of(store, rows)
    await rounds(collector, 2)
    store = await again(store, lost_index=True)

    assert ids_of(await read(store, 7, 0, 500)) == []
    assert (await add(store, run_of(7, [500]))).status is Status.FENCED


async def test_a_broken_segment_does_not_block_the_removal_of_others(root: Path) -> None:
    store = await filled(root / "d")
    await store.checkpoint()
    rows = Rows({7: GONE})
    # A share of 1: what 8 has is moved out of every segment, but one can't be read.
    collector = collector_of(store, rows, live_share_min=1.0)
    broken = store.segments.path(2)
    data = bytearray(broken.read_bytes())
    record = next(r for b in batches_of(broken) for r in b.records if r.ledger_id == 8)
    data[record.offset + 700] ^= 1
    broken.write_bytes(data)
    before = set(store.segments.numbers())

    await rounds(collector, 2)

    left = set(store.segments.numbers())
    assert 2 in left
    assert {1, 3} <= before - left
    answer = await read(store, 8, 0, 500)
    assert answer.absent == ((120, 500),)
    assert len(ids_of(answer)) == 110


async def test_a_segment_with_a_broken_head_or_batch_loses_no_fence(root: Path) -> None:
    """What can't be read may have been anybody's fence: all that is known is written again."""
    store = await filled(root / "d")
    await store.checkpoint()
    first = store.segments.path(1)
    data = bytearray(first.read_bytes())
    fences = [b for b in batches_of(first) if any(r.kind is Kind.FENCE for r in b.records)]
    data[fences[0].offset + 4] ^= 1
    first.write_bytes(data)
    rows = Rows({7: GONE})
    collector = collector_of(store, rows, live_share_min=1.0)

    await rounds(collector, 2)

    assert 1 not in store.segments.numbers()
    store = await again(store, lost_index=True)
    assert (await add(store, run_of(9, [3]))).status is Status.FENCED
    assert ids_of(await read(store, 9, 0, 5)) == [0, 1, 2]


async def test_compaction_orders_moved_parts_by_ledger(root: Path) -> None:
    store = await filled(root / "d")
    collector = collector_of(store, Rows(), live_share_min=1.0)

    await collector._space.free()
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


async def test_however_many_segments_are_empty_few_looks_at_the_index_free_them(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "SEGMENTS_AT_ONCE", 1)
    store = await filled(root / "d")
    rows = Rows({7: GONE, 8: GONE})
    before = set(store.segments.numbers())
    looks = Counted(monkeypatch, store.index, "_parts_with_pauses")
    collector = collector_of(store, rows)
    await rounds(collector, 2)
    looks.calls.clear()
    # The entries of 9 are all that is left, in the first segment.
    await collector._space.free()
    assert len(before - set(store.segments.numbers())) > 3
    assert len(looks.calls) <= 2
    assert ids_of(await read(store, 9, 0, 5)) == [0, 1, 2]


async def test_segments_that_go_together_have_each_ledgers_state_written_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(12):
        await add(store, run_of(7, range(number * 10, number * 10 + 10), "w" * 200))
        await add(store, run_of(8, [number]))
    await fence(store, 8)
    await add(store, run_of(7, range(120, 140), "w" * 200))
    rows = Rows({7: GONE})
    rewritten = Counted(monkeypatch, store, "rewrite_state")
    before = set(store.segments.numbers())
    collector = collector_of(store, rows)
    await rounds(collector, 2)
    assert len(before - set(store.segments.numbers())) > 3
    assert rewritten.calls.count((8,)) <= 2, (
        "of the empty ones together, and of those with a part in use"
    )
    store = await again(store, lost_index=True)
    assert (await add(store, run_of(8, [30]))).status is Status.FENCED
    assert ids_of(await read(store, 8, 0, 20)) == list(range(12))


async def test_what_a_segment_records_is_found_without_reading_its_entries(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        await add(store, large_run(7, number, 400_000))
        await fence(store, 20 + number)
    await store.checkpoint()
    read_bytes = 0
    original = replay._read

    def counted(fd: int, at: int, size: int, end: int) -> bytes:
        nonlocal read_bytes
        data = original(fd, at, size, end)
        read_bytes += len(data)
        return data

    monkeypatch.setattr(replay, "_read", counted)
    numbers = [n for n in store.segments.numbers() if n < store.position.segment]
    states = [replay.state_of(store.segments, number) for number in numbers]
    found = set().union(*(state.ledgers for state in states))
    assert all(state.is_whole for state in states)
    assert {7, 20, 21, 22, 23, 24} <= found
    assert read_bytes < 400_000 * len(numbers) / 2


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
    await rounds(collector, 3)
    assert store.holdings.row(7) is None
    assert freed == 1
    store.is_closed_to_adds = True
    await collector.round()
    assert freed == 2


async def test_removed_leading_segments_leave_no_files(root: Path) -> None:
    store = await filled(root / "d")
    rows = Rows(dict.fromkeys((7, 8, 9), GONE))
    for _ in range(2):
        await collector_of(store, rows).round()
    collector = collector_of(store, rows)
    await rounds(collector, 2)
    await store.stop()

    names = {path.name for path in (root / "d" / "log").iterdir()}
    store = started(root / "d")

    assert len([name for name in names if name.endswith(".log")]) <= 2
    assert not [name for name in names if name.endswith((".gone", ".new"))]
    assert list(store.holdings.ledgers()) == []
    await store.stop()
    store.segments._first.unlink()
    shutil.rmtree(root / "d" / "index")
    with pytest.raises(LogDamaged, match="is missing"):
        started(root / "d")


async def test_the_next_start_finishes_an_interrupted_removal(root: Path) -> None:
    store = await filled(root / "d")
    rows = Rows({7: GONE})
    collector = collector_of(store, rows, live_share_min=1.0)
    image_before = image(store, root / "before")
    await rounds(collector, 2)
    removed = set(Segments(image_before / "log", 0).numbers()) - set(store.segments.numbers())
    await store.stop()
    for number in removed:
        # As if the file's own removal had not reached the disk.
        path = Segments(image_before / "log", 0).path(number)
        shutil.copy(path, root / "d" / "log" / path.name)

    store = started(root / "d")

    assert not removed & set(store.segments.numbers())
    assert ids_of(await read(store, 8, 0, 500)) == list(range(120))
