"""What must hold of a log whose every step is seen (I32 to I34, rules 22 to 28).

What clients were told, and what ledgers held when they were sealed or dropped, goes into one history
(tests/support/log_history.py), judged at each event; the row and the ledgers are judged beside it. TLA is the public specification
Vanlightly/bookkeeper-tlaplus.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from quorumlog.protocol import batch
from quorumlog.protocol.batch import Record
from quorumlog.protocol.log import NO_KEYS, LogItem, LogMetadata
from quorumlog.protocol.log.keys import Bucket, bucket_of, keys_of
from quorumlog.protocol.log.messages import RecordsAppended
from quorumlog.protocol.metadata import State
from quorumlog.wire.log_bodies import INDEX_TAG, REWRITE_TAG
from services.gateway.logs.values import ReadRecord
from tests.model.logs.model import Cluster, Ledger
from tests.support.log_history import Checker, Event, LogHistory

LOG = 1
"""The log's number in the history."""
EXPIRY_SLACK_MS = 60_000
"""How long after its expiry a read that began before may return a record: it knows an older time."""
ID = "id"
"""The header by which a tombstone says what its value would have been."""


class Violation(Exception):
    """Something happened that must never happen."""


@dataclass(frozen=True, slots=True)
class Sent:
    """The state of the cluster when a client sent a request."""

    token: int
    needed: int
    """The highest token that anybody had been given."""
    deleted: frozenset[int]


class Judge(LogHistory):
    """Watches a cluster with one log, and raises Violation at the event that shows it."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__()
        self._cluster = cluster
        self._name = name
        self._checker = Checker()
        self._reported = 0
        self.found: list[str] = []
        """All violations: a gateway in which one was raised may take it for a request that failed."""
        self.token = 0
        """The highest writer token that anybody was given."""
        self.stored: dict[int, bytes] = {}
        """Every record that a sealed ledger ever held, by offset."""
        self.on_row: Callable[[LogMetadata], None] = lambda _row: None
        """Told of each row that was changed, of any log."""
        self._times: dict[int, int] = {}
        """Their append times."""
        self._keys: dict[int, tuple[bytes | None, bool]] = {}
        """Their keys, and whether they are tombstones."""
        self._sealed_ms: dict[int, int] = {}
        """When they were first seen in a sealed ledger, in the database's time."""
        self._gone_ms: dict[int, int] = {}
        """When they were removed. Both are independent of what the log itself notes."""
        self.removed: set[int] = set()
        """The offsets whose records a rewrite has removed."""
        self.expires: dict[int, int] = {}
        """When records expire, by offset, in the database's time; without those that last."""

    def violated(self, what: str) -> NoReturn:
        """Raise Violation, and keep it."""
        self.found.append(what)
        raise Violation(what)

    def record(self, event: Event) -> None:
        """Judge an event of the history as it comes."""
        super().record(event)
        self._checker.step(event)
        self._raise()

    def _raise(self) -> None:
        """Each violation is told once: who goes on after one may."""
        reported, self._reported = self._reported, len(self._checker.violations)
        if self._reported > reported:
            self.violated(str(self._checker.violations[reported]))

    # --- events of the cluster -------------------------------------------------------------------

    def submitted(self, ledger: Ledger) -> None:
        """An append to an open ledger begins."""
        written_for = {name for name, _ in ledger.row.extra}
        if ledger.row.log != self._name or written_for & {REWRITE_TAG, INDEX_TAG}:
            return
        self.written_is_named_last(ledger)
        self.older_ones_are_closed(ledger)
        self.copies_tell_its_place(ledger)

    def replaced(self, before: LogMetadata, now: LogMetadata) -> None:
        """The row was changed."""
        self.on_row(now)
        if now.name != self._name:
            return
        self.at_most_two_are_open(now)
        known = {item.ledger_id: item for item in before.items}
        for item in now.items:
            seen = known.get(item.ledger_id)
            if item.last_offset is not None and (seen is None or seen.last_offset is None):
                self.sealed_as_it_is(item)
                self._saw(item)
                if item.replaced:
                    self.removes_only_what_may_go(now, item)
            if item.index is not None and (seen is None or seen.index is None):
                self.index_names_all(item)
        for item in before.items:
            if now.item_of(item.ledger_id) is None and item.last_offset is None:
                # Ended and dropped at once: it was empty, or a new generation began.
                self._saw(item)

    def _note(self, item: LogItem) -> dict[int, Record]:
        """Note the records of a ledger, by offset: each has the time that it had before."""
        stored, first = self._cluster.ledgers[item.ledger_id].entries, item.first_offset or 0
        found: dict[int, Record] = {}
        for data in stored:
            time = item.published_ms or batch.decode_head(data).append_time_ms
            found |= (records := records_of([data], first))
            for offset, record in records.items():
                if self._times.setdefault(offset, time) != time:
                    self.violated(f"rule 27c: offset {offset} is of {time} now")
                if record.ttl_s:
                    self.expires[offset] = time + 1000 * record.ttl_s
        self.stored.update((offset, told(record)) for offset, record in found.items())
        self._keys.update((at, (each.key, each.is_tombstone)) for at, each in found.items())
        for at in found:
            self._sealed_ms.setdefault(at, self._cluster.database_ms())
        return found

    def _note_all(self) -> None:
        """Note the records of all ledgers that the log names, open ones too."""
        for item in self._cluster.logs[self._name].items:
            if item.first_offset is not None and item.ledger_id in self._cluster.ledgers:
                self._note(item)

    def _saw(self, item: LogItem) -> None:
        stored, first = self._cluster.ledgers[item.ledger_id].entries, item.first_offset or 0
        again = self.removed & self._note(item).keys()
        if again:
            self.violated(f"rule 27d: the records at {again} are there again")
        whole = range(first, batch_end(stored, first))
        if not self.stored.keys() >= set(whole):
            self.violated(f"rule 27d: ledger {item.ledger_id} skips offsets that had no record")
        self.fetched(LOG, first, *((at, self.stored[at]) for at in whole))

    def has_expired(self, offset: int) -> bool:
        """Rule 27f: whether a read may leave a record out because it has expired. Source: NATS' TTL of messages."""
        expires_ms = self.expires.get(offset)
        return expires_ms is not None and self._cluster.database_ms() >= expires_ms

    def may_lack(self, offset: int) -> bool:
        """Whether a read or a fork may have no record at this offset."""
        return offset in self.removed or self.has_expired(offset)

    def shown_in_time(self, found: Iterable[int]) -> None:
        """Rule 27f: a read returns no record that had expired long before. Source: NATS' TTL of messages."""
        late = self._cluster.database_ms() - EXPIRY_SLACK_MS
        if any(late > self.expires.get(offset, late) for offset in found):
            self.violated("rule 27f: a read returns an expired record")

    def removes_only_what_may_go(self, now: LogMetadata, item: LogItem) -> None:
        """Rule 27d: a record goes only if its key has a newer one, or if it is a tombstone that was kept for a while,
        and no older record of its key is left.

        Source: Kafka's log cleaner, KIP-534.
        """
        first, last = item.first_offset or 0, item.last_offset or 0
        present = records_of(self._cluster.ledgers[item.ledger_id].entries, first)
        gone = set(range(first, last + 1)) - present.keys() - self.removed
        kept = {at: self._keys[at][0] for at in self._keys if at >= now.first_offset}
        for offset in gone:
            key, is_tombstone = self._keys[offset]
            if self.has_expired(offset):
                continue
            if key is None:
                self.violated(f"rule 27d: offset {offset} went, without a key")
            if any(at > offset and other == key for at, other in kept.items()):
                continue
            if not is_tombstone:
                self.violated(f"rule 27d: the newest record of {key!r} went, at {offset}")
            older = [at for at, (other, _) in self._keys.items() if at < offset and other == key]
            known_ms = max(self._gone_ms.get(at, 0) for at in (*older, offset))
            known_ms = max(known_ms, self._sealed_ms[offset])
            kept_ms = 1000 * now.settings.delete_retention_s - EXPIRY_SLACK_MS
            if self._cluster.database_ms() < known_ms + kept_ms:
                self.violated(f"rule 27d: the tombstone at {offset} went too early")
        self.removed |= gone
        self._gone_ms |= dict.fromkeys(gone, self._cluster.database_ms())
        for offset in gone:
            if self.has_expired(offset):
                continue
            key, _ = self._keys[offset]
            newer = key is None or any(at > offset and other == key for at, other in kept.items())
            older = [at for at, other in kept.items() if at < offset and other == key]
            if not newer and set(older) - self.removed:
                self.violated(f"rule 27d: {older} come back without the tombstone at {offset}")

    def filled(
        self, found: Sequence[tuple[int, bytes]], first: int, end: int
    ) -> list[tuple[int, bytes]]:
        """What a read returned of these offsets, with the records that were removed or have expired."""
        known = dict(found)
        skipped = set(range(first, end)) - known.keys()
        if not self.stored.keys() >= skipped:
            self._note_all()
        if not all(map(self.may_lack, skipped)):
            self.violated(f"rule 27d: a read skips {skipped - self.removed}")
        return sorted({**known, **{at: self.stored[at] for at in skipped}}.items())

    def members_know_of_truncation(self, log: LogMetadata, began: float) -> None:
        """Rule 18e: a truncation is told once members have copies that say so of the last ledger that the log let go of; a
        rebuild leaves out those before that one, too; and of those that this one had replaced (rule 27c). Source: issue 16, a log that is made again from its bookies. A ledger
        that a fork named when the truncation, which `began` then, looked for forks is told of once that fork is deleted.
        """
        cluster = self._cluster
        below = [at for at, end in cluster.let_go.get(log.name, ()) if end < log.first_offset]
        replaced = [
            ledger_id
            for ledger_id in cluster.replaced_by
            if ledger_id in cluster.ledgers
            and cluster.ledgers[ledger_id].row.log == log.name
            and cluster.places[ledger_id] < log.first_offset
        ]
        for ledger_id in (*below[-1:], *replaced):
            if ledger_id in cluster.told_deleted or ledger_id in cluster.deleted:
                continue
            if not cluster.is_named(ledger_id) and cluster.shared_at.get(ledger_id, -1.0) < began:
                self.violated(f"rule 18e: nobody was told that the log let go of {ledger_id}")

    # --- events of clients -------------------------------------------------------------------------

    def opened(self, token: int) -> None:
        """A client was given this writer token."""
        self.token = max(self.token, token)

    def sending(self, token: int | None) -> "Sent":
        """A client begins to send a request."""
        return Sent(token or 0, self.token, frozenset(self._cluster.deleted))

    def appended(self, sent: "Sent", done: RecordsAppended) -> None:
        """A client was told where its records are."""
        self.deleted_takes_nothing(sent, done)
        self.end_covers_what_is_told(done)
        self.has_the_token(sent)

    # --- the invariants --------------------------------------------------------------------------

    def written_is_named_last(self, ledger: Ledger) -> None:
        """I32: what is written is in the log's list, as the one that its owner writes.

        Source: TLA LedgerChaining, AllNonEmptyLedgersInLedgerList.
        """
        # The base: what was added ahead by a roll has no start yet, and is not written (rule 23).
        item = self._cluster.logs[self._name].base
        if item is None or item.ledger_id != ledger.row.ledger_id:
            self.violated(f"I32: ledger {ledger.row.ledger_id} is written, but not named last")

    def copies_tell_its_place(self, ledger: Ledger) -> None:
        """Rule 18f: a writer knows where its ledger begins before it appends, so that each copy of the row
        that rides on an add says so. Source: issue 16, a log that is made again from its bookies.
        """
        item = self._cluster.logs[self._name].item_of(ledger.row.ledger_id)
        if item is not None and item.first_offset != ledger.told_offset:
            self.violated(f"rule 18f: ledger {ledger.row.ledger_id} is written without its place")

    def deleted_takes_nothing(self, sent: "Sent", done: RecordsAppended) -> None:
        """I1, I32: nothing is appended to a ledger that was deleted before (rule 16a). What a repeat
        is told may lie in one.

        Source: TLA LedgerChaining, AllNonEmptyLedgersInLedgerList; BK#870.
        """
        if done.ledger_id in sent.deleted and not done.is_duplicate:
            self.violated(
                f"I1: offset {done.first_offset} is in ledger {done.ledger_id}, deleted before"
            )

    def end_covers_what_is_told(self, done: RecordsAppended) -> None:
        """I1: what is acknowledged is not beyond the end of its ledger, were that deleted since.

        Source: TLA NoDivergenceBetweenClientAndMetaData.
        """
        at = done.ledger_id
        ledger = self._cluster.ledgers.get(at) or self._cluster.deleted[at]
        end = ledger.row.last_entry
        if end is not None and done.entry_id > end:
            self.violated(f"I1: {at}:{done.entry_id} is acknowledged, it ended at {end}")

    def has_the_token(self, sent: "Sent") -> None:
        """Rule 22: once a log is opened for one writer, nobody appends without that writer's token.

        Source: Kafka's KIP-98, an epoch that fences the ones before.
        """
        if sent.token < sent.needed:
            self.violated(f"rule 22: appended with the token {sent.token}, not {sent.needed}")

    def sealed_as_it_is(self, item: LogItem) -> None:
        """I33: the list's borders are those of its ledgers, so that offsets follow its order.

        Source: TLA LedgerChaining, EntryOrderMaintained.
        """
        assert item.first_offset is not None
        assert item.last_offset is not None
        end = batch_end(self._cluster.ledgers[item.ledger_id].entries, item.first_offset)
        if end != item.last_offset + 1:
            self.violated(f"I33: ledger {item.ledger_id} ends before {end}: {item}")

    def index_names_all(self, item: LogItem) -> None:
        """Rule 27e: an index names each entry that holds a key, for each key of its ledger.

        Source: issue 38, an index that is never trusted into a wrong "absent".
        """
        entries = self._cluster.ledgers[item.ledger_id].entries
        index = () if item.index == NO_KEYS else self._cluster.ledgers[item.index or 0].entries
        about = {"ledger_id": item.ledger_id, "last_entry": len(entries) - 1}
        for entry_id, stored in enumerate(entries):
            for key in keys_of(stored):
                found: Sequence[int] = ()
                if index:
                    data = index[bucket_of(key, len(index))]
                    found = Bucket(data, buckets=len(index), **about).entries_of(key)
                if entry_id not in found:
                    self.violated(f"rule 27e: {item.index} lacks a key of entry {entry_id}")

    def older_ones_are_closed(self, ledger: Ledger) -> None:
        """I34: only the last ledger is written, and all before it are CLOSED (rule 23).

        Source: TLA LedgerChaining, CloseLastLedger comes before AppendLedger.
        """
        row = self._cluster.logs[self._name]
        for before in row.items:
            if before.ledger_id == ledger.row.ledger_id:
                return
            if self._cluster.ledgers[before.ledger_id].row.state is not State.CLOSED:
                self.violated(f"I34: written behind ledger {before.ledger_id}, which is open")

    def at_most_two_are_open(self, row: LogMetadata) -> None:
        """I34 where the next ledger is made ahead: at most two are open, and one is written.

        Source: rule 23; TLA LedgerChaining has one, for it makes none ahead.
        """
        still_open = [
            item.ledger_id
            for item in row.items
            if self._cluster.ledgers[item.ledger_id].row.state is not State.CLOSED
        ]
        if len(still_open) > 2:
            self.violated(f"I34: ledgers {still_open} are open")

    def times_never_go_back(self) -> None:
        """Rule 26b: append times ascend with the offsets, whoever appended or published. Source: issue 19, a search
        for a time.
        """
        at, last = -1, -1
        for offset, time in sorted(self._times.items()):
            if time < last:
                self.violated(f"rule 26b: offset {offset} is of {time}, offset {at} of {last}")
            at, last = offset, time

    def whole(self, contents: Iterable[ReadRecord]) -> None:
        """Judge the log as it was, truncated ledgers too; `contents` is what it holds now."""
        sealed = dict(self.stored)
        self._note_all()
        # Records of the open ledger may have expired before anyone read them.
        expired = {at: value for at, value in self.stored.items() if self.has_expired(at)}
        self.stored.clear()
        self.stored.update(sealed | expired)
        for found in contents:
            if found.offset in self.removed:
                self.violated(f"rule 27d: the record at {found.offset} is there again")
            self.stored[found.offset] = told(found.record)
            self._times[found.offset] = found.timestamp_ms
        self.times_never_go_back()
        self.content(LOG, 0, *sorted(self.stored.items()))
        self._checker.finish()
        self._raise()


class Alarms(logging.Handler):
    """Collects what gateways log as errors: defects, which they must never have."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.found.append(f"{record.getMessage()}: {type(error).__name__}: {error}")


def told(record: Record) -> bytes:
    """What the history knows of a record: its value, or that of a tombstone's header."""
    return dict(record.headers)[ID].encode() if record.is_tombstone else record.value


def batch_end(entries: Sequence[bytes], first: int) -> int:
    """The offset after the last batch of a ledger that begins at `first`."""
    return first + (batch.decode_head(entries[-1]).records_after if entries else 0)


def records_of(entries: Sequence[bytes], first: int) -> dict[int, Record]:
    """The records of a ledger that begins at `first`, by offset."""
    found: dict[int, Record] = {}
    for data in entries:
        columns = batch.opened(data)
        begin = first + columns.head.records_before
        found.update(zip((begin + n for n in columns.indexes), columns.records, strict=True))
    return found


def values_of(entries: Sequence[bytes]) -> list[str]:
    """The records of a ledger's entries."""
    return [record.value.decode() for data in entries for record in batch.decode(data)[1]]
