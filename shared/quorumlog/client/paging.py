"""What is read page by page and looked at one by one."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Paged(AsyncIterator[T], Generic[T]):
    """An iterator over pages' items, in order. `pages` gives them as they came, for whoever wants
    to handle many at once; use one or the other.
    """

    def __init__(self, pages: AsyncGenerator[Sequence[T], None]) -> None:
        """`pages`: their items; a page may be empty."""
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
        """Ask for nothing more."""
        await self._pages.aclose()
