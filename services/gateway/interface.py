"""The values that pass between the engine and its callers.

The edge parses HTTP requests and is independent of quorums. The engine is independent of HTTP and
raises `quorumlog.errors`.
"""

from dataclasses import dataclass, field
from typing import Final, Literal

from quorumlog.net.directory import QuarantineRule
from quorumlog.net.identity import ANONYMOUS, Credentials
from quorumlog.net.ports import MachineTimes
from quorumlog.protocol.clock import CLOCK_DIFFERENCE_S
from quorumlog.protocol.metadata import DigestKind, LedgerMetadata
from quorumlog.protocol.once import Once
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.record import Run

LacSource = Literal["writer", "bookies", "metadata"]
"""The source of an LAC. `metadata` means that the ledger is CLOSED, and its metadata has the end."""

FRAMES: Final = "application/vnd.quorumlog.frames"
"""The media type of a sequence of payloads, each preceded by its length (32 bits, big-endian)."""

_DEFAULT: Final = Quorum.of()

DEGRADED = "degraded"
"""A tag in `LedgerMetadata.extra`. The value "true" means that too few bookies or zones were live
when the ledger was created (rule 29)."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration of one gateway's engine, made from the settings in `config.py`."""

    url: str
    """The URL at which clients reach this process."""
    metadata_urls: tuple[str, ...]
    internal_url: str = ""
    """The URL at which other processes of the cluster reach this process. Default: `url`."""
    credentials: Credentials = ANONYMOUS
    """The credentials that this process presents to other services."""
    ledger_in_flight_bytes_max: int = 128 << 20
    """The default is twice the largest request body (docs/reference/http.md, Bounds)."""
    gateway_in_flight_bytes_max: int = 512 << 20
    open_ledgers_max: int = 200_000
    peer_open_ledgers_max: int = 25_000
    metadata_s: float = 3.0
    """A request to the metadata service that takes longer fails with metadata-unavailable."""
    delays_ensemble_change: bool = False
    zones_min: int = 1
    enforces_zones: bool = False
    quarantine: QuarantineRule = field(default_factory=QuarantineRule)
    times: MachineTimes = field(default_factory=MachineTimes)
    clock_difference_s: float = CLOCK_DIFFERENCE_S
    """If the database's clock differs by more, no data is deleted by age (rule 26c)."""


@dataclass(frozen=True, slots=True)
class LedgerOptions:
    """The options of a ledger to create. `password` is the client's password, unchanged."""

    quorum: Quorum = _DEFAULT
    digest: DigestKind = DigestKind.CRC32C
    password: str | None = None
    custom: tuple[tuple[str, str], ...] = ()
    ledger_id: int | None = None
    allow_degraded: bool = False
    once: Once | None = None
    tags: tuple[tuple[str, str], ...] = ()
    """Fields of `LedgerMetadata.extra`, such as the transaction, partition and attempt of a
    transaction's ledger (docs/guides/transactions.md)."""
    log: str | None = None
    """The log for which the ledger is created. Only this log may write to the ledger (rule 27)."""


@dataclass(frozen=True, slots=True)
class EntriesAppended:
    """The result of an append: entries `first` to `last` (inclusive) are acknowledged."""

    first: int
    last: int
    last_add_confirmed: int


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The result of a read: contiguous confirmed entries from the first requested entry on.

    There may be no entries. The next read begins at the entry `next`. If `closed`, the ledger is
    CLOSED and ends at `last_entry`, which may lie beyond this page.
    """

    runs: tuple[Run, ...]
    next: int
    last_add_confirmed: int
    closed: bool
    lac_source: LacSource
    last_entry: int | None = None


@dataclass(frozen=True, slots=True)
class LedgerView:
    """How far a ledger is confirmed. The metadata is at least as new as the LAC, and therefore
    names the members that have the entries up to the LAC.
    """

    row: LedgerMetadata
    last_add_confirmed: int
    closed: bool
    lac_source: LacSource
