"""What the driver of a machine needs of the world, so that a simulator can be the world.

Requests to bookies take a callback, not a future: a run is answered without a task. A callback is
called exactly once, on the event loop, and never before the call that took it has returned.
"""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from quorumlog.protocol.messages import CasStatus, MissedRange, Status, Timer
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.record import Run

Ranges = tuple[tuple[int, int], ...]
AddDone = Callable[[Status], None]
LacDone = Callable[[Status, int], None]
"""Status and the highest LAC that the bookie knows of."""
ReadDone = Callable[[Status, Run | None, Ranges], None]
"""Status, what is present, what is absent; what neither names is unknown (rule 1)."""


class BookiesPort(Protocol):
    """Requests to bookies. Whatever is not a checked answer is `Status.UNKNOWN` (rule 4)."""

    def add(
        self,
        member: str,
        ledger_key: bytes,
        run: Run,
        done: AddDone,
        *,
        recovery: bool = False,
        repair: bool = False,
    ) -> None:
        """Store a member's part of a run."""
        ...

    def fence(self, member: str, ledger_id: int, ledger_key: bytes, done: LacDone) -> None:
        """Fence a ledger durably and learn its LAC."""
        ...

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
        """Read what a member holds of first..last; with `fence_key` it fences first (X1), with
        `from_disk` it syncs first, and reads its disk (rule 20a).
        """
        ...

    def read_lac(self, member: str, ledger_id: int, done: LacDone) -> None:
        """Learn the highest LAC that a member knows of, without fencing."""
        ...


class LacPort(Protocol):
    """Where the explicit LAC of an idle writer goes (rule 5)."""

    def write_lac(self, member: str, ledger_id: int, lac: int, ledger_key: bytes) -> None:
        """Have a member keep a LAC; whether it does is not told."""
        ...


class MetadataPort(Protocol):
    """One ledger's row: what a machine may do with it."""

    async def read(self, ledger_id: int) -> tuple[CasStatus, LedgerMetadata | None]:
        """The row from the primary."""
        ...

    async def cas(
        self, metadata: LedgerMetadata, missed: tuple[MissedRange, ...], *, attempt: str
    ) -> tuple[CasStatus, LedgerMetadata | None]:
        """Replace the row that has `metadata.version`. `attempt` names this change for ever: asked
        again with it after `CasStatus.UNKNOWN`, the store says what became of it (rule 6).
        """
        ...


class PlacementPort(Protocol):
    """Which bookies an ensemble may take."""

    def candidates(self, ensemble: tuple[str, ...], exclude: tuple[str, ...]) -> tuple[str, ...]:
        """Live writable members that are not in `exclude`, best first."""
        ...


class ClockPort(Protocol):
    """Timers that are never cancelled, cheap enough for one a run."""

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call `call(*args)` once, `delay_s` seconds from now or a little later."""
        ...


class TasksPort(Protocol):
    """Who owns the tasks of the rare work: metadata requests, recoveries."""

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` to its end; it answers for its own errors."""
        ...


@dataclass(frozen=True, slots=True)
class Times:
    """How long each timer of the machines takes (docs/protocol.md, Times)."""

    add_s: float = 2.0
    quorum_s: float = 10.0
    hedge_s: float = 0.05
    retry_s: float = 1.0

    def of(self, timer: Timer) -> float:
        """Seconds of one timer."""
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
    """The world of one process's machines."""

    bookies: BookiesPort
    metadata: MetadataPort
    placement: PlacementPort
    clock: ClockPort
    tasks: TasksPort
    times: Times = field(default_factory=Times)
    read_bytes_max: int = 4 << 20
    """How much one read asks of a bookie at most: a few runs, so that a reader stays fluent."""
