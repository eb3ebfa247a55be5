"""A handover: what may change who owns a log, as far as one gateway knows.

A handover says what comes next, one thing after another: a question, parting from the owner in this
process, a takeover, or its end. `route.py` does these things, one handover at a time.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from quorumlog.errors import (
    UNKNOWN,
    EntryUnavailable,
    LogClosed,
    LogReplaced,
    NoSuchLedger,
    NoSuchLog,
    Overloaded,
    QuorumLogError,
    ShuttingDown,
)
from quorumlog.protocol.log.messages import (
    DeleteLog,
    Finish,
    IsAlive,
    Pause,
    Question,
    ReadLedger,
    ReadLog,
    RecoverLedger,
    RequestKey,
    RowChanged,
    Wait,
)
from quorumlog.protocol.log.row import LogItem, LogMetadata, LogState
from quorumlog.protocol.log.takeover import ending, without_row
from quorumlog.protocol.metadata import LedgerMetadata, State, Writer
from quorumlog.protocol.once import Once

CONFLICTS_MAX: Final = 20
"""How often one handover yields to another gateway before it fails."""


class Aim(Enum):
    """What a handover is for."""

    SEARCH = "search"
    """Find who owns the log, or become the owner."""
    FORCE = "force"
    """Take the log over from whoever owns it."""
    HEAL = "heal"
    """Seal the log if the writer of a ledger of it does not live."""
    DELETE = "delete"
    DRAIN = "drain"
    """Seal the log if this process owns it, which is about to end."""


class HandoverStep(Enum):
    """Where a handover stands: what it waits for."""

    WAITING = "waiting"
    LOOKING = "looking"
    """For the row."""
    FINDING = "finding"
    """The row of a ledger, which names its writer."""
    PROBING = "probing"
    """Whether that writer lives."""
    SETTLING = "settling"
    """The end of the owner in this process."""
    TAKING = "taking"
    """A takeover."""
    YIELDING = "yielding"
    """Until the row is read again, since another gateway is changing it."""
    FENCING = "fencing"
    """The recovery of a ledger of a log that is to be deleted."""
    DELETING = "deleting"


class Move(Enum):
    """What a handover has its route do."""

    RETIRE = "retire"
    """End the owner in this process, if there is one: nothing is begun any more."""
    RELEASE = "release"
    """The same, once what is in flight is acknowledged and the ledger closed."""
    TAKE_OVER = "take-over"
    """From the row that the handover has read."""


@dataclass(frozen=True, slots=True)
class OwnerFound:
    """The end of a search: this other process owns the log."""

    writer: Writer


@dataclass(frozen=True, slots=True)
class HandoverDone:
    """The end of a handover, and the answer to its request: QuorumLogError where it failed."""

    answer: LogMetadata | QuorumLogError | bool | None = None


HandoverNext = Question | Move | OwnerFound | HandoverDone


def same(row: LogMetadata) -> LogMetadata:
    """The row without a further change (`Finish`)."""
    return row


@dataclass(slots=True, eq=False)
class Handover:
    """See the module. `me` is this process, as rows name it."""

    aim: Aim
    log: str
    me: str
    request: RequestKey = None
    """None: nobody waits for it alone."""
    creates: bool = False
    """Whether a takeover makes this process the owner."""
    finish: Finish = same
    once: Once | None = None
    """The client's request that `finish` carries out (rule 6a)."""
    ledger_id: int = -1
    """The ledger whose writer is asked for."""
    suspect: Writer | None = None
    """A process that counts as the owner only if it answers a probe."""
    created_at: str | None = None
    """Of the log to delete, or to take over by force; None: the one that has the name at the first look."""
    term: str | None = None
    """Of the keeper by whose word the log to delete has expired; None: it is deleted whether it has or not."""
    step: HandoverStep = HandoverStep.WAITING
    tries: int = 0
    row: LogMetadata | None = None
    """As it was read last."""
    unfenced: tuple[int, ...] = ()

    @property
    def _last(self) -> LogItem | None:
        """The item of the row whose end is unknown, of the ledger that an owner writes."""
        item = None if self.row is None else self.row.last_item
        return None if item is None or item.last_offset is not None else item

    # --- what happens to it ----------------------------------------------------------------------

    def begin(self) -> HandoverNext:
        """Nothing else is under way."""
        match self.aim:
            case Aim.SEARCH:
                return self._move(HandoverStep.SETTLING, Move.RETIRE)
            case Aim.DRAIN:
                return self._move(HandoverStep.SETTLING, Move.RELEASE)
            case _:
                return self._look()

    def settled(self) -> HandoverNext:
        """The owner in this process has ended, or there is none."""
        match self.aim:
            case Aim.SEARCH | Aim.DRAIN:
                return self._look()
            case Aim.DELETE:
                return HandoverDone(self.row)
            case _:
                return self._move(HandoverStep.TAKING, Move.TAKE_OVER)

    def taken(self, result: LogMetadata | QuorumLogError | None) -> HandoverNext:
        """A takeover has ended (`TakeoverDone`)."""
        if result is None or isinstance(result, NoSuchLedger):
            return self._yield()
        if isinstance(result, QuorumLogError):
            return HandoverDone(told(result, self.log))
        if self.creates and result.state is LogState.CLOSED:
            # A batch has ended the log (rule 25b).
            return HandoverDone(LogClosed(f"the log {self.log} is closed", log=self.log))
        if self.aim is Aim.FORCE:
            return HandoverDone(result)
        return HandoverDone(answer=True) if self.aim is Aim.HEAL else HandoverDone()

    def answered(self, value: Any, *, is_owned: bool) -> HandoverNext:
        """A question was answered; `is_owned`: the owner is in this process."""
        if self.step is HandoverStep.YIELDING:
            return self._look()
        if isinstance(value, NoSuchLedger) and self.step is HandoverStep.FINDING:
            found = without_row(value, self.log)
            # Where it is deleted, the row was changed since it was read.
            return self._yield() if found is value else HandoverDone(found)
        is_gone = isinstance(value, NoSuchLedger) and self.step is HandoverStep.FENCING
        if isinstance(value, QuorumLogError) and not is_gone:
            return HandoverDone(value)
        match self.step:
            case HandoverStep.LOOKING:
                return self._looked(value)
            case HandoverStep.FINDING:
                return self._found(value, is_owned=is_owned)
            case HandoverStep.PROBING:
                return self._probed(is_alive=value)
            case HandoverStep.FENCING:
                self.unfenced = self.unfenced[1:]
                return self._fence_next()
            case HandoverStep.DELETING:
                return self._deletion_answered(value)
            case _:
                raise AssertionError(f"nothing was asked in {self.step}")

    def stopped(self) -> QuorumLogError | None:
        """The answer to its request where the process ends first."""
        match self.aim:
            case Aim.DRAIN:
                return None
            case Aim.HEAL:
                return EntryUnavailable("this gateway is about to end", log=self.log)
            case Aim.DELETE:
                return ShuttingDown("this gateway is about to end", log=self.log, outcome=UNKNOWN)
            case _:
                return ending(self.log)

    # --- steps -----------------------------------------------------------------------------------

    def _ask(self, step: HandoverStep, question: Question) -> Question:
        self.step = step
        return question

    def _move(self, step: HandoverStep, move: Move) -> Move:
        self.step = step
        return move

    def _look(self) -> HandoverNext:
        self.tries += 1
        if self.tries > CONFLICTS_MAX:
            return HandoverDone(Overloaded("the log changes hands all the time", log=self.log))
        return self._ask(HandoverStep.LOOKING, ReadLog(self.log))

    def _yield(self) -> HandoverNext:
        """Another gateway has won: look again in a while."""
        return self._ask(HandoverStep.YIELDING, Wait(Pause.YIELD))

    def _looked(self, row: LogMetadata) -> HandoverNext:
        self.row = row
        if self.aim in (Aim.DELETE, Aim.FORCE) and self.created_at is None:
            self.created_at = row.created_at
        if self.aim is Aim.DELETE:
            return self._fence() if self._is_meant(row) else HandoverDone(deleted(self.log))
        try:
            row.check_created(self.created_at)
        except LogReplaced as error:
            return HandoverDone(error)
        if self.aim is Aim.HEAL:
            item = row.item_of(self.ledger_id)
            if item is None or item.last_offset is not None:
                return HandoverDone(answer=True)
            return self._ask(HandoverStep.FINDING, ReadLedger(item.ledger_id))
        if row.state is LogState.CLOSED and self.aim is not Aim.DRAIN:
            return HandoverDone(LogClosed(f"the log {self.log} is closed", log=self.log))
        if self.aim is Aim.FORCE:
            return self._move(HandoverStep.SETTLING, Move.RETIRE)
        if self._last is not None:
            return self._ask(HandoverStep.FINDING, ReadLedger(self._last.ledger_id))
        return self._nobody_lives() if self.aim is Aim.SEARCH else HandoverDone()

    def _found(self, ledger: LedgerMetadata, *, is_owned: bool) -> HandoverNext:
        """Who writes a ledger of the log."""
        writer, last = ledger.writer, self._last
        is_mine = writer is not None and writer.id == self.me
        if self.aim is Aim.DRAIN:
            # Who was displaced, and did not know it, must not end the owner after him.
            return self._nobody_lives() if is_mine else HandoverDone()
        if self.aim is Aim.HEAL and is_mine and is_owned:
            return HandoverDone(answer=False)
        if self.aim is Aim.HEAL and last is not None and last.ledger_id != ledger.ledger_id:
            return self._ask(HandoverStep.FINDING, ReadLedger(last.ledger_id))
        if writer is None or is_mine or ledger.state is not State.OPEN:
            return self._nobody_lives()
        if self.aim is Aim.SEARCH and writer != self.suspect:
            return OwnerFound(writer)
        self.suspect = writer
        return self._ask(HandoverStep.PROBING, IsAlive(writer))

    def _probed(self, *, is_alive: bool) -> HandoverNext:
        if not is_alive:
            return self._nobody_lives()
        if self.aim is Aim.HEAL:
            return HandoverDone(answer=False)
        assert self.suspect is not None
        return OwnerFound(self.suspect)

    def _nobody_lives(self) -> HandoverNext:
        if self.aim is Aim.HEAL:
            return self._move(HandoverStep.SETTLING, Move.RETIRE)
        return self._move(HandoverStep.TAKING, Move.TAKE_OVER)

    def _fence(self) -> HandoverNext:
        """End who writes a log, before its name is free (rule 27): the name may be given again, and
        an owner that heard of nothing would go on in a ledger of the log that is no more.
        """
        assert self.row is not None
        self.unfenced = tuple(item.ledger_id for item in self.row.unsealed)
        return self._fence_next()

    def _fence_next(self) -> HandoverNext:
        assert self.row is not None
        if self.unfenced:
            return self._ask(HandoverStep.FENCING, RecoverLedger(self.unfenced[0]))
        return self._ask(HandoverStep.DELETING, DeleteLog(self.row))

    def _deletion_answered(self, value: RowChanged | None) -> HandoverNext:
        assert self.row is not None
        if value is None:
            return self._move(HandoverStep.SETTLING, Move.RETIRE)
        if not self._is_meant(value.current):
            # A namesake that was made since, or a log that is in use again: not what was meant.
            return HandoverDone(deleted(self.log))
        self.row = value.current
        return self._fence()

    def _is_meant(self, row: LogMetadata) -> bool:
        """Whether the deletion is of the log of this row."""
        term = None if row.expiry is None else row.expiry.term
        return self.created_at in (None, row.created_at) and self.term in (None, term)


def deleted(log: str) -> NoSuchLog:
    """The answer to a request whose log was deleted meanwhile."""
    return NoSuchLog(f"the log {log} was deleted", log=log)


def told(error: QuorumLogError, log: str) -> QuorumLogError:
    """The error that a client gets for a failed takeover. An error of one of the log's ledgers is
    nothing that a client could act on.
    """
    if error.retryable or isinstance(error, NoSuchLog):
        return error
    return EntryUnavailable(f"the log can't be taken over now: {error.detail}", log=log)
