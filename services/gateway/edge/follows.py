"""One follow of a tail for all who read there: a page is read once and put into each form once.

A reader that keeps up takes each page from the window; one that falls behind it reads for itself
until it has caught up, so what a slow reader costs is one page and its connection's buffer.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

from quorumlog.errors import QuorumLogError

log = logging.getLogger(__name__)

_WINDOW_BYTES: Final = 4 << 20
"""What is kept for readers that are a little behind (taste); one page at least."""
_READ_S: Final = 30.0
"""How long one read of the follow waits for news."""

F = TypeVar("F")


class Positioned(Protocol):
    """A page: where to go on after it."""

    @property
    def next(self) -> int:
        """The first position after it."""
        ...


P = TypeVar("P", bound=Positioned)


@dataclass(slots=True)
class Told(Generic[P]):
    """A page that many may be given, and the forms in which it was asked for so far."""

    page: P
    _forms: dict[Hashable, Any] = field(default_factory=dict)

    def form(self, key: Hashable, make: Callable[[P], F]) -> F:
        """The page in a form, made once."""
        if key not in self._forms:
            self._forms[key] = make(self.page)
        made: F = self._forms[key]
        return made


class Tail(Protocol[P]):
    """What can be followed."""

    async def read(self, at: int, *, wait_s: float = 0.0) -> P:
        """What is there from `at` on, maybe nothing. Waits at the end."""
        ...

    def size(self, page: P) -> int:
        """Bytes of a page."""
        ...

    def rest(self, page: P, at: int) -> P:
        """The part of a page from `at` on, which is within it."""
        ...

    def is_end(self, page: P) -> bool:
        """Whether nothing can follow a page."""
        ...


class Follow(Generic[P]):
    """The newest pages of one tail.

    Invariants: the pages of the window are next to each other, and end at `_at`; `_news` is done
    with the next page, or with the end of the follow.
    """

    def __init__(self, tail: Tail[P], at: int) -> None:
        self._tail = tail
        self._window: deque[tuple[int, int, Told[P]]] = deque()
        """Where a page begins, its bytes, and the page."""
        self._bytes = 0
        self._at = at
        self._news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_over = False

    async def run(self) -> None:
        """Read on until the end, or the first error: then each reader asks for himself."""
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
            self._tell()

    def _add(self, page: P) -> None:
        size = self._tail.size(page)
        self._window.append((self._at, size, Told(page)))
        self._bytes += size
        self._at = page.next
        while self._bytes > _WINDOW_BYTES and len(self._window) > 1:
            self._bytes -= self._window.popleft()[1]
        self._tell()

    def _tell(self) -> None:
        if not self._news.done():
            self._news.set_result(None)
        if not self.is_over:
            self._news = asyncio.get_running_loop().create_future()

    async def after(self, at: int, wait_s: float) -> Told[P] | None:
        """The page that begins at `at`, waiting for it; None where that must be asked for otherwise:
        it is too old, the follow is over, or nothing came in time.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while at >= self._at and not self.is_over:
                    # Shielded: one reader that gives up must not end the others' news.
                    await asyncio.shield(self._news)
        if not self._window or not self._window[0][0] <= at < self._at:
            return None
        for first, _, told in reversed(self._window):
            if first == at:
                return told
            if first < at:
                return Told(self._tail.rest(told.page, at))
        return None


class Follows:
    """The tails that are followed. Invariant: one is followed while somebody reads there."""

    def __init__(self) -> None:
        self._followed: dict[Hashable, tuple[Follow[Any], asyncio.Task[None]]] = {}
        self._readers: dict[Hashable, int] = {}

    def __len__(self) -> int:
        """Tails that are followed."""
        return len(self._followed)

    @contextlib.asynccontextmanager
    async def joined(self, key: Hashable) -> AsyncIterator[None]:
        """Read along at the tail that `key` names; the last reader ends the follow."""
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
        """The follow of a tail, where there is one that goes on."""
        followed = self._followed.get(key)
        return None if followed is None or followed[0].is_over else followed[0]

    def begin(self, key: Hashable, tail: Tail[P], at: int) -> Follow[P]:
        """Follow a tail from `at` on, which is its end; call it within `joined`."""
        follow = Follow(tail, at)
        self._followed[key] = follow, asyncio.ensure_future(follow.run())
        return follow


async def told_tail(
    follows: Follows,
    key: Hashable,
    tail: Tail[P],
    at: int,
    *,
    wait_s: float,
    waited: Callable[[Awaitable[Told[P] | None]], Awaitable[Told[P] | None]],
) -> AsyncGenerator[Told[P], None]:
    """Pages from `at` on, an empty one whenever nothing came for `wait_s`; ends with the tail.
    `waited` waits for a page beside the requests in work.

    Raises: what `tail.read` raises.
    """
    async with follows.joined(key):
        while True:
            # The first one, and each one while this reader is behind, or when nothing came.
            told: Told[P] | None = Told(await tail.read(at))
            while told is not None:
                yield told
                page = told.page
                if tail.is_end(page):
                    return
                is_at_tail, at = page.next == at, page.next
                follow = follows.found(key)
                if follow is None and is_at_tail:
                    follow = follows.begin(key, tail, at)
                told = None if follow is None else await waited(follow.after(at, wait_s))
