"""Creates, finds, reads and removes the files of the log.

A segment is created under another name, synced and renamed; then the directory is synced (rule 19).
So a segment with its final name is on disk, with its head and the tail that a start copied into it.
Blocks are allocated at creation, so that a full disk is detected then, and not within a batch.
"""

import contextlib
import errno
import os
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final

import google_crc32c

from services.bookie.log import SEGMENT_HEAD, LogDamaged, SegmentHead, parse_segment_head

_FIRST: Final = struct.Struct(">QI")

OPEN_FILES_MAX: Final = 128
"""Maximum number of segments open for reading; beyond it, the segment opened first is closed."""


class SegmentFile:
    """A file open for reading. The file is closed with the last reference to this object. Otherwise
    a reader in another thread might use a descriptor that was reused for another file.
    """

    __slots__ = ("fd",)

    def __init__(self, path: Path) -> None:
        """Open the file. Raises FileNotFoundError."""
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        """Close the file."""
        fd = getattr(self, "fd", None)
        if fd is not None:
            os.close(fd)


class Segments:
    """The directory of segments.

    The head of a segment removed on purpose stays in a file `.gone`, so that any other missing
    segment is detected. The file `first` replaces the `.gone` files of the lowest numbers.
    """

    def __init__(self, directory: Path, segment_bytes: int) -> None:
        """`segment_bytes`: the size allocated for a new segment."""
        self.directory = directory
        self.segment_bytes = segment_bytes
        self._first = directory / "first"
        self._open: OrderedDict[int, SegmentFile] = OrderedDict()

    def path(self, segment: int) -> Path:
        """The path of a segment."""
        return self.directory / f"{segment:012d}.log"

    def gone_path(self, segment: int) -> Path:
        """The path of a removed segment's head."""
        return self.directory / f"{segment:012d}.gone"

    def numbers(self) -> list[int]:
        """The numbers of all segments, ascending."""
        return sorted(int(path.stem) for path in self.directory.glob("*.log"))

    def gone(self) -> list[int]:
        """The numbers of segments removed on purpose, ascending, unless `first` covers them."""
        return sorted(int(path.stem) for path in self.directory.glob("*.gone"))

    def first(self) -> int:
        """The number below which all segments were removed on purpose. Raises LogDamaged."""
        try:
            data = self._first.read_bytes()
        except FileNotFoundError:
            return 1
        if len(data) != _FIRST.size or google_crc32c.value(data[:8]) != _FIRST.unpack(data)[1]:
            raise LogDamaged(f"{self._first} is damaged")
        return int(_FIRST.unpack(data)[0])

    def remove_leftovers(self) -> None:
        """Remove unfinished segments, and finish interrupted removals. Raises LogDamaged."""
        for path in self.directory.glob("*.new"):
            path.unlink()
        for segment in self.gone():
            os.truncate(self.gone_path(segment), SEGMENT_HEAD.size)
        self._advance_first()
        for segment in self.numbers():
            if segment < self.first():
                self.path(segment).unlink()

    def create(
        self,
        segment: int,
        first_sequence: int,
        previous_end: int,
        fill: Callable[[SegmentHead], list[bytes]] | None = None,
        *,
        may_be_short: bool = False,
    ) -> tuple[SegmentHead, int, int]:
        """Create a segment. Returns head, descriptor, and the offset after the buffers of `fill`.

        `may_be_short`: without room for a whole segment, allocate only the content, so that a
        bookie can start on a full disk and answer reads. The file's size equals the allocated size.
        Raises: OSError; an error in NO_ROOM leaves no file behind.
        """
        head = SegmentHead(
            segment,
            int.from_bytes(os.urandom(8), "big"),
            first_sequence,
            previous_end,
            self.segment_bytes,
        )
        path = self.path(segment)
        new = path.with_suffix(".new")
        buffers = [head.encode(), *(fill(head) if fill is not None else ())]
        end = sum(map(len, buffers))
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
        try:
            try:
                allocate(fd, max(end, self.segment_bytes))
            except OSError as error:
                if not may_be_short or error.errno not in NO_ROOM:
                    raise
                os.ftruncate(fd, 0)
                allocate(fd, end)
            write_all(fd, buffers, 0)
            os.fsync(fd)
            new.rename(path)
            self.sync_entries()
        except BaseException:
            os.close(fd)
            new.unlink(missing_ok=True)
            raise
        return head, fd, end

    def head(self, segment: int) -> SegmentHead:
        """A present or removed segment's head. Raises LogDamaged for a missing or invalid head."""
        path = self.path(segment)
        if not path.exists():
            path = self.gone_path(segment)
        try:
            with path.open("rb") as file:
                data = file.read(SEGMENT_HEAD.size)
        except FileNotFoundError:
            raise LogDamaged(f"{self.path(segment)} is missing") from None
        head = parse_segment_head(data)
        if head is None or head.segment != segment:
            raise LogDamaged(
                f"{path} has a damaged head, or another release's format: restore the file"
            )
        return head

    def read_from(self, segment: int, offset: int) -> bytes:
        """All bytes of a segment from an offset on."""
        with self.path(segment).open("rb") as file:
            file.seek(offset)
            return file.read()

    def reader(self, segment: int) -> SegmentFile:
        """A segment's shared open file, for the loop's thread only. Raises FileNotFoundError."""
        file = self._open.get(segment)
        if file is None:
            file = self._open[segment] = SegmentFile(self.path(segment))
            if len(self._open) > OPEN_FILES_MAX:
                self._open.popitem(last=False)
        return file

    def sync_entries(self) -> None:
        """Sync the directory, so that the creation and removal of segments are on disk."""
        sync_directory(self.directory)

    def remove(self, segment: int) -> None:
        """Remove a segment that no part references, even on a full disk."""
        self._open.pop(segment, None)
        self.head(segment)
        self.path(segment).rename(self.gone_path(segment))
        self.sync_entries()
        os.truncate(self.gone_path(segment), SEGMENT_HEAD.size)  # frees its blocks
        with contextlib.suppress(OSError):
            # On a full disk the next start retries.
            self._advance_first()

    def _advance_first(self) -> None:
        """Replace leading `.gone` files by a higher number in the file `first`."""
        known = first = self.first()
        gone = self.gone()
        while first in gone:
            first += 1
        if first != known:
            start = first.to_bytes(8, "big")
            write_durably(self._first, _FIRST.pack(first, google_crc32c.value(start)))
        for segment in gone:
            if segment < first:
                self.gone_path(segment).unlink()

    def close(self) -> None:
        """Close all files."""
        self._open.clear()


NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a write that exceeds the disk, the user's quota or the maximum file size. An operator
can make room, so the bookie becomes read-only and does not exit."""


def allocate(fd: int, size: int) -> None:
    """Allocate a file's blocks, if the file system supports it."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
            raise
        os.ftruncate(fd, size)


IOV_MAX: Final = 1024
"""Maximum number of buffers per call of `pwritev` (Linux)."""


def write_all(fd: int, buffers: list[bytes], offset: int) -> None:
    """Write all buffers at an offset; continue after a short write."""
    start = 0
    while start < len(buffers):
        chunk: list[bytes | memoryview] = list(buffers[start : start + IOV_MAX])
        start += IOV_MAX
        while chunk:
            written = os.pwritev(fd, chunk, offset)
            offset += written
            while chunk and written >= len(chunk[0]):
                written -= len(chunk[0])
                chunk.pop(0)
            if written:
                chunk[0] = memoryview(chunk[0])[written:]


def sync_directory(directory: Path) -> None:
    """Make a directory's entries durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """Replace a small file atomically and durably."""
    new = path.with_name(path.name + ".new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
    try:
        write_all(fd, [data], 0)
        os.fsync(fd)
    except OSError:
        new.unlink()
        raise
    finally:
        os.close(fd)
    new.rename(path)
    sync_directory(path.parent)
