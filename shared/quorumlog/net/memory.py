"""Manages a process's use of memory and file descriptors.

Freed memory is returned to the operating system, but not at once. By default the C library returns
a large block as soon as it is freed. The next large block then costs a page fault per page: 1 ms
per MB of a run, more than all other work of a bookie on the run (measured). The library never
returns the memory of many small blocks, so after some hundred megabytes of pages or bodies the
process would stay that large. Python's collector frees objects in reference cycles. It runs only
when objects are created, so rarely after a busy time. Without glibc, this module changes nothing.
"""

import asyncio
import contextlib
import ctypes
import gc
import itertools
import logging
import resource
from functools import partial
from pathlib import Path
from typing import Final

from quorumlog.net.timers import restarted

log = logging.getLogger(__name__)

_LOOK_S: Final = 5.0
_WORTH_BYTES: Final = 32 << 20
"""Minimum idle memory that justifies a walk over the whole heap (chosen by judgement)."""
_LOOKS: Final = 6
"""Number of checks (half a minute) between trims of even little idle memory. One small block may
have kept a whole page at the previous trim, and freeing the block hardly adds idle memory. Such a
trim takes 9 ms for a heap of 600 MB (measured), after a collection of younger objects."""
_YOUNGER, _ALL = 1, 2
"""Generations to collect. The oldest has most objects: collecting a million takes 0.2 s."""
_QUIET: Final = 5
_BUSY: Final = 3
"""Number of automatic collections in half a minute: at most `_QUIET` if quiet, at least `_BUSY` if
busy. Each collection follows 10,000 new objects that were not freed (chosen by judgement)."""
_KEPT_BYTES: Final = 64 << 20
"""Maximum free memory at the heap's end, kept for the next large block until a check returns it."""
_IN_HEAP_BYTES: Final = 32 << 20
"""Size below which blocks are allocated in the heap: the largest value that glibc allows."""
_ARENAS: Final = 1
"""Number of arenas: one for all threads, since a trim shrinks only the main arena. The
interpreter's lock prevents contention."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""The numbers of the three parameters of `mallopt`."""
_FIELDS: Final = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
    "keepcost",
)  # fmt: skip
_STATM: Final = Path("/proc/self/statm")


class _Usage(ctypes.Structure):
    """`struct mallinfo2`; `uordblks` and `hblkhd` are the memory in use."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]  # ctypes' form


class Heap:
    """The C library's heap.

    `trim` depends on idle memory. The library's count of free memory also includes memory that was
    already returned to the system, so the count would not show a busy time between two checks.
    """

    def __init__(self) -> None:
        """Raises: AttributeError without glibc, OSError if the kernel is not Linux."""
        library = ctypes.CDLL(None)
        self._usage, self._trim = library.mallinfo2, library.malloc_trim
        self._usage.restype = _Usage
        self._least_idle_bytes = self.idle_bytes()

    def idle_bytes(self) -> int:
        """Resident but unused memory in the library's heap and Python's, which is never trimmed."""
        _, resident, shared, *_ = map(int, _STATM.read_text().split())
        usage = self._usage()
        in_use = int(usage.uordblks + usage.hblkhd)
        return (resident - shared) * resource.getpagesize() - in_use

    def trim(self, worth_bytes: int = _WORTH_BYTES) -> int:
        """Return idle memory to the system if it exceeds its minimum by `worth_bytes`. Returns the
        number of bytes given back.
        """
        idle = self.idle_bytes()
        self._least_idle_bytes = min(idle, self._least_idle_bytes)
        if idle - self._least_idle_bytes < worth_bytes:
            return 0
        self._trim(0)
        self._least_idle_bytes = self.idle_bytes()
        return max(0, idle - self._least_idle_bytes)


class Circles:
    """Frees unreachable objects that refer to each other (reference cycles)."""

    def __init__(self) -> None:
        """Begin with all existing objects counted as checked."""
        self._seen = self._looked_at_all = self._rounds()

    def free(self) -> None:
        """Collect younger objects; after a busy time, collect all, since cycles may have aged."""
        rounds, self._seen = self._seen, self._rounds()
        is_quiet = self._seen - rounds <= _QUIET
        if is_quiet and self._seen - self._looked_at_all >= _BUSY:
            self._looked_at_all = self._seen
            gc.collect(_ALL)
        else:
            gc.collect(_YOUNGER)

    @staticmethod
    def _rounds() -> int:
        newest: int = gc.get_stats()[0]["collections"]
        return newest


def keep_freed() -> None:
    """Make the C library keep freed memory for a while."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    mallopt(_MMAP_THRESHOLD, _IN_HEAP_BYTES)
    mallopt(_ARENA_MAX, _ARENAS)


async def trim_forever() -> None:
    """Return freed memory periodically, even after a failed check (such as one that got no thread)."""
    try:
        heap = Heap()
    except (AttributeError, OSError):
        return
    await restarted(partial(_trim_periodically, heap))


async def _trim_periodically(heap: Heap) -> None:
    loop, circles = asyncio.get_running_loop(), Circles()
    for look in itertools.count(1):
        await asyncio.sleep(_LOOK_S)
        begun = loop.time()
        is_thorough = look % _LOOKS == 0
        if is_thorough:
            circles.free()
        # Trim in a thread, because the trim of a large heap takes some milliseconds.
        freed = await asyncio.to_thread(heap.trim, 0 if is_thorough else _WORTH_BYTES)
        if freed >= _WORTH_BYTES:
            took_ms = round((loop.time() - begun) * 1000)
            log.info("memory-given-back", extra={"bytes": freed, "ms": took_ms})


OWN_MAX: Final = 512
"""Number of descriptors reserved for the process itself: a bookie's 128 segments and 64 index
files, a metadata service's pool, connections to other services, and refused connections."""


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard limit, and return the resulting limit.

    Without free descriptors a process can't open its own files, and its event loop closes new
    connections silently. So clients are refused (429) before the process itself lacks descriptors.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems refuse the value that they report as the hard limit.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def connections_within(descriptors: int, wanted: int) -> int:
    """The limit of client connections: `wanted`, or less if descriptors are scarce, but at least
    half of the descriptors.
    """
    if descriptors == resource.RLIM_INFINITY:
        return wanted
    allowed = min(wanted, max(descriptors - OWN_MAX, descriptors // 2))
    if allowed < wanted:
        log.warning(
            "few-descriptors",
            extra={
                "descriptors": descriptors,
                "connections_max": allowed,
                "wanted": wanted,
                "hint": "raise the hard limit of open files (ulimit -Hn, LimitNOFILE)",
            },
        )
    return allowed
