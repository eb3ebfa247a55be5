"""Guards of a bookie's rules that no other test would miss; `make mutate` found them."""

from dataclasses import replace

import pytest

from quorumlog.protocol.messages import Status
from quorumlog.protocol.replica import AddAsked, LacAsked, LacKept, LacTold, ask, memory_replica
from tests.bookie.test_replica import KEY, ME, add, run_of

STRANGERS = pytest.mark.parametrize("member", ["b9@2", "b1@3"], ids=["another", "a later one"])


def forced(is_repair: bool) -> AddAsked:
    """An add of recovery, or of a repair."""
    return AddAsked(ME, run_of(0), KEY, recovery=not is_repair, repair=is_repair)


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


@pytest.mark.parametrize("is_repair", [False, True], ids=["recovery", "repair"])
def test_a_bookie_that_takes_no_more_still_takes_recovery_and_repair(is_repair: bool) -> None:
    replica = memory_replica(ME)
    refused = ask(replica, AddAsked(ME, run_of(0), KEY, read_only=True))
    assert refused.status is Status.READ_ONLY

    verdict = ask(replica, replace(forced(is_repair), read_only=True))

    assert verdict.status is Status.OK
    assert verdict.records


@pytest.mark.parametrize("is_repair", [False, True], ids=["recovery", "repair"])
def test_a_damaged_copy_is_replaced_by_recovery_and_by_repair(is_repair: bool) -> None:
    """Rule 2."""
    replica = memory_replica(ME)
    ask(replica, add(run_of(0)))
    plain = replica.step(AddAsked(ME, run_of(0), KEY, damaged=((0, 0),)))
    assert plain.status is Status.UNKNOWN

    verdict = replica.step(replace(forced(is_repair), damaged=((0, 0),)))

    assert verdict.status is Status.OK
    assert verdict.records
