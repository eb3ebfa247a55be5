"""The writer: ids, confirmation, ensemble changes. Rules 6 to 10 and 21."""

from dataclasses import replace

import pytest

from quorumlog.protocol.messages import (
    AppendRequested,
    BookiesFound,
    CasStatus,
    Closed,
    CloseRequested,
    Confirmed,
    Failed,
    FindBookies,
    MetadataAnswered,
    MissedRange,
    PlacedInLog,
    ReadMetadata,
    ReplaceRequested,
    SendAdd,
    StartTimer,
    Status,
    Timer,
    TimerFired,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import Fragment, LedgerMetadata, State
from quorumlog.protocol.writer import LedgerWriter, WriterState
from tests.unit.protocol.hands import B1, B2, B3, B4, B5, CODEC, Hand, answer, applied, ledger


class Bench(Hand):
    """A writer and the adds that it sent, by (first, position)."""

    def __init__(
        self, metadata: LedgerMetadata | None = None, *, delays_change: bool = False
    ) -> None:
        self.writer = LedgerWriter(metadata or ledger(), CODEC, delays_change=delays_change)
        super().__init__(self.writer)
        self.adds: dict[tuple[int, int], SendAdd] = {}

    def append(self, *payloads: bytes) -> list[SendAdd]:
        self.do(AppendRequested(payloads or (b"x",)))
        return self.all(SendAdd)

    def keep(self) -> None:
        self.adds.update({(add.run.first, add.position): add for add in self.all(SendAdd)})

    def ok(self, first: int, *positions: int) -> list[Confirmed]:
        confirmed = []
        for position in positions:
            self.do(answer(self.adds[first, position]))
            confirmed += self.all(Confirmed)
        return confirmed

    def fails(self, first: int, position: int, status: Status = Status.UNKNOWN) -> None:
        self.do(answer(self.adds[first, position], status))

    def found(self, *members: str) -> None:
        self.do(BookiesFound(self.attempt(), members))

    def attempt(self) -> int:
        return self.writer._attempt

    def cas(self, status: CasStatus = CasStatus.OK, row: LedgerMetadata | None = None) -> None:
        self.do(MetadataAnswered(self.attempt(), status, row))

    def change_to(self, *members: str) -> None:
        """Bookies are found, and the row that names them is written."""
        self.found(*members)
        self.cas(row=applied(self.one(UpdateMetadata)))


def appended(count: int = 1) -> Bench:
    """So many runs of one entry, which nobody has acknowledged."""
    bench = Bench()
    for _ in range(count):
        bench.append()
    return bench


def one_short(count: int = 1) -> Bench:
    """Runs are pending; entry 0 is confirmed without the third bookie, for which there is no other."""
    bench = appended(count)
    bench.fails(0, 2)
    bench.found()
    bench.ok(0, 0, 1)
    return bench


def changing(*, at: int = 0) -> tuple[Bench, UpdateMetadata]:
    """Entry 0 pending, position `at` failed, the change to B4 not settled."""
    bench = appended()
    bench.fails(0, at)
    bench.found(B4)
    return bench, bench.one(UpdateMetadata)


# --- appending and confirming ----------------------------------------------------------------


def test_an_append_goes_to_every_member_as_one_run() -> None:
    bench = Bench()

    sent = bench.append(b"a", b"bc")

    assert [(add.position, add.member) for add in sent] == [(0, B1), (1, B2), (2, B3)]
    assert {add.run.body for add in sent} == {sent[0].run.body}
    assert (sent[0].run.first, sent[0].run.last, sent[0].run.last_length) == (0, 1, 3)
    assert (bench.writer.last_add_pushed, bench.writer.length) == (1, 3)


def test_an_entry_is_confirmed_at_the_ack_quorum_and_not_before() -> None:
    bench = appended()

    assert bench.ok(0, 0) == []
    assert bench.ok(0, 0) == []  # the same bookie again is one bookie
    assert bench.ok(0, 1) == [Confirmed(0, 0)]
    assert bench.ok(0, 2) == []
    assert bench.writer.last_add_confirmed == 0


def test_confirmations_come_in_order_of_ids() -> None:
    bench = Bench()
    bench.append(b"a", b"b")
    bench.append(b"c")

    assert bench.ok(2, 0, 1, 2) == []
    assert bench.ok(0, 0, 2) == [Confirmed(0, 2)]


def test_the_lac_is_stamped_when_a_run_is_sent() -> None:
    bench = Bench()
    (first, *_) = bench.append()
    (second, *_) = bench.append()
    bench.ok(0, 0, 1)
    (third, *_) = bench.append()

    assert [add.run.last_add_confirmed for add in (first, second, third)] == [-1, -1, 0]


def test_acks_after_completion_are_recorded_and_free_the_bytes() -> None:
    bench = Bench()
    bench.append(b"x" * 100)

    bench.ok(0, 0, 1)
    assert bench.writer.pending_bytes > 100
    bench.ok(0, 2)

    assert bench.writer.pending_bytes == 0


def test_a_striped_run_gives_each_position_its_part() -> None:
    bench = Bench(ledger(4, 3, 2))

    sent = bench.append(*(b"%d" % n for n in range(6)))

    assert [list(add.run.ids) for add in sent] == [
        [0, 2, 3, 4],
        [0, 1, 3, 4, 5],
        [0, 1, 2, 4, 5],
        [1, 2, 3, 5],
    ]


def test_a_striped_entry_alone_goes_to_its_write_set_only() -> None:
    bench = Bench(ledger(4, 2, 2))
    bench.append()
    sent = bench.append()

    assert [add.position for add in sent] == [1, 2]
    assert bench.ok(1, 1, 2) == []
    assert bench.ok(0, 0, 1) == [Confirmed(0, 1)]


def test_a_striped_run_is_confirmed_only_when_every_entry_has_its_ack_quorum() -> None:
    bench = Bench(ledger(4, 2, 2))
    sent = bench.append(b"0", b"1", b"2", b"3")

    got = []
    for add in sent:
        bench.do(answer(add))
        got.append(bool(bench.all(Confirmed)))

    assert got == [False, False, False, True]


# --- ensemble change -------------------------------------------------------------------------


def test_a_failed_bookie_is_replaced_from_the_first_unconfirmed_entry_on() -> None:
    bench = appended()
    bench.ok(0, 0, 1)
    bench.append()

    bench.fails(1, 0)
    assert bench.one(FindBookies).exclude == (B2, B3, B1)
    bench.found(B4)

    update = bench.one(UpdateMetadata)
    assert update.metadata.fragments == (Fragment(0, (B1, B2, B3)), Fragment(1, (B4, B2, B3)))


def test_a_bookie_that_is_to_be_replaced_does_not_stand_in_its_next_incarnations_way() -> None:
    bench = Bench()
    bench.do(ReplaceRequested(B1))

    found = bench.one(FindBookies)
    assert found.ensemble == (B2, B3)
    assert found.exclude == (B1, B2, B3)
    bench.found("b1@2")

    update = bench.one(UpdateMetadata)
    assert update.metadata.fragments == (Fragment(0, ("b1@2", B2, B3)),)


def test_a_new_bookie_gets_nothing_before_the_cas_that_names_it() -> None:
    bench, update = changing()
    assert bench.all(SendAdd) == []
    assert [add.member for add in bench.append()] == [B2, B3]

    bench.cas(row=applied(update))

    new = [(add.member, add.run.first) for add in bench.all(SendAdd) if add.member == B4]
    assert new == [(B4, 0), (B4, 1)]


def test_what_is_not_confirmed_is_sent_again_with_the_changed_row() -> None:
    """Rule 18b: an ack from before the change came without a copy of the row that is changed now. With that row
    lost, and the new member silent, an entry on {b2 before, b4 after} would be on one member that anybody knows.
    """
    bench = appended()
    bench.ok(0, 1)
    bench.do(ReplaceRequested(B1))
    bench.found(B4)
    row = applied(bench.one(UpdateMetadata))
    before = bench.adds[0, 1]

    bench.cas(row=row)

    assert {(add.member, add.row) for add in bench.all(SendAdd)} == {
        (B4, row),
        (B2, row),
        (B3, row),
    }
    bench.do(answer(before))
    assert bench.ok(0, 0) == []
    assert bench.ok(0, 1) == [Confirmed(0, 0)]


def test_an_ack_from_before_a_change_of_a_member_that_is_down_does_not_count() -> None:
    bench = appended()
    bench.ok(0, 2)
    bench.append()
    bench.fails(1, 0)
    bench.fails(1, 2)
    bench.change_to(B4)

    assert bench.ok(0, 0) == []
    assert bench.ok(0, 1) == [Confirmed(0, 0)]


def test_a_slow_member_that_stays_answers_for_confirmed_entries_after_a_change() -> None:
    """What is confirmed is not sent again, so that nobody else ever answers for it: with that answer ignored, the
    writer would take the member for silent, seek another one and queue repairs of entries that the member has.
    """
    bench = appended()
    bench.ok(0, 0, 1)
    slow = bench.adds[0, 2]
    bench.append()
    bench.fails(1, 0)
    bench.change_to(B4)
    bench.ok(1, 0, 1, 2)

    bench.do(answer(slow))
    bench.do(TimerFired(Timer.ADD, 2))

    assert bench.writer.pending_bytes == 0
    assert not bench.writer.is_degraded
    assert bench.writer.missed == ()


def test_rows_that_ride_on_adds_tell_the_place_in_the_log() -> None:
    bench = Bench()
    bench.do(PlacedInLog(7))

    assert [add.row and add.row.first_offset for add in bench.append()] == [7, 7, 7]


def test_a_row_from_before_the_log_placed_its_ledger_does_not_unplace_it() -> None:
    bench = Bench()
    bench.do(ReplaceRequested(B1))
    bench.found(B4)
    changed = applied(bench.one(UpdateMetadata))
    bench.do(PlacedInLog(7))

    bench.cas(row=changed)

    assert bench.writer.metadata == replace(changed, first_offset=7)
    assert {add.row for add in bench.append()} == {bench.writer.metadata}


def test_acks_of_a_replaced_bookie_do_not_count_while_a_change_is_pending() -> None:
    bench = appended()
    bench.ok(0, 0)
    bench.do(ReplaceRequested(B1))
    bench.found(B4)
    update = bench.one(UpdateMetadata)

    assert bench.ok(0, 1) == []  # Qa of the old ensemble, but not of both (rule 6)
    bench.cas(row=applied(update))
    assert bench.all(Confirmed) == []
    assert bench.ok(0, 0, 1) == [Confirmed(0, 0)]


def test_an_entry_with_both_ensembles_quorums_is_confirmed_during_a_change() -> None:
    bench, update = changing()

    assert bench.ok(0, 1, 2) == [Confirmed(0, 0)]
    bench.cas(row=applied(update))

    # The new fragment begins at 0, so the new member must hold entry 0 as well. Who stays is asked for nothing:
    # the members of both ensembles that confirmed it keep the row of before.
    assert [(add.member, add.run.first) for add in bench.all(SendAdd)] == [(B4, 0)]


def test_a_late_answer_of_a_replaced_bookie_is_ignored() -> None:
    bench = Bench()
    old = bench.append()[0]
    bench.fails(0, 0)
    bench.change_to(B4)

    bench.ok(0, 1)
    bench.do(answer(old))
    bench.none(Confirmed)
    bench.do(replace(answer(old), member=B4))
    bench.none(Confirmed)
    bench.do(answer(old, Status.UNKNOWN))
    bench.none(FindBookies)


def test_pending_entries_are_all_unacknowledged_before_one_is_confirmed() -> None:
    """BK#3005: with E > Qw an unaffected head must not release entries on a replaced bookie's acks."""
    bench = Bench(ledger(3, 2, 2))
    bench.append()  # entry 0: positions 0, 1
    bench.append()  # entry 1: positions 1, 2
    bench.append()  # entry 2: positions 2, 0
    bench.ok(2, 2, 0)
    bench.ok(1, 1, 2)
    bench.do(ReplaceRequested(B3))  # position 2
    bench.found(B4)
    update = bench.one(UpdateMetadata)
    assert bench.ok(0, 0, 1) == [Confirmed(0, 0)]

    bench.cas(row=applied(update))

    bench.none(Confirmed)
    assert bench.ok(1, 1, 2) == [Confirmed(1, 1)]
    assert bench.ok(2, 2, 0) == [Confirmed(2, 2)]


def test_an_entry_outside_the_replaced_write_set_is_still_offered_for_confirmation() -> None:
    """BK#1857: nothing hangs because its write set was not touched."""
    bench = Bench(ledger(4, 2, 2))
    bench.append()
    bench.append()
    bench.append()
    bench.fails(1, 2)
    bench.found(B5)
    bench.ok(0, 0)
    bench.do(answer(bench.adds[0, 1]))
    assert bench.all(Confirmed) == [Confirmed(0, 0)]


def test_a_round_that_changes_nothing_still_evaluates_again() -> None:
    """BK#4459: no spare, and the entry is confirmed by those that are left."""
    bench = appended()
    bench.fails(0, 0)
    bench.found()

    assert bench.ok(0, 1, 2) == [Confirmed(0, 0)]


def test_one_failure_reported_by_many_runs_is_one_change() -> None:
    bench = appended(2)
    bench.fails(0, 0)
    assert len(bench.all(FindBookies)) == 1
    bench.fails(1, 0)
    bench.none(FindBookies, UpdateMetadata)


def test_a_second_failure_during_a_change_gets_its_own_round() -> None:
    bench, update = changing()
    bench.fails(0, 1)
    bench.none(FindBookies, UpdateMetadata)

    bench.cas(row=applied(update))

    assert bench.one(FindBookies).exclude == (B4, B3, B1, B2)


def test_a_change_whose_fragment_starts_where_the_last_one_does_replaces_it() -> None:
    bench, update = changing()
    bench.cas(row=applied(update))
    bench.fails(0, 1)
    bench.found(B5)

    assert bench.one(UpdateMetadata).metadata.fragments == (Fragment(0, (B4, B5, B3)),)


def test_a_change_that_lost_to_a_repair_is_made_again_on_the_new_row() -> None:
    bench, _ = changing()

    bench.cas(CasStatus.CONFLICT, ledger(version=5))
    bench.one(FindBookies)
    bench.found(B4)

    assert bench.one(UpdateMetadata).metadata.version == 5


def test_a_bookie_that_came_back_takes_its_place_again_without_a_change() -> None:
    bench = appended()
    bench.fails(0, 0)
    bench.found()
    bench.do(TimerFired(Timer.RETRY))
    assert bench.one(FindBookies).exclude == (B2, B3)
    bench.found(B1)

    bench.none(UpdateMetadata)
    assert [(add.member, add.run.first) for add in bench.all(SendAdd)] == [(B1, 0)]
    assert not bench.writer.is_degraded


def test_a_request_that_is_still_under_way_is_not_sent_twice_and_its_answer_counts() -> None:
    """A bookie slower than every timer still gets its entries confirmed, without a flood."""
    bench = appended()
    bench.do(TimerFired(Timer.ADD, 1))
    bench.found()
    bench.do(TimerFired(Timer.RETRY))
    bench.found(B1, B2, B3)
    bench.none(SendAdd)
    assert not bench.writer.is_degraded

    assert bench.ok(0, 0, 1) == [Confirmed(0, 0)]


def test_a_new_incarnation_takes_the_place_of_the_old_one() -> None:
    bench = appended()
    bench.fails(0, 1, Status.NOT_MINE)
    bench.found(B4, "b2@2")

    assert bench.one(UpdateMetadata).metadata.last_fragment.bookies == (B1, "b2@2", B3)


def test_a_bookie_refusing_as_an_older_incarnation_is_never_used_again_as_that() -> None:
    bench = appended()
    bench.fails(0, 1, Status.NOT_MINE)
    bench.found(B2)
    bench.do(TimerFired(Timer.RETRY))
    bench.found(B2)

    bench.none(SendAdd)
    assert bench.writer.is_degraded


def test_a_late_answer_of_a_bookie_that_was_only_slow_brings_it_back() -> None:
    bench = appended()
    bench.do(TimerFired(Timer.ADD, 1))
    bench.one(FindBookies)
    bench.found()
    assert bench.writer.is_degraded

    bench.ok(0, 2)

    assert bench.all(SendAdd) == []  # it had stored the only pending run
    assert len(bench.append()) == 1


# --- no spare --------------------------------------------------------------------------------


def test_without_a_spare_the_writer_goes_on_and_hands_over_what_was_missed() -> None:
    bench = one_short()
    bench.append(b"a", b"b")
    bench.ok(1, 0, 1)
    assert bench.writer.is_degraded
    assert bench.writer.pending_bytes == 0

    bench.do(TimerFired(Timer.RETRY))
    bench.found(B4)

    update = bench.one(UpdateMetadata)
    assert update.missed == (MissedRange(B3, 0, 2),)
    assert update.metadata.last_fragment == Fragment(3, (B1, B2, B4))


def test_what_was_missed_is_handed_over_once() -> None:
    bench = one_short()
    bench.do(TimerFired(Timer.RETRY))
    bench.found(B4)
    bench.cas(CasStatus.CONFLICT, ledger(version=4))
    bench.found(B4)
    update = bench.one(UpdateMetadata)
    assert update.missed == (MissedRange(B3, 0, 0),)
    bench.cas(row=applied(update))

    bench.do(CloseRequested())

    assert bench.one(UpdateMetadata).missed == ()


def test_a_close_hands_over_what_was_missed() -> None:
    bench = one_short()

    bench.do(CloseRequested())

    assert bench.one(UpdateMetadata).missed == (MissedRange(B3, 0, 0),)


@pytest.mark.parametrize("end", [State.IN_RECOVERY, State.CLOSED])
def test_what_was_missed_is_known_when_others_end_the_ledger(end: State) -> None:
    """Their recovery begins above the LAC, and does not look at this."""
    bench = one_short(3)
    bench.ok(1, 0, 1)
    assert bench.writer.missed == (MissedRange(B3, 0, 1),)

    bench.do(CloseRequested())
    bench.ok(2, 0, 1)
    update = bench.one(UpdateMetadata)
    assert bench.writer.missed == update.missed == (MissedRange(B3, 0, 2),)
    is_closed = end is State.CLOSED
    others = ledger(
        fragments=((0, (B1, B2, B4)),),  # whom that recovery has written to
        state=end,
        last_entry=3 if is_closed else None,
        length=4 if is_closed else None,
        version=2,
    )
    bench.cas(CasStatus.CONFLICT, others)

    assert bench.writer.state is WriterState.ENDED
    assert bench.writer.missed == (MissedRange(B3, 0, 2),)


def test_what_was_missed_is_told_once() -> None:
    bench = one_short()
    bench.do(CloseRequested())
    bench.cas(row=applied(bench.one(UpdateMetadata)))

    assert bench.writer.missed == ()


def test_what_a_silent_member_owes_is_missed_when_the_fence_is_met() -> None:
    """The third bookie was only slow: the fence keeps what it was sent out."""
    bench = appended()
    bench.ok(0, 0, 1)
    bench.append()
    bench.fails(1, 0, Status.FENCED)
    bench.one(ReadMetadata)

    bench.cas(row=ledger(state=State.IN_RECOVERY, version=2))

    assert bench.one(Failed).code == "ledger-fenced"
    assert bench.writer.missed == (MissedRange(B3, 0, 0),)


def test_a_delayed_change_waits_until_an_ack_quorum_is_out_of_reach() -> None:
    """Reference 1.2: delayEnsembleChange."""
    bench = Bench(delays_change=True)
    bench.append(b"a")
    bench.ok(0, 0, 1)
    bench.fails(0, 2)
    bench.found(B4, B5)
    bench.none(UpdateMetadata)
    bench.append(b"b")
    bench.fails(1, 1)
    bench.do(TimerFired(Timer.RETRY))
    bench.found(B4, B5)
    changed = bench.one(UpdateMetadata).metadata.last_fragment
    assert changed == Fragment(1, (B1, B4, B5))


def test_a_delayed_change_is_made_at_once_for_who_refuses_or_is_to_leave() -> None:
    bench = Bench(delays_change=True)
    bench.append(b"a")
    bench.fails(0, 2, Status.READ_ONLY)
    bench.found(B4)
    bench.one(UpdateMetadata)

    bench = Bench(delays_change=True)
    bench.do(ReplaceRequested(B1))
    bench.found(B4)
    bench.one(UpdateMetadata)


def test_a_bookie_to_be_replaced_serves_until_a_spare_is_there() -> None:
    bench = Bench()
    bench.do(ReplaceRequested(B1))
    bench.found()
    assert not bench.writer.is_degraded
    assert len(bench.append()) == 3

    bench.do(TimerFired(Timer.RETRY))
    bench.found(B4)

    assert bench.one(UpdateMetadata).metadata.last_fragment.bookies == (B4, B2, B3)


def test_a_bookie_that_fails_again_and_again_is_asked_once_a_retry() -> None:
    """L6: no loop spins, whatever liveness says (I31)."""
    bench = appended()
    bench.fails(0, 0)
    bench.change_to(B4)
    bench.fails(0, 0)

    assert set(bench.one(FindBookies).exclude) == {B1, B2, B3, B4}


# --- guards that no other test would miss: `make mutate` found them ------------------------------


def silent(bench: Bench) -> bool:
    """Whether the writer looks for a bookie in the place of one that is silent."""
    return bool(bench.all(FindBookies))


@pytest.mark.parametrize("status", [Status.OK, Status.CONFLICT, Status.FENCED, Status.UNKNOWN])
def test_an_answer_after_the_end_changes_nothing(status: Status) -> None:
    bench = appended()
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
    bench = appended()
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
    bench = appended(2)
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
    bench = appended()
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
    bench = appended()
    bench.fails(0, 2)
    find = bench.one(FindBookies)
    bench.do(CloseRequested())
    bench.ok(0, 0, 1)
    assert bench.writer.is_drained

    bench.do(BookiesFound(find.attempt, (B4,)))

    assert bench.one(UpdateMetadata).metadata.state is State.CLOSED


def test_what_a_replaced_bookie_missed_is_handed_over_under_its_own_name() -> None:
    bench = appended()
    bench.ok(0, 0, 1)  # confirmed, and bookie 2 has not answered yet

    bench.do(ReplaceRequested(B3))
    bench.found(B4)

    assert bench.one(UpdateMetadata).missed == (MissedRange(B3, 0, 0),)


def test_a_new_member_lacks_what_was_confirmed_during_its_change() -> None:
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
    bench = appended(2)
    bench.ok(0, 0, 1)  # bookie 2 has not answered yet

    bench.do(TimerFired(Timer.QUORUM, 1))

    assert bench.one(UpdateMetadata).missed == (MissedRange(B3, 0, 0),)


def test_what_is_missed_for_long_is_one_range_and_not_one_for_each_append() -> None:
    bench = one_short()
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
    bench = appended()
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
    bench = appended()
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
    bench = appended()
    bench.ok(0, 0)

    bench.do(CloseRequested())

    bench.none(UpdateMetadata)
    assert StartTimer(Timer.HEDGE) not in bench.out


def test_a_close_whose_appends_lack_a_quorum_changes_the_ensemble_first() -> None:
    bench = appended()
    bench.do(CloseRequested())
    bench.fails(0, 1)

    bench.found(B4)

    assert bench.one(UpdateMetadata).metadata.last_fragment.bookies == (B1, B4, B3)


def test_a_writer_at_rest_starts_no_timer() -> None:
    bench = appended()
    bench.ok(0, 0, 1, 2)

    assert bench.do(TimerFired(Timer.ADD, 1)) == []
    assert bench.do(TimerFired(Timer.QUORUM, 0)) == []


def test_refusals_end_no_handle_in_which_nothing_waits() -> None:
    bench = appended(2)
    bench.ok(0, 0, 1)
    bench.ok(1, 1, 2)
    bench.fails(0, 2, Status.READ_ONLY)
    bench.found()
    bench.fails(1, 0, Status.READ_ONLY)
    bench.found()

    bench.none(Failed)
    assert bench.writer.state is WriterState.OPEN


def test_an_answer_to_an_earlier_search_is_not_taken_for_that_to_the_next_one() -> None:
    bench = appended()
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
def test_an_answer_without_a_row_repeats_the_attempt(status: CasStatus) -> None:
    bench, update = changing()

    bench.cas(status)

    bench.none(Failed, UpdateMetadata)
    bench.do(TimerFired(Timer.RETRY))
    assert bench.one(UpdateMetadata) == update


def test_a_refused_append_to_a_deleted_ledger_ends_the_handle() -> None:
    bench = appended()
    bench.fails(0, 1, Status.FENCED)

    bench.cas(CasStatus.MISSING)

    assert bench.one(Failed).code == "no-such-ledger"


def test_a_row_of_a_lost_race_does_not_stand_for_what_a_fence_asks_for() -> None:
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
    bench = appended(2)
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
    bench = appended(2)
    bench.fails(0, 2)
    bench.found()

    bench.fails(1, 2)

    bench.none(FindBookies)


def test_a_bookie_in_whose_place_another_was_chosen_does_not_come_back_too() -> None:
    bench = appended()
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


def test_a_change_that_outlived_its_handle_misses_nothing_unconfirmed() -> None:
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
    bench = appended()
    bench.ok(0, 0, 1)
    bench.do(CloseRequested())
    bench.do(TimerFired(Timer.HEDGE))
    bench.cas(row=applied(bench.one(UpdateMetadata)))
    assert bench.writer.state is WriterState.CLOSED
    is_degraded = bench.writer.is_degraded

    assert bench.do(TimerFired(Timer.ADD, 1)) == []
    assert bench.writer.is_degraded is is_degraded


def test_only_its_own_timer_has_a_change_asked_for_again() -> None:
    bench = appended()
    bench.do(TimerFired(Timer.QUORUM, 0))
    update = bench.one(UpdateMetadata)
    bench.cas(CasStatus.UNKNOWN)

    assert bench.do(TimerFired(Timer.ADD, 1)) == []
    assert bench.do(TimerFired(Timer.RETRY)) == [update]
