"""The machines that ship hold their invariants in a simulated world of faults."""

import pytest

from tests.model.sim.plan import FAULT_KINDS, STORE_BACK, draw
from tests.model.sim.run import run_plan, run_seed, shrink
from tests.mutation.mutants.hunt import applied
from tests.mutation.mutants.list import MUTANTS
from tests.support.salted import printed_under_salts

SEEDS = 800
"""Bounded by count, not by time: the same on every machine; many: `make sim`. About 10 s on one core."""

SHARES = 8


@pytest.mark.parametrize("share", range(SHARES))
def test_no_seed_breaks_an_invariant(share: int) -> None:
    backs = waiting = 0
    for seed in range(1 + share, 1 + SEEDS, SHARES):
        outcome = run_seed(seed)
        # The metadata store goes back in every seed, and few seeds wait for an operator.
        assert STORE_BACK in {fault.kind for fault in outcome.plan.faults}
        backs += outcome.backs > 0
        waiting += outcome.is_waiting
        if outcome.violation is not None:
            small = shrink(outcome)
            story = "\n".join(small.story[-150:])
            pytest.fail(
                f"{outcome.violation}\nagain: make sim SEED={seed} SEEDS=1\n{small.plan}\n{story}"
            )
    assert backs > 0.95 * SEEDS / SHARES
    assert waiting < 0.2 * SEEDS / SHARES


def test_a_seed_is_the_same_run_under_every_hash_seed() -> None:
    script = (
        "from tests.model.sim.run import run_seed\n"
        "print([run_seed(seed).trace_hash for seed in range(1, 21)])\n"
    )

    assert len(printed_under_salts("-c", script)) == 1


def test_telling_the_story_does_not_change_it() -> None:
    for seed in range(1, 6):
        plan = draw(seed)

        quiet, reported = run_plan(plan), run_plan(plan, is_reported=True)

        assert quiet.trace_hash == reported.trace_hash
        assert reported.story


def test_the_seeds_of_the_tests_meet_every_kind_of_fault() -> None:
    kinds = {fault.kind for seed in range(1, 200) for fault in draw(seed).faults}

    assert kinds == {*FAULT_KINDS, STORE_BACK}


def test_a_broken_plan_is_told_as_a_short_story_of_the_same_violation() -> None:
    mutant = next(
        mutant
        for mutant in MUTANTS
        if mutant.name == "a recovery takes one negative answer as proof of absence"
    )
    with applied(mutant):
        broken = next(
            outcome
            for outcome in map(run_seed, range(1, 1_000))
            if (outcome.violation or "").startswith("I16:") and 2 < len(outcome.plan.appends) < 10
        )

        small = shrink(broken)
        again = run_plan(small.plan, is_reported=True)

    assert (small.violation or "").startswith("I16:")
    assert again.story == small.story
    assert len(small.plan.appends) <= 2
    assert not small.plan.faults
    assert len(small.story) < 200
