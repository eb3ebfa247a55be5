"""A clock of the time in which this process was awake, for timeouts on other processes' silence.

A process that stands still (stopped, swapped out, busy with one long computation) reads no answers, yet
its timers expire; when the process resumes, they fire before its sockets are read. On this clock a
standstill takes a moment only, so that no bookie, gateway or client is blamed for it.
"""

import asyncio
from types import TracebackType
from typing import Final, Self
from weakref import ReferenceType, WeakKeyDictionary, ref

STANDSTILL_S: Final = 0.25
"""A longer pause between two looks at the clock is a standstill (taste)."""
LOOK_S: Final = 0.1
"""The interval of looks, and what a standstill counts as: if it counted as nothing, a process whose every
step is slow would wait for a dead bookie for ever."""


class Awake:
    """The clock of one event loop. Invariant: it never goes back, and never runs faster than the loop's."""

    __slots__ = ("__weakref__", "_awake_s", "_loop", "_seen")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use `awake`."""
        self._loop = loop
        self._seen = loop.time()
        self._awake_s = 0.0
        self._look()

    def time(self) -> float:
        """Seconds awake since an arbitrary moment."""
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
"""One clock for each event loop, since a standstill stops the whole loop; the loop keeps its clock alive."""


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
    """Like `asyncio.timeout`, in time awake. Raises: TimeoutError from the block."""

    __slots__ = ("_cancelling", "_clock", "_end", "_handle", "_is_expired", "_loop", "_task")

    def __init__(self, delay_s: float) -> None:
        """Must be called in the task that runs the block."""
        self._loop, self._clock = asyncio.get_running_loop(), awake()
        self._end = self._clock.time() + delay_s
        self._is_expired = False

    def extend(self, delay_s: float) -> None:
        """Postpone the end."""
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
