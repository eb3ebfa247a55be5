"""`python -m tests.mutation.mutants [words]`: each guard taken out must be seen within a minute."""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.model.logs.simulation import run_seed as run_log_seed
from tests.model.scenarios.script import FOLDER, goes_wrong, scripts_of
from tests.model.sim.run import run_seed
from tests.model.sim.services.run import run_seed as run_service_seed
from tests.mutation.mutants.ends import END_MUTANTS
from tests.mutation.mutants.hunt import Find, Guard, Mutant, by_search, by_swarm
from tests.mutation.mutants.idle import IDLE, IDLE_MUTANTS
from tests.mutation.mutants.list import MUTANTS
from tests.mutation.mutants.logs import LOG_MUTANTS, by_logs
from tests.mutation.mutants.positions import POSITION_MUTANTS, POSITIONS
from tests.mutation.mutants.queues import QUEUE_MUTANTS, QUEUES
from tests.mutation.mutants.subscriptions import SUBSCRIPTION_MUTANTS, SUBSCRIPTIONS
from tests.support.spread import interruptible, progress, spread
from tests.unit.bookie.mutants import STORAGE_MUTANTS, is_found

ALARM_SEEDS = 500
LOG_ALARM_SEEDS = 100
SERVICE_ALARM_SEEDS = 60

HISTORIES = (
    (POSITION_MUTANTS, POSITIONS),
    (QUEUE_MUTANTS, QUEUES),
    (SUBSCRIPTION_MUTANTS, SUBSCRIPTIONS),
    (IDLE_MUTANTS, IDLE),
)
"""Mutants, and the simulation that must see them."""

ALL = (
    *(*MUTANTS, *END_MUTANTS, *LOG_MUTANTS),
    *(mutant for mutants, _ in HISTORIES for mutant in mutants),
)


@dataclass(frozen=True, slots=True)
class Hunt:
    """How the hunt for one mutant ended, a line for each technique that found it."""

    mutant: str
    lines: tuple[str, ...]
    scenarios: tuple[str, ...] = ()
    """Those that go otherwise: they are written for it, so that they count for nothing."""


def hunt(index: int) -> Hunt:
    """Hunt the mutant of this number by its techniques. A number travels, a patch can't."""
    mutant = ALL[index]
    lines = []
    for how in (by_search, _seeds_for(mutant)):
        began = time.perf_counter()
        find = how(mutant)
        if find is not None:
            took = time.perf_counter() - began
            lines.append(f"{find.by} in {took:.1f} s ({find.effort}): {find.violation[:110]}")
    return Hunt(mutant.name, tuple(lines), tuple(replayed(mutant)))


def _seeds_for(mutant: Mutant) -> Callable[[Mutant], Find | None]:
    if mutant in END_MUTANTS:
        return lambda _mutant: None  # a search sees each
    for mutants, histories in HISTORIES:
        if mutant in mutants:
            return histories.hunt
    return by_logs if mutant in LOG_MUTANTS else by_swarm


def replayed(mutant: Mutant) -> list[str]:
    """The scenarios that name the mutant and go otherwise without its guard, a line for each."""
    return [
        f"scenario {path.relative_to(FOLDER).with_suffix('')}"
        for path in scripts_of(mutant)
        if goes_wrong(path, mutant)
    ]


def hunt_storage(index: int) -> Hunt:
    """Hunt a mutant of the bookie's files: by crashes, changed files, or a scenario."""
    mutant = STORAGE_MUTANTS[index]
    began = time.perf_counter()
    if not is_found(mutant):
        return Hunt(mutant.name, ())
    took = time.perf_counter() - began
    return Hunt(mutant.name, (f"{mutant.claim.__name__} in {took:.1f} s",))


def is_alarm(seed: int) -> bool:
    """Whether a seed finds something in the code as it ships."""
    return run_seed(seed).violation is not None


def is_log_alarm(seed: int) -> bool:
    """Whether a seed of the log simulation does."""
    return run_log_seed(seed).violation is not None


def is_service_alarm(seed: int) -> bool:
    """Whether a seed of whole services does."""
    return run_service_seed(seed).violation is not None


def is_chosen(mutant: Mutant | Guard, words: list[str]) -> bool:
    """Whether one of the words, or no word at all, asks for it."""
    return not words or any(word in mutant.name or word in mutant.rule for word in words)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation.mutants",
        description="Take guards of the shipped code out, one by one; searches must miss each.",
    )
    parser.add_argument(
        "words", nargs="*", help="mutants whose name or rule holds one of them, as X7; none: all"
    )
    return parser.parse_args()


def main() -> int:
    words = parsed().words
    chosen = [index for index, mutant in enumerate(ALL) if is_chosen(mutant, words)]
    hunted = [index for index in chosen if not ALL[index].is_equivalent]
    storage = [n for n, mutant in enumerate(STORAGE_MUTANTS) if is_chosen(mutant, words)]
    rules = {mutant.name: mutant.rule for mutant in ALL}
    rules |= {mutant.name: mutant.rule for mutant in STORAGE_MUTANTS}
    if not chosen and not storage:
        raise SystemExit(f"no mutant's name or rule holds any of {words}")
    count, found, done, alarms = len(hunted) + len(storage), 0, 0, 0
    with interruptible() as end:
        with progress("mutants", count) as bar:
            for ended in itertools.chain(spread(hunt, hunted), spread(hunt_storage, storage)):
                found += bool(ended.lines)
                word = "found" if ended.lines else "ALIVE"
                print(f"{word}  {rules[ended.mutant]}: {ended.mutant}", flush=True)
                for line in (*ended.lines, *ended.scenarios):
                    print(f"         {line}")
                done += 1
                bar.update(completed=done)
        for mutant in (ALL[index] for index in chosen if ALL[index].is_equivalent):
            print(f"equivalent  {mutant.rule}: {mutant.name}: {mutant.is_equivalent}")
            for line in replayed(mutant):
                print(f"         {line}")
        alarms = raised()
    print(f"mutants: {found} of {count} found, {alarms} alarms{end.word}")
    return end.status(is_right=found == done and not alarms)


def raised() -> int:
    """How many alarms there are with all guards in place."""
    kinds = (
        (is_alarm, ALARM_SEEDS),
        (is_log_alarm, LOG_ALARM_SEEDS),
        (is_service_alarm, SERVICE_ALARM_SEEDS),
    )
    alarms = done = 0
    with progress("seeds with all guards", sum(seeds for _, seeds in kinds)) as bar:
        for is_one, seeds in kinds:
            for alarm in spread(is_one, range(1, seeds + 1)):
                alarms += alarm
                done += 1
                bar.update(completed=done)
    return alarms


if __name__ == "__main__":
    sys.exit(main())
