"""A share of the mutants: the guards matter, and the checks see it. All of them: `make mutants`."""

import pytest

from tests.model.explore.scope import RewriteScope
from tests.mutation.mutants.__main__ import HISTORIES
from tests.mutation.mutants.ends import END_MUTANTS
from tests.mutation.mutants.hunt import Histories, Mutant, applied, by_search, by_swarm
from tests.mutation.mutants.list import MUTANTS
from tests.mutation.mutants.logs import CLAIMS, LOG_MUTANTS, LOG_SEEDS, by_logs
from tests.support.virtual import run_virtual

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}

BY_SWARM = (
    "a restart forgets the fence",
    "an older incarnation takes normal adds",
    "any answer counts for coverage",
    "silence counts as negative",
    "the fence is not checked on add",
    "recovery takes a conflict for success",
    "a fence is told before it is on disk",
    "the length is not measured",
    "what an answer does not name is absent",
    "what no list names is collected",
    "the fence goes with the copy",
    "a second process writes a ledger",
    "a live writer's ledger is recovered",
    "what somebody has is given up",
)

BY_SEARCH = (
    "answers of replaced members count",
    "acks of replaced members are kept",
    "entries are confirmed while a change is under way",
    "the ensemble changes without compare-and-swap",
    "an ack fewer confirms",
)


FIRST_SEEDS = {
    "a second process writes a ledger": 19,
    "a live writer's ledger is recovered": 15,
    "what somebody has is given up": 9,
    "what an ended ledger has kept is appended again": 17,
    "a reset leaves the token": 37,
    "a lease ends by the clock on the wall": 8,
    "a consumer expires while its lease is held": 6,
    "rows outlive a truncation": 6,
    "a keeper waits no longer than the log may be idle": 64,
    "a move that was sent is divided once more": 4,
    "a move begins anew after it was sent": 4,
    "a claim ends by the clock on the wall": 6,
}
"""The first seed that shows a mutant, where the seeds before it take a second or more. After a change of a simulation,
another seed may be the first: the hunt goes on from this one.
"""


def on_from(name: str, seeds: range) -> range:
    """The seeds from the first one that is known to show the mutant."""
    return range(FIRST_SEEDS.get(name, seeds.start), seeds.stop)


@pytest.mark.parametrize("name", BY_SWARM)
def test_the_swarm_sees_that_a_guard_is_missing(name: str) -> None:
    assert by_swarm(BY_NAME[name], on_from(name, range(1, 1_001))) is not None


BY_LOGS = (
    "an owner goes on whatever ledger the row names last",
    "a ledger is followed by another one before it is closed",
    "a batch does not count the records before it",
    "a producer's repeat is appended again",
    "an unknown producer is new",
    "what an ended ledger has kept is appended again",
)


@pytest.mark.parametrize("name", BY_LOGS)
def test_the_log_simulation_sees_that_a_guard_is_missing(name: str) -> None:
    mutant = next(mutant for mutant in LOG_MUTANTS if mutant.name == name)
    assert by_logs(mutant, on_from(name, LOG_SEEDS)) is not None


SEEN = [
    pytest.param(mutant, histories, id=mutant.name)
    for mutants, histories in HISTORIES
    for mutant in mutants
]


@pytest.mark.parametrize(("mutant", "histories"), SEEN)
def test_a_simulation_sees_that_a_guard_is_missing(mutant: Mutant, histories: Histories) -> None:
    assert histories.hunt(mutant, on_from(mutant.name, histories.seeds)) is not None


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_holds_and_sees_that_a_guard_is_missing(name: str) -> None:
    assert run_virtual(CLAIMS[name], seed=0) is None
    assert by_logs(next(mutant for mutant in LOG_MUTANTS if mutant.name == name)) is not None


@pytest.mark.parametrize("name", BY_SEARCH)
def test_the_explorer_sees_that_a_guard_is_missing(name: str) -> None:
    find = by_search(BY_NAME[name])

    assert find is not None
    assert find.violation.startswith("I")


@pytest.mark.parametrize("mutant", [*MUTANTS, *LOG_MUTANTS], ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_code_and_is_gone_afterwards(mutant: Mutant) -> None:
    before = [patch.owner.__dict__[patch.name] for patch in mutant.patches]

    with applied(mutant):
        within = [patch.owner.__dict__[patch.name] for patch in mutant.patches]

    after = [patch.owner.__dict__[patch.name] for patch in mutant.patches]
    assert before == after
    assert all(a is not b for a, b in zip(before, within, strict=True))


REWRITES = [mutant for mutant in LOG_MUTANTS if isinstance(mutant.scope, RewriteScope)]


@pytest.mark.parametrize("mutant", REWRITES, ids=lambda mutant: mutant.name)
def test_the_search_of_rewrites_sees_that_a_guard_is_missing(mutant: Mutant) -> None:
    assert by_search(mutant) is not None


@pytest.mark.parametrize("mutant", END_MUTANTS, ids=lambda mutant: mutant.name)
def test_the_search_of_ends_sees_that_a_guard_is_missing(mutant: Mutant) -> None:
    assert by_search(mutant) is not None
