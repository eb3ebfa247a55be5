"""A directory's identity, by properties that a copy cannot keep (rule 15a).

A copied data directory has the same bytes, so no token in a file tells the two apart. A file's
inode and birth time do: both survive restarts, renames and mounts of one file system, and no system
call sets them. The device is left out, since its number changes with boots and mounts.

Without birth times only the inode is left, which a copy on another file system may share by chance.
A file system that changes inodes at each mount makes every start a suspected loss: safe, but unfit
for a bookie (docs/guides/bookie.md).
"""

import ctypes
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.bookie.segments import sync_directory, write_all

MARKER: Final = "marker"

_TEXT: Final = (
    b"This file's inode and birth time say which directory this is: a copy has others.\n"
    b"See docs/guides/bookie.md, Who am I.\n"
)
_AT_FDCWD: Final = -100
_STATX_BTIME: Final = 0x800
_STATX_BYTES: Final = 256
_BORN_AT: Final = 80
"""Offset of the birth time in the structure that statx(2) fills in."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The inode and birth time of a directory's marker file."""

    inode: int
    born_ns: int | None = None
    """None if the file system keeps no birth times."""

    def is_same(self, other: "Identity") -> bool:
        """Whether both are one file. Birth times are compared only if both are known."""
        if self.inode != other.inode:
            return False
        return None in (self.born_ns, other.born_ns) or self.born_ns == other.born_ns


class HardLinked(Exception):
    """Two directories share the marker file by hard links, and so the files of the log."""


def identity_of(directory: Path) -> Identity:
    """The directory's identity; creates the marker durably if there is none. Raises HardLinked."""
    path = directory / MARKER
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
    except FileExistsError:
        pass
    else:
        try:
            write_all(fd, [_TEXT], 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_directory(directory)
    found = path.stat()
    if found.st_nlink > 1:
        raise HardLinked(path)
    return Identity(found.st_ino, _born_ns(path))


def _born_ns(path: Path) -> int | None:
    """A file's birth time, from the C library: `os.stat` has none on Linux."""
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if statx is None:
        return None
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_BTIME, answer) != 0:
        # The kernel or a sandbox does not support the call.
        return None
    (mask,) = struct.unpack_from("=I", answer)
    if not mask & _STATX_BTIME:
        return None
    seconds, nanoseconds = struct.unpack_from("=qI", answer, _BORN_AT)
    return int(seconds) * 10**9 + int(nanoseconds)
