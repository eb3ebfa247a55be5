"""Rebuilds a lost log from its ledgers' metadata (rule 18f), without IO.

A ledger's metadata has its first offset, the log's creation time and the nearest earlier ledgers.
So a missing ledger is noticed. If its first offset is known, the log names the missing ledger, and
readers get an error there until a later rebuild finds the ledger. If its first offset is unknown,
the rebuild does not write the log's metadata. Metadata of a fork's own ledgers also has the fork's
first own offset, and the shared ledgers (rule 27a).
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
"""The first version of a rebuilt log's metadata. It is higher than any version that a late
compare-and-swap from lost metadata names. Ledgers keep the versions of their copies."""


_NOTHING = -1
"""Stands for the missing predecessor of the log's first ledger."""


@dataclass(frozen=True, slots=True)
class LedgerPlace:
    """A ledger's place in its log, from the latest version of the ledger's metadata."""

    ledger_id: int
    first_offset: int | None
    """The offset of the ledger's first record; None if unknown."""
    last_entry: int | None
    """The ledger's last entry; None if the ledger is not CLOSED."""
    length: int
    quorum: Quorum
    digest: DigestKind
    lineage: Lineage | None = None
    has_row: bool = True
    """Whether the database has, or gets, the ledger's metadata, which readers need."""
    custom: tuple[tuple[str, str], ...] | None = None
    """The log's custom metadata, which its owner copies to each ledger. None for a transaction's
    ledger, because its custom metadata also contains tags of its task.
    """
    is_packed: bool = False
    """Whether the log's batches are compressed."""
    hides_next: bool = False
    """Whether another ledger of the log may exist, such as the next ledger after a CLOSED ledger,
    because all bookies with copies of that ledger may be lost or silent."""

    @property
    def log_created_at(self) -> str:
        """The creation time of the log that the ledger was placed in; "" if unknown."""
        return "" if self.lineage is None else self.lineage.log_created_at

    @property
    def before(self) -> tuple[tuple[int, int], ...]:
        """(id, first offset) of the nearest earlier ledgers."""
        return () if self.lineage is None else self.lineage.before

    @property
    def published_ms(self) -> int:
        """The time at which a transaction published the ledger; 0 if not published or unknown."""
        return 0 if self.lineage is None else self.lineage.published_ms

    @property
    def replaced(self) -> tuple[tuple[int, int], ...]:
        """(id, first offset) of the ledgers that this ledger has replaced (rule 27c)."""
        return () if self.lineage is None else self.lineage.replaced

    @property
    def shared(self) -> tuple[tuple[int, int], ...]:
        """(id, first offset) of the nearest ledgers that the log shares with other logs."""
        return () if self.lineage is None else self.lineage.shared

    @property
    def chains(self) -> tuple[tuple[int, ...], ...]:
        """Sequences of ids of ledgers that follow one another in the log."""
        before = (*(before for before, _ in self.before), self.ledger_id)
        shared = tuple(ledger_id for ledger_id, _ in self.shared)
        starts = (_NOTHING,) if 0 < len(shared) < SHARED_KEPT else ()
        return ((*self.begins_log, *before), (*starts, *shared))

    @property
    def begins_log(self) -> tuple[int, ...]:
        """(_NOTHING,) if the first ledger of `before`, or else this ledger, was the log's first."""
        is_reported = self.lineage is not None and len(self.before) < PREDECESSORS_KEPT
        return (_NOTHING,) if is_reported else ()

    @property
    def least_end(self) -> int:
        """A lower bound of the offset after the ledger's records, counting one record per entry."""
        entries = 0 if self.last_entry is None else self.last_entry + 1
        return (self.first_offset or 0) + entries

    @property
    def is_empty(self) -> bool:
        """Whether the ledger is CLOSED and has no entries."""
        return self.last_entry == NO_ENTRY


@dataclass(frozen=True, slots=True)
class LogDecision:
    """The decision about a log's metadata, and the report to the operator."""

    action: Action
    row: LogMetadata | None = None
    why: str = ""
    unplaced: tuple[int, ...] = ()
    """Ledgers that were created for a log of this name, but are not in the log. They were never
    placed (uncommitted transactions), are empty, were released, or are of an earlier log.
    """
    holes: tuple[int, ...] = ()
    """Ledgers of the log whose metadata is missing, because copies are missing or prove nothing."""


@dataclass(frozen=True, slots=True)
class DeletedLogs:
    """The deleted logs of one name, as the copies of their ledgers show them (rule 18f, clause 7).

    Ledger ids alone don't prove that a log was deleted: after a backup was restored, a log that was
    created after the deletion can have ledgers with lower ids than the deleted log's ledgers.
    """

    through: int = -1
    """The highest ledger id of the deleted logs; -1 if no ledger is known."""
    created_at: Collection[str] = frozenset()
    """The known creation times of the deleted logs."""

    def include(self, ledger: LedgerPlace) -> bool:
        """Whether the ledger was created for one of the deleted logs."""
        created_at = ledger.log_created_at
        return created_at in self.created_at or self._reach(ledger.ledger_id, created_at)

    def decide(self, known: LogMetadata) -> LogDecision | None:
        """Decide whether the database's log is one of the deleted logs; None if it isn't."""
        if known.created_at in self.created_at:
            return LogDecision(Action.TOMBSTONE)
        ids = [item.ledger_id for item in known.own]
        if not ids or not self._reach(max(ids), known.created_at):
            return None
        # This may be another log: a restored database's clock can be behind, too.
        why = (
            f"ledgers up to {self.through} were deleted with a log of this name, but no copy shows that it was"
            f" the log created at {known.created_at}: if this log was deleted, delete it again"
        )
        return LogDecision(Action.CONFLICT, why=why)

    def _reach(self, ledger_id: int, created_at: str) -> bool:
        """Whether both the id and the creation time are at most those of the deleted logs."""
        latest = max(self.created_at, default="")
        return ledger_id <= self.through and not (latest and created_at > latest)


def decide_log(
    name: str,
    known: LogMetadata | None,
    ledgers: Sequence[LedgerPlace],
    deleted: Collection[int],
    *,
    now_ms: int,
    token: int,
    stored: Collection[int] = (),
    silent: int = 0,
) -> LogDecision:
    """Decide how to rebuild one log, from the metadata of all ledgers that were created for the
    log. `deleted`: ids with tombstones. `stored`: ids with metadata in the database. `token`: an
    unused writer token. `silent`: the number of bookies that do not answer, or lost their data.
    """
    created_at = max((one.log_created_at for one in ledgers), default="")
    if known is not None and known.created_at < created_at:
        why = f"the log was deleted, and another log of its name was created at {created_at}"
        return LogDecision(Action.CONFLICT, why=why)
    created_at = created_at if known is None else known.created_at
    start = 0 if known is None else known.first_offset
    ledgers, replaced = _current(ledgers, created_at, start)
    found = _Found.of([one for one in ledgers if one.log_created_at in {"", created_at}], start)
    before = () if known is None else known.items
    before = tuple(item for item in before if item.ledger_id not in replaced)
    items = tuple(
        replace(item, index=None) if item.index in deleted else item
        for item in before
        if item.ledger_id not in deleted
    )
    named = {item.ledger_id for item in before}
    fresh = [item for item in found.items if item.ledger_id not in named]
    missing = [item for item in found.missing if item.ledger_id not in named | set(deleted)]
    items = found.ordered((*map(found.with_place, items), *missing, *fresh))
    items = found.not_let_go(items, deleted)
    hides = known is not None and silent >= known.settings.quorum.ack_quorum
    hidden = found.hidden(items, before, deleted, hides=hides)
    items = found.without_empty(items)
    fresh = [item for item in fresh if item in items]
    unplaced = _unplaced(ledgers, named | {item.ledger_id for item in items})
    if known is None and not fresh:
        return LogDecision(
            Action.WAIT, None, "no copy of the log's ledgers has a first offset", unplaced
        )
    if hidden:
        return LogDecision(Action.WAIT, None, hidden, unplaced)
    if known is None and found.hides_next(items):
        why = (
            f"ledger {items[-1].ledger_id} is CLOSED, and the ledger after it may be on bookies that do not answer or"
            " lost their data: start them, or, if their data is gone, name them as gone"
            " (`quorumlog metadata rebuild --without`)"
        )
        return LogDecision(Action.WAIT, None, why, unplaced)
    if before and not items:
        problem = "all known ledgers are deleted: the log was deleted, or later ones are unknown"
    else:
        problem = (
            found.unexplained(before, deleted, items)
            or found.contested(items)
            or found.misplaced(items)
            or found.gap(items)
        )
    # A ledger made by a rewrite contains older records than the log's last ledger, which a rewrite
    # never replaces (rule 27c). So it was not written after the log was CLOSED.
    later = [item for item in fresh if not item.replaced or item.ledger_id == items[-1].ledger_id]
    if known is not None and known.state is LogState.CLOSED and later:
        problem = f"the log is CLOSED, and ledger {later[0].ledger_id} was written later"
    if problem:
        return LogDecision(Action.CONFLICT, None, problem, unplaced)
    items = found.with_ends(items, now_ms=now_ms)
    rows = {one.ledger_id for one in ledgers if one.has_row} | set(stored)
    holes = tuple(item.ledger_id for item in items if item.ledger_id not in rows)
    if known is not None and items == known.items:
        # Bookies keep the ids of deleted ledgers, but not their logs' names.
        why = _WITHOUT_LEDGERS if deleted and not items else ""
        return LogDecision(Action.SAME, None, why, unplaced, holes)
    named_now = [found.ledgers[item.ledger_id] for item in items if item.ledger_id in found.ledgers]
    row = known or replace(_new_log(name, created_at, named_now), forked_at=found.forked_at)
    row = replace(row, stream_seq=_stream_seq(row, named_now))
    if is_opened(row, named_now):
        # If the last writer appended nothing, no ledger shows its token. So every writer must open
        # the log again.
        row = replace(row, writer_token=max(row.writer_token + 1, token), opened_by=None)
    return LogDecision(
        Action.WRITE, _with_items(row, items, now_ms=now_ms), unplaced=unplaced, holes=holes
    )


_WITHOUT_LEDGERS = (
    "the log has no ledgers in the database: if the log was deleted since, delete it again"
)


def _unplaced(ledgers: Iterable[LedgerPlace], placed: Collection[int]) -> tuple[int, ...]:
    return tuple(one.ledger_id for one in ledgers if one.ledger_id not in placed)


def _current(
    ledgers: Sequence[LedgerPlace], created_at: str, start: int
) -> tuple[list[LedgerPlace], Mapping[int, tuple[int, int]]]:
    """Separate current ledgers from replaced ledgers (rule 27c). Returns the current ledgers, and
    for each replaced ledger the id and first offset of its replacement. The current ledgers'
    lineages name replacements instead of replaced ledgers.
    """
    rewrites = [
        one
        for one in ledgers
        if one.replaced and one.log_created_at == created_at and (one.first_offset or 0) >= start
    ]
    rewrites.sort(key=lambda one: len(one.replaced))  # later rewrites have replaced more ledgers
    by = {
        ledger_id: (one.ledger_id, one.first_offset or 0)
        for one in rewrites
        for ledger_id, _ in one.replaced
    }
    current = [
        one
        if one.lineage is None
        else replace(
            one,
            lineage=replace(
                one.lineage,
                before=tuple(by.get(each[0], each) for each in one.before),
            ),
        )
        for one in ledgers
        if one.ledger_id not in by
    ]
    return current, by


@dataclass(frozen=True, slots=True)
class _Found:
    """The places of one log's ledgers, from the offset `start` on."""

    start: int
    ledgers: Mapping[int, LedgerPlace]
    reported: Mapping[int, int]
    """The first offsets, by id, of ledgers that later ledgers name as predecessors."""
    follows: Mapping[int, int]
    """For each ledger, the nearest earlier ledger with records (or _NOTHING), from any metadata."""

    @classmethod
    def of(cls, ledgers: Sequence[LedgerPlace], start: int) -> "_Found":
        """Collect the places of these ledgers."""
        chains = [chain for one in ledgers for chain in one.chains]
        return cls(
            start,
            {one.ledger_id: one for one in ledgers},
            {before: first for one in ledgers for before, first in (*one.shared, *one.before)},
            {
                after: before
                for chain in chains
                for before, after in pairwise(chain)
                if before != after
            },
        )

    def with_place(self, item: LogItem) -> LogItem:
        """Add the first offset to an item, from the metadata of its ledger or of a later ledger."""
        ledger = self.ledgers.get(item.ledger_id)
        first = item.first_offset
        if first is None and ledger is not None:
            first = ledger.first_offset
        return replace(
            item, first_offset=self.reported.get(item.ledger_id) if first is None else first
        )

    @property
    def forked_at(self) -> int | None:
        """The offset of the log's first own record if it is a fork; None otherwise."""
        lineages = [one.lineage for one in self.ledgers.values() if one.lineage is not None]
        return next((one.forked_at for one in lineages if one.forked_at is not None), None)

    @property
    def items(self) -> list[LogItem]:
        """The ledgers with a known place that some bookie holds, from `start` on."""
        found = (
            self.with_place(
                LogItem(
                    ledger_id,
                    None,
                    published_ms=ledger.published_ms,
                    replaced=len(ledger.replaced),
                )
            )
            for ledger_id, ledger in sorted(self.ledgers.items())
        )
        return [
            item
            for item in found
            if item.first_offset is not None and item.first_offset >= self.start
        ]

    @property
    def missing(self) -> list[LogItem]:
        """Ledgers that no bookie holds, from `start` on, with places from later ledgers."""
        return [
            LogItem(ledger_id, first)
            for ledger_id, first in self.reported.items()
            if ledger_id not in self.ledgers and first >= self.start
        ]

    def ordered(self, items: Iterable[LogItem]) -> tuple[LogItem, ...]:
        """Sort items by place. An item without a place has no records yet, and comes last."""
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
        """The items that the log had not released. A log releases its ledgers in order. So the log
        has released all items before the last item whose predecessor is a deleted ledger, or which
        was the log's first.
        """
        gone = {*deleted, _NOTHING}
        starts = [at for at, one in enumerate(items) if self.follows.get(one.ledger_id) in gone]
        return items[starts[-1] :] if starts else items

    def without_empty(self, items: tuple[LogItem, ...]) -> tuple[LogItem, ...]:
        """The items without empty ledgers, except the last item. An empty ledger that another
        ledger follows, and whose end is not in the log's metadata, was released.
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
        """Whether the next item has the same first offset, but follows another ledger."""
        is_reported = self.follows.get(after.ledger_id, item.ledger_id) != item.ledger_id
        return item.first_offset == after.first_offset and is_reported

    def hides_next(self, items: Sequence[LogItem]) -> bool:
        """Whether an unknown ledger may follow the last item. If so, the next owner would assign
        the offsets of that ledger's acknowledged records again.
        """
        last = self.ledgers.get(items[-1].ledger_id) if items else None
        return last is not None and last.last_entry is not None and last.hides_next

    def hidden(
        self,
        items: Sequence[LogItem],
        known: Sequence[LogItem],
        deleted: Collection[int],
        *,
        hides: bool,
    ) -> str:
        """The error if a ledger at the beginning of the log may be unknown; else "". If a ledger
        before the first item is deleted, the log has released that ledger, or another ledger has
        replaced it (rule 27c). `hides`: whether bookies with copies may be lost or silent.
        """
        hides = hides or any(one.hides_next for one in self.ledgers.values())
        first = items[0].first_offset if items else None
        if not hides or first is None or first <= self.start:
            return ""
        before = [item.ledger_id for item in known if (item.first_offset or 0) < first]
        before.append(self.follows.get(items[0].ledger_id, _NOTHING))
        gone = [ledger_id for ledger_id in before if ledger_id in deleted]
        if not gone:
            return ""
        return (
            f"ledger {gone[-1]} is deleted, and the ledger that replaced it may be on bookies that do not"
            " answer or lost their data: start them, or, if their data is gone, name them as gone"
            " (`quorumlog metadata rebuild --without`)"
        )

    def unexplained(
        self, known: Sequence[LogItem], deleted: Collection[int], items: Sequence[LogItem]
    ) -> str:
        """The error if a ledger in the database's list is deleted, but perhaps not released; else
        "". A log releases its first ledgers. It also releases an empty ledger when another ledger
        has the same place. A later ledger with records and a known predecessor proves the release.
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
            if not any(self._reports_behind(one, place) for one in items):
                return f"ledger {item.ledger_id} is deleted, although the log has earlier ledgers"
        return ""

    def _reports_behind(self, item: LogItem, place: int) -> bool:
        """Whether an item at or after `place` has records and a known predecessor."""
        is_behind = item.first_offset is not None and item.first_offset >= place
        return is_behind and item.ledger_id in self.follows and not self._is_empty(item)

    def contested(self, items: Sequence[LogItem]) -> str:
        """The error if a ledger was replaced in two histories; else ""."""
        by: dict[int, int] = {}
        for item in items:
            ledger = self.ledgers.get(item.ledger_id)
            for ledger_id, _ in () if ledger is None else ledger.replaced:
                if (other := by.setdefault(ledger_id, item.ledger_id)) != item.ledger_id:
                    return f"ledgers {other} and {item.ledger_id} both replaced ledger {ledger_id}"
        return ""

    def misplaced(self, items: Sequence[LogItem]) -> str:
        """The error if places contradict each other; else ""."""
        if sum(item.first_offset is None for item in items) > 1:
            return "two ledgers of the log have no first offset"
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
                    f"ledger {before.ledger_id} ends at offset {max(ends or 0, least or 0)}, but the"
                    f" next ledger {after.ledger_id} begins at {first}"
                )
        return ""

    def gap(self, items: Sequence[LogItem]) -> str:
        """The error if an unknown ledger is missing; else "". No ledger is missing between two
        ledgers if the second ledger's metadata names the first ledger as its predecessor, or has no
        lineage.
        """
        solid = [item for item in items if not item.is_empty]
        for before, after in pairwise(solid):
            if after.first_offset is None or before.last_offset is not None:
                continue
            if after.first_offset == self.forked_at:
                continue  # the metadata of each ledger of a fork names the nearest shared ledgers
            follows = self.follows.get(after.ledger_id)
            if follows is None and after.ledger_id not in self.ledgers:
                return (
                    f"ledgers between {before.ledger_id} and {after.ledger_id} may be missing: no bookie"
                    " that answers has them, and their ids are unknown"
                )
            if follows not in {None, before.ledger_id}:
                return f"ledger {after.ledger_id} follows ledger {follows}, not {before.ledger_id}"
        return ""

    def with_ends(self, items: Sequence[LogItem], *, now_ms: int) -> tuple[LogItem, ...]:
        """End each item where the next item begins. A takeover finds the last item's end."""
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
    """Make a log's metadata from its ledgers alone, with their settings and without limits."""
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
    """Whether the metadata of a log or its ledgers shows that the log was opened (rule 22a)."""
    lineages = (one.lineage for one in ledgers)
    reported = (0 if lineage is None else lineage.writer_token for lineage in lineages)
    return any(reported) or (known is not None and known.writer_token > 0)


def _stream_seq(row: LogMetadata, ledgers: Iterable[LedgerPlace]) -> str | None:
    """The highest stream sequence before the last ledger (rule 25a)."""
    reported = [one.lineage.stream_seq for one in ledgers if one.lineage is not None]
    return max(
        (seq for seq in (row.stream_seq, *reported) if seq is not None),
        key=str.encode,
        default=None,
    )


def _with_items(row: LogMetadata, items: tuple[LogItem, ...], *, now_ms: int) -> LogMetadata:
    first = items[0].first_offset if items else row.known_end
    row = replace(
        row,
        items=tuple(replace(item, index=None) for item in items),  # built anew (rule 27e)
        first_offset=max(row.first_offset, first or 0),
        next_offset=None if items else row.known_end,
        appended_ms=max(row.appended_ms, now_ms),
    )
    # Rule 26a: the producers of the lost metadata are unknown, and must not count as new producers.
    # A takeover reads the last ledger's producers from the ledger's entries.
    return replace(row, forgotten_end=max(row.forgotten_end, row.known_end))
