"""The runs that this process's writers confirmed last, in memory: a reader that follows the tail here asks no bookie.

A run is the very bytes that went to the bookies, which hold nothing else in memory: a request's buffer was copied from
when the run was made. Runs are kept from their confirmation on, so that nothing beyond the LAC is here.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final

from quorumlog.protocol.record import Run

RECENT_BYTES_MAX: Final = 8 << 20
"""Of all ledgers together, whoever followed them (taste): some thousand appends, or a moment of a busy gateway."""

RECENT_RUN_BYTES_MAX: Final = 64 << 10
"""A larger run is read from bookies: its bytes cost more than the question, and would push out those of many ledgers."""

_RUN_COST: Final = 1280
"""Bytes that a run takes besides its body, if it is the only one of its ledger; half of it is the ledger's (measured)."""


_ENTRY_COST: Final = 40
"""The same of an entry: where its payload begins, which a run notes when it is read (measured)."""


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
