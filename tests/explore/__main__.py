"""`python -m tests.explore [scope…]`: search scopes to their end. Without a name: the quick ones;
`all`: every one.
"""

import sys
import time

from tests.explore.explorer import Explorer
from tests.explore.scopes import ALL, QUICK


def main() -> int:
    names = sys.argv[1:]
    scopes = list(QUICK)
    if names == ["all"]:
        scopes = list(ALL.values())
    elif names:
        scopes = [ALL[name] for name in names]
    states = transitions = violations = complete = 0
    for scope in scopes:
        began = time.perf_counter()
        result = Explorer(scope).run()
        took = time.perf_counter() - began
        states += result.states
        transitions += result.transitions
        complete += result.is_complete
        print(
            f"{scope.name}: {'complete' if result.is_complete else 'NOT complete'},"
            f" depth {result.depth}, {result.states} states, {result.transitions} transitions,"
            f" {took:.1f} s",
            flush=True,
        )
        if result.violation is not None:
            violations += 1
            print("\n".join(f"    {line}" for line in result.story))
    print(
        f"explore: {complete} scopes complete, {states} states, {transitions} transitions,"
        f" {violations} violations"
    )
    return 1 if violations or complete < len(scopes) else 0


if __name__ == "__main__":
    sys.exit(main())
