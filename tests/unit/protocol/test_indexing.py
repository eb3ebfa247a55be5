"""The index of the keys of a sealed ledger: its format, the machine that writes it, and which ledger is next (rule 27e)."""

import random
from dataclasses import replace
from typing import Any

import pytest

from quorumlog.errors import EntryUnavailable, InvalidRequest, MetadataUnavailable, WriterLost
from quorumlog.protocol import batch, packed
from quorumlog.protocol.batch import Record
from quorumlog.protocol.changes import check_log
from quorumlog.protocol.log import NO_KEYS, LogItem, LogMetadata, LogSettings, ledgers_of
from quorumlog.protocol.log import indexing as module
from quorumlog.protocol.log.indexing import INDEXED_BYTES_MIN, Indexing, next_index
from quorumlog.protocol.log.keys import (
    BUCKET_PAIRS,
    KEY_ENTRIES_MAX,
    BadIndex,
    Bucket,
    KeyEntries,
    bucket_of,
    names_all,
)
from quorumlog.protocol.log.messages import (
    BatchesRead,
    CloseLedger,
    CreateLedger,
    ReadBatches,
    ReadLedger,
    ReleaseLedgers,
    RewriteDone,
    RowChanged,
    Stopped,
    SwapLog,
    WriteBatches,
)
from quorumlog.protocol.log.rewrite import CONFLICTS_MAX
from quorumlog.protocol.quorum import Quorum
from tests.unit.protocol.test_rewrite import NOW, Copying, ledger, read

ITEM = LogItem(1, 4, 8, bytes=INDEXED_BYTES_MIN, sealed_ms=10)
SETTINGS = LogSettings(Quorum(1, 1, 1), merge_below_bytes=0)
LOG = LogMetadata("log", SETTINGS, (ITEM, LogItem(4, 9)), version=9, first_offset=4)


def entry(*keys: bytes | None) -> bytes:
    return packed.pack(batch.encode([Record(b"v" * 300, key) for key in keys]))


ENTRIES = (entry(b"a", b"b", b"a"), entry(None), entry(b"b"))


def looked_up(buckets: list[bytes], key: bytes, ledger_id: int = 1, last: int = 2) -> list[int]:
    number = bucket_of(key, len(buckets))
    found = Bucket(buckets[number], buckets=len(buckets), ledger_id=ledger_id, last_entry=last)
    assert found.number == number
    assert found.size == len(buckets[number])
    return list(found.entries_of(key))


class Hand(Copying):
    def __init__(self) -> None:
        super().__init__(Indexing(LOG, ITEM))


def test_an_index_names_the_entries_of_each_key() -> None:
    hand = Hand()

    assert hand.question == ReadLedger(1)
    assert hand.answer(ledger(1, 2)) == ReadBatches(1, 0, 2)
    assert hand.answer(read(*ENTRIES[:2])) == ReadBatches(1, 2, 2)
    assert hand.answer(read(ENTRIES[2], first=2)) == CreateLedger(LOG)
    written = hand.answer(ledger(7, -1))
    assert isinstance(written, WriteBatches)
    assert (written.ledger_id, written.first, len(written.payloads)) == (7, 0, 1)
    buckets = list(written.payloads)
    assert [looked_up(buckets, key) for key in (b"a", b"b", b"c")] == [[0], [0, 2], []]
    assert hand.answer(None) == CloseLedger(7)
    swap = hand.answer(ledger(7, 0))
    assert swap == SwapLog(replace(LOG, items=(replace(ITEM, index=7), LOG.items[1])))
    assert ledgers_of(swap.log.items) == {1, 4, 7}
    assert hand.answer(swap.log) == RewriteDone(swap.log, len(buckets[0]))


def test_a_ledger_without_keys_needs_no_index() -> None:
    hand = Hand()

    swap = hand.answer(ledger(1, 0), read(entry(None)))

    assert isinstance(swap, SwapLog)
    assert swap.log.items[0].index == NO_KEYS
    assert ledgers_of(swap.log.items) == {1, 4}


def test_large_indexes_are_written_in_several_steps() -> None:
    keys = [b"%d" % number for number in range(30 * BUCKET_PAIRS)]
    hand, size = Hand(), 1000
    last = (2 * len(keys) - 1) // size
    asked = hand.answer(ledger(1, last))
    for first in range(0, 2 * len(keys), size):
        part = (keys * 2)[first : first + size]
        asked = hand.answer(read(entry(*part), first=first // size))
    assert asked == CreateLedger(LOG)
    buckets: list[bytes] = []
    asked = hand.answer(ledger(7, -1))
    while isinstance(asked, WriteBatches):
        assert asked.first == len(buckets)
        buckets += asked.payloads
        asked = hand.answer(None)
    assert asked == CloseLedger(7)

    assert len(buckets) == 64
    assert max(map(len, buckets)) < 24 << 10
    for number in random.Random(1).sample(range(len(keys)), 200):
        expected = [number // size, (number + len(keys)) // size]
        assert looked_up(buckets, keys[number], last=last) == expected
    assert looked_up(buckets, b"none", last=last) == []
    about = {"buckets": len(buckets), "ledger_id": 1, "last_entry": last}
    hints = [Bucket(bucket, **about).hints() for bucket in buckets]
    assert all(hints[bucket_of(key, len(buckets))].may_have(key) for key in keys)
    others = [b"other %d" % number for number in range(10_000)]
    found = sum(hints[bucket_of(key, len(buckets))].may_have(key) for key in others)
    assert found < 500, "hints rule out most other keys"


def test_damage_is_never_an_absence() -> None:
    """Each byte of a bucket that differs makes it unusable, and so does a bucket of something else."""
    keys = KeyEntries()
    for number in range(20):
        keys.add(number, {b"k%d" % number, b"all"})
    bucket = keys.bucket(0, 1, 19)
    key = b"k3"
    assert looked_up([bucket], key, last=19) == [3]

    for at in range(len(bucket)):
        wrong = bytearray(bucket)
        wrong[at] ^= 1 << at % 8
        with pytest.raises(BadIndex):
            Bucket(bytes(wrong), buckets=1, ledger_id=1, last_entry=19)
    for cut in (bucket[:-1], bucket[:-12], bucket + bucket[-12:], b"", bucket[:10]):
        with pytest.raises(BadIndex):
            Bucket(cut, buckets=1, ledger_id=1, last_entry=19)
    for other in ({"ledger_id": 2}, {"last_entry": 18}, {"buckets": 2}, {"buckets": 3}):
        about = {"buckets": 1, "ledger_id": 1, "last_entry": 19} | other
        with pytest.raises(BadIndex):
            Bucket(bucket, **about)
    for count in (0, 3, 1 << 13):
        with pytest.raises(BadIndex):
            bucket_of(key, count)


def test_an_index_of_a_key_that_is_everywhere_stays_small() -> None:
    """The bucket names the last entries of such a key, and all entries of the others."""
    keys, count = KeyEntries(), 20 * KEY_ENTRIES_MAX
    hot, rare = b"hot", b"rare"
    for entry_id in range(count):
        keys.add(entry_id, {hot, rare} if entry_id % 5000 == 7 else {hot})
    assert keys.pairs <= 4 * KEY_ENTRIES_MAX + 5

    buckets = [keys.bucket(number, 1, count - 1) for number in range(1 << keys.bits)]

    assert sum(map(len, buckets)) < 64 << 10
    found = looked_up(buckets, b"hot", last=count - 1)
    assert found == list(range(found[0], count)), "the last entries, without gaps"
    assert len(found) >= KEY_ENTRIES_MAX
    assert not names_all(found)
    found = looked_up(buckets, b"rare", last=count - 1)
    assert (found, names_all(found)) == ([7, 5007, 10007, 15007, 20007], True)


def test_keys_whose_hashes_begin_alike_get_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKET_PAIRS_MAX", 2)

    assert Hand().answer(ledger(1, 2), read(*ENTRIES)).spoiled == 1
    monkeypatch.setattr(module, "BUCKET_PAIRS_MAX", 3)
    assert Hand().answer(ledger(1, 2), read(*ENTRIES)) == CreateLedger(LOG)


def test_a_ledger_whose_keys_all_have_too_many_entries_gets_an_index() -> None:
    """A log that named no keys of such a ledger would report its records as absent."""
    count = 5 * KEY_ENTRIES_MAX
    hand = Hand()
    hand.answer(ledger(1, count - 1))

    assert hand.answer(read(*[entry(b"hot")] * count)) == CreateLedger(LOG)
    written = hand.answer(ledger(7, -1))
    buckets = [*written.payloads]
    found = looked_up(buckets, b"hot", last=count - 1)
    assert (found[-1], names_all(found)) == (count - 1, False)


@pytest.mark.parametrize("changes", [{"lost_entries": ((1, 1),)}, {"may_lack_entries": True}])
def test_a_ledger_that_may_lack_entries_gets_no_index(changes: dict[str, Any]) -> None:
    done = Hand().answer(ledger(1, 2, **changes))

    assert isinstance(done, RewriteDone)
    assert isinstance(done.log, EntryUnavailable)
    assert done.spoiled == 1


@pytest.mark.parametrize(
    "wrong",
    [
        BatchesRead((), 1, is_lost=True),
        read(ENTRIES[0], first=1),
        read(b"no batch"),
    ],
)
def test_what_is_no_whole_ledger_gets_no_index(wrong: BatchesRead) -> None:
    done = Hand().answer(ledger(1, 2), wrong)

    assert done.spoiled == 1


def test_too_many_keys_get_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAIRS_MAX", 1)

    assert Hand().answer(ledger(1, 0), read(ENTRIES[0])).spoiled == 1


def closing() -> Hand:
    hand = Hand()
    assert hand.answer(ledger(1, 2), read(*ENTRIES), ledger(7, -1), None) == CloseLedger(7)
    return hand


def test_a_failure_deletes_the_new_ledger() -> None:
    for answers in ([WriterLost()], [ledger(7, 3)], [ledger(7, 0), MetadataUnavailable()]):
        hand = closing()
        assert hand.answer(*answers) == ReleaseLedgers((7,))
        done = hand.answer(None)
        assert isinstance(done, RewriteDone)
        assert not isinstance(done.log, LogMetadata)
        assert done.spoiled is None


def test_the_swap_follows_other_changes() -> None:
    hand = closing()
    hand.answer(ledger(7, 0))
    now = replace(LOG, version=12, items=(*LOG.items, LogItem(5, None)))

    swap = hand.answer(RowChanged(now))

    assert swap == SwapLog(replace(now, items=(replace(ITEM, index=7), *now.items[1:])))


@pytest.mark.parametrize(
    "now",
    [
        LOG.truncated(9),
        replace(LOG, items=(replace(ITEM, index=6), LOG.items[1])),
        replace(LOG, created_at="later"),
        replace(LOG, forked_at=9),
    ],
)
def test_an_index_of_a_ledger_that_is_gone_is_discarded(now: LogMetadata) -> None:
    hand = closing()
    hand.answer(ledger(7, 0))

    assert hand.answer(RowChanged(now)) == ReleaseLedgers((7,))
    assert hand.answer(None) == RewriteDone(None, hand.machine._size)


def test_a_log_that_changes_all_the_time_keeps_no_index() -> None:
    hand = closing()
    asked = hand.answer(ledger(7, 0))
    for _ in range(CONFLICTS_MAX):
        assert isinstance(asked, SwapLog)
        asked = hand.answer(RowChanged(LOG))
    assert asked == ReleaseLedgers((7,))


def test_it_stops() -> None:
    hand = closing()
    (done,) = hand.machine.step(Stopped(), NOW)
    assert isinstance(done, RewriteDone)
    assert hand.machine.step(Stopped(), NOW) == []


def test_the_newest_ledger_that_stays_is_next() -> None:
    big = INDEXED_BYTES_MIN
    settings = replace(SETTINGS, merge_below_bytes=8 * big)
    items = (
        LogItem(1, 0, 0, bytes=4 * big),
        LogItem(2, 1, 1, bytes=4 * big, index=9),
        LogItem(3, 2, 2, bytes=big, replaced=8),
        LogItem(4, 3, 3, bytes=2 * big - 1),
        LogItem(5, 4, 4, bytes=big - 1, replaced=8),
        LogItem(6, 5, bytes=8 * big),
    )
    log = LogMetadata("log", settings, items)

    assert next_index(log) == items[2]
    assert next_index(log, {3}) == items[0]
    assert next_index(log, {3, 1}) is None
    assert next_index(replace(log, forked_at=3), {3}) is None, "others wrote the ledgers"
    small = replace(log, settings=replace(settings, merge_below_bytes=0))
    assert next_index(small) == items[3], "it is never merged"


def test_a_log_names_an_index_once_and_of_sealed_ledgers_only() -> None:
    indexed = LOG.indexed(1, 7)
    assert indexed is not None
    indexed.check()
    with pytest.raises(AssertionError):
        replace(indexed, items=(replace(ITEM, index=4), LOG.items[1])).check()
    with pytest.raises(AssertionError):
        replace(LOG, items=(ITEM, replace(LOG.items[1], index=7))).check()
    assert LOG.indexed(4, 7) is None, "it is open"
    assert LOG.indexed(2, 7) is None, "it is not there"
    assert indexed.indexed(1, 8) is None, "it has an index"
    assert indexed.indexed(1, None, before=7) == LOG


def test_a_fork_shares_an_index_and_gets_no_other() -> None:
    indexed = LOG.indexed(1, 7)
    assert indexed is not None
    fork = indexed.forked(LogMetadata("fork", SETTINGS), 9)
    assert fork.items[0].index == 7

    assert fork.indexed(1, 8, before=7) is None
    assert fork.indexed(1, None, before=7) is not None
    with pytest.raises(InvalidRequest, match="27e"):
        check_log(fork, replace(fork, items=(replace(fork.items[0], index=8),)))


def test_a_rewrite_drops_indexes() -> None:
    items = (replace(ITEM, index=7), LogItem(2, 9, 9, bytes=1), LogItem(4, 10))
    log = replace(LOG, items=items)

    assert ledgers_of(log.rewritten(items[:2], 8, 99).items) == {8, 4}
