"""Ranges of ids: pairs (first, last), both inclusive, ascending and disjoint."""

from bisect import bisect_right
from collections.abc import Iterable
from typing import TypeAlias

from quorumlog.protocol.ids import ID_MAX

Ranges: TypeAlias = tuple[tuple[int, int], ...]


def contains(ranges: Ranges, entry_id: int) -> bool:
    """Whether an entry is in one of the ranges, found by bisection (there may be hundreds)."""
    at = bisect_right(ranges, (entry_id, ID_MAX)) - 1
    return at >= 0 and entry_id <= ranges[at][1]


def ids_of_residue(first: int, last: int, modulus: int, residue: int) -> range:
    """The ids of first..last whose remainder modulo `modulus` is `residue`."""
    return range(first + (residue - first) % modulus, last + 1, modulus)


def union(ranges: Iterable[tuple[int, int]], stride: int = 1) -> Ranges:
    """Sort ranges, and join ranges that overlap or whose ends are at most `stride` apart."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + stride:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Ranges, first: int, last: int) -> Ranges:
    """The ranges of first..last that `ranges` doesn't cover."""
    gaps, at = [], first
    for low, high in ranges:
        if low > last:
            break
        if low > at:
            gaps.append((at, low - 1))
        at = max(at, high + 1)
    if at <= last:
        gaps.append((at, last))
    return tuple(gaps)


def ranges_of(ids: Iterable[int]) -> Ranges:
    """The ranges that cover exactly these ascending ids."""
    ranges: list[tuple[int, int]] = []
    for entry_id in ids:
        if ranges and ranges[-1][1] == entry_id - 1:
            ranges[-1] = (ranges[-1][0], entry_id)
        else:
            ranges.append((entry_id, entry_id))
    return tuple(ranges)
