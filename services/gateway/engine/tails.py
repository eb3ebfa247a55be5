"""The tails of ledgers: readers that wait for entries, and the newest entries in memory.

All readers of another gateway's ledger share one long poll.

The runs that this process's writers confirmed last stay in memory: a reader that follows the tail here asks no bookie. A run
is the very bytes that went to the bookies, which hold nothing else in memory: a request's buffer was copied from when the run
was made. Runs are kept from their confirmation on, so that nothing beyond the LAC is here.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from quorumlog.errors import QuorumLogError
from quorumlog.net.ports import TasksPort
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.record import Run
from services.gateway.interface import LedgerView

log = logging.getLogger(__name__)

RECENT_BYTES_MAX: Final = 8 << 20
"""Of all ledgers together, whoever followed them (taste): some thousand appends, or a moment of a busy gateway."""

RECENT_RUN_BYTES_MAX: Final = 64 << 10
"""A larger run is read from bookies: its bytes cost more than the question, and would push out those of many ledgers."""

_RUN_COST: Final = 1280
"""Bytes that a run takes besides its body, if it is the only one of its ledger; half of it is the ledger's (measured)."""

_ENTRY_COST: Final = 40
"""The same of an entry: where its payload begins, which a run notes when it is read (measured)."""

POLL_S: Final = 10.0
"""How long one poll waits at the writer."""
_PAUSE_S: Final = 1.0
"""Between polls that cannot wait at the writer, because the writer is gone (taste)."""

Poll = Callable[[int, int, float], Awaitable[LedgerView]]
"""(ledger, after, wait) to the LAC; waits for a higher one if possible."""


class LacWaiters:
    """Futures of waiters, each with the LAC that it knows. Invariant: no waiter is kept after its
    wait has ended, however it ended.
    """

    def __init__(self) -> None:
        """Nobody waits yet."""
        self._waiting: dict[asyncio.Future[None], int] = {}
        self.known = NO_ENTRY
        """The highest LAC that `Tails` has learned."""

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


class Tails:
    """The followed ledgers. Invariant: a ledger is followed while somebody waits."""

    def __init__(self, poll: Poll, tasks: TasksPort) -> None:
        """No ledger is followed yet."""
        self._poll = poll
        self._tasks = tasks
        self._followed: dict[int, LacWaiters] = {}

    async def wait(self, ledger_id: int, after: int, wait_s: float) -> bool:
        """True once there may be a LAC above `after`, False after `wait_s`."""
        tail = self._followed.get(ledger_id)
        if tail is None:
            tail = self._followed[ledger_id] = LacWaiters()
            self._tasks.start(self._follow(ledger_id, tail))
        if tail.known > after:
            return True
        return await tail.wait(after, wait_s)

    def changed(self, ledger_id: int) -> None:
        """The ledger's row changed: wake all waiters."""
        tail = self._followed.get(ledger_id)
        if tail is not None:
            tail.wake_all()

    async def _follow(self, ledger_id: int, tail: LacWaiters) -> None:
        try:
            # The first waiter registers right after this task is started.
            while (after := tail.lowest) is not None:
                pause_s = 0.0
                try:
                    known = await self._poll(ledger_id, max(after, tail.known), POLL_S)
                except QuorumLogError as error:
                    log.info("tail-unknown", extra={"ledger": ledger_id, "why": error.detail})
                    pause_s = _PAUSE_S
                else:
                    if known.closed:
                        return
                    tail.known = max(tail.known, known.last_add_confirmed)
                    tail.advance(tail.known)
                    if known.lac_source != "writer":
                        pause_s = _PAUSE_S
                if pause_s:
                    await asyncio.sleep(pause_s)
        finally:
            if self._followed.get(ledger_id) is tail:
                del self._followed[ledger_id]
            tail.wake_all()


class RecentRuns:
    """The newest confirmed runs of a process; the one that was confirmed first goes first.

    Invariants: a ledger's runs are in the order of their ids, with gaps where a run was too large; `_order` has a ledger
    once for each of its runs, oldest first.
    """

    __slots__ = ("_bytes_max", "_order", "_runs", "bytes_kept", "reads")

    def __init__(self, bytes_max: int = RECENT_BYTES_MAX) -> None:
        """Nothing is kept."""
        self._bytes_max = bytes_max
        self._runs: dict[int, deque[Run]] = {}
        self._order: deque[int] = deque()
        self.bytes_kept = 0
        self.reads = 0
        """How many reads were answered from here."""

    def keep(self, runs: Iterable[Run]) -> None:
        """Keep runs of one ledger that were just confirmed, in order."""
        for run in runs:
            if len(run.body) > RECENT_RUN_BYTES_MAX:
                continue
            kept = self._runs.get(run.ledger_id)
            if kept is None:
                kept = self._runs[run.ledger_id] = deque()
            kept.append(run)
            self._order.append(run.ledger_id)
            self.bytes_kept += _size(run)
        while self.bytes_kept > self._bytes_max:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        ledger_id = self._order.popleft()
        kept = self._runs[ledger_id]
        self.bytes_kept -= _size(kept.popleft())
        if not kept:
            del self._runs[ledger_id]

    def read(self, ledger_id: int, first: int, last: int, bytes_max: int) -> list[Run]:
        """Contiguous entries from `first` to `last` at most, about `bytes_max` of payload and one entry at least; none
        where `first` is not here.
        """
        found: list[Run] = []
        at, left = first, bytes_max
        for run in self._from(ledger_id, first):
            if at > last or not run.first <= at <= run.last:
                break
            part = _part(run, at, last, left, has_any=bool(found))
            if part is None:
                break
            found.append(part)
            at = part.last + 1
            left -= part.payload_bytes
        self.reads += bool(found)
        return found

    def _from(self, ledger_id: int, first: int) -> Iterable[Run]:
        """A ledger's runs from the one on that has `first`, found from the newest one backwards: a reader at the tail
        is near it.
        """
        kept = self._runs.get(ledger_id)
        if kept is None or not kept[0].first <= first <= kept[-1].last:
            return ()
        found: deque[Run] = deque()
        for run in reversed(kept):
            found.appendleft(run)
            if run.first <= first:
                break
        return found


def _size(run: Run) -> int:
    """Bytes of a run in memory, once it was read."""
    return len(run.body) + _RUN_COST + _ENTRY_COST * run.count


def _part(run: Run, first: int, last: int, bytes_max: int, *, has_any: bool) -> Run | None:
    """The entries of a run from `first` on that a page takes, as a reader of bookies cuts them (`RangeReader`)."""
    if run.first == first and run.last <= last and run.payload_bytes <= bytes_max:
        return run
    sizes, begin = run.sizes, first - run.first
    end = begin
    size = 0
    for each in sizes[begin : min(last, run.last) - run.first + 1]:
        size += each
        if size > bytes_max and (has_any or end > begin):
            break
        end += 1
    below = run.first + end
    return run.where(lambda entry_id: first <= entry_id < below)
