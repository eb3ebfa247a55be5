"""Whatever changes in a stopped bookie's files is found, or does no harm."""

import pytest

from tests.bookie import flips
from tests.bookie.mutants import OTHER_MUTANTS, is_found
from tests.mutants.hunt import Guard


def test_no_flipped_bit_or_truncated_file_makes_a_bookie_answer_falsely() -> None:
    tally = flips.run(150, seed=7, quiet=True)

    assert tally.wrong == []
    assert tally.flips == tally.detected + tally.harmless == 150
    # Both were changed; which bits lie where, RocksDB decides.
    assert {"log", "index"} <= {where.split()[0] for where in tally.where}


@pytest.mark.parametrize("mutant", OTHER_MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_of_the_damage_checks_is_found(mutant: Guard) -> None:
    assert is_found(mutant)
