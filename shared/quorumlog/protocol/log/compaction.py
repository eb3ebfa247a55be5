"""Which ledgers of a log are compacted next, and which of their records stay (rule 27d).

A pass reads the keys of the *dirty* ledgers, those behind the last pass, and notes the newest
offset of each key. Then it rewrites all earlier and all dirty ledgers, the oldest first, without the
records that have a newer one. After a pass, no key has two records in the ledgers that it wrote,
which are *clean*.

Tombstones stay for `delete_retention_s` after the pass that made their ledger clean, for readers
that have read an older record of the key. No older record of the key is left then, unless the log
has earlier ledgers that no pass may rewrite. So `compacted_ms` of a clean ledger never changes with
a later pass, and ledgers whose tombstones must stay are not rewritten together with others.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from typing import Final

from quorumlog.protocol.batch import BatchHead, Columns
from quorumlog.protocol.log.merge import adjacent, cut
from quorumlog.protocol.log.row import LogItem, LogMetadata
from quorumlog.protocol.metadata import REPLACED_MAX

KEYS_MAX: Final = 500_000
"""The most keys that a pass remembers, about 90 MB: chosen by judgement. A pass over ledgers with
more keys ends with the ledgers whose keys fit. If one ledger has more, several passes share them.
"""

GROUP_BYTES_MAX: Final = 256 << 20
"""The most bytes of old ledgers that become one ledger: the default of `roll_bytes`."""

_DIGEST_BYTES: Final = 16


def digest(key: bytes) -> bytes:
    """A short name of a key: the key itself if it is shorter than 16 bytes, which a digest has."""
    if len(key) < _DIGEST_BYTES:
        return key
    return blake2b(key, digest_size=_DIGEST_BYTES).digest()


class NewestOffsets:
    """The newest offset of each key in the dirty ledgers of a pass. With `parts` > 1, it has one of
    as many parts of the keys.
    """

    def __init__(self, part: int = 0, parts: int = 1, keys_max: int | None = None) -> None:
        """Has no key yet. `keys_max`: by default KEYS_MAX."""
        self.offsets: dict[bytes, int] = {}
        self._part, self._parts, self._keys_max = part, parts, keys_max or KEYS_MAX

    @property
    def is_full(self) -> bool:
        """Whether there are more keys than fit. What was noted before is right nevertheless."""
        return len(self.offsets) > self._keys_max

    def learn(self, first: int, columns: Columns) -> None:
        """Note the keys of a batch that begins at the offset `first`, after all earlier ones."""
        named = zip(columns.keys, columns.indexes, strict=True)
        found = {digest(key): first + index for key, index in named if key is not None}
        if self._parts > 1:
            found = {
                key: at for key, at in found.items() if hash_of(key) % self._parts == self._part
            }
        self.offsets.update(found)


def hash_of(name: bytes) -> int:
    """A number by which keys are shared among the parts of a pass, equal in all processes."""
    return int.from_bytes(blake2b(name, digest_size=4).digest())


@dataclass(frozen=True, slots=True)
class Compaction:
    """What a rewrite removes from ledgers: a merge only expired records (rule 27f)."""

    newest: Mapping[bytes, int] = field(default_factory=dict, repr=False)
    """By `digest`, the newest offset of a key in the dirty ledgers."""
    expired: Collection[int] = ()
    """The ledgers whose tombstones have been kept long enough."""
    compacted_ms: int = 0
    """The time of the pass, which makes dirty ledgers clean; 0 if more passes must follow, or for a
    merge."""
    now_ms: int = 0
    """The database's time; 0 if it is in doubt."""

    def may_remove(self, head: BatchHead) -> bool:
        """Whether records of a batch may go, so that it must be decoded."""
        return bool(self.newest or self.expired) or head.has_ttls

    def survivors(self, item: LogItem, first: int, columns: Columns) -> Sequence[int] | None:
        """The records of a batch of a ledger that stay, by their numbers; None if all stay. `first`
        is the batch's first offset.
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

    def compacted(self, items: Sequence[LogItem]) -> int:
        """`compacted_ms` of the ledger that replaces these."""
        known = [item.compacted_ms for item in items]
        return self.compacted_ms if 0 in known else max(known)


@dataclass(frozen=True, slots=True)
class Pass:
    """The ledgers of one pass, in order. `is_whole`: no earlier ledger of the log stays as it is."""

    row: LogMetadata
    now_ms: int
    clean: tuple[LogItem, ...]
    dirty: tuple[LogItem, ...]
    is_whole: bool

    @property
    def is_due(self) -> bool:
        """Whether the share of dirty bytes has reached `max_dirty_percent`."""
        dirty = sum(item.bytes for item in self.dirty)
        whole = dirty + sum(item.bytes for item in self.clean)
        return bool(self.dirty) and 100 * dirty >= self.row.settings.max_dirty_percent * whole

    @property
    def expired(self) -> frozenset[int]:
        """The clean ledgers whose tombstones have been kept long enough."""
        latest = self.now_ms - 1000 * self.row.settings.delete_retention_s
        found = (item.ledger_id for item in self.clean if item.compacted_ms <= latest)
        return frozenset(found) if self.is_whole else frozenset()

    @property
    def groups(self) -> Iterator[tuple[LogItem, ...]]:
        """The ledgers to rewrite, each group to one ledger, the oldest group first."""
        dirty, expired = {item.ledger_id for item in self.dirty}, self.expired

        def kind(item: LogItem) -> int:
            if item.ledger_id in dirty:
                return -1
            return -2 if item.ledger_id in expired else item.ledger_id

        for _, alike in groupby((*self.clean, *self.dirty), kind):
            for run in adjacent(tuple(alike)):
                yield from cut(self.row, run, GROUP_BYTES_MAX)


def next_pass(
    row: LogMetadata, now_ms: int, spoiled: Collection[int] = (), end: int | None = None
) -> Pass | None:
    """The next pass over a log, or None if none may be. `now_ms`: the database's time. `spoiled`:
    ledgers for which no rewrite succeeds. `end`: the pass takes the ledgers below this offset,
    which an earlier pass took.
    """
    settings = row.settings
    if not settings.compacts:
        return None
    latest = now_ms - 1000 * settings.min_compaction_lag_s
    clean, dirty, is_whole = list[LogItem](), list[LogItem](), True
    for item in row.items:
        last = item.last_offset
        if last is None or item is row.base or item.ledger_id in spoiled:
            break  # a later pass may take it, so no ledger behind it may become clean
        if end is not None and last >= end:
            break
        if row.is_shared(item) or item.replaced >= REPLACED_MAX:
            is_whole = False  # no pass will ever take it
        elif not dirty and item.compacted_ms:
            clean.append(item)
        elif item.sealed_ms <= latest or end is not None:
            dirty.append(item)
        else:
            break
    found = Pass(row, now_ms, tuple(clean), tuple(dirty), is_whole)
    return found if dirty else None
