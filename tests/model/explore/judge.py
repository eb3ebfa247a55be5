"""What must hold after each step of an explored world."""

from quorumlog.protocol.ids import member_name
from quorumlog.protocol.metadata import LedgerMetadata
from tests.model.explore.bookies import ModelBookie
from tests.model.explore.parts import Broken, LedgerParts
from tests.support import invariants


class Judge:
    """Rules over the whole world: I1, I2, I4, I9, I21, I22."""

    def __init__(self, parts: LedgerParts) -> None:
        self.parts = parts
        self._copies: dict[tuple[int, tuple[int, ...], int], str | None] = {}

    def acked(self, acked: int, end: int | None, bookies: tuple[int, ...], row: int) -> None:
        """Entries up to `acked` were just acknowledged."""
        broken_if(invariants.closed_covers_acked(acked, end))
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

        def has_held(member: str, entry_id: int) -> bool:
            bookie: ModelBookie = values[bookies[names.index(member_name(member))]]
            return bool(bookie.ever_held(entry_id))

        return invariants.acked_reaches_quorum(row, range(acked + 1), has_held)

    def row(self, before: LedgerMetadata, after: LedgerMetadata, acked: int, given: int) -> None:
        """The row has changed; `given` ids were given out."""
        broken_if(
            invariants.first_wrong(
                invariants.row_is_legal(after),
                invariants.state_goes_on(before, after),
                invariants.end_never_moves(before, after),
                invariants.borders_stay(before, after),
                invariants.closed_covers_acked(acked, after.last_entry),
            )
        )
        if after.last_entry is not None:
            broken_if(invariants.was_appended(after.last_entry, given))


def broken_if(wrong: invariants.Wrong) -> None:
    """Raise Broken where a check says what is wrong."""
    if wrong is not None:
        raise Broken(wrong)
