"""Packages of npm for tests and benchmarks, installed from a lock file once, below `build/`."""

import fcntl
import hashlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from loadtest.bench.measure import Absent

ROOM: Final = Path(__file__).resolve().parents[1] / "build" / "npm"
_FILES: Final = ("package.json", "package-lock.json")
_DEADLINE_S: Final = 600.0
_NO_WAY: Final = re.compile(
    r"code (?:ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH|EHOSTUNREACH|ERR_SOCKET_TIMEOUT)"
)
"""Error codes of npm if it can't reach its registry. Other errors count as defects."""


__all__ = ["Absent", "installed", "needs"]


def needs(*programs: str) -> None:
    """Raise Absent for the first program that is not installed."""
    for program in programs:
        if shutil.which(program) is None:
            raise Absent(f"{program} is not installed on this machine")


def installed(source: Path) -> Path:
    """Install the packages of the lock file in `source`; returns their folder. Raises: Absent."""
    needs("node", "npm")
    room = ROOM / source.name
    room.mkdir(parents=True, exist_ok=True)
    wanted = hashlib.sha256(b"".join((source / name).read_bytes() for name in _FILES)).hexdigest()
    done = room / "installed"
    with (room / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists() or done.read_text() != wanted:
            done.unlink(missing_ok=True)
            for name in _FILES:
                shutil.copyfile(source / name, room / name)
            _install(room)
            done.write_text(wanted)
    return room


def _install(room: Path) -> None:
    run = subprocess.run(
        ("npm", "ci", "--no-audit", "--no-fund", "--loglevel=error"),
        cwd=room,
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    if run.returncode and _NO_WAY.search(run.stderr):
        raise Absent("npm can't reach its registry from here")
    assert run.returncode == 0, run.stderr[-4000:]
