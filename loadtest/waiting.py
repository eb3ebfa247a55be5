"""Waiting for what must happen in the end: the only way in which tests and load wait.

A deadline that passes is a liveness failure on a machine that may be shared and slow. It has its
own class so that it can be told from a wrong answer (AssertionError), which is never forgiven.
"""

import asyncio
import inspect
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar, overload

T = TypeVar("T")

DEADLINE_S: Final = 120.0
"""Far above what anything takes that does not hang: it costs nothing where all is well."""
_POLL_S: Final = 0.05


class DeadlineMissed(Exception):
    """What was awaited did not happen in time; says what, and what was seen last."""

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
    """Ask until the answer is true, and return it.

    `predicate` may be a coroutine function; one that hangs counts as not yet. Exceptions named in
    `passing` count as not yet too, all others end the wait.
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
    """The same where no event loop runs."""
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
