"""One ledger at one bookie: decides which requests the bookie accepts, and how it answers.

This code is pure: it handles ids, bytes and keys, but neither files nor clocks. The real bookie and
the simulated bookie both run this code, so they behave the same.

A driver calls `step(asked) -> Verdict`, and appends the verdict's `records` to its log in order. It
calls `synced(count)` when the first `count` records of this ledger are on disk, and sends the
verdict only when `count >= verdict.after` (rule 3). After a crash, the first n records are left,
for some n from `synced_count` to `accepted_count`. The driver applies them to a new object.

`Holdings` has the entries that a bookie holds. In the real bookie it is an index of log offsets; in
the simulator it is a dictionary. Storage, limits, queues and anything that concerns several ledgers
are not part of this module.
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

# --- requests ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AddAsked:
    """A request to store entries. Recovery adds pass fence and limbo (rules 2, 9, 12).

    If some ids are held already, the first verdict names them in `compare`. The driver then repeats
    the request with the held entries that are readable (`stored`), and the ids of unreadable
    entries (`damaged`).
    """

    member: str
    run: Run
    ledger_key: bytes
    recovery: bool = False
    read_only: bool = False
    stored: Run | None = None
    damaged: Ranges = ()
    named_by: RowName | None = None
    """The version of the metadata that names this bookie for the run; None in a recovery add."""
    row: RowCopy | None = None
    """A copy of the version `named_by`; None if an earlier add with the copy was answered."""


@dataclass(frozen=True, slots=True)
class FenceAsked:
    """A request to fence the ledger durably against normal adds, and to return the LAC."""

    member: str
    ledger_key: bytes


@dataclass(frozen=True, slots=True)
class ReadAsked:
    """A request for entries first..last. `fence`: the bookie fences the ledger before it answers
    (X1). `from_disk`: entries in the answer must be on disk (rule 20a).
    """

    member: str
    first: int
    last: int
    fence: bool = False
    ledger_key: bytes = b""
    from_disk: bool = False


@dataclass(frozen=True, slots=True)
class LacAsked:
    """A request for the LAC, without fencing."""

    member: str


@dataclass(frozen=True, slots=True)
class LacReported:
    """A request to store an explicit LAC, which an idle writer sends."""

    member: str
    last_add_confirmed: int
    ledger_key: bytes


@dataclass(frozen=True, slots=True)
class RowReported:
    """A request to store a copy of the metadata, sent after a close or a repair (rule 18b)."""

    member: str
    row: RowCopy
    ledger_key: bytes


Asked = AddAsked | FenceAsked | ReadAsked | LacAsked | LacReported | RowReported


# A replay may apply records in any order (rule 16): fence, key and deletion are never undone, the
# highest LAC counts, and limbo has a counter. Order matters only between EntriesDropped and runs.


@dataclass(frozen=True, slots=True)
class RunStored:
    """Stored entries. `replaces`: whether they replace damaged copies of the same ids (rule 2)."""

    run: Run
    ledger_key: bytes
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class RowKept:
    """A stored copy of the ledger's metadata (rule 18b). Copies of other versions remain."""

    row: RowCopy
    ledger_key: bytes


@dataclass(frozen=True, slots=True)
class FenceSet:
    """A fence with the ledger's key, because the bookie may have nothing else of the ledger."""

    ledger_key: bytes


@dataclass(frozen=True, slots=True)
class LacKept:
    """A stored explicit LAC."""

    last_add_confirmed: int
    ledger_key: bytes


@dataclass(frozen=True, slots=True)
class LimboSet:
    """The beginning or end of a ledger's limbo, in which local state of the ledger may be lost. The
    record with the highest counter counts.
    """

    counter: int
    limbo: bool


@dataclass(frozen=True, slots=True)
class EntriesDropped:
    """The bookie dropped the ledger's entries, but keeps the fence (rule 16). Runs stored before
    this record are gone; later runs are not.

    Compaction reorders records (rule 16), but this record needs no counter. A driver rewrites this
    record only while the bookie holds no entries of the ledger, and moves only held entries. So a
    run that was stored after this record stays after it in the log. If compaction removes this
    record and leaves older runs, a replay finds the dropped entries again. The entries are valid
    entries of a fenced ledger, and the bookie drops them again.
    """

    ledger_key: bytes


@dataclass(frozen=True, slots=True)
class LedgerDeleted:
    """The ledger was deleted, and its metadata is a tombstone. Entries, key and fence are gone, but
    the id stays for ever (rule 16a). All other records of the ledger are ignored.
    """


ReplicaRecord = RunStored | RowKept | FenceSet | LacKept | LimboSet | EntriesDropped | LedgerDeleted


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer to a request, and the condition for sending it.

    - `after`: the number of records of this ledger that must be synced before the answer is sent;
    - `present` and `absent`: the result of a read; an entry in neither is unknown (rule 1);
    - `compare`: if not empty, there is no answer yet, and the driver must repeat the request with
      the stored entries of these ranges;
    - `made`: the result of `Holdings.accept`, if entries were stored.
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
    """The entries of one ledger that a bookie holds, including entries that aren't synced yet."""

    @property
    def highest(self) -> int:
        """An upper bound of the held ids; NO_ENTRY if no entry is held."""

    def present(self, first: int, last: int) -> Ranges:
        """The ranges of held entries in first..last. All other entries there are absent."""

    def accept(self, record: RunStored) -> object:
        """Add the record's entries. Returns a value for the driver, which writes the record."""

    def drop(self) -> None:
        """Remove all entries."""

    @property
    def row_names(self) -> tuple[RowName, ...]:
        """The names of the held copies of the ledger's metadata."""

    def row_copy(self, name: RowName) -> RowCopy:
        """Return the held copy of the metadata with this name."""

    def keep_row_copy(self, row: RowCopy) -> None:
        """Add a copy of the metadata."""

    def drop_row_copies(self, names: Collection[RowName]) -> None:
        """Remove copies of the metadata."""


@dataclass(slots=True, eq=False)
class Replica(Keyed):
    """The state of one ledger at one bookie.

    Invariants (`check`):
      - I13: `is_fenced` and `ledger_key` are set once and never change again;
      - I10: the LAC never decreases;
      - rule 16a: a deleted ledger has no entries, and stays deleted for ever;
      - the fence record's number is at most `accepted_count`, and 0 <= synced <= accepted.
    """

    me: str
    """The bookie, as name@incarnation."""
    holdings: Annotated[Holdings, IsKeyed]
    _: KW_ONLY
    is_deferred: bool = False
    """Whether the bookie acknowledges entries before it syncs them (rule 31)."""
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
        """Decide about a request. The driver must pass requests of a ledger one at a time."""
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
            case LacReported():
                return self._lac_reported(asked)
            case RowReported():
                return self._row_reported(asked)

    def synced(self, count: int) -> None:
        """Record that the first `count` records of this ledger are on disk."""
        self.synced_count = max(self.synced_count, count)

    def set_limbo(self, *, limbo: bool) -> Verdict:
        """Begin or end limbo, in which the bookie denies nothing and no fence counts (rule 15)."""
        if limbo == self.is_limbo or self.is_deleted:
            return Verdict(Status.OK, self.accepted_count)
        return self._took(LimboSet(self._limbo_counter + 1, limbo))

    def enter_limbo(self, ledger_key: bytes, *, is_fenced: bool) -> Verdict:
        """Begin limbo for a new incarnation (phase one of BP-46), because state of older
        incarnations may be lost. `is_fenced`: a recovery has begun or ended, so the ledger is
        fenced. If not, a writer may continue with this incarnation (rule 15).
        """
        if self.is_deleted:
            return Verdict(Status.OK, self.accepted_count)
        records: tuple[ReplicaRecord, ...] = ()
        if is_fenced and not self._is_wrong_key(ledger_key):
            records = self._fence(ledger_key)
        elif self.ledger_key is None:
            # Store the key too. Otherwise a crash could lose the key, and the next request could
            # set another key (rule 30).
            records = self._took(LacKept(self.last_add_confirmed, ledger_key)).records
        limbo = self.set_limbo(limbo=True)
        return Verdict(Status.OK, limbo.after, records=(*records, *limbo.records))

    def moved(self, run: Run) -> Verdict:
        """Write a held run again, because its segment of the bookie's log will be removed."""
        assert self.ledger_key is not None, "only a held run can be moved"
        assert not self.is_deleted, "a deleted ledger has no runs to move"
        return self._took(RunStored(run, self.ledger_key, replaces=True))

    def drop(self) -> Verdict:
        """Drop the entries of this CLOSED ledger, which other bookies store. The ledger stays
        fenced, and answers that report the fence wait until the record is on disk (I13).
        """
        was_fenced = self.is_fenced
        verdict = self._took(EntriesDropped(self.ledger_key or b""))
        if not was_fenced:
            self._fence_number = verdict.after
        return verdict

    def delete(self) -> Verdict:
        """Drop everything but the id, because the ledger has a tombstone (rules 16a, 17)."""
        if self.is_deleted:
            return Verdict(Status.OK, self.accepted_count)
        return self._took(LedgerDeleted())

    def forget_copies(self) -> None:
        """Forget superseded copies. The caller ensures that the database contains the changes of
        all held copies (rule 18c). No record is written, because a copy that a replay finds again
        is forgotten again.
        """
        names = superseded(name for name in self.holdings.row_names if name.token)
        if names:
            self.holdings.drop_row_copies(names)

    def repeated(self) -> Verdict:
        """Make records of the ledger's state, without entries. Applying a record twice is safe."""
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
            assert self.ledger_key is not None, "a ledger with copies must have a key"
            records.append(RowKept(self.holdings.row_copy(name), self.ledger_key))
        return Verdict(Status.OK, self._accepted(len(records)), records=tuple(records))

    def apply(self, record: ReplicaRecord) -> object:
        """Apply a new record, or a record that a replay reads in any order (rule 16). Returns the
        result of `Holdings.accept` for entries.
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
                # The ledger is CLOSED, so no normal add may follow.
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
        """Set the state from an index, instead of applying the records that the index covers."""
        self.is_deleted = is_deleted
        self.ledger_key = ledger_key
        self.is_fenced = is_fenced
        self.last_add_confirmed = last_add_confirmed
        self.apply(limbo)

    @property
    def limbo(self) -> LimboSet:
        """A record of the current state of limbo."""
        return LimboSet(self._limbo_counter, self.is_limbo)

    # --- the guards, each of which implements one rule --------------------------------------------

    def _is_foreign(self, member: str) -> bool:
        """Whether the request is for another bookie, or for a later incarnation (rule 4)."""
        return member_name(member) != member_name(self.me) or member_incarnation(
            member
        ) > member_incarnation(self.me)

    def _is_older(self, member: str) -> bool:
        """Whether the request is for an older incarnation, whose state may be lost (rule 15)."""
        return member_incarnation(member) < member_incarnation(self.me)

    def _is_wrong_key(self, ledger_key: bytes) -> bool:
        """Whether the key is of another ledger with this id (rule 17), or of a client without the
        password (rule 30). The first key that the bookie receives becomes the ledger's key.
        """
        return self.ledger_key is not None and ledger_key != self.ledger_key

    def _is_fence_in_the_way(self, asked: AddAsked) -> bool:
        """Whether the ledger is fenced, and the add is a normal add (I12)."""
        return self.is_fenced and not asked.recovery

    def _is_limbo_in_the_way(self, asked: AddAsked) -> bool:
        """Whether a normal add is for an older incarnation, whose fence may be lost (rule 15, X3).
        Adds for this incarnation pass, because its fences are not lost: the metadata named it after
        the loss.
        """
        return not asked.recovery and self._is_older(asked.member)

    def _lacks_row(self, asked: AddAsked) -> bool:
        """Whether the add would leave entries without a copy of their metadata (rule 18b)."""
        name = asked.named_by
        if asked.recovery or name is None or asked.row is not None:
            return False
        # A later copy may have superseded the copy of this version.
        return all(kept.version < name.version for kept in self.holdings.row_names)

    def _may_say_no(self, member: str) -> bool:
        """Whether the bookie may deny entries, which requires that it lost none (I27, X4)."""
        return not (self.is_limbo or self._is_older(member))

    def _has_other_bytes(self, run: Run, stored: Run) -> bool:
        """Whether entries with equal ids differ in digest, LAC, length or payload (rule 2)."""
        for entry in stored.entries():
            index = run.index(entry.entry_id)
            if index is not None and run.entry(index) != entry:
                return True
        return False

    def _after_entries(self) -> int:
        """The number of records that must be on disk before an add is answered ok (rule 3); 0 if
        entries are deferred (rule 31). For a repeated add, the first add's record counts too.
        """
        return 0 if self.is_deferred else self.accepted_count

    # --- the verdicts -----------------------------------------------------------------------------

    def _asked_of_deleted(self, asked: Asked) -> Verdict:
        """Answer for a deleted ledger, without storing, fencing or denying anything (rule 16a). A
        writer's add gets FENCED, so that the writer reads the metadata (rule 9) and finds the
        deletion. Other requests get UNKNOWN, because no process may rely on this bookie.
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
            # The fence must survive a crash once the writer has received this answer.
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
                # More entries were accepted while the driver read, and must be compared too.
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
        """Store the add's copy of the metadata if it is new. It is synced with the entries."""
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
        # A request for an older incarnation also fences, but doesn't count for coverage (rule 13).
        status = Status.OK if self._may_say_no(asked.member) else Status.NOT_MINE
        # The fence must be on disk before it is reported (I13, X20).
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
            # A repair replaces a member after this read, so all returned entries must survive a
            # power cut (rule 20a), even if the bookie defers entries (rule 31).
            after = self.accepted_count
        absent: Ranges = ()
        status = Status.OK
        if self._may_say_no(asked.member):
            absent = complement(present, asked.first, asked.last)
            if absent:
                after = self.accepted_count  # all earlier adds must be on disk (rule 3)
        elif not present:
            status = Status.NOT_MINE
        return Verdict(status, after, self.last_add_confirmed, records, present, absent)

    def _lac_asked(self, asked: LacAsked) -> Verdict:
        if self._is_foreign(asked.member):
            return self._refused(Status.NOT_MINE)
        # After a loss, this LAC may be lower than a LAC that the bookie reported before the loss.
        status = Status.OK if self._may_say_no(asked.member) else Status.NOT_MINE
        return Verdict(status, 0, self.last_add_confirmed)

    def _lac_reported(self, asked: LacReported) -> Verdict:
        """Store a LAC, even of a fenced ledger: no LAC is above the recovered end (I10)."""
        if self._is_foreign(asked.member):
            return self._refused(Status.NOT_MINE)
        if self._is_wrong_key(asked.ledger_key):
            return self._refused(Status.WRONG_KEY)
        if asked.last_add_confirmed <= self.last_add_confirmed:
            return Verdict(Status.OK, self.accepted_count, self.last_add_confirmed)
        return self._took(LacKept(asked.last_add_confirmed, asked.ledger_key))

    def _row_reported(self, asked: RowReported) -> Verdict:
        """Store a copy of metadata, even if fenced or in limbo: it proves nothing about entries."""
        if self._is_foreign(asked.member) or self._is_older(asked.member):
            # Rule 18b: this version names an older incarnation, whose entries may be lost.
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
        """Apply a new record. The verdict waits until the record is on disk."""
        made = self.apply(record)
        count = self._accepted(1)
        return Verdict(Status.OK, count, self.last_add_confirmed, (record,), made=made)

    def _accepted(self, count: int) -> int:
        self.accepted_count += count
        return self.accepted_count

    def _refused(self, status: Status, after: int = 0) -> Verdict:
        return Verdict(status, after, self.last_add_confirmed)

    def _held_of(self, run: Run) -> Ranges:
        """The ids of the run that the bookie holds already."""
        if run.first > self.holdings.highest:
            return ()
        held = self.holdings.present(run.first, run.last)
        if isinstance(run.ids, range) or not held:
            return held
        return ranges_of(e for e in run.ids if contains(held, e))

    # --- invariants --------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert the invariants of one state."""
        assert 0 <= self.synced_count <= self.accepted_count
        assert 0 <= self._fence_number <= self.accepted_count
        assert not self.is_fenced or self.ledger_key is not None, "a fenced ledger must have a key"
        assert self.last_add_confirmed >= NO_ENTRY
        assert not self.is_deleted or self.holdings.highest == NO_ENTRY, "entries after deletion"


# --- ranges --------------------------------------------------------------------------------------


def _without(held: Ranges, stored: Run | None, run: Run) -> list[int]:
    """The ids of the run that are held, but not in `stored`."""
    return [e for e in run.ids if contains(held, e) and (stored is None or stored.index(e) is None)]


def _covers(ranges: Ranges, ids: Iterable[int]) -> bool:
    return all(contains(ranges, e) for e in ids)
