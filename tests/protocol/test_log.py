"""A log's row: offsets are dense over ledgers, and a list changes only as rules 22 to 28 say."""

import pytest

from quorumlog.protocol.log import (
    ANSWERS_MAX,
    Answer,
    LogItem,
    LogMetadata,
    LogSettings,
    LogState,
    Producer,
    bounded,
)
from quorumlog.protocol.quorum import Quorum

SETTINGS = LogSettings(Quorum(3, 3, 2))
EMPTY = LogMetadata("events", SETTINGS, next_offset=0)


def closed(log: LogMetadata, ends: dict[int, tuple[int, int]]) -> LogMetadata:
    changed = log.with_ends(ends, producers=(), now_ms=1)
    changed.check()
    return changed


def test_the_first_ledger_begins_at_offset_zero() -> None:
    log = closed(EMPTY.with_ledger(7), {})

    assert log.items == (LogItem(7, 0),)


def test_a_ledger_added_ahead_gets_its_start_when_the_one_before_it_is_closed() -> None:
    log = closed(EMPTY.with_ledger(7), {}).with_ledger(8)
    log.check()

    after = closed(log, {7: (10, 100)})

    assert [(i.ledger_id, i.first_offset, i.last_offset) for i in after.items] == [
        (7, 0, 9),
        (8, 10, None),
    ]


def test_an_empty_closed_ledger_leaves_the_list_but_not_as_the_last() -> None:
    log = closed(EMPTY.with_ledger(7), {}).with_ledger(8)

    after = closed(log, {7: (0, 0)})
    ended = closed(after, {8: (0, 0)})

    assert [(i.ledger_id, i.first_offset) for i in after.items] == [(8, 0)]
    assert [(i.ledger_id, i.first_offset, i.last_offset) for i in ended.items] == [(8, 0, -1)]


def test_truncate_drops_whole_ledgers_and_its_start_never_goes_back() -> None:
    log = closed(EMPTY.with_ledger(7), {}).with_ledger(8)
    log = closed(log, {7: (10, 100)})

    assert log.truncated(9).first_offset == 0
    cut = log.truncated(10)

    assert (cut.first_offset, [i.ledger_id for i in cut.items]) == (10, [8])
    assert cut.truncated(3) == cut


def test_a_log_is_closed_at_the_end_of_its_last_ledger() -> None:
    log = closed(EMPTY.with_ledger(7), {})

    with pytest.raises(AssertionError):
        log.closed()
    done = closed(log, {7: (4, 10)}).closed()

    assert (done.state, done.next_offset) == (LogState.CLOSED, 4)


def test_opening_gives_a_greater_token_each_time() -> None:
    first = EMPTY.with_ledger(7).opened("a")
    second = closed(first, {7: (4, 10)}).with_ledger(9).opened("b")

    assert (first.writer_token, second.writer_token, second.opened_by) == (7, 9, "b")


def test_only_the_item_that_a_takeover_replays_keeps_a_producer_table() -> None:
    table = (Producer("p", 0, 1, (Answer(0, 0, 0, 7, 0, "x"),)),)
    log = EMPTY.with_ledger(7).with_ends({}, producers=(), now_ms=1).with_ledger(8)

    log = log.with_ends({7: (1, 9)}, producers=table, now_ms=2)
    assert log.base == LogItem(8, 1, None, table)

    log = log.with_ledger(9).with_ends({8: (1, 9)}, producers=table, now_ms=2)

    assert [item.producers for item in log.items] == [(), (), table]


def test_an_offset_is_found_in_its_item_and_in_none_where_its_place_is_not_known() -> None:
    log = closed(EMPTY.with_ledger(7), {}).with_ledger(8)
    log = closed(log, {7: (10, 100)})
    sealed = closed(log, {8: (5, 9)})

    assert [item.ledger_id for at in (0, 9, 10, 99) if (item := log.item_at(at))] == [7, 7, 8, 8]
    assert sealed.item_at(15) is None
    assert (log.end_offset, sealed.end_offset, EMPTY.end_offset) == (None, 15, 0)


def test_a_row_keeps_the_latest_answer_of_every_producer_whatever_their_number() -> None:
    answers = tuple(Answer(seq, seq, seq, 1, seq, "x") for seq in range(ANSWERS_MAX))
    many = tuple(Producer(str(n), 0, n, answers) for n in range(1000))

    kept = bounded(many)

    assert [producer.next_seq for producer in kept] == [ANSWERS_MAX] * 1000
    assert sum(len(producer.answers) for producer in kept) <= 4096
    assert bounded(many[:3]) == many[:3]
