"""Requests about work queues, and their answers (`queues.py` decides them)."""

from dataclasses import dataclass
from enum import StrEnum

from quorumlog.protocol.offset_set import NONE, Offsets
from quorumlog.protocol.queue_state import Order, QueueSettings
from quorumlog.protocol.rows import FreeLog, List


@dataclass(frozen=True, slots=True)
class PutQueue:
    """Create a queue, or change its settings. A queue of a deleted log begins anew."""

    log: str
    queue: str
    created: str
    settings: QueueSettings
    start: int = 0
    """The first record of a new queue."""
    dead_end: int = 0
    """The end of the dead-letter log: earlier dead letters are not a new queue's."""
    dead_created: str = ""
    version: int | None = None
    """The expected `settings_version`."""
    is_new: bool = False
    """Whether the queue must not exist."""


@dataclass(frozen=True, slots=True)
class LookQueue:
    """Return one queue. Records that were given too often are then on their way to the dead-letter
    log.
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
    """Claim records below `end`, the log's acknowledged end. Answer: Taken."""

    log: str
    queue: str
    created: str
    first_offset: int
    """The log's first offset: earlier records were dropped."""
    end: int
    count: int
    keys: tuple[tuple[int, int], ...] = ()
    """With the order `key`: offsets, each with a number of its key, or 0 for a record without."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The records of a new claim, by how often they were given. Without records: why."""

    token: int
    records: tuple[tuple[int, Offsets], ...]
    lease_ms: int
    limit: str = ""
    """The bound that keeps the queue from giving further records."""
    wait_ms: int = -1
    """When the next lease or delay ends; -1: there is none."""
    order: str = Order.NONE
    floor: int = 0
    acked: Offsets = NONE
    """With the order `key`: the done records above the floor."""


class Settlement(StrEnum):
    """What becomes of claimed records."""

    ACK = "ack"
    NAK = "nak"
    EXTEND = "extend"
    UNREAD = "unread"
    """Given back by a gateway that could not send them: the attempt does not count."""
    LOST = "lost"
    """The records can't be read any more."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Settle records of claims. Answer: Settled."""

    log: str
    queue: str
    kind: str
    items: tuple[tuple[int, Offsets], ...]
    """Tokens, each with offsets of its claim; no offsets: all that the claim still has."""
    delay_ms: int = 0
    """When records that are given back may be given again."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """Records that a token does not settle, and why."""

    token: int
    offsets: Offsets
    reason: str
    """`acknowledged`: they are done. `claim-ended`: the lease ended or the records were given back,
    and another worker may have them."""


@dataclass(frozen=True, slots=True)
class Settled:
    """How many records were settled, and those that were not."""

    done: int
    refused: tuple[Refused, ...] = ()


@dataclass(frozen=True, slots=True)
class Redrive:
    """Send dead letters back: `offsets` of the dead-letter log, all of this queue from `redriven`
    to `end`. Changes nothing unless `seen` is the queue's `redriven` and `dead_created`, or with too
    many moves. Answer: the queue.

    `created`: of the queue's log. `dead_created`: of the dead-letter log, which may be another one
    than in `seen`.
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
    """Allow the append of a move, unless its `since` and `created` are not those of `seen` any
    more. Answer: the queue.

    `offsets`: what the append will have; the rest becomes another move. `created`: as a move's.
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
    """Note that a move's append is done, without records that were `lost`. Answer: the queue."""

    log: str
    queue: str
    id: int
    lost: int = 0


@dataclass(frozen=True, slots=True)
class FailMove:
    """Note why records can't be sent to the dead-letter log, by the code of the error. Answer: the
    queue.
    """

    log: str
    queue: str
    code: str


OfQueue = LookQueue | DeleteQueue | Take | Settle | Redrive | BeginMove | EndMove | FailMove
"""Requests about a queue that exists."""
QueueRequest = PutQueue | List | FreeLog | OfQueue


def is_counted_once(request: QueueRequest) -> bool:
    """Whether a request needs a `Stamp`. A claim does not: a copy takes further records, which are
    given again after a lease. The others change nothing twice: they name a token, or a move.
    """
    return isinstance(request, PutQueue | DeleteQueue)
