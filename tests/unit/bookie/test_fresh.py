"""Copies of rows are fresh, and are presented to the metadata service, until a witness stands for them (rule 18c)."""

import shutil
from pathlib import Path

import pytest

from quorumlog.protocol.row_copy import RowCopy, RowName
from services.bookie.store import Store
from services.bookie.witnesses import FRESH_MAX, FreshCopies
from tests.unit.bookie.collecting import copy_of
from tests.unit.bookie.support import image, keep_row, opened


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
