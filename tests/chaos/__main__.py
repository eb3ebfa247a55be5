"""`python -m tests.chaos --time 60s --seed 1`: a storm over a cluster of its own (`make chaos`)."""

import argparse
import asyncio
import re
import sys
import time

from loadtest.cluster import running
from tests.chaos.storm import Report, Storm


def seconds(text: str) -> float:
    """`90`, `90s`, `2m` or `1h` in seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: 90s, 2m, 1h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


async def storm(time_s: float, seed: int, kills: int | None) -> Report:
    async with running(None, bookies=4, gateways=2) as cluster:
        end = time.monotonic() + time_s

        def is_enough(report: Report) -> bool:
            return time.monotonic() >= end or (kills is not None and report.kills >= kills)

        return await Storm(cluster, seed).run(is_enough)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--time", type=seconds, default=60.0, help="how long, as in 60s or 5m")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, help="end after so many")
    asked = parser.parse_args()
    report = asyncio.run(storm(asked.time, asked.seed, asked.kills))
    for violation in report.violations:
        print(violation)
    print(report)
    return 1 if report.violations or report.skipped else 0


if __name__ == "__main__":
    sys.exit(main())
