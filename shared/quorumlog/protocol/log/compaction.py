"""Decides which ledgers of a log are compacted next, and which of their records stay (rule 27d).

A pass reads the keys of the *dirty* ledgers, which are newer than the last pass, and stores the
newest offset of each key. Then the pass rewrites the clean and the dirty ledgers, the oldest first,
and removes each record whose key has a newer record. After a pass, the covered ledgers are *clean*,
so no key has two records in them.

Tombstones stay for `delete_retention_s` after their ledger became clean, because readers may have
read an older record of the key. After the pass that made the ledger clean, no older record of the
key is left, except in ledgers that no pass may rewrite. So a later pass does not change
`compacted_ms` of a clean ledger. A ledger that loses no record is not written again.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Final

from quorumlog.protocol.batch import BatchHead, Columns
from quorumlog.protocol.log.merge import MERGE_BYTES_MAX, MERGED_MIN, adjacent, cut
from quorumlog.protocol.log.row import LogItem, LogMetadata, LogSettings
from quorumlog.protocol.metadata import REPLACED_MAX

KEYS_MAX: Final = 500_000
"""Maximum keys that a pass keeps in memory, about 90 MB. Chosen by judgement. If the dirty ledgers
have more keys, the pass covers only the first ledgers. If one ledger has more keys, it is rewritten
several times, each time for a part of its keys."""

GROUP_BYTES_MAX: Final = 256 << 20
"""Maximum bytes of old ledgers that one new ledger replaces: the default of `roll_bytes`."""

DIRTY_BYTES_MIN: Final = 1 << 20
"""Minimum dirty bytes for a pass, unless it is the log's first pass or has MERGED_MIN dirty
ledgers. Chosen by judgement: a ledger can replace only REPLACED_MAX ledgers, and each pass adds to
their number."""

_DECIDE: Final = ("cleanup_policy", "min_compaction_lag_s", "delete_retention_s")
"""The settings that determine which records a pass may remove. A change of them ends the pass."""

_DIGEST_BYTES: Final = 16


def digest(key: bytes) -> bytes:
    """At most 16 bytes that represent a key: a short key itself, or the digest of a longer key."""
    if len(key) < _DIGEST_BYTES:
        return key
    return blake2b(key, digest_size=_DIGEST_BYTES).digest()


class NewestOffsets:
    """The newest offset of each key in the dirty ledgers of a pass. If `parts` > 1, only the keys
    of one part are stored.
    """

    def __init__(self, part: int = 0, parts: int = 1, keys_max: int | None = None) -> None:
        """Start without keys. `keys_max`: by default KEYS_MAX."""
        self.offsets: dict[bytes, int] = {}
        self._part, self._parts, self._keys_max = part, parts, keys_max or KEYS_MAX

    @property
    def is_full(self) -> bool:
        """Whether there are more than `keys_max` keys. The stored offsets are correct anyway."""
        return len(self.offsets) > self._keys_max

    def learn(self, first: int, columns: Columns) -> None:
        """Store the keys of a batch that begins at the offset `first`. Batches come in order."""
        named = zip(columns.keys, columns.indexes, strict=True)
        found = {digest(key): first + index for key, index in named if key is not None}
        if self._parts > 1:
            found = {
                key: at for key, at in found.items() if hash_of(key) % self._parts == self._part
            }
        self.offsets.update(found)


def hash_of(name: bytes) -> int:
    """The hash, equal in all processes, that assigns a key's digest to a part of a pass."""
    return int.from_bytes(blake2b(name, digest_size=4).digest())


@dataclass(frozen=True, slots=True)
class Compaction:
    """Decides which records a rewrite removes. A merge removes only expired records (rule 27f)."""

    newest: Mapping[bytes, int] = field(default_factory=dict, repr=False)
    """The newest offset of each key in the dirty ledgers, by the key's `digest`."""
    expired: Collection[int] = ()
    """The ids of ledgers whose tombstones have been kept long enough."""
    makes_clean: bool = False
    """Whether dirty ledgers become clean, as in a compaction with the last part of the keys."""
    now_ms: int = 0
    """The database's time; 0 if it is in doubt."""
    settings: LogSettings | None = None
    """The log's settings when the pass began; None for a merge."""
    sources: Collection[int] = ()
    """Later ledgers with newer records, which the log must still name at the swap (clause 1)."""

    def may_remove(self, head: BatchHead) -> bool:
        """Whether some of a batch's records may be removed, so that the batch must be decoded."""
        return bool(self.newest or self.expired) or head.has_ttls

    def is_wanted(self, log: LogMetadata) -> bool:
        """Whether `log`, the current metadata, still allows this compaction to remove records."""
        if self.settings is None:
            return True
        now = log.settings.limits
        is_same = all(now[name] == self.settings.limits[name] for name in _DECIDE)
        return is_same and all(log.item_of(source) is not None for source in self.sources)

    def survivors(self, item: LogItem, first: int, columns: Columns) -> Sequence[int] | None:
        """The numbers of a batch's records that stay; None if all records stay. `item` is the
        batch's ledger, `first` the batch's first offset.
        """
        kept = self._newest(item, first, columns)
        if columns.head.has_ttls:
            time_ms = item.published_ms or columns.head.append_time_ms
            lasting = set(columns.lasting(time_ms, self.now_ms))
            kept = [number for number in kept if number in lasting]
        return None if len(kept) == columns.count else kept

    def _newest(self, item: LogItem, first: int, columns: Columns) -> Sequence[int]:
        if not columns.key_sizes or not (self.newest or self.expired):
            return range(columns.count)
        newest, gone = self.newest, frozenset[int]()
        if columns.tombstones and item.ledger_id in self.expired:
            gone = columns.tombstones
        return [
            number
            for number, (key, index) in enumerate(zip(columns.keys, columns.indexes, strict=True))
            if key is None or (newest.get(digest(key), 0) <= first + index and number not in gone)
        ]

    def compacted(self, items: Sequence[LogItem], now_ms: int) -> int:
        """The `compacted_ms` of the ledger that replaces `items` at the time `now_ms`."""
        known = [item.compacted_ms for item in items]
        if 0 in known:
            return now_ms if self.makes_clean else 0
        return max(known)


@dataclass(frozen=True, slots=True)
class Pass:
    """The ledgers of one pass, in order. `is_whole`: whether no earlier ledger is skipped."""

    row: LogMetadata
    now_ms: int
    clean: tuple[LogItem, ...]
    dirty: tuple[LogItem, ...]
    is_whole: bool

    @property
    def is_due(self) -> bool:
        """Whether the share of dirty bytes has reached `max_dirty_percent`, and there are enough
        dirty ledgers or bytes. Otherwise passes would often rewrite clean ledgers for few records.
        """
        is_enough = (
            not self.clean
            or sum(item.bytes for item in self.dirty) >= DIRTY_BYTES_MIN
            or sum(item.replaced + 1 for item in self.dirty) >= MERGED_MIN
        )
        return is_enough and 100 * self.dirty_share >= self.row.settings.max_dirty_percent

    @property
    def dirty_share(self) -> float:
        """The share of the pass's bytes that dirty ledgers have, from 0 to 1."""
        dirty = sum(item.bytes for item in self.dirty)
        clean = sum(item.bytes for item in self.clean)
        return dirty / (dirty + clean) if clean else 1.0

    @property
    def expired(self) -> frozenset[int]:
        """The ids of the clean ledgers whose tombstones have been kept long enough."""
        latest = self.now_ms - 1000 * self.row.settings.delete_retention_s
        found = (item.ledger_id for item in self.clean if item.compacted_ms <= latest)
        return frozenset(found) if self.is_whole else frozenset()

    @property
    def groups(self) -> Iterator[tuple[LogItem, ...]]:
        """Groups of ledgers, the oldest first. Each group is rewritten to one ledger. Each clean
        ledger is its own group, because most clean ledgers lose no record and stay.
        """
        for item in self.clean:
            yield (item,)
        for run in adjacent(self.dirty):
            yield from cut(self.row, run, GROUP_BYTES_MAX)


def next_pass(
    row: LogMetadata, now_ms: int, spoiled: Collection[int] = (), end: int | None = None
) -> Pass | None:
    """The next pass over a log; None if no ledger is ready. `now_ms`: the database's time.
    `spoiled`: ledgers that can never be rewritten. `end`: if given, the pass covers exactly the
    ledgers below this offset, which an earlier pass covered.
    """
    settings = row.settings
    if not settings.compacts:
        return None
    latest = now_ms - 1000 * settings.min_compaction_lag_s
    clean, dirty, is_whole = list[LogItem](), list[LogItem](), True
    for item in row.items:
        last = item.last_offset
        if last is None or item is row.base or item.ledger_id in spoiled:
            break  # a later pass may cover this ledger, so no later ledger may become clean
        if end is not None and last >= end:
            break
        is_fixed = item.replaced >= REPLACED_MAX or item.bytes > MERGE_BYTES_MAX
        if is_fixed or row.is_shared(item):
            is_whole = False  # no pass can ever cover this ledger
        elif not dirty and item.compacted_ms:
            clean.append(item)
        elif item.sealed_ms <= latest or end is not None:
            dirty.append(item)
        else:
            break
    found = Pass(row, now_ms, tuple(clean), tuple(dirty), is_whole)
    return found if dirty else None


class PassState:
    """The state of a pass in progress, which decides the next ledger to read or rewrite.

    A pass reads the keys of the dirty ledgers one after the other, then rewrites the groups. If
    there are too many keys, the pass covers only the first ledgers. If the first ledger alone has
    too many keys, the pass reads and rewrites several times, each time for one part of the keys.
    """

    def __init__(self, due: Pass) -> None:
        """Begin with the first dirty ledger."""
        self.name = due.row.name
        self.end = _end(due.dirty)
        """The offset below which the pass covers ledgers."""
        self.is_over = False
        self._due = due
        self._part, self._parts = 0, 1
        self._begin()

    def _begin(self) -> None:
        """Begin to read the next part of the keys."""
        self._newest = NewestOffsets(self._part, self._parts)
        self._learned: list[LogItem] = []
        self._groups: deque[tuple[int, ...]] | None = None
        self._sources = {item.ledger_id for item in self._due.dirty}

    @property
    def to_learn(self) -> LogItem | None:
        """The dirty ledger whose keys are read next; None once the groups are rewritten."""
        return None if self._groups is not None else self._due.dirty[len(self._learned)]

    def learn(self, first: int, columns: Columns) -> bool:
        """Store the keys of the next batch of `to_learn`. `first`: the batch's first offset.
        Returns whether there is room for more keys.
        """
        self._newest.learn(first, columns)
        return not self._newest.is_full

    def learned(self, *, is_readable: bool = True) -> None:
        """Continue after the ledger `to_learn` was read, or had too many keys. `is_readable`: False
        if the read failed. The stored offsets are correct in any case.
        """
        item = self.to_learn
        assert item is not None
        is_first = not self._learned
        if self._newest.is_full and (self._part or is_first):
            self._part, self._parts = 0, 2 * self._parts
            self._begin()
        elif not is_readable and (self._part or is_first):
            self.is_over = True
        elif self._newest.is_full or not is_readable:
            kept = self._due.dirty[: len(self._learned)]
            self._due, self.end = replace(self._due, dirty=kept), _end(kept)
            self._sources = {each.ledger_id for each in (*kept, item)}
            self._rewrite()
        else:
            self._learned.append(item)
            if len(self._learned) == len(self._due.dirty):
                self._rewrite()

    def _rewrite(self) -> None:
        groups = self._due.groups
        self._groups = deque(tuple(item.ledger_id for item in group) for group in groups)

    def group(self, row: LogMetadata) -> tuple[tuple[LogItem, ...], Compaction] | None:
        """The next ledgers to rewrite, from the log's current metadata `row`, and the compaction
        that decides which records stay. None if the log has changed, which ends the pass.
        """
        assert self._groups is not None
        due, ids = self._due, self._groups[0]
        self._sources.difference_update(ids)
        compaction = Compaction(
            self._newest.offsets,
            due.expired,
            makes_clean=self._part + 1 == self._parts,
            now_ms=due.now_ms,
            settings=due.row.settings,
            sources=frozenset(self._sources),
        )
        items = tuple(item for item in row.items if item.ledger_id in ids)
        is_same = row.created_at == due.row.created_at and len(items) == len(ids)
        self.is_over = not (is_same and row.names_sealed(items) and compaction.is_wanted(row))
        return None if self.is_over else (items, compaction)

    def rewritten(self, row: LogMetadata | None) -> None:
        """Record that a group was rewritten. `row`: the log's new metadata; None (the rewrite
        failed) ends the pass, because ledgers become clean in order (clause 3).
        """
        assert self._groups is not None
        self._groups.popleft()
        if row is None:
            self.is_over = True
        elif not self._groups:
            self._part += 1
            again = next_pass(row, self._due.now_ms, end=self.end)
            self.is_over = again is None or self._part == self._parts
            if again is not None:
                self._due = again
                self._begin()


def _end(items: Sequence[LogItem]) -> int:
    return (items[-1].last_offset or 0) + 1
