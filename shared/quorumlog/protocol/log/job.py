"""A job: what reads or changes a log's row on behalf of its owner, which does one at a time.

A job says what comes next, one thing after another: a question, an empty pipeline, or its end.
`owner.py` does these things.
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
"""Rolls leave room for so many ledgers: takeovers, without which a log does not go on."""


class JobKind(Enum):
    """What a job is for."""

    CHECK = "check"
    """Whether the log is still owned. An owner that was displaced while it was idle does not know it,
    and what it says of the log means nothing."""
    ROLL = "roll"
    PUBLISH = "publish"
    RELEASE = "release"


class JobStep(Enum):
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


_BREAKING: Final = (JobStep.NAMING, JobStep.CLOSING, JobStep.SWAPPING)
"""After a failure here nobody knows what the row says, or the owner has no ledger."""


_FINAL: Final = (
    NoSuchTransaction,
    TransactionAborted,
    TransactionCommitted,
    InvalidRequest,
    NoSuchLog,
    LogClosed,
    LogProtected,
)
"""Refusals of a roll or a publication that hold whoever owns the log."""


class Fate(Enum):
    """What the end of a job means for its owner."""

    STAYS = "stays"
    MOVES_ON = "moves-on"
    """It writes to the ledger that the row names last now."""
    ENDS = "ends"


@dataclass(frozen=True, slots=True)
class Empty:
    """Acknowledge what is in flight; what comes meanwhile waits for the next ledger."""


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The end of a job, and what its request is answered."""

    answer: Any = None
    owner: Fate = Fate.STAYS


@dataclass(frozen=True, slots=True)
class JobUndone:
    """The end of a job that came to nothing. `error` is None where another owner is to do it."""

    error: QuorumLogError | None = None
    owner: Fate = Fate.STAYS


JobNext = Question | Empty | JobEnded | JobUndone


@dataclass(slots=True, eq=False)
class Job:
    """See the module. The tenancy that the methods are given is that of the job's owner."""

    kind: JobKind
    request: RequestKey = None
    """None: nobody waits for it."""
    call: Publish | None = None
    sizes: Sizes = ()
    step: JobStep = JobStep.WAITING
    new: int | None = None
    """The ledger that was created for it."""
    end: tuple[int, int, int] = (-1, 0, 0)
    """The old ledger, its records and bytes."""
    has_looked: bool = False
    refusal: QuorumLogError | None = None
    """What the request is answered if the log is still owned."""
    doubted: list[tuple[PendingAppend, RecordsAppended | QuorumLogError]] = field(
        default_factory=list
    )

    # --- what happens to it ----------------------------------------------------------------------

    def begin(self, held: Tenancy, now: Now) -> JobNext:
        """No other job is under way."""
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
                # An empty ledger stays.
                return self._look(held) if held.pipe.next_entry == 0 else self._prepare(held)

    def close(self, held: Tenancy, now: Now) -> JobNext:
        """Nothing is in flight any more."""
        del now
        return self._ask(JobStep.CLOSING, CloseLedger(held.ledger_id))

    def note(self, value: Any) -> None:
        """Know of the ledger that was created, whatever becomes of the owner."""
        if self.step is JobStep.CREATING and isinstance(value, LedgerMetadata):
            self.new = value.ledger_id

    def answered(self, value: Any, held: Tenancy, now: Now) -> JobNext:
        """A question was answered, and the owner has not ended."""
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
                raise AssertionError("nothing was asked")

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
        """Nothing is changed before the row has room, and enough bookies live (rule 23)."""
        full = no_room(held.log, spare=LEDGERS_SPARE + len(self.sizes))
        if full is None:
            return self._ask(JobStep.COUNTING, CountBookies())
        if self.has_looked:
            return JobUndone(full)
        return self._look(
            held
        )  # others may have truncated it since, of whom this owner did not hear

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
            detail = f"a roll needs {needed} bookies that take entries, {writable} do"
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
            detail = f"the ledger {held.ledger_id} ends at {closed.last_entry}"
            return JobUndone(WriterLost(detail, log=held.log.name), Fate.ENDS)
        self.end = (held.ledger_id, held.pipe.records, closed.length or 0)
        return self._swap(held, now)

    def _swap(self, held: Tenancy, now: Now) -> JobNext:
        """One change of the row by which the log goes on in the new ledger (rules 23 and 28)."""
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
        """The row was changed: by this owner, before it by another one, or by both."""
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
            # Another owner did it, or has taken over or closed the log since: this one has no ledger to go on in.
            return JobEnded(NOT_OWNER if answer is None else answer, Fate.ENDS)
        held.log = row
        return self._empty() if self.step is JobStep.NAMING else JobEnded(answer, Fate.MOVES_ON)

    # --- its end ---------------------------------------------------------------------------------

    def told(
        self, error: QuorumLogError | None, *, is_ended: bool
    ) -> Iterator[tuple[RequestKey, QuorumLogError | NotOwner]]:
        """What each request that waits for this job is answered where it comes to nothing: most errors
        say nothing of a log whose owner has ended.
        """
        for pending, answer in self.doubted:
            assert error is not None, "the next owner answers these"
            is_repeat = isinstance(answer, RecordsAppended)
            is_unknown = is_repeat and isinstance(error, MetadataUnavailable)
            yield pending.request, error.with_outcome(UNKNOWN) if is_unknown else error
        if self.request is not None:
            is_told = error is not None and (
                not is_ended
                or isinstance(error, _FINAL)
                or error.code == QuorumLogError.code  # a defect: the next owner has it too
            )
            yield self.request, error if error is not None and is_told else NOT_OWNER
