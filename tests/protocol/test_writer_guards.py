"""Guards of the writer that no other test would miss; `make mutate` found them."""

from dataclasses import replace

import pytest

from quorumlog.protocol.messages import (
    AppendRequested,
    BookiesFound,
    CasStatus,
    Closed,
    CloseRequested,
    Failed,
    FindBookies,
    MetadataAnswered,
    MissedRange,
    ReadMetadata,
    ReplaceRequested,
    SendAdd,
    StartTimer,
    Status,
    Timer,
    TimerFired,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import Fragment, State
from quorumlog.protocol.writer import WriterState
from tests.protocol.hands import B1, B2, B3, B4, B5, answer, applied
from tests.protocol.test_writer import Bench, changing


def silent(bench: Bench) -> bool:
    """Whether the writer looks for a bookie in the place of one that is silent."""
    return bool(bench.all(FindBookies))


@pytest.mark.parametrize("status", [Status.OK, Status.CONFLICT, Status.FENCED, Status.UNKNOWN])
def test_an_answer_after_the_end_changes_nothing(status: Status) -> None:
    bench = Bench()
    bench.append()
    bench.ok(0, 0, 1)
    bench.append()
    late = bench.adds[1, 2]
    bench.do(CloseRequested())
    bench.ok(1, 0, 1)
    bench.ok(0, 2)
    bench.do(TimerFired(Timer.HEDGE))
    row = applied(bench.one(UpdateMetadata))
    bench.cas(CasStatus.OK, row)
    assert bench.writer.state is WriterState.CLOSED
    before = bench.writer.key()

    bench.do(answer(late, status))

    assert bench.out == []
    assert bench.writer.key() == before


def test_an_answer_to_an_earlier_search_does_not_end_a_change_that_is_not_settled() -> None:
    bench, update = changing()
    earlier = bench.attempt() - 1
    bench.ok(0, 1)

    bench.do(BookiesFound(earlier, (B5,)))

    # Rule 6: two acks of which one is of the member that may be replaced confirm nothing.
    bench.do(answer(bench.adds[0, 0]))
    assert bench.out == []
    assert bench.writer.last_add_confirmed == -1
    bench.cas(CasStatus.OK, applied(update))
    assert bench.writer.metadata.last_fragment.bookies[0] == B4


def test_a_bookie_that_came_back_has_its_own_time_to_answer() -> None:
    bench = Bench()
    bench.append()
    bench.ok(0, 0, 1)
    bench.do(TimerFired(Timer.ADD, 1))  # bookie 2 is silent
    bench.found()
    bench.append()  # covered by timer 2, and not sent to bookie 2
    bench.ok(0, 2)  # it was slow: entry 1 is sent to it now
    assert bench.writer.is_degraded is False

    bench.ok(1, 0, 1)
    bench.do(TimerFired(Timer.ADD, 2))
    assert not silent(bench)

    bench.do(TimerFired(Timer.ADD, 3))
    assert silent(bench)


def test_a_bookie_that_answers_only_some_of_its_requests_is_silent() -> None:
    bench = Bench()
    bench.append()
    bench.append()
    bench.ok(0, 0, 1)
    bench.ok(1, 0, 1)
    bench.ok(1, 2)  # and not entry 0

    bench.do(TimerFired(Timer.ADD, 1))

    assert silent(bench)


def test_a_request_to_replace_a_stranger_or_for_an_ended_handle_changes_nothing() -> None:
    bench = Bench()
    before = bench.writer.key()
    assert bench.do(ReplaceRequested(B5)) == []
    assert bench.writer.key() == before

    bench.do(CloseRequested())
    bench.cas(CasStatus.OK, applied(bench.one(UpdateMetadata)))
    before = bench.writer.key()
    assert bench.do(ReplaceRequested(B1)) == []
    assert bench.writer.key() == before


def test_appends_to_a_handle_that_failed_and_closed_are_told_that_it_is_closed() -> None:
    bench = Bench()
    bench.append()
    bench.do(TimerFired(Timer.QUORUM, 0))
    update = bench.one(UpdateMetadata)
    assert bench.writer.state is WriterState.ENDING

    bench.do(AppendRequested((b"x",)))
    assert bench.one(Failed).code == "ledger-closed"

    bench.cas(CasStatus.OK, applied(update))
    assert bench.writer.metadata.state is State.CLOSED
    bench.do(AppendRequested((b"x",)))
    assert bench.one(Failed).code == "ledger-closed"
    bench.none(SendAdd)


def test_a_close_with_nothing_pending_does_not_wait_for_another_ensemble() -> None:
    bench = Bench()
    bench.append()
    bench.fails(0, 2)
    find = bench.one(FindBookies)
    bench.do(CloseRequested())
    bench.ok(0, 0, 1)
    assert bench.writer.is_drained

    bench.do(BookiesFound(find.attempt, (B4,)))

    assert bench.one(UpdateMetadata).metadata.state is State.CLOSED


def test_what_a_replaced_bookie_missed_is_handed_over_under_its_own_name() -> None:
    bench = Bench()
    bench.append()
    bench.ok(0, 0, 1)  # confirmed, and bookie 2 has not answered yet

    bench.do(ReplaceRequested(B3))
    bench.found(B4)

    assert bench.one(UpdateMetadata).missed == (MissedRange(B3, 0, 0),)


def test_what_was_confirmed_during_a_change_that_outlived_the_handle_is_missed_by_its_new_member() -> (
    None
):
    bench, update = changing()
    bench.ok(0, 1, 2)  # confirmed by members of both ensembles
    bench.append()
    bench.do(TimerFired(Timer.QUORUM, 1))
    assert bench.one(Failed).code == "quorum-timeout"

    bench.cas(row=applied(update))

    closing = bench.one(UpdateMetadata)
    assert closing.metadata.last_entry == 0
    assert MissedRange(B4, 0, 0) in closing.missed


def test_a_handle_that_fails_hands_over_what_was_missed_until_then() -> None:
    bench = Bench()
    bench.append()
    bench.append()
    bench.ok(0, 0, 1)  # bookie 2 has not answered yet

    bench.do(TimerFired(Timer.QUORUM, 1))

    assert bench.one(UpdateMetadata).missed == (MissedRange(B3, 0, 0),)


def test_what_is_missed_for_long_is_one_range_and_not_one_for_each_append() -> None:
    bench = Bench()
    bench.append()
    bench.fails(0, 2)
    bench.found()
    bench.ok(0, 0, 1)
    for entry_id in range(1, 20):
        bench.append()
        bench.ok(entry_id, 0, 1)

    assert bench.writer._window.missed == []
    assert bench.writer._slots.missed == (MissedRange(B3, 0, 19),)


def test_an_answer_to_a_settled_attempt_is_not_taken_for_that_to_the_next_one() -> None:
    bench, update = changing()
    row = applied(update)
    bench.cas(row=row)
    bench.fails(0, 1, Status.FENCED)
    read = bench.one(ReadMetadata)

    bench.do(MetadataAnswered(update.attempt, CasStatus.OK, row))

    assert bench.out == []
    fenced = replace(row, state=State.IN_RECOVERY, version=row.version + 1)
    bench.do(MetadataAnswered(read.attempt, CasStatus.OK, fenced))
    assert bench.one(Failed).code == "ledger-fenced"


def test_an_ensemble_that_somebody_else_changed_ends_the_handle() -> None:
    bench, _ = changing()
    row = bench.writer.metadata
    other = replace(row, fragments=(Fragment(0, (B1, B2, B5)),), version=row.version + 1)

    bench.cas(CasStatus.CONFLICT, other)

    assert bench.one(Failed).code == "ledger-fenced"
    assert bench.writer.state is WriterState.ENDED
    bench.none(SendAdd, UpdateMetadata)


def test_a_second_close_waits_for_the_first() -> None:
    bench = Bench()
    bench.append()
    bench.do(CloseRequested())

    assert bench.do(CloseRequested()) == []

    bench.ok(0, 0, 1, 2)
    assert bench.do(CloseRequested()) == []


@pytest.mark.parametrize(
    ("state", "last_entry", "is_closed"),
    [(State.CLOSED, 0, True), (State.CLOSED, -1, False), (State.IN_RECOVERY, None, False)],
)
def test_a_close_of_an_ended_handle_succeeds_only_where_others_closed_at_its_own_end(
    state: State, last_entry: int | None, is_closed: bool
) -> None:
    bench = Bench()
    bench.append()
    bench.ok(0, 0, 1, 2)
    bench.append()
    bench.fails(1, 0, Status.FENCED)
    row = bench.writer.metadata
    length = None if last_entry is None else 1 + last_entry
    bench.cas(row=replace(row, state=state, last_entry=last_entry, length=length, version=2))
    assert bench.writer.state is WriterState.ENDED

    bench.do(CloseRequested())

    assert bool(bench.all(Closed)) is is_closed
    assert bool(bench.all(Failed)) is not is_closed


def test_what_is_pending_fails_where_others_close_a_ledger_that_drains() -> None:
    bench, update = changing()
    bench.do(CloseRequested())
    row = update.metadata
    closed = replace(
        bench.writer.metadata, state=State.CLOSED, last_entry=-1, length=0, version=row.version + 1
    )

    bench.cas(CasStatus.CONFLICT, closed)

    assert bench.one(Failed) == Failed("ledger-closed", 0)
    assert bench.one(Closed).metadata == closed


def test_a_close_waits_for_pending_appends_longer_than_for_a_slow_bookie() -> None:
    bench = Bench()
    bench.append()
    bench.ok(0, 0)

    bench.do(CloseRequested())

    bench.none(UpdateMetadata)
    assert StartTimer(Timer.HEDGE) not in bench.out


def test_a_close_whose_appends_lack_a_quorum_changes_the_ensemble_first() -> None:
    bench = Bench()
    bench.append()
    bench.do(CloseRequested())
    bench.fails(0, 1)

    bench.found(B4)

    assert bench.one(UpdateMetadata).metadata.last_fragment.bookies == (B1, B4, B3)


def test_a_writer_at_rest_starts_no_timer() -> None:
    bench = Bench()
    bench.append()
    bench.ok(0, 0, 1, 2)

    assert bench.do(TimerFired(Timer.ADD, 1)) == []
    assert bench.do(TimerFired(Timer.QUORUM, 0)) == []


def test_refusals_end_no_handle_in_which_nothing_waits() -> None:
    bench = Bench()
    bench.append()
    bench.append()
    bench.ok(0, 0, 1)
    bench.ok(1, 1, 2)
    bench.fails(0, 2, Status.READ_ONLY)
    bench.found()
    bench.fails(1, 0, Status.READ_ONLY)
    bench.found()

    bench.none(Failed)
    assert bench.writer.state is WriterState.OPEN


def test_an_answer_to_an_earlier_search_is_not_taken_for_that_to_the_next_one() -> None:
    bench = Bench()
    bench.append()
    bench.fails(0, 0)
    earlier = bench.one(FindBookies)
    bench.found()
    bench.do(TimerFired(Timer.RETRY))
    bench.one(FindBookies)

    assert bench.do(BookiesFound(earlier.attempt, (B4,))) == []


def test_a_bookie_that_was_replaced_may_be_chosen_again_after_a_while() -> None:
    bench, update = changing()
    bench.cas(row=applied(update))
    assert Timer.RETRY in bench.writer._slots.armed

    bench.do(TimerFired(Timer.RETRY))
    bench.fails(0, 1)

    assert bench.one(FindBookies).exclude == (B4, B3, B2)


def test_a_retry_asks_nothing_again_that_is_under_way() -> None:
    bench, _ = changing()

    bench.do(TimerFired(Timer.RETRY))

    bench.none(UpdateMetadata)


@pytest.mark.parametrize("status", [CasStatus.OK, CasStatus.CONFLICT, CasStatus.UNKNOWN])
def test_an_answer_without_a_row_settles_nothing(status: CasStatus) -> None:
    bench, update = changing()

    bench.cas(status)

    bench.none(Failed)
    bench.do(TimerFired(Timer.RETRY))
    assert bench.one(UpdateMetadata) == update


def test_a_refused_append_to_a_deleted_ledger_ends_the_handle() -> None:
    bench = Bench()
    bench.append()
    bench.fails(0, 1, Status.FENCED)

    bench.cas(CasStatus.MISSING)

    assert bench.one(Failed).code == "no-such-ledger"


def test_a_row_that_came_with_a_lost_race_does_not_stand_for_the_one_that_a_fence_asks_for() -> (
    None
):
    """Rule 9: it may have been read before the fence."""
    bench, _ = changing()
    bench.fails(0, 1, Status.FENCED)

    bench.cas(CasStatus.CONFLICT, replace(bench.writer.metadata, version=5))

    bench.one(ReadMetadata)


def test_a_row_is_being_closed_only_while_its_close_is_under_way() -> None:
    bench, update = changing()
    assert not bench.writer.is_closing_row
    bench.cas(row=applied(update))
    bench.ok(0, 0, 1, 2)

    bench.do(CloseRequested())

    assert bench.writer.is_closing_row
    bench.cas(row=applied(bench.one(UpdateMetadata)))
    assert not bench.writer.is_closing_row


def test_what_a_bookie_has_not_acknowledged_of_what_is_confirmed_is_missed() -> None:
    """Rule 8: others may end the ledger before the bookie answers."""
    bench = Bench()
    bench.append()
    bench.append()
    bench.ok(0, 0, 1)

    assert bench.writer.missed == (MissedRange(B3, 0, 0),)
    bench.ok(0, 2)
    assert not bench.writer.missed


def test_a_bookie_that_answers_while_it_is_replaced_is_sent_nothing_more() -> None:
    """Rule 7."""
    bench, _ = changing()
    bench.do(answer(bench.adds[0, 0]))

    assert [add.position for add in bench.append()] == [1, 2]


def test_a_second_failure_of_a_bookie_that_is_down_starts_no_second_search() -> None:
    bench = Bench()
    bench.append()
    bench.append()
    bench.fails(0, 2)
    bench.found()

    bench.fails(1, 2)

    bench.none(FindBookies)


def test_a_bookie_in_whose_place_another_was_chosen_does_not_come_back_too() -> None:
    bench = Bench()
    bench.append()
    bench.fails(0, 2)
    bench.append()

    bench.found(B4, B3)

    assert bench.one(UpdateMetadata).metadata.last_fragment.bookies == (B1, B2, B4)
    bench.none(SendAdd)


def test_a_new_member_that_is_sent_what_was_confirmed_meanwhile_does_not_miss_it() -> None:
    bench, update = changing()
    bench.ok(0, 1, 2)
    bench.cas(row=applied(update))
    bench.ok(0, 0)

    bench.do(CloseRequested())

    assert bench.one(UpdateMetadata).missed == ()


def test_a_change_that_outlived_the_handle_leaves_nothing_missed_of_what_was_not_confirmed() -> (
    None
):
    bench, update = changing()
    bench.do(TimerFired(Timer.QUORUM, 0))

    bench.cas(row=applied(update))

    assert bench.one(UpdateMetadata).missed == ()


def test_a_timer_that_nobody_started_means_nothing() -> None:
    for timer in Timer:
        bench = Bench()
        before = bench.writer.key()
        assert bench.do(TimerFired(timer, 5)) == []
        assert bench.writer.key() == before


def test_silence_after_the_end_asks_for_nothing() -> None:
    bench = Bench()
    bench.append()
    bench.ok(0, 0, 1)
    bench.do(CloseRequested())
    bench.do(TimerFired(Timer.HEDGE))
    bench.cas(row=applied(bench.one(UpdateMetadata)))
    assert bench.writer.state is WriterState.CLOSED
    is_degraded = bench.writer.is_degraded

    assert bench.do(TimerFired(Timer.ADD, 1)) == []
    assert bench.writer.is_degraded is is_degraded


def test_only_its_own_timer_has_a_change_asked_for_again() -> None:
    bench = Bench()
    bench.append()
    bench.do(TimerFired(Timer.QUORUM, 0))
    update = bench.one(UpdateMetadata)
    bench.cas(CasStatus.UNKNOWN)

    assert bench.do(TimerFired(Timer.ADD, 1)) == []
    assert bench.do(TimerFired(Timer.RETRY)) == [update]
