"""Proves which entries no bookie can serve any longer, so that an operator may accept their loss.

Rule 31: an entry is proven lost if each bookie that could hold it answered, and none has it. A
bookie answers for its disk, whatever its incarnation. Silence proves nothing, nor does a copy that
can't be read (X15): only an operator may declare such a member lost for ever (rule 14). Pure
functions of metadata and bookies' answers.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.ranges import Ranges, contains


class Word(StrEnum):
    """What a member answered about an entry."""

    HELD = "held"
    ABSENT = "absent"
    DAMAGED = "damaged"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Holding:
    """The entries of a range in a bookie's index, and those of them that can't be read."""

    present: Ranges
    damaged: Ranges

    def word(self, entry_id: int) -> Word:
        """The bookie's answer about one entry."""
        if not contains(self.present, entry_id):
            return Word.ABSENT
        return Word.DAMAGED if contains(self.damaged, entry_id) else Word.HELD


@dataclass(frozen=True, slots=True)
class Answers:
    """Entries first..last, and each possible holder's answer, which is the same for all of them."""

    first: int
    last: int
    words: tuple[tuple[str, Word], ...]

    def __str__(self) -> str:
        """The range and the answers, as text for people."""
        said = ", ".join(f"{member}: {word}" for member, word in self.words)
        return f"entries {self.first} to {self.last} ({said})"

    def is_lost(self, declared: Iterable[str] = ()) -> bool:
        """Whether no member can serve these entries. A member in `declared` (lost for ever) need
        not have answered. Entries that a member reports as held are not lost.
        """
        return all(
            word is Word.ABSENT or (word is not Word.HELD and member in declared)
            for member, word in self.words
        )


def holders(row: LedgerMetadata, entry_id: int) -> tuple[str, ...]:
    """The members that could hold an entry, sorted: its write set, the targets of repairs of its
    fragment (rule 20), and the members kept after they lost their place there (rule 20b).
    """
    first = row.fragment_of(entry_id).first_entry
    targets = {repair.target for repair in row.repairs if repair.first_entry == first}
    kept = {repair.leaving for repair in row.placed_repairs if repair.first_entry == first}
    return tuple(sorted({*(member for _, member in row.members_of(entry_id)), *targets, *kept}))


def answers(
    row: LedgerMetadata, ids: Iterable[int], reported: Mapping[str, Holding | None]
) -> Iterator[Answers]:
    """The answers about ascending ids; adjacent entries with the same answers make one range."""
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
