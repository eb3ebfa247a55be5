"""An event loop whose time is virtual: where it would wait, it jumps to the next timer."""

import asyncio
import selectors
from collections.abc import Callable
from typing import Any


class Stuck(AssertionError):
    """Nothing is scheduled, and somebody waits: it would be for ever."""


class _Skip(selectors.SelectSelector):
    """Waits for nothing but time, and that passes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("nothing is scheduled")
        self.now_s += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs what a real loop runs, in the same order each time."""

    def __init__(self) -> None:
        self._skip = _Skip()
        super().__init__(self._skip)
        self.set_exception_handler(self._failed)
        self.failures: list[str] = []
        """What tasks and callbacks raised and nobody asked for: defects."""

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._skip.now_s

    def run_in_executor(
        self, _executor: object, work: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """What a thread would do is done at once: a thread is in no order."""
        future = self.create_future()
        future.set_result(work(*args))
        return future

    def _failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")
