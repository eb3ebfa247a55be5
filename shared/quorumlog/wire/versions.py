"""The versions of the channel protocol that this release speaks.

How they change from release to release is in docs/guides/upgrades.md. The channel's version is agreed on in its
handshake, as a protocol of HTTP's `Upgrade`: the caller offers all that it speaks, the bookie takes the highest that it
speaks too.
"""

import re
from collections.abc import Iterable
from typing import Final

CHANNEL: Final = range(1, 2)
"""The versions of the channel's frames (`wire/frames.py`) that this release speaks."""

_UPGRADE: Final = "quorumlog-channel/"
_NAME: Final = re.compile(rf"{re.escape(_UPGRADE)}([0-9]{{1,9}})")


def upgrades(spoken: range) -> tuple[str, ...]:
    """The names of versions in a handshake, the highest first: it is preferred."""
    return tuple(f"{_UPGRADE}{version}" for version in reversed(spoken))


def versions_in(names: Iterable[str]) -> list[int]:
    """The versions that a peer says it speaks, as far as their names are known here."""
    found = filter(None, map(_NAME.fullmatch, names))
    return sorted(int(name[1]) for name in found)


def shown(versions: Iterable[int]) -> str:
    """Versions for people: `1`, `2, 3`."""
    return ", ".join(map(str, versions))
