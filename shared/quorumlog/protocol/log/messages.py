"""The events that a log's machines take, and the effects that they return.

A machine takes one event and returns effects (`step(event, now) -> list[Effect]`), like the
ledger's machines (`protocol/messages.py`). Each question is an `Ask` with a unique number, and is
answered by `Answered` with the same number. A machine only returns the key of a client's request to
the driver, and never looks into the key.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Final

from quorumlog.errors import QuorumLogError
from quorumlog.protocol import batch
from quorumlog.protocol.batch import EncodedRecords, ProducerSeq, Record
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.log.row import LOG_LEDGERS_MAX, LogMetadata
from quorumlog.protocol.metadata import LedgerMetadata, Writer
from quorumlog.protocol.once import Once
from quorumlog.protocol.transaction import Sealed, Transaction, TransactionId
from quorumlog.protocol.values import Bounds, Number, Value

RequestKey = Any
"""The driver's hashable key of a client's request."""

QuestionNumber = int | tuple[int, int]
"""Identifies a request that a machine sent, so that its answer can be matched. If an owner or takeover
sent it within a route machine: (number of the owner or takeover, number of the request)."""

Finish = Callable[[LogMetadata], LogMetadata]
"""A further change of the metadata in a takeover's compare-and-swap, such as open or close."""


# --- requests of clients --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Append:
    """A request to append to a log. Its batch `data` becomes one entry (rule 25)."""

    data: bytes
    """The batch with `count` records and the producer, before `batch.placed` completes it."""
    count: int
    producer: ProducerSeq | None = None
    expect: int | None = None
    token: int | None = None
    since: int = 0
    """The log's end before the first request of `producer` (rule 26a); 0 if not given."""
    is_forwarded: bool = False
    """Whether another gateway, which considers this gateway the owner, forwarded the request."""
    created_at: str | None = None
    """The creation time of the requested log (rule 27b); None: any log with this name."""

    @classmethod
    def of(
        cls,
        records: Sequence[Record] | EncodedRecords,
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
        """Make a request from these records. A request without records must end the log."""
        data = batch.encode(records, producer, seq=seq, is_end=is_end, is_by_numbers=is_by_numbers)
        return cls(data, len(records), producer, expect, token, since, created_at=created_at)


@dataclass(frozen=True, slots=True)
class RecordsAppended:
    """The answer to an append, with the place of its durable records."""

    first_offset: int
    last_offset: int
    ledger_id: int
    entry_id: int
    is_duplicate: bool = False
    highest_seq: int | None = None
    """For a duplicate, the highest acknowledged number of its producer."""


@dataclass(frozen=True, slots=True)
class Publish(Value):
    """A commit, which adds these ledgers of a transaction to its log, in this order (rule 28)."""

    transaction: TransactionId
    ledgers: Annotated[tuple[Sealed, ...], Bounds(max_length=LOG_LEDGERS_MAX)]
    overwrite: bool = False
    """Whether all earlier records of the log are dropped."""
    token: Number | None = None


@dataclass(frozen=True, slots=True)
class Consult:
    """A request to the gateway that owns the log, answered without the log's machines."""

    data: bytes
    """The request's bytes. A request that is sent again after a loss must count once (rule 32)."""


class Here(Enum):
    """The answer to a Consult if this process owns the log."""

    HERE = "here"


HERE: Final = Here.HERE

Sizes = Sequence[tuple[int, int, int]]
"""(ledger, records, bytes) of each ledger."""

Again = tuple[tuple[RequestKey, Append], ...]
"""Requests that were certainly not appended, in order."""


class NotOwner(Enum):
    """The answer of an owner that has ended and has not carried out the request at all."""

    NOT_OWNER = "not-owner"


NOT_OWNER: Final = NotOwner.NOT_OWNER


# --- questions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadLog:
    """Read the log's current metadata. Answered by LogMetadata."""

    name: str


@dataclass(frozen=True, slots=True)
class SwapLog:
    """Compare-and-swap from `log.version`. Answered by the new LogMetadata, or RowChanged. Changes
    nothing if a copy of the client's request `once` was carried out already.
    """

    log: LogMetadata
    once: Once | None = None


@dataclass(frozen=True, slots=True)
class ReadTransaction:
    """Read the current state of a transaction. Answered by Transaction."""

    id: str


@dataclass(frozen=True, slots=True)
class Commit:
    """End a transaction, and publish these ledgers by a compare-and-swap of the log's metadata.
    Answered by Committed or RowChanged. If `log` is None, only returns the first commit's answer.
    """

    transaction: str
    ledgers: tuple[Sealed, ...]
    log: LogMetadata | None


@dataclass(frozen=True, slots=True)
class CreateLedger:
    """Create a ledger for a log, whose only writer is this process. Answered by LedgerMetadata."""

    log: LogMetadata


@dataclass(frozen=True, slots=True)
class ReadLedger:
    """Read a ledger's current metadata. Answered by LedgerMetadata."""

    ledger_id: int


@dataclass(frozen=True, slots=True)
class RecoverLedger:
    """Recover a ledger, unless it is CLOSED already. Answered by LedgerMetadata."""

    ledger_id: int


@dataclass(frozen=True, slots=True)
class CloseLedger:
    """Close a ledger as its writer. Answered by LedgerMetadata."""

    ledger_id: int


@dataclass(frozen=True, slots=True)
class MeasureLedger:
    """Read the end of a CLOSED ledger of a log from its last entry. Answered by LedgerEnd."""

    row: LedgerMetadata


@dataclass(frozen=True, slots=True)
class ReadBatches:
    """Read entries of a CLOSED ledger, from `first` to at most `last`. Answered by BatchesRead."""

    ledger_id: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class WriteBatches:
    """Append entries to this process's ledger, from the id `first` on, and wait for their
    acknowledgement. Answered by None.
    """

    ledger_id: int
    first: int
    payloads: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ReleaseLedgers:
    """Delete each of these ledgers that no log or fork names. Before that, bookies must have stored
    the place of the ledger that replaced it (rule 27c). Answered by None.
    """

    ledger_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeleteLedger:
    """Delete a ledger in a transaction, unless a log names it (rule 22). Answered by None."""

    ledger_id: int


@dataclass(frozen=True, slots=True)
class CountBookies:
    """Count the writable bookies. Answered by int."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Forward a request to the owner in another process. Answered by RecordsAppended, Transaction,
    None (a roll), bytes (a Consult), or OwnerLost.
    """

    owner: Writer
    log: str
    call: Append | Publish | Consult | None


@dataclass(frozen=True, slots=True)
class IsAlive:
    """Probe exactly this process (rule 11) twice, with a jittered pause. Answered by bool."""

    writer: Writer


@dataclass(frozen=True, slots=True)
class DeleteLog:
    """Delete the log if its metadata has this version. Answered by None or RowChanged."""

    log: LogMetadata


class Pause(Enum):
    """The reason for a wait. It determines the duration."""

    YIELD = "yield"
    """Wait until the metadata is read again: another gateway has changed or will change it."""
    SETTLE = "settle"
    """Wait until a ledger's recovery is requested again."""
    ROLL = "roll"
    """Wait until an automatic roll is tried again."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for some time. Answered by None."""

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
    | WriteBatches
    | ReleaseLedgers
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
    """The answer to a compare-and-swap from a version that is not the current version."""

    current: LogMetadata


@dataclass(frozen=True, slots=True)
class Committed:
    """An ended transaction, and the log's metadata; None if this commit did not change it."""

    transaction: Transaction
    log: LogMetadata | None


@dataclass(frozen=True, slots=True)
class LedgerEnd:
    """The end of a CLOSED ledger of a log."""

    records: int
    bytes: int
    last_entry: int
    has_producers: bool
    appended_ms: int = 0
    seq: str | None = None
    """The log's last stream sequence, if it has one (rule 25a)."""
    is_end: bool = False
    """Whether the ledger's last batch ends the log (rule 25b)."""


@dataclass(frozen=True, slots=True)
class BatchesRead:
    """Entries by id, in order. Reading continues at `next`. `is_lost`: entries below `next` that
    are not listed are lost (rule 31).
    """

    entries: tuple[tuple[int, bytes], ...]
    next: int
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class OwnerLost:
    """The log's owner cannot be reached. `sent`: the request may have reached the owner, so the
    outcome is unknown.
    """

    detail: str
    sent: bool


# --- effects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a question, answered by `Answered` with the same number."""

    number: QuestionNumber
    question: Question


@dataclass(frozen=True, slots=True)
class Submit:
    """Append entries to this process's ledger. The first entry gets the id `first_entry`."""

    ledger_id: int
    first_entry: int
    payloads: tuple[bytes, ...]
    number: int = 0
    """The number of refusals that the owner has handled. A refusal repeats this number."""
    one_by_one: bool = False
    """Whether to begin each entry by itself, because there may be room for some entries."""


@dataclass(frozen=True, slots=True)
class Resolve:
    """Answer a client's request."""

    request: RequestKey
    answer: (
        RecordsAppended | Transaction | LogMetadata | NotOwner | Here | QuorumLogError | bool | None
    )


@dataclass(frozen=True, slots=True)
class Relay:
    """Answer a client's request with the response of the owner in another process."""

    request: RequestKey
    answer: RecordsAppended | Transaction | bytes | None


@dataclass(frozen=True, slots=True)
class PlaceKnown:
    """A hint for readers that an acknowledged entry of a ledger begins after `records` records."""

    ledger_id: int
    records: int
    entry_id: int


@dataclass(frozen=True, slots=True)
class OwnerEnded:
    """An owner has ended; `error` is None if another gateway owns the log. The owner's requests in
    flight are settled next.
    """

    error: QuorumLogError | None


@dataclass(frozen=True, slots=True)
class Settled:
    """An ended owner has settled all requests. Requests in `again` were certainly not done."""

    again: Again
    begun: frozenset[RequestKey] = frozenset()
    """The requests in `again` that had an offset: a later log must not get them (rule 27b)."""


@dataclass(frozen=True, slots=True)
class TakeoverDone:
    """A takeover has ended. `log`: the metadata, None if another gateway won, or the error."""

    log: LogMetadata | QuorumLogError | None


@dataclass(frozen=True, slots=True)
class RewriteDone:
    """A rewrite has ended. `log`: the metadata afterwards, None if the log changed meanwhile, or
    the error. `size`: the number of bytes written. `spoiled`: the ledger that can't be rewritten.
    """

    log: LogMetadata | QuorumLogError | None
    size: int
    spoiled: int | None = None


@dataclass(frozen=True, slots=True)
class LogGone:
    """The log no longer exists, so the driver must forget all its state."""


Effect = (
    Ask
    | Submit
    | Resolve
    | Relay
    | PlaceKnown
    | OwnerEnded
    | Settled
    | TakeoverDone
    | RewriteDone
    | LogGone
)


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BeginTakeover:
    """The first event of a takeover, which begins its work."""


@dataclass(frozen=True, slots=True)
class BeginRewrite:
    """The first event of a rewrite, which begins its work."""


@dataclass(frozen=True, slots=True)
class AppendsAsked:
    """Requests to append, in order of arrival. `are_again`: they were accepted before."""

    requests: Again
    are_again: bool = False


@dataclass(frozen=True, slots=True)
class LogRequest:
    """A client's request to a log's owner; without a `call`, a roll. Answered by RecordsAppended,
    Transaction, or None (a roll); a Consult is answered by HERE, or by another process's bytes.
    """

    request: RequestKey
    call: Append | Publish | Consult | None = None
    sizes: Sizes = ()
    """The sizes of a publication's ledgers."""
    is_forwarded: bool = False
    """Whether another gateway, which considers this gateway the owner, forwarded the request."""
    created_at: str | None = None
    """If an owner here gave the append an offset: the creation time of that owner's log."""


@dataclass(frozen=True, slots=True)
class ForceAsked:
    """Take the log over from its owner, and own it if `creates`. Answered by LogMetadata."""

    request: RequestKey
    creates: bool
    finish: Finish
    created_at: str | None = None
    """The creation time of the log to change. No later log of the name is changed (rule 27b)."""
    once: Once | None = None
    """The client's request that `finish` carries out; None if it may be carried out twice."""


@dataclass(frozen=True, slots=True)
class HealAsked:
    """Take the log over if the writer of one of its ledgers is gone. Answered by a bool: whether
    the ledger is sealed.
    """

    request: RequestKey
    ledger_id: int


@dataclass(frozen=True, slots=True)
class DeletionAsked:
    """Fence the log's writer, and delete the log. Answered by its last LogMetadata."""

    request: RequestKey
    created_at: str | None = None
    """The creation time of the log to delete, if a later log of its name must stay."""
    term: str | None = None
    """The keeper's term when the log expired. If the term has changed, the log stays (ADR 40)."""


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Don't take the log over again, and give it up if this process owns it, because the process is
    about to end. Answered by None.
    """

    request: RequestKey


@dataclass(frozen=True, slots=True)
class Abandoned:
    """A request's client is gone, so no owner may begin the request any longer (rule 27b)."""

    request: RequestKey


@dataclass(frozen=True, slots=True)
class ReleaseAsked:
    """Settle requests in flight, close the ledger, and end."""


@dataclass(frozen=True, slots=True)
class Retired:
    """End without a failure, because the route now decides which process owns the log."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The process ends, so no further question or answer is possible."""


@dataclass(frozen=True, slots=True)
class HeadLearned:
    """The head of the log's metadata was read from the primary (rule 16a)."""

    head: LogHead


@dataclass(frozen=True, slots=True)
class RowTaken:
    """Another process changed the metadata without ending this owner (a truncation)."""

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
    """Entries were not acknowledged. The ledger's end will show whether the ledger has them."""

    ledger_id: int
    error: QuorumLogError


@dataclass(frozen=True, slots=True)
class SubmitRefused:
    """The ledger refused `count` entries from this id on, which were submitted together. No entry
    of the `Submit` with this number was begun from this id on.
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
    """A value of the type that the question names; QuorumLogError if the question failed."""


Event = (
    BeginTakeover
    | BeginRewrite
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
