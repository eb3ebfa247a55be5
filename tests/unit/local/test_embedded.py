"""Embedded databases, and services that are forked for tests."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import psutil
import pytest
import redis.asyncio

from loadtest import forked
from loadtest.ports import free_ports
from loadtest.stores import Stores, StoreServers, quick_postgres, run_sql, scratch
from loadtest.waiting import stop
from services.local.config import ROOT
from services.local.embedded import _await_predecessor
from services.local.process import Become, Program, in_child, start, users_to_try
from tests.support.waiting import until_sync


async def test_embedded_databases_accept_commands(stores: Stores) -> None:
    connection = await asyncpg.connect(stores.postgres_dsn)
    client = redis.asyncio.Redis.from_url(stores.redis_url)

    try:
        assert await connection.fetchval("SELECT 1") == 1
        assert await client.set("a", "b", px=60_000)
        assert await client.get("a") == b"b"
    finally:
        await connection.close()
        await client.aclose()


async def test_each_test_gets_databases_of_its_own(servers: StoreServers) -> None:
    first, second = servers.fresh(), servers.fresh()

    assert first.postgres_dsn != second.postgres_dsn
    assert first.redis_url != second.redis_url


async def test_a_wrong_password_is_refused(stores: Stores) -> None:
    dsn = stores.postgres_dsn.replace("quorumlog:", "quorumlog:not")

    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(dsn)


async def test_without_redis_password_no_url_that_services_trust_is_written(stores: Stores) -> None:
    """Services send the cluster's secret to the URLs of bookies that Redis has."""
    host = urlsplit(stores.redis_url).netloc.rpartition("@")[2]

    async with redis.asyncio.Redis.from_url(f"redis://{host}") as client:
        with pytest.raises(redis.exceptions.AuthenticationError):
            await client.hset("quorumlog:bookie-urls", "bookie-1", "http://127.0.0.1:1")


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
def test_postgres_keeps_its_data_below_a_closed_folder(*, is_killed: bool) -> None:
    with scratch("ql-closed-") as root:
        root.chmod(0o700)
        port = free_ports(1)[0]
        for round_number in range(2):
            postgres = quick_postgres(root / "pg", port)
            process = start(postgres.program, root / "pg.log")
            try:
                until_sync(postgres.is_ready, "Postgres takes connections")
                if round_number == 0:
                    run_sql(postgres, "CREATE TABLE kept AS SELECT 7 AS seven")
                assert run_sql(postgres, "SELECT seven FROM kept").strip() == "7"
            finally:
                stop(process, signal.SIGKILL if is_killed else postgres.program.stop_signal, 30)
        # The other processes of a killed one end by themselves a moment later.
        _await_predecessor(root / "pg" / "data")


@pytest.mark.parametrize("way", users_to_try(Path("/"), Path("/usr")))
def test_a_child_has_a_name_under_every_user_that_works(way: Become) -> None:
    try:
        done = subprocess.run(
            ["/usr/bin/id", "-u"],
            preexec_fn=in_child(way, signal.SIGKILL),
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except subprocess.SubprocessError as error:
        pytest.skip(f"this machine does not allow it: {error}")

    assert done.stdout.strip() == (str(os.getuid()) if way is Become.SELF else "65534")


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    code = """
import pathlib, sys, time
from services.local.process import Program, start
child = start(Program("sleeper", ("/bin/sleep", "600")), pathlib.Path(sys.argv[1]))
print(child.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout
    child = psutil.Process(int(parent.stdout.readline()))

    parent.kill()
    parent.wait()
    parent.stdout.close()

    until_sync(lambda: not _is_alive(child), "the child is gone")


def _is_alive(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="no /dev/shm here")
def test_a_killed_postgres_leaves_no_shared_memory_behind() -> None:
    with scratch("ql-killed-") as root:
        postgres = quick_postgres(root / "pg", free_ports(1)[0])
        process = start(postgres.program, root / "pg.log")
        try:
            until_sync(postgres.is_ready, "Postgres takes connections")
            mapped = Path(f"/proc/{process.pid}/maps").read_text()
        finally:
            stop(process, signal.SIGKILL, 30)
        _await_predecessor(root / "pg" / "data")

        assert "/dev/shm/PostgreSQL" not in mapped


def program(folder: Path, **settings: str) -> Program:
    """An autorecovery, whose metadata service is away."""
    environment = {"PORT": str(free_ports(1)[0]), "METADATA_URLS": "http://127.0.0.1:1", **settings}
    return Program("toy", (sys.executable, "-m", "services.autorecovery"), environment, folder)


def test_a_forked_service_has_its_own_session_folder_log_and_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = forked.start(program(tmp_path), log)
    until_sync(lambda: '"started"' in log.read_text(), "it has started")

    assert process.poll() is process.returncode is None
    assert os.getsid(process.pid) == process.pid
    assert Path(f"/proc/{process.pid}/cwd").readlink() == tmp_path
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(60) == process.poll() == -signal.SIGKILL
    process.send_signal(signal.SIGTERM)  # to nobody


def test_a_forked_service_reads_its_own_environment_and_has_its_own_status(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert forked.start(program(ROOT, PORT="none"), log).wait(60) == 2
    assert log.read_text() == "PORT = 'none': must be a whole number from 1 to 65535\n"


_PARENT = """
import sys, time
from pathlib import Path
from loadtest import forked
from tests.unit.local.test_embedded import program
print(forked.start(program(Path(sys.argv[1])), Path(sys.argv[1], "log")).pid, flush=True)
time.sleep(3600)
"""


def test_a_forked_service_ends_with_a_process_that_was_killed(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", _PARENT, str(tmp_path)]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        log = tmp_path / "log"
        until_sync(lambda: '"started"' in log.read_text(), "it has started")

        parent.kill()

    def is_gone() -> bool:
        try:
            return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True

    until_sync(is_gone, "it is gone")
