"""Which ledgers a lost log had, and where, by what the rows of its ledgers tell (rule 18f). Pure decisions, no IO.

A ledger's row tells its first offset in the log, when that log was created, and which ledgers were before it there. So
a ledger that nobody holds is known to be missing: the log names it all the same, and readers get an error there until
its row is made again. Where only its end of the hole is known, nothing is written.

A fork's own ledgers tell where the fork began, and the ledgers of other logs that it shares (rule 27a).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from quorumlog.protocol.ids import NO_ENTRY
from quorumlog.protocol.log import LogItem, LogMetadata, LogSettings, LogState
from quorumlog.protocol.metadata import PREDECESSORS_KEPT, SHARED_KEPT, DigestKind, Lineage
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.rebuild import Action

NEW_LOG_VERSION = 1_000_000_000
"""The first version of a log's row that is made again: a late compare-and-swap from the lost row's version cannot
meet it. Ledgers' rows keep their copies' versions."""


_NOTHING = -1
"""In place of a ledger: the log began here."""


@dataclass(frozen=True, slots=True)
class LedgerPlace:
    """What the latest row of a ledger that was made for a log tells of its place."""

    ledger_id: int
    first_offset: int | None
    """The offset of its first record; None where no row tells."""
    last_entry: int | None
    """None while it is not CLOSED."""
    length: int
    quorum: Quorum
    digest: DigestKind
    lineage: Lineage | None = None
    has_row: bool = True
    """Whether the database has its row, or gets it: without one it has a place in the log, and no reader."""
    custom: tuple[tuple[str, str], ...] | None = None
    """The log's own metadata, which its owner gives to each ledger; None for a transaction's ledger, which has its
    task's as well.
    """
    is_packed: bool = False
    """Whether the log packs its batches."""
    hides_next: bool = False
    """It is CLOSED, and all who hold copies of the ledger behind it may be silent, or have lost their data."""

    @property
    def log_created_at(self) -> str:
        """Of the log that it was placed in; "" where no row tells."""
        return "" if self.lineage is None else self.lineage.log_created_at

    @property
    def before(self) -> tuple[tuple[int, int], ...]:
        """The nearest ledgers before it, each with its first offset."""
        return () if self.lineage is None else self.lineage.before

    @property
    def published_ms(self) -> int:
        """When a transaction put it onto the log; 0 if its owner wrote it, or where no row tells."""
        return 0 if self.lineage is None else self.lineage.published_ms

    @property
    def shared(self) -> tuple[tuple[int, int], ...]:
        """The nearest ledgers of other logs that its log shares, each with its first offset."""
        return () if self.lineage is None else self.lineage.shared

    @property
    def chains(self) -> tuple[tuple[int, ...], ...]:
        """Ledgers of its log that follow each other."""
        before = (*(before for before, _ in self.before), self.ledger_id)
        shared = tuple(ledger_id for ledger_id, _ in self.shared)
        starts = (_NOTHING,) if 0 < len(shared) < SHARED_KEPT else ()
        return ((*self.begins_log, *before), (*starts, *shared))

    @property
    def begins_log(self) -> tuple[int, ...]:
        """_NOTHING, if the log began with the first one of `before`, or with this ledger."""
        is_told = self.lineage is not None and len(self.before) < PREDECESSORS_KEPT
        return (_NOTHING,) if is_told else ()

    @property
    def least_end(self) -> int:
        """The offset behind its records is this one at least: each entry has a record or more."""
        entries = 0 if self.last_entry is None else self.last_entry + 1
        return (self.first_offset or 0) + entries

    @property
    def is_empty(self) -> bool:
        """Whether it is CLOSED without records."""
        return self.last_entry == NO_ENTRY


@dataclass(frozen=True, slots=True)
class LogDecision:
    """What to do about a log's row, and what people should know of it."""

    action: Action
    row: LogMetadata | None = None
    why: str = ""
    unplaced: tuple[int, ...] = ()
    """Ledgers that were made for a log of this name and are not in it: nothing tells their place (a transaction that
    was not committed), they are empty, the log let go of them, or they are of an earlier log."""
    holes: tuple[int, ...] = ()
    """Ledgers of the log that have no rows: nobody who answers holds a copy, or what is held proves no row."""


def decide_log(
    name: str,
    known: LogMetadata | None,
    ledgers: Sequence[LedgerPlace],
    deleted: Collection[int],
    *,
    now_ms: int,
    token: int,
    stored: Collection[int] = (),
) -> LogDecision:
    """Judge one log by the rows of all ledgers that were made for it. `deleted`: ids with tombstones; `stored`: ids
    of ledgers whose rows the database has, whoever holds copies. `token`: a writer token that nobody has.
    """
    created_at = max((one.log_created_at for one in ledgers), default="")
    if known is not None and known.created_at < created_at:
        why = f"the log was deleted, and another one was created under its name at {created_at}"
        return LogDecision(Action.CONFLICT, why=why)
    created_at = created_at if known is None else known.created_at
    start = 0 if known is None else known.first_offset
    found = _Found.of([one for one in ledgers if one.log_created_at in {"", created_at}], start)
    before = () if known is None else known.items
    items = tuple(item for item in before if item.ledger_id not in deleted)
    named = {item.ledger_id for item in before}
    fresh = [item for item in found.items if item.ledger_id not in named]
    missing = [item for item in found.missing if item.ledger_id not in named | set(deleted)]
    items = found.ordered((*map(found.with_place, items), *missing, *fresh))
    items = found.without_empty(found.not_let_go(items, deleted))
    fresh = [item for item in fresh if item in items]
    unplaced = _unplaced(ledgers, named | {item.ledger_id for item in items})
    if known is None and not fresh:
        return LogDecision(Action.WAIT, None, "no ledger of the log tells its place", unplaced)
    if known is None and found.hides_next(items):
        why = (
            f"ledger {items[-1].ledger_id} is CLOSED, and the one behind it may be on bookies that do not answer or"
            " lost their data: start them, or, if what they held is gone, name them as gone"
            " (`quorumlog metadata rebuild --without`)"
        )
        return LogDecision(Action.WAIT, None, why, unplaced)
    if before and not items:
        problem = (
            "all ledgers of the log are deleted: so was the log, or nobody knows where it goes on"
        )
    else:
        problem = (
            found.unexplained(before, deleted, items) or found.misplaced(items) or found.gap(items)
        )
    if known is not None and known.state is LogState.CLOSED and fresh:
        problem = f"the log is CLOSED, and ledger {fresh[0].ledger_id} was written later"
    if problem:
        return LogDecision(Action.CONFLICT, None, problem, unplaced)
    items = found.with_ends(items, now_ms=now_ms)
    rows = {one.ledger_id for one in ledgers if one.has_row} | set(stored)
    holes = tuple(item.ledger_id for item in items if item.ledger_id not in rows)
    if known is not None and items == known.items:
        # Bookies keep the ids of deleted ledgers, and not whose they were.
        why = _WITHOUT_LEDGERS if deleted and not items else ""
        return LogDecision(Action.SAME, None, why, unplaced, holes)
    named_now = [found.ledgers[item.ledger_id] for item in items if item.ledger_id in found.ledgers]
    row = known or replace(_new_log(name, created_at, named_now), forked_at=found.forked_at)
    row = replace(row, stream_seq=_stream_seq(row, named_now))
    if is_opened(row, named_now):
        # Whoever opened the log last may have appended nothing since, and is not known; all others were fenced off.
        row = replace(row, writer_token=max(row.writer_token + 1, token), opened_by=None)
    return LogDecision(
        Action.WRITE, _with_items(row, items, now_ms=now_ms), unplaced=unplaced, holes=holes
    )


_WITHOUT_LEDGERS = (
    "the database's log has no ledger: if it was written and deleted after that, delete it again"
)


def _unplaced(ledgers: Iterable[LedgerPlace], placed: Collection[int]) -> tuple[int, ...]:
    return tuple(one.ledger_id for one in ledgers if one.ledger_id not in placed)


@dataclass(frozen=True, slots=True)
class _Found:
    """What the ledgers of one log tell, from the offset `start` on."""

    start: int
    ledgers: Mapping[int, LedgerPlace]
    told: Mapping[int, int]
    """First offsets of ledgers that others were placed behind, by id."""
    follows: Mapping[int, int]
    """The ledger with records before a ledger, or _NOTHING, where a row tells it."""

    @classmethod
    def of(cls, ledgers: Sequence[LedgerPlace], start: int) -> "_Found":
        """Gather it."""
        chains = [chain for one in ledgers for chain in one.chains]
        return cls(
            start,
            {one.ledger_id: one for one in ledgers},
            {before: first for one in ledgers for before, first in (*one.shared, *one.before)},
            {after: before for chain in chains for before, after in pairwise(chain)},
        )

    def with_place(self, item: LogItem) -> LogItem:
        """An item with the place that its ledger tells, or one behind it."""
        ledger = self.ledgers.get(item.ledger_id)
        first = item.first_offset
        if first is None and ledger is not None:
            first = ledger.first_offset
        return replace(item, first_offset=self.told.get(item.ledger_id) if first is None else first)

    @property
    def forked_at(self) -> int | None:
        """Where the log began, if it is a fork."""
        lineages = [one.lineage for one in self.ledgers.values() if one.lineage is not None]
        return next((one.forked_at for one in lineages if one.forked_at is not None), None)

    @property
    def items(self) -> list[LogItem]:
        """The ledgers that somebody holds, with a place."""
        found = (
            self.with_place(LogItem(ledger_id, None, published_ms=ledger.published_ms))
            for ledger_id, ledger in sorted(self.ledgers.items())
        )
        return [
            item
            for item in found
            if item.first_offset is not None and item.first_offset >= self.start
        ]

    @property
    def missing(self) -> list[LogItem]:
        """The ledgers that nobody holds, with the place that those behind them tell."""
        return [
            LogItem(ledger_id, first)
            for ledger_id, first in self.told.items()
            if ledger_id not in self.ledgers and first >= self.start
        ]

    def ordered(self, items: Iterable[LogItem]) -> tuple[LogItem, ...]:
        """By place. An item without a place was added ahead of its first record (rule 23), so it comes last."""
        return tuple(
            sorted(
                items,
                key=lambda one: (
                    one.first_offset is None,
                    one.first_offset or 0,
                    not self._is_empty(one),
                ),
            )
        )

    def _is_empty(self, item: LogItem) -> bool:
        ledger = self.ledgers.get(item.ledger_id)
        return item.is_empty or (ledger is not None and ledger.is_empty)

    def not_let_go(
        self, items: tuple[LogItem, ...], deleted: Collection[int]
    ) -> tuple[LogItem, ...]:
        """The items that the log had not let go of: it lets go of its first ledgers, so where one is deleted, or
        where a later ledger tells that the log began, those before are gone.
        """
        gone = {*deleted, _NOTHING}
        starts = [at for at, one in enumerate(items) if self.follows.get(one.ledger_id) in gone]
        return items[starts[-1] :] if starts else items

    def without_empty(self, items: tuple[LogItem, ...]) -> tuple[LogItem, ...]:
        """The items without ledgers that have no records; the last one stays. A log names no ledger behind one whose
        end it does not know, so it had let go of these.
        """
        kept = (
            before
            for before, after in pairwise(items)
            if before.last_offset is not None
            or after.first_offset is None
            or not (self._is_empty(before) or self._is_passed_over(before, after))
        )
        return (*kept, *items[-1:])

    def _is_passed_over(self, item: LogItem, after: LogItem) -> bool:
        """Whether the next ledger was placed at the item's own place, behind another ledger."""
        is_told = self.follows.get(after.ledger_id, item.ledger_id) != item.ledger_id
        return item.first_offset == after.first_offset and is_told

    def hides_next(self, items: Sequence[LogItem]) -> bool:
        """Whether the log may go on in a ledger with acknowledged records of which nobody has told: its next owner
        would give their offsets to others.
        """
        last = self.ledgers.get(items[-1].ledger_id) if items else None
        return last is not None and last.hides_next

    def unexplained(
        self, known: Sequence[LogItem], deleted: Collection[int], items: Sequence[LogItem]
    ) -> str:
        """Which ledger of the database's row is deleted though the log need not have let go of it, or "". It lets go of
        its first ledgers, and of one without records once another one has the place. A ledger with records that came
        later tells which of the two: by the one that it follows.
        """
        firsts = (item.ledger_id for item in known if item.ledger_id not in deleted)
        first = next(firsts, None)
        last_place = max((item.first_offset or 0 for item in known), default=0)
        is_first = True
        for item in known:
            is_first = is_first and item.ledger_id != first
            if is_first or item.ledger_id not in deleted:
                continue
            place = last_place if item.first_offset is None else item.first_offset
            if not any(self._tells_behind(one, place) for one in items):
                return f"ledger {item.ledger_id} in the middle of the log is deleted"
        return ""

    def _tells_behind(self, item: LogItem, place: int) -> bool:
        """Whether a ledger with records, there or behind it, tells what it follows."""
        is_behind = item.first_offset is not None and item.first_offset >= place
        return is_behind and item.ledger_id in self.follows and not self._is_empty(item)

    def misplaced(self, items: Sequence[LogItem]) -> str:
        """Why these are no places in one log, or ""."""
        if sum(item.first_offset is None for item in items) > 1:
            return "two ledgers of the log have no place"
        for before, after in pairwise(items):
            if after.first_offset is None:
                continue
            first, ledger = after.first_offset, self.ledgers.get(before.ledger_id)
            if before.first_offset == first and not before.is_empty:
                return f"ledgers {before.ledger_id} and {after.ledger_id} both begin at {first}"
            least = before.first_offset if ledger is None else ledger.least_end
            ends = least if before.last_offset is None else before.last_offset + 1
            if (before.last_offset is not None and ends != first) or (least or 0) > first:
                return (
                    f"ledger {before.ledger_id} ends at {max(ends or 0, least or 0)}, and ledger"
                    f" {after.ledger_id} begins at {first}"
                )
        return ""

    def gap(self, items: Sequence[LogItem]) -> str:
        """Where a ledger is missing and nobody knows which, or "". A ledger ends where the next one begins only if
        that one tells so, or is of a row from before lineages were kept.
        """
        solid = [item for item in items if not item.is_empty]
        for before, after in pairwise(solid):
            if after.first_offset is None or before.last_offset is not None:
                continue
            if after.first_offset == self.forked_at:
                continue  # what is nearest before it, each ledger of the fork tells
            follows = self.follows.get(after.ledger_id)
            if follows is None and after.ledger_id not in self.ledgers:
                return (
                    f"ledgers between {before.ledger_id} and {after.ledger_id} are on no bookie"
                    " that answers, and nobody knows which"
                )
            if follows not in {None, before.ledger_id}:
                return f"ledger {after.ledger_id} follows ledger {follows}, not {before.ledger_id}"
        return ""

    def with_ends(self, items: Sequence[LogItem], *, now_ms: int) -> tuple[LogItem, ...]:
        """Each item ends where the next one begins. The last one's end is for a takeover to find."""
        changed = []
        for item, after in zip(items, (*items[1:], None), strict=False):
            if item.last_offset is None and after is not None and after.first_offset is not None:
                ledger = self.ledgers.get(item.ledger_id)
                changed.append(
                    replace(
                        item,
                        last_offset=after.first_offset - 1,
                        bytes=item.bytes if ledger is None else ledger.length,
                        sealed_ms=now_ms,
                    )
                )
            else:
                changed.append(item)
        return tuple(changed)


def _new_log(name: str, created_at: str, ledgers: Sequence[LedgerPlace]) -> LogMetadata:
    """A log of which nothing is known but its ledgers: its settings are those that they were created with, without
    limits.
    """
    last = ledgers[-1]
    customs = [one.custom for one in ledgers if one.custom is not None]
    settings = LogSettings(
        quorum=last.quorum,
        digest=last.digest,
        batch_compression="zstd" if last.is_packed else "none",
        custom=customs[-1] if customs else (),
    )
    return LogMetadata(name, settings, version=NEW_LOG_VERSION, created_at=created_at)


def is_opened(known: LogMetadata | None, ledgers: Iterable[LedgerPlace]) -> bool:
    """Whether a log was opened for one writer, by its row or by what its ledgers tell (rule 22a)."""
    lineages = (one.lineage for one in ledgers)
    told = (0 if lineage is None else lineage.writer_token for lineage in lineages)
    return any(told) or (known is not None and known.writer_token > 0)


def _stream_seq(row: LogMetadata, ledgers: Iterable[LedgerPlace]) -> str | None:
    """The last stream sequence that is known, but for those of the last ledger, whose batches tell them (rule 25a)."""
    told = [one.lineage.stream_seq for one in ledgers if one.lineage is not None]
    return max(
        (seq for seq in (row.stream_seq, *told) if seq is not None), key=str.encode, default=None
    )


def _with_items(row: LogMetadata, items: tuple[LogItem, ...], *, now_ms: int) -> LogMetadata:
    first = items[0].first_offset if items else row.known_end
    row = replace(
        row,
        items=items,
        first_offset=max(row.first_offset, first or 0),
        next_offset=None if items else row.known_end,
        appended_ms=max(row.appended_ms, now_ms),
    )
    # Rule 26a: the producers of the lost rows are unknown, and unknown is not new. A takeover finds those of the last
    # ledger in its entries.
    return replace(row, forgotten_end=max(row.forgotten_end, row.known_end))
