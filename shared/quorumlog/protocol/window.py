"""Tracks runs that were sent to bookies: the positions that stored each run, and its confirmation.

A writer's appends and a recovery's write-backs use the same window. Masks have one bit for each
position, so that an answer costs the same for a run of one entry or of a thousand.
"""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field

from quorumlog.protocol.keyed import Keyed
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.record import Run


def positions(mask: int) -> Iterator[int]:
    """The positions in a mask, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def part_of(run: Run, quorum: Quorum, position: int) -> Run:
    """The part of a run that a position stores (rule 1), which must not be empty."""
    if not quorum.is_striped:
        return run
    residues, size = quorum.residues(position), quorum.ensemble_size
    part = run.where(lambda entry_id: entry_id % size in residues)
    assert part is not None, "the position must store an entry of the run"
    return part


@dataclass(slots=True, eq=False)
class PendingRun(Keyed):
    """A run that is unconfirmed, or for which some positions have not answered."""

    run: Run
    _: KW_ONLY
    holders: int
    """The positions that store a part of the run."""
    waiting: int
    """The positions whose answers are awaited."""
    asked: int
    """The positions with an unanswered request, awaited or not, which is not sent again."""
    tick: int
    """The first tick of the silence timer that covers the run (see Slots)."""
    acked: int = 0
    """The positions that answered ok; for a confirmed run, also positions recorded as missed."""


@dataclass(slots=True, eq=False)
class Window(Keyed):
    """The unconfirmed runs, and the confirmed runs for which some answers are missing.

    Invariants (checked by `check`):
      - unconfirmed runs follow `last_confirmed` without a gap;
      - a confirmed run stays only while an answer is awaited, or while `is_held`;
      - `pending_bytes` is the size of all runs in the window.
    """

    quorum: Quorum
    _: KW_ONLY
    last_confirmed: int
    length: int
    """Payload bytes of the ledger up to `last_confirmed`."""
    runs: dict[int, PendingRun] = field(default_factory=dict)
    """The runs by their first entry."""
    pending_bytes: int = 0
    missed: list[tuple[int, int, int]] = field(default_factory=list)
    """(position, first, last) of confirmed runs that a position lacks, until Slots reads them."""
    is_held: bool = False
    """Whether confirmed runs stay because an ensemble change is pending. The new fragment may
    contain these runs, and its new members then need them.
    """

    def check(self) -> None:
        """Assert the invariants."""
        following = self.last_confirmed + 1
        for first, pending in self.runs.items():
            run = pending.run
            assert first == run.first, "each run must be stored under its first entry"
            assert not pending.acked & pending.waiting, "an answered position must not be awaited"
            assert not (pending.acked | pending.waiting) & ~pending.holders, "only holders count"
            assert not pending.waiting & ~pending.asked, "an awaited position must have a request"
            if run.last <= self.last_confirmed:
                assert pending.waiting or self.is_held, "settled runs must be removed"
            else:
                assert first == following, "unconfirmed runs must have no gap"
                following = run.last + 1
        assert self.pending_bytes == sum(len(p.run.body) for p in self.runs.values())

    @property
    def unconfirmed(self) -> PendingRun | None:
        """The oldest unconfirmed run, if any."""
        return self.runs.get(self.last_confirmed + 1)

    def push(self, run: Run, *, usable: int, tick: int) -> PendingRun:
        """Add the next run, and await the answers of its holders that are `usable`."""
        holders = self.quorum.holders(run.first, run.last)
        asked = holders & usable
        pending = PendingRun(run, holders=holders, waiting=asked, asked=asked, tick=tick)
        self.runs[run.first] = pending
        self.pending_bytes += len(run.body)
        return pending

    def find(self, first: int) -> PendingRun | None:
        """The run of which a position's part begins at `first`. With striping, a part may begin
        later than its run.
        """
        quorum = self.quorum
        for distance in range(quorum.ensemble_size - quorum.write_quorum + 1):
            pending = self.runs.get(first - distance)
            if pending is not None:
                return pending if first <= pending.run.last else None
        return None

    def answered(self, pending: PendingRun, position: int) -> None:
        """Record that a position answered a request, with any status."""
        pending.waiting &= ~(1 << position)
        pending.asked &= ~(1 << position)

    def ack(self, pending: PendingRun, position: int) -> None:
        """Record that a position stored its part of a run. Confirmed runs count too, because a
        change may replace other positions (BOOKKEEPER-826).
        """
        self.answered(pending, position)
        pending.acked |= (1 << position) & pending.holders
        if pending.run.last <= self.last_confirmed:
            self._release(pending)

    def confirm(self, uncounted: int) -> tuple[Run, ...]:
        """Confirm runs strictly in order, and return the newly confirmed runs. Acknowledgements by
        positions in `uncounted` don't count (rule 6).
        """
        confirmed: tuple[Run, ...] = ()
        while (pending := self.unconfirmed) is not None and self._may_confirm(pending, uncounted):
            confirmed += (pending.run,)
            self.last_confirmed = pending.run.last
            self.length = pending.run.last_length
            self._release(pending)
        return confirmed

    def _may_confirm(self, pending: PendingRun, uncounted: int) -> bool:
        # I2, X14: each entry needs Qa acknowledgements from its write set. Rule 6, I19: while a
        # change is pending, only positions that it does not replace count.
        run = pending.run
        return self.quorum.has_ack_quorum(pending.acked & ~uncounted, run.first, run.last)

    def give_up(self, mask: int) -> None:
        """Stop waiting for answers of the positions in `mask`."""
        for pending in self.runs.values():
            pending.waiting &= ~mask

    def ask(self, mask: int, *, first: int, is_anew: bool) -> list[tuple[int, Run]]:
        """Await answers of the positions in `mask` for runs from entry `first` on. Returns the
        (position, run) pairs to send, except pairs with an unanswered request. `is_anew`: the
        positions have new members, so earlier requests and acknowledgements are discarded first
        (BK#3005, #4097).
        """
        asked: list[tuple[int, Run]] = []
        for pending in self.runs.values():
            if pending.run.last < first:
                continue
            if is_anew:
                pending.acked &= ~mask
                pending.asked &= ~mask
            wanted = mask & pending.holders & ~pending.acked
            unsent = wanted & ~pending.asked
            pending.waiting |= wanted
            pending.asked |= wanted
            asked.extend((position, pending.run) for position in positions(unsent))
        return asked

    def forget_acks(self, mask: int) -> None:
        """Discard requests and acknowledgements of these positions for unconfirmed runs."""
        for pending in self.runs.values():
            if pending.run.last > self.last_confirmed:
                pending.acked &= ~mask
                pending.asked &= ~mask
                pending.waiting &= ~mask

    def silent(self, tick: int, since: tuple[int, ...]) -> int:
        """The mask of the positions that have not answered a request covered by `tick`."""
        mask = 0
        for pending in self.runs.values():
            if pending.tick <= tick:
                mask |= pending.waiting
        return sum(1 << position for position in positions(mask) if since[position] <= tick)

    def is_waiting(self) -> bool:
        """Whether any position's answer is awaited."""
        return any(pending.waiting for pending in self.runs.values())

    def write_off(self, mask: int) -> None:
        """Record confirmed runs as missed by the positions in `mask` that have not stored them."""
        for pending in self.runs.values():
            run = pending.run
            if run.last > self.last_confirmed:
                break
            lacking = mask & pending.holders & ~pending.acked
            self.missed.extend((position, run.first, run.last) for position in positions(lacking))
            pending.acked |= lacking
            pending.waiting &= ~lacking

    def sweep(self) -> None:
        """Remove confirmed runs for which no answer is awaited."""
        for pending in list(self.runs.values()):
            if pending.run.last > self.last_confirmed:
                break
            self._release(pending)

    def _release(self, pending: PendingRun) -> None:
        if self.is_held or pending.waiting:
            return
        run = pending.run
        lacking = pending.holders & ~pending.acked
        if lacking:
            self.missed.extend((position, run.first, run.last) for position in positions(lacking))
        self.pending_bytes -= len(run.body)
        del self.runs[run.first]

    def clear(self) -> None:
        """Forget all runs."""
        self.runs.clear()
        self.missed.clear()
        self.pending_bytes = 0
        self.is_held = False
