"""What a new incarnation of a bookie may have lost of a ledger, and what it lacks until it has all
again (rule 15).

Pure: a row, a name, and the ranges that are held. The bookie asks this, and so does the simulator.
"""

from collections.abc import Iterator
from typing import Final

from quorumlog.protocol.ids import ID_MAX, member_incarnation, member_name
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.ranges import Ranges, complement, ids_of_residue, ranges_of

ENDLESS: Final = ID_MAX - 1
"""The last entry of a range that has no end yet, as the queue of repairs can hold it."""


def older_members(row: LedgerMetadata, me: str) -> list[str]:
    """The older incarnations of this bookie that a row's fragments name: while there are any, the
    ledger is in limbo here.
    """
    name, incarnation = member_name(me), member_incarnation(me)
    named = {member for fragment in row.fragments for member in fragment.bookies}
    return sorted(
        member
        for member in named
        if member_name(member) == name and member_incarnation(member) < incarnation
    )


def places(row: LedgerMetadata, member: str) -> Iterator[tuple[int, int]]:
    """The ranges of a ledger's fragments that name a member, or keep it (rule 20b); an open one ends
    nowhere. An empty one names a member too: the member is replaced there, though nothing is copied.
    """
    kept = {r.first_entry for r in row.placed_repairs if r.leaving == member}
    for index, fragment in enumerate(row.fragments):
        if member in fragment.bookies or fragment.first_entry in kept:
            last = row.fragment_last(index)
            end = ENDLESS if last is None else last
            yield fragment.first_entry, max(end, fragment.first_entry)


def expected(row: LedgerMetadata, me: str) -> Iterator[tuple[int, int, int]]:
    """Position, first and last entry of each closed fragment that names this incarnation."""
    for index, fragment in enumerate(row.fragments):
        last = row.fragment_last(index)
        if me in fragment.bookies and last is not None:
            yield fragment.bookies.index(me), fragment.first_entry, last


def lacking(row: LedgerMetadata, position: int, first: int, last: int, held: Ranges) -> Ranges:
    """Which of first..last a position should store and does not hold (I27: while there are any,
    the ledger stays in limbo). What was given up is expected of nobody (rule 31).
    """
    gaps = tuple(part for gap in complement(held, first, last) for part in row.kept(*gap))
    if row.quorum.write_quorum == row.quorum.ensemble_size:
        return gaps
    ids = (e for low, high in gaps for e in range(low, high + 1))
    return ranges_of(e for e in ids if row.quorum.is_member(position, e))


def share(row: LedgerMetadata, position: int, first: int, last: int) -> int:
    """How many of first..last a position stores."""
    size = row.quorum.ensemble_size
    return sum(
        len(ids_of_residue(first, last, size, residue)) for residue in row.quorum.residues(position)
    )
