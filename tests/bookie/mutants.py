"""The storage's mutants: one shipped method taken out or turned around, and who misses it.

The rules that the simulator judges have theirs in tests/mutants; these are about files, and about
what a bookie may give up.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any, Final

import pytest

from loadtest.stores import scratch, store_servers
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.replica import Replica
from services.bookie import cookie, registration, replay
from services.bookie.checkpoints import Moves
from services.bookie.collect import Collector
from services.bookie.ledger import StoredLedger
from services.bookie.registration import Registration
from services.bookie.segments import Segments
from services.bookie.space import Space
from services.bookie.store import Store
from services.bookie.writer import LogWriter
from services.metadata.liveness import Liveness
from tests.bookie import (
    crash,
    flips,
    patches,
    test_at_once,
    test_collect,
    test_cookie,
    test_deleted,
    test_guards,
    test_row_copies,
    test_space,
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


def by_crashes() -> bool:
    """Power cuts and kills."""
    return any(not crash.run(50, 1000 + n, quiet=True).is_good for n in range(ROUNDS))


def by_flips() -> bool:
    """Bits and sizes of files."""
    return any(flips.run(100, 1000 + n, quiet=True).wrong for n in range(ROUNDS))


def scenario(test: Callable[..., Coroutine[Any, Any, None]], **given: Any) -> Callable[[], bool]:
    """A scenario of the tests as a search. `given`: arguments beside its fixtures."""

    @wraps(test)
    def search() -> bool:
        with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
            fixtures: dict[str, Callable[[], object]] = {
                "root": lambda: stack.enter_context(scratch("ql-mutant-")),
                "stores": lambda: stack.enter_context(store_servers()).fresh(),
                "monkeypatch": lambda: patch,
                "gate": lambda: Gate(patch),
            }
            wanted = signature(test).parameters.keys() - given.keys()
            try:
                asyncio.run(test(**given, **{name: fixtures[name]() for name in wanted}))
            except AssertionError:
                return True
        return False

    return search


def keeps_a_copy_of_an_older_incarnation() -> bool:
    """A copy that a row's former incarnation is sent."""
    try:
        test_row_copies.test_a_copy_for_an_older_incarnation_is_refused()
    except AssertionError:
        return True
    return False


def starts_with_lost_data() -> bool:
    """Directories that are not what the bookie's name stands for."""
    for found in test_cookie.LOSSES.values():
        try:
            cookie.decide(found)
        except cookie.CookieRefused:
            continue
        return True
    return False


CRASH_MUTANTS: Final = (
    StorageMutant(
        "rule 3, I13",
        "acknowledged before it is synced",
        LogWriter,
        "_sync",
        patches.nothing,
        by_crashes,
    ),
    StorageMutant(
        "rule 19",
        "a new segment's name is not synced",
        Segments,
        "sync_entries",
        patches.nothing,
        by_crashes,
    ),
    StorageMutant(
        "rule 16",
        "a compacted segment's fences are not written again",
        Space,
        "_rewrite_state",
        patches.nothing_later,
        by_crashes,
    ),
    StorageMutant(
        "rules 16a, 17",
        "that a ledger is gone is not written again",
        Moves,
        "rewrite_deleted",
        patches.nothing_later,
        scenario(test_space.test_a_deleted_ledger_stays_deleted_after_the_index_is_rebuilt),
    ),
    StorageMutant(
        "rule 16a",
        "a deleted ledger's id goes with the segment that names it",
        Space,
        "_rewrite_deleted",
        patches.nothing_later,
        scenario(test_deleted.test_a_deleted_ledgers_id_survives_every_compaction),
    ),
    StorageMutant(
        "rule 16a",
        "crashes meet a compaction that drops the ids of deleted ledgers",
        Space,
        "_rewrite_deleted",
        patches.nothing_later,
        by_crashes,
    ),
    StorageMutant(
        "rule 16a",
        "the index knows that a ledger is deleted before the log does",
        StoredLedger,
        "is_deletion_synced",
        patches.gone_at_once,
        scenario(test_deleted.test_no_checkpoint_contains_a_deletion_before_the_log_does),
    ),
    StorageMutant(
        "rule 19",
        "a segment goes without a word",
        Segments,
        "remove",
        patches.forgetful,
        by_crashes,
    ),
    StorageMutant(
        "I13",
        "what a checkpoint is writing is forgotten in memory",
        StoredLedger,
        "is_idle",
        patches.idle_in_checkpoints,
        scenario(test_at_once.test_a_fence_is_not_evicted_while_a_checkpoint_writes_it),
    ),
    StorageMutant(
        "rule 3",
        "the index gives a copy up before the one in its place is on disk",
        StoredLedger,
        "_prune",
        patches.taken_at_once,
        scenario(
            test_at_once.test_a_checkpoint_drops_no_copy_before_its_replacement_is_on_disk,
            is_indexed=True,
        ),
    ),
)
OTHER_MUTANTS: Final = (
    StorageMutant(
        "X15, rule 1",
        "what can't be read is denied",
        Store,
        "read",
        patches.denying,
        by_flips,
    ),
    StorageMutant(
        "rule 19",
        "the log is cut on doubt",
        replay,
        "_judge",
        patches.nothing,
        by_flips,
    ),
    StorageMutant(
        "X17, rule 18",
        "a row that is missing is a tombstone",
        Collector,
        "_disposal",
        patches.trusting_absence,
        scenario(
            test_collect.test_nothing_is_dropped_without_proof, seen=(CasStatus.UNKNOWN, None)
        ),
    ),
    StorageMutant(
        "rule 18c",
        "a drop asks about no copy that is held",
        Store,
        "row_names",
        patches.no_copies,
        scenario(
            test_collect.test_nothing_is_dropped_by_a_database_that_lacks_the_change_of_a_held_copy
        ),
    ),
    StorageMutant(
        "rule 18c",
        "copies are forgotten by their version alone",
        Collector,
        "_disposal",
        patches.forgetting_first,
        scenario(
            test_collect.test_copies_are_forgotten_when_the_database_contains_them_and_enough_later_ones
        ),
    ),
    StorageMutant(
        "X18, rule 15",
        "an emptied directory is taken for the old one",
        cookie,
        "_suspected_loss",
        patches.no_reason,
        starts_with_lost_data,
    ),
)
TWIN_MUTANTS: Final = (
    StorageMutant(
        "rule 15a",
        "a copy of a directory is taken for the directory",
        cookie,
        "is_copy",
        patches.never,
        starts_with_lost_data,
    ),
    StorageMutant(
        "rules 15, 15a",
        "a directory that went back to a snapshot is taken for what it was",
        cookie,
        "_suspected_loss",
        patches.forgiving,
        starts_with_lost_data,
    ),
    StorageMutant(
        "rule 15a",
        "whoever counted to the same number of starts is the same",
        cookie,
        "_suspected_loss",
        patches.counting_only,
        starts_with_lost_data,
    ),
    StorageMutant(
        "rule 15a",
        "nobody asks whether the registered process lives",
        registration,
        "probe",
        patches.nobody_there,
        scenario(test_twins.test_the_registered_process_is_asked_before_anybody_takes_its_name),
    ),
    StorageMutant(
        "rules 15a, 21a",
        "a process that does not answer here counts as gone though it is heard",
        Registration,
        "_has_live_heartbeat",
        patches.never_heard,
        scenario(test_twins.test_the_registered_process_is_asked_before_anybody_takes_its_name),
    ),
    StorageMutant(
        "rule 15a",
        "a process goes on though another one is registered in its place",
        registration,
        "is_displaced",
        patches.never,
        scenario(test_twins.test_a_displaced_process_learns_of_it_and_its_heartbeats_do_not_count),
    ),
    StorageMutant(
        "rule 15a",
        "two processes of one name write one heartbeat",
        Liveness,
        "_bookie_key",
        patches.one_for_all,
        scenario(test_twins.test_a_displaced_process_learns_of_it_and_its_heartbeats_do_not_count),
    ),
)
GUARD_MUTANTS: Final = (
    StorageMutant(
        "rule 18b",
        "a copy is kept for an incarnation that may have lost its entries",
        Replica,
        "_row_told",
        patches.for_any_incarnation,
        keeps_a_copy_of_an_older_incarnation,
    ),
    StorageMutant(
        "rules 18, 20",
        "a ledger that is leaving takes adds",
        Store,
        "add",
        patches.unseen_while_added,
        scenario(test_guards.test_no_add_is_taken_while_the_drop_of_its_ledger_is_decided),
    ),
    StorageMutant(
        "rules 18, 20",
        "an add that was compared does not look whether its ledger is leaving",
        Store,
        "_add_compared",
        patches.unseen_while_compared,
        scenario(test_guards.test_no_compared_add_is_taken_while_the_drop_of_its_ledger_is_decided),
    ),
    StorageMutant(
        "rule 18",
        "no grace passes between the two looks",
        Collector,
        "__init__",
        patches.graceless,
        scenario(test_guards.test_a_grace_period_passes_between_the_two_looks),
    ),
    StorageMutant(
        "I1",
        "a segment goes though a part names it",
        Space,
        "_referenced",
        patches.unnamed,
        scenario(test_guards.test_a_segment_still_referenced_by_a_part_is_not_removed),
    ),
    StorageMutant(
        "rules 16, 17",
        "what was dropped meanwhile is moved",
        StoredLedger,
        "holds",
        lambda _original: lambda _self, _part: True,
        scenario(test_guards.test_a_ledger_dropped_during_a_move_does_not_come_back),
    ),
    StorageMutant(
        "I13",
        "a record that nobody waits for is forgotten before it is on disk",
        StoredLedger,
        "is_idle",
        patches.idle_in_queues,
        scenario(test_guards.test_a_ledger_whose_stub_is_not_on_disk_is_not_evicted),
    ),
)
STORAGE_MUTANTS: Final = CRASH_MUTANTS + OTHER_MUTANTS + TWIN_MUTANTS + GUARD_MUTANTS
