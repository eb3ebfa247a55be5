"""The values that the engine takes and returns.

The edge parses requests and knows nothing of quorums; the engine knows nothing of HTTP and raises
classes of `quorumlog.errors`. Both import these values from here.
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
"""The source of an LAC; `metadata`: the ledger is CLOSED."""

FRAMES: Final = "application/vnd.quorumlog.frames"
"""The media type of payloads, each after its length."""

_DEFAULT: Final = Quorum.of()

DEGRADED = "degraded"
"""A tag in `LedgerMetadata.extra`; "true": the ledger was created with absent members (rule 29)."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration of one gateway's engine, fixed at construction; `services/gateway/config.py` reads the settings."""

    url: str
    """The URL at which clients reach this process."""
    metadata_urls: tuple[str, ...]
    internal_url: str = ""
    """The URL at which other processes of the cluster reach this one; empty: the one of clients."""
    credentials: Credentials = ANONYMOUS
    """What this process shows to other services."""
    ledger_in_flight_bytes_max: int = 128 << 20
    """Two of the largest bodies (docs/guides/http.md, Bounds)."""
    gateway_in_flight_bytes_max: int = 512 << 20
    open_ledgers_max: int = 200_000
    peer_open_ledgers_max: int = 25_000
    metadata_s: float = 3.0
    """After this time a caller gets metadata-unavailable."""
    delays_ensemble_change: bool = False
    zones_min: int = 1
    enforces_zones: bool = False
    quarantine: QuarantineRule = field(default_factory=QuarantineRule)
    times: MachineTimes = field(default_factory=MachineTimes)
    clock_difference_s: float = CLOCK_DIFFERENCE_S
    """Beyond: the database's clock is doubted (rule 26c)."""


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
class LedgerView:
    """How far a ledger is confirmed, with metadata that is at least as new: entries up to the LAC are read from the members
    that it names.
    """

    row: LedgerMetadata
    last_add_confirmed: int
    closed: bool
    lac_source: LacSource
