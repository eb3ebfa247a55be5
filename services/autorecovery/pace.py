"""The rate of this process's copying: bytes per second, and none while repair is paused."""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, Final

from quorumlog.net.bookie_client import BookieClient
from quorumlog.net.ports import AddDone
from quorumlog.net.timers import Timers
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.record import Run

_POLL_S: Final = 0.2
"""How soon a changed limit, or the end of a pause, takes effect."""


class PacedBookies:
    """Bookies for repair: adds wait for their turn. Implements `BookiesPort`.

    Invariant: in any t seconds at most `bytes_per_s` * t bytes and one run are sent.
    """

    def __init__(self, bookies: BookieClient) -> None:
        """Not limited at first. Only adds are paced: a paced add follows each read."""
        self._bookies = bookies
        self.fence, self.read_lac, self.read = bookies.fence, bookies.read_lac, bookies.read
        self.keep_row = bookies.keep_row
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[int, int, Callable[[], None]]] = deque()
        self._wake = asyncio.Event()
        self._debt_bytes = 0.0
        self._seen_at = self._loop.time()
        self.bytes_per_s: float | None = None
        self.is_paused = False
        self.copied_bytes = 0
        self.copied_entries = 0

    async def run(self) -> None:
        """Send queued adds, for ever."""
        while True:
            while self._queue:
                await self._wait_for_turn()
                size, count, send = self._queue.popleft()
                self._debt_bytes += size
                self.copied_bytes += size
                self.copied_entries += count
                send()
                # Pay off from here on: a process that stalled while it sent gets no credit.
                self._seen_at = self._loop.time()
            self._wake.clear()
            await self._wake.wait()

    async def _wait_for_turn(self) -> None:
        while True:
            now = self._loop.time()
            rate, since = self.bytes_per_s, now - self._seen_at
            self._seen_at = now
            # Unused rate gives no credit: the limit holds at any time, not on average.
            self._debt_bytes = 0.0 if rate is None else max(0.0, self._debt_bytes - rate * since)
            if self.is_paused:
                await asyncio.sleep(_POLL_S)
            elif rate is not None and self._debt_bytes > 0:
                await asyncio.sleep(min(self._debt_bytes / rate, _POLL_S))
            else:
                return

    def add(
        self,
        member: str,
        ledger_key: bytes,
        run: Run,
        done: AddDone,
        *,
        recovery: bool = False,
        row: LedgerMetadata | None = None,
    ) -> None:
        """Store a member's part of a run, in its turn."""
        send = partial(self._bookies.add, member, ledger_key, run, done, recovery=recovery, row=row)
        self._queue.append((len(run.body), run.count, send))
        self._wake.set()


class EndlessTimers:
    """Timers that skip infinite delays: an add that waits for its turn must not time out, and a
    sent one is always answered by its channel, if only as unknown.
    """

    def __init__(self, timers: Timers) -> None:
        """`timers` runs the finite delays."""
        self._timers = timers

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call `call(*args)` once, `delay_s` seconds from now, unless the delay is infinite."""
        if delay_s != inf:
            self._timers.after(delay_s, call, *args)
