"""What a tally keeps of an answer, beside the same said entry by entry."""

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from quorumlog.protocol.messages import ReadAnswered, Status
from quorumlog.protocol.metadata import DigestKind, Fragment
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.ranges import contains, ranges_of
from quorumlog.protocol.record import Codec, Run, make, pack
from quorumlog.protocol.tally import Tally

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
def test_an_answer_is_taken_in_at_once_as_it_is_entry_by_entry(
    quorum: Quorum, given_answers: list[Given]
) -> None:
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
