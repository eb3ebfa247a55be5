"""Postgres and Redis of one machine."""

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

from loadtest.ports import free_ports
from loadtest.stores import Stores, StoreServers, quick_postgres, run_sql, scratch
from loadtest.waiting import stop
from services.local.embedded import _await_predecessor
from services.local.process import Become, in_child, start, users_to_try
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


async def test_a_client_without_the_password_of_redis_writes_no_url_that_services_would_trust(
    stores: Stores,
) -> None:
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
