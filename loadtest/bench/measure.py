"""Measurements: a rate, latencies, and the CPU and memory of each process.

Times in seconds are unreliable on a shared machine. The CPU per entry of each process depends least
on the machine's other work.
"""

import asyncio
import os
import resource
import shutil
import signal
import statistics
from asyncio.subprocess import PIPE
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from pathlib import Path
from time import perf_counter as clock
from typing import Final, Self, TypeVar

import orjson
import psutil

from services.local.process import Become, in_child

T = TypeVar("T")
R = TypeVar("R")

KIB: Final = 1024
ROLES: Final = ("client", "gateway", "servers", "others")
"""Roles of processes. `servers` are bookies and servers of JetStream; `others` are metadata
services, databases and ZooKeeper.
"""

_WRK_SCRIPT: Final = Path(__file__).with_name("wrk.lua")

Figures = dict[str, float]
"""The figures of one round of a measurement, by name; empty if the round failed."""
Pids = Mapping[str, Sequence[int]]
"""The process ids of each role. A role without processes is left out."""
Step = Callable[[], Awaitable[object] | None]
"""Begins the next call of a worker. Returns None if the worker has no work left."""


def payload_of(size: int) -> bytes:
    """A random payload, which can't be compressed."""
    return os.urandom(size)


class Meter:
    """Measures the time of a `with` block, and the CPU and memory of each role during the block."""

    def __init__(self, pids: Pids, *, families: Collection[str] = ()) -> None:
        """`families`: roles whose processes include their children, even ended ones."""
        self._roles = {role: [psutil.Process(pid) for pid in own] for role, own in pids.items()}
        self._families = families
        self._began = 0.0
        self._before: Mapping[str, float] = {}
        self._memory_before: Mapping[str, float] = {}
        self.seconds = 0.0
        self.cpu_s: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._memory_before = self.memory(max)
        self._before = self._taken()
        self._began = clock()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            return  # a process may be gone
        self.seconds = clock() - self._began
        after = self._taken()
        self.cpu_s = {role: after[role] - self._before[role] for role in after}

    def _ask(self, role: str, ask: Callable[[psutil.Process], float]) -> Iterator[float]:
        for process in self._roles[role]:
            yield ask(process)
            for child in process.children(recursive=True) if role in self._families else ():
                with suppress(psutil.NoSuchProcess):  # it has just ended
                    yield ask(child)

    def _taken(self) -> dict[str, float]:
        def cpu_s(process: psutil.Process) -> float:
            times = process.cpu_times()
            return times.user + times.system

        def with_ended(process: psutil.Process) -> float:
            """The CPU of a process and of its ended children."""
            return sum(process.cpu_times()[:4])

        return {
            role: sum(self._ask(role, with_ended if role in self._families else cpu_s))
            for role in self._roles
        }

    def figures(self, entries: int, size: int, times_s: Sequence[float] = ()) -> Figures:
        """Figures of a block with `entries` entries of `size` bytes. `times_s`: latencies."""
        megabytes = entries * size / 1e6
        found = {"entries/s": entries / self.seconds, "MB/s": megabytes / self.seconds}
        found |= percentiles(times_s)
        cpu_s = {**self.cpu_s, "all": sum(self.cpu_s.values())} if self.cpu_s else {}
        for role, taken in cpu_s.items():
            found[f"{role} us"] = taken / entries * 1e6
            found[f"{role} ms/MB"] = taken / megabytes * 1e3
        for role, megabytes in self.memory(max).items():
            found[f"{role} RSS before"] = self._memory_before[role]
            found[f"{role} RSS"] = megabytes
        return found

    def shares(self) -> Figures:
        """The percentage of a core that each role took."""
        return {f"{role} %": 100 * taken / self.seconds for role, taken in self.cpu_s.items()}

    def memory(self, of: Callable[[Iterable[float]], float]) -> Figures:
        """Resident MB of each role: of the largest process (`max`), or of all (`sum`)."""
        return {
            role: of(self._ask(role, lambda each: each.memory_info().rss / 1e6))
            for role in self._roles
        }


def percentiles(times_s: Sequence[float]) -> Figures:
    """The percentiles 50, 99 and 99.9 of latencies, in milliseconds; empty without latencies."""
    ordered = sorted(times_s)
    return {
        f"p{percent:g} ms": ordered[int(len(ordered) * percent / 100)] * 1e3
        for percent in (50, 99, 99.9)
        if ordered
    }


def medians(rounds: Sequence[Figures]) -> Figures:
    """The median of each figure over the rounds that have it."""
    names = dict.fromkeys(name for each in rounds for name in each)
    return {
        name: statistics.median(each[name] for each in rounds if name in each) for name in names
    }


def to_read(seconds: float) -> int:
    """The number of entries to write for reads in order: fewer for a short trial run."""
    return 1000 * max(1, min(50, round(50 * seconds)))


def during(seconds: float) -> Iterator[float]:
    """Yield the current time repeatedly until the seconds are over, and at least once."""
    now = clock()
    end = now + seconds
    yield now
    while (now := clock()) < end:
        yield now


async def at_a_rate(count: int, rate: float, begin_s: float = 0.0) -> AsyncIterator[int]:
    """Yield the numbers below `count`, `rate` per second. Late numbers follow at once."""
    loop = asyncio.get_running_loop()
    start = loop.time() + begin_s
    for number in range(count):
        await asyncio.sleep(start + number / rate - loop.time())
        yield number


async def for_each(items: Iterable[T], call: Callable[[T], Awaitable[R]], at_once: int) -> list[R]:
    """Call with each item, `at_once` calls at a time. Returns the results in the items' order."""
    left = enumerate(items)
    found: dict[int, R] = {}

    async def work() -> None:
        for number, item in left:
            found[number] = await call(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())
    return [found[number] for number in sorted(found)]


async def appends(
    meter: Meter,
    append: Callable[[], Awaitable[object]],
    *,
    in_flight: int,
    seconds: float,
    size: int,
    count: int = 1,
) -> Figures:
    """Measure repeated appends with `in_flight` concurrent calls of `count` entries each."""
    await append()
    return await repeated(meter, [append] * in_flight, seconds, size=size, count=count)


async def repeated(
    meter: Meter, steps: Sequence[Step], seconds: float, *, size: int = 1, count: int = 1
) -> Figures:
    """Repeat all steps concurrently, until the time is over or one step has no work left."""
    times_s: list[float] = []
    is_over = False

    async def work(step: Step) -> None:
        nonlocal is_over
        for began in during(seconds):
            call = None if is_over else step()
            if call is None:
                is_over = True
                return
            await call
            times_s.append(clock() - began)

    with meter:
        async with asyncio.TaskGroup() as group:
            for step in steps:
                group.create_task(work(step))
    return meter.figures(len(times_s) * count, size, times_s)


class Absent(Exception):
    """This machine lacks something that a measurement needs."""


class Failed(Exception):
    """Another system, or a program that makes load, gave no figures in this round."""


class Wrong(Exception):
    """The measured system gave wrong results, so its figures are meaningless."""


async def by_program(meter: Meter, argv: Sequence[str], *, deadline_s: float = 120.0) -> str:
    """Run a program that makes load, and return its output. Its CPU counts as the client's.

    The program ends with the measurement, even after an error. Raises: Failed.
    """
    before = _of_children()
    with meter:
        program = await asyncio.create_subprocess_exec(
            *argv, stdout=PIPE, stderr=PIPE, preexec_fn=in_child(Become.SELF, signal.SIGKILL)
        )
        try:
            async with asyncio.timeout(deadline_s):
                printed, errors = await program.communicate()
        except TimeoutError as error:
            raise Failed(f"{argv[0]} did not end within {deadline_s:g} s") from error
        finally:
            if program.returncode is None:
                program.kill()
                await program.wait()
    meter.cpu_s["client"] = _of_children() - before
    if program.returncode:
        raise Failed(f"{argv[0]} ended with status {program.returncode}: {errors.decode()[-500:]}")
    return printed.decode()


async def by_wrk(meter: Meter, url: str, connections: int, seconds: float) -> Figures:
    """Append one entry per request with wrk, a load generator in C. Raises: Absent, Failed."""
    wrk = shutil.which("wrk")
    if wrk is None:
        raise Absent("wrk is not installed (apt-get install wrk)")
    # wrk accepts only whole seconds, at least one.
    duration = f"-d{max(1, round(seconds))}s"
    # An answer that takes seconds on a busy disk counts as a latency, not as an error.
    argv = [
        wrk, "-t1", f"-c{connections}", duration, "--timeout", "30s", "-s", str(_WRK_SCRIPT), url, "--", str(KIB),
    ]  # fmt: skip
    reported = orjson.loads((await by_program(meter, argv)).splitlines()[-1])
    if reported["errors"]:
        raise Failed(f"wrk reported {reported['errors']} errors")
    meter.seconds = reported["us"] / 1e6
    times = {f"p{each:g} ms": reported["latency_us"][f"{each:g}"] / 1e3 for each in (50, 99, 99.9)}
    return meter.figures(reported["requests"], KIB) | times


def _of_children() -> float:
    """The CPU of this process's ended children, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
