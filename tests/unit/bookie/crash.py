"""`python -m tests.unit.bookie.crash --points N`: a bookie's storage, crashed at any moment.

A store does what a bookie does: writes, checkpoints, rolls, compacts, deletes. Between any two of
its calls to the disk the machine may lose power, or the process be killed. Each such moment is
started from again, with its index or without, and must hold all that was acknowledged, nothing
that was deleted, and, once all ledgers are deleted, no file that nobody needs. A deleted ledger that
takes an add again has risen from the dead (rule 16a), also after compactions and without the index.
"""

import argparse
import asyncio
import itertools
import logging
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rocksdict import Checkpoint

from loadtest.stores import scratch
from quorumlog.protocol.messages import CasStatus, Status
from services.bookie.collect import Collector, Found, MetadataRows
from services.bookie.config import StoreOptions
from services.bookie.index import Index
from services.bookie.log import LogDamaged
from services.bookie.space import Space
from services.bookie.store import Store
from tests.support.spread import End, count, interruptible
from tests.unit.bookie.powercut import Disk
from tests.unit.bookie.support import add, fence, ids_of, read, read_lac, run_of, started, write_lac
from tests.unit.bookie.support import assert_right as assert_bytes

POINTS_PER_STORY = 25
STEPS = 100
_OF_A_ROLL = {"allocate", "rename", "resize", "sync of names"}
OPTIONS = StoreOptions(
    segment_bytes=24 * 1024, checkpoint_bytes=1 << 30, read_only_below_bytes=0, reserve_bytes=4096
)


class Rows(MetadataRows):
    """What the metadata service would say: these ledgers are deleted, all others are here."""

    def __init__(self) -> None:
        self.deleted: set[int] = set()

    async def read(self, held: Mapping[int, object]) -> Mapping[int, Found]:
        return {
            ledger_id: (CasStatus.MISSING if ledger_id in self.deleted else CasStatus.UNKNOWN, None)
            for ledger_id in held
        }

    async def cluster_id(self) -> str:
        return "cluster"

    async def confirm(self) -> None:
        return

    async def ledgers_naming(self, bookie: str) -> set[int]:  # noqa: ARG002
        return set()


@dataclass
class Known:
    """What was answered, and what may have been done."""

    entries: dict[int, set[int]] = field(default_factory=dict)
    lacs: dict[int, int] = field(default_factory=dict)
    fenced: set[int] = field(default_factory=set)
    going: set[int] = field(default_factory=set)
    """Ledgers whose entries may be gone: their deletion was begun."""
    gone: set[int] = field(default_factory=set)
    """Deleted for sure."""

    def copy(self) -> "Known":
        """As it is now. One assignment each: another thread may be at it."""
        return Known(
            {ledger: set(ids) for ledger, ids in list(self.entries.items())},
            dict(self.lacs),
            set(self.fenced),
            set(self.going),
            set(self.gone),
        )


@dataclass
class Point:
    """A moment at which a story was cut off."""

    directory: Path
    known: Known
    during: str
    is_power: bool


class Story:
    """A store at work, and images of moments of it."""

    def __init__(self, root: Path, seed: str, most: int) -> None:
        self._root = root
        self._chance = random.Random(seed)
        self._most = most
        self._disk = Disk(root / "d", self._called)
        self._store: Store | None = None
        self._known = Known()
        self._doing = "write"
        self.points: list[Point] = []
        self._is_imaging = False

    def play(self) -> None:
        """Work, and be cut off now and then."""
        with self._disk.watching(), self._watched_index():
            asyncio.run(self._work())

    def _called(self, call: str) -> None:
        """Before a change of the disk; nothing else happens meanwhile."""
        is_roll = call in _OF_A_ROLL
        rate = 0.06 if is_roll else 0.015 if self._doing == "write" else 0.05
        if self._store is None or len(self.points) >= self._most or self._is_imaging:
            return
        if self._chance.random() >= rate:
            return
        self._is_imaging = True
        try:
            is_power = self._chance.random() < 0.75
            directory = self._root / f"point-{len(self.points)}"
            directory.mkdir()
            known = self._known.copy()
            during = "roll" if is_roll and self._doing == "write" else ""
            self._disk.image(directory, self._chance if is_power else None)
            if self._chance.random() < 0.7:
                Checkpoint(self._store.index._db).create_checkpoint(str(directory / "index"))
            self.points.append(Point(directory, known, during or self._doing, is_power))
        finally:
            self._is_imaging = False

    @contextmanager
    def _watched_index(self) -> Iterator[None]:
        real = Index.write

        def write(index: Index, *args: object) -> None:
            before, self._doing = self._doing, "checkpoint"
            self._called("checkpoint")
            real(index, *args)  # type: ignore[arg-type]
            self._called("checkpoint")
            self._doing = before

        Index.write = write  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            Index.write = real  # type: ignore[method-assign]

    async def _work(self) -> None:
        chance = self._chance
        store = self._store = started(self._root / "d", OPTIONS)
        next_ledger = 1
        open_ledgers: list[int] = []
        for _ in range(STEPS):
            while len(open_ledgers) < 4:
                open_ledgers.append(next_ledger)
                self._known.entries[next_ledger] = set()
                next_ledger += 1
            step = chance.random()
            ledger = chance.choice(open_ledgers)
            if step < 0.6:
                await asyncio.gather(
                    *[
                        self._add(store, chance.choice(open_ledgers))
                        for _ in range(chance.randint(1, 6))
                    ]
                )
            elif step < 0.68:
                await fence(store, ledger)
                self._known.fenced.add(ledger)
            elif step < 0.74:
                lac = max(self._known.entries[ledger], default=-1)
                await write_lac(store, ledger, lac)
                self._known.lacs[ledger] = lac
            elif step < 0.84:
                await store.checkpoint()
            elif step < 0.92:
                self._doing = "deletion"
                self._known.going.add(ledger)
                open_ledgers.remove(ledger)
                store.drop(ledger, keep_stub=False)
                await store.pending.wait_synced(store.ledger(ledger))
                self._known.gone.add(ledger)
                self._doing = "write"
            else:
                self._doing = "compaction"
                share = chance.choice([0.2, 0.4, 0.6, 1.0])
                await Space(store, live_share_min=share, bytes_per_s=1 << 40).free()
                self._doing = "write"
        self._store = None
        await store.stop()

    async def _add(self, store: Store, ledger: int) -> None:
        known = self._known.entries[ledger]
        start = self._chance.randint(0, 30)
        ids = range(start, start + self._chance.randint(1, 20), self._chance.choice([1, 1, 1, 2]))
        verdict = await add(store, run_of(ledger, ids), recovery=ledger in self._known.fenced)
        if verdict.status is Status.OK:
            known |= set(ids)


@dataclass
class Tally:
    """What the moments came to."""

    points: int = 0
    lost: int = 0
    resurrected: int = 0
    leaked: int = 0
    during: Counter[str] = field(default_factory=Counter)
    what: list[str] = field(default_factory=list)
    end: End = field(default_factory=End)

    @property
    def is_good(self) -> bool:
        """Whether nothing at all was wrong."""
        return not (self.lost or self.resurrected or self.leaked)


async def judge(point: Point, tally: Tally) -> None:
    """Start again from a moment, and look for what must and must not be there."""
    tally.points += 1
    how = "power" if point.is_power else "kill"
    tally.during[f"{point.during}/{how}"] += 1

    def wrong(kind: str, what: str) -> None:
        setattr(tally, kind, getattr(tally, kind) + 1)
        tally.what.append(f"{kind}: {what}, during {point.during} ({how}), {point.directory}")

    try:
        store = started(point.directory, OPTIONS)
    except LogDamaged as error:
        wrong("lost", str(error))
        return
    known = point.known
    for ledger, ids in known.entries.items():
        row = store.holdings.row(ledger)
        if ledger in known.gone:
            if row is not None or await _takes(store, ledger):
                wrong("resurrected", f"ledger {ledger}")
            continue
        answer = await read(store, ledger, 0, 99)
        assert_bytes(answer, ledger)
        lacking = ids - set(ids_of(answer))
        may_be_gone = ledger in known.going
        if lacking and not may_be_gone:
            wrong("lost", f"ledger {ledger}, entries {sorted(lacking)}")
        if may_be_gone and row is None:
            continue
        if ledger in known.fenced and not (row is not None and row.is_fenced):
            wrong("lost", f"the fence of ledger {ledger}")
        if (await read_lac(store, ledger)).last_add_confirmed < known.lacs.get(ledger, -1):
            wrong("lost", f"the LAC of ledger {ledger}")
    await _end(store, known.gone, wrong)


async def _takes(store: Store, ledger: int) -> bool:
    """Whether a ledger takes an add of a writer, or denies what it does not have."""
    late = await add(store, run_of(ledger, [200]))
    answer = await read(store, ledger, 0, 99)
    return late.status is not Status.FENCED or answer.absent != ()


async def _end(store: Store, gone: set[int], wrong: object) -> None:
    """Have all ledgers deleted; what is left then is leaked."""
    assert callable(wrong)
    rows = Rows()
    rows.deleted = {ledger for ledger, _ in store.holdings.ledgers()}
    collector = Collector(
        store, rows, "cluster", grace_s=0, space=Space(store, bytes_per_s=1 << 40)
    )
    for _ in range(2):
        await collector.round()
    # What is written now begins in a segment of its own, as after a roll.
    directory = store.directory
    await store.stop()
    store = started(directory, OPTIONS)
    await store.checkpoint()
    await Space(store, bytes_per_s=1 << 40).free()
    if list(store.holdings.ledgers()):
        wrong("resurrected", f"{list(store.holdings.ledgers())}")
    await store.stop()
    shutil.rmtree(directory / "index")
    try:
        store = started(directory, OPTIONS)
    except LogDamaged as error:
        wrong("lost", str(error))
        return
    for ledger in sorted(gone | rows.deleted):
        if await _takes(store, ledger):
            wrong("resurrected", f"ledger {ledger}, without the index")
    await store.stop()
    files = {path.name for path in directory.iterdir()}
    segments = sorted(path.name for path in (directory / "log").iterdir())
    if files - {"log", "index", "lock", "reserve"} or len(segments) > 3:
        wrong("leaked", f"{sorted(files)} {segments}")


@contextmanager
def silenced() -> Iterator[None]:
    """Nothing is logged until the end of the block."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def run(points: int, seed: int, *, quiet: bool = False) -> Tally:
    """Judge so many moments."""
    tally = Tally()
    console = Console(stderr=True, quiet=quiet)
    # What a store has to say of a crash is not asked for here.
    with interruptible() as tally.end, Progress(console=console) as progress, silenced():
        task = progress.add_task("points", total=points)
        for number in itertools.count():
            left = points - tally.points
            if left <= 0:
                break
            with scratch("ql-crash-") as root:
                story = Story(root, f"{seed} {number}", min(left, POINTS_PER_STORY))
                story.play()
                for point in story.points:
                    asyncio.run(judge(point, tally))
                    progress.advance(task)
                if not (tally.is_good or quiet):
                    kept = Path(tempfile.mkdtemp(prefix="ql-crash-kept-"))
                    shutil.copytree(root, kept, dirs_exist_ok=True)
    return tally


def main() -> None:
    """Crash, tell, and end with one line for programs."""
    parser = argparse.ArgumentParser(prog="make crash")
    parser.add_argument("--points", type=count, default=1000, help="moments of a crash")
    parser.add_argument("--seed", type=int, default=1, help="what is written, and when it crashes")
    asked = parser.parse_args()
    sys.stdout.write(f"seed {asked.seed}\n")
    tally = run(asked.points, asked.seed)
    for during, times in sorted(tally.during.items()):
        sys.stdout.write(f"{times:>6} during {during}\n")
    for line in tally.what[:50]:
        sys.stdout.write(line + "\n")
    sys.stdout.write(
        f"crash: {tally.points} points, {tally.lost} lost, {tally.resurrected} resurrected,"
        f" {tally.leaked} leaked{tally.end.word}\n"
    )
    sys.exit(tally.end.status(is_right=tally.is_good))


if __name__ == "__main__":
    main()
