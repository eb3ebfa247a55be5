"""The bookie's settings; nothing else reads the environment."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from quorumlog.net.service import ServiceSettings
from services.bookie.options import StoreOptions

_MIB = 1024 * 1024


class Config(ServiceSettings):
    """What a bookie can be told."""

    bookie_name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="who it is, for ever; its data belongs to this name, not to an address",
    )
    data_dir: Path = Field(description="where log and index lie; one bookie a directory")
    metadata_urls: tuple[str, ...] = Field(min_length=1, description="any of them is as good")
    cluster_id: str = Field("", description="refuse every other cluster; empty: the first one met")
    zone: str = Field("", max_length=100, description="placement spreads copies over zones")
    durability: Literal["fsync", "deferred"] = Field(
        "fsync", description="deferred: entries are acknowledged before they are synced (BP-46)"
    )
    auto_fix_cookies: bool = Field(
        False, description="where data is lost, come back as a new incarnation instead of refusing"
    )
    segment_bytes: int = Field(
        64 * _MIB, ge=64 * 1024, le=4096 * _MIB, description="a file of the log; freed as a whole"
    )
    checkpoint_bytes: int = Field(
        64 * _MIB, ge=64 * 1024, description="a start replays at most so much (below a second)"
    )
    warn_below_bytes: int = Field(
        1024 * _MIB, ge=0, description="with less room it warns, before it takes no adds"
    )
    read_only_below_bytes: int = Field(
        512 * _MIB, ge=0, description="with less room it takes no adds but recovery's and repair's"
    )
    reserve_bytes: int = Field(
        16 * _MIB, ge=0, description="kept for fences when the disk is full all the same"
    )
    data_bytes_max: int = Field(0, ge=0, description="most bytes of log; 0: what the disk has")
    pending_bytes_max: int = Field(
        64 * _MIB, ge=_MIB, description="queued for the disk; more is answered unknown"
    )
    read_bytes_max: int = Field(4 * _MIB, ge=64 * 1024, description="of one answer to a read")
    holder_s: float = Field(
        30.0, ge=0, description="how long a start waits for another process of its name to end"
    )
    log_end_s: float = Field(
        10.0, gt=0, description="between words to the metadata service of where the log ends"
    )
    heartbeat_s: float = Field(1.0, gt=0, le=60, description="a fifth of its time to live")

    compact_bytes_per_s: int = Field(
        32 * _MIB,
        ge=1024,
        description="what is moved out of nearly empty segments; a tenth of a disk",
    )
    scrub_bytes_per_s: int = Field(
        8 * _MIB, ge=0, description="read in the background to find what rotted; 0: never"
    )
    scrub_s: float = Field(
        7 * 86400.0, gt=0, description="between the beginnings of two passes over all of the log"
    )
    limbo_s: float = Field(
        2.0, gt=0, description="between looks at ledgers in limbo; at least ten times their length"
    )
    collect_s: float = Field(
        60.0, gt=0, description="between looks at what may be given up; a list and few reads"
    )
    collect_grace_s: float = Field(
        300.0, ge=0, description="between the first and the second proof that nobody needs it"
    )

    @property
    def store_options(self) -> StoreOptions:
        """What the storage needs to know of it."""
        return StoreOptions(
            segment_bytes=self.segment_bytes,
            checkpoint_bytes=self.checkpoint_bytes,
            warn_below_bytes=self.warn_below_bytes,
            read_only_below_bytes=self.read_only_below_bytes,
            reserve_bytes=self.reserve_bytes,
            data_bytes_max=self.data_bytes_max,
            pending_bytes_max=self.pending_bytes_max,
            read_bytes_max=self.read_bytes_max,
            is_deferred=self.durability == "deferred",
        )
