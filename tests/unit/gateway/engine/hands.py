"""Parts of an engine without sockets or other processes: whoever they ask is a test's own hand."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

from quorumlog.net.ports import LacDone, Ports
from quorumlog.protocol.messages import CasStatus, Status
from quorumlog.protocol.metadata import DigestKind, Fragment, LedgerMetadata, State, Writer
from quorumlog.protocol.quorum import Quorum
from services.gateway.engine.ends import Ends
from services.gateway.engine.handle import InFlightBytes, WriteHandle
from services.gateway.engine.keys import Gatekeeper
from services.gateway.engine.ledger_reads import LedgerReads
from services.gateway.engine.rows import LedgerRows
from services.gateway.engine.tails import RecentRuns

ME = Writer("me", "http://me")
MEMBERS = ("b1@1", "b2@1", "b3@1")
ROW = LedgerMetadata(
    7, Quorum(3, 3, 2), DigestKind.CRC32C, (Fragment(0, MEMBERS),), version=2, writer=ME
)


def closed(last_entry: int, version: int = 3) -> LedgerMetadata:
    """The same ledger after its end."""
    return replace(
        ROW, state=State.CLOSED, last_entry=last_entry, length=last_entry + 1, version=version
    )


@dataclass
class Reported:
    """A `HandleOwner` that notes what it is told."""

    failed: list[str | None] = field(default_factory=list)
    closed: list[LedgerMetadata] = field(default_factory=list)

    def handle_failed(self, handle: WriteHandle) -> None:
        self.failed.append(handle.failure_code)

    def handle_closed(self, _handle: WriteHandle, row: LedgerMetadata) -> None:
        self.closed.append(row)

    def recovery_wanted(self, _handle: WriteHandle) -> None: ...


class Hand:
    """Bookies that answer when a test lets them, and metadata that settles nothing."""

    def __init__(self) -> None:
        self.adds: list[Callable[[Status], None]] = []
        self.copies: list[Callable[[Status], None]] = []
        self.tasks: set[asyncio.Future[None]] = set()

    def add(self, *args: Any, **_flags: Any) -> None:
        self.adds.append(args[-1])

    def keep_row(self, *args: Any) -> None:
        self.copies.append(args[-1])

    def keep_all(self) -> None:
        """Every copy that was sent is kept."""
        while self.copies:
            self.copies.pop()(Status.OK)

    def read(self, *args: Any, **_how: Any) -> None:
        """Every read of entries ends without a word."""
        asyncio.get_running_loop().call_soon(args[-1], Status.UNKNOWN, None, ())

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    @property
    def ports(self) -> Ports:
        clock = SimpleNamespace(after=asyncio.get_running_loop().call_later)
        placement = SimpleNamespace(candidates=lambda *_args: (), is_down=lambda _member: False)
        return Ports(
            cast(Any, self),
            cast(Any, SimpleNamespace(cas=_never, read=_unknown)),
            cast(Any, placement),
            cast(Any, clock),
            cast(Any, self),
        )


async def _never(*_args: Any, **_options: Any) -> Any:
    await asyncio.Event().wait()


async def _unknown(_ledger_id: int) -> tuple[CasStatus, None]:
    return CasStatus.UNKNOWN, None


def handle_of(hand: Hand, reported: Reported) -> WriteHandle:
    """The handle of ROW's writer."""
    return WriteHandle(
        ROW,
        hand.ports,
        reported,
        lacs=cast(Any, SimpleNamespace(write_lac=lambda *_args: None)),
        ledger_limit_bytes=1 << 20,
        gateway_in_flight=InFlightBytes(1 << 20),
        recent=RecentRuns(),
    )


@dataclass
class Primary:
    """The metadata service, of one row."""

    row: LedgerMetadata
    reads: int = 0

    async def get(self, _ledger_id: int) -> LedgerMetadata:
        self.reads += 1
        return self.row


class Failing(Primary):
    """A metadata service that answers one error."""

    def __init__(self, error: Exception) -> None:
        super().__init__(closed(0))
        self._error = error

    async def get(self, _ledger_id: int) -> LedgerMetadata:
        raise self._error


def rows_of(primary: Primary) -> LedgerRows:
    return LedgerRows(cast(Any, primary), lambda _ledger: None, lambda _ledger: None)


def reading_of(
    rows: LedgerRows, handles: Mapping[int, Any], hand: Hand | None = None
) -> LedgerReads:
    """Reads by a process that asks nobody else."""
    ports = (hand or Hand()).ports
    here = SimpleNamespace(
        writer=ME,
        by_ledger=handles,
        rows=rows,
        ends=Ends(rows, ports),
        ports=ports,
        gatekeeper=Gatekeeper(),
    )
    return LedgerReads(cast(Any, here), cast(Any, None))


class Lacs:
    """Bookies of which each says one LAC, in the order given; None is silence, for ever."""

    def __init__(self, *lacs: int | None) -> None:
        self._lacs = dict(zip(MEMBERS, lacs, strict=True))

    def read_lac(self, member: str, _ledger_id: int, done: LacDone) -> None:
        lac = self._lacs[member]
        if lac is None:
            done(Status.UNKNOWN, -1)
        else:
            done(Status.OK, lac)
