"""What a log manager needs of the rest of the gateway, and the values that it speaks in."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from quorumlog.protocol.batch import Record
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.log.messages import Append, LogAppended, Publish
from quorumlog.protocol.metadata import LedgerMetadata, Writer
from quorumlog.protocol.transaction import Sealed, Transaction
from quorumlog.wire.bodies import BookieList
from services.gateway.interface import Appended, Confirmation, LedgerOptions, ReadResult

__all__ = ["Append", "LogAppended", "Publish"]
"""What clients ask of a log is the machines' language; what reads give is this module's."""


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One record as a reader gets it. `timestamp_ms` is its own, else that of its append."""

    offset: int
    timestamp_ms: int
    record: Record
    ledger_id: int
    entry_id: int


@dataclass(frozen=True, slots=True)
class LogRead:
    """Records from the offset asked for, in order, maybe none. `next` is where to go on; `closed`
    says that the log is, and that `next` is its end.
    """

    records: tuple[LogRecord, ...]
    next: int
    first_offset: int
    closed: bool


@dataclass(frozen=True, slots=True)
class LogBatch:
    """Records of one entry as they are stored: `count` of them from `skip` on.

    `first_offset` is that of the entry's first record, skipped or not.
    """

    first_offset: int
    ledger_id: int
    entry_id: int
    data: bytes
    skip: int
    count: int


@dataclass(frozen=True, slots=True)
class LogBatches:
    """What `LogRead` is, of records that nobody has decoded."""

    batches: tuple[LogBatch, ...]
    next: int
    first_offset: int
    closed: bool


class LogChanged(Exception):
    """A compare-and-swap from another version than the row has."""

    def __init__(self, current: LogMetadata) -> None:
        super().__init__(f"log {current.name} is at version {current.version}")
        self.current = current


class PeerLost(Exception):
    """Another gateway can't be reached as the process that was asked for."""

    def __init__(self, detail: str, *, sent: bool) -> None:
        """`sent`: it may have got the request, so what became of it is unknown."""
        super().__init__(detail)
        self.sent = sent


class LogStore(Protocol):
    """The logs' rows. All raise MetadataUnavailable."""

    def database_ms(self) -> int | None:
        """The database's clock, which this is never ahead of; None until a row was read."""
        ...

    async def get(self, name: str) -> LogMetadata:
        """The row as it is now. Raises NoSuchLog."""
        ...

    async def create(self, log: LogMetadata) -> tuple[LogMetadata, bool]:
        """The row of this name, and whether it was made just now."""
        ...

    async def cas(self, log: LogMetadata) -> LogMetadata:
        """The row with its new version. Raises LogChanged, NoSuchLog."""
        ...

    async def delete(self, log: LogMetadata) -> None:
        """Delete the row of this version. Raises LogChanged, NoSuchLog."""
        ...

    async def list(
        self, *, after: str | None, limit: int
    ) -> tuple[Sequence[LogMetadata], str | None]:
        """One page by name, and the `after` of the next one."""
        ...

    async def heads(self, names: Sequence[str]) -> Mapping[str, LogHead]:
        """Who may write to each of these logs; those that are lost, or never were, are left out."""
        ...

    async def orphans(self, *, older_than_s: float, after: int | None) -> Sequence[int]:
        """Some ledgers above an id that were made for a log and that no log names (rule 22)."""
        ...

    async def delete_unnamed(self, ledger_id: int) -> None:
        """Delete a ledger that was made for a log, if no log names it in that very transaction.

        Raises OwnedByLog, NoSuchLedger.
        """
        ...

    async def transaction(self, transaction_id: str) -> Transaction:
        """One transaction as it is now. Raises NoSuchTransaction."""
        ...

    async def commit(
        self, transaction_id: str, ledgers: tuple[Sealed, ...], log: LogMetadata | None
    ) -> tuple[Transaction, LogMetadata | None]:
        """End a transaction with these ledgers published, by compare-and-swap of the log's row.

        Gives the transaction, and the row as it is then; None where this call did not change it:
        the transaction was ended before, or `log` is None. Raises LogChanged, and why it is
        refused.
        """
        ...


class LogEngine(Protocol):
    """The part of the gateway's engine that logs stand on."""

    @property
    def writer(self) -> Writer:
        """This process, as rows name it."""
        ...

    async def create(self, options: LedgerOptions) -> LedgerMetadata:
        """Create a ledger whose only writer is this process."""
        ...

    async def get(self, ledger_id: int) -> LedgerMetadata:
        """The row as it is now. Raises NoSuchLedger."""
        ...

    def submit(
        self, ledger_id: int, payloads: Sequence[bytes], *, expect: int | None = None
    ) -> asyncio.Future[Appended]:
        """Begin an append to a ledger of this process; ids follow the order of the calls.

        Raises at once, with nothing done, where it can't begin.
        """
        ...

    async def read(
        self,
        ledger_id: int,
        first: int,
        *,
        last: int | None = None,
        limit: int = 100,
        max_bytes: int = 1 << 20,
    ) -> ReadResult:
        """Confirmed entries."""
        ...

    async def last_add_confirmed(
        self, ledger_id: int, *, after: int | None = None, wait_s: float = 0.0
    ) -> Confirmation:
        """The LAC, and who said so."""
        ...

    async def close(self, ledger_id: int) -> LedgerMetadata:
        """The writer's close."""
        ...

    async def recover(self, ledger_id: int) -> LedgerMetadata:
        """The reader's close. On a closed ledger: its row."""
        ...

    async def bookies(self) -> BookieList:
        """Every registered bookie with its state."""
        ...

    async def gateways(self) -> Sequence[Writer]:
        """The gateways that live as far as is known. Raises MetadataUnavailable."""
        ...


class Peers(Protocol):
    """The other gateways."""

    async def append(self, owner: Writer, name: str, call: Append) -> LogAppended:
        """Let the owner append. Raises PeerLost, and what the owner raised.

        WriterLost with outcome `not-done` says that it is not the owner.
        """
        ...

    async def roll(self, owner: Writer, name: str) -> None:
        """Let the owner roll. Raises PeerLost, and what the owner raised."""
        ...

    async def publish(self, owner: Writer, name: str, call: Publish) -> Transaction:
        """Let the owner publish a transaction. Raises PeerLost, and what the owner raised."""
        ...

    async def ends(self, owner: Writer, heads: Sequence[LogHead]) -> Mapping[str, int]:
        """Where those of these logs end that a gateway owns. Raises PeerLost."""
        ...

    async def is_alive(self, owner: Writer) -> bool:
        """Whether that very process answers at its URL (rule 11)."""
        ...
