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
    "a restarted bookie forgets the fence",
    "a bookie accepts normal adds that name its older incarnation",
    "a recovery counts any answer to a fence for coverage",
    "a recovery counts a timeout as a negative answer",
    "a bookie does not check the fence on an add",
    "a recovery takes a compare-and-swap conflict for success",
    "a bookie reports a fence before the fence is on disk",
    "a recovery closes a ledger without measuring its length",
    "a recovery takes entries that an answer leaves out for absent",
    "a bookie drops ledgers that no list of ledgers names",
    "a bookie drops a ledger's fence together with its entries",
    "a gateway writes a ledger that another process created",
    "autorecovery recovers the ledger of a live writer",
    "entries are declared lost although a bookie has them",
)

BY_SEARCH = (
    "a writer counts acknowledgements of members that were replaced",
    "an ensemble change keeps the acknowledgements of the replaced members",
    "a writer confirms entries while an ensemble change is in progress",
    "a writer changes its ensemble without a compare-and-swap",
    "an entry is confirmed with one acknowledgement too few",
)


FIRST_SEEDS = {
    "a gateway writes a ledger that another process created": 19,
    "autorecovery recovers the ledger of a live writer": 15,
    "entries are declared lost although a bookie has them": 9,
    "an owner appends entries again that the ended ledger contains": 17,
    "a reset does not change the fencing token": 37,
    "a lease ends by the wall clock": 8,
    "a consumer expires while its lease is held": 6,
    "a store keeps its old state after its log is truncated": 6,
    "an expiry keeper waits no longer than a log may be idle": 64,
    "a move is divided again after it was sent": 4,
    "a move starts again after it was sent": 4,
    "a claim ends by the wall clock": 6,
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
    "an owner continues although its log's metadata names another last ledger",
    "an owner switches ledgers before the old ledger is closed",
    "a batch does not state how many records precede it",
    "a producer's retry is appended again",
    "an owner takes an unknown producer for a new one",
    "an owner appends entries again that the ended ledger contains",
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
