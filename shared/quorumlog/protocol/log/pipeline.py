"""The appends to one ledger of a log: assigns entry ids and offsets, and acknowledges in order.

Invariants (checked by `check`):
  - an entry's records directly follow those of earlier entries, so offsets are dense (rule 25);
  - `in_flight` is in the order of entry ids, and acknowledged from its head only.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from quorumlog.errors import (
    InvalidRequest,
    KeyRequired,
    StreamSeqRegression,
    TooLarge,
    UnexpectedOffset,
)
from quorumlog.protocol import batch, packed
from quorumlog.protocol.log.clock import Now
from quorumlog.protocol.log.messages import Append, RecordsAppended, RequestKey
from quorumlog.protocol.log.producers import ProducerTable
from quorumlog.protocol.log.row import Answer, LogItem


@dataclass(slots=True, eq=False)
class PendingAppend:
    """A request to append that waits for its answer."""

    request: RequestKey
    call: Append
    entry_id: int = -1
    first_offset: int = -1
    data: bytes = b""
    """The entry's payload."""
    content: str = ""
    appended_ms: int = 0
    ends: bool = False
    """Whether the log ends with this append (rule 25b)."""
    seq_before: str | None = None
    replaced: object = None
    """The value for `ProducerTable.undo`."""
    repeats: list["PendingAppend"] = field(default_factory=list)
    """Retries that arrived while this request was in flight."""

    @property
    def with_repeats(self) -> tuple["PendingAppend", ...]:
        """The request and its retries, which all wait for this entry."""
        return (self, *self.repeats)

    def answer(self, ledger_id: int) -> RecordsAppended:
        """The client's response once the entry is durable."""
        last = self.first_offset + self.call.count - 1
        return RecordsAppended(self.first_offset, last, ledger_id, self.entry_id)


class Pipeline:
    """The appends to one ledger, in the order of their entry ids."""

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
        """Begin with the empty ledger of `item`, which must have a first offset. `appended_ms`,
        `seq`: the last append time and stream sequence. `packs`: whether to compress batches.
        """
        assert item.first_offset is not None, "the ledger must have a first offset (rule 23)"
        self.ledger_id = item.ledger_id
        self.first_offset = item.first_offset
        self.producers = producers
        self.appended_ms = appended_ms
        self.seq = seq
        self.is_over = False
        """Whether the batch that ends the log was begun, so that no batch may follow (rule 25b)."""
        self.since_s = now.monotonic_s
        self.in_flight: deque[PendingAppend] = deque()
        self.next_entry = 0
        self.records = 0
        self.bytes = 0
        self.acknowledged = 0
        """The number of acknowledged records."""
        self._submitted = 0
        """The id below which all entries were submitted."""
        self._has_producers = False
        self._packs = packs

    @property
    def next_offset(self) -> int:
        """The offset of the next request, if all requests in flight are acknowledged."""
        return self.first_offset + self.records

    def check(self) -> None:
        """Assert the invariants."""
        ids = [pending.entry_id for pending in self.in_flight]
        first = ids[0] if ids else 0
        assert ids == list(range(first, first + len(ids))), "entry ids must have no gap (rule 25)"
        assert self.acknowledged <= self.records

    def begin(self, pending: PendingAppend, now: Now, *, needs_keys: bool = False) -> Answer | None:
        """Assign an entry and offsets to an append, or return the answer to its first copy.
        `needs_keys`: reject a new request if any of its records has no key.

        Raises: QuorumLogError if the request can't be appended, without changing the state.
        """
        call = pending.call
        marked = batch.decode_head(call.data) if batch.is_marked(call.data) else None
        self._check_since(call.since)
        pending.appended_ms = now.stamp_ms(self.appended_ms)
        if len(call.data) > batch.BATCH_BYTES_MAX:
            raise TooLarge(f"a batch has at most {batch.BATCH_BYTES_MAX} bytes: send fewer records")
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
        if needs_keys and marked is not None and marked.has_ttls:
            raise InvalidRequest("the log is compacted: send records without ttl_s")
        if needs_keys and not batch.has_keys(call.data):
            raise KeyRequired("the log is compacted: send a key with each record")
        if call.expect is not None and call.expect != self.next_offset:
            raise UnexpectedOffset(
                f"the log's next offset is {self.next_offset}, not the expected {call.expect}: read"
                " the new records, and expect the new offset",
                next_offset=self.next_offset,
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
        """Raise InvalidRequest if Producer-Since is above the log's end, because no record may be
        below its request's Producer-Since (rule 26a, `producers.py`).
        """
        if since > self.next_offset:
            detail = f"must be at most the log's next offset {self.next_offset}"
            raise InvalidRequest(
                f"Producer-Since {detail} (got {since})",
                errors=[{"pointer": "/header/Producer-Since", "detail": detail}],
            )

    def _check_seq(self, seq: str | None) -> None:
        """Raise StreamSeqRegression unless `seq` is bytewise above the last value (rule 25a)."""
        if seq is not None and self.seq is not None and seq.encode() <= self.seq.encode():
            raise StreamSeqRegression(f"Stream-Seq must be above {self.seq!r} (got {seq!r})")

    def to_submit(self) -> tuple[bytes, ...]:
        """The newest entries, which were begun since the last call."""
        count, self._submitted = self.next_entry - self._submitted, self.next_entry
        if count <= 0:
            return ()
        newest = [pending.data for pending in islice(reversed(self.in_flight), count)]
        return tuple(reversed(newest))

    def again_from(self, first_entry: int) -> None:
        """Let `to_submit` return the entries from this id on again."""
        self._submitted = first_entry

    def acknowledge(self) -> tuple[PendingAppend, Answer]:
        """Acknowledge the durable entry at the head. Also returns the answer to its retries."""
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
        """Remove and return, in order, the appends from this entry id on, which were rejected."""
        taken: deque[PendingAppend] = deque()
        while self.in_flight and self.in_flight[-1].entry_id >= first_entry:
            taken.appendleft(self.in_flight.pop())
        return list(taken)

    def undo(self, refused: list[PendingAppend]) -> None:
        """Treat appends that were cut as never begun, so that their offsets are assigned again."""
        self.again_from(self.next_entry - len(refused))
        for pending in reversed(refused):
            self.next_entry -= 1
            self.records -= pending.call.count
            self.seq = pending.seq_before
            if pending.ends:
                self.is_over = False
            if pending.call.producer is not None:
                self.producers.undo(pending.call.producer, pending.replaced)
