"""Which entries nobody can serve any more (rule 31): the proof that an operator's acceptance needs.

Proof is the word of all who could hold an entry: each answered, and none has it. A bookie answers
for its disk, whatever its incarnation; silence is no proof, and neither is a copy that can't be
read (X15). Only an operator may say that such a member is gone for ever (rule 14).
Pure: a row, and what was answered.
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
    """What a bookie says that its disk has of a range: by its index, and which of it can't be read."""

    present: Ranges
    damaged: Ranges

    def word(self, entry_id: int) -> Word:
        """What it says of one entry."""
        if not contains(self.present, entry_id):
            return Word.ABSENT
        return Word.DAMAGED if contains(self.damaged, entry_id) else Word.HELD


@dataclass(frozen=True, slots=True)
class Answers:
    """Entries first..last, and what each who could hold them answered, the same for all of them."""

    first: int
    last: int
    words: tuple[tuple[str, Word], ...]

    def __str__(self) -> str:
        """For people."""
        said = ", ".join(f"{member}: {word}" for member, word in self.words)
        return f"entries {self.first} to {self.last} ({said})"

    def is_lost(self, declared: Iterable[str] = ()) -> bool:
        """Whether nobody can serve them. A member that is `declared` gone need not answer;
        if it answers nevertheless that it has them, it has them.
        """
        return all(
            word is Word.ABSENT or (word is not Word.HELD and member in declared)
            for member, word in self.words
        )


def holders(row: LedgerMetadata, entry_id: int) -> tuple[str, ...]:
    """Who could hold an entry, by name: its write set, who is being given its fragment (rule 20), and
    who is kept after it lost its place (rule 20b).
    """
    first = row.fragment_of(entry_id).first_entry
    targets = {repair.target for repair in row.repairs if repair.first_entry == first}
    kept = {repair.leaving for repair in row.placed_repairs if repair.first_entry == first}
    return tuple(sorted({*(member for _, member in row.members_of(entry_id)), *targets, *kept}))


def answers(
    row: LedgerMetadata, ids: Iterable[int], told: Mapping[str, Holding | None]
) -> Iterator[Answers]:
    """What was answered about ascending ids; neighbours of the same fate make one range."""
    found: Answers | None = None
    for entry_id in ids:
        words = []
        for member in holders(row, entry_id):
            holding = told.get(member)
            words.append((member, Word.SILENT if holding is None else holding.word(entry_id)))
        if found is not None and (found.last + 1, found.words) == (entry_id, tuple(words)):
            found = Answers(found.first, entry_id, found.words)
            continue
        if found is not None:
            yield found
        found = Answers(entry_id, entry_id, tuple(words))
    if found is not None:
        yield found
