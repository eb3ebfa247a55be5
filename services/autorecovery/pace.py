"""How fast this process copies: so many bytes a second, and none while repair is paused."""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, Final

from quorumlog.net.bookie_client import BookieClient
from quorumlog.net.ports import AddDone, LacDone, ReadDone
from quorumlog.net.timers import Timers
from quorumlog.protocol.record import Run

_LOOK_S: Final = 0.2
"""How soon a change of the limit, or the end of a pause, is obeyed."""


class PacedBookies:
    """The bookies as repair writes to them: adds wait for their turn. Implements `BookiesPort`.

    Invariant: in any t seconds at most `bytes_per_s` * t bytes and one run are handed over.
    """

    def __init__(self, bookies: BookieClient) -> None:
        """Nothing is limited yet."""
        self._bookies = bookies
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
        """Hand adds over, for ever."""
        while True:
            while self._queue:
                await self._until_free()
                size, count, send = self._queue.popleft()
                self._debt_bytes += size
                self.copied_bytes += size
                self.copied_entries += count
                send()
                # Paid off from here on: a process that stood still while it sent saves nothing up.
                self._seen_at = self._loop.time()
            self._wake.clear()
            await self._wake.wait()

    async def _until_free(self) -> None:
        while True:
            now = self._loop.time()
            rate, since = self.bytes_per_s, now - self._seen_at
            self._seen_at = now
            # What is not used is not saved up: a limit holds at any time, not on the average.
            self._debt_bytes = 0.0 if rate is None else max(0.0, self._debt_bytes - rate * since)
            if self.is_paused:
                await asyncio.sleep(_LOOK_S)
            elif rate is not None and self._debt_bytes > 0:
                await asyncio.sleep(min(self._debt_bytes / rate, _LOOK_S))
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
        repair: bool = False,
    ) -> None:
        """Store a member's part of a run, in its turn."""
        send = partial(
            self._bookies.add, member, ledger_key, run, done, recovery=recovery, repair=repair
        )
        self._queue.append((len(run.body), run.count, send))
        self._wake.set()

    def fence(self, member: str, ledger_id: int, ledger_key: bytes, done: LacDone) -> None:
        """As the bookies do it."""
        self._bookies.fence(member, ledger_id, ledger_key, done)

    def read_lac(self, member: str, ledger_id: int, done: LacDone) -> None:
        """As the bookies do it."""
        self._bookies.read_lac(member, ledger_id, done)

    def read(
        self,
        member: str,
        ledger_id: int,
        first: int,
        last: int,
        done: ReadDone,
        *,
        bytes_max: int,
        fence_key: bytes | None = None,
        from_disk: bool = False,
    ) -> None:
        """As the bookies do it: what is read is written, so the limit on writing is enough."""
        self._bookies.read(
            member,
            ledger_id,
            first,
            last,
            done,
            bytes_max=bytes_max,
            fence_key=fence_key,
            from_disk=from_disk,
        )


class EndlessTimers:
    """Timers of which infinite ones never fire: an add that waits for its turn is not silent, and
    one that was sent is answered by its channel, if only as unknown.
    """

    def __init__(self, timers: Timers) -> None:
        """The timers that do fire."""
        self._timers = timers

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call `call(*args)` once, `delay_s` seconds from now, if that ever comes."""
        if delay_s != inf:
            self._timers.after(delay_s, call, *args)
