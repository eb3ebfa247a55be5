"""The rules of one bookie for one ledger, each as a claim."""

import itertools
from dataclasses import replace

import pytest

from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.messages import Status
from quorumlog.protocol.metadata import DigestKind
from quorumlog.protocol.ranges import complement, ranges_of
from quorumlog.protocol.record import Codec, Run, make, merge
from quorumlog.protocol.replica import (
    AddAsked,
    EntriesDropped,
    FenceAsked,
    FenceSet,
    LacAsked,
    LacKept,
    LacReported,
    LedgerDeleted,
    LimboSet,
    ReadAsked,
    Replica,
    ReplicaRecord,
    RunStored,
)
from tests.support.replicas import HeldEntries, ask, memory_replica, replay

ME = "b1@2"
OLDER = "b1@1"
KEY = b"k" * 32
OTHER_KEY = b"o" * 32


def run_of(first: int, count: int = 1, *, lac: int = NO_ENTRY, text: str = "x") -> Run:
    return make(
        ledger_id=7,
        first_entry=first,
        last_add_confirmed=lac,
        length_before=first * 2,
        payloads=[f"{text}{e}".encode() for e in range(first, first + count)],
        codec=Codec(DigestKind.CRC32C),
    )


def add(run: Run, member: str = ME, key: bytes = KEY) -> AddAsked:
    return AddAsked(member, run, key)


def test_an_add_is_ok_only_after_its_record_is_synced() -> None:
    replica = memory_replica(ME)

    verdict = ask(replica, add(run_of(0)))

    assert verdict.status is Status.OK
    assert verdict.records == (RunStored(run_of(0), KEY),)
    assert verdict.after == 1
    assert replica.synced_count == 0


def test_a_repeated_add_writes_nothing_and_waits_for_the_record_that_it_matches() -> None:
    replica = memory_replica(ME)
    ask(replica, add(run_of(0, 3)))

    verdict = ask(replica, add(run_of(0, 3)))

    assert (verdict.status, verdict.after, verdict.records) == (Status.OK, 1, ())


def test_of_an_overlapping_add_only_what_lacks_is_stored() -> None:
    replica = memory_replica(ME)
    ask(replica, add(run_of(2, 2)))

    verdict = ask(replica, add(run_of(0, 5)))

    (record,) = verdict.records
    assert isinstance(record, RunStored)
    assert list(record.run.ids) == [0, 1, 4]


def test_other_bytes_under_a_stored_id_are_a_conflict_and_change_nothing() -> None:
    replica = memory_replica(ME)
    ask(replica, add(run_of(0, 2)))
    before = replica.key()

    verdict = ask(replica, add(run_of(1, 2, text="y")))

    assert (verdict.status, verdict.records) == (Status.CONFLICT, ())
    assert replica.key() == before


def test_a_run_accepted_while_the_driver_read_is_compared_too() -> None:
    replica = memory_replica(ME)
    ask(replica, add(run_of(0)))
    wanted = add(run_of(0, 2, text="x"))
    first = replica.step(wanted)
    assert first.compare == ((0, 0),)
    assert isinstance(replica.holdings, HeldEntries)
    stored = replica.holdings.run(first.compare)
    ask(replica, add(run_of(1, text="y")))

    second = replica.step(replace(wanted, stored=stored))

    assert second.compare == ((0, 1),)
    assert ask(replica, wanted).status is Status.CONFLICT


def test_recovery_replaces_a_damaged_copy_and_a_normal_add_does_not() -> None:
    replica = memory_replica(ME)
    ask(replica, add(run_of(0, 2)))
    wanted = replace(add(run_of(0)), damaged=((0, 0),))

    normal = replica.step(wanted)
    recovery = replica.step(replace(wanted, recovery=True))

    assert (normal.status, normal.records) == (Status.UNKNOWN, ())
    assert recovery.records == (RunStored(run_of(0), KEY, replaces=True),)


def test_a_fence_is_told_when_its_record_is_synced_the_second_time_too() -> None:
    replica = memory_replica(ME)
    ask(replica, add(run_of(0)))

    first = ask(replica, FenceAsked(ME, KEY))
    second = ask(replica, FenceAsked(ME, KEY))

    assert (first.status, first.after, first.records) == (Status.OK, 2, (FenceSet(KEY),))
    assert (second.status, second.after, second.records) == (Status.OK, 2, ())


def test_a_fenced_ledger_takes_recovery_but_no_normal_add() -> None:
    replica = memory_replica(ME)
    ask(replica, FenceAsked(ME, KEY))

    assert ask(replica, add(run_of(0))).status is Status.FENCED
    assert ask(replica, replace(add(run_of(0)), recovery=True)).status is Status.OK


def test_fencing_an_unknown_ledger_creates_it_fenced_with_its_key() -> None:
    replica = memory_replica(ME)

    verdict = ask(replica, FenceAsked(ME, KEY))

    assert (verdict.status, verdict.last_add_confirmed) == (Status.OK, NO_ENTRY)
    reborn = replay(ME, verdict.records)
    assert reborn.is_fenced
    assert ask(reborn, add(run_of(0), key=OTHER_KEY)).status is Status.WRONG_KEY


def test_the_first_key_defines_it() -> None:
    replica = memory_replica(ME)
    ask(replica, add(run_of(0)))

    assert ask(replica, add(run_of(1), key=OTHER_KEY)).status is Status.WRONG_KEY
    assert ask(replica, FenceAsked(ME, OTHER_KEY)).status is Status.WRONG_KEY
    assert ask(replica, ReadAsked(ME, 0, 0, True, OTHER_KEY)).status is Status.WRONG_KEY
    assert ask(replica, LacReported(ME, 5, OTHER_KEY)).status is Status.WRONG_KEY
    assert not replica.is_fenced


def test_a_negative_waits_for_the_adds_accepted_before_it() -> None:
    replica = memory_replica(ME)
    ask(replica, add(run_of(0)))

    verdict = ask(replica, ReadAsked(ME, 0, 2))

    assert (verdict.present, verdict.absent, verdict.after) == (((0, 0),), ((1, 2),), 1)


def test_a_fencing_read_waits_for_the_fence_even_where_all_is_present() -> None:
    replica = memory_replica(ME)
    ask(replica, add(run_of(0)))
    replica.synced(1)

    verdict = ask(replica, ReadAsked(ME, 0, 0, True, KEY))

    assert (verdict.present, verdict.absent, verdict.after) == (((0, 0),), (), 2)
    assert ask(replica, add(run_of(1))).status is Status.FENCED


def test_what_is_read_back_waits_for_all_that_was_accepted_where_entries_are_deferred_too() -> None:
    """Rules 20a and 31."""
    for is_deferred in (False, True):
        replica = memory_replica(ME, is_deferred=is_deferred)
        ask(replica, add(run_of(0)))

        assert ask(replica, ReadAsked(ME, 0, 0)).after == 0
        verdict = ask(replica, ReadAsked(ME, 0, 0, from_disk=True))

        assert (verdict.present, verdict.after) == (((0, 0),), 1)


def test_asked_as_an_older_incarnation_it_gives_what_it_has_and_no_negative() -> None:
    replica = memory_replica(ME)
    ask(replica, replace(add(run_of(0), OLDER), recovery=True))

    assert ask(replica, add(run_of(1), OLDER)).status is Status.NOT_MINE
    read = ask(replica, ReadAsked(OLDER, 0, 3))
    assert (read.status, read.present, read.absent) == (Status.OK, ((0, 0),), ())
    assert ask(replica, ReadAsked(OLDER, 1, 3)).status is Status.NOT_MINE
    assert ask(replica, LacAsked(OLDER)).status is Status.NOT_MINE


def test_asked_as_an_older_incarnation_it_fences_and_does_not_count() -> None:
    replica = memory_replica(ME)

    assert ask(replica, FenceAsked(OLDER, KEY)).status is Status.NOT_MINE
    assert replica.is_fenced


def test_another_bookie_and_a_later_incarnation_are_not_here() -> None:
    replica = memory_replica(ME)

    for member in ("b2@2", "b1@3"):
        assert ask(replica, add(run_of(0), member)).status is Status.NOT_MINE
        assert ask(replica, FenceAsked(member, KEY)).status is Status.NOT_MINE
        assert ask(replica, ReadAsked(member, 0, 0)).status is Status.NOT_MINE
    assert not replica.is_fenced


def test_limbo_gives_no_negative_and_does_not_count_for_coverage_until_it_ends() -> None:
    replica = memory_replica(ME)
    replica.enter_limbo(KEY, is_fenced=False)

    assert ask(replica, ReadAsked(ME, 0, 0)).absent == ()
    assert ask(replica, ReadAsked(ME, 0, 0)).status is Status.NOT_MINE
    assert ask(replica, LacAsked(ME)).status is Status.NOT_MINE
    assert ask(replica, FenceAsked(ME, KEY)).status is Status.NOT_MINE
    replica.set_limbo(limbo=False)
    assert ask(replica, ReadAsked(ME, 0, 0)).absent == ((0, 0),)


def test_limbo_takes_adds_only_from_who_knows_the_new_incarnation_and_after_a_fence_none() -> None:
    older = f"{ME.partition('@')[0]}@1"
    is_open, is_closed = memory_replica(ME), memory_replica(ME)
    is_open.enter_limbo(KEY, is_fenced=False)
    is_closed.enter_limbo(KEY, is_fenced=True)

    assert ask(is_open, add(run_of(0), older)).status is Status.NOT_MINE
    foreign = replace(add(run_of(0)), ledger_key=b"x" * 32)
    assert ask(is_open, foreign).status is Status.WRONG_KEY  # metadata told the key
    assert ask(is_open, add(run_of(0))).status is Status.OK
    assert ask(is_closed, add(run_of(0))).status is Status.FENCED
    assert ask(is_closed, replace(add(run_of(0)), recovery=True)).status is Status.OK


def test_phase_one_again_writes_nothing_again() -> None:
    replica = memory_replica(ME)

    assert len(replica.enter_limbo(KEY, is_fenced=True).records) == 2
    again = replica.enter_limbo(KEY, is_fenced=True)

    assert (again.records, again.after) == ((), 2)


def test_the_lac_is_the_highest_ever_told() -> None:
    replica = memory_replica(ME)
    ask(replica, add(run_of(5, lac=4)))
    ask(replica, LacReported(ME, 5, KEY))
    ask(replica, LacReported(ME, 3, KEY))
    ask(replica, add(run_of(3, lac=2)))

    assert ask(replica, LacAsked(ME)).last_add_confirmed == 5


def test_records_may_be_replayed_in_any_order() -> None:
    records = (
        RunStored(run_of(0, 2), KEY),
        RunStored(run_of(4, lac=1), KEY),
        FenceSet(KEY),
        LacKept(3, KEY),
        LimboSet(1, limbo=True),
        LimboSet(2, limbo=False),
    )

    there, back = replay(ME, records), replay(ME, reversed(records))

    assert there.key() == back.key()
    assert there.is_fenced
    assert not there.is_limbo
    there.check()


REQUESTS = (
    add(run_of(8)),
    add(run_of(8), OLDER),
    add(run_of(8), key=OTHER_KEY),
    replace(add(run_of(8)), recovery=True),
    FenceAsked(ME, KEY),
    FenceAsked(OLDER, OTHER_KEY),
    ReadAsked(ME, 0, 9),
    ReadAsked(ME, 0, 9, fence=True, ledger_key=KEY),
    LacAsked(ME),
    LacReported(ME, 9, KEY),
)


def test_a_deleted_ledger_is_deleted_in_whatever_order_its_records_come() -> None:
    """Rule 16a: nothing that is said of it before or after defines or denies anything."""
    records: tuple[ReplicaRecord, ...] = (
        RunStored(run_of(0, 2), KEY),
        FenceSet(OTHER_KEY),
        LacKept(3, KEY),
        LimboSet(1, limbo=True),
        EntriesDropped(KEY),
        LedgerDeleted(),
    )
    for order in itertools.permutations(records):
        replica = replay(ME, order)
        for asked in REQUESTS:
            verdict = ask(replica, asked)
            is_of_writer = isinstance(asked, AddAsked) and not asked.recovery
            assert verdict.status is (Status.FENCED if is_of_writer else Status.UNKNOWN)
            assert (verdict.records, verdict.present, verdict.absent) == ((), (), ())
        for of_the_bookie in (
            replica.enter_limbo(KEY, is_fenced=True),
            replica.set_limbo(limbo=not replica.is_limbo),
            replica.delete(),
        ):
            assert of_the_bookie.records == ()
        assert replica.repeated().records == ()
        assert ask(replica, add(run_of(8), "b2@1")).status is Status.NOT_MINE
        replica.check()


def test_a_writer_hears_of_a_deletion_when_it_is_on_disk() -> None:
    replica = memory_replica(ME)
    ask(replica, add(run_of(0)))
    assert replica.delete().records == (LedgerDeleted(),)

    assert ask(replica, add(run_of(1))).after == 2


def test_a_dropped_copy_leaves_its_fence_and_may_come_back() -> None:
    replica = memory_replica(ME)
    ask(replica, add(run_of(0, 3)))

    assert replica.drop().records == (EntriesDropped(KEY),)

    assert ask(replica, add(run_of(3))).status is Status.FENCED
    assert ask(replica, ReadAsked(ME, 0, 2)).absent == ((0, 2),)
    assert ask(replica, replace(add(run_of(0)), recovery=True)).status is Status.OK
    assert ask(replica, ReadAsked(ME, 0, 2)).present == ((0, 0),)


def test_what_was_acknowledged_survives_any_crash() -> None:
    replica = memory_replica(ME)
    records = [*ask(replica, add(run_of(0))).records]
    replica.synced(1)
    records += ask(replica, add(run_of(1))).records
    records += ask(replica, FenceAsked(ME, KEY)).records

    for kept in range(replica.synced_count, replica.accepted_count + 1):
        reborn: Replica = replay(ME, records[:kept])
        assert reborn.holdings.present(0, 9)[0][0] == 0


def test_a_read_only_bookie_still_takes_recovery_and_knows_what_it_has() -> None:
    replica = memory_replica(ME)
    ask(replica, add(run_of(0)))

    assert ask(replica, replace(add(run_of(0)), read_only=True)).status is Status.OK
    assert ask(replica, replace(add(run_of(1)), read_only=True)).status is Status.READ_ONLY
    recovery = replace(add(run_of(1)), read_only=True, recovery=True)
    assert ask(replica, recovery).status is Status.OK


def test_a_deferring_bookie_acknowledges_entries_at_once_but_fences_on_disk() -> None:
    replica = memory_replica(ME, is_deferred=True)

    assert ask(replica, add(run_of(0))).after == 0
    assert ask(replica, FenceAsked(ME, KEY)).after == 2


def test_a_copy_is_independent_and_has_the_same_key() -> None:
    replica = memory_replica(ME)
    ask(replica, add(run_of(0)))
    twin = replica.copy()
    assert twin.key() == replica.key()

    ask(twin, FenceAsked(ME, KEY))

    assert not replica.is_fenced
    assert twin.key() != replica.key()


def test_ranges_and_gaps_are_each_others_rest() -> None:
    ranges = ranges_of([1, 2, 5])

    assert ranges == ((1, 2), (5, 5))
    assert complement(ranges, 0, 6) == ((0, 0), (3, 4), (6, 6))
    assert complement((), 3, 4) == ((3, 4),)


# --- guards that no other test would miss: `make mutate` found them ------------------------------


STRANGERS = pytest.mark.parametrize("member", ["b9@2", "b1@3"], ids=["another", "a later one"])


FORCED = AddAsked(ME, run_of(0), KEY, recovery=True)


def test_a_lac_that_is_asked_for_is_an_answer_and_not_a_refusal() -> None:
    replica = memory_replica(ME)
    ask(replica, LacReported(ME, 5, KEY))

    verdict = ask(replica, LacAsked(ME))

    assert (verdict.status, verdict.last_add_confirmed) == (Status.OK, 5)


@STRANGERS
def test_a_lac_of_another_member_is_neither_given_nor_taken(member: str) -> None:
    """Rule 4."""
    replica = memory_replica(ME)
    ask(replica, LacReported(ME, 5, KEY))

    assert ask(replica, LacAsked(member)).status is Status.NOT_MINE
    reported = ask(replica, LacReported(member, 9, KEY))

    assert (reported.status, reported.records) == (Status.NOT_MINE, ())
    assert ask(replica, LacAsked(ME)).last_add_confirmed == 5


def test_a_lac_that_is_not_above_the_one_known_writes_nothing() -> None:
    replica = memory_replica(ME)
    assert ask(replica, LacReported(ME, 5, KEY)).records == (LacKept(5, KEY),)

    for lac in (4, 5):
        verdict = ask(replica, LacReported(ME, lac, KEY))
        assert (verdict.status, verdict.records) == (Status.OK, ())


def test_a_bookie_that_takes_no_more_still_takes_recovery() -> None:
    replica = memory_replica(ME)
    refused = ask(replica, AddAsked(ME, run_of(0), KEY, read_only=True))
    assert refused.status is Status.READ_ONLY

    verdict = ask(replica, replace(FORCED, read_only=True))

    assert verdict.status is Status.OK
    assert verdict.records


def test_a_damaged_copy_is_replaced_by_recovery() -> None:
    """Rule 2."""
    replica = memory_replica(ME)
    ask(replica, add(run_of(0)))
    plain = replica.step(AddAsked(ME, run_of(0), KEY, damaged=((0, 0),)))
    assert plain.status is Status.UNKNOWN

    verdict = replica.step(replace(FORCED, damaged=((0, 0),)))

    assert verdict.status is Status.OK
    assert verdict.records


# --- incarnations, limbo, what is dropped ----------------------------------------------------


@pytest.mark.parametrize("is_fenced", [False, True], ids=["open", "in recovery"])
def test_a_row_of_another_key_neither_fences_nor_defines_the_key(is_fenced: bool) -> None:
    """Rules 15 and 30: only limbo, which any loss asks for."""
    replica = memory_replica(ME)
    ask(replica, add(run_of(0)))

    verdict = replica.enter_limbo(b"o" * 32, is_fenced=is_fenced)

    assert verdict.records == (LimboSet(1, True),)
    assert (replica.ledger_key, replica.is_fenced, replica.is_limbo) == (KEY, False, True)


def test_the_first_row_of_a_ledger_that_was_lost_defines_its_key_once() -> None:
    replica = memory_replica(ME)

    assert LacKept(-1, KEY) in replica.enter_limbo(KEY, is_fenced=False).records
    assert replica.enter_limbo(KEY, is_fenced=False).records == ()
    assert replica.ledger_key == KEY


def test_what_is_moved_is_held_at_its_new_place() -> None:
    replica = memory_replica(ME)
    ask(replica, LacReported(ME, 5, KEY))

    verdict = replica.moved(run_of(0))

    assert verdict.records == (RunStored(run_of(0), KEY, replaces=True),)
    assert replica.accepted_count == 2
    assert ask(replica, ReadAsked(ME, 0, 0)).present == ((0, 0),)


def test_a_fence_that_a_dropped_copy_leaves_is_told_when_it_is_on_disk() -> None:
    """I13: not before, and no later than the record that fenced first."""
    replica = memory_replica(ME)
    ask(replica, add(run_of(0)))
    dropped = replica.drop()
    assert ask(replica, FenceAsked(ME, KEY)).after == dropped.after == 2

    replica = memory_replica(ME)
    fenced = ask(replica, FenceAsked(ME, KEY))
    replica.drop()
    assert ask(replica, FenceAsked(ME, KEY)).after == fenced.after == 1


def test_what_is_said_again_is_what_is_known_and_no_more() -> None:
    replica = memory_replica(ME)
    assert replica.repeated().records == ()
    assert replica.accepted_count == 0

    ask(replica, LacReported(ME, 5, KEY))
    assert replica.repeated().records == (LacKept(5, KEY),)

    ask(replica, FenceAsked(ME, KEY))
    replica.set_limbo(limbo=True)
    before = replica.accepted_count
    again = replica.repeated().records
    assert again == (FenceSet(KEY), LacKept(5, KEY), LimboSet(1, True))
    assert replica.accepted_count == before + 3
    replica.synced(before + 3)
    twin = replay(ME, again)
    assert (twin.ledger_key, twin.is_fenced, twin.is_limbo) == (KEY, True, True)


# --- adds and reads --------------------------------------------------------------------------


def test_what_a_driver_read_beside_the_run_is_not_compared() -> None:
    replica = memory_replica(ME)
    ask(replica, add(run_of(0, 3)))

    verdict = replica.step(replace(add(run_of(1)), stored=run_of(0, 3)))

    assert (verdict.status, verdict.records) == (Status.OK, ())


def test_what_lies_in_the_holes_of_a_run_need_not_be_read() -> None:
    replica = memory_replica(ME)
    ask(replica, add(run_of(1)))
    holes = run_of(0, 3).where(lambda entry_id: entry_id != 1)
    assert holes is not None

    verdict = replica.step(add(holes))

    assert (verdict.status, verdict.compare) == (Status.OK, ())


def test_a_bookie_that_defers_acknowledges_a_repeated_add_at_once_too() -> None:
    """Rule 31."""
    replica = memory_replica(ME, is_deferred=True)
    ask(replica, add(run_of(0)))

    assert ask(replica, add(run_of(0))).after == 0


def test_a_plain_read_does_not_wait_for_a_fence() -> None:
    replica = memory_replica(ME)
    ask(replica, add(run_of(0)))
    ask(replica, FenceAsked(ME, KEY))

    assert ask(replica, ReadAsked(ME, 0, 0)).after == 0


def test_entries_in_memory_change_only_where_a_record_replaces_them() -> None:
    """As the index of a bookie does: the first copy counts, and a repaired one takes its place."""
    held = HeldEntries()
    held.accept(RunStored(run_of(0, 2), KEY))

    held.accept(RunStored(run_of(1, 2, text="y"), KEY))
    assert held.run(((0, 2),)) == merge([run_of(0, 2), run_of(2, text="y")])

    held.accept(RunStored(run_of(1, text="z"), KEY, replaces=True))
    assert held.run(((1, 1),)) == run_of(1, text="z")
