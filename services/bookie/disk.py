"""How much room the disk has, and what follows: a warning, read-only, or full."""

import logging
import os
import shutil
from pathlib import Path

from services.bookie.options import StoreOptions
from services.bookie.writer import keep_reserve

log = logging.getLogger(__name__)


class Disk:
    """The room of one data directory.

    Invariant: from read-only to writable it goes only a quarter above the threshold, so that it
    does not go to and fro; from low to not low as well.
    """

    def __init__(self, directory: Path, options: StoreOptions) -> None:
        """Gives the reserve up where a start would not have room: it takes a new segment, and what
        the index writes of itself.
        """
        self._directory = directory
        self.options = options
        self.reserve = directory / "reserve"
        self.is_low = False
        """There is still room, and somebody should see to it that it stays so."""
        self.is_read_only = False
        self.is_full = False
        """There is no room for recovery and repair either."""
        if shutil.disk_usage(directory).free < options.reserve_bytes:
            self.give_reserve_up()

    def give_reserve_up(self) -> None:
        """Somebody needs what was set aside."""
        self.reserve.unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """Room that is left for this bookie."""
        stat = os.statvfs(self._directory)
        free = stat.f_bavail * stat.f_frsize
        if self.options.data_bytes_max:
            segments = self._directory / "log"
            used = sum(path.stat().st_size for path in segments.iterdir())
            free = min(free, self.options.data_bytes_max - used)
        return max(0, free)

    def check(self, *, is_stuck: bool) -> None:
        """Become read-only below the threshold, and writable again a quarter above it. Recovery
        and repair go on until a quarter of the threshold is left. `is_stuck`: what was accepted
        waits for room.
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
