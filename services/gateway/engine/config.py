"""The configuration of one gateway's engine."""

from dataclasses import dataclass, field

from quorumlog.net.directory import QuarantineRule
from quorumlog.net.identity import ANONYMOUS, Credentials
from quorumlog.net.ports import MachineTimes
from quorumlog.protocol.clock import CLOCK_DIFFERENCE_S


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Fixed at construction; `services/gateway/config.py` reads the settings."""

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
