"""Limits per request and per gateway, and the budgets that enforce the gateway's limits."""

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
"""Maximum number of entries in an append or a page (docs/reference/http.md, Bounds)."""

CONTROL_BYTES_MAX: Final = 2 << 20
"""Maximum JSON body, except for appends: three times the largest commit of a transaction."""
CONTROL_MARKS_MAX: Final = 1 << 16
"""Maximum commas, colons and opening brackets in a JSON body, except for appends."""
INLINE_BYTES_MAX: Final = 256 << 10
"""Maximum body that is parsed inline, which takes less than 50 ms in the worst case (measured)."""

WAIT_MS_MAX: Final = 60_000
CUSTOM_KEYS_MAX: Final = 64
CUSTOM_BYTES_MAX: Final = 16 * 1024
PASSWORD_CHARS_MAX: Final = 1024
"""Maximum length of a password, which is sent in a header (chosen by judgement)."""
READ_BYTES_MAX: Final = 64 << 20
"""Maximum `max_bytes` of a read, equal to the default limit of a request body of frames."""


class Limits(BaseModel):
    """Limits that an operator may set. Sizes are in bytes, times in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    entry_bytes_max: int = Field(default=1 << 20, ge=1, le=64 << 20)
    """Maximum size of one entry of a ledger."""
    body_bytes_max: int = Field(default=16 << 20, ge=1, le=1 << 30)
    """Maximum size of a JSON request body."""
    frames_bytes_max: int = Field(default=64 << 20, ge=1, le=1 << 30)
    """Maximum size of a request body of frames, which need no decoding."""
    body_timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """Timeout for receiving a request body, extended while bytes arrive at the minimum rate."""
    body_rate_bytes_s_min: int = Field(default=256 << 10, ge=1)
    """Minimum rate of a request body: this many bytes extend its timeout by one second."""
    stream_idle_s: float = Field(default=300.0, gt=0, le=86_400)
    """How long a streamed append may pause before its next line."""
    comment_every_s: float = Field(default=15.0, gt=0, le=3600)
    """Interval of the comments that keep the connection of an idle tail open."""
    stalled_answer_s: float = Field(default=30.0, gt=0, le=3600)
    """How long a client may pause while it reads a response."""
    connections_max: int = Field(default=10_000, ge=1)
    """Maximum number of connections. Requests on further connections get 429 overloaded."""
    peer_connections_max: int = Field(default=1250, ge=1)
    """Maximum connections of one address, once seven eighths of `CONNECTIONS_MAX` are in use."""
    requests_max: int = Field(default=4096, ge=1)
    """Maximum number of requests in progress. Further requests get 429 overloaded."""
    peer_requests_max: int = Field(default=512, ge=1)
    """Maximum requests of one address, once seven eighths of `REQUESTS_MAX` are in use."""
    held_bytes_max: int = Field(default=512 << 20, ge=1)
    """Maximum bytes of request bodies in memory. Further requests get 429 overloaded."""
    peer_held_bytes_max: int = Field(default=64 << 20, ge=1)
    """Maximum body bytes of one address, once seven eighths of `HELD_BYTES_MAX` are in use."""
    answers_bytes_max: int = Field(default=256 << 20, ge=1)
    """Maximum bytes of responses that clients have not read yet. Further reads get 429 overloaded."""
    peer_answers_bytes_max: int = Field(default=32 << 20, ge=1)
    """Maximum unread response bytes of one address, once 7/8 of `ANSWERS_BYTES_MAX` are in use."""
    compressed_answer_bytes_min: int = Field(default=0, ge=0)
    """Size from which responses to reads are compressed. 0: never (docs/reference/http.md)."""
    waiters_max: int = Field(default=10_000, ge=1)
    """Maximum number of waiting long polls and tails. Further requests get 429 overloaded."""
    peer_waiters_max: int = Field(default=1250, ge=1)
    """Maximum waiting requests of one address, once seven eighths of `WAITERS_MAX` are in use."""


T = TypeVar("T")

_HELD: Final = web.RequestKey("held_bytes", int)
"""Request key: bytes of the request's body that are charged to the budget `Room.bodies`."""
_KEPT: Final = web.RequestKey("kept_bytes", int)
"""Request key: bytes of the response that are charged to the budget `Room.answers`."""


class LargeMessages:
    """Limits the parsing of large messages to one chunk per iteration of the event loop. Without
    the limit, large messages that end at the same time would delay all other requests.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_taken = False

    def has_turn(self, parse: Callable[[], None]) -> bool:
        """Whether the caller may parse now. If not, `parse` is called in a later iteration."""
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
    """The budgets of a gateway's edge. Invariant: each charge is given back exactly once."""

    __slots__ = (
        "_waits", "answers", "bodies", "follows", "is_ending", "large_messages", "limits", "parsing", "requests", "waiters",
    )  # fmt: skip

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.follows = Follows()
        self.requests = Budget(
            "requests in progress", "REQUESTS_MAX", limits.requests_max, limits.peer_requests_max
        )
        self.bodies = Budget(
            "bytes of request bodies",
            "HELD_BYTES_MAX",
            limits.held_bytes_max,
            limits.peer_held_bytes_max,
        )
        self.answers = Budget(
            "bytes of responses that clients have not read yet",
            "ANSWERS_BYTES_MAX",
            limits.answers_bytes_max,
            limits.peer_answers_bytes_max,
        )
        self.waiters = Budget(
            "long polls and tails", "WAITERS_MAX", limits.waiters_max, limits.peer_waiters_max
        )
        self.is_ending = False
        self.parsing = asyncio.Semaphore(1)
        """Held while a large body is parsed. Parallel parsing would only use more memory."""
        self.large_messages = LargeMessages()
        self._waits: set[asyncio.Timeout] = set()

    async def wait(self, work: Awaitable[T]) -> T | None:
        """Await `work`, which uses no CPU. Meanwhile the request does not count as in progress.
        Returns None if the client disconnects or this process shuts down. Raises: Overloaded.
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
        """End all waits, present and future, because this process is shutting down."""
        self.is_ending = True
        end_limits(self._waits)

    def hold(self, request: web.Request, count: int) -> None:
        """Charge `count` bytes of a request's body to the budget. Raises: Overloaded."""
        self.bodies.take(PEER.get(), count)
        request[_HELD] = request.get(_HELD, 0) + count

    def drop(self, request: web.Request, count: int) -> None:
        """Give back `count` bytes that were charged for a request's body."""
        self.bodies.give(PEER.get(), count)
        request[_HELD] -= count

    def release(self, request: web.Request) -> None:
        """Give back all bytes that were charged for a request's body."""
        if count := request.get(_HELD, 0):
            self.bodies.give(PEER.get(), count)

    def keep(self, request: web.Request, count: int, *, is_problem: bool = False) -> None:
        """Charge `count` bytes of a response. Raises: Overloaded, except for a problem document."""
        (self.answers.back if is_problem else self.answers.take)(PEER.get(), count)
        request[_KEPT] = request.get(_KEPT, 0) + count

    def let_go(self, request: web.Request, count: int | None = None) -> None:
        """Give back `count` bytes that were charged for a request's response. None means all."""
        if self.answers.used and _KEPT in request:
            count = request[_KEPT] if count is None else count
            self.answers.give(PEER.get(), count)
            request[_KEPT] -= count

    @contextlib.contextmanager
    def kept(self, count: int) -> Iterator[None]:
        """Charge `count` bytes of a response while the block writes them. Raises: Overloaded."""
        peer = PEER.get()
        self.answers.take(peer, count)
        try:
            yield
        finally:
            self.answers.give(peer, count)
