"""Guards of the reader that no other test would miss; `make mutate` found them."""

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
    Status,
    Timer,
    TimerFired,
)
from quorumlog.protocol.metadata import Fragment, LedgerMetadata, State
from quorumlog.protocol.reader import RangeReader
from quorumlog.protocol.record import Run
from tests.protocol.hands import B1, B2, B3, B4, ledger, reply, run_of
from tests.protocol.test_reader import AB, Bench

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
def test_an_entry_that_moved_is_read_from_its_new_place_in_an_open_ledger_and_at_the_end(
    row: LedgerMetadata,
) -> None:
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


def test_after_the_end_nobody_is_heard_or_asked() -> None:
    bench = Bench()
    bench.hedge()
    other = bench.asked[1]
    bench.gets(0, AB)
    assert bench.reader.is_done

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


def test_after_a_byte_limit_nobody_is_heard() -> None:
    bench = Bench(max_bytes=1)
    bench.hedge()
    other = bench.asked[1]
    bench.gets(0, AB)
    assert (bench.read, bench.reader.is_done) == ([0], True)

    assert bench.do(ReadAnswered(1, B2, other.first, other.last, Status.OK, AB)) == []
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
