"""`python -m tests.explore [words]`: search scopes to their end. Without words: the quick ones;
`all`: every one; else those whose name holds the words.
"""

import sys
import time

from tests.explore.explorer import Explorer
from tests.explore.scopes import ALL, QUICK


def main() -> int:
    words = " ".join(sys.argv[1:])
    scopes = [scope for scope in ALL if words == "all" or words in scope.name] if words else QUICK
    if not scopes:
        names = "\n".join(scope.name for scope in ALL)
        raise SystemExit(f"no scope is named {words!r}; there are:\n{names}")
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
