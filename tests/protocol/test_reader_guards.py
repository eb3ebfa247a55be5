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
from tests.protocol.hands import B1, B2, B3, B4, ledger, run_of
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
    bench.keep()
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

    assert bench.do(ReadAnswered(0, read.member, read.first, read.last, Status.OK, A)) == []
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
