"""Which ledgers a log compacts, in which order, and which records stay (rule 27d)."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import pytest

from quorumlog.protocol import batch
from quorumlog.protocol.batch import Columns, Record
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings, compaction, merge
from quorumlog.protocol.log.compaction import (
    DIRTY_BYTES_MIN,
    GROUP_BYTES_MAX,
    Compaction,
    NewestOffsets,
    Pass,
    PassState,
    digest,
    next_pass,
)
from quorumlog.protocol.log.merge import MERGE_BYTES_MAX, next_merge
from quorumlog.protocol.metadata import REPLACED_MAX
from quorumlog.protocol.quorum import Quorum
from tests.mutation.mutants.hunt import Guard, Patch, applied, stand_in, swap

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
    clean, dirty = (LogItem(0, 0, bytes=DIRTY_BYTES_MIN, compacted_ms=each) for each in (7, 0))

    assert due(log(clean, clean, clean, dirty, settings=settings)).is_due is is_due


def test_a_pass_is_worth_its_effort() -> None:
    """Each pass may write all clean ledgers anew, and a ledger can be replaced 1,000 times only."""
    merged = LogItem(0, 0, bytes=100, replaced=6)

    assert due(log(0)).is_due, "the first one"
    assert not due(log(7, *[0] * 7)).is_due
    assert due(log(7, *[0] * 8)).is_due
    assert due(log(7, merged, 0)).is_due
    assert due(log(7, LogItem(0, 0, bytes=DIRTY_BYTES_MIN))).is_due


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


@pytest.mark.parametrize("fixed", [{"replaced": REPLACED_MAX}, {"bytes": MERGE_BYTES_MAX + 1}])
def test_ledgers_that_no_pass_will_ever_take_are_left_out(fixed: dict[str, Any]) -> None:
    full = replace(LogItem(0, 0, bytes=100), **fixed)
    row = log(0, full, 0)

    assert (ids(due(row).dirty), due(row).is_whole) == ([0, 2], False)
    assert groups(row) == [[0], [2]], "they are not adjacent"
    fork = log(0, 0, forked_at=10)
    assert (ids(due(fork).dirty), due(fork).is_whole) == ([1], False)


def test_ledgers_whose_tombstones_must_stay_are_rewritten_alone() -> None:
    """Else the tombstones of all would stay for as long as those of the latest one."""
    assert groups(log(OLD, OLD - 1, OLD + 1, OLD + 2, 0, 0)) == [[0], [1], [2], [3], [4, 5]]
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
    made, later = Compaction(makes_clean=True), Compaction()

    assert made.compacted(log(3, 5).items[:2], 9) == 5
    assert made.compacted(log(0, 5).items[:2], 9) == 9
    assert later.compacted(log(0, 5).items[:2], 9) == 0


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


def learned(state: PassState, *batches: Columns, is_readable: bool = True) -> None:
    """Note the keys of the next ledger, a batch of one record each."""
    item = state.to_learn
    assert item is not None
    for at, found in enumerate(batches, item.first_offset or 0):
        if not state.learn(at, found):
            break
    state.learned(is_readable=is_readable)


def rewritten(state: PassState, row: LogMetadata) -> tuple[LogMetadata, Compaction]:
    """The row after the next group, of one ledger, was compacted; and by what."""
    found = state.group(row)
    assert found is not None
    items, made = found
    after = row.cleaned(items, made.compacted(items, 9) or 0)
    state.rewritten(after)
    return after, made


def test_a_pass_learns_all_keys_before_it_rewrites() -> None:
    row = log(7, 0, 0)
    state = PassState(due(row))
    learned(state, columns(("a", "")), columns(("b", "")))
    assert state.to_learn == row.items[2]
    learned(state, columns(("a", "")))
    assert state.to_learn is None

    row, first = rewritten(state, row)
    assert (first.newest, first.sources) == ({b"a": 20, b"b": 11}, {1, 2})
    _, second = rewritten(state, row)
    assert (second.sources, second.makes_clean, state.is_over) == (set(), True, True)


def test_a_pass_ends_before_a_ledger_that_cant_be_read() -> None:
    """Rule 27d, clause 5: the earlier ones are compacted, and clean. Its newer records count."""
    row = log(0, 0, 0)
    state = PassState(due(row))
    learned(state, columns(("a", "")))
    learned(state, columns(("a", "")), is_readable=False)

    row, made = rewritten(state, row)

    assert (made.newest, made.sources, made.makes_clean) == ({b"a": 10}, {1}, True)
    assert [item.compacted_ms for item in row.items] == [9, 0, 0, 0]
    assert state.is_over
    none = PassState(due(row))
    learned(none, is_readable=False)
    assert none.is_over


def test_keys_that_dont_fit_are_learned_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ledger is clean before the last part."""
    monkeypatch.setattr(compaction, "KEYS_MAX", 1)
    row, many = log(0), [columns((f"k{at}", "")) for at in range(6)]
    state, found, was_clean = PassState(due(row)), dict[bytes, int](), list[bool]()
    while not state.is_over:
        if state.to_learn is not None:
            learned(state, *many)
            continue
        row, made = rewritten(state, row)
        if made.makes_clean:
            assert state.is_over
        assert len(made.newest) <= 1
        found |= made.newest
        was_clean.append(made.makes_clean)

    assert found == {b"k%d" % at: at for at in range(6)}
    assert was_clean[-1]
    assert was_clean.count(True) == 1


@pytest.mark.parametrize("fails", ["swap", "policy", "source", "created"])
def test_the_first_failure_ends_a_pass(fails: str) -> None:
    """Rule 27d, clauses 1 and 3."""
    row = log(7, 0)
    state = PassState(due(row))
    learned(state, columns(("a", "")))
    if fails == "swap":
        assert state.group(row) is not None
        state.rewritten(None)
    else:
        changed = {
            "policy": replace(row, settings=replace(SETTINGS, cleanup_policy="delete")),
            "source": replace(row, items=(row.items[0], row.items[2])),
            "created": replace(row, created_at="later"),
        }[fails]
        assert state.group(changed) is None
    assert state.is_over


def test_a_merge_does_not_make_tombstones_stay_longer() -> None:
    """It is clean since the latest of its parts, and dirty if one of them is."""
    small = [LogItem(0, 0, bytes=100, sealed_ms=NOW, compacted_ms=each) for each in (OLD, NOW, 0)]
    old, young, dirty = small

    def merged(*items: LogItem) -> int:
        return len(next_merge(log(*items)))

    assert [merged(*[each] * 9) for each in small] == [8 + 1] * 3
    assert merged(*[old] * 8, *[dirty] * 7) == 8
    assert merged(*[old] * 7, *[dirty] * 7) == 0
    assert merged(*[young] * 7, *[old] * 7) == 0


def test_a_compacted_log_ignores_its_retention_in_merges() -> None:
    settings = replace(SETTINGS, retention_seconds=8, retention_bytes=800)
    items = [LogItem(0, 0, bytes=200, sealed_ms=1000 * at, compacted_ms=5) for at in range(9)]

    assert next_merge(log(*items, settings=settings)) != ()
    settings = replace(settings, cleanup_policy="compact,delete")
    assert next_merge(log(*items, settings=settings)) == ()


def failed_rewrites_end_a_pass() -> None:
    test_the_first_failure_ends_a_pass("swap")


@stand_in
def whatever_failed(original: Any, self: PassState, row: LogMetadata | None) -> None:
    """A pass goes on after a rewrite that failed."""
    original(self, row or self._due.row)


def changed_logs_end_a_pass() -> None:
    for fails in ("policy", "source"):
        test_the_first_failure_ends_a_pass(fails)


GUARDS: Final = (
    swap(Compaction, "is_wanted", lambda *_: True).guard(
        "a pass goes on whatever the log has become", "rule 27d", changed_logs_end_a_pass
    ),
    Patch(PassState, "rewritten", whatever_failed).guard(
        "a pass goes on after a failure", "rule 27d", failed_rewrites_end_a_pass
    ),
    swap(merge, "_would_keep_tombstones", lambda *_: False).guard(
        "merges mix clean and dirty ledgers",
        "rule 27d",
        test_a_merge_does_not_make_tombstones_stay_longer,
    ),
    swap(PassState, "learned", lambda self, **_: self._rewrite()).guard(
        "a pass rewrites before it knows all keys",
        "rule 27d",
        test_a_pass_learns_all_keys_before_it_rewrites,
    ),
)


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_a_guard_that_is_taken_out_is_missed(guard: Guard) -> None:
    guard.claim()

    with applied(guard), pytest.raises(AssertionError):
        guard.claim()
