"""Plans of repairs: what is mended first, from where, and onto whom never."""

from typing import Any

from quorumlog.spark.jobs.repair_plan import BLOCKED, COPY, OPERATOR, REPLACE, UNRECOVERABLE, plan
from quorumlog.spark.jobs.spans import CORRUPT, DIVERGENT, EXTRA, MISSING, UNREACHABLE, Finding


def row(ledger: int, *fragments: list[str], last: int | None = 99, qw: int = 3) -> dict[str, Any]:
    step = 50
    return {
        "ledger_id": ledger,
        "state": "OPEN" if last is None else "CLOSED",
        "ensemble_size": len(fragments[0]),
        "write_quorum": qw,
        "ack_quorum": 2,
        "last_entry": last,
        "length": None if last is None else 10 * (last + 1),
        "fragments": [
            {"first_entry": step * i, "bookies": [f"{name}@1" for name in names]}
            for i, names in enumerate(fragments)
        ],
    }


def bookies(lost: str = "", **free: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{name}@1",
            "state": "lost" if name in lost else "writable",
            "zone": name[-1],
            "free_bytes": room,
        }
        for name, room in free.items()
    ]


ROOM = 10**9


def test_what_a_living_member_lacks_is_copied_to_it_from_the_others() -> None:
    findings = [Finding(1, 10, 19, "b@1", MISSING, 2), Finding(1, 30, 30, "c@1", CORRUPT, 1)]

    steps = plan(findings, {1: row(1, ["a", "b", "c"])}, bookies(a=ROOM, b=ROOM, c=ROOM))

    # The fewest copies left come first.
    assert [(s.first, s.target, s.sources, s.entries, s.bytes, s.action) for s in steps] == [
        (30, "c@1", ("a@1", "b@1"), 1, 10, COPY),
        (10, "b@1", ("a@1", "c@1"), 10, 100, COPY),
    ]


def test_what_nobody_has_is_unrecoverable_and_what_differs_is_for_an_operator() -> None:
    findings = [
        Finding(1, 4, 4, "a@1", MISSING, 0),
        Finding(1, 5, 5, "a@1", DIVERGENT, 2),
        Finding(1, 6, 6, "x@1", EXTRA, 3),
        Finding(1, 0, 99, "c@1", UNREACHABLE, 2),
    ]

    steps = plan(findings, {1: row(1, ["a", "b", "c"])}, bookies(a=ROOM, b=ROOM, c=ROOM))

    assert [(s.first, s.action, s.target) for s in steps] == [
        (4, UNRECOVERABLE, None),
        (5, OPERATOR, None),
    ]


def test_a_lost_member_is_replaced_in_closed_fragments_by_who_has_room_and_another_zone() -> None:
    rows = {1: row(1, ["a", "b", "c"], ["a", "b", "d"]), 2: row(2, ["a", "b", "c"], last=None)}
    listed = bookies("c", a=ROOM, b=ROOM, c=ROOM, d=ROOM, e=10)

    (step,) = plan([], rows, listed)

    assert (step.ledger, step.first, step.last, step.member) == (1, 0, 49, "c@1")
    assert (step.target, step.sources, step.action) == ("d@1", ("a@1", "b@1"), REPLACE)


def test_two_lost_members_of_a_fragment_never_get_the_same_bookie() -> None:
    listed = bookies("bc", a=ROOM, b=ROOM, c=ROOM, d=ROOM, e=ROOM)

    steps = plan([], {1: row(1, ["a", "b", "c"])}, listed)

    assert sorted(s.target or "" for s in steps) == ["d@1", "e@1"]
    (first, second) = plan([], {1: row(1, ["a", "b", "c"])}, listed[:4])
    assert {first.action, second.action} == {REPLACE, BLOCKED}


def test_bytes_are_spread_over_the_bookies_that_have_room() -> None:
    rows = {ledger: row(ledger, ["a", "b", "c"]) for ledger in range(10)}
    listed = bookies("c", a=ROOM, b=ROOM, c=ROOM, d=ROOM, e=ROOM)

    targets = [step.target or "" for step in plan([], rows, listed)]

    assert sorted(targets) == ["d@1"] * 5 + ["e@1"] * 5
