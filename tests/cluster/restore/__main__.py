"""`python -m tests.cluster.restore --restores 4 --failovers 3 --rebuilds 3 --seed 1` (`make restore`)."""

import argparse
import asyncio
import sys
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path

import orjson

from tests.cluster.restore.storm import FAILOVERS, RESTORES, Report, Step, storm
from tests.support.spread import INTERRUPTED_STATUS


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.restore")
    parser.add_argument(
        "--restores", type=int, default=4, help="of an older dump; every second one ends rebuilt"
    )
    parser.add_argument(
        "--failovers", type=int, default=3, help="two of three to a standby that lacks changes"
    )
    parser.add_argument("--rebuilds", type=int, default=3, help="of a database that is gone")
    parser.add_argument("--deleters", type=int, default=5, help="clients that make and delete logs")
    parser.add_argument("--seed", type=int, default=1, help="the order, and who is hurt")
    parser.add_argument("--json", type=Path, help="write the report there as well")
    return parser.parse_args()


def steps_of(asked: argparse.Namespace) -> list[Step]:
    return [
        *islice(cycle(RESTORES), asked.restores),
        *islice(cycle(FAILOVERS), asked.failovers),
        *islice(cycle((Step.REBUILD,)), asked.rebuilds),
    ]


def notify(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def stormed(asked: argparse.Namespace, report: Report) -> None:
    async with storm(report, seed=asked.seed, deleters=asked.deleters, notify=notify) as running:
        await running.run(steps_of(asked))


def main() -> int:
    asked, report = parsed(), Report()
    status = 0
    try:
        asyncio.run(stormed(asked, report))
    except KeyboardInterrupt:
        print("interrupted: what was acknowledged was not read")
        status = INTERRUPTED_STATUS
    for finding in report.findings:
        print(f"waits: {orjson.dumps(finding).decode()}")
    for detail in report.found.details:
        print(detail)
    if asked.json:
        document = {"seed": asked.seed, **asdict(report)}
        asked.json.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    print(report.last_line())
    return 1 if report.found.details else status


if __name__ == "__main__":
    sys.exit(main())
