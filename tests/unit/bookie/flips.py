"""`python -m tests.unit.bookie.flips --flips N`: bits and sizes of a stopped bookie's files, changed.

A bit is flipped, or a file cut short, in a segment or in the index's files, after an orderly stop
or a crash. Then the bookie is started and asked for everything. Each change is detected (it refuses
to start, or what it can't read is unknown) or harmless (all is there). Wrong are: bytes that were
never written, an entry denied that was proven to be on disk, a fence or a LAC forgotten.
"""

import argparse
import asyncio
import random
import shutil
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from loadtest.stores import scratch
from quorumlog.protocol.record import Run
from services.bookie.config import StoreOptions
from services.bookie.store import Store
from tests.support.spread import End, count, interruptible
from tests.unit.bookie.crash import silenced
from tests.unit.bookie.support import (
    add,
    entry_of,
    fence,
    ids_of,
    image,
    read,
    read_lac,
    run_of,
    started,
    write_lac,
)

OPTIONS = StoreOptions(
    segment_bytes=12 * 1024, checkpoint_bytes=1 << 30, read_only_below_bytes=0, reserve_bytes=4096
)
"""Three segments, of which the last holds a third: what is cut there would be missed."""
LEDGERS = (7, 8, 9)
IDS = set(range(60))
LAC = 77
LATE = (7, range(60, 63))
"""Written last before the crash: nothing proves that it was on disk."""


@dataclass
class Tally:
    """What the changes came to."""

    flips: int = 0
    detected: int = 0
    harmless: int = 0
    wrong: list[str] = field(default_factory=list)
    where: Counter[str] = field(default_factory=Counter)
    end: End = field(default_factory=End)


async def made(root: Path) -> tuple[Path, Path]:
    """A directory after an orderly stop, and the same one after a crash."""
    store = started(root / "clean", OPTIONS)
    for number in range(20):
        for ledger in LEDGERS:
            await add(store, run_of(ledger, range(number * 3, number * 3 + 3)), recovery=True)
        if number == 8:
            await fence(store, 9)
            await write_lac(store, 8, LAC)
        if number in {5, 12}:
            await store.checkpoint()
    store.drop(6, keep_stub=False)
    await add(store, run_of(8, range(3)), recovery=True)
    await add(store, run_of(8, range(60, 63)))
    await add(store, run_of(*LATE))
    crashed = image(store, root / "crashed")
    await store.stop()
    return root / "clean", crashed


async def looked(directory: Path) -> tuple[bool, str]:
    """Whether anything was detected, and what is wrong."""
    try:
        store = started(directory, OPTIONS)
    except Exception:  # noqa: BLE001 - it refuses to start, for whatever it found
        return True, ""
    try:
        return await _asked(store)
    finally:
        await store.stop()


async def _asked(store: Store) -> tuple[bool, str]:
    is_detected = False
    for ledger in LEDGERS:
        try:
            answer = await read(store, ledger, 0, 80)
            row = store.holdings.row(ledger)
            lac = (await read_lac(store, ledger)).last_add_confirmed
        except Exception:  # noqa: BLE001 - a caller is answered that it is unknown
            is_detected = True
            continue
        if answer.run is not None:
            for entry in Run(answer.run).entries():
                if entry != entry_of(ledger, entry.entry_id):
                    return True, f"ledger {ledger}, entry {entry.entry_id}: wrong bytes"
        absent = {e for low, high in answer.absent for e in range(low, high + 1)}
        if denied := sorted(absent & IDS):
            return True, f"ledger {ledger}: denies {denied}"
        if row is None or (ledger == 9 and not row.is_fenced):
            return True, f"ledger {ledger} or its fence is forgotten"
        if ledger == 8 and lac < LAC:
            return True, f"the LAC of ledger 8 is {lac}"
        is_detected |= bool(IDS - set(ids_of(answer)))
    return is_detected, ""


def change(directory: Path, chance: random.Random) -> str:
    """Change one file; tells which and how."""
    folder = directory / ("log" if chance.random() < 0.5 else "index")
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.stat().st_size)
    if folder.name == "log":
        # A larger segment is hit more often; the one that is written ends in blank blocks.
        path = chance.choices(files, [path.stat().st_size for path in files])[0]
    else:
        path = chance.choice(files)
    data = bytearray(path.read_bytes())
    used = len(data.rstrip(b"\0")) or 1
    if chance.random() < 0.2:
        size = chance.randrange(used)
        path.write_bytes(data[:size])
        return f"{folder.name}: {path.name} cut to {size}"
    bit = chance.randrange(used * 8)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    return f"{folder.name}: bit {bit} of {path.name}"


def run(flips: int, seed: int, *, quiet: bool = False) -> Tally:
    """Make so many changes, each alone."""
    tally = Tally()
    console = Console(stderr=True, quiet=quiet)
    with (
        interruptible() as tally.end,
        scratch("ql-flips-") as root,
        Progress(console=console) as progress,
        silenced(),
    ):
        task = progress.add_task("flips", total=flips)
        pristine = asyncio.run(made(root))
        for number in range(flips):
            chance = random.Random(f"{seed} {number}")
            directory = root / "changed"
            which = chance.randrange(2)
            shutil.copytree(pristine[which], directory)
            what = change(directory, chance)
            is_detected, wrong = asyncio.run(looked(directory))
            shutil.rmtree(directory)
            tally.flips += 1
            if wrong:
                how = ("clean", "crashed")[which]
                tally.wrong.append(f"seed {seed} {number}: {what} ({how}): {wrong}")
            elif is_detected:
                tally.detected += 1
            else:
                tally.harmless += 1
            tally.where[what.split(":")[0] + (" detected" if is_detected else " harmless")] += 1
            progress.advance(task)
    return tally


def main() -> None:
    """Flip, tell, and end with one line for programs."""
    parser = argparse.ArgumentParser(prog="make flips")
    parser.add_argument("--flips", type=count, default=10_000, help="changes, each alone")
    parser.add_argument("--seed", type=int, default=1, help="what is changed")
    asked = parser.parse_args()
    sys.stdout.write(f"seed {asked.seed}\n")
    tally = run(asked.flips, asked.seed)
    for where, times in sorted(tally.where.items()):
        sys.stdout.write(f"{times:>6} {where}\n")
    for line in tally.wrong[:50]:
        sys.stdout.write(line + "\n")
    sys.stdout.write(
        f"flips: {tally.flips}, {tally.detected} detected, {tally.harmless} harmless,"
        f" {len(tally.wrong)} wrong{tally.end.word}\n"
    )
    sys.exit(tally.end.status(is_right=not tally.wrong))


if __name__ == "__main__":
    main()
