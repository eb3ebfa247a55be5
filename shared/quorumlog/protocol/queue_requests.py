"""Requests about work queues, and their answers (`queues.py` decides them)."""

from dataclasses import dataclass
from enum import StrEnum

from quorumlog.protocol.offset_set import NONE, Offsets
from quorumlog.protocol.queue_state import Order, QueueSettings
from quorumlog.protocol.rows import FreeLog, List


@dataclass(frozen=True, slots=True)
class PutQueue:
    """Create a queue, or change its settings. Replaces a queue of a deleted log with this name."""

    log: str
    queue: str
    created: str
    settings: QueueSettings
    start: int = 0
    """The first record of a new queue."""
    dead_end: int = 0
    """The end of the dead-letter log. Dead letters of a new queue are at or above this end."""
    dead_created: str = ""
    version: int | None = None
    """The expected `settings_version`."""
    is_new: bool = False
    """Whether the queue must not exist."""


@dataclass(frozen=True, slots=True)
class LookQueue:
    """Return one queue. Before that, records whose last attempt has ended join a move to the
    dead-letter log.
    """

    log: str
    queue: str


@dataclass(frozen=True, slots=True)
class DeleteQueue:
    """Delete a queue. Answer: its last state. `version`: the expected `settings_version`."""

    log: str
    queue: str
    version: int | None = None


@dataclass(frozen=True, slots=True)
class Take:
    """Claim up to `count` records below `end`, the log's acknowledged end. Answer: Taken."""

    log: str
    queue: str
    created: str
    first_offset: int
    """The log's first offset, below which records were dropped."""
    end: int
    count: int
    keys: tuple[tuple[int, int], ...] = ()
    """With the order `key`, pairs of offset and key number; 0 for a record without a key."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The records of a new claim, grouped by their number of attempts."""

    token: int
    records: tuple[tuple[int, Offsets], ...]
    lease_ms: int
    limit: str = ""
    """The bound that keeps the queue from giving further records; empty: none."""
    wait_ms: int = -1
    """Milliseconds until the first lease or delay ends; -1 if there is none or records are
    given."""
    order: str = Order.NONE
    floor: int = 0
    acked: Offsets = NONE
    """With the order `key`, the done records above the floor."""


class Settlement(StrEnum):
    """The ways to settle claimed records."""

    ACK = "ack"
    NAK = "nak"
    EXTEND = "extend"
    UNREAD = "unread"
    """A gateway returns records that it could not send. The attempt does not count."""
    LOST = "lost"
    """The records can no longer be read."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Settle claimed records. `kind`: a Settlement. Answer: Settled."""

    log: str
    queue: str
    kind: str
    items: tuple[tuple[int, Offsets], ...]
    """Tokens, each with offsets of its claim; no offsets mean all records of the claim."""
    delay_ms: int = 0
    """Milliseconds until records that are given back may be given again."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """Records that a token does not settle, and the reason."""

    token: int
    offsets: Offsets
    reason: str
    """`acknowledged`: the records are done. `claim-ended`: the lease ended or the records were
    given back, and another worker may have them."""


@dataclass(frozen=True, slots=True)
class Settled:
    """The number of settled records, and the refused records."""

    done: int
    refused: tuple[Refused, ...] = ()


@dataclass(frozen=True, slots=True)
class Redrive:
    """Send this queue's dead letters from `redriven` to `end` back to the queue's log. Has no
    effect if the queue's `redriven` and `dead_created` differ from `seen`, or if the queue has too
    many moves. Answer: the queue.

    `created`: the creation time of the queue's log. `dead_created`: the creation time of the
    present dead-letter log, which may differ from the time in `seen`. `offsets`: all dead letters
    of this queue in the dead-letter log from `redriven` to `end`.
    """

    log: str
    queue: str
    created: str
    dead_created: str
    seen: tuple[int, str]
    end: int
    offsets: Offsets


@dataclass(frozen=True, slots=True)
class BeginMove:
    """Allow the append of a move. Has no effect if the move's `since` and `created` differ from
    `seen`. Answer: the queue.

    `offsets`: the records of the append; the rest becomes another move. `created`: see `Move`.
    """

    log: str
    queue: str
    id: int
    seen: tuple[int, str]
    since: int
    offsets: Offsets
    created: str


@dataclass(frozen=True, slots=True)
class EndMove:
    """Confirm that a move was appended. `lost`: number of records not sent. Answer: the queue."""

    log: str
    queue: str
    id: int
    lost: int = 0


@dataclass(frozen=True, slots=True)
class FailMove:
    """Store the code of the error that keeps records from the dead-letter log. Answer: the queue."""

    log: str
    queue: str
    code: str


OfQueue = LookQueue | DeleteQueue | Take | Settle | Redrive | BeginMove | EndMove | FailMove
"""Requests that fail if the queue does not exist."""
QueueRequest = PutQueue | List | FreeLog | OfQueue


def is_counted_once(request: QueueRequest) -> bool:
    """Whether a request needs a `Stamp`. A claim needs no stamp: a copy only claims further
    records, which are given again when its lease ends. Copies of settlements, moves and redrives
    have no effect.
    """
    return isinstance(request, PutQueue | DeleteQueue)
