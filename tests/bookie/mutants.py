"""The storage's mutants: one shipped method taken out or turned around, and who misses it.

The rules that the simulator judges have theirs in tests/mutants; these are about files, and about
what a bookie may give up.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from loadtest.stores import scratch
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.ranges import ranges_of
from quorumlog.protocol.record import Run
from quorumlog.protocol.replica import ReadAsked
from services.bookie import cookie, replay
from services.bookie.collect import Collector
from services.bookie.ledger import Ledger
from services.bookie.moves import Moves
from services.bookie.segments import Segments
from services.bookie.space import Space
from services.bookie.store import ReadAnswer, Store
from services.bookie.writer import LogWriter
from tests.bookie import crash, flips, test_at_once, test_collect, test_cookie
from tests.bookie.test_store import Gate

ROUNDS: Final = 8
"""Of 50 crashes, or 100 changes, within which a mutant must be found."""

Patch = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class StorageMutant:
    """A guard that is taken out, and the search that must miss it."""

    rule: str
    name: str
    owner: Any
    attribute: str
    patch: Patch
    search: Callable[[], bool]

    def is_found(self) -> bool:
        """Whether the search finds something wrong while the guard is gone."""
        with self._applied():
            return self.search()

    @contextmanager
    def _applied(self) -> Iterator[None]:
        original = getattr(self.owner, self.attribute)
        setattr(self.owner, self.attribute, self.patch(original))
        try:
            yield
        finally:
            setattr(self.owner, self.attribute, original)


# --- who looks -----------------------------------------------------------------------------------


def by_crashes() -> bool:
    """Power cuts and kills."""
    return any(not crash.run(50, 1000 + n, quiet=True).is_good for n in range(ROUNDS))


def by_flips() -> bool:
    """Bits and sizes of files."""
    return any(flips.run(100, 1000 + n, quiet=True).wrong for n in range(ROUNDS))


def by_scenario(test: Callable[..., Coroutine[Any, Any, None]], *args: object) -> bool:
    """A scenario of the tests."""
    with scratch("ql-mutant-") as root:
        try:
            asyncio.run(_played(test, root, *args))
        except AssertionError:
            return True
    return False


async def _played(
    test: Callable[..., Coroutine[Any, Any, None]], root: Path, *args: object
) -> None:
    await test(root, *args)


def resurrects() -> bool:
    """A deleted ledger whose index is built anew."""
    return by_scenario(
        test_collect.test_a_deleted_ledger_stays_deleted_though_the_index_is_built_anew
    )


def forgets_a_fence() -> bool:
    """A ledger is forgotten in memory while a checkpoint writes its fence."""
    with pytest.MonkeyPatch.context() as patch:
        return by_scenario(
            test_at_once.test_a_fence_is_not_forgotten_while_a_checkpoint_writes_it, patch
        )


def gives_up_too_soon() -> bool:
    """A power cut between a checkpoint and the sync of what was moved."""
    with pytest.MonkeyPatch.context() as patch:
        return by_scenario(
            partial(
                test_at_once.test_a_checkpoint_gives_no_copy_up_before_the_one_in_its_place_is_on_disk,
                is_indexed=True,
            ),
            Gate(patch),
        )


def drops_without_proof() -> bool:
    """Rows that can't be read."""
    seen = (CasStatus.UNKNOWN, None)
    return by_scenario(test_collect.test_nothing_is_dropped_without_proof, seen)


def starts_with_lost_data() -> bool:
    """Directories that are not what the bookie's name stands for."""
    for found in test_cookie.LOSSES.values():
        try:
            cookie.decide(found)
        except cookie.CookieRefused:
            continue
        return True
    return False


# --- what is taken out ---------------------------------------------------------------------------


def nothing(_original: Any) -> Any:
    """Do nothing."""
    return lambda *_args: None


def nothing_later(_original: Any) -> Any:
    """Do nothing, as a coroutine."""

    async def done(*_args: object) -> None:
        await asyncio.sleep(0)

    return done


def idle_in_checkpoints(_original: Any) -> Any:
    """What a checkpoint is writing counts as known to the index."""

    def is_idle(self: Ledger) -> bool:
        return not (self.recent or self.is_dirty or self._waiting)

    return property(is_idle)


def taken_at_once(_original: Any) -> Any:
    """What took the place of a copy counts as on disk."""

    def prune(self: Ledger) -> None:
        self._replaced = []

    return prune


def forgetful(_original: Any) -> Any:
    """Remove the file, and leave no word of it."""
    return lambda self, segment: self.path(segment).unlink()


def denying(original: Any) -> Any:
    """What can't be read is not there."""

    def read(
        self: Store,
        ledger_id: int,
        asked: ReadAsked,
        bytes_max: int,
        done: Callable[[ReadAnswer], None],
    ) -> None:
        def answered(given: ReadAnswer) -> None:
            found = set(Run(given.run).ids) if given.run is not None else set()
            lacking = [e for e in range(asked.first, asked.last + 1) if e not in found]
            done(replace(given, absent=ranges_of(lacking)))

        original(self, ledger_id, asked, bytes_max, answered)

    return read


def trusting_absence(original: Any) -> Any:
    """No row is as good as a tombstone."""

    async def verdict(self: Collector, ledger_id: int) -> bool | None:
        seen: bool | None = await original(self, ledger_id)
        row = (await self._rows.read(ledger_id))[1]
        return False if row is None else seen

    return verdict


def no_reason(_original: Any) -> Any:
    """A directory is always right."""
    return lambda _found: ""


CRASH_MUTANTS: Final = (
    StorageMutant(
        "rule 3, I13",
        "acknowledged before it is synced",
        LogWriter,
        "_sync",
        nothing,
        by_crashes,
    ),
    StorageMutant(
        "reliability 3.3",
        "a new segment's name is not synced",
        Segments,
        "sync_names",
        nothing,
        by_crashes,
    ),
    StorageMutant(
        "rule 16",
        "a compacted segment's fences are not written again",
        Space,
        "_repeat",
        nothing_later,
        by_crashes,
    ),
    StorageMutant(
        "rules 16, 17",
        "that a ledger is gone is not written again",
        Moves,
        "repeat_gone",
        nothing_later,
        resurrects,
    ),
    StorageMutant(
        "rule 19",
        "a segment goes without a word",
        Segments,
        "remove",
        forgetful,
        by_crashes,
    ),
    StorageMutant(
        "I13",
        "what a checkpoint is writing is forgotten in memory",
        Ledger,
        "is_idle",
        idle_in_checkpoints,
        forgets_a_fence,
    ),
    StorageMutant(
        "rule 3",
        "the index gives a copy up before the one in its place is on disk",
        Ledger,
        "_prune",
        taken_at_once,
        gives_up_too_soon,
    ),
)
OTHER_MUTANTS: Final = (
    StorageMutant(
        "X15, rule 1",
        "what can't be read is denied",
        Store,
        "read",
        denying,
        by_flips,
    ),
    StorageMutant(
        "rule 19",
        "the log is cut on doubt",
        replay,
        "_judge",
        nothing,
        by_flips,
    ),
    StorageMutant(
        "X17, rule 18",
        "a row that is missing is a tombstone",
        Collector,
        "_verdict",
        trusting_absence,
        drops_without_proof,
    ),
    StorageMutant(
        "X18, rule 15",
        "an emptied directory is taken for the old one",
        cookie,
        "_reason",
        no_reason,
        starts_with_lost_data,
    ),
)
STORAGE_MUTANTS: Final = CRASH_MUTANTS + OTHER_MUTANTS
