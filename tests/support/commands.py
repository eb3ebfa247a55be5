"""The command line in tests: as a program of its own, or quickly (`quick_command.py`)."""

import asyncio
import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from loadtest.waiting import until_sync
from services.local.process import Become, in_child
from tests.support import quick_command
from tests.support.waiting import MENDED_S


def words(*arguments: str) -> list[str]:
    """The command line as a process of its own."""
    return [sys.executable, "-m", "quorumlog.cli", *arguments]


def quick(*arguments: str) -> list[str]:
    """The command line in a fork, for tests that send it no signals and do not look for its process."""
    return [sys.executable, "-I", "-S", quick_command.__file__, _server(), *arguments]


async def told(
    *arguments: str, given: bytes = b"", environment: Mapping[str, str]
) -> tuple[int, bytes, str]:
    """Run the command line: its exit status, its output, and what it says on standard error."""
    done = await asyncio.to_thread(
        subprocess.run,
        quick(*arguments),
        env=environment,
        input=given,
        capture_output=True,
        timeout=2 * MENDED_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr.decode()


def path_with_quorumlog(folder: Path) -> str:
    """A PATH with this checkout's command line, as a program that is written to `folder`."""
    program = folder / "bin" / "quorumlog"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {subprocess.list2cmdline(quick())} "$@"\n')
    program.chmod(0o755)
    return f"{program.parent}{os.pathsep}{os.environ['PATH']}"


@cache
def _server() -> str:
    """Start the process that forks commands; returns its socket."""
    folder = Path(tempfile.mkdtemp(prefix="ql-commands-"))
    path = folder / "socket"
    server = subprocess.Popen(
        [sys.executable, "-m", quick_command.__name__, "--serve", str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        preexec_fn=in_child(Become.SELF, signal.SIGKILL),  # noqa: PLW1509
    )

    def end() -> None:
        server.kill()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    until_sync(path.exists, "commands are forked")
    return str(path)
