"""Which changes of a ledger and of a log are legal, and what a transaction publishes."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorumlog.errors import InvalidRequest
from quorumlog.protocol.access_key import sealed
from quorumlog.protocol.changes import check_ledger, check_log, check_new_ledger, published_by
from quorumlog.protocol.ids import ASSIGNED_ID_END
from quorumlog.protocol.log import LIMITS, Expiry, LogItem, LogMetadata, LogSettings, LogState
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, State, Writer
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.transaction import Sealed, Transaction, TransactionLedger, TransactionState
from tests.unit.protocol.hands import B1, B2, B3, B4, B5, ledger

OPEN = ledger()
TWO = ledger(fragments=((0, (B1, B2, B3)), (5, (B1, B2, B4))))
MARKED = replace(TWO, state=State.IN_RECOVERY)
CLOSED = replace(TWO, state=State.CLOSED, last_entry=9, length=10)
MOVED = CLOSED.with_member_replaced(1, B1, B3)
LOST = CLOSED.given_up(2, 4, (B1,))

LOG = LogMetadata(
    "log",
    LogSettings(Quorum(3, 3, 2)),
    items=(LogItem(1, 0, 9), LogItem(2, 10)),
    first_offset=5,
    forgotten_end=3,
    writer_token=2,
    archived_through=7,
)


def refused(check: Any, *rows: Any) -> list[str]:
    """The pointers of what is wrong."""
    with pytest.raises(InvalidRequest) as raised:
        check(*rows)
    return [error["pointer"] for error in raised.value.members["errors"]]


def test_a_ledger_begins_open_with_one_fragment_and_has_lost_nothing() -> None:
    new = replace(OPEN, ledger_id=-1, ledger_key=bytes(32))
    check_new_ledger(new)
    check_new_ledger(replace(new, ledger_id=ASSIGNED_ID_END))
    assert refused(check_new_ledger, replace(new, ledger_id=ASSIGNED_ID_END - 1)) == [
        "/row/ledger_id"
    ]
    assert refused(check_new_ledger, replace(new, ledger_key=b"k")) == ["/row/ledger_key"]
    assert refused(check_new_ledger, replace(new, state=State.IN_RECOVERY)) == ["/row/state"]
    assert refused(check_new_ledger, replace(new, fragments=TWO.fragments)) == ["/row/fragments"]
    for lost in (
        replace(new, may_lack_entries=True),
        replace(new, declared_lost=(B1,)),
        replace(new, lost_entries=((0, 1),)),
    ):
        assert refused(check_new_ledger, lost) == ["/row/declared_lost"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (OPEN, OPEN),
        (OPEN, OPEN.in_recovery()),
        (OPEN, OPEN.closed(last_entry=-1, length=0)),
        (TWO, TWO.with_ensemble(8, (B1, B3, B4))),
        (MARKED, MARKED),
        (MARKED, MARKED.closed(last_entry=9, length=10)),
        (MARKED, MARKED.with_ensemble(8, (B1, B3, B4)).closed(last_entry=9, length=10)),
        (MARKED, MARKED.with_member_replaced(0, B1, B4)),
        (CLOSED, CLOSED.with_member_replaced(1, B1, B3)),
        (MOVED, MOVED.with_member_replaced(1, B3, B5)),
        (MOVED, MOVED.with_leaving_released(5, B3)),
        (OPEN, replace(OPEN, fragments=(Fragment(0, (B1, B2, B4)),))),
        (CLOSED, LOST),
        (LOST, LOST),
        (LOST, LOST.given_up(4, 6, ())),
        (LOST, LOST.given_up(1, 5, ())),
    ],
)
def test_what_a_ledger_may_become(old: LedgerMetadata, new: LedgerMetadata) -> None:
    check_ledger(old, new)


@pytest.mark.parametrize(
    ("old", "new", "pointer"),
    [
        (OPEN, replace(OPEN, digest=DigestKind.NONE), "/row/digest"),
        (OPEN, replace(OPEN, ledger_key=b"x"), "/row/ledger_key"),
        (CLOSED, replace(MOVED, repairs=()), "/row/fragments/1"),
        (TWO, replace(TWO, fragments=(Fragment(0, (B1, B2, B4)), TWO.fragments[1])), "/row/fragments/0"),
        (
            MOVED,
            MOVED.with_leaving_released(5, B3).with_member_replaced(1, B2, B5),
            "/row/fragments/1",
        ),
        (MARKED, TWO, "/row/state"),
        (CLOSED, MARKED, "/row/state"),
        (LOST, replace(LOST, declared_lost=()), "/row/declared_lost"),
        (LOST, replace(LOST, may_lack_entries=False), "/row/may_lack_entries"),
        (LOST, replace(LOST, lost_entries=()), "/row/lost_entries"),
        (LOST, replace(LOST, lost_entries=((3, 4),)), "/row/lost_entries"),
        (LOST, replace(LOST, lost_entries=((2, 3),)), "/row/lost_entries"),
        (MARKED, replace(LOST, declared_lost=()), "/row/lost_entries"),
        (CLOSED, replace(CLOSED, last_entry=8), "/row/last_entry"),
        (CLOSED, replace(CLOSED, length=11), "/row/length"),
        (TWO, OPEN, "/row/fragments"),
        (TWO, replace(TWO, fragments=(TWO.fragments[0], Fragment(6, (B1, B2, B4)))), "/row/fragments"),
        (CLOSED, replace(CLOSED, fragments=(*CLOSED.fragments, Fragment(8, (B1, B2, B3)))), "/row/fragments"),
        (MARKED, MARKED.with_ensemble(8, (B1, B3, B4)), "/row/fragments"),
        (MARKED, MARKED.with_member_replaced(1, B4, B3), "/row/fragments"),
    ],
)  # fmt: skip
def test_what_a_ledger_may_not_become(
    old: LedgerMetadata, new: LedgerMetadata, pointer: str
) -> None:
    assert refused(check_ledger, old, new)[0] == pointer


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"state": LogState.CLOSED},
        {"first_offset": 6, "forgotten_end": 4, "writer_token": 3, "archived_through": 8},
        {"items": (LogItem(1, 0, 9), LogItem(2, 10, 12), LogItem(3, 13))},
        {"items": (LogItem(2, 10),)},
    ],
)
def test_what_a_log_may_become(changes: dict[str, Any]) -> None:
    check_log(LOG, replace(LOG, **changes))
    closed = replace(LOG, state=LogState.CLOSED)
    check_log(closed, replace(closed, first_offset=6))
    check_log(replace(LOG, archived_through=None), LOG)


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"settings": LogSettings(Quorum(1, 1, 1))}, "/row/settings"),
        ({"settings": replace(LOG.settings, digest=DigestKind.NONE)}, "/row/settings"),
        ({"settings": replace(LOG.settings, custom=(("k", "v"),))}, "/row/settings"),
        ({"first_offset": 4}, "/row/first_offset"),
        ({"forgotten_end": 2}, "/row/forgotten_end"),
        ({"writer_token": 1}, "/row/writer_token"),
        ({"archived_through": 6}, "/row/archived_through"),
        ({"archived_through": None}, "/row/archived_through"),
        ({"items": (LogItem(1, 0, 8), LogItem(2, 10))}, "/row/items/0/last_offset"),
        ({"items": (LogItem(1, 0, 9), LogItem(2, 11))}, "/row/items/1/first_offset"),
        ({"items": (LogItem(1, 0), LogItem(2, 10))}, "/row/items/0/last_offset"),
    ],
)
def test_what_a_log_may_not_become(changes: dict[str, Any], pointer: str) -> None:
    assert refused(check_log, LOG, replace(LOG, **changes)) == [pointer]


def test_a_log_that_expires_gets_another_keeper_and_nothing_else() -> None:
    expiry = Expiry(60, Writer("g1", "http://g1"), "t1")
    log = replace(LOG, expiry=expiry)
    kept = log.kept_by(Writer("g2", "http://g2"), "t2")
    assert kept.expiry == Expiry(60, Writer("g2", "http://g2"), "t2")
    check_log(log, kept)
    for old, new in (
        (log, LOG),
        (LOG, log),
        (log, replace(log, expiry=replace(expiry, idle_s=61))),
        (LOG, replace(log, expiry=replace(expiry, idle_s=0))),
    ):
        assert refused(check_log, old, new) == ["/row/expiry"]


def test_a_closed_log_is_not_opened_again() -> None:
    assert refused(check_log, replace(LOG, state=LogState.CLOSED), LOG) == ["/row/state"]


@pytest.mark.parametrize(
    "items",
    [
        (LogItem(5, 10, 19), LogItem(1, 0, 9), LogItem(9, 20)),
        (LogItem(1, 0, 9), LogItem(5, 10), LogItem(9, None)),
        (LogItem(1, 0), LogItem(5, 10, 19), LogItem(9, 20)),
        (LogItem(5, 10, 19), LogItem(9, 20), LogItem(1, 0, 9)),
    ],
    ids=["before what was there", "without an end", "after no end", "not last"],
)
def test_a_commit_publishes_behind_what_was_there(items: tuple[LogItem, ...]) -> None:
    """Rule 28."""
    old = replace(LOG, items=(LogItem(1, 0, 9),))
    whole = replace(old, items=(LogItem(1, 0, 9), LogItem(5, 10, 19), LogItem(9, 20)))
    assert published_by(old, whole, [Sealed(5)]) == (LogItem(5, 10, 19),)

    with pytest.raises(InvalidRequest):
        published_by(old, replace(old, items=items), [Sealed(5)])


def test_a_password_changes_alone_and_takes_the_mac_key_along() -> None:
    old = replace(OPEN, access_key=b"a" * 48, mac_key=b"m" * 32)
    new = replace(old, access_key=b"b" * 48, wrapped_mac_key=b"w" * 40)
    check_ledger(old, new)
    check_ledger(new, replace(new, access_key=b"c" * 48, wrapped_mac_key=b"x" * 40))

    for wrong in (
        replace(new, mac_key=b"n" * 32),
        replace(new, wrapped_mac_key=b""),
        replace(new, access_key=b""),
        replace(new, access_key=sealed(b"s" * 16, b"d" * 32)),
        replace(new, may_lack_entries=True),
        replace(new, custom=(("a", "b"),)),
    ):
        with pytest.raises(InvalidRequest):
            check_ledger(old, wrong)
    with pytest.raises(InvalidRequest):
        check_ledger(replace(old, access_key=b""), new)


@pytest.mark.parametrize("name", LIMITS)
def test_each_limit_of_a_log_may_change(name: str) -> None:
    check_log(LOG, LOG.with_limits({name: 7}))
    assert getattr(LOG.with_limits({name: 7}).settings, name) == 7


TARGET = LogMetadata("log", LogSettings(Quorum(3, 3, 2)), items=(LogItem(1, 0, None),))
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
    new = after(TARGET, [(2, 5, 50), (3, 0, 0), (4, 7, 70)])

    published = published_by(TARGET, new, ASKED)

    places = [(item.ledger_id, item.first_offset, item.last_offset) for item in new.items]
    assert places == [(1, 0, 9), (2, 10, 14), (4, 15, 21), (9, 22, None)]
    assert [item.ledger_id for item in published] == [2, 4]
    assert (new.first_offset, new.items[1].bytes) == (0, 50)


def test_a_new_generation_drops_what_was_there_and_offsets_go_on() -> None:
    new = after(TARGET, [(2, 5, 50)], is_new_start=True)

    published_by(TARGET, new, ASKED)

    assert [item.ledger_id for item in new.items] == [2, 9]
    assert (new.first_offset, new.items[1].first_offset) == (10, 15)


def test_an_empty_generation_begins_where_the_old_one_ended() -> None:
    new = after(TARGET, [], is_new_start=True)

    assert published_by(TARGET, new, ()) == ()
    assert [(item.ledger_id, item.first_offset) for item in new.items] == [(9, 10)]
    assert new.first_offset == 10


def test_a_row_that_publishes_otherwise_is_refused() -> None:
    good = after(TARGET, [(2, 5, 50), (4, 7, 70)])
    old, one, two, last = good.items

    for wrong, asked in (
        (replace(good, items=(old, one)), ASKED),
        (replace(good, items=(old, one, replace(two, last_offset=None))), ASKED),
        (good, (Sealed(4), Sealed(2))),
        (good, (Sealed(2),)),
        (good, (*ASKED, Sealed(9))),
        (replace(good, state=LogState.CLOSED), ASKED),
        (replace(good, items=(old, one, two, replace(last, last_offset=30))), ASKED),
        (TARGET, ASKED),
    ):
        with pytest.raises(InvalidRequest):
            published_by(TARGET, wrong, asked)
    with pytest.raises(InvalidRequest):
        published_by(replace(TARGET, state=LogState.CLOSED), good, ASKED)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 99)), max_size=8), st.booleans())
def test_offsets_are_dense_in_any_case(sizes: list[tuple[int, int]], is_new_start: bool) -> None:
    ledgers = [(10 + n, records, size) for n, (records, size) in enumerate(sizes)]

    new = after(TARGET, ledgers, is_new_start=is_new_start)

    new.check()
    published = published_by(TARGET, new, [Sealed(ledger) for ledger, _, _ in ledgers])
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
