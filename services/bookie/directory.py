"""Manages a data directory: its format, its lock, opening the index, and the free space, on which
the low-space warning and read-only mode depend.
"""

import contextlib
import fcntl
import logging
import os
import shutil
from pathlib import Path
from typing import Final

from services.bookie.config import StoreOptions
from services.bookie.index import Index
from services.bookie.segments import NO_ROOM
from services.bookie.writer import has_room, keep_reserve

log = logging.getLogger(__name__)

SUSPECT: Final = "index.suspect"
"""If this file exists, the next start rebuilds the index."""


FORMAT: Final = 1
"""The format of a directory's log and cookie; 1 without a file `format`. Before a release writes
data that its predecessor can't read, it durably stores a higher number (docs/guides/upgrades.md).
"""


class DirectoryTooNew(Exception):
    """A later release wrote the data directory in a format that this release does not read."""


class DirectoryInUse(Exception):
    """Another process owns the data directory."""


def check_format(directory: Path) -> None:
    """Check that this release reads the directory's format. Raises: DirectoryTooNew."""
    file = directory / "format"
    try:
        found = file.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return
    if found != str(FORMAT):
        raise DirectoryTooNew(
            f"{directory} has format {found[:20]!r} (see {file}), but this release reads format {FORMAT}. Nothing was"
            " changed. Start the release that wrote it, or a later one."
        )


def lock_directory(directory: Path) -> int:
    """Lock the directory; returns the lock's file. Raises: DirectoryTooNew, DirectoryInUse."""
    check_format(directory)
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise DirectoryInUse(f"another process uses {directory}: stop that process first") from None
    return fd


def open_index(path: Path) -> Index:
    """Open the index. Replace a damaged index by an empty one, which the log's replay fills."""
    suspect = path.with_name(SUSPECT)
    try:
        if suspect.exists():
            raise OSError("a read of the index failed before this start: the index is rebuilt")
        index = Index(path)
        index.checkpoint()
        return index
    except Exception as error:
        if is_disk_full_error(error):
            raise
        log.exception("index-damaged", extra={"path": str(path)})
        aside = path.with_name("index.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            path.rename(aside)
        made = Index(path)
        suspect.unlink(missing_ok=True)
        # Remove the damaged index only now that an empty one has replaced it.
        shutil.rmtree(aside, ignore_errors=True)
        return made


def is_disk_full_error(error: Exception) -> bool:
    """Whether an error of RocksDB means a full disk. RocksDB has only one exception class."""
    return any(os.strerror(code) in str(error) for code in NO_ROOM)


class Disk:
    """The free space of one data directory.

    Invariant: read-only mode and the low-space warning end only when free space exceeds the
    threshold by a quarter, so that they do not flap.
    """

    def __init__(self, directory: Path, options: StoreOptions) -> None:
        """Releases the reserve if a start lacks room for a segment and the index's files."""
        self._directory = directory
        self.options = options
        self.reserve = directory / "reserve"
        self.is_low = False
        """Whether an operator should make room; adds are still accepted."""
        self.is_read_only = False
        self.is_full = False
        """Whether even adds of recovery and repair lack room."""
        if not has_room(directory, options.reserve_bytes):
            self.release_reserve()

    def release_reserve(self) -> None:
        """Free the disk blocks that were reserved for a full disk."""
        self.reserve.unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """Free bytes for this bookie, on the disk or up to `data_bytes_max`, whichever is less."""
        stat = os.statvfs(self._directory)
        free = stat.f_bavail * stat.f_frsize
        if self.options.data_bytes_max:
            segments = self._directory / "log"
            used = sum(path.stat().st_size for path in segments.iterdir())
            free = min(free, self.options.data_bytes_max - used)
        return max(0, free)

    def check(self, *, is_stuck: bool) -> None:
        """Enter read-only mode below the threshold, and leave it a quarter above the threshold.
        Recovery and repair stop only below a quarter of the threshold. `is_stuck`: accepted records
        wait for disk space.
        """
        free, threshold = self.free_bytes(), self.options.read_only_below_bytes
        was_low, was_read_only = self.is_low, self.is_read_only
        self.is_low = _is_below(free, self.options.warn_below_bytes, was_below=was_low)
        has_reserve = keep_reserve(self.reserve, self.options.reserve_bytes)
        is_below = _is_below(free, threshold, was_below=was_read_only)
        self.is_read_only = is_below or not has_reserve or is_stuck
        self.is_full = free < threshold // 4
        if self.is_low and not was_low:
            log.warning("disk-low", extra={"free": free, "read_only_below": threshold})
        elif was_low and not self.is_low:
            log.info("disk-low-no-more", extra={"free": free})
        if was_read_only != self.is_read_only:
            log.warning("read-only" if self.is_read_only else "writable", extra={"free": free})


def _is_below(free: int, threshold: int, *, was_below: bool) -> bool:
    """Whether `free` is below the threshold; if `was_below`, below 1.25 times the threshold."""
    return free < threshold + (threshold // 4 if was_below else 0)
