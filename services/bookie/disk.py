"""Free space, and what follows from it: a warning, read-only mode, or a full disk."""

import logging
import os
from pathlib import Path

from services.bookie.config import StoreOptions
from services.bookie.writer import has_room, keep_reserve

log = logging.getLogger(__name__)


class Disk:
    """The free space of one data directory.

    Invariant: a bookie leaves read-only mode, and the low-space warning, only at a quarter above
    the threshold, so that it does not flap.
    """

    def __init__(self, directory: Path, options: StoreOptions) -> None:
        """Releases the reserve if a start lacks room for a segment and the index's files."""
        self._directory = directory
        self.options = options
        self.reserve = directory / "reserve"
        self.is_low = False
        """Adds are still taken, but an operator should make room."""
        self.is_read_only = False
        self.is_full = False
        """Recovery and repair have no room either."""
        if not has_room(directory, options.reserve_bytes):
            self.release_reserve()

    def release_reserve(self) -> None:
        """Free the blocks that were set aside."""
        self.reserve.unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """Free space for this bookie."""
        stat = os.statvfs(self._directory)
        free = stat.f_bavail * stat.f_frsize
        if self.options.data_bytes_max:
            segments = self._directory / "log"
            used = sum(path.stat().st_size for path in segments.iterdir())
            free = min(free, self.options.data_bytes_max - used)
        return max(0, free)

    def check(self, *, is_stuck: bool) -> None:
        """Enter read-only mode below the threshold, and leave it a quarter above. Recovery and
        repair stop only below a quarter of the threshold. `is_stuck`: accepted records wait for
        room.
        """
        free = self.free_bytes()
        self._warn(free)
        threshold = self.options.read_only_below_bytes
        has_reserve = keep_reserve(self.reserve, self.options.reserve_bytes)
        was = self.is_read_only
        if free < threshold or not has_reserve or is_stuck:
            self.is_read_only = True
        elif free >= threshold + threshold // 4:
            self.is_read_only = False
        self.is_full = free < threshold // 4
        if was != self.is_read_only:
            log.warning("read-only" if self.is_read_only else "writable", extra={"free": free})

    def _warn(self, free: int) -> None:
        threshold = self.options.warn_below_bytes
        if not self.is_low and free < threshold:
            self.is_low = True
            read_only_below = self.options.read_only_below_bytes
            log.warning("disk-low", extra={"free": free, "read_only_below": read_only_below})
        elif self.is_low and free >= threshold + threshold // 4:
            self.is_low = False
            log.info("disk-low-no-more", extra={"free": free})
