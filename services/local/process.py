"""Starts and stops processes on one machine, and leases ports for them.

A child must not outlive its parent, nor inherit ignored signals (a CI system may ignore SIGINT). A
child has its own session, so that Ctrl-C reaches only the parent, which stops its children in
order.

Ports come from 10000-19999. A process leases ports by locks that end with the process. Ports chosen
by the kernel (bind to 0, close, use later) are unsafe: another process, or an outgoing connection,
may get the port while its server does not listen.
"""

import ctypes
import errno
import fcntl
import os
import random
import signal
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Final

NOBODY: Final = 65534
"""Id of the user that owns Postgres's files if root runs the cluster: initdb refuses root."""

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_KEEPCAPS: Final = 8
_PR_SET_SECUREBITS: Final = 28
_SECBIT_NO_SETUID_FIXUP: Final = 1 << 2
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_RAISE: Final = 2
_CAP_DAC_OVERRIDE: Final = 1
_CAP_VERSION_3: Final = 0x20080522
_CLONE_NEWUSER: Final = 0x10000000
_FIRST: Final = 10_000
_END: Final = 20_000


class Become(Enum):
    """The user that runs a child, because some programs refuse root or users without a name."""

    SELF = "self"
    NOBODY = "nobody"
    """setuid to the user `nobody`, if `nobody` may read all files that the child needs."""
    NOBODY_WITH_DAC_OVERRIDE = "nobody past permissions"
    """setuid to `nobody` with CAP_DAC_OVERRIDE, if a parent folder is closed (mode 0700)."""
    NAMESPACE = "nobody in a user namespace"
    """A user namespace that maps this user to `nobody`: for systems that don't allow setuid, and for
    users without a name (containers with an arbitrary user id), because initdb rejects them."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run, with its environment, its user and the signals that stop it."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path = Path("/")
    become: Become = Become.SELF
    stop_signal: signal.Signals = signal.SIGTERM
    orphan_signal: signal.Signals = signal.SIGKILL
    """The signal that the kernel sends to the process when its parent dies."""


Process = subprocess.Popen[bytes]


def start(program: Program, log: Path) -> Process:
    """Starts a program, and appends its output to the file `log`.

    Call it in the main thread: the child gets `orphan_signal` when the calling thread ends.
    """
    with log.open("ab") as out:
        return subprocess.Popen(
            program.argv,
            cwd=program.cwd,
            env=dict(program.env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=in_child(program.become, program.orphan_signal),  # noqa: PLW1509
        )


def in_child(
    become: Become, orphan_signal: signal.Signals, *, parent: int | None = None
) -> Callable[[], None]:
    """Returns a function to run in a child between fork and exec. `parent`: the id of the process
    that forks; by default this one.
    """
    parent = parent or os.getpid()
    mask = set(signal.valid_signals())

    def prepare() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, mask)
        _become(become)
        die_with(parent, orphan_signal)  # comes last, because setuid resets it

    return prepare


def die_with(parent: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Makes the kernel send this process a signal when the thread that forked it ends."""
    _checked(_LIBC.prctl(_PR_SET_PDEATHSIG, int(how), 0, 0, 0))
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(1)


def users_to_try(*paths: Path) -> tuple[Become, ...]:
    """Returns users to try, best first, for a child that needs a user name and these paths."""
    if os.geteuid() != 0:
        return (Become.SELF, Become.NAMESPACE)
    ways = (Become.NOBODY_WITH_DAC_OVERRIDE, Become.NAMESPACE)
    folders = {folder for path in paths for folder in (path, *path.parents)}
    if all(folder.stat().st_mode & 0o001 for folder in folders):
        return (Become.NOBODY, *ways)
    return (*ways, Become.NOBODY)


def chown_tree(path: Path, become: Become) -> None:
    """Makes the child's user the owner of a folder and of all files below it."""
    if os.geteuid() != 0:
        return
    owner = 0 if become is Become.NAMESPACE else NOBODY
    os.chown(path, owner, owner)
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            os.chown(Path(folder, name), owner, owner, follow_symlinks=False)


def _become(become: Become) -> None:
    match become:
        case Become.SELF:
            pass
        case Become.NOBODY:
            _set_user()
        case Become.NOBODY_WITH_DAC_OVERRIDE:
            _checked(_LIBC.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0))
            # Postgres checks its binaries with access(2). For users other than root, access(2)
            # ignores capabilities unless this bit is set. Without CAP_SETPCAP the bit can't be set;
            # Postgres then runs only if all users may read its binaries.
            _LIBC.prctl(_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP, 0, 0, 0)
            _set_user()
            kept = 1 << _CAP_DAC_OVERRIDE
            head = (ctypes.c_uint32 * 2)(_CAP_VERSION_3, 0)
            sets = (ctypes.c_uint32 * 6)(kept, kept, kept, 0, 0, 0)
            _checked(_LIBC.capset(head, sets))
            _checked(_LIBC.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_OVERRIDE, 0, 0))
        case Become.NAMESPACE:
            user, group = os.geteuid(), os.getegid()
            _checked(_LIBC.unshare(_CLONE_NEWUSER))
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{NOBODY} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{NOBODY} {group} 1")


def _set_user() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def _checked(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


# --- ports -----------------------------------------------------------------------------------------

_leased: set[int] = set()


def free_ports(count: int, *, avoid: range = range(0)) -> list[int]:
    """Leases `count` consecutive unused ports until the end of this process.

    `avoid`: ports that are reserved for servers that do not listen yet.
    Raises: OSError if there are no such ports.
    """
    choices = _END - _FIRST - count + 1
    start = random.SystemRandom().randrange(choices)
    for step in range(choices):
        first = _FIRST + (start + step) % choices
        ports = range(first, first + count)
        if _leased.isdisjoint(ports) and _lock(ports):
            _leased.update(ports)
            if all(port not in avoid and is_free(port) for port in ports):
                return [*ports]
    raise OSError(errno.EADDRINUSE, f"no {count} adjacent ports in {_FIRST}-{_END - 1} are free")


def is_free(port: int, host: str = "") -> bool:
    """Whether a server could listen on the port now. Raises: OSError if the port can't be used."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def _lock(ports: range) -> bool:
    """Locks one byte of the lock file for each port, unless another process has locked one of them.
    The locks end with this process.
    """
    try:
        fcntl.lockf(_lock_file(), fcntl.LOCK_EX | fcntl.LOCK_NB, len(ports), ports.start)
    except (BlockingIOError, PermissionError):
        return False
    return True


@cache
def _lock_file() -> int:
    """The descriptor of the lock file. To close the descriptor would end all locks."""
    return os.open(_folder() / "lock", os.O_RDWR | os.O_CREAT, 0o600)


def _folder() -> Path:
    try:
        root = tempfile.gettempdir()
    except FileNotFoundError:  # /dev/shm is writable also in a container with a read-only root
        root = "/dev/shm"  # noqa: S108
    folder = Path(root) / f"quorumlog-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "another user owns the folder: remove it", str(folder))
    return folder
