"""What tasks and threads of one bookie do at once: checkpoints, the writer, compaction, adds, the end.

Each test holds one of them at a step and lets the others go on.
"""

import asyncio
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from quorumlog.protocol.messages import Status
from quorumlog.protocol.replica import AddAsked, FenceAsked, Verdict
from services.bookie.collect import Collector
from services.bookie.config import Config
from services.bookie.index import Index
from services.bookie.runtime import BookieRuntime
from services.bookie.space import Space
from services.bookie.store import Store
from tests.support.waiting import DEADLINE_S, until
from tests.unit.bookie.collecting import GONE, Rows, filled
from tests.unit.bookie.support import (
    KEY,
    ME,
    Gate,
    Held,
    add,
    again,
    assert_right,
    fence,
    ids_of,
    image,
    read,
    run_of,
    started,
)


def cut(store: Store, to: Path) -> Path:
    """The directory as a power cut at this moment leaves it: nothing of what was not synced."""
    image(store, to)
    log = to / "log" / store.segments.path(store.position.segment).name
    size = log.stat().st_size
    with log.open("r+b") as file:
        file.seek(store.position.offset)
        file.write(bytes(size - store.position.offset))
    return to


def rot(store: Store, ledger_id: int, entry_id: int) -> None:
    """Turn a bit of the part that holds an entry."""
    (part,) = store.ledger(ledger_id).find(entry_id, entry_id)
    with store.segments.path(part.segment).open("r+b") as file:
        file.seek(part.offset + part.size - 1)
        byte = file.read(1)[0]
        file.seek(part.offset + part.size - 1)
        file.write(bytes([byte ^ 1]))


async def test_no_fence_leaves_a_checkpoint(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I13. The index does not know it yet, and the ledger in memory has nothing more to write."""
    monkeypatch.setattr("services.bookie.holdings.LEDGERS_MAX", 0)
    store = started(root / "d")
    assert (await fence(store, 7)).status is Status.OK
    begun, held = threading.Event(), threading.Event()
    write = store.index.write

    def slow(*args: Any) -> None:
        begun.set()
        assert held.wait(DEADLINE_S)
        write(*args)

    monkeypatch.setattr(store.index, "write", slow)
    checkpoint = asyncio.create_task(store.checkpoint())
    await until(begun.is_set, "the checkpoint is being written")
    store.holdings.evict_idle()

    refused = await add(store, run_of(7, [0]))

    held.set()
    await checkpoint
    assert refused.status is Status.FENCED
    store.holdings.evict_idle()
    assert store.holdings._ledgers == {}
    assert (await add(store, run_of(7, [0]))).status is Status.FENCED


@pytest.mark.parametrize("is_indexed", [False, True])
async def test_a_checkpoint_drops_no_copy_before_its_replacement_is_on_disk(
    root: Path, store: Store, gate: Gate, *, is_indexed: bool
) -> None:
    """Compaction moves a part, and the power goes before the disk has it at its new place."""
    await add(store, run_of(7, range(10)))
    if is_indexed:
        await store.checkpoint()
    parts = store.ledger(7).find(0, 9)
    gate.open.clear()
    gate.waiting = 0
    moving = asyncio.create_task(store.move([(7, part) for part in parts]))
    await until(lambda: gate.waiting > 0, "what is moved is being synced")
    await store.checkpoint()

    after = started(cut(store, root / "after"))

    gate.open.set()
    assert_right(found := await read(after, 7, 0, 9), 7)
    assert (ids_of(found), found.absent) == (list(range(10)), ())
    assert await moving == [True]
    await after.stop()
    for lost_index in (False, True):
        store = await again(store, lost_index=lost_index)
        assert_right(found := await read(store, 7, 0, 9), 7)
        assert (ids_of(found), found.absent) == (list(range(10)), ())
        (row,) = [row for ledger, row in store.holdings.ledgers() if ledger == 7]
        assert row.entry_count == 10


@pytest.mark.parametrize("is_indexed", [False, True])
async def test_a_partly_replaced_copy_stays_whole_in_the_index_until_its_replacement_is_on_disk(
    root: Path, store: Store, gate: Gate, *, is_indexed: bool
) -> None:
    """Some entries of a damaged run are written again: till then the others are not denied."""
    await add(store, run_of(7, range(10)))
    await add(store, run_of(7, range(10, 12)))
    if is_indexed:
        await store.checkpoint()
    rot(store, 7, 0)
    gate.open.clear()
    gate.waiting = 0
    mending = asyncio.create_task(add(store, run_of(7, range(3, 6)), recovery=True))
    await until(lambda: gate.waiting > 0, "it is being synced")
    repeated = asyncio.create_task(add(store, run_of(7, range(8, 10)), recovery=True))
    await until(lambda: store.ledger(7).replica.accepted_count == 4, "both were accepted")
    await store.checkpoint()

    after = started(cut(store, root / "after"))

    gate.open.set()
    found = await read(after, 7, 0, 11)
    assert (ids_of(found), found.absent) == ([10, 11], ())
    (row,) = [row for _, row in after.holdings.ledgers()]
    assert row.entry_count == 12
    assert [(await mending).status, (await repeated).status] == [Status.OK, Status.OK]
    await after.stop()
    await store.checkpoint()
    store = await again(store)
    found = await read(store, 7, 0, 11)
    assert (ids_of(found), found.absent) == ([3, 4, 5, 8, 9, 10, 11], ())
    (row,) = [row for _, row in store.holdings.ledgers()]
    assert row.entry_count == 12


async def test_a_copy_partly_replaced_before_it_is_on_disk_is_found_after_a_restart(
    store: Store, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    """Two mend the same damage at once, with runs that were cut differently."""
    await add(store, run_of(7, range(20)))
    rot(store, 7, 0)
    held = Held(monkeypatch, store._reads, "fetch")
    adding = [
        asyncio.create_task(add(store, run_of(7, ids), recovery=True))
        for ids in (range(20), range(5, 10), range(8, 15))
    ]
    await until(lambda: held.count == 3, "all know that what is here is damaged")
    gate.open.clear()
    held.go_on.set()
    await until(lambda: store.ledger(7).replica.accepted_count == 4, "all were accepted")
    gate.open.set()

    assert [(await one).status for one in adding] == [Status.OK] * 3
    for _ in range(2):
        store = await again(store)
        assert_right(found := await read(store, 7, 0, 30), 7)
        assert (ids_of(found), found.absent) == (list(range(20)), ((20, 30),))


async def test_a_cancelled_waiter_blocks_nobody_elses_answer(store: Store, gate: Gate) -> None:
    gate.open.clear()
    store.add(AddAsked(ME, run_of(6, [0]), KEY), lambda _: None)
    await until(lambda: gate.waiting > 0, "the batch before is being synced")
    first = asyncio.create_task(add(store, run_of(7, [0])))
    waiting = asyncio.create_task(store.enter_limbo(9, KEY, is_fenced=False))
    second = asyncio.create_task(add(store, run_of(8, [0])))
    await until(lambda: store.ledger(8).replica.accepted_count == 1, "all were accepted")
    first.cancel()
    waiting.cancel()
    await asyncio.gather(first, waiting, return_exceptions=True)

    gate.open.set()

    assert (await second).status is Status.OK
    assert (await add(store, run_of(7, [1]))).status is Status.OK
    store = await again(store)
    for ledger in (6, 8):
        assert ids_of(await read(store, ledger, 0, 0)) == [0]
    assert ids_of(await read(store, 7, 0, 5)) == [0, 1]


async def test_a_ledger_leaves_limbo_once_its_entries_are_on_disk(root: Path, gate: Gate) -> None:
    """I27. A checkpoint tells that the limbo is over, and the power goes before the disk has the
    entry that ended it.
    """
    store = started(root / "d", me="b1@2")
    await store.enter_limbo(7, KEY, is_fenced=False)
    await add(store, run_of(7, [0]), member="b1@2", recovery=True)
    gate.open.clear()
    gate.waiting = 0
    adding = asyncio.create_task(add(store, run_of(7, [1]), member="b1@2", recovery=True))
    await until(lambda: gate.waiting > 0, "the entry is being synced")
    leaving = asyncio.create_task(store.leave_limbo(7))
    await store.checkpoint()

    after = started(cut(store, root / "after"), me="b1@2")

    gate.open.set()
    found = await read(after, 7, 0, 1, member="b1@2")
    assert (ids_of(found), found.absent) == ([0], ())
    await after.stop()
    await asyncio.gather(adding, leaving)
    await store.stop()
    store = started(root / "d", me="b1@2")
    assert (await read(store, 7, 0, 2, member="b1@2")).absent == ((2, 2),)


async def test_a_repair_reads_back_only_entries_on_disk(store: Store, gate: Gate) -> None:
    """Rule 20a; in memory it is for all others."""
    await add(store, run_of(7, [0]))
    gate.open.clear()
    gate.waiting = 0
    adding = asyncio.create_task(add(store, run_of(7, [1])))
    await until(lambda: gate.waiting > 0, "the entry is being synced")

    assert ids_of(await read(store, 7, 0, 1)) == [0, 1]
    back = asyncio.create_task(read(store, 7, 0, 1, from_disk=True))
    examined = asyncio.create_task(store.examine(7, 0, 1, 1 << 20, from_disk=True))
    assert ids_of(await read(store, 7, 0, 1)) == [0, 1]
    assert [back.done(), examined.done()] == [False, False]

    gate.open.set()
    answer, (_, run, _) = await back, await examined
    assert ids_of(answer) == [0, 1]
    assert run is not None
    assert list(run.ids) == [0, 1]
    assert_right(answer, 7)
    await adding


async def test_a_repair_reads_back_from_the_disk_not_from_the_page_cache(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add(store, run_of(7, range(5)))
    await add(store, run_of(7, range(5, 10)))
    (part, _) = store.ledger(7).find(0, 9)
    advised: list[tuple[int, int, int]] = []
    advise = os.posix_fadvise

    def spied(fd: int, start: int, size: int, advice: int) -> None:
        advised.append((start, start + size, advice))
        advise(fd, start, size, advice)

    monkeypatch.setattr(os, "posix_fadvise", spied)
    rot(store, 7, 7)
    advised.clear()

    answer = await read(store, 7, 0, 9, from_disk=True)

    assert (ids_of(answer), answer.absent) == (list(range(5)), ()), "damage is unknown"
    start, end, advice = advised[0]
    assert advice == os.POSIX_FADV_DONTNEED
    assert start <= part.offset < part.offset + part.size <= end
    assert (start % mmap.PAGESIZE, end % mmap.PAGESIZE) == (0, 0)
    assert ids_of(await read(store, 7, 0, 9)) == list(range(5))


async def test_a_clean_stop_after_a_failed_checkpoint_is_clean(
    root: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add(store, run_of(7, range(3)))
    begun, held = threading.Event(), threading.Event()
    write = store.index.write

    def fails(*_: Any) -> None:
        begun.set()
        assert held.wait(DEADLINE_S)
        monkeypatch.setattr(store.index, "write", write)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.index, "write", fails)
    checkpoint = asyncio.create_task(store.checkpoint())
    await until(begun.is_set, "the checkpoint is being written")
    writer = store._writer
    assert writer is not None
    ending = asyncio.create_task(store.stop())
    await until(lambda: not writer._thread.is_alive(), "the writer has ended")

    held.set()
    await ending

    with pytest.raises(OSError, match="No space left"):
        await checkpoint
    assert store.counters["checkpoints"] >= 1
    store = started(root / "d")
    assert ids_of(await read(store, 7, 0, 9)) == [0, 1, 2]


async def test_an_add_of_many_parts_does_not_delay_the_stop(root: Path, gate: Gate) -> None:
    store = started(root / "d")
    wide = run_of(7, range(0, 20_000, 4000))
    gate.open.clear()
    heard: list[Verdict] = []
    store.add(AddAsked(ME, wide, KEY), heard.append)
    await until(lambda: gate.waiting > 0, "its first part is being synced")
    ending = asyncio.create_task(store.stop())
    await until(store._writer._is_ending.is_set, "the end has begun")  # type: ignore[union-attr]

    gate.open.set()
    await ending

    assert [verdict.status for verdict in heard] == [Status.UNKNOWN]
    store = started(root / "d")
    assert ids_of(await read(store, 7, 0, 20_000))[0] == 0


async def test_damage_not_replaced_before_the_stop_is_not_denied_after_it(
    root: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its add is judged when the writer has ended: that changes nothing any more."""
    await add(store, run_of(7, range(10)))
    rot(store, 7, 0)
    held = Held(monkeypatch, store._reads, "fetch")
    heard: list[Verdict] = []
    store.add(AddAsked(ME, run_of(7, range(10)), KEY, recovery=True), heard.append)
    await held.reached.wait()
    writer = store._writer
    assert writer is not None
    ending = asyncio.create_task(store.stop())
    await until(lambda: not writer._thread.is_alive(), "the writer has ended")
    held.go_on.set()
    await ending

    assert [verdict.status for verdict in heard] == [Status.UNKNOWN]
    store = started(root / "d")
    found = await read(store, 7, 0, 9)
    assert (ids_of(found), found.absent) == ([], ())


async def test_a_bookie_stopped_while_it_enters_limbo_closes_its_log_cleanly(root: Path) -> None:
    """It has begun to write, and does not serve yet."""
    bookie = BookieRuntime(
        Config.read(
            {
                "PORT": "1",
                "BOOKIE_NAME": "b1",
                "DATA_DIR": str(root),
                "METADATA_URLS": "http://127.0.0.1:1",
            }
        )
    )
    bookie._opened = started(root / "d")
    await add(bookie._opened, run_of(7, range(3)))

    await bookie.stop()

    store = started(root / "d")
    assert store.replayed.was_clean
    assert ids_of(await read(store, 7, 0, 9)) == [0, 1, 2]


async def test_an_index_just_reopened_is_not_suspect(root: Path) -> None:
    """Else the bookie would end itself, and its next start build the index anew."""
    index = Index(root / "index")
    opened = index._db

    class Closed:
        """A checkpoint's thread has closed it, and opened another one before it is asked why."""

        def get(self, _key: bytes) -> None:
            index.is_failed = False
            index._db = opened
            raise OSError("DB was already closed")

    index.is_failed = True
    index._db = Closed()

    with pytest.raises(OSError, match="closed"):
        index.row(7)

    assert not index.is_suspect
    assert index.row(7) is None
    index.close()


async def test_a_reserve_released_concurrently_does_not_end_the_writer(store: Store) -> None:
    writer = store._writer
    assert writer is not None
    tries: list[str] = []

    class Raced(type(store.disk.reserve)):  # type: ignore[misc]
        """A checkpoint that needs room takes the reserve between the look and the step."""

        def unlink(self, *args: Any, **kwargs: Any) -> None:
            Path(self).unlink()
            super().unlink(*args, **kwargs)

    assert store.disk.reserve.exists()
    writer.reserve = Raced(store.disk.reserve)

    def work() -> str:
        tries.append("try")
        if len(tries) == 1:
            raise OSError(28, "No space left on device")
        return "done"

    assert writer._with_room(work) == "done"


# --- guards that no other test would miss: `make mutate` found them ------------------------------


async def test_no_add_is_taken_while_the_drop_of_its_ledger_is_decided(store: Store) -> None:
    """Rules 18 and 20: what came meanwhile would go with the rest, acknowledged."""
    await add(store, run_of(7, range(3)))

    store.withheld.add(7)
    answers = [
        await add(store, run_of(7, [3])),
        await add(store, run_of(7, [4]), recovery=True),
        await add(store, run_of(7, [5]), recovery=True),
        await add(store, run_of(7, range(3)), recovery=True),
    ]
    store.withheld.discard(7)

    assert [verdict.status for verdict in answers] == [Status.UNKNOWN] * 4
    assert (await add(store, run_of(7, [3]))).status is Status.OK


async def test_no_compared_add_is_taken_while_the_drop_of_its_ledger_is_decided(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked before, and reads what is here while the ledger begins to leave."""
    await add(store, run_of(7, range(3)))
    held = Held(monkeypatch, store._reads, "stored")
    adding = asyncio.create_task(add(store, run_of(7, range(5)), recovery=True))
    await held.reached.wait()
    store.withheld.add(7)
    held.go_on.set()

    assert (await adding).status is Status.UNKNOWN
    store.withheld.discard(7)


async def test_a_grace_period_passes_between_the_two_looks(root: Path) -> None:
    """Rule 18. However often it looks, announced or by itself, a first look is one."""
    store = await filled(root / "d")
    rows = Rows()
    rows.rows = {7: GONE, 8: GONE}
    collector = Collector(store, rows, "cluster", grace_s=3600.0)
    await collector.deletions_announced([7])
    for _ in range(3):
        await collector.round()
        await collector.recheck()
    assert [ledger for ledger, _ in store.holdings.ledgers()] == [7, 8, 9]

    collector.grace_s = 0.0  # it has passed
    await collector.recheck()

    assert [ledger for ledger, _ in store.holdings.ledgers()] == [9]


async def test_a_segment_in_use_is_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run can't be read for a moment, so a recovery writes some of its entries again. What is left
    of the run is another part than the one that compaction was about to move.
    """
    store = await filled(root / "d")
    await store.checkpoint()
    move = store.move
    (first,) = store.ledger(7).find(0, 0)
    seen: list[Verdict] = []

    async def mended(parts: Any) -> list[bool]:
        if not seen:
            rot(store, 7, 0)
            seen.append(await add(store, run_of(7, range(3, 6), "w" * 200), recovery=True))
            rot(store, 7, 9)  # the same bit: it reads again
        return await move(parts)

    monkeypatch.setattr(store, "move", mended)
    await Space(store, live_share_min=1.0).free()

    assert seen[0].status is Status.OK
    assert first.segment in store.segments.numbers()
    assert ids_of(await read(store, 7, 0, 500)) == list(range(120))
    # The next time it is moved whole, and the segment goes.
    await Space(store, live_share_min=1.0).free()
    assert first.segment not in store.segments.numbers()
    assert ids_of(await read(store, 7, 0, 500)) == list(range(120))


async def test_a_drop_during_a_move_is_final(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules 16 and 17: compaction writes nothing that is not held any more."""
    store = await filled(root / "d")
    await store.checkpoint()
    held = Held(monkeypatch, store._reads, "fetch_each")
    parts = [(ledger, part) for ledger in (7, 8) for part in store.ledger(ledger).find(0, 500)]
    moving = asyncio.create_task(store.move(parts))
    await held.reached.wait()
    store.drop(7, keep_stub=False)
    store.drop(8, keep_stub=True)
    held.go_on.set()

    assert all(await moving)
    assert [(ledger, row.highest) for ledger, row in store.holdings.ledgers()] == [(8, -1), (9, 2)]
    for ledger in (7, 8):
        assert ids_of(await read(store, ledger, 0, 500)) == []


async def test_a_ledger_whose_stub_is_not_on_disk_is_not_evicted(
    root: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I13. The index knows of the stub's fence before the log does, and nobody waits for it: loaded
    again from there, the ledger would tell it at once.
    """
    monkeypatch.setattr("services.bookie.holdings.LEDGERS_MAX", 0)
    store = started(root / "d")
    await add(store, run_of(7, range(3)))
    gate.open.clear()
    gate.waiting = 0
    store.drop(7, keep_stub=True)
    await until(lambda: gate.waiting > 0, "the stub is being synced")
    await store.checkpoint()
    store.holdings.evict_idle()
    heard: list[Verdict] = []

    store.ask(7, FenceAsked(ME, KEY), heard.append)

    told_before = len(heard)
    gate.open.set()
    assert told_before == 0
    await until(lambda: bool(heard), "the fence is told once it is on disk")
    assert heard[0].status is Status.OK
