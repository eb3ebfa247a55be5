"""Rule 18d: a row is made again only where the bookies' copies prove it."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorumlog.protocol import rebuild, rebuild_log
from quorumlog.protocol.access_key import salt_and_digest, sealed
from quorumlog.protocol.ids import NO_ENTRY, member_incarnation, member_name
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings, LogState, Producer
from quorumlog.protocol.metadata import (
    ANCESTORS_KEPT,
    PREDECESSORS_KEPT,
    SHARED_KEPT,
    DigestKind,
    Fragment,
    LedgerMetadata,
    Lineage,
    Repair,
    State,
    Writer,
)
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.rebuild import (
    Action,
    Bookies,
    Decision,
    Held,
    Known,
    Registered,
    decide,
    stand_ins,
)
from quorumlog.protocol.rebuild_log import (
    NEW_LOG_VERSION,
    DeletedLogs,
    LedgerPlace,
    LogDecision,
    decide_log,
)
from tests.mutation.mutants.hunt import Guard, Patch, applied, swap

KEY = b"k" * 32
MEMBERS = ("b1@1", "b2@1", "b3@1")
FIRST = LedgerMetadata(
    7,
    Quorum(3, 3, 2),
    DigestKind.CRC32C,
    (Fragment(0, MEMBERS),),
    attempt="a1",
    writer=Writer("gateway-1", ""),
)
ALL = Bookies({f"b{number}": 1 for number in range(1, 7)})


def later(row: LedgerMetadata, line: str = "a", **changes: object) -> LedgerMetadata:
    """The row that a change makes, in one of two lines of history."""
    return replace(row.changed_by(f"{line}{row.version + 1}", row), **changes)  # type: ignore[arg-type]


def far(row: LedgerMetadata) -> LedgerMetadata:
    """A descendant of the row with its content, too far from it to list its token."""
    for _ in range(ANCESTORS_KEPT + 1):
        row = later(row)
    return row


def closed(row: LedgerMetadata, last: int = 9, line: str = "a") -> LedgerMetadata:
    return later(row.closed(last_entry=last, length=10 * last), line)


def held(*rows: LedgerMetadata, by: str = "b1@1", key: bytes = KEY) -> Held:
    return Held(by, key, rows=rows)


def known(row: LedgerMetadata, *attempts: str) -> Known:
    """A database whose row this is; it contains the tokens of these copies."""
    return Known(replace(row, ledger_key=KEY), attempts=frozenset(attempts))


MOVED = later(FIRST.with_ensemble(4, ("b4@1", "b2@1", "b3@1")))
RECOVERED = later(FIRST.in_recovery())
CLOSED = closed(MOVED)


@pytest.mark.parametrize("row", [FIRST, MOVED, RECOVERED, CLOSED], ids=lambda row: row.state)
def test_a_missing_row_is_the_newest_copy_with_the_bookies_key(row: LedgerMetadata) -> None:
    decision = decide(Known(), [held(FIRST), held(FIRST, row, by="b2@1")], ALL)

    assert decision == Decision(Action.WRITE, replace(row, ledger_key=KEY))


def test_a_row_behind_the_copies_that_came_of_it_is_written() -> None:
    decision = decide(known(FIRST, "a1"), [held(FIRST), held(MOVED, CLOSED, by="b4@1")], ALL)

    assert decision == Decision(Action.WRITE, replace(CLOSED, ledger_key=KEY))


def test_a_closed_row_is_moved_by_a_later_copy_though_nobody_tells_the_steps_between() -> None:
    target = Repair(0, "b1@1", "b5@1")
    released = later(later(later(CLOSED.with_repair(target))))
    moved = far(released.with_member_replaced(0, "b2@1", "b6@1"))
    copies = [held(CLOSED), held(moved, by="b6@1")]

    decision = decide(known(released, "a3"), copies, ALL)
    elsewhere = replace(moved, lost_entries=((1, 1),), may_lack_entries=True)
    lost = decide(known(released, "a3"), [held(CLOSED), held(elsewhere, by="b6@1")], ALL)

    assert decision == Decision(Action.WRITE, replace(moved, ledger_key=KEY))
    assert lost.action is Action.CONFLICT


def test_a_closed_row_is_not_moved_to_members_that_may_have_dropped_their_entries() -> None:
    """Two lines of history moved the ledger's places. The database's row does not name b1, which holds no copy that
    the database lacks: b1 may have dropped its entries, and b5 would by the copies' row.
    """
    ours = later(later(CLOSED.with_member_replaced(0, "b1@1", "b5@1"), "z"), "z")
    theirs = CLOSED.with_member_replaced(0, "b2@1", "b6@1")
    for _ in range(3):
        theirs = later(theirs)
    theirs = replace(theirs, repairs=())
    copies = [held(CLOSED), held(CLOSED, theirs, by="b6@1")]

    decision = decide(known(replace(ours, repairs=()), CLOSED.attempt), copies, ALL)
    kept = decide(known(replace(ours, repairs=()), CLOSED.attempt), [*copies, held(theirs)], ALL)

    assert decision.action is Action.CONFLICT
    assert kept.action is Action.WRITE


def test_a_row_gets_the_place_in_its_log_that_its_copies_tell() -> None:
    """The change of the log is lost that placed the ledger, and the ledger's creation is not."""
    lineage = Lineage("2026-01-01", ((3, 0),))
    placed = replace(FIRST, log="log", first_offset=5, lineage=lineage)
    row = replace(FIRST, log="log")

    decision = decide(known(row, "a1"), [held(placed)], ALL)
    again = decide(known(placed, "a1"), [held(placed)], ALL)
    silent = replace(ALL, silent=frozenset({"b8", "b9"}))

    assert decision == Decision(Action.WRITE, replace(placed, ledger_key=KEY))
    assert again.action is Action.SAME
    assert decide(known(row, "a1"), [held(placed)], silent).action is Action.WAIT


def test_a_row_that_is_written_keeps_the_keys_that_bookies_do_not_have() -> None:
    row = replace(FIRST, mac_key=b"m" * 32, access_key=b"p" * 48)

    decision = decide(known(row, "a1"), [held(FIRST, CLOSED)], ALL)

    assert decision.row is not None
    assert (decision.row.mac_key, decision.row.access_key) == (b"m" * 32, b"p" * 48)


@pytest.mark.parametrize("row", [FIRST, CLOSED, closed(RECOVERED)], ids=lambda row: row.state)
def test_a_row_with_all_that_the_copies_tell_stays(row: LedgerMetadata) -> None:
    decision = decide(known(row, "a1", "a2", "a3"), [held(FIRST, MOVED)], ALL)

    assert decision == Decision(Action.SAME)


def test_a_row_of_before_tokens_is_compared_by_its_version() -> None:
    old, new = replace(FIRST, attempt=""), replace(FIRST, attempt="", version=2)

    assert decide(known(new), [held(old)], ALL).action is Action.SAME
    assert decide(known(old), [held(new)], ALL).action is Action.WRITE


def test_a_deleted_id_anywhere_is_a_tombstone() -> None:
    deleted = Held("b1@1", is_deleted=True)

    assert decide(Known(), [deleted], ALL) == Decision(Action.TOMBSTONE)
    assert decide(Known(), [held(CLOSED), deleted], ALL) == Decision(Action.TOMBSTONE)
    assert decide(known(CLOSED, "a3"), [deleted], ALL) == Decision(Action.TOMBSTONE)


def test_a_copy_of_a_tombstone_is_one_whatever_other_bookies_hold() -> None:
    reported = held(CLOSED, CLOSED.deleted("d"))

    assert decide(Known(), [reported], ALL) == Decision(Action.TOMBSTONE)
    assert decide(Known(), [held(CLOSED), reported], ALL) == Decision(Action.TOMBSTONE)
    assert decide(known(CLOSED, "a3"), [reported], ALL) == Decision(Action.TOMBSTONE)


def test_silent_bookies_may_hide_a_deletion_where_they_may_hide_a_later_row() -> None:
    one, two = (replace(ALL, silent=frozenset(names)) for names in (("b2",), ("b2", "b3")))

    assert decide(Known(), [held(CLOSED)], two).action is Action.WRITE
    assert (one.may_hide_later(CLOSED), two.may_hide_later(CLOSED)) == (False, True)


def test_a_tombstone_is_written_again_for_a_copy_whose_change_the_database_lacks() -> None:
    reported = held(CLOSED, CLOSED.deleted("d"))

    behind = decide(Known(is_deleted=True, attempts=frozenset({"a3"})), [reported], ALL)
    again = decide(Known(is_deleted=True, attempts=frozenset({"a3", "d"})), [reported], ALL)

    assert (behind.action, again.action) == (Action.TOMBSTONE, Action.SAME)


def test_a_tombstone_stays_whatever_bookies_hold() -> None:
    assert decide(Known(is_deleted=True), [held(CLOSED)], ALL) == Decision(Action.SAME)


FORKED = closed(later(FIRST, "z"), 9, "z")


@pytest.mark.parametrize(
    ("row", "copies", "why"),
    [
        (None, [MOVED, later(FIRST, "z")], "two copies of one version"),
        (None, [CLOSED, closed(FIRST, 3, "z")], "different last entries: 3, 9"),
        (known(closed(FIRST, 3, "z"), "a1"), [FIRST, CLOSED], "different last entries: 3, 9"),
        (None, [closed(FIRST), later(later(FIRST))], "is not CLOSED"),
        (known(later(FIRST, "z"), "a1"), [FIRST, MOVED], "the database lacks"),
        (known(later(FIRST, "z"), "a1"), [FIRST, later(MOVED)], "do not show"),
        (known(FORKED, "a1"), [FIRST, CLOSED], "the database lacks"),
        (known(FIRST, "a1"), [replace(MOVED, quorum=Quorum(3, 2, 2))], "differ"),
        (None, [FIRST, replace(MOVED, writer=Writer("gateway-2", ""))], "differ"),
        (Known(replace(FIRST, ledger_key=b"o" * 32)), [MOVED], "keys differ"),
    ],
)
def test_copies_that_contradict_each_other_or_the_row_are_told(
    row: Known | None, copies: Sequence[LedgerMetadata], why: str
) -> None:
    decision = decide(row or Known(), [held(*copies)], ALL)

    assert decision.action is Action.CONFLICT
    assert why in decision.why
    assert decision.row is None


def test_a_late_copy_of_a_lost_history_does_not_replace_the_database_s_version() -> None:
    """Only a silent bookie, the target of a repair, had copies of the lost history. An operator accepted the loss, and
    the writer changed the ensemble, before the bookie answered again.
    """
    lost = later(later(MOVED.with_repair(Repair(0, "b1@1", "b5@1"))))
    row = later(MOVED.with_ensemble(7, ("b4@1", "b6@1", "b3@1")), "z")
    answers = [held(FIRST, MOVED, row), held(lost, by="b5@1")]

    decision = decide(known(row, "a1", "a2", "z3"), answers, ALL)

    assert decision.action is Action.CONFLICT
    assert "version 4 descends from the database's version 3" in decision.why


def test_copies_of_two_lost_histories_are_reported_as_a_conflict() -> None:
    lost = later(MOVED, "z")
    newest = later(later(MOVED))

    decision = decide(known(MOVED, "a1", "a2"), [held(FIRST, lost), held(newest, by="b4@1")], ALL)

    assert decision.action is Action.CONFLICT


def test_copies_of_two_histories_are_reported_without_metadata_in_the_database() -> None:
    lost = later(later(MOVED))
    copies = [held(FIRST, MOVED, later(MOVED, "z")), held(lost, by="b5@1")]

    assert decide(Known(), copies, ALL).action is Action.CONFLICT
    assert decide(Known(), copies[1:], ALL).action is Action.WRITE


def test_an_end_of_another_history_is_not_written_over_a_fragment_that_it_lacks() -> None:
    """The bookies that the lost history's recovery fenced were silent, so the writer replaced them and continued."""
    end = closed(later(FIRST.in_recovery()))
    row = later(FIRST.with_ensemble(10, ("b4@1", "b5@1", "b6@1")), "z")

    assert decide(known(row, "a1"), [held(FIRST, end)], ALL).action is Action.CONFLICT
    assert decide(known(later(FIRST, "z"), "a1"), [held(end)], ALL).action is Action.WRITE


def test_a_copy_shows_its_descent_from_as_many_versions_as_it_lists() -> None:
    nine, second = far(FIRST), later(FIRST)

    assert decide(known(second, "a1"), [held(FIRST, nine)], ALL).action is Action.WRITE
    assert decide(known(FIRST, "a1"), [held(FIRST, nine)], ALL).action is Action.CONFLICT
    assert decide(known(FIRST, "a1"), [held(second, nine)], ALL).action is Action.WRITE


@given(st.data())
def test_no_version_replaces_a_version_that_it_does_not_descend_from(data: st.DataObject) -> None:
    """Two histories have the same first versions. Bookies have copies of any versions."""
    common = [FIRST]
    for _ in range(data.draw(st.integers(0, 3))):
        common.append(later(common[-1]))
    lines = [[*common], [*common]]
    for line, name in zip(lines, "yz", strict=True):
        for _ in range(data.draw(st.integers(0, 2 * ANCESTORS_KEPT))):
            line.append(later(line[-1], name))
    everything = [*lines[0], *lines[1][len(common) :]]
    row = data.draw(st.sampled_from(lines[0]))
    contained = [one.attempt for one in lines[0] if one.version <= row.version]
    copies = data.draw(st.lists(st.sampled_from(everything), min_size=1, unique=True))

    decision = decide(known(row, *contained), [held(*copies)], ALL)
    without = decide(Known(), [held(*copies)], ALL)

    if decision.row is not None:
        found = [line for line in lines if replace(decision.row, ledger_key=b"") in line]
        assert any(row in line for line in found)
    if without.row is not None:
        listed = [one for one in copies if one.version >= without.row.version - ANCESTORS_KEPT]
        assert any({*listed} <= {*line} for line in lines)


def test_an_end_is_written_over_an_open_row_of_any_line() -> None:
    row = later(FIRST.in_recovery(), "z")

    decision = decide(known(row, "a1"), [held(FIRST, CLOSED)], ALL)

    assert decision == Decision(Action.WRITE, replace(CLOSED, ledger_key=KEY))


def test_an_open_row_waits_where_as_many_bookies_are_silent_as_may_have_confirmed_more() -> None:
    one = replace(ALL, silent=frozenset({"b9"}))
    two = replace(ALL, silent=frozenset({"b8", "b9"}))

    assert decide(Known(), [held(FIRST)], one).action is Action.WRITE
    waits = decide(Known(), [held(FIRST)], two)
    assert (waits.action, waits.row) == (Action.WAIT, None)
    assert "2 bookies" in waits.why
    assert decide(Known(), [held(CLOSED)], two).action is Action.WRITE, "an end is final"


def test_a_bookie_that_lost_its_data_counts_as_silent() -> None:
    renewed = Bookies({"b1": 2, "b2": 2, "b3": 1})

    assert decide(Known(), [held(FIRST, by="b3@1")], renewed).action is Action.WAIT


def test_an_open_row_of_the_database_waits_for_silent_bookies_too() -> None:
    """Seed 2099: (1,1,1), and the only bookie that had a copy of the CLOSED row, which a client was told of, was down.
    The open row counted as proven, and the next recovery found another end.
    """
    two = replace(ALL, silent=frozenset({"b8", "b9"}))

    assert decide(known(FIRST, "a1"), [held(FIRST)], two).action is Action.WAIT
    assert decide(known(FIRST), [], two).action is Action.WAIT
    assert decide(known(CLOSED, "a1"), [held(FIRST)], two).action is Action.SAME


def test_a_bookie_in_limbo_may_have_lost_the_copy_of_a_row_that_named_it() -> None:
    one = replace(ALL, silent=frozenset({"b9"}))
    limbo = replace(held(by="b5@2"), is_limbo=True)

    assert decide(Known(), [held(FIRST), limbo], ALL).action is Action.WRITE
    assert decide(Known(), [held(FIRST), limbo], one).action is Action.WAIT
    assert decide(known(FIRST, "a1"), [held(FIRST), limbo], one).action is Action.WAIT

    accepted = Bookies({name: 1 for name in ALL.answering if name != "b5"}, one.silent)
    assert decide(Known(), [held(FIRST), limbo], accepted).action is Action.WRITE, "--without b5"


def test_entries_without_any_copy_wait() -> None:
    assert decide(Known(), [held()], ALL).action is Action.WAIT
    assert decide(Known(), [held(FIRST, key=b"")], ALL).action is Action.WAIT
    assert decide(known(FIRST), [held()], ALL).action is Action.SAME


@given(st.data())
def test_no_row_is_written_behind_a_confirmed_entry(data: st.DataObject) -> None:
    """A line of committed rows; members that confirmed under a row hold its copy or a later one."""
    quorum = Quorum(3, 3, data.draw(st.integers(1, 3)))
    names = [f"b{number}" for number in range(1, 7)]
    row = replace(FIRST, quorum=quorum)
    line = [row]
    for number in range(data.draw(st.integers(0, 4))):
        members = data.draw(st.permutations(names))[:3]
        row = later(row.with_ensemble(number + 1, tuple(f"{name}@1" for name in members)))
        line.append(row)
    if data.draw(st.booleans()):
        line.append(later(line[-1].in_recovery()))
    if data.draw(st.booleans()):
        line.append(closed(line[-1]))
    copies: dict[str, list[LedgerMetadata]] = {name: [] for name in names}
    confirmed = 0
    for at, row in enumerate(line):
        members = [member.partition("@")[0] for member in row.last_fragment.bookies]
        holders = data.draw(st.lists(st.sampled_from(members), unique=True))
        for name in holders:
            copies[name].append(row)
        if row.state is not State.IN_RECOVERY and len(holders) >= quorum.ack_quorum:
            confirmed = at
    silent = frozenset(data.draw(st.lists(st.sampled_from(names), unique=True)))
    stored = data.draw(st.integers(-1, len(line) - 1))
    database = (
        Known() if stored < 0 else known(line[stored], *(row.attempt for row in line[: stored + 1]))
    )
    answers = [held(*copies[name], by=f"{name}@1") for name in names if name not in silent]
    bookies = Bookies({name: 1 for name in names if name not in silent}, silent)

    decision = decide(database, [one for one in answers if one.rows], bookies)

    if decision.action is Action.WRITE:
        assert decision.row is not None
        assert replace(decision.row, ledger_key=b"") in line, "only what was committed"
        assert decision.row.version > (0 if database.row is None else database.row.version)
        is_final = decision.row.state is State.CLOSED
        assert is_final or decision.row.version >= line[confirmed].version
    if database.row is None and any(one.rows for one in answers):
        assert decision.action in {Action.WRITE, Action.WAIT}, "one line never contradicts itself"
    if len(silent) < quorum.ack_quorum and confirmed > max(stored, 0):
        assert decision.action in {Action.WRITE, Action.CONFLICT}


# --- logs -----------------------------------------------------------------------------------------

NOW_MS = 1_000
TOKEN = 1_000_000
"""A writer token that nobody has."""
CREATED_AT = "2026-01-02T00:00:00.000000Z"
LATER_AT = "2026-01-03T00:00:00.000000Z"
OFFSETS = tuple((number, 10 * number) for number in range(8))
"""The first offset of each ledger of a log, by id."""


def ledger(ledger_id: int, first: int | None, last: int | None = None) -> LedgerPlace:
    """A ledger of the log, CLOSED where `last` says where."""
    return LedgerPlace(ledger_id, first, last, 100, Quorum(3, 3, 2), DigestKind.CRC32C)


def behind(
    one: LedgerPlace, *before: tuple[int, int], created_at: str = CREATED_AT, has_row: bool = True
) -> LedgerPlace:
    """The ledger, with what was before it in the log when it got its place."""
    return replace(one, lineage=Lineage(created_at, before), has_row=has_row)


def reported(
    known: LogMetadata | None, *ledgers: LedgerPlace, deleted: Sequence[int] = ()
) -> LogDecision:
    return decide_log("events", known, ledgers, deleted, now_ms=NOW_MS, token=TOKEN)


LOG = LogMetadata(
    "events",
    LogSettings(Quorum(3, 2, 2), retention_bytes=5),
    (LogItem(1, 0, 9), LogItem(2, 10, producers=(Producer("p", 1, 0, ()),))),
    version=7,
    writer_token=3,
)


def test_a_lost_log_is_its_ledgers_by_place_and_has_forgotten_every_producer() -> None:
    decision = reported(None, ledger(5, 20), ledger(9, 0, 3), ledger(4, 10, 2))

    row = decision.row
    assert decision.action is Action.WRITE
    assert row is not None
    row.check()
    assert [(item.ledger_id, item.first_offset, item.last_offset) for item in row.items] == [
        (9, 0, 9),
        (4, 10, 19),
        (5, 20, None),
    ]
    assert [(item.bytes, item.sealed_ms) for item in row.items[:2]] == [(100, NOW_MS)] * 2
    assert (row.forgotten_end, row.first_offset, row.appended_ms) == (20, 0, NOW_MS)
    assert (row.version, row.settings) == (NEW_LOG_VERSION, LogSettings(Quorum(3, 3, 2)))


def test_a_lost_log_has_the_settings_that_its_owner_gave_to_its_ledgers() -> None:
    """A stream without its content type is none (ADR 38)."""
    mine = (("durable-stream.content-type", "application/json"),)
    own = replace(ledger(1, 0, 3), custom=mine, is_packed=True)
    of_transaction = replace(ledger(2, 10), is_packed=True)

    row = reported(None, own, of_transaction).row
    plain = reported(None, replace(own, is_packed=False)).row
    bare = reported(None, of_transaction).row

    assert row is not None
    assert row.settings == LogSettings(Quorum(3, 3, 2), batch_compression="zstd", custom=mine)
    assert plain is not None
    assert plain.settings == LogSettings(Quorum(3, 3, 2), custom=mine)
    assert bare is not None
    assert bare.settings == LogSettings(Quorum(3, 3, 2), batch_compression="zstd")


def test_what_a_transaction_published_keeps_the_time_of_its_publication() -> None:
    """Its batches have the times of their writing, which may be before those of the records before it (rule 26b)."""
    first = replace(ledger(1, 0, 3), lineage=Lineage(CREATED_AT))
    published = replace(
        ledger(2, 10, 3), lineage=Lineage(CREATED_AT, OFFSETS[1:2], published_ms=17)
    )

    lost = reported(None, first, published).row
    older = reported(replace(LOG, created_at=CREATED_AT, items=LOG.items[:1]), first, published).row

    for row in (lost, older):
        assert row is not None
        assert [item.published_ms for item in row.items] == [0, 17]


def test_a_stream_sequence_comes_back_as_it_was_before_the_last_ledger() -> None:
    """The last ledger may be empty, so that no batch tells the sequence (rule 25a)."""

    def after(ledger_id: int, seq: str | None) -> LedgerPlace:
        placed = ledger(ledger_id, 10 * (ledger_id - 1), 3)
        return replace(placed, lineage=Lineage(CREATED_AT, stream_seq=seq))

    ledgers = (after(1, None), after(2, "b"), after(3, "c"))
    known = replace(LOG, created_at=CREATED_AT, items=LOG.items[:1])

    for log, seq in ((None, "c"), (known, "c"), (replace(known, stream_seq="d"), "d")):
        row = reported(log, *ledgers).row
        assert row is not None
        assert row.stream_seq == seq


def test_a_lost_log_whose_next_ledger_may_be_on_silent_bookies_waits() -> None:
    """Its next owner would give the offsets of acknowledged records to others."""
    last = replace(ledger(2, 10, 3), hides_next=True)

    decision = reported(None, ledger(1, 0, 3), last)
    opened = reported(None, ledger(1, 0, 3), last, ledger(3, 20))

    assert (decision.action, decision.row) == (Action.WAIT, None)
    assert "ledger 2 is CLOSED, and the ledger after it may be" in decision.why
    assert opened.action is Action.WRITE


def test_a_deleted_ledger_that_had_no_records_was_only_passed_over() -> None:
    """The older row names the ledger last; a takeover closed it, and another one has its place."""
    empty = replace(LOG, created_at=CREATED_AT)
    before = behind(ledger(1, 0, 3))
    later = behind(ledger(3, 10, 5), (1, 0))

    decision = reported(empty, before, later, deleted=[2])

    assert places(decision.row) == [(1, 0, 9), (3, 10, None)]
    ahead = replace(empty, items=(*empty.items[:1], LogItem(2, None)))
    assert places(reported(ahead, before, later, deleted=[2]).row) == [(1, 0, 9), (3, 10, None)]
    # Where nobody tells what came later, it may have had records.
    for nothing in ([before], [before, behind(ledger(3, 10, NO_ENTRY), (1, 0))], [ledger(3, 10)]):
        assert reported(empty, *nothing, deleted=[2]).action is Action.CONFLICT
    # With records it was let go of, and all before it.
    after = behind(ledger(3, 20), (1, 0), (2, 10))
    assert places(reported(empty, before, after, deleted=[2]).row) == [(3, 20, None)]


def test_a_log_begins_where_its_first_ledger_does() -> None:
    row = reported(None, ledger(3, 50, 4), ledger(4, 60)).row

    assert row is not None
    assert row.first_offset == 50


def test_an_empty_ledger_has_no_place_but_at_the_end() -> None:
    middle = reported(None, ledger(1, 0, 4), ledger(2, 9, -1), ledger(3, 9, -1), ledger(4, 9, 0))
    end = reported(None, ledger(1, 0, 4), ledger(2, 9, -1), ledger(3, 9, -1))

    assert middle.row is not None
    assert [item.ledger_id for item in middle.row.items] == [1, 4]
    assert middle.unplaced == (2, 3)
    assert end.row is not None
    assert [item.ledger_id for item in end.row.items] == [1, 3]


def test_ledgers_without_a_place_are_told_and_not_in_the_log() -> None:
    assert reported(None, ledger(1, 0), ledger(2, None)).unplaced == (2,)
    assert reported(None, ledger(2, None)).action is Action.WAIT


@pytest.mark.parametrize(
    ("ledgers", "why"),
    [
        (
            [ledger(1, 0, 4), ledger(2, 4)],
            "ledger 1 ends at offset 5, but the next ledger 2 begins at 4",
        ),
        ([ledger(1, 0, 4), ledger(2, 9), ledger(3, 9)], "ledgers 2 and 3 both begin at 9"),
    ],
)
def test_an_end_beyond_the_next_beginning_is_told(ledgers: Sequence[LedgerPlace], why: str) -> None:
    decision = reported(None, *ledgers)

    assert (decision.action, decision.row) == (Action.CONFLICT, None)
    assert decision.why == why


def test_a_log_that_is_behind_gets_the_ledgers_that_came_later() -> None:
    decision = reported(LOG, ledger(1, 0, 3), ledger(2, 10, 4), ledger(3, 20))

    row = decision.row
    assert row is not None
    assert [(item.ledger_id, item.first_offset, item.last_offset) for item in row.items] == [
        (1, 0, 9),
        (2, 10, 19),
        (3, 20, None),
    ]
    assert (row.forgotten_end, row.version) == (20, 7)
    assert row.settings == LOG.settings


def opened(one: LedgerPlace, token: int) -> LedgerPlace:
    """A ledger that was placed when the log had this writer token."""
    assert one.lineage is not None
    return replace(one, lineage=replace(one.lineage, writer_token=token))


def test_a_rebuilt_log_that_was_opened_has_a_token_that_nobody_was_given() -> None:
    """Rule 22a."""
    placed = replace(ledger(2, 10), lineage=Lineage(CREATED_AT))
    lost = reported(None, opened(placed, 2)).row
    behind = reported(LOG, ledger(1, 0, 3), ledger(2, 10, 4), ledger(3, 20)).row
    never_opened = reported(None, placed).row

    assert lost is not None
    assert behind is not None
    assert never_opened is not None
    assert (lost.writer_token, behind.writer_token) == (TOKEN, TOKEN)
    assert never_opened.writer_token == 0


def test_a_log_whose_ledgers_it_names_stays() -> None:
    assert reported(LOG, ledger(1, 0, 3), ledger(2, 10)).action is Action.SAME
    assert reported(LOG).action is Action.SAME


def test_a_log_without_ledgers_is_told_where_deleted_ones_may_be_its() -> None:
    """The database went back to before the log's first ledger; the log was written and deleted, and bookies have dropped
    its ledgers: they keep the ids, and not whose they were.
    """
    empty = replace(LOG, items=(), next_offset=0)

    told_of = decide_log("log", empty, (), {7}, now_ms=NOW_MS, token=TOKEN)

    assert (told_of.action, told_of.row) == (Action.SAME, None)
    assert "delete it again" in told_of.why
    assert not decide_log("log", empty, (), (), now_ms=NOW_MS, token=TOKEN).why
    assert not decide_log("log", LOG, (), {7}, now_ms=NOW_MS, token=TOKEN).why


def test_an_item_that_was_added_ahead_gets_the_place_that_its_ledger_tells() -> None:
    ahead = replace(LOG, items=(*LOG.items, LogItem(3, None)))

    row = reported(ahead, ledger(2, 10, 4), ledger(3, 17)).row

    assert row is not None
    assert [(item.first_offset, item.last_offset) for item in row.items[1:]] == [
        (10, 16),
        (17, None),
    ]


def test_a_log_lets_go_again_of_the_first_ledgers_that_are_deleted() -> None:
    row = reported(LOG, ledger(2, 10), deleted=[1]).row

    assert row is not None
    assert (row.first_offset, [item.ledger_id for item in row.items]) == (10, [2])


@pytest.mark.parametrize(
    ("log", "ledgers", "deleted", "why"),
    [
        (
            LOG,
            [],
            [1, 2],
            "all known ledgers are deleted: the log was deleted, or later ones are unknown",
        ),
        (LOG, [], [2], "ledger 2 is deleted, although the log has earlier ledgers"),
        (LOG, [ledger(3, 5)], [], "ledger 1 ends at offset 10, but the next ledger 3 begins at 5"),
        (
            replace(LOG, items=LOG.items[:1], state=LogState.CLOSED, next_offset=10),
            [ledger(3, 10)],
            [],
            "the log is CLOSED, and ledger 3 was written later",
        ),
    ],
)
def test_a_log_that_contradicts_its_ledgers_is_told(
    log: LogMetadata, ledgers: Sequence[LedgerPlace], deleted: Sequence[int], why: str
) -> None:
    decision = reported(log, *ledgers, deleted=deleted)

    assert (decision.action, decision.why) == (Action.CONFLICT, why)


def test_what_a_log_let_go_of_does_not_come_back() -> None:
    log = replace(LOG, first_offset=10, items=LOG.items[1:])

    decision = reported(log, ledger(1, 0, 3), ledger(2, 10))

    assert (decision.action, decision.unplaced) == (Action.SAME, (1,))


def places(row: LogMetadata | None) -> list[tuple[int, int | None, int | None]]:
    """The log's ledgers, each with its first and last offset."""
    assert row is not None
    row.check()
    return [(item.ledger_id, item.first_offset, item.last_offset) for item in row.items]


def test_a_ledger_that_nobody_holds_keeps_its_place_and_is_told() -> None:
    decision = reported(
        None,
        behind(ledger(0, 0, 3)),
        behind(ledger(2, 20, 3), *OFFSETS[:2]),
        behind(ledger(3, 30), *OFFSETS[:3]),
    )

    assert (decision.action, decision.holes) == (Action.WRITE, (1,))
    assert places(decision.row) == [(0, 0, 9), (1, 10, 19), (2, 20, 29), (3, 30, None)]


def test_a_ledger_whose_row_is_not_proven_keeps_its_place_also_at_the_end() -> None:
    decision = reported(
        None, behind(ledger(0, 0, 3)), behind(ledger(1, 10), OFFSETS[0], has_row=False)
    )

    assert decision.holes == (1,)
    assert places(decision.row) == [(0, 0, 9), (1, 10, None)]


def test_a_hole_that_is_found_later_is_none() -> None:
    behind_hole = behind(ledger(2, 20, 3), *OFFSETS[:2])
    row = reported(None, behind(ledger(0, 0, 3)), behind_hole).row

    again = reported(
        row, behind(ledger(0, 0, 3)), behind(ledger(1, 10, 9), OFFSETS[0]), behind_hole
    )
    kept = decide_log("events", row, [behind_hole], [], now_ms=NOW_MS, token=TOKEN, stored=[0, 1])

    assert (again.action, again.holes) == (Action.SAME, ())
    assert (kept.action, kept.holes) == (Action.SAME, ())
    assert reported(row, behind_hole).holes == (0, 1)


def test_a_hole_of_which_only_the_end_is_known_is_told_and_not_closed() -> None:
    known = behind(ledger(0, 0, 3))
    most = PREDECESSORS_KEPT
    last = behind(ledger(most, 10 * most), *OFFSETS[:most])
    one_more = behind(ledger(most + 1, 10 * (most + 1)), *OFFSETS[1 : most + 1])

    assert reported(None, known, last).holes == tuple(range(1, most))
    decision = reported(None, known, one_more)
    assert (decision.action, decision.row) == (Action.CONFLICT, None)
    assert decision.why == (
        "ledgers between 0 and 1 may be missing: no bookie that answers has them, and their ids are unknown"
    )


def test_what_the_log_let_go_of_before_a_deleted_ledger_does_not_come_back() -> None:
    ledgers = [behind(ledger(0, 0, 3)), behind(ledger(2, 20), *OFFSETS[:2])]

    decision = reported(None, *ledgers, deleted=[1])

    assert places(decision.row) == [(2, 20, None)]
    assert (decision.unplaced, decision.holes) == ((0,), ())


def test_what_the_log_let_go_of_before_a_ledger_was_placed_does_not_come_back() -> None:
    let_go = [behind(ledger(0, 0, 3)), behind(ledger(1, 10, 3), OFFSETS[0])]

    decision = reported(None, *let_go, behind(ledger(2, 20, 3)), behind(ledger(3, 30), OFFSETS[2]))

    assert places(decision.row) == [(2, 20, 29), (3, 30, None)]
    assert decision.unplaced == (0, 1)


def test_a_ledger_without_records_gives_its_place_to_another() -> None:
    row = replace(LOG, created_at=CREATED_AT)
    instead = behind(ledger(3, 10), (1, 0))

    closed_empty = reported(row, ledger(1, 0, 3), ledger(2, 10, -1), instead)
    unreported = reported(row, ledger(1, 0, 3), instead)

    for decision in (closed_empty, unreported):
        assert places(decision.row) == [(1, 0, 9), (3, 10, None)]


def test_a_ledger_of_an_earlier_log_of_the_name_is_not_in_a_later_one() -> None:
    earlier = [behind(ledger(1, 0, 9)), behind(ledger(2, 10, 9), (1, 0))]
    later = behind(ledger(5, 0, 3), created_at=LATER_AT)
    row = replace(LOG, created_at=LATER_AT, items=(LogItem(5, 0),))

    lost, stays = reported(None, *earlier, later), reported(row, *earlier, later)

    assert places(lost.row) == [(5, 0, None)]
    assert lost.row is not None
    assert lost.row.created_at == LATER_AT
    assert (lost.unplaced, stays.unplaced) == ((1, 2), (1, 2))
    assert stays.action is Action.SAME


def test_a_later_log_with_lower_ledger_ids_than_the_deleted_log_is_kept() -> None:
    deletions = DeletedLogs(9, frozenset({CREATED_AT}))
    row = replace(LOG, created_at=LATER_AT, items=(LogItem(5, 0),))

    assert deletions.decide(row) is None
    assert not deletions.include(behind(ledger(5, 0, 3), created_at=LATER_AT))


def test_a_log_is_deleted_again_only_if_copies_show_its_creation_time() -> None:
    deletions = DeletedLogs(9, frozenset({LATER_AT}))
    deleted = replace(LOG, created_at=LATER_AT, items=(LogItem(12, 0),))
    earlier = replace(LOG, created_at=CREATED_AT, items=(LogItem(5, 0),))

    assert deletions.decide(deleted) == LogDecision(Action.TOMBSTONE)
    unproven = deletions.decide(earlier)
    assert unproven is not None
    assert unproven.action is Action.CONFLICT
    assert deletions.include(behind(ledger(12, 0, 3), created_at=LATER_AT))
    assert deletions.include(behind(ledger(5, 0, 3), created_at=CREATED_AT))
    assert deletions.include(ledger(9, None))
    assert not deletions.include(ledger(10, None))


def test_a_deletion_without_a_creation_time_is_reported_as_a_conflict() -> None:
    row = replace(LOG, created_at=LATER_AT, items=(LogItem(5, 0),))

    decision = DeletedLogs(9).decide(row)

    assert decision is not None
    assert decision.action is Action.CONFLICT
    assert "ledgers up to 9 were deleted with a log of this name" in decision.why
    assert DeletedLogs(4).decide(row) is None


def test_a_later_log_of_the_name_than_the_database_has_is_told() -> None:
    row = replace(LOG, created_at=CREATED_AT)

    decision = reported(row, behind(ledger(5, 0, 3), created_at=LATER_AT))

    assert (decision.action, decision.row) == (Action.CONFLICT, None)
    assert decision.why == (
        f"the log was deleted, and another log of its name was created at {LATER_AT}"
    )


def test_a_ledger_from_before_lineages_gets_the_place_that_later_ones_tell() -> None:
    decision = reported(
        None, ledger(0, 0, 3), ledger(1, None, 3), behind(ledger(2, 20), *OFFSETS[:2])
    )

    assert places(decision.row) == [(0, 0, 9), (1, 10, 19), (2, 20, None)]


@given(st.data())
def test_a_log_with_lineages_is_rebuilt_or_told_whatever_is_lost(data: st.DataObject) -> None:
    """A log grows, lets go of its first ledgers, and has empty ledgers; the database is of any time."""
    log = LogMetadata("events", LogSettings(Quorum(3, 3, 2)), created_at=CREATED_AT)
    ledgers: dict[int, LedgerPlace] = {}
    history = [log]
    for number in range(data.draw(st.integers(1, 9))):
        records = data.draw(st.integers(0, 5))
        log = log.with_ledger(number).with_ends({}, producers=(), now_ms=0)
        first = log.items[-1].first_offset
        ledgers[number] = replace(
            ledger(number, first, records - 1), lineage=log.lineages([number])[number]
        )
        history.append(log)
        log = log.with_ends({number: (records, 100)}, producers=(), now_ms=0)
        assert log.end_offset is not None
        log = log.truncated(data.draw(st.integers(0, log.end_offset)))
    lost = data.draw(st.sets(st.sampled_from(sorted(ledgers))))
    known = data.draw(st.sampled_from(history))
    held = [one for number, one in ledgers.items() if number not in lost]
    whole = [(item.ledger_id, item.first_offset) for item in log.items]

    decision = reported(known if known.items else None, *held)

    if decision.row is None:
        assert lost or decision.action is not Action.CONFLICT, decision.why
        return
    row = decision.row
    row.check()
    found = [(item.ledger_id, item.first_offset) for item in row.items]
    ends = dict(found)
    assert len(ends) == len(found)
    through = max(ends)
    since = found[0][0]
    expected = [place for place in whole if since <= place[0] <= through]
    assert [place for place in found if place in whole] == expected, "in order, nothing left out"
    for item, after in pairwise(row.items):
        if item.ledger_id in ledgers and not item.is_empty:
            entries = ledgers[item.ledger_id].last_entry
            assert entries is not None
            assert item.last_offset == (item.first_offset or 0) + entries, "no end by guess"
        assert item.last_offset is not None
        assert item.last_offset + 1 == after.first_offset


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=8), st.data())
def test_a_log_is_made_again_as_it_was_from_any_state_that_it_went_back_to(
    sizes: list[tuple[int, bool]], data: st.DataObject
) -> None:
    at, items, ledgers = 0, [], []
    for number, (records, has_batches) in enumerate(sizes):
        entries = 1 if has_batches else records
        items.append(LogItem(number, at, at + records - 1))
        ledgers.append(ledger(number, at, entries - 1))
        at += records
    whole = LogMetadata("events", LogSettings(Quorum(3, 3, 2)), tuple(items))
    count = data.draw(st.integers(0, len(items)))
    before = items[:count]
    if before:
        before[-1] = replace(before[-1], last_offset=None)
    known = replace(whole, items=tuple(before)) if before else None

    row = reported(known, *data.draw(st.permutations(ledgers))).row or known

    assert row is not None
    row.check()
    assert [item.first_offset for item in row.items] == [item.first_offset for item in items]
    assert all(a.last_offset == b.last_offset for a, b in zip(row.items[:-1], items, strict=False))
    assert count == len(items) or row.forgotten_end >= (items[-1].first_offset or 0)


def test_a_copy_of_a_later_password_is_made_again_with_the_known_mac_key() -> None:
    old = replace(CLOSED, access_key=b"s" * 16 + b"a" * 32, mac_key=b"m" * 32)
    digest = sealed(b"t" * 16, b"d" * 32)
    before = replace(CLOSED, access_key=sealed(*salt_and_digest(old.access_key)))
    copy = later(replace(CLOSED, access_key=digest, wrapped_mac_key=b"w" * 40))

    decision = decide(known(old, old.attempt), [held(before, copy)], ALL)

    assert decision.action is Action.WRITE
    assert decision.row is not None
    assert (decision.row.access_key, decision.row.mac_key) == (digest, b"m" * 32)


# --- forks ----------------------------------------------------------------------------------------


def of_fork(
    one: LedgerPlace, at: int, shared: Sequence[tuple[int, int]], *before: tuple[int, int]
) -> LedgerPlace:
    """A fork's own ledger. It tells the nearest ledgers that the fork shares, and those before it."""
    lineage = Lineage(
        CREATED_AT,
        before[-PREDECESSORS_KEPT:],
        forked_at=at,
        shared=tuple(shared[-SHARED_KEPT:]),
    )
    return replace(one, lineage=lineage)


def test_a_fork_has_what_its_own_ledgers_tell_that_it_shares() -> None:
    shared = OFFSETS[:6]

    decision = reported(None, of_fork(ledger(70, 57), 57, shared, *shared))

    row = decision.row
    assert row is not None
    row.check()
    assert [(i.ledger_id, i.first_offset) for i in row.items] == [*shared, (70, 57)]
    assert [i.last_offset for i in row.items] == [9, 19, 29, 39, 49, 56, None]
    assert (row.forked_at, [i.ledger_id for i in row.own]) == (57, [70])


def test_a_fork_that_shares_more_than_is_told_begins_with_what_is_told() -> None:
    shared = [(number, 10 * number) for number in range(SHARED_KEPT + 3)]
    at = 10 * len(shared)

    row = reported(None, of_fork(ledger(70, at), at, shared, *shared)).row

    assert row is not None
    assert row.first_offset == 30
    assert [(i.ledger_id, i.first_offset) for i in row.shared] == shared[3:]


def test_the_first_own_ledger_of_a_fork_is_known_to_be_missing() -> None:
    shared = OFFSETS[:6]
    own = [(70 + number, 57 + 10 * number) for number in range(5)]
    behind_it = [
        of_fork(ledger(own[at][0], own[at][1]), 57, shared, *shared, *own[:at])
        for at in range(1, 5)
    ]

    decision = reported(None, *behind_it[3:])

    row = decision.row
    assert row is not None
    assert [(i.ledger_id, i.first_offset) for i in row.items] == [*shared, *own]
    assert set(decision.holes) == {i.ledger_id for i in row.items} - {own[4][0]}


def test_a_fork_that_let_go_of_what_it_shared_does_not_get_it_back() -> None:
    row = reported(
        None,
        of_fork(ledger(70, 57, 3), 57, OFFSETS[:6], *OFFSETS[:6]),
        of_fork(ledger(71, 67), 57, (), (70, 57)),
    ).row

    assert row is not None
    assert [i.ledger_id for i in row.items] == [70, 71]


# --- incarnations that a database would give out again (rule 15b) -------------------------------


@pytest.mark.parametrize("answers", [1, 3])
def test_a_bookie_that_answers_as_another_incarnation_lost_its_data(answers: int) -> None:
    row = replace(FIRST, fragments=(Fragment(0, ("b1@1", "b2@1", "b3@2")),))
    others = {"b1": 1, "b2": 1, "b3": answers}

    assert Bookies({**others, "b3": 2}).lost_of(row) == frozenset()
    assert Bookies(others).lost_of(row) == {"b3"}
    assert not Bookies({"b1": 1, "b2": 1}).lost_of(row), "who is silent is counted as silent"


@pytest.mark.parametrize(
    ("incarnation", "born_at", "lost"),
    [
        (2, "2026-02-01", {"b4"}),
        (2, "2025-12-31", set()),
        (2, "", set()),
        (1, "2026-02-01", set()),
    ],
    ids=["emptied since", "emptied before", "the rebuild's own cookie", "a new bookie"],
)
def test_a_bookie_that_is_no_member_and_was_emptied_since_the_ledger_began_may_have_kept_its_end(
    incarnation: int, born_at: str, lost: set[str]
) -> None:
    """Seed 474198 of the machines: the end was on two silent bookies and one that was emptied."""
    members = Fragment(0, ("b1@1", "b2@1", "b3@1"))
    row = replace(FIRST, fragments=(members,), created_at="2026-01-01")
    answering = {"b1": 1, "b2": 1, "b3": 1, "b4": incarnation}
    registered = {"b4": Registered(incarnation, born_at)}

    bookies = Bookies(answering, registered=registered)
    assert bookies.lost_of(row) == lost
    assert not replace(bookies, given_up=frozenset({"b4"})).lost_of(row)


def test_a_row_that_waits_names_the_bookies_that_it_waits_for() -> None:
    row = replace(
        FIRST, fragments=(Fragment(0, ("b1@1", "b2@1", "b3@1")),), created_at="2026-01-01"
    )
    registered = {"b4": Registered(2, "2026-02-01")}
    answering = {"b2": 1, "b3": 1, "b4": 2}
    held = [Held("b2@1", KEY, rows=(row,))]

    bookies = Bookies(answering, frozenset({"b1"}), registered)
    waits = decide(Known(), held, bookies)
    goes_on = decide(Known(), held, replace(bookies, given_up=frozenset({"b4"})))

    assert waits.action is Action.WAIT
    assert "(b1, b4;" in waits.why
    assert goes_on.action is Action.WRITE


def test_who_is_given_up_and_answers_is_no_member_with_its_new_directory() -> None:
    """Rule 15b, clause 3: a recovery would believe its denials, whatever an operator says of what it held."""
    row = replace(
        FIRST, fragments=(Fragment(0, ("b1@1", "b2@1", "b4@2")),), created_at="2026-01-01"
    )
    held = [Held("b1@1", KEY, rows=(row,)), Held("b2@1", KEY, rows=(row,))]
    registered = {"b4": Registered(2, "2026-02-01")}
    bookies = Bookies({"b1": 1, "b2": 1, "b4": 2}, registered=registered)

    decision = decide(Known(), held, replace(bookies, given_up=frozenset({"b4"})))

    assert decision.action is Action.WAIT


@pytest.mark.parametrize(
    ("incarnation", "born_at", "is_written"),
    [
        (1, "", False),
        (2, "", True),
        (2, "2025-12-31", True),
        (2, "2026-01-01", False),
        (2, "2026-02-01", False),
        (3, "2026-02-01", True),
    ],
)
def test_no_row_is_written_whose_member_a_new_directory_is_registered_as(
    incarnation: int, born_at: str, is_written: bool
) -> None:
    members = Fragment(0, ("b1@1", "b2@1", "b3@2"))
    row = replace(FIRST, fragments=(members,), created_at="2026-01-01")
    bookies = Bookies(
        {"b1": 1, "b2": 1, "b3": incarnation}, registered={"b3": Registered(incarnation, born_at)}
    )
    held = [Held("b1@1", KEY, rows=(row,))]

    decision = decide(Known(), held, bookies)
    fenced = decide(Known(), [*held, Held(f"b3@{incarnation}", KEY)], bookies)
    kept = decide(Known(), [*held, Held(f"b3@{incarnation}", KEY, rows=(row,))], bookies)

    assert decision.action is (Action.WRITE if is_written else Action.WAIT)
    assert is_written or "AUTO_FIX_COOKIES=1" in decision.why
    assert fenced.action is decision.action, (
        "a recovery that began earlier has fenced the new directory"
    )
    assert kept.action is (Action.WAIT if incarnation == 1 else Action.WRITE), "it holds a copy"
    end = row.closed(last_entry=-1, length=0)
    closed_held = [Held("b1@1", KEY, rows=(end,)), Held(f"b3@{incarnation}", KEY)]
    ended = decide(Known(), closed_held, bookies)
    assert ended.action is kept.action, "of a CLOSED ledger anything is proof"


def test_a_member_that_answers_is_itself_though_the_database_has_an_older_cookie() -> None:
    """A backup is from before its last incarnation: the rebuild writes its own cookie last."""
    row = replace(FIRST, fragments=(Fragment(0, ("b1@1", "b2@1", "b3@2")),))
    bookies = Bookies({"b1": 1, "b2": 1, "b3": 2}, registered={"b3": Registered(1, "2026-02-01")})

    assert decide(Known(), [Held("b1@1", KEY, rows=(row,))], bookies).action is Action.WRITE


@pytest.mark.parametrize(
    ("is_closed", "is_given_up", "action"),
    [
        (False, False, Action.WAIT),
        (False, True, Action.WRITE),
        (True, False, Action.WRITE),
    ],
)
def test_a_silent_member_that_registered_after_the_ledger_is_to_be_started_not_wiped(
    is_closed: bool, is_given_up: bool, action: Action
) -> None:
    """Ledgers that were repaired onto a new bookie are older than it. Nothing cuts a CLOSED one."""
    members = Fragment(0, ("b1@1", "b2@1", "b3@1"))
    row = replace(FIRST, fragments=(members,), created_at="2026-01-01")
    row = row.closed(last_entry=3, length=4) if is_closed else row
    silent = frozenset[str]() if is_given_up else frozenset({"b3"})
    bookies = Bookies({"b1": 1, "b2": 1}, silent, {"b3": Registered(1, "2026-02-01")})

    decision = decide(Known(), [Held("b1@1", KEY, rows=(row,))], bookies)

    assert decision.action is action
    assert action is Action.WRITE or "start b3, so that" in decision.why


def test_a_cookie_stands_in_for_each_later_incarnation_that_copies_name() -> None:
    named = {"b1": 1, "b2": 2, "b3": 2, "b4": 1}

    assert stand_ins(named, {"b1": 1, "b2": 1, "b3": 3}) == {"b2": 2, "b4": 1}


# --- guards that are taken out one by one: a claim above must fail -------------------------------


Found: Final = rebuild_log._Found


def silent_bookies_are_none() -> Callable[..., frozenset[str]]:
    return lambda _bookies, _row: frozenset()


def nothing_wrong(*_given: object) -> str:
    return ""


def forks() -> None:
    copies = [FIRST, later(MOVED)]
    row = known(later(FIRST, "z"), "a1")
    test_copies_that_contradict_each_other_or_the_row_are_told(row, copies, "do not show")


def two_ends() -> None:
    copies = [CLOSED, closed(FIRST, 3, "z")]
    test_copies_that_contradict_each_other_or_the_row_are_told(
        None, copies, "different last entries"
    )


def overlaps() -> None:
    ledgers = [ledger(1, 0, 4), ledger(2, 4)]
    test_an_end_beyond_the_next_beginning_is_told(
        ledgers, "ledger 1 ends at offset 5, but the next ledger 2 begins at 4"
    )


WITH_ITEMS: Final = rebuild_log._with_items


def knowing_producers(row: LogMetadata, *given: Any, **named: Any) -> LogMetadata:
    return replace(WITH_ITEMS(row, *given, **named), forgotten_end=row.forgotten_end)


GUARDS: Final = (
    swap(Bookies, "lost_of", silent_bookies_are_none()).guard(
        "an open row is written whoever is silent",
        "rule 18d",
        test_an_open_row_waits_where_as_many_bookies_are_silent_as_may_have_confirmed_more,
    ),
    swap(Bookies, "lost_of", lambda bookies, _row: bookies.silent).guard(
        "a bookie that lost its data is asked as any other",
        "rule 18d",
        test_a_bookie_that_lost_its_data_counts_as_silent,
    ),
    swap(
        Bookies,
        "lost_of",
        lambda bookies, row: (
            bookies.silent
            | {
                member_name(m)
                for m in row.all_members
                if member_incarnation(m) != bookies.answering.get(member_name(m), 0)
            }
        ),
    ).guard(
        "only members may have kept an end",
        "rule 18d",
        partial(
            test_a_bookie_that_is_no_member_and_was_emptied_since_the_ledger_began_may_have_kept_its_end,
            2,
            "2026-02-01",
            {"b4"},
        ),
    ),
    swap(
        Bookies,
        "lost_of",
        lambda bookies, row: (
            bookies.silent
            | {
                member_name(m)
                for m in row.all_members
                if member_incarnation(m) < bookies.answering.get(member_name(m), 0)
            }
        ),
    ).guard(
        "a bookie that answers as an older incarnation has its data",
        "rule 18d",
        partial(test_a_bookie_that_answers_as_another_incarnation_lost_its_data, 1),
    ),
    swap(Bookies, "without_data_of", lambda _bookies, _row: "").guard(
        "a row is written though a new directory is registered as its member",
        "rule 18d",
        partial(
            test_no_row_is_written_whose_member_a_new_directory_is_registered_as,
            2,
            "2026-02-01",
            is_written=False,
        ),
    ),
    Patch(
        Bookies,
        "without_data_of",
        lambda original: (
            lambda bookies, row: original(replace(bookies, copying=bookies.holding), row)
        ),
    ).guard(
        "a fence of an older recovery proves a directory",
        "rule 15b",
        partial(
            test_no_row_is_written_whose_member_a_new_directory_is_registered_as,
            2,
            "2026-02-01",
            is_written=False,
        ),
    ),
    swap(sys.modules[__name__], "stand_ins", lambda _named, _present: {}).guard(
        "no cookie stands in for a bookie that did not answer",
        "rule 18d",
        test_a_cookie_stands_in_for_each_later_incarnation_that_copies_name,
    ),
    swap(
        rebuild, "_is_deletion_proven", lambda held: any(bookie.is_deleted for bookie in held)
    ).guard(
        "only an id that was dropped is one of a deleted ledger",
        "rule 18d",
        test_a_copy_of_a_tombstone_is_one_whatever_other_bookies_hold,
    ),
    swap(LedgerMetadata, "deleted", lambda row, attempt="": later(row, attempt)).guard(
        "what members hear of a deletion is the last row",
        "rule 18d",
        test_a_copy_of_a_tombstone_is_one_whatever_other_bookies_hold,
    ),
    swap(rebuild, "_fork", nothing_wrong).guard(
        "a higher version comes of any lower one", "rule 18d", forks
    ),
    swap(rebuild, "_fork_among", nothing_wrong).guard(
        "a rebuild without the database's version writes the highest of two histories",
        "rule 18d",
        test_copies_of_two_histories_are_reported_without_metadata_in_the_database,
    ),
    swap(rebuild, "_history", lambda rows: {row.version: row.attempt for row in rows}).guard(
        "a rebuild takes later copies for successors if one copy has the database's version",
        "rule 18d",
        test_no_version_replaces_a_version_that_it_does_not_descend_from,
    ),
    swap(rebuild, "_is_moved", lambda _known, _newest, _keeping: False).guard(
        "a CLOSED row stays where no copy tells the steps of its repairs",
        "rule 18d",
        test_a_closed_row_is_moved_by_a_later_copy_though_nobody_tells_the_steps_between,
    ),
    swap(rebuild, "_but_members", lambda row: row.last_entry).guard(
        "a CLOSED row is moved though more than its members differs",
        "rule 18d",
        test_a_closed_row_is_moved_by_a_later_copy_though_nobody_tells_the_steps_between,
    ),
    swap(
        rebuild,
        "_is_moved",
        lambda known, newest, _keeping: rebuild._but_members(known) == rebuild._but_members(newest),
    ).guard(
        "a CLOSED row is moved to members that may have dropped their entries",
        "rule 18d",
        test_a_closed_row_is_not_moved_to_members_that_may_have_dropped_their_entries,
    ),
    swap(rebuild, "_placed", lambda known, _rows: known).guard(
        "a place that the database lacks is no change",
        "rule 18d",
        test_a_row_gets_the_place_in_its_log_that_its_copies_tell,
    ),
    swap(rebuild, "_contradiction", nothing_wrong).guard(
        "one of two ends is written", "rule 18d", two_ends
    ),
    swap(Found, "misplaced", nothing_wrong).guard(
        "places of a log may overlap", "rule 18d", overlaps
    ),
    swap(Found, "without_empty", lambda _found, items: items).guard(
        "an empty ledger takes the place of the one behind it",
        "rule 18d",
        test_an_empty_ledger_has_no_place_but_at_the_end,
    ),
    swap(Found, "_is_passed_over", lambda *_given: False).guard(
        "a ledger that was passed over takes the place of the one behind it",
        "rule 18d",
        test_a_ledger_without_records_gives_its_place_to_another,
    ),
    swap(Found, "missing", property(lambda _found: [])).guard(
        "a ledger ends where the next one that is held begins",
        "rule 18d",
        test_a_ledger_that_nobody_holds_keeps_its_place_and_is_told,
    ),
    swap(Found, "gap", nothing_wrong).guard(
        "a hole of which nobody knows the beginning is closed",
        "rule 18d",
        test_a_hole_of_which_only_the_end_is_known_is_told_and_not_closed,
    ),
    swap(Found, "not_let_go", lambda _found, items, _deleted: items).guard(
        "what a log let go of comes back",
        "rule 18d",
        test_what_the_log_let_go_of_before_a_ledger_was_placed_does_not_come_back,
    ),
    swap(LedgerPlace, "log_created_at", "").guard(
        "a log's name is the log",
        "rule 18d",
        test_a_ledger_of_an_earlier_log_of_the_name_is_not_in_a_later_one,
    ),
    swap(
        DeletedLogs, "_reach", lambda deletions, ledger_id, _at: ledger_id <= deletions.through
    ).guard(
        "a rebuild deletes a log because a deleted log had higher ledger ids",
        "rule 18f",
        test_a_later_log_with_lower_ledger_ids_than_the_deleted_log_is_kept,
    ),
    swap(Found, "hides_next", lambda _found, _items: False).guard(
        "a lost log ends where those who answer know no further ledger",
        "rule 18d",
        test_a_lost_log_whose_next_ledger_may_be_on_silent_bookies_waits,
    ),
    swap(Found, "unexplained", nothing_wrong).guard(
        "a ledger that is deleted in the middle of a log is none of it, whoever tells",
        "rule 18d",
        test_a_deleted_ledger_that_had_no_records_was_only_passed_over,
    ),
    swap(rebuild_log, "_with_items", knowing_producers).guard(
        "a rebuilt log knows its producers",
        "rule 18d",
        test_a_lost_log_is_its_ledgers_by_place_and_has_forgotten_every_producer,
    ),
    swap(
        rebuild_log,
        "LogSettings",
        lambda quorum, digest, **_more: LogSettings(quorum=quorum, digest=digest),
    ).guard(
        "a lost log has no metadata",
        "rule 18d",
        test_a_lost_log_has_the_settings_that_its_owner_gave_to_its_ledgers,
    ),
    swap(LedgerPlace, "published_ms", 0).guard(
        "what was published has the times of its writing",
        "rule 18d",
        test_what_a_transaction_published_keeps_the_time_of_its_publication,
    ),
    swap(rebuild_log, "_stream_seq", lambda row, _ledgers: row.stream_seq).guard(
        "a lost log has no stream sequence",
        "rule 18d",
        test_a_stream_sequence_comes_back_as_it_was_before_the_last_ledger,
    ),
    swap(rebuild_log, "NEW_LOG_VERSION", 1).guard(
        "a log begins anew at a version that somebody may name",
        "rule 18d",
        test_a_lost_log_is_its_ledgers_by_place_and_has_forgotten_every_producer,
    ),
    swap(rebuild, "_contains", lambda known, row: row.attempt in known.attempts).guard(
        "a row without a token is never contained",
        "rule 18d",
        test_a_row_of_before_tokens_is_compared_by_its_version,
    ),
)


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_a_guard_that_is_taken_out_is_missed(guard: Guard) -> None:
    guard.claim()

    with applied(guard), pytest.raises(AssertionError):
        guard.claim()
