"""The storage's mutants: one shipped method taken out or turned around, and who misses it.

The rules that the simulator judges have theirs in tests/mutation/mutants; these are about files, and about
what a bookie may give up.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from functools import wraps
from inspect import signature
from typing import Any, Final

import pytest

from loadtest.stores import scratch, store_servers
from quorumlog.protocol.messages import CasStatus
from quorumlog.protocol.replica import Replica
from services.bookie import cookie, registration, replay
from services.bookie.collect import Collector
from services.bookie.ledger import StoredLedger
from services.bookie.registration import Presence, Registration
from services.bookie.segments import Segments
from services.bookie.space import Space
from services.bookie.store import Store
from services.bookie.writer import LogWriter
from services.metadata.liveness import Liveness
from tests.mutation.mutants.guards import always, answers
from tests.mutation.mutants.hunt import Guard, Patch, applied
from tests.unit.bookie import (
    crash,
    flips,
    patches,
    test_at_once,
    test_collect,
    test_cookie,
    test_deleted,
    test_row_copies,
    test_space,
    test_twins,
)
from tests.unit.bookie.support import Gate, started, stop_started

ROUNDS: Final = 8
"""Of 50 crashes, or 100 changes, within which a mutant must be found."""


def is_found(mutant: Guard) -> bool:
    """Whether the search that is a mutant's claim finds something wrong while the guard is gone."""
    with applied(mutant):
        return bool(mutant.claim())


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
            root = stack.enter_context(scratch("ql-mutant-"))
            fixtures: dict[str, Callable[[], object]] = {
                "root": lambda: root,
                "stores": lambda: stack.enter_context(store_servers()).fresh(),
                "monkeypatch": lambda: patch,
                "gate": lambda: Gate(patch),
            }
            wanted = signature(test).parameters.keys() - given.keys()
            found = {name: fixtures[name]() for name in wanted & fixtures.keys()}

            async def played() -> None:
                if "store" in wanted:
                    found["store"] = started(root / "d")
                await test(**given, **found)
                await stop_started()

            try:
                asyncio.run(played())
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
    Patch(LogWriter, "_sync", always(None)).guard(
        "a bookie acknowledges entries before it syncs them", "rule 3, I13", by_crashes
    ),
    Patch(Segments, "sync_entries", always(None)).guard(
        "a new segment's name is not synced", "rule 19", by_crashes
    ),
    Patch(Space, "_rewrite_state", answers(None)).guard(
        "compaction does not rewrite the fences of a removed segment", "rule 16", by_crashes
    ),
    Patch(Store, "rewrite_deleted", answers(None)).guard(
        "a bookie does not rewrite the deletion of a ledger",
        "rules 16a, 17",
        scenario(test_space.test_a_deleted_ledger_stays_deleted_after_the_index_is_rebuilt),
    ),
    Patch(Space, "_rewrite_deleted", answers(None)).guard(
        "compaction removes a deleted ledger's id with its segment",
        "rule 16a",
        scenario(test_deleted.test_a_deleted_ledgers_id_survives_every_compaction),
    ),
    Patch(Space, "_rewrite_deleted", answers(None)).guard(
        "compaction removes the ids of deleted ledgers before a crash", "rule 16a", by_crashes
    ),
    Patch(StoredLedger, "is_deletion_synced", patches.gone_at_once).guard(
        "a checkpoint writes a deletion before it is in the log",
        "rule 16a",
        scenario(test_deleted.test_no_checkpoint_precedes_a_deletion),
    ),
    Patch(Segments, "remove", patches.forgetful).guard(
        "a bookie removes a segment without recording the removal", "rule 19", by_crashes
    ),
    Patch(StoredLedger, "is_idle", patches.idle_in_checkpoints).guard(
        "a ledger is evicted from memory while a checkpoint writes it",
        "I13",
        scenario(test_at_once.test_no_fence_leaves_a_checkpoint),
    ),
    Patch(StoredLedger, "_prune", patches.taken_at_once).guard(
        "the index drops a copy before its replacement is on disk",
        "rule 3",
        scenario(
            test_at_once.test_a_checkpoint_drops_no_copy_before_its_replacement_is_on_disk,
            is_indexed=True,
        ),
    ),
)
OTHER_MUTANTS: Final = (
    Patch(Store, "read", patches.denying).guard(
        "a bookie denies entries that it cannot read", "X15, rule 1", by_flips
    ),
    Patch(replay, "_judge", always(None)).guard(
        "a bookie cuts its log although the tail may be damaged", "rule 19", by_flips
    ),
    Patch(Collector, "_disposal", patches.trusting_absence).guard(
        "a bookie takes missing metadata for a tombstone",
        "X17, rule 18",
        scenario(
            test_collect.test_nothing_is_dropped_without_proof, seen=(CasStatus.UNKNOWN, None)
        ),
    ),
    Patch(Collector, "_disposals", patches.naming_no_copies).guard(
        "a bookie drops entries without presenting its copies of metadata",
        "rule 18c",
        scenario(test_collect.test_a_database_that_lacks_a_held_copys_change_drops_nothing),
    ),
    Patch(Collector, "_disposal", patches.forgetting_first).guard(
        "a bookie forgets copies of metadata that the database may lack",
        "rule 18c",
        scenario(test_collect.test_copies_are_forgotten_once_the_database_contains_them),
    ),
    Patch(cookie, "_suspected_loss", always("")).guard(
        "a bookie takes an emptied directory for the old one", "X18, rule 15", starts_with_lost_data
    ),
)
TWIN_MUTANTS: Final = (
    Patch(cookie, "is_copy", always(False)).guard(
        "a bookie takes a copied directory for the original", "rule 15a", starts_with_lost_data
    ),
    Patch(cookie, "_suspected_loss", patches.forgiving).guard(
        "a bookie accepts a directory that went back to a snapshot",
        "rules 15, 15a",
        starts_with_lost_data,
    ),
    Patch(cookie, "_suspected_loss", patches.counting_only).guard(
        "a bookie takes equal numbers of starts for the same process",
        "rule 15a",
        starts_with_lost_data,
    ),
    Patch(registration, "probe", answers(Presence.GONE)).guard(
        "a bookie does not ask whether the registered process is alive",
        "rule 15a",
        scenario(test_twins.test_the_registered_process_is_asked_before_its_name_is_taken),
    ),
    Patch(Registration, "_has_live_heartbeat", answers(False)).guard(
        "a process that sends heartbeats counts as gone without an answer",
        "rules 15a, 21a",
        scenario(test_twins.test_the_registered_process_is_asked_before_its_name_is_taken),
    ),
    Patch(registration, "is_displaced", always(False)).guard(
        "a bookie process continues after another one has replaced it",
        "rule 15a",
        scenario(test_twins.test_a_displaced_process_learns_of_it_and_counts_no_more),
    ),
    Patch(Liveness, "_bookie_key", patches.one_for_all).guard(
        "two processes of one bookie write the same heartbeat",
        "rule 15a",
        scenario(test_twins.test_a_displaced_process_learns_of_it_and_counts_no_more),
    ),
)
GUARD_MUTANTS: Final = (
    Patch(Replica, "_row_reported", patches.for_any_incarnation).guard(
        "a bookie stores metadata sent to its older incarnation",
        "rule 18b",
        keeps_a_copy_of_an_older_incarnation,
    ),
    Patch(Store, "add", patches.unseen_while_added).guard(
        "a bookie accepts adds to a ledger that it drops",
        "rules 18, 20",
        scenario(test_at_once.test_no_add_is_taken_while_the_drop_of_its_ledger_is_decided),
    ),
    Patch(Store, "_add_compared", patches.unseen_while_compared).guard(
        "a bookie accepts a compared add to a ledger that it drops",
        "rules 18, 20",
        scenario(
            test_at_once.test_no_compared_add_is_taken_while_the_drop_of_its_ledger_is_decided
        ),
    ),
    Patch(Collector, "__init__", patches.graceless).guard(
        "a bookie collects without a grace period between its two checks",
        "rule 18",
        scenario(test_at_once.test_a_grace_period_passes_between_the_two_looks),
    ),
    Patch(Space, "_referenced", answers(set())).guard(
        "a bookie removes a segment that still contains entries in use",
        "I1",
        scenario(test_at_once.test_a_segment_in_use_is_kept),
    ),
    Patch(StoredLedger, "holds", lambda _original: lambda _self, _part: True).guard(
        "compaction moves entries that were dropped meanwhile",
        "rules 16, 17",
        scenario(test_at_once.test_a_drop_during_a_move_is_final),
    ),
    Patch(StoredLedger, "is_idle", patches.idle_in_queues).guard(
        "a bookie forgets a log record before it is on disk",
        "I13",
        scenario(test_at_once.test_a_ledger_whose_stub_is_not_on_disk_is_not_evicted),
    ),
)
STORAGE_MUTANTS: Final = CRASH_MUTANTS + OTHER_MUTANTS + TWIN_MUTANTS + GUARD_MUTANTS
