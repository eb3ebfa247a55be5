"""Leased ports: no other process takes a port during its lease.

A port that the kernel chose (bind to 0, close, use it later) may be given to another process in
between, and a port in the kernel's ephemeral range may be taken by any outgoing connection while
its server restarts. So ports come from 10000-19999, in blocks that a process leases by a file lock;
the lock ends with the process, however that ends.
"""

import contextlib
import errno
import fcntl
import os
import random
import socket
import stat
import tempfile
from pathlib import Path
from typing import Final

_FIRST: Final = 10_000
_END: Final = 20_000
_BLOCK: Final = 10

_lock_fds: list[int] = []
"""Descriptors of the locks; never closed, because the lease lasts as long as the process."""

_unused_ports: list[int] = []
"""The unused ports of the last block, in order: a test run that leases one port a thousand times
would otherwise take every block, and a descriptor for each."""


def free_ports(count: int, *, avoid: range = range(0)) -> list[int]:
    """Lease `count` consecutive ports on which nobody listens, for the life of this process.

    `avoid`: ports reserved for servers that do not listen yet.
    Raises: OSError if there are no such ports.
    """
    if count <= len(_unused_ports):
        ports = _unused_ports[:count]
        del _unused_ports[:count]
        if all(port not in avoid and is_free(port) for port in ports):
            return ports
    blocks = (_END - _FIRST) // _BLOCK
    wanted = -(-count // _BLOCK)
    start = random.SystemRandom().randrange(blocks)
    for step in range(blocks):
        first = (start + step) % blocks
        if first + wanted <= blocks and (ports := _lease(first, wanted, avoid)):
            _unused_ports[:] = ports[count:]
            return ports[:count]
    raise OSError(errno.EADDRINUSE, f"no {count} free ports in {_FIRST}-{_END - 1}")


def is_free(port: int, host: str = "") -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def _lease(first: int, wanted: int, avoid: range) -> list[int]:
    locks: list[int] = []
    for block in range(first, first + wanted):
        lock = os.open(_folder() / f"{block:03}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        locks.append(lock)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            continue
        break
    else:
        ports = [*range(_FIRST + first * _BLOCK, _FIRST + (first + wanted) * _BLOCK)]
        if all(port not in avoid and is_free(port) for port in ports):
            _lock_fds.extend(locks)
            return ports
    for lock in locks:
        os.close(lock)
    return []


def _folder() -> Path:
    try:
        root = tempfile.gettempdir()
    except FileNotFoundError:  # a container with a read-only root has this one still
        root = "/dev/shm"  # noqa: S108
    folder = Path(root) / f"quorumlog-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "another user made the folder of the locks", str(folder))
    return folder
