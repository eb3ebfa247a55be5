"""Pages of what a bookie tells for a rebuild (rule 18d): from the index, and from what is above the last checkpoint."""

import asyncio
from pathlib import Path

import pytest

from quorumlog.protocol.replica import RowReported, Verdict
from quorumlog.protocol.row_copy import RowCopy, RowName
from services.bookie import holdings
from services.bookie.store import Store
from tests.unit.bookie.support import KEY, ME, add, opened, run_of, started


async def keep(store: Store, ledger_id: int, *versions: int) -> None:
    for version in versions:
        answered: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        copy = RowCopy(RowName(version, b"a" * 16), b"row %d of %d" % (version, ledger_id))
        store.ask(ledger_id, RowReported(ME, copy, KEY), answered.set_result)
        await answered


async def reported(store: Store, after: int = -1, limit: int = 100) -> dict[int, object]:
    """By ledger: its copies, or None where it is deleted."""
    found, _ = await store.holdings.rows_page(after, limit)
    return {held.ledger_id: None if held.deleted else held.copies for held in found}


async def test_copies_keys_and_deleted_ids_are_told_across_checkpoints_and_restarts(
    root: Path, store: Store
) -> None:
    await keep(store, 3, 1, 2)
    await keep(store, 5, 1)
    await add(store, run_of(9, [0, 1]))
    store.drop(5, keep_stub=False)
    await store.checkpoint()
    await keep(store, 3, 4)
    await keep(store, 7, 1)
    await keep(store, 8, 1)
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
        await keep(store, ledger_id, 1)
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
        await keep(store, ledger_id, 1)

    found, following = await store.holdings.rows_page(-1, 100)

    assert ([held.ledger_id for held in found], following) == ([0, 1], 1)
