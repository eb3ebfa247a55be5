"""Computes which positions store an entry, and whether enough bookies have answered.

Positions are indexes in the ensemble, 0 to E-1. The *write set* of an entry is the Qw neighbouring
positions from `entry mod E` on, which store the entry. With E = Qw every position stores every
entry. Sources: both protocol documents, "Write quorum"; RoundRobinDistributionSchedule; BP-46,
"Quorums".
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Self

from quorumlog.protocol.values import Bounds

QUORUM_MAX = 255  # docs/reference/http.md, Bounds
_Size = Annotated[int, Bounds(ge=1, le=QUORUM_MAX)]


@dataclass(frozen=True, slots=True)
class Quorum:
    """Quorum sizes with E >= Qw >= Qa >= 1. Raises ValueError otherwise."""

    ensemble_size: _Size
    write_quorum: _Size
    ack_quorum: _Size

    def __post_init__(self) -> None:
        if not QUORUM_MAX >= self.ensemble_size >= self.write_quorum >= self.ack_quorum >= 1:
            raise ValueError(
                f"{QUORUM_MAX} >= ensemble_size >= write_quorum >= ack_quorum >= 1 must hold (got "
                f"{self.ensemble_size}, {self.write_quorum}, {self.ack_quorum})"
            )

    @property
    def is_striped(self) -> bool:
        """Whether entries of one ledger have different write sets."""
        return self.ensemble_size > self.write_quorum

    @property
    def modulus(self) -> int:
        """The period of write sets: entry ids equal modulo this number share a write set."""
        return self.ensemble_size if self.is_striped else 1

    @classmethod
    def of(
        cls,
        ensemble_size: int | None = None,
        write_quorum: int | None = None,
        ack_quorum: int | None = None,
    ) -> Self:
        """Fill in default sizes: E is 3, or Qw if Qw is larger. Qw is 3, or E if E is smaller. Qa
        is a majority of Qw.
        """
        size = ensemble_size or max(3, write_quorum or 0)
        write = write_quorum or min(3, size)
        return cls(size, write, ack_quorum or write // 2 + 1)

    def write_set(self, entry_id: int) -> tuple[int, ...]:
        """The positions that store an entry, in the order of its write set."""
        return _write_sets(self)[entry_id % self.ensemble_size]

    def residues(self, position: int) -> frozenset[int]:
        """The entry ids modulo E that a position stores."""
        return _residues(self)[position]

    def is_member(self, position: int, entry_id: int) -> bool:
        """Whether a position stores an entry."""
        return entry_id % self.ensemble_size in _residues(self)[position]

    @property
    def negatives_needed(self) -> int:
        """The number of explicit denials by a write set's members that prove that no ack quorum
        has the entry (I16).
        """
        return self.write_quorum - self.ack_quorum + 1

    def holders(self, first_entry: int, last_entry: int) -> int:
        """The positions that store at least one entry of a run, as a bit mask."""
        if not self.is_striped or last_entry - first_entry + 1 >= self.ensemble_size:
            return (1 << self.ensemble_size) - 1
        masks, mask = _write_set_masks(self), 0
        for entry_id in range(first_entry, last_entry + 1):
            mask |= masks[entry_id % self.ensemble_size]
        return mask

    def has_ack_quorum(self, acked: int, first_entry: int, last_entry: int) -> bool:
        """Whether each entry of a run has Qa positions of its write set in `acked`, a mask (I2)."""
        if not self.is_striped:
            return acked.bit_count() >= self.ack_quorum
        masks, size = _write_set_masks(self), self.ensemble_size
        return all(
            (acked & masks[(first_entry + offset) % size]).bit_count() >= self.ack_quorum
            for offset in range(min(last_entry - first_entry + 1, size))
        )

    def can_reach(self, usable: int) -> bool:
        """Whether every write set has at least Qa `usable` positions (a bit mask)."""
        return all(
            (usable & mask).bit_count() >= self.ack_quorum for mask in _write_set_masks(self)
        )

    def is_covered(self, answered: Iterable[int]) -> bool:
        """Whether the positions that have not answered contain no ack quorum (I14).

        True if fewer than Qa positions of each write set are silent. `answered` must contain only
        positions whose answer counts (rule 13), not all positions that were asked.
        """
        known = frozenset(answered)
        return all(
            sum(position not in known for position in write_set) < self.ack_quorum
            for write_set in _write_sets(self)
        )


@lru_cache(maxsize=1024)
def _write_sets(quorum: Quorum) -> tuple[tuple[int, ...], ...]:
    size = quorum.ensemble_size
    return tuple(
        tuple((start + step) % size for step in range(quorum.write_quorum)) for start in range(size)
    )


@lru_cache(maxsize=1024)
def _write_set_masks(quorum: Quorum) -> tuple[int, ...]:
    return tuple(sum(1 << p for p in write_set) for write_set in _write_sets(quorum))


@lru_cache(maxsize=1024)
def _residues(quorum: Quorum) -> tuple[frozenset[int], ...]:
    return tuple(
        frozenset(
            residue
            for residue, write_set in enumerate(_write_sets(quorum))
            if position in write_set
        )
        for position in range(quorum.ensemble_size)
    )
