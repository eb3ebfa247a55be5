"""What found a defect once is run again for ever. Plans are kept, not seeds: what a seed draws
changes with the simulator.
"""

import pytest

from tests.regressions.machines import MACHINES
from tests.regressions.services import SERVICES
from tests.sim import run as machines
from tests.sim.plan import Plan
from tests.sim.services import run as services
from tests.sim.services.plan import ServicePlan


def _ids(plans: tuple[tuple[str, Plan], ...] | tuple[tuple[str, ServicePlan], ...]) -> list[str]:
    return [why.replace(" ", "-")[:60] for why, _ in plans]


@pytest.mark.parametrize(("why", "plan"), MACHINES, ids=_ids(MACHINES))
def test_a_plan_of_machines_that_found_a_defect_finds_none(why: str, plan: Plan) -> None:
    outcome = machines.run_plan(plan)

    assert outcome.violation is None, f"it is back: {why}"


@pytest.mark.parametrize(("why", "plan"), SERVICES, ids=_ids(SERVICES))
def test_a_plan_of_services_that_found_a_defect_finds_none(why: str, plan: ServicePlan) -> None:
    outcome = services.run_plan(plan)

    assert outcome.violation is None, f"it is back: {why}"
