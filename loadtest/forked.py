"""Services forked from one process that has imported all of them, for tests: `start` in the place of `process.start`.

A service imports 0.7 s of modules before it does anything, and a cluster has eight; a fork of a process that has them
takes some milliseconds. The processes are as real as others, with a memory, a session, signals and an end of their own.
What differs: /proc shows the command line and the environment of the fork server. So `make run` does not do this.

The fork server ends with the process that asks it, and its services with it.
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
from typing import Final

from services.local import process
from services.local.process import Become, Process, Program, in_child

_PRELOADED: Final = (
    "services.autorecovery.app",
    "services.bookie.app",
    "services.gateway.app",
    "services.metadata.app",
)


def start(program: Program, log: Path) -> Process:
    """Start a program with its output appended to `log`: a service by a fork, others as `process.start` does."""
    python, *module = program.argv
    if python != sys.executable or module[:1] != ["-m"] or program.become is not Become.SELF:
        return process.start(program, log)
    log.touch()  # there once this function has returned, as it is otherwise
    context = _server()
    child = context.Process(target=_run, args=(program, log), daemon=True)
    child.start()
    return _Forked(child)


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    # Before multiprocessing waits for them: one that a test has stopped in its tracks would never end.
    atexit.register(_kill_all)
    return context


def _kill_all() -> None:
    for child in multiprocessing.active_children():
        child.kill()


class _Forked:
    """A forked process, as `subprocess.Popen` has it."""

    def __init__(self, child: ForkServerProcess) -> None:
        self._child = child
        assert child.pid is not None, "it is started"
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
        # The number may belong to another process once this one has ended.
        if self._child.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(program: Program, log: Path) -> None:
    """In the child: become what `process.start` would have made, and run the module."""
    gc.freeze()  # the modules are for ever: the collector need not look at them
    # One of them keeps the fork server alive, which would outlive the process that asks it.
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
