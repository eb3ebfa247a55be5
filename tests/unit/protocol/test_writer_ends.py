"""The writer: refusals and silence of bookies, and the ends of a ledger."""

from dataclasses import replace

import pytest

from quorumlog.protocol.messages import (
    AddAnswered,
    BookiesFound,
    CasStatus,
    Closed,
    CloseRequested,
    Failed,
    FindBookies,
    MetadataAnswered,
    MissedRange,
    ReadMetadata,
    RecoveryNeeded,
    StartTimer,
    Status,
    Timer,
    TimerFired,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import State
from quorumlog.protocol.writer import WriterState
from tests.unit.protocol.hands import B1, B2, B3, B4, B5, answer, applied, ledger
from tests.unit.protocol.test_writer import Bench, appended, changing

# --- refusals, silence -----------------------------------------------------------------------


def test_fenced_is_believed_only_after_metadata_was_read_again() -> None:
    bench = appended()
    bench.fails(0, 0, Status.FENCED)
    bench.one(ReadMetadata)
    bench.none(Failed)

    bench.cas(row=replace(ledger(version=2), state=State.IN_RECOVERY))

    assert bench.one(Failed).code == "ledger-fenced"
    bench.one(RecoveryNeeded)
    assert bench.writer.state is WriterState.ENDED


def test_a_fenced_answer_while_the_row_is_open_fails_only_the_slot() -> None:
    bench = appended()
    bench.fails(0, 0, Status.FENCED)
    bench.cas(row=ledger())
    bench.one(FindBookies)
    bench.found(B4)
    bench.one(UpdateMetadata)


@pytest.mark.parametrize("status", [Status.NOT_MINE, Status.READ_ONLY, Status.WRONG_KEY])
def test_other_refusals_fail_only_the_slot(status: Status) -> None:
    bench = appended()
    bench.fails(0, 0, status)
    bench.none(Failed, ReadMetadata)
    bench.one(FindBookies)


def test_below_the_ack_quorum_by_refusals_ends_at_once() -> None:
    bench = appended()
    bench.fails(0, 0, Status.READ_ONLY)
    bench.found()
    bench.none(Failed)
    bench.fails(0, 1, Status.READ_ONLY)
    bench.found()

    assert bench.one(Failed) == Failed(
        "read-only",
        0,
        "too many bookies refused adds, and no other live bookie can replace them: start bookies",
    )
    assert bench.one(UpdateMetadata).metadata.last_entry == -1


def test_below_the_ack_quorum_by_silence_waits_for_the_quorum_timeout() -> None:
    bench = appended(2)
    bench.ok(0, 0, 1)
    bench.fails(1, 0)
    bench.found()
    bench.fails(1, 1)
    bench.found()
    bench.none(Failed)
    bench.do(TimerFired(Timer.QUORUM, 0))
    bench.none(Failed)  # it covered entry 0 only
    assert StartTimer(Timer.QUORUM, 1) in bench.out

    bench.do(TimerFired(Timer.QUORUM, 1))

    assert bench.one(Failed) == Failed("quorum-timeout", 1)
    update = bench.one(UpdateMetadata)
    assert (update.metadata.last_entry, update.metadata.length) == (0, 1)


def test_silence_fails_only_the_silent_position() -> None:
    bench = appended()
    assert StartTimer(Timer.ADD, 1) in bench.out
    bench.ok(0, 0, 1)

    bench.do(TimerFired(Timer.ADD, 1))

    assert bench.one(FindBookies).exclude == (B1, B2, B3)
    assert bench.writer.is_degraded


def test_a_run_sent_after_the_timer_was_started_is_not_silent_yet() -> None:
    bench = appended()
    bench.ok(0, 0, 1, 2)
    bench.append()

    bench.do(TimerFired(Timer.ADD, 1))

    bench.none(FindBookies)
    assert StartTimer(Timer.ADD, 2) in bench.out


def test_other_bytes_under_an_id_are_final() -> None:
    bench = appended(2)
    bench.ok(0, 0, 1)

    bench.fails(1, 2, Status.CONFLICT)

    failed = bench.one(Failed)
    assert (failed.code, failed.first, failed.bookie, failed.entry_id) == (
        "entry-conflict",
        1,
        B3,
        1,
    )
    assert bench.one(UpdateMetadata).metadata.last_entry == 0


# --- ends ------------------------------------------------------------------------------------


def test_close_drains_first_and_ends_at_the_last_acknowledged_entry() -> None:
    bench = Bench()
    bench.append(b"abc")
    bench.do(CloseRequested())
    bench.none(UpdateMetadata)
    bench.ok(0, 0, 1)
    bench.none(UpdateMetadata)  # a moment for the third bookie
    assert not bench.writer.is_closing_row
    bench.ok(0, 2)
    assert bench.writer.is_closing_row

    update = bench.one(UpdateMetadata)
    assert (update.metadata.state, update.metadata.last_entry) == (State.CLOSED, 0)
    assert (update.metadata.length, update.missed) == (3, ())
    bench.cas(row=applied(update))
    assert bench.one(Closed).metadata.version == 2
    assert not bench.writer.is_closing_row


def test_close_waits_only_a_moment_for_a_slow_bookie_and_then_tells_what_it_missed() -> None:
    bench = appended()
    bench.ok(0, 0, 1)
    bench.do(CloseRequested())
    assert bench.one(StartTimer).timer is Timer.HEDGE

    bench.do(TimerFired(Timer.HEDGE))

    assert bench.one(UpdateMetadata).missed == (MissedRange(B3, 0, 0),)


def test_close_of_an_empty_ledger_ends_at_minus_one() -> None:
    bench = Bench()
    bench.do(CloseRequested())
    update = bench.one(UpdateMetadata)
    assert (update.metadata.last_entry, update.metadata.length) == (-1, 0)


def test_close_twice_is_one_close_with_one_outcome() -> None:
    bench = Bench()
    bench.do(CloseRequested())
    update = bench.one(UpdateMetadata)
    bench.do(CloseRequested())
    bench.none(UpdateMetadata)
    bench.cas(row=applied(update))
    bench.do(CloseRequested())
    bench.one(Closed)


def test_close_of_a_ledger_closed_by_others_at_our_end_succeeds() -> None:
    bench = appended()
    bench.ok(0, 0, 1, 2)
    bench.do(CloseRequested())
    closed = ledger(state=State.CLOSED, last_entry=0, length=1, version=3)
    bench.cas(CasStatus.CONFLICT, closed)
    assert bench.one(Closed).metadata == closed


def test_close_of_a_ledger_closed_by_others_elsewhere_fails() -> None:
    bench = appended()
    bench.ok(0, 0, 1, 2)
    bench.do(CloseRequested())
    bench.cas(CasStatus.CONFLICT, ledger(state=State.CLOSED, last_entry=1, length=2, version=3))
    assert bench.one(Failed).code == "ledger-closed"
    bench.do(CloseRequested())
    assert bench.one(Failed).code == "ledger-closed"


def test_close_met_by_recovery_fails_as_fenced_and_asks_for_the_recovery() -> None:
    bench = Bench()
    bench.do(CloseRequested())
    bench.cas(CasStatus.CONFLICT, ledger(state=State.IN_RECOVERY, version=2))
    assert bench.one(Failed).code == "ledger-fenced"
    bench.one(RecoveryNeeded)


def test_close_that_lost_to_a_repair_is_made_again_on_the_new_row() -> None:
    bench = Bench()
    bench.do(CloseRequested())
    bench.cas(CasStatus.CONFLICT, ledger(version=9))
    assert bench.one(UpdateMetadata).metadata.version == 9


def test_a_change_that_meets_recovery_fails_what_is_pending() -> None:
    bench, _ = changing()
    bench.append()
    bench.cas(CasStatus.CONFLICT, ledger(state=State.IN_RECOVERY, version=2))
    assert bench.one(Failed) == Failed("ledger-fenced", 0)
    bench.one(RecoveryNeeded)


def test_a_change_that_was_applied_before_recovery_began_meets_recovery_too() -> None:
    bench, update = changing()
    bench.cas(CasStatus.OK, replace(applied(update), state=State.IN_RECOVERY, version=3))
    assert bench.one(Failed).code == "ledger-fenced"


def test_a_deleted_ledger_ends_the_handle() -> None:
    bench, _ = changing()
    bench.cas(CasStatus.MISSING)
    assert bench.one(Failed).code == "no-such-ledger"


def test_nothing_is_taken_after_the_end() -> None:
    bench = Bench()
    bench.do(CloseRequested())
    bench.append()
    assert bench.one(Failed) == Failed("ledger-closed", 0)
    assert bench.writer.last_add_pushed == -1


def test_closing_goes_on_after_a_quorum_timeout_that_met_an_unsettled_change() -> None:
    bench, update = changing()
    bench.do(answer(bench.adds[0, 1]))
    bench.do(TimerFired(Timer.QUORUM, 0))
    assert bench.one(Failed).code == "quorum-timeout"
    bench.none(UpdateMetadata)

    bench.cas(row=applied(update))

    closing = bench.one(UpdateMetadata).metadata
    assert (closing.state, closing.version, closing.last_entry) == (State.CLOSED, 2, -1)


def test_the_store_being_away_while_closing_is_waited_for() -> None:
    bench = Bench()
    bench.do(CloseRequested())
    update = bench.one(UpdateMetadata)
    bench.cas(CasStatus.UNKNOWN)
    assert StartTimer(Timer.RETRY) in bench.out
    bench.do(TimerFired(Timer.RETRY))
    assert bench.one(UpdateMetadata) == update
    bench.cas(row=applied(update))
    bench.one(Closed)


def test_late_and_repeated_answers_are_harmless() -> None:
    bench, update = changing()
    bench.cas(row=applied(update))
    bench.do(MetadataAnswered(update.attempt, CasStatus.OK, applied(update)))
    bench.do(BookiesFound(1, (B5,)))
    bench.do(AddAnswered(0, B1, 0, 99, 99, Status.OK))
    bench.do(TimerFired(Timer.RETRY))
    bench.do(TimerFired(Timer.RETRY))
    bench.none(UpdateMetadata, Failed)


def test_a_copy_goes_its_own_way() -> None:
    bench = appended()
    before = bench.writer.key()
    other = bench.writer.copy()

    bench.ok(0, 0, 1)

    assert other.key() == before != bench.writer.key()
