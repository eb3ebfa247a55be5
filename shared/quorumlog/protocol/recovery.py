"""Closes a ledger whose writer is gone: mark, fence, read forward, write back, close.

Sources: both protocol documents, "Closing a ledger as a reader"; overview 1.6; fencing internals;
rules 10 and 12 to 14. Readers get no recovered entry before the metadata is CLOSED (X19).
"""

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, Final, assert_never

from quorumlog.protocol import placement
from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.keyed import Keyed, Out
from quorumlog.protocol.messages import (
    AddAnswered,
    AppendRequested,
    Begin,
    BookiesFound,
    CasStatus,
    Closed,
    CloseRequested,
    Effect,
    Event,
    Failed,
    FenceAnswered,
    MetadataAnswered,
    MissedRange,
    PlacedInLog,
    ReadAnswered,
    RecoverRequested,
    ReplaceRequested,
    RowAnswered,
    SendFence,
    SendRead,
    Status,
    Timer,
    TimerFired,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import Fragment, LedgerMetadata, State
from quorumlog.protocol.record import Codec
from quorumlog.protocol.slots import Slots
from quorumlog.protocol.tally import EntryVerdict, Tally
from quorumlog.protocol.window import Window, positions

READ_ENTRIES: Final = 1000
"""Entries per read, which is more than most writers have in flight. Chosen by judgement."""

_AHEAD_RUNS: Final = 2
"""Maximum runs that wait for their write-back while entries are read, which bounds memory."""


class Phase(Enum):
    """The phase of a recovery."""

    IDLE = "idle"
    MARKING = "marking"
    """Sets IN_RECOVERY in the metadata, so that the writer can no longer change its ensemble."""
    FENCING = "fencing"
    READING = "reading"
    """Reads entries from the LAC on, and writes them back."""
    MEASURING = "measuring"
    """No entry was found after the LAC, so the length is read from the entry at the LAC (I4)."""
    CLOSING = "closing"
    DONE = "done"


@dataclass(slots=True, eq=False, kw_only=True)
class Recovery(Keyed):
    """Recovers one ledger once, and ends with Closed or Failed.

    Invariants (checked by `check`):
      - I14: no entry is read before every ack quorum of the last fragment has a fenced member;
      - X6: reads go to the ensemble found at the start, even if this recovery changes the ensemble;
      - I24, X2: no entry below the last fragment is written; fragments made by this recovery begin
        after the confirmed entries (rule 12), and only the close writes them to the metadata.
    """

    declare_lost: tuple[str, ...] = ()
    """Members that an operator declares lost for ever (rule 14)."""
    read_entries: int = READ_ENTRIES
    phase: Phase = Phase.IDLE
    _row: LedgerMetadata | None = None
    _codec: Codec | None = None
    _update: UpdateMetadata | None = None
    _is_stalled: bool = False
    _attempt: int = 0
    _fenced: int = 0
    _unfenced: int = 0
    _lac: int = NO_ENTRY
    """The highest LAC found while fencing. The window has the entries that this recovery has
    confirmed since (rule 12)."""
    _tally: Tally | None = None
    _next: int = 0
    """The next entry to judge."""
    _is_end_known: bool = False
    _slots: Slots = field(default_factory=lambda: Slots(is_recovery=True))
    _changes: tuple[Fragment, ...] = ()
    """Fragments that this recovery makes. They stay in memory until the close (X5, I24)."""
    _find: int | None = None
    _is_grace_over: bool = False
    _is_lacking: bool = False
    """Whether a confirmed entry is lost, because its members were declared lost (rule 14)."""
    _out: Annotated[list[Effect], Out("empty between steps")] = field(default_factory=list)

    @property
    def metadata(self) -> LedgerMetadata:
        """The newest metadata that this recovery has received. Defined after RecoverRequested."""
        assert self._row is not None, "a recovery must begin with RecoverRequested"
        return self._row

    @property
    def is_done(self) -> bool:
        """Whether the recovery has ended with Closed or Failed."""
        return self.phase is Phase.DONE

    @property
    def _window(self) -> Window:
        return self._slots.window

    # --- the machine -------------------------------------------------------------------------

    def step(self, event: Event) -> list[Effect]:
        """Process an event and return the effects."""
        self._out = []
        if self.phase is Phase.DONE:
            return []
        match event:
            case ReadAnswered():
                self._read_answered(event)
            case AddAnswered():
                self._add_answered(event)
            case FenceAnswered():
                self._fence_answered(event)
            case MetadataAnswered():
                self._metadata_answered(event)
            case BookiesFound():
                self._bookies_found(event)
            case TimerFired():
                self._timer_fired(event)
            case RecoverRequested():
                if self.phase is Phase.IDLE:
                    self._begin(event.metadata)
            case (
                Begin()
                | AppendRequested()
                | CloseRequested()
                | ReplaceRequested()
                | RowAnswered()
                | PlacedInLog()
            ):
                raise AssertionError(f"a recovery can't process this event: {event}")
            case _:
                assert_never(event)
        self._go_on()
        out, self._out = self._out, []
        return out

    def check(self) -> None:
        """Assert the invariants."""
        if self.phase in (Phase.IDLE, Phase.DONE):
            return
        row = self.metadata
        row.check()
        self._slots.check()
        first = row.last_fragment.first_entry
        if self.phase in (Phase.READING, Phase.MEASURING, Phase.CLOSING):
            assert self._is_covered(), "coverage must precede reads (I14)"
            confirmed, runs = self._window.last_confirmed, self._window.runs
            assert confirmed >= first - 1, "earlier fragments must be confirmed (I24)"
            assert all(run >= first for run in runs), "earlier fragments get no writes (I24)"
        for change in self._changes:
            assert first <= change.first_entry <= self._window.last_confirmed + 1, "rule 12"
        if self.phase is Phase.READING and self._tally is not None:
            assert self._tally.fragment == row.last_fragment, "the ensemble read must stay (X6)"
        if self.phase is Phase.CLOSING:
            assert not self._window.runs, "all runs must be written back before the close (X10)"

    # --- marking -----------------------------------------------------------------------------

    def _begin(self, row: LedgerMetadata) -> None:
        self._row = row
        self._changes = ()
        self._codec = Codec(row.digest, row.mac_key)
        if row.state is State.CLOSED:
            self._closed(row)
            return
        lost = tuple(dict.fromkeys(row.declared_lost + self.declare_lost))
        if row.state is State.IN_RECOVERY and lost == row.declared_lost:
            self._fence()
        else:
            self.phase = Phase.MARKING
            self._send_update(replace(row.in_recovery(), declared_lost=lost))

    def _send_update(self, row: LedgerMetadata, missed: tuple[MissedRange, ...] = ()) -> None:
        self._attempt += 1
        self._update = UpdateMetadata(self._attempt, row, missed)
        self._out.append(self._update)

    def _metadata_answered(self, event: MetadataAnswered) -> None:
        if self._update is None or event.attempt != self._update.attempt:
            return
        row = event.metadata
        if event.status is CasStatus.MISSING:
            self._failed("no-such-ledger")
        elif event.status is CasStatus.UNKNOWN or row is None:
            self._is_stalled = True
            self._out += self._slots.arm(Timer.RETRY)
        elif row.state is State.CLOSED:
            self._update = None
            self._closed(row)  # perhaps by another recovery, at the same end (I4)
        elif (
            self.phase is Phase.CLOSING
            and self._is_same_ledger(row)
            and not event.refuses(self._update)
        ):
            self._row = row
            self._close()
        else:
            self._update = None
            self._begin(row)

    def _is_same_ledger(self, row: LedgerMetadata) -> bool:
        # Reference 2.4.8: if a fragment was added, entries that were read before don't count.
        mine = self.metadata
        return row.state is State.IN_RECOVERY and (
            row.last_fragment == mine.last_fragment and row.declared_lost == mine.declared_lost
        )

    # --- fencing -----------------------------------------------------------------------------

    def _lost(self, fragment: Fragment) -> int:
        lost = self.metadata.declared_lost
        return sum(1 << p for p, member in enumerate(fragment.bookies) if member in lost)

    def _fence(self) -> None:
        row = self.metadata
        self.phase = Phase.FENCING
        self._fenced = self._unfenced = 0
        self._lac = NO_ENTRY
        lost = self._lost(row.last_fragment)
        self._out.extend(
            SendFence(position, member, row.ledger_id, row.ledger_key)
            for position, member in enumerate(row.last_fragment.bookies)
            if not lost & 1 << position
        )
        if self._is_covered():
            self._start_reading()

    def _fence_answered(self, event: FenceAnswered) -> None:
        members = self.metadata.last_fragment.bookies
        if self.phase is not Phase.FENCING or members[event.position] != event.member:
            return
        if event.status is Status.OK:
            self._fenced |= 1 << event.position
            self._unfenced &= ~(1 << event.position)
            self._lac = max(self._lac, event.last_add_confirmed)
        elif not self._fenced & 1 << event.position:
            self._unfenced |= 1 << event.position
        if self._is_covered():
            self._start_reading()
        elif not self._may_be_covered():
            self._failed(
                "recovery-blocked",
                bookie=event.member,
                detail=f"too few bookies could be fenced: check {event.member} ({event.status})",
            )

    def _is_covered(self) -> bool:
        # Rule 13, I14: only durable fences count. Rule 14: members that were declared lost count as
        # fenced once all other members are fenced.
        row = self.metadata
        lost = self._lost(row.last_fragment)
        known = self._fenced
        if (lost | known).bit_count() == row.quorum.ensemble_size:
            known |= lost
        return row.quorum.is_covered(positions(known))

    def _may_be_covered(self) -> bool:
        """Whether the fragment may still become covered by awaited answers."""
        quorum, lost = self.metadata.quorum, self._lost(self.metadata.last_fragment)
        hopeful = ((1 << quorum.ensemble_size) - 1) & ~(self._unfenced | lost)
        return quorum.is_covered(positions(hopeful)) or not self._unfenced

    # --- reading forward ---------------------------------------------------------------------

    def _start_reading(self) -> None:
        row = self.metadata
        start = self._start()
        self.phase = Phase.READING
        self._slots.begin(row, last_confirmed=start, down=self._lost(row.last_fragment))
        self._next = start + 1
        self._is_end_known = False
        self._tally = None
        self._find = None
        self._is_grace_over = False

    def _start(self) -> int:
        # X2, I24: earlier fragments never change. The LAC may be below the last fragment.
        return max(self._lac, self.metadata.last_fragment.first_entry - 1)

    def _read_window(self) -> None:
        row = self.metadata
        self._tally = Tally(
            row.quorum,
            row.last_fragment,  # as found at the start; this recovery's fragments only get writes
            first=self._next,
            last=self._next + self.read_entries - 1,
            declared_lost=row.declared_lost,
        )
        self._read_all(self._tally, is_recovery=True)
        if not self._tally.is_asked:
            self._decide(self._tally)  # all members are declared lost, so no answer will arrive

    def _read_all(self, tally: Tally, *, is_recovery: bool) -> None:
        for position, cursor in enumerate(tally.cursors):
            if cursor is not None:
                self._send_read(tally, position, cursor, is_recovery=is_recovery)

    def _send_read(self, tally: Tally, position: int, first: int, *, is_recovery: bool) -> None:
        row = self.metadata
        self._out.append(
            SendRead(
                position,
                tally.fragment.bookies[position],
                row.ledger_id,
                first,
                tally.last,
                # X1, I15, BK#2614: without this fence, a bookie might deny an entry, and later
                # accept the entry from the old writer.
                fence=is_recovery,
                ledger_key=row.ledger_key if is_recovery else b"",
            )
        )

    def _read_answered(self, event: ReadAnswered) -> None:
        tally = self._tally
        if tally is None or self.phase not in (Phase.READING, Phase.MEASURING):
            return
        if not tally.is_answer(event):
            return
        codec, row = self._codec, self.metadata
        assert codec is not None, "reads must follow RecoverRequested"
        following = tally.note(event, codec, row.ledger_id)
        if following is not None:
            is_recovery = self.phase is Phase.READING
            self._send_read(tally, event.position, following, is_recovery=is_recovery)

    def _decide(self, tally: Tally) -> None:
        """Write back present entries in order, up to the first entry with another verdict."""
        first = self._next
        verdict = EntryVerdict.PRESENT
        while self._next <= tally.last:
            verdict = tally.verdict(self._next)
            if verdict is not EntryVerdict.PRESENT:
                break
            self._next += 1
        if self._next > first:
            # Rules 2 and 12: unchanged bytes go to all Qw members, even to members that have them.
            self._out += self._slots.push(tally.runs(first, self._next - 1))
        if verdict is EntryVerdict.ABSENT:
            self._is_end_known = True  # entries after the first absent one don't count
            self._tally = None
        elif verdict is EntryVerdict.BLOCKED:
            self._blocked(tally, self._next)
        elif self._next > tally.last:
            self._tally = None

    def _blocked(self, tally: Tally, entry_id: int) -> None:
        """Fail, because a recovery must not close the ledger while an entry is unknown (I16)."""
        self._failed(
            "recovery-blocked",
            bookie=tally.culprit(entry_id),
            entry_id=entry_id,
            detail=tally.said(entry_id),
        )

    # --- writing back ------------------------------------------------------------------------

    def _add_answered(self, event: AddAnswered) -> None:
        slots, position = self._slots, event.position
        if self.phase is not Phase.READING or not slots.is_current(event):
            return
        slots.settle(event)
        if event.status is Status.OK:
            # The slot was slow, not dead. A recovery revives every such slot, unlike a writer
            # (`LedgerWriter._was_silent`). Fence and limbo never refuse a recovery add, so a
            # refusal doesn't predict the next answer. A recovery changes its ensemble at once, so
            # no slot is being replaced.
            if slots.down & 1 << position:
                self._out += slots.revive(position)
        elif event.status is Status.CONFLICT:
            self._failed(
                "recovery-blocked",
                bookie=event.member,
                entry_id=event.first,
                detail=f"{event.member} stores other bytes for entry {event.first}",
            )
        else:
            slots.fail(position)

    def _needs_spare(self) -> bool:
        """Whether a run needs another member to reach Qa. If not, recovery continues (rule 12)."""
        quorum, pending = self.metadata.quorum, self._window.unconfirmed
        return pending is not None and not quorum.has_ack_quorum(
            pending.holders & (pending.acked | ~self._slots.down),
            pending.run.first,
            pending.run.last,
        )

    def _search(self) -> None:
        self._attempt += 1
        self._find = self._attempt
        lost = self.metadata.declared_lost
        self._out.append(self._slots.find(self._attempt, lost=lost))

    def _bookies_found(self, event: BookiesFound) -> None:
        if self._find is None or event.attempt != self._find:
            return
        self._find = None
        if self.phase is not Phase.READING or not self._needs_spare():
            return
        members, down = self._slots.members, tuple(positions(self._slots.down))
        chosen = placement.replacements(members, down, event.members)
        if not chosen:
            self._failed(
                "recovery-blocked",
                bookie=members[down[0]],
                entry_id=self._window.last_confirmed + 1,
                detail="too few bookies acknowledged the recovered entries, and no other live bookie "
                "can replace the missing ones: start bookies and recover the ledger again",
            )
            return
        self._change(chosen)

    def _change(self, chosen: dict[int, str]) -> None:
        """Change the ensemble in memory. Only the close commits the change (X5)."""
        mask = sum(1 << position for position in chosen)
        self._slots.write_off(mask)
        first = self._window.last_confirmed + 1  # rule 12: after all entries confirmed so far
        fragment = Fragment(first, self._slots.members_with(chosen))
        kept = [change for change in self._changes if change.first_entry < first]
        self._changes = (*kept, fragment)
        self._out += self._slots.replace(mask, fragment.bookies, first=first)

    # --- closing -----------------------------------------------------------------------------

    def _end(self) -> None:
        """Finish reading when all entries are on Qa bookies: find the length, then close."""
        window, row = self._window, self.metadata
        if window.is_waiting() and not self._is_grace_over:
            # Wait briefly for slower bookies, so that they miss nothing.
            self._out += self._slots.arm(Timer.HEDGE)
        elif window.last_confirmed > self._start() or window.last_confirmed == NO_ENTRY:
            self._close()
        else:
            self._measure(window.last_confirmed, row)

    def _measure(self, entry_id: int, row: LedgerMetadata) -> None:
        self.phase = Phase.MEASURING
        self._tally = Tally(
            row.quorum,
            row.fragment_of(entry_id),
            first=entry_id,
            last=entry_id,
            declared_lost=row.declared_lost,
        )
        self._read_all(self._tally, is_recovery=False)
        if not self._tally.is_asked:
            self._measured(self._tally)  # all members are declared lost, so no answer will arrive

    def _measured(self, tally: Tally) -> None:
        entry_id = tally.first
        verdict = tally.verdict(entry_id)
        if verdict is EntryVerdict.PRESENT:
            self._window.length = tally.length_of(entry_id)
            self._close()
        elif verdict is EntryVerdict.ABSENT and self.metadata.declared_lost:
            # Rule 14: a confirmed entry is lost for ever. An earlier entry gives a lower bound of
            # the length.
            self._is_lacking = True
            below = entry_id - (self._window.last_confirmed - entry_id + 1)
            if below < 0:
                self._close()
            else:
                self._measure(below, self.metadata)
        elif verdict is not EntryVerdict.UNDECIDED:
            self._blocked(tally, entry_id)

    def _close(self) -> None:
        window = self._window
        self._slots.write_off(self._slots.everyone)
        window.clear()
        self.phase = Phase.CLOSING
        self._tally = None
        row = self.metadata
        for change in self._changes:
            row = row.with_ensemble(change.first_entry, change.bookies)
        closed = row.closed(last_entry=window.last_confirmed, length=window.length)
        if self._is_lacking or self._lost(self.metadata.last_fragment):
            closed = replace(closed, may_lack_entries=True)
        self._send_update(closed, self._slots.missed)

    def _closed(self, row: LedgerMetadata) -> None:
        self._row = row
        self.phase = Phase.DONE
        self._out.append(Closed(row))

    def _failed(
        self, code: str, *, detail: str = "", bookie: str | None = None, entry_id: int | None = None
    ) -> None:
        self.phase = Phase.DONE
        self._out.append(Failed(code, None, detail, bookie, entry_id))

    # --- after every event -------------------------------------------------------------------

    def _go_on(self) -> None:
        if self.phase is Phase.READING:
            if self._tally is not None:
                self._decide(self._tally)
            self._window.confirm(0)
            if self._window.missed:
                self._slots.take_missed()
        elif self.phase is Phase.MEASURING and self._tally is not None:
            self._measured(self._tally)
        if self.phase is not Phase.READING:
            return
        if self._needs_spare():
            if self._find is None:
                self._search()
        elif self._is_end_known and self._window.unconfirmed is None:
            self._end()
        elif self._tally is None and not self._is_end_known and self._may_read_on():
            self._read_window()
            if self._is_end_known:
                self._end()
        self._out += self._slots.arm_silence()

    def _may_read_on(self) -> bool:
        return len(self._window.runs) < _AHEAD_RUNS or self._window.unconfirmed is None

    # --- timers ------------------------------------------------------------------------------

    def _timer_fired(self, event: TimerFired) -> None:
        if not self._slots.fired(event):
            return
        if event.timer is Timer.ADD and self.phase is Phase.READING:
            for position in self._slots.silent(event.tag):
                self._slots.fail(position)
        elif event.timer is Timer.HEDGE:
            self._is_grace_over = True
        elif event.timer is Timer.RETRY and self._is_stalled and self._update is not None:
            self._is_stalled = False
            self._out.append(self._update)
