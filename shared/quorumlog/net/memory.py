"""Return freed memory to the operating system.

The C library keeps the memory of a busy time: after some hundred megabytes of pages or bodies the process
would stay as large for ever. Without glibc nothing is returned.
"""

import asyncio
import ctypes
import logging
from typing import Final

log = logging.getLogger(__name__)

_LOOK_S: Final = 5.0
_WORTH_BYTES: Final = 32 << 20
"""Less memory, freed since the last time, is not worth the walk over the whole heap (taste)."""
_FIELDS: Final = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
    "keepcost",
)  # fmt: skip


class _Usage(ctypes.Structure):
    """`struct mallinfo2`; `fordblks` is the free memory."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]  # ctypes' form


class Heap:
    """The C library's heap."""

    def __init__(self) -> None:
        """Raises: AttributeError where the C library is not glibc."""
        library = ctypes.CDLL(None)
        self._usage, self._trim = library.mallinfo2, library.malloc_trim
        self._usage.restype = _Usage
        self._free_bytes = 0

    def free_bytes(self) -> int:
        """Free memory of the heap, whether the system has it back or not."""
        return int(self._usage().fordblks)

    def trim(self) -> int:
        """Return the memory that was freed since the last call if it is worth the walk; gives its bytes."""
        free = self.free_bytes()
        freed, self._free_bytes = free - self._free_bytes, min(free, self._free_bytes)
        if freed < _WORTH_BYTES:
            return 0
        self._trim(0)
        self._free_bytes = self.free_bytes()
        return freed


async def trim_forever() -> None:
    """Return freed memory periodically."""
    try:
        heap = Heap()
    except (AttributeError, OSError):
        return
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(_LOOK_S)
        begun = loop.time()
        # In a thread: a large heap takes some milliseconds.
        freed = await asyncio.to_thread(heap.trim)
        if freed:
            took_ms = round((loop.time() - begun) * 1000)
            log.info("memory-given-back", extra={"bytes": freed, "ms": took_ms})
