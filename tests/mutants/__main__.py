"""`python -m tests.mutants [words]`: each guard taken out must be seen within a minute."""

import sys
import time

from tests.mutants.hunt import by_search, by_swarm
from tests.mutants.list import MUTANTS
from tests.sim.run import run_seed

ALARM_SEEDS = 500


def main() -> int:
    words = sys.argv[1:]
    chosen = [m for m in MUTANTS if not words or any(w in m.name or w in m.rule for w in words)]
    hunted = [m for m in chosen if not m.is_equivalent]
    found = 0
    for mutant in hunted:
        lines = []
        for how in (by_search, by_swarm):
            began = time.perf_counter()
            find = how(mutant)
            if find is not None:
                took = time.perf_counter() - began
                lines.append(f"{find.by} in {took:.1f} s ({find.effort}): {find.violation[:110]}")
        found += bool(lines)
        print(f"{'found' if lines else 'ALIVE'}  {mutant.rule}: {mutant.name}", flush=True)
        for line in lines:
            print(f"         {line}")
    for mutant in chosen:
        if mutant.is_equivalent:
            print(f"equivalent  {mutant.rule}: {mutant.name}: {mutant.is_equivalent}")
    alarms = sum(run_seed(seed).violation is not None for seed in range(1, ALARM_SEEDS + 1))
    print(f"mutants: {found} of {len(hunted)} found, {alarms} alarms")
    return 0 if found == len(hunted) and not alarms else 1


if __name__ == "__main__":
    sys.exit(main())
