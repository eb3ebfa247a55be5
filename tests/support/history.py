"""What clients saw, and whether a log may look like that.

Every payload of a history is different, and an append's answer names its ids, so nothing has to be
searched: one pass over the events decides each rule (reliability I5 to I9), in linear time.

What is checked, by the name of the violation:
  - lost: acknowledged, and not in the ledger as it was closed, or answered `no-such-entry`;
  - phantom: read, and never appended, not yet appended, or its append had definitely failed;
  - duplicate: one payload under two ids;
  - reordered: an append that began after another was known has the lower id;
  - divergent: two payloads under one id, or a ledger that ended twice;
  - gone: read by somebody, and `no-such-entry` for somebody (that answer is about a closed end);
  - lac: a last add confirmed beyond what was appended or beyond the end;
  - gap: a closed ledger whose ids are not 0..last, or an answer that splits a batch.
"""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Violation:
    """One rule broken at one place."""

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
    """An append was asked for: payloads that nobody else appends."""

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
    """An append was definitely not done. One with an unknown outcome is simply never settled."""

    op: int


@dataclass(frozen=True, slots=True)
class Read:
    """A read of one ledger was asked for."""

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
    """Somebody was told where the ledger ended."""

    ledger: int
    last: int


@dataclass(frozen=True, slots=True)
class Content:
    """The whole of a closed ledger, read after everything else."""

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
        """An append begins; returns the number under which its answer is told."""
        self._ops += 1
        return self._record(Append(self._ops, ledger, payloads))

    def acked(self, op: int, first: int) -> None:
        """The append was acknowledged; its first payload is entry `first`."""
        self._record(Acked(op, first))

    def failed(self, op: int) -> None:
        """The append was answered with outcome `not-done`. Call nothing where it is unknown."""
        self._record(Failed(op))

    def read(self, ledger: int) -> int:
        """A read begins; returns the number under which its answer is told."""
        self._ops += 1
        return self._record(Read(self._ops, ledger))

    def found(self, op: int, *entries: tuple[int, bytes]) -> None:
        """The read returned these (id, payload)."""
        self._record(Found(op, entries))

    def absent(self, op: int, entry_id: int) -> None:
        """The read was answered `no-such-entry`. Call nothing where it was any other error."""
        self._record(Absent(op, entry_id))

    def lac(self, ledger: int, last_add_confirmed: int) -> None:
        """A last add confirmed was shown."""
        self._record(Lac(ledger, last_add_confirmed))

    def closed(self, ledger: int, last: int) -> None:
        """A client was told that the ledger is closed at `last`."""
        self._record(Closed(ledger, last))

    def content(self, ledger: int, *entries: tuple[int, bytes]) -> None:
        """The whole of a closed ledger, read at the end."""
        self._record(Content(ledger, entries))

    def write(self, path: Path) -> None:
        """Write all of it, an event a line, for a person who looks for a cause."""
        path.write_text("".join(f"{event}\n" for event in self.events))


@dataclass(slots=True)
class _Pending:
    """An append as far as it is known. `floor` is the highest id that was known when it began."""

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


class _Checker:
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

    def learn(self, ledger: int, entry_id: int, payload: bytes, how: str) -> None:
        """Payload and id belong together: somebody was told so."""
        state = self.ledger(ledger)
        before = state.known.setdefault(entry_id, payload)
        if before != payload:
            self.say("divergent", ledger, entry_id, f"{how} {payload!r}, was {before!r}")
            return
        origin = self.payloads.get(payload)
        if origin is None or origin.ledger != ledger:
            self.say("phantom", ledger, entry_id, f"{how} {payload!r}, which nobody appended")
        elif origin.failed:
            self.say("phantom", ledger, entry_id, f"{how} {payload!r}, which had failed")
        elif entry_id <= origin.floor:
            self.say("reordered", ledger, entry_id, f"{payload!r} began after {origin.floor}")
        place = self.places.setdefault(payload, (ledger, entry_id))
        if place != (ledger, entry_id):
            self.say("duplicate", ledger, entry_id, f"{payload!r} is also entry {place[1]}")
        if entry_id >= state.appended:
            self.say("phantom", ledger, entry_id, f"only {state.appended} payloads were appended")
        state.highest = max(state.highest, entry_id)

    def step(self, event: Event) -> None:
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
                if lac >= state.appended:
                    self.say("lac", ledger, lac, f"only {state.appended} payloads were appended")
            case Closed(ledger, last):
                state = self.ledger(ledger)
                if state.last is not None and state.last != last:
                    self.say("divergent", ledger, last, f"the end was {state.last}")
                state.last = last
            case Content(ledger, entries):
                for entry_id, payload in entries:
                    self.learn(ledger, entry_id, payload, "stored")
                self.ledger(ledger).content = dict(entries)
                if [entry_id for entry_id, _ in entries] != list(range(len(entries))):
                    self.say("gap", ledger, None, "the ids are not dense from 0")

    def finish(self) -> None:
        for number, state in self.ledgers.items():
            end = state.last
            if state.content is not None:
                stored = len(state.content) - 1
                if end is not None and stored != end:
                    self.say("gap", number, stored, f"the ledger was closed at {end}")
                end = stored if end is None else end
                for entry_id in sorted(state.acked - state.content.keys()):
                    self.say("lost", number, entry_id, "acknowledged and not stored")
            for entry_id in sorted(state.acked & state.absent):
                self.say("lost", number, entry_id, "acknowledged and answered as absent")
            for entry_id in sorted((state.known.keys() - state.acked) & state.absent):
                self.say("gone", number, entry_id, "was read, and answered as absent")
            if end is None:
                continue
            if state.lac > end:
                self.say("lac", number, state.lac, f"the ledger ends at {end}")
            for entry_id in sorted(state.known):
                if entry_id > end:
                    kind = "lost" if entry_id in state.acked else "gone"
                    self.say(kind, number, entry_id, f"known; the ledger ends at {end}")
            for entry_id in sorted(entry for entry in state.absent if entry <= end):
                self.say("gone", number, entry_id, f"absent, but the ledger ends at {end}")


def check(history: History) -> list[Violation]:
    """All violations of a history, in the order in which they show."""
    checker = _Checker()
    for event in history.events:
        checker.step(event)
    checker.finish()
    return checker.violations
