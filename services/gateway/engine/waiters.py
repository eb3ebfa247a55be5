"""Waiters at the tail of one ledger, woken by its changes."""

import asyncio


class LacWaiters:
    """Futures of waiters, each with the LAC that it knows."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        """Nobody waits yet."""
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def __bool__(self) -> bool:
        """Whether somebody still waits."""
        return any(not future.done() for _, future in self._waiting)

    @property
    def lowest(self) -> int | None:
        """The lowest LAC known to a waiter; None if nobody waits."""
        known = [after for after, future in self._waiting if not future.done()]
        return min(known, default=None)

    async def wait(self, after: int, wait_s: float) -> bool:
        """True once the LAC is above `after` or something else changed; False after `wait_s`."""
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
        """Wake the waiters that know a lower LAC."""
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
        """Wake all waiters: the ledger was closed or deleted, or the writer is gone."""
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            if not future.done():
                future.set_result(None)
