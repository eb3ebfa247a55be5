"""Share the reads of a tail among its readers: each page is read once, and encoded once per format.

A reader that keeps up gets each page from a window. A reader that falls behind the window reads its
own pages until it has caught up. A slow reader costs one page and its connection's buffer.
"""

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

from quorumlog.errors import QuorumLogError

log = logging.getLogger(__name__)

_WINDOW_BYTES: Final = 4 << 20
"""Maximum size of the window, which keeps at least one page (chosen by judgement)."""
_READ_S: Final = 30.0
"""How many seconds a follow's read waits for new items."""

F = TypeVar("F")


class Positioned(Protocol):
    """A page with the position after its last item."""

    @property
    def next(self) -> int:
        """The first position after the page."""
        ...


P = TypeVar("P", bound=Positioned)


@dataclass(slots=True)
class SharedPage(Generic[P]):
    """A page for many readers, with a cache of its encodings."""

    page: P
    _forms: dict[Hashable, Any] = field(default_factory=dict)

    def form(self, key: Hashable, make: Callable[[P], F]) -> F:
        """Return the page's encoding `key`. The first call creates the encoding with `make`."""
        if key not in self._forms:
            self._forms[key] = make(self.page)
        made: F = self._forms[key]
        return made


class Followable(ABC, Generic[P]):
    """A ledger or a log whose tail can be followed."""

    @abstractmethod
    async def read(self, at: int, *, wait_s: float = 0.0) -> P:
        """Read a page from `at` on. At the end, wait up to `wait_s`; the page may be empty."""

    @abstractmethod
    def size(self, page: P) -> int:
        """The size of a page in memory, in bytes."""

    @abstractmethod
    def rest(self, page: P, at: int) -> P:
        """The part of a page from the position `at` on, which must lie within the page."""

    @abstractmethod
    def is_end(self, page: P) -> bool:
        """Whether a page reaches the final end of a closed ledger or log."""


class Follow(Generic[P]):
    """Reads one tail continuously, and keeps a window of its newest pages for all readers.

    Invariants: the pages of the window are contiguous and end at `_at`. `_news` completes when the
    next page arrives or the follow ends.
    """

    def __init__(self, tail: Followable[P], at: int) -> None:
        self._tail = tail
        self._window: deque[tuple[int, int, SharedPage[P]]] = deque()
        """The position, the size in bytes, and the page, for each page of the window."""
        self._bytes = 0
        self._at = at
        self._news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_over = False

    async def run(self) -> None:
        """Read until the end or an error. Readers then read on their own, and get the error."""
        try:
            with contextlib.suppress(QuorumLogError):
                while not self.is_over:
                    page = await self._tail.read(self._at, wait_s=_READ_S)
                    if page.next > self._at:
                        self._add(page)
                    if self._tail.is_end(page):
                        break
        except Exception:
            log.exception("follow-broke")
        finally:
            self.is_over = True
            self._announce()

    def _add(self, page: P) -> None:
        size = self._tail.size(page)
        self._window.append((self._at, size, SharedPage(page)))
        self._bytes += size
        self._at = page.next
        while self._bytes > _WINDOW_BYTES and len(self._window) > 1:
            self._bytes -= self._window.popleft()[1]
        self._announce()

    def _announce(self) -> None:
        if not self._news.done():
            self._news.set_result(None)
        if not self.is_over:
            self._news = asyncio.get_running_loop().create_future()

    async def after(self, at: int, wait_s: float) -> SharedPage[P] | None:
        """Wait for the page that begins at `at`. Returns None if the page has left the window, the
        follow is over, or no page arrived within `wait_s`. The reader must then read the page itself.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while at >= self._at and not self.is_over:
                    # The shield keeps a cancelled reader from cancelling the future of all readers.
                    await asyncio.shield(self._news)
        if not self._window or not self._window[0][0] <= at < self._at:
            return None
        for first, _, shared in reversed(self._window):
            if first == at:
                return shared
            if first < at:
                return SharedPage(self._tail.rest(shared.page, at))
        return None


class Follows:
    """The active follows, by tail. Invariant: a tail is followed only while the tail has readers."""

    def __init__(self) -> None:
        self._followed: dict[Hashable, tuple[Follow[Any], asyncio.Task[None]]] = {}
        self._readers: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """The number of followed tails."""
        return len(self._followed)

    @contextlib.asynccontextmanager
    async def joined(self, key: Hashable) -> AsyncIterator[None]:
        """Count a reader of the tail `key` within the block. The last reader ends the follow."""
        self._readers[key] = self._readers.get(key, 0) + 1
        try:
            yield
        finally:
            self._readers[key] -= 1
            if not self._readers[key]:
                del self._readers[key]
                followed = self._followed.pop(key, None)
                if followed is not None:
                    followed[1].cancel()

    def found(self, key: Hashable) -> Follow[Any] | None:
        """Return the active follow of a tail, or None."""
        followed = self._followed.get(key)
        return None if followed is None or followed[0].is_over else followed[0]

    def begin(self, key: Hashable, tail: Followable[P], at: int) -> Follow[P]:
        """Start to follow a tail whose end is `at`. Must be called within `joined`."""
        follow = Follow(tail, at)
        self._followed[key] = follow, asyncio.ensure_future(follow.run())
        return follow


async def shared_tail(
    follows: Follows,
    key: Hashable,
    tail: Followable[P],
    at: int,
    *,
    wait_s: float,
    waited: Callable[[Awaitable[SharedPage[P] | None]], Awaitable[SharedPage[P] | None]],
) -> AsyncGenerator[SharedPage[P], None]:
    """Yield pages from `at` on until the tail's end, and an empty page after `wait_s` without items.
    `waited` wraps each wait for a page, so that a waiting request doesn't count as in progress.

    Raises: the errors of `tail.read`.
    """
    async with follows.joined(key):
        while True:
            # The reader reads its own page at first, while it lags, and after an idle wait.
            shared: SharedPage[P] | None = SharedPage(await tail.read(at))
            while shared is not None:
                yield shared
                page = shared.page
                if tail.is_end(page):
                    return
                is_at_tail, at = page.next == at, page.next
                follow = follows.found(key)
                if follow is None and is_at_tail:
                    follow = follows.begin(key, tail, at)
                shared = None if follow is None else await waited(follow.after(at, wait_s))
