"""Postgres on host-1 with a synchronous standby on host-2, and Redis on host-1: of these the operator has servers already.

They run from the wheels that the tests have, in the namespaces of their hosts.
"""

import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from loadtest.stores import quick_postgres
from loadtest.waiting import stop
from services.local.embedded import (
    USER,
    EmbeddedError,
    Postgres,
    _environment,
    set_up_redis,
)
from services.local.process import NOBODY, Become, Program, chown_tree, start
from tests.cluster.hosts.machines import Host
from tests.support.waiting import until

_POSTGRES: Final = 5432
_REDIS: Final = 6379
_LET_IN: Final = "host all all samenet scram-sha-256\nhost replication all samenet scram-sha-256\n"
_AS_NOBODY: Final = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")


class HostStores:
    """The servers, as they are started one after another."""

    def __init__(self, hosts: dict[str, Host], stack: ExitStack) -> None:
        """`stack` ends them."""
        self._primary, self._standby = hosts["host-1"], hosts["host-2"]
        self._stack = stack
        self._postgres = quick_postgres(self._primary.home / "db", _POSTGRES)

    @property
    def admin_dsn(self) -> str:
        """As the page calls it."""
        return f"postgresql://{USER}:{self._postgres.password}@host-1.example:{_POSTGRES}/postgres"

    @property
    def binaries(self) -> Path:
        """The folder of `psql`."""
        return self._postgres.binaries

    async def start_primary(self) -> None:
        """Start Postgres on host-1."""
        with (self._primary.home / "db/data/pg_hba.conf").open("a") as rules:
            rules.write(_LET_IN)
        await self._run_postgres(self._primary, self._postgres)

    async def start_standby(self) -> None:
        """Copy it to host-2, start the copy there, and have each commit wait for it, as docs/guides/database.md says."""
        home = self._standby.home / "db"
        home.mkdir(mode=0o755)
        self._call(
            "pg_basebackup", "--pgdata", str(home / "data"), "--dbname", self.admin_dsn,
            "--write-recovery-conf", "--wal-method=stream", "--checkpoint=fast", "--no-sync",
        )  # fmt: skip
        await self._run_postgres(self._standby, self._postgres)
        await self._is("SELECT count(*) = 1 FROM pg_stat_replication WHERE state = 'streaming'")
        self._sql("ALTER SYSTEM SET synchronous_standby_names = '*'")
        self._sql("SELECT pg_reload_conf()")
        await self._is("SELECT count(*) = 1 FROM pg_stat_replication WHERE sync_state = 'sync'")

    async def start_redis(self, url: str) -> None:
        """Start Redis with the password of a URL."""
        redis = set_up_redis(self._primary.home / "redis", _REDIS)
        argv = [word.replace("127.0.0.1", "0.0.0.0") for word in redis.program.argv]
        self._start(self._primary, "redis", (*argv, "--requirepass", str(urlsplit(url).password)))

    async def _run_postgres(self, host: Host, postgres: Postgres) -> None:
        data = host.home / "db/data"
        data.parent.chmod(0o755)
        chown_tree(data, Become.NOBODY)
        old = str(self._primary.home / "db/data")
        argv = [
            {old: str(data), "127.0.0.1": "0.0.0.0"}.get(word, word)
            for word in postgres.program.argv
        ]
        log = self._start(host, "postgres", (*_AS_NOBODY, *argv))

        def is_ready() -> bool:
            try:
                self._call("pg_isready", "-q", "-h", host.address, "-p", str(_POSTGRES))
            except EmbeddedError:
                return False
            return True

        await until(is_ready, f"Postgres of {host.name} takes connections, see {log}")

    def _start(self, host: Host, name: str, argv: tuple[str, ...]) -> Path:
        log = host.home / f"{name}.log"
        process = start(Program(name, (*host.prefix, *argv), _environment()), log)
        self._stack.callback(stop, process, signal.SIGKILL, 30)
        return log

    async def _is(self, question: str) -> None:
        asked: Callable[[], bool] = lambda: self._sql(question).strip() == "t"  # noqa: E731
        await until(asked, question)

    def _sql(self, statement: str) -> str:
        return self._call("psql", "-XAtqc", statement, self.admin_dsn)

    def _call(self, tool: str, *words: str) -> str:
        done = subprocess.run(
            [str(self.binaries / tool), *words], env={**_environment(), "HOME": "/nowhere"},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        if done.returncode:
            raise EmbeddedError(f"{tool}: {done.stderr or done.stdout}")
        return done.stdout
