"""`python -m tests.logs --seeds N --seed S`: the log simulation, many seeds, or one as a story."""

import argparse
import sys
import time

from tests.logs.simulation import run_seed
from tests.support.spread import CORES, spread


def main() -> int:
    """Many seeds, or one as a story."""
    parser = argparse.ArgumentParser(prog="python -m tests.logs")
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    asked = parser.parse_args()
    began = time.perf_counter()
    broken = events = 0
    virtual_s = 0.0
    seeds = range(asked.seed, asked.seed + asked.seeds)
    for outcome in spread(run_seed, seeds, jobs=min(CORES, asked.seeds)):
        events += outcome.events
        virtual_s += outcome.virtual_s
        if asked.seeds == 1:
            print("\n".join(outcome.story))
            print(f"digest {outcome.digest}")
        if outcome.violation is not None:
            broken += 1
            print(f"seed {outcome.seed}: {outcome.violation}", flush=True)
    took = time.perf_counter() - began
    print(
        f"log-sim: {asked.seeds} seeds, {events} events, {virtual_s / 3600:.1f} h in {took:.0f} s,"
        f" {broken} violations"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
