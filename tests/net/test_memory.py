"""Memory that was freed goes back to the system, whenever it was taken and freed."""

import resource
from pathlib import Path

import pytest

from quorumlog.net.memory import Heap

MIB = 1 << 20
BLOCK_BYTES = 100_000
"""Small enough for the C library's heap: larger blocks may be mappings of their own."""
BLOCKS = 2000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def busy_time() -> list[bytes]:
    """Take and free much memory; the few blocks that stay keep the heap's top where it is."""
    blocks = [bytes(BLOCK_BYTES) for _ in range(BLOCKS)]
    return blocks[:: BLOCKS // 10] + blocks[-1:]


def test_memory_of_a_busy_time_between_two_looks_goes_back_each_time() -> None:
    try:
        heap = Heap()
    except (AttributeError, OSError):
        pytest.skip("not glibc on Linux")
    before = resident_bytes()

    kept = [busy_time()]
    given_back = [heap.trim()]
    # The same room is taken and freed again: the library has as much free as after the first time.
    kept.append(busy_time())
    given_back.append(heap.trim())

    assert min(given_back) > 100 * MIB, given_back
    assert resident_bytes() - before < 50 * MIB
    assert len(kept) == 2


def test_memory_that_small_blocks_kept_at_a_trim_goes_back_after_them() -> None:
    """A block of 1,000 bytes keeps its page of 4,096; the last block keeps the heap's top."""
    try:
        heap = Heap()
    except (AttributeError, OSError):
        pytest.skip("not glibc on Linux")
    before = resident_bytes()

    blocks = [bytes(1000) for _ in range(200_000)]
    last, kept = blocks[-1], blocks[::8]
    del blocks
    heap.trim()
    while_kept = resident_bytes() - before
    del kept
    heap.trim(0)

    assert while_kept > 80 * MIB
    assert resident_bytes() - before < 40 * MIB
    assert len(last) == 1000
