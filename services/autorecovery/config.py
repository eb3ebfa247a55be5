"""The settings of autorecovery; nothing else reads the environment."""

from pydantic import Field

from quorumlog.net.service import ServiceSettings


class Config(ServiceSettings):
    """What autorecovery can be told."""

    metadata_urls: tuple[str, ...] = Field(min_length=1, description="metadata services")
    lost_bookie_delay_s: float = Field(
        60.0, ge=0, description="how long a bookie may be away before its ledgers are copied"
    )
    abandoned_s: float = Field(
        30.0,
        ge=0,
        description="how long a ledger's writer may be gone, by proof, before it is recovered",
    )
    silent_s: float = Field(
        300.0,
        ge=0,
        description="how long a ledger's writer may neither answer nor refuse before it is recovered",
    )
    in_recovery_s: float = Field(
        30.0, ge=0, description="how long a recovery may stand still before another one is run"
    )
    audit_s: float = Field(5.0, gt=0, description="between two looks at liveness and open ledgers")
    full_audit_s: float = Field(3600.0, gt=0, description="between two looks at every ledger")
    check_s: float = Field(
        86_400.0, gt=0, description="between two comparisons of all copies by their digests"
    )
    damage_s: float = Field(10.0, gt=0, description="between two looks at what bookies can't read")
    lease_s: float = Field(10.0, gt=1, description="an auditor that is silent so long is replaced")
    workers: int = Field(2, ge=1, le=64, description="repairs at a time")
    copy_bytes_per_s: int = Field(
        0, ge=0, description="of all processes together; 0: as fast as it goes"
    )
    recoveries: int = Field(4, ge=1, le=64, description="recoveries at a time (rule 21)")
    lost_share_max: float = Field(
        0.5,
        gt=0,
        le=1,
        description="if more of the bookies seem lost, liveness is not believed: nothing is copied",
    )
