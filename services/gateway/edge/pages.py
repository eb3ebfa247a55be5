"""Pages of a ledger or of a log, read one after another: what lists, streams and tails share.

What differs between the two (who is asked, and how a page looks in each form) is in
`ledger_pages.py` and `log_pages.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterable
from contextlib import aclosing
from typing import Final, Generic

from services.gateway.edge.follows import P, Told, told_tail
from services.gateway.edge.limits import BATCH_ENTRIES_MAX
from services.gateway.edge.room import Room
from services.gateway.logs.reading import Start

STREAM_BYTES: Final = 1 << 20
"""What a stream reads ahead of its client (taste)."""
TAIL_BYTES: Final = 256 << 10
"""What a tail does: hundreds of slow readers, each with a page in hand, must fit into memory."""
_ITEM_BYTES: Final = 64
"""What an entry or a record takes besides its payload."""


class Pages(ABC, Generic[P]):
    """What can be read page by page and followed (`follows.Tail`), and the forms of its pages."""

    def __init__(self, key: Hashable, last: int | None = None) -> None:
        """`key` names it among all that are followed; `last` is the last position to be read."""
        self.key, self.last = key, last

    @abstractmethod
    async def read(
        self,
        at: Start,
        *,
        limit: int = BATCH_ENTRIES_MAX,
        max_bytes: int = TAIL_BYTES,
        wait_s: float = 0.0,
    ) -> P:
        """The page at a position, maybe empty; with `wait_s` waits at the end for news."""

    @abstractmethod
    async def end(self, page: P) -> int:
        """The position after all that was acknowledged when a page was read."""

    @abstractmethod
    def count(self, page: P) -> int:
        """Entries or records of a page."""

    @abstractmethod
    def payload_bytes(self, page: P) -> int:
        """Bytes of their payloads."""

    def size(self, page: P) -> int:
        """Bytes of a page in memory."""
        return self.payload_bytes(page) + _ITEM_BYTES * self.count(page)

    @abstractmethod
    def rest(self, page: P, at: int) -> P:
        """The part of a page from a position on, which is within the page."""

    @abstractmethod
    def is_end(self, page: P) -> bool:
        """Whether nothing can ever follow a page."""

    @abstractmethod
    def position(self, page: P) -> dict[str, str]:
        """Where a read stands, as headers, for forms that have no room for it in the body."""

    @abstractmethod
    def ids(self, page: P) -> Iterable[int]:
        """The entry ids or offsets."""

    @abstractmethod
    def items(self, page: P, encoding: str) -> Iterable[bytes]:
        """Each entry or record as a JSON object."""

    @abstractmethod
    def frames(self, page: P) -> bytes:
        """A page as frames."""

    @abstractmethod
    def members(self, page: P, encoding: str) -> bytes:
        """The members of the JSON object that is a page."""

    def message(self, page: P, encoding: str) -> bytes:
        """A page as the JSON object of a socket."""
        return b"{%b}" % self.members(page, encoding)

    @abstractmethod
    def document(self, page: P, encoding: str) -> bytes:
        """A page as the JSON object of a read: it names what was read too."""

    def around(self, page: P) -> tuple[bytes, bytes]:
        """What stands before and after the items in the JSON of a read."""
        rest = self.document(self.rest(page, page.next), "base64")
        before, entries, after = rest.partition(b'"entries":[')
        return before + entries, after

    @abstractmethod
    def ending(self, page: P) -> dict[str, int]:
        """What the end says, of a page that is one."""


async def page_or_news(
    room: Room,
    read: Callable[[Start, float], Awaitable[P]],
    at: Start,
    wait_s: float,
    is_news: Callable[[P], bool],
) -> P:
    """The page at a position. Where that is no news, waits for some beside the requests in work."""
    page = await read(at, 0.0)
    if wait_s <= 0 or is_news(page):
        return page
    news = await room.wait(read(page.next if at == "latest" else at, wait_s))
    return page if news is None else news


class PageStream(Generic[P]):
    """Reads pages one after another, within limits, and follows the tail with all who read there.

    Invariant: `at` is the next position that nobody was given.
    """

    def __init__(
        self,
        pages: Pages[P],
        room: Room,
        at: Start,
        *,
        limit: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        """A limit that is None never ends the pages."""
        self.pages, self.room, self.at = pages, room, at
        self._left, self._bytes_left = limit, max_bytes

    @property
    def begins_at_end(self) -> bool:
        """Whether the next page is at the log's end, wherever that is: a client that is cut off before it
        knows the place would begin at another one, and miss what came in between.
        """
        return self.at == "latest"

    def begin(self, page: P) -> int:
        """The position at which a page begins."""
        return next(iter(self.pages.ids(page)), page.next)

    @property
    def is_over(self) -> bool:
        """Whether a limit is reached, or the last position that was asked for."""
        last = self.pages.last
        is_past = last is not None and isinstance(self.at, int) and self.at > last
        return is_past or any(
            left is not None and left <= 0 for left in (self._left, self._bytes_left)
        )

    async def page(self, wait_s: float = 0.0, *, bytes_max: int = STREAM_BYTES) -> P:
        """The next page, maybe empty. At the end waits for news, or for the end to be final."""
        pages = self.pages
        limit = BATCH_ENTRIES_MAX if self._left is None else self._left
        max_bytes = bytes_max if self._bytes_left is None else min(bytes_max, self._bytes_left)

        def read(at: Start, wait_s: float) -> Awaitable[P]:
            return pages.read(at, limit=limit, max_bytes=max_bytes, wait_s=wait_s)

        def is_news(page: P) -> bool:
            return pages.count(page) > 0 or pages.is_end(page)

        page = await page_or_news(self.room, read, self.at, wait_s, is_news)
        self.at = page.next
        if self._left is not None:
            self._left -= pages.count(page)
        if self._bytes_left is not None:
            self._bytes_left -= pages.payload_bytes(page)
        return page

    async def tail(self) -> AsyncGenerator[Told[P], None]:
        """Pages without an end, an empty one whenever nothing came for a while. Ends after the page
        that nothing can follow, with the limits, or when this process is about to end.
        """
        wait_s = 0.0
        is_limited = (self._left, self._bytes_left, self.pages.last) != (None, None, None)
        while is_limited or not isinstance(self.at, int):
            page = await self.page(wait_s)
            yield Told(page)
            wait_s = self.room.limits.comment_every_s
            if self.pages.is_end(page) or self.is_over or self.room.is_ending:
                return
        shared = told_tail(
            self.room.follows,
            self.pages.key,
            self.pages,
            self.at,
            wait_s=self.room.limits.comment_every_s,
            waited=self.room.wait,
        )
        async with aclosing(shared):
            async for told in shared:
                yield told
                if self.room.is_ending:
                    return
