"""The tails of ledgers: readers that wait for new entries, and a cache of the newest entries.

All readers that wait for entries of another gateway's ledger share one long poll.

The newest confirmed runs of this process's writers stay in memory, so readers at the tail need no
bookie. A cached run has the bytes that were sent to bookies, and keeps no request buffer alive.
Runs are cached when they are confirmed, so no entry beyond the LAC is cached.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from quorumlog.errors import QuorumLogError
from quorumlog.net.ports import TasksPort
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.record import Run
from services.gateway.interface import LedgerView

log = logging.getLogger(__name__)

RECENT_BYTES_MAX: Final = 8 << 20
"""Memory for the cached runs of all ledgers (chosen by judgement): a few thousand small appends."""

RECENT_RUN_BYTES_MAX: Final = 64 << 10
"""Larger runs are not cached. They would evict the runs of many ledgers, and a request to a bookie
costs little compared with the transfer of their bytes."""

_RUN_COST: Final = 1280
"""Memory overhead, in bytes, of a ledger's only cached run (measured). The ledger's own item in the
cache takes half of this overhead."""

_ENTRY_COST: Final = 40
"""Memory overhead of each entry in bytes: an offset that the run stores (measured)."""

POLL_S: Final = 10.0
"""Maximum time for which one poll waits at the writer for a higher LAC."""
_PAUSE_S: Final = 1.0
"""Pause between polls while the writer can't be reached (chosen by judgement)."""

Poll = Callable[[int, int, float], Awaitable[LedgerView]]
"""(ledger id, after, wait_s) -> LAC. Waits up to `wait_s` for an LAC above `after`, if possible."""


@dataclass(eq=False)
class LacWaiters:
    """The readers that wait for a higher LAC of one ledger, each with the last LAC it received.
    Invariant: a waiter is removed when its wait ends, also by cancellation.
    """

    _waiting: dict[asyncio.Future[None], int] = field(default_factory=dict)
    known: int = NO_ENTRY
    """The highest LAC that `Tails` has received."""

    @property
    def lowest(self) -> int | None:
        """The lowest of the waiters' last LACs; None without waiters."""
        return min(self._waiting.values(), default=None)

    async def wait(self, after: int, wait_s: float) -> bool:
        """Waits until the LAC is above `after` or the ledger changed. Returns False on timeout."""
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
        """Wakes the waiters whose last LAC is below `last_add_confirmed`."""
        if self._waiting:
            self._wake([f for f, after in self._waiting.items() if after < last_add_confirmed])

    def wake_all(self) -> None:
        """Wakes all waiters, because the ledger was closed or deleted, or the writer is gone."""
        self._wake(list(self._waiting))

    def _wake(self, futures: list[asyncio.Future[None]]) -> None:
        for future in futures:
            del self._waiting[future]
            if not future.done():
                future.set_result(None)


@dataclass(eq=False)
class Tails:
    """Waits for new entries. Invariant: one task polls each ledger for which readers wait."""

    _poll: Poll
    """Returns a ledger's LAC."""
    _tasks: TasksPort
    _followed: dict[int, LacWaiters] = field(default_factory=dict)

    async def wait(self, ledger_id: int, after: int, wait_s: float) -> bool:
        """Waits until the LAC may be above `after`; returns False after `wait_s`."""
        tail = self._followed.get(ledger_id)
        if tail is None:
            tail = self._followed[ledger_id] = LacWaiters()
            self._tasks.start(self._follow(ledger_id, tail))
        if tail.known > after:
            return True
        return await tail.wait(after, wait_s)

    def changed(self, ledger_id: int) -> None:
        """Wakes all waiters of a ledger, because its metadata changed."""
        tail = self._followed.get(ledger_id)
        if tail is not None:
            tail.wake_all()

    async def _follow(self, ledger_id: int, tail: LacWaiters) -> None:
        try:
            # The first waiter is registered before this task takes its first step.
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


@dataclass(eq=False, slots=True)
class RecentRuns:
    """A cache of the newest confirmed runs of this process; evicts in the order of confirmation.

    Invariants: a ledger's runs are in the order of their entry ids, with gaps where a run was too
    large. `_order` has a ledger's id once for each of its runs, oldest first.
    """

    _bytes_max: int = RECENT_BYTES_MAX
    """The memory limit of all cached runs."""
    _runs: dict[int, deque[Run]] = field(default_factory=dict)
    _order: deque[int] = field(default_factory=deque)
    bytes_kept: int = 0
    reads: int = 0
    """The number of reads that were answered from this cache."""

    def keep(self, runs: Iterable[Run]) -> None:
        """Caches runs of one ledger that were just confirmed, in order."""
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
        """Returns contiguous cached entries from `first` up to `last`: about `bytes_max` of
        payload, but at least one entry. Returns no entries if `first` is not cached.
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
        """Returns a ledger's runs from the run with `first` on, searched from the newest run."""
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
    """The memory that a run takes after its first read, in bytes."""
    return len(run.body) + _RUN_COST + _ENTRY_COST * run.count


def _part(run: Run, first: int, last: int, bytes_max: int, *, has_any: bool) -> Run | None:
    """Returns the entries of a run from `first` on that fit into a page; None if none fits."""
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
