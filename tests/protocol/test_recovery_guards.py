"""Guards of recovery that no other test would miss; `make mutate` found them."""

from dataclasses import replace

import pytest

from quorumlog.protocol.messages import (
    BookiesFound,
    CasStatus,
    Closed,
    Failed,
    FenceAnswered,
    FindBookies,
    MetadataAnswered,
    MissedRange,
    ReadAnswered,
    RecoverRequested,
    SendAdd,
    SendFence,
    SendRead,
    StartTimer,
    Status,
    Timer,
    TimerFired,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import State
from quorumlog.protocol.recovery import _AHEAD_RUNS, Phase
from tests.protocol.hands import B1, B2, B3, B4, B5, answer, ledger, run_of
from tests.protocol.test_recovery import Bench, reading


def closing(row_lacs: tuple[int, ...] = (-1, -1)) -> Bench:
    """Nothing was found; the close is under way."""
    bench = reading(None, *row_lacs)
    bench.reads_at(0, absent_from=row_lacs[0] + 1)
    bench.reads_at(1, absent_from=row_lacs[0] + 1)
    assert bench.recovery.phase is Phase.CLOSING
    return bench


def test_an_answer_to_an_earlier_attempt_is_not_taken_for_that_to_the_close() -> None:
    bench = Bench()
    bench.start()
    marked = bench.one(UpdateMetadata)
    bench.cas()
    row = bench.recovery.metadata
    bench.fenced(-1, -1, -1)
    bench.reads_at(0, absent_from=0)
    bench.reads_at(1, absent_from=0)
    assert bench.recovery.phase is Phase.CLOSING
    before = bench.recovery.key()

    for status in (CasStatus.OK, CasStatus.UNKNOWN):
        assert bench.do(MetadataAnswered(marked.attempt, status, row)) == []

    assert bench.recovery.key() == before


def test_an_answer_of_metadata_that_nobody_waits_for_changes_nothing() -> None:
    bench = Bench()
    bench.start()
    marked = bench.one(UpdateMetadata)
    bench.cas()
    row = bench.recovery.metadata
    before = bench.recovery.key()

    assert bench.do(MetadataAnswered(marked.attempt, CasStatus.OK, row)) == []
    assert bench.recovery.key() == before


def test_a_member_that_is_declared_lost_meanwhile_starts_the_recovery_again() -> None:
    bench = closing()
    row = ledger(state=State.IN_RECOVERY, version=8, declared_lost=(B3,))

    bench.cas(CasStatus.CONFLICT, row)

    assert [fence.member for fence in bench.all(SendFence)] == [B1, B2]
    bench.none(UpdateMetadata)


def test_a_loss_that_is_declared_for_a_recovery_under_way_is_recorded_before_it_counts() -> None:
    bench = Bench(ledger(state=State.IN_RECOVERY), declare_lost=(B2, B3))

    bench.start()

    bench.none(SendFence)
    assert bench.one(UpdateMetadata).metadata.declared_lost == (B2, B3)


def test_a_bookie_that_is_fenced_stays_so_whatever_it_answers_later() -> None:
    bench = Bench(ledger(state=State.IN_RECOVERY))
    bench.start()
    bench.fenced(-1)

    bench.do(FenceAnswered(0, B1, Status.UNKNOWN, -1))
    bench.do(FenceAnswered(1, B2, Status.UNKNOWN, -1))

    bench.none(Failed)
    bench.do(FenceAnswered(2, B3, Status.OK, -1))
    assert bench.recovery.phase is Phase.READING


def test_lost_members_leave_time_for_all_others_to_be_fenced() -> None:
    """Rule 14: two of four are lost, and it takes both others."""
    lost = (B1, B2)
    bench = Bench(ledger(4, 4, 2, state=State.IN_RECOVERY, declared_lost=lost))
    bench.start()

    bench.do(FenceAnswered(2, B3, Status.OK, -1))
    bench.none(Failed)
    bench.do(FenceAnswered(3, B4, Status.OK, -1))

    assert bench.recovery.phase is Phase.READING


def test_lost_members_do_not_make_up_for_one_that_was_not_fenced() -> None:
    bench = Bench(ledger(4, 4, 2, state=State.IN_RECOVERY, declared_lost=(B1, B2)))
    bench.start()

    bench.do(FenceAnswered(2, B3, Status.UNKNOWN, -1))

    assert bench.one(Failed).code == "recovery-blocked"


def test_an_answer_that_comes_twice_is_taken_once() -> None:
    bench = reading()
    read = bench.reads[0]
    bench.reads_at(0, run_of(b"a"))
    assert bench.one(SendRead).first == 1
    before = bench.recovery.key()

    again = ReadAnswered(0, read.member, read.first, read.last, Status.OK, run_of(b"a"))

    assert bench.do(again) == []
    assert bench.recovery.key() == before


@pytest.mark.parametrize("status", [Status.OK, Status.CONFLICT, Status.UNKNOWN])
def test_a_write_that_is_answered_during_the_close_changes_nothing(status: Status) -> None:
    bench = reading()
    bench.reads_at(0, run_of(b"abc"), absent_from=1)
    bench.reads_at(1, absent_from=0)
    bench.wrote(0, 1)
    bench.do(TimerFired(Timer.HEDGE))
    assert bench.recovery.phase is Phase.CLOSING
    before = bench.recovery.key()

    bench.wrote(2, status=status)

    assert bench.out == []
    assert bench.recovery.key() == before


def test_a_bookie_that_was_only_slow_is_written_to_again() -> None:
    bench = reading(None, -1, -1, -1, read_entries=1)
    bench.reads_at(0, run_of(b"a"))
    slow = bench.adds[2]
    bench.wrote(0, 1)
    bench.do(TimerFired(Timer.ADD, 1))  # bookie 2 is silent
    bench.reads_at(0, run_of(b"b", first=1, before=1))
    assert {add.position for add in bench.all(SendAdd)} == {0, 1}

    bench.do(answer(slow))

    assert [(add.position, add.run.first) for add in bench.all(SendAdd)] == [(2, 1)]


def test_a_spare_that_is_needed_no_more_need_not_be_found() -> None:
    bench = reading()
    bench.reads_at(0, run_of(b"a"), absent_from=1)
    late = bench.adds[1]
    bench.wrote(1, 2, status=Status.UNKNOWN)
    find = bench.one(FindBookies)
    bench.do(answer(late))  # it was only slow

    bench.do(BookiesFound(find.attempt, ()))

    bench.none(Failed)
    bench.wrote(0)
    bench.reads_at(1, absent_from=0)
    assert bench.one(UpdateMetadata).metadata.last_entry == 0


def test_an_answer_to_an_earlier_search_is_ignored() -> None:
    bench = reading()
    bench.reads_at(0, run_of(b"a"), absent_from=1)
    bench.wrote(1, 2, status=Status.UNKNOWN)
    find = bench.one(FindBookies)

    assert bench.do(BookiesFound(find.attempt - 1, ())) == []
    assert bench.do(BookiesFound(find.attempt - 1, (B4,))) == []


def test_a_confirmed_entry_that_all_deny_blocks_where_nobody_is_declared_lost() -> None:
    """Rule 14: only an operator's word lets a ledger close without what was confirmed."""
    bench = reading(None, 4, 4, 4)
    bench.reads_at(0, absent_from=5)
    bench.reads_at(1, absent_from=5)
    assert bench.recovery.phase is Phase.MEASURING

    for position in (0, 1):
        bench.reads_at(position, absent_from=4)

    failed = bench.one(Failed)
    assert (failed.code, failed.entry_id) == ("recovery-blocked", 4)
    bench.none(UpdateMetadata)


def test_a_ledger_of_which_nothing_is_left_closes_with_no_length() -> None:
    bench = Bench(ledger(state=State.IN_RECOVERY, declared_lost=(B2, B3)))
    bench.start()
    bench.fenced(0)
    bench.reads_at(0, absent_from=1)

    bench.reads_at(0, absent_from=0)

    closed = bench.one(UpdateMetadata).metadata
    assert (closed.last_entry, closed.length, closed.may_lack_entries) == (0, 0, True)


def test_the_first_entry_bounds_the_length_where_the_second_is_lost() -> None:
    bench = Bench(ledger(state=State.IN_RECOVERY, declared_lost=(B2, B3)))
    bench.start()
    bench.fenced(1)
    bench.reads_at(0, absent_from=2)

    bench.reads_at(0, absent_from=1)

    assert bench.reads[0].first == 0
    bench.reads_at(0, run_of(b"abc"))
    closed = bench.one(UpdateMetadata).metadata
    assert (closed.last_entry, closed.length) == (1, 3)


@pytest.mark.parametrize("status", [CasStatus.OK, CasStatus.CONFLICT, CasStatus.UNKNOWN])
def test_an_answer_without_a_row_settles_nothing(status: CasStatus) -> None:
    bench = closing()
    update = bench.one(UpdateMetadata)

    bench.do(MetadataAnswered(update.attempt, status))

    bench.none(Failed, Closed)
    bench.do(TimerFired(Timer.RETRY))
    assert bench.one(UpdateMetadata) == update


def test_nothing_comes_of_what_arrives_after_the_end() -> None:
    bench = closing()
    update = bench.one(UpdateMetadata)
    bench.cas()
    done = bench.one(Closed)

    assert bench.do(MetadataAnswered(update.attempt, CasStatus.OK, done.metadata)) == []
    assert bench.do(BookiesFound(1, (B4,))) == []
    row = replace(done.metadata, state=State.IN_RECOVERY, last_entry=None, length=None)
    assert bench.do(MetadataAnswered(update.attempt, CasStatus.CONFLICT, row)) == []


def test_a_recovery_begins_once() -> None:
    bench = Bench(ledger(state=State.IN_RECOVERY))
    bench.start()
    before = bench.recovery.key()

    assert bench.do(RecoverRequested(bench.row)) == []
    assert bench.recovery.key() == before


def test_a_timer_that_nobody_started_or_that_comes_after_the_end_means_nothing() -> None:
    for timer in Timer:
        bench = reading()
        before = bench.recovery.key()
        assert bench.do(TimerFired(timer, 5)) == []
        assert bench.recovery.key() == before

    bench = reading()
    bench.reads_at(0, run_of(b"abc"), absent_from=1)
    bench.reads_at(1, absent_from=0)
    bench.wrote(0, 1)  # a moment is given to the third
    bench.wrote(2)
    bench.cas()
    bench.one(Closed)
    before = bench.recovery.key()
    for timer in Timer:
        assert bench.do(TimerFired(timer, 1)) == []
    assert bench.recovery.key() == before


def test_an_answer_about_another_range_is_not_taken() -> None:
    bench = reading()
    read = bench.reads[0]
    before = bench.recovery.key()

    short = ReadAnswered(0, read.member, read.first, read.first, Status.NO_ENTRY)

    assert bench.do(short) == []
    assert bench.recovery.key() == before


def test_a_bookie_that_acknowledges_only_some_of_what_is_written_back_is_silent() -> None:
    bench = reading(None, -1, -1, -1, read_entries=1)
    bench.reads_at(0, run_of(b"a"))
    bench.wrote(0)
    bench.reads_at(0, run_of(b"b", first=1, before=1))
    bench.wrote(0, 1)  # entry 1; bookie 1 has not answered for entry 0, bookie 2 for neither

    bench.do(TimerFired(Timer.ADD, 1))

    find = bench.one(FindBookies)
    assert (find.ensemble, set(find.exclude)) == ((B1,), {B1, B2, B3})


def test_what_a_replaced_bookie_missed_is_handed_over_under_its_own_name() -> None:
    bench = reading(ledger(4, 4, 2), -1, -1, -1, -1, read_entries=1)
    bench.reads_at(0, run_of(b"a"))
    slow = bench.adds[2]
    bench.wrote(0, 1)
    bench.wrote(3, status=Status.UNKNOWN)
    bench.reads_at(0, run_of(b"b", first=1, before=1))
    bench.wrote(0, 1, status=Status.UNKNOWN)
    bench.do(BookiesFound(bench.one(FindBookies).attempt, (B5, "b6@1", "b7@1")))

    bench.do(answer(slow))
    bench.wrote(0, 1, 2, 3)
    for position in (0, 1, 2):
        bench.reads_at(position, absent_from=2)

    update = bench.one(UpdateMetadata)
    assert [fragment.first_entry for fragment in update.metadata.fragments] == [0, 1]
    assert update.missed == (MissedRange(B4, 0, 0),)


def test_a_length_that_only_lost_members_know_is_not_waited_for() -> None:
    """Rule 14: of a whole fragment nobody is left to be asked."""
    lost = (B1, B2, B3)
    row = ledger(
        fragments=((0, lost), (2, (B4, B5, "b6@1"))), state=State.IN_RECOVERY, declared_lost=lost
    )
    bench = Bench(row)
    bench.start()
    bench.fenced(1, 1, 1)
    bench.reads_at(0, absent_from=2)
    bench.reads_at(1, absent_from=2)

    closed = bench.one(UpdateMetadata).metadata
    assert (closed.last_entry, closed.length, closed.may_lack_entries) == (1, 0, True)


def test_what_a_silent_bookie_misses_is_one_range_and_not_one_for_each_entry() -> None:
    bench = reading(None, -1, -1, -1, read_entries=1)
    for entry_id in range(5):
        bench.reads_at(0, run_of(b"x", first=entry_id, before=entry_id))
        if entry_id == 0:
            bench.wrote(2, status=Status.UNKNOWN)
        bench.wrote(0, 1)

    assert bench.recovery._window.missed == []
    assert bench.recovery._slots.missed == (MissedRange(B3, 0, 4),)


def test_a_recovery_that_fails_closes_nothing() -> None:
    bench = reading()
    bench.reads_at(0, run_of(b"a"))

    bench.wrote(1, status=Status.CONFLICT)

    assert bench.one(Failed).code == "recovery-blocked"
    bench.none(UpdateMetadata, SendRead)


def test_reading_is_ahead_of_writing_by_a_few_runs_only() -> None:
    bench = reading(None, -1, -1, -1, read_entries=1)
    count = 0
    while bench.reads[0].first == count:
        bench.reads_at(0, run_of(b"x", first=count, before=count))
        count += 1
    assert count == _AHEAD_RUNS

    bench.wrote(0, 1)
    bench.none(SendRead)  # the last one alone confirms nothing


def test_a_slow_bookie_does_not_hold_up_reading() -> None:
    bench = reading(None, -1, -1, -1, read_entries=1)
    for entry_id in range(_AHEAD_RUNS + 2):
        bench.reads_at(0, run_of(b"x", first=entry_id, before=entry_id))
        bench.wrote(0, 1)

    assert bench.reads[0].first == _AHEAD_RUNS + 2


def test_one_moment_is_given_to_a_slow_bookie() -> None:
    bench = reading()
    bench.reads_at(0, run_of(b"a", b"b"), absent_from=2)
    bench.reads_at(1, absent_from=0)
    bench.wrote(0, 1)
    assert [timer.timer for timer in bench.all(StartTimer)].count(Timer.HEDGE) == 1

    bench.wrote(1)

    bench.none(StartTimer, UpdateMetadata)


def test_only_its_own_timer_has_the_close_asked_for_again() -> None:
    bench = reading()
    bench.reads_at(0, run_of(b"abc"), absent_from=1)
    bench.reads_at(1, absent_from=0)
    bench.wrote(0, 1, 2)
    update = bench.one(UpdateMetadata)
    other = bench.recovery.copy()
    assert bench.do(TimerFired(Timer.ADD, 1)) == []

    bench.machine = bench.recovery = other
    bench.cas(CasStatus.UNKNOWN)
    assert bench.do(TimerFired(Timer.ADD, 1)) == []
    assert bench.do(TimerFired(Timer.RETRY)) == [update]
