"""The timer of checkpoints: what a checkpoint has left for the next one waits for no further record."""

import asyncio
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from services.bookie import pending
from services.bookie.store import Store
from tests.support.waiting import DEADLINE_S, until, within
from tests.unit.bookie.support import SMALL, add, opened, run_of
from tests.unit.bookie.test_defects import broken


class Writes:
    """The writes of a store's index: the first one is replaced, and `second` is set once a second one is done."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.second = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._write = store.index.write
        self._count = 0
        monkeypatch.setattr(pending, "CHECKPOINT_S", 0.01)
        monkeypatch.setattr(store.index, "write", self._next)

    def _next(self, *args: Any) -> None:
        """In a checkpoint's thread."""
        self._count += 1
        if self._count == 1:
            self.first()
        self._write(*args)
        if self._count == 2:
            self.notify(self.second)

    def first(self) -> None:
        """What the first write does before it writes."""
        raise OSError("the disk did not answer")

    def notify(self, event: asyncio.Event) -> None:
        """Set an event of the loop, from a thread."""
        self._loop.call_soon_threadsafe(event.set)


async def test_after_a_checkpoint_on_a_full_disk_the_next_one_waits_for_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try gives the reserve away, which is for fences."""
    store = opened(tmp_path / "d", SMALL)
    store.start(broken)
    writes = Writes(store, monkeypatch)
    monkeypatch.setattr(writes, "first", full)
    monkeypatch.setattr(pending, "CHECKPOINT_S", 10 * DEADLINE_S)
    checkpoints = store._checkpoints
    await add(store, run_of(1, [0]))

    checkpoints._is_due()
    await until(lambda: checkpoints._running is None, "the first checkpoint has ended")
    failed, timer = store.counters["failed_checkpoints"], checkpoints._timer
    await add(store, run_of(1, [1]))

    assert (failed, timer) == (1, None)
    assert checkpoints._timer is not None
    await store.stop()


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_after_a_failed_checkpoint_the_next_one_comes_without_another_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path / "d", SMALL)
    store.start(broken)
    writes = Writes(store, monkeypatch)

    await add(store, run_of(1, [0]))

    async with within("a second checkpoint is written"):
        await writes.second.wait()
    assert store.counters["failed_checkpoints"] == 1
    assert [part.first for part in store.index.parts(1, 0, 0, 0)] == [0]
    await store.stop()


async def test_what_came_during_a_checkpoint_gets_one_without_another_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record's own timer fires while the first checkpoint still runs, and starts nothing."""
    store = opened(tmp_path / "d", SMALL)
    store.start(broken)
    writes = Writes(store, monkeypatch)
    begun, fired, held = asyncio.Event(), asyncio.Event(), threading.Event()

    def slow() -> None:
        writes.notify(begun)
        assert held.wait(DEADLINE_S)

    def start_background() -> None:
        if begun.is_set():
            fired.set()
        start()

    monkeypatch.setattr(writes, "first", slow)
    start = store._checkpoints.start_background
    monkeypatch.setattr(store._checkpoints, "start_background", start_background)
    await add(store, run_of(1, [0]))
    async with within("the first checkpoint is being written"):
        await begun.wait()
    await add(store, run_of(1, [1]))
    async with within("the timer of the second record fires"):
        await fired.wait()
    held.set()

    async with within("a second checkpoint is written"):
        await writes.second.wait()
    assert [part.first for part in store.index.parts(1, 0, 1, 0)] == [0, 1]
    await store.stop()
