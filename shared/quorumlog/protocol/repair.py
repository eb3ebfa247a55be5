"""Give one member of one closed fragment what it should hold: a new member in another's place, or a
member that missed some entries.

The bytes travel as they are (rule 2): no password is needed. Only closed fragments are repaired
(I25); a ledger whose open fragment lost a member is for its writer, or for a recovery.

All that the target should hold is read back from its disk before it gets a place, whoever wrote it
and when (rule 20a): what its index names may be damaged, or on its way to the disk, and who leaves
may have the last good copy.

Who leaves is a member until the target has a copy of the row in which it has the place (rule 20b): the
database may go back behind that row, and the older one names `leaving`.
"""

from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field
from enum import Enum
from typing import Annotated, Final, assert_never

from quorumlog.protocol.ids import member_name
from quorumlog.protocol.keyed import Keyed, Out
from quorumlog.protocol.messages import (
    AddAnswered,
    AppendRequested,
    Begin,
    BookiesFound,
    CasStatus,
    CloseRequested,
    Effect,
    EntriesRead,
    Event,
    Failed,
    FenceAnswered,
    MetadataAnswered,
    MissedRange,
    PlacedInLog,
    ReadAnswered,
    ReadMetadata,
    RecoverRequested,
    Repaired,
    ReplaceRequested,
    RowAnswered,
    SendAdd,
    SendRead,
    SendRow,
    StartTimer,
    Status,
    Timer,
    TimerFired,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import Fragment, LedgerMetadata, Repair
from quorumlog.protocol.ranges import Ranges, complement, ranges_of, union
from quorumlog.protocol.reader import READ_ENTRIES, RangeReader
from quorumlog.protocol.record import Codec, Run
from quorumlog.protocol.tally import Tally

_UNREADABLE_MAX: Final = 1000
"""Entries that may be unreadable before a repair gives up (taste): all are looked for, so that
what is left is copied.
"""


@dataclass(frozen=True, slots=True)
class FragmentRange:
    """Work for one FragmentRepair: entries first..last of the fragment that begins at `fragment`."""

    fragment: int
    first: int
    last: int


def fragment_ranges(metadata: LedgerMetadata, missed: MissedRange) -> Iterator[FragmentRange]:
    """Cut a missed range into one range for each closed fragment that the member is still in."""
    for index, fragment in enumerate(metadata.fragments):
        end = metadata.fragment_last(index)
        if end is None or missed.member not in fragment.bookies:
            continue
        first, last = max(missed.first, fragment.first_entry), min(missed.last, end)
        if first <= last:
            yield FragmentRange(fragment.first_entry, first, last)


class Stage(Enum):
    """Where a repair stands."""

    IDLE = "idle"
    MARKING = "marking"
    """The target becomes a pending member in metadata, before its first byte (rule 20)."""
    COPYING = "copying"
    VERIFYING = "verifying"
    """All is read back from the target's disk (rule 20a); what is not right there is copied again."""
    REPLACING = "replacing"
    RELEASING = "releasing"
    """The target gets a copy of the row in which it has the place; then `leaving` is let go (rule 20b)."""
    DONE = "done"


@dataclass(slots=True, eq=False, kw_only=True)
class FragmentRepair(Keyed):
    """Repairs one member of one closed fragment once; see the module. Ends with Repaired or Failed.

    Invariants (checked by `check`):
      - I25: the fragment is closed; only its members change; nothing is replaced before all
        entries are on the target;
      - rule 20: nothing is sent to a target that metadata does not name;
      - rule 20a: nobody is replaced before all was read back from the target's disk, under the row
        that is changed;
      - rule 20b: nobody is let go before the target has a copy of the row that is changed.
    """

    metadata: LedgerMetadata = field(kw_only=False)
    """The row as this repair knows it."""
    fragment: int
    """The first entry of the fragment."""
    leaving: str
    target: str
    """The new member, or `leaving` itself, which is then filled up."""
    first: InitVar[int | None] = None
    last: int | None = None
    """What is looked at where a member is filled up; None: to the fragment's border."""
    held: InitVar[Ranges] = ()
    """Ascending ranges that a new target has by its own word; they are not sent again, and verified
    as all else is.
    """
    read_entries: int = READ_ENTRIES
    stage: Stage = Stage.IDLE
    _codec: Codec = field(init=False)
    _attempt: int = 0
    _update: UpdateMetadata | None = None
    _is_stalled: bool = False
    _first: int = field(init=False)
    _next: int = field(init=False)
    """COPYING: the first entry that no reader was started for. VERIFYING: that was not seen."""
    _skipped: Ranges = field(init=False)
    """Ranges that this pass over the entries leaves out."""
    _lacking: Ranges = ()
    """VERIFYING: what should have been on the target's disk, and was not."""
    _is_again: bool = False
    """What was lacking has been copied again: once is enough."""
    _reader: RangeReader | None = None
    _tally: Tally | None = None
    _pending: dict[int, Run] = field(default_factory=dict)
    """Parts sent to the target and not acknowledged, by first entry."""
    _border: int | None = None
    """The fragment's last entry, as the first row had it."""
    _position: int | None = None
    """Whose entries were copied: the place that `leaving` had then."""
    _unreadable: tuple[int, ...] = ()
    _failure: Failed | None = None
    _out: Annotated[list[Effect], Out("empty between steps")] = field(default_factory=list)

    def __post_init__(self, first: int | None, held: Ranges) -> None:
        """Nothing is asked before Begin."""
        is_whole = first is None and self.last is None
        assert self.target == self.leaving or is_whole, "a new member needs all"
        self._codec = Codec(self.metadata.digest, self.metadata.mac_key)
        self._first = self._next = self.fragment if first is None else first
        self._skipped = held

    @property
    def unreadable(self) -> tuple[int, ...]:
        """Entries that the target should have, and of which nobody gave a valid copy; ascending."""
        return self._unreadable

    @property
    def is_done(self) -> bool:
        """Whether Repaired or Failed was emitted."""
        return self.stage is Stage.DONE

    # --- the machine -------------------------------------------------------------------------

    def step(self, event: Event) -> list[Effect]:
        """What to do about an event."""
        self._out = []
        match event:
            case Begin():
                if self.stage is Stage.IDLE:
                    self._begin(self.metadata)
            case AddAnswered():
                self._add_answered(event)
            case ReadAnswered():
                self._read_answered(event)
            case RowAnswered():
                self._row_answered(event)
            case MetadataAnswered():
                self._metadata_answered(event)
            case TimerFired():
                self._timer_fired(event)
            case (
                FenceAnswered()
                | BookiesFound()
                | AppendRequested()
                | CloseRequested()
                | RecoverRequested()
                | ReplaceRequested()
                | PlacedInLog()
            ):
                raise AssertionError(f"{event} is not for a repair")
            case _:
                assert_never(event)
        out, self._out = self._out, []
        return out

    def check(self) -> None:
        """Assert the invariants."""
        if self.stage in (Stage.IDLE, Stage.DONE, Stage.MARKING):
            return
        index = self._index(self.metadata)
        assert index is not None, "the fragment is there"
        assert self.metadata.is_closed_fragment(index), "I25"
        assert self.target in self.metadata.all_members, "rule 20"
        if self.stage is not Stage.COPYING:
            assert not self._pending, "I25: all was copied before"
        if self.stage is Stage.REPLACING:
            assert not self._lacking, "rule 20a"
        if self.stage is Stage.RELEASING:
            assert self.leaving in self.metadata.all_members, "rule 20b"

    # --- metadata ----------------------------------------------------------------------------

    def _index(self, row: LedgerMetadata) -> int | None:
        for index, fragment in enumerate(row.fragments):
            if fragment.first_entry == self.fragment:
                return index
        return None

    def _begin(self, row: LedgerMetadata) -> None:
        """Mark the target, or go on where metadata says that this was done."""
        self.metadata = row
        index = self._index(row)
        if index is None or not row.is_closed_fragment(index):
            self._fail(
                "ledger-fenced", detail="the fragment is open"
            )  # I25: its writer's, not ours
            return
        fragment, border = row.fragments[index], row.fragment_last(index)
        if not self._ends_as_before(border):
            self._fail("version-conflict", detail="the fragment's end changed meanwhile")
            return
        self._border = border
        if self.last is None:
            self.last = border
        place, is_there = (self.fragment, self.leaving), self.leaving in fragment.bookies
        successors = [r.target for r in row.placed_repairs if (r.first_entry, r.leaving) == place]
        if self.target in successors:
            # By this repair, or by an earlier one that ended before its last step.
            self._give_row()
        elif not successors and (self.stage is Stage.RELEASING or not is_there):
            # By this repair or another one: whose change it was queued a second look (rule 20a).
            self.stage = Stage.DONE
            self._out.append(Repaired(row))
        elif not (is_there and self._is_same_place(fragment)):
            self._fail("version-conflict", detail="the fragment's members changed meanwhile")
        elif self.target == self.leaving or self._is_marked(row):
            self._go_on()
        elif self._is_overtaken(row):
            self._fail("version-conflict", detail="another repair took over the place meanwhile")
        else:
            self.stage = Stage.MARKING
            self._send_update(row.with_repair(Repair(self.fragment, self.leaving, self.target)))

    def _ends_as_before(self, border: int | None) -> bool:
        """Whether the fragment has the end that this repair has seen first. It changes only in a database that went
        back and was rebuilt: what this repair copies is not all that the place has then (seed 314751).
        """
        return self._border in (None, border)

    def _is_same_place(self, fragment: Fragment) -> bool:
        """Whether the target may still have the place, with what was copied to it.

        A member may leave, by another repair, and come back at another place while this one
        copies: what the target was given does not belong there (seed 133237). And the target's
        bookie may have got a place in another incarnation: it would hold two copies (I22).
        """
        others = {member_name(m) for m in fragment.bookies if m != self.leaving}
        is_free = member_name(self.target) not in others
        return is_free and self._position in (None, fragment.bookies.index(self.leaving))

    def _is_marked(self, row: LedgerMetadata) -> bool:
        # Rule 20: a pending member in metadata before its first byte, so that nobody collects it.
        return Repair(self.fragment, self.leaving, self.target) in row.repairs

    def _is_overtaken(self, row: LedgerMetadata) -> bool:
        """Whether a later repair replaced this one's mark (rule 20). Then this one must give up. If it marked the place again,
        both would replace each other's mark and verify their copies again, and neither would end (L6, seed 99933).
        """
        place = (self.fragment, self.leaving)
        was_marked = self._position is not None
        return was_marked and place in ((r.first_entry, r.leaving) for r in row.repairs)

    def _go_on(self) -> None:
        if self._position is None:
            self._position, _ = self._place()
            self._copy()
        else:
            # Somebody changed the row since all was read back. Meanwhile it may not have named the
            # target, and who is not named drops what it has (rule 18).
            self._is_again = False
            self._verify()

    def _send_update(self, row: LedgerMetadata, missed: tuple[MissedRange, ...] = ()) -> None:
        self._attempt += 1
        self._update = UpdateMetadata(self._attempt, row, missed)
        self._out.append(self._update)

    def _metadata_answered(self, event: MetadataAnswered) -> None:
        if self.stage is Stage.COPYING:
            self._feed(event)
            return
        if self._update is None or event.attempt != self._update.attempt:
            return
        if event.status is CasStatus.MISSING:
            self._fail("no-such-ledger")
        elif event.status is CasStatus.UNKNOWN or event.metadata is None:
            if not self._is_stalled:
                self._is_stalled = True
                self._out.append(StartTimer(Timer.RETRY))
        elif event.refuses(self._update):
            self._fail("version-conflict", detail=f"{self.target} is not registered any longer")
        else:
            self._update = None
            self._begin(event.metadata)

    # --- copying -----------------------------------------------------------------------------

    def _place(self) -> tuple[int, Fragment]:
        """The position that is repaired, and its fragment as metadata has it: `leaving` has the place
        until the last step.
        """
        index = self._index(self.metadata)
        assert index is not None, "checked in _begin"
        fragment = self.metadata.fragments[index]
        return fragment.bookies.index(self.leaving), fragment

    def _copy(self) -> None:
        self.stage = Stage.COPYING
        self._next = self._first
        self._copy_next()

    def _copy_next(self) -> None:
        last = self._window()
        if last is None:
            self._copied()
            return
        self._reader = RangeReader(self.metadata, first=self._next, last=last, avoid=(self.target,))
        self._feed(Begin())

    def _window(self) -> int | None:
        """The last entry of the next window to work on, or None at the fragment's end. Moves `_next` to the
        window's first entry.
        """
        end = self.last
        assert end is not None, "a closed fragment has an end"
        while self._next <= end:
            past, last = self._around(min(end, self._next + self.read_entries - 1))
            if past == self._next:
                return last
            self._next = past
        return None

    def _around(self, last: int) -> tuple[int, int]:
        """The next entry to work on, and the last one before the next range that is left out. Entries that
        were given up are neither looked for nor expected of a target (rule 31).
        """
        for low, high in sorted(self._skipped + self.metadata.lost_entries):
            if low <= self._next <= high:
                return high + 1, last
            if self._next < low <= last:
                return self._next, low - 1
        return self._next, last

    def _feed(self, event: Event) -> None:
        """Pass an event to the reader."""
        reader = self._reader
        if reader is None:
            return
        for effect in reader.step(event):
            match effect:
                case EntriesRead(run, _):
                    self._send(run)
                case Failed():
                    self._unread(effect)
                case SendRead() | StartTimer() | ReadMetadata():
                    self._out.append(effect)
                case _:
                    raise AssertionError(f"{effect} is not a reader's")
        if reader.is_done:
            self._next = reader.next
            self._reader = None
            if self.stage is Stage.COPYING and not self._pending:
                self._copy_next()

    def _unread(self, failed: Failed) -> None:
        """Nobody has a valid copy of an entry: note it if it is ours to have, and go on."""
        reader = self._reader
        assert reader is not None, "it said so"
        if failed.entry_id is None:
            self._fail(failed.code, detail=failed.detail)
            return
        position, _ = self._place()
        if self.metadata.quorum.is_member(position, failed.entry_id):
            self._failure = self._failure or failed
            self._unreadable += (failed.entry_id,)
        reader.next = failed.entry_id + 1
        if len(self._unreadable) > _UNREADABLE_MAX:
            self._out.append(failed)
            self.stage = Stage.DONE

    def _send(self, run: Run) -> None:
        position, _ = self._place()
        quorum = self.metadata.quorum
        part = run.where(lambda entry_id: quorum.is_member(position, entry_id))
        if part is None:
            return
        self._pending[part.first] = part
        # As a recovery add: it passes the fence and replaces a damaged copy (BK#4163, X16).
        self._out.append(
            SendAdd(position, self.target, 0, part, self.metadata.ledger_key, recovery=True)
        )
        self._out.append(StartTimer(Timer.QUORUM, part.first))

    def _add_answered(self, event: AddAnswered) -> None:
        if self.stage is not Stage.COPYING or event.first not in self._pending:
            return
        if event.status is Status.OK:
            del self._pending[event.first]
            if self._reader is None and not self._pending:
                self._copy_next()
        elif event.status is Status.CONFLICT:
            self._fail("entry-conflict", bookie=self.target, entry_id=event.first)
        else:
            self._fail(
                "entry-unavailable",
                detail=f"{self.target} did not take it: {event.status}",
                bookie=self.target,
                entry_id=event.first,
            )

    def _copied(self) -> None:
        if self._failure is not None:
            # What can be copied was; the place is kept until somebody finds the rest.
            self.stage = Stage.DONE
            self._out.append(self._failure)
        else:
            self._verify()

    # --- verifying ---------------------------------------------------------------------------

    def _verify(self) -> None:
        self.stage = Stage.VERIFYING
        self._next = self._first
        self._lacking = ()
        if not self._is_again:
            self._skipped = ()  # rule 20a: what the target had before this repair is read as well
        self._verify_next()

    def _verify_next(self) -> None:
        position, fragment = self._place()
        while (last := self._window()) is not None:
            tally = Tally(self.metadata.quorum, fragment, first=self._next, last=last)
            if tally.cursors[position] is not None:
                self._tally = tally
                self._read_target(tally, position)
                return
            self._next = last + 1
        self._tally = None
        self._verified()

    def _read_target(self, tally: Tally, position: int) -> None:
        cursor = tally.cursors[position]
        assert cursor is not None, "it has something to say"
        ledger_id = self.metadata.ledger_id
        self._out.append(
            SendRead(position, self.target, ledger_id, cursor, tally.last, from_disk=True)
        )

    def _read_answered(self, event: ReadAnswered) -> None:
        if self.stage is Stage.COPYING:
            self._feed(event)
            return
        tally = self._tally
        if self.stage is not Stage.VERIFYING or tally is None:
            return
        position, _ = self._place()
        is_expected = (event.position, event.member) == (position, self.target)
        if not is_expected or (event.first, event.last) != (tally.cursors[position], tally.last):
            return
        if event.status not in {Status.OK, Status.NO_ENTRY}:
            self._fail(
                "entry-unavailable",
                detail=f"{self.target} does not tell what it has: {event.status}",
                bookie=self.target,
                entry_id=event.first,
            )
            return
        if tally.note(event, self._codec, self.metadata.ledger_id) is not None:
            self._read_target(tally, position)
            return
        self._lacking = union((*self._lacking, *ranges_of(self._unfound(tally, position))))
        self._next = tally.last + 1
        self._verify_next()

    def _unfound(self, tally: Tally, position: int) -> Iterator[int]:
        """What a look at the target did not find of what belongs there: absent, damaged or unknown."""
        for entry_id in range(tally.first, tally.last + 1):
            if self.metadata.quorum.is_member(position, entry_id) and entry_id not in tally.found:
                yield entry_id

    def _verified(self) -> None:
        """All was read back once: what was not right is copied again, and read back again."""
        end = self.last
        assert end is not None, "a closed fragment has an end"
        if not self._lacking:
            if self.leaving == self.target:
                self.stage = Stage.DONE
                self._out.append(Repaired(self.metadata))
            else:
                self._replace()
        elif self._is_again:
            self._fail(
                "entry-unavailable",
                detail=f"{self.target} does not have what it was given",
                bookie=self.target,
                entry_id=self._lacking[0][0],
            )
        else:
            self._is_again = True
            self._skipped = complement(self._lacking, self._first, end)
            self._copy()

    # --- replacing ---------------------------------------------------------------------------

    def _replace(self) -> None:
        self.stage = Stage.REPLACING
        index = self._index(self.metadata)
        assert index is not None, "checked in _begin"
        changed = self.metadata.with_member_replaced(index, self.leaving, self.target)
        self._send_update(changed, self._second_look())

    def _second_look(self) -> tuple[MissedRange, ...]:
        """Rule 20a: whatever becomes of this worker, the new member is looked at once more, from the
        queue, after it has its place: it may have lost something since it was read.
        """
        end = self.last
        assert end is not None, "a closed fragment has an end"
        is_empty = end < self._first
        return () if is_empty else (MissedRange(self.target, self._first, end),)

    # --- releasing ---------------------------------------------------------------------------

    def _give_row(self) -> None:
        """Rule 20b. Needs nothing of `leaving`, which may be gone for ever."""
        self.stage = Stage.RELEASING
        self._out.append(SendRow(self.target, self.metadata))

    def _row_answered(self, event: RowAnswered) -> None:
        row = self.metadata
        is_expected = (event.member, event.version) == (self.target, row.version)
        if self.stage is not Stage.RELEASING or self._update is not None or not is_expected:
            return
        if event.status is Status.OK:
            self._release()
        else:
            self._fail(
                "entry-unavailable",
                detail=f"{self.target} keeps no copy of the row: {event.status}",
                bookie=self.target,
            )

    def _release(self) -> None:
        """A change of the very row that the target has a copy of: after any other change the target may
        have its place by a later row.
        """
        self._send_update(self.metadata.with_leaving_released(self.fragment, self.target))

    # --- timers and ends ---------------------------------------------------------------------

    def _timer_fired(self, event: TimerFired) -> None:
        if event.timer is Timer.HEDGE and self.stage is Stage.COPYING:
            self._feed(event)
        elif event.timer is Timer.RETRY and self._is_stalled and self._update is not None:
            self._is_stalled = False
            self._out.append(self._update)
        elif event.timer is Timer.QUORUM:
            self._silent(event.tag)

    def _silent(self, first: int) -> None:
        if self.stage is Stage.COPYING and first in self._pending:
            self._fail(
                "entry-unavailable",
                detail=f"{self.target} is silent",
                bookie=self.target,
                entry_id=first,
            )

    def _fail(
        self, code: str, *, detail: str = "", bookie: str | None = None, entry_id: int | None = None
    ) -> None:
        self.stage = Stage.DONE
        self._out.append(Failed(code, None, detail, bookie, entry_id))
