"""What clients of a log saw, and whether a log may look like that (I1, I5 to I10, I30, I32, I33).

One pass, linear in the events. What is checked, by the name of the violation:
  - lost: acknowledged, and not in the log as it is at the end;
  - gone: read by a client, and not there at the end;
  - phantom: read and never produced, not yet produced, or definitely refused;
  - duplicate: one request of a producer under two offsets, or a plain one more often than it was
    sent (a plain client's retry may duplicate: rule 24);
  - reordered: a request that began after another was known has the lower offset, or a producer's
    requests stand in another order than their numbers;
  - divergent: two records under one offset;
  - torn: of one request (rule 25: a batch is atomic) records are missing or apart;
  - unseen: a read found nothing where something had been acknowledged before it began;
  - end: an end beyond what was ever produced, or beyond the log's end;
  - gap: offsets of a read or of the log that are not dense.
TLA is the public specification Vanlightly/bookkeeper-tlaplus.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.history import Violation


@dataclass(frozen=True, slots=True)
class Produce:
    """A request: records that no other request has. `sent` counts the tries of a plain client."""

    op: int
    log: int
    records: tuple[bytes, ...]
    producer: tuple[str, int] | None = None
    """Id and epoch, where the request carries them."""
    seq: int = 0
    sent: int = 1


@dataclass(frozen=True, slots=True)
class Produced:
    """The request was acknowledged; its first record has this offset."""

    op: int
    first: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The request was definitely not done."""

    op: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """A read from `offset` on returned these (offset, record)."""

    log: int
    offset: int
    entries: tuple[tuple[int, bytes], ...]
    acknowledged: int = 0
    """The offset below which all was acknowledged when the read began, as far as is known."""


@dataclass(frozen=True, slots=True)
class End:
    """A client was told the log's next offset."""

    log: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Content:
    """The whole log, read after all other events; `start` is its first offset after retention."""

    log: int
    start: int
    entries: tuple[tuple[int, bytes], ...]


Event = Produce | Produced | Refused | Fetched | End | Content


class LogHistory:
    """Records what clients saw, in the order in which one process saw it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._ops = 0
        self._asked: dict[int, Produce] = {}
        self._acknowledged: dict[int, int] = {}

    def record(self, event: Event) -> None:
        """Record an event."""
        self.events.append(event)

    def acknowledged(self, log: int) -> int:
        """The offset after the last acknowledged record: ask before a read begins."""
        return self._acknowledged.get(log, 0)

    def produce(
        self,
        log: int,
        *records: bytes,
        producer: tuple[str, int] | None = None,
        seq: int = 0,
    ) -> int:
        """Record that a request begins; returns its number, by which its answer is recorded."""
        self._ops += 1
        self._asked[self._ops] = Produce(self._ops, log, records, producer, seq)
        self.record(self._asked[self._ops])
        return self._ops

    def produced(self, op: int, first: int) -> None:
        """The request was acknowledged; its first record has the offset `first`."""
        self.record(Produced(op, first))
        asked = self._asked[op]
        end = first + len(asked.records)
        self._acknowledged[asked.log] = max(end, self.acknowledged(asked.log))

    def refused(self, op: int) -> None:
        """The request was answered with outcome `not-done`. Don't call this for an unknown outcome."""
        self.record(Refused(op))

    def fetched(
        self, log: int, offset: int, *entries: tuple[int, bytes], acknowledged: int = 0
    ) -> None:
        """A read from `offset` on returned these (offset, record); `acknowledged` as it was told
        before the read.
        """
        self.record(Fetched(log, offset, entries, acknowledged))

    def end(self, log: int, next_offset: int) -> None:
        """A client was told the log's next offset."""
        self.record(End(log, next_offset))

    def content(self, log: int, start: int, *entries: tuple[int, bytes]) -> None:
        """The whole log, read at the end."""
        self.record(Content(log, start, entries))

    def write(self, path: Path) -> None:
        """Write the history, one event per line, for a person who searches for a cause."""
        path.write_text("".join(f"{event}\n" for event in self.events))


@dataclass(slots=True)
class _Log:
    known: dict[int, bytes] = field(default_factory=dict)
    acked: set[int] = field(default_factory=set)
    highest: int = -1
    sent: int = 0
    end: int = 0
    content: dict[int, bytes] | None = None
    start: int = 0


@dataclass(slots=True)
class _Request:
    asked: Produce
    floor: int
    is_refused: bool = False


class Checker:
    """Processes events in order, and collects violations in `violations`."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.logs: dict[int, _Log] = {}
        self.requests: dict[int, _Request] = {}
        self.of_record: dict[bytes, tuple[int, int]] = {}
        """The request of a record, and its place in it."""
        self.places: dict[bytes, set[int]] = {}

    def say(self, kind: str, log: int, offset: int | None, detail: str) -> None:
        self.violations.append(Violation(kind, log, offset, detail, ("log", "offset")))

    def log(self, number: int) -> _Log:
        return self.logs.setdefault(number, _Log())

    # --- the invariants --------------------------------------------------------------------------

    def learn(self, number: int, offset: int, record: bytes) -> None:
        """Check an answer that gives this record this offset."""
        log = self.log(number)
        if not self.same_record(number, offset, record):
            return
        log.highest = max(log.highest, offset)
        request = self.no_phantom(number, offset, record)
        if request is not None:
            self.in_order(request, offset, record)
            self.there_once(request, offset, record)

    def same_record(self, number: int, offset: int, record: bytes) -> bool:
        """I5, I33: all answers about an offset have the same record.

        Source: Jepsen's kafka workload, "inconsistent offsets".
        """
        before = self.log(number).known.setdefault(offset, record)
        if before != record:
            self.say("divergent", number, offset, f"{record!r}, was {before!r}")
        return before == record

    def no_phantom(self, number: int, offset: int, record: bytes) -> _Request | None:
        """I9: each record in an answer was produced, by a request that was not refused. Returns that request.

        Source: Jepsen's kafka workload, "aborted read".
        """
        found = self.of_record.get(record)
        request = None if found is None else self.requests[found[0]]
        if request is None or request.asked.log != number:
            self.say("phantom", number, offset, f"{record!r}, which nobody produced")
            return None
        if request.is_refused:
            self.say("phantom", number, offset, f"{record!r}, which was refused")
        return request

    def in_order(self, request: _Request, offset: int, record: bytes) -> None:
        """I8: a request that began when another record was known has a higher offset than that record.

        Source: Jepsen's kafka workload, "nonmonotonic send".
        """
        if offset <= request.floor:
            self.say(
                "reordered", request.asked.log, offset, f"{record!r} began after {request.floor}"
            )

    def there_once(self, request: _Request, offset: int, record: bytes) -> None:
        """I30, rules 24 and 26: a request is in the log once; a plain one at most as often as it was sent.

        Source: redpanda#3039; Jepsen's kafka workload, "duplicate".
        """
        places = self.places.setdefault(record, set())
        places.add(offset)
        if len(places) > request.asked.sent:
            self.say("duplicate", request.asked.log, offset, f"{record!r} is at {sorted(places)}")

    def acknowledged_is_seen(self, event: Fetched) -> None:
        """I6: a read returns all records that were acknowledged before the read began.

        Source: Jepsen's kafka workload, "unseen".
        """
        if not event.entries and event.offset < event.acknowledged:
            self.say("unseen", event.log, event.offset, f"acknowledged was {event.acknowledged}")

    def is_dense(self, number: int, first: int, entries: Iterable[tuple[int, bytes]]) -> None:
        """I33: offsets have no gaps.

        Source: TLA LedgerChaining, EntryOrderMaintained; Jepsen's kafka workload, "poll skip".
        """
        offsets = [at for at, _ in entries]
        if offsets != list(range(first, first + len(offsets))):
            self.say("gap", number, first, "offsets are not dense")

    def end_is_within(self, number: int, reported: int, end: int, what: str) -> None:
        """I10: an end in an answer is beyond neither the produced records nor the log's end.

        Source: TLA NoDirtyReads.
        """
        if reported > end:
            self.say("end", number, reported, what)

    def known_is_there(self, number: int, log: _Log, content: dict[int, bytes]) -> None:
        """I1, I6, I32: what was acknowledged or read is there, but for what retention took.

        Source: Jepsen's kafka workload, "lost write"; TLA LedgerChaining,
        AllNonEmptyLedgersInLedgerList.
        """
        end = log.start + len(content)
        for offset in sorted(log.known.keys() - content.keys()):
            if offset >= log.start:
                kind = "lost" if offset in log.acked else "gone"
                self.say(kind, number, offset, f"known; the log is {log.start}..{end - 1}")

    def requests_are_whole(self, number: int, content: dict[int, bytes]) -> None:
        """Rule 25: a log has all of a request's records, side by side, or none.

        Source: Kafka's record batches, which are appended whole.
        """
        first = min(content, default=0)
        for offset in sorted(content):
            found = self.of_record.get(content[offset])
            if found is None or offset - found[1] < first:
                continue  # retention goes by ledgers; a request never lies in two
            op, place = found
            records = self.requests[op].asked.records
            begins = offset - place
            if records != tuple(content.get(begins + n) for n in range(len(records))):
                self.say("torn", number, offset, f"of request {op}")

    def producers_are_in_order(self, number: int, content: dict[int, bytes]) -> None:
        """Rule 26: a producer's requests are in the log in the order of their numbers.

        Source: Kafka's KIP-98, the sequence numbers of a producer.
        """
        last: dict[tuple[str, int], int] = {}
        for offset in sorted(content):
            op, place = self.of_record.get(content[offset], (-1, -1))
            if place != 0 or (asked := self.requests[op].asked).producer is None:
                continue
            if asked.seq <= last.get(asked.producer, -1):
                self.say("reordered", number, offset, f"{asked.producer} {asked.seq}")
            last[asked.producer] = asked.seq

    # --- events ----------------------------------------------------------------------------------

    def step(self, event: Event) -> None:
        """Process the next event."""
        match event:
            case Produce(op, number, records):
                log = self.log(number)
                log.sent += len(records) * event.sent
                self.requests[op] = _Request(event, log.highest)
                for place, record in enumerate(records):
                    assert record not in self.of_record, "records of a history are different"
                    self.of_record[record] = op, place
            case Produced(op, first):
                asked = self.requests[op].asked
                for place, record in enumerate(asked.records):
                    self.learn(asked.log, first + place, record)
                    self.log(asked.log).acked.add(first + place)
            case Refused(op):
                self.requests[op].is_refused = True
                asked = self.requests[op].asked
                for record in asked.records:
                    if self.places.get(record):
                        self.say("phantom", asked.log, None, f"{record!r} was seen and refused")
            case Fetched(number, offset, entries):
                self.acknowledged_is_seen(event)
                for at, record in entries:
                    self.learn(number, at, record)
                self.is_dense(number, offset, entries)
            case End(number, next_offset):
                log = self.log(number)
                log.end = max(log.end, next_offset)
                self.end_is_within(number, next_offset, log.sent, f"produced were {log.sent}")
            case Content(number, start, entries):
                for at, record in entries:
                    self.learn(number, at, record)
                log = self.log(number)
                log.content, log.start = dict(entries), start
                self.is_dense(number, start, entries)

    def finish(self) -> None:
        """Check whole logs, whose content was recorded."""
        for number, log in self.logs.items():
            if log.content is not None:
                end = log.start + len(log.content)
                self.end_is_within(number, log.end, end, f"the log ends at {end}")
                self.known_is_there(number, log, log.content)
                self.producers_are_in_order(number, log.content)
                self.requests_are_whole(number, log.content)


def check(events: Iterable[Event]) -> list[Violation]:
    """All violations of a history, in the order of detection."""
    checker = Checker()
    for event in events:
        checker.step(event)
    checker.finish()
    return checker.violations
