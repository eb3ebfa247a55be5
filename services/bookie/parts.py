"""Parts, the units of a bookie's index. A part locates entries of a stored run.

With striping (E > Qw) a bookie's share of a run has holes. Repair may fill the holes with other
runs, so parts may interleave. As sets of ids the parts of a ledger are disjoint (rule 1).
"""

import struct
from dataclasses import dataclass, replace
from typing import Final

from quorumlog.protocol.ranges import Ranges, ranges_of
from quorumlog.protocol.record import Run

SPARSE_SPAN_MAX: Final = 4096
"""Maximum span of a part with holes, in ids; wider runs are split. The maximum limits how far back
a lookup searches for such parts."""

_VALUE: Final = struct.Struct(">qQQII")


@dataclass(slots=True, eq=False)
class Part:
    """Entries first..last of a run. `mask` has a bit for each id in the part; 0 stands for all ids.

    `segment` is -1, and `body` has the run, until the record is on disk.
    """

    first: int
    last: int
    mask: int
    segment: int = -1
    offset: int = -1
    size: int = 0
    crc: int = 0
    body: bytes | None = None
    rest: "Part | None" = None
    """The rest of this part, if another part replaced entries before this part was on disk."""

    def has(self, entry_id: int) -> bool:
        """Whether an entry belongs to the part."""
        if not self.first <= entry_id <= self.last:
            return False
        return self.mask == 0 or self.mask >> (entry_id - self.first) & 1 == 1

    def has_any(self, first: int, last: int) -> bool:
        """Whether some of first..last belong to the part."""
        low, high = max(first, self.first), min(last, self.last)
        if low > high or self.mask == 0:
            return low <= high
        return self.mask >> (low - self.first) & ((1 << (high - low + 1)) - 1) != 0

    @property
    def count(self) -> int:
        """The number of entries in the part."""
        return self.mask.bit_count() if self.mask else self.last - self.first + 1

    def ids(self) -> list[int]:
        """The ids of the part's entries."""
        if self.mask == 0:
            return list(range(self.first, self.last + 1))
        span = range(self.last - self.first + 1)
        return [self.first + bit for bit in span if self.mask >> bit & 1]

    def encode(self) -> bytes:
        """The value that the index stores under the key (ledger, first)."""
        mask = self.mask.to_bytes((self.mask.bit_length() + 7) // 8, "big")
        return _VALUE.pack(self.last, self.segment, self.offset, self.size, self.crc) + mask

    def without(self, ids: set[int]) -> "Part | None":
        """The part without some ids, or None if no id is left."""
        left = [entry_id for entry_id in self.ids() if entry_id not in ids]
        if not left:
            return None
        return replace(self, first=left[0], last=left[-1], mask=mask_of(left), rest=None)


def decode_part(first: int, value: bytes) -> Part:
    """Decode the value of a part that begins at id `first`, which `Part.encode` returned."""
    last, segment, offset, size, crc = _VALUE.unpack_from(value)
    mask = int.from_bytes(value[_VALUE.size :], "big")
    return Part(first, last, mask, segment, offset, size, crc)


def stored_at(value: bytes) -> tuple[int, int]:
    """The segment and the size of a part, from its value in the index."""
    _, segment, _, size, _ = _VALUE.unpack_from(value)
    return segment, size


def part_of(run: Run) -> Part:
    """A part with all entries of a run that is not on disk yet."""
    ids = run.ids
    mask = 0 if isinstance(ids, range) else mask_of(list(ids))
    return Part(run.first, run.last, mask, body=run.body)


def mask_of(ids: list[int]) -> int:
    """The mask of ascending ids; 0 if there are no holes."""
    first = ids[0]
    if ids[-1] - first == len(ids) - 1:
        return 0
    mask = 0
    for entry_id in ids:
        mask |= 1 << (entry_id - first)
    return mask


def present_in(parts: list[Part], first: int, last: int) -> Ranges:
    """The ranges of first..last that the parts contain."""
    if all(part.mask == 0 for part in parts):
        ranges: list[tuple[int, int]] = []
        for part in sorted(parts, key=lambda part: part.first):
            low, high = max(first, part.first), min(last, part.last)
            if low > high:
                continue
            if ranges and ranges[-1][1] == low - 1:
                ranges[-1] = (ranges[-1][0], high)
            else:
                ranges.append((low, high))
        return tuple(ranges)
    return ranges_of(sorted(e for part in parts for e in part.ids() if first <= e <= last))


def split_run(run: Run) -> list[Run]:
    """Split a run into runs that are narrow enough to be parts (SPARSE_SPAN_MAX)."""
    if isinstance(run.ids, range) or run.last - run.first < SPARSE_SPAN_MAX:
        return [run]
    pieces = []
    low = run.first
    while low <= run.last:
        high = low + SPARSE_SPAN_MAX
        piece = run.where(lambda e, low=low, high=high: low <= e < high)  # type: ignore[misc]
        if piece is not None:
            pieces.append(piece)
        later = [e for e in run.ids if e >= high]
        if not later:
            break
        low = later[0]
    return pieces
