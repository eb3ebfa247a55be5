"""The owner of one log: gives out offsets, pipelines appends, remembers producers, rolls, publishes.

An owner lives as long as its handle on the last ledger of the row. Whatever goes wrong ends it:
it is never mended. What it had in flight is settled by the end of its ledger (rule 24), and the
next owner is made from the row and a replay.

    LIVE -> DRAINING -> LIVE      a roll, or a publication
    LIVE, DRAINING -> SETTLING -> SETTLED

What reads or changes the row is a job; there is one at a time, so no job meets the changes of another.

Invariants (checked by `check`):
  - nothing is written to a ledger before the row names it with its first offset (rule 23);
  - who is settled has nothing in flight, and nobody who waits (rule 24).
"""

from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Any, Final

from quorumlog.errors import (
    UNKNOWN,
    ExpiredProducer,
    InvalidRequest,
    LogClosed,
    LogFenced,
    MetadataUnavailable,
    NoSuchLedger,
    NoSuchLog,
    NoSuchTransaction,
    NotEnoughBookies,
    NotTheOwner,
    Overloaded,
    QuorumLogError,
    SequenceGap,
    StaleProducer,
    TransactionAborted,
    TransactionCommitted,
    UnexpectedOffset,
    WriterLost,
)
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.job import BREAKING, Job, Stage, Work
from quorumlog.protocol.log.messages import (
    NOT_OWNER,
    Answered,
    Append,
    AppendsAsked,
    Ask,
    CloseLedger,
    Commit,
    CountBookies,
    CreateLedger,
    DeleteLedger,
    Effect,
    EntriesDurable,
    Event,
    HeadLearned,
    LogAppended,
    OwnerEnded,
    Pause,
    PlaceKnown,
    PublishAsked,
    Question,
    ReadLog,
    ReadTransaction,
    RecoverLedger,
    ReleaseAsked,
    Request,
    Resolve,
    Retired,
    RollAsked,
    RowChanged,
    RowTaken,
    Settled,
    Stopped,
    Submit,
    SubmitFailed,
    SubmitRefused,
    SwapLog,
    Ticked,
    Wait,
)
from quorumlog.protocol.log.pipeline import Pending, Pipeline
from quorumlog.protocol.log.producers import ProducerTable
from quorumlog.protocol.log.row import Answer, LogMetadata, LogState
from quorumlog.protocol.log.takeover import ending, is_last, no_room
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.transaction import Transaction

IN_FLIGHT_MAX: Final = 10_000
"""Requests of one log that wait for their acknowledgement; beyond: 429 (taste)."""

LEDGERS_SPARE: Final = 1000
"""Rolls leave room for so many ledgers: takeovers, without which a log does not go on."""

_POINT_EVERY: Final = 16
"""Every 16th batch is a hint for readers."""

_FINAL: Final = (
    NoSuchTransaction,
    TransactionAborted,
    TransactionCommitted,
    InvalidRequest,
    NoSuchLog,
    LogClosed,
)
"""Refusals of a roll or a publication that hold whoever owns the log."""

_BY_STATE: Final = (
    UnexpectedOffset,
    SequenceGap,
    ExpiredProducer,
    StaleProducer,
    LogFenced,
    InvalidRequest,
)
"""Refusals of an append that hold for the state of the log that the owner knows, and only while it
owns it.
"""


class Phase(Enum):
    """An owner begins LIVE; SETTLED is for good."""

    LIVE = "live"
    DRAINING = "draining"
    """The ledger is about to be closed: new requests wait for the next one."""
    SETTLING = "settling"
    """It has ended; where its ledger ends decides what becomes of what was in flight."""
    SETTLED = "settled"


class Owner:
    """Appends to one log, in this process; see the module."""

    def __init__(
        self, log: LogMetadata, producers: ProducerTable[Pending], now: Now, *, settle_s: float
    ) -> None:
        """`log` names a last ledger of this process, empty, with its first offset. For `settle_s`
        the end of a ledger is asked for whose handle is over.
        """
        self.log = log
        self.phase = Phase.LIVE
        self.error: QuorumLogError | None = None
        self._pipe = self._pipeline(producers, log.appended_ms, now)
        """The ledger that is written."""
        self._ahead = self.ledger_id
        self._waiting: deque[Pending] = deque()
        self._doubted: list[tuple[Pending, LogAppended | QuorumLogError]] = []
        """Answers that rest on what this owner remembers: they are given once it is known that it
        still owns the log."""
        self._job: Job | None = None
        self._jobs: deque[Job] = deque()
        self._is_roll_asked = False
        self._number = self._job_asked = self._settle_asked = self._pause_asked = 0
        self._settle_s, self._settle_until_s = settle_s, 0.0
        self._out: list[Effect] = []

    def _pipeline(self, producers: ProducerTable[Pending], appended_ms: int, now: Now) -> Pipeline:
        """Of the last ledger of the row."""
        item = self.log.last_item
        assert item is not None
        return Pipeline(item, producers, appended_ms, now)

    @property
    def ledger_id(self) -> int:
        """The ledger that is written."""
        return self._pipe.ledger_id

    @property
    def is_ended(self) -> bool:
        """Whether this owner is over."""
        return self.phase in (Phase.SETTLING, Phase.SETTLED)

    @property
    def is_busy(self) -> bool:
        """Whether a job waits for an answer, which may outlast the owner's end."""
        return self._job is not None

    @property
    def acknowledged_offset(self) -> int:
        """The end of what is acknowledged."""
        return self._pipe.first_offset + self._pipe.acknowledged

    # --- the machine -----------------------------------------------------------------------------

    def step(self, event: Event, now: Now) -> list[Effect]:
        """What to do about an event."""
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
            case RollAsked(request):
                self._enqueue(Job(Work.ROLL, request))
            case PublishAsked(request, call, sizes):
                self._enqueue(Job(Work.PUBLISH, request, call, sizes))
            case ReleaseAsked():
                self._enqueue(Job(Work.RELEASE))
            case HeadLearned(head):
                self._learn(head, now)
            case RowTaken(log):
                self._took(log)
            case Ticked():
                # Nobody is forgotten by it: that goes by what is appended (rule 26a).
                self._roll_if_due(now)
            case Retired():
                self._retire(now)
            case Stopped():
                self._stop()
            case _:
                raise AssertionError(f"{event} is not for an owner")
        self._go_on(now)
        out, self._out = self._out, []
        return out

    def _go_on(self, now: Now) -> None:
        """What follows from the state, whatever has happened."""
        if self._doubted and not any(job.work is Work.CHECK for job in self._jobs):
            self._enqueue(Job(Work.CHECK))
        while self._job is None and self._jobs:
            self._job = self._jobs.popleft()
            self._begin_job(self._job, now)
        if self._job is not None and self._job.stage is Stage.EMPTYING and not self._pipe.in_flight:
            self._ask_for_job(Stage.CLOSING, CloseLedger(self.ledger_id))
        payloads = self._pipe.to_submit()
        if payloads and not self.is_ended:
            first = self._pipe.next_entry - len(payloads)
            self._out.append(Submit(self.ledger_id, first, payloads))

    def check(self) -> None:
        """Assert the invariants."""
        self.log.check()
        self._pipe.check()
        if not self.is_ended:
            mine = self.log.item_of(self.ledger_id)
            assert mine is not None, "rule 23: the row names what is written"
            assert mine.first_offset == self._pipe.first_offset, "rule 23"
        if self.phase is Phase.SETTLED:
            assert not self._pipe.in_flight, "rule 24"
            assert not self._waiting, "rule 24"

    def _ask(self, question: Question) -> int:
        self._number += 1
        self._out.append(Ask(self._number, question))
        return self._number

    def _answered(self, event: Answered, now: Now) -> None:
        if event.number == self._job_asked:
            self._job_answered(event.value, now)
        elif event.number == self._settle_asked:
            self._settle_answered(event.value, now)
        elif event.number == self._pause_asked:
            self._is_roll_asked = False

    # --- appending -------------------------------------------------------------------------------

    def _appends_asked(
        self, requests: Iterable[tuple[Request, Append]], now: Now, *, are_again: bool
    ) -> None:
        for request, call in requests:
            if not are_again and len(self._pipe.in_flight) + len(self._waiting) >= IN_FLIGHT_MAX:
                full = Overloaded("too many appends to this log wait", log=self.log.name)
                self._out.append(Resolve(request, full))
            else:
                self._append(Pending(request, call), now)
        self._roll_if_due(now)
        if self.phase is Phase.SETTLED:
            self._settled()

    def _append(self, pending: Pending, now: Now) -> None:
        if self.phase is not Phase.LIVE:
            self._waiting.append(pending)
            return
        try:
            self._check_token(pending.call.token)
            before = self._pipe.begin(pending, now)
        except QuorumLogError as error:
            told = error.replace(log=self.log.name)
            if isinstance(error, _BY_STATE):
                self._doubted.append((pending, told))
            else:
                self._out.append(Resolve(pending.request, told))
        else:
            if before is not None:
                self._doubted.append((pending, repeated(before)))

    def _check_token(self, token: int | None) -> None:
        """Raise LogFenced unless who writes may (`open`)."""
        mine = self.log.writer_token
        if (token or 0) != mine and (token is not None or mine):
            raise LogFenced(f"the log is open for the writer token {mine}", log=self.log.name)

    def _durable(self, event: EntriesDurable, now: Now) -> None:
        """Acknowledge what is durable, in order."""
        if self.is_ended or event.ledger_id != self.ledger_id:
            return
        pipe = self._pipe
        while pipe.in_flight and pipe.in_flight[0].entry_id <= event.last_entry:
            self._acknowledge()
        pipe.producers.forget(now_ms=now.expiry_ms(pipe.appended_ms))

    def _acknowledge(self) -> None:
        place = self._pipe.acknowledged
        pending, kept = self._pipe.acknowledge()
        if pending.entry_id % _POINT_EVERY == 0:
            self._out.append(PlaceKnown(self.ledger_id, place, pending.entry_id))
        self._doubted += [(repeat, repeated(kept)) for repeat in pending.repeats]
        self._out.append(Resolve(pending.request, pending.answer(self.ledger_id)))

    def _refused(self, event: SubmitRefused, now: Now) -> None:
        """Entries that were begun were not taken: it is as if they had not been."""
        refused = self._pipe.cut(event.first_entry)
        if event.is_over:
            self._waiting.extendleft(reversed(refused))
            self._end(event.error, now)
            return
        self._pipe.undo(refused)
        for pending in refused:
            self._resolve_all(pending, event.error)

    def _resolve_all(self, pending: Pending, answer: QuorumLogError) -> None:
        self._out.extend(Resolve(each.request, answer) for each in pending.with_repeats)

    # --- the end ---------------------------------------------------------------------------------

    def _end(self, error: QuorumLogError | None, now: Now) -> None:
        """This owner has failed; None: another one owns the log."""
        if not self.is_ended:
            self.error = error
            self._out.append(OwnerEnded(error))
            self._retire(now)

    def _retire(self, now: Now) -> None:
        """Nothing is begun any more; the ledger's end says what is in it (rule 24)."""
        if self.is_ended:
            return
        self.phase = Phase.SETTLING
        job = self._job
        if job is not None and (job.stage is Stage.EMPTYING or job.work is Work.CHECK):
            self._fail(job, None)
        while self._jobs:
            self._drop(self._jobs.popleft(), None)
        self._take_back(self._doubted)
        self._settle_until_s = now.monotonic_s + self._settle_s
        if self._pipe.in_flight:
            self._settle_asked = self._ask(RecoverLedger(self.ledger_id))
        else:
            self._settled()

    def _take_back(self, doubted: list[tuple[Pending, LogAppended | QuorumLogError]]) -> None:
        """Nobody can say here what these requests are to be told: the next owner does."""
        self._waiting.extendleft(pending for pending, _ in reversed(doubted))
        doubted.clear()

    def _settle_answered(self, value: Any, now: Now) -> None:
        if isinstance(value, LedgerMetadata):
            assert value.last_entry is not None, "it is CLOSED"
            self._settle(value.last_entry)
        elif isinstance(value, NoSuchLedger):
            # Another owner has ended it, and it was truncated or deleted with the log since.
            lost = WriterLost("the ledger that it went to is gone", log=self.log.name)
            self._lose(lost)
        elif not isinstance(value, QuorumLogError):
            self._settle_asked = self._ask(RecoverLedger(self.ledger_id))
        elif value.retryable and now.monotonic_s <= self._settle_until_s:
            self._settle_asked = self._ask(Wait(Pause.SETTLE))
        else:
            self._lose(value)

    def _settle(self, last_entry: int) -> None:
        """What was in flight is done up to the ledger's end, and certainly not done beyond."""
        again: list[Pending] = []
        for pending in self._pipe.in_flight:
            if pending.entry_id <= last_entry:
                self._out.append(Resolve(pending.request, pending.answer(self.ledger_id)))
            else:
                again.append(pending)
            again += pending.repeats
        self._pipe.in_flight.clear()
        self._waiting.extendleft(reversed(again))
        self._settled()

    def _lose(self, error: QuorumLogError) -> None:
        """Whether what was in flight is done, nobody can say."""
        unknown = error.with_outcome(UNKNOWN)
        for pending in self._pipe.in_flight:
            self._resolve_all(pending, unknown)
        self._pipe.in_flight.clear()
        self._settled()

    def _settled(self) -> None:
        self.phase = Phase.SETTLED
        again = tuple((pending.request, pending.call) for pending in self._waiting)
        self._waiting.clear()
        self._out.append(Settled(again))

    def _stop(self) -> None:
        """The process ends: nobody can say what becomes of what is under way."""
        if self.phase is Phase.SETTLED:
            return
        self.phase = Phase.SETTLING
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
        if self.phase is Phase.LIVE and not self._is_roll_asked and self._is_roll_due(now):
            self._is_roll_asked = True
            self._enqueue(Job(Work.ROLL))

    def _is_roll_due(self, now: Now) -> bool:
        """Whether the ledger has reached a limit of the log's settings."""
        settings, pipe = self.log.settings, self._pipe
        return pipe.next_entry > 0 and (
            0 < settings.roll_bytes <= pipe.bytes
            or 0 < settings.roll_entries <= pipe.next_entry
            or 0 < settings.roll_seconds <= now.monotonic_s - pipe.since_s
        )

    def _enqueue(self, job: Job) -> None:
        self._jobs.append(job)

    def _ask_for_job(self, stage: Stage, question: Question) -> None:
        assert self._job is not None
        self._job.stage = stage
        self._job_asked = self._ask(question)

    def _begin_job(self, job: Job, now: Now) -> None:
        if self.is_ended:
            self._fail(job, None)
        elif job.work is Work.CHECK:
            job.doubted, self._doubted = self._doubted, []
            self._look()
        elif job.work is Work.RELEASE:
            self._empty(job)
        elif job.work is Work.PUBLISH:
            self._begin_publication(job)
        elif job.request is None and not self._is_roll_due(now):
            self._end_job(None)
        elif self._pipe.next_entry == 0:
            self._look()  # an empty ledger stays
        else:
            self._prepare(job)

    def _begin_publication(self, job: Job) -> None:
        assert job.call is not None
        try:
            self._check_token(job.call.token)
        except LogFenced as error:
            job.refusal = error
            self._look()
        else:
            self._ask_for_job(Stage.FINDING, ReadTransaction(job.call.transaction))

    def _look(self) -> None:
        self._ask_for_job(Stage.LOOKING, ReadLog(self.log.name))

    def _prepare(self, job: Job) -> None:
        """Nothing is changed before the row has room, and enough bookies live (rule 23)."""
        full = no_room(self.log, spare=LEDGERS_SPARE + len(job.sizes))
        if full is None:
            self._ask_for_job(Stage.COUNTING, CountBookies())
        elif job.has_looked:
            self._fail(job, full)
        else:
            self._look()  # others may have truncated it since, of whom this owner did not hear

    def _empty(self, job: Job) -> None:
        """Settle what is in flight; what comes waits for the next ledger."""
        job.stage = Stage.EMPTYING
        self.phase = Phase.DRAINING

    def _job_answered(self, value: Any, now: Now) -> None:
        job = self._job
        assert job is not None, "each question of a job is answered once"
        if job.stage is Stage.CREATING and isinstance(value, LedgerMetadata):
            job.new = value.ledger_id
        error = value if isinstance(value, QuorumLogError) else None
        if job.work is Work.RELEASE:
            self._end_job(None)  # a ledger that can't be closed is recovered by who comes next
            self._retire(now)
        elif self.is_ended:
            self._fail(job, error)
        elif error is not None:
            if job.stage in BREAKING or isinstance(error, NoSuchLog):
                self._end(error, now)
            self._fail(job, error)
        else:
            self._job_goes_on(job, value, now)

    def _job_goes_on(self, job: Job, value: Any, now: Now) -> None:
        match job.stage:
            case Stage.LOOKING:
                self._looked(job, value, now)
            case Stage.FINDING:
                self._found(job, value)
            case Stage.REPEATING:
                self._end_job(value.transaction)
            case Stage.COUNTING:
                self._counted(job, value)
            case Stage.CREATING:
                self._created(job, value)
            case Stage.NAMING | Stage.SWAPPING:
                self._swapped(job, value, now)
            case Stage.CLOSING:
                self._closed(job, value, now)
            case Stage.WAITING | Stage.EMPTYING:
                raise AssertionError("nothing was asked")

    def _looked(self, job: Job, row: LogMetadata, now: Now) -> None:
        if not self.is_mine(row):
            self._end(None, now)
            self._fail(job, None)
            return
        self._took(row)
        job.has_looked = True
        if job.work is Work.CHECK:
            for pending, answer in job.doubted:
                self._out.append(Resolve(pending.request, answer))
            job.doubted.clear()
            self._end_job(None)
        elif job.refusal is not None:
            self._fail(job, job.refusal)
        elif self._pipe.next_entry == 0 and job.work is Work.ROLL:
            self._end_job(None)
        else:
            self._prepare(job)

    def _found(self, job: Job, found: Transaction) -> None:
        assert job.call is not None
        if found.is_open:
            self._prepare(job)
        else:
            again = Commit(job.call.transaction, job.call.ledgers, None)
            self._ask_for_job(Stage.REPEATING, again)

    def _counted(self, job: Job, writable: int) -> None:
        needed = self.log.settings.quorum.ensemble_size
        if writable < needed:
            detail = f"a roll needs {needed} bookies that take entries, {writable} do"
            self._fail(job, NotEnoughBookies(detail, log=self.log.name))
        else:
            self._ask_for_job(Stage.CREATING, CreateLedger(self.log))

    def _created(self, job: Job, new: LedgerMetadata) -> None:
        self._ahead = new.ledger_id
        if job.work is Work.ROLL:
            self._ask_for_job(Stage.NAMING, SwapLog(self.log.with_ledger(new.ledger_id)))
        else:
            self._empty(job)

    def _closed(self, job: Job, closed: LedgerMetadata, now: Now) -> None:
        if closed.last_entry != self._pipe.next_entry - 1:
            detail = f"the ledger {self.ledger_id} ends at {closed.last_entry}"
            error = WriterLost(detail, log=self.log.name)
            self._end(error, now)
            self._fail(job, error)
            return
        job.end = (self.ledger_id, self._pipe.records, closed.length or 0)
        self._swap(job, now)

    def _swap(self, job: Job, now: Now) -> None:
        """One change of the row by which the log goes on in the new ledger (rules 23 and 28)."""
        ledger_id, records, size = job.end
        row = self._with_ends(self.log, {ledger_id: (records, size)}, now)
        if job.call is None:
            self._ask_for_job(Stage.SWAPPING, SwapLog(row))
            return
        assert job.new is not None
        row = row.with_published(
            job.sizes, now_ms=now.sealed_ms(), is_new_start=job.call.overwrite
        ).with_ledger(job.new)
        row = self._with_ends(row, {}, now)
        commit = Commit(job.call.transaction, job.call.ledgers, row)
        self._ask_for_job(Stage.SWAPPING, commit)

    def _with_ends(
        self, log: LogMetadata, ends: dict[int, tuple[int, int]], now: Now
    ) -> LogMetadata:
        """The row with the ends of ledgers, and with the producers as they are now."""
        producers = self._pipe.producers.snapshot()
        return log.with_ends(
            ends,
            producers=producers,
            now_ms=now.sealed_ms(),
            forgotten_end=self._pipe.producers.forgotten_end,
            appended_ms=self._pipe.appended_ms,
        )

    def _swapped(self, job: Job, value: Any, now: Now) -> None:
        """The row was changed: by this owner, before it by another one, or by both."""
        assert job.new is not None
        if isinstance(value, RowChanged):
            if not self.is_mine(value.current):
                self._end(None, now)
                self._fail(job, None)
                return
            self.log = value.current
            if job.stage is Stage.NAMING:
                self._ask_for_job(Stage.NAMING, SwapLog(self.log.with_ledger(job.new)))
            else:
                self._swap(job, now)
            return
        row, answer = (
            (value, None) if isinstance(value, LogMetadata) else (value.log, value.transaction)
        )
        if row is None or not is_last(row, job.new):
            # Another owner did it, or has taken over since: this one has no ledger to go on in.
            self._end(None, now)
            self._discard(job)
            self._end_job(NOT_OWNER if answer is None else answer)
            return
        self.log = row
        if job.stage is Stage.NAMING:
            self._empty(job)
        else:
            self._next_ledger(now)
            self._end_job(answer)

    def _next_ledger(self, now: Now) -> None:
        """Write to the ledger that the row names last now, what waited first."""
        pipe = self._pipe
        self._out.append(PlaceKnown(self.ledger_id, pipe.records, pipe.next_entry))
        self._pipe = self._pipeline(pipe.producers, pipe.appended_ms, now)
        self._ahead = self.ledger_id
        self.phase = Phase.LIVE
        waiting, self._waiting = self._waiting, deque()
        for pending in waiting:
            self._append(pending, now)
        self._roll_if_due(now)

    def _end_job(self, answer: Any) -> None:
        job = self._job
        assert job is not None
        self._job, self._job_asked = None, 0
        if job.request is not None:
            self._out.append(Resolve(job.request, answer))
        elif job.work is Work.ROLL:
            self._is_roll_asked = False

    def _fail(self, job: Job, error: QuorumLogError | None) -> None:
        """A job comes to nothing; where the owner has ended, most errors say nothing of the log."""
        if self._job is not job:
            return  # the owner's end was its end
        self._job, self._job_asked = None, 0
        self._drop(job, error)

    def _drop(self, job: Job, error: QuorumLogError | None) -> None:
        self._discard(job)
        if job.work is Work.CHECK:
            self._fail_check(job, error)
        elif job.request is not None:
            is_told = error is not None and (
                not self.is_ended
                or isinstance(error, _FINAL)
                or error.code == QuorumLogError.code  # a defect: the next owner has it too
            )
            self._out.append(Resolve(job.request, error if is_told else NOT_OWNER))
        elif not self.is_ended:
            self._pause_asked = self._ask(Wait(Pause.ROLL))

    def _fail_check(self, job: Job, error: QuorumLogError | None) -> None:
        if error is None:
            self._take_back(job.doubted)
            return
        unknown = error
        if isinstance(error, MetadataUnavailable):
            unknown = error.with_outcome(UNKNOWN)
        for pending, answer in job.doubted:
            is_repeat = isinstance(answer, LogAppended)
            self._out.append(Resolve(pending.request, unknown if is_repeat else error))

    def _discard(self, job: Job) -> None:
        """Delete a ledger that was made ahead, unless the log names it; the sweep does the rest."""
        if job.new is not None:
            self._ask(DeleteLedger(job.new))

    # --- what rows say ---------------------------------------------------------------------------

    def _learn(self, head: LogHead, now: Now) -> None:
        """A row of the primary was read (rule 16a)."""
        if head.version > self.log.version and not self._may_be_own(head):
            self._end(None, now)

    def _may_be_own(self, head: LogHead) -> bool:
        """Whether this owner writes the row's last ledger: also while its roll or publication, which
        it may not have heard the end of, names the next one.
        """
        return (
            head.state is LogState.OPEN
            and head.last_ledger in (self.ledger_id, self._ahead)
            and head.writer_token == self.log.writer_token
        )

    def is_mine(self, log: LogMetadata) -> bool:
        """Whether a row still says that this owner writes the log's last ledger."""
        mine, last = self.log.last_item, log.last_item
        return (
            log.state is LogState.OPEN
            and mine is not None
            and last is not None
            and mine.ledger_id == last.ledger_id
            and mine.first_offset == last.first_offset
            and log.writer_token == self.log.writer_token
        )

    def _took(self, log: LogMetadata) -> None:
        if log.version > self.log.version and self.is_mine(log):
            self.log = log


def repeated(answer: Answer) -> LogAppended:
    """What a repeat of an acknowledged request is told."""
    return LogAppended(
        answer.first_offset,
        answer.last_offset,
        answer.ledger_id,
        answer.entry_id,
        is_duplicate=True,
    )


def not_the_owner(name: str) -> NotTheOwner:
    """What a gateway is told that forwarded to one which does not own the log: nothing was done."""
    return NotTheOwner("this gateway does not own the log", log=name)
