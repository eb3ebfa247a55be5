"""Pages of a ledger or of a log, read one after another: what lists, streams and tails share.

The differences between the two (who is asked, and the members of a page) are in `ledger_pages.py` and
`log_pages.py`.
"""

import struct
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterable, Iterator
from contextlib import aclosing
from typing import Final, Generic

from quorumlog.net.listen import client_listens_only
from services.gateway.edge.http.follows import P, SharedPage, shared_tail
from services.gateway.edge.http.limits import BATCH_ENTRIES_MAX
from services.gateway.edge.http.room import Room
from services.gateway.logs.values import Start

STREAM_BYTES: Final = 1 << 20
"""What a stream reads ahead of its client (taste)."""
TAIL_BYTES: Final = 256 << 10
"""The same for a tail: hundreds of slow readers, each with a page in hand, must fit into memory."""
_ITEM_BYTES: Final = 64
"""What an entry or a record takes in memory besides its payload."""
_FRAME: Final = struct.Struct(">QI")


class Pages(ABC, Generic[P]):
    """A ledger or a log that is read page by page and followed, and the forms of its pages.

    An item is an entry or a record; its number is its entry id or offset.
    """

    noun = b"entries"
    """The JSON member of the items."""

    def __init__(self, name: bytes, last: int | None = None) -> None:
        """`name` is the JSON member that names the ledger or log; `last` the last number to be read."""
        self.name, self.last = name, last

    @property
    def key(self) -> Hashable | None:
        """What all readers have in common who read the same; None until a page was read that says it."""
        return self.name

    def id_end(self, page: P) -> bytes:
        """The second half of an event's id, after the item's number. A client sends the id to continue (`Last-Event-ID`)."""
        del page
        return b""

    @abstractmethod
    async def read(
        self,
        at: Start,
        *,
        limit: int = BATCH_ENTRIES_MAX,
        max_bytes: int = TAIL_BYTES,
        wait_s: float = 0.0,
    ) -> P:
        """The page at a position, maybe empty. At the end waits for news for `wait_s`."""

    @abstractmethod
    async def end(self, page: P) -> int:
        """The position after all that was acknowledged when a page was read."""

    @abstractmethod
    def count(self, page: P) -> int:
        """Items of a page."""

    @abstractmethod
    def payload_bytes(self, page: P) -> int:
        """Bytes of their payloads."""

    @abstractmethod
    def rest(self, page: P, at: int) -> P:
        """The part of a page from a position within the page on."""

    @abstractmethod
    def is_end(self, page: P) -> bool:
        """Whether nothing can ever follow a page."""

    @abstractmethod
    def position(self, page: P) -> dict[str, str]:
        """The members of a page as headers, for forms whose body has no room for them."""

    @abstractmethod
    def numbers(self, page: P) -> Iterable[int]:
        """The items' numbers."""

    @abstractmethod
    def payloads(self, page: P) -> Iterable[tuple[int, bytes | memoryview]]:
        """The items' numbers with their payloads."""

    @abstractmethod
    def arrow(self, page: P) -> bytes:
        """A page as an Arrow stream."""

    @abstractmethod
    def items(self, page: P, encoding: str) -> Iterable[bytes]:
        """Each item as a JSON object."""

    @abstractmethod
    def members(self, page: P) -> bytes:
        """The JSON members of a page besides its items."""

    @abstractmethod
    def ending(self, page: P) -> dict[str, int]:
        """What a stream says after its last page."""

    def size(self, page: P) -> int:
        """Bytes of a page in memory."""
        return self.payload_bytes(page) + _ITEM_BYTES * self.count(page)

    def frames(self, page: P) -> bytes:
        """A page as (u64 number, u32 length, payload), repeated."""
        parts: list[bytes | memoryview] = []
        for number, payload in self.payloads(page):
            parts.append(_FRAME.pack(number, len(payload)))
            parts.append(payload)
        return b"".join(parts)

    def message(self, page: P, encoding: str) -> bytes:
        """A page as the JSON object of a socket."""
        items = b",".join(self.items(page, encoding))
        return b'{"%b":[%b],%b}' % (self.noun, items, self.members(page))

    def document(self, pages: Iterable[P], end: bytes, encoding: str) -> Iterator[bytes]:
        """Pages as the JSON object of one read, which names what was read too; `end` has the members besides
        the items.
        """
        before = b'{%b,"%b":[' % (self.name, self.noun)
        for page in pages:
            yield before + b",".join(self.items(page, encoding))
            before = b","
        yield b"],%b}" % end

    def document_members(self, page: P) -> bytes:
        """The JSON members of a read besides its items, where its last page is this one."""
        return self.members(page)


def is_sought(at: Start) -> bool:
    """Whether a position depends on when it is asked for."""
    return not isinstance(at, int) and at != "earliest"


async def page_or_news(
    room: Room,
    read: Callable[[Start, float], Awaitable[P]],
    at: Start,
    wait_s: float,
    is_news: Callable[[P], bool],
) -> P:
    """The page at a position. If it has no news, waits for some without a place among the requests in work."""
    page = await read(at, 0.0)
    if wait_s <= 0 or is_news(page):
        return page
    news = await room.wait(read(page.next if is_sought(at) else at, wait_s))
    return page if news is None else news


class PageStream(Generic[P]):
    """Reads pages one after another, within limits, and follows the tail together with its other readers.

    Invariant: `at` is the next position that the caller was not given.
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
    def is_sought(self) -> bool:
        """Whether the next page is where the log's end, or a time, is now. A client must learn the place early: if
        it is cut off before, it begins again at a later end, and misses the records in between.
        """
        return is_sought(self.at)

    def begin(self, page: P) -> int:
        """The position at which a page begins."""
        return next(iter(self.pages.numbers(page)), page.next)

    @property
    def is_over(self) -> bool:
        """Whether a limit is reached, or the last position that was asked for."""
        last = self.pages.last
        is_past = last is not None and isinstance(self.at, int) and self.at > last
        return is_past or any(
            left is not None and left <= 0 for left in (self._left, self._bytes_left)
        )

    @property
    def _is_ending(self) -> bool:
        # A client that is gone also looks like one that only listens: its place is given back at once.
        return self.room.is_ending or client_listens_only()

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

    async def tail(self) -> AsyncGenerator[SharedPage[P], None]:
        """Pages without an end, an empty one whenever nothing came for a while. Ends after the page
        that nothing can follow, at the limits, when the client sends no more, or when this process is about to end.
        """
        wait_s = 0.0
        is_limited = (self._left, self._bytes_left, self.pages.last) != (None, None, None)
        while is_limited or not isinstance(self.at, int) or self.pages.key is None:
            page = await self.page(wait_s)
            yield SharedPage(page)
            wait_s = self.room.limits.comment_every_s
            if self.pages.is_end(page) or self.is_over or self._is_ending:
                return
        tail = shared_tail(
            self.room.follows,
            self.pages.key,
            self.pages,
            self.at,
            wait_s=self.room.limits.comment_every_s,
            waited=self.room.wait,
        )
        async with aclosing(tail):
            async for shared in tail:
                yield shared
                if self._is_ending:
                    return
