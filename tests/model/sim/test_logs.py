"""Some seeds of the log simulation; many: `make logsim`. What it would miss: `make mutants`."""

import pytest

from tests.model.logs.simulation import run_seed
from tests.support.salted import printed_under_salts

CHUNK = 10


@pytest.mark.parametrize("first", range(1, 31, CHUNK))
def test_a_log_keeps_its_promises_whatever_dies_rolls_publishes_or_duels(first: int) -> None:
    for seed in range(first, first + CHUNK):
        outcome = run_seed(seed)

        assert outcome.violation is None, f"seed {seed}: {outcome.violation}"
        assert outcome.events > 20


def test_a_seed_is_one_schedule_in_any_process() -> None:
    seeds = [2, 35, 95, 160]
    script = (
        "from tests.model.logs.simulation import run_seed\n"
        f"print([run_seed(seed).digest for seed in {seeds}])\n"
    )

    here = [run_seed(seed).digest for seed in seeds]

    assert printed_under_salts("-c", script) == {f"{here}\n"}
