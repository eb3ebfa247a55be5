"""What reads or changes a log's row on behalf of its owner: one job at a time (`owner.py`)."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from quorumlog.errors import QuorumLogError
from quorumlog.protocol.log.messages import LogAppended, Publish, Request, Sizes
from quorumlog.protocol.log.pipeline import Pending


class Work(Enum):
    """What a job is for."""

    CHECK = "check"
    """Whether the log is still owned: one that was displaced while it was idle does not know it, and
    what it says of the log means nothing."""
    ROLL = "roll"
    PUBLISH = "publish"
    RELEASE = "release"


class Stage(Enum):
    """Where a job stands: what it waits for."""

    WAITING = "waiting"
    LOOKING = "looking"
    """For the row, which says whether this owner still is one."""
    FINDING = "finding"
    """A transaction's row."""
    REPEATING = "repeating"
    """The answer of a commit that was ended before."""
    COUNTING = "counting"
    """The bookies that live."""
    CREATING = "creating"
    NAMING = "naming"
    """The row names the ledger that a roll goes on in, before the old one is closed."""
    EMPTYING = "emptying"
    """What is in flight is acknowledged."""
    CLOSING = "closing"
    SWAPPING = "swapping"
    """The row gets the end of the old ledger and the start of the new one."""


BREAKING: Final = (Stage.NAMING, Stage.CLOSING, Stage.SWAPPING)
"""A failure here leaves nobody knowing what the row says, or an owner without a ledger."""


@dataclass(slots=True, eq=False)
class Job:
    """Something that reads or changes the row."""

    work: Work
    request: Request = None
    """None: nobody waits for it."""
    call: Publish | None = None
    sizes: Sizes = ()
    stage: Stage = Stage.WAITING
    new: int | None = None
    """The ledger that was made for it."""
    end: tuple[int, int, int] = (-1, 0, 0)
    """The old ledger, its records and bytes."""
    has_looked: bool = False
    refusal: QuorumLogError | None = None
    """What the request is answered if the log is still owned."""
    doubted: list[tuple[Pending, LogAppended | QuorumLogError]] = field(default_factory=list)
