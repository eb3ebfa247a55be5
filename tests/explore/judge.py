"""What must hold after each step of an explored world."""

from quorumlog.protocol.ids import member_name
from quorumlog.protocol.metadata import LedgerMetadata, State
from tests.explore.bookies import Bookie
from tests.explore.parts import Broken, Parts
from tests.sim.world import describe

_ORDER = (State.OPEN, State.IN_RECOVERY, State.CLOSED)


class Judge:
    """Rules over all that there is: I1, I2, I4, I9, I21, I22."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._copies: dict[tuple[int, tuple[int, ...], int], str | None] = {}

    def acked(self, acked: int, end: int | None, bookies: tuple[int, ...], row: int) -> None:
        """Entries up to `acked` were just acknowledged."""
        if end is not None and acked > end:
            raise Broken(f"I1: {acked} is acknowledged, the ledger ended at {end}")
        self.copies(acked, bookies, row)

    def copies(self, acked: int, bookies: tuple[int, ...], row: int) -> None:
        """I2: each acknowledged entry is on an ack quorum of the fragment that owns it."""
        key = acked, bookies, row
        if key not in self._copies:
            self._copies[key] = self._lacking(acked, bookies, self.parts.rows.values[row])
        if (broken := self._copies[key]) is not None:
            raise Broken(broken)

    def _lacking(self, acked: int, bookies: tuple[int, ...], row: LedgerMetadata) -> str | None:
        names, values = self.parts.names, self.parts.bookies.values
        for entry_id in range(acked + 1):
            holders = 0
            for _, member in row.members_of(entry_id):
                bookie: Bookie = values[bookies[names.index(member_name(member))]]
                holders += bookie.ever_held(entry_id)
            if holders < self.parts.quorum.ack_quorum:
                return f"I2: entry {entry_id} is acknowledged, {holders} members hold it"
        return None

    def row(self, before: LedgerMetadata, after: LedgerMetadata, acked: int, given: int) -> None:
        """The row has changed; `given` ids were given out."""
        try:
            after.check()
        except AssertionError as broken:
            raise Broken(f"{broken}") from broken
        if _ORDER.index(after.state) < _ORDER.index(before.state):
            raise Broken(f"I21: {before.state} became {after.state}")
        if before.state is State.CLOSED and (before.last_entry, before.length) != (
            after.last_entry,
            after.length,
        ):
            raise Broken(f"I4: the end moved from {before.last_entry} to {after.last_entry}")
        firsts = [f.first_entry for f in before.fragments]
        kept = [f.first_entry for f in after.fragments][: len(firsts)]
        if after.state is not State.CLOSED and kept != firsts:
            raise Broken(f"I22: {describe(before)} became {describe(after)}")
        if after.last_entry is not None:
            if acked > after.last_entry:
                raise Broken(f"I1: {acked} is acknowledged, closed at {after.last_entry}")
            if after.last_entry >= given:
                raise Broken(f"I9: closed at {after.last_entry}, {given} appended")
