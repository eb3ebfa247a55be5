"""The writer of one ledger: appends runs, confirms them in order, changes the ensemble, closes.

The writer returns an effect for anything that needs a clock, a socket or randomness, and gets the
result as an event (messages.py). A ledger never has a second writer (rule 11). When the writer is
gone, other processes recover the ledger.
"""

from dataclasses import KW_ONLY, dataclass, field, replace
from enum import Enum
from typing import Annotated, Final, assert_never

from quorumlog.protocol import placement, record
from quorumlog.protocol.keyed import Keyed, Out
from quorumlog.protocol.messages import (
    AddAnswered,
    AppendRequested,
    Begin,
    BookiesFound,
    CasStatus,
    Closed,
    CloseRequested,
    Confirmed,
    Effect,
    Event,
    Failed,
    FenceAnswered,
    MetadataAnswered,
    MissedRange,
    PlacedInLog,
    ReadAnswered,
    ReadMetadata,
    RecoverRequested,
    RecoveryNeeded,
    ReplaceRequested,
    RowAnswered,
    Status,
    Timer,
    TimerFired,
    UpdateMetadata,
)
from quorumlog.protocol.metadata import LedgerMetadata, State
from quorumlog.protocol.record import Codec
from quorumlog.protocol.slots import Slots
from quorumlog.protocol.window import Window, positions

_REFUSALS: Final = (Status.FENCED, Status.NOT_MINE, Status.READ_ONLY, Status.WRONG_KEY)


class WriterState(Enum):
    """The state of a write handle. It never returns to an earlier state."""

    OPEN = "open"
    DRAINING = "draining"
    """A close was requested. Pending entries are still confirmed; new entries are refused."""
    ENDING = "ending"
    """Pending appends have failed, and the ledger is being closed at the last confirmed entry."""
    CLOSED = "closed"
    """The ledger is CLOSED at this writer's last confirmed entry; `metadata` has the end."""
    ENDED = "ended"
    """The handle failed and must not close the ledger. `end_code` has the reason."""


_LIVE: Final = (WriterState.OPEN, WriterState.DRAINING)


class _Kind(Enum):
    VERIFY = "verify"
    FIND = "find"
    CHANGE = "change"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class _Task:
    """The only pending request for metadata or for bookies."""

    kind: _Kind
    attempt: int
    effect: ReadMetadata | UpdateMetadata | None = None
    """The effect to repeat on RETRY; None for FIND, which always gets an answer."""
    replaced: int = 0
    """For CHANGE, the positions whose members are replaced, as a bit mask."""
    first: int = 0
    """For CHANGE, the first entry of the new fragment."""
    is_stalled: bool = False
    """Whether the store could not be reached. RETRY repeats the same attempt (rule 6)."""


@dataclass(slots=True, eq=False)
class LedgerWriter(Keyed):
    """Appends to one ledger, confirms entries in order, changes the ensemble, and closes.

    A driver answers append requests when it gets the effects `Confirmed` and `Failed` (from `first`
    on). It answers a close request when the state is CLOSED or ENDED after a step.

    Invariants (checked by `check`, with those of Window):
      - I8: ids are assigned once and confirmed in order, without a gap;
      - I19: while a change is pending, only acknowledgements by members of both ensembles count;
      - at most one request for metadata is pending;
      - while a position is down or to be replaced, a task or the RETRY timer is pending;
      - I24: only OPEN metadata is changed.
    """

    metadata: LedgerMetadata
    """The metadata of the newly created ledger, with all changes since."""
    _codec: Codec
    _: KW_ONLY
    delays_change: bool = False
    """Whether a silent member stays while every write set reaches its ack quorum without this
    member (BookKeeper: delayEnsembleChange).
    """
    state: WriterState = WriterState.OPEN
    end_code: str | None = None
    _next: int = field(init=False)
    _length: int = 0
    _unwanted: int = 0
    """Positions to replace on request (rule 21), as a bit mask. They are in use until replaced."""
    _refusals: dict[int, Status] = field(default_factory=dict)
    """The status with which each position's current member refused an add, by position."""
    _slots: Slots = field(default_factory=Slots)
    _task: _Task | None = None
    _attempt: int = 0
    _must_verify: bool = False
    _must_search: bool = False
    _is_grace_over: bool = False
    _out: Annotated[list[Effect], Out("empty between steps")] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Start with the metadata of a new ledger. No handle is created for an existing ledger."""
        row = self.metadata
        assert row.state is State.OPEN, "a writer must start with an OPEN ledger"
        self._next = row.last_fragment.first_entry
        self._slots.begin(row, last_confirmed=self._next - 1)

    @property
    def _window(self) -> Window:
        return self._slots.window

    # --- state for drivers -------------------------------------------------------------------

    @property
    def last_add_confirmed(self) -> int:
        """The LAC: the last acknowledged entry."""
        return self._window.last_confirmed

    @property
    def last_add_pushed(self) -> int:
        """The LAP: the last assigned id."""
        return self._next - 1

    @property
    def length(self) -> int:
        """Payload bytes of the ledger up to the last assigned id."""
        return self._length

    @property
    def pending_bytes(self) -> int:
        """Bytes of runs for which answers are missing, including confirmed runs."""
        return self._window.pending_bytes

    @property
    def is_degraded(self) -> bool:
        """Whether some position of the ensemble currently gets no entries (rule 8)."""
        return self._slots.down != 0

    @property
    def is_drained(self) -> bool:
        """Whether every assigned id is confirmed."""
        return self._window.last_confirmed == self._next - 1

    @property
    def is_closing_row(self) -> bool:
        """Whether this writer's change to CLOSED is pending, while no entry is pending. If the
        metadata is CLOSED already, this change may have closed it.
        """
        return self._task is not None and self._task.kind is _Kind.CLOSE

    @property
    def missed(self) -> tuple[MissedRange, ...]:
        """Confirmed entries that members are known to lack, and that no successful metadata change
        has queued (rule 8). If another process ends the ledger, the driver must queue these ranges,
        because a recovery checks only entries above the LAC.
        """
        effect = None if self._task is None else self._task.effect
        return self._slots.lacking(effect.missed if isinstance(effect, UpdateMetadata) else ())

    # --- the machine -------------------------------------------------------------------------

    def step(self, event: Event) -> list[Effect]:
        """Process an event and return the effects."""
        self._out = []
        match event:
            case AddAnswered():
                self._add_answered(event)
            case AppendRequested():
                self._append(event)
            case MetadataAnswered():
                self._metadata_answered(event)
            case BookiesFound():
                self._bookies_found(event)
            case TimerFired():
                self._timer_fired(event)
            case CloseRequested():
                self._close_requested()
            case ReplaceRequested():
                self._replace_requested(event)
            case PlacedInLog(first_offset, lineage):
                self.metadata = replace(self.metadata, first_offset=first_offset, lineage=lineage)
                self._slots.row = self.metadata
            case Begin() | FenceAnswered() | ReadAnswered() | RecoverRequested() | RowAnswered():
                raise AssertionError(f"a writer can't process this event: {event}")
            case _:
                assert_never(event)
        self._go_on()
        out, self._out = self._out, []
        return out

    def check(self) -> None:
        """Assert the invariants."""
        self.metadata.check()
        self._slots.check()
        assert self._window.last_confirmed < self._next, "the LAC must not exceed the LAP (I10)"
        assert not self._unwanted & ~self._slots.everyone
        task = self._task
        if self.state in _LIVE:
            assert self.metadata.state is State.OPEN, "a live writer needs OPEN metadata (I24)"
            if self.state is WriterState.OPEN and self._slots.down | self._unwanted:
                is_coming = task is not None or Timer.RETRY in self._slots.armed
                assert is_coming, "a task or RETRY must be pending for failed positions"
        else:
            assert not self._window.runs, "an ended writer must have no pending runs"
        is_change = task is not None and task.kind is _Kind.CHANGE
        assert self._window.is_held == (is_change and self.state in _LIVE)

    # --- appending ---------------------------------------------------------------------------

    def _append(self, event: AppendRequested) -> None:
        if self.state is not WriterState.OPEN:
            self._out.append(Failed(self._refusal_code(), first=self._next))
            return
        run = record.make(
            ledger_id=self.metadata.ledger_id,
            first_entry=self._next,
            last_add_confirmed=self._window.last_confirmed,  # the current LAC (I10)
            length_before=self._length,
            payloads=event.payloads,
            codec=self._codec,
        )
        self._next = run.last + 1
        self._length = run.last_length
        self._out += self._slots.push(run)

    def _refusal_code(self) -> str:
        if self.state is WriterState.ENDED and self.end_code is not None:
            return self.end_code
        return "ledger-closed"

    def _add_answered(self, event: AddAnswered) -> None:
        slots, position = self._slots, event.position
        if self.state not in _LIVE or not slots.is_current(event):
            return
        slots.settle(event)
        if event.status is Status.OK:
            if slots.down & 1 << position and self._was_silent(position):
                self._out += slots.revive(position)
        elif event.status is Status.CONFLICT:
            # Rule 2: the bookie has other bytes under this id, so this handle must not continue.
            self._fail("entry-conflict", bookie=event.member, entry_id=event.first)
        else:
            self._slot_failed(position, event.status)

    def _was_silent(self, position: int) -> bool:
        """Whether a slot is down only because its answers were late. A slot that refused an add
        stays down, because the refusal may have overtaken an earlier ok. A slot that is being
        replaced stays down too. A recovery needs neither guard (`Recovery._add_answered`).
        """
        return position not in self._refusals and not self._uncounted() & 1 << position

    # --- positions that fail -----------------------------------------------------------------

    def _slot_failed(self, position: int, status: Status) -> None:
        if status is Status.FENCED:
            self._must_verify = True  # rule 9: only metadata can confirm a fence
        if status in _REFUSALS:
            self._refusals[position] = status
        if self._slots.fail(position):
            self._must_search = True

    def _replace_requested(self, event: ReplaceRequested) -> None:
        members = self.metadata.last_fragment.bookies
        if self.state is WriterState.OPEN and event.member in members:
            self._unwanted |= 1 << members.index(event.member)
            self._must_search = True

    def _bookies_found(self, event: BookiesFound) -> None:
        task = self._task
        if task is None or task.kind is not _Kind.FIND or task.attempt != event.attempt:
            return
        self._task = None
        is_needed = self.state is WriterState.DRAINING and not self.is_drained
        if self.state is not WriterState.OPEN and not is_needed:
            return
        self._must_search = False
        slots = self._slots
        leaving = (*positions(slots.down), *positions(self._unwanted & ~slots.down))
        chosen = placement.replacements(slots.members, leaving, event.members)
        for position in positions(slots.down):
            is_back = slots.members[position] in event.members and self._may_come_back(position)
            if position not in chosen and is_back:
                self._refusals.pop(position, None)
                self._out += slots.revive(position)
        if chosen and not self._may_wait():
            self._start_change(chosen)
        elif self._is_refused():
            is_read_only = set(self._refusals.values()) == {Status.READ_ONLY}
            code = "read-only" if is_read_only else "not-enough-bookies"
            detail = "too many bookies refused adds, and no other live bookie can replace them"
            self._fail(code, detail=f"{detail}: start bookies")

    def _may_wait(self) -> bool:
        """Whether a change may wait: no member refused or must leave, and Qa can be reached."""
        usable = self._slots.everyone & ~self._slots.down
        is_reached = self.metadata.quorum.can_reach(usable)
        return self.delays_change and is_reached and not (self._unwanted or self._refusals)

    def _may_come_back(self, position: int) -> bool:
        # Rule 15: after any other refusal, this incarnation never accepts a normal add again.
        return self._refusals.get(position) in (None, Status.READ_ONLY)

    def _is_refused(self) -> bool:
        # Rule 9: if refusals leave fewer than Qa members, the handle ends at once. If members are
        # silent, the handle ends after the quorum timeout.
        willing = self._slots.everyone & ~sum(1 << position for position in self._refusals)
        return not self.is_drained and not self.metadata.quorum.can_reach(willing)

    # --- ensemble change ---------------------------------------------------------------------

    def _start_change(self, chosen: dict[int, str]) -> None:
        """Stop counting acknowledgements of replaced positions, then read the LAC (rule 7)."""
        row, replaced = self.metadata, sum(1 << position for position in chosen)
        self._slots.write_off(replaced)
        self._window.is_held = True
        first = self._window.last_confirmed + 1
        changed = row.with_ensemble(first, self._slots.members_with(chosen))
        self._update(_Kind.CHANGE, changed, replaced=replaced, first=first)

    def _uncounted(self) -> int:
        # Rule 6, I19, X8, X9: while a change is pending, only members of both ensembles count.
        task = self._task
        return task.replaced if task is not None and task.kind is _Kind.CHANGE else 0

    def _changed(self, row: LedgerMetadata, task: _Task) -> None:
        """Apply a committed change. Only now may new members get entries (X8, BK#1591)."""
        self.metadata = row
        self._unwanted &= ~task.replaced
        members, last = row.last_fragment.bookies, self._window.last_confirmed
        for position in positions(task.replaced):
            self._refusals.pop(position, None)
            if self.state is WriterState.ENDING and task.first <= last:
                # These entries were confirmed while the change was pending; no run is left to send.
                self._slots.add_missed((MissedRange(members[position], task.first, last),))
        self._slots.row = row
        self._out += self._slots.replace(task.replaced, members, first=task.first)

    # --- metadata ----------------------------------------------------------------------------

    def _update(
        self, kind: _Kind, row: LedgerMetadata, *, replaced: int = 0, first: int = 0
    ) -> None:
        missed, self._slots.missed = self._slots.missed, ()
        self._attempt += 1
        effect = UpdateMetadata(self._attempt, row, missed)
        self._task = _Task(kind, self._attempt, effect, replaced, first)
        self._out.append(effect)

    def _metadata_answered(self, event: MetadataAnswered) -> None:
        task = self._task
        if task is None or task.kind is _Kind.FIND or task.attempt != event.attempt:
            return
        row = event.metadata
        if row is not None and row.first_offset is None:
            # The answer is older than the ledger's place in its log, which the writer already has.
            mine = self.metadata
            row = replace(row, first_offset=mine.first_offset, lineage=mine.lineage)
        if event.status is CasStatus.UNKNOWN or (
            row is None and event.status is not CasStatus.MISSING
        ):
            # The outcome is unknown, so the same attempt is repeated until it is known (rule 6).
            self._task = replace(task, is_stalled=True)
            self._out += self._slots.arm(Timer.RETRY)
            return
        self._task = None
        if event.status is not CasStatus.OK and isinstance(task.effect, UpdateMetadata):
            self._slots.add_missed(task.effect.missed)
        if task.kind is _Kind.CHANGE:
            self._window.is_held = False
        if row is None:
            self._end("no-such-ledger")
        elif row.state is not State.OPEN:
            self._met_end(row)
        elif row.last_fragment != self._expected(task, event.status).last_fragment:
            # Only the writer may change the last fragment of an open ledger.
            self._end("ledger-fenced", detail="another process changed the last fragment")
        elif task.kind is _Kind.CHANGE and event.status is CasStatus.OK:
            self._changed(row, task)
        else:
            self.metadata = row
            if task.kind is _Kind.VERIFY:
                self._must_verify = False
            self._must_search = True
        self._window.sweep()

    def _expected(self, task: _Task, status: CasStatus) -> LedgerMetadata:
        if isinstance(task.effect, UpdateMetadata) and status is CasStatus.OK:
            return task.effect.metadata
        return self.metadata

    def _met_end(self, row: LedgerMetadata) -> None:
        """Process metadata that this writer or another process made IN_RECOVERY or CLOSED."""
        was_open = self.state is WriterState.OPEN
        self._slots.write_off(self._slots.everyone)
        self.metadata = row
        if row.state is State.IN_RECOVERY:
            self._end("ledger-fenced")
            self._out.append(RecoveryNeeded())  # rule 10
        elif row.last_entry == self._window.last_confirmed and not was_open:
            self._closed(row)
        else:
            self._end("ledger-closed", detail=f"the ledger's last entry is {row.last_entry}")

    # --- ends --------------------------------------------------------------------------------

    def _close_requested(self) -> None:
        if self.state is WriterState.OPEN:
            self.state = WriterState.DRAINING
        elif self.state is WriterState.CLOSED:
            self._out.append(Closed(self.metadata))
        elif self.state is WriterState.ENDED:
            row = self.metadata
            if row.state is State.CLOSED and row.last_entry == self._window.last_confirmed:
                self.state = WriterState.CLOSED  # by another process, at this writer's end (I4)
                self._out.append(Closed(row))
            else:
                self._out.append(Failed(self._refusal_code()))

    def _closed(self, row: LedgerMetadata) -> None:
        if not self.is_drained and self.state is WriterState.DRAINING:
            self._out.append(Failed("ledger-closed", first=self._window.last_confirmed + 1))
        self.state = WriterState.CLOSED
        self._window.clear()
        self._out.append(Closed(row))

    def _fail(
        self, code: str, *, detail: str = "", bookie: str | None = None, entry_id: int | None = None
    ) -> None:
        """Fail pending appends, and close the ledger at the last confirmed entry (rule 9)."""
        first = self._window.last_confirmed + 1
        self._out.append(Failed(code, first, detail, bookie, entry_id))
        self._slots.write_off(self._slots.everyone)
        self._window.clear()
        self.state = WriterState.ENDING
        self.end_code = code

    def _end(self, code: str, *, detail: str = "") -> None:
        """Fail pending appends, and end without closing the ledger (rule 10)."""
        self._out.append(Failed(code, self._window.last_confirmed + 1, detail))
        self._window.clear()
        self.state = WriterState.ENDED
        self.end_code = code

    # --- after every event -------------------------------------------------------------------

    def _go_on(self) -> None:
        slots = self._slots
        window = slots.window
        if self.state in _LIVE:
            confirmed = window.confirm(self._uncounted())
            if confirmed:
                self._out.append(Confirmed(confirmed[0].first, confirmed[-1].last, confirmed))
        if window.missed:
            slots.take_missed()
        if self._task is None:
            self._next_task()
        self._out += slots.arm_silence()
        if window.unconfirmed is not None:
            self._out += slots.arm(Timer.QUORUM, self.last_add_pushed)
        if slots.suspects:
            self._out += slots.arm(Timer.RETRY)

    def _next_task(self) -> None:
        if self.state is WriterState.ENDING:
            self._close()
        elif self.state is WriterState.DRAINING and self.is_drained:
            if self._window.is_waiting() and not self._is_grace_over:
                # Wait briefly for slower bookies, so that they miss nothing.
                self._out += self._slots.arm(Timer.HEDGE)
            else:
                self._close()
        elif self.state in _LIVE:
            if self._must_verify:
                self._attempt += 1
                read = ReadMetadata(self._attempt)
                self._task = _Task(_Kind.VERIFY, self._attempt, read)
                self._out.append(read)
            elif self._must_search and self._slots.down | self._unwanted:
                self._search()
            elif self._slots.down | self._unwanted:
                self._out += self._slots.arm(Timer.RETRY)

    def _search(self) -> None:
        self._must_search = False
        self._attempt += 1
        self._task = _Task(_Kind.FIND, self._attempt)
        self._out.append(self._slots.find(self._attempt, leaving=self._unwanted))

    def _close(self) -> None:
        window = self._window
        self._slots.write_off(self._slots.everyone)
        window.clear()
        closed = self.metadata.closed(last_entry=window.last_confirmed, length=window.length)
        self._update(_Kind.CLOSE, closed)

    # --- timers ------------------------------------------------------------------------------

    def _timer_fired(self, event: TimerFired) -> None:
        if not self._slots.fired(event):
            return
        is_live = self.state in _LIVE
        if event.timer is Timer.ADD and is_live:
            for position in self._slots.silent(event.tag):
                self._slot_failed(position, Status.UNKNOWN)
        elif event.timer is Timer.QUORUM and is_live:
            if self._window.last_confirmed < event.tag:
                self._fail("quorum-timeout")
        elif event.timer is Timer.HEDGE:
            self._is_grace_over = True
        elif event.timer is Timer.RETRY:
            self._retry()

    def _retry(self) -> None:
        self._slots.suspects = frozenset()
        self._must_search = True
        task = self._task
        if task is not None and task.is_stalled and task.effect is not None:
            self._task = replace(task, is_stalled=False)
            self._out.append(task.effect)
