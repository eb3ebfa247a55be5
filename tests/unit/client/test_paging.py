"""Pages are read one ahead of the caller, and no more."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from quorumlog.client.records import Paged, ahead
from tests.support.waiting import turns

_TURNS = 20
"""Of the event loop: by then everything has come as far as it comes by itself."""


class Pages:
    """Pages of one number each, and how far they were asked for."""

    def __init__(self, count: int, *, fails_at: int | None = None) -> None:
        self.asked = -1
        self.is_closed = False
        self._count, self._fails_at = count, fails_at
        self.hold: asyncio.Event | None = None

    async def read(self) -> AsyncGenerator[Sequence[int], None]:
        try:
            for number in range(self._count):
                self.asked = number
                if self.hold is not None:
                    await self.hold.wait()
                if number == self._fails_at:
                    raise ConnectionError(number)
                yield [number]
        finally:
            self.is_closed = True


async def test_all_pages_come_in_order() -> None:
    assert [each async for each in Paged(ahead(Pages(5).read()))] == [0, 1, 2, 3, 4]
    assert [each async for each in Paged(ahead(Pages(0).read()))] == []


async def test_nothing_is_read_before_somebody_asks_and_one_page_beyond() -> None:
    pages = Pages(5)
    items = Paged(ahead(pages.read()))
    await turns(_TURNS)
    assert pages.asked == -1

    assert await anext(items) == 0
    await turns(_TURNS)

    assert pages.asked == 1
    await items.aclose()
    assert pages.is_closed


async def test_an_error_comes_at_its_page() -> None:
    pages = Pages(5, fails_at=1)
    items = Paged(ahead(pages.read()))
    assert await anext(items) == 0
    await turns(_TURNS)

    with pytest.raises(ConnectionError):
        await anext(items)
    assert pages.is_closed


async def test_an_error_of_a_page_that_nobody_wants_is_nobodys(
    caplog: pytest.LogCaptureFixture,
) -> None:
    items = Paged(ahead(Pages(5, fails_at=1).read()))
    assert await anext(items) == 0
    await turns(_TURNS)

    await items.aclose()

    assert not caplog.records


async def test_who_stops_waiting_stops_the_read() -> None:
    pages = Pages(5)
    pages.hold = asyncio.Event()
    asking = asyncio.ensure_future(anext(Paged(ahead(pages.read()))))
    await turns(_TURNS)
    assert pages.asked == 0

    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking

    assert pages.is_closed
