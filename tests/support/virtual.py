"""An event loop whose clock jumps: it sleeps without waiting, and each seed is one schedule.

Only for code without sockets, threads and processes.
"""

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """Everything waits, and nothing will ever happen."""


class _Jumping(selectors.SelectSelector):
    """Nothing is ever ready; a wait moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("nothing will ever happen")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time begins at 0 and passes only while everybody sleeps."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]], *, seed: int) -> T:
    """Run to the end in virtual time, with the `random` module seeded. Raises: Deadlock."""
    state = random.getstate()
    random.seed(seed)
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(main())
    finally:
        random.setstate(state)
