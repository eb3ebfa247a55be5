"""Those who wait at the tail of one ledger, woken by the news itself."""

import asyncio


class LacWaiters:
    """Futures of those who wait until something of the ledger is news to them."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        """Nobody waits."""
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def __bool__(self) -> bool:
        """Whether somebody waits still."""
        return any(not future.done() for _, future in self._waiting)

    @property
    def lowest(self) -> int | None:
        """The lowest LAC that is known to those who wait; None when nobody does."""
        known = [after for after, future in self._waiting if not future.done()]
        return min(known, default=None)

    async def wait(self, after: int, wait_s: float) -> bool:
        """Return True once the LAC is above `after` or anything else changed; False after
        `wait_s`.
        """
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((after, future))
        try:
            async with asyncio.timeout(wait_s):
                await future
        except TimeoutError:
            return False
        finally:
            if not future.done():
                future.cancel()
                self._waiting = [item for item in self._waiting if item[1] is not future]
        return True

    def advance(self, last_add_confirmed: int) -> None:
        """The LAC is this now: wake those who know less."""
        if not self._waiting:
            return
        still = []
        for item in self._waiting:
            if item[0] >= last_add_confirmed:
                still.append(item)
            elif not item[1].done():
                item[1].set_result(None)
        self._waiting = still

    def wake_all(self) -> None:
        """Something else changed: closed, deleted, the writer gone."""
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            if not future.done():
                future.set_result(None)
