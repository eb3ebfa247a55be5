"""Requests that nobody would send, made from the descriptions of a running cluster's services."""

import asyncio
import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loadtest.cluster import Cluster, running
from quorumlog.client import Client
from services.local.process import Become, in_child

ROOT: Final = Path(__file__).resolve().parents[3]
_CONFIG: Final = Path(__file__).with_name("schemathesis.toml")
_TIMES: Final = {"gateway": 0.6, "bookie": 0.2, "metadata": 0.2}
"""Shares of the time: the gateway has most of the operations."""

_CASES: Final = re.compile(r"(\d+) generated")
_GRACE_S: Final = 600


@dataclass(frozen=True, slots=True)
class Heard:
    """What came of the requests to one service."""

    service: str
    requests: int
    is_right: bool
    output: str


async def ask_all(seconds: float, seed: int, build: Path) -> list[Heard]:
    """A cluster of its own is asked, one kind of service after another."""
    heard = []
    async with running(None, bookies=4, gateways=1) as cluster:
        await _fill(cluster)
        for kind, share in _TIMES.items():
            heard.append(await _ask(cluster, kind, max(1, int(seconds * share)), seed, build))
            names = [name for name in cluster.names if not cluster.is_alive(name)]
            if names:
                heard.append(Heard(kind, 0, False, f"{names} ended under its requests"))
                break
    return heard


async def _fill(cluster: Cluster) -> None:
    """What requests may be about: ledgers 1 to 4 and a log (`hooks.py`)."""
    async with Client(*cluster.gateways) as client:
        for state in ("empty", "written", "closed", "of bytes"):
            ledger = await client.create_ledger()
            if state != "empty":
                await ledger.append_batch([b'{"json":1}', b"\xff"[: state == "of bytes"]])
            if state == "closed":
                await ledger.close()
        await (await client.create_log("events")).append(b'{"in":"events"}')


async def _ask(cluster: Cluster, kind: str, seconds: int, seed: int, build: Path) -> Heard:
    headers = {} if kind == "gateway" else cluster.headers
    argv = (
        sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()",
        "--config-file", str(_CONFIG), "run", f"{cluster.url(f'{kind}-1')}/openapi.json",
        "--phases", "examples,coverage,fuzzing", "--max-time", str(seconds), "--seed", str(seed),
        # What fits together is for the tests of the API; here is only what is never right.
        "--checks", ("not_a_server_error,status_code_conformance,content_type_conformance,"
        "response_schema_conformance,response_headers_conformance"),
        *(f"--header={name}: {value}" for name, value in headers.items()),
        "--no-color", "--suppress-health-check", "all", "--request-timeout", "120",
        "--workers", "1", "--continue-on-failure", "--exclude-path-regex", "/(ws|sse|channel|changes)$",
    )  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=build,
        env=os.environ
        | {
            "SCHEMATHESIS_HOOKS": "tests.outside.fuzz.hooks",
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "shared"))),
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        preexec_fn=in_child(Become.SELF, signal.SIGKILL),
    )
    try:
        async with asyncio.timeout(seconds + _GRACE_S):
            said, _ = await process.communicate()
    except TimeoutError:
        return Heard(kind, 0, False, f"the requests to {kind} do not end")
    finally:
        if process.returncode is None:
            process.kill()
    output = said.decode(errors="replace")
    (build / f"{kind}.txt").write_text(output)
    found = _CASES.search(output)
    return Heard(kind, int(found[1]) if found else 0, process.returncode == 0, output)
