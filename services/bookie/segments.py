"""The files of the log: how they come into being, are found, read and removed.

A segment gets its name only when its head (and, after an unclean start, the tail that was copied
into it) is on disk: created under another name, synced, renamed, directory synced (rule
19). Blocks are allocated at creation, so that a full disk shows there and not in the middle of a
batch.
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
"""Segments that are kept open for reading; the least lately used one is closed."""


class SegmentFile:
    """A file open for reading. It is closed when nobody holds it any more, so a reader in another
    thread never reads from a number that means another file by now.
    """

    __slots__ = ("fd",)

    def __init__(self, path: Path) -> None:
        """Opens it. Raises FileNotFoundError."""
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        """Close it."""
        fd = getattr(self, "fd", None)
        if fd is not None:
            os.close(fd)


class Segments:
    """The directory of segments.

    A segment that was removed on purpose leaves its head in a file `.gone`, so that one that is
    missing for another reason is noticed. The file `first` stands for those at the beginning.
    """

    def __init__(self, directory: Path, segment_bytes: int) -> None:
        """`segment_bytes`: what a new segment is given on disk."""
        self.directory = directory
        self.segment_bytes = segment_bytes
        self._first = directory / "first"
        self._open: OrderedDict[int, SegmentFile] = OrderedDict()

    def path(self, segment: int) -> Path:
        """Where a segment lies."""
        return self.directory / f"{segment:012d}.log"

    def gone_path(self, segment: int) -> Path:
        """Where the head of a removed segment lies."""
        return self.directory / f"{segment:012d}.gone"

    def numbers(self) -> list[int]:
        """All segments, ascending."""
        return sorted(int(path.stem) for path in self.directory.glob("*.log"))

    def gone(self) -> list[int]:
        """All segments that were removed on purpose, ascending."""
        return sorted(int(path.stem) for path in self.directory.glob("*.gone"))

    def first(self) -> int:
        """All segments below it were removed on purpose. Raises LogDamaged."""
        try:
            data = self._first.read_bytes()
        except FileNotFoundError:
            return 1
        if len(data) != _FIRST.size or google_crc32c.value(data[:8]) != _FIRST.unpack(data)[1]:
            raise LogDamaged(f"{self._first} is damaged")
        return int(_FIRST.unpack(data)[0])

    def remove_leftovers(self) -> None:
        """Remove segments that were never finished: nothing in them was ever acknowledged. And
        what a removal left when it was cut off. Raises LogDamaged.
        """
        for path in self.directory.glob("*.new"):
            path.unlink()
        for segment in self.gone():
            self._cut_gone(segment)
        self._forget_first()
        for segment in self.numbers():
            if segment < self.first():
                self.path(segment).unlink()

    def create(
        self,
        segment: int,
        first_sequence: int,
        previous_end: int,
        fill: Callable[[SegmentHead], list[bytes]] | None = None,
    ) -> tuple[SegmentHead, int, int]:
        """A new segment: its head, its file, and the offset after what `fill` wrote into it.

        Raises: OSError; ENOSPC leaves nothing behind.
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
            allocate(fd, max(end, self.segment_bytes))
            write_all(fd, buffers, 0)
            os.fsync(fd)
            new.rename(path)
            self.sync_names()
        except BaseException:
            os.close(fd)
            new.unlink(missing_ok=True)
            raise
        return head, fd, end

    def head(self, segment: int) -> SegmentHead:
        """The head of a segment, a removed one too. Raises LogDamaged where it is not right."""
        path = self.path(segment)
        if not path.exists():
            path = self.gone_path(segment)
        try:
            data = read_start(path, SEGMENT_HEAD.size)
        except FileNotFoundError:
            raise LogDamaged(f"{self.path(segment)} is missing") from None
        head = parse_segment_head(data)
        if head is None or head.segment != segment:
            raise LogDamaged(f"{path}: the head of the segment is damaged")
        return head

    def read_from(self, segment: int, offset: int) -> bytes:
        """All bytes of a segment from an offset on."""
        with self.path(segment).open("rb") as file:
            file.seek(offset)
            return file.read()

    def reader(self, segment: int) -> SegmentFile:
        """A file to read the segment from; the loop's thread asks. Raises FileNotFoundError."""
        file = self._open.get(segment)
        if file is None:
            file = self._open[segment] = SegmentFile(self.path(segment))
            if len(self._open) > OPEN_FILES_MAX:
                self._open.popitem(last=False)
        return file

    def sync_names(self) -> None:
        """Which segments there are is on disk when it returns."""
        sync_directory(self.directory)

    def opened(self, segment: int) -> SegmentFile:
        """The same for other threads: not kept open. Raises OSError."""
        return SegmentFile(self.path(segment))

    def remove(self, segment: int) -> None:
        """Delete a segment that nothing names any more. Takes no room: a full disk is emptied."""
        self._open.pop(segment, None)
        self.head(segment)
        self.path(segment).rename(self.gone_path(segment))
        self.sync_names()
        self._cut_gone(segment)
        with contextlib.suppress(OSError):
            # On a full disk the next start does it.
            self._forget_first()

    def _cut_gone(self, segment: int) -> None:
        """Keep the head of a segment that is gone, and give its blocks back."""
        fd = os.open(self.gone_path(segment), os.O_RDWR | os.O_CLOEXEC)
        try:
            os.ftruncate(fd, SEGMENT_HEAD.size)
        finally:
            os.close(fd)

    def _forget_first(self) -> None:
        """One number stands for all segments that are gone at the beginning."""
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
        """Forget all open files."""
        self._open.clear()


def read_start(path: Path, size: int) -> bytes:
    """The first bytes of a file."""
    with path.open("rb") as file:
        return file.read(size)


def allocate(fd: int, size: int) -> None:
    """Give a file its blocks, where the file system can."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
            raise
        os.ftruncate(fd, size)


IOV_MAX: Final = 1024
"""How many buffers one call takes (Linux)."""


def write_all(fd: int, buffers: list[bytes], offset: int) -> None:
    """Write all of the buffers at an offset; a short write goes on where it stopped."""
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
    """Make names in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """Replace a small file whole or not at all."""
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
