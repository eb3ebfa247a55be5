"""A log's metadata, which is an ordered list of ledgers, and all changes of it.

Values are immutable. A transform's result keeps the version that it was made from, as with ledgers.

Invariants (checked by `check`):
  - I33: offsets of the items grow, and known borders meet (`last_offset` + 1 is the next
    `first_offset`);
  - an item's end is known before the next item's `first_offset`; an item without `first_offset` was
    added ahead by a roll, and gets no entry before its `first_offset` is set (rule 23);
  - `first_offset`, `archived_through`, `forgotten_end` and `writer_token` of the log never
    decrease;
  - ledgers that a fork shares with its source are sealed, precede the fork's own ledgers, and end
    where the fork begins (rule 27a).
Source: both protocol documents, "Ledgers to logs"; rules 22 to 28.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, NamedTuple

from quorumlog.errors import LogReplaced
from quorumlog.protocol.batch import STREAM_SEQ_BYTES_MAX
from quorumlog.protocol.ids import ID_MAX
from quorumlog.protocol.metadata import PREDECESSORS_KEPT, SHARED_KEPT, DigestKind, Lineage, Writer
from quorumlog.protocol.quorum import Quorum
from quorumlog.protocol.values import (
    AttemptOrNone,
    Bounds,
    IdOrNone,
    LedgerId,
    LogName,
    Number,
    Pairs,
    Text,
    Value,
    Version,
)

PRODUCERS_MAX = 1000
"""Maximum producers that a log remembers. It forgets the longest-silent producer first (rule
26)."""

ANSWERS_MAX = 64
"""Maximum answers kept for each producer, so that a retry gets the first answer. Clients have fewer
requests in flight."""

LOG_LEDGERS_MAX = 10_000
"""Maximum ledgers of a log. A full log must be truncated before more ledgers are added."""

ROW_ANSWERS_MAX = 4096
"""Maximum answers in a log's producer table, about 400 KiB of JSON. Each producer keeps at least
its last answer, which has its sequence number."""


NO_KEYS: Final = -1
"""The value of `LogItem.index` for a ledger without keys, which needs no index (rule 27e)."""


class LogState(StrEnum):
    """A log's state. CLOSED is final, so no append follows."""

    OPEN = "OPEN"
    CLOSED = "CLOSED"


class Answer(NamedTuple):
    """The answer to a producer's request, and the digest of its records. In JSON it is a compact
    list, because there may be thousands.
    """

    seq: Number
    first_offset: Number
    last_offset: IdOrNone
    """One below `first_offset` if a request without records ended the log."""
    ledger_id: LedgerId
    entry_id: Number
    content: Text


@dataclass(frozen=True, slots=True)
class Producer:
    """A producer in a log's metadata. `answers`: its latest answers, ascending by seq."""

    id: Text
    epoch: Number
    seen_ms: Annotated[int, Bounds(ge=-(2**63), le=ID_MAX)]
    answers: tuple[Answer, ...]

    @property
    def next_seq(self) -> int:
        """The seq of this producer's next request in its epoch."""
        return self.answers[-1].seq + 1 if self.answers else 0


@dataclass(frozen=True, slots=True)
class LogItem:
    """One ledger of a log. `producers`: the producer table at the ledger's start, stored only in
    the item from which a takeover replays (rule 26).
    """

    ledger_id: LedgerId
    first_offset: Number | None
    last_offset: IdOrNone | None = None
    """The last record's offset; None while the ledger may grow; first_offset - 1 if it is empty."""
    producers: Annotated[tuple[Producer, ...], Bounds(max_length=PRODUCERS_MAX)] = ()
    bytes: Number = 0
    sealed_ms: Number = 0
    """The time of the ledger's close; retention counts its age from then on. 0 while open."""
    published_ms: Number = 0
    """The time of the ledger's publication, which is the append time of all its records; 0 if no
    transaction published it. Its batches then have the append times."""
    replaced: Number = 0
    """The number of ledgers that this ledger has replaced, directly or indirectly (rule 27c)."""
    index: IdOrNone | None = None
    """The ledger with the index of this ledger's keys, NO_KEYS (-1) if it has none, or None if it
    has no index (rule 27e)."""
    compacted_ms: Number = 0
    """The time since which the ledger is clean; 0 if it is dirty (rule 27d)."""

    @property
    def is_empty(self) -> bool:
        """Whether the ledger is closed without records."""
        first, last = self.first_offset, self.last_offset
        return first is not None and last is not None and last < first


def ledgers_of(items: Iterable[LogItem]) -> set[int]:
    """The ids of these items' ledgers, and of the ledgers with their key indexes."""
    named = (each for item in items for each in (item.ledger_id, item.index))
    return {each for each in named if each is not None and each != NO_KEYS}


LIMITS: Final = (
    "roll_bytes", "roll_entries", "roll_seconds", "retention_bytes", "retention_seconds",
    "merge_below_bytes", "cleanup_policy", "min_compaction_lag_s", "delete_retention_s",
    "max_dirty_percent",
)  # fmt: skip
"""The settings of a log that may be changed."""

DAY_S: Final = 24 * 3600


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The settings of a log. Zero switches a limit off."""

    quorum: Quorum
    digest: DigestKind = DigestKind.CRC32C
    roll_bytes: Number = 256 * 1024 * 1024
    roll_entries: Number = 0
    roll_seconds: Number = 0
    retention_bytes: Number = 0
    retention_seconds: Number = 0
    merge_below_bytes: Number = 64 * 1024 * 1024
    """The size below which sealed ledgers are merged into larger ledgers (rule 27c)."""
    cleanup_policy: Annotated[str, Bounds(pattern="^(delete|compact|compact,delete)$")] = "delete"
    """`delete`: the retention releases old ledgers. `compact`: the newest record of each key stays
    (rule 27d)."""
    min_compaction_lag_s: Number = 0
    """Seconds after a ledger's seal during which it is not compacted."""
    delete_retention_s: Number = DAY_S
    """Seconds for which compaction keeps tombstones."""
    max_dirty_percent: Annotated[int, Bounds(ge=0, le=100)] = 50
    """The percentage of dirty bytes at which a log is compacted."""
    batch_compression: Annotated[str, Bounds(pattern="^(none|zstd)$")] = "none"
    """The compression of the columns of record batches: `none` or `zstd` (`packed.py`)."""
    custom: Pairs = ()

    @property
    def compacts(self) -> bool:
        """Whether the log is compacted, and therefore rejects records without a key (rule 27d)."""
        return self.cleanup_policy != "delete"

    @property
    def limits(self) -> dict[str, int | str]:
        """The settings in LIMITS, by name."""
        return {name: getattr(self, name) for name in LIMITS}

    @property
    def fields(self) -> dict[str, Any]:
        """All settings by their names in the API."""
        return {
            **asdict(self.quorum),
            "digest": self.digest,
            "metadata": dict(self.custom),
            **self.limits,
            "batch_compression": self.batch_compression,
        }

    def with_limits(self, limits: Mapping[str, int | str]) -> "LogSettings":
        """The settings with some of LIMITS changed, by name."""
        assert set(limits) <= set(LIMITS)
        values: dict[str, Any] = dict(limits)
        return replace(self, **values)


@dataclass(frozen=True, slots=True)
class Expiry:
    """The expiry of a log that is deleted after `idle_s` seconds without use (ADR 40)."""

    idle_s: Number
    keeper: Writer
    """The process that remembers the last use, and decides alone whether the log has expired."""
    term: Text
    """A token that is unique to this appointment of a keeper."""


@dataclass(frozen=True, slots=True)
class LogMetadata(Value):
    """One log's metadata."""

    STORE_FIELDS: ClassVar = frozenset(("name", "version", "attempt", "created_at", "read_ms"))
    """Fields that the store sets itself. Their values in a requested change are ignored."""

    name: LogName
    settings: LogSettings
    items: Annotated[tuple[LogItem, ...], Bounds(max_length=LOG_LEDGERS_MAX)] = ()
    version: Version = 1
    state: LogState = LogState.OPEN
    first_offset: Number = 0
    next_offset: Number | None = None
    """The next record's offset while no ledger is open (no items yet, or closed)."""
    writer_token: Number = 0
    """The token that appends must have, set by `open`; 0 if any client may append."""
    opened_by: Annotated[Text, Bounds(max_length=1024)] | None = None
    forgotten_end: Number = 0
    """The offset below which all records of forgotten producers are (rule 26a); 0 if no producer
    was forgotten."""
    appended_ms: Number = 0
    """The latest append time in all ledgers except the last. Stored because append times never go
    back (rule 26b)."""
    stream_seq: Annotated[Text, Bounds(max_length=STREAM_SEQ_BYTES_MAX)] | None = None
    """The last stream sequence before the last ledger (rule 25a); None if there was none."""
    created_at: Text = ""
    attempt: AttemptOrNone = ""
    """The token of the change that made this version. It distinguishes versions of two histories
    with equal numbers (rule 18a). Empty if the store keeps no tokens."""
    archived_through: Number | None = None
    """The offset below which all records are archived elsewhere; None if no record is."""
    deletion_protection: bool = False
    """Whether requests to delete, truncate or overwrite the log fail; retention continues."""
    expiry: Expiry | None = None
    """The expiry of the log after a time without use; None: never."""
    forked_at: Number | None = None
    """A fork's first own offset; None if the log is not a fork. Items that begin below this offset
    are shared, so their ledgers were created for other logs. The last shared ledger may also have
    records that are not part of the fork."""
    read_ms: Number = field(default=0, compare=False)
    """The store's time when it returned this metadata, in ms since 1970; 0 if unknown."""

    def check(self) -> None:
        """Assert the invariants of this metadata."""
        for before, item in zip(self.items, self.items[1:], strict=False):
            if item.first_offset is not None:
                assert before.last_offset is not None, (
                    "an item before one with a first_offset must have a last_offset (I33)"
                )
                assert before.last_offset + 1 == item.first_offset, "items must have no gaps (I33)"
        is_placed = all(item.first_offset is not None for item in self.items[:-1])
        assert is_placed, "all items except the last must have a first_offset (rule 23)"
        ids = [item.ledger_id for item in self.items]
        ids += [item.index for item in self.items if item.index not in {None, NO_KEYS}]
        assert len(set(ids)) == len(ids), "items must name each ledger only once"
        is_final = all(item.index is None for item in self.unsealed)
        assert is_final, "only sealed ledgers may have an index (rule 27e)"
        for item in self.shared:
            assert item.last_offset is not None, "shared ledgers must be sealed (rule 27a)"
            assert item.last_offset < (self.forked_at or 0), (
                "shared ledgers must end below forked_at (rule 27a)"
            )

    def check_created(self, created_at: str | None) -> None:
        """Raise LogReplaced unless `created_at` is None or this log's creation time (rule 27b)."""
        if created_at not in (None, self.created_at):
            raise LogReplaced(
                f"the log {self.name} of {created_at} was deleted, and another log of this name was"
                f" created at {self.created_at}: read its metadata",
                log=self.name,
                created_at=self.created_at,
            )

    def is_shared(self, item: LogItem) -> bool:
        """Whether an item's ledger was created for another log, and this log is a fork of that log."""
        return (
            self.forked_at is not None
            and item.first_offset is not None
            and item.first_offset < self.forked_at
        )

    @property
    def shared(self) -> tuple[LogItem, ...]:
        """The items whose ledgers were created for other logs, which come first."""
        return tuple(item for item in self.items if self.is_shared(item))

    @property
    def own(self) -> tuple[LogItem, ...]:
        """The items whose ledgers were created for this log."""
        return tuple(item for item in self.items if not self.is_shared(item))

    @property
    def last_item(self) -> LogItem | None:
        """The last ledger, whose writer owns the log (rule 22)."""
        return self.items[-1] if self.items else None

    @property
    def end_offset(self) -> int | None:
        """The next record's offset; None while an open ledger determines it."""
        last = self.last_item
        if last is None:
            return self.first_offset if self.next_offset is None else self.next_offset
        return None if last.last_offset is None else last.last_offset + 1

    @property
    def base(self) -> LogItem | None:
        """The item from which a takeover rebuilds producers: the last own item with a known start.
        A fork ignores producers and end marks of shared ledgers (rule 27a).
        """
        known = (item for item in reversed(self.items) if item.first_offset is not None)
        return next((item for item in known if not self.is_shared(item)), None)

    @property
    def unsealed(self) -> tuple[LogItem, ...]:
        """The items with an unknown end, which a takeover must close."""
        return tuple(item for item in self.items if item.last_offset is None)

    @property
    def known_end(self) -> int:
        """The offset after all records that the metadata counts."""
        ends = [self.first_offset, self.next_offset or 0]
        for item in self.items:
            ends.append(item.first_offset or 0)
            ends.append(0 if item.last_offset is None else item.last_offset + 1)
        return max(ends)

    def item_at(self, offset: int) -> LogItem | None:
        """The item to which an offset belongs; None if no item is known to contain the offset."""
        for item in reversed(self.items):
            if item.first_offset is not None and item.first_offset <= offset:
                is_in = item.last_offset is None or offset <= item.last_offset
                return item if is_in else None
        return None

    def item_of(self, ledger_id: int) -> LogItem | None:
        """The item of a ledger; None if the log does not name the ledger."""
        return next((item for item in self.items if item.ledger_id == ledger_id), None)

    def lineages(
        self,
        ledger_ids: Collection[int],
        replaced: Mapping[int, tuple[tuple[int, int], ...]] = MappingProxyType({}),
    ) -> dict[int, Lineage]:
        """The lineages of ledgers that get their places with this version (rule 18f). `replaced`:
        the ledgers that each ledger replaces, by its id (rule 27c).
        """
        found: dict[int, Lineage] = {}
        before: deque[tuple[int, int]] = deque(maxlen=PREDECESSORS_KEPT)
        shared = tuple((i.ledger_id, i.first_offset or 0) for i in self.shared[-SHARED_KEPT:])
        for item in self.items:
            if item.ledger_id in ledger_ids:
                found[item.ledger_id] = Lineage(
                    self.created_at,
                    tuple(before),
                    item.published_ms,
                    self.stream_seq,
                    self.attempt,
                    self.forked_at,
                    shared,
                    self.writer_token,
                    replaced.get(item.ledger_id, ()),
                )
            if item.first_offset is not None and not item.is_empty:
                before.append((item.ledger_id, item.first_offset))
        return found

    def with_ledger(self, ledger_id: int) -> "LogMetadata":
        """The log with a new last ledger, whose start is unknown until the previous ledger ends."""
        assert self.state is LogState.OPEN
        assert all(item.first_offset is not None for item in self.items), "one ahead (rule 23)"
        return replace(self, items=(*self.items, LogItem(ledger_id, None)))

    def with_ends(
        self,
        ends: dict[int, tuple[int, int]],
        *,
        producers: tuple[Producer, ...],
        now_ms: int,
        forgotten_end: int = 0,
        appended_ms: int = 0,
        stream_seq: str | None = None,
    ) -> "LogMetadata":
        """The log with the ends of CLOSED ledgers. `ends`: records and bytes of each ledger. The
        last item's start and producer table follow from the ends. `forgotten_end` belongs to the
        table of `producers`. Neither `forgotten_end` nor `appended_ms` decreases.
        """
        items: list[LogItem] = []
        at = self.first_offset if self.next_offset is None else self.next_offset
        if self.items and self.items[0].first_offset is not None:
            at = self.items[0].first_offset
        for item in self.items:
            changed = item
            if item.first_offset is None:
                changed = replace(changed, first_offset=at, producers=producers)
            if item.last_offset is None and item.ledger_id in ends:
                records, size = ends[item.ledger_id]
                changed = replace(
                    changed, last_offset=at + records - 1, bytes=size, sealed_ms=now_ms
                )
            items.append(changed)
            at = at if changed.last_offset is None else changed.last_offset + 1
        kept = tuple(
            item for index, item in enumerate(items) if index == len(items) - 1 or not item.is_empty
        )
        log = replace(
            self,
            items=kept,
            next_offset=None if kept else at,
            forgotten_end=max(self.forgotten_end, forgotten_end),
            appended_ms=max(self.appended_ms, appended_ms),
            stream_seq=self.stream_seq if stream_seq is None else stream_seq,
        )
        base = log.base
        return replace(
            log,
            items=tuple(
                item if item is base or not item.producers else replace(item, producers=())
                for item in log.items
            ),
        )

    def with_published(
        self,
        sealed: Sequence[tuple[int, int, int]],
        *,
        now_ms: int,
        published_ms: int,
        is_new_start: bool = False,
    ) -> "LogMetadata":
        """The log with ledgers that tasks wrote and closed. `sealed`: (ledger, records, bytes) of
        each. Ledgers without records are left out. All earlier ends must be known (rule 28).

        `published_ms`: the append time of the published records, because the times in their batches
        may be earlier than times in the log. `is_new_start`: earlier records are dropped, and
        offsets continue.
        """
        at = self.end_offset
        assert self.state is LogState.OPEN
        assert at is not None, "all earlier ledgers must be CLOSED (rule 28)"
        start, added = at, []
        for ledger_id, records, size in sealed:
            if records:
                item = LogItem(ledger_id, at, at + records - 1, bytes=size, sealed_ms=now_ms)
                added.append(replace(item, published_ms=published_ms))
                at += records
        items = (*(() if is_new_start else self.items), *added)
        return replace(
            self,
            items=items,
            next_offset=None if items else at,
            first_offset=start if is_new_start else self.first_offset,
            appended_ms=max(self.appended_ms, published_ms),
        )

    def is_sealed_below(self, offset: int) -> bool:
        """Whether a fork may begin at an offset: all earlier records are in sealed ledgers."""
        end = self.end_offset
        if end is not None:
            return offset <= end
        last = self.base
        return last is not None and last.first_offset is not None and offset <= last.first_offset

    def forked(self, wanted: "LogMetadata", at: int) -> "LogMetadata":
        """A fork of this log, made from the empty log `wanted`. It begins with this log's records
        below `at`, but has neither producers nor a stream sequence (rule 27a).
        """
        assert self.first_offset <= at, "a fork must not begin at a dropped record"
        assert self.is_sealed_below(at), "shared ledgers must be sealed"
        items = tuple(
            replace(item, last_offset=min(item.last_offset, at - 1), producers=())
            for item in self.items
            if item.first_offset is not None
            and item.first_offset < at
            and item.last_offset is not None
            and not item.is_empty
        )
        return replace(
            wanted,
            items=items,
            first_offset=self.first_offset,
            next_offset=None if items else at,
            appended_ms=self.appended_ms,
            forked_at=at,
        )

    def truncated(self, before: int) -> "LogMetadata":
        """The log without closed ledgers that end below `before`. The last item stays."""
        kept = tuple(
            item
            for index, item in enumerate(self.items)
            if index == len(self.items) - 1
            or item.last_offset is None
            or item.last_offset >= before
        )
        first = kept[0].first_offset if kept else self.first_offset
        return replace(
            self, items=kept, first_offset=max(self.first_offset, 0 if first is None else first)
        )

    def names_sealed(self, items: Sequence[LogItem]) -> bool:
        """Whether the log still names these items, unchanged and adjacent, and a rewrite may
        replace them (rule 27c). They must be sealed, the log's own, and before the item from which
        a takeover replays. Their indexes may have changed.
        """
        at = self._place_of(items)
        now = self.items[at : at + len(items)]
        return (
            len(now) == len(items) > 0
            and all(replace(a, index=b.index) == b for a, b in zip(now, items, strict=True))
            and self.may_rewrite(items)
        )

    def _place_of(self, items: Sequence[LogItem]) -> int:
        """The index of the first of these items in the log's items."""
        ids = (n for n, item in enumerate(self.items) if item.ledger_id == items[0].ledger_id)
        return next(ids, len(self.items)) if items else len(self.items)

    def may_rewrite(self, items: Sequence[LogItem]) -> bool:
        """Whether none of these adjacent items is open, shared, or replayed by a takeover."""
        base = -1 if self.base is None else self.base.ledger_id
        return all(
            item.last_offset is not None and not self.is_shared(item) and item.ledger_id != base
            for item in items
        )

    def rewritten(
        self,
        items: Sequence[LogItem],
        ledger_id: int,
        size: int,
        compacted_ms: int = 0,
    ) -> "LogMetadata":
        """The log after one ledger of `size` bytes has replaced the ledgers of adjacent sealed
        items, at the same offsets (rule 27c). `compacted_ms`: the value for the new item.
        """
        assert self.names_sealed(items), "only adjacent sealed ledgers may be replaced (rule 27c)"
        new = LogItem(
            ledger_id,
            items[0].first_offset,
            items[-1].last_offset,
            bytes=size,
            sealed_ms=max(item.sealed_ms for item in items),
            replaced=sum(item.replaced + 1 for item in items),
            compacted_ms=compacted_ms,
        )
        at = self._place_of(items)
        return replace(self, items=(*self.items[:at], new, *self.items[at + len(items) :]))

    def cleaned(self, items: Sequence[LogItem], compacted_ms: int) -> "LogMetadata":
        """The log with these items marked clean, since `compacted_ms` or earlier (rule 27d)."""
        ids = {item.ledger_id for item in items if not item.compacted_ms}
        return replace(
            self,
            items=tuple(
                replace(item, compacted_ms=compacted_ms) if item.ledger_id in ids else item
                for item in self.items
            ),
        )

    def indexed(
        self, ledger_id: int, index: int | None, *, before: int | None = None
    ) -> "LogMetadata | None":
        """The log with `index` as the key index of one of its own sealed ledgers. None
        if the ledger is gone, or has another index than `before` (rule 27e).
        """
        item = self.item_of(ledger_id)
        if item is None or item.last_offset is None or item.index != before:
            return None
        if self.is_shared(item) and index is not None:
            return None
        at = self.items.index(item)
        changed = replace(item, index=index)
        return replace(self, items=(*self.items[:at], changed, *self.items[at + 1 :]))

    def archived(self, through: int) -> "LogMetadata":
        """The log whose records below an offset are archived elsewhere."""
        assert through >= (self.archived_through or 0), "archived_through must not decrease"
        return replace(self, archived_through=through)

    def with_limits(self, limits: Mapping[str, int | str]) -> "LogMetadata":
        """The log with some of LIMITS changed, by name."""
        return replace(self, settings=self.settings.with_limits(limits))

    def protected(self, *, is_on: bool) -> "LogMetadata":
        """The log with its protection from deletion on or off."""
        return replace(self, deletion_protection=is_on)

    def kept_by(self, keeper: Writer, term: str) -> "LogMetadata":
        """The log with a new keeper, which remembers the last use from now on."""
        assert self.expiry is not None
        return replace(self, expiry=Expiry(self.expiry.idle_s, keeper, term))

    def opened(self, owner: str) -> "LogMetadata":
        """The log with a new writer token, so that appends with older tokens are rejected. The
        token is the id of the ledger that the takeover created, because ids are never reused, even
        after rebuilds (rule 22a).
        """
        last = -1 if self.last_item is None else self.last_item.ledger_id
        return replace(self, writer_token=max(self.writer_token + 1, last), opened_by=owner)

    def closed(self) -> "LogMetadata":
        """The log in the state CLOSED. All its ledgers must be CLOSED."""
        end = self.end_offset
        assert end is not None, "all ledgers must be CLOSED before the log"
        return replace(self, state=LogState.CLOSED, next_offset=end)


def bounded(producers: tuple[Producer, ...]) -> tuple[Producer, ...]:
    """The producers as the metadata stores them, with ROW_ANSWERS_MAX latest answers in total."""
    each = max(1, min(ANSWERS_MAX, ROW_ANSWERS_MAX // max(1, len(producers))))
    return tuple(replace(producer, answers=producer.answers[-each:]) for producer in producers)
