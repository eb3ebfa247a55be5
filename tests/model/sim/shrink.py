"""A plan that breaks a rule is made smaller, as long as some run of it breaks the same rule.

What is left out changes all dice that are thrown after it, so that a smaller plan is tried with several
of them: with one try nearly nothing can be left out.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, TypeVar

from tests.model.sim.plan import Plan
from tests.model.sim.services.plan import ServicePlan

AnyPlan = TypeVar("AnyPlan", Plan, ServicePlan)

_OTHER_DICE: Final = 1_000_000_007 * 2
"""Added to a seed: far from all that anybody asks for, and even, as what a seed asks for may hang on that."""


def shrunk(
    plan: AnyPlan,
    is_broken: Callable[[AnyPlan], bool],
    *,
    lists: tuple[str, ...],
    quiet: tuple[dict[str, Any], ...],
    dice: int,
) -> AnyPlan:
    """The plan with as little in these lists as it takes, and as few kinds of noise.

    `is_broken` runs a plan; `dice`: how many runs a smaller plan gets.
    """
    first_seed = plan.seed

    def smaller(**change: Any) -> AnyPlan | None:
        for number in range(dice):
            other: AnyPlan = replace(plan, seed=first_seed + number * _OTHER_DICE, **change)
            if is_broken(other):
                return other
        return None

    for change in quiet:
        if any(getattr(plan, name) != value for name, value in change.items()):
            plan = smaller(**change) or plan
    for name in lists:
        size: int = len(getattr(plan, name))
        while size:
            at: int = 0
            while at < len(getattr(plan, name)):
                kept: tuple[Any, ...] = getattr(plan, name)
                fewer: AnyPlan | None = smaller(**{name: (*kept[:at], *kept[at + size :])})
                if fewer is None:
                    at += size
                else:
                    plan = fewer
            size //= 2
    return plan
