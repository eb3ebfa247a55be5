"""Calls of the system that fail: strace gives a bookie an error in place of what it asked for.

One error and then success again is the trap of fsync: whoever tries again is told that all is well
and has lost what the kernel dropped. A site is a call about a kind of file, in a phase of a bookie's
life, and an error. Nobody lists sites by hand: they are what a recording of a bookie shows, so that
each one exists, and a call that the bookie comes to make is not forgotten.
"""

import asyncio
import re
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from services.local.process import Become, in_child
from tests.cluster.chaos.machine import Unusable, call, need
from tests.support.waiting import until, within

Phase = Literal["start", "running", "stop"]

ERRORS: Final = {
    "EIO": (
        "fsync", "fdatasync", "sync_file_range", "syncfs", "msync",
        "rename", "renameat", "renameat2", "link", "linkat", "unlink", "unlinkat", "rmdir",
        "truncate", "ftruncate",
        "read", "readv", "pread64", "preadv", "preadv2",
    ),
    "ENOSPC": (
        "write", "writev", "pwrite64", "pwritev", "pwritev2", "fallocate", "copy_file_range",
        "creat", "open", "openat", "openat2",
    ),
}  # fmt: skip
"""What a call is told: that the disk fails, or where it takes room that there is none. Not looked at
are calls that neither change a file nor read one (stat, flock, getdents, close).
"""

ERROR_OF: Final = {name: error for error, names in ERRORS.items() for name in names}
ALSO: Final = {
    "fsync": "ENOSPC", "fdatasync": "ENOSPC", "rename": "ENOSPC",
    "write": "EIO", "pwritev2": "EIO", "fallocate": "EIO", "openat": "EMFILE",
}  # fmt: skip
"""What some calls may be told too: blocks are given out late, a new name needs one, a process has its
limit. While a bookie runs, where it could go on.
"""
_READS: Final = ("read", "readv", "pread64", "preadv", "preadv2")
_OPENS: Final = ("open", "openat", "openat2")
NTH_MAX: Final = 2
"""Of a start and a stop, whose calls of one kind may stand at different steps."""

START_CALLS: Final = 500
"""So many calls after a bookie is up still count as its start: whoever comes later misses them."""

QUIET_CALLS: Final = 4_000
"""A recording is long enough when so many calls in a row were of kinds that it knew. A bookie under a
storm's load makes about 200 a second, the rarest of them (the scrubber's mark) every 15 s.
"""

AHEAD: Final = 300
"""Numbers of files that do not exist yet, and may before a call has failed."""

_LINE: Final = re.compile(r"^(\d+) +(\w+)\((.*)$")
_NUMBER: Final = re.compile(r"\d{6,}")
_WIDTHS: Final = {"log": 12, "index": 6}
"""Digits in the names of files, by their folder: the log's segments, RocksDB's files."""


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """Where an error is put."""

    phase: Phase
    call: str
    file: str
    """Below the bookie's folder, which is `.`; `N` stands for a number."""
    nth: int = 1
    """Of such calls about such files, counted in each thread."""
    error: str = "EIO"

    def __str__(self) -> str:
        """As the report names it."""
        nth = "" if self.nth == 1 else f" #{self.nth}"
        return f"{self.phase} {self.call} {self.file}{nth} {self.error}"

    def options(self, folder: Path) -> tuple[str, ...]:
        """What strace is told, of a bookie whose folder has these files now."""
        what = f"inject={self.call}:error={self.error}:when={self.nth}"
        paths = [part for path in self._paths(folder) for part in ("-P", str(path))]
        return ("-f", "-y", "-qq", "-e", f"trace={self.call}", "-e", what, *paths)

    def _paths(self, folder: Path) -> list[Path]:
        """The files that it means, and those that may come to be."""
        if self.file == ".":
            return [folder]
        where, _, kind = self.file.rpartition("/")
        if not re.search(r"\bN\b", kind):
            return [folder / self.file]
        width = _WIDTHS.get(where, 6)
        try:
            present = sorted(path.name for path in (folder / where).iterdir())
        except FileNotFoundError:
            present = []
        # Not a part of a longer one: RocksDB names its old logs by the time.
        number = re.compile(rf"(?<!\d)\d{{{width}}}(?!\d)")
        numbers = {int(found[0]) for name in present if (found := number.search(name))}
        last = max(numbers, default=0)
        numbers.update(range(last + 1, last + 1 + AHEAD))
        return [folder / where / re.sub(r"\bN\b", f"{n:0{width}}", kind) for n in sorted(numbers)]


@dataclass(slots=True)
class Recording:
    """The calls of a bookie about its files, as strace tells them line by line."""

    folder: Path
    phase: Phase = "start"
    """Of the calls that are taken next."""
    calls: int = 0
    quiet: int = 0
    """How many calls in a row were of a known kind."""
    seen: dict[tuple[Phase, str, str], int] = field(default_factory=dict)
    """By phase, call and file: how many of them one thread made."""
    _by_thread: Counter[tuple[Phase, str, str, str]] = field(default_factory=Counter)

    def take(self, line: str) -> None:
        """One line of strace with `-f -y`. A call that another thread's line splits counts where it
        begins. An `open` counts where it makes a file.
        """
        found = _LINE.match(line)
        if found is None:
            return
        thread, name, rest = found.groups()
        file = self._file(rest)
        if file is None or (name in _OPENS and "O_CREAT" not in rest):
            return
        place = self.phase, name, file
        self.calls += 1
        self.quiet = self.quiet + 1 if place in self.seen else 0
        self._by_thread[*place, thread] += 1
        self.seen[place] = max(self.seen.get(place, 0), self._by_thread[*place, thread])

    def _file(self, rest: str) -> str | None:
        """The first file below the folder that a call names."""
        found = re.search(rf'{re.escape(str(self.folder))}(?:/([^"<>]*))?[">]', rest)
        if found is None:
            return None
        return _NUMBER.sub("N", (found[1] or "").rstrip("/")) or "."

    def sites(self) -> list[Site]:
        """A site for each kind of call and error; two where a start or a stop made two such calls."""
        return sorted(
            Site(phase, name, file, nth, error)
            for (phase, name, file), count in self.seen.items()
            for nth in range(1, self._nths(phase, name, count) + 1)
            for error in self._errors(phase, name)
        )

    @staticmethod
    def _errors(phase: Phase, name: str) -> tuple[str, ...]:
        also = (ALSO[name],) if phase == "running" and name in ALSO else ()
        return (ERROR_OF[name], *also)

    @staticmethod
    def _nths(phase: Phase, name: str, count: int) -> int:
        return 1 if phase == "running" or name in _READS else min(count, NTH_MAX)


class Recorder:
    """strace on one bookie from its start, which makes no call fail."""

    def __init__(self, folder: Path, out: Path) -> None:
        self.recording = Recording(folder)
        self._out = out
        self._offset = 0
        out.unlink(missing_ok=True)

    @property
    def prefix(self) -> tuple[str, ...]:
        """In front of the bookie's command; it stays the same process."""
        names = ",".join(f"?{name}" for name in ERROR_OF)
        return ("strace", "-D", "-o", str(self._out), "-f", "-y", "-qq", "-e", f"trace={names}")

    def read(self) -> Recording:
        """The recording as far as it is."""
        try:
            with self._out.open("rb") as file:
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return self.recording
        if whole:
            self._offset += len(whole) + 1
            for line in whole.decode(errors="replace").splitlines():
                self.recording.take(line)
        return self.recording


def usable() -> None:
    """Raises: Unusable where no call can be made to fail."""
    need("strace")
    said = call("strace", "-qq", "-o", "/dev/null", "-e", "inject=fsync:error=EIO", "true")
    if said:
        raise Unusable(f"strace: {said.strip()}")


class Tracer:
    """strace on one process. Its file tells what came of it."""

    def __init__(self, site: Site, folder: Path, out: Path) -> None:
        """`folder`: of the bookie, with the files that it has now."""
        self._options = site.options(folder)
        self._out = out
        self._process: asyncio.subprocess.Process | None = None
        out.unlink(missing_ok=True)

    @property
    def prefix(self) -> tuple[str, ...]:
        """In front of a command that is to be traced from its start, as the same process."""
        return ("strace", "-D", "-o", str(self._out), *self._options)

    async def attach(self, pid: int) -> None:
        """Trace a process that runs. Raises: DeadlineMissed."""
        argv = ("strace", "-o", str(self._out), *self._options, "-p", str(pid))
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
        """Whether a sync of a segment was told that it failed."""
        return any(map(breaks_the_log, self.failed()))


def breaks_the_log(line: str) -> bool:
    """Whether a bookie must end after this call: what it wrote may be lost, though a next sync says ok.
    Of a segment that is still being made nothing was told, and where the disk is full it is thrown
    away and made anew.
    """
    found = re.search(r"sync\(.*/log/\d+\.(log|new)", line)
    return found is not None and (found[1] == "log" or " EIO " in line)
