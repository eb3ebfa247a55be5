"""`python -m tests.bookie.crash [SECONDS]`: the store against a dictionary, for as long as you like.

The same search as in `test_store_model.py`, with other seeds: each failure prints the steps that
lead to it.
"""

import sys
import time

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.bookie.test_store_model import StoreAgainstDictionary

EXAMPLES = 20


def main(duration_s: float) -> None:
    """Search until the time is over."""
    end = time.monotonic() + duration_s
    number = time.time_ns() // 1_000_000
    rounds = 0
    while time.monotonic() < end:
        number += 1
        sys.stdout.write(f"seed {number}\n")
        sys.stdout.flush()
        run_state_machine_as_test(
            seed(number)(StoreAgainstDictionary),
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=50,
                database=None,
                deadline=None,
                phases=[Phase.generate],
                print_blob=True,
                suppress_health_check=list(HealthCheck),
            ),
        )
        rounds += 1
    sys.stdout.write(f"{rounds * EXAMPLES} histories, nothing was lost\n")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)
