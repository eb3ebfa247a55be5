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

from loadtest.stores import Stores, scratch, store_servers
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.ranges import ranges_of
from quorumlog.protocol.record import Run
from quorumlog.protocol.replica import ReadAsked
from services.bookie import cookie, registration, replay
from services.bookie.collect import Collector, Disposal
from services.bookie.holder import Presence
from services.bookie.ledger import StoredLedger
from services.bookie.moves import Moves
from services.bookie.registration import Registration
from services.bookie.segments import Segments
from services.bookie.space import Space
from services.bookie.store import ReadAnswer, Store
from services.bookie.writer import LogWriter
from services.metadata.liveness import Liveness
from tests.bookie import (
    crash,
    flips,
    test_at_once,
    test_collect,
    test_cookie,
    test_deleted,
    test_guards,
    test_twins,
)
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
    return by_scenario(test_collect.test_a_deleted_ledger_stays_deleted_after_the_index_is_rebuilt)


def forgets_an_id() -> bool:
    """Deleted ledgers through three compactions."""
    return by_scenario(test_deleted.test_a_deleted_ledgers_id_survives_every_compaction)


def knows_too_soon() -> bool:
    """A checkpoint and a power cut while it is written that a ledger is deleted."""
    with pytest.MonkeyPatch.context() as patch:
        return by_scenario(
            test_deleted.test_no_checkpoint_contains_a_deletion_before_the_log_does, Gate(patch)
        )


def forgets_a_fence() -> bool:
    """A ledger is forgotten in memory while a checkpoint writes its fence."""
    with pytest.MonkeyPatch.context() as patch:
        return by_scenario(
            test_at_once.test_a_fence_is_not_evicted_while_a_checkpoint_writes_it, patch
        )


def gives_up_too_soon() -> bool:
    """A power cut between a checkpoint and the sync of what was moved."""
    with pytest.MonkeyPatch.context() as patch:
        return by_scenario(
            partial(
                test_at_once.test_a_checkpoint_drops_no_copy_before_its_replacement_is_on_disk,
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


def by_twins(
    test: Callable[[Stores], Coroutine[Any, Any, None]],
) -> bool:
    """Two processes under one name, and stores that know of them."""
    with store_servers() as servers:
        try:
            asyncio.run(_played_at(test, servers.fresh()))
        except AssertionError:
            return True
    return False


async def _played_at(test: Callable[[Stores], Coroutine[Any, Any, None]], stores: Stores) -> None:
    await test(stores)


def displaces() -> bool:
    """A newcomer, while the registered process answers at its URL, or is only heard."""
    return by_twins(test_twins.test_the_registered_process_is_asked_before_anybody_takes_its_name)


def stays_displaced() -> bool:
    """A process that comes back after another one took its name."""
    return by_twins(
        test_twins.test_a_displaced_process_learns_of_it_and_its_heartbeats_do_not_count
    )


def loses_while_leaving() -> bool:
    """Adds to a ledger of which it is decided whether it goes."""
    return by_scenario(test_guards.test_no_add_is_taken_while_the_drop_of_its_ledger_is_decided)


def drops_at_once() -> bool:
    """Two looks within a grace."""
    return by_scenario(test_guards.test_a_grace_period_passes_between_the_two_looks)


def removes_what_is_named() -> bool:
    """A run of which a part is replaced while its segment is given up."""
    with pytest.MonkeyPatch.context() as patch:
        return by_scenario(
            test_guards.test_a_segment_still_referenced_by_a_part_is_not_removed, patch
        )


def brings_back() -> bool:
    """A ledger that is dropped while its parts are moved."""
    with pytest.MonkeyPatch.context() as patch:
        return by_scenario(
            test_guards.test_a_ledger_dropped_during_a_move_does_not_come_back, patch
        )


def forgets_a_stub() -> bool:
    """A ledger that is forgotten in memory before its stub is on disk."""
    with pytest.MonkeyPatch.context() as patch:
        return by_scenario(
            test_guards.test_a_ledger_whose_stub_is_not_on_disk_is_not_evicted, Gate(patch), patch
        )


def compares_while_leaving() -> bool:
    """An add that is being compared when its ledger begins to leave."""
    with pytest.MonkeyPatch.context() as patch:
        return by_scenario(
            test_guards.test_no_compared_add_is_taken_while_the_drop_of_its_ledger_is_decided, patch
        )


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

    def is_idle(self: StoredLedger) -> bool:
        return not (self.recent or self.is_dirty or self._waiting)

    return property(is_idle)


def taken_at_once(_original: Any) -> Any:
    """What took the place of a copy counts as on disk."""

    def prune(self: StoredLedger) -> None:
        self._replaced = []

    return prune


def gone_at_once(_original: Any) -> Any:
    """What is deleted is so for the index, whatever the disk has."""
    return property(lambda self: self.replica.is_deleted)


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

    async def disposal(self: Collector, ledger_id: int) -> Disposal:
        decided: Disposal = await original(self, ledger_id)
        row = (await self._rows.read(ledger_id))[1]
        return Disposal.DROP if row is None else decided

    return disposal


def no_reason(_original: Any) -> Any:
    """A directory is always right."""
    return lambda _found: ""


def never(_original: Any) -> Any:
    """No."""
    return lambda *_args: False


def forgiving(original: Any) -> Any:
    """How far the log was counts for nothing."""
    return lambda found: original(replace(found, log_end_reported=0))


def counting_only(original: Any) -> Any:
    """Starts are counted, and not told apart."""

    def reason(found: cookie.Situation) -> Any:
        remote = found.remote
        nameless = None if remote is None else remote.model_copy(update={"process": ""})
        return original(replace(found, remote=nameless))

    return reason


def never_heard(_original: Any) -> Any:
    """Heartbeats count for nothing."""

    async def is_heard(_self: Registration, _name: str) -> bool:
        return False

    return is_heard


def nobody_there(_original: Any) -> Any:
    """Whoever is registered counts as gone, unasked."""

    async def probe(_url: str, _name: str, _process: str) -> Presence:
        return Presence.GONE

    return probe


def one_for_all(_original: Any) -> Any:
    """All processes of a name write one heartbeat."""
    return lambda self, name, _process: self._key("bookie", name)


class Blind(set[int]):
    """Ledgers that leave, and nobody sees it."""

    def __contains__(self, _item: object) -> bool:
        return False


def unseen_while_added(original: Any) -> Any:
    """An add does not look whether its ledger is leaving."""

    def taken(self: Store, *args: Any) -> None:
        leaving, self._withheld = self._withheld, Blind()
        try:
            original(self, *args)
        finally:
            self._withheld = leaving

    return taken


def unseen_while_compared(original: Any) -> Any:
    """Nor does one that was compared meanwhile."""

    async def taken(self: Store, *args: Any) -> None:
        self._withheld = Blind()
        await original(self, *args)

    return taken


def graceless(original: Any) -> Any:
    """The second look may follow the first at once."""

    def made(self: Collector, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs | {"grace_s": 0.0})

    return made


def unnamed(_original: Any) -> Any:
    """What was moved counts as all that there was."""

    async def named(_self: Space, _numbers: list[int]) -> set[int]:
        return set()

    return named


def idle_in_queues(_original: Any) -> Any:
    """Records that nobody waits for may be forgotten before they are on disk."""

    def is_idle(self: StoredLedger) -> bool:
        is_busy = self.recent or self.is_dirty or self._is_in_checkpoint or self._waiting
        return not is_busy

    return property(is_idle)


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
        "rule 19",
        "a new segment's name is not synced",
        Segments,
        "sync_entries",
        nothing,
        by_crashes,
    ),
    StorageMutant(
        "rule 16",
        "a compacted segment's fences are not written again",
        Space,
        "_rewrite_state",
        nothing_later,
        by_crashes,
    ),
    StorageMutant(
        "rules 16a, 17",
        "that a ledger is gone is not written again",
        Moves,
        "rewrite_deleted",
        nothing_later,
        resurrects,
    ),
    StorageMutant(
        "rule 16a",
        "a deleted ledger's id goes with the segment that names it",
        Space,
        "_rewrite_deleted",
        nothing_later,
        forgets_an_id,
    ),
    StorageMutant(
        "rule 16a",
        "crashes meet a compaction that drops the ids of deleted ledgers",
        Space,
        "_rewrite_deleted",
        nothing_later,
        by_crashes,
    ),
    StorageMutant(
        "rule 16a",
        "the index knows that a ledger is deleted before the log does",
        StoredLedger,
        "is_deletion_synced",
        gone_at_once,
        knows_too_soon,
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
        StoredLedger,
        "is_idle",
        idle_in_checkpoints,
        forgets_a_fence,
    ),
    StorageMutant(
        "rule 3",
        "the index gives a copy up before the one in its place is on disk",
        StoredLedger,
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
        "_disposal",
        trusting_absence,
        drops_without_proof,
    ),
    StorageMutant(
        "X18, rule 15",
        "an emptied directory is taken for the old one",
        cookie,
        "_suspected_loss",
        no_reason,
        starts_with_lost_data,
    ),
)
TWIN_MUTANTS: Final = (
    StorageMutant(
        "rule 15a",
        "a copy of a directory is taken for the directory",
        cookie,
        "_is_copy",
        never,
        starts_with_lost_data,
    ),
    StorageMutant(
        "rules 15, 15a",
        "a directory that went back to a snapshot is taken for what it was",
        cookie,
        "_suspected_loss",
        forgiving,
        starts_with_lost_data,
    ),
    StorageMutant(
        "rule 15a",
        "whoever counted to the same number of starts is the same",
        cookie,
        "_suspected_loss",
        counting_only,
        starts_with_lost_data,
    ),
    StorageMutant(
        "rule 15a",
        "nobody asks whether the registered process lives",
        registration,
        "probe",
        nobody_there,
        displaces,
    ),
    StorageMutant(
        "rules 15a, 21a",
        "a process that does not answer here counts as gone though it is heard",
        Registration,
        "_has_live_heartbeat",
        never_heard,
        displaces,
    ),
    StorageMutant(
        "rule 15a",
        "a process goes on though another one is registered in its place",
        registration,
        "is_displaced",
        never,
        stays_displaced,
    ),
    StorageMutant(
        "rule 15a",
        "two processes of one name write one heartbeat",
        Liveness,
        "_bookie_key",
        one_for_all,
        stays_displaced,
    ),
)
GUARD_MUTANTS: Final = (
    StorageMutant(
        "rules 18, 20",
        "a ledger that is leaving takes adds",
        Store,
        "add",
        unseen_while_added,
        loses_while_leaving,
    ),
    StorageMutant(
        "rules 18, 20",
        "an add that was compared does not look whether its ledger is leaving",
        Store,
        "_add_compared",
        unseen_while_compared,
        compares_while_leaving,
    ),
    StorageMutant(
        "rule 18",
        "no grace passes between the two looks",
        Collector,
        "__init__",
        graceless,
        drops_at_once,
    ),
    StorageMutant(
        "I1",
        "a segment goes though a part names it",
        Space,
        "_referenced",
        unnamed,
        removes_what_is_named,
    ),
    StorageMutant(
        "rules 16, 17",
        "what was dropped meanwhile is moved",
        StoredLedger,
        "holds",
        lambda _original: lambda _self, _part: True,
        brings_back,
    ),
    StorageMutant(
        "I13",
        "a record that nobody waits for is forgotten before it is on disk",
        StoredLedger,
        "is_idle",
        idle_in_queues,
        forgets_a_stub,
    ),
)
STORAGE_MUTANTS: Final = CRASH_MUTANTS + OTHER_MUTANTS + TWIN_MUTANTS + GUARD_MUTANTS
