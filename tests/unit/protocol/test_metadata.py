"""Metadata of a ledger, and machines that meet a row of another line of history."""

from dataclasses import replace
from typing import Final

import pytest

from quorumlog.protocol.log import LogItem
from quorumlog.protocol.log.messages import (
    NOT_OWNER,
    CountBookies,
    CreateLedger,
    DeleteLedger,
    LogRequest,
    RowChanged,
    SwapLog,
)
from quorumlog.protocol.messages import (
    CasStatus,
    Failed,
    RecoverRequested,
    SendFence,
    SendRead,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import Fragment, LedgerMetadata, Repair, State
from tests.unit.protocol import test_log_owner as owners
from tests.unit.protocol import test_recovery as recoveries
from tests.unit.protocol import test_repair as repairs
from tests.unit.protocol import test_writer as writers
from tests.unit.protocol.hands import B1, B2, B3, B4, B5, ledger

TWO = ledger(fragments=((0, (B1, B2, B3)), (12, (B4, B2, B3))))


def test_the_two_fragments_of_the_protocol_document_own_their_entries() -> None:
    """Entries 0 to 11 live on B1 B2 B3, 12 and later ones on B4 B2 B3."""
    assert [TWO.fragment_of(entry_id).bookies[0] for entry_id in (0, 11, 12, 99)] == [
        B1,
        B1,
        B4,
        B4,
    ]
    assert [TWO.fragment_last(index) for index in (0, 1)] == [11, None]
    assert TWO.members_of(13) == ((1, B2), (2, B3), (0, B4))


def test_a_change_after_the_last_fragment_appends_and_at_its_start_replaces() -> None:
    appended = TWO.with_ensemble(20, (B1, B2, B3))
    replaced = TWO.with_ensemble(12, (B5, B2, B3))

    assert [f.first_entry for f in appended.fragments] == [0, 12, 20]
    assert replaced.fragments == (Fragment(0, (B1, B2, B3)), Fragment(12, (B5, B2, B3)))
    assert (appended.version, replaced.version) == (TWO.version, TWO.version)


def test_a_fragment_below_the_last_one_is_impossible() -> None:
    """I22, X2."""
    with pytest.raises(ValueError, match="below"):
        TWO.with_ensemble(11, (B5, B2, B3))


def test_a_row_that_breaks_an_invariant_is_found_out() -> None:
    for broken in (
        replace(TWO, fragments=()),
        replace(TWO, fragments=(Fragment(1, (B1, B2, B3)),)),
        replace(TWO, fragments=(TWO.fragments[0], TWO.fragments[0])),
        replace(TWO, fragments=(Fragment(0, (B1, B2)),)),
        replace(TWO, fragments=(Fragment(0, (B1, B2, B2)),)),
        replace(TWO, last_entry=3),
        replace(TWO, length=3),
        replace(TWO, state=State.CLOSED),
        replace(TWO, state=State.CLOSED, last_entry=10, length=3),
    ):
        with pytest.raises(AssertionError):
            broken.check()


def test_an_empty_last_fragment_is_legal_when_closed() -> None:
    """I23, BK#4551."""
    closed = TWO.closed(last_entry=11, length=40)
    closed.check()
    assert len(closed.fragments) == 2


def test_a_close_drops_fragments_beyond_the_end_but_never_the_first() -> None:
    TWO.closed(last_entry=5, length=9).check()
    assert ledger().closed(last_entry=-1, length=0).fragments == ledger().fragments


def test_nothing_follows_closed() -> None:
    closed = TWO.closed(last_entry=12, length=40)
    with pytest.raises(AssertionError):
        closed.closed(last_entry=13, length=41)
    with pytest.raises(AssertionError):
        closed.in_recovery()


def test_both_members_of_a_repair_are_kept_by_all_who_drop_until_it_ends() -> None:
    """Rules 20 and 20b."""
    repair = Repair(0, B1, B5)
    pending = TWO.with_repair(repair)
    assert B5 in pending.all_members
    assert pending.fragments == TWO.fragments

    done = pending.with_member_replaced(0, B1, B5)
    assert done.fragments == (Fragment(0, (B5, B2, B3)), TWO.fragments[1])
    assert done.placed_repairs == done.repairs == (repair,)
    assert {B1, B5} <= set(done.all_members)

    ended = done.with_leaving_released(0, B5)
    assert ended.fragments == done.fragments
    assert ended.repairs == ()
    assert B1 not in ended.all_members


def test_who_is_kept_for_a_member_is_kept_for_the_one_that_gets_its_place() -> None:
    """Rule 20b: else nobody could be let go once the first target is gone for ever."""
    moved = TWO.with_member_replaced(0, B1, B5)
    again = moved.with_repair(Repair(0, B5, B4)).with_member_replaced(0, B5, B4)
    assert again.repairs == (Repair(0, B1, B4), Repair(0, B5, B4))
    assert {B1, B5} <= set(again.all_members)
    assert again.with_leaving_released(0, B4).repairs == ()

    back = moved.with_member_replaced(0, B5, B1)
    assert back.repairs == (Repair(0, B5, B1),)


def test_a_member_that_comes_back_and_leaves_again_is_kept_for_both_successors() -> None:
    """Rule 20b: each of them needs a copy of the row for the entries of its place."""
    back = TWO.with_member_replaced(0, B1, B5).with_member_replaced(0, B2, B1)
    left = back.with_repair(Repair(0, B1, B4)).with_member_replaced(0, B1, B4)

    assert left.fragments[0] == Fragment(0, (B5, B4, B3))
    assert left.placed_repairs == (Repair(0, B1, B5), Repair(0, B2, B4), Repair(0, B1, B4))
    assert left.with_leaving_released(0, B4).repairs == (Repair(0, B1, B5),)


def test_a_place_that_is_given_away_ends_pending_repairs_with_its_members() -> None:
    other = Repair(12, B4, B1)
    pending = TWO.with_repair(Repair(0, B1, B4)).with_repair(Repair(0, B2, B5)).with_repair(other)

    assert pending.with_member_replaced(0, B1, B5).repairs == (other, Repair(0, B1, B5))


def test_a_later_repair_of_the_same_place_takes_over() -> None:
    pending = TWO.with_repair(Repair(0, B1, B5)).with_repair(Repair(0, B1, B4))
    assert pending.repairs == (Repair(0, B1, B4),)


def test_a_member_is_replaced_only_where_it_is_and_by_one_that_is_not() -> None:
    for old, new in ((B4, B5), (B1, B2)):
        with pytest.raises(ValueError, match="must not name"):
            TWO.with_member_replaced(0, old, new)


def test_only_the_last_fragment_of_a_ledger_that_is_not_closed_is_open() -> None:
    assert [TWO.is_closed_fragment(index) for index in (0, 1)] == [True, False]
    assert TWO.closed(last_entry=12, length=1).is_closed_fragment(1)


def test_an_id_below_zero_has_no_fragment() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        TWO.fragment_index(-1)


CLOSED = ledger(state=State.CLOSED, last_entry=9, length=10)


def test_what_is_given_up_is_one_ascending_list_and_is_told_for_ever() -> None:
    row = CLOSED.given_up(6, 7, ()).given_up(1, 2, (B1,)).given_up(3, 3, (B1, B2))
    row.check()

    assert row.lost_entries == ((1, 3), (6, 7))
    assert (row.may_lack_entries, row.declared_lost) == (True, (B1, B2))
    assert row.given_up(4, 5, ()).lost_entries == ((1, 7),)
    assert row.given_up(0, 9, ()).lost_entries == ((0, 9),)


def test_readers_and_members_are_asked_for_what_was_not_given_up() -> None:
    row = CLOSED.given_up(0, 1, ()).given_up(5, 6, ())

    assert [row.lost_at(entry_id) for entry_id in (1, 2, 5)] == [(0, 1), None, (5, 6)]
    assert row.kept(0, 9) == ((2, 4), (7, 9))
    assert row.kept(3, 5) == ((3, 4),)
    assert row.kept(5, 6) == ()
    assert row.kept(7, 8) == ((7, 8),)
    assert CLOSED.kept(3, 2) == ()


@pytest.mark.parametrize(
    "row",
    [
        replace(ledger(), lost_entries=((0, 0),), may_lack_entries=True),
        replace(CLOSED, lost_entries=((0, 0),)),
        replace(CLOSED, lost_entries=((9, 10),), may_lack_entries=True),
        replace(CLOSED, lost_entries=((3, 2),), may_lack_entries=True),
        replace(CLOSED, lost_entries=((1, 2), (3, 4)), may_lack_entries=True),
        replace(CLOSED, lost_entries=((4, 5), (1, 2)), may_lack_entries=True),
    ],
)
def test_a_row_that_gave_up_what_it_can_not_is_no_row(row: LedgerMetadata) -> None:
    """Rule 31: an open ledger, silently, beyond its end; and ranges that are none."""
    with pytest.raises(AssertionError):
        row.check()


MINE: Final = "11111111-0000-4000-8000-000000000000"
OTHER: Final = "22222222-0000-4000-8000-000000000000"


def other(row: LedgerMetadata) -> LedgerMetadata:
    """The row of its version that the store has."""
    return replace(row, attempt=OTHER)


def changing() -> writers.Bench:
    """A writer whose ensemble change is under way."""
    bench = writers.Bench(replace(ledger(version=4), attempt=MINE))
    bench.append()
    bench.fails(0, 0)
    bench.found(B4)
    assert bench.one(UpdateMetadata).metadata.attempt == MINE
    return bench


def test_a_writer_whose_ensemble_is_in_the_row_goes_on_from_that_row() -> None:
    bench = changing()

    bench.cas(CasStatus.CONFLICT, other(ledger(version=4)))
    bench.found(B4)

    update = bench.one(UpdateMetadata).metadata
    assert (update.version, update.attempt) == (4, OTHER)


def test_a_writer_whose_ensemble_is_not_in_the_row_ends_and_closes_nothing() -> None:
    bench = changing()

    bench.cas(CasStatus.CONFLICT, other(ledger(version=4, fragments=((0, (B5, B2, B3)),))))

    failed = bench.one(Failed)
    assert (failed.code, failed.first) == ("ledger-fenced", 0)
    bench.none(UpdateMetadata)
    bench.append()
    assert bench.one(Failed).code == "ledger-fenced"
    bench.none(UpdateMetadata)


def test_a_recovery_starts_over_by_the_row() -> None:
    bench = recoveries.Bench(replace(ledger(version=4), attempt=MINE))
    bench.do(RecoverRequested(bench.row))

    bench.cas(CasStatus.CONFLICT, other(ledger(version=4, fragments=((0, (B5, B2, B3)),))))

    update = bench.one(UpdateMetadata).metadata
    assert (update.version, update.attempt) == (4, OTHER)
    bench.cas()
    assert [fence.member for fence in bench.all(SendFence)] == [B5, B2, B3]


def test_a_recovery_that_closes_reads_again_where_the_row_has_another_last_fragment() -> None:
    bench = recoveries.ended()

    moved = ledger(version=2, state=State.IN_RECOVERY, fragments=((0, (B1, B4, B3)),))
    bench.cas(CasStatus.CONFLICT, other(moved))

    bench.none(UpdateMetadata)
    assert [fence.member for fence in bench.all(SendFence)] == [B1, B4, B3]


def test_a_repair_marks_its_target_again_in_the_row() -> None:
    bench = repairs.Bench(replace(repairs.CLOSED, attempt=MINE))

    bench.cas(CasStatus.CONFLICT, other(repairs.CLOSED))

    update = bench.one(UpdateMetadata).metadata
    assert (update.attempt, update.repairs != ()) == (OTHER, True)


def test_a_repair_that_replaces_reads_the_target_again_under_the_row() -> None:
    """Rule 20a: meanwhile nobody may have named the target."""
    bench = repairs.verifying()
    bench.gets(bench.one(SendRead), repairs.AB)
    assert bench.row.repairs

    bench.cas(CasStatus.CONFLICT, other(bench.row))

    bench.none(UpdateMetadata)
    assert bench.one(SendRead).member == B4


def rolling() -> owners.Hand:
    hand = owners.Hand()
    hand.append("a")
    hand.hear(LogRequest("roll"))
    hand.answer(CountBookies, 3)
    hand.answer(CreateLedger, owners.ledger(2))
    return hand


def test_an_owner_whose_ledger_is_the_last_of_the_row_goes_on_from_that_row() -> None:
    hand = rolling()

    hand.answer(SwapLog, RowChanged(replace(owners.LOG, attempt=OTHER)))

    again = hand.asked(SwapLog).question
    assert isinstance(again, SwapLog)
    assert again.log.attempt == OTHER


def test_an_owner_whose_ledger_is_not_the_last_of_the_row_ends() -> None:
    hand = rolling()
    row = replace(owners.LOG, attempt=OTHER, items=(LogItem(9, 0),))

    hand.answer(SwapLog, RowChanged(row))

    assert hand.asked(DeleteLedger).question == DeleteLedger(2)
    assert hand.owner.is_ended
    assert hand.answers["roll"] is NOT_OWNER
