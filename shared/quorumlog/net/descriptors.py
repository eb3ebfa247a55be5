"""How many files and connections this process may have open, and how many of them clients may take.

A process that has none left can't open its own files, and the event loop closes new connections
without a word. So the soft limit is raised to the hard one, and clients are refused (429) before the
rest is used up.
"""

import contextlib
import logging
import resource
from typing import Final

log = logging.getLogger(__name__)

OWN_MAX: Final = 512
"""Left for what is no client: a bookie's 128 segments and 64 files of its index, a metadata service's
pool, connections to other services, and refused connections.
"""


def raise_limit() -> int:
    """Raise the soft limit to the hard one; the limit as it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems refuse what they have as the hard limit.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def connections_within(descriptors: int, wanted: int) -> int:
    """How many of the wanted connections clients may have, at least half of the descriptors."""
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
