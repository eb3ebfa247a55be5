"""A takeover as a machine: which questions it asks, and what it makes of the answers."""

from dataclasses import replace
from typing import Any

import pytest

from quorumlog.errors import EntryUnavailable, LogFull, MetadataUnavailable, WriterLost
from quorumlog.protocol import batch
from quorumlog.protocol.batch import ProducerSeq, Record
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings, LogState, takeover
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
def test_who_swaps_and_finds_the_log_closed_or_its_ledger_sealed_since_yields(
    since: dict[str, Any],
) -> None:
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
