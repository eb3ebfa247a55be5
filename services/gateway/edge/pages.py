"""Pages of a ledger or of a log, read one after another: what lists, streams and tails share.

What differs between the two (who is asked, and how a page looks in each form) is in
`ledger_pages.py` and `log_pages.py`.
"""

from collections.abc import AsyncGenerator, Hashable, Iterable
from contextlib import aclosing
from typing import Final, Generic, Protocol

from services.gateway.edge.body import Room
from services.gateway.edge.follows import P, Told, told_tail
from services.gateway.edge.limits import BATCH_ENTRIES_MAX
from services.gateway.logs.reading import Start

STREAM_BYTES: Final = 1 << 20
"""What a stream reads ahead of its client (taste)."""
TAIL_BYTES: Final = 256 << 10
"""What a tail does: hundreds of slow readers, each with a page in hand, must fit into memory."""
_ITEM_BYTES: Final = 64
"""What an entry or a record takes besides its payload."""


class Readable(Protocol[P]):
    """What can be read page by page."""

    async def read(self, at: Start, *, limit: int, max_bytes: int, wait_s: float = 0.0) -> P:
        """The page at a position, maybe empty. With `wait_s` that position is the end, and news
        are waited for.
        """
        ...

    def count(self, page: P) -> int:
        """Entries or records of a page."""
        ...

    def payload_bytes(self, page: P) -> int:
        """Bytes of a page that count for `max_bytes`."""
        ...

    def is_end(self, page: P) -> bool:
        """Whether nothing can ever follow a page."""
        ...


class Pages(Readable[P], Protocol[P]):
    """What can be streamed and followed too, with the forms of its pages."""

    @property
    def key(self) -> Hashable:
        """Names it among all that are followed."""
        ...

    @property
    def last(self) -> int | None:
        """The last position that is asked for; None stands for no limit."""
        ...

    async def end(self, page: P) -> int:
        """The position after all that was acknowledged when a page was read."""
        ...

    def rest(self, page: P, at: int) -> P:
        """The part of a page from a position on, which is within the page."""
        ...

    def position(self, page: P) -> dict[str, str]:
        """Where a read stands, as headers, for forms that have no room for it in the body."""
        ...

    def ids(self, page: P) -> Iterable[int]:
        """The entry ids or offsets of a page."""
        ...

    def items(self, page: P, encoding: str) -> Iterable[bytes]:
        """Each entry or record of a page as a JSON object."""
        ...

    def frames(self, page: P) -> bytes:
        """A page as frames."""
        ...

    def document(self, page: P, encoding: str) -> bytes:
        """A page as the JSON object of a read."""
        ...

    def message(self, page: P, encoding: str) -> bytes:
        """A page as the JSON object of a socket."""
        ...

    def ending(self, page: P) -> dict[str, int]:
        """What the end says, of a page that is one."""
        ...


class PageReader(Generic[P]):
    """Reads page by page, within limits.

    Invariant: `at` is the next position that nobody was given.
    """

    def __init__(
        self,
        source: Readable[P],
        room: Room,
        at: Start,
        *,
        limit: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        """A limit that is None never ends the pages."""
        self._source, self._room, self.at = source, room, at
        self._left, self._bytes_left = limit, max_bytes

    @property
    def is_over(self) -> bool:
        """Whether a limit is reached."""
        return any(left is not None and left <= 0 for left in (self._left, self._bytes_left))

    async def page(self, wait_s: float = 0.0, *, bytes_max: int = STREAM_BYTES) -> P:
        """The next page, maybe empty. At the end waits for news, or for the end to be final."""
        limit = BATCH_ENTRIES_MAX if self._left is None else self._left
        max_bytes = bytes_max if self._bytes_left is None else min(bytes_max, self._bytes_left)
        page = await self._source.read(self.at, limit=limit, max_bytes=max_bytes)
        if wait_s > 0 and not self._source.count(page) and not self._source.is_end(page):
            self.at = page.next if self.at == "latest" else self.at
            news = await self._room.wait(
                self._source.read(self.at, limit=limit, max_bytes=max_bytes, wait_s=wait_s)
            )
            page = page if news is None else news
        self.at = page.next
        if self._left is not None:
            self._left -= self._source.count(page)
        if self._bytes_left is not None:
            self._bytes_left -= self._source.payload_bytes(page)
        return page


class PageStream(PageReader[P]):
    """Reads pages one after another, and follows the tail with all others who read there."""

    def __init__(
        self,
        pages: Pages[P],
        room: Room,
        at: Start,
        *,
        limit: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        """The same as for a reader."""
        super().__init__(pages, room, at, limit=limit, max_bytes=max_bytes)
        self.pages = pages

    @property
    def is_over(self) -> bool:
        """Whether a limit is reached, or the last position that was asked for."""
        last = self.pages.last
        is_past = last is not None and isinstance(self.at, int) and self.at > last
        return is_past or super().is_over

    async def tail(self) -> AsyncGenerator[Told[P], None]:
        """Pages without an end, an empty one whenever nothing came for a while. Ends after the page
        that nothing can follow, with the limits, or when this process is about to end.
        """
        wait_s = 0.0
        is_limited = (self._left, self._bytes_left, self.pages.last) != (None, None, None)
        while is_limited or not isinstance(self.at, int):
            page = await self.page(wait_s)
            yield Told(page)
            wait_s = self._room.limits.comment_every_s
            if self.pages.is_end(page) or self.is_over or self._room.is_ending:
                return
        shared = told_tail(
            self._room.follows,
            self.pages.key,
            self,
            self.at,
            wait_s=self._room.limits.comment_every_s,
            waited=self._room.wait,
        )
        async with aclosing(shared):
            async for told in shared:
                yield told
                if self._room.is_ending:
                    return

    # What `follows.Tail` asks for.

    async def read(self, at: int, wait_s: float) -> P:
        """As a follow reads."""
        return await self.pages.read(
            at, limit=BATCH_ENTRIES_MAX, max_bytes=TAIL_BYTES, wait_s=wait_s
        )

    def size(self, page: P) -> int:
        """Bytes of a page in memory."""
        return self.pages.payload_bytes(page) + _ITEM_BYTES * self.pages.count(page)

    def rest(self, page: P, at: int) -> P:
        """The part of a page from a position on."""
        return self.pages.rest(page, at)

    def is_end(self, page: P) -> bool:
        """Whether nothing can ever follow a page."""
        return self.pages.is_end(page)
