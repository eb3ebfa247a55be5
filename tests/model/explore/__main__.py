"""`python -m tests.model.explore [words]`: search scopes to their end, and hold the search to its floor."""

import argparse
import sys
import time
from functools import partial
from typing import Final

from tests.model.explore.kinds import explorer_of
from tests.model.explore.scope import Scope
from tests.model.explore.scopes import ALL, DEFAULT, HOURS, LOGS_HOURS
from tests.model.explore.search import FOREVER, Result
from tests.support.spread import CORES, interruptible, progress, spread

FLOOR: Final = 20_000
"""Transitions a second of a core, of a ledger's scopes: below it an hour does not reach two million
states. A log's scopes are small, and their machines large."""

FLOOR_FROM_S: Final = 1.0
"""Of a core's time: what takes less than that says nothing about speed."""


def search(index: int, minutes: float) -> tuple[Result, float, float]:
    """The scope of this number, searched for so long at most; how long that took, and how long of it
    on a core.
    """
    began, worked = time.perf_counter(), time.process_time()
    scope = ALL[index]
    result = explorer_of(scope).run(time.monotonic() + 60 * minutes)
    return result, time.perf_counter() - began, time.process_time() - worked


def notify(result: Result, took: float) -> None:
    """One scope's line, and the story of what it found."""
    print(
        f"{result.scope.name}: {'complete' if result.is_complete else 'NOT complete'},"
        f" depth {result.depth}, {result.states} states, {result.transitions} transitions,"
        f" {took:.1f} s, {result.transitions / took:.0f}/s"
        + (f", of {result.namings} namings one" if result.namings > 1 else ""),
        flush=True,
    )
    if result.violation is not None:
        print(f"    {result.violation}")
        print("\n".join(f"    {line}" for line in result.story))


def parsed() -> argparse.Namespace:
    names = "\n".join(
        f"  {scope.name}{'  (hours)' if scope in (*HOURS, *LOGS_HOURS) else ''}" for scope in ALL
    )
    parser = argparse.ArgumentParser(
        prog="python -m tests.model.explore",
        description="Search small worlds of the real machines to their end.",
        epilog=f"scopes:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words",
        nargs="*",
        help="scopes whose name contains them; `all`: every one; none: those of a minute or less each",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=FOREVER,
        help="after these a scope is given up (default: never)",
    )
    return parser.parse_args()


def main() -> int:
    asked = parsed()
    words = " ".join(asked.words)
    chosen = [scope for scope in ALL if words == "all" or words in scope.name]
    if not words:
        chosen = list(DEFAULT)
    if not chosen:
        names = "\n".join(scope.name for scope in ALL)
        raise SystemExit(f"no scope is named {words!r}; there are:\n{names}")
    # The long ones first, so that no core is left with one of them at the end.
    numbers = sorted((ALL.index(scope) for scope in chosen), reverse=True)
    states = transitions = violations = complete = done = 0
    worked, fast = 0.0, 0
    with interruptible() as end, progress("scopes", len(numbers)) as bar:
        for result, took, core_s in spread(
            partial(search, minutes=asked.minutes), numbers, jobs=min(CORES, len(numbers))
        ):
            notify(result, took)
            states += result.states
            transitions += result.transitions
            complete += result.is_complete
            violations += result.violation is not None
            if isinstance(result.scope, Scope):
                worked += core_s
                fast += result.transitions
            done += 1
            bar.update(completed=done)
    is_slow = worked >= FLOOR_FROM_S and fast < FLOOR * worked
    if worked >= FLOOR_FROM_S:
        word = "BELOW" if is_slow else "above"
        print(f"{fast / worked:.0f} transitions a second of a core, {word} {FLOOR}")
    print(
        f"explore: {complete} scopes complete, {states} states, {transitions} transitions,"
        f" {violations} violations{end.word}"
    )
    return end.status(is_right=not (violations or complete < done or is_slow))


if __name__ == "__main__":
    sys.exit(main())
