"""The appends to one ledger of a log: each gets its entry and its offsets, and all are acknowledged in
order.

Invariants (checked by `check`):
  - entry n holds the records from `records_before`, so offsets are dense (rule 25);
  - `in_flight` is in the order of entry ids, and acknowledged from its head only.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from quorumlog.errors import InvalidRequest, StreamSeqRegression, TooLarge, UnexpectedOffset
from quorumlog.protocol import batch, packed
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.messages import Append, RecordsAppended, RequestKey
from quorumlog.protocol.log.producers import ProducerTable
from quorumlog.protocol.log.row import Answer, LogItem


@dataclass(slots=True, eq=False)
class PendingAppend:
    """One request to append that waits for its answer."""

    request: RequestKey
    call: Append
    entry_id: int = -1
    first_offset: int = -1
    data: bytes = b""
    """The entry's payload."""
    content: str = ""
    appended_ms: int = 0
    ends: bool = False
    """Whether the log ends with it (rule 25b)."""
    seq_before: str | None = None
    replaced: object = None
    """What `ProducerTable.undo` needs."""
    repeats: list["PendingAppend"] = field(default_factory=list)
    """Duplicates that came while this one was in flight."""

    @property
    def with_repeats(self) -> tuple["PendingAppend", ...]:
        """All that wait for this entry."""
        return (self, *self.repeats)

    def answer(self, ledger_id: int) -> RecordsAppended:
        """What the client is told when the entry is durable."""
        last = self.first_offset + self.call.count - 1
        return RecordsAppended(self.first_offset, last, ledger_id, self.entry_id)


class Pipeline:
    """The appends to one ledger; see the module."""

    def __init__(
        self,
        item: LogItem,
        producers: ProducerTable[PendingAppend],
        appended_ms: int,
        now: Now,
        *,
        packs: bool = False,
        seq: str | None = None,
    ) -> None:
        """`item` is the ledger's, empty, with its first offset; `appended_ms` is the append time of
        the last batch before it, and `seq` the last stream sequence; `packs`: batches are stored with compressed columns.
        """
        assert item.first_offset is not None, "rule 23"
        self.ledger_id = item.ledger_id
        self.first_offset = item.first_offset
        self.producers = producers
        self.appended_ms = appended_ms
        self.seq = seq
        self.is_over = False
        """The batch that ends the log was begun: nothing may follow it (rule 25b)."""
        self.since_s = now.monotonic_s
        self.in_flight: deque[PendingAppend] = deque()
        self.next_entry = 0
        self.records = 0
        self.bytes = 0
        self.acknowledged = 0
        """How many records are acknowledged."""
        self._submitted = 0
        """Entries below this id were submitted."""
        self._has_producers = False
        self._packs = packs

    @property
    def next_offset(self) -> int:
        """What the next request gets, if all that is in flight is acknowledged."""
        return self.first_offset + self.records

    def check(self) -> None:
        """Assert the invariants."""
        ids = [pending.entry_id for pending in self.in_flight]
        first = ids[0] if ids else 0
        assert ids == list(range(first, first + len(ids))), "rule 25: ids follow on each other"
        assert self.acknowledged <= self.records

    def begin(self, pending: PendingAppend, now: Now) -> Answer | None:
        """Give an append its entry and its offsets; or the answer that its request had before.

        Raises: why it can't be appended, and nothing is changed.
        """
        call = pending.call
        marked = batch.decode_head(call.data) if batch.is_marked(call.data) else None
        self._check_since(call.since)
        pending.appended_ms = now.stamp_ms(self.appended_ms)
        if len(call.data) > batch.BATCH_BYTES_MAX:
            raise TooLarge(f"a record batch has at most {batch.BATCH_BYTES_MAX} bytes")
        data = batch.placed(
            call.data,
            append_time_ms=pending.appended_ms,
            records_before=self.records,
            after_producer=self._has_producers,
            seq=self.seq,
        )
        if call.producer is not None:
            pending.content = batch.content(data)
            any_content = marked is not None and marked.is_by_numbers
            first = self.producers.find(
                call.producer, None if any_content else pending.content, since=call.since
            )
            if isinstance(first, Answer):
                return first
            if first is not None:
                first.repeats.append(pending)
                return None
        if call.expect is not None and call.expect != self.next_offset:
            raise UnexpectedOffset(
                f"the next record gets the offset {self.next_offset}", next_offset=self.next_offset
            )
        pending.seq_before = self.seq
        if marked is not None:
            self._check_seq(marked.seq)
            pending.ends = self.is_over = marked.is_end
            self.seq = self.seq if marked.seq is None else marked.seq
        if call.producer is not None:
            pending.replaced = self.producers.begin(call.producer, pending.content, pending)
            self._has_producers = True
        if self._packs:
            data = packed.pack(data)
        pending.data = data
        pending.entry_id = self.next_entry
        pending.first_offset = self.next_offset
        self.appended_ms = pending.appended_ms
        self.next_entry += 1
        self.records += call.count
        self.bytes += len(data)
        self.in_flight.append(pending)
        return None

    def _check_since(self, since: int) -> None:
        """Raise InvalidRequest where Producer-Since is above the log's end: so each record is at or
        above the since of its request, which rule 26a rests on (`producers.py`).
        """
        if since > self.next_offset:
            detail = f"the log's next record gets the offset {self.next_offset}"
            raise InvalidRequest(
                f"Producer-Since is {since}, but {detail}",
                errors=[{"pointer": "/header/Producer-Since", "detail": detail}],
            )

    def _check_seq(self, seq: str | None) -> None:
        """Raise StreamSeqRegression unless a stream sequence is above the log's last one, byte by byte (rule 25a)."""
        if seq is not None and self.seq is not None and seq.encode() <= self.seq.encode():
            raise StreamSeqRegression(f"Stream-Seq must be above {self.seq!r}, the last one")

    def to_submit(self) -> tuple[bytes, ...]:
        """The entries that were begun since this was asked last: the newest ones."""
        count, self._submitted = self.next_entry - self._submitted, self.next_entry
        if count <= 0:
            return ()
        newest = [pending.data for pending in islice(reversed(self.in_flight), count)]
        return tuple(reversed(newest))

    def again_from(self, first_entry: int) -> None:
        """Submit the entries from this id on once more."""
        self._submitted = first_entry

    def acknowledge(self) -> tuple[PendingAppend, Answer]:
        """The entry at the head is durable. The answer is for repeats of its request."""
        pending = self.in_flight.popleft()
        self.acknowledged += pending.call.count
        done, producer = pending.answer(self.ledger_id), pending.call.producer
        answer = Answer(
            0 if producer is None else producer.seq,
            done.first_offset,
            done.last_offset,
            done.ledger_id,
            done.entry_id,
            pending.content,
        )
        if producer is not None:
            self.producers.done(producer, answer, now_ms=pending.appended_ms)
        return pending, answer

    def cut(self, first_entry: int) -> list[PendingAppend]:
        """Entries from this id on were not taken: what was begun for them, in order."""
        taken: deque[PendingAppend] = deque()
        while self.in_flight and self.in_flight[-1].entry_id >= first_entry:
            taken.appendleft(self.in_flight.pop())
        return list(taken)

    def undo(self, refused: list[PendingAppend]) -> None:
        """Treat entries that were cut off as never begun: the next request gets their place."""
        self.again_from(self.next_entry - len(refused))
        for pending in reversed(refused):
            self.next_entry -= 1
            self.records -= pending.call.count
            self.seq = pending.seq_before
            if pending.ends:
                self.is_over = False
            if pending.call.producer is not None:
                self.producers.undo(pending.call.producer, pending.replaced)
