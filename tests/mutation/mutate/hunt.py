"""One mutant after another: put into a forked child, and run against what reaches it."""

import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tests.mutation.mutate import detectors, live
from tests.mutation.mutate.child import Child
from tests.mutation.mutate.detectors import DETECTORS
from tests.mutation.mutate.places import Place
from tests.mutation.mutate.reach import Reach
from tests.mutation.mutate.suite import Suite

FOUND: Final = "found"
UNNOTICED: Final = "unnoticed"
UNREACHED: Final = "unreached"
EQUIVALENT: Final = "equivalent"
UNFIT: Final = "unfit"

SEARCHES_FROM_S: Final = 5.0
"""Of a mutant's budget. With less, only tests are run: a first look, which finds nine of ten."""

_SLOWER: Final = 10.0
"""How many times as long as it took when it was recorded a test may take, and a little time beside it."""
_GRACE_CPU_S: Final = 5.0
_GRACE_WALL_S: Final = 45.0
"""For what waits: longer than the deadlines of most tests, which say better what is missing."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a mutant."""

    name: str
    digest: str
    verdict: str
    line: int
    by: str = ""
    """The test that failed and what it said; or why the mutant is equivalent or does not fit."""
    tests: int = 0
    """How many were run."""
    left: int = 0
    """How many more reach it: the budget of a mutant was over."""
    seconds: float = 0.0

    def line_of_json(self) -> dict[str, Any]:
        """For the report."""
        return asdict(self)


class Hunter:
    """Knows the tests and what found earlier mutants: what found one may find its neighbour."""

    def __init__(self, suite: Suite, reach: Reach, *, seconds: float) -> None:
        self._suite = suite
        self._reach = reach
        self._seconds = seconds
        self._functions = live.Functions()
        self._killers: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def hunt(self, place: Place) -> Verdict:
        """One mutant, to its verdict."""
        began = time.monotonic()
        chosen, left = self._chosen(place)

        def made(verdict: str, by: str = "", tests: int = 0) -> Verdict:
            took = round(time.monotonic() - began, 2)
            return Verdict(
                place.name, place.digest, verdict, place.first_line, by, tests, left, took
            )  # fmt: skip

        if not chosen:
            return made(UNREACHED)
        child = Child(lambda notify: self._try(place, chosen, notify))
        running, count = "", 0
        found = None
        for reported in child.reported():
            if "unfit" in reported:
                found = made(UNFIT, reported["unfit"])
            elif "runs" in reported:
                running, count = reported["runs"], count + 1
                seconds = self._seconds_of(running)
                child.watch.again(
                    _GRACE_CPU_S + _SLOWER * seconds,
                    _GRACE_WALL_S + 3 * _SLOWER * seconds,
                    child.used_s(),
                )
            elif "failed" in reported:
                found = made(FOUND, f"{running}: {reported['failed']}", count)
            elif "broken" in reported:
                # What breaks before a test runs says nothing about the tests.
                verdict = FOUND if running else UNFIT
                found = made(verdict, f"{running}: ended by {reported['broken']}", count)
            elif "done" in reported:
                found = made(UNNOTICED, "", count)
            if found is not None:
                break
        child.stop()
        self._suite.clean_up()
        if found is None:
            word = "does not end" if child.is_overdue else "the process died"
            found = made(FOUND if running else UNFIT, f"{running}: {word}", count)
        if found.verdict == FOUND and running:
            self._killers[place.path][running] += 1
        return found

    def _try(self, place: Place, chosen: list[str], notify: Callable[[Any], None]) -> None:
        """In the child."""
        try:
            self._functions.put(place)
        except live.Unfit as error:
            notify({"unfit": str(error)})
            return
        self._suite.be_ready()
        tests = [name for name in chosen if name not in DETECTORS]
        then = dict(itertools.pairwise(tests))
        for name in chosen:
            notify({"runs": name})
            if name in DETECTORS:
                DETECTORS[name].run()
                continue
            is_right, said = self._suite.trial(name, then.get(name))
            if not is_right:
                notify({"failed": said})
                return
        notify({"done": True})

    def _seconds_of(self, name: str) -> float:
        if name in DETECTORS:
            return DETECTORS[name].seconds
        return self._reach.tests[name]

    def _chosen(self, place: Place) -> tuple[list[str], int]:
        """What to run, likely finders first, then the fast ones, until the budget is over."""
        names = self._reach.reaching(place.path, place.first_line, place.last_line)
        if not names:
            return [], 0
        tests = set(names)
        if self._seconds >= SEARCHES_FROM_S:
            names += [each.name for each in detectors.of(place.path)]
        killers = self._killers[place.path]
        names.sort(key=lambda name: self._seconds_of(name) / (1 + 5 * killers.get(name, 0)))
        chosen: list[str] = []
        seconds = 0.0
        for name in names:
            cost = self._seconds_of(name) if name in tests else 0.0  # a search is run in any case
            if chosen and seconds + cost > self._seconds:
                continue
            chosen.append(name)
            seconds += cost
        return chosen, len(names) - len(chosen)


def root() -> Path:
    """Of the repository."""
    return Path(__file__).resolve().parents[3]
