"""What a commit may publish (rule 28), and where that comes on the log."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorumlog.errors import InvalidRequest
from quorumlog.protocol.changes import published_by
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings, LogState
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.transaction import Sealed, Transaction, TransactionLedger, TransactionState

LOG = LogMetadata("log", LogSettings(Quorum(3, 3, 2)), items=(LogItem(1, 0, None),))
ASKED = (Sealed(2), Sealed(3, 4), Sealed(4))


def after(
    old: LogMetadata, sizes: list[tuple[int, int, int]], *, is_new_start: bool = False
) -> LogMetadata:
    """The row that an owner sends whose open ledger holds ten records."""
    ended = old.with_ends({1: (10, 100)}, producers=(), now_ms=1)
    row = ended.with_published(
        sizes, now_ms=1, published_ms=1, is_new_start=is_new_start
    ).with_ledger(9)
    return row.with_ends({}, producers=(), now_ms=1)


def test_published_ledgers_follow_what_was_there_and_a_new_one_follows_them() -> None:
    new = after(LOG, [(2, 5, 50), (3, 0, 0), (4, 7, 70)])

    published = published_by(LOG, new, ASKED)

    places = [(item.ledger_id, item.first_offset, item.last_offset) for item in new.items]
    assert places == [(1, 0, 9), (2, 10, 14), (4, 15, 21), (9, 22, None)]
    assert [item.ledger_id for item in published] == [2, 4]
    assert (new.first_offset, new.items[1].bytes) == (0, 50)


def test_a_new_generation_drops_what_was_there_and_offsets_go_on() -> None:
    new = after(LOG, [(2, 5, 50)], is_new_start=True)

    published_by(LOG, new, ASKED)

    assert [item.ledger_id for item in new.items] == [2, 9]
    assert (new.first_offset, new.items[1].first_offset) == (10, 15)


def test_an_empty_generation_begins_where_the_old_one_ended() -> None:
    new = after(LOG, [], is_new_start=True)

    assert published_by(LOG, new, ()) == ()
    assert [(item.ledger_id, item.first_offset) for item in new.items] == [(9, 10)]
    assert new.first_offset == 10


def test_a_row_that_publishes_otherwise_is_refused() -> None:
    good = after(LOG, [(2, 5, 50), (4, 7, 70)])
    old, one, two, last = good.items

    for wrong, asked in (
        (replace(good, items=(old, one)), ASKED),
        (replace(good, items=(old, one, replace(two, last_offset=None))), ASKED),
        (good, (Sealed(4), Sealed(2))),
        (good, (Sealed(2),)),
        (good, (*ASKED, Sealed(9))),
        (replace(good, state=LogState.CLOSED), ASKED),
        (replace(good, items=(old, one, two, replace(last, last_offset=30))), ASKED),
        (LOG, ASKED),
    ):
        with pytest.raises(InvalidRequest):
            published_by(LOG, wrong, asked)
    with pytest.raises(InvalidRequest):
        published_by(replace(LOG, state=LogState.CLOSED), good, ASKED)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 99)), max_size=8), st.booleans())
def test_offsets_stay_dense_whatever_is_published(
    sizes: list[tuple[int, int]], is_new_start: bool
) -> None:
    ledgers = [(10 + n, records, size) for n, (records, size) in enumerate(sizes)]

    new = after(LOG, ledgers, is_new_start=is_new_start)

    new.check()
    published = published_by(LOG, new, [Sealed(ledger) for ledger, _, _ in ledgers])
    assert [item.ledger_id for item in published] == [ledger for ledger, n, _ in ledgers if n]
    last = new.last_item
    assert last is not None
    assert last.first_offset == 10 + sum(records for records, _ in sizes)


def test_a_transaction_has_offsets_only_once_it_has_published() -> None:
    ledgers = (TransactionLedger(2, first_offset=5, last_offset=9),)

    begun = Transaction("t", "log", ledgers=(TransactionLedger(2),))
    done = replace(begun, state=TransactionState.COMMITTED, ledgers=ledgers)

    assert (begun.is_open, begun.first_offset, begun.last_offset) == (True, None, None)
    assert (done.is_open, done.first_offset, done.last_offset) == (False, 5, 9)
    none = replace(done, ledgers=())
    assert (none.first_offset, none.last_offset) == (None, None)
    for state in (TransactionState.OPEN, TransactionState.ABORTED):
        other = replace(done, state=state)
        assert (other.first_offset, other.last_offset) == (None, None)
