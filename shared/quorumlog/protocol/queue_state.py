"""The state of a work queue, and its changes (ADR 55).

The state has a floor (all records below it are done), the done records above the floor, claims
(each gives some records to one worker), and moves of dead letters.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from quorumlog.protocol.offset_set import NONE, Offsets
from quorumlog.protocol.rows import Key


class Order(StrEnum):
    """The order in which a queue gives records."""

    NONE = "none"
    """Approximately the log's order, without a guarantee."""
    KEY = "key"
    """The log's order for each key. Workers have at most one record of a key at a time."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The settings of a queue."""

    lease_ms: int = 30_000
    max_attempts: int = 0
    """Attempts before a record goes to the dead-letter log; 0: without limit."""
    dead_letter_log: str = ""
    order: str = Order.NONE
    max_in_flight: int = 1000
    """Maximum number of unfinished records that were given to workers."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Records that were given to one worker, until it settles them or its lease ends."""

    token: int
    offsets: Offsets
    hold_ms: int
    """Duration of the lease, or of the delay of records that were given back."""
    is_valid: bool = True
    """False if the records were given back and a delay is running. No token settles them then."""


@dataclass(frozen=True, slots=True)
class Move:
    """Records that one append, with the producer id `id`, adds to another log."""

    id: int
    offsets: Offsets
    """Offsets of records in the queue's log, or in the dead-letter log if `is_back`."""
    is_back: bool = False
    """Whether dead letters go back to the queue's log."""
    since: int = -1
    """The target log's end before the first append was sent; -1 if no append was sent."""
    reason: str = ""
    created: str = ""
    """The creation time of the dead-letter log that gets the append. If `is_back`, the creation
    time of the dead-letter log from which the records are read."""


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue's whole state."""

    log: str
    queue: str
    created: str
    """The log's creation time, which distinguishes the log from later namesakes."""
    version: int
    settings: QueueSettings
    floor: int
    """All records below this offset are done."""
    next: int
    """No record at this offset or above was ever given."""
    acked: Offsets = NONE
    """The done records above the floor."""
    claims: tuple[Claim, ...] = ()
    attempts: tuple[tuple[int, Offsets], ...] = ()
    """The unfinished records that were given, grouped by their number of attempts."""
    moves: tuple[Move, ...] = ()
    redriven: int = 0
    """The offset in the dead-letter log below which this queue's dead letters were sent back."""
    dead_created: str = ""
    """The creation time of the dead-letter log to which `redriven` refers."""
    redelivered: int = 0
    """The number of redeliveries of records."""
    dead: int = 0
    """The number of records that were moved to the dead-letter log."""
    lost: int = 0
    """The number of unfinished records that truncation, retention or a loss removed."""
    failed: str = ""
    """The code of the last error of an append to the dead-letter log; empty: no error."""
    settings_version: int = 0
    """The version of the last change of the settings, or of the queue's creation if there was none."""

    @property
    def key(self) -> Key:
        """The log and the queue."""
        return self.log, self.queue

    @property
    def given(self) -> Offsets:
        """The unfinished records that were given to workers."""
        return Offsets.union(offsets for _, offsets in self.attempts)

    @property
    def moving(self) -> Offsets:
        """The records above the floor that moves send to the dead-letter log."""
        moving = (move.offsets for move in self.moves if not move.is_back)
        return Offsets.union(each - each.below(self.floor) for each in moving)

    @property
    def in_flight(self) -> int:
        """The number of records in claims of workers."""
        return sum(len(claim.offsets) for claim in self.claims if claim.is_valid)

    def depth(self, end: int) -> int:
        """The number of unfinished records if the log ends at `end`."""
        return max(end, self.next) - self.floor - len(self.acked)

    @property
    def size(self) -> int:
        """A rough upper bound of the row's characters."""
        sets = [offsets.packed_size for _, offsets in self.attempts]
        sets += [64 + claim.offsets.packed_size for claim in self.claims]
        # JSON needs up to six bytes for a character of a reason.
        sets += [64 + 6 * len(move.reason) + move.offsets.packed_size for move in self.moves]
        return 1000 + self.acked.packed_size + sum(sets)

    @property
    def outline(self) -> "Queue":
        """The queue without its sets of records, which may be large."""
        return replace(self, acked=NONE, claims=(), attempts=(), moves=())

    def without(self, offsets: Offsets) -> "Queue":
        """The queue after these records were removed from all claims."""
        if not offsets:
            return self
        begin, end = offsets.first, offsets.end
        kept: list[Claim] = []
        for claim in self.claims:
            if claim.offsets.first >= end or claim.offsets.end <= begin:
                kept.append(claim)
            elif left := claim.offsets - offsets:
                kept.append(claim if left == claim.offsets else replace(claim, offsets=left))
        return replace(self, claims=tuple(kept))

    def counted(self, offsets: Offsets, more: int) -> "Queue":
        """The queue after these records were given once more (1), or once less (-1)."""
        counts = {count: each - offsets for count, each in self.attempts}
        new = offsets
        for count, each in self.attempts:
            part = each & offsets
            new = new - part
            if count + more:
                counts[count + more] = counts.get(count + more, NONE) | part
        if more > 0:
            counts[1] = counts.get(1, NONE) | new
        left = ((count, each) for count, each in sorted(counts.items()) if each)
        return replace(self, attempts=tuple(left))

    def acknowledged(self, offsets: Offsets) -> "Queue":
        """The queue with these records done, and the floor at the first unfinished record."""
        offsets -= offsets.below(self.floor)
        attempts = tuple((count, left) for count, each in self.attempts if (left := each - offsets))
        return replace(self, acked=self.acked | offsets, attempts=attempts).raised(self.floor)

    def raised(self, floor: int) -> "Queue":
        """The queue with the floor raised to an offset, and past the done records that follow."""
        acked = self.acked - self.acked.below(floor)
        if acked and acked.first == floor:
            floor = acked.run_end
            acked -= acked.below(floor)
        return replace(self, floor=floor, acked=acked)

    def trimmed(self, first_offset: int) -> "Queue":
        """The queue without records below the log's first offset. Unfinished records are lost."""
        if first_offset <= self.floor:
            return self
        done = len(self.acked.below(first_offset)) + len(self.moving.below(first_offset))
        lost = first_offset - self.floor - done
        claims = (
            replace(one, offsets=one.offsets - one.offsets.below(first_offset))
            for one in self.claims
        )
        attempts = ((count, each - each.below(first_offset)) for count, each in self.attempts)
        kept = replace(
            self,
            next=max(self.next, first_offset),
            claims=tuple(claim for claim in claims if claim.offsets),
            attempts=tuple((count, left) for count, left in attempts if left),
            lost=self.lost + lost,
        )
        return kept.raised(first_offset)

    def moved(self, number: int, lost: int) -> "Queue":
        """The queue after a move was appended. `lost`: the number of records not appended."""
        move = next((each for each in self.moves if each.id == number), None)
        if move is None:
            return self
        row = replace(self, moves=tuple(each for each in self.moves if each is not move))
        if move.is_back:
            return row
        dead = row.dead + len(move.offsets) - lost
        return replace(row.acknowledged(move.offsets), dead=dead, lost=row.lost + lost, failed="")
