"""`make conformance`: the suite that any server of the Durable Streams protocol is judged by.

The last line is `conformance: N passed, N failed, N skipped`. The suite has its tests of subscriptions for those who ask for
them, as `streams.test.js` does. The whole suite is skipped where there is no Node, or no way to npm's registry.

With `--kills` (`KILLS=1`) a gateway or a bookie is killed every few seconds. A proxy stands for a client that repeats what
the protocol lets it repeat (`repeats.py`), and remembers every acknowledged append; at the end all of them are read
back, and the last line is `streams: N kills, N acknowledged, N lost`.

The suite waits by the clock on the wall, which a slow machine may miss: tests that failed are run once more. The first
failure is told as `again:`, and a test fails that fails both times.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

from loadtest.cluster import running
from tests.outside.conformance.repeats import Repeats, killing

HERE: Final = Path(__file__).resolve().parent
ROOM: Final = HERE.parents[2] / "build" / "conformance"
"""Where npm puts the packages: nothing of them is beside the tests."""
FILES: Final = ("package.json", "package-lock.json", "streams.test.js", "vitest.config.js")
_TIMEOUT_S: Final = 1500.0
_LINE_MAX: Final = 300
_UNREACHABLE: Final = re.compile(
    r"\b(?:ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH|EHOSTUNREACH|ERR_SOCKET_TIMEOUT|E403|E407)\b"
)
"""What npm says where it has no way to its registry."""


async def main(*, has_kills: bool) -> int:
    """Run the suite; returns the exit status."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        return _skipped("there is no Node here")
    ROOM.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(HERE / name, ROOM / name)
    status, said = await _run(
        *("npm", "ci", "--no-audit", "--no-fund", "--loglevel=error"),
        *("--prefer-offline", "--fetch-retries=1", "--fetch-timeout=30000"),
    )
    if status and _UNREACHABLE.search(said):
        return _skipped("npm's registry can't be reached")
    if status:
        print(said)
        print("conformance: the packages can't be installed")
        return 1
    # Browsers of other origins are what the suite's preflight stands for.
    # The suite's webhooks listen on this machine.
    allowed = {"CORS_ORIGINS": "*", "WEBHOOK_NETWORKS": "127.0.0.0/8"}
    async with running(None, environment=allowed) as cluster:
        if not has_kills:
            return _notify(await _results(cluster.gateways[0]))
        async with Repeats(cluster.gateways) as repeats:
            async with killing(cluster) as kills:
                status = _notify(await _results(repeats.url))
            acknowledged, lost = await repeats.appends.read_back(cluster.gateways)
    for problem in lost:
        print(f"lost: {problem}")
    print(f"streams: {len(kills)} kills, {acknowledged} acknowledged, {len(lost)} lost")
    return status or int(bool(lost) or not kills or not acknowledged)


async def _results(url: str) -> dict[str, dict[str, Any]]:
    """The results of all tests, by full name."""
    results = await _judged(".", url)
    failed = {name: test for name, test in results.items() if test["status"] == "failed"}
    if failed:
        for name, test in failed.items():
            print(f"again: {name}: {_why(test)}")
        again = await _judged(f"(?:{'|'.join(map(re.escape, failed))})$", url)
        results |= {name: test for name, test in again.items() if name in failed}
    return results


def _skipped(why: str) -> int:
    print(f"conformance: {why}: the whole suite is skipped")
    print("conformance: 0 passed, 0 failed, 1 skipped")
    return 0


async def _judged(names: str, url: str) -> dict[str, dict[str, Any]]:
    """The results of the tests whose full names match, and of the others as skipped, by full name."""
    report = ROOM / "report.json"
    report.unlink(missing_ok=True)
    _, said = await _run(
        *("npx", "--no-install", "vitest", "run", "--reporter=json", f"--outputFile={report}"),
        *("-t", names),
        STREAMS_URL=url,
    )
    if not report.exists():
        raise RuntimeError(f"the suite did not run: {said}")
    suites = json.loads(report.read_bytes())["testResults"]
    tests = [test for suite in suites for test in suite["assertionResults"]]
    results = {test["fullName"]: test for test in tests}
    assert len(results) == len(tests), "two tests have one name"
    return results


def _why(test: dict[str, Any]) -> str:
    return " ".join(test["failureMessages"])[:_LINE_MAX]


def _notify(results: dict[str, dict[str, Any]]) -> int:
    """Print how each test that was not passed ended, and the counts."""
    counts: Counter[str] = Counter()
    for name, test in results.items():
        status = test["status"]
        counts[status if status in ("passed", "failed") else "skipped"] += 1
        if status == "failed":
            print(f"failed: {name}: {_why(test)}")
        elif status != "passed":
            print(f"skipped: {name}")
    print(
        f"conformance: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
    )
    return 0 if counts["passed"] and not counts["failed"] else 1


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
    parser = argparse.ArgumentParser(prog="make conformance", description=__doc__)
    parser.add_argument("--kills", action="store_true", help="kill processes meanwhile")
    sys.exit(asyncio.run(main(has_kills=parser.parse_args().kills)))
