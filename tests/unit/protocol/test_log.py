"""Metadata of a log, and the takeover that makes a gateway its owner."""

from dataclasses import replace
from typing import Any

import pytest

from quorumlog.errors import EntryUnavailable, LogFull, MetadataUnavailable, WriterLost
from quorumlog.protocol import batch
from quorumlog.protocol.batch import ProducerSeq, Record
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.log import (
    ANSWERS_MAX,
    Answer,
    LogItem,
    LogMetadata,
    LogSettings,
    LogState,
    Producer,
    bounded,
    takeover,
)
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.messages import (
    Answered,
    Ask,
    BatchesRead,
    BeginTakeover,
    CreateLedger,
    DeleteLedger,
    LedgerEnd,
    MeasureLedger,
    Question,
    ReadBatches,
    RecoverLedger,
    RowChanged,
    Stopped,
    SwapLog,
    TakeoverDone,
)
from quorumlog.protocol.log.takeover import Takeover
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata
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


# --- guards that no other test would miss: `make mutate` found them ------------------------------


ROLLED = closed(closed(EMPTY.with_ledger(7), {}).with_ledger(8), {7: (10, 100)})
"""Offsets 0 to 9 are in ledger 7; ledger 8 is open."""


def at(offset: int) -> Producer:
    """A producer whose first request ended at an offset."""
    return Producer("p", 0, 0, (Answer(0, offset, offset, 7, 0, "c"),))


def test_offsets_go_on_where_a_log_holds_no_ledger_any_more() -> None:
    log = LogMetadata("events", SETTINGS, first_offset=3, next_offset=12)
    assert log.end_offset == 12

    assert closed(log.with_ledger(9), {}).items == (LogItem(9, 12),)
    assert log.with_published([(9, 5, 50)], now_ms=1, published_ms=1).items[0].first_offset == 12


def test_a_log_that_never_held_a_ledger_ends_where_it_begins() -> None:
    log = LogMetadata("events", SETTINGS, first_offset=3)

    assert log.end_offset == 3
    assert closed(log.with_ledger(9), {}).items == (LogItem(9, 3),)


def test_a_start_that_publishes_nothing_keeps_the_next_offset() -> None:
    log = closed(ROLLED, {8: (2, 20)})

    empty = log.with_published([(9, 0, 0)], now_ms=1, published_ms=1, is_new_start=True)

    assert (empty.items, empty.first_offset, empty.next_offset) == ((), 12, 12)
    assert empty.end_offset == 12
    assert closed(empty.with_ledger(9), {}).items == (LogItem(9, 12),)


def test_a_log_with_ledgers_has_no_next_offset_of_its_own() -> None:
    assert closed(EMPTY.with_ledger(7), {}).next_offset is None
    assert EMPTY.with_published([(9, 1, 1)], now_ms=1, published_ms=1).next_offset is None


def test_ledgers_without_records_are_not_published() -> None:
    log = closed(ROLLED, {8: (2, 20)})

    after = log.with_published([(9, 0, 0), (10, 3, 30)], now_ms=1, published_ms=1)

    assert [(item.ledger_id, item.first_offset) for item in after.items] == [
        (7, 0),
        (8, 10),
        (10, 12),
    ]
    after.check()


def test_an_end_that_is_known_is_not_changed() -> None:
    again = closed(ROLLED, {7: (3, 30)})

    assert again.items == ROLLED.items


def test_a_start_that_is_known_is_not_changed_nor_its_producers() -> None:
    log = replace(
        EMPTY, items=(LogItem(7, 0, 9), LogItem(8, 10, producers=(at(9),))), next_offset=None
    )

    after = log.with_ends({8: (5, 50)}, producers=(), now_ms=1)

    assert after.items[1].producers == (at(9),)
    assert (after.items[1].first_offset, after.items[1].last_offset) == (10, 14)


def test_a_ledger_whose_start_is_not_known_stays() -> None:
    log = replace(EMPTY, items=(LogItem(7, 0), LogItem(8, None)), next_offset=None)

    after = log.with_ends({}, producers=(), now_ms=1)

    assert [item.ledger_id for item in after.items] == [7, 8]


def test_the_end_of_what_was_forgotten_never_goes_back() -> None:
    """Rule 26a."""
    log = EMPTY.with_ledger(7).with_ends({}, producers=(), now_ms=1, forgotten_end=5)

    assert log.forgotten_end == 5
    assert log.with_ends({}, producers=(), now_ms=2).forgotten_end == 5
    assert log.with_ends({}, producers=(), now_ms=2, forgotten_end=9).forgotten_end == 9


def test_truncating_keeps_the_last_ledger_and_those_that_may_grow() -> None:
    both_closed = closed(ROLLED, {8: (2, 20)})
    assert [item.ledger_id for item in both_closed.truncated(100).items] == [8]

    open_last = ROLLED.truncated(100)
    assert [item.ledger_id for item in open_last.items] == [8]
    assert open_last.first_offset == 10

    unsealed = replace(EMPTY, items=(LogItem(7, 0), LogItem(8, None)), next_offset=None)
    assert [item.ledger_id for item in unsealed.truncated(100).items] == [7, 8]


def test_truncating_a_log_without_ledgers_changes_nothing() -> None:
    log = LogMetadata("events", SETTINGS, first_offset=3, next_offset=12)

    assert log.truncated(100) == log


def test_a_takeover_replays_from_the_last_ledger_whose_start_is_known() -> None:
    log = replace(EMPTY, items=(LogItem(7, 0), LogItem(8, None)), next_offset=None)
    assert log.base == LogItem(7, 0)
    assert log.item_at(5) == LogItem(7, 0)


def test_a_producer_that_has_answered_nothing_begins_at_zero() -> None:
    assert Producer("p", 0, 0, ()).next_seq == 0


def test_the_head_of_a_log_names_the_ledger_whose_writer_owns_it() -> None:
    """Rule 22."""
    assert LogHead.of(ROLLED).last_ledger == 8
    assert LogHead.of(LogMetadata("events", SETTINGS)).last_ledger is None


def test_a_ledger_ends_where_its_own_start_says_not_the_logs() -> None:
    log = replace(EMPTY, items=(LogItem(7, 5),), first_offset=3, next_offset=None)

    assert closed(log, {7: (2, 20)}).items[0].last_offset == 6


def test_a_log_without_ledgers_keeps_its_end_when_nothing_is_closed() -> None:
    log = LogMetadata("events", SETTINGS, first_offset=3, next_offset=12)

    assert closed(log, {}) == log


def test_truncating_leaves_a_ledger_alone_whose_start_is_not_known() -> None:
    log = replace(EMPTY.with_ledger(7), first_offset=3)

    assert log.truncated(100) == log


def test_append_times_never_go_back() -> None:
    log = EMPTY.with_ledger(7).with_ends({}, producers=(), now_ms=1, appended_ms=5)

    assert log.appended_ms == 5
    assert log.with_ends({}, producers=(), now_ms=2, appended_ms=4).appended_ms == 5
    assert log.with_ends({}, producers=(), now_ms=2, appended_ms=9).appended_ms == 9


def test_nothing_that_a_row_tells_of_is_at_its_known_end_or_above() -> None:
    assert LogMetadata("events", SETTINGS, first_offset=3).known_end == 3
    assert LogMetadata("events", SETTINGS, first_offset=3, next_offset=12).known_end == 12
    assert ROLLED.known_end == 10
    assert replace(EMPTY, items=(LogItem(7, 20),), next_offset=None).known_end == 20
    assert replace(EMPTY, items=(LogItem(7, 20, 29), LogItem(8, None))).known_end == 30


LOG = LogMetadata("log", LogSettings(Quorum(1, 1, 1)), (LogItem(1, 0),), version=2)
NOW = Now(0, 0)


class Hand:
    """A takeover, and the one question or result that it came to last."""

    def __init__(self, log: LogMetadata = LOG, *, creates: bool = True) -> None:
        self.machine = Takeover(log, creates=creates, finish=lambda row: row)
        (self.last,) = self.machine.step(BeginTakeover(), NOW)

    @property
    def question(self) -> Question:
        assert isinstance(self.last, Ask)
        return self.last.question

    def answer(self, *values: Any) -> Any:
        """Answer the questions in turn; gives the next one, or the result."""
        for value in values:
            assert isinstance(self.last, Ask)
            (self.last,) = self.machine.step(Answered(self.last.number, value), NOW)
        return self.last.log if isinstance(self.last, TakeoverDone) else self.question


def ledger(ledger_id: int) -> LedgerMetadata:
    return LedgerMetadata(
        ledger_id, LOG.settings.quorum, DigestKind.CRC32C, (Fragment(0, ("b1@1",)),), log="log"
    )


def entry(value: str, seq: int, before: int) -> bytes:
    data = batch.encode((Record(value.encode()),), ProducerSeq("p", 0, seq))
    return batch.placed(data, append_time_ms=0, records_before=before)


def replaying(end: LedgerEnd) -> Hand:
    hand = Hand()
    assert hand.answer(ledger(1)) == MeasureLedger(ledger(1))
    assert hand.answer(end) == ReadBatches(1, 0, end.last_entry)
    return hand


def test_what_is_open_is_recovered_in_order_and_the_row_swapped_once() -> None:
    hand = Hand(LogMetadata("log", LOG.settings, (LogItem(1, 0), LogItem(2, None)), version=3))

    assert hand.question == RecoverLedger(1)
    hand.answer(ledger(1))
    assert hand.answer(LedgerEnd(4, 40, 1, has_producers=False)) == RecoverLedger(2)
    hand.answer(ledger(2))
    assert isinstance(hand.answer(LedgerEnd(0, 0, -1, has_producers=False)), CreateLedger)
    swap = hand.answer(ledger(7))

    assert isinstance(swap, SwapLog)
    assert [(item.ledger_id, item.first_offset) for item in swap.log.items] == [(1, 0), (7, 4)]
    assert hand.answer(swap.log) == swap.log


def test_who_loses_the_swap_deletes_the_new_ledger_and_yields() -> None:
    hand = Hand()
    hand.answer(ledger(1), LedgerEnd(0, 0, -1, has_producers=False), ledger(7))

    assert hand.answer(RowChanged(LOG)) == DeleteLedger(7)
    assert hand.answer(MetadataUnavailable()) is None  # the sweep deletes it


@pytest.mark.parametrize(
    "since", [{"state": LogState.CLOSED, "next_offset": 0}, {}], ids=["log-closed", "ledger-sealed"]
)
def test_who_swaps_and_finds_its_log_closed_or_sealed_yields(since: dict[str, Any]) -> None:
    hand = Hand()
    hand.answer(ledger(1), LedgerEnd(0, 0, -1, has_producers=False))
    swap = hand.answer(ledger(7))
    assert isinstance(swap, SwapLog)
    items = tuple(replace(item, last_offset=-1) for item in swap.log.items)

    assert hand.answer(replace(swap.log, items=items, **since)) == DeleteLedger(7)


def test_a_swap_of_an_unknown_outcome_deletes_what_no_log_names_and_fails() -> None:
    hand = Hand()
    hand.answer(ledger(1), LedgerEnd(0, 0, -1, has_producers=False), ledger(7))
    lost = MetadataUnavailable()

    assert hand.answer(lost) == DeleteLedger(7)
    assert hand.answer(None) is lost


def test_a_replay_goes_on_until_the_end_and_knows_the_producers() -> None:
    hand = replaying(LedgerEnd(2, 20, 1, has_producers=True))

    assert hand.answer(BatchesRead(((0, entry("a", 0, 0)),), 1)) == ReadBatches(1, 1, 1)
    assert isinstance(hand.answer(BatchesRead(((1, entry("b", 1, 1)),), 2)), CreateLedger)

    (producer,) = hand.machine.producers.snapshot()
    assert [answer.first_offset for answer in producer.answers] == [0, 1]


def test_producers_of_lost_entries_count_as_forgotten() -> None:
    hand = replaying(LedgerEnd(2, 20, 1, has_producers=True))

    hand.answer(BatchesRead((), 1, is_lost=True))
    hand.answer(BatchesRead(((1, entry("b", 1, 1)),), 2))

    assert hand.machine.producers.forgotten_end == 2


def test_damage_is_not_absence() -> None:
    hand = replaying(LedgerEnd(1, 10, 0, has_producers=True))

    assert isinstance(hand.answer(BatchesRead(((0, b"no batch"),), 1)), EntryUnavailable)


def test_a_row_without_room_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "LOG_LEDGERS_MAX", 1)
    hand = Hand()

    assert isinstance(hand.answer(ledger(1), LedgerEnd(1, 9, 0, has_producers=False)), LogFull)


def test_a_seal_makes_no_ledger() -> None:
    hand = Hand(creates=False)

    swap = hand.answer(ledger(1), LedgerEnd(3, 9, 0, has_producers=False))

    assert isinstance(swap, SwapLog)
    assert swap.log.end_offset == 3


def test_a_process_that_ends_ends_its_takeover_once() -> None:
    hand = Hand()

    (done,) = hand.machine.step(Stopped(), NOW)

    assert isinstance(done, TakeoverDone)
    assert isinstance(done.log, WriterLost)
    assert hand.machine.step(Stopped(), NOW) == []
