"""Quorums, coverage, and the tally of answers about entries."""

import itertools
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorumlog.protocol.messages import ReadAnswered, Status
from quorumlog.protocol.metadata import DigestKind, Fragment
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.ranges import contains, ids_of_residue, ranges_of
from quorumlog.protocol.record import Codec, Run, make, pack
from quorumlog.protocol.tally import Tally

SMALL = [
    Quorum(e, qw, qa) for e in range(1, 6) for qw in range(1, e + 1) for qa in range(1, qw + 1)
]
quorums = st.sampled_from(SMALL)


def subsets(members: tuple[int, ...], size: int | None = None) -> list[tuple[int, ...]]:
    sizes = range(len(members) + 1) if size is None else [size]
    return [found for n in sizes for found in itertools.combinations(members, n)]


def test_sizes_that_are_left_out_fit_those_that_are_given() -> None:
    assert Quorum.of() == Quorum(3, 3, 2)
    assert Quorum.of(2) == Quorum(2, 2, 2)
    assert Quorum.of(5) == Quorum(5, 3, 2)
    assert Quorum.of(write_quorum=5) == Quorum(5, 5, 3)
    assert Quorum.of(ack_quorum=3) == Quorum(3, 3, 3)
    with pytest.raises(ValueError, match="must hold"):
        Quorum.of(2, 3)


@given(quorums, st.integers(0, 30), st.integers(0, 30))
def test_residues_share_write_sets_and_have_all_ids(quorum: Quorum, first: int, count: int) -> None:
    last = first + count - 1
    found = [
        list(ids_of_residue(first, last, quorum.modulus, residue))
        for residue in range(quorum.modulus)
    ]

    assert sorted(itertools.chain(*found)) == list(range(first, last + 1))
    for residue, ids in enumerate(found):
        places = set(quorum.write_set(residue))
        assert all(set(quorum.write_set(entry_id)) == places for entry_id in ids)


def test_the_write_quorum_table_of_the_protocol_document() -> None:
    """E = 4, Qw = 3: entries 0 to 5 of the table in both protocol documents."""
    quorum = Quorum(4, 3, 2)
    bookies = ("B1", "B2", "B3", "B4")
    table = [[bookies[p] for p in quorum.write_set(entry_id)] for entry_id in range(6)]

    assert table == [
        ["B1", "B2", "B3"],
        ["B2", "B3", "B4"],
        ["B3", "B4", "B1"],
        ["B4", "B1", "B2"],
        ["B1", "B2", "B3"],
        ["B2", "B3", "B4"],
    ]


def test_without_striping_there_is_one_write_quorum() -> None:
    quorum = Quorum(3, 3, 2)
    assert not quorum.is_striped
    assert {frozenset(quorum.write_set(entry_id)) for entry_id in range(9)} == {
        frozenset({0, 1, 2})
    }


@pytest.mark.parametrize(
    ("e", "qw", "qa"), [(2, 3, 2), (3, 2, 3), (3, 3, 0), (0, 0, 0), (256, 3, 2), (3, 0, 0)]
)
def test_a_quorum_out_of_order_is_refused(e: int, qw: int, qa: int) -> None:
    with pytest.raises(ValueError, match="ensemble_size >= write_quorum >= ack_quorum"):
        Quorum(e, qw, qa)


def test_the_least_and_the_greatest_quorum_are_quorums() -> None:
    assert Quorum(1, 1, 1).negatives_needed == 1
    assert Quorum(255, 255, 255).can_reach((1 << 255) - 1)


@given(quorums, st.integers(0, 2**63 - 1))
def test_write_sets_have_qw_members_and_agree_with_residues(quorum: Quorum, entry_id: int) -> None:
    write_set = quorum.write_set(entry_id)

    assert len(set(write_set)) == quorum.write_quorum
    for position in range(quorum.ensemble_size):
        assert quorum.is_member(position, entry_id) == (position in write_set)
        residue = entry_id % quorum.ensemble_size
        assert (residue in quorum.residues(position)) == (position in write_set)


@given(quorums, st.integers(0, 50), st.integers(0, 12), st.integers(0, 31))
def test_a_run_is_acked_with_each_entry(quorum: Quorum, first: int, more: int, mask: int) -> None:
    mask &= (1 << quorum.ensemble_size) - 1
    acked = {p for p in range(quorum.ensemble_size) if mask & 1 << p}
    plain = all(
        len(acked & set(quorum.write_set(entry_id))) >= quorum.ack_quorum
        for entry_id in range(first, first + more + 1)
    )

    assert quorum.has_ack_quorum(mask, first, first + more) == plain


@given(quorums, st.integers(0, 50), st.integers(0, 12))
def test_a_runs_holders_are_its_write_sets_members(quorum: Quorum, first: int, more: int) -> None:
    plain = {p for e in range(first, first + more + 1) for p in quorum.write_set(e)}
    assert quorum.holders(first, first + more) == sum(1 << p for p in plain)


@pytest.mark.parametrize("quorum", SMALL, ids=str)
def test_coverage_means_that_no_ack_quorum_of_any_write_set_is_silent(quorum: Quorum) -> None:
    """I14: counted per write set."""
    everybody = tuple(range(quorum.ensemble_size))
    for answered in subsets(everybody):
        silent = set(everybody) - set(answered)
        possible = [
            ack_set
            for start in everybody
            for ack_set in subsets(quorum.write_set(start), quorum.ack_quorum)
        ]
        assert quorum.is_covered(answered) == (not any(set(a) <= silent for a in possible))


@pytest.mark.parametrize("quorum", [q for q in SMALL if not q.is_striped], ids=str)
def test_the_four_definitions_of_coverage_agree_without_striping(quorum: Quorum) -> None:
    """BP-46 and QuorumCoverage of the TLA+ specification."""
    everybody = tuple(range(quorum.ensemble_size))
    ack_sets = subsets(everybody, quorum.ack_quorum)
    for answered in subsets(everybody):
        silent = set(everybody) - set(answered)
        by_count = len(answered) >= quorum.ensemble_size - quorum.ack_quorum + 1
        one_of_each = all(set(answered) & set(ack_set) for ack_set in ack_sets)
        none_without = not any(set(ack_set) <= silent for ack_set in ack_sets)
        by_silence = len(silent) < quorum.ack_quorum

        found = {quorum.is_covered(answered), by_count, one_of_each, none_without, by_silence}
        assert len(found) == 1


@pytest.mark.parametrize("quorum", SMALL, ids=str)
def test_the_negatives_needed_leave_no_room_for_an_ack_quorum(quorum: Quorum) -> None:
    """I16: one fewer would."""
    left = quorum.write_quorum - quorum.negatives_needed
    assert left == quorum.ack_quorum - 1


@given(quorums, st.integers(0, 31))
def test_reach_is_an_ack_quorum_in_every_write_set(quorum: Quorum, mask: int) -> None:
    usable = {p for p in range(quorum.ensemble_size) if mask & 1 << p}
    plain = all(
        len(usable & set(quorum.write_set(start))) >= quorum.ack_quorum
        for start in range(quorum.ensemble_size)
    )
    assert quorum.can_reach(mask) == plain


def test_without_striping_all_ids_are_alike() -> None:
    assert Quorum(3, 3, 2).modulus == 1
    assert Quorum(4, 3, 2).modulus == 4


CODEC = Codec(DigestKind.CRC32C)
LAST = 11
MEMBERS = ("a@1", "b@1", "c@1", "d@1")
WHOLE = make(
    ledger_id=7,
    first_entry=0,
    last_add_confirmed=-1,
    length_before=0,
    payloads=[bytes([number]) * number for number in range(LAST + 1)],
    codec=CODEC,
)


@dataclass(frozen=True)
class Given:
    """An answer: which entries, which of these are damaged, which are denied."""

    position: int
    ids: frozenset[int]
    bad: frozenset[int]
    absent: frozenset[int]

    def run(self) -> Run | None:
        """The entries as a run."""
        entries = [
            replace(entry, digest=b"none") if entry.entry_id in self.bad else entry
            for entry in WHOLE.entries()
            if entry.entry_id in self.ids
        ]
        return pack(entries, DigestKind.CRC32C) if entries else None


@dataclass
class Plain:
    """A tally that looks at each entry by itself."""

    quorum: Quorum
    found: dict[int, Run] = field(default_factory=dict)

    def note(self, given_answer: Given, cursor: int) -> int | None:
        """Take an answer in; from where to ask on."""
        run, position = given_answer.run(), given_answer.position
        for entry_id in run.ids if run is not None else ():
            is_member = position in self.quorum.write_set(entry_id)
            if run is not None and is_member and entry_id not in given_answer.bad:
                self.found.setdefault(entry_id, run)
        absent = ranges_of(sorted(given_answer.absent))
        unnamed = [
            entry_id
            for entry_id in range(cursor, LAST + 1)
            if position in self.quorum.write_set(entry_id)
            and entry_id not in given_answer.ids
            and not contains(absent, entry_id)
        ]
        if unnamed and unnamed[0] == cursor:
            unnamed = unnamed[1:] if given_answer.ids or given_answer.absent else []
        return unnamed[0] if unnamed else None


@st.composite
def answers(draw: st.DrawFn) -> Given:
    low = draw(st.integers(0, LAST))
    ids = set(range(low, draw(st.integers(low, LAST)) + 1)) - draw(
        st.one_of(st.just(frozenset()), st.frozensets(st.integers(0, LAST)))
    )
    bad = draw(st.one_of(st.just(frozenset()), st.frozensets(st.sampled_from(range(LAST + 1)))))
    absent = draw(st.frozensets(st.integers(0, LAST))) - ids
    return Given(draw(st.integers(0, 2)), frozenset(ids), bad, absent)


@given(
    quorum=st.sampled_from([Quorum(3, 3, 2), Quorum(4, 3, 2), Quorum(4, 2, 2)]),
    given_answers=st.lists(answers(), max_size=4),
)
def test_ranges_are_tallied_like_single_entries(quorum: Quorum, given_answers: list[Given]) -> None:
    fragment = Fragment(0, MEMBERS[: quorum.ensemble_size])
    tally, plain = Tally(quorum, fragment, first=0, last=LAST), Plain(quorum)
    for reported in given_answers:
        cursor = tally.cursors[reported.position]
        if cursor is None:
            continue
        member = fragment.bookies[reported.position]
        answer = ReadAnswered(
            reported.position,
            member,
            cursor,
            LAST,
            Status.OK,
            reported.run(),
            ranges_of(sorted(reported.absent)),
        )

        following = tally.note(answer, CODEC, 7)

        assert following == plain.note(reported, cursor)
        assert tally.found == plain.found


def test_a_member_that_spoke_of_an_entry_is_asked_for_later_ones_only() -> None:
    tally = Tally(Quorum(3, 3, 2), Fragment(0, MEMBERS[:3]), first=0, last=LAST)
    assert tally.may_decide(0) == (0, 1, 2)

    answer = ReadAnswered(0, MEMBERS[0], 0, LAST, Status.OK, None, ((0, 1),))
    assert tally.note(answer, CODEC, 7) == 2

    assert tally.may_decide(1) == (1, 2)
    assert sorted(tally.may_decide(2)) == [0, 1, 2]
