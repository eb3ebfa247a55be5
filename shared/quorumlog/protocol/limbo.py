"""Computes the entries that a bookie should store, and the entries that it lacks (rule 15).

A new incarnation of a bookie stays in limbo for a ledger while it lacks entries of the ledger. The
bookie and the simulator call these pure functions.
"""

from collections.abc import Iterator
from typing import Final

from quorumlog.protocol.ids import ID_MAX, member_incarnation, member_name
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.ranges import Ranges, complement, ids_of_residue, ranges_of

ENDLESS: Final = ID_MAX - 1
"""The last entry of a range without an end, as the repair queue stores it."""


def older_members(row: LedgerMetadata, me: str) -> list[str]:
    """The older incarnations of this bookie that fragments of the metadata name. If there are any,
    the ledger is in limbo at this bookie.
    """
    name, incarnation = member_name(me), member_incarnation(me)
    named = {member for fragment in row.fragments for member in fragment.bookies}
    return sorted(
        member
        for member in named
        if member_name(member) == name and member_incarnation(member) < incarnation
    )


def places(row: LedgerMetadata, member: str) -> Iterator[tuple[int, int]]:
    """The entry ranges of the fragments that name a member, or that still keep the member after its
    replacement (rule 20b). The range of an open fragment ends at ENDLESS. An empty fragment has a
    range of one entry, because its member must be replaced too.
    """
    kept = {r.first_entry for r in row.placed_repairs if r.leaving == member}
    for index, fragment in enumerate(row.fragments):
        if member in fragment.bookies or fragment.first_entry in kept:
            last = row.fragment_last(index)
            end = ENDLESS if last is None else last
            yield fragment.first_entry, max(end, fragment.first_entry)


def expected(row: LedgerMetadata, me: str) -> Iterator[tuple[int, int, int]]:
    """(position, first entry, last entry) of each closed fragment that names this incarnation."""
    for index, fragment in enumerate(row.fragments):
        last = row.fragment_last(index)
        if me in fragment.bookies and last is not None:
            yield fragment.bookies.index(me), fragment.first_entry, last


def lacking(row: LedgerMetadata, position: int, first: int, last: int, held: Ranges) -> Ranges:
    """The entries of first..last that a position should store, but that `held` lacks. The ledger
    stays in limbo at the bookie while such entries exist (I27). Entries that were accepted as lost
    don't count (rule 31).
    """
    gaps = tuple(part for gap in complement(held, first, last) for part in row.kept(*gap))
    if row.quorum.write_quorum == row.quorum.ensemble_size:
        return gaps
    ids = (e for low, high in gaps for e in range(low, high + 1))
    return ranges_of(e for e in ids if row.quorum.is_member(position, e))


def share(row: LedgerMetadata, position: int, first: int, last: int) -> int:
    """The number of entries of first..last that a position should store."""
    size = row.quorum.ensemble_size
    return sum(
        len(ids_of_residue(first, last, size, residue)) for residue in row.quorum.residues(position)
    )
