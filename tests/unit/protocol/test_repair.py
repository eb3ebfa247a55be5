"""Repair of one member of one closed fragment: rules 2, 18, 20 to 20b, I25."""

from dataclasses import replace
from typing import Any

import pytest

from quorumlog.protocol.ids import member_name
from quorumlog.protocol.messages import (
    Begin,
    CasStatus,
    Failed,
    MetadataAnswered,
    MissedRange,
    ReadAnswered,
    ReadMetadata,
    Repaired,
    RowAnswered,
    SendAdd,
    SendRead,
    SendRow,
    StartTimer,
    Status,
    Timer,
    TimerFired,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import Fragment, LedgerMetadata, Repair, State
from quorumlog.protocol.record import Run
from quorumlog.protocol.repair import (
    _UNREADABLE_MAX,
    FragmentRange,
    FragmentRepair,
    Stage,
    fragment_ranges,
)
from tests.unit.protocol.hands import (
    B1,
    B2,
    B3,
    B4,
    B5,
    Hand,
    answer,
    applied,
    ledger,
    reply,
    run_of,
)

CLOSED = ledger(state=State.CLOSED, last_entry=1, length=2)
AB = run_of(b"a", b"b")
B = run_of(b"b", first=1, before=1)


class Bench(Hand):
    """A repair; B4 takes the place of B1 unless told otherwise."""

    def __init__(
        self,
        row: LedgerMetadata = CLOSED,
        *,
        fragment: int = 0,
        leaving: str = B1,
        target: str = B4,
        **options: Any,
    ) -> None:
        self.repair = FragmentRepair(
            row, fragment=fragment, leaving=leaving, target=target, **options
        )
        super().__init__(self.repair)
        self.row = row
        self.do(Begin())

    def cas(self, status: CasStatus = CasStatus.OK, row: LedgerMetadata | None = None) -> None:
        update = self.one(UpdateMetadata)
        self.row = row or applied(update)
        self.do(MetadataAnswered(update.attempt, status, self.row))

    def keeps(self, status: Status = Status.OK) -> None:
        """The target answers that it has a copy of the row."""
        sent = self.one(SendRow)
        self.do(RowAnswered(sent.member, sent.row.version, status))

    def gets(
        self, read: SendRead, run: Run | None, *absent: int, status: Status = Status.OK
    ) -> None:
        self.do(reply(read, run, *absent, status=status))


def copying() -> Bench:
    bench = Bench()
    bench.cas()
    return bench


def test_a_target_is_a_pending_member_in_metadata_before_its_first_byte() -> None:
    bench = Bench()
    bench.none(SendRead, SendAdd)
    marked = bench.one(UpdateMetadata).metadata
    assert marked.repairs == (Repair(0, B1, B4),)
    assert B4 in marked.all_members
    assert marked.fragments == CLOSED.fragments


def test_entries_are_copied_unchanged_then_read_back_then_metadata_names_the_target() -> None:
    """Rules 2, 20 and 20a."""
    bench = copying()
    bench.gets(bench.one(SendRead), AB)
    add = bench.one(SendAdd)
    assert (add.member, add.position, add.run.body, add.recovery) == (B4, 0, AB.body, True)
    bench.none(UpdateMetadata, SendRead)
    bench.do(answer(add))
    check = bench.one(SendRead)
    assert (check.member, check.first, check.last, check.from_disk) == (B4, 0, 1, True)
    bench.none(UpdateMetadata)
    bench.gets(check, AB)
    update = bench.one(UpdateMetadata)
    assert update.metadata.fragments == (Fragment(0, (B4, B2, B3)),)
    assert update.missed == (MissedRange(B4, 0, 1),)
    bench.none(Repaired)
    bench.cas()
    bench.none(Repaired)


def releasing() -> Bench:
    """The target has its place, and is sent the row."""
    bench = verifying()
    bench.gets(bench.one(SendRead), AB)
    bench.cas()
    return bench


def test_who_leaves_is_let_go_once_the_target_keeps_the_row_with_its_place() -> None:
    """Rule 20b."""
    bench = releasing()
    assert bench.one(SendRow) == SendRow(B4, bench.row)
    assert B1 in bench.row.all_members
    bench.none(UpdateMetadata)

    bench.keeps()
    update = bench.one(UpdateMetadata)
    assert (update.metadata.repairs, update.missed) == ((), ())
    assert update.metadata.fragments == bench.row.fragments
    bench.none(Repaired)
    bench.cas()
    assert bench.one(Repaired).metadata == bench.row
    assert B1 not in bench.row.all_members


def test_a_target_that_does_not_keep_the_row_leaves_the_last_step_to_the_next_repair() -> None:
    """Rule 20b: it needs nothing of `leaving`, and reads and copies nothing again."""
    bench = releasing()
    bench.keeps(Status.UNKNOWN)
    failed = bench.one(Failed)
    assert (failed.code, failed.bookie) == ("entry-unavailable", B4)
    bench.none(UpdateMetadata)

    following = Bench(bench.row)
    assert following.out == [SendRow(B4, bench.row)]
    following.keeps()
    following.cas()
    following.one(Repaired)


def test_a_row_that_changed_after_its_copy_was_sent_is_sent_anew() -> None:
    """Rule 20b: the target may have lost its place meanwhile, and got it by a later row."""
    bench = releasing()
    bench.keeps()
    changed = replace(bench.row, version=20)
    bench.cas(CasStatus.CONFLICT, changed)
    assert bench.out == [SendRow(B4, changed)]
    bench.do(RowAnswered(B4, 4, Status.OK))
    bench.do(RowAnswered(B2, 20, Status.OK))
    assert bench.out == []
    bench.do(RowAnswered(B4, 20, Status.OK))
    assert bench.one(UpdateMetadata).metadata == replace(changed, repairs=())
    bench.do(RowAnswered(B4, 20, Status.OK))
    assert bench.out == []


def test_a_repair_whose_target_lost_its_place_leaves_the_end_to_the_next_one() -> None:
    bench = releasing()
    bench.keeps()
    bench.cas(CasStatus.CONFLICT, bench.row.with_member_replaced(0, B4, B5))
    assert bench.one(Failed).code == "version-conflict"


def test_a_repair_that_another_one_ended_is_done() -> None:
    for back in ((B4, B2, B3), (B4, B1, B3)):
        bench = releasing()
        bench.keeps()
        ended = replace(bench.row, fragments=(Fragment(0, back),), repairs=(), version=9)
        bench.cas(CasStatus.CONFLICT, ended)
        assert bench.one(Repaired).metadata == ended


def test_who_came_back_to_another_place_is_let_go_of_the_first_one() -> None:
    row = CLOSED.with_member_replaced(0, B1, B4).with_member_replaced(0, B2, B1)
    bench = Bench(row)
    bench.keeps()
    assert bench.one(UpdateMetadata).metadata.repairs == (Repair(0, B2, B1),)
    bench.cas()
    bench.one(Repaired)


def verifying() -> Bench:
    bench = copying()
    bench.gets(bench.one(SendRead), AB)
    bench.do(answer(bench.one(SendAdd)))
    return bench


def test_what_is_not_right_on_the_targets_disk_is_copied_again_and_read_back_again() -> None:
    """Rule 20a: absent there, or damaged (unknown)."""
    for absent in ((1,), ()):
        bench = verifying()
        bench.gets(bench.one(SendRead), run_of(b"a"), *absent)
        if not absent:
            bench.gets(bench.one(SendRead), None)  # asked on, for the answer may have been cut
        bench.none(UpdateMetadata)
        again = bench.one(SendRead)
        assert (again.member != B4, again.first, again.last) == (True, 1, 1)
        bench.gets(again, B)
        add = bench.one(SendAdd)
        assert (add.member, list(add.run.ids), add.recovery) == (B4, [1], True)
        bench.do(answer(add))
        check = bench.one(SendRead)
        assert (check.member, check.first, check.last, check.from_disk) == (B4, 1, 1, True)
        bench.gets(check, B)
        assert bench.one(UpdateMetadata).missed == (MissedRange(B4, 0, 1),)


def test_a_target_that_lacks_twice_what_it_was_given_does_not_get_the_place() -> None:
    bench = verifying()
    bench.gets(bench.one(SendRead), run_of(b"a"), 1)
    bench.gets(bench.one(SendRead), B)
    bench.do(answer(bench.one(SendAdd)))
    bench.gets(bench.one(SendRead), None, 1)
    failed = bench.one(Failed)
    assert (failed.code, failed.bookie, failed.entry_id) == ("entry-unavailable", B4, 1)
    bench.none(UpdateMetadata)


def test_a_target_that_does_not_say_what_it_has_does_not_get_the_place() -> None:
    """Silence is no damage: nothing is written again for it."""
    for status in (Status.UNKNOWN, Status.NOT_MINE):
        bench = verifying()
        bench.gets(bench.one(SendRead), None, status=status)
        assert bench.one(Failed).bookie == B4
        bench.none(UpdateMetadata, SendAdd)


def test_a_row_that_changed_since_all_was_read_back_has_it_read_back_again() -> None:
    """Rules 18 and 20a: meanwhile it may not have named the target, which then drops what it has."""
    bench = verifying()
    bench.gets(bench.one(SendRead), AB)
    marked = bench.row
    bench.cas(CasStatus.CONFLICT, replace(marked, version=9))
    check = bench.one(SendRead)
    assert (check.member, check.first, check.last) == (B4, 0, 1)
    bench.gets(check, AB)
    bench.cas(CasStatus.CONFLICT, replace(CLOSED, version=11))
    assert bench.one(UpdateMetadata).metadata.repairs == (Repair(0, B1, B4),)
    bench.cas()
    bench.gets(bench.one(SendRead), None, 0, 1)
    bench.gets(bench.one(SendRead), AB)
    bench.do(answer(bench.one(SendAdd)))
    bench.gets(bench.one(SendRead), AB)
    assert bench.one(UpdateMetadata).metadata.fragments == (Fragment(0, (B4, B2, B3)),)


def test_only_the_write_set_is_copied() -> None:
    """Reference 2.8.3."""
    row = ledger(4, 2, 2, state=State.CLOSED, last_entry=3, length=4)
    bench = Bench(row, target=B5)
    bench.cas()
    whole = run_of(b"a", b"b", b"c", b"d")
    sent = []
    reads = bench.all(SendRead)
    while reads:
        read = reads.pop(0)
        mine = row.quorum.residues(read.position)
        bench.gets(read, whole.where(lambda n, mine=mine: n % 4 in mine))  # type: ignore[misc]
        sent += [entry_id for add in bench.all(SendAdd) for entry_id in add.run.ids]
        reads += bench.all(SendRead)
    assert sorted(sent) == [0, 3]


def test_an_open_fragment_is_never_repaired() -> None:
    """I25: it is for its writer, or for a recovery."""
    bench = Bench(ledger())
    assert bench.one(Failed).code == "ledger-fenced"
    row = ledger(fragments=((0, (B1, B2, B3)), (2, (B1, B2, B3))))
    assert Bench(row).all(Failed) == []
    assert Bench(row, fragment=2).one(Failed).code == "ledger-fenced"


def test_a_fragment_that_somebody_else_repaired_is_done() -> None:
    bench = Bench()
    moved = replace(CLOSED, fragments=(Fragment(0, (B5, B2, B3)),), version=5)
    bench.cas(CasStatus.CONFLICT, moved)
    assert bench.one(Repaired).metadata == moved


@pytest.mark.parametrize(
    "bookies",
    [
        pytest.param((B5, B1, B3), id="I25: B1 left and came back at another place (seed 133237)"),
        pytest.param((B1, B4, B3), id="I22: B4 got another place"),
        pytest.param((B1, f"{member_name(B4)}@2", B3), id="I22: a later B4 got another place"),
    ],
)
def test_a_place_is_not_given_what_was_copied_before_a_move(bookies: tuple[str, ...]) -> None:
    bench = copying()
    bench.gets(bench.one(SendRead), AB)
    bench.do(answer(bench.one(SendAdd)))
    bench.gets(bench.one(SendRead), AB)
    moved = replace(CLOSED, fragments=(Fragment(0, bookies),), version=9)
    bench.cas(CasStatus.CONFLICT, moved)
    bench.none(UpdateMetadata, Repaired)
    assert bench.one(Failed).code == "version-conflict"


def test_a_fragment_that_ends_elsewhere_gets_no_member_that_lacks_the_rest() -> None:
    """I25: the database went back behind the change that ended the fragment, and another end was found (seed 314751)."""
    row = ledger(fragments=((0, (B1, B2, B3)), (2, (B5, B2, B3))))
    longer = replace(CLOSED, last_entry=9, length=10, version=9)
    bench = Bench(row)
    bench.cas(CasStatus.CONFLICT, longer)
    bench.none(UpdateMetadata, SendRead, Repaired)
    assert bench.one(Failed).code == "version-conflict"


def test_a_conflict_with_another_change_is_tried_again() -> None:
    bench = Bench()
    bench.cas(CasStatus.CONFLICT, replace(CLOSED, version=5))
    assert bench.one(UpdateMetadata).metadata.version == 5


def test_a_store_that_is_away_is_asked_the_same_again() -> None:
    bench = Bench()
    update = bench.one(UpdateMetadata)
    bench.do(MetadataAnswered(update.attempt, CasStatus.UNKNOWN))
    assert bench.one(StartTimer).timer is Timer.RETRY
    bench.do(TimerFired(Timer.RETRY))
    assert bench.one(UpdateMetadata) == update


def test_an_entry_that_nobody_has_does_not_keep_the_others_from_being_copied() -> None:
    bench = copying()
    b = AB.where(lambda n: n == 1)
    for _ in range(3):
        bench.gets(bench.one(SendRead), b, 0)
    bench.do(MetadataAnswered(bench.one(ReadMetadata).attempt, CasStatus.OK, bench.row))
    bench.gets(bench.one(SendRead), b)
    bench.do(answer(bench.one(SendAdd)))

    failed = bench.one(Failed)
    assert (failed.code, failed.entry_id) == ("entry-unavailable", 0)
    bench.none(UpdateMetadata)


def test_a_target_that_fails_or_is_silent_ends_the_repair() -> None:
    bench = copying()
    bench.gets(bench.one(SendRead), AB)
    add = bench.one(SendAdd)
    other = bench.repair.copy()

    bench.do(answer(add, Status.UNKNOWN))
    assert bench.one(Failed).bookie == B4
    bench.machine = other
    bench.do(TimerFired(Timer.QUORUM, 0))
    assert bench.one(Failed).detail == f"{B4} did not answer in time"


def test_other_bytes_at_the_target_are_an_alarm() -> None:
    bench = copying()
    bench.gets(bench.one(SendRead), AB)
    bench.do(answer(bench.one(SendAdd), Status.CONFLICT))
    assert bench.one(Failed).code == "entry-conflict"


def test_a_member_that_missed_entries_is_filled_up_without_a_change() -> None:
    bench = Bench(leaving=B3, target=B3, first=1, last=1)
    bench.none(UpdateMetadata)
    read = bench.one(SendRead)
    assert (read.member != B3, read.first, read.last) == (True, 1, 1)
    bench.gets(read, run_of(b"b", first=1, before=1))
    bench.do(answer(bench.one(SendAdd)))
    bench.gets(bench.one(SendRead), run_of(b"b", first=1, before=1))
    assert bench.one(Repaired).metadata == CLOSED


def test_an_empty_fragment_only_changes_its_member() -> None:
    """BK#4551: an empty last fragment is legal."""
    row = ledger(
        fragments=((0, (B1, B2, B3)), (2, (B1, B2, B3))), state=State.CLOSED, last_entry=1, length=2
    )
    bench = Bench(row, fragment=2)
    bench.cas()
    assert bench.one(UpdateMetadata).metadata.fragments[1] == Fragment(2, (B4, B2, B3))
    bench.cas()
    bench.keeps()
    bench.cas()
    bench.one(Repaired)
    assert bench.repair.stage is Stage.DONE


def test_long_fragments_are_copied_and_asked_in_windows() -> None:
    bench = Bench(read_entries=1)
    bench.cas()
    for entry_id in (0, 1):
        read = bench.one(SendRead)
        assert (read.first, read.last) == (entry_id, entry_id)
        bench.gets(read, AB.where(lambda n, wanted=entry_id: n == wanted))  # type: ignore[misc]
        bench.do(answer(bench.one(SendAdd)))
    for entry_id in (0, 1):
        bench.gets(bench.one(SendRead), AB.where(lambda n, wanted=entry_id: n == wanted))  # type: ignore[misc]
    bench.cas()
    bench.one(SendRow)


def test_what_a_target_has_by_its_own_word_is_not_sent_again_and_verified_all_the_same() -> None:
    bench = Bench(held=((0, 0),))
    bench.cas()
    read = bench.one(SendRead)
    assert (read.first, read.last) == (1, 1)
    bench.gets(read, AB.where(lambda n: n == 1))
    add = bench.one(SendAdd)
    assert list(add.run.ids) == [1]
    bench.do(answer(add))
    check = bench.one(SendRead)
    assert (check.member, check.first, check.last, check.from_disk) == (B4, 0, 1, True)


def test_a_missed_range_is_split_by_the_closed_fragments_that_name_the_member() -> None:
    row = ledger(fragments=((0, (B1, B2, B3)), (5, (B1, B4, B3)), (9, (B1, B2, B3))))
    assert list(fragment_ranges(row, MissedRange(B1, 3, 20))) == [
        FragmentRange(0, 3, 4),
        FragmentRange(5, 5, 8),
    ]
    assert list(fragment_ranges(row, MissedRange(B2, 3, 20))) == [FragmentRange(0, 3, 4)]


@pytest.mark.parametrize(
    ("lost", "left"),
    [
        ([(1, 2)], {0: b"a", 3: b"d"}),
        ([(1, 3)], {0: b"a"}),
        ([(0, 0), (2, 2)], {1: b"b", 3: b"d"}),
    ],
    ids=["within", "at-the-end", "more-than-once"],
)
def test_what_was_given_up_is_neither_read_nor_sent_nor_asked_for(
    lost: list[tuple[int, int]], left: dict[int, bytes]
) -> None:
    """Rule 31: else a repair, and with it the limbo of a ledger, would never end."""
    row = ledger(state=State.CLOSED, last_entry=3, length=4)
    for first, last in lost:
        row = row.given_up(first, last, ())
    bench = Bench(row)
    bench.cas()
    for first, payload in left.items():
        read = bench.one(SendRead)
        assert (read.first, read.last) == (first, first)
        bench.gets(read, run_of(payload, first=first))
        bench.do(answer(bench.one(SendAdd)))
    for first, payload in left.items():
        check = bench.one(SendRead)
        assert (check.member, check.first, check.last) == (B4, first, first)
        bench.gets(check, run_of(payload, first=first))
    bench.cas()
    assert bench.one(SendRow).row.fragments == (Fragment(0, (B4, B2, B3)),)


def test_a_fragment_of_which_all_was_given_up_is_moved_without_a_read() -> None:
    bench = Bench(CLOSED.given_up(0, 1, ()))
    bench.cas()
    bench.none(SendRead)
    bench.cas()
    bench.none(SendRead)
    assert bench.one(SendRow).row.fragments == (Fragment(0, (B4, B2, B3)),)


def test_a_repair_that_fails_names_all_that_nobody_gave() -> None:
    bench = copying()
    for _ in range(2):
        while bench.all(SendRead):
            read = bench.all(SendRead)[0]
            bench.gets(read, None, *range(read.first, read.last + 1))
        asked = bench.one(ReadMetadata)
        bench.do(MetadataAnswered(asked.attempt, CasStatus.OK, bench.row))
    assert bench.one(Failed).code == "entry-unavailable"
    assert bench.repair.unreadable == (0, 1)


# --- guards that no other test would miss: `make mutate` found them ------------------------------


A = run_of(b"a")
STRIPED = ledger(4, 2, 2, state=State.CLOSED, last_entry=3, length=4)
"""Position 0 stores entries 0 and 3."""


def sending() -> tuple[Bench, SendAdd]:
    """All was read, and is on its way to the target."""
    bench = copying()
    bench.gets(bench.one(SendRead), AB)
    return bench, bench.one(SendAdd)


def sending_in_parts() -> tuple[Bench, SendAdd]:
    """The first of two entries is on its way to the target; the second one is being read."""
    bench = copying()
    bench.gets(bench.one(SendRead), A)
    return bench, bench.one(SendAdd)


def nobody_has(bench: Bench) -> None:
    """Whoever is asked has nothing, until the row is read."""
    while reads := bench.all(SendRead):
        bench.gets(reads[0], None, status=Status.NO_ENTRY)
    asked = bench.one(ReadMetadata)
    bench.do(MetadataAnswered(asked.attempt, CasStatus.OK, bench.row))


def carried_through(bench: Bench, nowhere: int | None = None) -> list[int]:
    """Everybody gives what they store of four entries, until the place changes hands; the entries that
    were sent to the target and then read back from the target's disk.
    """
    whole = run_of(b"a", b"b", b"c", b"d")
    sent: list[int] = []
    verified: list[int] = []
    todo = list(bench.out)
    while not bench.all(UpdateMetadata):
        effect = todo.pop(0)
        match effect:
            case SendAdd():
                sent += effect.run.ids
                bench.do(answer(effect))
            case SendRead():
                stored = [
                    entry_id
                    for entry_id in range(effect.first, effect.last + 1)
                    if STRIPED.quorum.is_member(effect.position, entry_id) and entry_id != nowhere
                ]
                assert effect.from_disk or not verified, "what is right is not copied again"
                verified += stored if effect.from_disk else []
                run = whole.where(stored.__contains__)
                absent = () if nowhere is None else (nowhere,)
                bench.gets(effect, run, *absent)
            case ReadMetadata():
                bench.do(MetadataAnswered(effect.attempt, CasStatus.OK, bench.row))
            case _:
                continue
        todo += bench.out
    assert sent == verified
    return sent


def changes_nothing(bench: Bench, *events: object) -> None:
    """None of the events is for this repair now."""
    before = bench.repair.key()
    for event in events:
        assert bench.do(event) == [], event  # type: ignore[arg-type]
    assert bench.repair.key() == before


# --- what is begun ---------------------------------------------------------------------------


def test_a_missed_range_has_no_part_in_a_fragment_that_it_does_not_touch() -> None:
    row = ledger(fragments=((0, (B1, B2, B3)), (5, (B1, B4, B3)), (9, (B1, B2, B3))))

    assert list(fragment_ranges(row, MissedRange(B1, 0, 4))) == [FragmentRange(0, 0, 4)]
    assert list(fragment_ranges(row, MissedRange(B1, 8, 8))) == [FragmentRange(5, 8, 8)]


def test_a_repair_begins_once() -> None:
    bench = Bench()

    changes_nothing(bench, Begin())


def test_a_fragment_that_is_open_or_not_there_is_left_alone() -> None:
    for bench in (Bench(ledger()), Bench(fragment=1)):
        assert bench.one(Failed).code == "ledger-fenced"
        bench.none(UpdateMetadata, Repaired)
        assert bench.repair.is_done


def test_only_the_part_that_a_member_missed_is_looked_at() -> None:
    bench = Bench(leaving=B3, target=B3, first=0, last=0)

    read = bench.one(SendRead)
    assert (read.first, read.last) == (0, 0)
    bench.gets(read, A)
    bench.do(answer(bench.one(SendAdd)))
    check = bench.one(SendRead)
    assert (check.member, check.first, check.last) == (B3, 0, 0)
    bench.gets(check, A)
    bench.one(Repaired)


def test_a_repair_has_copies_that_go_their_own_way() -> None:
    for made in (copying, verifying):
        bench = made()
        before = bench.repair.key()
        other = bench.repair.copy()

        bench.gets(bench.one(SendRead), A)

        assert other.key() == before != bench.repair.key()


# --- the row ---------------------------------------------------------------------------------


def test_a_ledger_that_is_gone_ends_its_repair() -> None:
    bench = Bench()
    bench.do(MetadataAnswered(bench.one(UpdateMetadata).attempt, CasStatus.MISSING))
    assert bench.one(Failed).code == "no-such-ledger"

    bench = copying()
    for _ in range(3):
        bench.gets(bench.one(SendRead), None, status=Status.NO_ENTRY)
    bench.do(MetadataAnswered(bench.one(ReadMetadata).attempt, CasStatus.MISSING))
    assert bench.one(Failed).code == "no-such-ledger"
    bench.none(SendRead)
    assert bench.repair.is_done


@pytest.mark.parametrize("status", [CasStatus.UNKNOWN, CasStatus.CONFLICT])
def test_while_the_row_is_unknown_only_one_timer_counts(status: CasStatus) -> None:
    bench = Bench()
    update = bench.one(UpdateMetadata)
    assert bench.do(TimerFired(Timer.RETRY)) == []

    bench.do(MetadataAnswered(update.attempt, status))

    assert bench.out == [StartTimer(Timer.RETRY)]
    changes_nothing(
        bench,
        MetadataAnswered(update.attempt, status),
        TimerFired(Timer.QUORUM),
        TimerFired(Timer.HEDGE),
    )
    assert bench.do(TimerFired(Timer.RETRY)) == [update]


def test_an_answer_of_metadata_that_nobody_waits_for_changes_nothing() -> None:
    bench = Bench()
    first = bench.one(UpdateMetadata)
    bench.cas()
    read = bench.one(SendRead)
    stale = MetadataAnswered(first.attempt, CasStatus.CONFLICT, replace(CLOSED, version=9))
    changes_nothing(bench, stale)
    bench.gets(read, AB)
    bench.do(answer(bench.one(SendAdd)))
    check = bench.one(SendRead)
    changes_nothing(bench, stale)
    bench.gets(check, AB)
    assert bench.repair.stage is Stage.REPLACING
    changes_nothing(bench, stale)


def test_a_place_without_entries_is_not_looked_at_again_and_one_with_one_entry_is() -> None:
    """Rule 20a."""
    row = ledger(
        fragments=((0, (B1, B2, B3)), (1, (B1, B2, B3))), state=State.CLOSED, last_entry=0, length=1
    )
    empty = Bench(row, fragment=1)
    empty.cas()
    assert empty.one(UpdateMetadata).missed == ()

    single = Bench(row)
    single.cas()
    single.gets(single.one(SendRead), A)
    single.do(answer(single.one(SendAdd)))
    single.gets(single.one(SendRead), A)
    assert single.one(UpdateMetadata).missed == (MissedRange(B4, 0, 0),)


# --- copying ---------------------------------------------------------------------------------


def test_a_source_that_is_late_is_joined_by_another_one() -> None:
    bench = copying()
    asked = bench.one(SendRead)

    bench.do(TimerFired(Timer.HEDGE, bench.one(StartTimer).tag))

    assert bench.one(SendRead).member != asked.member


def test_while_the_target_is_waited_for_no_source_is_heard_or_asked() -> None:
    bench, add = sending()

    changes_nothing(
        bench,
        ReadAnswered(1, B2, 0, 1, Status.OK, AB),
        TimerFired(Timer.HEDGE, 1),
        TimerFired(Timer.RETRY),
        TimerFired(Timer.QUORUM, add.run.last),
    )


def test_reading_ends_before_what_was_sent_is_all_there_is() -> None:
    """The target is read back once all was sent and taken, whichever comes last."""
    bench, first = sending_in_parts()
    read = bench.one(SendRead)
    assert bench.do(answer(first)) == []
    bench.gets(read, B)
    bench.none(UpdateMetadata)
    bench.do(answer(bench.one(SendAdd)))
    assert bench.one(SendRead).from_disk

    bench, first = sending_in_parts()
    bench.gets(bench.one(SendRead), B)
    second = bench.one(SendAdd)
    assert bench.do(answer(second)) == []
    assert bench.do(answer(second)) == []
    bench.do(answer(first))
    assert bench.one(SendRead).from_disk


@pytest.mark.parametrize("status", [Status.UNKNOWN, Status.NOT_MINE, Status.CONFLICT])
def test_only_other_bytes_are_an_alarm(status: Status) -> None:
    bench, add = sending()

    bench.do(answer(add, status))

    code = "entry-conflict" if status is Status.CONFLICT else "entry-unavailable"
    assert bench.one(Failed).code == code


def test_after_its_end_a_repair_hears_nobody() -> None:
    bench, add = sending()
    bench.do(TimerFired(Timer.QUORUM, add.run.first))
    bench.one(Failed)
    changes_nothing(bench, answer(add), answer(add, Status.UNKNOWN), TimerFired(Timer.QUORUM))

    bench, add = sending_in_parts()
    timers = [timer for timer in bench.all(StartTimer) if timer.timer is Timer.HEDGE]
    bench.do(TimerFired(Timer.QUORUM, add.run.first))
    bench.one(Failed)
    changes_nothing(bench, *(TimerFired(Timer.HEDGE, timer.tag) for timer in timers))

    bench = verifying()
    check = bench.one(SendRead)
    changes_nothing(bench, answer(add), TimerFired(Timer.QUORUM, add.run.first))
    bench.gets(check, None, status=Status.UNKNOWN)
    bench.one(Failed)
    bench.none(SendRead)
    changes_nothing(bench, ReadAnswered(0, B4, 0, 1, Status.OK, AB))


# --- what nobody has -------------------------------------------------------------------------


def test_what_another_member_should_have_and_nobody_has_is_not_this_repairs() -> None:
    bench = Bench(STRIPED, target=B5)
    bench.cas()

    assert carried_through(bench, nowhere=1) == [0, 3]
    assert bench.repair.unreadable == ()


def test_the_first_entry_that_nobody_has_is_what_a_repair_fails_for() -> None:
    bench = copying()
    nobody_has(bench)
    nobody_has(bench)

    assert bench.one(Failed).entry_id == 0
    assert bench.repair.unreadable == (0, 1)


@pytest.mark.parametrize("unreadable", [_UNREADABLE_MAX, _UNREADABLE_MAX + 1])
def test_a_repair_gives_up_where_too_many_entries_are_nowhere(unreadable: int) -> None:
    row = ledger(state=State.CLOSED, last_entry=unreadable, length=unreadable + 1)
    bench = Bench(row, read_entries=1)
    bench.cas()
    for _ in range(unreadable):
        nobody_has(bench)

    assert len(bench.repair.unreadable) == unreadable
    if unreadable > _UNREADABLE_MAX:
        assert bench.one(Failed).entry_id == unreadable - 1
        bench.none(SendRead)
    else:
        assert bench.one(SendRead).first == unreadable


# --- reading back ----------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 100])
def test_only_the_targets_own_entries_are_sent_and_asked_of_it(window: int) -> None:
    bench = Bench(STRIPED, target=B5, read_entries=window)
    bench.cas()

    assert carried_through(bench) == [0, 3]


def test_while_the_target_is_read_back_only_its_answer_to_that_question_is_heard() -> None:
    bench = verifying()
    check = bench.one(SendRead)
    changes_nothing(
        bench,
        ReadAnswered(1, B2, 0, 1, Status.OK, AB),
        ReadAnswered(0, B4, 1, 1, Status.OK, B),
        ReadAnswered(0, B4, 0, 0, Status.OK, A),
        ReadAnswered(0, B1, 0, 1, Status.OK, AB),
    )

    bench.gets(check, A)
    assert bench.one(SendRead).first == 1
    changes_nothing(bench, ReadAnswered(0, B4, 0, 1, Status.OK, AB))


def test_an_answer_after_all_was_read_back_changes_nothing() -> None:
    bench = verifying()
    bench.gets(bench.one(SendRead), AB)
    assert bench.repair.stage is Stage.REPLACING

    changes_nothing(bench, ReadAnswered(0, B4, 0, 1, Status.NO_ENTRY))
