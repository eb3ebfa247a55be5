"""Timers and tasks for up to 10,000 open ledgers, the database's clock, and the clock `awake`.

Machines' timers have only a few different durations and are never cancelled. So there is a queue
for each duration, in the order of expiry, and one timer of the event loop serves all queues.

`awake` is a clock that counts only the time in which this process was awake, for timeouts on other
processes. A process that stands still (stopped, swapped out, busy with one long computation) reads
no answers, but its timers expire. When the process resumes, its timers fire before its sockets are
read. On the clock `awake`, a standstill takes only a moment, so other processes don't seem silent.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime
from math import inf
from types import TracebackType
from typing import Any, Final, Self
from weakref import ReferenceType, WeakKeyDictionary, ref

from quorumlog.protocol.clock import CLOCK_DIFFERENCE_S, DatabaseClock

log = logging.getLogger(__name__)

TICK_S: Final = 0.01
"""Interval in which timers share a wake-up: a fifth of the shortest timer (hedge)."""

_RESTART_S: Final = 1.0
"""Pause before a restart of background work (chosen by judgement)."""


class Timers:
    """The timers of one event loop. Invariant: the times in each queue ascend."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, time: Callable[[], float] | None = None
    ) -> None:
        """`time`: the timers' clock, `awake` in a real process; by default the loop's clock."""
        self._loop = loop
        self._time = time or loop.time
        self._queues: dict[float, deque[tuple[float, Callable[..., None], tuple[Any, ...]]]] = {}
        self._armed: asyncio.TimerHandle | None = None
        self._armed_at = self._due = 0.0
        self._was_late = False
        self._closed = False

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call `call(*args)` once, after `delay_s` seconds or a little later; never for `inf`."""
        if delay_s == inf:
            return
        when = self._time() + delay_s
        queue = self._queues.get(delay_s)
        if queue is None:
            queue = self._queues[delay_s] = deque()
        queue.append((when, call, args))
        if self._armed is None or when < self._armed_at - TICK_S:
            self._arm(when)

    def close(self) -> None:
        """Drop all timers; timers that are added later are never called."""
        self._closed = True
        self._queues.clear()
        if self._armed is not None:
            self._armed.cancel()
            self._armed = None

    def _arm(self, when: float) -> None:
        if self._closed:
            return
        if self._armed is not None:
            self._armed.cancel()
        self._armed_at = when
        self._due = self._loop.time() + when - self._time()
        self._armed = self._loop.call_at(self._due, self._fire)

    def _fire(self) -> None:
        self._armed = None
        now = self._time()
        if self._loop.time() - self._due > STANDSTILL_S and not self._was_late:
            # The process stood still and read no answers, so first let it read the answers that have arrived.
            self._was_late = True
            self._arm(now + LOOK_S)
            return
        self._was_late = False
        due = []
        for delay_s in list(self._queues):
            queue = self._queues[delay_s]
            while queue and queue[0][0] <= now:
                due.append(queue.popleft())
            if not queue:
                del self._queues[delay_s]
        for _, call, args in due:
            try:
                call(*args)
            except Exception:
                log.exception("timer-failed")
        ends = [queue[0][0] for queue in self._queues.values() if queue]
        if ends and (self._armed is None or min(ends) < self._armed_at):
            self._arm(max(min(ends), now + TICK_S))


class Tasks:
    """Owns a process's tasks for rare work, so that none is lost and all end with the process."""

    def __init__(self) -> None:
        """Begin without tasks."""
        self._running: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` to its end, and log an exception. After `close`, no work starts."""
        if self._closed:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)

    async def close(self) -> None:
        """Cancel the running tasks, and wait until they have ended."""
        self._closed = True
        for task in self._running:
            task.cancel()
        await self.ended()

    async def ended(self) -> None:
        """Wait until the running tasks have ended."""
        await asyncio.gather(*self._running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("task-failed", exc_info=task.exception())


async def restarted(work: Callable[[], Awaitable[None]]) -> None:
    """Run background work for ever: whenever the work ends, log its exception and restart it."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("background-work-failed")
        await asyncio.sleep(_RESTART_S)


_LATEST_S: Final = 253_402_300_799
"""The last second of the year 9999."""


def wall_s() -> float:
    """This machine's clock in seconds since 1970, for display and not for durations."""
    return datetime.now(UTC).timestamp()


def time_text(at_s: float) -> str:
    """A time in seconds since 1970 in the format of the APIs, such as 2026-01-02T03:04:05.678Z."""
    at = datetime.fromtimestamp(min(at_s, _LATEST_S), UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


CLOCK_SETTING: Final = (
    "if the database's clock jumps by more than this, or differs by more from this machine's clock, nothing is deleted by"
    " age (docs/guides/database.md)"
)


class HeardClock:
    """A database's clock, estimated from the times in the database's answers."""

    def __init__(self, difference_s: float = CLOCK_DIFFERENCE_S) -> None:
        self._clock = DatabaseClock(difference_s)
        self._is_doubted = False
        """Whether the last log line about this clock reported a doubt."""

    @property
    def doubt(self) -> str:
        """The reason why nothing may be deleted by age; empty if deletion is allowed (rule 26c)."""
        return self._clock.doubt

    def hear(self, database_ms: float) -> str:
        """Process a time that the database has just reported, and return `doubt`."""
        monotonic_s = asyncio.get_running_loop().time()
        wall_ms = datetime.now(UTC).timestamp() * 1000
        doubt = self._clock.hear(database_ms, wall_ms=wall_ms, monotonic_s=monotonic_s)
        if bool(doubt) != self._is_doubted:
            self._is_doubted = bool(doubt)
            event = "clock-doubted" if doubt else "clock-trusted"
            log.warning(event, extra={"database_ms": int(database_ms), "why": doubt})
        return doubt

    def now_ms(self) -> int | None:
        """The database's current time, without doubtful jumps; None before the first report."""
        return self._clock.now_ms(asyncio.get_running_loop().time())


STANDSTILL_S: Final = 0.25
"""Minimum pause between two checks of the clock that counts as a standstill (by judgement)."""
LOOK_S: Final = 0.1
"""Interval of checks. A standstill counts as one interval: if it counted as zero, a process with
only slow steps would wait for a dead bookie for ever."""


class Awake:
    """An event loop's clock of awake time. It never goes back, and never runs ahead of the loop."""

    __slots__ = ("__weakref__", "_awake_s", "_loop", "_seen")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Don't call this directly: call `awake`."""
        self._loop = loop
        self._seen = loop.time()
        self._awake_s = 0.0
        self._look()

    def time(self) -> float:
        """The awake time in seconds since an arbitrary moment."""
        now = self._loop.time()
        step_s = now - self._seen
        self._seen = now
        self._awake_s += step_s if step_s < STANDSTILL_S else LOOK_S
        return self._awake_s

    def _look(self) -> None:
        self.time()
        self._loop.call_later(LOOK_S, self._look)


_clocks: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, ReferenceType[Awake]]] = (
    WeakKeyDictionary()
)
"""One clock per event loop, since a standstill stops the loop; the loop keeps its clock alive."""


def awake() -> Awake:
    """The clock of the running event loop."""
    loop = asyncio.get_running_loop()
    known = _clocks.get(loop)
    clock = None if known is None else known()
    if clock is None:
        clock = Awake(loop)
        _clocks[loop] = ref(clock)
    return clock


class awake_timeout:  # noqa: N801  # like asyncio.timeout, which it replaces
    """A variant of `asyncio.timeout` that counts only awake time. Raises: TimeoutError."""

    __slots__ = ("_cancelling", "_clock", "_end", "_handle", "_is_expired", "_loop", "_task")

    def __init__(self, delay_s: float) -> None:
        """Must be called in the task that runs the block."""
        self._loop, self._clock = asyncio.get_running_loop(), awake()
        self._end = self._clock.time() + delay_s
        self._is_expired = False

    def extend(self, delay_s: float) -> None:
        """Postpone the timeout by `delay_s` seconds."""
        self._end += delay_s

    async def __aenter__(self) -> Self:
        """Begin the block."""
        task = asyncio.current_task()
        assert task is not None, "a timeout is for a task"
        self._task, self._cancelling = task, task.cancelling()
        self._arm(self._end - self._clock.time())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """End the block."""
        self._handle.cancel()
        is_ours = self._is_expired and self._task.uncancel() <= self._cancelling
        if is_ours and kind is not None and issubclass(kind, asyncio.CancelledError):
            raise TimeoutError from error

    def _arm(self, delay_s: float) -> None:
        self._handle = self._loop.call_later(max(delay_s, 0.0), self._expire)

    def _expire(self) -> None:
        left_s = self._end - self._clock.time()
        if left_s > 0:
            self._arm(left_s)
        else:
            self._is_expired = True
            self._task.cancel()
