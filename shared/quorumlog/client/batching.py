"""Batches of appends: what is submitted while a request is under way goes with the next request.

One request is under way at a time, so the order of submissions is the order of entries; and a lone
append is sent at once.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from quorumlog.errors import (
    NOT_DONE,
    ConnectionLost,
    Invalid,
    QuorumLogError,
)

P = TypeVar("P")
A = TypeVar("A")
R = TypeVar("R")

_ENTRIES_MAX: Final = 10_000
"""Of one request: the API's limit."""


@dataclass(frozen=True, slots=True)
class Batching:
    """When appends are sent. A single append that is larger than a limit is sent alone."""

    bytes_max: int = 1 << 20
    """Payload bytes of one request."""
    count_max: int = 1000
    """Entries of one request."""
    linger_ms: float = 0.0
    """How long the first append of a batch that is not full waits for more."""
    queued_bytes_max: int = 64 << 20
    """Bytes that may wait to be sent; beyond them, `submit` waits."""

    def __post_init__(self) -> None:
        if self.bytes_max < 1 or self.queued_bytes_max < 1 or self.linger_ms < 0:
            raise ValueError("sizes are at least 1, and linger_ms is not negative")
        if not 1 <= self.count_max <= _ENTRIES_MAX:
            raise ValueError(f"count_max is 1 to {_ENTRIES_MAX}")


@dataclass(frozen=True, slots=True)
class Call(Generic[P]):
    """One request, made of whole submissions."""

    payloads: Sequence[P]
    expect: int | None


def _future() -> Any:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True)
class _Submission(Generic[P, R]):
    payloads: Sequence[P]
    size: int
    expect: int | None
    done: asyncio.Future[R] = field(default_factory=_future)


Send = Callable[[Call[P]], Awaitable[A]]
Share = Callable[[A, int, int], R]
"""A submission's share of an answer: of the answer, its first payload's index, and its count."""


class Batcher(Generic[P, A, R]):
    """The queue of submissions, and the one request that is under way.

    Invariants: submissions are sent in the order of the calls, one request at a time; after a failed
    request nothing that was queued behind the request is sent, so that no gap is left unnoticed.
    """

    def __init__(
        self,
        send: Send[P, A],
        share: Share[A, R],
        size_of: Callable[[P], int],
        start: Callable[[Coroutine[Any, Any, None]], None],
        limits: Batching,
    ) -> None:
        """`start` runs a coroutine beside the caller; `send` raises QuorumLogError only."""
        self._send, self._share, self._size_of, self._start = send, share, size_of, start
        self._limits = limits
        self._queue: deque[_Submission[P, R]] = deque()
        self._bytes = 0
        self._count = 0
        self._turn = asyncio.Lock()
        """Held by the first append that waits for room; the others wait for the lock in their order."""
        self._changed = asyncio.Event()
        self._drained = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    async def submit(self, payloads: Sequence[P], expect: int | None = None) -> asyncio.Future[R]:
        """Queue an append; the future is done once the append is durable. Waits while too much is
        queued.

        An append with `expect` is sent alone.
        """
        if not payloads:
            raise ValueError("nothing to append")
        size = sum(map(self._size_of, payloads))
        async with self._turn:
            # A small append must not overtake a large one that waits for room.
            while self._bytes and self._bytes + size > self._limits.queued_bytes_max:
                self._drained.clear()
                await self._drained.wait()
        submission = _Submission[P, R](payloads, size, expect)
        self._queue.append(submission)
        self._bytes += size
        self._count += len(payloads)
        self._changed.set()
        if self._idle.is_set():
            self._idle.clear()
            self._start(self._run())
        return submission.done

    async def append(self, payloads: Sequence[P], expect: int | None = None) -> R:
        """Queue an append and wait until the append is durable."""
        return await (await self.submit(payloads, expect))

    async def flush(self) -> None:
        """Wait until nothing is queued or under way."""
        await self._idle.wait()

    async def _run(self) -> None:
        try:
            while self._queue:
                await self._linger()
                taken = self._take()
                if taken:
                    await self._send_all(taken)
        finally:
            self._fail_queued(ConnectionLost("the client was closed"))
            self._idle.set()

    async def _linger(self) -> None:
        """Wait for more submissions unless the next batch is full."""
        if not self._limits.linger_ms or self._queue[0].expect is not None:
            return
        try:
            async with asyncio.timeout(self._limits.linger_ms / 1000):
                while self._bytes < self._limits.bytes_max and self._count < self._limits.count_max:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return

    def _take(self) -> list[_Submission[P, R]]:
        """The next batch, without submissions whose callers gave up waiting."""
        taken: list[_Submission[P, R]] = []
        size = count = 0
        while self._queue:
            first = self._queue[0]
            is_full = (
                size + first.size > self._limits.bytes_max
                or count + len(first.payloads) > self._limits.count_max
            )
            if taken and (is_full or first.expect is not None or taken[0].expect is not None):
                break
            self._drop_first()
            if not first.done.done():
                taken.append(first)
                size += first.size
                count += len(first.payloads)
        return taken

    def _drop_first(self) -> None:
        gone = self._queue.popleft()
        self._bytes -= gone.size
        self._count -= len(gone.payloads)
        self._drained.set()

    async def _send_all(self, taken: Sequence[_Submission[P, R]]) -> None:
        payloads = [payload for submission in taken for payload in submission.payloads]
        try:
            answer = await self._send(Call(payloads, taken[0].expect))
        except Invalid as error:
            if len(taken) > 1 and error.outcome == NOT_DONE:
                # One submission is invalid; the others are sent one by one and need not fail with it.
                for submission in taken:
                    await self._send_all([submission])
            else:
                _fail(taken, error)
        except asyncio.CancelledError:
            _fail(taken, ConnectionLost("the client was closed while an append was under way"))
            raise
        except QuorumLogError as error:
            _fail(taken, error)
            if taken[0].expect is None:
                self._fail_queued(error)
        else:
            index = 0
            for submission in taken:
                count = len(submission.payloads)
                if not submission.done.done():
                    submission.done.set_result(self._share(answer, index, count))
                index += count

    def _fail_queued(self, cause: QuorumLogError) -> None:
        """Fail what is queued behind a failed request: none of it was sent."""
        while self._queue:
            submission = self._queue[0]
            self._drop_first()
            error = cause.with_outcome(NOT_DONE)
            error.add_note("not sent: the append before it failed")
            _fail([submission], error)


def _fail(taken: Sequence[_Submission[P, R]], error: QuorumLogError) -> None:
    for submission in taken:
        if not submission.done.done():
            submission.done.set_exception(error if len(taken) == 1 else error.replace())
