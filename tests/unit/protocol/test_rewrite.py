"""Rewrites of sealed ledgers: what is copied and swapped, and what is chosen to be merged (rule 27c)."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from quorumlog.errors import EntryUnavailable, InvalidRequest, MetadataUnavailable, WriterLost
from quorumlog.protocol import batch, packed
from quorumlog.protocol.batch import ProducerSeq, Record
from quorumlog.protocol.changes import check_log, rewritten_by
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.indexing import Indexing
from quorumlog.protocol.log.merge import MERGED_MIN, next_merge
from quorumlog.protocol.log.messages import (
    Answered,
    Ask,
    BatchesRead,
    BeginRewrite,
    CloseLedger,
    CreateLedger,
    Question,
    ReadBatches,
    ReadLedger,
    ReleaseLedgers,
    RewriteDone,
    RowChanged,
    Stopped,
    SwapLog,
    WriteBatches,
)
from quorumlog.protocol.log.rewrite import CONFLICTS_MAX, Rewrite
from quorumlog.protocol.metadata import REPLACED_MAX, DigestKind, Fragment, LedgerMetadata
from quorumlog.protocol.quorum import Quorum

NOW = Now(0, 0)
ITEMS = (
    LogItem(1, 4, 5, bytes=20, sealed_ms=10),
    LogItem(2, 6, 8, bytes=30, sealed_ms=11, published_ms=77),
    LogItem(3, 9, 9, bytes=10, sealed_ms=12),
)
LAST = LogItem(4, 10)
LOG = LogMetadata("log", LogSettings(Quorum(1, 1, 1)), (*ITEMS, LAST), version=9, first_offset=4)


def entry(
    count: int, before: int, time_ms: int, *, after_producer: bool = True, **options: Any
) -> bytes:
    data = batch.encode([Record(b"%d" % n) for n in range(count)], **options)
    return batch.placed(
        data, append_time_ms=time_ms, records_before=before, after_producer=after_producer
    )


FIRST = (entry(1, 0, 70), entry(1, 1, 71, producer=ProducerSeq("p", 0, 3)))
SECOND = (packed.pack(entry(3, 0, 5, producer=ProducerSeq("q", 0, 0), seq="s")),)


def ledger(ledger_id: int, last: int, **changes: Any) -> LedgerMetadata:
    row = LedgerMetadata(
        ledger_id, LOG.settings.quorum, DigestKind.CRC32C, (Fragment(0, ("b1@1",)),), log="log"
    )
    return replace(row.closed(last_entry=last, length=55), **changes)


class Copying:
    """A machine that copies ledgers, and the question or result that it came to last."""

    def __init__(self, machine: Rewrite | Indexing) -> None:
        self.machine = machine
        (self.last,) = machine.step(BeginRewrite(), NOW)

    @property
    def question(self) -> Question:
        assert isinstance(self.last, Ask)
        return self.last.question

    def answer(self, *values: Any) -> Any:
        """Answer the questions in turn; gives the next one, or the result."""
        for value in values:
            assert isinstance(self.last, Ask)
            (self.last,) = self.machine.step(Answered(self.last.number, value), NOW)
        return self.last if isinstance(self.last, RewriteDone) else self.question


def read(*entries: bytes, first: int = 0) -> BatchesRead:
    return BatchesRead(tuple(enumerate(entries, first)), first + len(entries))


class Hand(Copying):
    def __init__(self, items: Sequence[LogItem] = ITEMS[:2]) -> None:
        super().__init__(Rewrite(LOG, items))


def closing() -> Hand:
    """A rewrite that has written all and closes its ledger."""
    hand = Hand()
    hand.answer(ledger(1, 1), ledger(2, 0), ledger(7, -1), read(*FIRST), None, read(*SECOND))
    assert hand.answer(None) == CloseLedger(7)
    return hand


def test_the_batches_are_written_at_the_same_offsets_and_times() -> None:
    hand = Hand()

    assert hand.question == ReadLedger(1)
    assert hand.answer(ledger(1, 1)) == ReadLedger(2)
    assert hand.answer(ledger(2, 0)) == CreateLedger(LOG)
    assert hand.answer(ledger(7, -1)) == ReadBatches(1, 0, 1)
    assert hand.answer(read(FIRST[0])) == WriteBatches(7, 0, FIRST[:1])
    assert hand.answer(None) == ReadBatches(1, 1, 1)
    assert hand.answer(read(FIRST[1], first=1)) == WriteBatches(7, 1, FIRST[1:])
    assert hand.answer(None) == ReadBatches(2, 0, 0)
    written = hand.answer(read(*SECOND))

    assert isinstance(written, WriteBatches)
    (moved,) = written.payloads
    head, before = batch.decode_head(moved), batch.decode_head(SECOND[0])
    assert head == replace(before, records_before=2, append_time_ms=77)
    assert batch.content(moved) == batch.content(SECOND[0])
    assert batch.decode(packed.unpack(moved))[1] == batch.decode(packed.unpack(SECOND[0]))[1]


@pytest.mark.parametrize("flags", [(0, 0, 1), (0, 1, 1), (1, 1, 1), (0, 0, 0)])
def test_the_last_batch_tells_of_producers_before_it(flags: tuple[int, int, int]) -> None:
    """A takeover that would replay the new ledger looks at its last batch alone."""
    has_producer = any(flags)
    producer = ProducerSeq("p", 0, 3) if has_producer and not flags[0] else None
    old = (
        entry(1, 0, 70, after_producer=bool(flags[0]), producer=producer if flags[1] else None),
        entry(1, 1, 71, after_producer=bool(flags[1]), producer=None if flags[1] else producer),
    )
    hand = Hand()
    hand.answer(ledger(1, 1), ledger(2, 0), ledger(7, -1))

    first = hand.answer(read(*old))
    hand.answer(None)
    second = hand.answer(read(entry(3, 0, 5, after_producer=False)))

    written = [*first.payloads, *second.payloads]
    assert [batch.decode_head(each).after_producer for each in written] == [*map(bool, flags)]


def test_the_new_ledger_takes_the_items_place_and_the_old_ones_are_released() -> None:
    hand = closing()

    swap = hand.answer(ledger(7, 2))

    assert isinstance(swap, SwapLog)
    new = LogItem(7, 4, 8, bytes=55, sealed_ms=11, replaced=2)
    assert swap.log == replace(LOG, items=(new, *ITEMS[2:], LAST))
    assert hand.answer(swap.log) == ReleaseLedgers((1, 2))
    assert hand.answer(MetadataUnavailable()) == RewriteDone(swap.log, 55)


def test_a_row_that_changed_elsewhere_is_swapped_again() -> None:
    hand = closing()
    hand.answer(ledger(7, 2))
    rolled = replace(LOG, version=10, items=(*ITEMS, replace(LAST, last_offset=19), LogItem(5, 20)))

    swap = hand.answer(RowChanged(rolled))

    assert isinstance(swap, SwapLog)
    assert [item.ledger_id for item in swap.log.items] == [7, 3, 4, 5]
    for _ in range(CONFLICTS_MAX - 2):
        assert isinstance(hand.answer(RowChanged(rolled)), SwapLog)
    assert hand.answer(RowChanged(rolled)) == ReleaseLedgers((7,))


@pytest.mark.parametrize(
    "now",
    [
        LOG.truncated(6),
        replace(LOG, items=(LogItem(6, 4, 8, replaced=2), *LOG.items[2:])),
        replace(LOG, created_at="another"),
        replace(LOG, forked_at=6),
        replace(LOG, items=(ITEMS[0], replace(ITEMS[1], last_offset=None))),
        replace(LOG, items=ITEMS[:2], next_offset=9),
    ],
    ids=["truncated", "rewritten", "replaced", "shared", "unsealed", "base"],
)
def test_a_row_that_no_longer_names_the_items_so_is_left(now: LogMetadata) -> None:
    hand = closing()
    hand.answer(ledger(7, 2))

    assert hand.answer(RowChanged(replace(now, version=10))) == ReleaseLedgers((7,))
    assert hand.answer(None) == RewriteDone(None, 55)


@pytest.mark.parametrize(
    "first",
    [
        replace(ledger(1, 1), lost_entries=((0, 0),), may_lack_entries=True),
        replace(ledger(1, 1), may_lack_entries=True),
        LedgerMetadata(1, Quorum(1, 1, 1), DigestKind.CRC32C, (Fragment(0, ("b1@1",)),)),
    ],
    ids=["lost", "may-lack", "open"],
)
def test_only_a_whole_closed_ledger_is_rewritten(first: LedgerMetadata) -> None:
    hand = Hand()

    done = hand.answer(first)

    assert isinstance(done, RewriteDone)
    assert (type(done.log), done.spoiled) == (EntryUnavailable, 1)


@pytest.mark.parametrize(
    "found",
    [
        read(FIRST[1]),
        read(FIRST[0], FIRST[0]),
        read(entry(1, 0, 70, is_end=True)),
        read(b"no batch"),
        BatchesRead(((1, FIRST[1]),), 2),
        BatchesRead(((0, FIRST[0]),), 2),
        BatchesRead((), 2, is_lost=True),
    ],
    ids=["gap", "twice", "mark", "damaged", "left-out", "left-out-at-the-end", "lost"],
)
def test_a_batch_that_does_not_continue_the_log_is_not_written(found: BatchesRead) -> None:
    hand = Hand()
    hand.answer(ledger(1, 1), ledger(2, 0), ledger(7, -1))

    assert hand.answer(found) == ReleaseLedgers((7,))
    done = hand.answer(None)
    assert isinstance(done, RewriteDone)
    assert done.spoiled == 1


def test_a_ledger_with_fewer_records_than_the_row_says_is_not_replaced() -> None:
    hand = Hand()
    hand.answer(ledger(1, 0), ledger(2, 0), ledger(7, -1), read(FIRST[0]))

    assert hand.answer(None) == ReleaseLedgers((7,))


def test_a_new_ledger_that_ends_elsewhere_takes_no_place() -> None:
    hand = closing()

    assert hand.answer(ledger(7, 1)) == ReleaseLedgers((7,))
    done = hand.answer(None)
    assert isinstance(done.log, WriterLost)


def test_a_swap_of_an_unknown_outcome_releases_what_no_log_names() -> None:
    hand = closing()
    hand.answer(ledger(7, 2))
    lost = MetadataUnavailable()

    assert hand.answer(lost) == ReleaseLedgers((7,))
    assert hand.answer(None) == RewriteDone(lost, 55)


def test_nothing_follows_the_end_of_the_process() -> None:
    hand = closing()

    (done,) = hand.machine.step(Stopped(), NOW)

    assert isinstance(done, RewriteDone)
    assert isinstance(hand.last, Ask)
    assert hand.machine.step(Answered(hand.last.number, ledger(7, 2)), NOW) == []
    assert hand.machine.step(Stopped(), NOW) == []


# --- the row --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "items",
    [(), (ITEMS[0], ITEMS[2]), (ITEMS[1], ITEMS[0]), (*ITEMS, LAST), (LAST,), (LogItem(1, 4, 5),)],
    ids=["none", "apart", "in-another-order", "the-last", "open", "otherwise"],
)
def test_only_adjacent_sealed_items_as_they_are_may_be_replaced(items: tuple[LogItem, ...]) -> None:
    assert not LOG.names_sealed(items)


def test_a_second_rewrite_counts_what_the_first_one_replaced() -> None:
    once = LOG.rewritten(ITEMS[:2], 7, 50)

    twice = once.rewritten(once.items[:2], 8, 60)

    assert twice.items == (LogItem(8, 4, 9, bytes=60, sealed_ms=12, replaced=4), LAST)
    twice.check()


def test_a_lineage_names_all_that_a_ledger_has_replaced() -> None:
    row = LOG.rewritten(ITEMS[:2], 7, 50)

    lineages = row.lineages({3, 7}, {7: ((1, 4), (2, 6))})

    assert lineages[7].replaced == ((1, 4), (2, 6))
    assert (lineages[3].replaced, lineages[3].before) == ((), ((7, 4),))


def test_a_rewrite_is_a_legal_change() -> None:
    row = LOG.rewritten(ITEMS[:2], 7, 50)

    check_log(LOG, row)

    assert rewritten_by(LOG, row) == {7: ITEMS[:2]}
    closed = replace(LOG, items=(*ITEMS, LogItem(4, 10, 9)), next_offset=10)
    assert rewritten_by(closed, closed.rewritten(ITEMS, 7, 60)) == {7: ITEMS}, "the last is empty"
    assert rewritten_by(LOG, LOG.truncated(9)) == {}


class Counted(tuple[LogItem, ...]):
    """Items that count how often someone passes over them."""

    __slots__ = ()
    passes: ClassVar[int] = 0

    def __iter__(self) -> Iterator[LogItem]:
        Counted.passes += 1
        return super().__iter__()


@pytest.mark.parametrize("kind", ["roll", "merge", "truncation", "many merges"])
def test_the_cost_of_a_change_grows_with_the_log_and_not_with_its_square(kind: str) -> None:
    """The metadata service checks it on its event loop: 9,000 ledgers took half a minute."""
    passes = []
    for count in (80, 800):
        items = tuple(LogItem(at, 10 * at, 10 * at + 9) for at in range(count))
        old = replace(LOG, items=(*items, LogItem(count, 10 * count)), first_offset=0)
        match kind:
            case "roll":
                new = old.with_ledger(count + 1)
            case "truncation":
                new = old.truncated(300)
            case "merge":
                new = old.rewritten(items[8:40], 9000, 9)
            case _:
                new = old.rewritten(items[8:24], 9000, 9).rewritten(items[40:70], 9001, 9)
        old, new = (replace(row, items=Counted(row.items)) for row in (old, new))
        Counted.passes = 0

        check_log(old, new)

        passes.append(Counted.passes)
    assert passes[0] == passes[1] < 20


@pytest.mark.parametrize(
    ("old", "items"),
    [
        (LOG, (LogItem(7, 4, 7), LogItem(8, 8, 8), *LOG.items[2:])),
        (LOG, (LogItem(7, 5, 8), *LOG.items[2:])),
        (LOG, (LogItem(7, 4, 8), LogItem(2, 9, 8), *LOG.items[2:])),
        (LOG, (LogItem(7, 4), LAST)),
        (LOG, (LogItem(7, 4, 99),)),
        (replace(LOG, forked_at=6), (LogItem(7, 4, 8), *LOG.items[2:])),
        (LOG, (LogItem(7, 0, 3), *LOG.items)),
        (replace(LOG, items=ITEMS, next_offset=10), (*ITEMS[:2], LogItem(7, 9, 9))),
    ],
    ids=["parts", "begins-within", "both", "no-end", "the-last-too", "shared", "before", "base"],
)
def test_other_ledgers_below_the_last_fail(old: LogMetadata, items: tuple[LogItem, ...]) -> None:
    with pytest.raises(InvalidRequest):
        check_log(old, replace(old, items=items))


MIB = 1 << 20
EMPTY = LogMetadata("log", LogSettings(Quorum(3, 3, 2)), next_offset=0)


def log(*sizes: int, **settings: int) -> LogMetadata:
    """Sealed ledgers of these sizes, one each second, behind each an open one."""
    items = (
        LogItem(at, 10 * at, 10 * at + 9, bytes=size, sealed_ms=1000 * at)
        for at, size in enumerate(sizes)
    )
    last = LogItem(len(sizes), 10 * len(sizes))
    return replace(EMPTY, items=(*items, last), settings=EMPTY.settings.with_limits(settings))


def ids(row: LogMetadata) -> list[int]:
    return [item.ledger_id for item in next_merge(row)]


@pytest.mark.parametrize("size", [100, 3000, 10 * MIB])
def test_as_many_as_there_are_are_merged_where_they_are_alike(size: int) -> None:
    assert ids(log(*[size] * (MERGED_MIN - 1))) == []
    assert ids(log(*[size] * (MERGED_MIN + 2))) == [*range(MERGED_MIN + 2)]


def test_small_ones_are_merged_apart_from_a_large_one() -> None:
    small = [1000] * MERGED_MIN

    assert ids(log(MIB, *small)) == [*range(1, MERGED_MIN + 1)]
    assert ids(log(MIB, *small[1:])) == []
    assert ids(log(*[MIB, 1000] * MERGED_MIN)) == [*range(2 * MERGED_MIN)]


def test_what_is_large_empty_or_of_others_stays_as_it_is() -> None:
    alike = [100 * MIB] * 20

    assert ids(log(*alike)) == []
    assert ids(log(*[0] * 20)) == [*range(20)]
    assert ids(log(*[5] * 20, merge_below_bytes=0)) == []
    assert ids(replace(log(*[5] * 20), forked_at=100)) == [*range(10, 20)]
    row = log(*[5] * 20)
    sealed = replace(row, items=row.items[:-1], next_offset=200)
    assert ids(sealed) == [*range(19)], "a takeover replays the last one"
    assert [one.ledger_id for one in next_merge(row, {3})] == [*range(4, 20)]


def test_a_merge_is_as_large_as_the_settings_allow() -> None:
    assert ids(log(*[10 * MIB] * 40)) == [*range(12)]
    assert ids(log(*[MIB] * 400, retention_bytes=96 * MIB)) == [*range(12)]
    assert ids(log(*[MIB] * 400, retention_seconds=80)) == [*range(11)]
    many = log(*[5] * 20)
    full = [replace(item, replaced=REPLACED_MAX // 10) for item in many.items[:-1]]
    assert ids(replace(many, items=(*full, many.items[-1]))) == [*range(9)]


def test_a_gap_between_larger_ones_is_merged_once() -> None:
    gap = [1000, 9000, *[1000] * (MERGED_MIN - 2)]

    assert ids(log(MIB, *gap, MIB)) == [*range(1, MERGED_MIN + 1)]
    assert ids(log(MIB, *gap[1:], MIB)) == []
    assert ids(log(MIB, *gap)) == [], "others may join them"
    assert ids(log(MIB, 9000 + 1000 * (MERGED_MIN - 1), MIB)) == []


def alike(_: random.Random) -> int:
    return 300


def spread(sizes: random.Random) -> int:
    """A few ledgers have most of the bytes."""
    return int(1000 * sizes.paretovariate(0.8))


def mixed(sizes: random.Random) -> int:
    return 4 * MIB if sizes.random() < 0.02 else 2000


@pytest.mark.parametrize("size", [alike, spread, mixed])
def test_a_log_with_a_ledger_a_second_has_few(size: Callable[[random.Random], int]) -> None:
    sizes = random.Random(7)
    row, written, got, most, following = log(), 0, 0, 0, 10**6
    for begin in range(0, 86_400, 30):
        sealed, last = list[LogItem](), row.items[-1]
        for second in range(begin, begin + 30):
            new = size(sizes)
            sealed.append(replace(last, last_offset=10 * second + 9, bytes=new, sealed_ms=second))
            last = LogItem(second + 1, 10 * second + 10)
            got += new if new < row.settings.merge_below_bytes else 0
        row = replace(row, items=(*row.items[:-1], *sealed, last))
        most = max(most, len(row.items))
        while items := next_merge(row):
            following += 1
            total = sum(one.bytes for one in items)
            row, written = row.rewritten(items, following, total), written + total
            assert row.item_of(following) is not None

    row.check()
    assert most < 500
    assert max(item.replaced for item in row.items) <= REPLACED_MAX
    assert written < 6 * got
