"""A mutant is the shipped code with one guard taken out; a hunt looks for the harm that it does.

No code is planted to fail: each patch replaces one method by one that does not guard. If neither
the explorer nor the swarm sees a mutant, the checks are too weak or the guard is not needed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final

from tests.model.explore.kinds import explorer_of
from tests.model.explore.scope import AnyScope
from tests.model.sim import run as machines
from tests.model.sim.plan import Plan, draw
from tests.model.sim.services import run as services
from tests.model.sim.services.plan import ServicePlan

SEEDS: Final = range(1, 4_001)
"""Tried against a mutant: about 40 s."""

SERVICE_SEEDS: Final = range(1, 201)
"""The same of whole services."""


BROKEN: Final = ("AttributeError", "TypeError", "NameError", "UnboundLocalError")
"""A patch that no longer fits the code shows itself so: that is no find."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One attribute of a class or module, and what stands in for it. `make` gets the original."""

    owner: Any
    name: str
    make: Callable[[Any], Any]

    def mutant(self, name: str, rule: str, scope: AnyScope | None = None, **more: Any) -> "Mutant":
        """A mutant that is this patch alone."""
        return Mutant(name, rule, (self,), scope, **more)

    def guard(self, name: str, rule: str, claim: Callable[..., Any]) -> "Guard":
        """A guard that this patch alone takes out."""
        return Guard(name, rule, (self,), claim)


def stand_in(method: Callable[..., Any]) -> Callable[[Any], Any]:
    """What a patch puts in place of a method, from a function that gets the original first."""

    def make(original: Any) -> Any:
        def called(*args: Any, **named: Any) -> Any:
            return method(original, *args, **named)

        return called

    return wraps(method)(make)


def swap(owner: Any, name: str, value: Any) -> Patch:
    """A patch that has no use for the original."""
    return Patch(owner, name, lambda _original: value)


@dataclass(frozen=True, slots=True)
class Guard:
    """A guard that is taken out, and the claim that must then fail."""

    name: str
    rule: str
    patches: tuple[Patch, ...]
    claim: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Mutant:
    """A guard that is taken out. `scope` is a search that shows it, where one does."""

    name: str
    rule: str
    patches: tuple[Patch, ...]
    scope: AnyScope | None = None
    draw: Callable[[int], Plan] = draw
    """What a seed means; plans of a kind that shows it sooner, where it takes much to come about."""
    draw_services: Callable[[int], ServicePlan] | None = None
    """What a seed of whole services means, where only they show it."""
    is_equivalent: str = ""
    """Why nothing can show it in these worlds; then it is not hunted."""


@dataclass(frozen=True, slots=True)
class Find:
    """How a mutant was found."""

    by: str
    violation: str
    effort: str


@contextmanager
def applied(mutant: Mutant | Guard) -> Iterator[None]:
    """The code without the guard, until the end of the block."""
    kept = []
    try:
        for patch in mutant.patches:
            raw = patch.owner.__dict__[patch.name]
            kept.append((patch, raw))
            setattr(patch.owner, patch.name, patch.make(raw))
        yield
    finally:
        for patch, raw in reversed(kept):
            setattr(patch.owner, patch.name, raw)


def _judged(mutant: Mutant, seed: int) -> str | None:
    if mutant.draw_services:
        return services.run_plan(mutant.draw_services(seed)).violation
    return machines.run_plan(mutant.draw(seed)).violation


def by_swarm(mutant: Mutant, seeds: range | None = None) -> Find | None:
    """Seeds against a mutant until one shows it: of machines, or of whole services."""
    is_whole = mutant.draw_services is not None
    with applied(mutant):
        for count, seed in enumerate(seeds or (SERVICE_SEEDS if is_whole else SEEDS), 1):
            found = _judged(mutant, seed)
            if found is not None:
                assert not any(name in found.partition("Error")[0] + "Error" for name in BROKEN), (
                    found
                )
                who = "whole services" if is_whole else "swarm"
                return Find(who, found, f"seed {seed}, {count} tried")
    return None


@dataclass(frozen=True, slots=True)
class Histories:
    """A simulation that raises AssertionError at the first violation, and the seeds to try against a mutant."""

    name: str
    run: Callable[[int], object]
    seeds: range

    def hunt(self, mutant: Mutant, seeds: range | None = None) -> Find | None:
        """Try seeds until one shows the mutant."""
        with applied(mutant):
            for count, seed in enumerate(seeds or self.seeds, 1):
                try:
                    self.run(seed)
                except AssertionError as found:
                    said = str(found) or repr(found)
                    return Find(self.name, said, f"seed {seed}, {count} tried")
        return None


def by_search(mutant: Mutant) -> Find | None:
    """The explorer against a mutant."""
    if mutant.scope is None:
        return None
    with applied(mutant):
        result = explorer_of(mutant.scope).run()
    if result.violation is None:
        return None
    return Find(
        "explorer",
        result.violation,
        f"depth {result.depth}, {result.states} states, {mutant.scope.name}",
    )
