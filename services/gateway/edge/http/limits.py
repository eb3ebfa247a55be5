"""The edge's limits, for one request and for all requests together, and what of them is in use."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Final, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from quorumlog.errors import Overloaded
from quorumlog.net.budget import PEER, Budget
from quorumlog.net.connections import end_limits, ending_with_the_connection
from services.gateway.edge.http.follows import Follows

BATCH_ENTRIES_MAX: Final = 10_000
"""Entries of one append, and of one page (docs/guides/http.md, Bounds)."""

CONTROL_BYTES_MAX: Final = 2 << 20
"""A JSON body other than an append's: three times a commit of as many ledgers as a log may have."""
CONTROL_MARKS_MAX: Final = 1 << 16
"""Values of such a body (`strict.MARKS_MAX`)."""
INLINE_BYTES_MAX: Final = 256 << 10
"""A body up to this size is parsed at once: less than 50 ms of work in the worst case (measured)."""

WAIT_MS_MAX: Final = 60_000
CUSTOM_KEYS_MAX: Final = 64
CUSTOM_BYTES_MAX: Final = 16 * 1024
PASSWORD_CHARS_MAX: Final = 1024
"""Long enough for any secret; short enough for a header (taste)."""
READ_BYTES_MAX: Final = 64 << 20
"""The greatest `max_bytes`: as much as a body of frames."""


class Limits(BaseModel):
    """Limits that an operator may set. Sizes in bytes, times in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    entry_bytes_max: int = Field(default=1 << 20, ge=1, le=64 << 20)
    """One entry."""
    body_bytes_max: int = Field(default=16 << 20, ge=1, le=1 << 30)
    """A JSON body."""
    frames_bytes_max: int = Field(default=64 << 20, ge=1, le=1 << 30)
    """A body of frames, which need no decoding."""
    body_timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """For a body to come; longer while it comes at a fair rate."""
    body_rate_bytes_s_min: int = Field(default=256 << 10, ge=1)
    """The fair rate: so many bytes earn a body one second more."""
    stream_idle_s: float = Field(default=300.0, gt=0, le=86_400)
    """For the next line of a streamed append."""
    comment_every_s: float = Field(default=15.0, gt=0, le=3600)
    """Between the comments that keep an idle tail's connection open."""
    stalled_answer_s: float = Field(default=30.0, gt=0, le=3600)
    """For a client to go on reading its answer."""
    connections_max: int = Field(default=10_000, ge=1)
    """Connections at once; beyond: 429 overloaded."""
    peer_connections_max: int = Field(default=1250, ge=1)
    """Of one address, once seven eighths of all are taken."""
    requests_max: int = Field(default=4096, ge=1)
    """Requests in work at once; beyond: 429 overloaded."""
    peer_requests_max: int = Field(default=512, ge=1)
    """Of one address, once seven eighths of all are taken."""
    held_bytes_max: int = Field(default=512 << 20, ge=1)
    """Bodies in memory at once; beyond: 429 overloaded."""
    peer_held_bytes_max: int = Field(default=64 << 20, ge=1)
    """Of one address, once seven eighths of all are taken."""
    answers_bytes_max: int = Field(default=256 << 20, ge=1)
    """Answers that wait for their readers; beyond: 429."""
    peer_answers_bytes_max: int = Field(default=32 << 20, ge=1)
    """Of one address, once seven eighths of all are taken."""
    compressed_answer_bytes_min: int = Field(default=0, ge=0)
    """Answers to reads are compressed from this length on, say 1024; 0: none is (docs/guides/http.md)."""
    waiters_max: int = Field(default=10_000, ge=1)
    """Long polls and tails at once; they cost no work."""
    peer_waiters_max: int = Field(default=1250, ge=1)
    """Of one address, once seven eighths of all are taken."""


T = TypeVar("T")

_HELD: Final = web.RequestKey("held_bytes", int)
"""The request's key for the bytes of its body that the room counts."""
_KEPT: Final = web.RequestKey("kept_bytes", int)
"""The same for the bytes of its answer."""


class LargeMessages:
    """Parses one chunk of a large message in each iteration of the event loop; other chunks wait in order. Otherwise large
    messages that end together would be parsed in one iteration, and delay all other requests by their sum.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_taken = False

    def has_turn(self, parse: Callable[[], None]) -> bool:
        """Whether the caller may parse now; otherwise `parse` is called in a later turn."""
        if self._is_taken:
            self._waiting.append(parse)
            return False
        self._is_taken = True
        asyncio.get_running_loop().call_soon(self._next)
        return True

    def _next(self) -> None:
        self._is_taken = bool(self._waiting)
        if self._is_taken:
            asyncio.get_running_loop().call_soon(self._next)
            self._waiting.popleft()()


class Room:
    """The budgets of the edge. Invariant: whatever is taken from a budget is given back once."""

    __slots__ = (
        "_waits", "answers", "bodies", "follows", "is_ending", "large_messages", "limits", "parsing", "requests", "waiters",
    )  # fmt: skip

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.follows = Follows()
        self.requests = Budget(
            "requests in work", "REQUESTS_MAX", limits.requests_max, limits.peer_requests_max
        )
        self.bodies = Budget(
            "bytes being appended",
            "HELD_BYTES_MAX",
            limits.held_bytes_max,
            limits.peer_held_bytes_max,
        )
        self.answers = Budget(
            "bytes of answers that nobody has read yet",
            "ANSWERS_BYTES_MAX",
            limits.answers_bytes_max,
            limits.peer_answers_bytes_max,
        )
        self.waiters = Budget(
            "long polls and tails", "WAITERS_MAX", limits.waiters_max, limits.peer_waiters_max
        )
        self.is_ending = False
        self.parsing = asyncio.Semaphore(1)
        """Held while a large body is parsed: several at once would take no less time, and the memory of all."""
        self.large_messages = LargeMessages()
        self._waits: set[asyncio.Timeout] = set()

    async def wait(self, work: Awaitable[T]) -> T | None:
        """The result of `work`, which only waits: meanwhile the request gives up its place among those in
        work. None if the wait was cut short because the client went away or sends no more, or this process is about to
        end.
        Raises: Overloaded.
        """
        peer = PEER.get()
        try:
            self.waiters.take(peer)
        except Overloaded:
            if isinstance(work, Coroutine):
                work.close()
            raise
        limit = asyncio.timeout(0 if self.is_ending else None)
        self._waits.add(limit)
        self.requests.give(peer)
        try:
            async with limit:
                with ending_with_the_connection(limit):
                    return await work
        except TimeoutError:
            if limit.expired():
                return None
            raise
        finally:
            self._waits.discard(limit)
            self.waiters.give(peer)
            self.requests.back(peer)

    def end_waits(self) -> None:
        """End all waits, now and from now on: this process is about to end."""
        self.is_ending = True
        end_limits(self._waits)

    def hold(self, request: web.Request, count: int) -> None:
        """Take room for `count` more bytes of a request's body, until the request is done. Raises: Overloaded."""
        self.bodies.take(PEER.get(), count)
        request[_HELD] = request.get(_HELD, 0) + count

    def drop(self, request: web.Request, count: int) -> None:
        """Give back a part of what a request's body took."""
        self.bodies.give(PEER.get(), count)
        request[_HELD] -= count

    def release(self, request: web.Request) -> None:
        """Give back what a request's body took."""
        if count := request.get(_HELD, 0):
            self.bodies.give(PEER.get(), count)

    def keep(self, request: web.Request, count: int, *, is_problem: bool = False) -> None:
        """Take room for `count` bytes of an answer; that of a problem is always there. Raises: Overloaded."""
        (self.answers.back if is_problem else self.answers.take)(PEER.get(), count)
        request[_KEPT] = request.get(_KEPT, 0) + count

    def let_go(self, request: web.Request, count: int | None = None) -> None:
        """Give back what a request's answer took: all of it, or the part that was read."""
        if self.answers.used and _KEPT in request:
            count = request[_KEPT] if count is None else count
            self.answers.give(PEER.get(), count)
            request[_KEPT] -= count

    @contextlib.contextmanager
    def kept(self, count: int) -> Iterator[None]:
        """Take room for bytes of an answer while a block writes them. Raises: Overloaded."""
        peer = PEER.get()
        self.answers.take(peer, count)
        try:
            yield
        finally:
            self.answers.give(peer, count)
