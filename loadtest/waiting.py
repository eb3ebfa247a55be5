"""Waits for a condition that must become true. Tests and load use no other way of waiting.

A missed deadline is a liveness failure, possibly of a shared and slow machine. It has its own class
to distinguish it from a wrong result (AssertionError), which is always a defect.
"""

import asyncio
import inspect
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar, overload

from services.local.process import Process

T = TypeVar("T")

DEADLINE_S: Final = 120.0
"""Far longer than any operation that does not hang. A long deadline normally costs nothing."""
_POLL_S: Final = 0.05


class DeadlineMissed(Exception):
    """A condition did not become true in time. The message has its last result."""

    def __init__(self, what: str, last: object, deadline_s: float) -> None:
        super().__init__(f"not within {deadline_s:g} s: {what}; seen last: {last!r}")
        self.what = what
        self.last = last


@overload
async def until(
    predicate: Callable[[], Coroutine[Any, Any, T]],
    what: str,
    deadline_s: float = DEADLINE_S,
    *,
    passing: tuple[type[Exception], ...] = (),
) -> T: ...
@overload
async def until(
    predicate: Callable[[], T],
    what: str,
    deadline_s: float = DEADLINE_S,
    *,
    passing: tuple[type[Exception], ...] = (),
) -> T: ...
async def until(
    predicate: Callable[[], Any],
    what: str,
    deadline_s: float = DEADLINE_S,
    *,
    passing: tuple[type[Exception], ...] = (),
) -> Any:
    """Call `predicate` until its result is true, and return the result. Raises: DeadlineMissed.

    `predicate` may be a coroutine function. A call that hangs counts as false, and so do exceptions
    of the types in `passing`. All other exceptions end the wait.
    """
    last: object = None
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    while True:
        limit = asyncio.timeout_at(end)
        try:
            async with limit:
                answer = predicate()
                if inspect.isawaitable(answer):
                    answer = await answer
        except TimeoutError as error:
            if limit.expired():
                raise DeadlineMissed(what, last, deadline_s) from error
            if not isinstance(error, passing):
                raise
            last = error
        except passing as error:
            last = error
        else:
            if answer:
                return answer
            last = answer
        if loop.time() >= end:
            raise DeadlineMissed(what, last, deadline_s)
        await asyncio.sleep(_POLL_S)


def until_sync(
    predicate: Callable[[], T],
    what: str,
    deadline_s: float = DEADLINE_S,
    *,
    passing: tuple[type[Exception], ...] = (),
) -> T:
    """Like `until`, for code without an event loop."""
    last: object = None
    end = time.monotonic() + deadline_s
    while True:
        try:
            answer = predicate()
        except passing as error:
            last = error
        else:
            if answer:
                return answer
            last = answer
        if time.monotonic() >= end:
            raise DeadlineMissed(what, last, deadline_s)
        time.sleep(_POLL_S)


def stop(process: Process, how: signal.Signals, deadline_s: float) -> bool:
    """Stop a process with a signal, and wait for its end. Returns False if it had to be killed."""
    if process.poll() is not None:
        return True
    process.send_signal(how)
    try:
        process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True
