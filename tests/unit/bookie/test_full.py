"""A disk that is full, at every place where something is written: nothing is lost, and it ends."""

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtest.stores import scratch
from loadtest.waiting import until
from quorumlog.protocol.messages import CasStatus, Status
from quorumlog.protocol.replica import AddAsked, Verdict
from services.bookie import inspection
from services.bookie.collect import Collector
from services.bookie.config import StoreOptions
from services.bookie.cookie import read_cookie, write_cookie
from services.bookie.segments import Segments
from services.bookie.store import Store
from services.bookie.tools import app
from tests.unit.bookie.collecting import Rows
from tests.unit.bookie.support import KEY, ME, add, fence, ids_of, read, run_of, started
from tests.unit.bookie.test_cookie import LOCAL

MIB = 1 << 20
OPTIONS = StoreOptions(
    segment_bytes=MIB,
    checkpoint_bytes=1 << 40,
    read_only_below_bytes=8 * MIB,
    reserve_bytes=4 * MIB,
)
LONG = "w" * 400
RUN = 50


@pytest.fixture
def disk() -> Iterator[Path]:
    """A small file system of its own: needs root and mount."""
    with scratch("ql-full-") as root:
        folder = root / "disk"
        folder.mkdir()
        try:
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(folder)],
                check=True,
                capture_output=True,
                timeout=30,
            )
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"no file system can be mounted here, so none can be full: {error}")
        try:
            yield folder
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30)


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Somebody else takes every block until the end of the block."""
    path = disk / "somebody-else"
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT)
        try:
            for size in (MIB, 4096):
                while _is_written(fd, size):
                    pass
        finally:
            os.close(fd)
        yield
    finally:
        path.unlink()


def _is_written(fd: int, size: int) -> bool:
    try:
        return os.write(fd, bytes(size)) == size
    except OSError:
        return False


class RunAdder:
    """Adds runs, and knows which of them were acknowledged."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.next = 0
        self.acknowledged: set[int] = set()
        self.in_flight = 0

    async def add(self, *, recovery: bool = False) -> Status:
        ids = range(self.next, self.next + RUN)
        verdict = await add(self.store, run_of(7, ids, LONG), recovery=recovery)
        if verdict.status is Status.OK:
            self.acknowledged |= set(ids)
            self.next += RUN
        return verdict.status

    def send(self) -> None:
        """The same without waiting for the answer, which may be long in coming."""
        ids = range(self.next, self.next + RUN)
        self.next += RUN
        self.in_flight += 1

        def done(verdict: Verdict) -> None:
            self.in_flight -= 1
            assert verdict.status is Status.OK
            self.acknowledged.update(ids)

        self.store.add(AddAsked(ME, run_of(7, ids, LONG), KEY, True), done)

    async def until_read_only(self) -> None:
        for _ in range(1000):
            self.store.check_space()
            if await self.add() is Status.READ_ONLY:
                return
        raise AssertionError("the disk never filled")

    async def check(self, store: Store) -> None:
        """All that was acknowledged is there."""
        found: set[int] = set()
        for first in range(0, self.next, RUN):
            answer = await read(store, 7, first, first + RUN - 1)
            found |= set(ids_of(answer))
            denied = {e for low, high in answer.absent for e in range(low, high + 1)}
            assert not denied & self.acknowledged
        assert self.acknowledged <= found


@pytest.fixture
async def writer(disk: Path) -> AsyncIterator[RunAdder]:
    writer = RunAdder(started(disk / "d", OPTIONS))
    yield writer
    await writer.store.stop()


async def test_a_full_disk_makes_a_bookie_read_only(disk: Path, writer: RunAdder) -> None:
    store = writer.store
    with filled(disk):
        (disk / "somebody-else").write_bytes(bytes(16 * MIB))
        await writer.until_read_only()
        # Recovery and repair go on; what it has is read.
        assert await writer.add(recovery=True) is Status.OK
        assert store.disk.is_read_only
        await writer.check(store)

    store.check_space()
    assert not store.takes_no_adds
    assert await writer.add() is Status.OK
    await writer.check(store)


async def test_without_a_free_block_fences_hold_adds_wait(disk: Path, writer: RunAdder) -> None:
    store = writer.store
    for _ in range(5):
        assert await writer.add() is Status.OK
    with filled(disk):
        assert (await fence(store, 9)).status is Status.OK
        for _ in range(40):
            # The reserve takes some of these; the rest wait for room.
            writer.send()
        await until(lambda: store.is_stuck, "the writer waits for room")
        store.check_space()
        assert store.takes_no_adds
        assert writer.in_flight
        assert set(ids_of(await read(store, 7, 0, RUN - 1))) == set(range(RUN))

    await until(lambda: writer.in_flight == 0, "what waited is on disk")
    await store.checkpoint()
    store.check_space()
    assert not store.takes_no_adds
    assert (await add(store, run_of(9, [0]))).status is Status.FENCED
    await writer.check(store)


async def test_a_checkpoint_without_room_fails_and_catches_up(disk: Path, writer: RunAdder) -> None:
    store = writer.store
    for _ in range(20):
        await writer.add()
    with filled(disk):
        with pytest.raises(Exception, match="No space left"):
            await store.checkpoint()
        await writer.check(store)

    await store.checkpoint()
    await writer.check(store)
    await store.stop()
    writer.store = started(disk / "d", OPTIONS)
    assert writer.store.replayed.was_clean
    await writer.check(writer.store)


async def test_a_bookie_starts_on_a_full_disk_denying_nothing(disk: Path, writer: RunAdder) -> None:
    for _ in range(20):
        await writer.add()
    await writer.store.stop()
    with filled(disk):
        writer.store = started(disk / "d", OPTIONS)
        assert writer.store.takes_no_adds
        await writer.check(writer.store)
        assert (await fence(writer.store, 9)).status is Status.OK
    writer.store.check_space()
    assert await writer.add() is Status.OK
    await writer.check(writer.store)


async def test_garbage_is_freed_on_a_full_disk(disk: Path, writer: RunAdder) -> None:
    store = writer.store
    for number in range(60):
        ids = range(number * RUN, number * RUN + RUN)
        assert (await add(store, run_of(8, ids, LONG))).status is Status.OK
    await writer.add()
    rows = Rows()
    rows.rows = {8: (CasStatus.MISSING, None)}
    collector = Collector(store, rows, "cluster", grace_s=0.0)
    before = len(store.segments.numbers())
    with filled(disk):
        store.check_space()
        for _ in range(3):
            with suppress(Exception):
                # A checkpoint may find no room at first; the next one has the reserve.
                await collector.round()
        await collector._space.free()
        assert len(store.segments.numbers()) < before - 3
        store.check_space()
        assert not store.disk.is_full

    store.check_space()
    assert await writer.add() is Status.OK
    await writer.check(store)


async def test_a_salvage_without_room_says_so_and_changes_nothing(disk: Path) -> None:
    store = started(disk / "d", OPTIONS)
    for first in range(0, 40 * RUN, RUN):
        await add(store, run_of(7, range(first, first + RUN), LONG))
    await store.stop()
    write_cookie(disk / "d", LOCAL)
    before = sorted(path.name for path in (disk / "d").rglob("*"))

    with filled(disk):
        result = CliRunner().invoke(app, ["salvage", str(disk / "d"), "--yes"])

    assert result.exit_code == 1
    assert "a salvage writes a second log" in result.output
    cookie = read_cookie(disk / "d")
    assert cookie is not None
    assert not cookie.salvaged
    assert sorted(path.name for path in (disk / "d").rglob("*")) == before


async def test_a_failed_salvage_frees_its_room(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = started(disk / "d", OPTIONS)
    size = 0
    while size < 22 * MIB:
        run = run_of(7, range(store.ledger(7).highest + 1, store.ledger(7).highest + 1 + RUN), LONG)
        await add(store, run)
        size += len(run.body)
    await store.stop()
    # As if somebody took the room while it copies.
    monkeypatch.setattr(inspection, "_check_room", lambda *_: None)
    monkeypatch.setattr(inspection, "IN_FLIGHT_BYTES", MIB)

    with pytest.raises(OSError, match="the disk is full"):
        inspection.salvage_log(disk / "d", MIB, Segments(disk / "d" / "log", 0).numbers())

    assert not (disk / "d" / "log.salvaged").exists()
    store = started(disk / "d", OPTIONS)
    assert ids_of(await read(store, 7, 0, 5)) == list(range(6))
    await store.stop()
