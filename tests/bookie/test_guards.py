"""Guards of the storage that are seldom needed: each test is what happens without one.

Their mutants stand in mutants.py.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from quorumlog.protocol.messages import Status
from quorumlog.protocol.replica import FenceAsked, Verdict
from services.bookie.collect import Collector
from services.bookie.space import Space
from tests.bookie.collecting import GONE, Rows, filled
from tests.bookie.support import KEY, ME, Held, add, ids_of, read, run_of, started
from tests.bookie.test_at_once import rot
from tests.bookie.test_store import Gate
from tests.support.waiting import until


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


async def test_no_add_is_taken_while_the_drop_of_its_ledger_is_decided(root: Path) -> None:
    """Rules 18 and 20: what came meanwhile would go with the rest, acknowledged."""
    store = started(root / "d")
    await add(store, run_of(7, range(3)))

    store.withhold(7, withheld=True)
    answers = [
        await add(store, run_of(7, [3])),
        await add(store, run_of(7, [4]), recovery=True),
        await add(store, run_of(7, [5]), recovery=True),
        await add(store, run_of(7, range(3)), recovery=True),
    ]
    store.withhold(7, withheld=False)

    assert [verdict.status for verdict in answers] == [Status.UNKNOWN] * 4
    assert (await add(store, run_of(7, [3]))).status is Status.OK
    await store.stop()


async def test_no_compared_add_is_taken_while_the_drop_of_its_ledger_is_decided(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked before, and reads what is here while the ledger begins to leave."""
    store = started(root / "d")
    await add(store, run_of(7, range(3)))
    held = Held(monkeypatch, store._reads, "stored")
    adding = asyncio.create_task(add(store, run_of(7, range(5)), recovery=True))
    await held.reached.wait()
    store.withhold(7, withheld=True)
    held.go_on.set()

    assert (await adding).status is Status.UNKNOWN
    store.withhold(7, withheld=False)
    await store.stop()


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
    assert [ledger for ledger, _ in store.ledgers()] == [7, 8, 9]

    collector._grace_s = 0.0  # it has passed
    await collector.recheck()

    assert [ledger for ledger, _ in store.ledgers()] == [9]
    await store.stop()


async def test_a_segment_still_referenced_by_a_part_is_not_removed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run can't be read for a moment, so a recovery writes some of its entries again. What is left
    of the run is another part than the one that compaction was about to move.
    """
    store = await filled(root / "d")
    await store.checkpoint()
    move = store.moves.move
    (first,) = store.ledger(7).find(0, 0)
    seen: list[Verdict] = []

    async def mended(parts: Any) -> list[bool]:
        if not seen:
            rot(store, 7, 0)
            seen.append(await add(store, run_of(7, range(3, 6), "w" * 200), recovery=True))
            rot(store, 7, 9)  # the same bit: it reads again
        return await move(parts)

    monkeypatch.setattr(store.moves, "move", mended)
    await Space(store, live_share_min=1.0).free()

    assert seen[0].status is Status.OK
    assert first.segment in store.segments.numbers()
    assert ids_of(await read(store, 7, 0, 500)) == list(range(120))
    # The next time it is moved whole, and the segment goes.
    await Space(store, live_share_min=1.0).free()
    assert first.segment not in store.segments.numbers()
    assert ids_of(await read(store, 7, 0, 500)) == list(range(120))
    await store.stop()


async def test_a_ledger_dropped_during_a_move_does_not_come_back(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules 16 and 17: compaction writes nothing that is not held any more."""
    store = await filled(root / "d")
    await store.checkpoint()
    held = Held(monkeypatch, store._reads, "fetch_each")
    parts = [(ledger, part) for ledger in (7, 8) for part in store.ledger(ledger).find(0, 500)]
    moving = asyncio.create_task(store.moves.move(parts))
    await held.reached.wait()
    store.moves.drop(7, keep_stub=False)
    store.moves.drop(8, keep_stub=True)
    held.go_on.set()

    assert all(await moving)
    assert [(ledger, row.highest) for ledger, row in store.ledgers()] == [(8, -1), (9, 2)]
    for ledger in (7, 8):
        assert ids_of(await read(store, ledger, 0, 500)) == []
    await store.stop()


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
    store.moves.drop(7, keep_stub=True)
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
    await store.stop()
