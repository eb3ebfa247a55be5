"""One Postgres and one Redis server for a test session. Each test gets its own databases."""

import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from loadtest.ports import free_ports
from loadtest.waiting import stop, until_sync
from services.local.embedded import (
    USER,
    EmbeddedError,
    Postgres,
    Redis,
    _environment,
    set_up_postgres,
    set_up_redis,
)
from services.local.process import Program, start

_SHM: Final = Path("/dev/shm")  # noqa: S108
_SHM_BYTES_MIN: Final = 8 << 30
"""Free memory that a test session needs: two workers of a whole run fill more than 2 GiB, since a
database takes 7 MB and is never dropped."""


@dataclass(frozen=True, slots=True)
class Stores:
    """The addresses of a new database in Postgres and in Redis."""

    postgres_dsn: str
    redis_url: str


class StoreServers:
    """The running servers of Postgres and Redis."""

    def __init__(self, postgres: Postgres, redis: Redis) -> None:
        self._postgres = postgres
        self._redis = redis
        self._numbers = itertools.count(1)
        self._psql: subprocess.Popen[str] | None = None

    def fresh(self, *, like: str = "") -> Stores:
        """Create a new database in both servers. `like`: the DSN of a database to copy in Postgres,
        which must have no connections.
        """
        number = next(self._numbers)
        template = like and f" TEMPLATE {like.rpartition('/')[2]} STRATEGY FILE_COPY"
        self._run_sql(f"CREATE DATABASE test_{number}{template}")
        return Stores(self._postgres.dsn(f"test_{number}"), self._redis.url(number))

    def close(self) -> None:
        """End the connection that creates databases."""
        if self._psql is not None:
            self._psql.communicate()

    def _run_sql(self, sql: str) -> None:
        """Run a statement in an open psql: starting psql takes as long as the statement."""
        if self._psql is None:
            server = self._postgres
            self._psql = subprocess.Popen(
                [server.binaries / "psql", "-XAtq", "-v", "ON_ERROR_STOP=1",
                 f"postgresql://{USER}@127.0.0.1:{server.port}/postgres"],
                env={**_environment(), "PGPASSWORD": server.password},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
        assert self._psql.stdin is not None
        assert self._psql.stdout is not None
        print(f"{sql};\n\\echo done", file=self._psql.stdin, flush=True)
        answer = self._psql.stdout.readline()
        assert answer == "done\n", f"{sql}: {answer}"


def quick_postgres(folder: Path, port: int) -> Postgres:
    """Like `set_up_postgres`, but commits survive the death of the process only, not of the machine.
    With synchronous_commit=off instead, a commit may be lost with the process.
    """
    postgres = set_up_postgres(folder, port)
    argv = (*postgres.program.argv, "-c", "fsync=off")
    return replace(postgres, program=replace(postgres.program, argv=argv))


def run_sql(postgres: Postgres, sql: str) -> str:
    """Run one SQL statement as psql prints it. Raises: EmbeddedError."""
    # Without the password, because all users of this machine can see arguments.
    url = f"postgresql://{USER}@127.0.0.1:{postgres.port}/postgres"
    argv = [str(postgres.binaries / "psql"), "-XAtq", "-v", "ON_ERROR_STOP=1", "-c", sql, url]
    env = {**_environment(), "PGPASSWORD": postgres.password}
    done = subprocess.run(argv, env=env, check=False, timeout=60, capture_output=True, text=True)
    if done.returncode:
        raise EmbeddedError(f"{sql}: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def store_servers() -> Iterator[StoreServers]:
    """Run both servers until the end of the block, with their data in a folder of `scratch`, to
    which Postgres does not sync. Must be called in the main thread.
    """
    with scratch("ql-stores-") as folder, ExitStack() as stack:
        postgres_port, redis_port = free_ports(2)
        postgres = quick_postgres(folder / "postgres", postgres_port)
        redis = set_up_redis(folder / "redis", redis_port)
        for server in (postgres, redis):
            _run(server.program, server.is_ready, folder / f"{server.program.name}.log", stack)
        servers = StoreServers(postgres, redis)
        stack.callback(servers.close)
        yield servers


@contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """A temporary folder. It is in memory, where syncs are cheap, if the memory has room."""
    root = _SHM if _has_room(_SHM) else None
    with tempfile.TemporaryDirectory(prefix=prefix, dir=root, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def _has_room(root: Path) -> bool:
    return os.access(root, os.W_OK) and shutil.disk_usage(root).free > _SHM_BYTES_MIN


def _run(program: Program, is_ready: Callable[[], bool], log: Path, stack: ExitStack) -> None:
    process = start(program, log)
    stack.callback(stop, process, program.stop_signal, 30)

    def is_up() -> bool:
        if process.poll() is not None:
            raise OSError(f"{program.name} ended at once:\n{log.read_text(errors='replace')}")
        return is_ready()

    until_sync(is_up, f"{program.name} takes connections", passing=(subprocess.TimeoutExpired,))
