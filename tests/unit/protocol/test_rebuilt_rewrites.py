"""Rule 27c in a rebuild: a ledger that has replaced others comes back in their place, and never beside them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import pytest

from quorumlog.protocol import rebuild_log
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings, LogState
from quorumlog.protocol.metadata import DigestKind, Lineage
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.rebuild import Action
from quorumlog.protocol.rebuild_log import LedgerPlace, LogDecision, decide_log
from tests.mutation.mutants.hunt import Guard, applied, swap

MADE = "2026-01-02T03:04:05.000001Z"
QUORUM = Quorum(3, 3, 2)
Places = tuple[tuple[int, int], ...]


def place(
    ledger_id: int,
    first: int,
    *before: tuple[int, int],
    replaced: Places = (),
    hides: bool = False,
    is_open: bool = False,
) -> LedgerPlace:
    last = None if is_open else 3
    lineage = Lineage(MADE, before, replaced=replaced)
    return LedgerPlace(
        ledger_id, first, last, 100, QUORUM, DigestKind.CRC32C, lineage, hides_next=hides
    )


OLD = (
    place(1, 0),
    place(2, 10, (1, 0)),
    place(3, 20, (1, 0), (2, 10)),
    place(4, 30, (1, 0), (2, 10), (3, 20)),
)
MERGED = place(5, 10, (1, 0), replaced=((2, 10), (3, 20)))
"""It replaced the second and the third ledger."""
AGAIN = place(7, 0, replaced=((1, 0), (2, 10), (3, 20), (5, 10)))
"""It replaced the first ledger, and that one."""
LAST = place(6, 40, (1, 0), (2, 10), (3, 20), (4, 30), is_open=True)
KNOWN = LogMetadata(
    "events",
    LogSettings(QUORUM),
    (*(LogItem(n + 1, 10 * n, 10 * n + 9, bytes=9, sealed_ms=1) for n in range(4)), LogItem(6, 40)),
    version=8,
    created_at=MADE,
)
"""A database of before the rewrites."""


def rebuilt(
    *ledgers: LedgerPlace, known: LogMetadata | None = None, deleted: Sequence[int] = ()
) -> LogDecision:
    return decide_log("events", known, ledgers, deleted, now_ms=5, token=99)


def items(decision: LogDecision) -> list[tuple[int, int | None, int | None]]:
    assert decision.action is Action.WRITE, decision.why
    assert decision.row is not None
    decision.row.check()
    return [(one.ledger_id, one.first_offset, one.last_offset) for one in decision.row.items]


ONCE: Final = [(1, 0, 9), (5, 10, 29), (4, 30, 39), (6, 40, None)]
TWICE: Final = [(7, 0, 29), (4, 30, 39), (6, 40, None)]


@pytest.mark.parametrize("known", [None, KNOWN], ids=["lost", "restored"])
@pytest.mark.parametrize("gone", [(), (2,), (2, 3)], ids=["none", "one", "all"])
def test_a_rewrite_is_in_the_log_and_what_it_replaced_is_not(
    known: LogMetadata | None, gone: tuple[int, ...]
) -> None:
    """Whether bookies still have the old ledgers or not."""
    kept = [one for one in OLD if one.ledger_id not in gone]

    decision = rebuilt(*kept, MERGED, LAST, known=known, deleted=gone)

    assert items(decision) == ONCE
    assert decision.holes == ()
    assert decision.row is not None
    merged = decision.row.items[1]
    assert (merged.bytes, merged.replaced, merged.sealed_ms) == (100, 2, 5)


@pytest.mark.parametrize("known", [None, KNOWN], ids=["lost", "restored"])
@pytest.mark.parametrize("gone", [(), (1, 2), (1, 2, 3, 5)], ids=["none", "some", "all"])
def test_the_last_rewrite_is_in_the_log(known: LogMetadata | None, gone: tuple[int, ...]) -> None:
    ledgers = [one for one in (*OLD, MERGED) if one.ledger_id not in gone]

    assert items(rebuilt(*ledgers, AGAIN, LAST, known=known, deleted=gone)) == TWICE


CLOSED: Final = replace(
    KNOWN,
    items=(*KNOWN.items[:-1], replace(KNOWN.items[-1], last_offset=49, bytes=9, sealed_ms=1)),
).closed()
ENDED: Final = replace(LAST, last_entry=3)


@pytest.mark.parametrize("gone", [(), (2,), (2, 3)], ids=["none", "one", "all"])
def test_a_restored_closed_log_gets_its_rewrite_and_stays_closed(gone: tuple[int, ...]) -> None:
    """Else it would name the old ledgers, which are deleted."""
    kept = [one for one in OLD if one.ledger_id not in gone]

    decision = rebuilt(*kept, MERGED, ENDED, known=CLOSED, deleted=gone)

    assert items(decision) == [*ONCE[:3], (6, 40, 49)]
    assert decision.row is not None
    assert (decision.row.state, decision.row.end_offset) == (LogState.CLOSED, 50)
    assert decision.row.known_end == CLOSED.known_end


@pytest.mark.parametrize("replaced", [(), ((6, 40),)], ids=["ledger", "rewrite"])
def test_a_closed_log_gets_no_ledger_behind_its_end(replaced: Places) -> None:
    before = ((2, 10), (3, 20), (4, 30), (6, 40))
    later = place(8, 50, *before, replaced=()) if not replaced else place(8, 40, replaced=replaced)

    decision = rebuilt(*OLD, ENDED, later, known=CLOSED)

    assert decision.action is Action.CONFLICT


def test_a_restored_database_of_between_two_rewrites_gets_the_last_one() -> None:
    between = KNOWN.rewritten(KNOWN.items[1:3], 5, 20)

    decision = rebuilt(OLD[3], AGAIN, LAST, known=between, deleted=(1, 2, 3, 5))

    assert items(decision) == TWICE


def test_a_database_that_has_the_rewrite_stays_as_it_is() -> None:
    row = KNOWN.rewritten(KNOWN.items[1:3], 5, 20)

    for gone in ((), (2, 3)):
        kept = [one for one in OLD if one.ledger_id not in gone]
        decision = rebuilt(*kept, MERGED, LAST, known=row, deleted=gone)
        assert (decision.action, decision.why) == (Action.SAME, "")


def test_a_log_that_released_its_first_records_since_begins_at_the_rewrite() -> None:
    """The first ledger was released, and then those behind it were merged."""
    merged = place(5, 10, replaced=((2, 10), (3, 20)))

    for known in (None, KNOWN):
        decision = rebuilt(OLD[3], merged, LAST, known=known, deleted=(1, 2, 3))
        assert items(decision) == ONCE[1:]


def test_a_log_that_released_the_rewrite_begins_behind_it() -> None:
    decision = rebuilt(OLD[3], LAST, deleted=(1, 2, 3, 5))

    assert items(decision) == ONCE[2:]


def test_a_rewrite_below_the_beginning_of_the_log_replaces_nothing() -> None:
    """The database released the first ledgers in another history, and names one that the rewrite replaced."""
    row = replace(KNOWN.truncated(20), version=9)

    decision = rebuilt(OLD[2], MERGED, OLD[3], LAST, known=row, deleted=(1, 2))

    assert (decision.action, decision.unplaced) == (Action.SAME, (5,))


def test_rewrites_of_two_histories_conflict() -> None:
    other = place(8, 20, (1, 0), (2, 10), replaced=((3, 20), (4, 30)))

    decision = rebuilt(OLD[0], MERGED, other, LAST, deleted=(2, 3, 4))

    assert (decision.action, decision.row) == (Action.CONFLICT, None)
    assert decision.why == "ledgers 5 and 8 both replaced ledger 3"


@pytest.mark.parametrize("known", [None, KNOWN], ids=["lost", "restored"])
def test_a_rewrite_that_silent_bookies_may_have_is_waited_for(known: LogMetadata | None) -> None:
    """That a ledger is deleted does not show that the log released it."""
    hiding = [replace(one, hides_next=True) for one in (OLD[0], OLD[3], LAST)]
    answering = [OLD[0], OLD[3], LAST]

    waits = rebuilt(*hiding, known=known, deleted=(2, 3))
    given_up = rebuilt(*answering, known=known, deleted=(2, 3))

    assert (waits.action, waits.row) == (Action.WAIT, None)
    assert "ledger 3 is deleted, and the ledger that replaced it may be" in waits.why
    assert items(given_up) == ONCE[2:]


def test_a_rewrite_is_waited_for_where_no_ledger_of_the_log_is_told_of() -> None:
    """All who hold one are silent; those who answer know only that some are deleted."""
    waits = decide_log("events", KNOWN, (), {1, 2, 3}, now_ms=5, token=99, silent=2)
    conflict = decide_log("events", KNOWN, (), {2, 3}, now_ms=5, token=99, silent=2)

    assert (waits.action, waits.row) == (Action.WAIT, None)
    assert (conflict.action, conflict.row) == (Action.CONFLICT, None)


def test_an_empty_ledger_that_was_passed_over_does_not_hide_that_a_rewrite_is_unknown() -> None:
    """It was placed behind a ledger that was replaced since. The next one tells of the rewrite, which nobody holds."""
    empty = replace(place(9, 30, (1, 0), (2, 10), (3, 20)), last_entry=NO_ENTRY)
    behind = place(4, 30, (1, 0), (5, 10), hides=True)

    decision = rebuilt(OLD[0], empty, behind, LAST, deleted=(2, 3))

    assert decision.action is Action.WAIT


def test_a_database_that_says_where_its_log_begins_waits_for_nobody() -> None:
    row = KNOWN.truncated(30)
    hiding = [replace(one, hides_next=True) for one in (OLD[3], LAST)]

    assert rebuilt(*hiding, known=row, deleted=(1, 2, 3)).action is Action.SAME


def test_a_ledger_that_a_rewrite_does_not_name_is_not_replaced() -> None:
    """Of another history: the same place shows nothing."""
    foreign = place(9, 10, (1, 0))

    decision = rebuilt(OLD[0], MERGED, foreign, OLD[3], LAST, deleted=(2, 3))

    assert decision.action is Action.CONFLICT


def test_a_rewrite_in_an_earlier_log_of_the_name_replaces_nothing() -> None:
    assert MERGED.lineage is not None
    earlier = replace(MERGED, lineage=replace(MERGED.lineage, log_created_at="2026-01-01"))

    decision = rebuilt(*OLD, earlier, LAST)

    assert [one for one, _, _ in items(decision)] == [1, 2, 3, 4, 6]


def not_lost() -> None:
    test_a_rewrite_is_in_the_log_and_what_it_replaced_is_not(None, (2, 3))


def not_twice() -> None:
    test_a_rewrite_is_in_the_log_and_what_it_replaced_is_not(None, ())


def waited_for() -> None:
    test_a_rewrite_that_silent_bookies_may_have_is_waited_for(None)


GUARDS: Final = (
    swap(LedgerPlace, "replaced", ()).guard(
        "a rebuild takes a rewrite for one more ledger", "rule 27c", not_twice
    ),
    swap(rebuild_log, "_current", lambda ledgers, _created_at, _start: (ledgers, {})).guard(
        "a rebuild leaves out a rewrite as released", "rule 27c", not_lost
    ),
    swap(rebuild_log._Found, "contested", lambda *_given: "").guard(
        "rewrites of two histories are both in a log",
        "rule 27c",
        test_rewrites_of_two_histories_conflict,
    ),
    swap(rebuild_log._Found, "hidden", lambda *_given, **_named: "").guard(
        "a deleted ledger shows that its records were released", "rule 27c", waited_for
    ),
)


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_a_guard_that_is_taken_out_is_missed(guard: Guard) -> None:
    guard.claim()

    with applied(guard), pytest.raises(AssertionError):
        guard.claim()
