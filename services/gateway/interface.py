"""The engine's interface for the HTTP edge.

The edge parses requests and knows nothing of quorums; the engine knows nothing of HTTP and raises
classes of `quorumlog.errors`. Both import these values from here.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from quorumlog.errors import QuorumLogError
from quorumlog.protocol.metadata import DigestKind, LedgerMetadata, State
from quorumlog.protocol.once import Once
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.record import Run
from quorumlog.wire.bodies import BookieList

LacSource = Literal["writer", "bookies", "metadata"]
"""The source of an LAC; `metadata`: the ledger is CLOSED."""

FRAMES: Final = "application/vnd.quorumlog.frames"
"""The media type of payloads, each after its length."""

_DEFAULT: Final = Quorum.of()

DEGRADED = "degraded"
"""A tag in `LedgerMetadata.extra`; "true": the ledger was created with absent members (rule 29)."""


@dataclass(frozen=True, slots=True)
class LedgerOptions:
    """A ledger to create. The password is as the client sent it."""

    quorum: Quorum = _DEFAULT
    digest: DigestKind = DigestKind.CRC32C
    password: str | None = None
    custom: tuple[tuple[str, str], ...] = ()
    ledger_id: int | None = None
    allow_degraded: bool = False
    once: Once | None = None
    tags: tuple[tuple[str, str], ...] = ()
    """Transaction, partition and attempt of a transaction's ledger (docs/guides/transactions.md)."""
    log: str | None = None
    """The log for which the ledger is created: only that log may write to it (rule 27)."""


@dataclass(frozen=True, slots=True)
class LedgerQuery:
    """The conditions of a list, of which all must hold. Ids ascend from above `after`."""

    state: State | None = None
    bookie: str | None = None
    log: str | None = None
    custom: tuple[tuple[str, str], ...] = ()
    limit: int = 100
    after: int | None = None
    shown: tuple[str, ...] | None = None
    """The logs and namespaces whose ledgers the page has (`wire/bodies.py`, SHOWN); None: all."""


@dataclass(frozen=True, slots=True)
class LedgerPage:
    """One page; `next` is the `after` of the next page, None at the end."""

    ledgers: tuple[LedgerMetadata, ...]
    next: int | None


@dataclass(frozen=True, slots=True)
class EntriesAppended:
    """Entries first..last are acknowledged."""

    first: int
    last: int
    last_add_confirmed: int


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Confirmed entries, contiguous from the first requested one, possibly none.

    `next` is where to go on. `closed`: the ledger is CLOSED, with `last_entry` as its end, which this
    page need not reach.
    """

    runs: tuple[Run, ...]
    next: int
    last_add_confirmed: int
    closed: bool
    lac_source: LacSource
    last_entry: int | None = None


@dataclass(frozen=True, slots=True)
class EntryResult:
    """One confirmed entry."""

    payload: bytes
    last_add_confirmed: int
    closed: bool


@dataclass(frozen=True, slots=True)
class LedgerView:
    """How far a ledger is confirmed, with metadata that is at least as new: entries up to the LAC are read from the members
    that it names.
    """

    row: LedgerMetadata
    last_add_confirmed: int
    closed: bool
    lac_source: LacSource


class EngineInterface(Protocol):
    """The client protocol for any ledger, whichever gateway is its writer."""

    async def create(self, options: LedgerOptions) -> LedgerMetadata:
        """Create a ledger whose only writer is this process."""
        ...

    async def get(self, ledger_id: int) -> LedgerMetadata:
        """The row as it is now. Raises: NoSuchLedger."""
        ...

    async def row(self, ledger_id: int) -> LedgerMetadata:
        """The row, possibly some moments old. Raises: NoSuchLedger."""
        ...

    def writes(self, ledger_id: int) -> bool:
        """Whether this process has the ledger open for appends."""
        ...

    async def list(self, query: LedgerQuery) -> LedgerPage:
        """One page of rows."""
        ...

    async def append(
        self,
        ledger_id: int,
        payloads: Sequence[bytes],
        *,
        password: str | None = None,
        expect: int | None = None,
    ) -> EntriesAppended:
        """Append payloads as contiguous entries; returns when they are acknowledged."""
        ...

    async def forward(
        self,
        ledger_id: int,
        media: str,
        data: bytes,
        *,
        password: str | None = None,
        expect: int | None = None,
    ) -> bytes:
        """Pass a client's append, whose body is `data`, to the ledger's writer, another gateway: the JSON of its response."""
        ...

    def at_hand(
        self, ledger_id: int
    ) -> Callable[[Sequence[bytes]], asyncio.Future[EntriesAppended]] | None:
        """How to begin an append at once, as `append` would, to a ledger that this process writes and that neither a log,
        a transaction nor a password keeps from whoever asks; None for any other. What it gives raises at once, with nothing
        done, if the append cannot begin.
        """
        ...

    async def transaction_of(self, ledger_id: int) -> str | None:
        """The transaction of a ledger, if any; None for an unknown ledger too."""
        ...

    async def read(
        self,
        ledger_id: int,
        first: int,
        *,
        last: int | None = None,
        limit: int = 100,
        max_bytes: int = 1 << 20,
        password: str | None = None,
    ) -> ReadResult:
        """Confirmed entries from `first` to `last` (inclusive), at most `limit` and about
        `max_bytes` of payload, but at least one. Includes every entry acknowledged before the call.
        Beyond the end: no entries, and `next` is `first`. Stops before lost entries; a read from
        there raises EntryLost, whose `next` is where to go on.
        """
        ...

    async def entry(
        self, ledger_id: int, entry_id: int, *, password: str | None = None
    ) -> EntryResult:
        """One entry. Raises: NoSuchEntry, NotYetConfirmed, EntryLost, EntryUnavailable."""
        ...

    async def last_add_confirmed(
        self,
        ledger_id: int,
        *,
        after: int | None = None,
        wait_s: float = 0.0,
        password: str | None = None,
    ) -> LedgerView:
        """The LAC; with `after`, waits up to `wait_s` for a higher one or the close."""
        ...

    async def close(self, ledger_id: int, *, password: str | None = None) -> LedgerMetadata:
        """The writer's close."""
        ...

    async def recover(
        self, ledger_id: int, *, password: str | None = None, declare_lost: Sequence[str] = ()
    ) -> LedgerMetadata:
        """The reader's close: fence, recover, close. On a closed ledger: its row."""
        ...

    async def change_password(
        self,
        ledger_id: int,
        new: str,
        *,
        password: str | None = None,
        once: Once | None = None,
    ) -> LedgerMetadata:
        """Set another password. Raises: WrongPassword."""
        ...

    async def accept_loss(
        self,
        ledger_id: int,
        first: int,
        last: int,
        *,
        password: str | None = None,
        declare_lost: Sequence[str] = (),
    ) -> LedgerMetadata:
        """Declare entries of a CLOSED ledger lost that no bookie can serve. Raises: LossNotProven."""
        ...

    async def delete(self, ledger_id: int, *, password: str | None = None) -> None:
        """Delete a ledger; an open one is recovered first."""
        ...

    async def bookies(self) -> BookieList:
        """Every registered bookie with its state."""
        ...

    async def cluster(self) -> dict[str, Any]:
        """Every service with its state, and under-replicated ledgers, as JSON."""
        ...

    async def ready(self) -> QuorumLogError | None:
        """None if a default ledger could be created now, else the error of that creation."""
        ...

    async def drain(self) -> None:
        """Refuse new work, settle what is in flight and close the ledgers of this writer."""
        ...

    def waits_for(self) -> Sequence[str]:
        """What a drain waits for, for people."""
        ...
