"""What is known to be damaged here, with its place, until it was repaired.

A read or the scrubber finds it; recovery's and repair's adds replace it. It is no record of the
log: a restart finds it again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from quorumlog.protocol.ranges import Ranges
from services.bookie.parts import Part, present_in

DAMAGES_MAX: Final = 10_000
"""Kept in memory; who repairs these and looks again finds the others."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes of a segment that are not what was written."""

    segment: int
    start: int
    end: int
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Entries that should be here and can't be read."""

    ledger_id: int
    ranges: Ranges
    segment: int
    offset: int


class Damages:
    """All damage that was met and is not repaired. `find` tells what the index names of a range."""

    def __init__(self, find: Callable[[int, int, int], list[Part]]) -> None:
        self._find = find
        self._parts: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._stretches: dict[tuple[int, int], Stretch] = {}
        self.is_cut = False
        """There was more than is kept."""

    def note(self, ledger_id: int, part: Part) -> bool:
        """A part that could not be read. False: it lies elsewhere by now, so nothing is lost."""
        place = (ledger_id, part.segment, part.offset)
        if not self._named(place, part.first, part.last):
            return False
        if len(self._parts) >= DAMAGES_MAX:
            self.is_cut = True
        else:
            self._parts[place] = (part.first, part.last)
        return True

    def note_stretch(self, stretch: Stretch) -> None:
        """A part of a segment that can't be read as what was written."""
        if len(self._stretches) >= DAMAGES_MAX:
            self.is_cut = True
        else:
            self._stretches[stretch.segment, stretch.start] = stretch

    def segment_removed(self, segment: int) -> None:
        """Its damage went with it."""
        for place in [place for place in self._stretches if place[0] == segment]:
            del self._stretches[place]

    def stretches(self) -> list[Stretch]:
        """Damaged bytes of the log, by place."""
        return [self._stretches[place] for place in sorted(self._stretches)]

    def lost(self) -> Iterator[Lost]:
        """Entries that can't be read, by ledger; what was repaired meanwhile is forgotten."""
        for place in sorted(self._parts):
            first, last = self._parts[place]
            named = self._named(place, first, last)
            if named:
                yield Lost(place[0], present_in(named, first, last), place[1], place[2])
            else:
                del self._parts[place]
        if not self._parts:
            self.is_cut = False

    @property
    def count(self) -> int:
        """Places with damage."""
        return len(self._parts) + len(self._stretches)

    def _named(self, place: tuple[int, int, int], first: int, last: int) -> list[Part]:
        return [
            part
            for part in self._find(place[0], first, last)
            if (part.segment, part.offset) == place[1:]
        ]
