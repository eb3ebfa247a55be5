"""What must hold in a cluster of whole services, whatever happens (I1, I2, I4 to I9, I20 to I26).

The judge keeps books of its own: what clients were told, what became durable, what each row was.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quorumlog.protocol.ids import member_incarnation, member_name
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.record import Entry
from tests.sim.services.plan import ServicePlan
from tests.sim.world import Violation, describe
from tests.support.history import History

if TYPE_CHECKING:
    from tests.sim.services.node import Node


class Judge:
    """Raises Violation with the name of the invariant."""

    def __init__(self, plan: ServicePlan) -> None:
        self.plan = plan
        self.history = History()
        self.rows: dict[int, LedgerMetadata | None] = {}
        """As the service holds them; None is a tombstone."""
        self.acked: dict[int, int] = {}
        self.held: dict[tuple[int, str], dict[int, int]] = {}
        """By ledger, bookie and entry: the last incarnation in which it was durable there."""
        self.bytes_of: dict[tuple[int, int], Entry] = {}
        self.lost_copies = 0
        self.declared_lost: set[int] = set()
        """Ledgers of which an operator said that members are gone for ever."""
        self.marked: set[int] = set()
        """Ledgers that somebody began to recover: what a dead writer's members missed nobody knows."""
        self.unheld: set[tuple[int, int]] = set()
        """By ledger and entry: what nobody had when an operator began to give it up."""
        self.may_be_had: Callable[[LedgerMetadata, int], bool] = lambda _row, _entry_id: True
        """Whether a disk that may come back has an entry."""
        self.drops = 0

    # --- what the world tells ------------------------------------------------------------------

    def watcher_of(self, ledger_id: int) -> "_OfLedger":
        """Who hears what becomes durable of a ledger."""
        return _OfLedger(self, ledger_id)

    def may_lose_a_copy(self) -> bool:
        """Whether one more copy may be destroyed: an ack quorum of them is data loss by design."""
        self.lost_copies += 1
        return self.lost_copies <= self.plan.max_lost_copies

    def stored(self, ledger_id: int, member: str, entries: Sequence[Entry]) -> None:
        """Entries became durable: equal ids mean equal bytes (I7)."""
        held = self.held.setdefault((ledger_id, member_name(member)), {})
        for entry in entries:
            held[entry.entry_id] = member_incarnation(member)
            if self.bytes_of.setdefault((ledger_id, entry.entry_id), entry) != entry:
                raise Violation(f"I7: {member} holds other bytes of {ledger_id}:{entry.entry_id}")

    def changed(self, before: LedgerMetadata | None, after: LedgerMetadata | None) -> None:
        """A row was changed; the service's own rules (I21 to I24) have let it pass."""
        if after is None:
            assert before is not None
            self.rows[before.ledger_id] = None
            return
        if before is not None and after.version != before.version + 1:
            raise Violation(f"I20: version {before.version} became {after.version}")
        ledger_id = after.ledger_id
        self.rows[ledger_id] = after
        if after.state is State.IN_RECOVERY:
            self.marked.add(ledger_id)
        acked = self.acked.get(ledger_id, -1)
        self._flagged(after)
        self._given_up(before, after)
        if after.last_entry is not None and acked > after.last_entry and not after.may_lack_entries:
            raise Violation(f"I1: {ledger_id}:{acked} is acknowledged, {describe(after)}")
        if before is not None and before.state is State.CLOSED:
            self._repaired(before, after)
        self._acked_are_held(after, 0, acked)

    def acknowledged(self, ledger_id: int, first: int, last: int) -> None:
        """A client was told that first..last are stored."""
        row = self.rows[ledger_id]
        self.acked[ledger_id] = max(self.acked.get(ledger_id, -1), last)
        if row is None:
            return  # deleted meanwhile
        if row.last_entry is not None and last > row.last_entry and not row.may_lack_entries:
            raise Violation(f"I1: {ledger_id}:{last} is acknowledged, {describe(row)}")
        self._acked_are_held(row, first, last)

    def dropped(self, node: "Node", ledger_id: int, *, keep_stub: bool) -> None:
        """A bookie gives a ledger's entries up (I26, rule 18)."""
        self.drops += 1
        row = self.rows[ledger_id]
        if row is None:
            if keep_stub:
                raise Violation(f"rule 17: {node.me} keeps a stub of the deleted {ledger_id}")
            return
        if not keep_stub:
            raise Violation(f"I26: {node.me} forgets {ledger_id}, which is not deleted")
        names = {member_name(member) for member in row.all_members}
        if row.state is not State.CLOSED or node.name in names:
            raise Violation(f"I26: {node.me} drops {ledger_id}: {describe(row)} {row.repairs}")

    # --- the invariants --------------------------------------------------------------------------

    def _flagged(self, row: LedgerMetadata) -> None:
        if row.may_lack_entries and not (row.ledger_id in self.declared_lost or row.lost_entries):
            raise Violation(f"rule 14: {row.ledger_id} may lack entries, and nobody said so")

    def _given_up(self, before: LedgerMetadata | None, after: LedgerMetadata) -> None:
        """Rule 31: only what nobody can serve."""
        for first, last in after.lost_entries:
            for entry_id in range(first, last + 1):
                is_old = before is not None and before.lost_at(entry_id) is not None
                is_unheld = (after.ledger_id, entry_id) in self.unheld
                if not is_old and not is_unheld and self.may_be_had(after, entry_id):
                    raise Violation(
                        f"rule 31: {after.ledger_id}:{entry_id} is given up, and is there"
                    )

    def _acked_are_held(self, row: LedgerMetadata, first: int, last: int) -> None:
        """I2: on an ack quorum of the fragment that owns it, copies that a fault destroyed
        included.
        """
        if row.may_lack_entries:
            return
        for entry_id in range(first, last + 1):
            holders = sum(
                self.has_held(row.ledger_id, member, entry_id)
                for _, member in row.members_of(entry_id)
            )
            if holders < row.quorum.ack_quorum:
                raise Violation(
                    f"I2: {row.ledger_id}:{entry_id} is acknowledged, {holders} of its members"
                    f" hold it: {describe(row)}"
                )

    def _repaired(self, before: LedgerMetadata, after: LedgerMetadata) -> None:
        """I25: only members change, once all their entries are copied."""
        for index, fragment in enumerate(after.fragments):
            old, end = before.fragments[index].bookies, after.fragment_last(index)
            for position, member in enumerate(fragment.bookies):
                if member == old[position]:
                    continue
                lacking = [
                    entry_id
                    for entry_id in range(fragment.first_entry, (end or 0) + 1)
                    if end is not None
                    and entry_id <= end
                    and after.quorum.is_member(position, entry_id)
                    and after.lost_at(entry_id) is None
                    and not self.has_held(after.ledger_id, member, entry_id)
                ]
                if lacking:
                    raise Violation(f"I25: {member} lacks {lacking} of {after.ledger_id}")

    def has_held(self, ledger_id: int, member: str, entry_id: int) -> bool:
        """Whether an entry was durable at a member in its incarnation, or in a later one."""
        last = self.held.get((ledger_id, member_name(member)), {}).get(entry_id, 0)
        return last >= member_incarnation(member)


class _OfLedger:
    """The judge's ear for one ledger."""

    def __init__(self, judge: Judge, ledger_id: int) -> None:
        self._judge = judge
        self._ledger_id = ledger_id

    def stored(self, member: str, entries: Sequence[Entry]) -> None:
        self._judge.stored(self._ledger_id, member, entries)
