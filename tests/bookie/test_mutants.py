"""Guards of the bookie that are taken out are missed: who is a member, and what is given up."""

import pytest

from tests.bookie.mutants import GUARD_MUTANTS, TWIN_MUTANTS, is_found
from tests.mutants.hunt import Guard


@pytest.mark.parametrize("mutant", [*TWIN_MUTANTS, *GUARD_MUTANTS], ids=lambda mutant: mutant.name)
def test_a_guard_that_is_taken_out_is_missed(mutant: Guard) -> None:
    assert is_found(mutant)
