"""`make conformance`: the suite that any server of the Durable Streams protocol is judged by.

The last line is `conformance: N passed, N failed, N skipped`. Tests of what is not served are left out by name
(`UNSERVED`), each group is named with its reason, and all of them count as skipped. So is the whole suite where there
is no Node.
"""

import asyncio
import json
import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from loadtest.cluster import running

HERE: Final = Path(__file__).resolve().parent
ROOM: Final = HERE.parents[1] / "build" / "conformance"
"""Where npm puts the packages: nothing of them is beside the tests."""
FILES: Final = ("package.json", "package-lock.json", "streams.test.js", "vitest.config.js")
UNSERVED: Final = MappingProxyType({})
"""Tests of parts of the protocol that are not served: how their names begin, and the reason."""
_OPT_IN: Final = "Reserved subscription APIs"
_TIMEOUT_S: Final = 1500.0
_LINE_MAX: Final = 300


async def main() -> int:
    """Run the suite; returns the exit status."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        print("conformance: there is no Node here: the whole suite is skipped")
        print("conformance: 0 passed, 0 failed, 1 skipped")
        return 0
    ROOM.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(HERE / name, ROOM / name)
    status, said = await _run("npm", "ci", "--no-audit", "--no-fund", "--loglevel=error")
    if status:
        print(said)
        print("conformance: the packages can't be had")
        return 1
    report = ROOM / "report.json"
    report.unlink(missing_ok=True)
    served = f"^(?!.*(?:{'|'.join(UNSERVED)}))"
    # Browsers of other origins are what the suite's preflight stands for.
    async with running(None, environment={"CORS_ORIGINS": "*"}) as cluster:
        _, said = await _run(
            *("npx", "--no-install", "vitest", "run", "--reporter=json", f"--outputFile={report}"),
            *(("-t", served) if UNSERVED else ()),
            STREAMS_URL=cluster.gateways[0],
        )
    if not report.exists():
        print(said)
        print("conformance: the suite did not run")
        return 1
    return _tell(json.loads(report.read_bytes()))


def _tell(report: dict[str, Any]) -> int:
    """Print how each test that was not passed ended, and the counts."""
    counts: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    for suite in report["testResults"]:
        for test in suite["assertionResults"]:
            status = test["status"]
            counts[status if status in ("passed", "failed") else "skipped"] += 1
            if status == "failed":
                print(
                    f"failed: {test['fullName']}: {' '.join(test['failureMessages'])[:_LINE_MAX]}"
                )
            elif status != "passed":
                skipped[_reason(test["fullName"])] += 1
    for reason, count in sorted(skipped.items()):
        print(f"skipped: {count} tests: {reason}")
    print(
        f"conformance: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
    )
    return 0 if counts["passed"] and not counts["failed"] else 1


def _reason(name: str) -> str:
    if _OPT_IN in name:
        return "the suite has them for those who ask: subscriptions are not served"
    found = (why for start, why in UNSERVED.items() if re.search(start, name))
    return next(found, f"nobody knows why: {name}")


async def _run(*command: str, **environment: str) -> tuple[int, str]:
    """Run a program in the room of the packages: its exit status, and what it said."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=ROOM,
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, said.decode(errors="replace")


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
