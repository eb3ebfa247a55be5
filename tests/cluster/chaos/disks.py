"""Disks that lose power: a loop-mounted file system whose unsynced part is taken away.

FS_IOC_SHUTDOWN ends a file system as a power cut does: what was not synced never reaches the
device. The device itself keeps what it was given, so a disk that lies is not tested.

A sync that returns during the cut may say that it succeeded. Whoever counts acknowledgements
therefore stops the process first (`frozen`), so that none leaves after the cut.
"""

import asyncio
import fcntl
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from loadtest.waiting import until
from tests.cluster.chaos.machine import Unusable, call, need

_FS_IOC_SHUTDOWN: Final = 0x8004587D
LOSE_JOURNAL: Final = 2
"""Nothing more reaches the device."""
KEEP_JOURNAL: Final = 1
"""Names and sizes that wait in the journal still do; data that was not synced does not."""

_EXT4_BYTES: Final = 192 << 20
_XFS_BYTES: Final = 320 << 20
"""mkfs.xfs makes none below 300 MiB. Both are sparse files."""


class Disk:
    """One file system in a file, mounted at a folder."""

    def __init__(self, image: Path, folder: Path, *, kind: str = "ext4") -> None:
        """Makes and mounts it. Raises: Unusable."""
        self.folder = folder
        self.kind = kind
        self._image = image
        size = _EXT4_BYTES if kind == "ext4" else _XFS_BYTES
        with image.open("wb") as file:
            file.truncate(size)
        options = ("-q", "-F", "-J", "size=4") if kind == "ext4" else ("-q", "-f")
        call(f"mkfs.{kind}", *options, str(image))
        folder.mkdir(parents=True, exist_ok=True)
        self.mount()

    def mount(self) -> None:
        """Mount it; its journal is replayed. Raises: Unusable."""
        call("mount", "-t", self.kind, "-o", "loop", str(self._image), str(self.folder))

    def unmount(self) -> bool:
        """Unmount it, or say that somebody still uses it."""
        try:
            call("umount", str(self.folder))
        except Unusable:
            return not os.path.ismount(self.folder)
        return True

    def cut(self, how: int = LOSE_JOURNAL) -> None:
        """Take its power away. From now on every call on it fails until it is mounted again."""
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(folder, _FS_IOC_SHUTDOWN, struct.pack("I", how))
        finally:
            os.close(folder)

    async def come_back(self) -> None:
        """Mount it again, once the processes that used it are gone."""
        await until(
            lambda: asyncio.to_thread(self._mount_anew), f"{self.folder} can be mounted anew", 90
        )

    def _mount_anew(self) -> bool:
        """Whether it is mounted and has power. While the kernel has not let go of the file system
        that was cut off, mounting it gives that one again.
        """
        if not self.unmount():
            return False
        self.mount()
        probe = self.folder / ".power"
        try:
            probe.touch()
            probe.unlink()
        except OSError:
            return False
        return True


@contextmanager
def disks(images: Path, folders: list[Path]) -> Iterator[dict[str, Disk]]:
    """A disk for each folder, by its name; ext4 and, where there is mkfs.xfs, xfs in turn.

    Raises: Unusable.
    """
    need("mkfs.ext4", "losetup")
    kinds = ["ext4"]
    if shutil.which("mkfs.xfs") and "\txfs" in Path("/proc/filesystems").read_text():
        kinds.append("xfs")
    made: dict[str, Disk] = {}
    try:
        for number, folder in enumerate(folders):
            kind = kinds[number % len(kinds)]
            made[folder.name] = Disk(images / f"{folder.name}.img", folder, kind=kind)
        _prove(next(iter(made.values())))
        yield made
    finally:
        for disk in made.values():
            disk.unmount()


def _prove(disk: Disk) -> None:
    """A cut takes what was not synced, and nothing else. Raises: Unusable."""
    synced, lost = disk.folder / "synced", disk.folder / "lost"
    for path in (synced, lost):
        path.write_bytes(b"x" * 4096)
        if path is synced:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
    try:
        disk.cut()
    except OSError as error:
        raise Unusable(f"FS_IOC_SHUTDOWN on {disk.kind}: {error}") from None
    if not disk.unmount():
        raise Unusable(f"{disk.folder} can't be unmounted")
    disk.mount()
    if not synced.exists() or (lost.exists() and lost.stat().st_size):
        raise Unusable(f"FS_IOC_SHUTDOWN on {disk.kind} does not lose what was not synced")
    for path in (synced, lost):
        path.unlink(missing_ok=True)


def is_frozen(pid: int) -> bool:
    """Whether every thread of a process is stopped, or is in a call of the kernel after which it
    will be: none of them can send anything any more.
    """
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        states = [(thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in threads]
    except OSError:
        return False
    return all(state in "TtDZX" for state in states)
