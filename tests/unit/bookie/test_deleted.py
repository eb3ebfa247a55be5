"""Rule 16a: a deleted ledger's id outlives its fence. Nothing is taken, defined or denied under it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quorumlog.protocol.ids import NO_LEDGER
from quorumlog.protocol.messages import Status
from services.bookie import space
from services.bookie.index import Index
from services.bookie.log import Kind
from services.bookie.records import IDS_MAX, deleted_in, packed
from services.bookie.space import Space
from services.bookie.store import Store
from services.bookie.tools import app
from tests.support.waiting import until
from tests.unit.bookie.collecting import GONE, Rows, collector_of
from tests.unit.bookie.support import (
    Gate,
    add,
    again,
    assert_right,
    batches_of,
    fence,
    ids_of,
    images_at,
    large_run,
    read,
    read_lac,
    run_of,
    started,
    write_lac,
)
from tests.unit.bookie.test_at_once import cut


def drop(store: Store, *ledger_ids: int) -> None:
    """As on a tombstone."""
    for ledger_id in ledger_ids:
        store.drop(ledger_id, keep_stub=False)


async def assert_deleted(store: Store, ledger_id: int, *, key: bytes = b"k" * 32) -> None:
    """Whatever is asked of it is refused, denies nothing, and leaves nothing behind."""
    # The writer reads its row again, and finds none (rule 9).
    late = await add(store, run_of(ledger_id, [90]), key=key)
    assert late.status is Status.FENCED
    records = store.counters["log_records"]
    copied = await add(store, run_of(ledger_id, [91]), key=key, recovery=True)
    assert copied.status is Status.UNKNOWN
    # Nothing that counts for coverage (rule 13), and no negative.
    assert (await fence(store, ledger_id, key=key)).status is Status.UNKNOWN
    assert (await read_lac(store, ledger_id)).status is Status.UNKNOWN
    assert (await write_lac(store, ledger_id, 5)).status is Status.UNKNOWN
    for is_fencing in (True, False):
        answer = await read(store, ledger_id, 0, 99, is_fencing=is_fencing)
        assert (answer.status, answer.run, answer.absent) == (Status.UNKNOWN, None, ())
    await store.enter_limbo(ledger_id, key, is_fenced=False)
    await store.leave_limbo(ledger_id)
    assert store.counters["log_records"] == records
    assert store.holdings.row(ledger_id) is None
    assert ledger_id not in dict(store.holdings.ledgers())
    assert store.holdings.is_deleted(ledger_id)


async def compacted(store: Store) -> Store:
    """What is written is sealed by a restart, and all of it is moved that may be."""
    store = await again(store)
    before = set(store.segments.numbers())
    await Space(store, live_share_min=1.0).free()
    assert before - set(store.segments.numbers())
    return store


def named(store: Store) -> list[int]:
    """The deleted ledgers that the log names, as often as it does."""
    return [
        ledger_id
        for number in store.segments.numbers()
        for batch in batches_of(store.segments.path(number))
        for record in batch.records
        for ledger_id in deleted_in(record)
    ]


@pytest.mark.parametrize("is_fenced", [True, False])
async def test_a_deleted_ledger_has_no_adds_and_no_reads(store: Store, *, is_fenced: bool) -> None:
    await add(store, run_of(7, range(3)))
    await add(store, run_of(9, range(3)))
    if is_fenced:
        await fence(store, 7)

    drop(store, 7)

    await assert_deleted(store, 7)
    await store.checkpoint()
    await assert_deleted(store, 7)
    for lost_index in (False, True):
        store = await again(store, lost_index=lost_index)
        await assert_deleted(store, 7)
        store = await compacted(store)
        await assert_deleted(store, 7, key=b"another key".ljust(32))
    store = await again(store, lost_index=True)
    await assert_deleted(store, 7)
    assert ids_of(await read(store, 9, 0, 9)) == [0, 1, 2]


async def test_a_deleted_ledgers_id_survives_every_compaction(store: Store) -> None:
    """Also of the oldest one, and of one in which it is packed already: nothing else names it."""
    for ledger in range(7, 17):
        await add(store, run_of(ledger, [0]))
    drop(store, *range(7, 17))

    for _ in range(3):
        store = await compacted(store)
        assert sorted(named(store)) == list(range(7, 17))
    store = await again(store, lost_index=True)

    for ledger in range(7, 17):
        await assert_deleted(store, ledger)


async def test_a_writer_that_missed_the_deletion_is_refused_after_the_drop(store: Store) -> None:
    """Issue 13, hole 1: read OPEN; fenced, closed, deleted and dropped by others; then the add."""
    await add(store, run_of(7, range(3)))
    await fence(store, 7)
    rows = Rows()
    rows.rows = {7: GONE}
    collector = collector_of(store, rows)
    for _ in range(2):
        await collector.round()
    assert store.counters["dropped_ledgers"] == 1

    await assert_deleted(store, 7)
    reads = rows.reads
    await collector.round()
    await collector.deletions_announced([7])

    # Nobody asks about it any more.
    assert rows.reads == reads


async def test_no_checkpoint_precedes_a_deletion(root: Path, store: Store, gate: Gate) -> None:
    """Else the index alone would know, and nobody once it is built anew."""
    await add(store, run_of(7, range(3)))
    await fence(store, 7)
    await store.checkpoint()
    gate.open.clear()
    gate.waiting = 0
    drop(store, 7)
    await until(lambda: gate.waiting > 0, "that it is deleted is being synced")
    await store.checkpoint()

    after = started(cut(store, root / "after"))

    gate.open.set()
    # It is here as it was, for a collector to drop it again.
    assert not after.holdings.is_deleted(7)
    assert (await add(after, run_of(7, [3]))).status is Status.FENCED
    after = await compacted(after)
    after = await again(after, lost_index=True)
    assert (await add(after, run_of(7, [3]))).status is Status.FENCED
    await after.stop()
    await assert_deleted(store, 7)
    store = await again(store, lost_index=True)
    await assert_deleted(store, 7)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("is_indexed", [False, True])
async def test_records_of_a_ledger_after_its_deletion_are_ignored(
    root: Path, store: Store, *, is_packed: bool, is_indexed: bool
) -> None:
    """Rule 16: records are order-free, and an older release took adds to a deleted id."""
    await add(store, run_of(8, [0]))
    if is_packed:
        await store.rewrite_deleted([7, 8])
    else:
        drop(store, 8)
    await add(store, run_of(9, [0]))
    await store.stop()
    # The other ledger's records come to stand behind it, as 8's and 7's own.
    store = started(root / "d")
    if is_indexed:
        await store.checkpoint()
    store.holdings._ledgers.clear()
    ledger = store.ledger(8)
    ledger.replica.is_deleted = False
    await add(store, run_of(8, [5]))
    await fence(store, 8)
    await store.stop()
    shutil.rmtree(root / "d" / "index")

    store = started(root / "d")

    await assert_deleted(store, 8)
    if is_packed:
        await assert_deleted(store, 7)
    assert ids_of(await read(store, 9, 0, 9)) == [0]
    assert {ledger_id for ledger_id, _ in store.index.all_parts()} <= {9}
    await store.checkpoint()
    assert {ledger_id for ledger_id, _ in store.index.all_parts()} <= {9}


async def test_many_deletions_are_packed_into_few_records_and_not_rewritten_by_each_compaction(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "IDS_MAX", 100)
    store = started(root / "d")
    gone = [10**15 + 7919 * n for n in range(500)]
    for start in range(0, len(gone), 100):
        for ledger in gone[start : start + 100]:
            await add(store, run_of(ledger, [0]))
    drop(store, *gone)
    store = await again(store)
    await Space(store).free()
    assert sorted(named(store)) == gone
    kinds = {
        record.kind
        for number in store.segments.numbers()
        for batch in batches_of(store.segments.path(number))
        for record in batch.records
    }
    assert kinds == {Kind.DELETED}

    # Many of them fill a segment: it stays, though no entry is in use in it.
    store = await again(store)
    freeing = Space(store, live_share_min=0.01)
    before = store.segments.numbers()
    written = store.counters["log_records"]
    for _ in range(3):
        await freeing.free()
    assert store.segments.numbers() == before
    assert store.counters["log_records"] == written
    store = await again(store, lost_index=True)
    for ledger in gone[::50]:
        await assert_deleted(store, ledger)


async def test_a_damaged_segment_loses_no_deleted_id(store: Store) -> None:
    """What can't be read may have named anybody: all that the index knows is said again."""
    for ledger in (6, 7):
        await add(store, run_of(ledger, range(3)))
    drop(store, 7)
    await add(store, run_of(9, [0]))
    await store.checkpoint()
    store = await again(store)
    first = store.segments.path(1)
    (batch,) = [b for b in batches_of(first) if any(r.kind is Kind.DELETE for r in b.records)]
    data = bytearray(first.read_bytes())
    data[batch.offset + 4] ^= 1
    first.write_bytes(data)

    await Space(store, live_share_min=1.0).free()

    assert 1 not in store.segments.numbers()
    store = await again(store, lost_index=True)
    await assert_deleted(store, 7)
    assert ids_of(await read(store, 6, 0, 9)) == [0, 1, 2]


async def test_a_damaged_record_of_packed_deletions_loses_no_deleted_id(store: Store) -> None:
    gone = list(range(100, 140))
    for ledger in gone:
        await add(store, run_of(ledger, [0]))
    drop(store, *gone)
    store = await again(store)
    await Space(store).free()
    store = await again(store)
    (path, record) = next(
        (store.segments.path(number), record)
        for number in store.segments.numbers()
        for batch in batches_of(store.segments.path(number))
        for record in batch.records
        if record.kind is Kind.DELETED
    )
    with path.open("r+b") as file:
        file.seek(record.offset + 3)
        file.write(b"\x55")

    await Space(store, live_share_min=1.0).free()

    assert not path.exists()
    store = await again(store, lost_index=True)
    for ledger in gone:
        await assert_deleted(store, ledger)


def found_by(command: str) -> Callable[[Path], str]:
    def run(directory: Path) -> str:
        result = CliRunner().invoke(app, [command, str(directory), "--json"])
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


async def test_the_tools_report_and_keep_deleted_ledgers(root: Path, store: Store) -> None:
    for ledger in (7, 8, 9):
        await add(store, run_of(ledger, range(3)))
    drop(store, 7)
    store = await compacted(store)
    drop(store, 8)
    await store.stop()

    assert '"deleted_ledgers": 2' in found_by("verify")(root / "d")
    lines = found_by("dump")(root / "d")
    assert '"kind":"DELETED","ledger":7,"bytes":8,"ledgers":[7]' in lines
    assert '"kind":"DELETE","ledger":8' in lines
    assert '"deleted_ledgers":2' in found_by("rebuild-index")(root / "d")
    store = started(root / "d")
    await assert_deleted(store, 7)
    await assert_deleted(store, 8)
    await store.stop()
    # What a salvage keeps of a log that is whole is all of it.
    assert CliRunner().invoke(app, ["salvage", str(root / "d"), "--yes"]).exit_code == 0
    store = started(root / "d")
    await assert_deleted(store, 7)
    await assert_deleted(store, 8)


async def test_verify_reports_a_deleted_ledger_missing_from_the_index(root: Path) -> None:
    store = started(root / "d")
    await add(store, run_of(7, range(3)))
    drop(store, 7)
    store = await again(store)
    await store.checkpoint()
    await store.stop()
    index = Index(root / "d" / "index")
    index._db.delete(b"D" + (7).to_bytes(8, "big"))
    index.close()

    result = CliRunner().invoke(app, ["verify", str(root / "d"), "--json"])

    assert result.exit_code == 1
    assert "the index does not list ledger 7 as deleted" in result.output


async def test_an_index_of_an_older_format_is_rebuilt(root: Path, store: Store) -> None:
    """It knows nothing of deleted ledgers, and the log does."""
    await add(store, run_of(7, range(3)))
    drop(store, 7)
    await add(store, run_of(9, range(3)))
    await store.stop()
    index = Index(root / "d" / "index")
    index._db[b"Aformat"] = b"1"
    index._db.delete(b"D" + (7).to_bytes(8, "big"))
    index.close()

    store = started(root / "d")

    await assert_deleted(store, 7)
    assert ids_of(await read(store, 9, 0, 9)) == [0, 1, 2]


async def test_a_crash_at_any_step_of_a_compaction_forgets_no_deleted_ledger(
    root: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ledger in range(7, 12):
        await add(store, run_of(ledger, [0]))
    await add(store, large_run(20, 0, 20_000))
    drop(store, *range(7, 11))
    store = await again(store)
    steps = (
        (store, "checkpoint"),
        (store, "rewrite_state"),
        (store, "rewrite_deleted"),
    )
    images = images_at(monkeypatch, store, steps, root)
    await Space(store, live_share_min=1.0).free()
    await store.stop()
    monkeypatch.undo()

    assert len(images) > 5
    for crashed in images:
        for lost_index in (False, True):
            after = started(crashed)
            after = await again(after, lost_index=lost_index)
            for ledger in range(7, 11):
                await assert_deleted(after, ledger)
            assert ids_of(await read(after, 11, 0, 9)) == [0]
            await after.stop()


# --- DROP: a copy that others have is given up, and may come back (rule 16) ---------------------------


async def test_copies_restored_after_a_drop_survive_every_compaction(store: Store) -> None:
    """Rule 16 asks for a counter, since compaction reorders records. It never brings a DROP behind
    a copy that was stored after it, so that no counter is kept.
    """
    await add(store, run_of(7, range(10)))
    await add(store, run_of(9, range(10)))
    store.drop(7, keep_stub=True)
    store = await again(store)
    await add(store, run_of(7, range(5)), recovery=True)
    for _ in range(3):
        for lost_index in (False, True):
            store = await again(store, lost_index=lost_index)
            assert_right(found := await read(store, 7, 0, 9), 7)
            assert set(range(5)) <= set(ids_of(found))
            assert (await add(store, run_of(7, [50]))).status is Status.FENCED
        store = await compacted(store)


async def test_copies_that_reappear_after_their_drop_are_dropped_again(store: Store) -> None:
    """The other order: older runs stay in a segment, and the DROP goes while newer copies are held. A
    rebuilt index finds all of them; they are what their ids say, fenced, and a collector drops them.
    """
    await add(store, run_of(7, range(10)))
    # Much of ledger 9 keeps the segment that holds 7 in use.
    await add(store, run_of(9, range(20), "w" * 20))
    await fence(store, 7)
    store = await again(store)
    store.drop(7, keep_stub=True)
    store = await again(store)
    await add(store, run_of(7, range(5)), recovery=True)
    await Space(store, live_share_min=0.2).free()
    assert store.segments.numbers()[0] == 1
    assert 2 not in store.segments.numbers()

    store = await again(store, lost_index=True)

    assert_right(found := await read(store, 7, 0, 20), 7)
    assert ids_of(found) == list(range(10))
    assert (await add(store, run_of(7, [50]))).status is Status.FENCED
    store.drop(7, keep_stub=True)
    store = await again(store, lost_index=True)
    assert ids_of(await read(store, 7, 0, 20)) == []


def test_a_packed_record_holds_up_to_its_maximum_of_ids() -> None:
    ids = list(range(0, IDS_MAX * 3, 3))
    assert packed(ids).size == 8 * IDS_MAX


async def test_the_highest_ledger_counts_memory_index_and_deleted_ids(root: Path) -> None:
    """Rule 18a: an id that a bookie holds or held is not assigned again."""
    store = started(root)

    def highest(below: int = 1 << 52) -> int:
        return store.holdings.highest_ledger(below)

    try:
        assert highest() == NO_LEDGER
        store.holdings.ledger(90)  # only asked for
        for ledger_id in (3, 7, 12):
            await add(store, run_of(ledger_id, [0]))
        assert (highest(), highest(below=12), highest(below=3)) == (12, 7, NO_LEDGER)
        await store.checkpoint()
        assert (highest(), highest(below=12)) == (12, 7)
        drop(store, 12)
        assert (highest(), highest(below=12)) == (12, 7)
        await store.checkpoint()
        store = await again(store)
        assert (highest(), highest(below=12)) == (12, 7)
        store = await again(store, lost_index=True)
        assert (highest(), highest(below=12)) == (12, 7)
    finally:
        await store.stop()
