"""A bookie's rules over entries in memory: what the simulator, the explorer and tests drive."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.keyed import Keyed
from quorumlog.protocol.metadata import DigestKind
from quorumlog.protocol.ranges import Ranges, contains, ranges_of
from quorumlog.protocol.record import Entry, Run, pack
from quorumlog.protocol.replica import AddAsked, Asked, Record, Replica, RunStored, Verdict


@dataclass(slots=True, eq=False)
class HeldEntries(Keyed):
    """Holdings in memory: entry by id. For the simulator and for tests."""

    entries: dict[int, Entry] = field(default_factory=dict)
    kind: DigestKind = DigestKind.NONE

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

    def run(self, ranges: Ranges) -> Run | None:
        """What is held of these ranges, as one run."""
        chosen = [self.entries[e] for e in sorted(self.entries) if contains(ranges, e)]
        return pack(chosen, self.kind) if chosen else None


def memory_replica(me: str, *, is_deferred: bool = False) -> Replica:
    """An unknown ledger over `HeldEntries`."""
    return Replica(me, HeldEntries(), is_deferred=is_deferred)


def replay(me: str, records: Iterable[Record], *, is_deferred: bool = False) -> Replica:
    """A bookie's ledger after a restart that found these records: all of them are synced before
    anything is served (rule 3).
    """
    replica = memory_replica(me, is_deferred=is_deferred)
    for record in records:
        replica.apply(record)
    return replica


def ask(replica: Replica, asked: Asked) -> Verdict:
    """One step over `HeldEntries`, with what is stored compared at once."""
    verdict = replica.step(asked)
    if not verdict.compare:
        return verdict
    assert isinstance(asked, AddAsked)
    assert isinstance(replica.holdings, HeldEntries)
    return replica.step(
        AddAsked(
            asked.member,
            asked.run,
            asked.ledger_key,
            asked.recovery,
            asked.read_only,
            replica.holdings.run(verdict.compare),
        )
    )
