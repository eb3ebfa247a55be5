"""`python -m tests.sim --seeds N --seed S`: a campaign of seeds, or one seed as a story."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.sim.run import Outcome, run_plan, run_seed, shrink
from tests.support.spread import CORES, progress, spread

CHUNK = 20
"""Seeds that a process takes at a time: a second's work or less."""


@dataclass(slots=True)
class Tally:
    """What some seeds came to. Without the outcomes themselves: there may be a million."""

    seeds: int = 0
    messages: int = 0
    virtual_us: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    broken: list[Outcome] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        self.seeds += other.seeds
        self.messages += other.messages
        self.virtual_us += other.virtual_us
        self.ends += other.ends
        self.broken += other.broken


def simulate(seeds: range) -> Tally:
    """Each of these seeds."""
    tally = Tally()
    for seed in seeds:
        outcome = run_seed(seed)
        tally.seeds += 1
        tally.messages += outcome.messages
        tally.virtual_us += outcome.virtual_us
        tally.ends[outcome.ended.partition(" ")[0]] += 1
        if outcome.violation is not None:
            tally.broken.append(outcome)
    return tally


def chunks(first: int, count: int) -> Iterator[range]:
    """The seeds, a chunk at a time."""
    end = first + count
    for start in range(first, end, CHUNK):
        yield range(start, min(start + CHUNK, end))


def tell(outcome: Outcome, lines: int) -> None:
    """A broken seed: how to run it again, and its story as short as it gets."""
    small = shrink(outcome)
    seed = outcome.plan.seed
    print(f"seed {seed}: {outcome.violation}")
    print(f"  again: make sim SEED={seed} SEEDS=1")
    print(f"  {small.plan}")
    print("  shrunk:", small.violation)
    for line in small.story[-lines:]:
        print("   ", line)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--jobs", type=int, default=CORES, help="processes")
    parser.add_argument("--failures", type=int, default=1, help="end after so many")
    parser.add_argument("--story", type=int, default=200, help="lines of a failure's story")
    asked = parser.parse_args()
    began = time.perf_counter()
    total = Tally()
    with progress() as bar:
        task = bar.add_task("seeds", total=asked.seeds)
        jobs = min(asked.jobs, -(-asked.seeds // CHUNK))
        for tally in spread(simulate, chunks(asked.seed, asked.seeds), jobs=jobs):
            total.add(tally)
            bar.update(task, completed=total.seeds)
            if len(total.broken) >= asked.failures:
                break
    took = time.perf_counter() - began
    for outcome in total.broken[: asked.failures]:
        tell(outcome, asked.story)
    if asked.seeds == 1 and not total.broken:
        print("\n".join(run_plan(run_seed(asked.seed).plan, is_told=True).story))
    print(
        f"virtual time {total.virtual_us / 1e6 / 3600:.1f} h in {took:.0f} s"
        f" ({total.virtual_us / 1e6 / took:.0f} : 1), {total.messages} messages,"
        f" {dict(sorted(total.ends.items()))}, {jobs} processes"
    )
    print(
        f"sim: {total.seeds} seeds, {total.messages / took:.0f} messages/s,"
        f" {len(total.broken)} violations"
    )
    return 1 if total.broken else 0


if __name__ == "__main__":
    sys.exit(main())
