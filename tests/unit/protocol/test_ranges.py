"""Ranges of ids against sets of ids."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from quorumlog.protocol.ranges import complement, contains, union

SOME = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda p: (p[0], sum(p))))


def ids(ranges: tuple[tuple[int, int], ...]) -> set[int]:
    return {n for first, last in ranges for n in range(first, last + 1)}


@given(SOME, st.integers(0, 40), st.integers(-1, 20))
def test_what_is_named_and_what_is_left_are_those_of_sets(
    some: list[tuple[int, int]], first: int, count: int
) -> None:
    ranges = union(some)
    last = first + count

    assert ids(ranges) == ids(tuple(some))
    assert ids(complement(ranges, first, last)) == set(range(first, last + 1)) - ids(ranges)
    assert [n for n in range(50) if contains(ranges, n)] == sorted(ids(ranges))


@given(SOME)
def test_a_union_is_ascending_and_apart(some: list[tuple[int, int]]) -> None:
    ranges = union(some)

    assert all(low <= high for low, high in ranges)
    assert all(a[1] + 1 < b[0] for a, b in itertools.pairwise(ranges))
