"""Routes one gateway's requests to one log, either to the owner here or to another gateway.

    UNKNOWN -> REMOTE                       metadata names another process that lives
    UNKNOWN, REMOTE -> TAKING -> OWNING     no owner lives: a takeover (rule 22)
    OWNING -> SETTLING -> UNKNOWN           the owner failed, or gave the log up (rule 24)

A gateway owns a log while it writes the last ledger in the log's metadata. Compare-and-swap decides
which gateway owns the log, and probing an owner only avoids needless takeovers. A handover may
change the owner (`handover.py`). Only one handover runs at a time, and requests that find no owner
wait for its end. Owner and takeover are separate machines, to which the route passes events.

Invariants (checked by `check`):
  - a live owner here and an owner elsewhere are never known at the same time (rule 22);
  - liveness: no request waits while the owner is known, or while no search for it is running.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import replace
from enum import Enum
from typing import Any

from quorumlog.errors import (
    NOT_DONE,
    UNKNOWN,
    LogReplaced,
    NoSuchLog,
    QuorumLogError,
    WriterLost,
)
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.handover import (
    Aim,
    Handover,
    HandoverDone,
    HandoverNext,
    HandoverStep,
    Move,
    OwnerFound,
)
from quorumlog.protocol.log.messages import (
    HERE,
    NOT_OWNER,
    Abandoned,
    Again,
    Answered,
    Append,
    AppendsAsked,
    Ask,
    BeginTakeover,
    Consult,
    DeletionAsked,
    DrainAsked,
    Effect,
    Event,
    ForceAsked,
    Forward,
    HealAsked,
    LogGone,
    LogRequest,
    OwnerLost,
    Pause,
    Publish,
    Question,
    ReadLog,
    Relay,
    ReleaseAsked,
    RequestKey,
    Resolve,
    Retired,
    Settled,
    Stopped,
    TakeoverDone,
    Wait,
)
from quorumlog.protocol.log.owner import Owner, not_the_owner
from quorumlog.protocol.log.row import LogMetadata, LogState
from quorumlog.protocol.log.takeover import Takeover, ending
from quorumlog.protocol.metadata import Writer


class RoutePhase(Enum):
    """The state of a gateway's knowledge about a log's owner."""

    UNKNOWN = "unknown"
    REMOTE = "remote"
    OWNING = "owning"
    SETTLING = "settling"


class LogRoute:
    """Routes requests to one log, in one gateway."""

    def __init__(self, name: str, me: str, *, settle_s: float) -> None:
        """Begin without an owner. `me`: this process's name in metadata. `settle_s`: as in Owner."""
        self.name = name
        self._me = me
        self._settle_s = settle_s
        self.owner: Owner | None = None
        self._takeover: Takeover | None = None
        self._tenure = 0
        """The number of the present owner or takeover, which tags its questions."""
        self._former: dict[int, Owner] = {}
        """Ended owners, by tenure, that wait for an answer to a job's question."""
        self.remote: Writer | None = None
        """Another process that writes the log's last ledger."""
        self._remote_created_at = ""
        """The creation time of the log that `remote` owns, as last read."""
        self._is_draining = False
        self._handover: Handover | None = None
        self._handovers: deque[Handover] = deque()
        self._again: deque[LogRequest] = deque()
        """Appends that an ended owner certainly did not carry out. They go first, in order."""
        self._resent: LogRequest | None = None
        """The append from `_again` that is being forwarded, one at a time to keep the order."""
        self._waiting: list[LogRequest] = []
        """Requests that wait for an owner, and arrived before the search read the metadata."""
        self._late: list[LogRequest] = []
        """Requests that wait for an owner, and arrived after the search read the metadata."""
        self._jobs: dict[RequestKey, LogRequest] = {}
        """Rolls and publications that the owner here carries out."""
        self._asked: dict[int, LogRequest | None] = {}
        """The route's own pending questions, by number; None for questions of a handover."""
        self._free: list[int] = []
        """Unused question numbers below the highest number in use."""
        self._is_gone = False
        """Whether a request found that the log does not exist."""
        self._forwarded_to: dict[int, Writer] = {}
        self._abandoned: dict[RequestKey, None] = {}
        """Unresolved requests whose clients are gone, and which must not be begun again."""
        self._out: list[Effect] = []

    @property
    def phase(self) -> RoutePhase:
        """The state of this gateway's knowledge about the owner."""
        if self.owner is not None:
            return RoutePhase.SETTLING if self.owner.is_ended else RoutePhase.OWNING
        return RoutePhase.UNKNOWN if self.remote is None else RoutePhase.REMOTE

    @property
    def is_idle(self) -> bool:
        """Whether no request is unanswered, and no answer is awaited."""
        parts = (self._handover, self._asked, self._jobs, self._former, self._again)
        return not any((*parts, self._waiting, self._late)) and (
            self.phase is not RoutePhase.SETTLING
        )

    def check(self) -> None:
        """Assert the invariants."""
        assert self.owner is None or self.remote is None, "only one owner may be known (rule 22)"
        if (self._waiting or self._late or self._again) and self.phase is not RoutePhase.SETTLING:
            assert self._handover or self._resent, "requests must not wait without a search"
        if self.owner is not None:
            self.owner.check()

    # --- the machine -----------------------------------------------------------------------------

    def step(self, event: Event, now: Now) -> list[Effect]:
        """Process an event and return the effects."""
        match event:
            case AppendsAsked():
                self._appends_asked(event, now)
            case Answered((tenure, number), value):
                self._part_answered(tenure, Answered(number, value), now)
            case Answered(int(number), value):
                self._answered(number, value, now)
            case LogRequest():
                self._go(event, now)
            case ForceAsked(request, creates, finish, created_at, once):
                self._queue(
                    Aim.FORCE,
                    request,
                    creates=creates,
                    finish=finish,
                    created_at=created_at,
                    once=once,
                )
            case HealAsked(request, ledger_id):
                self._queue(Aim.HEAL, request, ledger_id=ledger_id)
            case DeletionAsked(request, created_at, term):
                self._queue(Aim.DELETE, request, created_at=created_at, term=term)
            case DrainAsked(request):
                self._is_draining = True
                self._queue(Aim.DRAIN, request)
            case Abandoned(request):
                count = len(self._waiting) + len(self._late)
                self._waiting = [one for one in self._waiting if one.request != request]
                self._late = [one for one in self._late if one.request != request]
                if len(self._waiting) + len(self._late) == count:
                    self._abandoned[request] = None
            case Stopped():
                self._stop(now)
            case _:
                self._step_part(event, now)
        while self._handover is None and self._handovers:
            self._handover = self._handovers.popleft()
            self._begin(self._handover, now)
        if self._is_gone and self.is_idle:
            self._is_gone = False
            if self.owner is None:
                self._out.append(LogGone())
        out, self._out = self._out, []
        for one in out if self._abandoned else ():
            if isinstance(one, Resolve | Relay):
                self._abandoned.pop(one.request, None)
        return out

    def _part_answered(self, tenure: int, event: Answered, now: Now) -> None:
        former = self._former.get(tenure)
        if former is not None:
            self._heed(former.step(event, now), tenure, now)
            if not former.is_busy:
                del self._former[tenure]
        elif tenure == self._tenure:
            self._step_part(event, now)

    def _step_part(self, event: Event, now: Now) -> None:
        """Pass an event to the takeover or the owner, if there is one."""
        part = self._takeover or self.owner
        if part is not None:
            self._heed(part.step(event, now), self._tenure, now)

    def _heed(self, effects: Iterable[Effect], tenure: int, now: Now) -> None:
        """Perform or pass on the effects of an owner or a takeover."""
        for effect in effects:
            match effect:
                case Resolve(request, answer) if request in self._jobs:
                    self._job_done(self._jobs.pop(request), answer, now)
                case Ask(int(number), question):
                    self._out.append(Ask((tenure, number), question))
                case Settled(again, begun):
                    self._settled(again, begun, now)
                case TakeoverDone(result):
                    self._taken(result, now)
                case _:
                    self._out.append(effect)

    def _ask(self, question: Question, asked: LogRequest | None = None) -> int:
        number = self._free.pop() if self._free else len(self._asked)
        self._asked[number] = asked
        self._out.append(Ask(number, question))
        return number

    def _resolve(self, request: RequestKey, answer: Any) -> None:
        if request is not None:
            self._out.append(Resolve(request, answer))

    # --- requests --------------------------------------------------------------------------------

    def _appends_asked(self, event: AppendsAsked, now: Now) -> None:
        if self.phase is RoutePhase.OWNING and not self._is_draining:
            self._step_part(event, now)
            return
        for request, call in event.requests:
            self._go(LogRequest(request, call, (), call.is_forwarded), now)

    def _go(self, asked: LogRequest, now: Now) -> None:
        """Send a request to the owner, here or elsewhere, or let the request wait for an owner."""
        phase = self.phase
        if not self._is_awaited(asked.request):
            return
        if self._is_draining and phase is not RoutePhase.REMOTE:
            self._resolve(
                asked.request, not_the_owner(self.name)
            )  # otherwise a busy log would never settle
        elif phase is RoutePhase.OWNING:
            self._go_here(asked, now)
        elif phase is not RoutePhase.REMOTE:
            self._late.append(asked)
            self._search()
        elif asked.is_forwarded:
            self._resolve(asked.request, not_the_owner(self.name))  # one hop (rule 11)
        else:
            self._forward(asked)

    def _go_here(self, asked: LogRequest, now: Now) -> None:
        if isinstance(asked.call, Append):
            self._step_part(AppendsAsked(((asked.request, asked.call),)), now)
            return
        if isinstance(asked.call, Consult):
            self._resolve(asked.request, HERE)
            return
        self._jobs[asked.request] = asked
        self._step_part(asked, now)

    def _job_done(self, asked: LogRequest, answer: Any, now: Now) -> None:
        """Answer a finished roll or publication, or send it to the next owner."""
        if answer is not NOT_OWNER:
            self._resolve(asked.request, answer)
        elif asked.is_forwarded:
            self._resolve(asked.request, not_the_owner(self.name))
        else:
            self._go(asked, now)

    def _forward(self, asked: LogRequest) -> None:
        assert self.remote is not None
        call = asked.call
        if isinstance(call, Append) and call.created_at is None:
            created_at = asked.created_at or self._remote_created_at
            call = replace(call, created_at=created_at or None)
        number = self._ask(Forward(self.remote, self.name, call), asked)
        self._forwarded_to[number] = self.remote

    def _answered(self, number: int, value: Any, now: Now) -> None:
        if number not in self._asked:
            return  # asked before the process began to stop
        asked = self._asked.pop(number)
        self._free.append(number)
        if not self._asked:
            self._free.clear()
        owner = self._forwarded_to.pop(number, None)
        if asked is None:
            assert self._handover is not None, "a handover must not end before its answers"
            is_owned = self.phase is RoutePhase.OWNING
            self._proceed(self._handover.answered(value, is_owned=is_owned), now)
        elif owner is None:
            self._go_again(asked, now)  # the request waited because its owner had lost the log
        else:
            self._forwarded(asked, owner, value, now)

    def _forwarded(self, asked: LogRequest, owner: Writer, value: Any, now: Now) -> None:
        """Process the answer of an owner in another process, or the failure to reach the owner."""
        if isinstance(value, OwnerLost):
            self._forget(owner)
            if value.sent and not _is_repeatable(asked.call):
                lost = f"the log's owner {owner.id} did not answer: {value.detail}"
                error = WriterLost(lost, log=self.name, outcome=UNKNOWN)
                self._finish(asked, Resolve(asked.request, error), now)
            else:
                self._go_again(asked, now, suspect=owner)
        elif isinstance(value, WriterLost) and value.outcome == NOT_DONE:
            self._forget(owner)
            self._ask(Wait(Pause.YIELD), asked)
        elif isinstance(value, LogReplaced) and asked.created_at is not None:
            self._finish(asked, Resolve(asked.request, not_the_owner(self.name)), now)
        elif isinstance(value, LogReplaced) and _is_by_name(asked.call):
            self._forget(owner)  # the known owner was that of an older log of the name
            self._ask(Wait(Pause.YIELD), asked)
        elif isinstance(value, QuorumLogError):
            self._finish(asked, Resolve(asked.request, value), now)
        else:
            self._finish(asked, Relay(asked.request, value), now)

    def _forget(self, owner: Writer) -> None:
        if self.remote == owner:
            self.remote = None

    def _finish(self, asked: LogRequest, answer: Effect, now: Now) -> None:
        self._out.append(answer)
        if asked is self._resent:
            self._resent = None
            self._go_on(now)

    def _go_again(self, asked: LogRequest, now: Now, suspect: Writer | None = None) -> None:
        """Send a forwarded request again, because it was certainly not done or may be repeated."""
        if suspect is not None and self.phase is RoutePhase.UNKNOWN:
            self._search(suspect)
        if asked is self._resent:
            self._resent = None
            self._again.appendleft(asked)
            self._go_on(now)
        else:
            self._go(asked, now)

    def _refuse_for(self, row: LogMetadata) -> None:
        """Hand back appends that an owner here accepted for a deleted log, if `row` is of a later
        log. A sender that still waits retries. Other senders were answered long ago (rule 27b).
        """
        again, self._again = self._again, deque()
        for asked in again:
            if asked.created_at in (None, row.created_at):
                self._again.append(asked)
            else:
                self._resolve(asked.request, not_the_owner(self.name))

    def _go_on(self, now: Now) -> None:
        """Send waiting requests to the owner if it is known, or search for the owner."""
        phase = self.phase
        if self._abandoned:
            self._again = deque(one for one in self._again if self._is_awaited(one.request))
        if phase is RoutePhase.OWNING and self._again and self._resent is None:
            again, self._again = self._again, deque()
            calls = tuple((one.request, one.call) for one in again if isinstance(one.call, Append))
            self._step_part(AppendsAsked(calls, are_again=True), now)
        elif phase is RoutePhase.REMOTE and self._again and self._resent is None:
            self._resent = self._again.popleft()
            self._forward(self._resent)
        if phase in (RoutePhase.OWNING, RoutePhase.REMOTE):
            waiting, self._waiting, self._late = [*self._waiting, *self._late], [], []
            for asked in waiting:
                self._go(asked, now)
        elif self._again or self._waiting or self._late:
            self._search()

    def _is_awaited(self, request: RequestKey) -> bool:
        """Whether a client still waits for the request. Forgets a request that was abandoned."""
        return self._abandoned.pop(request, self) is self

    # --- handovers -------------------------------------------------------------------------------

    def _search(self, suspect: Writer | None = None) -> None:
        """Search for the owner, unless a search for all waiting requests is running."""
        for one in (*([self._handover] if self._handover else ()), *self._handovers):
            if one.aim is Aim.SEARCH:
                return
        self._queue(Aim.SEARCH, creates=True, suspect=suspect)

    def _queue(self, aim: Aim, request: RequestKey = None, **options: Any) -> None:
        self._handovers.append(Handover(aim, self.name, self._me, request, **options))

    def _begin(self, handover: Handover, now: Now) -> None:
        is_found = self.phase in (RoutePhase.OWNING, RoutePhase.REMOTE)
        is_needless = handover.aim is Aim.SEARCH and is_found
        if is_needless or (handover.aim is Aim.DRAIN and self.owner is None):
            self._end(None, now)
        else:
            self._proceed(handover.begin(), now)

    def _proceed(self, following: HandoverNext, now: Now) -> None:
        """Perform a handover's next step."""
        handover = self._handover
        assert handover is not None
        match following:
            case HandoverDone(QuorumLogError() as error):
                self._fail(error, now)
            case HandoverDone(answer):
                self._end(answer, now)
            case OwnerFound(writer):
                assert handover.row is not None, "the metadata must have been read"
                self._refuse_for(handover.row)
                self.remote, self._remote_created_at = writer, handover.row.created_at
                self._end(None, now)
            case Move.TAKE_OVER:
                self._take_over(handover, now)
            case Move.RETIRE | Move.RELEASE if self.owner is None:
                self._retired(now)
            case Move.RETIRE:
                self._step_part(Retired(), now)
            case Move.RELEASE:
                self._step_part(ReleaseAsked(), now)
            case ReadLog() if self._is_draining and handover.aim is Aim.SEARCH:
                self._fail(not_the_owner(self.name), now)
            case ReadLog() if handover.aim is Aim.SEARCH:
                self._waiting, self._late = [*self._waiting, *self._late], []
                self._ask(following)
            case _:
                self._ask(following)

    def _settled(self, again: Again, begun: Collection[RequestKey], now: Now) -> None:
        """Forget the ended owner here, and keep `again`, the requests that it did not answer."""
        if self.owner is not None and self.owner.is_busy:
            self._former[self._tenure] = self.owner
        mine = None if self.owner is None else self.owner.log.created_at
        self.owner = None
        for request, call in again:
            if self._is_awaited(request):
                created_at = call.created_at or (mine if request in begun else None)
                self._again.append(LogRequest(request, call, (), call.is_forwarded, created_at))
        if self._handover is not None and self._handover.step is HandoverStep.SETTLING:
            self._retired(now)
        elif self._again or self._waiting or self._late:
            self._search()

    def _retired(self, now: Now) -> None:
        """Continue the handover, which waited until this process no longer owns the log."""
        handover = self._handover
        assert handover is not None
        if handover.aim is Aim.DELETE:
            self.remote = None
            self._is_gone = True
        self._proceed(handover.settled(), now)

    def _take_over(self, handover: Handover, now: Now) -> None:
        assert handover.row is not None
        assert self.owner is None
        self._tenure += 1
        self._takeover = Takeover(
            handover.row, creates=handover.creates, finish=handover.finish, once=handover.once
        )
        self._step_part(BeginTakeover(), now)

    def _taken(self, result: LogMetadata | QuorumLogError | None, now: Now) -> None:
        """Process the end of a takeover."""
        taken, self._takeover = self._takeover, None
        handover = self._handover
        assert taken is not None
        assert handover is not None
        self._out.append(TakeoverDone(result))
        if isinstance(result, LogMetadata):
            self._refuse_for(result)
            self.remote = None
            if handover.creates and result.state is LogState.OPEN:
                self.owner = Owner(result, taken.producers, now, settle_s=self._settle_s)
        self._proceed(handover.taken(result), now)

    def _end(self, answer: Any, now: Now) -> None:
        """End the handover with an answer."""
        handover, self._handover = self._handover, None
        assert handover is not None
        self._resolve(handover.request, answer)
        self._go_on(now)

    def _fail(self, error: QuorumLogError, now: Now) -> None:
        """End a failed handover. A failed search fails the waiting requests. If the metadata caused
        the error, only requests that arrived before the metadata was read fail (rule 27b).
        """
        handover = self._handover
        assert handover is not None
        self._handover = None
        self._is_gone = self._is_gone or isinstance(error, NoSuchLog)
        self._resolve(handover.request, None if handover.aim is Aim.DRAIN else error)
        if handover.aim is Aim.SEARCH:
            again, self._again = self._again, deque()
            for asked in again:
                # None of these requests was carried out.
                self._resolve(asked.request, error.with_outcome(NOT_DONE))
            waiting, self._waiting = self._waiting, []
            if error.retryable:
                waiting, self._late = [*waiting, *self._late], []
            for asked in waiting:
                self._resolve(asked.request, error)
        self._go_on(now)

    def _stop(self, now: Now) -> None:
        """End because the process ends. Requests in progress get an unknown outcome."""
        self._is_draining = True
        self._takeover = None
        handovers = [*([self._handover] if self._handover else ()), *self._handovers]
        self._handover = None
        self._handovers.clear()
        lost, refusal = ending(self.name), not_the_owner(self.name)
        self._step_part(Stopped(), now)
        self._handovers.clear()
        self.owner = self.remote = None
        for handover in handovers:
            self._resolve(handover.request, handover.stopped())
        for asked in (*self._asked.values(), *self._jobs.values()):
            if asked is not None:
                self._resolve(asked.request, lost)
        for asked in (*self._again, *self._waiting, *self._late):
            self._resolve(asked.request, refusal)
        for table in (self._asked, self._free, self._forwarded_to, self._jobs, self._former):
            table.clear()
        self._again.clear()
        self._waiting.clear()
        self._late.clear()
        self._abandoned.clear()
        self._resent = None


def _is_by_name(call: Append | Publish | Consult | None) -> bool:
    """Whether a request is an append that does not name the log's creation time."""
    return isinstance(call, Append) and call.created_at is None


def _is_repeatable(call: Append | Publish | Consult | None) -> bool:
    """Whether a request that may have been carried out may be sent again."""
    match call:
        case Append(producer=producer):
            return producer is not None
        case _:
            return True
