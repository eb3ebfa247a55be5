"""The versions of the channel protocol that this release supports.

docs/guides/upgrades.md describes how versions change between releases. The channel's handshake
(HTTP's `Upgrade`) determines the version: the caller offers all its versions, and the bookie
chooses the highest one that it supports.
"""

import re
from collections.abc import Iterable
from typing import Final

CHANNEL: Final = range(1, 2)
"""The versions of the channel's frames (`wire/frames.py`) that this release supports."""

_UPGRADE: Final = "quorumlog-channel/"
_NAME: Final = re.compile(rf"{re.escape(_UPGRADE)}([0-9]{{1,9}})")


def upgrades(spoken: range) -> tuple[str, ...]:
    """The names of versions in a handshake, with the highest (preferred) version first."""
    return tuple(f"{_UPGRADE}{version}" for version in reversed(spoken))


def versions_in(names: Iterable[str]) -> list[int]:
    """The versions that a peer offers, ascending; unknown names are ignored."""
    found = filter(None, map(_NAME.fullmatch, names))
    return sorted(int(name[1]) for name in found)


def shown(versions: Iterable[int]) -> str:
    """Versions as text: `1`, `2, 3`."""
    return ", ".join(map(str, versions))
