"""The log read back: torn tails are cut, damage is refused, nothing that was acknowledged is lost."""

import random
import shutil
from pathlib import Path

import pytest

from quorumlog.protocol.record import make
from services.bookie.log import (
    BATCH_HEAD,
    KEY_BYTES,
    SECTOR,
    Kind,
    LogDamaged,
    QueuedRecord,
    encode_batch,
)
from services.bookie.segments import Segments
from services.bookie.store import Store
from tests.unit.bookie import support
from tests.unit.bookie.support import (
    add,
    again,
    assert_right,
    batches_of,
    fence,
    ids_of,
    image,
    last_segment,
    opened,
    read,
    run_of,
    started,
)


async def filled(directory: Path, runs: int = 6) -> Store:
    """A store with some runs, one batch each, all acknowledged; it still serves."""
    store = started(directory)
    for number in range(runs):
        await add(store, run_of(7, range(number * 10, number * 10 + 10)))
    return store


async def entries_in(directory: Path) -> list[int]:
    store = started(directory)
    answer = await read(store, 7, 0, 999)
    assert_right(answer, 7)
    await store.stop()
    return ids_of(answer)


async def test_a_torn_tail_is_cut_and_everything_before_it_is_kept(root: Path) -> None:
    store = await filled(root / "d")
    for cut in range(1, 400, 37):
        crashed = image(store, root / f"cut-{cut}")
        path = last_segment(crashed)
        last = batches_of(path)[-1]
        data = path.read_bytes()
        # The file keeps the length that it was given; whole sectors of its end were never written.
        kept = max(last.offset, (last.end - cut) // SECTOR * SECTOR)
        path.write_bytes(data[:kept] + bytes(len(data) - kept))

        assert await entries_in(crashed) == list(range(50))


async def test_a_tail_with_blank_sectors_is_cut(root: Path) -> None:
    store = await filled(root / "d")
    crashed = image(store, root / "torn")
    path = last_segment(crashed)
    last = batches_of(path)[-1]
    data = bytearray(path.read_bytes())
    sector = (last.offset // 512 + 1) * 512
    data[sector : sector + 512] = bytes(512)
    path.write_bytes(data)

    assert await entries_in(crashed) == list(range(50))


async def test_batches_after_the_last_sync_point_are_copied_to_a_new_segment(root: Path) -> None:
    store = await filled(root / "d")
    crashed = image(store, root / "c")
    before = last_segment(crashed)

    reopened = opened(crashed)

    assert reopened.replayed.copied_records == 1
    assert not reopened.replayed.was_clean
    reopened.close()
    # A second crash finds the copy; what it was copied from is never looked at again.
    data = before.read_bytes()
    end = batches_of(before)[-2].end
    before.write_bytes(data[:end])
    assert await entries_in(crashed) == list(range(60))


async def test_a_clean_end_that_missed_the_disk_is_no_later_damage(root: Path) -> None:
    store = await filled(root / "d")
    await store.stop()
    path = last_segment(root / "d")
    end = batches_of(path)[-1]
    store = started(root / "d")
    assert store.replayed.was_clean
    await add(store, run_of(8, range(5)))
    crashed = image(store, root / "crashed")
    await store.stop()

    # Its sync failed, or the process was killed before it: the page cache had it, the disk had not.
    damaged = crashed / path.relative_to(root / "d")
    damaged.write_bytes(damaged.read_bytes()[: end.offset] + bytes(end.end - end.offset))

    assert await entries_in(crashed) == list(range(60))


async def test_damage_below_the_sync_point_is_refused_and_nothing_is_changed(root: Path) -> None:
    store = await filled(root / "d")
    for kind in ("flip", "zero", "missing batch"):
        crashed = image(store, root / kind)
        path = last_segment(crashed)
        batches = batches_of(path)
        data = bytearray(path.read_bytes())
        if kind == "flip":
            data[batches[2].offset + BATCH_HEAD.size + 50] ^= 1
        elif kind == "zero":
            data[batches[2].offset : batches[2].end] = bytes(batches[2].end - batches[2].offset)
        else:
            del data[batches[2].offset : batches[2].end]
        path.write_bytes(data)

        with pytest.raises(LogDamaged, match="does not start"):
            opened(crashed)

        assert path.read_bytes() == data


async def test_a_damaged_last_batch_that_does_not_look_torn_is_refused(root: Path) -> None:
    store = await filled(root / "d")
    crashed = image(store, root / "c")
    path = last_segment(crashed)
    last = batches_of(path)[-1]
    data = bytearray(path.read_bytes())
    data[last.end - 20] ^= 4
    path.write_bytes(data)

    with pytest.raises(LogDamaged, match="does not look like an interrupted write"):
        opened(crashed)


@pytest.mark.parametrize(
    ("has_checkpoint", "batches", "what"), [(False, 4, "the file had"), (True, 3, "ends before")]
)
async def test_a_log_that_was_cut_is_refused(
    root: Path, has_checkpoint: bool, batches: int, what: str
) -> None:
    """Whole batches are gone with their proof, below a checkpoint too; no crash does that, since the length was synced."""
    store = await filled(root / "d")
    if has_checkpoint:
        await store.checkpoint()
    crashed = image(store, root / "c")
    path = last_segment(crashed)
    path.write_bytes(path.read_bytes()[: batches_of(path)[batches - 1].end])

    with pytest.raises(LogDamaged, match=what):
        opened(crashed)


async def test_a_missing_segment_is_refused(root: Path) -> None:
    store = await filled(root / "d")
    await store.stop()
    shutil.rmtree(root / "d" / "index")
    store = await filled(root / "d")
    await store.stop()
    shutil.rmtree(root / "d" / "index")
    Segments(root / "d" / "log", 0).path(1).unlink()

    with pytest.raises(LogDamaged, match="missing"):
        opened(root / "d")


async def test_an_index_without_its_log_is_refused(root: Path) -> None:
    store = await filled(root / "d")
    await store.stop()
    for path in (root / "d" / "log").iterdir():
        path.unlink()

    with pytest.raises(LogDamaged, match="missing"):
        opened(root / "d")


async def test_a_payload_that_looks_like_a_batch_is_never_parsed_as_one(root: Path) -> None:
    store = await filled(root / "d", runs=2)
    segments = Segments(root / "d" / "log", 0)
    head = segments.head(1)
    guessed = head._replace(nonce=0)
    posing = b"".join(
        encode_batch(
            guessed,
            offset=store.position.offset + 500,
            sequence=99,
            synced_below=store.position.offset + 499,
            records=[QueuedRecord(Kind.RUN, 7, (b"x" * 40,), 40)],
        )
    )
    run = make(
        ledger_id=7,
        first_entry=20,
        last_add_confirmed=-1,
        length_before=0,
        payloads=[posing * 40],
        codec=support.CODEC,
    )
    await add(store, run)
    crashed = image(store, root / "c")
    path = last_segment(crashed)
    data = path.read_bytes()
    kept = batches_of(path)[-1].end - 600
    path.write_bytes(data[:kept] + bytes(len(data) - kept))

    assert await entries_in(crashed) == list(range(20))


async def test_after_a_clean_stop_every_flipped_bit_is_found_or_harmless(root: Path) -> None:
    """A fixed sample; `python -m tests.unit.bookie.flips` tries them all."""
    store = await filled(root / "d", runs=3)
    await fence(store, 7)
    await store.stop()
    shutil.rmtree(root / "d" / "index")
    path = last_segment(root / "d")
    data = path.read_bytes()
    chance = random.Random(20)
    for bit in chance.sample(range(len(data) * 8), 60):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)

        with pytest.raises(LogDamaged):
            opened(root / "d")

    path.write_bytes(data)
    store = opened(root / "d")
    row = store.holdings.row(7)
    assert row is not None
    assert row.is_fenced
    store.close()


async def test_a_bit_flipped_while_serving_makes_entries_unknown_not_absent(root: Path) -> None:
    store = await filled(root / "d")
    await store.checkpoint()
    path = last_segment(root / "d")
    batch = batches_of(path)[2]
    with path.open("r+b") as file:
        file.seek(batch.end - 5)
        byte = file.read(1)
        file.seek(batch.end - 5)
        file.write(bytes([byte[0] ^ 1]))

    answer = await read(store, 7, 0, 70)

    assert_right(answer, 7)
    assert ids_of(answer) == [*range(20), *range(30, 60)]
    assert answer.absent == ((60, 70),)
    assert store.counters["damaged_reads"] == 1
    expected, run, _ = await store.examine(7, 0, 70, 1 << 20)
    assert run is not None
    assert (expected, list(run.ids)) == (((0, 59),), ids_of(answer))


async def test_recovery_replaces_a_damaged_copy(root: Path) -> None:
    store = await filled(root / "d")
    await store.checkpoint()
    path = last_segment(root / "d")
    batch = batches_of(path)[2]
    with path.open("r+b") as file:
        file.seek(batch.end - 5)
        file.write(b"\x00\x01\x02")
    part = run_of(7, range(22, 27))

    assert (await add(store, part)).status.value == "unknown"
    assert (await add(store, part, recovery=True)).status.value == "ok"

    assert ids_of(await read(store, 7, 20, 29)) == [22, 23, 24, 25, 26]
    await store.checkpoint()
    assert ids_of(await read(store, 7, 20, 29)) == [22, 23, 24, 25, 26]
    assert (await add(store, run_of(7, range(20, 30)), recovery=True)).status.value == "ok"
    assert ids_of(await read(store, 7, 0, 59)) == list(range(60))
    store = await again(store)
    assert ids_of(await read(store, 7, 0, 59)) == list(range(60))


async def test_a_large_run_is_read_as_it_was_stored_or_left_out_as_damaged(root: Path) -> None:
    store = started(root / "d")
    run = support.large_run(7, 0, 200_000)
    await add(store, run)
    await store.checkpoint()
    (part,) = store.ledger(7).find(0, 0)
    path = last_segment(root / "d")

    assert (await read(store, 7, 0, 0)).run == run.body
    for place in (part.offset, part.offset + KEY_BYTES, part.offset + part.size - 1):
        with path.open("r+b") as file:
            file.seek(place)
            (right,) = file.read(1)
            file.seek(place)
            file.write(bytes((right ^ 1,)))
        answer = await read(store, 7, 0, 0)
        assert (answer.run, answer.absent) == (None, ()), "neither there nor denied"
        with path.open("r+b") as file:
            file.seek(place)
            file.write(bytes((right,)))
    assert (await read(store, 7, 0, 0)).run == run.body
    assert store.counters["damaged_reads"] == 3
