"""Sets of offsets as bits of one integer, which is compact if the offsets are close together."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Offsets:
    """An immutable set of offsets. Bit n of `bits` stands for the offset `first` + n. Create sets
    with `of`, `span` and the operators: their results have the lowest bit set, and an empty set
    has `first` 0, so that sets of the same offsets compare equal.
    """

    first: int = 0
    bits: int = 0

    @classmethod
    def of(cls, offsets: Iterable[int]) -> "Offsets":
        """The set of these offsets."""
        given = list(offsets)
        first = min(given, default=0)
        bits = 0
        for offset in given:
            bits |= 1 << (offset - first)
        return cls(first, bits)

    @classmethod
    def span(cls, begin: int, end: int) -> "Offsets":
        """All offsets from `begin` to `end` - 1."""
        return cls(begin, (1 << (end - begin)) - 1) if begin < end else NONE

    @classmethod
    def union(cls, sets: Iterable["Offsets"]) -> "Offsets":
        """The offsets in any of these sets."""
        given = [each for each in sets if each.bits]
        first = min((each.first for each in given), default=0)
        bits = 0
        for each in given:
            bits |= each.bits << (each.first - first)
        return cls(first, bits)

    def __len__(self) -> int:
        """The number of offsets in the set."""
        return self.bits.bit_count()

    def __contains__(self, offset: int) -> bool:
        """Whether an offset is in the set."""
        return offset >= self.first and bool(self.bits >> (offset - self.first) & 1)

    def __iter__(self) -> Iterator[int]:
        """The offsets, ascending."""
        for begin, end in self.runs:
            yield from range(begin, end)

    def __or__(self, other: "Offsets") -> "Offsets":
        """The offsets in either set."""
        if not (self.bits and other.bits):
            return self if self.bits else other
        first = min(self.first, other.first)
        return Offsets(first, self._at(first) | other._at(first))

    def __and__(self, other: "Offsets") -> "Offsets":
        """The offsets in both sets."""
        first = max(self.first, other.first)
        return _normal(first, self._at(first) & other._at(first))

    def __sub__(self, other: "Offsets") -> "Offsets":
        """The offsets of this set that are not in the other set."""
        if other.first >= self.end:
            return self
        return _normal(self.first, self.bits & ~other._at(self.first))

    def _at(self, first: int) -> int:
        """The bits relative to another offset, without the bits of lower offsets."""
        shift = self.first - first
        return self.bits << shift if shift >= 0 else self.bits >> -shift

    def below(self, offset: int) -> "Offsets":
        """The offsets of this set that are below an offset."""
        if offset >= self.end:
            return self
        return _normal(self.first, self.bits & ((1 << max(offset - self.first, 0)) - 1))

    @property
    def end(self) -> int:
        """The offset after the set's last offset."""
        return self.first + self.bits.bit_length()

    @property
    def run_end(self) -> int:
        """The first offset above `first` that is not in the set."""
        return self.first + (~self.bits & (self.bits + 1)).bit_length() - 1

    @property
    def runs(self) -> Iterator[tuple[int, int]]:
        """The ranges (begin, end) of consecutive offsets, ascending; `end` is exclusive."""
        text = bin(self.bits)[:1:-1] + "0"
        at = text.find("1")
        while at >= 0:
            end = text.index("0", at)
            yield self.first + at, self.first + end
            at = text.find("1", end)

    @property
    def _run_count(self) -> int:
        return ((self.bits ^ (self.bits << 1)).bit_count() + 1) // 2

    @property
    def packed_size(self) -> int:
        """A rough upper bound on the number of characters in the `packed` form."""
        if self.bits <= 1:
            return 38
        return 24 + min(14 * self._run_count, 140 + self.bits.bit_length() // 4)

    def lowest(self, count: int) -> "Offsets":
        """The `count` lowest offsets, or all if there are fewer."""
        if count >= len(self):
            return self
        low, high = 0, self.bits.bit_length()
        while low < high:
            middle = (low + high) // 2
            if (self.bits & ((1 << middle) - 1)).bit_count() < count:
                low = middle + 1
            else:
                high = middle
        return self.below(self.first + low)

    def packed(self) -> list[int | str]:
        """A compact form for JSON: `first`, then alternating lengths of runs and gaps. A set with
        short runs is packed as `first` and the bits as one hexadecimal number.
        """
        if 56 * self._run_count > self.bits.bit_length() > 64:
            return [self.first, f"{self.bits:x}"]
        parts: list[int | str] = [self.first]
        at = self.first
        for begin, end in self.runs:
            parts += [begin - at, end - begin] if begin > self.first else [end - begin]
            at = end
        return parts

    @classmethod
    def unpacked(cls, parts: Sequence[int | str]) -> "Offsets":
        """Parse the `packed` form of a set. Raises: TypeError, ValueError."""
        first, *rest = parts
        if len(rest) == 1 and isinstance(rest[0], str):
            return _normal(int(first), int(rest[0], 16))
        at, bits = 0, 0
        for number, length in enumerate(map(int, rest)):
            if number % 2 == 0:
                bits |= ((1 << length) - 1) << at
            at += length
        return _normal(int(first), bits)


NONE: Final = Offsets()
"""The empty set."""


def _normal(first: int, bits: int) -> Offsets:
    if not bits:
        return NONE
    zeros = (bits & -bits).bit_length() - 1
    return Offsets(first + zeros, bits >> zeros)
