"""Proves that no bookie can serve an entry any longer, so that an operator may accept the loss.

An entry is proven lost if every bookie that could have the entry has denied it (rule 31). A
bookie's answer counts for all its incarnations, because it is about the bookie's disk. Silence and
unreadable copies prove nothing (X15). So only an operator may declare a silent member, or a member
with unreadable copies, lost for ever (rule 14).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.ranges import Ranges, contains


class Word(StrEnum):
    """A member's answer about an entry."""

    HELD = "held"
    ABSENT = "absent"
    DAMAGED = "damaged"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Holding:
    """The entries of a range that a bookie's index lists, and the unreadable entries among them."""

    present: Ranges
    damaged: Ranges

    def word(self, entry_id: int) -> Word:
        """The bookie's answer about one entry."""
        if not contains(self.present, entry_id):
            return Word.ABSENT
        return Word.DAMAGED if contains(self.damaged, entry_id) else Word.HELD


@dataclass(frozen=True, slots=True)
class Answers:
    """Entries first..last for which each bookie that could hold them gave one answer."""

    first: int
    last: int
    words: tuple[tuple[str, Word], ...]

    def __str__(self) -> str:
        """The range and the answers as text for an operator."""
        said = ", ".join(f"{member}: {word}" for member, word in self.words)
        return f"entries {self.first} to {self.last} ({said})"

    def is_lost(self, declared: Iterable[str] = ()) -> bool:
        """Whether no member can serve these entries. Each member must have denied the entries, or
        be declared lost for ever (in `declared`) and not have reported that it holds the entries.
        """
        return all(
            word is Word.ABSENT or (word is not Word.HELD and member in declared)
            for member, word in self.words
        )


def holders(row: LedgerMetadata, entry_id: int) -> tuple[str, ...]:
    """The members that could hold an entry, sorted: the members of its write set, the targets of
    its fragment's repairs (rule 20), and replaced members that are still kept (rule 20b).
    """
    first = row.fragment_of(entry_id).first_entry
    targets = {repair.target for repair in row.repairs if repair.first_entry == first}
    kept = {repair.leaving for repair in row.placed_repairs if repair.first_entry == first}
    return tuple(sorted({*(member for _, member in row.members_of(entry_id)), *targets, *kept}))


def answers(
    row: LedgerMetadata, ids: Iterable[int], reported: Mapping[str, Holding | None]
) -> Iterator[Answers]:
    """The answers about ascending ids; adjacent entries with equal answers form ranges."""
    found: Answers | None = None
    for entry_id in ids:
        words = []
        for member in holders(row, entry_id):
            holding = reported.get(member)
            words.append((member, Word.SILENT if holding is None else holding.word(entry_id)))
        if found is not None and (found.last + 1, found.words) == (entry_id, tuple(words)):
            found = Answers(found.first, entry_id, found.words)
            continue
        if found is not None:
            yield found
        found = Answers(entry_id, entry_id, tuple(words))
    if found is not None:
        yield found
