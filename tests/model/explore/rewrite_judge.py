"""Checks an explored log whose sealed ledgers are rewritten."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from quorumlog.errors import NOT_DONE, QuorumLogError
from quorumlog.protocol import batch, packed
from quorumlog.protocol.log import NO_KEYS, LogItem, LogMetadata, ledgers_of
from quorumlog.protocol.log.keys import Bucket, bucket_of
from quorumlog.protocol.metadata import DigestKind, Lineage
from quorumlog.protocol.rebuild_log import LedgerPlace, decide_log
from services.gateway.logs.values import Page
from tests.model.explore.log_judge import LogJudge
from tests.model.explore.log_world import QUORUM, Ledger, World
from tests.model.explore.parts import Broken, Interned
from tests.model.explore.rewrite_work import EARLY_MS, LATE_MS

KEPT_S: Final = 60
"""How long tombstones stay, and records with a time to live."""


class Seen(NamedTuple):
    """A record as it is stored. `time_ms`: its append time, or when it was published."""

    value: bytes
    key: bytes | None
    is_tombstone: bool
    ttl_s: int
    time_ms: int

    def at(self, now_ms: int, *, compacts: bool) -> "Seen | None":
        """The part of the record that a reader gets at a given time (rule 27f)."""
        if not self.ttl_s or now_ms - self.time_ms < 1000 * self.ttl_s:
            return self
        is_buried = compacts and self.key is not None
        return Seen(b"", self.key, True, 0, self.time_ms) if is_buried else None


Records = Mapping[int, tuple[Seen, int]]
"""By offset: the record and its entry."""


class RewriteJudge(LogJudge):
    """Rules over rows, ledgers and copies. `histories` has each record that was ever at an offset, `places` what the database
    says of ledgers.
    """

    def __init__(self, scope: Any, rows: Interned, ledgers: Interned) -> None:
        super().__init__(scope, rows, ledgers)
        self.histories, self.places = Interned(), Interned()
        self._found: dict[Any, Records] = {}
        self._fine: set[Any] = set()

    def log(self, before: World, after: World) -> None:
        """Rules 27a, 27c, 27d, 27e and 27f, I5 and I6: what readers find, what copies say, and what is deleted."""
        same = self._state(before) == self._state(after)
        if same and before.acked == after.acked:
            return
        row: LogMetadata = self._rows.values[after.row]
        for one in self.named(after):
            ledgers_named = ledgers_of(one.items) & after.more.told
            if ledgers_named:
                raise Broken(
                    f"rule 27a: {ledgers_named} is told as deleted, and {one.name} names it"
                )
            self._static(after, one)
        self._stale_readers(after)
        if after.is_deleted:
            return
        history = self.history(after)
        for name, answer in after.acked:
            there = history.get((after.generation, answer.first_offset))
            if not after.generation and (there is None or there.value not in (name.encode(), b"")):
                raise Broken(f"I33: {name} was acknowledged at {answer}, there is {there}")
        if not before.is_deleted and before.generation == after.generation:
            self._check_change(before, after, row)
        if not after.generation:
            self._check_copies(after, row)

    def named(self, world: World) -> Iterator[LogMetadata]:
        """The log and its fork, as far as they exist."""
        if not world.is_deleted:
            yield self._rows.values[world.row]
        if world.more.fork >= 0:
            yield self._rows.values[world.more.fork]

    def history(self, world: World) -> Mapping[tuple[int, int], Seen]:
        """By generation and offset: the record that was first there."""
        found: Mapping[tuple[int, int], Seen] = self.histories.values[world.more.history]
        return found

    def _state(self, world: World) -> Any:
        more = world.more
        return world.row, world.ledgers, more.fork, more.told, more.placed, more.late, more.places

    # --- readers -----------------------------------------------------------------------------------

    def found(self, world: World, row: LogMetadata) -> Records:
        """What is stored in the ledgers of a log, which must cover each of its offsets once."""
        numbers = tuple(world.ledgers[item.ledger_id - 1] for item in row.items)
        known = self._found.get((row, numbers))
        if known is None:
            known = {}
            for item, number in zip(row.items, numbers, strict=True):
                if number < 0:
                    raise Broken(
                        f"rule 27a: {row.name} names ledger {item.ledger_id}, which is deleted"
                    )
                known |= self._covered(self._ledgers.values[number], item)
            self._found[row, numbers] = known
        return known

    def _covered(self, ledger: Ledger, item: LogItem) -> Records:
        """Rules 27c and 27d: the batches of a ledger cover its offsets, whatever records are left."""
        at, found = item.first_offset or 0, {}
        for entry_id, data in enumerate(ledger.entries):
            head = batch.decode_head(data)
            if (item.first_offset or 0) + head.records_before != at:
                raise Broken(f"rule 27d: no batch of ledger {item.ledger_id} covers offset {at}")
            for offset, record in records_of(item, data):
                if item.last_offset is None or offset <= item.last_offset:
                    found[offset] = record, entry_id
            at += head.count
        if item.last_offset is not None and at <= item.last_offset:
            raise Broken(f"rule 27c: ledger {item.ledger_id} ends at {at}, not {item.last_offset}")
        return found

    def _static(self, world: World, row: LogMetadata) -> None:
        """What must hold of a log's row and ledgers, whatever was before."""
        found, more = self.found(world, row), world.more
        named = tuple(sorted((n, world.ledgers[n - 1]) for n in ledgers_of(row.items)))
        key = row, named, more.late, more.history, world.generation
        if key in self._fine:
            return
        if any(number < 0 for _, number in named):
            raise Broken(f"rule 27a: {row.name} names an index that is deleted")
        history = self.history(world)
        generation = 0 if row.forked_at else world.generation
        for offset, (record, _) in found.items():
            self._check_same(row, history.get((generation, offset)), record, offset)
        self._check_read(world, row, found)
        self._check_clean(row, found)
        for item in row.items:
            self._check_index(world, item, found)
        self._fine.add(key)

    def _check_same(self, row: LogMetadata, was: Seen | None, now: Seen, offset: int) -> None:
        """I5, I6: a record stays as it is, or is buried once it has expired."""
        buried = was and was.at(LATE_MS, compacts=row.settings.compacts)
        if now not in (was, buried):
            raise Broken(f"rule 27c: at {offset} of {row.name} was {was}, and there is {now}")

    def _check_read(self, world: World, row: LogMetadata, found: Records) -> None:
        """Rule 27f: a read returns what has not expired."""
        now_ms = LATE_MS if world.more.late else EARLY_MS
        first = row.items[0].first_offset or 0 if row.items else 0
        page = Page(row, 1000, 1 << 20, at=first, now_ms=now_ms)
        for item in row.items:
            page.stop = None if item.last_offset is None else item.last_offset + 1
            number = world.ledgers[item.ledger_id - 1]
            for entry_id, data in enumerate(self._ledgers.values[number].entries):
                page.take(item, entry_id, data)
        read = {
            one.offset: (one.record.value, one.record.key, one.record.is_tombstone)
            for one in page.done().records
        }
        wanted = {
            at: one.at(now_ms, compacts=row.settings.compacts) for at, (one, _) in found.items()
        }
        if read != {at: one[:3] for at, one in wanted.items() if one is not None}:
            raise Broken(f"rule 27f: a read at {now_ms} returns {read}, of {found}")

    def _check_clean(self, row: LogMetadata, found: Records) -> None:
        """Rule 27d: no earlier ledger has an older record of a clean ledger's keys, nor has that ledger two of one key."""
        keys: dict[bytes | None, int] = {}
        for item in row.items:
            if item.compacted_ms and not EARLY_MS <= item.compacted_ms <= LATE_MS:
                raise Broken(f"rule 27d: {item} is clean since a time without a pass")
            for at in range(item.first_offset or 0, (item.last_offset or 0) + 1):
                key = found[at][0].key if at in found else None
                if item.compacted_ms and key is not None and key in keys:
                    raise Broken(
                        f"rule 27d: {key!r} is at {at}, in a clean ledger, and at {keys[key]}"
                    )
                keys[key] = at

    def _check_index(self, world: World, item: LogItem, found: Records) -> None:
        """Rule 27e: an index names all entries of a key."""
        if item.index is None:
            return
        last = len(self._ledgers.values[world.ledgers[item.ledger_id - 1]].entries) - 1
        for at in range(item.first_offset or 0, (item.last_offset or 0) + 1):
            record, entry_id = found.get(at, (None, 0))
            if record is None or record.key is None:
                continue
            entries: Sequence[int] = ()
            if item.index != NO_KEYS:
                buckets = self._ledgers.values[world.ledgers[item.index - 1]].entries
                data = buckets[bucket_of(record.key, len(buckets))]
                bucket = Bucket(
                    data, buckets=len(buckets), ledger_id=item.ledger_id, last_entry=last
                )
                entries = bucket.entries_of(record.key)
            if entry_id not in entries:
                raise Broken(f"rule 27e: the index of {item} lacks {record.key!r} in {entry_id}")

    def _stale_readers(self, world: World) -> None:
        """I5, I6: whoever knows an older row reads the same records in the ledgers that it names, as long as they exist."""
        history = self.history(world)
        for ledger_id, first, lineage in self.places.values[world.more.places]:
            number = world.ledgers[ledger_id - 1]
            key = ledger_id, number, world.more.history
            if number < 0 or key in self._fine:
                continue
            generation = int(lineage.log_created_at != "0")
            item = LogItem(ledger_id, first, published_ms=lineage.published_ms)
            row: LogMetadata = self._rows.values[world.row]
            for offset, (record, _) in self._covered(self._ledgers.values[number], item).items():
                self._check_same(row, history.get((generation, offset)), record, offset)
            self._fine.add(key)

    # --- changes -----------------------------------------------------------------------------------

    def _check_change(self, before: World, after: World, row: LogMetadata) -> None:
        """Rule 27d: the newest record of each key stays, tombstones for their time; what was removed stays away."""
        old: LogMetadata = self._rows.values[before.row]
        was, now = self.found(before, old), self.found(after, row)
        if was == now:
            return
        now_ms, compacts = LATE_MS if after.more.late else EARLY_MS, row.settings.compacts
        came = [at for at in now if at not in was and at < max(was, default=-1)]
        if came:
            raise Broken(f"rules 27c and 27d: {came} come back")
        kept = {at: one for at, one in was.items() if at >= row.first_offset}
        newest = newest_of(kept, now_ms, compacts=compacts)
        left = newest_of(now, now_ms, compacts=compacts)
        for key, (at, record) in newest.items():
            if record.is_tombstone and left.get(key) is None:
                if record == was[at][0]:
                    self._check_kept(old, at, after)
            elif left.get(key, (-1, None))[0] != at and at not in now:
                raise Broken(
                    f"rule 27d: the newest record of {key!r} at {at} goes: {left.get(key)}"
                )
        for at in kept.keys() - now.keys():
            seen = was[at][0].at(now_ms, compacts=compacts)
            if seen is not None and (seen.key is None or not compacts):
                raise Broken(f"rules 27c and 27f: the record at {at} goes: {seen}")

    def _check_kept(self, old: LogMetadata, at: int, after: World) -> None:
        """Rule 27d: a tombstone goes once its ledger was clean for long enough."""
        item = old.item_at(at)
        since = item.compacted_ms if item is not None else 0
        now_ms = LATE_MS if after.more.late else EARLY_MS
        if not since or now_ms - since < 1000 * KEPT_S:
            raise Broken(f"rule 27d: the tombstone at {at} goes, its ledger is clean since {since}")

    # --- copies ------------------------------------------------------------------------------------

    def _check_copies(self, world: World, row: LogMetadata) -> None:
        """Rules 18f, 27c and 27d: were the database lost now, copies would bring the log back as it is. Only between a
        rewrite's change and its copies may an operator be needed.
        """
        more = world.more
        key = "rebuilt", world.row, world.ledgers, more.told, more.placed, more.places
        if key in self._fine:
            return
        held = [
            place(ledger_id, self._ledgers.values[number], *self._copy_of(world, ledger_id))
            for ledger_id, number in enumerate(world.ledgers, 1)
            if number >= 0 and ledger_id not in more.told
        ]
        decision = decide_log("log", None, held, more.told, now_ms=EARLY_MS, token=99)
        is_kept = all(self._is_known(world, item.ledger_id) for item in row.own[:-1])
        if decision.row is not None:
            self._check_rebuilt(world, row, decision.row)
        elif is_kept:
            raise Broken(f"rule 18f: the log is not rebuilt: {decision.why}")
        self._fine.add(key)

    def _check_rebuilt(self, world: World, row: LogMetadata, back: LogMetadata) -> None:
        was, now, compacts = self.found(world, row), self.found(world, back), row.settings.compacts
        lost = [at for at, (one, _) in was.items() if at not in now and not one.ttl_s]
        if lost:
            raise Broken(f"rule 18f: a rebuild loses the records at {lost}: {back.items}")
        newest = newest_of(was, EARLY_MS, compacts=compacts)
        for key, (at, record) in newest_of(now, EARLY_MS, compacts=compacts).items():
            is_back = at >= row.first_offset and not record.is_tombstone and key not in newest
            if compacts and is_back:
                raise Broken(f"rule 27d: a rebuild brings {record} back at {at}")

    def _copy_of(self, world: World, ledger_id: int) -> tuple[int, Lineage] | tuple[None, None]:
        """The place of a ledger as its members know it."""
        if self._is_known(world, ledger_id):
            for found, first, lineage in self.places.values[world.more.places]:
                if found == ledger_id:
                    return first, lineage
        return None, None

    def _is_known(self, world: World, ledger_id: int) -> bool:
        """Whether members know a ledger's place: a writer tells it before its first entry."""
        number = world.ledgers[ledger_id - 1]
        if number < 0 or ledger_id in world.more.placed:
            return ledger_id in world.more.placed
        ledger: Ledger = self._ledgers.values[number]
        return ledger.owner[0] >= 0 and bool(ledger.entries or ledger.in_flight)

    # --- answers -----------------------------------------------------------------------------------

    def is_refused(self, request: Any, answer: Any) -> bool:
        """Whether a client is told that certainly nothing was done."""
        is_error = isinstance(answer, QuorumLogError) and answer.outcome == NOT_DONE
        return is_error and request in self._scope.requests


def place(
    ledger_id: int, ledger: Ledger, first: int | None, lineage: Lineage | None
) -> LedgerPlace:
    """A ledger as bookies hold it."""
    last = len(ledger.entries) - 1 if ledger.is_closed else None
    return LedgerPlace(ledger_id, first, last, 1, QUORUM, DigestKind.CRC32C, lineage)


def records_of(item: LogItem, data: bytes) -> Iterator[tuple[int, Seen]]:
    """The records of one batch, by offset."""
    columns = batch.opened(packed.unpack(data))
    first = (item.first_offset or 0) + columns.head.records_before
    time_ms = item.published_ms or columns.head.append_time_ms
    for index, one in zip(columns.indexes, columns.records, strict=True):
        yield first + index, Seen(one.value, one.key, one.is_tombstone, one.ttl_s, time_ms)


def newest_of(found: Records, now_ms: int, *, compacts: bool) -> Mapping[bytes, tuple[int, Seen]]:
    """The newest record of each key that a reader finds."""
    newest: dict[bytes, tuple[int, Seen]] = {}
    for at, (record, _) in sorted(found.items()):
        seen = record.at(now_ms, compacts=compacts)
        if seen is not None and seen.key is not None:
            newest[seen.key] = at, seen
    return newest
