"""What clients saw, and whether a log may look like that.

Every payload of a history is different, and an append's answer names its ids, so nothing has to be
searched: one pass over the events decides each rule (I1 and I4 to I10 as clients see them), in
linear time. TLA is the public specification Vanlightly/bookkeeper-tlaplus.

What is checked, by the name of the violation:
  - lost: acknowledged, and not in the ledger as it was closed, or answered `no-such-entry`;
  - phantom: read, and never appended, not yet appended, or its append had definitely failed;
  - duplicate: one payload under two ids;
  - reordered: an append that began after another was known has the lower id;
  - divergent: two payloads under one id, or a ledger that ended twice;
  - gone: read by one client, and `no-such-entry` for another (that answer is about a closed end);
  - lac: a last add confirmed beyond what was appended or beyond the end;
  - gap: a closed ledger whose ids are not 0..last, or an answer that splits a batch.
"""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Violation:
    """One violation of a rule."""

    kind: str
    ledger: int
    entry_id: int | None
    detail: str
    words: tuple[str, str] = ("ledger", "entry")
    """What `ledger` and `entry_id` are numbers of."""

    def __str__(self) -> str:
        """One line for a report."""
        whole, part = self.words
        where = "" if self.entry_id is None else f" {part} {self.entry_id}"
        return f"{self.kind}: {whole} {self.ledger}{where}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Append:
    """A client requested an append of payloads that no other request appends."""

    op: int
    ledger: int
    payloads: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Acked:
    """An append was acknowledged with the id of its first payload."""

    op: int
    first: int


@dataclass(frozen=True, slots=True)
class Failed:
    """An append was definitely not done. An append with an unknown outcome is never settled."""

    op: int


@dataclass(frozen=True, slots=True)
class Read:
    """A client requested a read of one ledger."""

    op: int
    ledger: int


@dataclass(frozen=True, slots=True)
class Found:
    """A read returned entries as confirmed."""

    op: int
    entries: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True, slots=True)
class Absent:
    """A read was answered `no-such-entry`: this id is beyond the end for ever."""

    op: int
    entry_id: int


@dataclass(frozen=True, slots=True)
class Lac:
    """A last add confirmed was shown to a client."""

    ledger: int
    last_add_confirmed: int


@dataclass(frozen=True, slots=True)
class Closed:
    """A client learned where the ledger ended."""

    ledger: int
    last: int


@dataclass(frozen=True, slots=True)
class Content:
    """A whole closed ledger, read after all other events."""

    ledger: int
    entries: tuple[tuple[int, bytes], ...]


Event = Append | Acked | Failed | Read | Found | Absent | Lac | Closed | Content


class History:
    """Records what clients saw, in the order in which one process saw it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._ops = 0

    def _record(self, event: Event) -> int:
        self.events.append(event)
        return self._ops

    def append(self, ledger: int, *payloads: bytes) -> int:
        """Record that an append begins; returns its number, by which its answer is recorded."""
        self._ops += 1
        return self._record(Append(self._ops, ledger, payloads))

    def acked(self, op: int, first: int) -> None:
        """The append was acknowledged; its first payload is entry `first`."""
        self._record(Acked(op, first))

    def failed(self, op: int) -> None:
        """The append was answered with outcome `not-done`. Don't call this for an unknown outcome."""
        self._record(Failed(op))

    def read(self, ledger: int) -> int:
        """Record that a read begins; returns its number, by which its answer is recorded."""
        self._ops += 1
        return self._record(Read(self._ops, ledger))

    def found(self, op: int, *entries: tuple[int, bytes]) -> None:
        """The read returned these (id, payload)."""
        self._record(Found(op, entries))

    def absent(self, op: int, entry_id: int) -> None:
        """The read was answered `no-such-entry`. Don't call this for other errors."""
        self._record(Absent(op, entry_id))

    def lac(self, ledger: int, last_add_confirmed: int) -> None:
        """A last add confirmed was shown."""
        self._record(Lac(ledger, last_add_confirmed))

    def closed(self, ledger: int, last: int) -> None:
        """A client was told that the ledger is closed at `last`."""
        self._record(Closed(ledger, last))

    def content(self, ledger: int, *entries: tuple[int, bytes]) -> None:
        """Record a whole closed ledger, read at the end."""
        self._record(Content(ledger, entries))

    def write(self, path: Path) -> None:
        """Write the history, one event per line, for a person who searches for a cause."""
        path.write_text("".join(f"{event}\n" for event in self.events))


@dataclass(slots=True)
class _Pending:
    """What is known about an append. `floor` is the highest id that was known when it began."""

    ledger: int
    floor: int
    failed: bool = False


@dataclass(slots=True)
class _Ledger:
    known: dict[int, bytes] = field(default_factory=dict)
    acked: set[int] = field(default_factory=set)
    highest: int = -1
    appended: int = 0
    last: int | None = None
    lac: int = -1
    content: dict[int, bytes] | None = None
    absent: set[int] = field(default_factory=set)


class Checker:
    """Processes events in order, and collects violations in `violations`."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.ledgers: dict[int, _Ledger] = {}
        self.payloads: dict[bytes, _Pending] = {}
        self.places: dict[bytes, tuple[int, int]] = {}
        self.appends: dict[int, Append] = {}
        self.reads: dict[int, int] = {}

    def say(self, kind: str, ledger: int, entry_id: int | None, detail: str) -> None:
        self.violations.append(Violation(kind, ledger, entry_id, detail))

    def ledger(self, ledger: int) -> _Ledger:
        return self.ledgers.setdefault(ledger, _Ledger())

    # --- the invariants --------------------------------------------------------------------------

    def learn(self, ledger: int, entry_id: int, payload: bytes, how: str) -> None:
        """Check an answer that gives an entry this payload and id."""
        if not self.same_payload(ledger, entry_id, payload, how):
            return
        origin = self.no_phantom(ledger, entry_id, payload, how)
        if origin is not None:
            self.in_order(origin, entry_id, payload)
        self.there_once(ledger, entry_id, payload)
        state = self.ledger(ledger)
        state.highest = max(state.highest, entry_id)

    def same_payload(self, ledger: int, entry_id: int, payload: bytes, how: str) -> bool:
        """I5, I7: all answers about an entry have the same payload.

        Source: TLA NoOutOfOrderEntries; Jepsen's kafka workload, "inconsistent offsets".
        """
        before = self.ledger(ledger).known.setdefault(entry_id, payload)
        if before != payload:
            self.say("divergent", ledger, entry_id, f"{how} {payload!r}, was {before!r}")
        return before == payload

    def no_phantom(self, ledger: int, entry_id: int, payload: bytes, how: str) -> _Pending | None:
        """I9: each entry in an answer was appended, by an append that had not failed. Returns that append.

        Source: Jepsen's kafka workload, "aborted read".
        """
        appended = self.ledger(ledger).appended
        if entry_id >= appended:
            self.say("phantom", ledger, entry_id, f"only {appended} payloads were appended")
        origin = self.payloads.get(payload)
        if origin is None or origin.ledger != ledger:
            self.say("phantom", ledger, entry_id, f"{how} {payload!r}, which nobody appended")
            return None
        if origin.failed:
            self.say("phantom", ledger, entry_id, f"{how} {payload!r}, which had failed")
            return None
        return origin

    def in_order(self, origin: _Pending, entry_id: int, payload: bytes) -> None:
        """I8: an append that began when another entry was known has a higher id than that entry.

        Source: Jepsen's kafka workload, "nonmonotonic send".
        """
        if entry_id <= origin.floor:
            self.say(
                "reordered", origin.ledger, entry_id, f"{payload!r} began after {origin.floor}"
            )

    def there_once(self, ledger: int, entry_id: int, payload: bytes) -> None:
        """I30: one append is one entry.

        Source: redpanda#3039; Jepsen's kafka workload, "duplicate".
        """
        place = self.places.setdefault(payload, (ledger, entry_id))
        if place != (ledger, entry_id):
            self.say("duplicate", ledger, entry_id, f"{payload!r} is also entry {place[1]}")

    def one_end(self, ledger: int, last: int) -> None:
        """I4: all answers name the same end.

        Source: TLA, CLOSED is final.
        """
        state = self.ledger(ledger)
        if state.last is not None and state.last != last:
            self.say("divergent", ledger, last, f"the end was {state.last}")
        state.last = last

    def whole(self, number: int, state: _Ledger, stored: dict[int, bytes]) -> None:
        """I5: a closed ledger is dense up to its end, and holds what was acknowledged.

        Source: TLA NoDivergenceBetweenClientAndMetaData; Jepsen's kafka workload, "lost write".
        """
        if state.last is not None and len(stored) - 1 != state.last:
            self.say("gap", number, len(stored) - 1, f"the ledger was closed at {state.last}")
        for entry_id in sorted(state.acked - stored.keys()):
            self.say("lost", number, entry_id, "acknowledged and not stored")

    def acked_is_not_denied(self, number: int, state: _Ledger) -> None:
        """I1: no answer says that an acknowledged entry is beyond the final end.

        Source: TLA NoDivergenceBetweenClientAndMetaData.
        """
        for entry_id in sorted(state.acked & state.absent):
            self.say("lost", number, entry_id, "acknowledged and answered as absent")

    def read_stays_readable(self, number: int, state: _Ledger) -> None:
        """I6: no answer says that an entry which a client has read is beyond the final end.

        Source: TLA NoDirtyReads; Jepsen on NATS 2.12.1, records that were read and gone.
        """
        for entry_id in sorted((state.known.keys() - state.acked) & state.absent):
            self.say("gone", number, entry_id, "was read, and answered as absent")

    def end_covers_what_is_known(self, number: int, state: _Ledger, end: int) -> None:
        """I1, I6: all acknowledged or read entries are within the end, and no entry within the end is denied.

        Source: TLA NoDivergenceBetweenClientAndMetaData.
        """
        for entry_id in sorted(state.known):
            if entry_id > end:
                kind = "lost" if entry_id in state.acked else "gone"
                self.say(kind, number, entry_id, f"known; the ledger ends at {end}")
        for entry_id in sorted(entry for entry in state.absent if entry <= end):
            self.say("gone", number, entry_id, f"absent, but the ledger ends at {end}")

    def lac_is_within(self, number: int, lac: int, end: int, what: str) -> None:
        """I10: a LAC that was shown is not beyond what was appended, nor beyond the end.

        Source: TLA NoDirtyReads.
        """
        if lac > end:
            self.say("lac", number, lac, what)

    # --- events ----------------------------------------------------------------------------------

    def step(self, event: Event) -> None:
        """Process the next event."""
        match event:
            case Append(op, ledger, payloads):
                state = self.ledger(ledger)
                state.appended += len(payloads)
                self.appends[op] = event
                for payload in payloads:
                    assert payload not in self.payloads, "payloads of a history are different"
                    self.payloads[payload] = _Pending(ledger, state.highest)
            case Acked(op, first):
                ledger, payloads = self.appends[op].ledger, self.appends[op].payloads
                for offset, payload in enumerate(payloads):
                    self.learn(ledger, first + offset, payload, "acknowledged")
                    self.ledger(ledger).acked.add(first + offset)
            case Failed(op):
                for payload in self.appends[op].payloads:
                    self.payloads[payload].failed = True
                    if payload in self.places:
                        ledger, entry_id = self.places[payload]
                        self.say(
                            "phantom", ledger, entry_id, f"{payload!r} failed after it was seen"
                        )
            case Read(op, ledger):
                self.reads[op] = ledger
            case Found(op, entries):
                for entry_id, payload in entries:
                    self.learn(self.reads[op], entry_id, payload, "read")
            case Absent(op, entry_id):
                self.ledger(self.reads[op]).absent.add(entry_id)
            case Lac(ledger, lac):
                state = self.ledger(ledger)
                state.lac = max(state.lac, lac)
                highest = state.appended - 1
                self.lac_is_within(ledger, lac, highest, f"appended was up to {highest}")
            case Closed(ledger, last):
                self.one_end(ledger, last)
            case Content(ledger, entries):
                for entry_id, payload in entries:
                    self.learn(ledger, entry_id, payload, "stored")
                self.ledger(ledger).content = dict(entries)
                if [entry_id for entry_id, _ in entries] != list(range(len(entries))):
                    self.say("gap", ledger, None, "the ids are not dense from 0")

    def finish(self) -> None:
        """Check what only a complete history shows."""
        for number, state in self.ledgers.items():
            end = state.last
            if state.content is not None:
                self.whole(number, state, state.content)
                end = len(state.content) - 1 if end is None else end
            self.acked_is_not_denied(number, state)
            self.read_stays_readable(number, state)
            if end is not None:
                self.lac_is_within(number, state.lac, end, f"the ledger ends at {end}")
                self.end_covers_what_is_known(number, state, end)


def check(history: History) -> list[Violation]:
    """All violations of a history, in the order of detection."""
    checker = Checker()
    for event in history.events:
        checker.step(event)
    checker.finish()
    return checker.violations
