"""Each guard of autorecovery is taken out once; a test of this folder must notice."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, Final

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
from tests.mutation.mutants.guards import always, answers, kept_verdict, let_go_at_once
from tests.mutation.mutants.guards import believed as believed_target
from tests.mutation.mutants.hunt import Guard, Patch, applied, stand_in
from tests.unit.autorecovery import (
    test_at_once,
    test_audits,
    test_findings,
    test_replica_check,
    test_writers,
)

NOTICED = (AssertionError, pytest.fail.Exception, NotEnoughBookies)


@stand_in
async def believed(_original: Any, _self: ReplicaCheck, _row: Any, lacks: Any) -> list[Any]:
    """Findings are not checked again."""
    return list(lacks)


@stand_in
def at_once(original: Any, self: LostMembers, bookies: Any, now: float) -> Any:
    """Who is away is lost."""
    self.grace_s = 0.0
    return original(self, bookies, now)


@stand_in
async def silence_is_enough(original: Any, self: ReplicaCheck, *where: Any) -> Any:
    """A member that says nothing lacks nothing."""
    return await original(self, *where) or ()


@stand_in
async def left(_original: Any, _self: Worker, row: LedgerMetadata, _member: str) -> LedgerMetadata:
    """What an earlier worker began stays as it is."""
    return row


GUARDS: Final = (
    Patch(Worker, "_may_move", always(True)).guard(
        "a place moves while its bookie restarts",
        "rule 8, ADR 6",
        test_replica_check.test_repair_waits_for_a_bookie_that_is_only_away,
    ),
    Patch(check, "_is_reply_about", always(True)).guard(
        "whoever answers is believed to be the member",
        "rules 4 and 15",
        test_replica_check.test_a_reply_about_another_member_or_ledger_is_ignored,
    ),
    Patch(ReplicaCheck, "recheck", believed).guard(
        "a finding is not checked again",
        "findings are judged twice",
        test_replica_check.test_entries_repaired_or_moved_meanwhile_are_no_findings,
    ),
    Patch(LostMembers, "update", at_once).guard(
        "the delay of a lost bookie is nothing",
        "BookKeeper: lostBookieRecoveryDelay",
        test_findings.test_a_bookie_is_lost_only_after_the_delay,
    ),
    Patch(PacedBookies, "_wait_for_turn", answers(None)).guard(
        "the copy rate has no limit",
        "copying has a limit",
        test_audits.test_in_any_interval_at_most_the_limit_and_one_run_are_sent,
    ),
    Patch(PacedBookies, "_wait_for_turn", answers(None)).guard(
        "a pause stops nothing",
        "operators can pause",
        test_audits.test_a_pause_holds_back_all_adds_until_it_ends,
    ),
    Patch(Auditor, "_is_abandoned", answers(True)).guard(
        "a recovery that waited does not ask the writer again",
        "rule 21",
        test_writers.test_a_writer_that_answers_again_is_not_fenced_by_a_recovery_that_waited,
    ),
    Patch(FragmentRepair, "_verify", believed_target).guard(
        "a repair replaces a bookie without reading back the copies",
        "rule 20a",
        test_at_once.test_the_only_healthy_copy_survives_a_move_to_a_damaged_one,
    ),
    Patch(FragmentRepair, "_go_on", kept_verdict).guard(
        "what was read back once counts whatever became of the row",
        "rules 18 and 20a",
        test_at_once.test_a_target_that_was_dropped_meanwhile_is_filled_again,
    ),
    Patch(FragmentRepair, "_second_look", always(())).guard(
        "a repair queues no second verification of the copies",
        "rule 20a",
        test_at_once.test_a_place_that_went_bad_is_repaired_by_the_second_look,
    ),
    Patch(FragmentRepair, "_give_row", let_go_at_once).guard(
        "a repair releases the replaced bookie before the target has the metadata",
        "rule 20b",
        test_at_once.test_nobody_is_let_go_before_the_target_keeps_the_row,
    ),
    Patch(Worker, "_finish_placed", left).guard(
        "nobody takes the last step of a repair whose worker died",
        "rule 20b",
        test_at_once.test_what_a_dead_worker_left_is_finished_by_the_next_one,
    ),
    Patch(ReplicaCheck, "missing_on_disk", silence_is_enough).guard(
        "silence is a second look", "rule 20a", test_at_once.test_silence_is_no_second_look
    ),
    Patch(writers, "is_refusal", always(True)).guard(
        "whatever keeps from connecting is a refusal",
        "rule 21a",
        test_writers.test_an_unreachable_host_is_silence,
    ),
    Patch(writers, "refuses_everywhere", answers(True)).guard(
        "one address refuses for all",
        "rule 21a",
        test_writers.test_a_name_with_several_addresses_refuses_only_if_all_of_them_do,
    ),
    Patch(writers, "instance_in", always("")).guard(
        "an answer without an id is another process",
        "rule 21a",
        test_writers.test_an_answer_without_an_id_is_silence,
    ),
    Patch(test_findings, "missing_zones", always(0)).guard(
        "zones do not count",
        "placement spreads over zones",
        test_findings.test_a_ledger_in_fewer_zones_than_possible_is_reported,
    ),
)


def played(test: Callable[[], Any]) -> None:
    result = test()
    if inspect.isawaitable(result):

        async def awaited() -> None:
            await result

        asyncio.run(awaited())


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_every_guard_that_is_taken_out_is_noticed(guard: Guard) -> None:
    played(guard.claim)
    with applied(guard), pytest.raises(NOTICED):
        played(guard.claim)
