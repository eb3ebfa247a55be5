"""Crashed between any two calls to the disk, a bookie's storage loses, revives and leaks nothing, and whatever
changes in the files of a stopped bookie is found or does no harm. A guard that is taken out is missed.
"""

import random

import pytest

from loadtest.stores import scratch
from services.bookie.segments import write_durably
from tests.mutation.mutants.hunt import Guard
from tests.unit.bookie import crash, flips
from tests.unit.bookie.mutants import (
    CRASH_MUTANTS,
    GUARD_MUTANTS,
    OTHER_MUTANTS,
    TWIN_MUTANTS,
    is_found,
)
from tests.unit.bookie.powercut import Disk, Inode


def test_no_crash_loses_resurrects_or_leaks_anything() -> None:
    tally = crash.run(100, seed=7, quiet=True)

    assert tally.what == []
    assert tally.points == 100


@pytest.mark.parametrize("mutant", CRASH_MUTANTS, ids=lambda mutant: mutant.name)
def test_every_crash_mutant_is_found(mutant: Guard) -> None:
    assert is_found(mutant)


def test_synced_bytes_survive_every_power_cut_and_unsynced_ones_may_be_torn() -> None:
    inode = Inode()
    inode.pending.append((0, b"a" * 2048))
    inode.sync()
    inode.pending.append((1024, b"b" * 2048))
    seen = set()
    for seed in range(200):
        made = bytes(inode.content(random.Random(seed)))
        assert made[:1024] == b"a" * 1024
        sectors = tuple(made[at : at + 1] for at in range(1024, 3072, 512))
        seen.add(sectors)
    assert (b"b", b"b", b"b", b"b") in seen
    assert any(b"a" in sectors and b"b" in sectors for sectors in seen)
    assert len({len(sectors) - sectors.count(b"") for sectors in seen}) > 1


def test_an_unsynced_file_name_may_be_gone_after_a_power_cut() -> None:
    with scratch("ql-disk-") as root:
        folder = root / "d"
        folder.mkdir()
        disk = Disk(folder, lambda _: None)
        with disk.watching():
            write_durably(folder / "kept", b"kept")
            (folder / "kept").rename(folder / "moved")
        names = set()
        for seed in range(20):
            to = root / str(seed)
            to.mkdir()
            disk.image(to, random.Random(seed))
            names.add(tuple(sorted(path.name for path in to.iterdir())))

    assert names == {("kept",), ("moved",)}


# --- changed files -------------------------------------------------------------------------------


def test_no_flipped_bit_or_truncated_file_makes_a_bookie_answer_falsely() -> None:
    tally = flips.run(150, seed=7, quiet=True)

    assert tally.wrong == []
    assert tally.flips == tally.detected + tally.harmless == 150
    # Both were changed; which bits lie where, RocksDB decides.
    assert {"log", "index"} <= {where.split()[0] for where in tally.where}


@pytest.mark.parametrize("mutant", OTHER_MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_of_the_damage_checks_is_found(mutant: Guard) -> None:
    assert is_found(mutant)


# --- guards that are taken out -------------------------------------------------------------------


@pytest.mark.parametrize("mutant", [*TWIN_MUTANTS, *GUARD_MUTANTS], ids=lambda mutant: mutant.name)
def test_a_guard_that_is_taken_out_is_missed(mutant: Guard) -> None:
    assert is_found(mutant)
