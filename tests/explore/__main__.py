"""`python -m tests.explore [words]`: search scopes to their end. Without words: the quick ones and
those of a minute or so; `all`: every one; else those whose name holds the words.
"""

import sys
import time

from tests.explore.explorer import Explorer, Result
from tests.explore.scopes import ALL, DEFAULT
from tests.support.spread import CORES, progress, spread


def search(index: int) -> tuple[Result, float]:
    """The scope of this number, searched; and how long that took."""
    began = time.perf_counter()
    result = Explorer(ALL[index]).run()
    return result, time.perf_counter() - began


def tell(result: Result, took: float) -> None:
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


def main() -> int:
    words = " ".join(sys.argv[1:])
    chosen = [scope for scope in ALL if words == "all" or words in scope.name]
    if not words:
        chosen = list(DEFAULT)
    if not chosen:
        names = "\n".join(scope.name for scope in ALL)
        raise SystemExit(f"no scope is named {words!r}; there are:\n{names}")
    # The long ones first, so that no core is left with one of them at the end.
    numbers = sorted((ALL.index(scope) for scope in chosen), reverse=True)
    states = transitions = violations = complete = 0
    with progress() as bar:
        task = bar.add_task("scopes", total=len(numbers))
        for result, took in spread(search, numbers, jobs=min(CORES, len(numbers))):
            tell(result, took)
            states += result.states
            transitions += result.transitions
            complete += result.is_complete
            violations += result.violation is not None
            bar.advance(task)
    print(
        f"explore: {complete} scopes complete, {states} states, {transitions} transitions,"
        f" {violations} violations"
    )
    return 1 if violations or complete < len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
