"""Waiters at the tail of one ledger, woken by its changes."""

import asyncio


class LacWaiters:
    """Futures of waiters, each with the LAC that it knows. Invariant: no waiter is kept after its
    wait has ended, however it ended.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        """Nobody waits yet."""
        self._waiting: dict[asyncio.Future[None], int] = {}

    @property
    def lowest(self) -> int | None:
        """The lowest LAC known to a waiter; None if nobody waits."""
        return min(self._waiting.values(), default=None)

    async def wait(self, after: int, wait_s: float) -> bool:
        """True once the LAC is above `after` or something else changed; False after `wait_s`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = after
        try:
            async with asyncio.timeout(wait_s):
                await future
        except TimeoutError:
            return False
        finally:
            self._waiting.pop(future, None)
        return True

    def advance(self, last_add_confirmed: int) -> None:
        """Wake the waiters that know a lower LAC."""
        if self._waiting:
            self._wake([f for f, after in self._waiting.items() if after < last_add_confirmed])

    def wake_all(self) -> None:
        """Wake all waiters: the ledger was closed or deleted, or the writer is gone."""
        self._wake(list(self._waiting))

    def _wake(self, futures: list[asyncio.Future[None]]) -> None:
        for future in futures:
            del self._waiting[future]
            if not future.done():
                future.set_result(None)
