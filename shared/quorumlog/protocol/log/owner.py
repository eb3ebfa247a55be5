"""The owner of one log: assigns offsets, pipelines appends, remembers producers, rolls, publishes.

An owner lasts as long as its handle on the log's last ledger. Any failure ends the owner for good.
The end of its ledger then settles its requests in flight (rule 24). The next owner's state is
rebuilt from the metadata and a replay.

    LIVE -> DRAINING -> LIVE      a roll, or a publication
    LIVE, DRAINING -> SETTLING -> SETTLED

The owner's state is its tenancy (`tenancy.py`). Jobs read or change the metadata (`job.py`), one at
a time, so no job conflicts with another.

Invariant (checked by `check`): a settled owner has no request in flight or waiting (rule 24).
"""

from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Any, Final

from quorumlog.errors import (
    UNKNOWN,
    ExpiredProducer,
    InvalidRequest,
    KeyRequired,
    LogFenced,
    LogReplaced,
    NoSuchLedger,
    NotTheOwner,
    Overloaded,
    QuorumLogError,
    SequenceGap,
    StaleProducer,
    StreamSeqRegression,
    TooLarge,
    UnexpectedOffset,
    WriterLost,
)
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.job import (
    Empty,
    Fate,
    Job,
    JobEnded,
    JobKind,
    JobNext,
    JobStep,
    JobUndone,
)
from quorumlog.protocol.log.messages import (
    Answered,
    Append,
    AppendsAsked,
    Ask,
    DeleteLedger,
    Effect,
    EntriesDurable,
    Event,
    HeadLearned,
    LogRequest,
    OwnerEnded,
    Pause,
    PlaceKnown,
    Publish,
    Question,
    ReadLog,
    RecordsAppended,
    RecoverLedger,
    ReleaseAsked,
    RequestKey,
    Resolve,
    Retired,
    RowTaken,
    Settled,
    Stopped,
    Submit,
    SubmitFailed,
    SubmitRefused,
    Ticked,
    Wait,
)
from quorumlog.protocol.log.pipeline import PendingAppend, Pipeline
from quorumlog.protocol.log.producers import ProducerTable
from quorumlog.protocol.log.row import Answer, LogMetadata
from quorumlog.protocol.log.takeover import ending
from quorumlog.protocol.log.tenancy import Tenancy
from quorumlog.protocol.metadata import LedgerMetadata

IN_FLIGHT_MAX: Final = 10_000
"""Maximum unacknowledged requests of one log; further requests get 429. Chosen by judgement."""

_POINT_EVERY: Final = 16
"""The owner emits a hint for readers with every 16th batch."""

_BY_STATE: Final = (
    UnexpectedOffset,
    SequenceGap,
    ExpiredProducer,
    StaleProducer,
    StreamSeqRegression,
    LogFenced,
    LogReplaced,
    InvalidRequest,
    KeyRequired,
)
"""Errors of an append that depend on the known state of the log, and are valid only while this
process still owns the log.
"""

_OF_ENTRIES: Final = (Overloaded, InvalidRequest, TooLarge)
"""Refusals of single entries by a healthy ledger. Any other refusal ends the owner."""


class OwnerPhase(Enum):
    """The phase of an owner, which begins LIVE; SETTLED is final."""

    LIVE = "live"
    DRAINING = "draining"
    """The ledger is about to be closed, so new requests wait for the next ledger."""
    SETTLING = "settling"
    """The owner has ended. The end of its ledger decides about requests in flight."""
    SETTLED = "settled"


class Owner:
    """The owner of one log, in this process."""

    def __init__(
        self,
        log: LogMetadata,
        producers: ProducerTable[PendingAppend],
        now: Now,
        *,
        settle_s: float,
    ) -> None:
        """Begin to own `log`. Its last ledger must be empty, belong to this process, and have a
        known first offset. `settle_s`: how long an ended owner retries to find its ledger's end.
        """
        self.tenancy = Tenancy(log, producers, now)
        self.phase = OwnerPhase.LIVE
        self._waiting: deque[PendingAppend] = deque()
        self._doubted: list[tuple[PendingAppend, RecordsAppended | QuorumLogError]] = []
        """Answers from this owner's memory, which wait for a check that it still owns the log."""
        self._job: Job | None = None
        self._jobs: deque[Job] = deque()
        self._is_roll_asked = False
        self._is_named = False
        """Whether the metadata named the ledger after its first entry was on disk (rule 18f)."""
        self._durable_to = NO_ENTRY
        """The last entry that is on disk, even if it is not acknowledged."""
        self._number = self._job_asked = self._settle_asked = self._pause_asked = 0
        self._name_asked = 0
        self._refusals = 0
        """The number of refusals. A refusal of an earlier `Submit` is ignored, because its entries
        were begun again or answered.
        """
        self._settle_s, self._settle_until_s = settle_s, 0.0
        self._out: list[Effect] = []

    @property
    def log(self) -> LogMetadata:
        """The newest metadata of the log that this owner has received."""
        return self.tenancy.log

    @property
    def _pipe(self) -> Pipeline:
        return self.tenancy.pipe

    @property
    def ledger_id(self) -> int:
        """The ledger that the owner writes."""
        return self.tenancy.ledger_id

    def is_mine(self, log: LogMetadata) -> bool:
        """Whether a version of the metadata names this owner's ledger last."""
        return self.tenancy.is_mine(log)

    @property
    def is_ended(self) -> bool:
        """Whether this owner has ended."""
        return self.phase in (OwnerPhase.SETTLING, OwnerPhase.SETTLED)

    @property
    def is_busy(self) -> bool:
        """Whether a job waits for an answer, which may outlast the owner's end."""
        return self._job is not None

    @property
    def acknowledged_offset(self) -> int:
        """The offset after the last acknowledged record."""
        return self._pipe.first_offset + self._pipe.acknowledged

    # --- the machine -----------------------------------------------------------------------------

    def step(self, event: Event, now: Now) -> list[Effect]:
        """Process an event and return the effects."""
        match event:
            case AppendsAsked(requests, are_again):
                self._appends_asked(requests, now, are_again=are_again)
            case EntriesDurable():
                self._durable(event, now)
            case Answered():
                self._answered(event, now)
            case SubmitRefused():
                self._refused(event, now)
            case SubmitFailed(ledger_id, error):
                if ledger_id == self.ledger_id:
                    self._end(error, now)
            case LogRequest(request, None):
                self._jobs.append(Job(JobKind.ROLL, request))
            case LogRequest(request, Publish() as call, sizes):
                self._jobs.append(Job(JobKind.PUBLISH, request, call, sizes))
            case ReleaseAsked():
                self._jobs.append(Job(JobKind.RELEASE))
            case HeadLearned(head):
                self._learn(head, now)
            case RowTaken(log):
                self.tenancy.take(log)
            case Ticked():
                # Producers don't expire here, because their age counts in append times (rule 26a).
                self._roll_if_due(now)
            case Retired():
                self._retire(now)
            case Stopped():
                self._stop()
            case _:
                raise AssertionError(f"an owner can't process this event: {event}")
        self._go_on(now)
        out, self._out = self._out, []
        return out

    def _go_on(self, now: Now) -> None:
        """Perform the next steps that the state requires, after any event."""
        if self._doubted and not any(job.kind is JobKind.CHECK for job in self._jobs):
            self._jobs.append(Job(JobKind.CHECK))
        while self._job is None and self._jobs:
            self._begin_job(self._jobs.popleft(), now)
        job = self._job
        if job is not None and job.step is JobStep.EMPTYING and not self._pipe.in_flight:
            self._proceed(job.close(self.tenancy, now), now)
        if not self.is_ended:
            self._submit()

    def check(self) -> None:
        """Assert the invariants."""
        self.tenancy.check(is_ended=self.is_ended)
        if self.phase is OwnerPhase.SETTLED:
            assert not self._pipe.in_flight, "a settled owner must have no requests (rule 24)"
            assert not self._waiting, "a settled owner must have no requests (rule 24)"

    def _ask(self, question: Question) -> int:
        self._number += 1
        self._out.append(Ask(self._number, question))
        return self._number

    def _answered(self, event: Answered, now: Now) -> None:
        if event.number == self._job_asked:
            self._job_answered(event.value, now)
        elif event.number == self._settle_asked:
            self._settle_answered(event.value, now)
        elif event.number == self._name_asked:
            self._name_answered(event.value, now)
        elif event.number == self._pause_asked:
            self._is_roll_asked = False

    # --- appending -------------------------------------------------------------------------------

    def _appends_asked(
        self, requests: Iterable[tuple[RequestKey, Append]], now: Now, *, are_again: bool
    ) -> None:
        for request, call in requests:
            if not are_again and len(self._pipe.in_flight) + len(self._waiting) >= IN_FLIGHT_MAX:
                full = Overloaded("too many appends to the log wait: retry", log=self.log.name)
                self._out.append(Resolve(request, full))
            else:
                self._append(PendingAppend(request, call), now)
        self._roll_if_due(now)
        if self.phase is OwnerPhase.SETTLED:
            self._settled()

    def _append(self, pending: PendingAppend, now: Now) -> None:
        if self._must_wait():
            self._waiting.append(pending)
            return
        try:
            self.log.check_created(pending.call.created_at)
            self.tenancy.check_token(pending.call.token)
            needs_keys = self.log.settings.compacts
            before = self._pipe.begin(pending, now, needs_keys=needs_keys)
        except QuorumLogError as error:
            reported = error.replace(log=self.log.name)
            if isinstance(error, _BY_STATE):
                self._doubted.append((pending, reported))
            else:
                self._out.append(Resolve(pending.request, reported))
        else:
            if before is not None:
                self._doubted.append((pending, self._repeated(pending, before)))

    def _must_wait(self) -> bool:
        """Whether an append must wait for the next ledger, or for the log's end (rule 25b)."""
        return self.phase is not OwnerPhase.LIVE or self._pipe.is_over

    def _durable(self, event: EntriesDurable, now: Now) -> None:
        """Acknowledge entries that are on disk, in order. Before a ledger's first acknowledgement,
        read the metadata, because a restored database may have lost the ledger. If the database
        loses the ledger later, an operator can accept the loss only after a rebuild has read the
        ledger's place from copies (rule 18f).
        """
        if self.is_ended or event.ledger_id != self.ledger_id:
            return
        is_first = self._durable_to == NO_ENTRY
        self._durable_to = max(self._durable_to, event.last_entry)
        if self._is_named:
            self._acknowledge_durable(now)
        elif is_first:
            self._name_asked = self._ask(ReadLog(self.log.name))

    def _name_answered(self, value: Any, now: Now) -> None:
        """Process metadata that was read after the ledger's first entries were on disk."""
        if self.is_ended:
            return
        if isinstance(value, LogMetadata) and self._names(value):
            self._is_named = True
            self._acknowledge_durable(now)
        elif isinstance(value, LogMetadata):
            gone = NoSuchLedger(
                f"the log no longer names ledger {self.ledger_id}", ledger_id=self.ledger_id
            )
            self._end(gone, now)
        elif not isinstance(value, QuorumLogError):
            self._name_asked = self._ask(ReadLog(self.log.name))
        elif value.retryable:
            self._name_asked = self._ask(Wait(Pause.YIELD))
        else:
            self._end(value, now)

    def _names(self, row: LogMetadata) -> bool:
        """Whether metadata names this owner's ledger with its first offset."""
        item = row.item_of(self.ledger_id)
        return item is not None and item.first_offset is not None

    def _acknowledge_durable(self, now: Now) -> None:
        pipe = self._pipe
        while pipe.in_flight and pipe.in_flight[0].entry_id <= self._durable_to:
            self._acknowledge()
        if pipe.is_over and not pipe.in_flight:
            # The log has ended. The next request closes the log, and no ledger follows (rule 25b).
            self._end(None, now)
            return
        pipe.producers.forget(now_ms=now.expiry_ms(pipe.appended_ms))

    def _acknowledge(self) -> None:
        place = self._pipe.acknowledged
        pending, kept = self._pipe.acknowledge()
        if pending.entry_id % _POINT_EVERY == 0:
            self._out.append(PlaceKnown(self.ledger_id, place, pending.entry_id))
        self._doubted += [(each, self._repeated(each, kept)) for each in pending.repeats]
        self._out.append(Resolve(pending.request, pending.answer(self.ledger_id)))

    def _repeated(self, pending: PendingAppend, first: Answer) -> RecordsAppended:
        """The answer to a retry of an acknowledged request."""
        assert pending.call.producer is not None
        return RecordsAppended(
            first.first_offset,
            first.last_offset,
            first.ledger_id,
            first.entry_id,
            is_duplicate=True,
            highest_seq=self._pipe.producers.highest(pending.call.producer.id),
        )

    def _submit(self, *, one_by_one: bool = False) -> None:
        payloads = self._pipe.to_submit()
        if payloads:
            first = self._pipe.next_entry - len(payloads)
            self._out.append(Submit(self.ledger_id, first, payloads, self._refusals, one_by_one))

    def _refused(self, event: SubmitRefused, now: Now) -> None:
        """Submit refused entries singly, reject or leave them to the next owner (rule 24a)."""
        if (event.ledger_id, event.number) != (self.ledger_id, self._refusals):
            return
        self._refusals += 1
        is_over = not isinstance(event.error, _OF_ENTRIES)
        if event.count > 1 and not is_over and not self.is_ended:
            self._pipe.again_from(event.first_entry)
            self._submit(one_by_one=True)
            return
        refused = self._pipe.cut(event.first_entry)
        if is_over:
            again = [each for pending in refused for each in pending.with_repeats]
            self._waiting.extendleft(reversed(again))
            self._end(event.error, now)
            return
        self._pipe.undo(refused)
        for pending in refused:
            self._resolve_all(pending, event.error)
        if self.phase is OwnerPhase.LIVE and not self._pipe.is_over:
            # These requests waited for the batch that ends the log, which was refused.
            waiting, self._waiting = self._waiting, deque()
            for each in waiting:
                self._append(each, now)

    def _resolve_all(self, pending: PendingAppend, answer: QuorumLogError) -> None:
        self._out.extend(Resolve(each.request, answer) for each in pending.with_repeats)

    # --- the end ---------------------------------------------------------------------------------

    def _end(self, error: QuorumLogError | None, now: Now) -> None:
        """End because of `error`, or because another gateway owns the log (None)."""
        if not self.is_ended:
            self._out.append(OwnerEnded(error))
            self._retire(now)

    def _retire(self, now: Now) -> None:
        """Begin no further request. The ledger's end settles requests in flight (rule 24)."""
        if self.is_ended:
            return
        self.phase = OwnerPhase.SETTLING
        job = self._job
        if job is not None and (job.step is JobStep.EMPTYING or job.kind is JobKind.CHECK):
            self._fail(job, None)
        while self._jobs:
            self._drop(self._jobs.popleft(), None)
        self._take_back(self._doubted)
        self._settle_until_s = now.monotonic_s + self._settle_s
        if self._pipe.in_flight:
            self._settle_asked = self._ask(RecoverLedger(self.ledger_id))
        else:
            self._settled()

    def _take_back(
        self, doubted: list[tuple[PendingAppend, RecordsAppended | QuorumLogError]]
    ) -> None:
        """Leave these requests to the next owner, because this owner can't know their answers."""
        self._waiting.extendleft(pending for pending, _ in reversed(doubted))
        doubted.clear()

    def _settle_answered(self, value: Any, now: Now) -> None:
        if isinstance(value, LedgerMetadata):
            assert value.last_entry is not None, "a recovered ledger must be CLOSED"
            self._durable_to = value.last_entry
            in_flight = self._pipe.in_flight
            if self._is_named or not in_flight or value.last_entry < in_flight[0].entry_id:
                self._settle()
            else:
                self._settle_asked = self._ask(ReadLog(self.log.name))
        elif isinstance(value, LogMetadata) and self._names(value):
            self._settle()
        elif isinstance(value, NoSuchLedger | LogMetadata):
            # The ledger was deleted under another owner, or the database was restored.
            lost = WriterLost(f"ledger {self.ledger_id} of the request is gone", log=self.log.name)
            self._lose(lost)
        elif not isinstance(value, QuorumLogError):
            self._settle_asked = self._ask(RecoverLedger(self.ledger_id))
        elif value.retryable and now.monotonic_s <= self._settle_until_s:
            self._settle_asked = self._ask(Wait(Pause.SETTLE))
        else:
            self._lose(value)

    def _settle(self) -> None:
        """Settle requests in flight. A request was done if its entry is not beyond the end."""
        again: list[PendingAppend] = []
        for pending in self._pipe.in_flight:
            if pending.entry_id <= self._durable_to:
                self._out.append(Resolve(pending.request, pending.answer(self.ledger_id)))
            else:
                again.append(pending)
            again += pending.repeats
        self._pipe.in_flight.clear()
        self._waiting.extendleft(reversed(again))
        self._settled()

    def _lose(self, error: QuorumLogError) -> None:
        """Answer all requests in flight with an unknown outcome."""
        unknown = error.with_outcome(UNKNOWN)
        for pending in self._pipe.in_flight:
            self._resolve_all(pending, unknown)
        self._pipe.in_flight.clear()
        self._settled()

    def _settled(self) -> None:
        self.phase = OwnerPhase.SETTLED
        again = tuple((pending.request, pending.call) for pending in self._waiting)
        begun = frozenset(each.request for each in self._waiting if each.entry_id >= 0)
        self._waiting.clear()
        self._out.append(Settled(again, begun))

    def _stop(self) -> None:
        """End because the process ends. Requests in progress get an unknown outcome."""
        if self.phase is OwnerPhase.SETTLED:
            return
        self.phase = OwnerPhase.SETTLING
        lost, refusal = ending(self.log.name), not_the_owner(self.log.name)
        for job in (*([self._job] if self._job else ()), *self._jobs):
            if job.request is not None:
                self._out.append(Resolve(job.request, lost))
            self._take_back(job.doubted)
        self._job = None
        self._jobs.clear()
        self._take_back(self._doubted)
        self._out.extend(Resolve(pending.request, refusal) for pending in self._waiting)
        self._waiting.clear()
        self._lose(lost)

    # --- jobs ------------------------------------------------------------------------------------

    def _roll_if_due(self, now: Now) -> None:
        if (
            self.phase is OwnerPhase.LIVE
            and not self._is_roll_asked
            and self.tenancy.is_roll_due(now)
        ):
            self._is_roll_asked = True
            self._jobs.append(Job(JobKind.ROLL))

    def _begin_job(self, job: Job, now: Now) -> None:
        self._job = job
        if self.is_ended:
            self._fail(job, None)
            return
        if job.kind is JobKind.CHECK:
            job.doubted, self._doubted = self._doubted, []
        self._proceed(job.begin(self.tenancy, now), now)

    def _job_answered(self, value: Any, now: Now) -> None:
        job = self._job
        assert job is not None, "a job's question must be answered only once"
        job.note(value)
        if job.kind is JobKind.RELEASE:
            self._end_job(None)  # if the ledger can't be closed, the next owner recovers it
            self._retire(now)
        elif self.is_ended:
            self._fail(job, value if isinstance(value, QuorumLogError) else None)
        else:
            self._proceed(job.answered(value, self.tenancy, now), now)

    def _proceed(self, following: JobNext, now: Now) -> None:
        """Perform a job's next step."""
        job = self._job
        assert job is not None
        match following:
            case Empty():
                self.phase = OwnerPhase.DRAINING
            case JobUndone(error, Fate.ENDS):
                self._end(error, now)
                self._fail(job, error)
            case JobUndone(error):
                self._fail(job, error)
            case JobEnded(answer, Fate.ENDS):
                self._end(None, now)
                self._discard(job)
                self._end_job(answer)
            case JobEnded(answer, fate):
                if fate is Fate.MOVES_ON:
                    self._next_ledger(now)
                self._end_job(answer)
            case _:
                self._job_asked = self._ask(following)

    def _next_ledger(self, now: Now) -> None:
        """Switch to the ledger that the metadata now names last, and begin waiting requests."""
        pipe = self._pipe
        self._out.append(PlaceKnown(self.ledger_id, pipe.records, pipe.next_entry))
        self.tenancy.next_ledger(now)
        self._is_named, self._durable_to, self._name_asked = False, NO_ENTRY, 0
        self.phase = OwnerPhase.LIVE
        waiting, self._waiting = self._waiting, deque()
        for pending in waiting:
            self._append(pending, now)
        self._roll_if_due(now)

    def _end_job(self, answer: Any) -> None:
        job = self._job
        assert job is not None
        self._job, self._job_asked = None, 0
        for pending, doubted in job.doubted:
            self._out.append(Resolve(pending.request, doubted))
        if job.request is not None:
            self._out.append(Resolve(job.request, answer))
        elif job.kind is JobKind.ROLL:
            self._is_roll_asked = False

    def _fail(self, job: Job, error: QuorumLogError | None) -> None:
        """End a failed job. After the owner's end, most errors need not apply to the log."""
        if self._job is not job:
            return  # the job ended with the owner
        self._job, self._job_asked = None, 0
        self._drop(job, error)

    def _drop(self, job: Job, error: QuorumLogError | None) -> None:
        self._discard(job)
        if job.kind is JobKind.CHECK and error is None:
            self._take_back(job.doubted)
        self._out += [
            Resolve(*reported) for reported in job.reported(error, is_ended=self.is_ended)
        ]
        if job.kind is not JobKind.CHECK and job.request is None and not self.is_ended:
            self._pause_asked = self._ask(Wait(Pause.ROLL))

    def _discard(self, job: Job) -> None:
        """Delete the ledger that a job created, unless the log names it."""
        if job.new is not None:
            self._ask(DeleteLedger(job.new))

    def _learn(self, head: LogHead, now: Now) -> None:
        """End if newer metadata from the primary names another owner (rule 16a)."""
        if head.version > self.log.version and not self.tenancy.may_be_own(head):
            self._end(None, now)


def not_the_owner(name: str) -> NotTheOwner:
    """The error for a request that this gateway ignored, because it doesn't own the log."""
    return NotTheOwner(
        "this gateway does not own the log, and ignored the request: retry", log=name
    )
