"""`python -m tests.cluster.compose` (`make e2e-compose`): compose.yaml on a real engine, hurt while clients write, and judged.

The engine and all that it starts live in namespaces of their own: whatever ends the run ends them.
"""

import argparse
import asyncio
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import aiohttp

from loadtest.cluster import Cluster
from quorumlog.client import Client
from services.local.config import ROOT
from tests.cluster.chaos.clients import Clients
from tests.cluster.chaos.report import Report
from tests.cluster.compose.engine import Engine
from tests.cluster.compose.faults import PARTITIONS, Containers, Done
from tests.cluster.compose.standins import BUILD, ENGINE, PLUGINS, Unavailable, make_images, prepare
from tests.support import history, log_history
from tests.support.waiting import DeadlineMissed, until, within

PORT: Final = 8080
"""Of the network namespace of the run, in which nobody else listens."""
URLS: Final = (f"http://127.0.0.1:{PORT}", f"http://localhost:{PORT}")
"""Of the balancer: some clients ask one address about what they did at another one."""
RESUME_S: Final = 300.0
ACKS: Final = 10
"""Acknowledgements between two faults."""


@dataclass(frozen=True, slots=True)
class Balanced:
    """A cluster as clients know it."""

    gateways: tuple[str, ...] = URLS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.compose", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the order of the faults")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.inside is not None:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return asyncio.run(run(asked.inside, asked.seed))
    try:
        prepare()
    except Unavailable as why:
        print(f"compose: skipped: {why}")
        return 0
    folder = Path(tempfile.mkdtemp(prefix="quorumlog-compose-", dir="/var/tmp"))
    try:
        return _in_namespaces(folder, asked.seed)
    finally:
        remove(folder)


def _in_namespaces(folder: Path, seed: int) -> int:
    """The run with networks, mounts and processes of its own; tini takes in what the engine leaves."""
    space = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    program = (
        sys.executable,
        "-m",
        "tests.cluster.compose",
        "--inside",
        str(folder),
        "--seed",
        str(seed),
    )
    process = subprocess.Popen([*space, "tini", "-s", "--", *program], cwd=ROOT)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        return 130


def remove(folder: Path) -> None:
    """Remove what an engine leaves behind once all its processes are gone: its folder and its groups."""
    for group in Path("/sys/fs/cgroup").glob(f"**/{folder.name}"):
        for path, _, _ in os.walk(group, topdown=False):
            Path(path).rmdir()
    shutil.rmtree(folder)


async def run(folder: Path, seed: int) -> int:
    """Everything, with an engine whose sockets are in a folder."""
    began = time.monotonic()

    def notify(what: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {what}", flush=True)

    engine, done, report = Engine(folder, ENGINE, PLUGINS), Done(), Report(seed=seed)
    try:
        engine.start()
    except Exception as why:  # noqa: BLE001 - whatever the machine does not allow
        print(f"compose: skipped: no engine runs here: {why}")
        return 0
    containers = Containers(engine, done)
    try:
        notify("the engine runs; images are made")
        await asyncio.to_thread(make_images, engine)
        await asyncio.to_thread(engine.build, "compose", "build", "credentials")
        notify("the cluster starts")
        await asyncio.to_thread(engine.compose, "down", "--volumes")
        await asyncio.to_thread(engine.build, "compose", "up", "--detach", "--wait")
        await asyncio.to_thread(containers.check)
        await check_command_line(engine)
        await check_ways_through()
        await Rage(engine, containers, report, notify).run(random.Random(seed))
        await check_tokens(engine)
        notify("done")
    except DeadlineMissed as missed:
        report.stuck.append(f"{missed} {getattr(missed, '__notes__', '')}")
    finally:
        if report.stuck or report.violations or sys.exc_info()[0] is not None:
            keep_logs(engine, containers)
        engine.compose("kill")
        engine.stop()
    for line in [*report.stuck, *map(str, report.violations)]:
        print(f"  {line}")
    print(
        f"compose: {len(containers.services)} containers, {done.kills} kills, {done.engine_restarts} engine restarts,"
        f" {done.partitions} partitions, {report.acknowledged} acknowledged, {report.count('lost', 'gone')} lost,"
        f" {report.count('duplicate')} duplicated, {len(report.stuck)} stuck"
    )
    return int(report.has_failed)


class Rage:
    """Faults while clients write, and the judgement on what they saw."""

    def __init__(
        self, engine: Engine, containers: Containers, report: Report, notify: Callable[[str], None]
    ) -> None:
        self._containers, self._report, self._notify = containers, report, notify
        self._engine = engine
        self._clients = Clients(cast("Cluster", Balanced()), report.seed, report)

    async def run(self, dice: random.Random) -> None:
        """Hurt everything, then recover and read everything."""
        try:
            await self._clients.run(lambda: self._hurt(dice), writers=3)
            self._notify("everything is recovered and read")
            await self._clients.learn()
        finally:
            self._report.violations += history.check(self._clients.history)
            self._report.violations += log_history.check(self._clients.log_history.events)

    async def _hurt(self, dice: random.Random) -> None:
        containers = self._containers
        await self._until_going()
        for name in containers.in_turn(dice):
            self._notify(f"kill {name}")
            await containers.kill(name)
            await self._until_going()
        await containers.until_healthy()
        for name, network in PARTITIONS:
            self._notify(f"take {name} from network {network}")
            await containers.part(name, network, self._until_going)
            await self._until_going()
            await containers.until_healthy()
        for end in (self._engine.stop, self._engine.cut):
            self._notify(f"the engine and all containers end: {end.__name__}")
            await containers.restart_engine(end)
            await containers.until_healthy()
            await self._until_going()
        await asyncio.to_thread(containers.check)

    async def _until_going(self) -> None:
        wanted = self._report.acknowledged + ACKS
        await until(
            lambda: self._report.acknowledged >= wanted, "appends are acknowledged again", RESUME_S
        )


async def check_command_line(engine: Engine) -> None:
    """`docker compose exec operator quorumlog …` finds everything by itself."""
    for command in ("cluster status", "bookie info bookie-1", "repair status", "cluster witnesses", "token list"):  # fmt: skip
        await asyncio.to_thread(
            engine.compose, "exec", "-T", "operator", "quorumlog", *command.split()
        )
    mode = ("exec", "-T", "operator", "stat", "-c", "%a", "/credentials/admin.token")
    assert (await asyncio.to_thread(engine.compose, *mode)).strip() == "600"


async def check_ways_through() -> None:
    """A long poll, a tail of events and a WebSocket pass the balancer, and bring an entry when it comes."""
    async with (
        within("an entry passes the balancer"),
        Client(URLS[0]) as client,
        aiohttp.ClientSession(URLS[0]) as session,
    ):
        ledger = await client.create_ledger()
        path = f"/v1/ledgers/{ledger.ledger_id}"

        async def poll() -> str:
            async with session.get(f"{path}/entries?encoding=text&wait_ms=60000") as answer:
                return await answer.text()

        async def follow() -> str:
            headers = {"Accept": "text/event-stream"}
            async with session.get(f"{path}/entries?encoding=text", headers=headers) as answer:
                tail.set()
                async for line in answer.content:
                    if b"through" in line:
                        return line.decode()
                return ""

        tail = asyncio.Event()
        waiting = [asyncio.create_task(poll()), asyncio.create_task(follow())]
        async with session.ws_connect(f"{path}/ws") as socket:
            await socket.send_json({"tail": {"from": 0, "encoding": "text"}})
            await tail.wait()
            await ledger.append(b"through the balancer")
            while "through the balancer" not in await socket.receive_str():
                pass
        for seen in await asyncio.gather(*waiting):
            assert "through the balancer" in seen


async def check_tokens(engine: Engine) -> None:
    """With REQUIRE_TOKENS=1 strangers are refused, and the first token is that of the operator."""
    await asyncio.to_thread(
        engine.compose, "up", "--detach", "--wait", REQUIRE_TOKENS="1", ALLOW_ANONYMOUS="0"
    )
    async with aiohttp.ClientSession() as session, session.get(f"{URLS[0]}/v1/logs") as answer:
        assert answer.status == 401, await answer.text()
    listed = await asyncio.to_thread(
        engine.compose, "exec", "-T", "operator", "quorumlog", "token", "list", REQUIRE_TOKENS="1"
    )
    assert "admin:*" in listed


def keep_logs(engine: Engine, containers: Containers) -> None:
    """Write down what the containers said, for a person who looks for a cause."""
    logs = BUILD / "logs"
    logs.mkdir(exist_ok=True)
    for name in containers.services:
        try:
            (logs / f"{name}.log").write_text(engine.compose("logs", "--no-color", name))
        except Exception as error:  # noqa: BLE001 - the others are kept
            (logs / f"{name}.log").write_text(str(error))
    print(f"logs: {logs}")


if __name__ == "__main__":
    sys.exit(main())
