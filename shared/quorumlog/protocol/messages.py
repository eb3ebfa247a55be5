"""What the machines hear (events) and ask for (effects): the whole language of the protocol.

Rules of the language (style guide, "the contract of a machine"):
  - effects in one list have no order: if B must follow A, the machine asks for B on A's answer;
  - each request effect is answered exactly once; a timeout is an answer (`Status.UNKNOWN`);
  - a late or repeated answer is legal: answers carry what they answer (`attempt`, `generation`).
"""

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Annotated

from quorumlog.protocol.ids import ID_MAX
from quorumlog.protocol.metadata import LedgerMetadata, Lineage
from quorumlog.protocol.record import Run
from quorumlog.protocol.values import Bounds, EntryId, Member, Value


class Status(StrEnum):
    """What a bookie says. Only OK and NO_ENTRY are knowledge of what it holds (rule 4, I16)."""

    OK = "ok"
    NO_ENTRY = "no-such-entry"
    """Explicit negative: proven absent here (also: the ledger was never seen here)."""
    FENCED = "fenced"
    """A recoverer asked for it: no normal add is taken any more (rule 9)."""
    NOT_MINE = "not-mine"
    """Asked as another incarnation, or the ledger is in limbo here (rules 9 and 15)."""
    READ_ONLY = "read-only"
    CONFLICT = "conflict"
    """Other bytes are stored under this id: final for the write handle (rule 2)."""
    WRONG_KEY = "wrong-key"
    """Another ledger key: not a negative (rule 17)."""
    UNKNOWN = "unknown"
    """Timeout, broken connection, damage, anything else: no knowledge at all."""


class CasStatus(StrEnum):
    """How a read or compare-and-swap of metadata ended."""

    OK = "ok"
    CONFLICT = "conflict"
    """Settled: not applied and never will be; `metadata` is the row as it is now."""
    MISSING = "missing"
    """The ledger is deleted (a tombstone)."""
    UNKNOWN = "unknown"
    """A read failed, or the store is away before anything was sent. A compare-and-swap that may
    have been applied is never answered so: the driver asks again with its token until it is
    settled (rule 6)."""


class Timer(Enum):
    """The timers that machines ask for; the driver knows how long each takes (docs/protocol.md, Times)."""

    ADD = "add"
    """A bookie is silent for an add: 2 s, then its slot has failed."""
    QUORUM = "quorum"
    """The oldest pending entry waits for its ack quorum: 10 s, then `quorum-timeout`."""
    HEDGE = "hedge"
    """A read was not answered: 50 ms, then the next member is asked too."""
    RETRY = "retry"
    """Something failed that may succeed later (no spare, store away): 1 s."""


# --- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendAdd:
    """Ask a member to store its part of a run. Answered by AddAnswered.

    `recovery` adds pass the fence and replace a copy that fails its CRC (rules 2 and 12). `row` names the member:
    the member keeps a copy of it before it acknowledges the run (rule 18b). None: a recovery add.
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
    """Ask a member to fence the ledger durably and tell its LAC. Answered by FenceAnswered."""

    position: int
    member: str
    ledger_id: int
    ledger_key: bytes


@dataclass(frozen=True, slots=True)
class SendRead:
    """Ask a member for entries first..last. With `fence` it is a recovery read: the bookie fences
    durably before it answers (X1). With `from_disk` it is a repair's look at its own work: what is
    on its way to the disk is waited for, and the bytes come from there (rule 20a). Answered by
    ReadAnswered.
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
    """Have a member keep a copy of this row durably (rule 18b). Answered by RowAnswered."""

    member: str
    row: LedgerMetadata


@dataclass(frozen=True, slots=True)
class MissedRange(Value):
    """Entries that a member should hold and may not: handed to the repair queue (rule 8)."""

    member: Member
    first: EntryId
    last: Annotated[int, Bounds(ge=0, le=ID_MAX - 1)]

    def check(self) -> None:
        """Assert that the range is not empty."""
        assert self.first <= self.last, "first is above last"


@dataclass(frozen=True, slots=True)
class UpdateMetadata:
    """Compare-and-swap: `metadata` if the row still has `metadata.version`. Answered by
    MetadataAnswered with the same attempt. `missed` is queued for repair in the same transaction.
    The same attempt again is the same change asked again: it carries the same token (rule 6).
    """

    attempt: int
    metadata: LedgerMetadata
    missed: tuple[MissedRange, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadMetadata:
    """Read the ledger's row from the primary. Answered by MetadataAnswered."""

    attempt: int


@dataclass(frozen=True, slots=True)
class FindBookies:
    """Ask for live writable bookies not in `exclude`, best first: they join the members of
    `ensemble`, which are those that stay. Answered by BookiesFound.
    """

    attempt: int
    ensemble: tuple[str, ...]
    exclude: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartTimer:
    """Answer with TimerFired(timer, tag) after the timer's time. Never cancelled: a machine
    ignores what fires too late.
    """

    timer: Timer
    tag: int = 0


@dataclass(frozen=True, slots=True)
class Confirmed:
    """Entries first..last are acknowledged, in order, each exactly once; the LAC is now `last`."""

    first: int
    last: int
    runs: tuple[Run, ...] = field(default=(), compare=False, repr=False)
    """These entries as they are stored, which their writer may show from memory."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The machine's work ended with an error of the error tree, named by its code.

    For a writer: every pending entry from `first` on is failed (outcome unknown), in order.
    """

    code: str
    first: int | None = None
    detail: str = ""
    bookie: str | None = None
    entry_id: int | None = None


@dataclass(frozen=True, slots=True)
class Closed:
    """The ledger is CLOSED; this is its row."""

    metadata: LedgerMetadata


@dataclass(frozen=True, slots=True)
class Repaired:
    """A member of a fragment holds all that it should; this is the ledger's row."""

    metadata: LedgerMetadata


@dataclass(frozen=True, slots=True)
class RecoveryNeeded:
    """The writer met IN_RECOVERY: whoever drives it runs the recovery itself (rule 10)."""


@dataclass(frozen=True, slots=True)
class EntriesRead:
    """A reader's result, in order: digest-valid entries as `run`. With `is_last` the reader has
    ended: it read all, or as many bytes as were asked for.
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
    """Begin, for machines that were told at their making what to do (RangeReader,
    FragmentRepair).
    """


@dataclass(frozen=True, slots=True)
class AppendRequested:
    """Append these payloads as one run; ids follow on from the last one given out."""

    payloads: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CloseRequested:
    """The writer's close: drain what is pending, then close at the last acknowledged entry."""


@dataclass(frozen=True, slots=True)
class RecoverRequested:
    """Start a recovery from this row."""

    metadata: LedgerMetadata


@dataclass(frozen=True, slots=True)
class ReplaceRequested:
    """Auditor or drain asks the live writer to replace a member (rule 21)."""

    member: str


@dataclass(frozen=True, slots=True)
class PlacedInLog:
    """A log's row says that this ledger begins at `first_offset`: before the first append (rule 23). The
    members' copies of the ledger's row say so too (rule 18f).
    """

    first_offset: int
    lineage: Lineage | None = None


@dataclass(frozen=True, slots=True)
class AddAnswered:
    """The answer to SendAdd: position, member, generation and the run's range as they were asked."""

    position: int
    member: str
    generation: int
    first: int
    last: int
    status: Status


@dataclass(frozen=True, slots=True)
class FenceAnswered:
    """The answer to SendFence. OK means durably fenced now; `last_add_confirmed` is the highest
    LAC that the bookie knows of (NO_ENTRY where it knows none).
    """

    position: int
    member: str
    status: Status
    last_add_confirmed: int = -1


@dataclass(frozen=True, slots=True)
class ReadAnswered:
    """The answer to SendRead for first..last as asked. `run` holds what is present (maybe only
    some of it), `absent` the ranges that are explicitly not there; what neither names is unknown
    (rule 1). Status OK says that run and absent can be believed.
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
    """The answer to SendRow: `version` is that of the row. OK means that the copy is on disk."""

    member: str
    version: int
    status: Status


@dataclass(frozen=True, slots=True)
class MetadataAnswered:
    """The answer to UpdateMetadata and ReadMetadata. `metadata` is the row as it is now, where it
    is known (after OK: with its new version).
    """

    attempt: int
    status: CasStatus
    metadata: LedgerMetadata | None = None

    def refuses(self, update: UpdateMetadata) -> bool:
        """Whether the row is still the one that the change was made from, and the change is refused: a bookie that
        it adds has registered as a later incarnation (rule 15b).
        """
        now, base = self.metadata, update.metadata
        is_same = now is not None and (now.version, now.attempt) == (base.version, base.attempt)
        return self.status is CasStatus.CONFLICT and is_same


@dataclass(frozen=True, slots=True)
class BookiesFound:
    """The answer to FindBookies: members in the order of preference, maybe none."""

    attempt: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A timer that StartTimer asked for."""

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
