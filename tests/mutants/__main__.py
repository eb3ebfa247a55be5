"""`python -m tests.mutants [words]`: each guard taken out must be seen within a minute."""

import itertools
import sys
import time
from dataclasses import dataclass

from tests.bookie.mutants import STORAGE_MUTANTS, StorageMutant
from tests.logs.simulation import run_seed as run_log_seed
from tests.mutants.hunt import Mutant, by_search, by_swarm
from tests.mutants.list import MUTANTS
from tests.mutants.logs import LOG_MUTANTS, by_logs
from tests.sim.run import run_seed
from tests.sim.services.run import run_seed as run_service_seed
from tests.support.spread import progress, spread

ALARM_SEEDS = 500
LOG_ALARM_SEEDS = 100
SERVICE_ALARM_SEEDS = 60

ALL = (*MUTANTS, *LOG_MUTANTS)


@dataclass(frozen=True, slots=True)
class Hunt:
    """How the hunt for one mutant ended, a line for each technique that found it."""

    mutant: str
    lines: tuple[str, ...]


def hunt(index: int) -> Hunt:
    """Hunt the mutant of this number by its techniques. A number travels, a patch can't."""
    mutant = ALL[index]
    lines = []
    for how in (by_search, by_swarm) if index < len(MUTANTS) else (by_logs,):
        began = time.perf_counter()
        find = how(mutant)
        if find is not None:
            took = time.perf_counter() - began
            lines.append(f"{find.by} in {took:.1f} s ({find.effort}): {find.violation[:110]}")
    return Hunt(mutant.name, tuple(lines))


def hunt_storage(index: int) -> Hunt:
    """Hunt a mutant of the bookie's files: by crashes, changed files, or a scenario."""
    mutant = STORAGE_MUTANTS[index]
    began = time.perf_counter()
    if not mutant.is_found():
        return Hunt(mutant.name, ())
    took = time.perf_counter() - began
    return Hunt(mutant.name, (f"{mutant.search.__name__} in {took:.1f} s",))


def is_alarm(seed: int) -> bool:
    """Whether a seed finds something in the code as it ships."""
    return run_seed(seed).violation is not None


def is_log_alarm(seed: int) -> bool:
    """Whether a seed of the log simulation does."""
    return run_log_seed(seed).violation is not None


def is_service_alarm(seed: int) -> bool:
    """Whether a seed of whole services does."""
    return run_service_seed(seed).violation is not None


def is_chosen(mutant: Mutant | StorageMutant, words: list[str]) -> bool:
    """Whether one of the words, or no word at all, asks for it."""
    return not words or any(word in mutant.name or word in mutant.rule for word in words)


def main() -> int:
    words = sys.argv[1:]
    chosen = [index for index, mutant in enumerate(ALL) if is_chosen(mutant, words)]
    hunted = [index for index in chosen if not ALL[index].is_equivalent]
    storage = [n for n, mutant in enumerate(STORAGE_MUTANTS) if is_chosen(mutant, words)]
    rules = {mutant.name: mutant.rule for mutant in (*ALL, *STORAGE_MUTANTS)}
    found = 0
    with progress() as bar:
        task = bar.add_task("mutants", total=len(hunted) + len(storage))
        for end in itertools.chain(spread(hunt, hunted), spread(hunt_storage, storage)):
            found += bool(end.lines)
            word = "found" if end.lines else "ALIVE"
            print(f"{word}  {rules[end.mutant]}: {end.mutant}", flush=True)
            for line in end.lines:
                print(f"         {line}")
            bar.advance(task)
    for index in chosen:
        mutant = ALL[index]
        if mutant.is_equivalent:
            print(f"equivalent  {mutant.rule}: {mutant.name}: {mutant.is_equivalent}")
    alarms = sum(spread(is_alarm, range(1, ALARM_SEEDS + 1)))
    alarms += sum(spread(is_log_alarm, range(1, LOG_ALARM_SEEDS + 1)))
    alarms += sum(spread(is_service_alarm, range(1, SERVICE_ALARM_SEEDS + 1)))
    count = len(hunted) + len(storage)
    print(f"mutants: {found} of {count} found, {alarms} alarms")
    return 0 if found == count and not alarms else 1


if __name__ == "__main__":
    sys.exit(main())
