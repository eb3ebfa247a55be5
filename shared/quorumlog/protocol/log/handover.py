"""A handover: the steps by which one gateway may change a log's owner.

A handover returns one step after another: a question, the end of the owner in this process, a
takeover, or its own end. `route.py` performs the steps, one handover at a time.
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
"""Maximum reads of the metadata by one handover, which fails afterwards."""


class Aim(Enum):
    """The purpose of a handover."""

    SEARCH = "search"
    """Find the log's owner, or become the owner."""
    FORCE = "force"
    """Take the log over from its owner."""
    HEAL = "heal"
    """Close and seal the log's ledgers if the writer of one of them is gone."""
    DELETE = "delete"
    DRAIN = "drain"
    """Seal the log's last ledger if this process owns the log, because the process will end."""


class HandoverStep(Enum):
    """The answer that a handover waits for."""

    WAITING = "waiting"
    LOOKING = "looking"
    """Waits for the log's metadata."""
    FINDING = "finding"
    """Waits for a ledger's metadata, which names its writer."""
    PROBING = "probing"
    """Waits for a probe of the ledger's writer."""
    SETTLING = "settling"
    """Waits for the end of the owner in this process."""
    TAKING = "taking"
    """Waits for the end of a takeover."""
    YIELDING = "yielding"
    """Pauses before the metadata is read again, because another gateway is changing it."""
    FENCING = "fencing"
    """Waits for the recovery of a ledger of a log that is to be deleted."""
    DELETING = "deleting"


class Move(Enum):
    """A step that the route must carry out for a handover."""

    RETIRE = "retire"
    """End the owner in this process, if there is one, without beginning further requests."""
    RELEASE = "release"
    """End the owner in this process after its requests in flight are acknowledged, and its ledger
    is closed.
    """
    TAKE_OVER = "take-over"
    """Take the log over, starting from the metadata that the handover has read."""


@dataclass(frozen=True, slots=True)
class OwnerFound:
    """The end of a search that found another process as the owner."""

    writer: Writer


@dataclass(frozen=True, slots=True)
class HandoverDone:
    """The end of a handover, with the answer to its request; QuorumLogError if it failed."""

    answer: LogMetadata | QuorumLogError | bool | None = None


HandoverNext = Question | Move | OwnerFound | HandoverDone


def same(row: LogMetadata) -> LogMetadata:
    """Return the metadata unchanged (`Finish`)."""
    return row


@dataclass(slots=True, eq=False)
class Handover:
    """One handover of a log. `me`: this process's name in metadata."""

    aim: Aim
    log: str
    me: str
    request: RequestKey = None
    """The request that waits for this handover; None if no request does."""
    creates: bool = False
    """Whether a takeover makes this process the owner."""
    finish: Finish = same
    once: Once | None = None
    """The client's request that `finish` carries out (rule 6a)."""
    ledger_id: int = -1
    """For HEAL, the ledger whose writer is probed."""
    suspect: Writer | None = None
    """A process that counts as the owner only if it answers a probe."""
    created_at: str | None = None
    """For DELETE and FORCE, the log's creation time; None: the log that the first read returns."""
    term: str | None = None
    """For DELETE, the term of the keeper that found the log expired. None: delete the log whether
    or not it has expired."""
    step: HandoverStep = HandoverStep.WAITING
    tries: int = 0
    row: LogMetadata | None = None
    """The log's metadata, as last read."""
    unfenced: tuple[int, ...] = ()

    @property
    def _last(self) -> LogItem | None:
        """The last item if its end is unknown, because an owner may then be writing its ledger."""
        item = None if self.row is None else self.row.last_item
        return None if item is None or item.last_offset is not None else item

    # --- events ----------------------------------------------------------------------------------

    def begin(self) -> HandoverNext:
        """Begin the handover while no other handover is in progress."""
        match self.aim:
            case Aim.SEARCH:
                return self._move(HandoverStep.SETTLING, Move.RETIRE)
            case Aim.DRAIN:
                return self._move(HandoverStep.SETTLING, Move.RELEASE)
            case _:
                return self._look()

    def settled(self) -> HandoverNext:
        """Continue after the end of the owner in this process, if there was one."""
        match self.aim:
            case Aim.SEARCH | Aim.DRAIN:
                return self._look()
            case Aim.DELETE:
                return HandoverDone(self.row)
            case _:
                return self._move(HandoverStep.TAKING, Move.TAKE_OVER)

    def taken(self, result: LogMetadata | QuorumLogError | None) -> HandoverNext:
        """Continue after a takeover (`TakeoverDone`)."""
        if result is None or isinstance(result, NoSuchLedger):
            return self._yield()
        if isinstance(result, QuorumLogError):
            return HandoverDone(reported(result, self.log))
        if self.creates and result.state is LogState.CLOSED:
            # A batch has ended the log (rule 25b).
            return HandoverDone(LogClosed(f"the log {self.log} is closed", log=self.log))
        if self.aim is Aim.FORCE:
            return HandoverDone(result)
        return HandoverDone(answer=True) if self.aim is Aim.HEAL else HandoverDone()

    def answered(self, value: Any, *, is_owned: bool) -> HandoverNext:
        """Continue after an answer. `is_owned`: the owner is in this process."""
        if self.step is HandoverStep.YIELDING:
            return self._look()
        if isinstance(value, NoSuchLedger) and self.step is HandoverStep.FINDING:
            found = without_row(value, self.log)
            # If the ledger is deleted, the log's metadata has changed since it was read.
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
                raise AssertionError(f"a handover must not get an answer in step {self.step}")

    def stopped(self) -> QuorumLogError | None:
        """The answer to the handover's request if the process ends first."""
        match self.aim:
            case Aim.DRAIN:
                return None
            case Aim.HEAL:
                return EntryUnavailable("this gateway is shutting down: retry", log=self.log)
            case Aim.DELETE:
                return ShuttingDown("this gateway ends: retry", log=self.log, outcome=UNKNOWN)
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
            return HandoverDone(
                Overloaded("other gateways took the log over repeatedly: retry", log=self.log)
            )
        return self._ask(HandoverStep.LOOKING, ReadLog(self.log))

    def _yield(self) -> HandoverNext:
        """Pause, then read the metadata again, because another gateway has changed it."""
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
        return self._none_lives() if self.aim is Aim.SEARCH else HandoverDone()

    def _found(self, ledger: LedgerMetadata, *, is_owned: bool) -> HandoverNext:
        """Process the metadata of a ledger, which names the ledger's writer."""
        writer, last = ledger.writer, self._last
        is_mine = writer is not None and writer.id == self.me
        if self.aim is Aim.DRAIN:
            # A displaced owner that has not noticed its end must not end its successor.
            return self._none_lives() if is_mine else HandoverDone()
        if self.aim is Aim.HEAL and is_mine and is_owned:
            return HandoverDone(answer=False)
        if self.aim is Aim.HEAL and last is not None and last.ledger_id != ledger.ledger_id:
            return self._ask(HandoverStep.FINDING, ReadLedger(last.ledger_id))
        if writer is None or is_mine or ledger.state is not State.OPEN:
            return self._none_lives()
        if self.aim is Aim.SEARCH and writer != self.suspect:
            return OwnerFound(writer)
        self.suspect = writer
        return self._ask(HandoverStep.PROBING, IsAlive(writer))

    def _probed(self, *, is_alive: bool) -> HandoverNext:
        if not is_alive:
            return self._none_lives()
        if self.aim is Aim.HEAL:
            return HandoverDone(answer=False)
        assert self.suspect is not None
        return OwnerFound(self.suspect)

    def _none_lives(self) -> HandoverNext:
        if self.aim is Aim.HEAL:
            return self._move(HandoverStep.SETTLING, Move.RETIRE)
        return self._move(HandoverStep.TAKING, Move.TAKE_OVER)

    def _fence(self) -> HandoverNext:
        """Fence a log's writer before the log's name is free (rule 27). Otherwise an unaware owner
        would still write to the deleted log after another log got the name.
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
            # A later log has the name now, or the log is in use again.
            return HandoverDone(deleted(self.log))
        self.row = value.current
        return self._fence()

    def _is_meant(self, row: LogMetadata) -> bool:
        """Whether the deletion applies to the log with this metadata."""
        term = None if row.expiry is None else row.expiry.term
        return self.created_at in (None, row.created_at) and self.term in (None, term)


def deleted(log: str) -> NoSuchLog:
    """The error for a request whose log was deleted while the request waited."""
    return NoSuchLog(f"the log {log} was deleted meanwhile", log=log)


def reported(error: QuorumLogError, log: str) -> QuorumLogError:
    """The client's error for a failed takeover. An error about one of the log's ledgers is
    replaced, because clients can't act on it.
    """
    if error.retryable or isinstance(error, NoSuchLog):
        return error
    return EntryUnavailable(f"no gateway can take over log {log} now: {error.detail}", log=log)
