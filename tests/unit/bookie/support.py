"""A store under test: entries that follow from their ids, awaited operations, images of crashes."""

import asyncio
import os
import random
import shutil
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from rocksdict import Checkpoint

from quorumlog.protocol.metadata import DigestKind
from quorumlog.protocol.record import Codec, Entry, Run, make, pack
from quorumlog.protocol.replica import (
    AddAsked,
    FenceAsked,
    LacAsked,
    LacReported,
    ReadAsked,
    RowReported,
    Verdict,
)
from quorumlog.protocol.row_copy import RowCopy, RowName
from services.bookie.config import StoreOptions
from services.bookie.cookie import LocalCookie
from services.bookie.log import SECTOR, SEGMENT_HEAD, LogBatch, read_batches
from services.bookie.segments import Segments
from services.bookie.store import ReadAnswer, Store
from services.bookie.writer import Position

ME = "b1@1"
KEY = b"k" * 32
COOKIE = LocalCookie(
    name="b1",
    incarnation=1,
    cluster_id="cluster",
    instance="instance",
    directories=("/data",),
    boots=1,
    registered=True,
)
SMALL = StoreOptions(
    segment_bytes=64 * 1024,
    checkpoint_bytes=1 << 30,
    read_only_below_bytes=0,
    reserve_bytes=4096,
)
"""Small segments roll often; checkpoints come when a test asks for them."""

CODEC = Codec(DigestKind.CRC32C)
_STARTED: WeakKeyDictionary[Store, asyncio.AbstractEventLoop] = WeakKeyDictionary()
"""The stores that were started, and on which loop."""


class Held:
    """A coroutine method of an object whose answers are held back until they may go on."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.count = 0
        """How many have been asked for."""
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()
        self._answer = getattr(owner, name)
        patch.setattr(owner, name, self._late)

    async def _late(self, *args: Any) -> Any:
        answer = await self._answer(*args)
        self.count += 1
        self.reached.set()
        await self.go_on.wait()
        return answer


class Gate:
    """Holds every fdatasync back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.open.set()
        self.waiting = 0
        sync = os.fdatasync

        def gated(fd: int) -> None:
            self.waiting += 1
            assert self.open.wait(60)
            sync(fd)

        monkeypatch.setattr(os, "fdatasync", gated)


def entry_of(ledger_id: int, entry_id: int, text: str = "") -> Entry:
    """The entry that every test means by this id; another text is another entry."""
    payload = f"{ledger_id}:{entry_id}:{text}".encode() * (1 + entry_id * 7 % 40)
    run = make(
        ledger_id=ledger_id,
        first_entry=entry_id,
        last_add_confirmed=entry_id - 1,
        length_before=min(entry_id * 10, 1 << 62),
        payloads=[payload],
        codec=CODEC,
    )
    return run.entry(0)


def run_of(ledger_id: int, ids: Iterable[int], text: str = "") -> Run:
    """The run of these entries."""
    return pack([entry_of(ledger_id, e, text) for e in sorted(ids)], DigestKind.CRC32C)


def large_run(ledger_id: int, entry_id: int, size: int) -> Run:
    """One entry of so many bytes."""
    return make(
        ledger_id=ledger_id,
        first_entry=entry_id,
        last_add_confirmed=entry_id - 1,
        length_before=entry_id * size,
        payloads=[entry_id.to_bytes(4, "big") * (size // 4)],
        codec=CODEC,
    )


def broken(error: BaseException) -> None:
    """For stores whose writer must not fail.

    A scenario that a mutant ends by an assertion leaves its store: the last batch finds the loop closed, and nobody
    is there to hear of it.
    """
    if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
        raise AssertionError(error)


def opened(directory: Path, options: StoreOptions = SMALL, me: str = ME) -> Store:
    """A store that is replayed and not started."""
    return Store(directory, me, options)


def started(directory: Path, options: StoreOptions = SMALL, me: str = ME) -> Store:
    """A store that serves; on the running loop."""
    store = opened(directory, options, me)
    store.start(broken)
    _STARTED[store] = asyncio.get_running_loop()
    return store


async def stop_started() -> None:
    """Stop the stores that this loop still serves."""
    for store, loop in list(_STARTED.items()):
        if loop is asyncio.get_running_loop() and not store._is_ending:
            await store.stop()


async def add(
    store: Store, run: Run, *, member: str = ME, key: bytes = KEY, recovery: bool = False
) -> Verdict:
    """An add, answered."""
    answered: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
    store.add(AddAsked(member, run, key, recovery), answered.set_result)
    return await answered


async def keep_row(
    store: Store, ledger_id: int, name: RowName, body: bytes | None = None
) -> Verdict:
    """A copy of a row that no add brings, answered."""
    answered: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
    copy = RowCopy(name, b"row %d" % name.version if body is None else body)
    store.ask(ledger_id, RowReported(store.me, copy, KEY), answered.set_result)
    return await answered


async def fence(store: Store, ledger_id: int, *, member: str = ME, key: bytes = KEY) -> Verdict:
    """A fence, answered."""
    answered: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
    store.ask(ledger_id, FenceAsked(member, key), answered.set_result)
    return await answered


async def read_lac(store: Store, ledger_id: int) -> Verdict:
    """A LAC read, answered."""
    answered: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
    store.ask(ledger_id, LacAsked(ME), answered.set_result)
    return await answered


async def write_lac(store: Store, ledger_id: int, lac: int) -> Verdict:
    """An explicit LAC, answered."""
    answered: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
    store.ask(ledger_id, LacReported(ME, lac, KEY), answered.set_result)
    return await answered


async def read(
    store: Store,
    ledger_id: int,
    first: int,
    last: int,
    *,
    bytes_max: int = 1 << 20,
    member: str = ME,
    is_fencing: bool = False,
    from_disk: bool = False,
) -> ReadAnswer:
    """A read, answered."""
    answered: asyncio.Future[ReadAnswer] = asyncio.get_running_loop().create_future()
    asked = ReadAsked(member, first, last, is_fencing, KEY, from_disk)
    store.read(ledger_id, asked, bytes_max, answered.set_result)
    return await answered


def ids_of(answer: ReadAnswer) -> list[int]:
    """The ids that an answer has entries of."""
    return [] if answer.run is None else list(Run(answer.run).ids)


def assert_right(answer: ReadAnswer, ledger_id: int) -> None:
    """Each entry of an answer is what its id says."""
    if answer.run is not None:
        for entry in Run(answer.run).entries():
            assert entry == entry_of(ledger_id, entry.entry_id)


def image(store: Store, to: Path) -> Path:
    """The directory as a crash at this moment leaves it, were all of the log on disk.

    The index is copied by RocksDB itself, which removes files behind our back.
    """
    shutil.copytree(store.directory, to, ignore=shutil.ignore_patterns("index"))
    Checkpoint(store.index._db).create_checkpoint(str(to / "index"))
    return to


def images_at(
    monkeypatch: pytest.MonkeyPatch, store: Store, steps: Sequence[tuple[Any, str]], folder: Path
) -> list[Path]:
    """Gets an image of the store before and after each call of these steps: owners, and names of methods."""
    images: list[Path] = []

    def take() -> None:
        images.append(image(store, folder / f"image-{len(images)}"))

    for owner, name in steps:
        step = getattr(owner, name)

        async def watched(*args: object, step: Any = step) -> object:
            take()
            result = await step(*args)
            take()
            return result

        monkeypatch.setattr(owner, name, watched)
    return images


async def again(store: Store, *, lost_index: bool = False) -> Store:
    """The same directory after a clean stop and a start, with its index or without."""
    await store.stop()
    if lost_index:
        shutil.rmtree(store.directory / "index")
    return started(store.directory)


def last_segment(directory: Path) -> Path:
    """The segment that is written."""
    return max((directory / "log").glob("*.log"))


def batches_of(path: Path) -> list[LogBatch]:
    """The right batches of a segment."""
    segments = Segments(path.parent, 0)
    number = int(path.stem)
    data = path.read_bytes()[SEGMENT_HEAD.size :]
    found = read_batches(segments.head(number), data, SEGMENT_HEAD.size)
    return [batch for batch in found if isinstance(batch, LogBatch)]


def lose_unsynced(directory: Path, synced: Position, chance: random.Random) -> None:
    """Make an image what a power cut may leave, if all above `synced` was not acknowledged yet.

    Batches are synced one after another, so some of them are whole, one of them is there in part
    (any of its sectors), and later ones were never written.
    """
    for path in sorted((directory / "log").glob("*.log")):
        number = int(path.stem)
        if number < synced.segment:
            continue
        batches = [
            batch
            for batch in batches_of(path)
            if number > synced.segment or batch.offset >= synced.offset
        ]
        if not batches:
            continue
        torn = chance.choice(batches)
        data = bytearray(path.read_bytes())
        data[torn.end :] = bytes(len(data) - torn.end)
        if chance.random() < 0.9:
            at = torn.offset
            while at < torn.end:
                edge = min(torn.end, at + SECTOR - at % SECTOR)
                if chance.random() < 0.4:
                    data[at:edge] = bytes(edge - at)
                at = edge
        path.write_bytes(data)
        for later in sorted((directory / "log").glob("*.log")):
            if int(later.stem) > number:
                # Its predecessor was not synced when it was made: it never was.
                later.unlink()
        return
