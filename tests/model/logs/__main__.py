"""`python -m tests.model.logs --seeds N --seed S`: the log simulation, many seeds, or one as a story."""

import argparse
import sys
import time

from tests.model.logs.simulation import run_seed
from tests.support.spread import CORES, count, interruptible, progress, spread


def main() -> int:
    """Many seeds, or one as a story."""
    parser = argparse.ArgumentParser(prog="python -m tests.model.logs")
    parser.add_argument("--seeds", type=count, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    asked = parser.parse_args()
    began = time.perf_counter()
    broken = events = done = 0
    virtual_s = 0.0
    seeds = range(asked.seed, asked.seed + asked.seeds)
    with interruptible() as end, progress("seeds", asked.seeds) as bar:
        for outcome in spread(run_seed, seeds, jobs=min(CORES, asked.seeds)):
            events += outcome.events
            virtual_s += outcome.virtual_s
            if asked.seeds == 1:
                print("\n".join(outcome.story))
                print(f"digest {outcome.digest}")
            if outcome.violation is not None:
                broken += 1
                print(f"seed {outcome.seed}: {outcome.violation}", flush=True)
            done += 1
            bar.update(completed=done)
    took = time.perf_counter() - began
    print(
        f"log-sim: {done} seeds, {events} events, {virtual_s / 3600:.1f} h in {took:.0f} s,"
        f" {broken} violations{end.word}"
    )
    return end.status(is_right=not broken)


if __name__ == "__main__":
    sys.exit(main())
