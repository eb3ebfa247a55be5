"""Decides which ledgers of a log are merged next, so that each byte is rewritten only a few times.

A merge covers at least MERGED_MIN adjacent ledgers that are smaller than a power of GROWTH, if:

- together they have at least GROWTH times the bytes of the largest of them. Each such merge
  multiplies the size of the ledger that contains a byte by GROWTH or more; or
- they are a gap, with larger ledgers on both sides, so no ledger will join them. The ledgers of a
  gap are merged once for each second power of GROWTH.

So a byte in a ledger of n bytes was rewritten at most 1.5 * log(n) / log(GROWTH) times. Fewer than
MERGED_MIN adjacent ledgers below a size stay between two larger ledgers.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Final

from quorumlog.protocol.log.row import LogItem, LogMetadata
from quorumlog.protocol.metadata import REPLACED_MAX

MERGED_MIN: Final = 8
"""The minimum number of ledgers in a merge. Chosen by judgement."""

GROWTH: Final = 4
"""Minimum ratio of the bytes of a merge to the bytes of its largest ledger. Chosen by judgement."""

MERGE_BYTES_MAX: Final = 1 << 30
"""Maximum bytes of one merge, which must end before the sweep deletes its new ledger."""

_PART: Final = 8
"""A merged ledger has at most 1/8 of the retained bytes or age: ledgers are released whole."""


def next_merge(row: LogMetadata, spoiled: Collection[int] = ()) -> tuple[LogItem, ...]:
    """The adjacent ledgers to merge next, if any. `spoiled`: ledgers that can't be rewritten."""
    below = row.settings.merge_below_bytes
    if not below or len(row.items) <= MERGED_MIN:
        return ()
    base = row.base
    small = [
        item.bytes < below
        and item.last_offset is not None
        and not row.is_shared(item)
        and item is not base
        and item.ledger_id not in spoiled
        for item in row.items
    ]
    last = len(row.items) if base is None else row.items.index(base)
    largest, takes_gaps = GROWTH, False
    while largest < GROWTH * below:
        for begin, end in _runs(row.items, small, largest):
            # The last run, which ends before the base, is not a gap: further ledgers can still join
            # it.
            is_gap = end < last and (takes_gaps or largest >= below)
            bytes_max = min(2 * below, MERGE_BYTES_MAX)
            for items in cut(row, row.items[begin:end], bytes_max):
                if len(items) >= MERGED_MIN and (is_gap or _grow(items)):
                    return items
        largest, takes_gaps = largest * GROWTH, not takes_gaps
    return ()


def _grow(items: Sequence[LogItem]) -> bool:
    """Whether a merge has at least GROWTH times the bytes of the largest ledger."""
    total = sum(item.bytes for item in items)
    return total >= GROWTH * max(item.bytes for item in items)


def _runs(
    items: Sequence[LogItem], small: Sequence[bool], largest: int
) -> Iterator[tuple[int, int]]:
    """The begin and end of each maximal run of small ledgers with less than `largest` bytes."""
    begin = 0
    for at, item in enumerate(items):
        if not small[at] or item.bytes >= largest:
            if at - begin >= MERGED_MIN:
                yield begin, at
            begin = at + 1
    if len(items) - begin >= MERGED_MIN:
        yield begin, len(items)


def adjacent(items: Sequence[LogItem]) -> Iterator[tuple[LogItem, ...]]:
    """Split `items` into runs without missing ledgers in between."""
    begin = 0
    for at, (one, other) in enumerate(pairwise(items), 1):
        if (one.last_offset or 0) + 1 != other.first_offset:
            yield tuple(items[begin:at])
            begin = at
    yield tuple(items[begin:])


def cut(row: LogMetadata, run: Sequence[LogItem], bytes_max: int) -> Iterator[tuple[LogItem, ...]]:
    """Split adjacent ledgers into parts of at most `bytes_max`, each replaceable by one ledger."""
    settings = row.settings
    # A ledger that replaced too many other ledgers can't be compacted.
    replaced_max = REPLACED_MAX // _PART if settings.compacts else REPLACED_MAX
    keeps_all = settings.cleanup_policy == "compact"  # then retention releases no ledger
    retention_s = 0 if keeps_all else settings.retention_seconds
    if settings.retention_bytes and not keeps_all:
        bytes_max = min(bytes_max, settings.retention_bytes // _PART)
    part: list[LogItem] = []
    size = replaced = 0
    for item in run:
        span_s = (item.sealed_ms - part[0].sealed_ms) / 1000 if part else 0.0
        is_full = (
            size + item.bytes > bytes_max
            or replaced + item.replaced + 1 > replaced_max
            or (retention_s and span_s > retention_s / _PART)
        )
        if part and (is_full or _would_keep_tombstones(row, part[0], item)):
            yield tuple(part)
            part, size, replaced = [], 0, 0
        part.append(item)
        size, replaced = size + item.bytes, replaced + item.replaced + 1
    yield tuple(part)


def _would_keep_tombstones(row: LogMetadata, one: LogItem, other: LogItem) -> bool:
    """Whether tombstones would stay much longer in a ledger that replaces both ledgers. The new
    ledger is dirty if one of the two is dirty, and otherwise clean since the later time (rule 27d).
    """
    if not row.settings.compacts:
        return False
    kept_ms = 1000 * row.settings.delete_retention_s
    latest = max(item.sealed_ms for item in row.items) - kept_ms
    times = one.compacted_ms, other.compacted_ms
    if 0 in times or max(times) <= latest:
        return any(times) and 0 in times
    return min(times) <= latest or max(times) - min(times) > kept_ms / _PART
