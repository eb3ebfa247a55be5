"""Memory goes back to the system, and one peer alone does not use up a budget."""

import asyncio
import gc
import itertools
import resource
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from quorumlog.errors import Overloaded
from quorumlog.net import memory, timers
from quorumlog.net.budget import Budget, peer_of
from quorumlog.net.memory import Circles, Heap, trim_forever
from quorumlog.net.timers import Tasks
from tests.support.waiting import within

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


@pytest.fixture
def heap() -> Heap:
    """The heap, without what earlier tests of this process freed: from that a test would take its memory."""
    try:
        heap = Heap()
    except (AttributeError, OSError):
        pytest.skip("not glibc on Linux")
    heap.trim(0)
    return heap


def test_memory_of_a_busy_time_between_two_looks_goes_back_each_time(heap: Heap) -> None:
    before = resident_bytes()

    kept = [busy_time()]
    given_back = [heap.trim()]
    # The same room is taken and freed again: the library has as much free as after the first time.
    kept.append(busy_time())
    given_back.append(heap.trim())

    assert min(given_back) > 100 * MIB, given_back
    assert resident_bytes() - before < 50 * MIB
    assert len(kept) == 2


def test_memory_that_small_blocks_kept_at_a_trim_goes_back_after_them(heap: Heap) -> None:
    """A block of 1,000 bytes keeps its page of 4,096; the last block keeps the heap's top."""
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


@pytest.mark.usefixtures("heap")
async def test_memory_goes_back_again_after_a_look_for_which_no_thread_could_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks, looked_again = itertools.count(1), asyncio.Event()

    async def to_thread(_trim: Callable[[int], int], _worth_bytes: int) -> int:
        if next(looks) == 1:
            raise RuntimeError("can't start new thread")
        looked_again.set()
        return 0

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    monkeypatch.setattr(memory, "_LOOK_S", 0.0)
    monkeypatch.setattr(timers, "_RESTART_S", 0.0)

    tasks = Tasks()
    tasks.start(trim_forever())
    async with within("a look after the one that failed"):
        await looked_again.wait()
    await tasks.close()

    assert "background-work-failed" in caplog.text


class Linked:
    """One of a circle of objects."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.usefixtures("heap")
async def test_objects_in_circles_are_freed_without_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger's writer and its timers, say: the last ones before a quiet time stayed as long as that lasted."""
    monkeypatch.setattr(memory, "_LOOK_S", 0.0)
    gc.disable()
    freed, tasks = asyncio.Event(), Tasks()
    try:
        reference = weakref.ref(Linked(), lambda _: freed.set())
        tasks.start(trim_forever())
        async with within("the circle is freed"):
            await freed.wait()
    finally:
        gc.enable()
        await tasks.close()

    assert reference() is None


LARGE_BLOCKS = """
import resource
from quorumlog.net.memory import Heap, keep_freed

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def work():
    for _ in range(100):
        memoryview(bytearray(1 << 20))[:] = bytes(1 << 20)

keep_freed()
heap = Heap()
work()
before = faults()
work()
print(faults() - before, heap.trim(0))
"""


def test_circles_that_have_grown_old_are_freed_once_it_is_quiet_after_a_busy_time() -> None:
    """Those of connections, which live for a while: Python's collector would look at them after many more objects."""
    circles, linked = Circles(), Linked()
    gc.collect(1)
    reference = weakref.ref(linked)
    del linked
    circles.free()
    is_kept = reference() is not None

    for _ in range(30):
        assert [[] for _ in range(2 * gc.get_threshold()[0])]
    circles.free()
    circles.free()

    assert is_kept
    assert reference() is None


OF_A_THREAD = """
import resource
import threading
from pathlib import Path
from quorumlog.net.memory import Heap, keep_freed

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def work():
    blocks = [b"x" * 100_000 for _ in range(500)]

keep_freed()
heap = Heap()
before = resident()
thread = threading.Thread(target=work)
thread.start()
thread.join()
heap.trim(0)
print(resident() - before)
"""


@pytest.mark.usefixtures("heap")
def test_memory_that_a_thread_took_and_freed_goes_back() -> None:
    """A bookie reads entries in threads."""
    reported = subprocess.run(
        (sys.executable, "-c", OF_A_THREAD), check=True, capture_output=True, text=True
    ).stdout

    assert int(reported) < 10 * MIB


@pytest.mark.usefixtures("heap")
def test_freed_large_blocks_are_used_again_and_go_back_when_idle() -> None:
    """In a process of its own: the library's settings are for all of a process."""
    reported = subprocess.run(
        (sys.executable, "-c", LARGE_BLOCKS), check=True, capture_output=True, text=True
    ).stdout
    faults, given_back = map(int, reported.split())

    # Of 51,200 pages that are written to.
    assert faults < 1000
    assert given_back >= MIB


def budget(limit: int = 800, share: int = 100) -> Budget:
    return Budget("bytes", "BYTES_MAX", limit, share)


def test_one_peer_alone_may_use_all_but_the_part_that_is_kept_for_others() -> None:
    bytes_ = budget()

    bytes_.take("a", 700)
    with pytest.raises(Overloaded, match=r"the limit per address is 100 \(PEER_BYTES_MAX\)"):
        bytes_.take("a", 1)

    bytes_.take("b", 100)
    assert (bytes_.used, bytes_.of("a"), bytes_.of("b")) == (800, 700, 100)
    with pytest.raises(Overloaded, match=r"the limit is 800 \(BYTES_MAX\)"):
        bytes_.take("c", 1)


def test_a_peer_below_its_share_gets_no_more_than_its_share_while_it_is_tight() -> None:
    bytes_ = budget(share=50)
    bytes_.take("a", 700)

    bytes_.take("b", 30)
    with pytest.raises(Overloaded, match="PEER_BYTES_MAX"):
        bytes_.take("b", 30)

    bytes_.give("a", 100)
    bytes_.take("b", 30)
    assert bytes_.of("b") == 60


def test_what_is_refused_takes_nothing_and_what_is_given_back_is_free() -> None:
    bytes_ = budget(limit=10)

    bytes_.take("a", 6)
    with pytest.raises(Overloaded):
        bytes_.take("b", 6)
    assert (bytes_.used, bytes_.of("b")) == (6, 0)
    bytes_.give("a", 6)

    bytes_.take("b", 6)
    assert (bytes_.used, bytes_.of("a")) == (6, 0)


def test_one_of_any_size_is_taken_when_nothing_else_is() -> None:
    bytes_ = budget(limit=10, share=5)

    bytes_.take("a", 50)

    with pytest.raises(Overloaded):
        bytes_.take("b", 1)


def test_an_ipv6_host_is_one_peer_and_a_mapped_address_is_the_ipv4_one() -> None:
    assert peer_of("2001:db8:1:2::1") == peer_of("2001:db8:1:2:ffff::9%eth0")
    assert peer_of("2001:db8:1:2::1") != peer_of("2001:db8:1:3::1")
    assert peer_of("::ffff:192.0.2.1") == peer_of("192.0.2.1") == "192.0.2.1"
    assert peer_of(None) == ""
