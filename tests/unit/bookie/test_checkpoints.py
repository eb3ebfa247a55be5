"""Checkpoints that fail, and defects: no waiter waits for ever, and no loss is taken for an absence."""

import asyncio
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from quorumlog.protocol.messages import Status
from quorumlog.wire import frames
from quorumlog.wire.frames import Op, Request
from services.bookie import pending
from services.bookie import store as stores
from services.bookie.ledger import StoredLedger
from services.bookie.reads import Reads
from services.bookie.store import Store
from tests.support.framed import channel
from tests.support.waiting import DEADLINE_S, until, within
from tests.unit.bookie.support import KEY, ME, SMALL, add, opened, read, run_of
from tests.unit.bookie.test_channel import Served, served


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


__all__ = ["served"]


def broken(*_args: Any, **_named: Any) -> Any:
    raise RuntimeError("unforeseen")


async def test_a_batch_that_can_not_be_noted_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fatal: list[BaseException] = []
    store = opened(tmp_path / "d", SMALL)
    store.start(fatal.append)
    monkeypatch.setattr(StoredLedger, "on_synced", broken)

    adding = asyncio.ensure_future(add(store, run_of(1, [0])))
    await until(lambda: fatal, "whoever ends the process is told")

    assert isinstance(fatal[0], RuntimeError)
    assert "batch-not-noted" in caplog.text
    adding.cancel()
    await store.stop()


@pytest.mark.parametrize(
    ("owner", "step"), [(Reads, "fetch_cached"), (stores, "join"), (Reads, "read")]
)
async def test_a_read_that_breaks_is_unknown(
    owner: Any, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path / "d", SMALL)
    store.start(broken)
    assert (await add(store, run_of(1, [0]))).status is Status.OK
    if step == "read":
        monkeypatch.setattr(
            Reads, "fetch_cached", lambda _self, _ledger, parts, **_how: ([], parts)
        )
    with monkeypatch.context() as patched:
        patched.setattr(owner, step, broken)
        async with within("it is answered"):
            found = await read(store, 1, 0, 0)
    assert found.run is None
    await store.stop()


async def test_a_task_that_broke_does_not_keep_a_store_from_its_clean_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path / "d", SMALL)
    store.start(broken)
    await add(store, run_of(1, [0]))

    stopping = asyncio.Event()

    async def work() -> None:
        await stopping.wait()
        broken()

    store._tasks.start(work())
    asyncio.get_running_loop().call_later(0, stopping.set)
    await store.stop()

    assert "task-failed" in caplog.text
    again = Store(tmp_path / "d", ME, SMALL)
    assert again.replayed.was_clean
    again.close()


async def test_a_checkpoint_cut_off_at_its_start_blocks_no_other(tmp_path: Path) -> None:
    store = opened(tmp_path / "d", SMALL)
    store.start(broken)
    await add(store, run_of(1, [0]))
    store._checkpoints.start_background()
    running = store._checkpoints._running
    assert running is not None

    before = store.counters["checkpoints"]
    running.cancel()
    async with within("the next one runs"):
        await store.checkpoint()

    assert store.counters["checkpoints"] > before
    await store.stop()


@pytest.mark.parametrize("step", ["encode_answers", "parse_request"])
async def test_a_channel_whose_work_breaks_is_closed_so_that_its_peer_stops_waiting(
    step: str, served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        async with within("the channel is closed"), channel(served.session, served.url) as line:
            patched.setattr(frames, step, broken)
            line.send(frames.encode_request(Request(Op.FENCE, 1, 7, -1, -1, ME, KEY)))
            assert await line.receive() is None
        await until(lambda: not served.bookie.channels, "the bookie notices")
    assert "channel-broke" in caplog.text
