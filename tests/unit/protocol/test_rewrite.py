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
from quorumlog.protocol.log.compaction import Compaction
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
from quorumlog.protocol.log.rewrite import CONFLICTS_MAX, SECONDS_MAX, Rewrite
from quorumlog.protocol.metadata import REPLACED_MAX, DigestKind, Fragment, LedgerMetadata
from quorumlog.protocol.quorum import Quorum

NOW = Now(0, 99)
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
    def __init__(
        self,
        items: Sequence[LogItem] = ITEMS[:2],
        compaction: Compaction | None = None,
        log: LogMetadata = LOG,
    ) -> None:
        super().__init__(Rewrite(log, items, compaction or Compaction()))


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


def keyed(before: int, keys: str, *, packs: bool = False, **options: Any) -> bytes:
    """A batch of records with these keys, each of one letter; their values are their places."""
    records = [Record(b"%d" % (before + n) * 300, key.encode()) for n, key in enumerate(keys)]
    data = batch.placed(
        batch.encode(records, **options), append_time_ms=70 + before, records_before=before
    )
    return packed.pack(data) if packs else data


def compacted(newest: dict[bytes, int], *old: Sequence[bytes]) -> tuple[list[bytes], LogMetadata]:
    """What a compaction of the first ledgers writes, each read at once, and the row it makes."""
    hand = Hand(ITEMS[: len(old)], Compaction(newest, makes_clean=True))
    hand.answer(*[ledger(at, len(each) - 1) for at, each in enumerate(old, 1)], ledger(7, -1))
    written: list[bytes] = []
    asked: Any = None
    for each in old:
        asked = hand.answer(read(*each))
        while isinstance(asked, WriteBatches):
            assert asked.first == len(written)
            written += asked.payloads
            asked = hand.answer(None)
    assert asked == CloseLedger(7)
    swap = hand.answer(ledger(7, len(written) - 1))
    assert isinstance(swap, SwapLog)
    return written, swap.log


def left(written: Sequence[bytes], first: int = 4) -> dict[int, bytes]:
    """The records of a ledger, by offset. Its batches follow on each other."""
    found: dict[int, bytes] = {}
    end = 0
    for data in written:
        columns = batch.opened(packed.unpack(data))
        assert columns.head.records_before == end
        end = columns.head.records_after
        offsets = [first + columns.head.records_before + index for index in columns.indexes]
        found.update(zip(offsets, (record.key or b"" for record in columns.records), strict=True))
    return found


@pytest.mark.parametrize("packs", [False, True])
def test_a_compaction_leaves_out_what_has_a_newer_record(packs: bool) -> None:
    """Rule 27d, clauses 1 and 2."""
    written, row = compacted(
        {b"a": 7, b"b": 5}, (keyed(0, "ab", packs=packs),), (keyed(0, "xay", packs=packs),)
    )

    assert left(written) == {5: b"b", 6: b"x", 7: b"a", 8: b"y"}
    assert [batch.is_packed(data) for data in written] == [packs] * 2
    times = [batch.decode_head(data).append_time_ms for data in written]
    assert times == [70, 77], "the second ledger was published"
    new = row.items[0]
    assert (new.first_offset, new.last_offset, new.compacted_ms) == (4, 8, 99)


def test_offsets_without_records_are_covered() -> None:
    """Rule 27d, clause 2: before a batch that stays whole, and at the end."""
    whole = keyed(1, "b")
    written, _ = compacted(
        {b"a": 8, b"c": 50}, (keyed(0, "a", seq="s"), whole), (keyed(0, "ca"), keyed(2, "c"))
    )

    assert left(written) == {5: b"b"}
    bridge, same, end = written
    assert same == batch.moved(whole, records_before=1, append_time_ms=71)
    assert batch.decode_head(bridge).seq == "s"
    assert batch.decode_head(end).records_after == 5

    none, row = compacted({b"a": 50}, (keyed(0, "aa"),), (keyed(0, "aaa"),))
    assert (len(none), left(none), row.items[0].last_offset) == (1, {}, 8)
    hand = Hand(ITEMS[:1], Compaction({}))
    hand.answer(ledger(1, 0), ledger(7, -1))
    again = hand.answer(read(batch.emptied(batch.decode_head(keyed(0, "aa")), 2)))
    assert isinstance(again, WriteBatches), "a ledger has at least one batch"
    assert left(again.payloads) == {}


def test_a_batch_that_lost_records_has_no_producer() -> None:
    """Rule 27d, clause 7: whoever replays the ledger must see that requests are missing."""
    producer = ProducerSeq("p", 0, 3)
    written, _ = compacted(
        {b"a": 50}, (keyed(0, "ab", producer=producer),), (keyed(0, "c"), keyed(1, "aa"))
    )

    heads = [batch.decode_head(data) for data in written]
    assert [head.producer for head in heads] == [None] * 3
    assert [head.has_gaps for head in heads] == [True, False, True]
    assert heads[-1].after_producer


def test_a_merge_of_a_compacted_ledger_keeps_its_gaps() -> None:
    written, _ = compacted({b"a": 50}, (keyed(0, "ab"),))
    hand = Hand(ITEMS[:2])
    hand.answer(ledger(1, 0), ledger(2, 0), ledger(7, -1))

    first = hand.answer(read(*written))
    hand.answer(None)
    second = hand.answer(read(keyed(0, "xyz")))

    assert left([*first.payloads, *second.payloads]) == {5: b"b", 6: b"x", 7: b"y", 8: b"z"}


def test_a_merge_is_clean_if_all_its_parts_are() -> None:
    """Rule 27d."""
    clean = tuple(replace(item, compacted_ms=5 + at) for at, item in enumerate(ITEMS[:2]))

    assert Compaction().compacted(clean, 99) == 6
    assert Compaction().compacted((clean[1], ITEMS[2]), 99) == 0
    assert LOG.rewritten(ITEMS[:2], 7, 1, 6).items[0].compacted_ms == 6


def test_a_merge_leaves_out_what_has_expired() -> None:
    """Rule 27f: by the time of the publication, where there is one."""
    records = [Record(b"a", ttl_s=1), Record(b"b"), Record(b"c", ttl_s=2)]
    data = batch.placed(batch.encode(records), append_time_ms=70, records_before=0)
    hand = Hand(ITEMS[1:2], Compaction(now_ms=1077))
    hand.answer(ledger(2, 0), ledger(7, -1))

    written = hand.answer(read(data))

    (thinned,) = written.payloads
    assert batch.opened(thinned).records == records[1:]
    doubted = Hand(ITEMS[1:2])
    doubted.answer(ledger(2, 0), ledger(7, -1))
    (whole,) = doubted.answer(read(data)).payloads
    assert batch.opened(whole).records == records


SETTINGS = replace(LOG.settings, cleanup_policy="compact")
COMPACTED = replace(LOG, settings=SETTINGS)


def scan(newest: dict[bytes, int], log: LogMetadata = COMPACTED, **options: Any) -> Hand:
    """A compaction of the first ledger, `ab`, as a pass asks for it, up to the end of its scan."""
    made = Compaction(newest, makes_clean=True, settings=SETTINGS, **options)
    hand = Hand(log.items[:1], made, log)
    assert hand.answer(ledger(1, 0)) == ReadBatches(1, 0, 0)
    hand.answer(read(keyed(0, "ab")))
    return hand


def test_a_ledger_of_which_nothing_goes_is_only_marked() -> None:
    """It is not written again, and does not count as replaced, however many passes it sees."""
    swap = scan({b"a": 4, b"x": 50}).question

    assert isinstance(swap, SwapLog)
    assert swap.log.items == (replace(ITEMS[0], compacted_ms=99), *LOG.items[1:])
    was = replace(ITEMS[0], compacted_ms=5)
    clean = replace(COMPACTED, items=(was, *LOG.items[1:]))
    assert scan({}, clean).last == RewriteDone(clean, 0)


def test_a_ledger_of_which_a_record_goes_is_read_again() -> None:
    hand = scan({b"a": 50})

    assert hand.question == CreateLedger(COMPACTED)
    assert hand.answer(ledger(7, -1)) == ReadBatches(1, 0, 0)
    written = hand.answer(read(keyed(0, "ab")))
    assert left(written.payloads) == {5: b"b"}


@pytest.mark.parametrize(
    "changes",
    [
        {"cleanup_policy": "delete"},
        {"delete_retention_s": 10**6},
        {"min_compaction_lag_s": 1},
    ],
)
def test_a_change_of_the_policy_ends_a_compaction(changes: dict[str, Any]) -> None:
    """An operator has asked to keep what it would remove."""
    hand = scan({b"a": 50})
    hand.answer(ledger(7, -1), read(keyed(0, "ab")), None, ledger(7, 0))
    assert isinstance(hand.question, SwapLog)

    dropped = hand.answer(RowChanged(COMPACTED.with_limits(changes)))

    assert dropped == ReleaseLedgers((7,))
    assert hand.answer(None) == RewriteDone(None, 55)


def test_a_compaction_needs_the_ledgers_with_the_newer_records() -> None:
    """Rule 27d, clause 1."""
    hand = scan({b"a": 50}, sources={2, 4})
    hand.answer(ledger(7, -1), read(keyed(0, "ab")), None, ledger(7, 0))
    assert isinstance(hand.question, SwapLog)
    other = replace(COMPACTED, items=(ITEMS[0], replace(ITEMS[1], ledger_id=9), *LOG.items[2:]))

    assert hand.answer(RowChanged(other)) == ReleaseLedgers((7,))


def test_a_batch_covers_no_more_offsets_than_it_can_count() -> None:
    """Each of these old ledgers has lost all its records."""
    whole = (1 << 31) - 5
    head = replace(batch.decode_head(keyed(0, "a")), count=whole)
    gone = batch.emptied(head, whole)
    after = batch.moved(keyed(0, "ab"), records_before=whole, append_time_ms=7)
    item = replace(ITEMS[0], last_offset=3 + 2 * whole + 2)
    log = replace(LOG, items=(item, replace(LAST, first_offset=4 + 2 * whole + 2)))
    hand = Hand(log.items[:1], Compaction({b"a": 1 << 40}), log)
    hand.answer(ledger(1, 2), ledger(7, -1))
    second = batch.emptied(replace(head, records_before=whole), whole)
    last = batch.moved(after, records_before=2 * whole, append_time_ms=7)

    written = hand.answer(read(gone, second, last))

    heads = [batch.decode_head(data) for data in written.payloads]
    assert [(each.records_before, each.count) for each in heads] == [
        (0, whole),
        (whole, whole + 2),
    ]
    assert left(written.payloads) == {4 + 2 * whole + 1: b"b"}


def test_a_rewrite_that_takes_too_long_is_not_tried_again() -> None:
    """Its new ledger would count as an orphan."""
    hand = Hand(ITEMS[:1])
    hand.answer(ledger(1, 1), ledger(7, -1), read(FIRST[0]))
    assert isinstance(hand.last, Ask)

    late = Now(0, 99, SECONDS_MAX + 1)
    (asked,) = hand.machine.step(Answered(hand.last.number, None), late)

    assert isinstance(asked, Ask)
    assert asked.question == ReleaseLedgers((7,))
    (done,) = hand.machine.step(Answered(asked.number, None), late)
    assert isinstance(done, RewriteDone)
    assert done.spoiled == 1
