"""Searches that run beside the tests: seeds of the simulations, in small shares.

They take every line of a machine into account and judge it by the invariants, which no single test does.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Detector:
    """A search that raises where the code is wrong, and about how long it takes where it is right."""

    name: str
    folders: tuple[str, ...]
    """Whose mutants it is run against."""
    seconds: float
    run: Callable[[], None]


def _seeds(module: str, first: int, last: int) -> Callable[[], None]:
    """A search by seeds. It imports what it needs when it is made ready: most runs need only one."""

    def search() -> None:
        run = importlib.import_module(module).run_seed
        for seed in range(first, last + 1):
            violation = run(seed).violation
            assert violation is None, f"seed {seed}: {violation}"

    return search


_PROTOCOL: Final = "shared/quorumlog/protocol"
_BOOKIE: Final = "services/bookie"
_MACHINES: Final = "tests.model.sim.run"
_SERVICES: Final = "tests.model.sim.services.run"

_LOGS: Final = "tests.model.logs.simulation"


def _shares(
    what: str, module: str, folders: tuple[str, ...], *, share: int, shares: int, seconds: float
) -> list[Detector]:
    """Seeds from 1 on, in shares: the first one that sees the mutant ends it."""
    return [
        Detector(
            f"{what} {first}-{first + share - 1}",
            folders,
            seconds,
            _seeds(module, first, first + share - 1),
        )
        for first in range(1, share * shares, share)
    ]


DETECTORS: Final = {
    detector.name: detector
    for detector in (
        *_shares("machines", _MACHINES, (_PROTOCOL,), share=25, shares=4, seconds=0.4),
        *_shares("logs", _LOGS, (f"{_PROTOCOL}/log",), share=10, shares=4, seconds=1.0),
        *_shares("services", _SERVICES, (_PROTOCOL, _BOOKIE), share=5, shares=2, seconds=1.5),
    )
}


def of(path: str) -> list[Detector]:
    """Those that may see a mutant of this file. What they run is imported now, in the parent."""
    found = [each for each in DETECTORS.values() if path.startswith(each.folders)]
    for module in (_MACHINES, _LOGS, _SERVICES) if found else ():
        importlib.import_module(module)
    return found
