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
_MACHINES: Final = "tests.sim.run"
_SERVICES: Final = "tests.sim.services.run"

DETECTORS: Final = {
    detector.name: detector
    for detector in (
        *(
            Detector(
                f"machines {first}-{first + 24}", (_PROTOCOL,), 0.4, _seeds(_MACHINES, first, first + 24)
            )
            for first in (1, 26, 51, 76)
        ),
        *(
            Detector(
                f"services {first}-{first + 4}",
                (_PROTOCOL, "services/bookie"),
                1.5,
                _seeds(_SERVICES, first, first + 4),
            )
            for first in (1, 6)
        ),
    )
}


def of(path: str) -> list[Detector]:
    """Those that may see a mutant of this file. What they run is imported now, in the parent."""
    found = [each for each in DETECTORS.values() if path.startswith(each.folders)]
    for module in (_MACHINES, _SERVICES) if found else ():
        importlib.import_module(module)
    return found
