"""The settings of autorecovery. Only this module reads the environment."""

from pydantic import Field

from quorumlog.net.service import ServiceSettings


class Config(ServiceSettings):
    """The settings of autorecovery; each field is the environment variable of the same name."""

    metadata_urls: tuple[str, ...] = Field(min_length=1)
    """URLs of the processes of the metadata service"""
    lost_bookie_delay_s: float = Field(default=60.0, ge=0)
    """how long a bookie may be absent before its entries are copied to other bookies"""
    abandoned_s: float = Field(default=30.0, ge=0)
    """how long probes must show that a writer is gone before its open ledger is recovered"""
    silent_s: float = Field(default=300.0, ge=0)
    """how long a writer that may still work must be silent before its ledger is recovered"""
    in_recovery_s: float = Field(default=30.0, ge=0)
    """how long a ledger may stay IN_RECOVERY before another recovery is started"""
    audit_s: float = Field(default=5.0, gt=0)
    """interval between checks for lost bookies and abandoned ledgers"""
    full_audit_s: float = Field(default=3600.0, gt=0)
    """interval at which the repairs for a lost bookie are queued again"""
    check_s: float = Field(default=86_400.0, gt=0)
    """interval between comparisons of all copies by their digests"""
    damage_s: float = Field(default=10.0, gt=0)
    """interval between checks of the damage that bookies report"""
    lease_s: float = Field(default=10.0, gt=1)
    """how long a lease lasts without renewal, before another process becomes the auditor"""
    workers: int = Field(default=2, ge=1, le=64)
    """maximum number of concurrent repairs in this process"""
    copy_bytes_per_s: int = Field(default=0, ge=0)
    """copy rate limit of all processes together; 0: no limit"""
    recoveries: int = Field(default=4, ge=1, le=64)
    """maximum number of concurrent recoveries of abandoned ledgers (rule 21)"""
    lost_share_max: float = Field(default=0.5, gt=0, le=1)
    """largest share of bookies that may count as lost; if more seem lost, nothing is copied"""
