"""Plans that found a defect once, by what the defect was. They stay, whatever seeds come to mean."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from tests.model.sim.plan import Plan
from tests.model.sim.services.plan import ServicePlan

_FOLDER: Final = Path(__file__).parent

MACHINES: Final = TypeAdapter(dict[str, Plan]).validate_json(
    (_FOLDER / "machines.json").read_bytes()
)
SERVICES: Final = TypeAdapter(dict[str, ServicePlan]).validate_json(
    (_FOLDER / "services.json").read_bytes()
)

OUTLIVED: Final = "a repair went on in a database that had gone back behind the end of its fragment, and gave the place to a bookie that lacked the rest"
RIVALS: Final = (
    "three repairs of one place replaced each other's mark for ever, and none of them ended"
)


def drawn_like(why: str) -> Callable[[int], Plan]:
    """What a seed means where a defect takes many seeds: a kept plan's work and faults, with other times and choices."""
    return lambda seed: replace(MACHINES[why], seed=seed)
