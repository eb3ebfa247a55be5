"""Space is given up on proof, by whole segments, and crashes on the way lose nothing."""

import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.stores import scratch
from quorumlog.protocol.messages import CasStatus, Status
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata
from quorumlog.protocol.quorum import Quorum
from services.bookie.collect import Collector
from services.bookie.store import Store
from tests.bookie.support import (
    add,
    assert_right,
    fence,
    ids_of,
    image,
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
        self.reads = 0
        self.listed: set[int] = set()

    async def read(self, ledger_id: int) -> tuple[CasStatus, LedgerMetadata | None]:
        self.reads += 1
        return self.rows.get(ledger_id, (CasStatus.OK, ROW))

    async def cluster_id(self) -> str:
        return self.cluster

    async def named(self, bookie: str) -> set[int]:
        assert bookie == "b1"
        return self.listed


@pytest.fixture
async def root() -> AsyncIterator[Path]:
    with scratch("ql-collect-") as folder:
        yield folder


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


async def test_a_deleted_ledger_is_dropped_at_the_second_look_and_its_segments_go(
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


async def test_a_tombstone_that_is_taken_back_was_none(root: Path) -> None:
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


async def test_a_copy_that_is_not_needed_any_more_leaves_its_fence(root: Path) -> None:
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
    assert (await add(store, run_of(9, range(3)), repair=True)).status is Status.OK
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

    async def read_row(ledger_id: int) -> tuple[CasStatus, LedgerMetadata | None]:
        rows.reads += 1
        if rows.reads == last_look:
            answers.append((await read(store, 9, 0, 5)).status)
            answers.append((await add(store, run_of(9, range(3)), repair=True)).status)
            return CasStatus.OK, replace(ROW, ledger_id=9)
        return rows.rows.get(ledger_id, (CasStatus.OK, ROW))

    rows.listed = {7, 8}
    rows.read = read_row  # type: ignore[method-assign]
    await collector.round()

    assert answers == [Status.UNKNOWN, Status.UNKNOWN]
    assert ids_of(await read(store, 9, 0, 5)) == [0, 1, 2]
    await store.stop()


async def test_a_crash_at_any_step_of_giving_up_a_segment_loses_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await filled(root / "d")
    rows = Rows()
    rows.rows = {7: GONE}
    collector = collector_of(store, rows)
    images: list[Path] = []

    def snapshot() -> None:
        images.append(image(store, root / f"image-{len(images)}"))

    for name in ("checkpoint", "repeat", "move"):
        step = getattr(store, name)

        async def watched(*args: object, step: object = step) -> object:
            result = await step(*args)  # type: ignore[operator]
            snapshot()
            return result

        monkeypatch.setattr(store, name, watched)
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
