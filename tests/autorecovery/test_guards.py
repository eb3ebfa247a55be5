"""Each guard of autorecovery is taken out once; a test of this folder must notice."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from quorumlog.errors import NotEnoughBookies
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.repair import FragmentRepair
from services.autorecovery import check, writers
from services.autorecovery.auditor import Auditor
from services.autorecovery.check import ReplicaCheck
from services.autorecovery.findings import LostMembers
from services.autorecovery.steering import PacedBookies
from services.autorecovery.worker import Worker
from tests.autorecovery import (
    test_at_once,
    test_findings,
    test_moves,
    test_open_ledgers,
    test_pace,
    test_replica_check,
    test_writers,
)
from tests.mutants.guards import always, kept_verdict, let_go_at_once
from tests.mutants.guards import believed as believed_target
from tests.mutants.hunt import Mutant, Patch, applied

NOTICED = (AssertionError, pytest.fail.Exception, NotEnoughBookies)


def believed(_original: Any) -> Any:
    """Findings are not checked again."""

    async def still(_self: ReplicaCheck, _row: Any, lacks: Any) -> list[Any]:
        return list(lacks)

    return still


def at_once(original: Any) -> Any:
    """Who is away is lost."""

    def update(self: LostMembers, bookies: Any, now: float) -> Any:
        self.grace_s = 0.0
        return original(self, bookies, now)

    return update


def unlimited(_original: Any) -> Any:
    """Copies go out as they come."""

    async def until_free(_self: PacedBookies) -> None:
        return

    return until_free


def unasked(_original: Any) -> Any:
    """What the audit has found of a writer is good enough, however long ago."""

    async def is_abandoned(_self: Auditor, _row: Any, *, is_silence_enough: bool) -> bool:
        del is_silence_enough
        return True

    return is_abandoned


def silence_is_enough(original: Any) -> Any:
    """A member that says nothing lacks nothing."""

    async def lacking(self: ReplicaCheck, *where: Any) -> Any:
        return await original(self, *where) or ()

    return lacking


def left(_original: Any) -> Any:
    """What an earlier worker began stays as it is."""

    async def finish(_self: Worker, row: LedgerMetadata, _member: str) -> LedgerMetadata:
        return row

    return finish


def everywhere(_original: Any) -> Any:
    """What the last address says stands for all of them."""

    async def refuses(_url: str) -> bool:
        return True

    return refuses


GUARDS: list[tuple[Mutant, Callable[[], Any]]] = [
    (
        Mutant("a place moves while its bookie restarts", "rule 8, ADR 6",
               (Patch(Worker, "_may_move", always(True)),)),
        test_moves.test_repair_waits_for_a_bookie_that_is_only_away,
    ),
    (
        Mutant("whoever answers is believed to be the member", "rules 4 and 15",
               (Patch(check, "_is_reply_about", always(True)),)),
        test_replica_check.test_a_reply_about_another_member_or_ledger_is_ignored,
    ),
    (
        Mutant("a finding is not checked again", "findings are judged twice", (Patch(ReplicaCheck, "recheck", believed),)),
        test_replica_check.test_entries_repaired_or_moved_meanwhile_are_no_findings,
    ),
    (
        Mutant("the delay of a lost bookie is nothing", "BookKeeper: lostBookieRecoveryDelay",
               (Patch(LostMembers, "update", at_once),)),
        test_findings.test_a_bookie_is_lost_only_after_the_delay,
    ),
    (
        Mutant("the copy rate has no limit", "copying has a limit",
               (Patch(PacedBookies, "_wait_for_turn", unlimited),)),
        test_pace.test_in_any_interval_at_most_the_limit_and_one_run_are_sent,
    ),
    (
        Mutant("a pause stops nothing", "operators can pause",
               (Patch(PacedBookies, "_wait_for_turn", unlimited),)),
        test_pace.test_a_pause_holds_back_all_adds_until_it_ends,
    ),
    (
        Mutant("a recovery that waited does not ask the writer again", "rule 21",
               (Patch(Auditor, "_is_abandoned", unasked),)),
        test_open_ledgers.test_a_writer_that_answers_again_is_not_fenced_by_a_recovery_that_waited,
    ),
    (
        Mutant("a repair does not read back what it gives a place for", "rule 20a",
               (Patch(FragmentRepair, "_verify", believed_target),)),
        test_at_once.the_only_healthy_copy_outlasts_the_move,
    ),
    (
        Mutant("what was read back once counts whatever became of the row", "rules 18 and 20a",
               (Patch(FragmentRepair, "_go_on", kept_verdict),)),
        test_at_once.a_target_that_was_dropped_meanwhile_is_filled_again,
    ),
    (
        Mutant("a change of place queues no second look", "rule 20a",
               (Patch(FragmentRepair, "_second_look", always(())),)),
        test_at_once.a_place_that_went_bad_is_repaired_by_the_second_look,
    ),
    (
        Mutant("a repair lets go of the member before the target has its row", "rule 20b",
               (Patch(FragmentRepair, "_give_row", let_go_at_once),)),
        test_at_once.nobody_is_let_go_before_the_target_keeps_the_row,
    ),
    (
        Mutant("nobody takes the last step of a repair whose worker died", "rule 20b",
               (Patch(Worker, "_finish_placed", left),)),
        test_at_once.what_a_dead_worker_left_is_finished_by_the_next_one,
    ),
    (
        Mutant("silence is a second look", "rule 20a", (Patch(ReplicaCheck, "missing_on_disk", silence_is_enough),)),
        test_at_once.silence_is_no_second_look,
    ),
    (
        Mutant("whatever keeps from connecting is a refusal", "rule 21a",
               (Patch(writers, "is_refusal", always(True)),)),
        test_writers.an_unreachable_host_is_silence,
    ),
    (
        Mutant("one address refuses for all", "rule 21a", (Patch(writers, "refuses_everywhere", everywhere),)),
        test_writers.a_name_with_several_addresses_refuses_only_if_all_of_them_do,
    ),
    (
        Mutant("an answer without an id is another process", "rule 21a",
               (Patch(writers, "instance_in", always("")),)),
        test_writers.an_answer_without_an_id_is_silence,
    ),
    (
        Mutant("zones do not count", "placement spreads over zones", (Patch(test_findings, "missing_zones", always(0)),)),
        test_findings.test_a_ledger_in_fewer_zones_than_possible_is_reported,
    ),
]  # fmt: skip


def played(test: Callable[[], Any]) -> None:
    result = test()
    if inspect.isawaitable(result):

        async def awaited() -> None:
            await result

        asyncio.run(awaited())


@pytest.mark.parametrize("guard", GUARDS, ids=[mutant.name for mutant, _ in GUARDS])
def test_every_guard_that_is_taken_out_is_noticed(guard: tuple[Mutant, Callable[[], Any]]) -> None:
    mutant, test = guard
    played(test)
    with applied(mutant), pytest.raises(NOTICED):
        played(test)
