"""Collects the answers of one fragment's members about a range of entries, and judges each entry.

Recovery, repair and regular reads use tallies. A copy with a valid digest proves an entry, and
explicit denials prove its absence. Without such proof, the entry is unknown (I16).
"""

from collections.abc import Collection, Iterator
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import Enum
from typing import Annotated

from quorumlog.protocol import record
from quorumlog.protocol.keyed import Keyed, Out
from quorumlog.protocol.messages import ReadAnswered, Status
from quorumlog.protocol.metadata import Fragment
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.ranges import Ranges, contains
from quorumlog.protocol.record import Codec, Entry, Run


class EntryVerdict(Enum):
    """The conclusion about an entry that the members' answers prove."""

    PRESENT = "present"
    ABSENT = "absent"
    UNDECIDED = "undecided"
    """A member whose answer may decide has not answered yet."""
    BLOCKED = "blocked"
    """All members have answered, but prove neither presence nor absence."""


@dataclass(slots=True, eq=False)
class Tally(Keyed):
    """The answers to reads of entries first..last of one fragment.

    Each position has a cursor: the first entry that the position stores and has not answered about,
    or None if no further answer is expected. A request asks for the entries from there to `last`.
    """

    quorum: Quorum
    fragment: Fragment
    _: KW_ONLY
    first: int
    last: int
    declared_lost: InitVar[tuple[str, ...]] = ()
    """Members that are not asked. They count as denials once all other members have denied the
    entry (rule 14)."""
    lost: int = 0
    """The positions of members declared lost, as a bit mask."""
    found: dict[int, Run] = field(default_factory=dict)
    """For each entry with a valid copy, a run that contains the copy."""
    absent: list[Ranges] = field(default_factory=list)
    what: Annotated[list[str], Out("only for error texts; decides nothing")] = field(
        default_factory=list
    )
    cursors: list[int | None] = field(default_factory=list)

    def __post_init__(self, declared_lost: tuple[str, ...]) -> None:
        """Start without answers."""
        for position, member in enumerate(self.fragment.bookies):
            is_lost = member in declared_lost
            self.absent.append(())
            self.lost |= is_lost << position
            self.what.append("declared lost" if is_lost else "not asked")
            self.cursors.append(None if is_lost else self._own(position, self.first))

    def _own(self, position: int, entry_id: int) -> int | None:
        """The first entry from `entry_id` on that a position stores; None if above `last`."""
        while not self.quorum.is_member(position, entry_id):
            entry_id += 1
        return entry_id if entry_id <= self.last else None

    @property
    def is_asked(self) -> bool:
        """Whether an answer of any member is still expected."""
        return any(cursor is not None for cursor in self.cursors)

    def is_answer(self, event: ReadAnswered) -> bool:
        """Whether an event answers the latest request to its position."""
        return (
            self.fragment.bookies[event.position] == event.member
            and self.cursors[event.position] == event.first
            and self.last == event.last
        )

    def verdict(self, entry_id: int) -> EntryVerdict:
        """The verdict about an entry, from the answers so far."""
        if entry_id in self.found:
            return EntryVerdict.PRESENT
        if self._is_absent(entry_id):
            return EntryVerdict.ABSENT
        return EntryVerdict.UNDECIDED if self.may_decide(entry_id) else EntryVerdict.BLOCKED

    def may_decide(self, entry_id: int) -> tuple[int, ...]:
        """The positions that have not answered about an entry, in order of its write set."""
        silent = []
        for position in self.quorum.write_set(entry_id):
            cursor = self.cursors[position]
            if cursor is not None and cursor <= entry_id:
                silent.append(position)
        return tuple(silent)

    def _is_absent(self, entry_id: int) -> bool:
        # I16, X11: absence needs Qw-Qa+1 explicit denials by the entry's write set; silence is no
        # denial. Rule 14: lost members count as denials once all other members have denied the
        # entry. Without lost members, the second condition below implies the first.
        negative, lost = self._negatives(entry_id)
        quorum = self.quorum
        if negative >= quorum.negatives_needed:
            return True
        return negative + lost == quorum.write_quorum

    def _negatives(self, entry_id: int) -> tuple[int, int]:
        """Count the members of an entry's write set that denied the entry or are lost."""
        negative = lost = 0
        for position in self.quorum.write_set(entry_id):
            if self.lost & 1 << position:
                lost += 1
            elif contains(self.absent[position], entry_id):
                negative += 1
        return negative, lost

    def note(self, answer: ReadAnswered, codec: Codec, ledger_id: int) -> int | None:
        """Process a position's answer, which begins at its cursor. Returns the entry from which to
        ask the position again, or None if no further answer is expected. An answer that ends early
        because of a size limit proves nothing about later entries (rule 1).
        """
        position, cursor = answer.position, self.cursors[answer.position]
        assert cursor is not None, "the answer must be awaited"
        run = answer.run
        absent = answer.absent
        if answer.status is Status.NO_ENTRY:
            run, absent = None, ((answer.first, answer.last),)
        elif answer.status is not Status.OK or (run is not None and run.ledger_id != ledger_id):
            self.cursors[position] = None
            self.what[position] = answer.status.value
            return None
        absent = tuple(sorted(absent))
        self.absent[position] = tuple(sorted(self.absent[position] + absent))
        named: Collection[int] = ()
        if run is not None:
            bad = self._invalid(run, codec)
            named = run.ids
            if isinstance(named, range):
                self._take_stretch(position, run, named, bad)
            else:
                named = set(named)
                self._take(position, run, bad)
            if bad:
                self.what[position] = "damaged"
        unnamed = self._unnamed(position, cursor, named, absent)
        following = next(unnamed, None)
        if following == cursor:
            # The position answered "unknown" for the first entry: continue after this entry.
            self.what[position] = "unknown"
            following = next(unnamed, None) if named or absent else None
        self.cursors[position] = following
        return following

    def _take(self, position: int, run: Run, bad: set[int]) -> None:
        """Keep a valid copy of each entry that the position stores, unless a copy is known."""
        for entry_id in run.ids:
            if entry_id not in bad and self.quorum.is_member(position, entry_id):
                self.found.setdefault(entry_id, run)

    def _take_stretch(self, position: int, run: Run, ids: range, bad: set[int]) -> None:
        """Keep the entries of a run without gaps. If all entries are new and valid, as in most
        sequential reads, a single update adds them.
        """
        if bad or self.quorum.is_striped or not self.found.keys().isdisjoint(ids):
            self._take(position, run, bad)
        else:
            self.found.update(dict.fromkeys(ids, run))

    def _invalid(self, run: Run, codec: Codec) -> set[int]:
        # Overview 1.4: an entry with a wrong digest is not denied, and is read from other members.
        return set(run.invalid(codec))

    def _unnamed(
        self, position: int, cursor: int, named: Collection[int], absent: Ranges
    ) -> Iterator[int]:
        size, residues = self.quorum.ensemble_size, self.quorum.residues(position)
        if isinstance(named, range) and cursor in named:
            cursor = named.stop
        for entry_id in range(cursor, self.last + 1):
            if (
                entry_id not in named
                and entry_id % size in residues
                and not contains(absent, entry_id)
            ):
                yield entry_id

    def runs(self, first: int, last: int) -> Run:
        """The copies of entries first..last, all present, as one run, bytes unchanged (rule 2)."""
        run = self.found[first]
        if run.first == first and run.last == last and run.count == last - first + 1:
            return run
        entries = [self._entry(entry_id) for entry_id in range(first, last + 1)]
        return record.pack(entries, run.kind)

    def length_of(self, entry_id: int) -> int:
        """The ledger's length up to a present entry, read from the entry."""
        return self._entry(entry_id).length

    def _entry(self, entry_id: int) -> Entry:
        run = self.found[entry_id]
        index = run.index(entry_id)
        assert index is not None, "the run must contain an entry that was found in it"
        return run.entry(index)

    def culprit(self, entry_id: int) -> str:
        """The member to name in an error: a member of the write set that did not deny the entry."""
        members = self.fragment.bookies
        for position in self.quorum.write_set(entry_id):
            if not contains(self.absent[position], entry_id):
                return members[position]
        return members[self.quorum.write_set(entry_id)[0]]

    def said(self, entry_id: int) -> str:
        """The write set's answers about an entry that is not present, as text for an error."""
        parts = []
        for position in self.quorum.write_set(entry_id):
            is_absent = contains(self.absent[position], entry_id)
            what = "absent" if is_absent else self.what[position]
            parts.append(f"{self.fragment.bookies[position]}: {what}")
        return ", ".join(parts)
