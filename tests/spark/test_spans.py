"""What digests of replicas tell, for every kind of damage anywhere in a ledger."""

import hashlib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from quorumlog.protocol.quorum import Quorum
from quorumlog.spark.jobs import spans
from quorumlog.spark.jobs.spans import Finding, MemberDigest, Span

SOUND, OTHER, DAMAGED = "sound", "other", "damaged"
DAMAGE = (spans.MISSING, spans.CORRUPT, spans.DIVERGENT)

Copies = dict[str, dict[int, str]]


def held(copies: dict[int, str], span: Span) -> MemberDigest:
    """What a bookie says of these copies."""
    mine = [entry for entry in span.ids if entry in copies]
    readable = [entry for entry in mine if copies[entry] != DAMAGED]
    text = repr([(entry, copies[entry]) for entry in readable])
    is_damaged = any(copies[entry] == DAMAGED for entry in mine)
    return MemberDigest(len(readable), hashlib.sha256(text.encode()).hexdigest(), is_damaged)


def flat(findings: list[Finding], modulus: int) -> set[tuple[str, int, str, int]]:
    return {
        (f.bookie, entry, f.kind, f.survivors)
        for f in findings
        for entry in range(f.first, f.last + 1, modulus)
    }


@st.composite
def ledgers(draw: st.DrawFn) -> tuple[dict[str, Any], Copies, set[tuple[str, int, str, int]]]:
    """A closed ledger of two fragments, what its bookies hold, and what is to be found."""
    size = draw(st.integers(1, 5))
    write_quorum = draw(st.integers(1, size))
    quorum = Quorum(size, write_quorum, 1)
    last = draw(st.sampled_from([0, 3, 40, 1300]))
    border = draw(st.integers(0, last))
    row = {
        "ledger_id": 7,
        "state": "CLOSED",
        "ensemble_size": size,
        "write_quorum": write_quorum,
        "ack_quorum": 1,
        "fragments": [
            {"first_entry": 0, "bookies": [f"b{i}@1" for i in range(size)]},
            {"first_entry": border, "bookies": [f"b{i + 1}@1" for i in range(size)]},
        ][0 if border else 1 :],
    }
    copies: Copies = {f"b{i}@1": {} for i in range(size + 1)}
    sets = {}
    for entry in range(last + 1):
        shift = 1 if entry >= border else 0
        sets[entry] = [f"b{place + shift}@1" for place in quorum.write_set(entry)]
        for member in sets[entry]:
            copies[member][entry] = SOUND
    expected = set()
    for entry in draw(st.sets(st.integers(0, last), max_size=12)):
        members = sets[entry]
        # Fewer than half are hurt, so that it is clear who is right.
        hurt = draw(st.sets(st.sampled_from(members), max_size=(len(members) - 1) // 2))
        for member in hurt:
            kind = draw(st.sampled_from(DAMAGE))
            if kind == spans.MISSING:
                del copies[member][entry]
            else:
                copies[member][entry] = DAMAGED if kind == spans.CORRUPT else OTHER + member
            expected.add((member, entry, kind, len(members) - len(hurt)))
    return row, copies, expected


@settings(max_examples=150, deadline=None)
@given(ledgers(), st.sampled_from([3, 100, 100_000]))
def test_exactly_the_damage_that_is_there_is_found(
    ledger: tuple[dict[str, Any], Copies, set[tuple[str, int, str, int]]], most: int
) -> None:
    row, copies, expected = ledger
    last = max(entry for has in copies.values() for entry in [*has, 0])
    last = max([last, *(entry for _, entry, _, _ in expected)])
    found: set[tuple[str, int, str, int]] = set()
    for span in spans.spans_of(row, last, most):
        found |= flat(spans.judge(span, lambda m, s: held(copies[m], s)), span.modulus)

    assert found == expected


def test_what_an_operator_gave_up_is_asked_of_nobody() -> None:
    row = {
        "ledger_id": 7,
        "state": "CLOSED",
        "ensemble_size": 3,
        "write_quorum": 2,
        "ack_quorum": 1,
        "fragments": [{"first_entry": 0, "bookies": ["a@1", "b@1", "c@1"]}],
        "lost_entries": [{"first": 3, "last": 5}, {"first": 9, "last": 9}],
    }

    asked = [entry for span in spans.spans_of(row, 9, 2) for entry in span.ids]

    assert sorted(asked) == [0, 1, 2, 6, 7, 8]


def test_without_a_majority_no_copy_is_called_right() -> None:
    span = Span(7, 0, 9, 1, 0, ("a@1", "b@1"), is_complete=True)
    copies: Copies = {m: dict.fromkeys(range(10), SOUND) for m in span.members}
    copies["b@1"][4] = OTHER

    found = spans.judge(span, lambda m, s: held(copies[m], s))

    assert found == [
        Finding(7, 4, 4, "a@1", spans.DIVERGENT, 0),
        Finding(7, 4, 4, "b@1", spans.DIVERGENT, 0),
    ]


def test_what_does_not_answer_is_unreachable_and_never_missing() -> None:
    span = Span(7, 0, 9, 1, 0, ("a@1", "b@1", "c@1"), is_complete=True)
    copies: Copies = {m: dict.fromkeys(range(10), SOUND) for m in span.members}
    del copies["a@1"][3]

    found = spans.judge(span, lambda m, s: "is gone" if m == "c@1" else held(copies[m], s))

    assert found == [
        Finding(7, 0, 9, "c@1", spans.UNREACHABLE, 2, "is gone"),
        Finding(7, 3, 3, "a@1", spans.MISSING, 1),
    ]


def test_where_a_writer_is_at_work_a_copy_that_is_not_there_yet_is_no_damage() -> None:
    span = Span(7, 0, 9, 1, 0, ("a@1", "b@1", "c@1"), is_complete=False)
    copies: Copies = {m: dict.fromkeys(range(10), SOUND) for m in span.members}
    copies["c@1"] = dict.fromkeys(range(4), SOUND)
    copies["b@1"][2] = OTHER

    found = spans.judge(span, lambda m, s: held(copies[m], s))

    assert found == [Finding(7, 2, 2, "b@1", spans.DIVERGENT, 2)]


def test_what_lies_where_it_is_not_placed_is_extra() -> None:
    span = Span(7, 0, 9, 3, 1, ("a@1",), is_complete=True, strangers=("x@1",))
    copies = {"a@1": dict.fromkeys(range(10), SOUND), "x@1": dict.fromkeys((1, 2, 4), SOUND)}

    found = spans.judge(span, lambda m, s: held(copies[m], s))

    assert found == [Finding(7, 1, 4, "x@1", spans.EXTRA, 1)]


def test_all_that_is_extra_is_found_and_asked_for_once() -> None:
    span = Span(7, 0, 5999, 3, 1, ("a@1",), is_complete=True, strangers=("x@1",))
    copies = dict.fromkeys(span.ids, SOUND)

    asked: list[str] = []

    def ask(member: str, part: Span) -> MemberDigest:
        asked.append(member)
        return held(copies, part)

    assert spans.judge(span, ask) == [Finding(7, 1, 5998, "x@1", spans.EXTRA, 1)]
    assert asked == ["a@1", "x@1"]


def test_a_bookie_that_lost_a_range_is_asked_few_times() -> None:
    span = Span(7, 0, 99_999, 1, 0, ("a@1", "b@1", "c@1"), is_complete=True)
    copies: Copies = {m: dict.fromkeys(range(100_000), SOUND) for m in span.members}
    for entry in range(12_345, 67_890):
        del copies["b@1"][entry]
    asked = 0

    def ask(member: str, part: Span) -> MemberDigest:
        nonlocal asked
        asked += 1
        return held(copies[member], part)

    assert spans.judge(span, ask) == [Finding(7, 12_345, 67_889, "b@1", spans.MISSING, 2)]
    assert asked < 3 * 4 * 17
