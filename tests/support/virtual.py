"""An event loop whose clock jumps: it sleeps without waiting, and each seed is one schedule.

Only for code without sockets and processes; what a thread would do is done at once.
"""

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from functools import wraps
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
P = ParamSpec("P")


class Deadlock(Exception):
    """All tasks wait, and no event can wake them."""


class _Jumping(selectors.SelectSelector):
    """A selector in which no file is ever ready; a wait moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("nothing will ever happen")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time begins at 0, and passes only while all tasks sleep."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)
        self.set_exception_handler(self._failed)
        self.failures: list[str] = []
        """Exceptions of tasks and callbacks that no task retrieved: defects."""

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._jumping.now

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Do a thread's work here and now, because threads run in no defined order."""
        del executor
        future: asyncio.Future[T] = self.create_future()
        future.set_result(func(*args))
        return future

    def _failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]], *, seed: int) -> T:
    """Run to the end in virtual time, with the `random` module seeded. Raises: Deadlock."""
    state = random.getstate()
    random.seed(seed)
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(main())
    finally:
        random.setstate(state)


def in_virtual_time(
    *, seed: int
) -> Callable[[Callable[P, Coroutine[Any, Any, None]]], Callable[P, None]]:
    """Decorator of a test that `run_virtual` runs."""

    def decorated(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
        @wraps(test)
        def run(*args: P.args, **named: P.kwargs) -> None:
            run_virtual(lambda: test(*args, **named), seed=seed)

        return run

    return decorated
