"""The write-ahead-log example: what was answered survives a server's kill -9 and a failover."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from loadtest.cluster import Cluster
from loadtest.ports import free_ports
from services.local.process import Program, start
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="package")

ROOT = Path(__file__).resolve().parents[3]
WRITERS = 8
CHANGES = 400


class Server:
    """One process of the example."""

    def __init__(self, session: aiohttp.ClientSession, folder: Path, gateways: list[str]) -> None:
        port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{port}"
        self._session = session
        self._log = folder / f"{port}.log"
        self._program = Program(
            name=f"store-{port}",
            argv=(
                sys.executable, str(ROOT / "examples" / "wal_store.py"),
                "--place", str(folder / "place"), "--port", str(port),
                "--gateways", *gateways, "--snapshot-every", "150", "--roll-entries", "40",
            ),
            env=os.environ,
        )  # fmt: skip
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return start(self._program, self._log)

    def restart(self) -> None:
        self.process = self._start()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    async def ask(self, method: str, path: str, data: str | None = None) -> tuple[int, str]:
        async with self._session.request(method, self.url + path, data=data) as answer:
            return answer.status, await answer.text()

    async def role(self) -> str:
        async with self._session.get(self.url + "/state") as answer:
            return str((await answer.json())["role"])

    async def is_up(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()
        return bool(await self.role())

    async def take_over(self) -> None:
        async def done() -> bool:
            return (await self.ask("POST", "/takeover"))[0] == 200

        await until(done, "it takes over")
        assert await self.role() == "active"

    async def up(self) -> None:
        await until(self.is_up, "the server answers", passing=(aiohttp.ClientError, OSError))


class Load:
    """Writers that each count up one key, and what they know of it."""

    def __init__(self) -> None:
        self.answered = [0] * WRITERS
        self.sent = [0] * WRITERS

    async def run(self, server: Server, *, until_it_fails: bool) -> None:
        await asyncio.gather(*(self._write(server, n, until_it_fails) for n in range(WRITERS)))

    async def _write(self, server: Server, writer: int, until_it_fails: bool) -> None:
        for _ in range(10_000 if until_it_fails else CHANGES // WRITERS):
            self.sent[writer] += 1
            try:
                status, text = await server.ask("PUT", f"/keys/k{writer}", str(self.sent[writer]))
            except (aiohttp.ClientError, OSError):
                assert until_it_fails
                return
            if status != 204:
                assert until_it_fails, text
                return
            self.answered[writer] = self.sent[writer]

    async def check(self, server: Server) -> None:
        """What was answered is there; what was sent and not answered may be."""
        for writer in range(WRITERS):
            status, text = await server.ask("GET", f"/keys/k{writer}")
            assert status == 200
            assert self.answered[writer] <= int(text) <= self.sent[writer]
            self.sent[writer] = self.answered[writer] = int(text)


@contextmanager
def servers(
    session: aiohttp.ClientSession, folder: Path, cluster: Cluster
) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        started = []
        for _ in range(2):
            started.append(Server(session, folder, cluster.gateways))
            stack.callback(started[-1].kill)
        yield started


@pytest_asyncio.fixture(loop_scope="package")
async def pair(cluster: Cluster, tmp_path: Path) -> AsyncIterator[list[Server]]:
    async with aiohttp.ClientSession() as session:
        with servers(session, tmp_path, cluster) as started:
            for server in started:
                await server.up()
            yield started


async def test_what_was_answered_survives_kill_9_under_load(pair: list[Server]) -> None:
    first, second = pair
    load = Load()
    await first.take_over()
    await load.run(first, until_it_fails=False)

    running = asyncio.ensure_future(load.run(first, until_it_fails=True))
    before = sum(load.answered)
    await until(lambda: sum(load.answered) > before + 100, "the load runs")
    first.kill()
    await running
    await second.take_over()
    await load.check(second)
    await load.run(second, until_it_fails=False)

    # And back: the one that was killed comes again as a standby, which follows and fences nobody.
    first.restart()
    await first.up()
    assert await first.role() == "standby"

    async def has_followed() -> bool:
        return (await first.ask("GET", "/keys/k0"))[1] == str(load.answered[0])

    await until(has_followed, "the standby is up to date")
    assert await second.role() == "active"
    await load.run(second, until_it_fails=False)
    await load.check(second)


async def test_the_old_server_s_next_write_fails_after_a_failover(pair: list[Server]) -> None:
    first, second = pair
    load = Load()
    await first.take_over()
    await load.run(first, until_it_fails=False)

    # The active server hangs; while it does, the other one takes over.
    first.process.send_signal(signal.SIGSTOP)
    await second.take_over()
    await load.check(second)
    first.process.send_signal(signal.SIGCONT)

    status, said = await first.ask("PUT", "/keys/k0", "from the past")
    assert status == 503
    assert said.startswith("log-fenced")
    assert await first.role() == "standby"
    assert (await second.ask("GET", "/keys/k0"))[1] == str(load.answered[0])
    assert (await second.ask("DELETE", "/keys/k0"))[0] == 204

    async def has_followed() -> bool:
        return (await first.ask("GET", "/keys/k0"))[0] == 404

    await until(has_followed, "the old server follows the new one")
