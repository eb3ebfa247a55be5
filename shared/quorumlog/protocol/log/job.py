"""A job: the steps by which an owner reads or changes its log's metadata, one job at a time.

A job returns one step after another: a question, the emptying of the pipeline, or its end.
`owner.py` performs the steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from quorumlog.errors import (
    UNKNOWN,
    InvalidRequest,
    LogClosed,
    LogFenced,
    LogProtected,
    MetadataUnavailable,
    NoSuchLog,
    NoSuchTransaction,
    NotEnoughBookies,
    QuorumLogError,
    TransactionAborted,
    TransactionCommitted,
    WriterLost,
)
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.messages import (
    NOT_OWNER,
    CloseLedger,
    Commit,
    Committed,
    CountBookies,
    CreateLedger,
    NotOwner,
    Publish,
    Question,
    ReadLog,
    ReadTransaction,
    RecordsAppended,
    RequestKey,
    RowChanged,
    Sizes,
    SwapLog,
)
from quorumlog.protocol.log.pipeline import PendingAppend
from quorumlog.protocol.log.row import LogMetadata
from quorumlog.protocol.log.takeover import is_written, no_room
from quorumlog.protocol.log.tenancy import Tenancy
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.transaction import Transaction

LEDGERS_SPARE: Final = 1000
"""Rolls leave room for this many ledgers of takeovers, without which a log can't continue."""


class JobKind(Enum):
    """The purpose of a job."""

    CHECK = "check"
    """Find out whether this owner still owns the log. An owner that was displaced while idle has
    not noticed its end, and must not answer from memory."""
    ROLL = "roll"
    PUBLISH = "publish"
    RELEASE = "release"


class JobStep(Enum):
    """The answer that a job waits for."""

    WAITING = "waiting"
    LOOKING = "looking"
    """Waits for the log's metadata, which shows whether this owner still owns the log."""
    FINDING = "finding"
    """Waits for the state of a transaction."""
    REPEATING = "repeating"
    """Waits for the first answer of a transaction that has ended already."""
    COUNTING = "counting"
    """Waits for the number of writable bookies."""
    CREATING = "creating"
    NAMING = "naming"
    """Waits for the change that names the next ledger before the old ledger is closed."""
    EMPTYING = "emptying"
    """Waits for the acknowledgement of all requests in flight."""
    CLOSING = "closing"
    SWAPPING = "swapping"
    """Waits for the change with the old ledger's end and the new ledger's start."""


_BREAKING: Final = (JobStep.NAMING, JobStep.CLOSING, JobStep.SWAPPING)
"""Steps whose failure leaves the metadata unknown, or the owner without a ledger."""


_FINAL: Final = (
    NoSuchTransaction,
    TransactionAborted,
    TransactionCommitted,
    InvalidRequest,
    NoSuchLog,
    LogClosed,
    LogProtected,
)
"""Errors of a roll or a publication that any owner would return."""


class Fate(Enum):
    """The consequence of a job's end for its owner."""

    STAYS = "stays"
    MOVES_ON = "moves-on"
    """The owner switches to the ledger that the metadata now names last."""
    ENDS = "ends"


@dataclass(frozen=True, slots=True)
class Empty:
    """A step that waits for all requests in flight. Later requests wait for the next ledger."""


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The end of a job, with the answer to its request."""

    answer: Any = None
    owner: Fate = Fate.STAYS


@dataclass(frozen=True, slots=True)
class JobUndone:
    """The end of a job that failed. `error`: None if another owner is to do the job."""

    error: QuorumLogError | None = None
    owner: Fate = Fate.STAYS


JobNext = Question | Empty | JobEnded | JobUndone


@dataclass(slots=True, eq=False)
class Job:
    """One job of an owner. The owner passes its tenancy to the methods."""

    kind: JobKind
    request: RequestKey = None
    """The request that waits for the job; None if no request does."""
    call: Publish | None = None
    sizes: Sizes = ()
    step: JobStep = JobStep.WAITING
    new: int | None = None
    """The ledger that was created for the job."""
    end: tuple[int, int, int] = (-1, 0, 0)
    """The old ledger's id, records and bytes."""
    has_looked: bool = False
    refusal: QuorumLogError | None = None
    """The error for the request if this process still owns the log."""
    doubted: list[tuple[PendingAppend, RecordsAppended | QuorumLogError]] = field(
        default_factory=list
    )

    # --- events ----------------------------------------------------------------------------------

    def begin(self, held: Tenancy, now: Now) -> JobNext:
        """Begin the job while no other job is in progress."""
        match self.kind:
            case JobKind.CHECK:
                return self._look(held)
            case JobKind.RELEASE:
                return self._empty()
            case JobKind.PUBLISH:
                return self._begin_publication(held)
            case JobKind.ROLL:
                if self.request is None and not held.is_roll_due(now):
                    return JobEnded()
                # A roll does not replace an empty ledger.
                return self._look(held) if held.pipe.next_entry == 0 else self._prepare(held)

    def close(self, held: Tenancy, now: Now) -> JobNext:
        """Close the ledger, because no request is in flight any longer."""
        del now
        return self._ask(JobStep.CLOSING, CloseLedger(held.ledger_id))

    def note(self, value: Any) -> None:
        """Store the id of a created ledger, even if the owner has ended."""
        if self.step is JobStep.CREATING and isinstance(value, LedgerMetadata):
            self.new = value.ledger_id

    def answered(self, value: Any, held: Tenancy, now: Now) -> JobNext:
        """Continue after an answer, if the owner has not ended."""
        if isinstance(value, QuorumLogError):
            is_over = self.step in _BREAKING or isinstance(value, NoSuchLog)
            return JobUndone(value, Fate.ENDS if is_over else Fate.STAYS)
        match self.step:
            case JobStep.LOOKING:
                return self._looked(value, held)
            case JobStep.FINDING:
                return self._found(value, held)
            case JobStep.REPEATING:
                return JobEnded(value.transaction)
            case JobStep.COUNTING:
                return self._counted(value, held)
            case JobStep.CREATING:
                return self._created(value, held)
            case JobStep.NAMING | JobStep.SWAPPING:
                return self._swapped(value, held, now)
            case JobStep.CLOSING:
                return self._closed(value, held, now)
            case JobStep.WAITING | JobStep.EMPTYING:
                raise AssertionError(f"a job must not get an answer in step {self.step}")

    # --- steps -----------------------------------------------------------------------------------

    def _ask(self, step: JobStep, question: Question) -> Question:
        self.step = step
        return question

    def _look(self, held: Tenancy) -> JobNext:
        return self._ask(JobStep.LOOKING, ReadLog(held.log.name))

    def _empty(self) -> JobNext:
        self.step = JobStep.EMPTYING
        return Empty()

    def _begin_publication(self, held: Tenancy) -> JobNext:
        assert self.call is not None
        try:
            held.check_token(self.call.token)
        except LogFenced as error:
            self.refusal = error
            return self._look(held)
        return self._ask(JobStep.FINDING, ReadTransaction(self.call.transaction))

    def _prepare(self, held: Tenancy) -> JobNext:
        """Prepare a new ledger if the log has room and enough bookies are live (rule 23)."""
        full = no_room(held.log, spare=LEDGERS_SPARE + len(self.sizes))
        if full is None:
            return self._ask(JobStep.COUNTING, CountBookies())
        if self.has_looked:
            return JobUndone(full)
        return self._look(
            held
        )  # another process may have truncated the log without this owner's knowledge

    def _looked(self, row: LogMetadata, held: Tenancy) -> JobNext:
        if not held.is_mine(row):
            return JobUndone(None, Fate.ENDS)
        held.take(row)
        self.has_looked = True
        if self.kind is JobKind.CHECK:
            return JobEnded()
        if self.refusal is not None:
            return JobUndone(self.refusal)
        if held.pipe.next_entry == 0 and self.kind is JobKind.ROLL:
            return JobEnded()
        return self._prepare(held)

    def _found(self, found: Transaction, held: Tenancy) -> JobNext:
        assert self.call is not None
        if found.is_open:
            return self._prepare(held)
        repeat = Commit(self.call.transaction, self.call.ledgers, None)
        return self._ask(JobStep.REPEATING, repeat)

    def _counted(self, writable: int, held: Tenancy) -> JobNext:
        needed = held.log.settings.quorum.ensemble_size
        if writable < needed:
            detail = f"a new ledger needs {needed} writable bookies, but only {writable} are live"
            return JobUndone(NotEnoughBookies(detail, log=held.log.name))
        return self._ask(JobStep.CREATING, CreateLedger(held.log))

    def _created(self, new: LedgerMetadata, held: Tenancy) -> JobNext:
        held.ahead = new.ledger_id
        return self._name(held) if self.kind is JobKind.ROLL else self._empty()

    def _name(self, held: Tenancy) -> JobNext:
        assert self.new is not None
        return self._ask(JobStep.NAMING, SwapLog(held.log.with_ledger(self.new)))

    def _closed(self, closed: LedgerMetadata, held: Tenancy, now: Now) -> JobNext:
        if closed.last_entry != held.pipe.next_entry - 1:
            detail = f"the ledger ends at {closed.last_entry}, not at {held.pipe.next_entry - 1}"
            return JobUndone(WriterLost(detail, log=held.log.name), Fate.ENDS)
        self.end = (held.ledger_id, held.pipe.records, closed.length or 0)
        return self._swap(held, now)

    def _swap(self, held: Tenancy, now: Now) -> JobNext:
        """Make the change that continues the log in the new ledger (rules 23 and 28)."""
        ledger_id, records, size = self.end
        row = held.with_ends(held.log, {ledger_id: (records, size)}, now)
        if self.call is None:
            return self._ask(JobStep.SWAPPING, SwapLog(row))
        assert self.new is not None
        row = row.with_published(
            self.sizes,
            now_ms=now.sealed_ms(),
            published_ms=now.stamp_ms(held.pipe.appended_ms),
            is_new_start=self.call.overwrite,
        ).with_ledger(self.new)
        row = held.with_ends(row, {}, now)
        commit = Commit(self.call.transaction, self.call.ledgers, row)
        return self._ask(JobStep.SWAPPING, commit)

    def _swapped(self, value: Any, held: Tenancy, now: Now) -> JobNext:
        """Continue after a change, which this or another owner may have made."""
        assert self.new is not None
        if isinstance(value, RowChanged):
            if not held.is_mine(value.current):
                return JobUndone(None, Fate.ENDS)
            held.log = value.current
            return self._name(held) if self.step is JobStep.NAMING else self._swap(held, now)
        row, answer = (
            (value.log, value.transaction) if isinstance(value, Committed) else (value, None)
        )
        if row is None or not is_written(row, self.new):
            # Another owner made the change, took over, or closed the log; this owner has no ledger.
            return JobEnded(NOT_OWNER if answer is None else answer, Fate.ENDS)
        held.log = row
        return self._empty() if self.step is JobStep.NAMING else JobEnded(answer, Fate.MOVES_ON)

    # --- its end ---------------------------------------------------------------------------------

    def reported(
        self, error: QuorumLogError | None, *, is_ended: bool
    ) -> Iterator[tuple[RequestKey, QuorumLogError | NotOwner]]:
        """The answers to the requests that wait for this failed job. If the owner has ended, most
        errors need not apply to the log any longer.
        """
        for pending, answer in self.doubted:
            assert error is not None, "without an error, the next owner must answer these requests"
            is_repeat = isinstance(answer, RecordsAppended)
            is_unknown = is_repeat and isinstance(error, MetadataUnavailable)
            yield pending.request, error.with_outcome(UNKNOWN) if is_unknown else error
        if self.request is not None:
            is_reported = error is not None and (
                not is_ended
                or isinstance(error, _FINAL)
                or error.code == QuorumLogError.code  # a defect: the next owner has it too
            )
            yield self.request, error if error is not None and is_reported else NOT_OWNER
