"""Each named check reports a violation where there is one, and otherwise nothing."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, Repair, State
from quorumlog.protocol.quorum import Quorum
from tests.model.logs.judge import Judge
from tests.support import history, invariants, log_history
from tests.support.invariants import CHECKS, Wrong

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "protocol.md"
QUORUM: Final = Quorum(3, 3, 2)
BOOKIES: Final = ("b1@1", "b2@1", "b3@1")
OPEN: Final = LedgerMetadata(1, QUORUM, DigestKind.CRC32C, (Fragment(0, BOOKIES),))
MARKED: Final = OPEN.in_recovery()
CLOSED: Final = OPEN.closed(last_entry=4, length=5)
OTHERS: Final = ("b1@1", "b2@1", "b4@1")
CHANGED: Final = OPEN.with_ensemble(2, OTHERS)
MENDED: Final = replace(CLOSED, fragments=(Fragment(0, OTHERS),))
KEEPING: Final = replace(MENDED, repairs=(Repair(0, "b3@1", "b4@1"),))


def on(*members: str) -> invariants.Held:
    """Every entry was durable at these members."""
    return lambda member, _: member in members


def never(_member: str) -> bool:
    """No bookie is down."""
    return False


CASES: Final[dict[Callable[..., Wrong], tuple[Wrong, Wrong]]] = {
    invariants.closed_covers_acked: (
        invariants.closed_covers_acked(4, 4),
        invariants.closed_covers_acked(5, 4),
    ),
    invariants.deleted_takes_nothing: (
        invariants.deleted_takes_nothing(7, 4, was_deleted=False),
        invariants.deleted_takes_nothing(7, 4, was_deleted=True),
    ),
    invariants.acked_reaches_quorum: (
        invariants.acked_reaches_quorum(OPEN, range(2), on("b1@1", "b3@1")),
        invariants.acked_reaches_quorum(OPEN, range(2), on("b1@1", "b4@1")),
    ),
    invariants.acked_keeps_its_row: (
        invariants.acked_keeps_its_row(OPEN, range(2), on(*BOOKIES), on("b1@1", "b3@1")),
        invariants.acked_keeps_its_row(OPEN, range(2), on("b1@1", "b2@1"), on("b1@1", "b3@1")),
    ),
    invariants.end_is_kept: (
        invariants.end_is_kept(CLOSED, "b1@1 b3@1".__contains__, never),
        invariants.end_is_kept(CLOSED, "b1@1".__contains__, "b3@1".__contains__),
    ),
    invariants.one_payload: (
        invariants.one_payload(0, {b"a"}),
        invariants.one_payload(0, {b"a", b"b"}),
    ),
    invariants.end_never_moves: (
        invariants.end_never_moves(CLOSED, MENDED),
        invariants.end_never_moves(CLOSED, replace(CLOSED, last_entry=3)),
    ),
    invariants.same_bytes: (
        invariants.same_bytes("b1@1", 0, b"a", b"a"),
        invariants.same_bytes("b1@1", 0, b"a", b"b"),
    ),
    invariants.in_order: (invariants.in_order(3, 5, 2), invariants.in_order(4, 5, 2)),
    invariants.was_appended: (invariants.was_appended(4, 5), invariants.was_appended(5, 5)),
    invariants.lac_is_bounded: (
        invariants.lac_is_bounded(4, 4, "b1"),
        invariants.lac_is_bounded(5, 4, "b1"),
    ),
    invariants.fenced_rejects: (
        invariants.fenced_rejects("b1@1", was_fenced=False),
        invariants.fenced_rejects("b1@1", was_fenced=True),
    ),
    invariants.fence_is_kept: (
        invariants.fence_is_kept("b1@1", reported=False, is_kept=False),
        invariants.fence_is_kept("b1@1", reported=True, is_kept=False),
    ),
    invariants.deleted_is_for_ever: (
        invariants.deleted_is_for_ever("b1@1", reported=True, is_kept=True, says=False),
        invariants.deleted_is_for_ever("b1@1", reported=True, is_kept=False, says=False),
    ),
    invariants.covers_before_reading: (
        invariants.covers_before_reading(QUORUM, {0, 2}),
        invariants.covers_before_reading(QUORUM, {2}),
    ),
    invariants.reads_fence: (
        invariants.reads_fence("b1@1", is_fenced=True),
        invariants.reads_fence("b1@1", is_fenced=False),
    ),
    invariants.absence_is_proven: (
        invariants.absence_is_proven(QUORUM, 4, {0, 1}),
        invariants.absence_is_proven(QUORUM, 4, {0}),
    ),
    invariants.negative_sticks: (
        invariants.negative_sticks("b1@1", (4,), {(5, 9)}),
        invariants.negative_sticks("b1@1", (5,), {(5, 9)}),
    ),
    invariants.version_grows_by_one: (
        invariants.version_grows_by_one(OPEN, replace(OPEN, version=2)),
        invariants.version_grows_by_one(OPEN, OPEN),
    ),
    invariants.state_goes_on: (
        invariants.state_goes_on(MARKED, CLOSED),
        invariants.state_goes_on(MARKED, OPEN),
    ),
    invariants.row_is_legal: (
        invariants.row_is_legal(CHANGED),
        invariants.row_is_legal(
            replace(OPEN, fragments=(Fragment(0, ("b1@1", "b1@2", "b3@1")),)),
        ),
    ),
    invariants.borders_stay: (
        invariants.borders_stay(OPEN, CHANGED),
        invariants.borders_stay(CHANGED, OPEN),
    ),
    invariants.begins_after_acked: (
        invariants.begins_after_acked(2, 1),
        invariants.begins_after_acked(2, 2),
    ),
    invariants.recovery_changes_at_the_close: (
        invariants.recovery_changes_at_the_close(MARKED, replace(MARKED, declared_lost=("b1@1",))),
        invariants.recovery_changes_at_the_close(MARKED, replace(CHANGED, state=MARKED.state)),
    ),
    invariants.writer_changes_the_last: (
        invariants.writer_changes_the_last(CHANGED, CHANGED.with_ensemble(5, BOOKIES)),
        invariants.writer_changes_the_last(
            CHANGED, replace(CHANGED, fragments=(Fragment(0, OTHERS), Fragment(2, OTHERS)))
        ),
    ),
    invariants.repair_copies_first: (
        invariants.repair_copies_first(CLOSED, MENDED, on("b4@1")),
        invariants.repair_copies_first(CLOSED, MENDED, on("b3@1")),
    ),
    invariants.repair_reads_back: (
        invariants.repair_reads_back(CLOSED, MENDED, on("b3@1")),
        invariants.repair_reads_back(CLOSED, MENDED, on("b4@1")),
    ),
    invariants.repair_looks_again: (
        invariants.repair_looks_again(CLOSED, MENDED, [("b4@1", 0, 4)]),
        invariants.repair_looks_again(CLOSED, MENDED, [("b4@1", 0, 3), ("b3@1", 0, 4)]),
    ),
    invariants.repair_keeps_who_leaves: (
        invariants.repair_keeps_who_leaves(KEEPING, MENDED, on("b4@1")),
        invariants.repair_keeps_who_leaves(KEEPING, MENDED, on("b3@1")),
    ),
    invariants.garbage_is_proven: (
        invariants.garbage_is_proven("b4@1", CLOSED, keep_stub=True),
        invariants.garbage_is_proven("b3@2", CLOSED, keep_stub=True),
    ),
    invariants.limbo_denies_nothing: (
        invariants.limbo_denies_nothing("b1@2", "b1@2", is_limbo=False),
        invariants.limbo_denies_nothing("b1@2", "b1@1", is_limbo=False),
    ),
    invariants.limbo_takes_no_adds: (
        invariants.limbo_takes_no_adds("b1@2", "b1@2"),
        invariants.limbo_takes_no_adds("b1@2", "b1@1"),
    ),
    invariants.limbo_is_marked: (
        invariants.limbo_is_marked("b1@2", may_have_lost=True, is_marked=True),
        invariants.limbo_is_marked("b1@2", may_have_lost=True, is_marked=False),
    ),
    invariants.limbo_ends_whole: (
        invariants.limbo_ends_whole("b1@2", (), is_older_named=False),
        invariants.limbo_ends_whole("b1@2", (3,), is_older_named=False),
    ),
    invariants.ledger_ends: (
        invariants.ledger_ends(1, State.CLOSED),
        invariants.ledger_ends(1, State.IN_RECOVERY),
    ),
    invariants.appends_are_acked: (
        invariants.appends_are_acked(5, 5),
        invariants.appends_are_acked(5, 4),
    ),
    invariants.one_hung_blocks_nothing: (
        invariants.one_hung_blocks_nothing("b1", State.CLOSED),
        invariants.one_hung_blocks_nothing("b1", State.IN_RECOVERY),
    ),
    invariants.copies_come_back: (
        invariants.copies_come_back([]),
        invariants.copies_come_back(["b1@1"]),
    ),
    invariants.limbo_empties: (invariants.limbo_empties(()), invariants.limbo_empties(("b1@2",))),
    invariants.comes_to_rest: (invariants.comes_to_rest(8, 8), invariants.comes_to_rest(9, 8)),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_check_tells_right_from_wrong(check: Callable[..., Wrong]) -> None:
    right, wrong = CASES[check]

    assert right is None
    assert wrong is not None
    assert check.__doc__ is not None
    assert wrong.partition(":")[0] in check.__doc__, "a violation is named after its invariant"
    assert "Source:" in check.__doc__


def test_a_deleted_ledger_is_not_answered_for() -> None:
    assert invariants.deleted_is_for_ever("b1@1", reported=True, is_kept=True, says=True)
    assert not invariants.deleted_is_for_ever("b1@1", reported=False, is_kept=False, says=True)


def test_a_closed_ledger_that_names_a_bookie_is_not_dropped_by_it() -> None:
    open_one = invariants.garbage_is_proven("b4@1", OPEN, keep_stub=True)
    forgotten = invariants.garbage_is_proven("b4@1", CLOSED, keep_stub=False)
    deleted = invariants.garbage_is_proven("b1@1", None, keep_stub=False)

    assert open_one is not None
    assert forgotten is not None
    assert deleted is None


def test_the_page_names_a_check_for_each_invariant() -> None:
    headings = re.findall(r"^### (I\d+)$", PAGE.read_text(), re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", PAGE.read_text()))

    assert headings == [f"I{number}" for number in range(1, 35)]
    assert {check.__name__ for check in CHECKS} <= named


def test_checks_of_histories_and_logs_cite_their_source() -> None:
    for owner in (history.Checker, log_history.Checker, Judge):
        for name, check in vars(owner).items():
            text = getattr(check, "__doc__", None) or ""
            if re.match(r"(I\d+|Rule \d+)", text):
                assert "Source:" in text, f"{owner.__name__}.{name}"
