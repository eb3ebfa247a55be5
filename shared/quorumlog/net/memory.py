"""What a process takes of the machine: memory and file descriptors.

Freed memory goes back to the operating system neither at once nor never.

By itself the C library gives a large block back as soon as it is freed, and the next one costs a page fault for each of
its pages: 1 ms per MB of a run, more than all else that a bookie does with it (measured). The memory of many small blocks,
on the other hand, it keeps: after some hundred megabytes of pages or bodies the process would stay as large for ever.
Objects that refer to each other in a circle are freed by Python's collector, which looks for them as objects are made: after
a busy time nobody makes any. Without glibc nothing of this is changed.
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
"""Less idle memory is not worth the walk over the whole heap at once (taste)."""
_LOOKS: Final = 6
"""One look in so many, every half minute, trims whatever there is: a page that a last small block kept at an earlier trim
becomes free by the end of that block, which adds next to nothing. Takes 9 ms for a heap of 600 MB (measured). It frees
circles of younger objects first.
"""
_YOUNGER, _ALL = 1, 2
"""The collector's generations to look at. The oldest has most objects, which live on: a look at a million takes 0.2 s."""
_QUIET: Final = 5
_BUSY: Final = 3
"""So many times the collector looks at the newest objects in a quiet half minute at most, and in a busy time at least: as
often as 10,000 objects were made and not freed (taste)."""
_KEPT_BYTES: Final = 64 << 20
"""So much freed memory at the heap's end is kept for the next large block until a look finds it idle."""
_IN_HEAP_BYTES: Final = 32 << 20
"""Smaller blocks are taken from the heap; the most that glibc allows."""
_ARENAS: Final = 1
"""Of another thread's arena the end is never trimmed by a look. Threads that hold the interpreter's lock do not contend."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""The names of `mallopt` for these."""
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

    Idle memory counts, not the library's free memory: that includes what the system has back, so a busy
    time between two looks would leave no trace in it.
    """

    def __init__(self) -> None:
        """Raises: AttributeError where the C library is not glibc, OSError where the kernel is not Linux."""
        library = ctypes.CDLL(None)
        self._usage, self._trim = library.mallinfo2, library.malloc_trim
        self._usage.restype = _Usage
        self._least_idle_bytes = self.idle_bytes()

    def idle_bytes(self) -> int:
        """Resident memory that nobody uses: free in the library's heap, or in Python's own, which is never trimmed."""
        _, resident, shared, *_ = map(int, _STATM.read_text().split())
        usage = self._usage()
        in_use = int(usage.uordblks + usage.hblkhd)
        return (resident - shared) * resource.getpagesize() - in_use

    def trim(self, worth_bytes: int = _WORTH_BYTES) -> int:
        """Return idle memory to the system if there is so much more than at its least; the bytes returned."""
        idle = self.idle_bytes()
        self._least_idle_bytes = min(idle, self._least_idle_bytes)
        if idle - self._least_idle_bytes < worth_bytes:
            return 0
        self._trim(0)
        self._least_idle_bytes = self.idle_bytes()
        return max(0, idle - self._least_idle_bytes)


class Circles:
    """Frees objects that refer to each other, and that nobody else refers to."""

    def __init__(self) -> None:
        """All that there is now counts as looked at."""
        self._seen = self._looked_at_all = self._rounds()

    def free(self) -> None:
        """Look at younger objects; at all of them once after each busy time, whose circles may have grown old."""
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
    """Have the C library keep freed memory for a while."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    mallopt(_MMAP_THRESHOLD, _IN_HEAP_BYTES)
    mallopt(_ARENA_MAX, _ARENAS)


async def trim_forever() -> None:
    """Return freed memory periodically, also after a look that failed: threads may have run out, say."""
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
        # In a thread: a large heap takes some milliseconds.
        freed = await asyncio.to_thread(heap.trim, 0 if is_thorough else _WORTH_BYTES)
        if freed >= _WORTH_BYTES:
            took_ms = round((loop.time() - begun) * 1000)
            log.info("memory-given-back", extra={"bytes": freed, "ms": took_ms})


OWN_MAX: Final = 512
"""Reserved for the process itself: a bookie's 128 segments and 64 files of its index, a metadata service's
pool, connections to other services, and refused connections.
"""


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard limit, and return the limit in force.

    A process without free descriptors can't open its own files, and the event loop closes new connections silently. So
    clients are refused (429) before they take the descriptors that the process needs itself.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems refuse the value that they report as the hard limit.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def connections_within(descriptors: int, wanted: int) -> int:
    """The connections of clients: `wanted`, or fewer where descriptors are scarce, but at least half of the descriptors."""
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
