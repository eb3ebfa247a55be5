"""Which directory this is, by what a copy of it can't keep (rule 15a).

A copy of a data directory has every byte of it, so no token in a file tells the two apart. The inode
and the birth time of a file do: both stay over restarts, renames and mounts of the same file system,
and no call sets them. The device is left out, since its number changes with boots and mounts.

A file system without birth times leaves the inode, which a copy on another one may have by chance. One
that gives a file another inode at each mount makes every start a suspected loss; that is safe, and no
place for a bookie (docs/guides/bookie.md).
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
"""Where the birth time stands in what statx(2) fills in, behind four times 16 bytes and more."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A directory's marker, as the file system knows it."""

    inode: int
    born_ns: int | None = None
    """None where the file system keeps no birth times."""

    def is_same(self, other: "Identity") -> bool:
        """Whether both are one file. A kernel that learned of birth times says no more than before."""
        if self.inode != other.inode:
            return False
        return None in (self.born_ns, other.born_ns) or self.born_ns == other.born_ns


class HardLinked(Exception):
    """Two directories share the marker's file, and so those of the log."""


def identity_of(directory: Path) -> Identity:
    """The directory's identity; one that was never marked is marked, durably. Raises HardLinked."""
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
    """A file's birth time. `os.stat` has none on Linux, so the C library is asked."""
    statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    if statx is None:
        return None
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_BTIME, answer) != 0:
        # A kernel or a sandbox that does not know the call.
        return None
    (mask,) = struct.unpack_from("=I", answer)
    if not mask & _STATX_BTIME:
        return None
    seconds, nanoseconds = struct.unpack_from("=qI", answer, _BORN_AT)
    return int(seconds) * 10**9 + int(nanoseconds)
