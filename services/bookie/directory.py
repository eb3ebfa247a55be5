"""A data directory: its format, its lock, and its index as found at startup."""

import contextlib
import fcntl
import logging
import os
import shutil
from pathlib import Path
from typing import Final

from services.bookie.index import Index
from services.bookie.segments import NO_ROOM

log = logging.getLogger(__name__)

SUSPECT: Final = "index.suspect"
"""If this file exists, the next start rebuilds the index."""


FORMAT: Final = 1
"""The format of a directory's log and cookie. A release that writes what the one before it can't read first stores a
higher number, durably, in the file `format` (docs/guides/upgrades.md). Without the file it is 1.
"""


class DirectoryTooNew(Exception):
    """A later release wrote the data directory in a format that this one does not read."""


class DirectoryInUse(Exception):
    """Another process owns the data directory."""


def check_format(directory: Path) -> None:
    """Refuse a directory of another format; changes nothing. Raises: DirectoryTooNew."""
    file = directory / "format"
    try:
        found = file.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return
    if found != str(FORMAT):
        raise DirectoryTooNew(
            f"{directory} is of format {found[:20]!r}, by {file}, and this release reads format {FORMAT}. Nothing was"
            " changed. Start the release that wrote it, or a later one."
        )


def lock_directory(directory: Path) -> int:
    """Take the directory's lock. Raises: DirectoryTooNew, DirectoryInUse."""
    check_format(directory)
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise DirectoryInUse(f"another process uses {directory}") from None
    return fd


def open_index(path: Path) -> Index:
    """Open the index; replace a damaged or unfinished one by an empty one, which the log fills."""
    suspect = path.with_name(SUSPECT)
    try:
        if suspect.exists():
            raise OSError("a read of the index failed before this start")
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
        # The damaged index is kept only until an empty one is in its place.
        shutil.rmtree(aside, ignore_errors=True)
        return made


def is_disk_full_error(error: Exception) -> bool:
    """Whether an error of RocksDB, which has one exception class for all, means a full disk."""
    return any(os.strerror(code) in str(error) for code in NO_ROOM)
