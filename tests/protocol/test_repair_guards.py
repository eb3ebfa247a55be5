"""Guards of the repair that no other test would miss; `make mutate` found them."""

from dataclasses import replace

import pytest

from quorumlog.protocol.messages import (
    Begin,
    CasStatus,
    Failed,
    MetadataAnswered,
    MissedRange,
    ReadAnswered,
    ReadMetadata,
    Repaired,
    SendAdd,
    SendRead,
    StartTimer,
    Status,
    Timer,
    TimerFired,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import State
from quorumlog.protocol.repair import _UNREADABLE_MAX, FragmentRange, Stage, fragment_ranges
from tests.protocol.hands import B1, B2, B3, B4, B5, answer, ledger, run_of
from tests.protocol.test_repair import AB, CLOSED, B, Bench, copying, verifying

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
def test_while_the_row_is_not_known_one_timer_runs_and_no_other_one_counts(
    status: CasStatus,
) -> None:
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


def test_what_was_given_up_is_left_out_at_the_end_and_more_than_once() -> None:
    """Rule 31."""
    bench = Bench(CLOSED.given_up(1, 1, ()))
    bench.cas()
    read = bench.one(SendRead)
    assert (read.first, read.last) == (0, 0)

    row = ledger(state=State.CLOSED, last_entry=3, length=4).given_up(0, 0, ()).given_up(2, 2, ())
    bench = Bench(row)
    bench.cas()
    for first, payload in ((1, b"b"), (3, b"d")):
        read = bench.one(SendRead)
        assert (read.first, read.last) == (first, first)
        bench.gets(read, run_of(payload, first=first))
        bench.do(answer(bench.one(SendAdd)))
    for first, payload in ((1, b"b"), (3, b"d")):
        check = bench.one(SendRead)
        assert (check.member, check.first, check.last) == (B4, first, first)
        bench.gets(check, run_of(payload, first=first))
    bench.one(UpdateMetadata)


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
