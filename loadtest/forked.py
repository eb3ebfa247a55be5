"""Services as forks of one process that has imported their modules, for tests: `start` replaces
`process.start`.

A service needs 0.7 s to import its modules, and a cluster has eight services. A fork of a process
that has imported them takes some milliseconds. Forked services are real processes, each with its
own memory, session and signals. But /proc shows the command line and the environment of the fork
server, so `make run` does not fork services.

The fork server and its services end with the process that uses them.
"""

import atexit
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from functools import cache
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Final, cast

from services.local import process
from services.local.process import Become, Process, Program, in_child

_PRELOADED: Final = (
    "services.autorecovery.app",
    "services.bookie.app",
    "services.gateway.app",
    "services.metadata.app",
)


def start(program: Program, log: Path) -> Process:
    """Start a program that writes to `log`: fork a service, start others by `process.start`."""
    python, *module = program.argv
    if python != sys.executable or module[:1] != ["-m"] or program.become is not Become.SELF:
        return process.start(program, log)
    log.touch()  # the file must exist when this function returns, as with `process.start`
    context = _server()
    child = context.Process(target=_run, args=(program, log), daemon=True)
    child.start()
    return cast("Process", _Forked(child))


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    # Kill the children before multiprocessing waits for them: suspended ones would never end.
    atexit.register(_kill_all)
    return context


def _kill_all() -> None:
    for child in multiprocessing.active_children():
        child.kill()


class _Forked:
    """A forked process, with the interface of `subprocess.Popen`."""

    def __init__(self, child: ForkServerProcess) -> None:
        self._child = child
        assert child.pid is not None, "the process must be started"
        self.pid = child.pid

    @property
    def returncode(self) -> int | None:
        return self._child.exitcode

    def poll(self) -> int | None:
        return self._child.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._child.join(timeout)
        status = self._child.exitcode
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        # Once this process has ended, its id may belong to another process.
        if self._child.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(program: Program, log: Path) -> None:
    """In the child: set the process up like `process.start` does, and run the module."""
    gc.freeze()  # modules are never freed, so the collector need not scan them
    # One of the open files would keep the fork server alive beyond the process that uses it.
    os.closerange(3, 1 + max(int(each.name) for each in Path("/proc/self/fd").iterdir()))
    os.setsid()
    with log.open("ab") as out, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.chdir(program.cwd)
    os.environ.clear()
    os.environ.update(program.env)
    in_child(program.become, program.orphan_signal, parent=os.getppid())()
    _, _, module, *arguments = program.argv
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
