"""What must hold in a cluster of whole services, whatever happens (I1, I2, I4 to I9, I20 to I26).

The judge keeps books of its own: what clients were told, what became durable, what each row was.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quorumlog.protocol.ids import member_incarnation, member_name
from quorumlog.protocol.metadata import LedgerMetadata, Repair, State
from quorumlog.protocol.record import Entry
from quorumlog.protocol.row_copy import RowName
from tests.model.sim.services.plan import CUT, ServicePlan
from tests.model.sim.services.restores import Restores
from tests.model.sim.world import Violation, describe, judged
from tests.support import invariants
from tests.support.history import History

if TYPE_CHECKING:
    from tests.model.sim.services.node import Node


class Judge:
    """Raises Violation with the name of the invariant."""

    def __init__(self, plan: ServicePlan) -> None:
        self.plan = plan
        self.history = History()
        self.rows: dict[int, LedgerMetadata | None] = {}
        """As the service holds them; None is a tombstone."""
        self.ended: dict[int, LedgerMetadata] = {}
        """Rows as they were when their ledgers were deleted: that changes no end, for ever."""
        self.vanished: dict[int, LedgerMetadata] = {}
        """Rows that a database lacks which went back, as they were: of ledgers that no bookie has a copy of."""
        self.forks: dict[int, list[LedgerMetadata | None]] = {}
        """Rows that were answered, and that others took the place of by an older one."""
        self.acked: dict[int, int] = {}
        self.held: dict[tuple[int, str], dict[int, int]] = {}
        """By ledger, bookie and entry: the last incarnation in which it was durable there."""
        self.collected: dict[tuple[int, str], set[int]] = {}
        """By ledger and bookie: entries that the bookie dropped as garbage, and did not store again."""
        self.destroyed: dict[tuple[int, str], set[int]] = {}
        """By ledger and bookie: entries whose disk was wiped, and that the bookie did not store again."""
        self.targets: dict[tuple[int, str], int] = {}
        """By ledger and member: the version of the metadata that first named the member as a repair's target."""
        self.copies: dict[tuple[int, str], set[int]] = {}
        """By ledger and member: the versions of the row of which it ever kept a copy durably."""
        self.bytes_of: dict[tuple[int, int], Entry] = {}
        self.lost_copies = 0
        self.declared_lost: set[int] = set()
        """Ledgers of which an operator said that members are gone for ever."""
        self.marked: set[int] = set()
        """Ledgers that somebody began to recover: what a dead writer's members missed nobody knows."""
        self.unheld: set[tuple[int, int]] = set()
        """By ledger and entry: what nobody had when an operator began to give it up."""
        self._is_damaged = False
        self.may_be_had: Callable[[LedgerMetadata, int], bool] = lambda _row, _entry_id: True
        self.was_had = self.may_be_had
        """Whether a disk that may come back has an entry."""
        self.drops = 0
        self.restores = Restores()
        kinds = {fault.kind for fault in plan.faults}
        self._gateways_are_heard = not (plan.loss or plan.straggler or plan.answer_loss) and not (
            kinds & {"partition", "one-way", "clog", "gateway-paused"}
        )
        """Whether a gateway that lives answers whoever asks whether it does."""
        self.are_all_heard = self._gateways_are_heard and not (kinds & {"metadata-down", CUT})
        """Whether what a living process tells the metadata service comes there, and soon."""

    # --- what the world tells ------------------------------------------------------------------

    def watcher_of(self, ledger_id: int) -> "_OfLedger":
        """Who hears what becomes durable of a ledger."""
        return _OfLedger(self, ledger_id)

    def may_lose_a_copy(self) -> bool:
        """Whether one more copy may be destroyed: an ack quorum of them is data loss by design."""
        dead = self.plan.dead if self._is_damaged else 0
        return self._may_lose(self.plan.max_lost_copies - dead)

    def may_damage_a_copy(self) -> bool:
        """The same of one that stays and can't be read. An operator may declare lost who is dead for
        good, and not such a copy: a recovery that needs it for the ledger's length is blocked where
        all others are dead (seeds 532, 1323), or lost later (seed 407501).
        """
        may = self._may_lose(self.plan.max_lost_copies - self.plan.dead)
        self._is_damaged |= may
        return may

    def _may_lose(self, most: int) -> bool:
        self.lost_copies += 1
        return self.lost_copies <= most

    def stored(self, ledger_id: int, member: str, entries: Sequence[Entry]) -> None:
        """Entries became durable: equal ids mean equal bytes (I7)."""
        key = ledger_id, member_name(member)
        held, collected = self.held.setdefault(key, {}), self.collected.setdefault(key, set())
        for entry in entries:
            collected.discard(entry.entry_id)
            self.destroyed.get(key, set()).discard(entry.entry_id)
            held[entry.entry_id] = member_incarnation(member)
            known = self.bytes_of.setdefault((ledger_id, entry.entry_id), entry)
            where = f"{member}, ledger {ledger_id},"
            judged(invariants.same_bytes(where, entry.entry_id, known, entry))

    def changed(
        self,
        before: LedgerMetadata | None,
        after: LedgerMetadata | None,
        *,
        now: int,
        is_known: bool = False,
    ) -> None:
        """A row was changed; the service's own rules (I21 to I24) have let it pass. `is_known`: to the process
        that did it, that the database lacks changes.
        """
        if after is not None:
            self.restores.made(after)
        row = after or before
        assert row is not None
        if self.restores.lost:
            what = f"a row of {row.ledger_id} was changed"
            self.restores.changed(what, now, is_known=is_known)
        if self._is_fork(row.ledger_id, before):
            self._forked(row.ledger_id, after)
            return
        if after is None:
            assert before is not None
            self.rows[before.ledger_id] = None
            self.ended[before.ledger_id] = before
            return
        if before is not None:
            judged(
                invariants.version_grows_by_one(before, after),
                invariants.row_is_legal(after),
                invariants.state_goes_on(before, after),
                invariants.borders_stay(before, after),
                invariants.end_never_moves(before, after),
                invariants.repair_keeps_who_leaves(before, after, self._copies_of(after.ledger_id)),
            )
        ledger_id = after.ledger_id
        self.rows[ledger_id] = after
        for target in {r.target for r in after.repairs} - {
            r.target for r in (before.repairs if before else ())
        }:
            self.targets[ledger_id, target] = after.version
        if after.state is State.IN_RECOVERY:
            self.marked.add(ledger_id)
        acked = self.acked.get(ledger_id, -1)
        self._flagged(after)
        self._given_up(before, after)
        self._covers(after, acked)
        if before is not None and before.state is State.CLOSED:
            judged(invariants.repair_copies_first(before, after, self._held_of(ledger_id)))
        elif before is not None and after.state is State.CLOSED:
            self._declared_is_told(before, after)
            if after.may_lack_entries:
                self._only_the_lost_held(before, after)
        if ledger_id not in self.forks:
            self._acked_are_held(after, 0, acked)

    # --- a database that goes back -----------------------------------------------------------------

    def _is_fork(self, ledger_id: int, before: LedgerMetadata | None) -> bool:
        """Whether a change was made to another row than the last one that was answered."""
        if ledger_id not in self.rows:
            return ledger_id in self.vanished
        return not _is_same(self.rows[ledger_id], before)

    def _forked(self, ledger_id: int, after: LedgerMetadata | None) -> None:
        """An older row was changed, and nobody could know. Both lines hold what was acknowledged."""
        known = self.rows[ledger_id] if ledger_id in self.rows else self.vanished.pop(ledger_id)
        acked = self.acked.get(ledger_id, -1)
        if after is None:
            if known is not None:
                self.ended.setdefault(ledger_id, known)
        elif after.version == 1 and (known is None or acked >= 0):
            raise Violation(f"rule 17: {ledger_id} is given again, {acked} is acknowledged")
        else:
            self._covers(after, acked)
            self.marked.add(ledger_id)
        self.forks.setdefault(ledger_id, []).append(known)
        self.rows[ledger_id] = after

    def rebuilt(self, ledger_id: int, row: LedgerMetadata | None) -> None:
        """A row was made again of copies, or a tombstone of a deleted id (rule 18d)."""
        self.vanished.pop(ledger_id, None)
        self._replaced(ledger_id, row)

    def settle(self, rows: Mapping[int, LedgerMetadata | None]) -> None:
        """All bookies have told, and an operator has decided: these rows are what there is. What was acknowledged is
        of them.
        """
        for ledger_id, known in sorted(self.rows.items()):
            if ledger_id in rows:
                self._replaced(ledger_id, rows[ledger_id])
                continue
            del self.rows[ledger_id]
            if known is not None:
                self.vanished[ledger_id] = known
        for ledger_id, row in self.vanished.items():
            acked = self.acked.get(ledger_id, -1)
            # What only bookies held that are dead for good is lost by design, and nobody can tell of it (seed 201639).
            if any(self.was_had(row, entry_id) for entry_id in range(acked + 1)):
                raise Violation(f"rule 18d: {ledger_id} is lost, and has acknowledged entries")

    def _replaced(self, ledger_id: int, row: LedgerMetadata | None) -> None:
        known = self.rows.get(ledger_id)
        if ledger_id in self.rows and _is_same(known, row):
            return
        self.rows[ledger_id] = row
        if row is None:
            if ledger_id not in self.ended:
                raise Violation(f"rule 18d: {ledger_id} has a tombstone, and nobody deleted it")
            return
        self.ended.pop(ledger_id, None)  # of a deletion that no bookie had heard of
        self.marked.add(ledger_id)
        self._covers(row, self.acked.get(ledger_id, -1))

    def is_deleted(self, ledger_id: int) -> bool:
        """Whether a ledger's deletion is committed."""
        return ledger_id in self.ended

    def final(self, ledger_id: int) -> LedgerMetadata:
        """A ledger's row, or what that was at last."""
        found = self.rows.get(ledger_id) or self.ended.get(ledger_id)
        return found or self.vanished[ledger_id]

    def acknowledged(
        self, ledger_id: int, first: int, last: int, *, was_deleted: bool = False
    ) -> None:
        """A client was told that first..last are stored; `was_deleted` before it asked for that.
        One that asked before may hear of it later: what the end covers was stored then.
        """
        row = self.final(ledger_id)
        self.acked[ledger_id] = max(self.acked.get(ledger_id, -1), last)
        judged(invariants.deleted_takes_nothing(ledger_id, last, was_deleted=was_deleted))
        self._covers(row, last)
        if ledger_id not in self.forks:
            self._acked_are_held(row, first, last)

    def dropped(self, node: "Node", ledger_id: int, *, keep_stub: bool) -> None:
        """A bookie gives a ledger's entries up (I26, rule 18)."""
        self.drops += 1
        row = self.rows.get(ledger_id)
        if row is None:  # it is garbage, by whichever row: its deletion was committed
            return
        if row.attempt in self.restores.lost:
            # A target that got no place yet is no holder by the older row: whoever was to leave holds all. And if the
            # right row comes back, all is read back from the target before it gets the place (rule 20a).
            row = replace(row, repairs=row.placed_repairs)
        row = replace(
            row, repairs=tuple(r for r in row.repairs if not self._is_unreached(node, row, r))
        )
        judged(invariants.garbage_is_proven(node.me, row, keep_stub=keep_stub))

    def _is_unreached(self, node: "Node", row: LedgerMetadata, repair: Repair) -> bool:
        """Whether a bookie has nothing of a repair that began during the collector's last look. The bookie withholds
        the ledger's requests from that look to the drop, so every copy comes after the drop (seed 505192).
        """
        if repair in row.placed_repairs or member_name(repair.target) != node.name:
            return False
        first = self.targets.get((row.ledger_id, repair.target), 0)
        return all(name.version < first for name in node.ledger(row.ledger_id).row_names)

    def auditor_recovers(self, ledger_id: int, *, is_writer_there: bool) -> None:
        """Rule 21: a live writer is told, not fenced. One that can't be heard may be gone."""
        if is_writer_there and self._gateways_are_heard:
            raise Violation(f"rule 21: the auditor recovers {ledger_id}, whose writer lives")

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

    def _declared_is_told(self, before: LedgerMetadata, closed: LedgerMetadata) -> None:
        """Rule 14: a ledger that ended without members of its last fragment says so."""
        lost = set(closed.declared_lost) & set(before.last_fragment.bookies)
        if lost and not closed.may_lack_entries:
            raise Violation(
                f"rule 14: {closed.ledger_id} does not say that it ended without {lost}"
            )

    def _only_the_lost_held(self, before: LedgerMetadata, closed: LedgerMetadata) -> None:
        """Rule 14: a ledger is cut off only at an acknowledged entry that none but members that an
        operator declared lost have held durably. What follows that entry goes with it, whoever holds
        it: a ledger has no gaps (seed 7530).
        """
        assert closed.last_entry is not None
        entry_id = closed.last_entry + 1
        if entry_id > self.acked.get(closed.ledger_id, -1):
            return
        for _, member in before.members_of(entry_id):
            if member not in closed.declared_lost and self.has_held(
                closed.ledger_id, member, entry_id
            ):
                raise Violation(f"rule 14: {member} holds {closed.ledger_id}:{entry_id}")

    def _acked_are_held(self, row: LedgerMetadata, first: int, last: int) -> None:
        """I2: on an ack quorum of the fragment that owns it, copies that a fault destroyed
        included.
        """
        if row.may_lack_entries:
            return
        ids, held = range(first, last + 1), self._held_of(row.ledger_id)
        wrong = invariants.acked_reaches_quorum(row, ids, held)
        if wrong is not None:
            raise Violation(f"{wrong}: ledger {row.ledger_id}, {describe(row)}")

    def _covers(self, row: LedgerMetadata, acked: int) -> None:
        """I1, but for what an operator gave up."""
        wrong = invariants.closed_covers_acked(acked, row.last_entry)
        if wrong is not None and not row.may_lack_entries:
            raise Violation(f"{wrong}: ledger {row.ledger_id}, {describe(row)}")

    def _held_of(self, ledger_id: int) -> invariants.Held:
        return lambda member, entry_id: self.has_held(ledger_id, member, entry_id)

    def _copies_of(self, ledger_id: int) -> Callable[[str, int], bool]:
        return lambda member, version: version in self.copies.get((ledger_id, member), ())

    def has_held(self, ledger_id: int, member: str, entry_id: int) -> bool:
        """Whether an entry was durable at a member in its incarnation, or in a later one."""
        last = self.held.get((ledger_id, member_name(member)), {}).get(entry_id, 0)
        return last >= member_incarnation(member)


def _is_same(one: LedgerMetadata | None, other: LedgerMetadata | None) -> bool:
    """Whether these are one row of one line of history."""
    if one is None or other is None:
        return one is other
    return (one.version, one.attempt) == (other.version, other.attempt)


class _OfLedger:
    """The judge's ear for one ledger."""

    def __init__(self, judge: Judge, ledger_id: int) -> None:
        self._judge = judge
        self._ledger_id = ledger_id

    def stored(self, member: str, entries: Sequence[Entry]) -> None:
        self._judge.stored(self._ledger_id, member, entries)

    def copied(self, member: str, name: RowName) -> None:
        """A copy of a row became durable (rule 18b)."""
        self._judge.copies.setdefault((self._ledger_id, member), set()).add(name.version)
