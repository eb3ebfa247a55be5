"""Batches of appends: what is submitted while a request is under way goes with the next request.

One request is under way at a time, so the order of submissions is the order of entries; and a lone
append is sent at once. Two requests could overtake each other on two connections, and no request says
what it must follow: `expect` of the second one is right too where another client has appended as many
entries meanwhile. What overlaps instead is the client's own work: the next request leaves before the
callers of the last one go on.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from itertools import chain
from typing import Final, Generic, NamedTuple, TypeVar

from quorumlog import errors
from quorumlog.client import checks
from quorumlog.client.transport import Transport

log = logging.getLogger(__name__)

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
        for name in ("bytes_max", "count_max", "queued_bytes_max"):
            checks.whole(name, getattr(self, name))
        if not isinstance(self.linger_ms, int | float):
            raise TypeError(f"linger_ms is a number, not {type(self.linger_ms).__name__}")
        if self.bytes_max < 1 or self.queued_bytes_max < 1 or not self.linger_ms >= 0:
            raise ValueError("sizes are at least 1, and linger_ms is not negative")
        if not 1 <= self.count_max <= _ENTRIES_MAX:
            raise ValueError(f"count_max is 1 to {_ENTRIES_MAX}")


@dataclass(frozen=True, slots=True)
class Call(Generic[P]):
    """One request, made of whole submissions."""

    payloads: Sequence[P]
    expect: int | None
    end: float
    """When the deadline of the oldest submission ends, in the event loop's time."""


AppendFuture = asyncio.Future[R] | futures.Future[R]
"""The future of a submission: of a task of the event loop, or of another thread."""


class Submission(NamedTuple, Generic[P, R]):
    """An append in the queue or under way. A tuple: it is made for each append, and costs half."""

    payloads: Sequence[P]
    size: int
    expect: int | None
    is_alone: bool
    """No other submission travels in its request."""
    end: float
    done: AppendFuture[R]

    def is_wanted(self) -> bool:
        """Whether the caller still waits. From now on another thread can't cancel its future."""
        if isinstance(self.done, asyncio.Future):
            return not self.done.done()
        return self.done.set_running_or_notify_cancel()


Send = Callable[[Call[P]], Awaitable[A]]
Share = Callable[[A, int, int], R]
"""A submission's share of an answer: of the answer, its first payload's index, and its count."""


class Batcher(Generic[P, A, R]):
    """The queue of submissions, and the one request that is under way.

    Invariants: submissions are sent in the order of the calls, one request at a time; after a failed
    request nothing that was queued behind the request is sent, so that no gap is left unnoticed. Each
    submission ends: with its request, or with the task that sends requests, however that one ends.
    """

    def __init__(
        self,
        send: Send[P, A],
        share: Share[A, R],
        size_of: Callable[[P], int],
        transport: Transport,
        limits: Batching,
    ) -> None:
        """`size_of` raises TypeError or ValueError for a payload that can't be sent. `transport` runs the batches."""
        self._send, self._share, self._size_of = send, share, size_of
        self._transport = transport
        self._limits = limits
        self._queue: deque[Submission[P, R]] = deque()
        self._under_way: Sequence[Submission[P, R]] = ()
        self._answers: deque[tuple[Sequence[Submission[P, R]], A]] = deque()
        """Of requests whose callers do not know of the answer yet."""
        self._bytes = 0
        self._count = 0
        self._turn = asyncio.Lock()
        """Held by the first append that waits for room; the others wait for the lock in their order."""
        self._waiting_count = 0
        self._posted: list[Submission[P, R]] = []
        """What other threads have submitted and what is not queued here yet."""
        self._posted_bytes = 0
        self._changed = asyncio.Event()
        self._drained = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    # Other threads may call these methods too; the caller of `post` and `collect` holds the portal's lock.

    @property
    def deadline_s(self) -> float:
        """For one append, from the call to its end."""
        return self._transport.deadline_s

    def checked(self, payloads: Sequence[P], expect: int | None = None) -> tuple[Sequence[P], int]:
        """The payloads, in a sequence that the caller can't change, and their size.

        Raises: TypeError, ValueError for payloads that can't be sent.
        """
        given = tuple(payloads)
        if not given:
            raise ValueError("nothing to append")
        if expect is not None:
            checks.offset("expect", expect)
        if len(given) == 1:
            return given, self._size_of(given[0])
        return given, sum(map(self._size_of, given))

    def has_room(self, size: int) -> bool:
        """Whether `size` more bytes may be queued now. An empty queue takes any size; while an append
        waits for room, later ones wait too, so that small appends do not overtake large ones.
        """
        return not self._waiting_count and self._fits(size)

    def _fits(self, size: int) -> bool:
        queued = self._posted_bytes + self._bytes
        return not queued or queued + size <= self._limits.queued_bytes_max

    def post(self, submission: Submission[P, R]) -> bool:
        """Keep a submission for `collect`; tell whether it is the first one."""
        self._posted.append(submission)
        self._posted_bytes += submission.size
        return len(self._posted) == 1

    def collect(self) -> Sequence[Submission[P, R]]:
        """What other threads have posted, in the order of their calls; it counts as queued from now on."""
        posted, self._posted = self._posted, []
        self._bytes += self._posted_bytes
        self._posted_bytes = 0
        self._count += sum([len(submission.payloads) for submission in posted])
        return posted

    # Tasks of the event loop call these methods.

    async def submit(
        self, payloads: Sequence[P], expect: int | None = None, *, is_alone: bool = False
    ) -> asyncio.Future[R]:
        """Queue an append; the future is done once the append is durable. Waits while too much is
        queued.

        An append with `expect` is sent alone, and so is one with `is_alone`.
        """
        submission, done = self._submission(payloads, expect, is_alone=is_alone)
        if self.has_room(submission.size):
            self.queue(submission)
        else:
            await self.queue_with_room(submission)
        return done

    def append(
        self, payloads: Sequence[P], expect: int | None = None, *, is_alone: bool = False
    ) -> Awaitable[R]:
        """Queue an append; what is awaited ends once the append is durable. No coroutine is made where there is room."""
        submission, done = self._submission(payloads, expect, is_alone=is_alone)
        if not self.has_room(submission.size):
            return self._append_with_room(submission, done)
        self.queue(submission)
        return done

    async def _append_with_room(self, submission: Submission[P, R], done: asyncio.Future[R]) -> R:
        await self.queue_with_room(submission)
        return await done

    def _submission(
        self, payloads: Sequence[P], expect: int | None, *, is_alone: bool
    ) -> tuple[Submission[P, R], asyncio.Future[R]]:
        given, size = self.checked(payloads, expect)
        loop = self._transport.loop
        end = loop.time() + self._transport.deadline_s
        done: asyncio.Future[R] = loop.create_future()
        return Submission(given, size, expect, is_alone or expect is not None, end, done), done

    async def queue_with_room(self, submission: Submission[P, R]) -> None:
        """Queue a submission once there is room, in the order of the calls. Raises: ConnectionLost."""
        self._waiting_count += 1
        try:
            async with asyncio.timeout_at(submission.end), self._turn:
                while not self._fits(submission.size):
                    self._drained.clear()
                    await self._drained.wait()
        except TimeoutError:
            raise errors.ConnectionLost(
                "the appends before this one took the whole deadline", outcome=errors.NOT_DONE
            ) from None
        finally:
            self._waiting_count -= 1
        self.queue(submission)

    def queue(self, submission: Submission[P, R]) -> None:
        """Queue a submission for which there is room. Raises: ClientClosed."""
        self._transport.check_open()
        self._queue.append(submission)
        self._bytes += submission.size
        self._count += len(submission.payloads)
        self._send_soon()

    def receive(self, posted: Sequence[Submission[P, R]]) -> None:
        """Queue what was collected, or fail it."""
        try:
            self._transport.check_open()
        except errors.ClientClosed as error:
            for submission in posted:
                self._left_queue(submission.size, len(submission.payloads))
                if submission.is_wanted():
                    submission.done.set_exception(error.replace())
        else:
            self._queue.extend(posted)
            self._send_soon()

    def _send_soon(self) -> None:
        self._changed.set()
        if self._idle.is_set():
            self._idle.clear()
            # A task that is cancelled before its first step runs none of its code, no `finally`
            # either, but its callbacks are always called.
            self._transport.start(self._run()).add_done_callback(self._ended)

    async def flush(self) -> None:
        """Wait until nothing is queued or under way."""
        await self._idle.wait()

    # The task that sends.

    async def _run(self) -> None:
        while self._queue:
            await self._linger()
            self._under_way = self._take()
            if self._under_way:
                await self._send_all(self._under_way)
        self._under_way = ()
        self._idle.set()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """End what waits if the task was cancelled, or died of something unforeseen."""
        self._share_out()
        if task.cancelled():
            closed = errors.ConnectionLost("the client was closed while an append was under way")
            self._end(self._under_way, closed)
        elif (error := task.exception()) is not None:
            self._broke(self._under_way, error)
        else:
            return
        self._idle.set()

    async def _linger(self) -> None:
        """Wait for more submissions unless the next batch is full."""
        if not self._limits.linger_ms or self._queue[0].is_alone:
            return
        try:
            async with asyncio.timeout(self._limits.linger_ms / 1000):
                while self._bytes < self._limits.bytes_max and self._count < self._limits.count_max:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return

    def _take(self) -> list[Submission[P, R]]:
        """The next batch, without submissions whose callers gave up waiting."""
        taken: list[Submission[P, R]] = []
        queue, bytes_max, count_max = self._queue, self._limits.bytes_max, self._limits.count_max
        size = count = 0
        while queue:
            first = queue[0]
            more = len(first.payloads)
            is_full = size + first.size > bytes_max or count + more > count_max
            if taken and (is_full or first.is_alone or taken[0].is_alone):
                break
            queue.popleft()
            if first.is_wanted():
                taken.append(first)
                size += first.size
                count += more
            else:
                self._left_queue(first.size, more)
        self._left_queue(size, count)
        return taken

    def _left_queue(self, size: int, count: int) -> None:
        self._bytes -= size
        self._count -= count
        self._drained.set()

    async def _send_all(self, taken: Sequence[Submission[P, R]]) -> errors.QuorumLogError | None:
        """Send a batch, and give the error after which nothing more of the queue may be sent."""
        payloads = list(chain.from_iterable([submission.payloads for submission in taken]))
        try:
            answer = await self._send(Call(payloads, taken[0].expect, taken[0].end))
        except errors.Invalid as error:
            if len(taken) > 1 and error.outcome == errors.NOT_DONE:
                return await self._send_each(taken)
            self._share_out()
            _fail(taken, error)
        except errors.QuorumLogError as error:
            self._share_out()
            _fail(taken, error)
            # An append that met another place than the expected one leaves no gap behind it.
            if taken[0].expect is None or error.outcome == errors.UNKNOWN:
                self._fail_queued(error)
                return error
        else:
            await self._answered(taken, answer, len(payloads))
        return None

    async def _answered(self, taken: Sequence[Submission[P, R]], answer: A, count: int) -> None:
        """End submissions with their shares of an answer. If about as much is queued, that is sent
        first, and the callers go on while the gateway works; else the callers may append again before
        the next request is made up.
        """
        self._answers.append((taken, answer))
        if 2 * self._count >= count:
            self._transport.loop.call_soon(self._share_out)
            return
        self._share_out()
        await asyncio.sleep(0)

    def _share_out(self) -> None:
        """End all submissions that were answered, in the order of the calls."""
        while self._answers:
            taken, answer = self._answers[0]
            try:
                self._give(taken, answer)
            except Exception as error:  # noqa: BLE001 - a defect, which must not leave a caller waiting
                self._broke(taken, error)
            # Not before: a thread's callback may end the loop's thread, whose end gives the rest.
            self._answers.popleft()

    def _give(self, taken: Sequence[Submission[P, R]], answer: A) -> None:
        index = 0
        for submission in taken:
            count = len(submission.payloads)
            if not submission.done.done():
                submission.done.set_result(self._share(answer, index, count))
            index += count

    def _broke(self, taken: Sequence[Submission[P, R]], error: BaseException) -> None:
        """End what was sent and what is queued after a defect of the client."""
        log.error("batching-broke", exc_info=error)
        cause = errors.ClientBroke(f"the client failed while an append was under way: {error!r}")
        cause.__cause__ = error
        self._end(taken, cause)

    def _end(self, taken: Sequence[Submission[P, R]], cause: errors.QuorumLogError) -> None:
        _fail(taken, cause.with_outcome(errors.UNKNOWN))
        self._fail_queued(cause)

    async def _send_each(self, taken: Sequence[Submission[P, R]]) -> errors.QuorumLogError | None:
        """Send one by one: one submission is invalid, and the others need not fail with it."""
        for index, submission in enumerate(taken):
            if submission.done.done():
                continue
            error = await self._send_all([submission])
            if error is not None:
                for behind in taken[index + 1 :]:
                    _fail([behind], _not_sent(error))
                return error
        return None

    def _fail_queued(self, cause: errors.QuorumLogError) -> None:
        """Fail what is queued behind a failed request: none of it was sent."""
        while self._queue:
            submission = self._queue.popleft()
            self._left_queue(submission.size, len(submission.payloads))
            if submission.is_wanted():
                _fail([submission], _not_sent(cause))


def _not_sent(cause: errors.QuorumLogError) -> errors.QuorumLogError:
    error = cause.with_outcome(errors.NOT_DONE)
    error.add_note("not sent: the append before it failed")
    return error


def _fail(taken: Sequence[Submission[P, R]], error: errors.QuorumLogError) -> None:
    for submission in taken:
        if not submission.done.done():
            submission.done.set_exception(error if len(taken) == 1 else error.replace())
