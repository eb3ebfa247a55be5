"""Known damage and its place, until it is repaired.

Reads and the scrubber find damage; adds of recovery and repair replace it. It is not logged: after
a restart, reads and the scrubber find it again.
"""

from collections.abc import Callable, Iterator
from typing import Final

from services.bookie.bodies import DamagedEntries, DamagedStretch
from services.bookie.parts import Part, present_in

DAMAGES_MAX: Final = 10_000
"""Places kept in memory. `is_cut` reports that more were found, until a whole pass of the scrubber had
room for all that it found.
"""


class Damages:
    """All damage found and not repaired yet. `find` returns the index's parts of a range."""

    def __init__(self, find: Callable[[int, int, int], list[Part]]) -> None:
        self._find = find
        self._parts: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._stretches: dict[tuple[int, int], DamagedStretch] = {}
        self.is_cut = False
        """More damage was found than is kept."""
        self._is_cut_in_pass = False

    def note(self, ledger_id: int, part: Part) -> bool:
        """Record an unreadable part. False: the index names another copy now; nothing is lost."""
        place = (ledger_id, part.segment, part.offset)
        if not self._parts_at(place, part.first, part.last):
            return False
        if place in self._parts or len(self._parts) < DAMAGES_MAX:
            self._parts[place] = (part.first, part.last)
        else:
            self.is_cut = self._is_cut_in_pass = True
        return True

    def note_stretch(self, stretch: DamagedStretch) -> None:
        """Record an unreadable stretch of a segment."""
        place = (stretch.segment, stretch.start)
        if place in self._stretches or len(self._stretches) < DAMAGES_MAX:
            self._stretches[place] = stretch
        else:
            self.is_cut = self._is_cut_in_pass = True

    def pass_begins(self) -> None:
        """The scrubber begins to look at the whole log."""
        self._is_cut_in_pass = False

    def pass_ends(self) -> None:
        """The scrubber has looked at the whole log: whatever it had no room for sets `is_cut`."""
        self.is_cut = self._is_cut_in_pass

    def segment_removed(self, segment: int) -> None:
        """Forget the damage of a removed segment."""
        for place in [place for place in self._stretches if place[0] == segment]:
            del self._stretches[place]

    def stretches(self) -> list[DamagedStretch]:
        """Damaged bytes of the log, by place."""
        return [self._stretches[place] for place in sorted(self._stretches)]

    def lost(self) -> Iterator[DamagedEntries]:
        """Unreadable entries by ledger; repaired ones are forgotten."""
        for place in sorted(self._parts):
            first, last = self._parts[place]
            named = self._parts_at(place, first, last)
            if named:
                yield DamagedEntries(
                    ledger_id=place[0],
                    ranges=present_in(named, first, last),
                    segment=place[1],
                    offset=place[2],
                )
            else:
                del self._parts[place]

    @property
    def count(self) -> int:
        """How many places are damaged."""
        return len(self._parts) + len(self._stretches)

    def _parts_at(self, place: tuple[int, int, int], first: int, last: int) -> list[Part]:
        return [
            part
            for part in self._find(place[0], first, last)
            if (part.segment, part.offset) == place[1:]
        ]
