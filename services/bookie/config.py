"""The bookie's settings. No other module reads the environment."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from pydantic import Field

from quorumlog.net.service import ServiceSettings


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The settings of the storage; `Config` describes each."""

    segment_bytes: int = 64 * 1024 * 1024
    checkpoint_bytes: int = 64 * 1024 * 1024
    warn_below_bytes: int = 1024 * 1024 * 1024
    read_only_below_bytes: int = 512 * 1024 * 1024
    reserve_bytes: int = 16 * 1024 * 1024
    data_bytes_max: int = 0
    pending_bytes_max: int = 64 * 1024 * 1024
    read_bytes_max: int = 4 * 1024 * 1024
    is_deferred: bool = False


_MIB = 1024 * 1024


class Config(ServiceSettings):
    """The settings of a bookie."""

    bookie_name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """the bookie's name, which never changes; data belongs to the name, not to an address"""
    data_dir: Path
    """directory of the log and the index; each bookie needs its own directory"""
    metadata_urls: tuple[str, ...] = Field(min_length=1)
    """URLs of the metadata service's processes; one is enough"""
    cluster_id: str = ""
    """id of the only cluster that the bookie may join; empty: the cluster at METADATA_URLS"""
    zone: str = Field(default="", max_length=100)
    """failure domain, such as a rack; placement spreads copies over zones"""
    durability: Literal["fsync", "deferred"] = "fsync"
    """deferred: entries are acknowledged before they are synced (BP-46)"""
    auto_fix_cookies: bool = False
    """1: after a loss of data, start as a new incarnation instead of refusing to start"""
    segment_bytes: int = Field(default=64 * _MIB, ge=64 * 1024, le=4096 * _MIB)
    """size of a log file; disk space is freed one whole file at a time"""
    checkpoint_bytes: int = Field(default=64 * _MIB, ge=64 * 1024)
    """log bytes between checkpoints; a start replays about as much, in less than a second"""
    warn_below_bytes: int = Field(default=1024 * _MIB, ge=0)
    """free space below which the bookie warns"""
    read_only_below_bytes: int = Field(default=512 * _MIB, ge=0)
    """free space below which the bookie accepts only adds of recovery and repair"""
    reserve_bytes: int = Field(default=16 * _MIB, ge=0)
    """disk space reserved for fences on a full disk"""
    data_bytes_max: int = Field(default=0, ge=0)
    """maximum size of the log; 0: limited only by the disk"""
    pending_bytes_max: int = Field(default=64 * _MIB, ge=_MIB)
    """maximum size of adds queued for the disk; further adds are answered `unknown`"""
    read_bytes_max: int = Field(default=4 * _MIB, ge=64 * 1024)
    """size limit of one read's answer"""
    holder_s: float = Field(default=30.0, ge=0)
    """how long a starting bookie waits for another process of this name to end"""
    log_end_s: float = Field(default=10.0, gt=0)
    """interval at which the bookie reports its log's end to the metadata service"""
    heartbeat_s: float = Field(default=1.0, gt=0, le=60)
    """interval of heartbeats; a bookie counts as live for five intervals after its last one"""

    compact_bytes_per_s: int = Field(default=32 * _MIB, ge=1024)
    """rate of moving entries out of nearly empty segments; default: a tenth of a disk's rate"""
    scrub_bytes_per_s: int = Field(default=8 * _MIB, ge=0)
    """rate of scrubbing, which finds bit rot; 0: never"""
    scrub_s: float = Field(default=7 * 86400.0, gt=0)
    """minimum time from the start of one scrub pass to the start of the next"""
    limbo_s: float = Field(default=2.0, gt=0)
    """minimum pause between limbo rounds; a pause is at least ten times as long as its round"""
    collect_s: float = Field(default=60.0, gt=0)
    """interval of garbage collection scans; each takes one listing and few reads of metadata"""
    collect_grace_s: float = Field(default=300.0, ge=0)
    """time between the two checks that are required before a ledger is dropped"""

    @property
    def store_options(self) -> StoreOptions:
        """The settings of the storage."""
        same = (each.name for each in fields(StoreOptions) if each.name != "is_deferred")
        given = {name: getattr(self, name) for name in same}
        return StoreOptions(**given, is_deferred=self.durability == "deferred")
