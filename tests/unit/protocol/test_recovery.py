"""Recovery: mark, fence, read forward, write back, close. Rules 10 and 12 to 14."""

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
from quorumlog.protocol.metadata import Fragment, LedgerMetadata, State
from quorumlog.protocol.record import Run
from quorumlog.protocol.recovery import _AHEAD_RUNS, Phase, Recovery
from tests.unit.protocol.hands import (
    B1,
    B2,
    B3,
    B4,
    B5,
    Hand,
    answer,
    applied,
    ledger,
    reply,
    run_of,
)


class Bench(Hand):
    """A recovery, what it reads and what it writes, by position."""

    def __init__(self, row: LedgerMetadata | None = None, **options: object) -> None:
        self.recovery = Recovery(**options)  # type: ignore[arg-type]
        super().__init__(self.recovery)
        self.reads: dict[int, SendRead] = {}
        self.adds: dict[int, SendAdd] = {}
        self.update: UpdateMetadata | None = None
        self.row = row or ledger()

    def keep(self) -> None:
        self.reads.update({read.position: read for read in self.all(SendRead)})
        self.adds.update({add.position: add for add in self.all(SendAdd)})
        for update in self.all(UpdateMetadata):
            self.update = update

    def start(self) -> None:
        self.do(RecoverRequested(self.row))

    def cas(self, status: CasStatus = CasStatus.OK, row: LedgerMetadata | None = None) -> None:
        assert self.update is not None
        given = applied(self.update) if status is CasStatus.OK and row is None else row
        self.do(MetadataAnswered(self.update.attempt, status, given))

    def fenced(self, *lacs: int | None) -> None:
        members = self.recovery.metadata.last_fragment.bookies
        for position, lac in enumerate(lacs):
            if lac is not None:
                self.do(FenceAnswered(position, members[position], Status.OK, lac))

    def reads_at(
        self, position: int, run: Run | None = None, *, absent_from: int | None = None
    ) -> None:
        read = self.reads[position]
        absent = () if absent_from is None else ((absent_from, read.last),)
        self.do(ReadAnswered(position, read.member, read.first, read.last, Status.OK, run, absent))

    def read_fails(self, position: int, status: Status = Status.UNKNOWN) -> None:
        self.do(reply(self.reads[position], status=status))

    def wrote(self, *at: int, status: Status = Status.OK) -> None:
        for position in at:
            self.do(answer(self.adds[position], status))


def reading(row: LedgerMetadata | None = None, *lacs: int | None, **options: object) -> Bench:
    """Marked, fenced with these LACs, and the first reads are out."""
    bench = Bench(row, **options)
    bench.start()
    if bench.row.state is State.OPEN:
        bench.cas()
    bench.fenced(*(lacs or (-1, -1, -1)))
    assert bench.recovery.phase is Phase.READING
    return bench


# --- marking and fencing ---------------------------------------------------------------------


def test_the_row_is_marked_before_anything_is_fenced() -> None:
    bench = Bench()
    bench.start()

    bench.none(SendFence)
    assert bench.one(UpdateMetadata).metadata.state is State.IN_RECOVERY
    bench.cas()
    assert [fence.member for fence in bench.all(SendFence)] == [B1, B2, B3]


def test_a_row_in_recovery_is_fenced_at_once() -> None:
    bench = Bench(ledger(state=State.IN_RECOVERY))
    bench.start()
    bench.none(UpdateMetadata)
    assert len(bench.all(SendFence)) == 3


def test_a_closed_ledger_needs_nothing() -> None:
    row = ledger(state=State.CLOSED, last_entry=3, length=9)
    bench = Bench(row)
    bench.start()
    assert bench.out == [Closed(row)]


def test_a_ledger_that_is_closed_while_it_is_marked_is_adopted() -> None:
    bench = Bench()
    bench.start()
    row = ledger(state=State.CLOSED, last_entry=3, length=9, version=2)
    bench.cas(CasStatus.CONFLICT, row)
    assert bench.out == [Closed(row)]


def test_marking_is_made_again_on_a_row_that_moved() -> None:
    bench = Bench()
    bench.start()
    bench.cas(CasStatus.CONFLICT, ledger(version=4))
    assert bench.one(UpdateMetadata).metadata.version == 4


def test_only_the_last_fragment_is_fenced() -> None:
    row = ledger(fragments=((0, (B1, B2, B3)), (12, (B4, B2, B3))), state=State.IN_RECOVERY)
    bench = Bench(row)
    bench.start()
    assert [fence.member for fence in bench.all(SendFence)] == [B4, B2, B3]


def test_reading_begins_at_coverage_and_not_before() -> None:
    bench = Bench(ledger(state=State.IN_RECOVERY))
    bench.start()
    bench.fenced(4)
    bench.none(SendRead)
    bench.fenced(None, 5)

    assert [read.first for read in bench.all(SendRead)] == [6, 6, 6]


@pytest.mark.parametrize(
    "status", [Status.UNKNOWN, Status.NOT_MINE, Status.WRONG_KEY, Status.NO_ENTRY]
)
def test_answers_that_are_no_durable_fence_do_not_count_for_coverage(status: Status) -> None:
    """BK#2612: a "no such ledger" once ended the read with "empty"."""
    bench = Bench(ledger(state=State.IN_RECOVERY))
    bench.start()
    bench.do(FenceAnswered(0, B1, status, 8))
    bench.none(SendRead, Failed)
    bench.do(FenceAnswered(1, B2, status, 8))

    assert bench.one(Failed).code == "recovery-blocked"


def test_a_hung_bookie_blocks_neither_fencing_nor_reading_nor_closing() -> None:
    """L3, BK#1067."""
    bench = reading(None, -1, None, -1)
    bench.reads_at(0, run_of(b"a"), absent_from=1)
    bench.reads_at(2, absent_from=0)
    bench.wrote(0, 2)
    assert StartTimer(Timer.HEDGE) in bench.out
    bench.do(TimerFired(Timer.HEDGE))

    update = bench.one(UpdateMetadata)
    assert (update.metadata.state, update.metadata.last_entry) == (State.CLOSED, 0)
    assert update.missed == (MissedRange(B2, 0, 0),)


# --- reading forward -------------------------------------------------------------------------


def test_recovery_reads_fence_and_carry_the_key() -> None:
    bench = reading(replace(ledger(), ledger_key=b"k"))
    assert {(read.fence, read.ledger_key) for read in bench.reads.values()} == {(True, b"k")}


def test_the_highest_lac_is_where_reading_begins() -> None:
    bench = reading(None, 3, 9)
    assert bench.reads[0].first == 10


def test_reading_never_begins_below_the_last_fragment() -> None:
    """X2, BK#2615."""
    row = ledger(fragments=((0, (B1, B2, B3)), (12, (B4, B2, B3))), state=State.IN_RECOVERY)
    bench = reading(row, -1, -1)
    assert bench.reads[0].first == 12


def test_one_valid_copy_is_enough_for_an_entry_to_be_kept() -> None:
    bench = reading()
    bench.reads_at(0, run_of(b"a"), absent_from=1)
    assert [add.member for add in bench.all(SendAdd)] == [B1, B2, B3]


def test_an_entry_is_written_back_unchanged_to_its_whole_write_set() -> None:
    bench = reading()
    stored = run_of(b"a", b"b")
    bench.reads_at(1, stored, absent_from=2)

    assert {add.run.body for add in bench.all(SendAdd)} == {stored.body}
    assert {add.recovery for add in bench.all(SendAdd)} == {True}


def test_an_entry_is_absent_at_enough_explicit_negatives() -> None:
    bench = reading()
    bench.reads_at(0, absent_from=0)
    bench.none(UpdateMetadata)
    bench.reads_at(2, absent_from=0)
    assert bench.one(UpdateMetadata).metadata.last_entry == -1


def test_no_such_ledger_counts_as_a_negative_for_all_that_was_asked() -> None:
    bench = reading()
    bench.read_fails(0, Status.NO_ENTRY)
    bench.read_fails(1, Status.NO_ENTRY)
    assert bench.one(UpdateMetadata).metadata.last_entry == -1


def test_with_a_write_quorum_equal_to_the_ack_quorum_one_negative_decides() -> None:
    bench = reading(ledger(2, 2, 2), -1)
    bench.reads_at(1, absent_from=0)
    assert bench.one(UpdateMetadata).metadata.last_entry == -1


def test_unknown_is_never_absent() -> None:
    """BK#2908: what cannot be read is an error; the ledger stays IN_RECOVERY."""
    bench = reading()
    bench.reads_at(0, absent_from=0)
    bench.read_fails(1)
    bench.none(Failed)
    bench.read_fails(2, Status.NOT_MINE)

    failed = bench.one(Failed)
    assert (failed.code, failed.entry_id, failed.bookie) == ("recovery-blocked", 0, B2)
    assert failed.detail == "b1@1: absent, b2@1: unknown, b3@1: not-mine"


def test_a_damaged_copy_is_neither_present_nor_absent() -> None:
    good = run_of(b"aaaa")
    bad = Run(good.body[:-1] + b"X")
    bench = reading()
    bench.reads_at(0, bad)
    bench.none(SendAdd)
    bench.reads_at(1, absent_from=0)
    bench.none(UpdateMetadata)

    bench.reads_at(2, good, absent_from=1)

    assert {add.run.body for add in bench.all(SendAdd)} == {good.body}


def test_what_is_found_beyond_a_gap_does_not_count() -> None:
    bench = reading()
    bench.reads_at(0, run_of(b"c", first=1), absent_from=2)
    bench.none(SendAdd)
    bench.do(
        ReadAnswered(1, B2, 0, bench.reads[1].last, Status.OK, None, ((0, bench.reads[1].last),))
    )
    bench.none(UpdateMetadata)  # B1 did not say that it lacks entry 0
    bench.do(ReadAnswered(2, B3, 0, bench.reads[2].last, Status.OK, None, ((0, 5),)))
    assert bench.one(UpdateMetadata).metadata.last_entry == -1


def test_an_answer_cut_short_is_asked_on_from_where_it_ended() -> None:
    bench = reading()
    bench.reads_at(0, run_of(b"a", b"b"))

    assert [(read.member, read.first) for read in bench.all(SendRead)] == [(B1, 2)]
    bench.reads_at(0, run_of(b"c", first=2, before=2), absent_from=3)
    assert [add.run.first for add in bench.all(SendAdd)] == [2, 2, 2]


def test_a_bookie_that_skips_an_entry_is_unknown_there_and_asked_for_the_rest() -> None:
    bench = reading()
    rest = run_of(b"b", first=1, before=1)
    bench.reads_at(0, rest)
    assert [(read.position, read.first) for read in bench.all(SendRead)] == [(0, 2)]
    bench.reads_at(1, run_of(b"a"))

    # Entry 0 from one bookie, entry 1 from the other.
    assert {(add.run.first, add.run.last) for add in bench.all(SendAdd)} == {(0, 1)}


def test_long_tails_are_read_in_windows() -> None:
    bench = reading(None, -1, -1, read_entries=2)
    assert (bench.reads[0].first, bench.reads[0].last) == (0, 1)

    bench.reads_at(0, run_of(b"a", b"b"))

    assert {(read.first, read.last) for read in bench.all(SendRead)} == {(2, 3)}
    assert len(bench.all(SendAdd)) == 3


def test_a_striped_ledger_asks_each_position_for_its_own_entries() -> None:
    bench = reading(ledger(3, 2, 2), -1, -1, read_entries=1)
    assert sorted(read.position for read in bench.all(SendRead)) == [0, 1]
    bench.reads_at(0, run_of(b"a"))
    assert sorted(add.position for add in bench.all(SendAdd)) == [0, 1]
    assert sorted(read.position for read in bench.all(SendRead)) == [1, 2]


# --- writing back ----------------------------------------------------------------------------


def test_the_ledger_is_closed_only_when_everything_read_is_on_an_ack_quorum() -> None:
    """X10."""
    bench = reading()
    bench.reads_at(0, run_of(b"abc"), absent_from=1)
    bench.reads_at(1, absent_from=0)
    bench.wrote(0)
    bench.none(UpdateMetadata)
    bench.wrote(1, 2)

    update = bench.one(UpdateMetadata)
    assert (update.metadata.last_entry, update.metadata.length) == (0, 3)
    assert update.missed == ()
    bench.cas()
    assert bench.one(Closed).metadata.state is State.CLOSED
    assert bench.recovery.is_done


def test_what_reached_only_an_ack_quorum_is_queued_for_repair() -> None:
    bench = reading()
    bench.reads_at(0, run_of(b"abc"), absent_from=1)
    bench.reads_at(1, absent_from=0)
    bench.wrote(2, status=Status.UNKNOWN)
    bench.none(FindBookies)
    bench.wrote(0, 1)
    assert bench.one(UpdateMetadata).missed == (MissedRange(B3, 0, 0),)


def below_quorum() -> Bench:
    """Entry 0 is confirmed, entry 1 can no longer reach Qa on the ensemble."""
    bench = reading(None, -1, -1, read_entries=1)
    bench.reads_at(0, run_of(b"a"))
    bench.wrote(0, 1, 2)
    bench.reads_at(0, run_of(b"b", first=1, before=1))
    bench.wrote(1, status=Status.UNKNOWN)
    bench.wrote(2, status=Status.READ_ONLY)
    return bench


def test_a_replacement_found_during_recovery_stays_in_memory_until_the_close() -> None:
    """X5, and rule 12: only what is confirmed by now may start a fragment."""
    bench = below_quorum()
    assert bench.one(FindBookies).exclude == (B1, B2, B3)
    bench.do(BookiesFound(bench.recovery._attempt, (B4,)))
    bench.none(UpdateMetadata)
    assert [(add.member, add.run.first) for add in bench.all(SendAdd)] == [(B4, 1)]

    bench.wrote(0, 1)
    for position in (0, 2):
        bench.reads_at(position, absent_from=2)

    update = bench.one(UpdateMetadata)
    assert update.metadata.fragments == (Fragment(0, (B1, B2, B3)), Fragment(1, (B1, B4, B3)))
    assert update.missed == (MissedRange(B3, 1, 1),)


def test_a_recovery_that_begins_anew_forgets_the_members_that_it_chose() -> None:
    """The database went back: the close meets a row of another history, in which the last fragment begins later."""
    bench = below_quorum()
    bench.do(BookiesFound(bench.recovery._attempt, (B4,)))
    bench.wrote(0, 1)
    for position in (0, 2):
        bench.reads_at(position, absent_from=2)
    other = ledger(fragments=((0, (B1, B2, B3)), (9, (B5, B2, B3))), version=8)

    bench.cas(CasStatus.CONFLICT, other)

    assert bench.one(UpdateMetadata).metadata == other.in_recovery()


def test_reads_go_to_the_ensemble_found_at_the_start() -> None:
    """X6."""
    bench = below_quorum()
    bench.do(BookiesFound(bench.recovery._attempt, (B4,)))
    bench.wrote(0, 1)
    assert {read.member for read in bench.reads.values()} == {B1, B2, B3}


def test_no_bookie_to_write_back_to_fails_and_leaves_the_ledger_in_recovery() -> None:
    bench = below_quorum()
    bench.do(BookiesFound(bench.recovery._attempt, ()))
    failed = bench.one(Failed)
    assert (failed.code, failed.bookie, failed.entry_id) == ("recovery-blocked", B2, 1)
    assert bench.recovery.metadata.state is State.IN_RECOVERY


def test_silent_bookies_are_replaced_after_their_time() -> None:
    bench = reading()
    bench.reads_at(0, run_of(b"a"), absent_from=1)
    bench.wrote(0)
    bench.do(TimerFired(Timer.ADD, 1))
    assert bench.one(FindBookies).exclude == (B1, B2, B3)


def test_a_bookie_that_refused_a_write_is_used_again_once_it_takes_another() -> None:
    """Its disk was full. A writer leaves who refused alone (rule 15); a recovery's adds pass limbo."""
    bench = reading(read_entries=1)
    bench.reads_at(0, run_of(b"a"))
    first = bench.adds[1]
    bench.reads_at(0, run_of(b"b", first=1, lac=0, before=1))
    second = bench.adds[1]
    assert (first.run.first, second.run.first) == (0, 1)

    bench.do(answer(first, Status.READ_ONLY))
    bench.none(SendAdd)
    bench.do(answer(second))

    assert bench.one(SendAdd) == first


def test_a_late_write_of_a_replaced_bookie_does_not_count() -> None:
    bench = below_quorum()
    late = bench.adds[1]
    bench.do(BookiesFound(bench.recovery._attempt, (B4,)))
    bench.wrote(0)
    bench.do(answer(late))
    assert bench.recovery._window.last_confirmed == 0


def test_other_bytes_under_an_id_block_the_recovery() -> None:
    bench = reading()
    bench.reads_at(0, run_of(b"a"), absent_from=1)
    bench.wrote(1, status=Status.CONFLICT)
    failed = bench.one(Failed)
    assert (failed.code, failed.bookie, failed.entry_id) == ("recovery-blocked", B2, 0)


# --- closing ---------------------------------------------------------------------------------


def ended(row: LedgerMetadata | None = None, *lacs: int | None) -> Bench:
    """Nothing was found beyond the LAC."""
    bench = reading(row, *lacs)
    for position in (0, 1):
        bench.reads_at(position, absent_from=bench.reads[position].first)
    return bench


def test_the_length_of_a_ledger_with_nothing_beyond_its_lac_is_read_from_its_last_entry() -> None:
    bench = ended(None, 4, 4)
    assert {(read.first, read.last, read.fence) for read in bench.all(SendRead)} == {(4, 4, False)}
    bench.reads_at(1, run_of(b"xy", first=4, before=40))
    update = bench.one(UpdateMetadata)
    assert (update.metadata.last_entry, update.metadata.length) == (4, 42)


def test_an_empty_second_fragment_closes_at_the_end_of_the_first_with_the_right_length() -> None:
    """Reference 2.4.3: the length was once taken from a reply that knew of nothing."""
    row = ledger(fragments=((0, (B1, B2, B3)), (12, (B4, B2, B3))), state=State.IN_RECOVERY)
    bench = ended(row, -1, -1)
    assert {(read.member, read.first) for read in bench.all(SendRead)} == {
        (B1, 11),
        (B2, 11),
        (B3, 11),
    }
    bench.reads_at(0, run_of(b"xy", first=11, before=40))

    closed = bench.one(UpdateMetadata).metadata
    assert (closed.last_entry, closed.length) == (11, 42)
    assert [fragment.first_entry for fragment in closed.fragments] == [0, 12]


def test_a_last_entry_that_cannot_be_read_blocks_the_close() -> None:
    bench = ended(None, 4, 4)
    for position in (0, 1, 2):
        bench.read_fails(position)
    failed = bench.one(Failed)
    assert (failed.code, failed.entry_id) == ("recovery-blocked", 4)


def test_a_close_by_another_recovery_is_adopted() -> None:
    bench = ended()
    row = ledger(state=State.CLOSED, last_entry=0, length=1, version=3)
    bench.cas(CasStatus.CONFLICT, row)
    assert bench.out == [Closed(row)]


def test_a_version_that_moved_without_a_new_fragment_is_retried() -> None:
    bench = ended()
    bench.cas(CasStatus.CONFLICT, ledger(state=State.IN_RECOVERY, version=8))
    bench.none(SendFence)
    assert bench.one(UpdateMetadata).metadata.version == 8


def test_a_fragment_appended_meanwhile_starts_the_recovery_again() -> None:
    bench = ended()
    moved = ledger(
        fragments=((0, (B1, B2, B3)), (5, (B4, B2, B3))), state=State.IN_RECOVERY, version=8
    )
    bench.cas(CasStatus.CONFLICT, moved)
    assert [fence.member for fence in bench.all(SendFence)] == [B4, B2, B3]


def test_a_store_that_is_away_is_asked_the_same_again() -> None:
    bench = ended()
    update = bench.update
    bench.cas(CasStatus.UNKNOWN)
    assert StartTimer(Timer.RETRY) in bench.out
    bench.do(TimerFired(Timer.RETRY))
    assert bench.one(UpdateMetadata) == update


def test_a_deleted_ledger_ends_the_recovery() -> None:
    bench = ended()
    bench.cas(CasStatus.MISSING)
    assert bench.one(Failed).code == "no-such-ledger"


# --- members declared lost -------------------------------------------------------------------


def test_members_declared_lost_are_recorded_count_as_negative_and_the_ledger_says_so() -> None:
    """Rule 14."""
    bench = Bench(declare_lost=(B2, B3))
    bench.start()
    assert bench.one(UpdateMetadata).metadata.declared_lost == (B2, B3)
    bench.cas()
    assert [fence.member for fence in bench.all(SendFence)] == [B1]
    bench.fenced(-1)
    assert [read.member for read in bench.all(SendRead)] == [B1]
    bench.reads_at(0, absent_from=0)

    closed = bench.one(UpdateMetadata).metadata
    assert (closed.last_entry, closed.may_lack_entries) == (-1, True)


def test_members_are_declared_lost_of_the_row_as_a_repair_left_it() -> None:
    """The repair's place in an earlier fragment stays; whoever left the last one decides nothing there."""
    bench = Bench(ledger(fragments=((0, (B1, B2, B3)), (5, (B1, B2, B3)))), declare_lost=(B3,))
    bench.start()
    repaired = ledger(fragments=((0, (B1, B2, B4)), (5, (B1, B2, B5))), version=4)

    bench.cas(CasStatus.CONFLICT, repaired)

    marked = bench.one(UpdateMetadata).metadata
    assert (marked.version, marked.fragments) == (4, repaired.fragments)
    bench.cas()
    assert [fence.member for fence in bench.all(SendFence)] == [B1, B2, B5]
    bench.fenced(-1)
    # Nobody of the last fragment was declared lost, so nothing makes up for silence there.
    bench.none(SendRead)


def test_lost_members_decide_nothing_before_all_others_have_answered() -> None:
    """Two of three are lost; what the third one still has must not be thrown away."""
    bench = Bench(ledger(state=State.IN_RECOVERY, declared_lost=(B2, B3)))
    bench.start()
    bench.none(SendRead)
    bench.fenced(-1)
    bench.none(UpdateMetadata)
    bench.read_fails(0)
    assert bench.one(Failed).code == "recovery-blocked"


def test_entries_found_are_written_to_spares_where_members_are_declared_lost() -> None:
    bench = Bench(ledger(state=State.IN_RECOVERY, declared_lost=(B2, B3)))
    bench.start()
    bench.fenced(-1)
    bench.reads_at(0, run_of(b"a"), absent_from=1)
    bench.do(BookiesFound(bench.recovery._attempt, (B4, B5)))
    bench.wrote(0, 1, 2)
    closed = bench.one(UpdateMetadata).metadata
    assert closed.fragments == (Fragment(0, (B1, B4, B5)),)
    assert closed.may_lack_entries


@pytest.mark.parametrize(
    ("end", "before_it", "length"),
    [(4, run_of(b"x", first=3, before=10), 11), (1, run_of(b"abc"), 3), (0, None, 0)],
    ids=["an-entry-before-it", "the-first-entry-before-it", "nothing-left"],
)
def test_a_confirmed_end_that_is_lost_for_good_closes_with_a_lower_bound_of_the_length(
    end: int, before_it: Run | None, length: int
) -> None:
    bench = Bench(ledger(state=State.IN_RECOVERY, declared_lost=(B2, B3)))
    bench.start()
    bench.fenced(end)
    bench.reads_at(0, absent_from=end + 1)
    bench.reads_at(0, absent_from=end)
    if before_it is not None:
        assert bench.reads[0].first == end - 1
        bench.reads_at(0, before_it)
    closed = bench.one(UpdateMetadata).metadata
    assert (closed.last_entry, closed.length, closed.may_lack_entries) == (end, length, True)


def test_a_confirmed_entry_that_is_lost_with_an_earlier_fragment_is_told() -> None:
    """Rule 14: all members of the last fragment are there, and the ledger lacks an entry."""
    bench = Bench(
        ledger(
            state=State.IN_RECOVERY,
            fragments=((0, (B1, B2, B3)), (3, (B1, B4, B5))),
            declared_lost=(B2, B3),
        )
    )
    bench.start()
    bench.fenced(2, 2, 2)
    for position in (0, 1, 2):
        bench.reads_at(position, absent_from=3)
    bench.reads_at(0, absent_from=2)
    bench.reads_at(0, run_of(b"x", first=1, before=1))
    closed = bench.one(UpdateMetadata).metadata
    assert (closed.last_entry, closed.may_lack_entries) == (2, True)


def test_late_and_repeated_answers_are_harmless() -> None:
    bench = ended()
    bench.do(FenceAnswered(2, B3, Status.OK, 99))
    bench.do(ReadAnswered(2, B3, 0, 999, Status.OK, run_of(b"a")))
    bench.do(TimerFired(Timer.ADD, 1))
    bench.cas()
    bench.do(FenceAnswered(2, B3, Status.OK, 99))
    bench.none(UpdateMetadata, Failed)


def test_a_copy_goes_its_own_way() -> None:
    bench = reading()
    other = bench.recovery.copy()
    before = bench.recovery.key()
    bench.reads_at(0, run_of(b"a"))
    assert other.key() == before != bench.recovery.key()


# --- guards that no other test would miss: `make mutate` found them ------------------------------


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
