"""The rules of one bookie for one ledger: what it takes, what it refuses, what it may say.

Pure: it knows ids, bytes and keys, but neither files nor clocks. The real bookie and the simulated
one run this very code, so they cannot differ.

How it is driven: `step(asked) -> Verdict`. A verdict may carry `records`: the driver appends them
to its log in this order. It tells `synced(count)` when the first `count` records of this ledger are
on disk, and sends the verdict only when `count >= verdict.after` (rule 3). So what is accepted and
what is durable are two numbers, and a crash is: forget this object, keep the first n records for
any n from `synced_count` to `accepted_count`, and `apply` them to a new one.

What a bookie holds of a ledger is asked of `Holdings`: the real one is an index of log places, the
simulator's a dictionary.

Left out: where bytes lie, limits and queues, and everything that is about more than one ledger.
"""

from collections.abc import Collection, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Protocol

from quorumlog.protocol.ids import NO_ENTRY, member_incarnation, member_name
from quorumlog.protocol.keyed import IsKeyed, Keyed
from quorumlog.protocol.messages import Status
from quorumlog.protocol.ranges import Ranges, complement, contains, ranges_of
from quorumlog.protocol.record import Run
from quorumlog.protocol.row_copy import RowCopy, RowName, superseded

# --- what is asked -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AddAsked:
    """Store these entries. Recovery adds, which repair sends too, pass the fence and limbo (rules 2, 9, 12).

    Where some of the ids are held already, the first verdict says so in `compare`; the driver asks
    again with what it could read of them (`stored`) and what it could not (`damaged`).
    """

    member: str
    run: Run
    ledger_key: bytes
    recovery: bool = False
    read_only: bool = False
    stored: Run | None = None
    damaged: Ranges = ()
    named_by: RowName | None = None
    """The row that names this bookie for the run; None for a recovery add."""
    row: RowCopy | None = None
    """A copy of that row. None: the sender had an answer to an add that brought it."""


@dataclass(frozen=True, slots=True)
class FenceAsked:
    """Take no normal add any more, durably, and tell the LAC."""

    member: str
    ledger_key: bytes


@dataclass(frozen=True, slots=True)
class ReadAsked:
    """Which of first..last are here? With `fence` the ledger is fenced before the answer (X1); with
    `from_disk` what is told to be here is on disk (rule 20a).
    """

    member: str
    first: int
    last: int
    fence: bool = False
    ledger_key: bytes = b""
    from_disk: bool = False


@dataclass(frozen=True, slots=True)
class LacAsked:
    """Tell the LAC, without fencing."""

    member: str


@dataclass(frozen=True, slots=True)
class LacTold:
    """Keep this LAC (the explicit LAC of an idle writer)."""

    member: str
    last_add_confirmed: int
    ledger_key: bytes


@dataclass(frozen=True, slots=True)
class RowTold:
    """Keep a copy of the ledger's row (rule 18b): it was closed, or repaired, and no add brings the copy."""

    member: str
    row: RowCopy
    ledger_key: bytes


Asked = AddAsked | FenceAsked | ReadAsked | LacAsked | LacTold | RowTold


# --- what is written ---------------------------------------------------------------------------
# Order-free on replay (rule 16): fence, key and delete are monotone, the LAC is a maximum, limbo
# carries a counter. Only of EntriesDropped and runs the order counts.


@dataclass(frozen=True, slots=True)
class RunStored:
    """Entries. `replaces`: these copies stand in for damaged ones of the same ids (rule 2)."""

    run: Run
    ledger_key: bytes
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class RowKept:
    """A copy of the ledger's row (rule 18b). Copies of other rows stay beside it."""

    row: RowCopy
    ledger_key: bytes


@dataclass(frozen=True, slots=True)
class FenceSet:
    """The fence. It carries the key, since it may be all that the bookie ever saw of the ledger."""

    ledger_key: bytes


@dataclass(frozen=True, slots=True)
class LacKept:
    """An explicit LAC."""

    last_add_confirmed: int
    ledger_key: bytes


@dataclass(frozen=True, slots=True)
class LimboSet:
    """Local state of the ledger may be lost, or (`limbo` false) was repaired. The highest counter
    decides.
    """

    counter: int
    limbo: bool


@dataclass(frozen=True, slots=True)
class EntriesDropped:
    """The entries were given up; the fence stays (rule 16). Runs that were stored before this record
    are gone, later ones are not.

    It needs no counter, though compaction reorders records (rule 16). It does not reorder these two:
    a driver writes this record again only while nothing is held, and what it moves is what is held,
    so that no run that was stored after this record ever comes to lie before it. What may happen is
    that this record goes and older runs stay: then a replay finds copies again that had been given
    up. They are right copies of a fenced ledger; a collector gives them up once more.
    """

    ledger_key: bytes


@dataclass(frozen=True, slots=True)
class LedgerDeleted:
    """The metadata has a tombstone: entries, key and fence are gone, and the id stays for ever
    (rule 16a). Whatever else was or will be recorded of the ledger counts for nothing.
    """


ReplicaRecord = RunStored | RowKept | FenceSet | LacKept | LimboSet | EntriesDropped | LedgerDeleted


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to answer, and when.

    `after`: how many records of this ledger must be synced before the answer leaves.
    `present` and `absent`: of a read; what neither names is unknown (rule 1).
    `compare`: not an answer yet: ask again with what is stored of these ranges.
    `made`: what the holdings made of the one record of entries (`Holdings.accept`).
    """

    status: Status
    after: int = 0
    last_add_confirmed: int = NO_ENTRY
    records: tuple[ReplicaRecord, ...] = ()
    present: Ranges = ()
    absent: Ranges = ()
    compare: Ranges = ()
    made: object = None


class Holdings(Protocol):
    """Which entries of one ledger a bookie holds, accepted ones that are not synced included."""

    @property
    def highest(self) -> int:
        """No entry above this id is held (NO_ENTRY: none at all)."""

    def present(self, first: int, last: int) -> Ranges:
        """Which of first..last are held. Proof: what it does not name is not here."""

    def accept(self, record: RunStored) -> object:
        """Hold these entries from now on. What it returns is for whoever writes the record."""

    def drop(self) -> None:
        """Hold no entry any more."""

    @property
    def row_names(self) -> tuple[RowName, ...]:
        """The copies of the ledger's rows that are held."""

    def row_copy(self, name: RowName) -> RowCopy:
        """A copy that is held."""

    def keep_row_copy(self, row: RowCopy) -> None:
        """Hold a copy of a row from now on."""

    def drop_row_copies(self, names: Collection[RowName]) -> None:
        """Hold these copies of rows no more."""


@dataclass(slots=True, eq=False)
class Replica(Keyed):
    """One ledger at one bookie.

    Invariants (`check`):
      - I13: `is_fenced` and `ledger_key` are set once and never change again;
      - I10: the LAC never goes down;
      - rule 16a: a deleted ledger holds nothing, and is deleted for ever;
      - the fence record's number is at most `accepted_count`, and 0 <= synced <= accepted.
    """

    me: str
    """The bookie, as name@incarnation."""
    holdings: Annotated[Holdings, IsKeyed]
    _: KW_ONLY
    is_deferred: bool = False
    """Entries are acknowledged before they are synced (rule 31)."""
    ledger_key: bytes | None = None
    is_fenced: bool = False
    is_limbo: bool = False
    is_deleted: bool = False
    last_add_confirmed: int = NO_ENTRY
    accepted_count: int = 0
    synced_count: int = 0
    _fence_number: int = 0
    _limbo_counter: int = 0

    # --- driving ------------------------------------------------------------------------------

    def step(self, asked: Asked) -> Verdict:
        """Judge one request. Requests of one ledger are judged one after another."""
        if self.is_deleted:
            return self._asked_of_deleted(asked)
        match asked:
            case AddAsked():
                return self._add(asked)
            case FenceAsked():
                return self._fence_asked(asked)
            case ReadAsked():
                return self._read(asked)
            case LacAsked():
                return self._lac_asked(asked)
            case LacTold():
                return self._lac_told(asked)
            case RowTold():
                return self._row_told(asked)

    def synced(self, count: int) -> None:
        """The first `count` records of this ledger are on disk."""
        self.synced_count = max(self.synced_count, count)

    def set_limbo(self, *, limbo: bool) -> Verdict:
        """Local state was lost (or repaired again): no negatives, nothing for coverage (or again)."""
        if limbo == self.is_limbo or self.is_deleted:
            return Verdict(Status.OK, self.accepted_count)
        return self._took(LimboSet(self._limbo_counter + 1, limbo))

    def enter_limbo(self, ledger_key: bytes, *, is_fenced: bool) -> Verdict:
        """Phase one of a new incarnation (BP-46): what older ones were told may be lost. Where
        `is_fenced` a recovery has begun or ended, so that no normal add is right any more; else a
        writer may go on through this incarnation (rule 15).
        """
        if self.is_deleted:
            return Verdict(Status.OK, self.accepted_count)
        records: tuple[ReplicaRecord, ...] = ()
        if is_fenced and not self._is_wrong_key(ledger_key):
            records = self._fence(ledger_key)
        elif self.ledger_key is None:
            # The key may be lost too, and the first one that comes would define it (rule 30).
            records = self._took(LacKept(self.last_add_confirmed, ledger_key)).records
        limbo = self.set_limbo(limbo=True)
        return Verdict(Status.OK, limbo.after, records=(*records, *limbo.records))

    def moved(self, run: Run) -> Verdict:
        """The same bytes are written again elsewhere, because their old place is given up."""
        assert self.ledger_key is not None, "only what is held is moved"
        assert not self.is_deleted, "nothing is held of a deleted ledger"
        return self._took(RunStored(run, self.ledger_key, replaces=True))

    def drop(self) -> Verdict:
        """Give the entries up: the ledger is CLOSED and others have them. The fence that stays is told
        once its record is on disk (I13).
        """
        was_fenced = self.is_fenced
        verdict = self._took(EntriesDropped(self.ledger_key or b""))
        if not was_fenced:
            self._fence_number = verdict.after
        return verdict

    def delete(self) -> Verdict:
        """Drop all but the id: the metadata has a tombstone (rules 16a, 17)."""
        if self.is_deleted:
            return Verdict(Status.OK, self.accepted_count)
        return self._took(LedgerDeleted())

    def forget_copies(self) -> None:
        """Forget superseded copies of rows: the database contains the changes of all that are held (rule 18c).

        No record says so: a copy that a replay of the log finds again is a right one, and is forgotten once more.
        """
        names = superseded(name for name in self.holdings.row_names if name.token)
        if names:
            self.holdings.drop_row_copies(names)

    def repeated(self) -> Verdict:
        """Records that say again what is known beside the entries (all are monotone)."""
        records: list[ReplicaRecord] = []
        if self.is_deleted:
            return Verdict(Status.OK, self.accepted_count)
        if self.ledger_key is not None and self.is_fenced:
            records.append(FenceSet(self.ledger_key))
        if self.ledger_key is not None:
            records.append(LacKept(self.last_add_confirmed, self.ledger_key))
        if self._limbo_counter:
            records.append(self.limbo)
        for name in self.holdings.row_names:
            assert self.ledger_key is not None, "a copy carries the key"
            records.append(RowKept(self.holdings.row_copy(name), self.ledger_key))
        return Verdict(Status.OK, self._accepted(len(records)), records=tuple(records))

    def apply(self, record: ReplicaRecord) -> object:
        """Take over a record: one that was just made, or one read back from the log. Records may
        come in any order (rule 16). Returns what the holdings made of entries.
        """
        if self.is_deleted:
            return None  # rule 16a
        match record:
            case RunStored():
                self.ledger_key = record.ledger_key
                lac = record.run.last_add_confirmed
                self.last_add_confirmed = max(self.last_add_confirmed, lac)
                return self.holdings.accept(record)
            case RowKept():
                self.ledger_key = record.ledger_key
                self.holdings.keep_row_copy(record.row)
            case FenceSet():
                self.ledger_key = record.ledger_key
                self.is_fenced = True
            case LacKept():
                self.ledger_key = record.ledger_key
                self.last_add_confirmed = max(self.last_add_confirmed, record.last_add_confirmed)
            case LimboSet():
                if record.counter > self._limbo_counter:
                    self._limbo_counter = record.counter
                    self.is_limbo = record.limbo
            case EntriesDropped():
                # The ledger is CLOSED: no normal add is right any more.
                self.ledger_key = record.ledger_key
                self.is_fenced = True
                self.holdings.drop()
            case LedgerDeleted():
                self.is_deleted = True
                self.holdings.drop()
                self.holdings.drop_row_copies(self.holdings.row_names)
        return None

    def restore(
        self,
        *,
        ledger_key: bytes | None,
        is_fenced: bool,
        limbo: LimboSet,
        last_add_confirmed: int,
        is_deleted: bool = False,
    ) -> None:
        """Take over the state of an index, which stands for the records that it was built from."""
        self.is_deleted = is_deleted
        self.ledger_key = ledger_key
        self.is_fenced = is_fenced
        self.last_add_confirmed = last_add_confirmed
        self.apply(limbo)

    @property
    def limbo(self) -> LimboSet:
        """Limbo as the record that says so."""
        return LimboSet(self._limbo_counter, self.is_limbo)

    # --- the guards: each is one rule -------------------------------------------------------------

    def _is_foreign(self, member: str) -> bool:
        """Another bookie is meant, or an incarnation that this one knows nothing of (rule 4)."""
        return member_name(member) != member_name(self.me) or member_incarnation(
            member
        ) > member_incarnation(self.me)

    def _is_older(self, member: str) -> bool:
        """Asked as an incarnation whose state may be lost here (rule 15)."""
        return member_incarnation(member) < member_incarnation(self.me)

    def _is_wrong_key(self, ledger_key: bytes) -> bool:
        """Another ledger of the same id (rule 17), or somebody without its password (rule 30).
        The first key that comes defines it.
        """
        return self.ledger_key is not None and ledger_key != self.ledger_key

    def _is_fence_in_the_way(self, asked: AddAsked) -> bool:
        """I12: after the fence only recovery and repair add."""
        return self.is_fenced and not asked.recovery

    def _is_limbo_in_the_way(self, asked: AddAsked) -> bool:
        """Who asks for an incarnation whose fence may be lost adds nothing (rule 15, X3). A writer
        that knows of the new one may: metadata named it after the loss, so that no fence of it
        was lost.
        """
        return not asked.recovery and self._is_older(asked.member)

    def _lacks_row(self, asked: AddAsked) -> bool:
        """An entry whose member has no copy of the row that names it is lost with the row (rule 18b)."""
        name = asked.named_by
        if asked.recovery or name is None or asked.row is not None:
            return False
        # A later copy may have taken the place of this one.
        return all(kept.version < name.version for kept in self.holdings.row_names)

    def _may_say_no(self, member: str) -> bool:
        """No negative about what may have been lost (I27, X4)."""
        return not (self.is_limbo or self._is_older(member))

    def _has_other_bytes(self, run: Run, stored: Run) -> bool:
        """Equal ids mean equal bytes (rule 2): digest, LAC, length and payload."""
        for entry in stored.entries():
            index = run.index(entry.entry_id)
            if index is not None and run.entry(index) != entry:
                return True
        return False

    def _after_entries(self) -> int:
        """ok means on disk (rule 3), unless the bookie defers entries (rule 31). A repeated add is
        among what was accepted so far.
        """
        return 0 if self.is_deferred else self.accepted_count

    # --- the verdicts -----------------------------------------------------------------------------

    def _asked_of_deleted(self, asked: Asked) -> Verdict:
        """Rule 16a: nothing is taken, defined, fenced or denied. A writer that missed the news is
        told that it is fenced: it reads its row again (rule 9), and finds none. Nobody else may
        count on this bookie for anything.
        """
        if self._is_foreign(asked.member):
            return Verdict(Status.NOT_MINE)
        if isinstance(asked, AddAsked) and not asked.recovery:
            return Verdict(Status.FENCED, self.accepted_count)
        return Verdict(Status.UNKNOWN)

    def _add(self, asked: AddAsked) -> Verdict:
        run = asked.run
        if self._is_foreign(asked.member):
            return self._refused(Status.NOT_MINE)
        if self._is_wrong_key(asked.ledger_key):
            return self._refused(Status.WRONG_KEY)
        if self._is_fence_in_the_way(asked):
            # A fence that the writer hears of must not be forgotten in a crash.
            return self._refused(Status.FENCED, self._fence_number)
        if self._is_limbo_in_the_way(asked):
            return self._refused(Status.NOT_MINE)
        if self._lacks_row(asked):
            return self._refused(Status.UNKNOWN)
        held = self._held_of(run)
        if held and asked.stored is None and not asked.damaged:
            return Verdict(Status.UNKNOWN, compare=held)
        lacking: Run | None = run
        if held:
            readable = asked.stored
            if readable is not None and self._has_other_bytes(run, readable):
                return self._refused(Status.CONFLICT, self._after_entries())
            unread = _without(held, readable, run)
            if not _covers(asked.damaged, unread):
                # Accepted while the driver read: compare these too.
                return Verdict(Status.UNKNOWN, compare=held)
            if unread and not asked.recovery:
                return self._refused(Status.UNKNOWN)
            lacking = run.where(lambda e: readable is None or readable.index(e) is None)
        if lacking is not None and asked.read_only and not asked.recovery:
            return self._refused(Status.READ_ONLY)
        records = self._kept_row(asked)
        made: object = None
        if lacking is not None:
            record = RunStored(lacking, asked.ledger_key, bool(asked.damaged))
            made = self.apply(record)
            self._accepted(1)
            records = (*records, record)
        return Verdict(
            Status.OK, self._after_entries(), self.last_add_confirmed, records, made=made
        )

    def _kept_row(self, asked: AddAsked) -> tuple[ReplicaRecord, ...]:
        """Keep a copy that is new here; it is on disk with the entries (rule 18b)."""
        row = asked.row
        if row is None or row.name in self.holdings.row_names:
            return ()
        return self._took(RowKept(row, asked.ledger_key)).records

    def _fence_asked(self, asked: FenceAsked) -> Verdict:
        if self._is_foreign(asked.member):
            return self._refused(Status.NOT_MINE)
        if self._is_wrong_key(asked.ledger_key):
            return self._refused(Status.WRONG_KEY)
        records = self._fence(asked.ledger_key)
        # It does fence for an older incarnation, but does not count for coverage (rule 13).
        status = Status.OK if self._may_say_no(asked.member) else Status.NOT_MINE
        # A fence that is told is on disk (I13, X20).
        return Verdict(status, self._fence_number, self.last_add_confirmed, records)

    def _read(self, asked: ReadAsked) -> Verdict:
        if self._is_foreign(asked.member):
            return self._refused(Status.NOT_MINE)
        records: tuple[ReplicaRecord, ...] = ()
        if asked.fence:
            if self._is_wrong_key(asked.ledger_key):
                return self._refused(Status.WRONG_KEY)
            records = self._fence(asked.ledger_key)
        present = self.holdings.present(asked.first, asked.last)
        after = self._fence_number if asked.fence else 0
        if asked.from_disk:
            # A repair gives a place away for what it reads back, so all of that must outlast a power
            # cut (rule 20a); where entries are deferred too (rule 31).
            after = self.accepted_count
        absent: Ranges = ()
        status = Status.OK
        if self._may_say_no(asked.member):
            absent = complement(present, asked.first, asked.last)
            if absent:
                after = self.accepted_count  # all adds that were accepted before it (rule 3)
        elif not present:
            status = Status.NOT_MINE
        return Verdict(status, after, self.last_add_confirmed, records, present, absent)

    def _lac_asked(self, asked: LacAsked) -> Verdict:
        if self._is_foreign(asked.member):
            return self._refused(Status.NOT_MINE)
        # A lower LAC than was known before a loss is a kind of negative.
        status = Status.OK if self._may_say_no(asked.member) else Status.NOT_MINE
        return Verdict(status, 0, self.last_add_confirmed)

    def _lac_told(self, asked: LacTold) -> Verdict:
        """Not stopped by the fence: a LAC is never above what recovery will find (I10)."""
        if self._is_foreign(asked.member):
            return self._refused(Status.NOT_MINE)
        if self._is_wrong_key(asked.ledger_key):
            return self._refused(Status.WRONG_KEY)
        if asked.last_add_confirmed <= self.last_add_confirmed:
            return Verdict(Status.OK, self.accepted_count, self.last_add_confirmed)
        return self._took(LacKept(asked.last_add_confirmed, asked.ledger_key))

    def _row_told(self, asked: RowTold) -> Verdict:
        """Neither fence nor limbo is in the way: a copy says nothing about entries."""
        if self._is_foreign(asked.member) or self._is_older(asked.member):
            # Rule 18b: the row names an incarnation that may have lost its entries, and is counted as a holder.
            return self._refused(Status.NOT_MINE)
        if self._is_wrong_key(asked.ledger_key):
            return self._refused(Status.WRONG_KEY)
        if asked.row.name in self.holdings.row_names:
            return Verdict(Status.OK, self.accepted_count, self.last_add_confirmed)
        return self._took(RowKept(asked.row, asked.ledger_key))

    def _fence(self, ledger_key: bytes) -> tuple[ReplicaRecord, ...]:
        if self.is_fenced:
            return ()
        fenced = self._took(FenceSet(ledger_key))
        self._fence_number = fenced.after
        return fenced.records

    def _took(self, record: ReplicaRecord) -> Verdict:
        """Apply a record that was just made; the answer waits until the record is on disk."""
        made = self.apply(record)
        count = self._accepted(1)
        return Verdict(Status.OK, count, self.last_add_confirmed, (record,), made=made)

    def _accepted(self, count: int) -> int:
        self.accepted_count += count
        return self.accepted_count

    def _refused(self, status: Status, after: int = 0) -> Verdict:
        return Verdict(status, after, self.last_add_confirmed)

    def _held_of(self, run: Run) -> Ranges:
        """Which ids of the run are held already."""
        if run.first > self.holdings.highest:
            return ()
        held = self.holdings.present(run.first, run.last)
        if isinstance(run.ids, range) or not held:
            return held
        return ranges_of(e for e in run.ids if contains(held, e))

    # --- exploring ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert the invariants of one state."""
        assert 0 <= self.synced_count <= self.accepted_count
        assert 0 <= self._fence_number <= self.accepted_count
        assert not self.is_fenced or self.ledger_key is not None, "a fence carries the key"
        assert self.last_add_confirmed >= NO_ENTRY
        assert not self.is_deleted or self.holdings.highest == NO_ENTRY, "rule 16a"


# --- ranges --------------------------------------------------------------------------------------


def _without(held: Ranges, stored: Run | None, run: Run) -> list[int]:
    """Ids of the run that are held and that `stored` does not have."""
    return [e for e in run.ids if contains(held, e) and (stored is None or stored.index(e) is None)]


def _covers(ranges: Ranges, ids: Iterable[int]) -> bool:
    return all(contains(ranges, e) for e in ids)
