"""`python -m tests.restore --restores 5 --failovers 5 --seed 1` (`make restore`)."""

import argparse
import asyncio
import sys

from tests.restore.storm import Report, storm


async def stormed(asked: argparse.Namespace, report: Report) -> None:
    async with storm(report, seed=asked.seed) as running:
        await running.run(restores=asked.restores, failovers=asked.failovers)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.restore")
    parser.add_argument("--restores", type=int, default=5, help="of an older dump")
    parser.add_argument(
        "--failovers", type=int, default=4, help="every second one to a standby that lacks changes"
    )
    parser.add_argument("--seed", type=int, default=1, help="the order, and who is hurt")
    report = Report()
    asyncio.run(stormed(parser.parse_args(), report))
    for detail in report.found.details:
        print(detail)
    print(report.last_line())
    return int(bool(report.found.details))


if __name__ == "__main__":
    sys.exit(main())
