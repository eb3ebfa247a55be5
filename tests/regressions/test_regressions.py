"""What found a defect once is run again for ever. Plans are kept, not seeds: what a seed draws
changes with the simulator.
"""

import pytest

from tests.regressions.services import SERVICES
from tests.sim.services.plan import ServicePlan
from tests.sim.services.run import run_plan


@pytest.mark.parametrize(
    ("why", "plan"), SERVICES, ids=[why.replace(" ", "-")[:60] for why, _ in SERVICES]
)
def test_a_plan_that_found_a_defect_finds_none(why: str, plan: ServicePlan) -> None:
    outcome = run_plan(plan)

    assert outcome.violation is None, f"it is back: {why}"
