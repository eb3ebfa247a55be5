"""What a storm may do to this machine: a world of its own, or the reason why there is none.

A storm that owns its mount and network namespaces can do no harm to others, and leaves nothing
behind however it ends: mounts, loop devices and networks go with their last process.
"""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS: Final = 0x00020000
_CLONE_NEWNET: Final = 0x40000000
_MS_REC: Final = 0x4000
_MS_PRIVATE: Final = 1 << 18


class Unusable(Exception):
    """This machine can't do a kind of fault; says why."""


def call(*argv: str, stdin: str | None = None) -> str:
    """Run a tool of the machine. Raises Unusable with what it said."""
    try:
        done = subprocess.run(
            argv, input=stdin, capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise Unusable(f"{argv[0]}: {error}") from None
    if done.returncode:
        raise Unusable(f"{' '.join(argv)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def need(*tools: str) -> None:
    """Raises Unusable where one of these is missing, or where we are not root."""
    if os.geteuid() != 0:
        raise Unusable("needs root")
    for tool in tools:
        if shutil.which(tool) is None:
            raise Unusable(f"{tool} is not installed")


def own_mounts() -> None:
    """Mounts from now on are seen by us and our children only. Call it before any thread starts.

    Raises: Unusable.
    """
    need("mount", "umount")
    _unshare(_CLONE_NEWNS)
    if _LIBC.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        raise Unusable(f"mount: {os.strerror(ctypes.get_errno())}")


def own_network() -> None:
    """A network of our own, with nothing but loopback. It needs `own_mounts` before.

    Raises: Unusable, and then nothing has changed.
    """
    need("ip", "nsenter")
    names = Path("/run/netns")
    try:
        names.mkdir(exist_ok=True)
    except OSError as error:
        raise Unusable(f"{names}: {error}") from None
    call("mount", "-t", "tmpfs", "tmpfs", str(names))
    call("ip", "netns", "add", "probe")  # before we leave ours, for which there is no way back
    call("ip", "netns", "delete", "probe")
    _unshare(_CLONE_NEWNET)
    call("ip", "link", "set", "lo", "up")


def _unshare(what: int) -> None:
    if _LIBC.unshare(what):
        raise Unusable(f"unshare: {os.strerror(ctypes.get_errno())}")
