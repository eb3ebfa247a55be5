"""Reading a range: in order, digest-valid, from whoever has it; and what is said when nobody has."""

from dataclasses import replace

import pytest

from quorumlog.protocol.messages import (
    Begin,
    CasStatus,
    EntriesRead,
    Failed,
    MetadataAnswered,
    ReadAnswered,
    ReadMetadata,
    SendRead,
    StartTimer,
    Status,
    Timer,
    TimerFired,
)
from quorumlog.protocol.metadata import Fragment, LedgerMetadata, State
from quorumlog.protocol.reader import RangeReader
from quorumlog.protocol.record import Run
from tests.unit.protocol.hands import B1, B2, B3, B4, Hand, ledger, reply, run_of


class Bench(Hand):
    """A reader and who is asked."""

    def __init__(
        self, row: LedgerMetadata | None = None, *, first: int = 0, last: int = 1, **options: object
    ) -> None:
        self.reader = RangeReader(row or ledger(), first=first, last=last, **options)  # type: ignore[arg-type]
        super().__init__(self.reader)
        self.asked: dict[int, SendRead] = {}
        self.read: list[int] = []
        self.do(Begin())

    def keep(self) -> None:
        self.asked.update({read.position: read for read in self.all(SendRead)})
        for got in self.all(EntriesRead):
            self.read.extend(got.run.ids)

    def gets(
        self, position: int, run: Run | None = None, *absent: int, status: Status = Status.OK
    ) -> None:
        self.do(reply(self.asked[position], run, *absent, status=status))

    def hedge(self) -> None:
        self.do(TimerFired(Timer.HEDGE, self.reader._round))


AB = run_of(b"a", b"b")


def test_one_bookie_is_asked_and_reads_never_fence() -> None:
    bench = Bench()
    read = bench.one(SendRead)
    assert (read.member, read.first, read.last, read.fence, read.ledger_key) == (
        B1,
        0,
        1,
        False,
        b"",
    )
    assert bench.one(StartTimer).timer is Timer.HEDGE

    bench.gets(0, AB)

    assert bench.one(EntriesRead) == EntriesRead(AB, is_last=True)
    assert bench.reader.is_done


def test_a_slow_bookie_is_hedged_by_the_next_one_and_the_first_answer_counts() -> None:
    bench = Bench()
    bench.hedge()
    assert bench.one(SendRead).member == B2
    bench.gets(1, AB)
    assert bench.read == [0, 1]
    bench.gets(0, AB)
    assert bench.read == [0, 1]


def test_a_timer_of_an_earlier_request_does_not_hedge() -> None:
    bench = Bench()
    bench.gets(0, run_of(b"a"))
    bench.do(TimerFired(Timer.HEDGE, 1))
    bench.none(SendRead)


def test_an_entry_missing_at_one_bookie_is_read_from_another() -> None:
    """Overview 1.4."""
    bench = Bench()
    bench.gets(0, run_of(b"a"), 1)
    assert bench.read == [0]
    assert [read.member for read in bench.all(SendRead)] == [B2]
    bench.gets(1, AB)
    assert bench.read == [0, 1]


def test_an_entry_with_a_bad_code_is_read_from_another_bookie() -> None:
    bench = Bench()
    bench.gets(0, Run(AB.body[:-1] + b"X"))
    assert bench.read == [0]
    bench.gets(1, AB)
    assert bench.read == [0, 1]


def test_an_unreachable_bookie_is_failed_over_at_once() -> None:
    bench = Bench()
    bench.gets(0, status=Status.UNKNOWN)
    assert bench.one(SendRead).member == B2


def test_a_copy_at_the_last_bookie_is_found_whatever_the_others_deny() -> None:
    """A confirmed entry with Qw-Qa+1 negatives is still looked for: only recovery may conclude."""
    bench = Bench()
    bench.gets(0, None, 0, 1)
    bench.gets(1, None, 0, 1)
    bench.gets(2, AB)
    assert bench.read == [0, 1]


def test_an_entry_that_nobody_has_is_an_error_that_says_what_each_answered() -> None:
    bench = Bench()
    bench.gets(0, AB.where(lambda n: n == 0), 1)
    bench.gets(1, None, 1)
    bench.gets(2, status=Status.UNKNOWN)
    bench.one(ReadMetadata)
    bench.do(MetadataAnswered(bench.reader._round, CasStatus.OK, ledger()))

    failed = bench.one(Failed)
    assert (failed.code, failed.entry_id) == ("entry-unavailable", 1)
    assert failed.detail == "b2@1: absent, b3@1: unknown, b1@1: absent"


def test_an_entry_moved_by_repair_is_found_where_metadata_says_now() -> None:
    """BK#4613: readers follow ensembles of closed ledgers."""
    bench = Bench()
    for position in range(3):
        bench.gets(position, status=Status.UNKNOWN)
    moved = ledger(
        fragments=((0, (B4, B2, B3)),), state=State.CLOSED, last_entry=1, length=2, version=9
    )
    bench.do(MetadataAnswered(bench.reader._round, CasStatus.OK, moved))
    assert bench.one(SendRead).member == B4
    bench.gets(0, AB)
    assert bench.read == [0, 1]


def test_a_deleted_ledger_is_told() -> None:
    bench = Bench()
    for position in range(3):
        bench.gets(position, status=Status.UNKNOWN)
    bench.do(MetadataAnswered(bench.reader._round, CasStatus.MISSING))
    assert bench.one(Failed).code == "no-such-ledger"


def test_an_answer_cut_short_is_asked_on() -> None:
    bench = Bench(last=2)
    bench.gets(0, AB)
    assert bench.read == [0, 1]
    assert (bench.one(SendRead).member, bench.one(SendRead).first) == (B1, 2)


def test_fragments_are_read_one_after_another() -> None:
    row = ledger(fragments=((0, (B1, B2, B3)), (1, (B4, B2, B3))))
    bench = Bench(row)
    assert (bench.asked[0].member, bench.asked[0].last) == (B1, 0)
    bench.gets(0, run_of(b"a"))
    assert bench.one(EntriesRead).is_last is False
    assert (bench.asked[0].member, bench.asked[0].first) == (B4, 1)
    bench.gets(0, run_of(b"b", first=1, before=1))
    assert bench.read == [0, 1]


def test_striped_entries_are_asked_of_their_own_write_sets() -> None:
    bench = Bench(ledger(3, 1, 1), last=4)
    assert sorted(bench.asked) == [0, 1, 2]
    whole = run_of(b"a", b"b", b"c", b"d", b"e")
    bench.gets(1, whole.where(lambda n: n % 3 == 1))
    assert bench.read == []
    bench.gets(0, whole.where(lambda n: n % 3 == 0))
    assert bench.read == [0, 1]
    bench.gets(2, whole.where(lambda n: n % 3 == 2))
    assert bench.read == [0, 1, 2, 3, 4]
    assert bench.reader.is_done


def test_a_byte_limit_ends_the_read_early_but_never_before_the_first_entry() -> None:
    run = run_of(b"a" * 10, b"b" * 10, b"c" * 10)
    bench = Bench(last=2, max_bytes=5)
    bench.gets(0, run)
    assert bench.read == [0]
    assert bench.reader.is_done
    assert bench.reader.next == 1

    bench = Bench(last=2, max_bytes=20)
    bench.gets(0, run)
    assert bench.read == [0, 1]
    assert bench.one(EntriesRead).is_last


def test_members_to_avoid_are_asked_last_and_turns_spread_the_load() -> None:
    assert Bench(avoid=(B1,)).asked.keys() == {1}
    assert Bench(turn=2).asked.keys() == {2}


def test_entries_of_another_ledger_are_not_taken() -> None:
    bench = Bench(replace(ledger(), ledger_id=8))
    bench.gets(0, AB)
    assert bench.read == []
    assert bench.one(SendRead).member == B2


def ended_elsewhere(bench: Bench) -> None:
    """Metadata answers that the ledger ended at entry 1, with other members."""
    row = ledger(fragments=((0, (B2, B3, B4)),), state=State.CLOSED, last_entry=1, length=2)
    attempt = bench.one(ReadMetadata).attempt
    bench.do(MetadataAnswered(attempt, CasStatus.OK, replace(row, version=2)))


def test_a_ledger_that_ended_before_the_entry_has_it_nowhere_else() -> None:
    """An operator declared the members lost: the ledger ended below a LAC that was known."""
    bench = Bench(first=2, last=4)
    for position in range(3):
        bench.gets(position, None, 2, 3, 4)

    ended_elsewhere(bench)

    assert bench.one(Failed).code == "entry-unavailable"
    assert bench.reader.is_done
    assert not bench.all(SendRead)


def test_a_ledger_that_ended_within_the_range_is_read_to_its_end() -> None:
    bench = Bench(first=0, last=4)
    for position in range(3):
        bench.gets(position, None, 0, 1, 2, 3, 4)

    ended_elsewhere(bench)
    read = bench.one(SendRead)
    bench.gets(read.position, AB)

    assert (read.first, read.last) == (0, 1)
    assert bench.read == [0, 1]
    assert bench.one(EntriesRead).is_last


# --- guards that no other test would miss: `make mutate` found them ------------------------------


A = run_of(b"a")


def unavailable(row: LedgerMetadata | None = None) -> Bench:
    """All have failed to give entry 0; the row is read."""
    bench = Bench(row, last=0)
    for position in range(3):
        bench.gets(position, status=Status.UNKNOWN)
    bench.one(ReadMetadata)
    return bench


def moved(row: LedgerMetadata) -> LedgerMetadata:
    """The row after a repair took the place of one member."""
    return replace(row, fragments=(Fragment(0, (B1, B2, B4)),), version=row.version + 1)


@pytest.mark.parametrize(
    "row", [ledger(), ledger(state=State.CLOSED, last_entry=0, length=1)], ids=["open", "last"]
)
def test_an_entry_that_moved_is_read_from_its_new_place(row: LedgerMetadata) -> None:
    bench = unavailable(row)

    bench.do(MetadataAnswered(bench.reader._round, CasStatus.OK, moved(row)))
    for position in (0, 1):
        bench.gets(position, status=Status.UNKNOWN)

    assert bench.one(SendRead).member == B4
    bench.gets(2, A)
    assert bench.read == [0]


def test_a_row_that_cannot_be_read_leaves_what_the_bookies_said() -> None:
    bench = unavailable()

    bench.do(MetadataAnswered(bench.reader._round, CasStatus.UNKNOWN))

    assert bench.one(Failed).code == "entry-unavailable"


def test_an_answer_of_metadata_that_nobody_waits_for_changes_nothing() -> None:
    bench = Bench(last=0)
    before = bench.reader.key()
    assert bench.do(MetadataAnswered(bench.reader._round, CasStatus.OK, moved(ledger()))) == []
    assert bench.do(MetadataAnswered(bench.reader._round, CasStatus.MISSING)) == []
    assert bench.reader.key() == before

    bench = unavailable()
    before = bench.reader.key()
    assert bench.do(MetadataAnswered(bench.reader._round - 1, CasStatus.MISSING)) == []
    assert bench.reader.key() == before


def test_while_the_row_is_read_nobody_else_is_heard_or_asked() -> None:
    bench = Bench(last=0)
    read = bench.asked[0]
    for position in range(3):
        bench.gets(position, status=Status.UNKNOWN)
    before = bench.reader.key()

    assert bench.do(reply(read, A)) == []
    assert bench.do(TimerFired(Timer.HEDGE, bench.reader._round)) == []
    assert bench.reader.key() == before


@pytest.mark.parametrize(("max_bytes", "ids"), [(None, [0, 1]), (1, [0])])
def test_after_the_end_nobody_is_heard_or_asked(max_bytes: int | None, ids: list[int]) -> None:
    bench = Bench(max_bytes=max_bytes)
    bench.hedge()
    other = bench.asked[1]
    bench.gets(0, AB)
    assert (bench.read, bench.reader.is_done) == (ids, True)

    assert bench.do(ReadAnswered(1, B2, other.first, other.last, Status.OK, AB)) == []
    assert bench.do(TimerFired(Timer.HEDGE, bench.reader._round)) == []
    assert bench.do(Begin()) == []


def test_a_second_begin_asks_nobody_again() -> None:
    bench = Bench()

    assert bench.do(Begin()) == []


def test_an_answer_that_comes_twice_or_unasked_is_not_taken() -> None:
    bench = Bench(last=0)
    bench.gets(0, status=Status.UNKNOWN)
    read = bench.asked[0]
    before = bench.reader.key()

    assert bench.do(ReadAnswered(0, B1, read.first, read.last, Status.UNKNOWN)) == []
    assert bench.do(ReadAnswered(2, B3, read.first, read.last, Status.OK, A)) == []
    assert bench.reader.key() == before


def test_a_hedge_asks_nobody_where_all_are_asked() -> None:
    bench = Bench(last=0)
    bench.hedge()
    bench.hedge()
    assert len(bench.asked) == 3

    bench.hedge()

    assert bench.out == []


def test_a_byte_limit_that_falls_on_the_end_of_a_part_ends_the_read() -> None:
    bench = Bench(last=1, max_bytes=1)

    bench.gets(0, run_of(b"a"))

    assert bench.one(EntriesRead).is_last
    bench.none(SendRead)


def test_a_reader_has_copies_that_go_their_own_way() -> None:
    bench = Bench()
    before = bench.reader.key()
    other = bench.reader.copy()

    bench.gets(0, AB)

    assert other.key() == before != bench.reader.key()


def test_a_reader_that_has_not_begun_hears_nobody_and_can_be_copied() -> None:
    reader = RangeReader(ledger(), first=0, last=1)
    before = reader.key()

    assert reader.step(ReadAnswered(0, B1, 0, 1, Status.OK, AB)) == []
    assert reader.step(TimerFired(Timer.HEDGE, 0)) == []
    assert reader.copy().key() == before == reader.key()


def test_a_row_that_is_read_is_not_asked_for_again() -> None:
    bench = unavailable()

    assert bench.do(Begin()) == []


def test_a_byte_limit_counts_what_all_answers_gave() -> None:
    bench = Bench(last=2, max_bytes=3)
    bench.gets(0, run_of(b"a"))
    assert not bench.one(EntriesRead).is_last

    bench.gets(0, run_of(b"bb", b"c", first=1, before=1))

    assert bench.one(EntriesRead).is_last
    assert bench.read == [0, 1]


def test_what_nobody_asked_for_is_not_handed_out() -> None:
    bench = Bench(last=0)

    bench.gets(0, AB)

    assert bench.read == [0]


def test_a_timer_of_another_kind_asks_nobody() -> None:
    bench = Bench()

    assert bench.do(TimerFired(Timer.RETRY, bench.reader._round)) == []


def test_an_answer_to_another_question_is_not_taken() -> None:
    """Of whoever had the place before, to an earlier question, or of another range."""
    bench = unavailable()
    row = replace(ledger(), fragments=(Fragment(0, (B4, B2, B3)),), version=2)
    bench.do(MetadataAnswered(bench.reader._round, CasStatus.OK, row))
    read = bench.one(SendRead)
    assert (read.position, read.member) == (0, B4)
    before = bench.reader.key()
    assert bench.do(ReadAnswered(0, B1, 0, 0, Status.OK, A)) == []
    assert bench.reader.key() == before

    bench = Bench(last=2)
    bench.gets(0, A)
    assert bench.asked[0].first == 1
    before = bench.reader.key()
    assert bench.do(ReadAnswered(0, B1, 0, 2, Status.UNKNOWN)) == []
    assert bench.do(ReadAnswered(0, B1, 1, 1, Status.UNKNOWN)) == []
    assert bench.reader.key() == before


def test_who_gave_a_part_is_asked_on_only_for_what_nobody_else_is_asked_for() -> None:
    bench = Bench()
    bench.hedge()
    bench.gets(0, A)
    bench.none(SendRead)

    bench = Bench()
    bench.hedge()
    bench.gets(1, run_of(b"b", first=1, before=1))
    bench.gets(0, None, 0)
    assert [read.position for read in bench.all(SendRead)] == [2]


STRIPED = ledger(4, 2, 2)
"""Positions 0 to 3 store entries 0, 3, 4; 0, 1, 4, 5; 1, 2, 5; and 2, 3 of the first six."""
SIX = run_of(b"a", b"b", b"c", b"d", b"e", b"f")


def some(*entry_ids: int) -> Run:
    run = SIX.where(entry_ids.__contains__)
    assert run is not None
    return run


def test_who_gave_a_part_is_not_asked_on_for_what_others_store() -> None:
    bench = Bench(STRIPED, last=5)
    bench.gets(1, some(1, 4), 0)
    bench.none(SendRead)
    bench.gets(2, status=Status.UNKNOWN)
    assert bench.one(SendRead).position == 3
    bench.gets(3, some(2, 3))
    assert bench.read == []

    bench.gets(0, some(0))

    assert bench.read == [0, 1, 2, 3, 4]
    assert [(read.position, read.first) for read in bench.all(SendRead)] == [(1, 5)]


def test_while_the_row_is_read_for_an_entry_nobody_is_asked_or_heard_about_later_ones() -> None:
    bench = Bench(STRIPED, last=3)
    bench.gets(1, status=Status.UNKNOWN)
    bench.gets(0, status=Status.UNKNOWN)
    bench.one(ReadMetadata)
    bench.none(SendRead)
    read = bench.asked[2]
    before = bench.reader.key()

    assert bench.do(ReadAnswered(2, B3, read.first, read.last, Status.OK, some(1, 2))) == []
    assert bench.reader.key() == before


def test_nobody_else_is_asked_for_an_entry_that_is_here_already() -> None:
    bench = Bench(STRIPED, last=3)

    bench.gets(0, some(3), 0)

    bench.none(SendRead)
