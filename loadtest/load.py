"""`make load USERS= TIME=`: runs locust against a cluster, and writes a report in HTML.

The load goes to the gateway in GATEWAY, or to a new cluster if GATEWAY is not set.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from loadtest.cluster import running
from services.local.config import ROOT


def main() -> None:
    """Run the load, and end with locust's exit status."""
    gateway = os.environ.get("GATEWAY", "")
    raise SystemExit(_locust(gateway) if gateway else asyncio.run(_with_cluster()))


async def _with_cluster() -> int:
    async with running(None) as cluster:
        return await asyncio.to_thread(_locust, cluster.gateways[0])


def _locust(gateway: str) -> int:
    report = ROOT / "build" / "load.html"
    report.parent.mkdir(exist_ok=True)
    argv = [
        sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("locustfile.py")),
        "--headless", "--host", gateway, "--html", str(report), "--only-summary",
        "--users", os.environ.get("USERS") or "20", "--spawn-rate", "20",
        "--run-time", os.environ.get("TIME") or "30s", "--stop-timeout", "30",
    ]  # fmt: skip
    status = subprocess.run(argv, check=False).returncode
    sys.stdout.write(f"report: {report}\n")
    return status


if __name__ == "__main__":
    main()
