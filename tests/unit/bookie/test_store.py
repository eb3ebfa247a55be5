"""What the store promises, each as a claim."""

import asyncio
import contextlib
import errno
import os
import resource
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quorumlog.errors import Overloaded
from quorumlog.protocol.ids import ID_MAX, NO_ENTRY
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import DigestKind
from quorumlog.protocol.record import Run, pack
from quorumlog.protocol.replica import AddAsked, FenceAsked, ReadAsked, Verdict
from services.bookie import extents
from services.bookie import writer as writers
from services.bookie.directory import DirectoryInUse, is_disk_full_error
from services.bookie.log import QueuedRecord
from services.bookie.store import ReadAnswer, Store
from tests.support.waiting import until
from tests.unit.bookie.support import (
    KEY,
    ME,
    SMALL,
    Gate,
    add,
    again,
    assert_right,
    entry_of,
    fence,
    ids_of,
    opened,
    read,
    read_lac,
    run_of,
    started,
    write_lac,
)


async def test_an_answer_leaves_after_its_records_are_synced(store: Store, gate: Gate) -> None:
    gate.open.clear()
    heard: list[str] = []

    def note(name: str) -> None:
        heard.append(name)

    store.add(AddAsked(ME, run_of(7, [0]), KEY), lambda _: note("add"))
    await until(lambda: gate.waiting > 0, "the writer syncs")
    store.add(AddAsked(ME, run_of(7, [0]), KEY), lambda _: note("the same add again"))
    store.read(7, ReadAsked(ME, 5, 5), 1000, lambda _: note("negative"))
    store.ask(7, FenceAsked(ME, KEY), lambda _: note("fence"))
    store.ask(7, FenceAsked(ME, KEY), lambda _: note("the same fence again"))
    store.read(7, ReadAsked(ME, 0, 0, True, KEY), 1000, lambda _: note("fencing read"))
    store.add(AddAsked(ME, run_of(7, [1]), KEY), lambda _: note("refusal by the fence"))
    answered: asyncio.Future[ReadAnswer] = asyncio.get_running_loop().create_future()
    store.read(8, ReadAsked(ME, 0, 0), 1000, answered.set_result)
    # Another ledger's negative has nothing to wait for, and comes while the disk is stuck.
    assert (await answered).absent == ((0, 0),)
    assert heard == []

    gate.open.set()
    await until(lambda: len(heard) == 7, "all is answered")


async def test_adds_that_arrive_during_a_sync_form_one_batch(store: Store, gate: Gate) -> None:
    gate.open.clear()
    answers: list[Verdict] = []
    store.add(AddAsked(ME, run_of(7, [0]), KEY), answers.append)
    await until(lambda: gate.waiting > 0, "the writer syncs")
    for number in range(1, 50):
        store.add(AddAsked(ME, run_of(7, [number]), KEY), answers.append)

    gate.open.set()
    await until(lambda: len(answers) == 50, "all is answered")

    assert store.counters["log_syncs"] == 2
    assert store.counters["log_sync_us"] > 0


async def test_adds_above_the_memory_limit_are_refused_not_queued(root: Path, gate: Gate) -> None:
    store = started(root / "d", replace(SMALL, pending_bytes_max=20_000))
    gate.open.clear()
    answers: list[Verdict] = []
    taken = 0
    with contextlib.suppress(Overloaded):
        for taken in range(10_000):
            store.add(AddAsked(ME, run_of(7, [taken]), KEY), answers.append)

    assert 0 < taken < 9_999
    gate.open.set()
    await until(lambda: store.pending.bytes == 0, "what was taken is written")
    assert len(answers) == taken
    assert (await add(store, run_of(8, [0]))).status is Status.OK


async def test_nothing_is_acked_after_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[BaseException] = []
    store = opened(root / "d")
    store.start(failed.append)
    assert (await add(store, run_of(7, [0]))).status is Status.OK
    sync = os.fdatasync
    calls: list[int] = []

    def broken(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 1:
            raise OSError(errno.EIO, "the disk is gone")
        sync(fd)

    monkeypatch.setattr(os, "fdatasync", broken)
    answers: list[Verdict] = []

    store.add(AddAsked(ME, run_of(7, [1]), KEY), answers.append)
    await until(lambda: bool(failed), "the writer gives up")
    store.add(AddAsked(ME, run_of(7, [2]), KEY), answers.append)
    await asyncio.to_thread(store._writer._thread.join)  # type: ignore[union-attr]

    assert answers == []
    assert len(calls) == 1, "a sync that failed is never tried again"
    store.close()


async def test_a_filling_disk_makes_a_bookie_read_only_until_there_is_room(root: Path) -> None:
    options = replace(
        SMALL, data_bytes_max=600_000, warn_below_bytes=500_000, read_only_below_bytes=400_000
    )
    store = started(root / "d", options)
    assert not store.disk.is_low
    filler = "x" * 2000
    number = 0
    has_warned_before = False
    while not store.disk.is_read_only:
        has_warned_before = has_warned_before or store.disk.is_low
        assert (await add(store, run_of(7, [number], filler))).status is Status.OK
        store.check_space()
        number += 1

    assert has_warned_before
    assert (await add(store, run_of(7, [number]))).status is Status.READ_ONLY
    assert (await add(store, run_of(7, [number]), recovery=True)).status is Status.OK
    assert (await fence(store, 9)).status is Status.OK
    assert ids_of(await read(store, 7, 0, 0)) == [0]
    store.disk.options = replace(options, data_bytes_max=2_000_000)
    store.check_space()
    assert not store.disk.is_low
    assert (await add(store, run_of(7, [number + 1]))).status is Status.OK


@pytest.mark.parametrize("full", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
async def test_on_a_full_disk_the_reserve_holds_accepted_records(
    root: Path, store: Store, monkeypatch: pytest.MonkeyPatch, full: int
) -> None:
    create = store.segments.create

    def without_room(*args: Any) -> object:
        if (root / "d" / "reserve").exists():
            raise OSError(full, "full")
        return create(*args)

    monkeypatch.setattr(store.segments, "create", without_room)
    monkeypatch.setattr("services.bookie.directory.keep_reserve", lambda *_: False)
    number = 0
    while (root / "d" / "reserve").exists():
        verdict = await add(store, run_of(7, [number], "y" * 500))
        assert verdict.status is Status.OK
        number += 1

    store.check_space()
    assert store.disk.is_read_only
    assert (await fence(store, 7)).status is Status.OK


async def test_a_store_without_room_for_its_reserve_is_read_only_and_answers(root: Path) -> None:
    """The kernel refuses to allocate, as at a quota, though the disk has room."""
    store = started(root / "d")
    assert (await add(store, run_of(7, [0]))).status is Status.OK
    await store.stop()
    options = replace(SMALL, reserve_bytes=1 << 20)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (options.reserve_bytes - 1, before[1]))
    try:
        store = started(root / "d", options)
        assert store.disk.is_read_only
        assert (await add(store, run_of(7, [1]))).status is Status.READ_ONLY
        assert ids_of(await read(store, 7, 0, 0)) == [0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    store.check_space()
    assert (await add(store, run_of(7, [1]))).status is Status.OK


async def test_a_store_starts_and_writes_in_less_than_a_segment(root: Path, store: Store) -> None:
    assert (await add(store, run_of(7, [0]))).status is Status.OK
    await store.stop()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL.segment_bytes - 1, before[1]))
    try:
        store = started(root / "d")
        assert ids_of(await read(store, 7, 0, 0)) == [0]
        assert (await add(store, run_of(7, [1], "x" * 5000))).status is Status.OK
        assert (await fence(store, 7)).status is Status.OK
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    store = await again(store)
    assert ids_of(await read(store, 7, 0, 1)) == [0, 1]


@pytest.mark.parametrize("full", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_an_index_that_finds_no_room_is_not_taken_for_damaged(full: int) -> None:
    assert is_disk_full_error(Exception(f"IO error: {os.strerror(full)}: While appending"))
    assert not is_disk_full_error(Exception(f"IO error: {os.strerror(errno.EIO)}"))


async def test_one_process_owns_a_directory(root: Path) -> None:
    store = opened(root / "d")

    with pytest.raises(DirectoryInUse):
        opened(root / "d")

    store.close()


async def test_parts_with_holes_that_interleave_are_found_by_any_range(store: Store) -> None:
    for start in (2, 0, 1):
        await add(store, run_of(7, range(start, 300, 3)))
    for _ in range(2):
        for first, last in ((0, 299), (5, 5), (100, 101), (298, 400)):
            answer = await read(store, 7, first, last)
            assert_right(answer, 7)
            assert ids_of(answer) == list(range(first, min(last, 299) + 1))
        await store.checkpoint()


async def test_a_read_returns_at_least_one_entry_and_stops_at_the_size_limit(store: Store) -> None:
    await add(store, run_of(7, range(40)))
    await add(store, run_of(7, range(40, 80)))
    for first in (0, 5, 39, 40, 79):
        at, seen = first, []
        while at <= 79:
            answer = await read(store, 7, at, 79, bytes_max=300)
            assert_right(answer, 7)
            assert answer.absent == ()
            found = ids_of(answer)
            assert found[0] == at
            seen += found
            at = found[-1] + 1
        assert seen == list(range(first, 80))
    assert ids_of(await read(store, 7, 3, 79, bytes_max=0)) == [3]


async def test_a_read_ends_at_the_border_of_a_run(store: Store) -> None:
    for first in range(0, 80, 20):
        await add(store, run_of(7, range(first, first + 20)))
    await store.checkpoint()
    size = sum(part.size for part in store.ledger(7).find(0, 79)) // 4

    one = await read(store, 7, 0, 79, bytes_max=5 * size // 2)
    two = await read(store, 7, 40, 79, bytes_max=5 * size // 2)

    assert ids_of(one) == list(range(40))
    assert ids_of(two) == list(range(40, 80))


async def test_a_read_joins_memory_and_disk(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for first in range(0, 80, 20):
        await add(store, run_of(7, range(first, first + 20)))
        # Too far from one another for one call.
        await add(store, run_of(8, [first], "x" * 2 * extents.GAP_BYTES_MAX))
    asked: list[extents.Extent] = []

    def half(extent: extents.Extent, _: memoryview) -> extents.Bytes | None:
        asked.append(extent)
        return extents.read_blocking(extent) if len(asked) <= 2 else None

    monkeypatch.setattr(extents, "read_cached", half)

    answer = await read(store, 7, 0, 79)

    assert len(asked) == 3
    assert ids_of(answer) == list(range(80))
    assert_right(answer, 7)


async def test_runs_of_different_digest_kinds_are_not_joined(store: Store) -> None:
    plain = pack([replace(entry_of(7, e), digest=b"") for e in range(3)], DigestKind.NONE)
    await add(store, plain)
    await add(store, run_of(7, range(3, 6)))
    for _ in range(2):
        answer = await read(store, 7, 0, 9)
        assert answer.run == plain.body
        assert answer.absent == ((6, 9),)
        assert_right(await read(store, 7, 3, 9), 7)
        assert ids_of(await read(store, 7, 3, 9)) == [3, 4, 5]
        await store.checkpoint()


async def test_a_whole_run_is_returned_as_its_stored_bytes(store: Store) -> None:
    run = run_of(7, range(10))
    await add(store, run)

    assert (await read(store, 7, 0, 9)).run == run.body
    await store.checkpoint()
    assert (await read(store, 7, 0, 500)).run == run.body


async def test_the_greatest_ids_work(store: Store) -> None:
    await add(store, run_of(ID_MAX, [ID_MAX - 1, ID_MAX]))
    await store.checkpoint()

    answer = await read(store, ID_MAX, 0, ID_MAX)

    assert ids_of(answer) == [ID_MAX - 1, ID_MAX]
    assert answer.absent == ((0, ID_MAX - 2),)
    assert (await read(store, ID_MAX - 1, 0, ID_MAX)).absent == ((0, ID_MAX),)


async def test_state_survives_with_no_entry_in_the_ledger(store: Store) -> None:
    await fence(store, 7)
    await write_lac(store, 8, 41)
    for _ in range(2):
        store = await again(store)

    assert (await add(store, run_of(7, [0]))).status is Status.FENCED
    assert (await read_lac(store, 8)).last_add_confirmed == 41
    assert (await add(store, run_of(8, [0]), key=b"o" * 32)).status is Status.WRONG_KEY
    assert [ledger for ledger, _ in store.holdings.ledgers()] == [7, 8]


async def test_limbo_survives_a_restart_until_it_is_ended(store: Store) -> None:
    await add(store, run_of(7, [0]))
    await store.enter_limbo(7, KEY, is_fenced=True)
    store = await again(store)

    answer = await read(store, 7, 0, 3)
    assert (ids_of(answer), answer.absent) == ([0], ())
    assert (await add(store, run_of(7, [1]))).status is Status.FENCED
    await store.leave_limbo(7)
    assert (await read(store, 7, 0, 3)).absent == ((1, 3),)


async def test_a_new_incarnation_denies_nothing_that_the_old_one_was_asked(root: Path) -> None:
    store = started(root / "d")
    await add(store, run_of(7, range(3)))
    await store.stop()
    store = opened(root / "d")
    store.set_member("b1@2")
    store.start(lambda error: pytest.fail(repr(error)))

    old = await read(store, 7, 0, 9, member="b1@1")
    assert (ids_of(old), old.absent) == ([0, 1, 2], ())
    assert (await add(store, run_of(7, [3]), member="b1@1")).status is Status.NOT_MINE
    assert (await fence(store, 7, member="b1@1")).status is Status.NOT_MINE
    assert (await read(store, 8, 0, 9, member="b1@2")).absent == ((0, 9),)
    assert (await add(store, run_of(9, [0]), member="b1@2")).status is Status.OK


async def test_evicted_ledgers_are_known(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.bookie.holdings.LEDGERS_MAX", 10)
    store = started(root / "d")
    for ledger in range(50):
        await add(store, run_of(ledger, range(2)))
    await store.checkpoint()

    store.holdings.evict_idle()

    assert len(store.holdings._ledgers) == 0
    for ledger in range(50):
        assert ids_of(await read(store, ledger, 0, 5)) == [0, 1]
    assert len(list(store.holdings.ledgers())) == 50


async def test_a_ledger_that_nobody_uses_leaves_memory_and_one_in_use_stays(root: Path) -> None:
    store = started(root / "d")
    for ledger in range(50):
        await add(store, run_of(ledger, range(2)))
    await store.checkpoint()

    for _ in range(200):
        store.holdings.evict_idle()
        await read(store, 7, 0, 5)

    assert set(store.holdings._ledgers) == {7}
    assert ids_of(await read(store, 8, 0, 5)) == [0, 1]


async def test_a_segment_beyond_the_files_that_are_kept_open_is_opened_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.bookie.segments.OPEN_FILES_MAX", 1)
    store = started(root / "d")
    for number in range(40):
        await add(store, run_of(7, range(number * 3, number * 3 + 3), "w" * 200))
    assert len(store.segments.numbers()) > 2

    for _ in range(2):
        for number in range(40):
            assert ids_of(await read(store, 7, number * 3, number * 3)) == [number * 3]
    assert ids_of(await read(store, 7, 0, 500)) == list(range(120))

    assert len(store.segments._open) == 1


async def test_on_a_stuck_disk_deferred_adds_are_acked(root: Path, gate: Gate) -> None:
    store = started(root / "d", replace(SMALL, is_deferred=True))
    gate.open.clear()

    assert (await add(store, run_of(7, range(5)))).status is Status.OK
    assert ids_of(await read(store, 7, 0, 4)) == list(range(5))
    heard: list[Verdict] = []
    store.ask(7, FenceAsked(ME, KEY), heard.append)
    await until(lambda: gate.waiting > 0, "the writer syncs")
    assert heard == []

    gate.open.set()
    await until(lambda: bool(heard), "the fence is on disk")


async def test_adds_during_a_checkpoint_are_in_the_next_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add(store, run_of(7, range(5)))
    held = threading.Event()
    begun = threading.Event()
    write = store.index.write

    def slow(*args: object) -> None:
        begun.set()
        assert held.wait(60)
        write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(store.index, "write", slow)
    checkpoint = asyncio.create_task(store.checkpoint())
    await until(begun.is_set, "the checkpoint is being written")
    await add(store, run_of(7, range(5, 9)))
    assert ids_of(await read(store, 7, 0, 20)) == list(range(9))
    held.set()
    await checkpoint

    assert ids_of(await read(store, 7, 0, 20)) == list(range(9))
    store = await again(store)
    assert ids_of(await read(store, 7, 0, 20)) == list(range(9))
    assert (await read_lac(store, 7)).last_add_confirmed == 7
    assert (await read_lac(store, 1)).last_add_confirmed == NO_ENTRY


async def test_records_reach_the_writer_in_order(store: Store) -> None:
    order: list[int] = []
    on_synced = store.pending._on_synced

    def noted(records: list[QueuedRecord], position: writers.Position) -> None:
        order.extend(record.ledger_id for record in records)
        on_synced(records, position)

    store.pending._on_synced = noted  # type: ignore[method-assign]
    await asyncio.gather(*[add(store, run_of(ledger, [0])) for ledger in range(200)])

    assert order == list(range(200))
    assert all(Run(a.run or b"").count == 1 for a in [await read(store, 3, 0, 0)])


async def test_an_add_compared_while_its_ledger_was_evicted_meets_the_fence(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BookKeeper's #4701: two objects of one ledger, and the fence is on the other one."""
    monkeypatch.setattr("services.bookie.holdings.LEDGERS_MAX", -1)
    store = started(root / "d")
    await add(store, run_of(7, range(5)))
    await store.checkpoint()
    bodies = store._reads.fetch
    reading, go_on = asyncio.Event(), asyncio.Event()

    async def slow(*args: Any) -> Any:
        reading.set()
        await go_on.wait()
        return await bodies(*args)

    monkeypatch.setattr(store._reads, "fetch", slow)
    adding = asyncio.create_task(add(store, run_of(7, range(3, 9))))
    await reading.wait()
    store.holdings.evict_idle()
    assert store.holdings._ledgers == {}
    assert (await fence(store, 7)).status is Status.OK
    go_on.set()

    assert (await adding).status is Status.FENCED
