"""The settings of autorecovery; nothing else reads the environment."""

from pydantic import Field

from quorumlog.net.service import ServiceSettings


class Config(ServiceSettings):
    """The settings of autorecovery."""

    metadata_urls: tuple[str, ...] = Field(min_length=1)
    """metadata services"""
    lost_bookie_delay_s: float = Field(default=60.0, ge=0)
    """how long a bookie may be away before its ledgers are copied"""
    abandoned_s: float = Field(default=30.0, ge=0)
    """how long a writer may be proven gone before its ledger is recovered"""
    silent_s: float = Field(default=300.0, ge=0)
    """how long a writer may neither answer nor refuse before its ledger is recovered"""
    in_recovery_s: float = Field(default=30.0, ge=0)
    """how long a recovery may stall before another one is run"""
    audit_s: float = Field(default=5.0, gt=0)
    """interval of checks of liveness and open ledgers"""
    full_audit_s: float = Field(default=3600.0, gt=0)
    """until a lost bookie's places are queued again"""
    check_s: float = Field(default=86_400.0, gt=0)
    """interval of comparing all copies by digests"""
    damage_s: float = Field(default=10.0, gt=0)
    """interval of checking damage reported by bookies"""
    lease_s: float = Field(default=10.0, gt=1)
    """time without renewal after which another process may audit"""
    workers: int = Field(default=2, ge=1, le=64)
    """concurrent repairs of this process"""
    copy_bytes_per_s: int = Field(default=0, ge=0)
    """copy rate limit of all processes together; 0: no limit"""
    recoveries: int = Field(default=4, ge=1, le=64)
    """concurrent recoveries (rule 21)"""
    lost_share_max: float = Field(default=0.5, gt=0, le=1)
    """if a larger share of bookies seems lost, liveness is not believed: nothing is copied"""
