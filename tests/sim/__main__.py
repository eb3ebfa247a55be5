"""`python -m tests.sim --seeds N --seed S`: a campaign of seeds, or one seed as a story."""

import argparse
import sys
import time
from collections import Counter

from tests.sim.run import run_plan, run_seed, shrink


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--failures", type=int, default=1, help="end after so many")
    parser.add_argument("--story", type=int, default=200, help="lines of a failure's story")
    asked = parser.parse_args()
    began = time.perf_counter()
    messages = virtual_us = violations = 0
    ends: Counter[str] = Counter()
    seeds = 0
    for seed in range(asked.seed, asked.seed + asked.seeds):
        seeds += 1
        outcome = run_seed(seed)
        messages += outcome.messages
        virtual_us += outcome.virtual_us
        ends[outcome.ended.partition(" ")[0]] += 1
        if outcome.violation is None:
            if asked.seeds == 1:
                print("\n".join(run_plan(outcome.plan, is_told=True).story))
            continue
        violations += 1
        small = shrink(outcome)
        print(f"seed {seed}: {outcome.violation}")
        print(f"  again: make sim SEED={seed} SEEDS=1")
        print(f"  {small.plan}")
        print("  shrunk:", small.violation)
        for line in small.story[-asked.story :]:
            print("   ", line)
        if violations >= asked.failures:
            break
    took = time.perf_counter() - began
    print(
        f"virtual time {virtual_us / 1e6 / 3600:.1f} h in {took:.0f} s"
        f" ({virtual_us / 1e6 / took:.0f} : 1), {messages} messages, {dict(ends)}"
    )
    print(f"sim: {seeds} seeds, {messages / took:.0f} messages/s, {violations} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
