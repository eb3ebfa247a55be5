"""Which ledgers a log merges: few stay, and each byte is rewritten a few times (rule 27c)."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings
from quorumlog.protocol.log.merge import MERGED_MIN, next_merge
from quorumlog.protocol.metadata import REPLACED_MAX
from quorumlog.protocol.quorum import Quorum

MIB = 1 << 20
LOG = LogMetadata("log", LogSettings(Quorum(3, 3, 2)), next_offset=0)


def log(*sizes: int, **settings: int) -> LogMetadata:
    """Sealed ledgers of these sizes, one each second, behind each an open one."""
    items = (
        LogItem(at, 10 * at, 10 * at + 9, bytes=size, sealed_ms=1000 * at)
        for at, size in enumerate(sizes)
    )
    last = LogItem(len(sizes), 10 * len(sizes))
    return replace(LOG, items=(*items, last), settings=LOG.settings.with_limits(settings))


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
def test_a_log_that_gets_a_ledger_each_second_has_few_after_a_day(
    size: Callable[[random.Random], int],
) -> None:
    sizes = random.Random(7)
    row, written, got, most, following = log(), 0, 0, 0, 10**6
    for second in range(86_400):
        new = size(sizes)
        item = replace(row.items[-1], last_offset=10 * second + 9, bytes=new, sealed_ms=second)
        row = replace(row, items=(*row.items[:-1], item, LogItem(second + 1, 10 * second + 10)))
        got += new if new < row.settings.merge_below_bytes else 0
        if second % 30 == 0:
            while items := next_merge(row):
                following += 1
                total = sum(one.bytes for one in items)
                row, written = row.rewritten(items, following, total), written + total
                assert row.item_of(following) is not None
        most = max(most, len(row.items))

    row.check()
    assert most < 500
    assert max(item.replaced for item in row.items) <= REPLACED_MAX
    assert written < 6 * got
