"""The writer: ids, confirmation, ensemble changes. Rules 6 to 10 and 21."""

from dataclasses import replace

import pytest

from quorumlog.protocol.messages import (
    AppendRequested,
    BookiesFound,
    CasStatus,
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
    Status,
    Timer,
    TimerFired,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import Fragment, LedgerMetadata, State
from quorumlog.protocol.writer import LedgerWriter, WriterState
from tests.protocol.hands import B1, B2, B3, B4, B5, CODEC, Hand, answer, applied, ledger


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


def changing(*, at: int = 0) -> tuple[Bench, UpdateMetadata]:
    """Entry 0 pending, position `at` failed, the change to B4 not settled."""
    bench = Bench()
    bench.append()
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
    bench = Bench()
    bench.append()

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
    bench = Bench()
    bench.append()
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
    bench = Bench()
    bench.append()
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
    bench = Bench()
    bench.append()
    bench.ok(0, 2)
    bench.append()
    bench.fails(1, 0)
    bench.fails(1, 2)
    bench.found(B4)
    bench.cas(row=applied(bench.one(UpdateMetadata)))

    assert bench.ok(0, 0) == []
    assert bench.ok(0, 1) == [Confirmed(0, 0)]


def test_a_slow_member_that_stays_answers_for_confirmed_entries_after_a_change() -> None:
    """What is confirmed is not sent again, so that nobody else ever answers for it: with that answer ignored, the
    writer would take the member for silent, seek another one and queue repairs of entries that the member has.
    """
    bench = Bench()
    bench.append()
    bench.ok(0, 0, 1)
    slow = bench.adds[0, 2]
    bench.append()
    bench.fails(1, 0)
    bench.found(B4)
    bench.cas(row=applied(bench.one(UpdateMetadata)))
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
    bench = Bench()
    bench.append()
    bench.ok(0, 0)
    bench.do(ReplaceRequested(B1))
    bench.found(B4)
    update = bench.one(UpdateMetadata)

    assert bench.ok(0, 1) == []  # Qa of the old ensemble, but not of both (rule 6)
    bench.cas(row=applied(update))
    assert bench.all(Confirmed) == []
    assert bench.ok(0, 0, 1) == [Confirmed(0, 0)]


def test_an_entry_with_ack_quorums_of_both_ensembles_is_confirmed_while_a_change_is_pending() -> (
    None
):
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
    bench.found(B4)
    bench.cas(row=applied(bench.one(UpdateMetadata)))

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
    bench = Bench()
    bench.append()
    bench.fails(0, 0)
    bench.found()

    assert bench.ok(0, 1, 2) == [Confirmed(0, 0)]


def test_one_failure_reported_by_many_runs_is_one_change() -> None:
    bench = Bench()
    bench.append()
    bench.append()
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


def test_a_change_that_is_not_settled_is_asked_again_as_the_same_attempt() -> None:
    bench, update = changing()

    bench.cas(CasStatus.UNKNOWN)
    bench.none(UpdateMetadata)
    bench.do(TimerFired(Timer.RETRY))

    assert bench.one(UpdateMetadata) == update


def test_a_bookie_that_came_back_takes_its_place_again_without_a_change() -> None:
    bench = Bench()
    bench.append()
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
    bench = Bench()
    bench.append()
    bench.do(TimerFired(Timer.ADD, 1))
    bench.found()
    bench.do(TimerFired(Timer.RETRY))
    bench.found(B1, B2, B3)
    bench.none(SendAdd)
    assert not bench.writer.is_degraded

    assert bench.ok(0, 0, 1) == [Confirmed(0, 0)]


def test_a_new_incarnation_takes_the_place_of_the_old_one() -> None:
    bench = Bench()
    bench.append()
    bench.fails(0, 1, Status.NOT_MINE)
    bench.found(B4, "b2@2")

    assert bench.one(UpdateMetadata).metadata.last_fragment.bookies == (B1, "b2@2", B3)


def test_a_bookie_refusing_as_an_older_incarnation_is_never_used_again_as_that() -> None:
    bench = Bench()
    bench.append()
    bench.fails(0, 1, Status.NOT_MINE)
    bench.found(B2)
    bench.do(TimerFired(Timer.RETRY))
    bench.found(B2)

    bench.none(SendAdd)
    assert bench.writer.is_degraded


def test_a_late_answer_of_a_bookie_that_was_only_slow_brings_it_back() -> None:
    bench = Bench()
    bench.append()
    bench.do(TimerFired(Timer.ADD, 1))
    bench.one(FindBookies)
    bench.found()
    assert bench.writer.is_degraded

    bench.ok(0, 2)

    assert bench.all(SendAdd) == []  # it had stored the only pending run
    assert len(bench.append()) == 1


# --- no spare --------------------------------------------------------------------------------


def test_without_a_spare_the_writer_goes_on_and_hands_over_what_was_missed() -> None:
    bench = Bench()
    bench.append()
    bench.fails(0, 2)
    bench.found()
    bench.ok(0, 0, 1)
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
    bench = Bench()
    bench.append()
    bench.fails(0, 2)
    bench.found()
    bench.ok(0, 0, 1)
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
    bench = Bench()
    bench.append()
    bench.fails(0, 2)
    bench.found()
    bench.ok(0, 0, 1)

    bench.do(CloseRequested())

    assert bench.one(UpdateMetadata).missed == (MissedRange(B3, 0, 0),)


@pytest.mark.parametrize("end", [State.IN_RECOVERY, State.CLOSED])
def test_what_was_missed_is_known_when_others_end_the_ledger(end: State) -> None:
    """Their recovery begins above the LAC, and does not look at this."""
    bench = Bench()
    bench.append()
    bench.append()
    bench.append()
    bench.fails(0, 2)
    bench.found()
    bench.ok(0, 0, 1)
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
    bench = Bench()
    bench.append()
    bench.fails(0, 2)
    bench.found()
    bench.ok(0, 0, 1)
    bench.do(CloseRequested())
    bench.cas(row=applied(bench.one(UpdateMetadata)))

    assert bench.writer.missed == ()


def test_what_a_silent_member_owes_is_missed_when_the_fence_is_met() -> None:
    """The third bookie was only slow: the fence keeps what it was sent out."""
    bench = Bench()
    bench.append()
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
    bench = Bench()
    bench.append()
    bench.fails(0, 0)
    bench.found(B4)
    bench.cas(row=applied(bench.one(UpdateMetadata)))
    bench.fails(0, 0)

    assert set(bench.one(FindBookies).exclude) == {B1, B2, B3, B4}
