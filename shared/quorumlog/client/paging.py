"""An iterator over items that are fetched page by page."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Generic, Self, TypeVar

T = TypeVar("T")


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
