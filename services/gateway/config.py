"""The gateway's settings."""

from pydantic import Field

from quorumlog.net.service import ServiceSettings
from services.gateway.edge.limits import Limits
from services.gateway.logs.sweep import ORPHAN_AGE_S


class GatewaySettings(ServiceSettings, Limits):
    """What a gateway can be told; each field is the environment variable of the same name."""

    metadata_urls: tuple[str, ...] = Field(
        min_length=1, description="Metadata services; one that does not answer is passed over."
    )
    cors_origins: tuple[str, ...] = Field(
        default=(), description="Origins whose pages may call; `*` for all. Off by default."
    )
    quorum_timeout_s: float = Field(
        default=10.0, gt=0, description="An append without its ack quorum fails as unknown then."
    )
    silent_bookie_s: float = Field(
        default=2.0, gt=0, description="A bookie that is silent so long loses its place."
    )
    delay_ensemble_change: bool = Field(
        default=False, description="Places change only where an ack quorum is out of reach."
    )
    ledger_in_flight_bytes_max: int = Field(
        default=128 << 20, gt=0, description="Of a ledger's unacknowledged appends; more is a 429."
    )
    gateway_in_flight_bytes_max: int = Field(
        default=512 << 20, gt=0, description="The same of all ledgers together."
    )
    zones_min: int = Field(
        default=1, ge=1, le=255, description="Zones over which the copies of an entry are to lie."
    )
    enforce_zones: bool = Field(
        default=False, description="Refuse a ledger where too few zones live; else it is told."
    )
    quarantine_failures: int = Field(
        default=10, ge=0, description="Failures of a live bookie, after which others are chosen."
    )
    quarantine_window_s: float = Field(default=60.0, gt=0, description="Within so many seconds.")
    quarantine_s: float = Field(default=300.0, gt=0, description="For how long.")
    orphan_age_s: float = Field(
        default=ORPHAN_AGE_S,
        ge=30,
        description="Ledgers of logs that none names go then: longer than a roll or a takeover.",
    )
