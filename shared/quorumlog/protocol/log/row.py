"""A named log: an ordered list of ledgers in one row, and the only ways in which it may change.

As with ledgers, values are immutable and a transform keeps the version that it was made from.

Invariants (checked by `check`):
  - I33: offsets of the items grow; known borders meet (`last_offset` + 1 is the next `first_offset`);
  - only the last item may be of an unknown end; an item whose `first_offset` is not known yet was
    added ahead by a roll, and no write is served from it before it is (rule 23);
  - `first_offset`, `archived_through` and `forgotten_end` of the log never go back, `writer_token`
    never goes down;
  - what a fork shares with the log that it came of is in sealed ledgers before its own, and ends where the fork
    begins (rule 27a).
Source: both protocol documents, "Ledgers to logs"; rules 22 to 28.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
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
"""Producers that a log remembers; the one that was silent longest goes first (rule 26)."""

ANSWERS_MAX = 64
"""Answers that are kept for each producer, so that a repeat gets the first one again: more than a
client has in flight."""

LOG_LEDGERS_MAX = 10_000
"""Ledgers in one log: retention or `truncate` must drop some before more are added."""

ROW_ANSWERS_MAX = 4096
"""Answers in a row's producer table all in all, about 400 KiB of JSON; each producer keeps at
least one, which is its place in its sequence."""


class LogState(StrEnum):
    """CLOSED is final: nothing is appended any more."""

    OPEN = "OPEN"
    CLOSED = "CLOSED"


class Answer(NamedTuple):
    """The answer to one request of a producer, and the digest of its records. A tuple, since it is a plain list in JSON:
    there may be thousands.
    """

    seq: Number
    first_offset: Number
    last_offset: IdOrNone
    """One below the first where a request without records ended the log."""
    ledger_id: LedgerId
    entry_id: Number
    content: Text


@dataclass(frozen=True, slots=True)
class Producer:
    """One producer as a log knows it. `answers` are its latest, ascending by seq."""

    id: Text
    epoch: Number
    seen_ms: Annotated[int, Bounds(ge=-(2**63), le=ID_MAX)]
    answers: tuple[Answer, ...]

    @property
    def next_seq(self) -> int:
        """The seq that this producer's next request in this epoch must carry."""
        return self.answers[-1].seq + 1 if self.answers else 0


@dataclass(frozen=True, slots=True)
class LogItem:
    """One ledger of a log. `producers` is the producer table as of its start (rule 26); only the
    item from which a takeover replays keeps it.
    """

    ledger_id: LedgerId
    first_offset: Number | None
    last_offset: IdOrNone | None = None
    """None while the ledger may grow; first_offset - 1 of an empty closed one."""
    producers: Annotated[tuple[Producer, ...], Bounds(max_length=PRODUCERS_MAX)] = ()
    bytes: Number = 0
    sealed_ms: Number = 0
    """When it was closed: retention by age begins here. 0 while open."""
    published_ms: Number = 0
    """When a transaction put it onto the log: the append time of all its records. 0: its batches tell theirs."""

    @property
    def is_empty(self) -> bool:
        """Whether it is closed without records."""
        first, last = self.first_offset, self.last_offset
        return first is not None and last is not None and last < first


LIMITS: Final = (
    "roll_bytes", "roll_entries", "roll_seconds", "retention_bytes", "retention_seconds",
)  # fmt: skip
"""The settings of a log that may be changed."""


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
    batch_compression: Annotated[str, Bounds(pattern="^(none|zstd)$")] = "none"
    """How the columns of record batches are stored: `none` or `zstd` (`packed.py`)."""
    custom: Pairs = ()

    @property
    def limits(self) -> dict[str, int]:
        """Those of LIMITS, by name."""
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

    def with_limits(self, limits: Mapping[str, int]) -> "LogSettings":
        """The settings with some of LIMITS changed, by name."""
        assert set(limits) <= set(LIMITS)
        values: dict[str, Any] = dict(limits)
        return replace(self, **values)


@dataclass(frozen=True, slots=True)
class Expiry:
    """A log that is deleted once nobody has used it for so many seconds (ADR 40)."""

    idle_s: Number
    keeper: Writer
    """The process that remembers the last use: no other one may say that the log has expired."""
    term: Text
    """Of this appointment of the keeper, and of no other."""


@dataclass(frozen=True, slots=True)
class LogMetadata(Value):
    """One log's row."""

    STORE_FIELDS: ClassVar = frozenset(("name", "version", "attempt", "created_at", "read_ms"))
    """Fields that the store sets, whatever a change of the row says."""

    name: LogName
    settings: LogSettings
    items: Annotated[tuple[LogItem, ...], Bounds(max_length=LOG_LEDGERS_MAX)] = ()
    version: Version = 1
    state: LogState = LogState.OPEN
    first_offset: Number = 0
    next_offset: Number | None = None
    """Where the next record goes while no ledger is open (no items yet, or closed)."""
    writer_token: Number = 0
    """0: any gateway may own it. Else only appends with this token are taken (`open`)."""
    opened_by: Annotated[Text, Bounds(max_length=1024)] | None = None
    forgotten_end: Number = 0
    """The end of what the log has forgotten (rule 26a): every producer that is not known any more
    was seen below this offset only. 0: nobody was forgotten."""
    appended_ms: Number = 0
    """The latest append time of a record of the log, but for those of its last ledger: append times never go
    back (rule 26b)."""
    stream_seq: Annotated[Text, Bounds(max_length=STREAM_SEQ_BYTES_MAX)] | None = None
    """The last stream sequence, but for those of requests to its last ledger (rule 25a); None: nobody has sent one."""
    created_at: Text = ""
    attempt: AttemptOrNone = ""
    """The token of the change that made this version: versions of two lines of history may be equal (rule 18a).
    Empty where the store keeps none."""
    archived_through: Number | None = None
    """All records below this offset are kept elsewhere too; None: nobody archives the log."""
    deletion_protection: bool = False
    """Nobody may delete the log, nor truncate or overwrite it; its retention goes on."""
    expiry: Expiry | None = None
    """None: it exists until it is deleted."""
    forked_at: Number | None = None
    """Of a fork: the offset of its first own record. Items that begin below are shared: their ledgers were made for
    other logs, and the last one may go on behind this offset there. None: the log is no fork."""
    read_ms: Number = field(default=0, compare=False)
    """The store's clock when the row was read, in milliseconds since 1970; 0 in rows that were not read from the store."""

    def check(self) -> None:
        """Assert the invariants of one row."""
        for before, item in zip(self.items, self.items[1:], strict=False):
            if item.first_offset is not None:
                assert before.last_offset is not None, "I33: an end is known before what follows"
                assert before.last_offset + 1 == item.first_offset, "I33: borders meet"
        assert all(item.first_offset is not None for item in self.items[:-1]), "rule 23"
        ids = [item.ledger_id for item in self.items]
        assert len(set(ids)) == len(ids), "a ledger is named once"
        for item in self.shared:
            assert item.last_offset is not None, "rule 27a: what is shared is sealed"
            assert item.last_offset < (self.forked_at or 0), (
                "rule 27a: what is shared ends where the fork begins"
            )

    def check_created(self, created_at: str | None) -> None:
        """Raise LogReplaced unless this is the log that was created then. None: any log of this name (rule 27b)."""
        if created_at not in (None, self.created_at):
            raise LogReplaced(
                f"the log {self.name} of {created_at} was deleted, and created again at {self.created_at}",
                log=self.name,
                created_at=self.created_at,
            )

    def is_shared(self, item: LogItem) -> bool:
        """Whether an item's ledger was made for another log, of which this one is a fork."""
        return (
            self.forked_at is not None
            and item.first_offset is not None
            and item.first_offset < self.forked_at
        )

    @property
    def shared(self) -> tuple[LogItem, ...]:
        """The items whose ledgers were made for other logs: the first ones."""
        return tuple(item for item in self.items if self.is_shared(item))

    @property
    def own(self) -> tuple[LogItem, ...]:
        """The items whose ledgers were made for this log."""
        return tuple(item for item in self.items if not self.is_shared(item))

    @property
    def last_item(self) -> LogItem | None:
        """The ledger that is written, whose writer owns the log (rule 22)."""
        return self.items[-1] if self.items else None

    @property
    def end_offset(self) -> int | None:
        """Where the next record goes, or None while a ledger is open that decides it."""
        last = self.last_item
        if last is None:
            return self.first_offset if self.next_offset is None else self.next_offset
        return None if last.last_offset is None else last.last_offset + 1

    @property
    def base(self) -> LogItem | None:
        """The item from which a takeover rebuilds the producers: the last of its own with a known start. What others
        appended to a shared ledger, and how their log ended, is nothing that a fork goes on from (rule 27a).
        """
        known = (item for item in reversed(self.items) if item.first_offset is not None)
        return next((item for item in known if not self.is_shared(item)), None)

    @property
    def unsealed(self) -> tuple[LogItem, ...]:
        """The items that a takeover must close: those whose end is not known."""
        return tuple(item for item in self.items if item.last_offset is None)

    @property
    def known_end(self) -> int:
        """An upper bound of the offsets that the row tells of: no record that it counts is at or above."""
        ends = [self.first_offset, self.next_offset or 0]
        for item in self.items:
            ends.append(item.first_offset or 0)
            ends.append(0 if item.last_offset is None else item.last_offset + 1)
        return max(ends)

    def item_at(self, offset: int) -> LogItem | None:
        """The item that holds an offset or would, or None where that is not known."""
        for item in reversed(self.items):
            if item.first_offset is not None and item.first_offset <= offset:
                is_in = item.last_offset is None or offset <= item.last_offset
                return item if is_in else None
        return None

    def item_of(self, ledger_id: int) -> LogItem | None:
        """The item of a ledger, or None where the log does not name it."""
        return next((item for item in self.items if item.ledger_id == ledger_id), None)

    def lineages(self, ledger_ids: Collection[int]) -> dict[int, Lineage]:
        """What the rows of ledgers tell that get their places with this row (rule 18f)."""
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
                )
            if item.first_offset is not None and not item.is_empty:
                before.append((item.ledger_id, item.first_offset))
        return found

    def with_ledger(self, ledger_id: int) -> "LogMetadata":
        """The log with a new last ledger, whose start is not known before the old one's end."""
        assert self.state is LogState.OPEN
        assert all(item.first_offset is not None for item in self.items), "rule 23"
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
        """Fill in what is known now that ledgers are CLOSED: `ends` gives the records and the
        bytes of each; the last item's start and its producer table follow from them.

        `forgotten_end`: of the table that `producers` is of; neither that nor `appended_ms` goes
        back.
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
        """The log with ledgers that were written and CLOSED elsewhere: (ledger, records, bytes)
        each, those without records left out. All ends before them are known (rule 28).

        `published_ms`: the append time of their records. Their batches have the times at which tasks wrote them,
        which may be before those of records that the log has already.
        `is_new_start`: what was there before is dropped, and offsets go on.
        """
        at = self.end_offset
        assert self.state is LogState.OPEN
        assert at is not None, "rule 28: all earlier ledgers are CLOSED"
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
        """Whether all records below an offset are in ledgers whose ends are known: a fork may begin there."""
        end = self.end_offset
        if end is not None:
            return offset <= end
        last = self.base
        return last is not None and last.first_offset is not None and offset <= last.first_offset

    def forked(self, wanted: "LogMetadata", at: int) -> "LogMetadata":
        """A new log, empty as it is wanted, that begins with this one's records below `at`, as they are, and goes on by
        itself (rule 27a): it takes over no producers, and no stream sequence.
        """
        assert self.first_offset <= at, "what was dropped is in no fork"
        assert self.is_sealed_below(at), "what is shared is sealed"
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
        """The log without the closed ledgers that end below `before`; the last item stays."""
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

    def archived(self, through: int) -> "LogMetadata":
        """The log, whose records below an offset are kept elsewhere now."""
        assert through >= (self.archived_through or 0), "what is archived stays archived"
        return replace(self, archived_through=through)

    def with_limits(self, limits: Mapping[str, int]) -> "LogMetadata":
        """The log with some of LIMITS changed, by name."""
        return replace(self, settings=self.settings.with_limits(limits))

    def protected(self, *, is_on: bool) -> "LogMetadata":
        """The log with its protection from deletion on or off."""
        return replace(self, deletion_protection=is_on)

    def kept_by(self, keeper: Writer, term: str) -> "LogMetadata":
        """The log, whose last use another process remembers from now on."""
        assert self.expiry is not None
        return replace(self, expiry=Expiry(self.expiry.idle_s, keeper, term))

    def opened(self, owner: str) -> "LogMetadata":
        """The log with a new writer token: appends with an older one are fenced off. The token is the id of the ledger that
        the takeover has created for it: an id is given once, over rebuilds too (rule 22a).
        """
        last = -1 if self.last_item is None else self.last_item.ledger_id
        return replace(self, writer_token=max(self.writer_token + 1, last), opened_by=owner)

    def closed(self) -> "LogMetadata":
        """The log after its end; all its ledgers are CLOSED by then."""
        end = self.end_offset
        assert end is not None, "all ledgers are CLOSED before the log is"
        return replace(self, state=LogState.CLOSED, next_offset=end)


def bounded(producers: tuple[Producer, ...]) -> tuple[Producer, ...]:
    """The producers as a row keeps them: the latest answers of each, ROW_ANSWERS_MAX in all."""
    each = max(1, min(ANSWERS_MAX, ROW_ANSWERS_MAX // max(1, len(producers))))
    return tuple(replace(producer, answers=producer.answers[-each:]) for producer in producers)
