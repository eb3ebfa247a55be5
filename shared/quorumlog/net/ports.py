"""The interfaces that a machine's driver uses, which a simulator can implement too.

Requests to bookies take a callback, not a future, so that a run costs no task. A callback is called
exactly once, on the event loop, after the method that it was passed to has returned.
"""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from quorumlog.protocol.messages import CasStatus, MissedRange, Status, Timer
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.ranges import Ranges
from quorumlog.protocol.record import Run

AddDone = Callable[[Status], None]
LacDone = Callable[[Status, int], None]
"""A callback that gets the status and the bookie's highest LAC."""
ReadDone = Callable[[Status, Run | None, Ranges], None]
"""A callback that gets the status, the present entries and the absent ids (rule 1)."""


class BookiesPort(Protocol):
    """Requests to bookies. Any result except a checked answer is `Status.UNKNOWN` (rule 4)."""

    def add(
        self,
        member: str,
        ledger_key: bytes,
        run: Run,
        done: AddDone,
        *,
        recovery: bool = False,
        row: LedgerMetadata | None = None,
    ) -> None:
        """Store a member's part of a run, and a copy of its metadata `row` (rule 18b)."""

    def fence(self, member: str, ledger_id: int, ledger_key: bytes, done: LacDone) -> None:
        """Fence a ledger at a member durably; `done` gets the member's LAC."""

    def read(
        self,
        member: str,
        ledger_id: int,
        first: int,
        last: int,
        done: ReadDone,
        *,
        bytes_max: int,
        fence_key: bytes | None = None,
        from_disk: bool = False,
    ) -> None:
        """Read the entries from `first` to `last` that a member has. With `fence_key`, the member
        fences first (X1); with `from_disk`, it syncs and reads its disk (rule 20a).
        """

    def read_lac(self, member: str, ledger_id: int, done: LacDone) -> None:
        """Read a member's LAC without fencing."""

    def keep_row(self, member: str, ledger_key: bytes, row: LedgerMetadata, done: AddDone) -> None:
        """Make a member store a copy of a ledger's metadata (rule 18b)."""


class LacPort(Protocol):
    """Sends the explicit LAC of an idle writer (rule 5)."""

    def write_lac(self, member: str, ledger_id: int, lac: int, ledger_key: bytes) -> None:
        """Send a member the LAC. The caller gets no answer."""


class MetadataPort(Protocol):
    """Reads and changes a ledger's metadata for a machine."""

    async def read(self, ledger_id: int) -> tuple[CasStatus, LedgerMetadata | None]:
        """The status of a ledger's metadata on the primary, and the metadata."""

    async def cas(
        self, metadata: LedgerMetadata, missed: tuple[MissedRange, ...], *, attempt: str
    ) -> tuple[CasStatus, LedgerMetadata | None]:
        """Replace the metadata if the stored version is `metadata.version`. A repeat with the same
        `attempt` after `CasStatus.UNKNOWN` returns the change's outcome (rule 6).
        """


class PlacementPort(Protocol):
    """The bookies that an ensemble change may choose, and the bookies that are down."""

    def candidates(self, ensemble: tuple[str, ...], exclude: tuple[str, ...]) -> tuple[str, ...]:
        """Live writable members that are not in `exclude`, best first."""

    def is_down(self, member: str) -> bool:
        """Whether a member's bookie is considered down. The bookie may still answer (I31)."""

    async def refresh(self) -> object:
        """Read the list of bookies now. Raises: MetadataUnavailable."""


class ClockPort(Protocol):
    """Timers that are never cancelled, and cheap enough for one per run."""

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call `call(*args)` once, `delay_s` seconds from now or a little later."""


class TasksPort(Protocol):
    """The owner of tasks for rare work, such as metadata requests and recoveries."""

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` to its end; `work` must handle its own errors."""


@dataclass(frozen=True, slots=True)
class MachineTimes:
    """The durations of the machines' timers (docs/protocol.md, Times)."""

    add_s: float = 2.0
    quorum_s: float = 10.0
    hedge_s: float = 0.05
    retry_s: float = 1.0

    def of(self, timer: Timer) -> float:
        """The duration of one timer, in seconds."""
        match timer:
            case Timer.ADD:
                return self.add_s
            case Timer.QUORUM:
                return self.quorum_s
            case Timer.HEDGE:
                return self.hedge_s
            case Timer.RETRY:
                return self.retry_s


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports shared by the machines of one process."""

    bookies: BookiesPort
    metadata: MetadataPort
    placement: PlacementPort
    clock: ClockPort
    tasks: TasksPort
    times: MachineTimes = field(default_factory=MachineTimes)
    read_bytes_max: int = 4 << 20
    """Maximum size of one read: a few runs, so that a reader gets entries steadily."""
