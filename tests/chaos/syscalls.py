"""Calls of the system that fail: strace gives a bookie an error in place of what it asked for.

One error and then success again is the trap of fsync: whoever tries again is told that all is well
and has lost what the kernel dropped. A site is a call, an error, and a phase of a bookie's life.
"""

import asyncio
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from services.local.process import Become, in_child
from tests.chaos.machine import Unusable, call, need
from tests.support.waiting import until, within

Phase = Literal["start", "running", "stop"]


@dataclass(frozen=True, slots=True)
class Site:
    """Where an error is put."""

    phase: Phase
    call: str
    error: str
    nth: int = 1
    """Counted in each thread."""

    def __str__(self) -> str:
        """As the report names it."""
        nth = "" if self.nth == 1 else f" #{self.nth}"
        return f"{self.phase} {self.call}{nth} {self.error}"

    @property
    def inject(self) -> tuple[str, ...]:
        """What strace is told."""
        what = f"inject={self.call}:error={self.error}:when={self.nth}"
        return ("-f", "-y", "-qq", "-e", f"trace={self.call}", "-e", what)


_START: Final = (
    *(("fsync", "EIO", nth) for nth in (1, 2, 3, 4, 5, 6)),
    *(("fdatasync", "EIO", nth) for nth in (1, 2)),
    *(("pwritev2", "ENOSPC", nth) for nth in (1, 2, 3)),
    *(("fallocate", "ENOSPC", nth) for nth in (1, 2)),
    *(("rename", "EIO", nth) for nth in (1, 2, 3)),
    ("ftruncate", "EIO", 1),
    ("unlink", "EIO", 1),
)
_RUNNING: Final = (
    ("fdatasync", "EIO", 1), ("fdatasync", "EIO", 3), ("fdatasync", "ENOSPC", 1),
    ("pwritev2", "ENOSPC", 1), ("pwritev2", "ENOSPC", 3), ("pwritev2", "EIO", 1),
    ("fallocate", "ENOSPC", 1), ("fallocate", "EIO", 1),
    ("fsync", "EIO", 1), ("fsync", "EIO", 2), ("fsync", "EIO", 3),
    ("rename", "EIO", 1), ("rename", "ENOSPC", 1), ("ftruncate", "EIO", 1),
    ("openat", "ENOSPC", 1), ("openat", "EMFILE", 1),
    ("write", "ENOSPC", 1), ("pread64", "EIO", 1),
)  # fmt: skip
_STOP: Final = (
    ("fsync", "EIO", 1), ("fsync", "EIO", 2), ("fdatasync", "EIO", 1), ("pwritev2", "ENOSPC", 1),
    ("ftruncate", "EIO", 1),
)  # fmt: skip

SITES: Final = (
    *(Site("running", *what) for what in _RUNNING),
    *(Site("start", *what) for what in _START),
    *(Site("stop", *what) for what in _STOP),
)


def usable() -> None:
    """Raises: Unusable where no call can be made to fail."""
    need("strace")
    said = call("strace", "-qq", "-o", "/dev/null", "-e", "inject=fsync:error=EIO", "true")
    if said:
        raise Unusable(f"strace: {said.strip()}")


class Tracer:
    """strace on one process. Its file tells what came of it."""

    def __init__(self, site: Site, out: Path) -> None:
        self._site = site
        self._out = out
        self._process: asyncio.subprocess.Process | None = None
        out.unlink(missing_ok=True)

    @property
    def prefix(self) -> tuple[str, ...]:
        """In front of a command that is to be traced from its start, as the same process."""
        return ("strace", "-D", "-o", str(self._out), *self._site.inject)

    async def attach(self, pid: int) -> None:
        """Trace a process that runs. Raises: DeadlineMissed."""
        argv = ("strace", "-o", str(self._out), *self._site.inject, "-p", str(pid))
        self._process = await asyncio.create_subprocess_exec(
            *argv,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            preexec_fn=in_child(Become.SELF, signal.SIGKILL),
        )
        status = Path(f"/proc/{pid}/status")

        process = self._process

        def is_traced() -> bool:
            if process.returncode is not None:
                return True  # the call has failed already, and ended what was traced
            try:
                return "TracerPid:\t0\n" not in status.read_text()
            except FileNotFoundError:
                return True  # it is gone, and so will the tracer be

        await until(is_traced, f"process {pid} is traced")

    async def ended(self) -> None:
        """Wait until it has ended, which it does with the process. It is never told to detach: that
        waits for a process that is ending, which in turn waits for its tracer.
        """
        if self._process is not None:
            async with within("strace ends with what it traced"):
                await self._process.wait()
            self._process = None

    def failed(self) -> list[str]:
        """The calls that were given an error, with the files that they were about."""
        try:
            lines = self._out.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return []
        return [line for line in lines if "(INJECTED)" in line]

    def has_broken_the_log(self) -> bool:
        """Whether a sync of the log was told that it failed."""
        return any("/log/" in line and "sync(" in line for line in self.failed())
