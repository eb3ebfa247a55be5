"""`python -m tests.cluster.upgrade --from v0.1.0` (`make upgrade`)."""

import argparse
import asyncio
import sys

from tests.cluster.upgrade.releases import PRESENT, checked_out, last_tag, next_release
from tests.cluster.upgrade.storm import Releases, Upgrade, storm


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.upgrade")
    parser.add_argument(
        "--from", dest="earlier", default="", help="a tag or commit instead of the last tag"
    )
    parser.add_argument("--seed", type=int, default=1, help="what the clients do")
    return parser.parse_args()


def notify(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def releases(earlier: str) -> Releases:
    """The last release and the present one; while there is none, the present one and a next one."""
    if tag := earlier or last_tag():
        return Releases(checked_out(tag), PRESENT)
    return Releases(PRESENT, next_release())


async def upgraded(earlier: str, report: Upgrade) -> None:
    chosen = releases(earlier)
    notify(f"a cluster of {chosen.earlier.name} starts")
    async with storm(chosen, report, notify) as running:
        await running.run()


def main() -> int:
    asked = parsed()
    report = Upgrade(seed=asked.seed)
    report.seen.seed = asked.seed
    try:
        asyncio.run(upgraded(asked.earlier, report))
    finally:
        for found in (*report.seen.violations, *report.seen.stuck):
            print(found)
        for defect, count in sorted(report.defects.items()):
            print(f"{defect}: {count} times")
        print(report.last_line())
    return 1 if report.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
