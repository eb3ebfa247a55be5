"""What becomes of those who wait when a bookie's work dies of something unforeseen."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from quorumlog.protocol.messages import Status
from quorumlog.wire import frames
from quorumlog.wire.frames import Op, Request
from services.bookie import store as stores
from services.bookie.ledger import StoredLedger
from services.bookie.reads import Reads
from services.bookie.store import Store
from tests.support.framed import channel
from tests.support.waiting import until, within
from tests.unit.bookie.support import KEY, ME, SMALL, add, opened, read, run_of
from tests.unit.bookie.test_channel import Served, served

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


async def test_a_checkpoint_that_is_cut_off_before_its_first_step_keeps_no_other_one_waiting(
    tmp_path: Path,
) -> None:
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
