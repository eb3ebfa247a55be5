"""`python -m tests.bookie.flips`: every single bit of a small log, flipped.

After a clean stop each flip must be found; after a crash it must be found or lose nothing that was
acknowledged below the last batch. And under a serving store no flip may turn an entry into an
absent one.
"""

import asyncio
import shutil
import sys
import time
from pathlib import Path

from loadtest.stores import scratch
from services.bookie.log import LogDamaged
from tests.bookie.support import (
    add,
    batches_of,
    fence,
    ids_of,
    image,
    last_segment,
    opened,
    read,
    run_of,
    started,
)

RUNS = 3
ENTRIES = set(range(RUNS * 2))


async def _made(root: Path) -> tuple[Path, Path]:
    """A log after a clean stop, and the same one after a crash; both without an index."""
    store = started(root / "clean")
    await fence(store, 7)
    for number in range(RUNS):
        await add(store, run_of(7, range(number * 2, number * 2 + 2)), recovery=True)
    crashed = image(store, root / "crashed")
    await store.stop()
    for made in (root / "clean", crashed):
        shutil.rmtree(made / "index")
    return root / "clean", crashed


def _held(directory: Path) -> set[int] | None:
    """The entries that a start finds, or None where it refuses."""
    try:
        store = opened(directory)
    except LogDamaged:
        return None
    ranges = store.ledger(7).present(0, 99)
    row = store.row(7)
    assert row is not None, "the fence is gone"
    assert row.is_fenced, "the fence is gone"
    store.close()
    # The start began a new segment; the next one shall see the log as it was.
    last_segment(directory).unlink()
    shutil.rmtree(directory / "index")
    return {entry for first, last in ranges for entry in range(first, last + 1)}


def flip_all(directory: Path, *, at_least: set[int], step: int = 1) -> tuple[int, int]:
    """How many flips were found, and how many were harmless. Raises AssertionError for others."""
    path = last_segment(directory)
    end = batches_of(path)[-1].end
    data = path.read_bytes()
    found = harmless = 0
    for bit in range(0, end * 8, step):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        held = _held(directory)
        if held is None:
            found += 1
        else:
            assert held >= at_least, f"bit {bit} of {end * 8} lost entries: {sorted(held)}"
            harmless += 1
    path.write_bytes(data)
    return found, harmless


async def flip_under_reads(root: Path, *, step: int = 1) -> int:
    """Flip bits under a serving store: an entry may become unknown, never absent or another."""
    store = started(root / "served")
    for number in range(RUNS):
        await add(store, run_of(7, range(number * 2, number * 2 + 2)))
    path = last_segment(root / "served")
    end = batches_of(path)[-1].end
    data = path.read_bytes()
    with path.open("r+b") as file:
        for bit in range(0, end * 8, step):
            file.seek(bit // 8)
            file.write(bytes([data[bit // 8] ^ 1 << bit % 8]))
            file.flush()
            answer = await read(store, 7, 0, max(ENTRIES))
            assert answer.absent == ()
            assert set(ids_of(answer)) <= ENTRIES
            file.seek(bit // 8)
            file.write(data[bit // 8 : bit // 8 + 1])
            file.flush()
    assert set(ids_of(await read(store, 7, 0, 99))) == ENTRIES
    await store.stop()
    return end * 8


def main(step: int = 1) -> None:
    """Try them all, and tell."""
    began = time.monotonic()
    with scratch("ql-flips-") as root:
        clean, crashed = asyncio.run(_made(root))
        found, harmless = flip_all(clean, at_least=ENTRIES, step=step)
        sys.stdout.write(f"after a clean stop: {found} flips found, {harmless} harmless\n")
        found, harmless = flip_all(crashed, at_least=set(range(RUNS * 2 - 2)), step=step)
        sys.stdout.write(f"after a crash:      {found} flips found, {harmless} harmless\n")
        bits = asyncio.run(flip_under_reads(root, step=step))
        sys.stdout.write(f"under reads:        {bits // step} flips, none became an absence\n")
    sys.stdout.write(f"{time.monotonic() - began:.1f} s\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
