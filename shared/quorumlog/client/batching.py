"""Batches of appends: the next request carries all appends submitted while a request is under way.

Requests are sent one at a time, so entries keep the order of the submissions. A single append is
sent at once. Two concurrent requests could overtake each other on two connections. `expect` would
not detect a swapped order, because another client may append as many entries in between. So only
the client's own work overlaps: it sends the next request before callers of the previous one continue.
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
"""Maximum entries per request: the API's limit."""


@dataclass(frozen=True, slots=True)
class Batching:
    """The limits of a batch of appends. A single append that exceeds a limit is sent alone."""

    bytes_max: int = 1 << 20
    """Maximum payload bytes per request."""
    count_max: int = 1000
    """Maximum entries per request."""
    linger_ms: float = 0.0
    """How long the first append of a batch waits for more appends, unless the batch is full."""
    queued_bytes_max: int = 64 << 20
    """Maximum bytes in the queue. While the queue is full, `submit` and `append` wait."""

    def __post_init__(self) -> None:
        for name in ("bytes_max", "count_max", "queued_bytes_max"):
            checks.whole(name, getattr(self, name))
        if not isinstance(self.linger_ms, int | float):
            raise TypeError(f"linger_ms must be a number, not {type(self.linger_ms).__name__}")
        if self.bytes_max < 1 or self.queued_bytes_max < 1 or not self.linger_ms >= 0:
            raise ValueError("bytes_max and queued_bytes_max must be above 0, linger_ms 0 or more")
        if not 1 <= self.count_max <= _ENTRIES_MAX:
            raise ValueError(f"count_max must be 1 to {_ENTRIES_MAX}, not {self.count_max}")


@dataclass(frozen=True, slots=True)
class Call(Generic[P]):
    """One append request, made of whole submissions."""

    payloads: Sequence[P]
    expect: int | None
    end: float
    """The oldest submission's deadline, on the event loop's clock."""


AppendFuture = asyncio.Future[R] | futures.Future[R]
"""The future of a submission, either from a task of the event loop or from another thread."""


class Submission(NamedTuple, Generic[P, R]):
    """A queued or running append. A tuple, because a dataclass takes twice as long to create."""

    payloads: Sequence[P]
    size: int
    expect: int | None
    is_alone: bool
    """Whether the submission must be sent in its own request."""
    end: float
    done: AppendFuture[R]

    def is_wanted(self) -> bool:
        """Whether the caller is still waiting. After this call, other threads can't cancel the future."""
        if isinstance(self.done, asyncio.Future):
            return not self.done.done()
        return self.done.set_running_or_notify_cancel()


Send = Callable[[Call[P]], Awaitable[A]]
Share = Callable[[A, int, int], R]
"""Computes a submission's share of a response from its first payload's index and its count."""


class Batcher(Generic[P, A, R]):
    """The queue of submissions, and the one request that is under way.

    Invariants: submissions are sent in the order of the calls, one request at a time. After a
    failed request, the submissions queued behind it fail unsent, so that no gap goes unnoticed.
    A submission ends when its request ends, or when the task that sends requests ends for any
    reason.
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
        """Responses that the callers have not received yet, each with its submissions."""
        self._bytes = 0
        self._count = 0
        self._turn = asyncio.Lock()
        """The first append that waits for room holds this lock; later appends wait for the lock in order."""
        self._waiting_count = 0
        self._posted: list[Submission[P, R]] = []
        """Submissions from other threads that are not queued yet."""
        self._posted_bytes = 0
        self._changed = asyncio.Event()
        self._drained = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    # Other threads may call these methods too. `post` and `collect` require the portal's lock.

    @property
    def deadline_s(self) -> float:
        """Maximum seconds for one append, from the call to its end."""
        return self._transport.deadline_s

    def checked(self, payloads: Sequence[P], expect: int | None = None) -> tuple[Sequence[P], int]:
        """Return the payloads as a sequence that the caller can't change, and their total size.

        Raises: TypeError, ValueError for payloads that can't be sent.
        """
        given = tuple(payloads)
        if not given:
            raise ValueError("nothing to append: pass at least one entry or record")
        if expect is not None:
            checks.offset("expect", expect)
        if len(given) == 1:
            return given, self._size_of(given[0])
        return given, sum(map(self._size_of, given))

    def has_room(self, size: int) -> bool:
        """Whether `size` more bytes may be queued now. An empty queue accepts any size. While an
        append waits for room, later appends wait too, so that small appends do not overtake large
        ones.
        """
        return not self._waiting_count and self._fits(size)

    def _fits(self, size: int) -> bool:
        queued = self._posted_bytes + self._bytes
        return not queued or queued + size <= self._limits.queued_bytes_max

    def post(self, submission: Submission[P, R]) -> bool:
        """Store a submission until `collect` is called. Returns whether it is the only submission."""
        self._posted.append(submission)
        self._posted_bytes += submission.size
        return len(self._posted) == 1

    def collect(self) -> Sequence[Submission[P, R]]:
        """Remove and return the posted submissions, in order. From now on they count as queued."""
        posted, self._posted = self._posted, []
        self._bytes += self._posted_bytes
        self._posted_bytes = 0
        self._count += sum([len(submission.payloads) for submission in posted])
        return posted

    # Tasks of the event loop call these methods.

    async def submit(
        self, payloads: Sequence[P], expect: int | None = None, *, is_alone: bool = False
    ) -> asyncio.Future[R]:
        """Queue an append; the future is done once the append is durable. Waits while the queue is
        full.

        An append with `expect` or `is_alone` is sent alone.
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
        """Queue an append; the awaitable ends once the append is durable. Avoids coroutines if possible."""
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
                "earlier appends used up this append's deadline: retry", outcome=errors.NOT_DONE
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
        """Queue the submissions that `collect` returned, or fail them if the client is closed."""
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
            # A task that is cancelled before its first step runs none of its code, not even a
            # `finally`. But the callbacks of a task are always called.
            self._transport.start(self._run()).add_done_callback(self._ended)

    async def flush(self) -> None:
        """Wait until nothing is queued or under way."""
        await self._idle.wait()

    # The task that sends the batches.

    async def _run(self) -> None:
        while self._queue:
            await self._linger()
            self._under_way = self._take()
            if self._under_way:
                await self._send_all(self._under_way)
        self._under_way = ()
        self._idle.set()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """End all waiting submissions if the task was cancelled or failed unexpectedly."""
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
        """Wait up to `linger_ms` for more submissions, unless the next batch is full."""
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
        """Take the next batch off the queue, without submissions whose callers gave up waiting."""
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
        """Send a batch. Returns an error if the queued submissions must fail, otherwise None."""
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
            # A failed append with `expect` leaves no gap, so queued submissions may be sent.
            if taken[0].expect is None or error.outcome == errors.UNKNOWN:
                self._fail_queued(error)
                return error
        else:
            await self._answered(taken, answer, len(payloads))
        return None

    async def _answered(self, taken: Sequence[Submission[P, R]], answer: A, count: int) -> None:
        """Complete submissions with their shares of a response. If at least half as many payloads are
        queued, the next request is sent first, and the callers continue while the gateway works.
        Otherwise the callers continue first, and may append more to the next request.
        """
        self._answers.append((taken, answer))
        if 2 * self._count >= count:
            self._transport.loop.call_soon(self._share_out)
            return
        self._share_out()
        await asyncio.sleep(0)

    def _share_out(self) -> None:
        """Complete all submissions whose response has arrived, in the order of the calls."""
        while self._answers:
            taken, answer = self._answers[0]
            try:
                self._give(taken, answer)
            except Exception as error:  # noqa: BLE001 - a defect, which must not leave a caller waiting
                self._broke(taken, error)
            # The answer is removed only after its callbacks, because a callback may end the loop's
            # thread. The thread's end then completes the answer's remaining submissions.
            self._answers.popleft()

    def _give(self, taken: Sequence[Submission[P, R]], answer: A) -> None:
        index = 0
        for submission in taken:
            count = len(submission.payloads)
            if not submission.done.done():
                submission.done.set_result(self._share(answer, index, count))
            index += count

    def _broke(self, taken: Sequence[Submission[P, R]], error: BaseException) -> None:
        """Fail all sent and queued submissions after a bug in the client."""
        log.error("batching-broke", exc_info=error)
        cause = errors.ClientBroke(f"the client failed while an append was under way: {error!r}")
        cause.__cause__ = error
        self._end(taken, cause)

    def _end(self, taken: Sequence[Submission[P, R]], cause: errors.QuorumLogError) -> None:
        _fail(taken, cause.with_outcome(errors.UNKNOWN))
        self._fail_queued(cause)

    async def _send_each(self, taken: Sequence[Submission[P, R]]) -> errors.QuorumLogError | None:
        """Send the submissions one by one, so that only the invalid one fails."""
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
        """Fail the submissions that are queued behind a failed request. None of these submissions was sent."""
        while self._queue:
            submission = self._queue.popleft()
            self._left_queue(submission.size, len(submission.payloads))
            if submission.is_wanted():
                _fail([submission], _not_sent(cause))


def _not_sent(cause: errors.QuorumLogError) -> errors.QuorumLogError:
    error = cause.with_outcome(errors.NOT_DONE)
    error.add_note("this append was not sent, because the append before it failed")
    return error


def _fail(taken: Sequence[Submission[P, R]], error: errors.QuorumLogError) -> None:
    for submission in taken:
        if not submission.done.done():
            submission.done.set_exception(error if len(taken) == 1 else error.replace())
