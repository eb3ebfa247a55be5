"""`python -m tests.upgrade --from v0.1.0` (`make upgrade`)."""

import argparse
import asyncio
import sys

from tests.upgrade.releases import checked_out, default_from
from tests.upgrade.storm import Upgrade, storm


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.upgrade")
    parser.add_argument("--from", dest="earlier", default="", help="a tag or commit")
    parser.add_argument("--seed", type=int, default=1, help="what the clients do")
    return parser.parse_args()


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def upgraded(earlier: str, report: Upgrade) -> None:
    release = checked_out(earlier)
    tell(f"a cluster of {release.name[:12]} starts")
    async with storm(release, report, tell) as running:
        await running.run()


def main() -> int:
    asked = parsed()
    report = Upgrade(seed=asked.seed)
    report.seen.seed = asked.seed
    try:
        asyncio.run(upgraded(asked.earlier or default_from(), report))
    finally:
        for found in (*report.seen.violations, *report.seen.stuck):
            print(found)
        for defect, count in sorted(report.defects.items()):
            print(f"{defect}: {count} times")
        print(report.last_line())
    return 1 if report.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
