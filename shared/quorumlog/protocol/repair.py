"""Repairs one member of one closed fragment: replaces the member, or copies missed entries to it.

Bytes are copied unchanged (rule 2), so no password is needed. Only closed fragments are repaired
(I25), because the writer or a recovery replaces members of an open fragment.

Before the target replaces a member, the repair reads all entries that the target should hold back
from its disk (rule 20a). The target's index may name entries that are damaged or not on disk yet,
and the replaced member may have the last good copy.

The replaced member stays a member until the target has a copy of the new metadata (rule 20b),
because the database may go back to a version that names the replaced member.
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
"""A repair skips up to this many unreadable entries, and fails if there are more. Chosen by
judgement.
"""


@dataclass(frozen=True, slots=True)
class FragmentRange:
    """The task of one repair: entries first..last of the fragment that begins at `fragment`."""

    fragment: int
    first: int
    last: int


def fragment_ranges(metadata: LedgerMetadata, missed: MissedRange) -> Iterator[FragmentRange]:
    """Split a missed range into the parts in closed fragments that still name the member."""
    for index, fragment in enumerate(metadata.fragments):
        end = metadata.fragment_last(index)
        if end is None or missed.member not in fragment.bookies:
            continue
        first, last = max(missed.first, fragment.first_entry), min(missed.last, end)
        if first <= last:
            yield FragmentRange(fragment.first_entry, first, last)


class Stage(Enum):
    """The stage of a repair."""

    IDLE = "idle"
    MARKING = "marking"
    """Names the target as a pending member in the metadata, before any byte is sent (rule 20)."""
    COPYING = "copying"
    VERIFYING = "verifying"
    """Reads all entries back from the target's disk, and copies wrong entries again (rule 20a)."""
    REPLACING = "replacing"
    RELEASING = "releasing"
    """Gives the target a copy of the new metadata, and then releases `leaving` (rule 20b)."""
    DONE = "done"


@dataclass(slots=True, eq=False, kw_only=True)
class FragmentRepair(Keyed):
    """Repairs one member of one closed fragment once, and ends with Repaired or Failed.

    Invariants (checked by `check`):
      - I25: the fragment is closed; only its members change; no member is replaced before all
        entries are on the target;
      - rule 20: no entry is sent to a target that the metadata does not name;
      - rule 20a: no member is replaced before all entries were read back from the target's disk,
        under the version of the metadata that is changed;
      - rule 20b: no member is released before the target has a copy of the version that is changed.
    """

    metadata: LedgerMetadata = field(kw_only=False)
    """The newest metadata that this repair has received."""
    fragment: int
    """The first entry of the fragment to repair."""
    leaving: str
    target: str
    """The new member, or `leaving` itself if the repair only copies entries that it lacks."""
    first: InitVar[int | None] = None
    last: int | None = None
    """The last entry to check if `target` is `leaving`; None for the fragment's last entry."""
    held: InitVar[Ranges] = ()
    """Ascending ranges that a new target claims to hold. These entries are verified, but not
    copied.
    """
    read_entries: int = READ_ENTRIES
    stage: Stage = Stage.IDLE
    _codec: Codec = field(init=False)
    _attempt: int = 0
    _update: UpdateMetadata | None = None
    _is_stalled: bool = False
    _first: int = field(init=False)
    _next: int = field(init=False)
    """In COPYING the first entry without a reader, in VERIFYING the first unverified entry."""
    _skipped: Ranges = field(init=False)
    """Ranges to skip in the current stage."""
    _lacking: Ranges = ()
    """In VERIFYING, the ranges that are missing or wrong on the target's disk."""
    _is_again: bool = False
    """Whether lacking ranges were copied a second time, which is the last attempt."""
    _reader: RangeReader | None = None
    _tally: Tally | None = None
    _pending: dict[int, Run] = field(default_factory=dict)
    """The parts that were sent to the target and not acknowledged yet, by their first entries."""
    _border: int | None = None
    """The fragment's last entry in the metadata with which the repair began."""
    _position: int | None = None
    """The position whose entries are copied, which `leaving` had at the start."""
    _unreadable: tuple[int, ...] = ()
    _failure: Failed | None = None
    _out: Annotated[list[Effect], Out("empty between steps")] = field(default_factory=list)

    def __post_init__(self, first: int | None, held: Ranges) -> None:
        """Prepare the repair, which sends no request before Begin."""
        is_whole = first is None and self.last is None
        assert self.target == self.leaving or is_whole, "a new member needs the whole fragment"
        self._codec = Codec(self.metadata.digest, self.metadata.mac_key)
        self._first = self._next = self.fragment if first is None else first
        self._skipped = held

    @property
    def unreadable(self) -> tuple[int, ...]:
        """Entries that the target should have, but that no member returned intact, ascending."""
        return self._unreadable

    @property
    def is_done(self) -> bool:
        """Whether the repair has ended with Repaired or Failed."""
        return self.stage is Stage.DONE

    # --- the machine -------------------------------------------------------------------------

    def step(self, event: Event) -> list[Effect]:
        """Process an event and return the effects."""
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
                raise AssertionError(f"a repair can't process this event: {event}")
            case _:
                assert_never(event)
        out, self._out = self._out, []
        return out

    def check(self) -> None:
        """Assert the invariants."""
        if self.stage in (Stage.IDLE, Stage.DONE, Stage.MARKING):
            return
        index = self._index(self.metadata)
        assert index is not None, "the metadata must have the fragment"
        assert self.metadata.is_closed_fragment(index), "the fragment must be closed (I25)"
        assert self.target in self.metadata.all_members, "the target must be a member (rule 20)"
        if self.stage is not Stage.COPYING:
            assert not self._pending, "all adds must be answered after COPYING (I25)"
        if self.stage is Stage.REPLACING:
            assert not self._lacking, "the target must have all entries (rule 20a)"
        if self.stage is Stage.RELEASING:
            assert self.leaving in self.metadata.all_members, "`leaving` must stay (rule 20b)"

    # --- metadata ----------------------------------------------------------------------------

    def _index(self, row: LedgerMetadata) -> int | None:
        for index, fragment in enumerate(row.fragments):
            if fragment.first_entry == self.fragment:
                return index
        return None

    def _begin(self, row: LedgerMetadata) -> None:
        """Continue from this metadata. It must name the target before entries are copied."""
        self.metadata = row
        index = self._index(row)
        if index is None or not row.is_closed_fragment(index):
            self._fail("ledger-fenced", detail="only the writer may change an open fragment")  # I25
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
            # This repair, or an earlier one that ended before its last step, placed the target.
            self._give_row()
        elif not successors and (self.stage is Stage.RELEASING or not is_there):
            # This or another repair replaced `leaving`, and queued a second check (rule 20a).
            self.stage = Stage.DONE
            self._out.append(Repaired(row))
        elif not (is_there and self._is_same_place(fragment)):
            self._fail("version-conflict", detail="the fragment's members changed meanwhile")
        elif self.target == self.leaving or self._is_marked(row):
            self._go_on()
        elif self._is_overtaken(row):
            self._fail("version-conflict", detail=f"another repair now replaces {self.leaving}")
        else:
            self.stage = Stage.MARKING
            self._send_update(row.with_repair(Repair(self.fragment, self.leaving, self.target)))

    def _ends_as_before(self, border: int | None) -> bool:
        """Whether the fragment's end is unchanged since this repair began. An end changes only if
        the database went back and was rebuilt. The copies are then incomplete (seed 314751).
        """
        return self._border in (None, border)

    def _is_same_place(self, fragment: Fragment) -> bool:
        """Whether the target may still replace `leaving`, with the entries copied so far.

        Another repair may have moved `leaving` to another position, which stores other entries
        (seed 133237). Or the target's bookie may have become a member in another incarnation, and
        would then store two copies (I22).
        """
        others = {member_name(m) for m in fragment.bookies if m != self.leaving}
        is_free = member_name(self.target) not in others
        return is_free and self._position in (None, fragment.bookies.index(self.leaving))

    def _is_marked(self, row: LedgerMetadata) -> bool:
        # Rule 20: if the metadata doesn't name the target, the bookie drops the copied entries.
        return Repair(self.fragment, self.leaving, self.target) in row.repairs

    def _is_overtaken(self, row: LedgerMetadata) -> bool:
        """Whether a later repair replaced this repair's mark (rule 20). Then this repair must fail,
        because two repairs that both mark again would replace each other's mark for ever (L6, seed
        99933).
        """
        place = (self.fragment, self.leaving)
        was_marked = self._position is not None
        return was_marked and place in ((r.first_entry, r.leaving) for r in row.repairs)

    def _go_on(self) -> None:
        if self._position is None:
            self._position, _ = self._place()
            self._copy()
        else:
            # The metadata changed after all entries were read back. If a version in between did not
            # name the target, the target may have dropped entries (rule 18).
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
            self._fail("version-conflict", detail=f"target {self.target} is unregistered")
        else:
            self._update = None
            self._begin(event.metadata)

    # --- copying -----------------------------------------------------------------------------

    def _place(self) -> tuple[int, Fragment]:
        """The position to repair, and its fragment. `leaving` stays there until the last step."""
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
        """The last entry of the next window to process, or None at the fragment's end. Sets `_next`
        to the window's first entry.
        """
        end = self.last
        assert end is not None, "a closed fragment must have an end"
        while self._next <= end:
            past, last = self._around(min(end, self._next + self.read_entries - 1))
            if past == self._next:
                return last
            self._next = past
        return None

    def _around(self, last: int) -> tuple[int, int]:
        """The next entry to process, and the last entry (at most `last`) before the next skipped
        range. Lost entries are skipped, because no member has to hold them (rule 31).
        """
        for low, high in sorted(self._skipped + self.metadata.lost_entries):
            if low <= self._next <= high:
                return high + 1, last
            if self._next < low <= last:
                return self._next, low - 1
        return self._next, last

    def _feed(self, event: Event) -> None:
        """Pass an event to the reader, and process the reader's effects."""
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
                    raise AssertionError(f"a reader must not return this effect: {effect}")
        if reader.is_done:
            self._next = reader.next
            self._reader = None
            if self.stage is Stage.COPYING and not self._pending:
                self._copy_next()

    def _unread(self, failed: Failed) -> None:
        """Skip an unreadable entry, and record the entry if this position should store it."""
        reader = self._reader
        assert reader is not None, "only a reader may report an unreadable entry"
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
        # A recovery add passes the fence, and replaces a damaged copy (BK#4163, X16).
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
                detail=f"{self.target} did not store the copies: {event.status}",
                bookie=self.target,
                entry_id=event.first,
            )

    def _copied(self) -> None:
        if self._failure is not None:
            # All readable entries are copied. `leaving` stays while other entries are unreadable.
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
            self._skipped = ()  # rule 20a: also reads entries that the target held at the start
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
        assert cursor is not None, "the position must have entries of the window"
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
                detail=f"{self.target} did not return its entries: {event.status}",
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
        """The position's entries that are absent, damaged or unknown at the target."""
        for entry_id in range(tally.first, tally.last + 1):
            if self.metadata.quorum.is_member(position, entry_id) and entry_id not in tally.found:
                yield entry_id

    def _verified(self) -> None:
        """End the verification: replace the member, or copy and read lacking entries once more."""
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
                detail=f"{self.target} lacks entries that were copied to it",
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
        """The entries to verify a second time (rule 20a). The target may lose entries after they
        were read back, and this worker may end before it notices.
        """
        end = self.last
        assert end is not None, "a closed fragment has an end"
        is_empty = end < self._first
        return () if is_empty else (MissedRange(self.target, self._first, end),)

    # --- releasing ---------------------------------------------------------------------------

    def _give_row(self) -> None:
        """Send the target (not `leaving`, which may be lost) a copy of the metadata (rule 20b)."""
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
                detail=f"{self.target} did not store a copy of the metadata: {event.status}",
                bookie=self.target,
            )

    def _release(self) -> None:
        """Release `leaving` by a change of exactly the version that the target has a copy of. If
        the metadata has changed since, the target first needs a copy of the newer version.
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
                detail=f"{self.target} did not answer in time",
                bookie=self.target,
                entry_id=first,
            )

    def _fail(
        self, code: str, *, detail: str = "", bookie: str | None = None, entry_id: int | None = None
    ) -> None:
        self.stage = Stage.DONE
        self._out.append(Failed(code, None, detail, bookie, entry_id))
