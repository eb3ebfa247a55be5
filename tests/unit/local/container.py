"""What a container with default settings takes from its root: capabilities, and user namespaces.

Docker and podman do it so: a bounding set of capabilities, and a filter of system calls that refuses
`unshare`. Here the same calls are made in a child before its program starts.
"""

import ctypes
import os
import platform
import struct
from typing import Final

KEPT: Final = frozenset((0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31))
"""Docker's default: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, and some more."""

_UNSHARE: Final = {"x86_64": 272, "aarch64": 97}
_CAPABILITY_LAST: Final = 63
_PR_SET_SECCOMP: Final = 22
_PR_CAPBSET_DROP: Final = 24
_LOAD_NUMBER, _SKIP_UNLESS_EQUAL, _RETURN = 0x20, 0x15, 0x06
_REFUSE, _ALLOW = 0x0005_0001, 0x7FFF_0000
"""EPERM; and go on."""

_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class _Filter(ctypes.Structure):
    _fields_ = (("count", ctypes.c_ushort), ("first", ctypes.c_void_p))


def can_be_made() -> bool:
    """Whether this process may put its children into such a container."""
    return os.geteuid() == 0 and platform.machine() in _UNSHARE


def enter(kept: frozenset[int] = KEPT) -> None:
    """Put this process into the container, with the capabilities that the next program shall have."""
    steps = (
        (_LOAD_NUMBER, 0, 0, 0),
        (_SKIP_UNLESS_EQUAL, 0, 1, _UNSHARE[platform.machine()]),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    given = _Filter(len(steps), ctypes.addressof(code))
    if _LIBC.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(given), 0, 0):
        raise OSError(ctypes.get_errno(), "no filter of system calls here")
    for capability in range(_CAPABILITY_LAST + 1):
        if capability not in kept:
            _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # refused for numbers that are none
