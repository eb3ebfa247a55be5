"""The writer's window of runs, and the ranges of ids that it tells."""

import itertools
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from quorumlog.protocol.messages import MissedRange, ReadAnswered, Status
from quorumlog.protocol.metadata import Fragment
from quorumlog.protocol.placement import ensemble, replacements, spread
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.ranges import complement, contains, union
from quorumlog.protocol.slots import RANGES_MAX, merged
from quorumlog.protocol.tally import EntryVerdict, Tally
from quorumlog.protocol.window import Window, part_of, positions
from tests.unit.protocol.hands import B1, B2, B3, CODEC, run_of


def filled(quorum: Quorum, counts: list[int]) -> Window:
    window = Window(quorum, last_confirmed=-1, length=0)
    first = 0
    for count in counts:
        run = run_of(*([b"x"] * count), first=first, before=first)
        window.push(run, usable=(1 << quorum.ensemble_size) - 1, tick=1)
        first += count
    window.check()
    return window


@given(
    st.sampled_from([Quorum(3, 3, 2), Quorum(3, 2, 2), Quorum(4, 3, 2), Quorum(5, 2, 1)]),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=40),
)
def test_confirmation_agrees_with_a_count_per_entry(
    quorum: Quorum, counts: list[int], acks: list[tuple[int, int]]
) -> None:
    window = filled(quorum, counts)
    runs = [pending.run for pending in window.runs.values()]
    stored: dict[int, set[int]] = {}
    confirmed = -1
    for which, position in acks:
        run, place = runs[which % len(runs)], position % quorum.ensemble_size
        if not window.quorum.holders(run.first, run.last) & 1 << place:
            continue
        part = part_of(run, quorum, place)
        for entry_id in part.ids:
            stored.setdefault(entry_id, set()).add(place)
        pending = window.find(part.first)
        if pending is not None:
            window.ack(pending, place)
        found = window.confirm(0)
        window.check()
        for run in found:
            assert run.first == confirmed + 1
            confirmed = run.last

        plain = -1
        for each in runs:  # runs are confirmed whole, in order
            if not all(len(stored.get(e, ())) >= quorum.ack_quorum for e in each.ids):
                break
            plain = each.last
        assert confirmed == plain == window.last_confirmed
        assert window.length == confirmed + 1


def test_a_part_is_found_though_it_begins_after_its_run() -> None:
    quorum = Quorum(4, 2, 2)
    window = filled(quorum, [4])
    for position in range(4):
        part = part_of(window.runs[0].run, quorum, position)
        assert window.find(part.first) is window.runs[0]
    assert window.find(4) is None


def test_bytes_are_freed_when_every_position_answered_or_was_given_up() -> None:
    window = filled(Quorum(3, 3, 2), [1, 1])
    for pending in list(window.runs.values()):
        window.ack(pending, 0)
        window.ack(pending, 1)
    window.confirm(0)
    assert window.pending_bytes > 0

    window.give_up(0b100)
    window.sweep()

    assert window.pending_bytes == 0
    assert window.missed == [(2, 0, 0), (2, 1, 1)]


def test_positions_are_the_bits_of_a_mask() -> None:
    assert list(positions(0b101001)) == [0, 3, 5]


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 60), st.integers(0, 5)), max_size=30)
)
def test_merged_ranges_name_the_same_entries_once(found: list[tuple[str, int, int]]) -> None:
    ranges = [MissedRange(member, first, first + more) for member, first, more in found]
    result = merged(ranges)

    for member in "ab":
        plain = {e for m in ranges if m.member == member for e in range(m.first, m.last + 1)}
        reported = [e for m in result if m.member == member for e in range(m.first, m.last + 1)]
        assert len(reported) == len(set(reported))
        assert set(reported) == plain


def test_many_ranges_become_one_that_covers_them() -> None:
    ranges = [MissedRange("a", 10 * n, 10 * n) for n in range(RANGES_MAX + 1)]
    assert merged(ranges) == (MissedRange("a", 0, 10 * RANGES_MAX),)
    assert len(merged(ranges[1:])) == RANGES_MAX


def test_what_a_striped_member_missed_in_a_row_is_one_range() -> None:
    """E = 4, Qw = 3: it stores three of four entries."""
    ranges = [MissedRange("a", e, e) for e in (0, 2, 3, 4, 6, 7)]
    assert merged(ranges, 2) == (MissedRange("a", 0, 7),)


def test_an_ensemble_spreads_over_zones_and_keeps_the_order_given() -> None:
    zones = {"b1@1": "x", "b2@1": "x", "b3@1": "y", "b4@1": "z"}
    assert ensemble(3, tuple(zones), zones) == ("b1@1", "b3@1", "b4@1")
    assert ensemble(4, tuple(zones), zones) == ("b1@1", "b3@1", "b4@1", "b2@1")
    assert ensemble(5, tuple(zones), zones) is None
    assert ensemble(2, tuple(zones)) == ("b1@1", "b2@1")


def test_no_bookie_joins_in_two_incarnations() -> None:
    assert ensemble(2, ("b1@1", "b1@2", "b2@1")) == ("b1@1", "b2@1")
    assert spread(("b1@1",), ("b1@2", "b2@1")) == ("b2@1",)


def test_a_new_incarnation_takes_its_own_place_and_strangers_the_others() -> None:
    members = ("b1@1", "b2@1", "b3@1")
    assert replacements(members, (0, 2), ("b3@2", "b4@1")) == {2: "b3@2", 0: "b4@1"}
    assert replacements(members, (0,), ("b3@2", "b1@1")) == {}
    assert replacements(members, (0, 1, 2), ("b9@1", "b9@2")) == {0: "b9@1"}


@given(
    st.lists(st.integers(0, 2), max_size=3, unique=True),
    st.lists(st.sampled_from([f"b{n}@{i}" for n in range(1, 7) for i in (1, 2)]), max_size=8),
)
def test_no_ensemble_has_one_bookie_twice(leaving: list[int], candidates: list[str]) -> None:
    members = ("b1@1", "b2@1", "b3@1")
    chosen = replacements(members, leaving, candidates)
    after = [chosen.get(p, member) for p, member in enumerate(members)]

    assert set(chosen) <= set(leaving)
    assert set(chosen.values()) <= set(candidates)
    names = [member.split("@")[0] for member in after]
    assert len(set(names)) == 3


# --- guards that no other test would miss: `make mutate` found them ------------------------------


STRIPED = Quorum(3, 2, 2)
MEMBERS = (B1, B2, B3)


def test_a_late_answer_to_a_run_that_left_is_not_taken_for_the_run_before_it() -> None:
    window = Window(STRIPED, last_confirmed=-1, length=0)
    pending = window.push(run_of(b"a"), usable=0b111, tick=1)

    assert window.find(0) is pending
    assert window.find(1) is None


def test_what_several_positions_gave_is_one_run_without_holes() -> None:
    """A position's part may begin and end where the range does, and lack what others store."""
    tally = Tally(STRIPED, Fragment(0, MEMBERS), first=0, last=2)
    whole = run_of(b"a", b"b", b"c")
    for position in (0, 1):
        part = whole.where(partial(STRIPED.is_member, position))
        assert part is not None
        answer = ReadAnswered(position, MEMBERS[position], 0, 2, Status.OK, part, ())
        tally.note(answer, CODEC, 7)
    assert [tally.verdict(entry_id) for entry_id in range(3)] == [EntryVerdict.PRESENT] * 3

    run = tally.runs(0, 2)

    assert list(run.ids) == [0, 1, 2]
    assert run.body == whole.body


def test_who_is_waited_for_is_silent_only_for_what_he_was_asked_before() -> None:
    window = Window(Quorum(3, 3, 2), last_confirmed=-1, length=0)
    window.push(run_of(b"a"), usable=0b111, tick=2)

    assert window.silent(2, (0, 2, 3)) == 0b011
    assert window.silent(1, (0, 0, 0)) == 0


def test_a_window_that_is_cleared_has_missed_nothing() -> None:
    window = Window(Quorum(3, 3, 2), last_confirmed=-1, length=0)
    window.missed.append((0, 0, 0))

    window.clear()

    assert window.missed == []


SOME = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda p: (p[0], sum(p))))


def ids(ranges: tuple[tuple[int, int], ...]) -> set[int]:
    return {n for first, last in ranges for n in range(first, last + 1)}


@given(SOME, st.integers(0, 40), st.integers(-1, 20))
def test_names_and_gaps_are_as_of_sets(some: list[tuple[int, int]], first: int, count: int) -> None:
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
