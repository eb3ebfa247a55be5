"""Which ledgers a log compacts, in which order, and which records stay (rule 27d)."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from quorumlog.protocol import batch
from quorumlog.protocol.batch import Columns, Record
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings
from quorumlog.protocol.log.compaction import (
    GROUP_BYTES_MAX,
    Compaction,
    NewestOffsets,
    Pass,
    digest,
    next_pass,
)
from quorumlog.protocol.metadata import REPLACED_MAX
from quorumlog.protocol.quorum import Quorum

NOW = 1_000_000_000
DAY_MS = 86_400_000
SETTINGS = LogSettings(Quorum(1, 1, 1), cleanup_policy="compact")
LOG = LogMetadata("log", SETTINGS, next_offset=0)
OLD = NOW - DAY_MS


def log(*made: int | LogItem, **changes: Any) -> LogMetadata:
    """Sealed ledgers of 10 records, with `compacted_ms` or as given, and an open one behind them."""
    items = [
        replace(
            LogItem(at, 0, bytes=100, compacted_ms=each) if isinstance(each, int) else each,
            ledger_id=at,
            first_offset=10 * at,
            last_offset=10 * at + 9,
        )
        for at, each in enumerate(made)
    ]
    last = LogItem(len(items), 10 * len(items))
    return replace(LOG, items=(*items, last), **changes)


def due(row: LogMetadata, **options: Any) -> Pass:
    found = next_pass(row, NOW, **options)
    assert found is not None
    return found


def ids(items: Sequence[LogItem]) -> list[int]:
    return [item.ledger_id for item in items]


def groups(row: LogMetadata) -> list[list[int]]:
    return [ids(group) for group in due(row).groups]


def columns(*records: tuple[str | None, str | None]) -> Columns:
    """A batch of keys and values; a value of None is a tombstone."""
    return batch.opened(
        batch.encode(
            [
                Record(
                    b"" if value is None else value.encode(),
                    None if key is None else key.encode(),
                    is_tombstone=value is None,
                )
                for key, value in records
            ]
        )
    )


def test_a_pass_takes_the_ledgers_behind_the_last_pass_and_all_earlier_ones() -> None:
    found = due(log(OLD, 5, 0, 7, 0))

    assert (ids(found.clean), ids(found.dirty), found.is_whole) == ([0, 1], [2, 3, 4], True)


@pytest.mark.parametrize(
    "row",
    [
        log(0, 0, settings=replace(SETTINGS, cleanup_policy="delete")),
        log(7, 7),
        log(),
        log(LogItem(0, 0, sealed_ms=NOW), settings=replace(SETTINGS, min_compaction_lag_s=1)),
    ],
)
def test_a_log_without_ledgers_to_compact_has_no_pass(row: LogMetadata) -> None:
    assert next_pass(row, NOW) is None


@pytest.mark.parametrize(("percent", "is_due"), [(0, True), (25, True), (26, False)])
def test_a_pass_is_due_from_a_share_of_dirty_bytes_on(percent: int, is_due: bool) -> None:
    settings = replace(SETTINGS, max_dirty_percent=percent)

    assert due(log(7, 7, 7, 0, settings=settings)).is_due is is_due


def test_young_ledgers_and_what_a_takeover_replays_stay() -> None:
    young = LogItem(0, 0, sealed_ms=NOW - 999)
    row = log(0, young, 0, settings=replace(SETTINGS, min_compaction_lag_s=1))
    sealed = replace(log(0, 0, 0), items=log(0, 0, 0).items[:-1], next_offset=30)

    assert ids(due(row).dirty) == [0]
    assert ids(due(sealed).dirty) == [0, 1], "a takeover replays the last one"


def test_a_pass_ends_before_a_ledger_that_cant_be_rewritten_now() -> None:
    """Else a later pass takes a tombstone behind it for the only record of its key."""
    assert ids(due(log(0, 0, 0), spoiled={1}).dirty) == [0]
    assert next_pass(log(0, 0), NOW, {0}) is None


def test_ledgers_that_no_pass_will_ever_take_are_left_out() -> None:
    full = LogItem(0, 0, replaced=REPLACED_MAX, bytes=100)
    row = log(0, full, 0)

    assert (ids(due(row).dirty), due(row).is_whole) == ([0, 2], False)
    assert groups(row) == [[0], [2]], "they are not adjacent"
    fork = log(0, 0, forked_at=10)
    assert (ids(due(fork).dirty), due(fork).is_whole) == ([1], False)


def test_ledgers_whose_tombstones_must_stay_are_rewritten_alone() -> None:
    """Else the tombstones of all would stay for as long as those of the latest one."""
    assert groups(log(OLD, OLD - 1, OLD + 1, OLD + 2, 0, 0)) == [[0, 1], [2], [3], [4, 5]]
    assert due(log(OLD, OLD + 1, 0)).expired == {0}
    full = LogItem(0, 0, replaced=REPLACED_MAX)
    assert due(log(full, OLD, 0)).expired == frozenset()


def test_a_group_is_as_large_as_one_ledger_may_be() -> None:
    half = LogItem(0, 0, bytes=GROUP_BYTES_MAX // 2)
    many = LogItem(0, 0, replaced=REPLACED_MAX // 16)

    assert groups(log(half, half, half)) == [[0, 1], [2]]
    assert groups(log(many, many, many)) == [[0], [1], [2]]


def test_the_newest_record_of_each_key_stays() -> None:
    newest = NewestOffsets()
    newest.learn(100, columns(("a", "1"), ("b", "2"), ("a", "3"), (None, "4")))
    made = Compaction(newest.offsets)
    item = LogItem(1, 0)

    assert made.survivors(item, 100, columns(("a", "1"), ("b", "2"), ("a", "3"), (None, "4"))) == [
        1,
        2,
        3,
    ]
    assert made.survivors(item, 0, columns(("a", "0"), ("c", "0"), ("b", "0"))) == [1]
    assert made.survivors(item, 102, columns(("a", "3"), ("c", "5"))) is None
    assert made.survivors(item, 0, columns((None, "a"))) is None


def test_tombstones_go_only_from_ledgers_that_kept_them_long_enough() -> None:
    made = Compaction({}, {1})
    found = columns(("a", None), ("b", "2"))

    assert made.survivors(LogItem(1, 0), 0, found) == [1]
    assert made.survivors(LogItem(2, 0), 0, found) is None


def test_a_new_ledger_is_clean_since_its_latest_part() -> None:
    made, later = Compaction({}, (), 9), Compaction({}, (), 0)

    assert made.compacted(log(3, 5).items[:2]) == 5
    assert made.compacted(log(0, 5).items[:2]) == 9
    assert later.compacted(log(0, 5).items[:2]) == 0


def test_parts_of_the_keys_are_all_keys() -> None:
    keys = [f"key {number}" for number in range(100)]
    found = columns(*[(key, "") for key in keys])
    parts: list[Mapping[bytes, int]] = []
    for part in range(3):
        newest = NewestOffsets(part, 3, keys_max=50)
        newest.learn(7, found)
        assert not newest.is_full
        parts.append(newest.offsets)

    whole = NewestOffsets(keys_max=99)
    whole.learn(7, found)
    assert whole.is_full
    assert {**parts[0], **parts[1], **parts[2]} == whole.offsets
    assert sum(map(len, parts)) == 100


def test_digests_differ() -> None:
    rng = random.Random(5)
    keys = {rng.randbytes(size) for size in range(40) for _ in range(50)}

    assert len({digest(key) for key in keys}) == len(keys)
    assert max(map(len, map(digest, keys))) == 16
