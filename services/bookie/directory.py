"""A data directory: whose it is, and its index as it is found."""

import contextlib
import fcntl
import logging
import os
import shutil
from pathlib import Path
from typing import Final

from services.bookie.index import Index

log = logging.getLogger(__name__)

SUSPECT: Final = "index.suspect"
"""A file that has the next start build the index anew."""


class DirectoryInUse(Exception):
    """Another process owns the data directory."""


def locked(directory: Path) -> int:
    """The directory's lock. Raises DirectoryInUse."""
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise DirectoryInUse(f"another process uses {directory}") from None
    return fd


def open_index(path: Path) -> Index:
    """The index; where it is damaged or was never finished, an empty one, to be rebuilt."""
    suspect = path.with_name(SUSPECT)
    try:
        if suspect.exists():
            raise OSError("it could not be read when it was used last")
        index = Index(path)
        index.checkpoint()
        return index
    except Exception as error:
        if is_no_room(error):
            raise
        log.exception("index-damaged", extra={"path": str(path)})
        aside = path.with_name("index.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            path.rename(aside)
        made = Index(path)
        suspect.unlink(missing_ok=True)
        # It was kept only until the new one is there, which the log fills.
        shutil.rmtree(aside, ignore_errors=True)
        return made


def is_no_room(error: Exception) -> bool:
    """Whether RocksDB, which has one exception for all, speaks of a full disk."""
    return "No space left" in str(error)
