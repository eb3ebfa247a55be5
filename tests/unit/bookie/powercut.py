"""A disk that can lose power between any two calls.

While `Disk.watching` is open, every change that this process makes to files below a folder is also
made to a model: what is durable, and what was only written. A cut keeps what is durable, and of
what is not any sectors, in any order, and any prefix of the changes to a directory. A kill keeps all.
RocksDB writes its files past us; its state is copied by RocksDB itself.
"""

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.bookie.log import SECTOR

Change = tuple[int, bytes] | int
"""Bytes at an offset, or a new size."""


@dataclass(eq=False)
class Inode:
    """A file: what is on disk for sure, and what came since."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[Change] = field(default_factory=list)

    def sync(self) -> None:
        """All of it is durable."""
        self.durable = self.content(None)
        self.pending.clear()

    def content(self, chance: random.Random | None) -> bytearray:
        """Its bytes after a kill (no chance), or after a power cut."""
        made = bytearray(self.durable)
        changes = list(self.pending)
        keep = 1.0
        if chance is not None:
            chance.shuffle(changes)
            keep = chance.choice([0.0, 0.1, 0.5, 0.9, 1.0])
        for change in changes:
            if isinstance(change, int):
                if chance is None or chance.random() < keep:
                    _resize(made, change)
                continue
            at, data = change
            end = at + len(data)
            while at < end:
                edge = min(end, at + SECTOR - at % SECTOR)
                if chance is None or chance.random() < keep:
                    _resize(made, max(len(made), edge))
                    made[at:edge] = data[at - end : edge - end or None]
                at = edge
        return made


def _resize(made: bytearray, size: int) -> None:
    if len(made) > size:
        del made[size:]
    else:
        made.extend(bytes(size - len(made)))


NameChange = tuple[tuple[str, Inode | None], ...]
"""Names, and what they stand for from then on; a rename is one change."""


class Disk:
    """The model. `on_call` is called before each change, with nothing in between."""

    def __init__(self, folder: Path, on_call: Callable[[str], None]) -> None:
        self.folder = folder
        self._on_call = on_call
        self._lock = threading.RLock()
        self._open: dict[int, Inode] = {}
        self._directories: dict[int, str] = {}
        self._names: dict[str, Inode] = {}
        self._durable_names: dict[str, Inode] = {}
        self._pending_names: list[NameChange] = []

    def image(self, to: Path, chance: random.Random | None) -> None:
        """The files as a kill (no chance) or a power cut at this moment leaves them."""
        names = dict(self._names)
        if chance is not None:
            names = dict(self._durable_names)
            kept = chance.randint(0, len(self._pending_names))
            for change in self._pending_names[:kept]:
                _name(names, change)
        for name, inode in names.items():
            path = to / Path(name).relative_to(self.folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(inode.content(chance))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Follow all calls until the end of the block."""
        hooks: dict[str, Callable[..., Any]] = {
            "open": self._opened,
            "close": self._closed,
            "pwritev": self._written,
            "fsync": self._synced,
            "fdatasync": self._synced,
            "ftruncate": self._resized,
            "posix_fallocate": self._allocated,
            "rename": self._renamed,
            "unlink": self._unlinked,
        }
        real = {name: getattr(os, name) for name in hooks}
        try:
            for name, hook in hooks.items():
                setattr(os, name, _hooked(hook, real[name]))
            yield
        finally:
            for name, call in real.items():
                setattr(os, name, call)

    def _is_ours(self, path: object) -> str | None:
        if not isinstance(path, str | Path):
            return None
        name = str(path)
        # RocksDB's files and locks are not part of the model.
        ours = name.startswith(str(self.folder)) and "/index" not in name
        return name if ours and not name.endswith("/lock") else None

    def _opened(self, real: Callable[..., int], path: object, flags: int, *rest: Any) -> int:
        name = self._is_ours(path)
        if name is None:
            return real(path, flags, *rest)
        with self._lock:
            fd = real(path, flags, *rest)
            if Path(name).is_dir():
                self._directories[fd] = name
                return fd
            inode = self._names.get(name)
            if inode is None:
                inode = Inode()
                self._name((name, inode))
            elif flags & os.O_TRUNC:
                inode.pending.append(0)
            self._open[fd] = inode
            return fd

    def _closed(self, real: Callable[..., None], fd: int) -> None:
        with self._lock:
            self._open.pop(fd, None)
            self._directories.pop(fd, None)
            real(fd)

    def _written(self, real: Callable[..., int], fd: int, buffers: Any, at: int, *rest: Any) -> int:
        with self._lock:
            inode = self._open.get(fd)
            if inode is None:
                return real(fd, buffers, at, *rest)
            self._on_call("write")
            count = real(fd, buffers, at, *rest)
            data = b"".join(bytes(buffer) for buffer in buffers)[:count]
            inode.pending.append((at, data))
            return count

    def _synced(self, real: Callable[..., None], fd: int) -> None:
        with self._lock:
            inode = self._open.get(fd)
            if inode is not None:
                self._on_call("sync")
                inode.sync()
            elif fd in self._directories:
                self._on_call("sync of names")
                # Of all directories: the file system's journal is one.
                for change in self._pending_names:
                    _name(self._durable_names, change)
                self._pending_names.clear()
            real(fd)

    def _resized(self, real: Callable[..., None], fd: int, size: int) -> None:
        with self._lock:
            if fd in self._open:
                self._on_call("resize")
                self._open[fd].pending.append(size)
            real(fd, size)

    def _allocated(self, real: Callable[..., None], fd: int, at: int, size: int) -> None:
        with self._lock:
            inode = self._open.get(fd)
            if inode is not None and len(inode.content(None)) < at + size:
                self._on_call("allocate")
                inode.pending.append(at + size)
            real(fd, at, size)

    def _renamed(self, real: Callable[..., None], old: object, new: object, **rest: Any) -> None:
        with self._lock:
            before, after = self._is_ours(old), self._is_ours(new)
            if before is not None and after is not None and before in self._names:
                self._on_call("rename")
                self._name((after, self._names[before]), (before, None))
            real(old, new, **rest)

    def _unlinked(self, real: Callable[..., None], path: object, **rest: Any) -> None:
        with self._lock:
            name = self._is_ours(path)
            real(path, **rest)
            if name is not None and name in self._names:
                self._name((name, None))
                self._on_call("unlink")

    def _name(self, *change: tuple[str, Inode | None]) -> None:
        _name(self._names, change)
        self._pending_names.append(change)


def _name(names: dict[str, Inode], change: NameChange) -> None:
    for name, inode in change:
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode


def _hooked(hook: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return hook(real, *args, **kwargs)

    return call
