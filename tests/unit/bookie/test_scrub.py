"""Damage is found before somebody needs what rotted, told with its place, and repaired by adds."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.stores import scratch
from loadtest.waiting import until
from quorumlog.protocol.messages import Status
from services.bookie import reads, replay
from services.bookie.log import SEGMENT_HEAD
from services.bookie.replay import STEP_BYTES
from services.bookie.scrub import Pace, Scrubber
from services.bookie.store import Store
from tests.unit.bookie.support import (
    SMALL,
    add,
    batches_of,
    fence,
    ids_of,
    large_run,
    read,
    run_of,
    started,
)

FAST = 1 << 40
WORDS = "w" * 100


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    """Two ledgers over several segments, all but the last of them sealed; the index knows them."""
    with scratch("ql-scrub-") as root:
        store = started(root / "d")
        for number in range(40):
            for ledger in (7, 8):
                ids = range(number * 3, number * 3 + 3)
                await add(store, run_of(ledger, ids, WORDS))
        await fence(store, 8)
        await store.checkpoint()
        assert len(store.segments.numbers()) > 3
        yield store
        await store.stop()


def scrubber_of(store: Store, pace: Pace | None = None) -> Scrubber:
    return Scrubber(store, pace or Pace(), bytes_per_s=FAST, pass_s=1)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


async def test_a_pass_over_an_undamaged_log_finds_nothing(store: Store) -> None:
    scrubber = scrubber_of(store)

    await scrubber.one_pass()

    assert scrubber.progress.passes == 1
    assert scrubber.progress.checked_bytes > 100_000
    assert store.damages.count == 0


async def test_batches_larger_than_one_read_are_judged_one_by_one() -> None:
    # A reader knows how long a batch is from its head only, so it has to come back for the rest.
    with scratch("ql-scrub-") as root:
        store = started(root / "d", replace(SMALL, segment_bytes=6 * STEP_BYTES))
        for number in range(8):
            await add(store, large_run(7, number, STEP_BYTES + 100_000 * (number % 3)))
        await store.checkpoint()
        path = store.segments.path(1)
        batches = batches_of(path)
        assert len(batches) > 2
        assert store.position.segment > 1

        await scrubber_of(store).one_pass()

        assert store.damages.count == 0
        flip(path, batches[1].end - 1)
        await scrubber_of(store).one_pass()
        (found,) = store.damages.stretches()
        assert (found.segment, found.start, found.end) == (1, batches[1].offset, batches[1].end)
        await store.stop()


async def test_a_segment_reads_the_same_however_much_is_read_at_a_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(9)
    for number in store.segments.numbers()[:3]:
        path = store.segments.path(number)
        for _ in range(12):
            flip(path, chance.randrange(SEGMENT_HEAD.size, path.stat().st_size))
        whole = list(replay.scan(store.segments, number))
        assert any(found.batch is None for found in whole)
        for step in (200, 1000, 5000, 20_000):  # each holds the table of these batches
            monkeypatch.setattr(replay, "STEP_BYTES", step)

            assert list(replay.scan(store.segments, number)) == whole, f"{step} at a time"
        monkeypatch.undo()


async def test_every_flipped_byte_of_a_sealed_segment_is_found_with_its_place(store: Store) -> None:
    path = store.segments.path(2)
    end = batches_of(path)[-1].end
    chance = random.Random(4)
    for at in sorted(chance.sample(range(SEGMENT_HEAD.size, end), 40)):
        flip(path, at)
        await scrubber_of(store).one_pass()

        found = store.damages.stretches()

        assert [stretch.segment for stretch in found] == [2], f"byte {at}"
        assert found[0].start <= at < found[0].end
        flip(path, at)
        store.damages.segment_removed(2)


async def test_damaged_entries_are_listed_unknown_and_forgotten_once_repaired(store: Store) -> None:
    path = store.segments.path(2)
    batches = batches_of(path)
    for batch in batches[:2]:
        flip(path, batch.records[0].offset + batch.records[0].size - 1)

    await scrubber_of(store).one_pass()

    lost = list(store.damages.lost())
    assert {item.ledger_id for item in lost} == {7, 8}
    assert len(store.damages.stretches()) == 2
    for item in lost:
        ((first, last),) = item.ranges
        answer = await read(store, item.ledger_id, first, last)
        assert (ids_of(answer), answer.absent) == ([], ())
        repaired = await add(
            store, run_of(item.ledger_id, range(first, last + 1), WORDS), recovery=True
        )
        assert repaired.status is Status.OK
    assert list(store.damages.lost()) == []
    for ledger in (7, 8):
        assert ids_of(await read(store, ledger, 0, 500)) == list(range(120))


async def test_a_broken_segment_head_does_not_hide_later_segments(store: Store) -> None:
    flip(store.segments.path(2), 20)
    path = store.segments.path(3)
    batch = batches_of(path)[-1]
    flip(path, SEGMENT_HEAD.size + 5)
    flip(path, batch.end - 3)

    await scrubber_of(store).one_pass()

    assert [(s.segment, s.start) for s in store.damages.stretches()] == [
        (2, 0),
        (3, SEGMENT_HEAD.size),
        (3, batch.offset),
    ]
    # The index knows where the entries of a segment without a head lie: they can be read.
    assert all(item.segment == 3 for item in store.damages.lost())


async def test_a_missing_segment_is_an_alarm_and_its_entries_are_unknown(store: Store) -> None:
    store.segments.path(2).unlink()

    await scrubber_of(store).one_pass()

    assert [s.reason for s in store.damages.stretches()] == ["the file is missing"]
    lost = {e for item in store.damages.lost() for low, high in item.ranges for e in (low, high)}
    assert lost
    answer = await read(store, 7, 0, 200)
    assert answer.absent == ((120, 200),)


async def test_a_paused_scrubber_takes_no_further_step(store: Store) -> None:
    pace = Pace()
    pace.pause()
    scrubber = scrubber_of(store, pace)

    one_pass = asyncio.create_task(scrubber.one_pass())
    await until(lambda: scrubber.progress.checked_bytes > 0, "the first step")

    first = scrubber.progress.checked_bytes
    assert not one_pass.done()
    assert scrubber.progress.segment == 0
    pace.resume()
    await one_pass
    assert scrubber.progress.checked_bytes > first


async def test_a_pass_resumes_after_a_restart(store: Store) -> None:
    pace = Pace()
    pace.pause()
    first = scrubber_of(store, pace)
    one_pass = asyncio.create_task(first.one_pass())
    await until(lambda: first.progress.checked_bytes > 0, "the first step")
    (store.directory / "scrubbed").write_bytes(b"2")
    one_pass.cancel()

    second = scrubber_of(store)
    await second.one_pass()

    sealed = [n for n in store.segments.numbers() if 2 < n < store.position.segment]
    sizes = [batches_of(store.segments.path(n))[-1].end - SEGMENT_HEAD.size for n in sealed]
    assert second.progress.checked_bytes == sum(sizes)


async def test_a_segment_removed_while_it_is_scrubbed_is_no_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.bookie.replay.STEP_BYTES", 4096)
    monkeypatch.setattr("services.bookie.scrub._STEP_BYTES", 4096)

    class Removing(Pace):
        """Compaction is done with the segment when the scrubber is in the midst of it."""

        async def spend(self, _size: int, _bytes_per_s: int) -> None:
            if store.segments.path(2).exists():
                store.segments.remove(2)
                store.damages.segment_removed(2)

    scrubber = scrubber_of(store, Removing())
    scrubber.progress.segment = 1

    await scrubber.one_pass()

    assert not store.segments.path(2).exists()
    assert store.damages.stretches() == []
    assert list(store.damages.lost()) == []
    assert store.counters["scrub_damages"] == 0


async def test_damage_is_told_until_all_fits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bookie does not say that nothing is damaged when what it remembers is repaired."""
    monkeypatch.setattr(reads, "DAMAGES_MAX", 1)
    for entry in (0, 60):
        (part,) = store.ledger(7).find(entry, entry)
        flip(store.segments.path(part.segment), part.offset + part.size - 1)
    await scrubber_of(store).one_pass()
    (lost,) = store.damages.lost()
    assert store.damages.is_cut

    for low, high in lost.ranges:
        await add(store, run_of(7, range(low, high + 1), WORDS), recovery=True)
    assert not list(store.damages.lost())
    assert store.damages.is_cut

    monkeypatch.setattr(reads, "DAMAGES_MAX", 100)
    await scrubber_of(store).one_pass()

    (other,) = store.damages.lost()
    assert other.ranges != lost.ranges
    assert not store.damages.is_cut
