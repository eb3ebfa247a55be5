"""What must hold in the simulated world, whatever happens (I1 to I25).

The checker sees everything at once: each step of a client, each record that became durable, each
change of the row. It keeps its own books and asks the machines nothing, so that a fault of a
machine cannot hide itself.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from quorumlog.protocol.ids import NO_ENTRY, member_incarnation, member_name
from quorumlog.protocol.messages import (
    AppendRequested,
    Begin,
    Closed,
    Confirmed,
    Effect,
    Event,
    Failed,
    FenceAnswered,
    ReadAnswered,
    RecoverRequested,
    SendAdd,
    SendRead,
    Status,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.record import Entry
from quorumlog.protocol.row_copy import RowName, name_of
from tests.model.sim.world import Client, Violation, World, judged
from tests.support import invariants
from tests.support.history import History, check


@dataclass(slots=True)
class Recovery:
    """What a recoverer has heard, by our own books."""

    covered: set[int] = field(default_factory=set)
    negatives: dict[int, set[int]] = field(default_factory=dict)
    lac: int = NO_ENTRY


class Checker:
    """Raises Violation with the name of the invariant."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.quorum = world.plan.quorum
        self.history = History()
        self.acked = NO_ENTRY
        """The writer told its callers that 0..acked are stored."""
        self.appended: list[bytes] = []
        self.ends: set[tuple[int, int]] = set()
        self.closed_by = ""
        self.marked: LedgerMetadata | None = None
        """The row when it became IN_RECOVERY."""
        self.held: dict[str, dict[int, int]] = {}
        """By bookie and entry: the last incarnation in which it was durable there."""
        self.is_loss_accepted = False
        self.told_ends: set[tuple[int, int]] = set()
        """Ends that a client was told of, once enough members kept the row of the close."""
        self.named: RowName | None = None
        """The row by which the writer sent entries last."""
        self._named: LedgerMetadata | None = None
        self.copies: dict[str, set[RowName]] = {}
        """By member: the rows of which it ever kept a copy durably."""
        self.bytes_of: dict[int, Entry] = {}
        self.recoveries: dict[str, Recovery] = {}
        self.ops: dict[int, int] = {}
        self.bad: dict[str, dict[str, set[int]]] = {}
        """By repair and bookie: copies that were damaged when the repair began, and still are."""
        self.wanted: LedgerMetadata | None = None
        """The last ensemble change that the writer asked for."""

    # --- what the world tells ------------------------------------------------------------------

    def before_step(self, client: Client, event: Event) -> None:
        """Keep our own books of what a client hears."""
        match event:
            case AppendRequested(payloads):
                for payload in payloads:
                    self.ops[len(self.appended)] = self.history.append(
                        self.world.metadata.ledger_id, payload
                    )
                    self.appended.append(payload)
            case Begin() if client.name.startswith("repairer"):
                self.bad[client.name] = {
                    name: set(bookie.damaged) for name, bookie in self.world.bookies.items()
                }
            case RecoverRequested():
                self.recoveries[client.name] = Recovery()
            case FenceAnswered(position, _, Status.OK, lac):
                judged(invariants.lac_is_bounded(lac, self.acked, "a bookie"))
                if client.name in self.recoveries:
                    recovery = self.recoveries[client.name]
                    recovery.covered.add(position)
                    recovery.lac = max(recovery.lac, lac)
            case ReadAnswered(position, _, _, _, Status.OK, _, absent):
                if client.name in self.recoveries:
                    negatives = self.recoveries[client.name].negatives
                    for first, last in absent:
                        for entry_id in range(first, min(last, len(self.appended)) + 1):
                            if self.quorum.is_member(position, entry_id):
                                negatives.setdefault(entry_id, set()).add(position)
            case _:
                pass

    def effect(self, client: Client, effect: Effect) -> None:
        """Judge what a client asks for or tells."""
        match effect:
            case Confirmed(first, last):
                self._confirmed(first, last)
            case SendAdd(position, _, _, run):
                judged(invariants.lac_is_bounded(run.last_add_confirmed, self.acked, client.name))
                if any(not self.quorum.is_member(position, entry_id) for entry_id in run.ids):
                    raise Violation(f"I2: position {position} is sent entries of other positions")
                if effect.row is not None and effect.row is not self._named:
                    self._named, self.named = effect.row, name_of(effect.row)
            case SendRead(fence=True) if client.name in self.recoveries:
                self._covered(self.recoveries[client.name])
            case UpdateMetadata(metadata=wanted):
                self._wanted(client, wanted)
            case Closed(metadata):
                # The answer may be of a store that is lost since: then nobody is told (`reported`).
                if metadata.state is not State.CLOSED or (
                    self.world.store.row.state is not State.CLOSED
                    and not self.world.store.is_lost(metadata)
                ):
                    raise Violation("I4: told as closed, and it is not")
            case Failed():
                pass
            case _:
                pass

    def stored(self, member: str, entries: Sequence[Entry]) -> None:
        """Entries became durable: equal ids mean equal bytes (I7)."""
        held = self.held.setdefault(member_name(member), {})
        for entry in entries:
            held[entry.entry_id] = member_incarnation(member)
            for bad in self.bad.values():
                bad[member_name(member)].discard(entry.entry_id)
            known = self.bytes_of.setdefault(entry.entry_id, entry)
            judged(invariants.same_bytes(member, entry.entry_id, known, entry))

    def copied(self, member: str, name: RowName) -> None:
        """A copy of a row became durable (rule 18b)."""
        if name not in self.world.store.rows:
            raise Violation(f"rule 18b: {member} keeps a copy of a row that never was: {name}")
        self.copies.setdefault(member, set()).add(name)

    def row_changed(self, client: Client, before: LedgerMetadata, after: LedgerMetadata) -> None:
        """Judge a change of the row that was applied."""
        judged(
            invariants.row_is_legal(after),
            invariants.state_goes_on(before, after),
            invariants.borders_stay(before, after),
            invariants.end_never_moves(before, after),
        )
        if before.state is not State.CLOSED and after.state is State.CLOSED:
            self._closed(client, after)
        if before.state is State.OPEN and after.state is State.IN_RECOVERY:
            self.marked = after
        if client.name.startswith("repairer"):
            bad, missed = self.bad[client.name], self.world.store.missed
            judged(
                invariants.repair_copies_first(before, after, self._has_held),
                invariants.repair_reads_back(
                    before,
                    after,
                    lambda member, entry_id: entry_id in bad.get(member_name(member), ()),
                ),
                invariants.repair_looks_again(
                    before, after, [(m.member, m.first, m.last) for m in missed]
                ),
                invariants.repair_keeps_who_leaves(
                    before, after, lambda member, _: name_of(before) in self.copies.get(member, ())
                ),
            )
        else:
            judged(invariants.recovery_changes_at_the_close(before, after))
            if before.state is State.OPEN and after.state is State.OPEN:
                judged(invariants.writer_changes_the_last(before, after))
        self.acknowledged_are_held(after)

    def reported(self, row: LedgerMetadata) -> None:
        """A client was told that the ledger is CLOSED."""
        assert row.last_entry is not None
        assert row.length is not None
        if self.world.store.row.state is not State.CLOSED:
            raise Violation("I4: told as closed, and it is not")
        if self.is_kept(row):
            self.history.closed(row.ledger_id, row.last_entry)
            self.told_ends.add((row.last_entry, row.length))

    def is_kept(self, row: LedgerMetadata) -> bool:
        """Whether an ack quorum of bookies has kept a copy of the row."""
        name = name_of(row)
        return sum(name in names for names in self.copies.values()) >= self.quorum.ack_quorum

    def rebuilt(self, row: LedgerMetadata) -> None:
        """The store went back, and goes on with a row that was rebuilt or was there (rule 18d)."""
        if row not in self.world.store.rows.values():
            raise Violation("rule 18d: a row was made by guess")
        self.acknowledged_are_held(row)
        self.ends.clear()
        if row.last_entry is not None:
            assert row.length is not None
            self._ended(row.last_entry, row.length)
        elif row.state is State.IN_RECOVERY:
            self.marked = row

    def loss_accepted(self) -> None:
        """An operator goes on without what nobody proved: acknowledged entries may be gone."""
        self.is_loss_accepted = True
        self.told_ends.clear()

    def vanished(self) -> None:
        """The store is empty, and no bookie has heard of the ledger."""
        if not self.world.is_quorum_lost and (self.acked != NO_ENTRY or self.told_ends):
            raise Violation(f"I1: the ledger is gone, acknowledged to {self.acked}")

    # --- the invariants --------------------------------------------------------------------------

    def _confirmed(self, first: int, last: int) -> None:
        row = self.world.store.row
        judged(
            invariants.in_order(first, last, self.acked),
            invariants.was_appended(last, len(self.appended)),
        )
        self.acked = last
        for entry_id in range(first, last + 1):
            self.history.acked(self.ops[entry_id], entry_id)
        self.acknowledged_are_held(row, first)
        if row.state is State.OPEN:
            ids = range(first, last + 1)
            judged(invariants.acked_keeps_its_row(row, ids, self._has_held, self._has_copy))

    def acknowledged_are_held(self, row: LedgerMetadata, first: int = 0) -> None:
        """I1 and I2, of the entries from `first` on."""
        if self.is_loss_accepted:
            return
        judged(invariants.closed_covers_acked(self.acked, row.last_entry))
        ids = range(first, self.acked + 1)
        judged(invariants.acked_reaches_quorum(row, ids, self._has_held))

    def _covered(self, recovery: Recovery) -> None:
        judged(invariants.covers_before_reading(self.quorum, recovery.covered))

    def _wanted(self, client: Client, wanted: LedgerMetadata) -> None:
        if client.name == "writer" and wanted.state is State.OPEN:
            begins = wanted.last_fragment.first_entry
            # The same change asked again (the store was away) keeps its first entry: meanwhile
            # entries may be acknowledged by members of both ensembles (rule 6).
            is_again = wanted == self.wanted
            self.wanted = wanted
            if not is_again:
                judged(invariants.begins_after_acked(begins, self.acked))
        if client.name in self.recoveries and wanted.state is State.OPEN:
            raise Violation("I24: a recoverer changes the ensemble of an open ledger")

    def _closed(self, client: Client, row: LedgerMetadata) -> None:
        assert row.last_entry is not None
        assert row.length is not None
        end = row.last_entry
        self.acknowledged_are_held(row)
        judged(invariants.was_appended(end, len(self.appended)))
        self._ended(end, row.length)
        self.closed_by = client.name
        length = sum(len(payload) for payload in self.appended[: end + 1])
        if row.length != length:
            raise Violation(f"I4: closed with length {row.length}, it is {length}")
        recovery = self.recoveries.get(client.name)
        if recovery is not None and end + 1 < len(self.appended):
            negatives = recovery.negatives.get(end + 1, set())
            judged(invariants.absence_is_proven(self.quorum, end, negatives))
        if not self.is_loss_accepted:
            judged(invariants.acked_reaches_quorum(row, range(end + 1), self._has_held))

    def _ended(self, end: int, length: int) -> None:
        """An end that nobody was told of may be lost with its row; any other one is for ever, unless faults destroyed an ack
        quorum of copies: those of the row that the client was told of may be among them.
        """
        self.ends.add((end, length))
        known = self.ends if self.world.is_quorum_lost else self.ends | self.told_ends
        if len(known) > 1:
            found = sorted(known)
            raise Violation(f"I4: the ledger ended more than once: {found}")

    def _has_held(self, member: str, entry_id: int) -> bool:
        """Whether an entry was durable at a member. What an earlier incarnation held and lost says
        nothing of a later one; a later one may have been given what an earlier one should hold.
        """
        last = self.held.get(member_name(member), {}).get(entry_id, 0)
        return last >= member_incarnation(member)

    def _has_copy(self, member: str, _entry_id: int) -> bool:
        """Whether a member ever kept a copy of the row by which the writer sends."""
        return self.named in self.copies.get(member, ())

    def missed_is_known(self) -> None:
        """Rules 8 and 12: what a member should hold and never did is in the repair queue: all of
        it where the writer closed the ledger, else what the recovery wrote back. (What a dead
        writer knew is lost: the auditor looks for that.)
        """
        row, store = self.world.store.row, self.world.store
        missed = (*store.missed, *store.forgotten)
        assert row.last_entry is not None, "L1 was judged"
        recovery = self.recoveries.get(self.closed_by)
        first = 0
        if recovery is not None and self.marked is not None:
            first = max(recovery.lac + 1, self.marked.last_fragment.first_entry)
        for entry_id in range(first, row.last_entry + 1):
            for _, member in row.members_of(entry_id):
                is_known = any(m.member == member and m.first <= entry_id <= m.last for m in missed)
                if not is_known and not self._has_held(member, entry_id):
                    raise Violation(f"rule 8: nobody knows that {member} lacks entry {entry_id}")

    def at_the_end(self) -> None:
        """After all is healed: the closed ledger can be read, and clients' histories agree."""
        row = self.world.store.row
        assert row.last_entry is not None, "L1 was judged"
        entries: list[tuple[int, bytes]] = []
        for entry_id in range(row.last_entry + 1):
            found = {
                payload
                for _, member in row.members_of(entry_id)
                for payload in [self.world.bookies[member_name(member)].peek(entry_id)]
                if payload is not None
            }
            judged(invariants.one_payload(entry_id, found))
            entries.extend((entry_id, payload) for payload in found)
        self.history.content(row.ledger_id, *entries)
        wrong = check(self.history)
        if wrong:
            raise Violation("; ".join(map(str, itertools.islice(wrong, 3))))
