"""A forked child: it does one thing and ends, and tells its parent line by line."""

import contextlib
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Final

import orjson

from services.local.process import die_with

MEMORY_BYTES_MAX: Final = 4 << 30
"""What a loop without an end may take before it is taken for what it is."""

_TURN_S: Final = 0.5


@dataclass(slots=True)
class Watch:
    """How long a child may take over what it last told. Processor time is what a loop without an end uses,
    however busy the machine is; `wall_s` is for what waits for nothing.
    """

    cpu_s: float = 60.0
    wall_s: float = 600.0
    began_cpu: float = field(default=0.0)
    began: float = field(default_factory=time.monotonic)

    def again(self, cpu_s: float, wall_s: float, used: float) -> None:
        """The next thing begins."""
        self.cpu_s, self.wall_s = cpu_s, wall_s
        self.began_cpu, self.began = used, time.monotonic()

    def is_over(self, used: float) -> bool:
        """Whether it takes too long."""
        return used - self.began_cpu > self.cpu_s or time.monotonic() - self.began > self.wall_s


Notify = Callable[[Any], None]


class Child:
    """Forks, and yields what the child tells. `watch` ends it where it hangs; so does `stop`."""

    def __init__(self, work: Callable[[Notify], None]) -> None:
        self.watch = Watch()
        self.is_overdue = False
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            _be_child(work, os.fdopen(writing, "wb"), parent)
        os.close(writing)
        self._reading = reading
        self._is_over = False

    def reported(self) -> Iterator[Any]:
        """Each line, until the child ends or takes too long."""
        rest = b""
        try:
            while True:
                ready, _, _ = select.select([self._reading], [], [], _TURN_S)
                if not ready:
                    if self.watch.is_over(self.used_s()):
                        self.is_overdue = True
                        return
                    continue
                data = os.read(self._reading, 1 << 20)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    yield orjson.loads(line)
        finally:
            self.stop()

    def used_s(self) -> float:
        """Processor time of the child until now."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:  # noqa: PTH123
                parts = file.read().rpartition(b")")[2].split()
        except OSError:
            return 0.0
        return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End it and all that it has started."""
        if self._is_over:
            return
        self._is_over = True
        for kill, whom in ((os.killpg, self.pid), (os.kill, self.pid)):
            with contextlib.suppress(ProcessLookupError):
                kill(whom, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._reading)


def _be_child(work: Callable[[Notify], None], writing: IO[bytes], parent: int) -> None:
    """The child's whole life."""
    try:
        os.setpgid(0, 0)  # Ctrl-C is the parent's; and a group ends as one
        die_with(parent)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        work(lambda what: _write(writing, what))
    except BaseException as error:  # noqa: BLE001 - the parent is to know
        _write(writing, {"broken": repr(error)[:300]})
    finally:
        os._exit(0)


def _write(writing: IO[bytes], what: Any) -> None:
    writing.write(orjson.dumps(what) + b"\n")
    writing.flush()
