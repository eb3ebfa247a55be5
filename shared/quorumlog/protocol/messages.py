"""The events that machines take, and the effects that they return.

The contract between a machine and its driver:
  - The effects of one step have no order. If B must follow A, the machine requests B when A is
    answered.
  - The driver answers each request exactly once; a timeout is an answer (`Status.UNKNOWN`).
  - Late and repeated answers are legal: an answer names its request (`attempt`, `generation`).
"""

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Annotated

from quorumlog.protocol.ids import ID_MAX
from quorumlog.protocol.metadata import LedgerMetadata, Lineage
from quorumlog.protocol.record import Run
from quorumlog.protocol.values import Bounds, EntryId, Member, Value


class Status(StrEnum):
    """A bookie's answer. Only OK and NO_ENTRY prove which entries the bookie has (rule 4, I16)."""

    OK = "ok"
    NO_ENTRY = "no-such-entry"
    """Explicit denial: the bookie proves that it lacks the entry, or never saw the ledger."""
    FENCED = "fenced"
    """A recoverer fenced the ledger: the bookie accepts no further adds by the writer (rule 9)."""
    NOT_MINE = "not-mine"
    """The request names another incarnation, or the ledger is in limbo here (rules 9 and 15)."""
    READ_ONLY = "read-only"
    CONFLICT = "conflict"
    """Other bytes are stored under this id. The write handle must end (rule 2)."""
    WRONG_KEY = "wrong-key"
    """The bookie has another key for this ledger. This is not a denial (rule 17)."""
    UNKNOWN = "unknown"
    """Timeout, broken connection, damage or any other failure. It proves nothing."""


class CasStatus(StrEnum):
    """The result of a read or compare-and-swap of metadata."""

    OK = "ok"
    CONFLICT = "conflict"
    """The change was not applied and never will be. `metadata` is the current version."""
    MISSING = "missing"
    """The ledger is deleted (a tombstone)."""
    UNKNOWN = "unknown"
    """A read failed, or the store could not be reached before anything was sent. A compare-and-swap
    that may have been applied never gets this answer: the driver repeats it with its token until
    the outcome is known (rule 6)."""


class Timer(Enum):
    """The timers that machines start. The driver sets their durations (docs/protocol.md, Times)."""

    ADD = "add"
    """An add has had no answer for 2 s, so its slot counts as failed."""
    QUORUM = "quorum"
    """The oldest pending entry has lacked its ack quorum for 10 s, so the writer ends."""
    HEDGE = "hedge"
    """A read has had no answer for 50 ms, so the next member is asked too."""
    RETRY = "retry"
    """A step failed 1 s ago (no spare bookie, or the store was unreachable), and is retried."""


# --- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendAdd:
    """Ask a member to store its part of a run. Answered by AddAnswered.

    `recovery`: the add passes the fence and replaces a copy that fails its CRC (rules 2 and 12).
    `row`: metadata that names the member; before the member acknowledges the run, it stores a copy
    of `row` (rule 18b). A recovery add has no `row`.
    """

    position: int
    member: str
    generation: int
    run: Run
    ledger_key: bytes
    recovery: bool = False
    row: LedgerMetadata | None = None


@dataclass(frozen=True, slots=True)
class SendFence:
    """Ask a member to fence the ledger durably and return its LAC. Answered by FenceAnswered."""

    position: int
    member: str
    ledger_id: int
    ledger_key: bytes


@dataclass(frozen=True, slots=True)
class SendRead:
    """Ask a member for entries first..last. Answered by ReadAnswered.

    `fence`: a recovery read; the bookie fences durably before it answers (X1). `from_disk`: a
    repair verifies copies; the bookie waits for pending writes and reads its disk (rule 20a).
    """

    position: int
    member: str
    ledger_id: int
    first: int
    last: int
    fence: bool = False
    ledger_key: bytes = b""
    from_disk: bool = False


@dataclass(frozen=True, slots=True)
class SendRow:
    """Ask a member to store a copy of this metadata durably (rule 18b). Answered by RowAnswered."""

    member: str
    row: LedgerMetadata


@dataclass(frozen=True, slots=True)
class MissedRange(Value):
    """Entries that a member should hold but may lack, for the repair queue (rule 8)."""

    member: Member
    first: EntryId
    last: Annotated[int, Bounds(ge=0, le=ID_MAX - 1)]

    def check(self) -> None:
        """Assert that the range is not empty."""
        assert self.first <= self.last, "first is above last"


@dataclass(frozen=True, slots=True)
class UpdateMetadata:
    """Compare-and-swap to `metadata`, if the store still has `metadata.version`. Answered by
    MetadataAnswered with the same attempt. `missed` enters the repair queue in the same
    transaction. A retry of an attempt has the same content and token (rule 6).
    """

    attempt: int
    metadata: LedgerMetadata
    missed: tuple[MissedRange, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadMetadata:
    """Read the ledger's metadata from the primary. Answered by MetadataAnswered."""

    attempt: int


@dataclass(frozen=True, slots=True)
class FindBookies:
    """Ask for live writable bookies that can join the remaining members in `ensemble`. Bookies in
    `exclude` are left out, and the best bookies come first. Answered by BookiesFound.
    """

    attempt: int
    ensemble: tuple[str, ...]
    exclude: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartTimer:
    """Start a timer, answered by TimerFired(timer, tag). Timers are never cancelled: a machine
    ignores a timer that it no longer needs.
    """

    timer: Timer
    tag: int = 0


@dataclass(frozen=True, slots=True)
class Confirmed:
    """Entries first..last are acknowledged, in order, each exactly once; the LAC is now `last`."""

    first: int
    last: int
    runs: tuple[Run, ...] = field(default=(), compare=False, repr=False)
    """These entries as bookies store them; the gateway may serve them from memory."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The machine's work failed; `code` is the error code of a class in `errors.py`.

    A writer's pending entries from `first` on all fail in order, with an unknown outcome.
    """

    code: str
    first: int | None = None
    detail: str = ""
    bookie: str | None = None
    entry_id: int | None = None


@dataclass(frozen=True, slots=True)
class Closed:
    """The ledger is CLOSED, with this metadata."""

    metadata: LedgerMetadata


@dataclass(frozen=True, slots=True)
class Repaired:
    """The repair is done, and the ledger has this metadata."""

    metadata: LedgerMetadata


@dataclass(frozen=True, slots=True)
class RecoveryNeeded:
    """The writer found IN_RECOVERY in the metadata: its driver must run a recovery (rule 10)."""


@dataclass(frozen=True, slots=True)
class EntriesRead:
    """A reader's next entries in order, all with valid digests. `is_last`: the reader has returned
    all requested entries or bytes.
    """

    run: Run
    is_last: bool = False


Effect = (
    SendAdd
    | SendFence
    | SendRead
    | SendRow
    | UpdateMetadata
    | ReadMetadata
    | FindBookies
    | StartTimer
    | Confirmed
    | Failed
    | Closed
    | Repaired
    | RecoveryNeeded
    | EntriesRead
)

# --- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin the task for which the machine was created (RangeReader, FragmentRepair)."""


@dataclass(frozen=True, slots=True)
class AppendRequested:
    """Append these payloads as one run, whose ids follow the last assigned id."""

    payloads: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CloseRequested:
    """Close the ledger: wait for pending entries, then close at the last acknowledged entry."""


@dataclass(frozen=True, slots=True)
class RecoverRequested:
    """Start a recovery from this metadata."""

    metadata: LedgerMetadata


@dataclass(frozen=True, slots=True)
class ReplaceRequested:
    """The auditor or a drain asks the live writer to replace a member (rule 21)."""

    member: str


@dataclass(frozen=True, slots=True)
class PlacedInLog:
    """A log's metadata places this ledger at `first_offset`. Sent before the first append (rule
    23), so that the members' copies of the metadata have the place too (rule 18f).
    """

    first_offset: int
    lineage: Lineage | None = None


@dataclass(frozen=True, slots=True)
class AddAnswered:
    """The answer to SendAdd, with the request's position, member, generation and range."""

    position: int
    member: str
    generation: int
    first: int
    last: int
    status: Status


@dataclass(frozen=True, slots=True)
class FenceAnswered:
    """The answer to SendFence. OK: the bookie has fenced the ledger durably. `last_add_confirmed`:
    the highest LAC that the bookie has received (NO_ENTRY if none).
    """

    position: int
    member: str
    status: Status
    last_add_confirmed: int = -1


@dataclass(frozen=True, slots=True)
class ReadAnswered:
    """The answer to SendRead, with the requested range. If the status is OK, `run` has entries that
    the bookie returned (perhaps not all), and `absent` the ranges that it denied. Entries in
    neither are unknown (rule 1).
    """

    position: int
    member: str
    first: int
    last: int
    status: Status
    run: Run | None = None
    absent: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RowAnswered:
    """The answer to SendRow, with the version of the sent metadata. OK: the copy is on disk."""

    member: str
    version: int
    status: Status


@dataclass(frozen=True, slots=True)
class MetadataAnswered:
    """The answer to UpdateMetadata and ReadMetadata. `metadata` is the current metadata, if known;
    after a successful change, the changed metadata.
    """

    attempt: int
    status: CasStatus
    metadata: LedgerMetadata | None = None

    def refuses(self, update: UpdateMetadata) -> bool:
        """Whether the store rejected the change for another reason than its version: a bookie that
        the change adds has registered a later incarnation (rule 15b).
        """
        now, base = self.metadata, update.metadata
        is_same = now is not None and (now.version, now.attempt) == (base.version, base.attempt)
        return self.status is CasStatus.CONFLICT and is_same


@dataclass(frozen=True, slots=True)
class BookiesFound:
    """The answer to FindBookies: members in the order of preference; may be empty."""

    attempt: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A timer that StartTimer started has fired."""

    timer: Timer
    tag: int = 0


Event = (
    Begin
    | AppendRequested
    | CloseRequested
    | RecoverRequested
    | ReplaceRequested
    | PlacedInLog
    | AddAnswered
    | FenceAnswered
    | ReadAnswered
    | RowAnswered
    | MetadataAnswered
    | BookiesFound
    | TimerFired
)
