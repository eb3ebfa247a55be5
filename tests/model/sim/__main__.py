"""`python -m tests.model.sim --seeds N --seed S`: a campaign of seeds, or one seed as a story.

`--of machines` (the default) are the machines of the protocol, `--of services` whole services.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import orjson

from tests.model.sim import run as machines
from tests.model.sim.services import run as services
from tests.support.spread import CORES, count, interruptible, progress, spread

CHUNKS = {"machines": 20, "services": 2}
"""Seeds that a process takes at a time: a second's work or less."""

Outcome = machines.Outcome | services.Outcome


@dataclass(slots=True)
class Tally:
    """What some seeds came to. Without the outcomes themselves: there may be a million."""

    seeds: int = 0
    messages: int = 0
    virtual_us: int = 0
    backs: int = 0
    waited: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    broken: list[Outcome] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        self.seeds += other.seeds
        self.messages += other.messages
        self.virtual_us += other.virtual_us
        self.backs += other.backs
        self.waited += other.waited
        self.ends += other.ends
        self.broken += other.broken


def simulate(asked: tuple[str, range]) -> Tally:
    """Each of these seeds."""
    what, seeds = asked
    tally = Tally()
    for seed in seeds:
        outcome: Outcome = (
            services.run_seed(seed) if what == "services" else machines.run_seed(seed)
        )
        tally.seeds += 1
        tally.messages += outcome.messages
        tally.virtual_us += outcome.virtual_us
        tally.ends[outcome.ended] += 1
        if isinstance(outcome, machines.Outcome):
            tally.backs += outcome.backs
            tally.waited += outcome.is_waiting
        if outcome.violation is not None:
            tally.broken.append(outcome)
    return tally


def chunks(what: str, first: int, count: int) -> Iterator[tuple[str, range]]:
    """The seeds, a chunk at a time."""
    end, size = first + count, CHUNKS[what]
    for start in range(first, end, size):
        yield what, range(start, min(start + size, end))


def story_of(outcome: Outcome) -> tuple[str, ...]:
    """All that happens in a seed."""
    if isinstance(outcome, services.Outcome):
        return services.run_plan(outcome.plan, is_reported=True).story
    return machines.run_plan(outcome.plan, is_reported=True).story


def notify(what: str, outcome: Outcome, lines: int) -> None:
    """A broken seed: how to run it again, and its story as short as it gets."""
    small: Outcome = (
        services.shrink(outcome)
        if isinstance(outcome, services.Outcome)
        else machines.shrink(outcome)
    )
    seed = outcome.plan.seed
    print(f"seed {seed}: {outcome.violation}")
    print(f"  again: make sim OF={what} SEED={seed} SEEDS=1")
    print(f"  {orjson.dumps(small.plan).decode()}")
    print("  shrunk:", small.violation)
    for line in small.story[-lines:]:
        print("   ", line)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model.sim")
    parser.add_argument("--of", choices=sorted(CHUNKS), default="machines")
    parser.add_argument("--seeds", type=count, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--jobs", type=int, default=CORES, help="processes")
    parser.add_argument("--failures", type=int, default=1, help="end after so many")
    parser.add_argument("--story", type=int, default=200, help="lines of a failure's story")
    asked = parser.parse_args()
    began = time.perf_counter()
    total = Tally()
    jobs = min(asked.jobs, -(-asked.seeds // CHUNKS[asked.of]))
    with interruptible() as end, progress("seeds", asked.seeds) as bar:
        for tally in spread(simulate, chunks(asked.of, asked.seed, asked.seeds), jobs=jobs):
            total.add(tally)
            bar.update(completed=total.seeds)
            if len(total.broken) >= asked.failures:
                break
    took = time.perf_counter() - began
    for outcome in total.broken[: asked.failures]:
        notify(asked.of, outcome, asked.story)
    if asked.seeds == 1 and total.seeds and not total.broken:
        run = services.run_seed if asked.of == "services" else machines.run_seed
        print("\n".join(story_of(run(asked.seed))))
    print(
        f"virtual time {total.virtual_us / 1e6 / 3600:.1f} h in {took:.0f} s"
        f" ({total.virtual_us / 1e6 / took:.0f} : 1), {total.messages} messages,"
        f" {dict(sorted(total.ends.items()))}, {jobs} processes"
    )
    if asked.of == "machines":
        print(f"the store went back {total.backs} times, {total.waited} seeds wait for an operator")
    print(
        f"sim: {total.seeds} seeds, {total.messages / took:.0f} messages/s,"
        f" {len(total.broken)} violations{end.word}"
    )
    return end.status(is_right=not total.broken)


if __name__ == "__main__":
    sys.exit(main())
