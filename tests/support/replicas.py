"""A bookie's rules over entries in memory: what the simulator, the explorer and tests drive."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.keyed import Keyed
from quorumlog.protocol.messages import SendAdd, SendRow
from quorumlog.protocol.metadata import DigestKind
from quorumlog.protocol.ranges import Ranges, contains, ranges_of
from quorumlog.protocol.record import Entry, Run, pack
from quorumlog.protocol.replica import (
    AddAsked,
    Asked,
    Replica,
    ReplicaRecord,
    RowReported,
    RunStored,
    Verdict,
)
from quorumlog.protocol.row_copy import RowCopy, RowName, name_of


@dataclass(slots=True, eq=False)
class HeldEntries(Keyed):
    """Holdings in memory: entry by id. For the simulator and for tests."""

    entries: dict[int, Entry] = field(default_factory=dict)
    kind: DigestKind = DigestKind.NONE
    copies: dict[RowName, RowCopy] = field(default_factory=dict)

    @property
    def highest(self) -> int:
        """No entry above this id is held."""
        return max(self.entries, default=NO_ENTRY)

    def present(self, first: int, last: int) -> Ranges:
        """Which of first..last are held."""
        return ranges_of(sorted(e for e in self.entries if first <= e <= last))

    def accept(self, record: RunStored) -> None:
        """Hold these entries."""
        self.kind = record.run.kind
        for entry in record.run.entries():
            if record.replaces or entry.entry_id not in self.entries:
                self.entries[entry.entry_id] = entry

    def drop(self) -> None:
        """Hold no entry any more."""
        self.entries.clear()

    @property
    def row_names(self) -> tuple[RowName, ...]:
        """The copies of rows that are held."""
        return tuple(sorted(self.copies))

    def row_copy(self, name: RowName) -> RowCopy:
        """A copy that is held."""
        return self.copies[name]

    def keep_row_copy(self, row: RowCopy) -> None:
        """Hold a copy of a row from now on."""
        self.copies[row.name] = row

    def drop_row_copies(self, names: Collection[RowName]) -> None:
        """Drop these copies of rows."""
        for name in names:
            del self.copies[name]

    def run(self, ranges: Ranges) -> Run | None:
        """The held entries of these ranges, as one run."""
        chosen = [self.entries[e] for e in sorted(self.entries) if contains(ranges, e)]
        return pack(chosen, self.kind) if chosen else None


def memory_replica(me: str, *, is_deferred: bool = False) -> Replica:
    """An unknown ledger over `HeldEntries`."""
    return Replica(me, HeldEntries(), is_deferred=is_deferred)


def replay(me: str, records: Iterable[ReplicaRecord], *, is_deferred: bool = False) -> Replica:
    """A bookie's ledger after a restart that found these records: all of them are synced before
    anything is served (rule 3).
    """
    replica = memory_replica(me, is_deferred=is_deferred)
    for record in records:
        replica.apply(record)
    return replica


def add_asked(effect: SendAdd) -> AddAsked:
    """A machine's add as a bookie receives it, always with a copy of the row, whose body is not read."""
    name = None if effect.row is None else name_of(effect.row)
    return AddAsked(
        effect.member,
        effect.run,
        effect.ledger_key,
        recovery=effect.recovery,
        named_by=name,
        row=None if name is None else RowCopy(name, b""),
    )


def row_told(effect: SendRow) -> RowReported:
    """A copy of a row as a bookie receives it without an add."""
    row = effect.row
    return RowReported(effect.member, RowCopy(name_of(row), b""), row.ledger_key)


def ask(replica: Replica, asked: Asked) -> Verdict:
    """One step over `HeldEntries`, with what is stored compared at once."""
    verdict = replica.step(asked)
    if not verdict.compare:
        return verdict
    assert isinstance(asked, AddAsked)
    assert isinstance(replica.holdings, HeldEntries)
    return replica.step(replace(asked, stored=replica.holdings.run(verdict.compare)))
