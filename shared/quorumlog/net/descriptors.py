"""The limit on a process's open files and connections, and the part of it that clients may use.

A process without free descriptors can't open its own files, and the event loop closes new connections
silently. So the soft limit is raised to the hard limit, and clients are refused (429) before they take
the descriptors that the process needs itself.
"""

import contextlib
import logging
import resource
from typing import Final

log = logging.getLogger(__name__)

OWN_MAX: Final = 512
"""Reserved for the process itself: a bookie's 128 segments and 64 files of its index, a metadata service's
pool, connections to other services, and refused connections.
"""


def raise_limit() -> int:
    """Raise the soft limit to the hard limit, and return the limit in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems refuse the value that they report as the hard limit.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def connections_within(descriptors: int, wanted: int) -> int:
    """The connections that clients may have: `wanted`, or fewer where descriptors are scarce, but at least
    half of the descriptors.
    """
    if descriptors == resource.RLIM_INFINITY:
        return wanted
    allowed = min(wanted, max(descriptors - OWN_MAX, descriptors // 2))
    if allowed < wanted:
        log.warning(
            "few-descriptors",
            extra={
                "descriptors": descriptors,
                "connections_max": allowed,
                "wanted": wanted,
                "hint": "raise the hard limit of open files (ulimit -Hn, LimitNOFILE)",
            },
        )
    return allowed
