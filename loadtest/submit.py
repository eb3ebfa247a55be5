"""`make spark FILE=x.py`: runs a Spark job with spark-submit, against the local cluster.

If no gateway responds at PORT, a cluster is started like `make run` does, and ends with the job.
The job finds the gateways by the environment: QUORUMLOG_GATEWAY and CLUSTER_SECRET_FILE are set.
"""

import asyncio
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError

from quorumlog.spark.config import NoJava, prepare
from services.local.cluster import ClusterError, LocalCluster
from services.local.config import LocalSettings

_CONF = ("spark.ui.enabled=false", "spark.log.level=WARN")


def main() -> None:
    """Run the job in FILE. The program's arguments are passed to the job."""
    name = os.environ.get("FILE", "")
    if not Path(name).is_file():
        raise SystemExit(f"run make spark FILE=<a Python file>: {name!r} is not a file")
    try:
        raise SystemExit(asyncio.run(_run(name, sys.argv[1:])))
    except (ClusterError, NoJava) as error:
        raise SystemExit(str(error)) from None


async def _run(name: str, arguments: list[str]) -> int:
    environment = dict(os.environ)
    _say("Java: " + prepare(environment))
    settings = LocalSettings.read(os.environ)
    async with _cluster(settings) as gateways:
        environment["QUORUMLOG_GATEWAY"] = ",".join(gateways)
        if settings.secret_file.exists():
            environment.setdefault("CLUSTER_SECRET_FILE", str(settings.secret_file))
        process = await asyncio.create_subprocess_exec(*_command(name), *arguments, env=environment)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, process.terminate)
        return await process.wait()


def _command(name: str) -> list[str]:
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise SystemExit("PySpark is not installed: make setup-spark")
    program = Path(spec.origin).parent / "bin" / "spark-submit"
    conf = [part for setting in _CONF for part in ("--conf", setting)]
    return [str(program), "--master", "local[*]", "--driver-memory", "1g", *conf, name]


@asynccontextmanager
async def _cluster(settings: LocalSettings) -> AsyncIterator[list[str]]:
    """Yield the URLs of a running cluster's gateways, or of a new cluster for the block."""
    urls = [f"http://127.0.0.1:{settings.port + n}" for n in range(settings.gateways)]
    running = [url for url in urls if await asyncio.to_thread(_is_ready, url)]
    if running:
        yield running
        return
    _say("starting a cluster")
    cluster = LocalCluster(settings, say=_say)
    try:
        await cluster.begin()
        yield urls
    finally:
        await cluster.end()


def _is_ready(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    main()
