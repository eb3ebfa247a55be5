"""The storage's settings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The storage's settings. config.py gives the reasons for the defaults."""

    segment_bytes: int = 64 * 1024 * 1024
    checkpoint_bytes: int = 64 * 1024 * 1024
    warn_below_bytes: int = 1024 * 1024 * 1024
    read_only_below_bytes: int = 512 * 1024 * 1024
    reserve_bytes: int = 16 * 1024 * 1024
    data_bytes_max: int = 0
    pending_bytes_max: int = 64 * 1024 * 1024
    read_bytes_max: int = 4 * 1024 * 1024
    is_deferred: bool = False
