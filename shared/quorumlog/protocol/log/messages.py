"""The language of a log's machines: what happens to them, and what they want done.

A machine takes one event and returns effects (`step(event, now) -> list[Effect]`), as the ledger's
machines do (`protocol/messages.py`). Everything that takes time is an `Ask` with a number of its own;
its answer comes back as `Answered` with that number. A client's request is
opaque to a machine: the machine only hands it back to the driver.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Final

from quorumlog.errors import QuorumLogError
from quorumlog.protocol import batch
from quorumlog.protocol.batch import ProducerSeq, Record
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.log.row import LOG_LEDGERS_MAX, LogMetadata
from quorumlog.protocol.metadata import LedgerMetadata, Writer
from quorumlog.protocol.once import Once
from quorumlog.protocol.transaction import Sealed, Transaction, TransactionId
from quorumlog.protocol.values import Bounds, Number, Value

RequestKey = Any
"""A client's request, as its driver knows it: hashable."""

QuestionNumber = int | tuple[int, int]
"""Of a question. A machine within another one numbers its own: (tenure, number)."""

Finish = Callable[[LogMetadata], LogMetadata]
"""A further change of the row in the step that takes the log over (open, close)."""


# --- requests of clients --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Append:
    """One request to append to a log: its batch, `data`, becomes one entry (rule 25)."""

    data: bytes
    """A batch of `count` records and of the producer, without its time and place in a ledger."""
    count: int
    producer: ProducerSeq | None = None
    expect: int | None = None
    token: int | None = None
    since: int = 0
    """The log's end before `producer` had sent anything (rule 26a). 0: it does not say."""
    is_forwarded: bool = False
    """Another gateway takes this one for the owner."""
    created_at: str | None = None
    """Of the log that the request is for: no other log of its name takes it (rule 27b). None: any."""

    @classmethod
    def of(
        cls,
        records: Sequence[Record],
        producer: ProducerSeq | None = None,
        *,
        expect: int | None = None,
        token: int | None = None,
        since: int = 0,
        seq: str | None = None,
        is_end: bool = False,
        is_by_numbers: bool = False,
        created_at: str | None = None,
    ) -> "Append":
        """A request of at least one record, unless it ends the log."""
        data = batch.encode(records, producer, seq=seq, is_end=is_end, is_by_numbers=is_by_numbers)
        return cls(data, len(records), producer, expect, token, since, created_at=created_at)


@dataclass(frozen=True, slots=True)
class RecordsAppended:
    """Where the records of one request are, durable."""

    first_offset: int
    last_offset: int
    ledger_id: int
    entry_id: int
    is_duplicate: bool = False
    highest_seq: int | None = None
    """Of a duplicate: the highest number of its producer that is acknowledged."""


@dataclass(frozen=True, slots=True)
class Publish(Value):
    """A commit: these ledgers of a transaction come onto its log, in this order (rule 28)."""

    transaction: TransactionId
    ledgers: Annotated[tuple[Sealed, ...], Bounds(max_length=LOG_LEDGERS_MAX)]
    overwrite: bool = False
    """What was on the log before is dropped by it."""
    token: Number | None = None


@dataclass(frozen=True, slots=True)
class Consult:
    """Something that the gateway that owns the log is asked, and answers without the log's machines."""

    data: bytes
    """What is asked again where an owner was lost must count once (rule 32)."""


class Here(Enum):
    """The answer to a Consult: this process owns the log."""

    HERE = "here"


HERE: Final = Here.HERE

Sizes = Sequence[tuple[int, int, int]]
"""(ledger, records, bytes) of each."""

Again = tuple[tuple[RequestKey, Append], ...]
"""Requests that certainly were not appended, in order."""


class NotOwner(Enum):
    """An answer: this owner has ended, and nothing of the request was done by it."""

    NOT_OWNER = "not-owner"


NOT_OWNER: Final = NotOwner.NOT_OWNER


# --- questions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadLog:
    """The log's row as it is now: LogMetadata."""

    name: str


@dataclass(frozen=True, slots=True)
class SwapLog:
    """Compare-and-swap from `log.version`: LogMetadata as it is afterwards, or RowChanged. Where a copy of the client's
    request `once` was carried out before, nothing is swapped.
    """

    log: LogMetadata
    once: Once | None = None


@dataclass(frozen=True, slots=True)
class ReadTransaction:
    """One transaction as it is now: Transaction."""

    id: str


@dataclass(frozen=True, slots=True)
class Commit:
    """End a transaction with these ledgers published by compare-and-swap of the log's row: Committed,
    or RowChanged. Without a row: the answer that the transaction got when it was ended.
    """

    transaction: str
    ledgers: tuple[Sealed, ...]
    log: LogMetadata | None


@dataclass(frozen=True, slots=True)
class CreateLedger:
    """A new ledger for a log, whose only writer is this process: LedgerMetadata."""

    log: LogMetadata


@dataclass(frozen=True, slots=True)
class ReadLedger:
    """A ledger's row as it is now: LedgerMetadata."""

    ledger_id: int


@dataclass(frozen=True, slots=True)
class RecoverLedger:
    """The reader's close; on a CLOSED ledger its row: LedgerMetadata."""

    ledger_id: int


@dataclass(frozen=True, slots=True)
class CloseLedger:
    """The writer's close: LedgerMetadata."""

    ledger_id: int


@dataclass(frozen=True, slots=True)
class MeasureLedger:
    """What the last entry of a CLOSED ledger of a log says: LedgerEnd."""

    row: LedgerMetadata


@dataclass(frozen=True, slots=True)
class ReadBatches:
    """Some entries of a CLOSED ledger from `first` on, up to `last`: BatchesRead."""

    ledger_id: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class DeleteLedger:
    """Delete a ledger in a transaction that sees no log naming it (rule 22): None."""

    ledger_id: int


@dataclass(frozen=True, slots=True)
class CountBookies:
    """How many bookies are writable: int."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Forward a request to the owner in another process: RecordsAppended, Transaction, None (a roll) or bytes
    (a Consult); OwnerLost.
    """

    owner: Writer
    log: str
    call: Append | Publish | Consult | None


@dataclass(frozen=True, slots=True)
class IsAlive:
    """Whether that very process answers (rule 11), asked twice a jittered time apart: bool."""

    writer: Writer


@dataclass(frozen=True, slots=True)
class DeleteLog:
    """Delete the row of this version: None, or RowChanged."""

    log: LogMetadata


class Pause(Enum):
    """What a machine waits for. The driver decides how long."""

    YIELD = "yield"
    """Until the row is read again, which another gateway has changed or is about to change."""
    SETTLE = "settle"
    """Until the end of a ledger is asked for again."""
    ROLL = "roll"
    """Until a roll by itself is tried again."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Time passes: None."""

    pause: Pause


Question = (
    ReadLog
    | SwapLog
    | ReadTransaction
    | Commit
    | CreateLedger
    | ReadLedger
    | RecoverLedger
    | CloseLedger
    | MeasureLedger
    | ReadBatches
    | DeleteLedger
    | CountBookies
    | Forward
    | IsAlive
    | DeleteLog
    | Wait
)


# --- answers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowChanged:
    """A compare-and-swap from another version than the row has; the row as it is."""

    current: LogMetadata


@dataclass(frozen=True, slots=True)
class Committed:
    """An ended transaction, and the log's row as it is then: None where this call did not change it."""

    transaction: Transaction
    log: LogMetadata | None


@dataclass(frozen=True, slots=True)
class LedgerEnd:
    """Where a CLOSED ledger of a log ends."""

    records: int
    bytes: int
    last_entry: int
    has_producers: bool
    appended_ms: int = 0
    seq: str | None = None
    """The log's last stream sequence, if it has one (rule 25a)."""
    is_end: bool = False
    """The ledger's last batch ends the log (rule 25b)."""


@dataclass(frozen=True, slots=True)
class BatchesRead:
    """Entries by id, in order; `next` is where to go on. `is_lost`: those before it are lost
    (rule 31).
    """

    entries: tuple[tuple[int, bytes], ...]
    next: int
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class OwnerLost:
    """The process that owned the log cannot be reached. `sent`: the request may have reached it, so its
    outcome is unknown.
    """

    detail: str
    sent: bool


# --- effects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """A question; `Answered` brings the answer under the same number."""

    number: QuestionNumber
    question: Question


@dataclass(frozen=True, slots=True)
class Submit:
    """Append entries to this process's ledger; the first one gets the id `first_entry`."""

    ledger_id: int
    first_entry: int
    payloads: tuple[bytes, ...]
    number: int = 0
    """How many refusals the owner knew of; a refusal names it."""
    one_by_one: bool = False
    """Begin each entry by itself: there may be room for some of them."""


@dataclass(frozen=True, slots=True)
class Resolve:
    """Answer a client's request."""

    request: RequestKey
    answer: (
        RecordsAppended | Transaction | LogMetadata | NotOwner | Here | QuorumLogError | bool | None
    )


@dataclass(frozen=True, slots=True)
class Relay:
    """Answer a client's request with the answer of the owner in another process."""

    request: RequestKey
    answer: RecordsAppended | Transaction | bytes | None


@dataclass(frozen=True, slots=True)
class PlaceKnown:
    """An acknowledged entry of a ledger begins after so many records: a hint for readers."""

    ledger_id: int
    records: int
    entry_id: int


@dataclass(frozen=True, slots=True)
class OwnerEnded:
    """An owner has failed; `error` is None where another one owns the log. What it had in flight is
    settled next.
    """

    error: QuorumLogError | None


@dataclass(frozen=True, slots=True)
class Settled:
    """An owner that ended has nothing in flight any more; these requests certainly were not done."""

    again: Again
    begun: frozenset[RequestKey] = frozenset()
    """Those of them that had a place in the owner's ledger: they are for its log, and for no later one (rule 27b)."""


@dataclass(frozen=True, slots=True)
class TakeoverDone:
    """The row after a takeover, None where another one has won, or why it failed with the row as it
    was.
    """

    log: LogMetadata | QuorumLogError | None


@dataclass(frozen=True, slots=True)
class LogGone:
    """There is no log of this name any more: what is known of it is to be forgotten."""


Effect = Ask | Submit | Resolve | Relay | PlaceKnown | OwnerEnded | Settled | TakeoverDone | LogGone


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BeginTakeover:
    """A takeover's first event."""


@dataclass(frozen=True, slots=True)
class AppendsAsked:
    """Requests to append, in the order in which they came. `are_again`: they have waited before."""

    requests: Again
    are_again: bool = False


@dataclass(frozen=True, slots=True)
class LogRequest:
    """A client's request to a log's owner. Without a `call` it is a roll: go on in a new ledger. Answer: RecordsAppended,
    Transaction, None (a roll), HERE for a Consult, or the bytes that another process answered it with.
    """

    request: RequestKey
    call: Append | Publish | Consult | None = None
    sizes: Sizes = ()
    """Of a publication's ledgers."""
    is_forwarded: bool = False
    """Another gateway takes this one for the owner."""
    created_at: str | None = None
    """The creation of the log in whose ledger an owner here gave the append a place; None: no owner did."""


@dataclass(frozen=True, slots=True)
class ForceAsked:
    """Take the log over from its owner, and own it where `creates`. Answer: LogMetadata."""

    request: RequestKey
    creates: bool
    finish: Finish
    created_at: str | None = None
    """Of the log that is meant: a log that was created later under its name is not changed (rule 27b)."""
    once: Once | None = None
    """The client's request that `finish` carries out; None where it may be carried out again."""


@dataclass(frozen=True, slots=True)
class HealAsked:
    """Take the log over if the writer of one of its ledgers does not live. Answer: whether the ledger is
    sealed, bool.
    """

    request: RequestKey
    ledger_id: int


@dataclass(frozen=True, slots=True)
class DeletionAsked:
    """Fence the log's writer, and delete the row. Answer: LogMetadata as it was."""

    request: RequestKey
    created_at: str | None = None
    """Of the log that is meant, where another one of its name must stay."""
    term: str | None = None
    """Of the keeper by whose word the log has expired: under another one it stays (ADR 40)."""


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """The process is about to end: take nothing over any more, and hand over what is owned. Answer:
    None.
    """

    request: RequestKey


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The client of a request is gone: a request that was not done goes to no owner any more (rule 27b)."""

    request: RequestKey


@dataclass(frozen=True, slots=True)
class ReleaseAsked:
    """Settle what is in flight, close the ledger, and end."""


@dataclass(frozen=True, slots=True)
class Retired:
    """End without a failure: somebody else decides who owns the log now."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The process ends: nothing is asked or answered any more."""


@dataclass(frozen=True, slots=True)
class HeadLearned:
    """A row of the primary was read (rule 16a)."""

    head: LogHead


@dataclass(frozen=True, slots=True)
class RowTaken:
    """Somebody else changed the row without ending this owner (truncated it)."""

    log: LogMetadata


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class EntriesDurable:
    """All entries of a ledger up to this id are acknowledged."""

    ledger_id: int
    last_entry: int


@dataclass(frozen=True, slots=True)
class SubmitFailed:
    """Entries of a ledger were not acknowledged: whether they are in it, its end decides."""

    ledger_id: int
    error: QuorumLogError


@dataclass(frozen=True, slots=True)
class SubmitRefused:
    """The ledger refused `count` entries from this id on, which were begun together: neither these nor
    the later entries of the `Submit` of this number were begun.
    """

    ledger_id: int
    first_entry: int
    count: int
    error: QuorumLogError
    number: int = 0


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to a question."""

    number: QuestionNumber
    value: Any
    """Of the type that the question names; QuorumLogError where it failed."""


Event = (
    BeginTakeover
    | AppendsAsked
    | LogRequest
    | ForceAsked
    | HealAsked
    | DeletionAsked
    | DrainAsked
    | Abandoned
    | ReleaseAsked
    | Retired
    | Stopped
    | HeadLearned
    | RowTaken
    | Ticked
    | EntriesDurable
    | SubmitFailed
    | SubmitRefused
    | Answered
)
