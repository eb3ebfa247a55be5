"""The services that ship hold their invariants on a virtual event loop, in a world of faults."""

import asyncio

import pytest

from tests.model.sim.services.plan import (
    BACK,
    BOTH_LOST,
    CUT,
    ENDED,
    FAULT_KINDS,
    draw,
    draw_restores,
)
from tests.model.sim.services.run import run_plan, run_seed, shrink
from tests.support.salted import printed_under_salts
from tests.support.virtual import Deadlock, VirtualLoop

SEEDS = 24
"""Bounded by count; many: `make sim OF=services`. About 15 s on one core."""

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
        "from tests.model.sim.services.run import run_seed\n"
        "print([run_seed(seed).trace_hash for seed in range(1, 7)])\n"
    )

    assert len(printed_under_salts("-c", script)) == 1


def test_the_seeds_of_the_tests_meet_every_kind_of_fault_and_drop_garbage() -> None:
    plans = [draw(seed) for seed in range(1, 1 + SEEDS)]

    assert {fault.kind for plan in plans for fault in plan.faults} == {
        *FAULT_KINDS,
        CUT,
        ENDED,
        BACK,
        BOTH_LOST,
    }
    assert all(BOTH_LOST in {fault.kind for fault in plan.faults} for plan in plans)
    assert any(plan.dead for plan in plans)
    assert any(run_plan(plan).drops for plan in plans[:5])


def test_older_tables_lose_changes_and_an_operator_rebuilds_and_accepts() -> None:
    outcomes = [run_plan(draw_restores(seed), is_reported=True) for seed in (1, 4)]

    stories = "\n".join("\n".join(outcome.story) for outcome in outcomes)
    assert not any(outcome.violation or outcome.waits for outcome in outcomes)
    for event in (
        "database back by",
        "collects nothing: database-went-back",
        "database right again",
        "operator rebuilds",
        "operator accepts",
    ):
        assert event in stories


def test_rows_that_too_few_bookies_prove_wait_for_an_operator() -> None:
    outcome = run_plan(draw(16))

    assert outcome.violation is None
    assert outcome.waits is not None
    assert "at most 0 are allowed" in outcome.waits


def test_virtual_time_jumps_to_the_next_timer() -> None:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(asyncio.sleep(3600))

        assert loop.time() == pytest.approx(3600)
        with pytest.raises(Deadlock):
            loop.run_until_complete(loop.create_future())
    finally:
        loop.close()
