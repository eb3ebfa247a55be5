"""One follow of a tail for all of its readers: a page is read once and put into each form once.

A reader that keeps up takes each page from the follow's window. A reader that falls behind the window reads for
itself until it has caught up, so a slow reader costs one page and its connection's buffer.
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
"""Pages kept for readers that are a little behind (taste); one page at least."""
_READ_S: Final = 30.0
"""How long one read of a follow waits for news."""

F = TypeVar("F")


class Positioned(Protocol):
    """A page that says where to go on."""

    @property
    def next(self) -> int:
        """The first position after the page."""
        ...


P = TypeVar("P", bound=Positioned)


@dataclass(slots=True)
class SharedPage(Generic[P]):
    """A page for many readers, with the forms that were made of it so far."""

    page: P
    _forms: dict[Hashable, Any] = field(default_factory=dict)

    def form(self, key: Hashable, make: Callable[[P], F]) -> F:
        """The page in a form, made once."""
        if key not in self._forms:
            self._forms[key] = make(self.page)
        made: F = self._forms[key]
        return made


class Followable(ABC, Generic[P]):
    """A ledger or a log, of which a tail can be followed."""

    @abstractmethod
    async def read(self, at: int, *, wait_s: float = 0.0) -> P:
        """The page at a position, maybe empty. At the end waits for news for `wait_s`."""

    @abstractmethod
    def size(self, page: P) -> int:
        """Bytes of a page in memory."""

    @abstractmethod
    def rest(self, page: P, at: int) -> P:
        """The part of a page from a position within the page on."""

    @abstractmethod
    def is_end(self, page: P) -> bool:
        """Whether nothing can ever follow a page."""


class Follow(Generic[P]):
    """The newest pages of one tail.

    Invariants: the pages of the window are contiguous and end at `_at`; `_news` is done with the next
    page, or with the end of the follow.
    """

    def __init__(self, tail: Followable[P], at: int) -> None:
        self._tail = tail
        self._window: deque[tuple[int, int, SharedPage[P]]] = deque()
        """Where a page begins, its bytes, and the page."""
        self._bytes = 0
        self._at = at
        self._news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_over = False

    async def run(self) -> None:
        """Read on until the end, or the first error: each reader then reads for itself, and learns why."""
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
        """The page that begins at `at`, waiting for it. None if the reader must read for itself: the page left
        the window, the follow is over, or nothing came in time.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while at >= self._at and not self.is_over:
                    # Shielded: a reader that gives up must not cancel the others' future.
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
    """The tails that are followed. Invariant: a tail is followed only while it has readers."""

    def __init__(self) -> None:
        self._followed: dict[Hashable, tuple[Follow[Any], asyncio.Task[None]]] = {}
        self._readers: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """Tails that are followed."""
        return len(self._followed)

    @contextlib.asynccontextmanager
    async def joined(self, key: Hashable) -> AsyncIterator[None]:
        """Be a reader of the tail that `key` names for a block; the last reader ends the follow."""
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
        """The follow of a tail, unless it is over or there is none."""
        followed = self._followed.get(key)
        return None if followed is None or followed[0].is_over else followed[0]

    def begin(self, key: Hashable, tail: Followable[P], at: int) -> Follow[P]:
        """Follow a tail from its end, `at`; call it within `joined`."""
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
    """Pages from `at` on, an empty one whenever nothing came for `wait_s`; ends with the tail. `waited`
    wraps each wait for a page, which is no work.

    Raises: what `tail.read` raises.
    """
    async with follows.joined(key):
        while True:
            # The first page, each page while this reader is behind, and after a wait without news.
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
