"""The two servers: ours, with three copies, and the protocol's own, with one."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp

from loadtest import npm
from loadtest.bench.measure import Pids
from loadtest.cluster import running
from loadtest.ports import free_ports
from loadtest.waiting import until
from services.local.process import Program, start, stop

HERE: Final = Path(__file__).resolve().parent
_ROLES: Final = {"gateway": "gateway", "bookie": "servers"}
_SETTINGS: Final = {"QUORUM_TIMEOUT_S": "50"}
"""No append is given up because the machine is busy; their server never gives one up."""
_STOP_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class System:
    """A server of streams."""

    name: str
    url: str
    """Of its first process; streams are below `/v1/stream/`."""
    pids: Pids


@asynccontextmanager
async def ours(folder: Path) -> AsyncIterator[System]:
    """A gateway and three bookies; an answer says that two disks of three are synced."""
    data = folder / "cluster"
    data.mkdir()
    async with running(None, bookies=3, gateways=1, data=data, environment=_SETTINGS) as cluster:
        pids: dict[str, list[int]] = {"client": [os.getpid()]}
        for name in cluster.names:
            role = _ROLES.get(name.partition("-")[0], "others")
            pids.setdefault(role, []).append(cluster.pid(name))
        yield System("quorumlog", cluster.gateways[0], pids)


@asynccontextmanager
async def theirs(folder: Path) -> AsyncIterator[System]:
    """One process of Node with its file-backed store, as shipped: an answer says that its file is synced
    (`fdatasync` for each append). Raises: Absent.
    """
    packages = npm.installed(HERE)
    program = packages / "server.mjs"
    program.write_bytes((HERE / "server.mjs").read_bytes())
    data = folder / "theirs"
    data.mkdir()
    (port,) = free_ports(1)
    argv = ("node", str(program), str(port), str(data))
    process = start(Program("durable-streams", argv, os.environ), folder / "theirs.log")
    url = f"http://127.0.0.1:{port}"

    async def answers() -> bool:
        assert process.poll() is None, (folder / "theirs.log").read_text()
        async with session.get(f"{url}/v1/stream/none") as answer:
            return answer.status == 404

    try:
        async with aiohttp.ClientSession() as session:
            await until(answers, "the server answers", passing=(aiohttp.ClientError, OSError))
        yield System("their server", url, {"client": [os.getpid()], "servers": [process.pid]})
    finally:
        stop(process, signal.SIGTERM, _STOP_S)
