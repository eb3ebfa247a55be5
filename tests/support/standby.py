"""Postgres with a standby that follows it by streaming replication, for failovers.

The steps are those of docs/guides/database.md, which an operator does by hand or has done by a
program.
"""

import asyncio
import atexit
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from loadtest.ports import free_ports
from loadtest.stores import quick_postgres, run_sql, scratch
from loadtest.waiting import stop
from services.local.embedded import EmbeddedError, Postgres, _environment, set_up_postgres
from services.local.process import start
from tests.support.waiting import until

_FOLLOWS = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"
_IS_SYNCHRONOUS = "SELECT count(*) FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum')"
_RECEIVES = "SELECT count(*) FROM pg_stat_wal_receiver"


@dataclass(slots=True)
class Server:
    """One Postgres and its process. `folder` has its data, its password and its log."""

    postgres: Postgres
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """`host:port`, as in a DSN."""
        return f"127.0.0.1:{self.postgres.port}"

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.poll() is None

    async def start(self) -> None:
        """Start it and wait until it takes connections. Call it in the main thread."""
        log = self.folder / "log"
        self.process = start(self.postgres.program, log)

        async def is_up() -> bool:
            assert self.is_alive, log.read_text(errors="replace")
            return await asyncio.to_thread(self.postgres.is_ready)

        await until(is_up, "Postgres takes connections", passing=(subprocess.TimeoutExpired,))

    async def kill(self) -> None:
        """SIGKILL all of its processes, as a power cut ends them (its disk stays)."""
        assert self.process is not None
        backends = _children(self.process.pid)
        self._signal(signal.SIGKILL)
        self.process.wait()
        await until(lambda: not any(map(_is_alive, backends)), "its backends are gone")

    def freeze(self) -> None:
        """Suspend all of its processes: its machine accepts connections and doesn't answer."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Resume its processes."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        for pid in (self.process.pid, *_children(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def stop(self) -> None:
        """An orderly stop."""
        if self.process is not None:
            await asyncio.to_thread(stop, self.process, signal.SIGINT, 60)

    async def sql(self, statement: str) -> str:
        """Run one statement and return what psql prints."""
        return (await asyncio.to_thread(run_sql, self.postgres, statement)).strip()

    async def follower(self, folder: Path, port: int) -> "Server":
        """A standby of this server, from a base backup; not started yet."""
        return Server(await copied(self.postgres, folder, port), folder)

    async def set(self, name: str, value: str) -> None:
        """Change a setting of the running server."""
        await self.sql(f"ALTER SYSTEM SET {name} = '{value}'")
        await self.sql("SELECT pg_reload_conf()")

    async def until_followed(self) -> None:
        """Wait until a standby streams."""
        await until(lambda: self._is(_FOLLOWS), "the standby streams")

    async def require_standby(self) -> None:
        """From now on a commit returns only when the standby has it on its disk."""
        await self.until_followed()
        await self.set("synchronous_standby_names", "*")
        await until(lambda: self._is(_IS_SYNCHRONOUS), "the standby is synchronous")

    async def stop_following(self) -> None:
        """For a standby: receive no further commits, so that it is certain which ones it lacks."""
        await self.set("primary_conninfo", "")

        async def is_cut() -> bool:
            return not await self._is(_RECEIVES)

        await until(is_cut, "the standby receives nothing")

    async def has_all_of(self, primary: "Server") -> None:
        """For a standby: wait until it has replayed everything that the primary has written."""
        position = await primary.sql("SELECT pg_current_wal_insert_lsn()")
        question = f"SELECT (pg_last_wal_replay_lsn() >= '{position}')::int"
        await until(lambda: self._is(question), "the standby has everything")

    async def promote(self) -> None:
        """For a standby: become the primary."""

        async def is_promoted() -> bool:
            return await self.sql("SELECT pg_promote()") == "t"

        # It may have been started just now.
        await until(is_promoted, "the standby is promoted", passing=(EmbeddedError,))

    async def _is(self, question: str) -> bool:
        return int(await self.sql(question)) > 0


async def copied(primary: Postgres, folder: Path, port: int) -> Postgres:
    """A base backup that will follow `primary` (and waits for no standby of its own when promoted)."""
    data = folder / "data"
    await asyncio.to_thread(shutil.rmtree, data, ignore_errors=True)
    await asyncio.to_thread(folder.mkdir, mode=0o700, parents=True, exist_ok=True)
    argv = (
        str(primary.binaries / "pg_basebackup"), "--pgdata", str(data), "--dbname", primary.dsn(),
        "--write-recovery-conf", "--wal-method=stream", "--checkpoint=fast", "--no-sync",
    )  # fmt: skip
    environment = {**_environment(), "HOME": os.environ.get("HOME", "/")}
    process = await asyncio.create_subprocess_exec(
        *argv, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode(errors="replace")
    with (data / "postgresql.auto.conf").open("a") as settings:
        settings.write("synchronous_standby_names = ''\n")
    password = folder / "password"
    password.touch(mode=0o600)
    password.write_text(primary.password)
    return await asyncio.to_thread(quick_postgres, folder, port)


@dataclass(slots=True)
class Pair:
    """A primary and its standby."""

    primary: Server
    standby: Server

    @property
    def dsn(self) -> str:
        """A DSN with both, the first primary first."""
        return dsn_of(self.primary.postgres.dsn(), self.primary.address, self.standby.address)

    async def fail_over(self) -> None:
        """Kill the primary and promote the standby; the two then swap their names."""
        await self.primary.kill()
        await self.standby.promote()
        self.swap()

    def swap(self) -> None:
        """Swap the names: the standby has become the primary."""
        self.primary, self.standby = self.standby, self.primary

    async def follow_again(self) -> None:
        """Make the former primary a standby, from a new base backup."""
        old = self.standby
        await old.stop()
        self.standby = await self.primary.follower(old.folder, old.postgres.port)
        await self.standby.start()
        await self.primary.until_followed()

    async def end(self) -> None:
        """Stop both."""
        for server in (self.primary, self.standby):
            if server.is_alive:
                server.thaw()
                await server.stop()


def dsn_of(dsn: str, *addresses: str) -> str:
    """A DSN with these servers in place of its own."""
    parts = urlsplit(dsn)
    login, at, _ = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{login}{at}{','.join(addresses)}"))


@asynccontextmanager
async def pair(*, is_synchronous: bool = False) -> AsyncIterator[Pair]:
    """A primary with a standby that streams, until the end of the block."""
    with scratch("ql-standby-") as folder:
        first, second = free_ports(2)
        # A copy takes a fifth of the time that initdb takes.
        await asyncio.to_thread(shutil.copytree, _new_data(), folder / "one")
        postgres = await asyncio.to_thread(quick_postgres, folder / "one", first)
        one = Server(postgres, folder / "one")
        await one.start()
        both = Pair(one, one)
        try:
            both.standby = await one.follower(folder / "two", second)
            await both.standby.start()
            await one.until_followed()
            if is_synchronous:
                await one.require_standby()
            yield both
        finally:
            await both.end()


@cache
def _new_data() -> Path:
    """A folder with a new database cluster, which no server uses."""
    lasting = contextlib.ExitStack()
    atexit.register(lasting.close)
    folder = lasting.enter_context(scratch("ql-initdb-")) / "new"
    set_up_postgres(folder, 0)
    return folder


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
