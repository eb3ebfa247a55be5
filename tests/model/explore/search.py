"""Breadth-first search from one state to all that follow, with the way to the first violation."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tests.model.explore.parts import Broken
from tests.model.explore.scope import AnyScope

FOREVER: Final = math.inf


@dataclass(slots=True)
class Result:
    """How a search ended. `story` leads to the violation."""

    scope: AnyScope
    states: int
    transitions: int
    depth: int
    is_complete: bool
    violation: str | None = None
    story: tuple[str, ...] = ()
    namings: int = 1
    """How many namings were taken for one."""


class Space(NamedTuple):
    """A graph of states, each equal to itself only."""

    start: Any
    following: Callable[[Any], Iterable[tuple[Any, Any]]]
    """(label, state or Broken) of all that can happen at a state."""
    number: Callable[[Any], int] = hash
    """Equal for equal states. Only numbers are kept: of 14 million states, two have the same one with
    a chance of 1e-5."""
    canonical: Callable[[Any], Any] | None = None
    """The state that stands for all that differ in names."""
    notify: Callable[[Any], str] = str
    """A label as text."""


def search(scope: AnyScope, space: Space, until_s: float = FOREVER) -> Result:
    """Search to the end, to the first violation, to the scope's limit, or until the monotonic clock
    shows `until_s`.
    """
    number, canonical, following = space.number, space.canonical, space.following
    first = number(space.start)
    seen = {first: first}
    frontier = [space.start]
    transitions = depth = 0
    while frontier and len(seen) <= scope.states_max:
        depth += 1
        coming = []
        for state in frontier:
            came = None
            for _, found in following(state):
                transitions += 1
                if isinstance(found, Broken):
                    story = _story(space, seen, number(state), str(found))
                    return Result(scope, len(seen), transitions, depth, False, str(found), story)
                after = found if canonical is None else canonical(found)
                reached = number(after)
                if reached not in seen:
                    if came is None:
                        came = number(state)
                    seen[reached] = came
                    coming.append(after)
            if time.monotonic() > until_s:
                return Result(scope, len(seen), transitions, depth, False)
        frontier = coming
    return Result(scope, len(seen), transitions, depth, not frontier)


def _story(space: Space, seen: dict[int, int], state: int, end: str) -> tuple[str, ...]:
    """What led to a state and to `end`, replayed from the start under one naming. Empty where the
    replay comes to something else.
    """
    way = [state]
    while seen[way[-1]] != way[-1]:
        way.append(seen[way[-1]])
    way.reverse()
    lines: list[str] = []
    now = space.start
    for wanted in way[1:]:
        for label, after in space.following(now):
            if isinstance(after, Broken):
                continue
            same = after if space.canonical is None else space.canonical(after)
            if space.number(same) == wanted:
                lines.append(space.notify(label))
                now = after
                break
        else:
            return ()
    for label, after in space.following(now):
        if isinstance(after, Broken) and str(after)[:3] == end[:3]:
            return (*lines, space.notify(label), str(after))
    return ()
