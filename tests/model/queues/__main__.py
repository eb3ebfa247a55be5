"""`python -m tests.model.queues --seeds N --seed S`: histories of queues, each judged."""

import argparse
import sys
import time
from typing import Final

from tests.model.queues.simulation import run
from tests.support.spread import count

_SAID_EVERY_S: Final = 60.0


def main() -> int:
    """Run the seeds. The first violation ends the program, with its traceback."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=count, default=1000, help="number of seeds")
    asked = parser.parse_args()
    said_s = time.monotonic()
    for done, seed in enumerate(range(asked.seed, asked.seed + asked.seeds)):
        if time.monotonic() - said_s > _SAID_EVERY_S:
            said_s = time.monotonic()
            print(f"{done} of {asked.seeds} seeds, no violation", flush=True)
        try:
            run(seed)
        except AssertionError:
            print(f"seed {seed}", flush=True)
            raise
    print(f"{asked.seeds} seeds from {asked.seed} on, 0 violations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
