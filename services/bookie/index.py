"""The index on disk: parts, states and metadata copies of ledgers. The log can rebuild the index.

Why RocksDB: docs/adr/0004-index-in-rocksdb.md. Only checkpoints write to the index. A checkpoint is
one flush that includes the covered log position, so that data and position cannot disagree. Lookups
run on the event loop's thread and take some microseconds.

RocksDB's write-ahead log is off: a checkpoint is one file and one line of RocksDB's manifest, so
after any torn write the index is at an earlier checkpoint. (With a write-ahead log, a torn manifest
could miss a file while later writes survive in the log, and the bookie would deny entries.)
"""

import contextlib
import errno
import struct
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    Options,
    Rdict,
    WriteBatch,
    WriteOptions,
)

from quorumlog.protocol.ids import NO_ENTRY, NO_LEDGER
from quorumlog.protocol.row_copy import RowCopy, RowName
from services.bookie.parts import Part, decode_part, stored_at
from services.bookie.writer import Position, has_room

_PART_KEY: Final = struct.Struct(">cQq")
_LEDGER_KEY: Final = struct.Struct(">cQ")
_ROW: Final = struct.Struct(">?32s??QqqQQQI")
_COPY_KEY: Final = struct.Struct(">cQQ16s")
_POSITION: Final = struct.Struct(">QQQ")

FORMAT: Final = b"3"
"""The index's format. An index of another format is rebuilt from the log."""
_FORMAT_KEY: Final = b"Aformat"
_CHECKPOINT_KEY: Final = b"Acheckpoint"
_FRESH_KEY: Final = b"Afresh"

PARTS_AT_ONCE: Final = 100
PAUSE_S: Final = 0.0003
"""Pause of a scanning thread after PARTS_AT_ONCE parts. Without the pause, the event loop waits 5
ms for each of its turns (measured)."""

REOPEN_BYTES: Final = 2 * 1024 * 1024
"""Free space needed to open RocksDB, which writes its options, a manifest and a log of its own."""

WRITE_BUFFER_BYTES: Final = 16 * 1024 * 1024
"""Size of a write buffer. RocksDB uses at most two write buffers and the block cache."""

BLOCK_CACHE_BYTES: Final = 8 * 1024 * 1024
"""Less than RocksDB's default of 32 MiB, which even scans of a small index fill, because blocks of deleted files stay
cached until newer blocks need their space."""


class IndexRow(NamedTuple):
    """A ledger's data in the index, except its parts."""

    ledger_key: bytes | None = None
    is_fenced: bool = False
    is_limbo: bool = False
    limbo_counter: int = 0
    last_add_confirmed: int = NO_ENTRY
    highest: int = NO_ENTRY
    sparse_span: int = 0
    """Width of the widest part with holes, which is how far back a lookup searches."""
    entry_count: int = 0
    stored_bytes: int = 0
    copy_count: int = 0
    """Number of copies of the ledger's metadata (rule 18b)."""

    def encode(self) -> bytes:
        """The index row as bytes."""
        ledger_key, *rest = self
        return _ROW.pack(ledger_key is not None, ledger_key or b"", *rest)


def decode_row(value: bytes) -> IndexRow:
    """The row that `IndexRow.encode` returned as `value`."""
    has_key, ledger_key, *rest = _ROW.unpack(value)
    return IndexRow(ledger_key if has_key else None, *rest)


@dataclass(slots=True)
class IndexChange:
    """One ledger's changes in a checkpoint."""

    ledger_id: int
    row: IndexRow | None
    """None if the ledger is deleted, so that only its id is kept (rule 16a)."""
    parts: list[Part]
    hidden: list[int]
    """First ids of parts to remove; `parts` may contain a new part with the same first id."""
    copies: list[RowCopy] = field(default_factory=list)
    dropped_copies: list[RowName] = field(default_factory=list)


class Index:
    """Stores parts by (ledger, first), index rows by ledger, deleted ids, and the checkpoint.

    Deleted ledgers have their own key prefix, so that a scan of the ledgers skips millions of
    deleted ids.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the index. Raises Exception for a damaged index or another format."""
        self.is_suspect = False
        """Whether a read failed, so that the index must be rebuilt."""
        self.is_failed = False
        """Whether the last checkpoint failed, so that the next one must reopen RocksDB first."""
        self.path = path
        path.mkdir(exist_ok=True)
        path.chmod(0o750)  # by default RocksDB lets everyone read the files, with ledgers' keys
        self._db = self._open_database()
        found = self._db.get(_FORMAT_KEY)
        if found is None:
            self._db[_FORMAT_KEY] = FORMAT
        elif found != FORMAT:
            self.close()
            raise ValueError(f"the index format must be {FORMAT!r} (got {found!r})")

    def _open_database(self) -> Rdict:
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_write_buffer_size(WRITE_BUFFER_BYTES)
        options.set_max_write_buffer_number(2)
        options.set_max_open_files(64)
        options.set_keep_log_file_num(2)
        table = BlockBasedOptions()
        table.set_block_cache(Cache(BLOCK_CACHE_BYTES))
        options.set_block_based_table_factory(table)
        return Rdict(str(self.path), options, access_type=AccessType.read_write())

    def checkpoint(self) -> Position | None:
        """The log position that the index covers; None if the index is empty."""
        value = self._db.get(_CHECKPOINT_KEY)
        return None if value is None else Position(*_POSITION.unpack(value))

    def fresh(self) -> bytes:
        """The fresh copies of metadata at the checkpoint, as `FreshCopies.encode` returned them."""
        return self._db.get(_FRESH_KEY) or b""

    def write(
        self,
        position: Position | None,
        changes: Iterable[IndexChange],
        deleted: Iterable[int] = (),
        fresh: bytes = b"",
    ) -> None:
        """Write one checkpoint atomically and durably. May run in any thread.

        If `position` is None, the covered log position does not change. `deleted`: ids of deleted
        ledgers without any other data here. `fresh`: the new value of `Index.fresh`.
        """
        batch = WriteBatch(raw_mode=True)
        count = 0
        for change in changes:
            ledger_id = change.ledger_id
            for first in change.hidden:
                batch.delete(_PART_KEY.pack(b"P", ledger_id, first))
            if change.row is None:
                batch.delete(_LEDGER_KEY.pack(b"L", ledger_id))
                batch.put(_LEDGER_KEY.pack(b"D", ledger_id), b"")
            else:
                batch.put(_LEDGER_KEY.pack(b"L", ledger_id), change.row.encode())
            for name in change.dropped_copies:
                batch.delete(_copy_key(ledger_id, name))
            for copy in change.copies:
                batch.put(_copy_key(ledger_id, copy.name), copy.body)
            for part in change.parts:
                batch.put(_PART_KEY.pack(b"P", ledger_id, part.first), part.encode())
                count += 1
                if count % PARTS_AT_ONCE == 0:
                    time.sleep(PAUSE_S)
        for ledger_id in deleted:
            batch.put(_LEDGER_KEY.pack(b"D", ledger_id), b"")
        batch.put(_FRESH_KEY, fresh)
        if position is not None:
            batch.put(_CHECKPOINT_KEY, _POSITION.pack(*position))
        if self.is_failed:
            # After an error, such as a full disk, RocksDB refuses writes until it is reopened.
            # Reopening needs room; until there is room, the open database still serves reads.
            if not has_room(self.path.parent, REOPEN_BYTES):
                raise OSError(errno.ENOSPC, "No space left to reopen the index: free some space")
            self.close()
            self._db = self._open_database()
            self.is_failed = False
        try:
            options = WriteOptions()
            options.disable_wal = True
            self._db.write(batch, options)
            self._db.flush(True)
        except Exception:
            self.is_failed = True
            raise

    def row(self, ledger_id: int) -> IndexRow | None:
        """A ledger's index row, or None if the index does not have the ledger."""
        with self._reading():
            value = self._db.get(_LEDGER_KEY.pack(b"L", ledger_id))
            return None if value is None else decode_row(value)

    def copies(self, ledger_id: int) -> Iterator[RowCopy]:
        """The copies of a ledger's metadata, ascending by version (rule 18b)."""
        prefix = _LEDGER_KEY.pack(b"R", ledger_id)
        with self._reading():
            for key, value in self._walk(prefix, prefix):
                _, _, version, attempt = _COPY_KEY.unpack(key)
                yield RowCopy(RowName(version, attempt), value)

    def is_deleted(self, ledger_id: int) -> bool:
        """Whether a ledger without an index row was deleted (rule 16a)."""
        with self._reading():
            return self._db.get(_LEDGER_KEY.pack(b"D", ledger_id)) is not None

    def deleted(self, after: int = -1) -> Iterator[int]:
        """The ids above `after` of deleted ledgers, ascending."""
        for key, _ in self._walk(_LEDGER_KEY.pack(b"D", after + 1), b"D"):
            yield _LEDGER_KEY.unpack(key)[1]

    def ledgers(self, after: int = -1) -> Iterator[tuple[int, IndexRow]]:
        """All ledgers with ids above `after`, ascending."""
        for key, value in self._walk(_LEDGER_KEY.pack(b"L", after + 1), b"L"):
            yield _LEDGER_KEY.unpack(key)[1], decode_row(value)

    def highest_ledger(self, below: int) -> int:
        """The highest id below `below` of a ledger stored or deleted here; else NO_LEDGER."""
        found = NO_LEDGER
        cursor = self._db.iter()
        for prefix in (b"L", b"D"):
            cursor.seek_for_prev(_LEDGER_KEY.pack(prefix, below - 1))
            if cursor.valid() and cursor.key()[:1] == prefix:
                found = max(found, _LEDGER_KEY.unpack(cursor.key())[1])
        cursor.status()
        return found

    def parts(self, ledger_id: int, first: int, last: int, sparse_span: int) -> Iterator[Part]:
        """The parts that may contain some of first..last, ascending by first."""
        with self._reading():
            cursor = self._db.iter()
            prefix = _LEDGER_KEY.pack(b"P", ledger_id)
            # The part before `first` may reach into the range; parts with holes may begin earlier.
            cursor.seek_for_prev(_PART_KEY.pack(b"P", ledger_id, max(0, first - sparse_span)))
            if not cursor.valid() or cursor.key()[:9] != prefix:
                cursor.seek(_PART_KEY.pack(b"P", ledger_id, 0))
            while cursor.valid() and (key := cursor.key())[:9] == prefix:
                low = _PART_KEY.unpack(key)[2]
                if low > last:
                    break
                part = decode_part(low, cursor.value())
                if part.last >= first:
                    yield part
                cursor.next()
            cursor.status()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Mark the index as suspect if a read fails, unless the database is being reopened."""
        was_failed = self.is_failed
        try:
            yield
        except Exception:
            self.is_suspect = self.is_suspect or not (was_failed or self.is_failed)
            raise

    def all_parts(self) -> Iterator[tuple[int, Part]]:
        """All parts of all ledgers."""
        for key, value in self._walk(b"P", b"P"):
            _, ledger_id, first = _PART_KEY.unpack(key)
            yield ledger_id, decode_part(first, value)

    def used_bytes(self) -> Counter[int]:
        """Total size of the parts in each segment. Pauses, so it must run in a thread."""
        used: Counter[int] = Counter()
        for _, value in self._parts_with_pauses():
            segment, size = stored_at(value)
            used[segment] += size
        return used

    def parts_in(self, segments: Collection[int]) -> list[tuple[int, Part]]:
        """The parts in some segments, by ledger and entry. Pauses, so it must run in a thread."""
        found = []
        for key, value in self._parts_with_pauses():
            if stored_at(value)[0] in segments:
                _, ledger_id, first = _PART_KEY.unpack(key)
                found.append((ledger_id, decode_part(first, value)))
        return found

    def _parts_with_pauses(self) -> Iterator[tuple[bytes, bytes]]:
        for number, item in enumerate(self._walk(b"P", b"P"), start=1):
            yield item
            if number % PARTS_AT_ONCE == 0:
                time.sleep(PAUSE_S)

    def _walk(self, start: bytes, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values in order, from key `start` on, while the key begins with `prefix`."""
        cursor = self._db.iter()
        cursor.seek(start)
        while cursor.valid() and (key := cursor.key()).startswith(prefix):
            yield key, cursor.value()
            cursor.next()
        cursor.status()

    def close(self) -> None:
        """Close the database. A replay of the log restores data that RocksDB could not write."""
        with contextlib.suppress(Exception):
            self._db.close()


def _copy_key(ledger_id: int, name: RowName) -> bytes:
    return _COPY_KEY.pack(b"R", ledger_id, *name)
