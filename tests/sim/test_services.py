"""The services that ship hold their invariants on a virtual event loop, in a world of faults."""

import asyncio

import pytest

from tests.sim.services.plan import BACK, CUT, FAULT_KINDS, SAVED, draw, draw_restores
from tests.sim.services.run import run_plan, run_seed, shrink
from tests.support.salted import printed_under_salts
from tests.support.virtual import Deadlock, VirtualLoop

SEEDS = 104
"""Bounded by count. About 20 s on one core."""

SHARES = 8


@pytest.mark.parametrize("share", range(SHARES))
def test_no_seed_of_whole_services_breaks_an_invariant(share: int) -> None:
    for seed in range(1 + share, 1 + SEEDS, SHARES):
        outcome = run_seed(seed)
        if outcome.violation is not None:
            small = shrink(outcome)
            story = "\n".join(small.story[-150:])
            pytest.fail(
                f"{outcome.violation}\nagain: make sim OF=services SEED={seed} SEEDS=1\n{small.plan}\n{story}"
            )


def test_a_seed_of_whole_services_is_the_same_run_under_every_hash_seed() -> None:
    script = (
        "from tests.sim.services.run import run_seed\n"
        "print([run_seed(seed).trace_hash for seed in range(1, 7)])\n"
    )

    assert len(printed_under_salts("-c", script)) == 1


def test_the_seeds_of_the_tests_meet_every_kind_of_fault_and_drop_garbage() -> None:
    plans = [draw(seed) for seed in range(1, 1 + SEEDS)]

    assert {fault.kind for plan in plans for fault in plan.faults} == {
        *FAULT_KINDS,
        CUT,
        SAVED,
        BACK,
    }
    assert any(plan.dead for plan in plans)
    assert any(run_plan(plan).drops for plan in plans[:5])


def test_older_tables_lose_changes_and_bookies_hear_of_it() -> None:
    outcomes = [run_plan(draw_restores(seed), is_told=True) for seed in (3, 9)]

    for outcome in outcomes:
        assert outcome.violation is None
        assert outcome.limit is None
        assert any("database back by" in line for line in outcome.story)
        assert any("collects nothing: database-went-back" in line for line in outcome.story)


def test_virtual_time_jumps_to_the_next_timer() -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(asyncio.sleep(3600))

        assert loop.time() == pytest.approx(3600)
        with pytest.raises(Deadlock):
            loop.run_until_complete(loop.create_future())
    finally:
        loop.close()
