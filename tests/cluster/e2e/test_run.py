"""`python -m services.local`, as `make run` starts it."""

import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil

from loadtest.ports import free_ports
from loadtest.stores import scratch
from quorumlog.client import Client
from services.local.process import die_with
from tests.support.waiting import SETTLED_S, until_sync

DRAINED = {"DRAIN_S": "120"}
"""A gateway on a slow machine still closes all that is open before it ends."""


class Run:
    """A cluster in a process group of its own, SIGINT ignored as in a shell's background."""

    def __init__(self, data: Path, **settings: str) -> None:
        self.data = data
        self.ports = free_ports(2)
        self.output = data.with_suffix(".out")
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        with self.output.open("wb") as out:  # only what this start says
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.local"],
                env={**os.environ, **DRAINED, "DATA": str(data), "PORT": str(self.ports[0])}
                | settings,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=partial(die_with, os.getpid()),  # noqa: PLW1509
            )
        signal.signal(signal.SIGINT, before)

    @property
    def gateways(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def until_ready(self) -> None:
        def is_ready() -> bool:
            said = self.output.read_text()
            assert self.process.poll() is None, said
            return "quorumlog is ready" in said

        until_sync(is_ready, "the cluster is ready")

    def pid(self, name: str) -> int:
        return int((self.data / "run" / f"{name}.pid").read_text())

    def interrupt(self) -> int:
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(SETTLED_S)


@contextmanager
def run(data: Path, **settings: str) -> Iterator[Run]:
    started = Run(data, **settings)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.terminate()
            started.process.wait(SETTLED_S)


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def gone(pids: list[int]) -> bool:
    """Whether none of them runs; what nobody has reaped does not run."""
    return not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def test_an_interrupt_ends_all_of_it_and_what_it_kept_is_there_at_the_next_start() -> None:
    with scratch("ql-run-") as folder:
        with run(folder / "data") as cluster:
            cluster.until_ready()
            until_sync(
                lambda: [status_of(f"{url}/health/ready") for url in cluster.gateways] == [200] * 2,
                "both gateways are ready: a bookie that is slow counts as lost for a moment",
            )
            assert all(url in cluster.output.read_text() for url in cluster.gateways)
            assert (cluster.data / "log" / "bookie-3.log").stat().st_size > 0
            async with Client(*cluster.gateways) as client:
                ledger = await client.create_ledger()
                await ledger.append_batch([b"one", b"two"])
            _shows_others_no_password_and_no_entry(cluster)
            _ends_in_order(cluster)
        # Starts are the most of this test: the next one serves what is tried of a RESTART too.
        with run(folder / "data", RESTART="1") as cluster:
            cluster.until_ready()
            async with Client(*cluster.gateways) as client:
                found = client.ledger(ledger.ledger_id)

                assert [entry.payload async for entry in found.entries()] == [b"one", b"two"]
                # A gateway that drains closes its users' ledgers.
                assert (await found.info())["state"] == "CLOSED"
            _brings_the_dead_back(cluster)
            _leaves_nothing_when_it_is_killed(cluster)


def _shows_others_no_password_and_no_entry(cluster: Run) -> None:
    passwords = [(cluster.data / store / "password").read_text() for store in ("postgres", "redis")]
    for path in (cluster.data / "run").glob("*.pid"):
        process = psutil.Process(cluster.pid(path.stem))
        shown = " ".join([*process.environ().values(), *process.cmdline()])
        assert not [each for each in passwords if each in shown], path.stem
    files = [path for path in (cluster.data / "bookie-1").rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"CURRENT", "000000000001.log"}
    assert not [path for path in files if path.stat().st_mode & 0o007]
    secrets = [path for path in (cluster.data / "run").iterdir() if "://" in path.read_text()]
    assert {path.name for path in secrets} >= {"postgres_dsn", "redis_url"}
    assert not [path for path in secrets if "@" in path.read_text() and path.stat().st_mode & 0o077]


def _ends_in_order(cluster: Run) -> None:
    names = ["postgres", "redis", "metadata-1", "bookie-1", "bookie-4", "gateway-2"]
    pids = [cluster.pid(name) for name in names]

    status = cluster.interrupt()

    assert status == 0, cluster.output.read_text()
    assert gone(pids)
    assert not list((cluster.data / "run").glob("*.pid"))
    assert "killed" not in cluster.output.read_text()


def _brings_the_dead_back(cluster: Run) -> None:
    names = ("bookie-2", "gateway-1", "redis")
    dead = [cluster.pid(name) for name in names]

    for pid in dead:
        os.kill(pid, signal.SIGKILL)

    def are_back() -> bool:
        now = [cluster.pid(name) for name in names]
        return not set(now) & set(dead) and status_of(f"{cluster.gateways[0]}/health/ready") == 200

    until_sync(are_back, "all are back", passing=(OSError, ValueError))


def _leaves_nothing_when_it_is_killed(cluster: Run) -> None:
    pids = [cluster.pid(path.stem) for path in (cluster.data / "run").glob("*.pid")]
    assert len(pids) > 6

    cluster.process.kill()
    cluster.process.wait()

    until_sync(lambda: gone(pids), "every process is gone")
