"""Guards of a bookie's rules that no other test would miss; `make mutate` found them."""

from dataclasses import replace

import pytest

from quorumlog.protocol.messages import Status
from quorumlog.protocol.record import merge
from quorumlog.protocol.replica import (
    AddAsked,
    FenceAsked,
    FenceSet,
    LacAsked,
    LacKept,
    LacTold,
    LimboSet,
    ReadAsked,
    RunStored,
)
from tests.bookie.test_replica import KEY, ME, add, run_of
from tests.support.replicas import HeldEntries, ask, memory_replica, replay

STRANGERS = pytest.mark.parametrize("member", ["b9@2", "b1@3"], ids=["another", "a later one"])


FORCED = AddAsked(ME, run_of(0), KEY, recovery=True)


def test_a_lac_that_is_asked_for_is_an_answer_and_not_a_refusal() -> None:
    replica = memory_replica(ME)
    ask(replica, LacTold(ME, 5, KEY))

    verdict = ask(replica, LacAsked(ME))

    assert (verdict.status, verdict.last_add_confirmed) == (Status.OK, 5)


@STRANGERS
def test_a_lac_of_another_member_is_neither_given_nor_taken(member: str) -> None:
    """Rule 4."""
    replica = memory_replica(ME)
    ask(replica, LacTold(ME, 5, KEY))

    assert ask(replica, LacAsked(member)).status is Status.NOT_MINE
    told = ask(replica, LacTold(member, 9, KEY))

    assert (told.status, told.records) == (Status.NOT_MINE, ())
    assert ask(replica, LacAsked(ME)).last_add_confirmed == 5


def test_a_lac_that_is_not_above_the_one_known_writes_nothing() -> None:
    replica = memory_replica(ME)
    assert ask(replica, LacTold(ME, 5, KEY)).records == (LacKept(5, KEY),)

    for lac in (4, 5):
        verdict = ask(replica, LacTold(ME, lac, KEY))
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
def test_a_row_of_another_key_neither_fences_what_is_here_nor_defines_its_key(
    is_fenced: bool,
) -> None:
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
    ask(replica, LacTold(ME, 5, KEY))

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

    ask(replica, LacTold(ME, 5, KEY))
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
