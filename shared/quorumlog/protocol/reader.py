"""Reads a range of confirmed entries in order, from bookies that have them, without fencing.

An entry that is missing or invalid at one bookie is read from another bookie (source: overview
1.4). The caller must ensure that `last` is at most the LAC, or the end of a CLOSED ledger.
"""

from dataclasses import InitVar, dataclass, field
from typing import Annotated, Final, assert_never

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
    PlacedInLog,
    ReadAnswered,
    ReadMetadata,
    RecoverRequested,
    ReplaceRequested,
    RowAnswered,
    SendRead,
    StartTimer,
    Timer,
    TimerFired,
)
from quorumlog.protocol.metadata import LedgerMetadata
from quorumlog.protocol.record import Codec
from quorumlog.protocol.tally import Tally

READ_ENTRIES: Final = 1000
"""Entries per request, chosen by judgement. A bookie's size limit may shorten its answer."""


@dataclass(slots=True, eq=False, kw_only=True)
class RangeReader(Keyed):
    """Reads first..last once, and ends with EntriesRead(is_last) or Failed.

    Invariants (checked by `check`):
      - entries are returned in order, once each, and only with valid digests;
      - until the reader ends, it waits for a member that may have the next entry, or for metadata.
    """

    metadata: LedgerMetadata = field(kw_only=False)
    first: InitVar[int]
    last: int
    max_bytes: int | None = None
    """Payload bytes that may still be returned; None for no limit. The reader ends early at the
    limit, but always returns at least one entry.
    """
    avoid: tuple[str, ...] = ()
    """Members that are asked only if no other member can answer."""
    turn: int = 0
    """Rotates the order in which other members are asked, so that readers spread over them."""
    next: int = field(init=False)
    """The next entry to return."""
    is_done: bool = False
    _codec: Codec = field(init=False)
    _tally: Tally | None = None
    _asked: int = 0
    """Positions whose answer is awaited, as a bit mask."""
    _tried: int = 0
    """Positions that were asked for entries of the current part, as a bit mask."""
    _round: int = 0
    _reading_row: int | None = None
    _failure: Failed | None = None
    _out: Annotated[list[Effect], Out("empty between steps")] = field(default_factory=list)

    def __post_init__(self, first: int) -> None:
        """Prepare the reader, which sends no request before Begin."""
        assert 0 <= first <= self.last, "the range must have at least one entry"
        self.next = first
        self._codec = Codec(self.metadata.digest, self.metadata.mac_key)

    # --- the machine -------------------------------------------------------------------------

    def step(self, event: Event) -> list[Effect]:
        """Process an event and return the effects."""
        self._out = []
        match event:
            case ReadAnswered():
                self._read_answered(event)
            case TimerFired():
                self._timer_fired(event)
            case MetadataAnswered():
                self._metadata_answered(event)
            case Begin():
                if self._tally is None:
                    self._go_on()
            case (
                AddAnswered()
                | FenceAnswered()
                | BookiesFound()
                | AppendRequested()
                | CloseRequested()
                | RecoverRequested()
                | ReplaceRequested()
                | RowAnswered()
                | PlacedInLog()
            ):
                raise AssertionError(f"a reader can't process this event: {event}")
            case _:
                assert_never(event)
        out, self._out = self._out, []
        return out

    def check(self) -> None:
        """Assert the invariants."""
        if self.is_done or (self._tally is None and self._reading_row is None):
            return
        assert self.next <= self.last
        assert not self._asked & ~self._tried
        if self._reading_row is None and self._tally is not None:
            silent = self._tally.may_decide(self.next)
            assert any(self._asked & 1 << p for p in silent), "an answer must be awaited"

    # --- asking ------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Request the next missing entries."""
        tally = self._tally
        if tally is None or self.next > tally.last:
            tally = self._part()
        self._fetch(tally)

    def _part(self) -> Tally:
        """Begin the next part of the range: at most READ_ENTRIES entries of one fragment."""
        row = self.metadata
        index = row.fragment_index(self.next)
        end = row.fragment_last(index)
        last = min(self.last, self.next + READ_ENTRIES - 1, self.last if end is None else end)
        self._tally = Tally(row.quorum, row.fragments[index], first=self.next, last=last)
        self._asked = self._tried = 0
        return self._tally

    def _fetch(self, tally: Tally) -> None:
        """For each of the next missing entries, ask a member unless an answer is awaited."""
        # Looks only one stripe ahead, so that later entries are requested only when they are
        # needed.
        ahead = self.next + self.metadata.quorum.ensemble_size
        for entry_id in range(self.next, min(ahead, tally.last + 1)):
            if entry_id in tally.found:
                continue
            silent = tally.may_decide(entry_id)
            if any(self._asked & 1 << position for position in silent):
                continue
            if silent:
                self._ask(tally, self._best(tally, silent))
            elif entry_id == self.next:
                self._unavailable(tally, entry_id)
                return

    def _best(self, tally: Tally, silent: tuple[int, ...]) -> int:
        members, size = tally.fragment.bookies, self.metadata.quorum.ensemble_size
        return min(
            silent,
            key=lambda position: (
                members[position] in self.avoid,
                bool(self._tried & 1 << position),
                (position - self.turn) % size,
            ),
        )

    def _ask(self, tally: Tally, position: int) -> None:
        cursor = tally.cursors[position]
        assert cursor is not None, "a member must not be asked again after its last answer"
        self._asked |= 1 << position
        self._tried |= 1 << position
        self._round += 1
        member = tally.fragment.bookies[position]
        self._out.append(SendRead(position, member, self.metadata.ledger_id, cursor, tally.last))
        self._out.append(StartTimer(Timer.HEDGE, self._round))

    def _timer_fired(self, event: TimerFired) -> None:
        """Hedge: ask another member too, because the next entry has not arrived in time."""
        tally = self._tally
        is_current = event.timer is Timer.HEDGE and event.tag == self._round
        if tally is None or self.is_done or not is_current:
            return
        others = tuple(p for p in tally.may_decide(self.next) if not self._asked & 1 << p)
        if others:
            self._ask(tally, self._best(tally, others))

    # --- answers -----------------------------------------------------------------------------

    def _read_answered(self, event: ReadAnswered) -> None:
        tally = self._tally
        if tally is None or self.is_done or self._reading_row is not None:
            return
        if not tally.is_answer(event) or not self._asked & 1 << event.position:
            return
        self._asked &= ~(1 << event.position)
        following = tally.note(event, self._codec, self.metadata.ledger_id)
        self._hand_out(tally)
        if self.is_done:
            return
        if following is not None and self._lacks(tally, event.position, following):
            self._ask(tally, event.position)
        self._go_on()

    def _lacks(self, tally: Tally, position: int, entry_id: int) -> bool:
        """Whether no member was asked for the next missing entry that the position stores."""
        quorum = self.metadata.quorum
        for wanted in range(entry_id, tally.last + 1):
            if quorum.is_member(position, wanted) and wanted not in tally.found:
                return not any(self._asked & 1 << other for other in tally.may_decide(wanted))
        return False

    def _hand_out(self, tally: Tally) -> None:
        first, found, most = self.next, tally.found, self.max_bytes
        size = 0
        sizes: dict[int, int] = {}
        for entry_id in range(first, tally.last + 1):
            run = found.get(entry_id)
            if run is None:
                break
            if entry_id not in sizes:
                sizes.update(zip(run.ids, run.sizes, strict=True))
            size += sizes[entry_id]
            if most is not None and size > most and entry_id > first:
                break
            self.next = entry_id + 1
        if self.next == first:
            return
        if self.max_bytes is not None:
            self.max_bytes = max(0, self.max_bytes - size)
        self.is_done = self.next > self.last or self.max_bytes == 0
        self._out.append(EntriesRead(tally.runs(first, self.next - 1), is_last=self.is_done))

    # --- unavailable entries -----------------------------------------------------------------

    def _unavailable(self, tally: Tally, entry_id: int) -> None:
        """Read the metadata again, because no member returned a valid copy of the entry: a repair
        may have moved the entry (BK#4613).
        """
        self._failure = Failed(
            "entry-unavailable",
            detail=tally.said(entry_id),
            bookie=tally.culprit(entry_id),
            entry_id=entry_id,
        )
        self._round += 1
        self._reading_row = self._round
        self._out.append(ReadMetadata(self._round))

    def _metadata_answered(self, event: MetadataAnswered) -> None:
        if event.attempt != self._reading_row:
            return
        self._reading_row = None
        row = event.metadata
        if event.status is CasStatus.MISSING:
            self.is_done = True
            self._out.append(Failed("no-such-ledger"))
        elif row is not None and self._is_elsewhere(row):
            self.metadata = row
            if row.last_entry is not None:
                self.last = min(self.last, row.last_entry)
            self._tally = None
            self._go_on()
        else:
            assert self._failure is not None, "metadata may be read only after a failure"
            self.is_done = True
            self._out.append(self._failure)

    def _is_elsewhere(self, row: LedgerMetadata) -> bool:
        """Whether the current metadata names other members for the next entry. False if the ledger
        now ends before the entry, because members were declared lost (rule 14).
        """
        if row.last_entry is not None and row.last_entry < self.next:
            return False
        return row.fragment_of(self.next) != self.metadata.fragment_of(self.next)
