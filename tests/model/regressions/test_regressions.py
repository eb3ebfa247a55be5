"""What found a defect once is run again for ever. Plans are kept, not seeds: what a seed draws
changes with the simulator.
"""

import pytest

from tests.model.regressions.plans import MACHINES, SERVICES
from tests.model.sim import run as machines
from tests.model.sim.services import run as services


def _id(why: str) -> str:
    return why.replace(" ", "-")[:60]


@pytest.mark.parametrize("why", MACHINES, ids=_id)
def test_a_plan_of_machines_that_found_a_defect_finds_none(why: str) -> None:
    outcome = machines.run_plan(MACHINES[why])

    assert outcome.violation is None, f"it is back: {why}"


@pytest.mark.parametrize("why", SERVICES, ids=_id)
def test_a_plan_of_services_that_found_a_defect_finds_none(why: str) -> None:
    outcome = services.run_plan(SERVICES[why])

    assert outcome.violation is None, f"it is back: {why}"
