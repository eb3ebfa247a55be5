"""The state of a work queue (ADR 55): a floor, below which all records are done; the done records above
it; claims, each of which gives some records to one worker; and moves of dead letters.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from quorumlog.protocol.offset_set import NONE, Offsets
from quorumlog.protocol.rows import Key


class Order(StrEnum):
    """In which order a queue gives records."""

    NONE = "none"
    """Any order; about the log's."""
    KEY = "key"
    """In the log's order for each key, one record of a key at a time."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The settings of a queue."""

    lease_ms: int = 30_000
    max_attempts: int = 0
    """How often a record is given before it goes to the dead-letter log; 0: without limit."""
    dead_letter_log: str = ""
    order: str = Order.NONE
    max_in_flight: int = 1000
    """The most records that were given and are not done."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Records that one worker has, until it settles them or its lease ends."""

    token: int
    offsets: Offsets
    hold_ms: int
    """The lease, or the delay of records that were given back."""
    is_valid: bool = True
    """False: the records were given back, and wait; no token settles them."""


@dataclass(frozen=True, slots=True)
class Move:
    """Records on their way to another log, by one append with the producer id `id`."""

    id: int
    offsets: Offsets
    """Of the queue's log; of the dead-letter log if `is_back`."""
    is_back: bool = False
    """Whether dead letters go back to the queue's log."""
    since: int = -1
    """The end of the other log before the first append was sent; -1: none was."""
    reason: str = ""
    created: str = ""
    """The creation time of the log that the append is sent to; if `is_back`, of the dead-letter
    log that the records are read from."""


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue's whole state."""

    log: str
    queue: str
    created: str
    """The log's creation time: a later log of the same name has another one."""
    version: int
    settings: QueueSettings
    floor: int
    """All records below are done."""
    next: int
    """No record from here on was ever given."""
    acked: Offsets = NONE
    """The done records above the floor."""
    claims: tuple[Claim, ...] = ()
    attempts: tuple[tuple[int, Offsets], ...] = ()
    """The records that were given and are not done, by how often they were given."""
    moves: tuple[Move, ...] = ()
    redriven: int = 0
    """The offset in the dead-letter log below which dead letters were sent back, or are not this
    queue's."""
    dead_created: str = ""
    """The creation time of the dead-letter log that `redriven` is about."""
    redelivered: int = 0
    """How often records were given again."""
    dead: int = 0
    """How many records went to the dead-letter log."""
    lost: int = 0
    """How many records were gone before they were done: by truncation, retention or a loss."""
    failed: str = ""
    """The code of the error for which records can't be sent to the dead-letter log now."""
    settings_version: int = 0
    """The version of the change that created the queue, or was the last one of its settings."""

    @property
    def key(self) -> Key:
        """The log and the queue."""
        return self.log, self.queue

    @property
    def given(self) -> Offsets:
        """The records that were given and are not done."""
        return Offsets.union(offsets for _, offsets in self.attempts)

    @property
    def moving(self) -> Offsets:
        """The records above the floor on their way to the dead-letter log."""
        moving = (move.offsets for move in self.moves if not move.is_back)
        return Offsets.union(each - each.below(self.floor) for each in moving)

    @property
    def in_flight(self) -> int:
        """How many records workers have."""
        return sum(len(claim.offsets) for claim in self.claims if claim.is_valid)

    def depth(self, end: int) -> int:
        """How many records are not done, of a log that ends at `end`."""
        return max(end, self.next) - self.floor - len(self.acked)

    @property
    def size(self) -> int:
        """About the most characters of the row."""
        sets = [offsets.packed_size for _, offsets in self.attempts]
        sets += [64 + claim.offsets.packed_size for claim in self.claims]
        # JSON takes up to six bytes for a character of a reason.
        sets += [64 + 6 * len(move.reason) + move.offsets.packed_size for move in self.moves]
        return 1000 + self.acked.packed_size + sum(sets)

    @property
    def outline(self) -> "Queue":
        """The queue without its sets of records, which may be large."""
        return replace(self, acked=NONE, claims=(), attempts=(), moves=())

    def without(self, offsets: Offsets) -> "Queue":
        """The queue without these records in any claim."""
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
        """The queue with these records done; the floor moves up to the first one that is not."""
        offsets -= offsets.below(self.floor)
        attempts = tuple((count, left) for count, each in self.attempts if (left := each - offsets))
        return replace(self, acked=self.acked | offsets, attempts=attempts).raised(self.floor)

    def raised(self, floor: int) -> "Queue":
        """The queue with the floor raised, and above the done records that follow it."""
        acked = self.acked - self.acked.below(floor)
        if acked and acked.first == floor:
            floor = acked.run_end
            acked -= acked.below(floor)
        return replace(self, floor=floor, acked=acked)

    def trimmed(self, first_offset: int) -> "Queue":
        """The queue without records that the log has dropped. Those that were not done are lost."""
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
        """The queue after the append of a move, without records that were `lost`."""
        move = next((each for each in self.moves if each.id == number), None)
        if move is None:
            return self
        row = replace(self, moves=tuple(each for each in self.moves if each is not move))
        if move.is_back:
            return row
        dead = row.dead + len(move.offsets) - lost
        return replace(row.acknowledged(move.offsets), dead=dead, lost=row.lost + lost, failed="")
