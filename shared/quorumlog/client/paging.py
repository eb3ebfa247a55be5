"""An iterator over items that are fetched page by page."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Generic, Self, TypeVar

T = TypeVar("T")


async def ahead(
    pages: AsyncGenerator[Sequence[T], None],
) -> AsyncGenerator[Sequence[T], None]:
    """The same pages. While the caller handles one, the next one is read: never more."""

    async def read() -> Sequence[T] | None:
        return await anext(pages, None)

    async with aclosing(pages):
        reading = asyncio.create_task(read())
        try:
            while (page := await reading) is not None:
                reading = asyncio.create_task(read())
                reading.add_done_callback(_passed_over)
                yield page
        finally:
            reading.cancel()
            await asyncio.wait([reading])


def _passed_over(reading: asyncio.Task[Sequence[T] | None]) -> None:
    """Nobody may ask for the page, so that its error is nobody's."""
    if not reading.cancelled():
        reading.exception()


class Paged(AsyncIterator[T], Generic[T]):
    """Iterates over the items of pages, in order, or over whole pages (`pages`), for callers that
    handle many items at once. Use one of the two.
    """

    def __init__(self, pages: AsyncGenerator[Sequence[T], None]) -> None:
        """`pages`: the items of each page; a page may be empty."""
        self._pages = pages
        self._page: Sequence[T] = ()
        self._index = 0

    def __aiter__(self) -> Self:
        """Itself."""
        return self

    async def __anext__(self) -> T:
        """The next item."""
        while self._index >= len(self._page):
            self._page, self._index = await anext(self._pages), 0
        item = self._page[self._index]
        self._index += 1
        return item

    def pages(self) -> AsyncGenerator[Sequence[T], None]:
        """The pages."""
        return self._pages

    async def aclose(self) -> None:
        """Stop fetching."""
        await self._pages.aclose()
