"""The producer table of one log, at the log's owner. It recognizes retries (rules 26 and 26a).

The table has acknowledged requests and requests in flight. Each takeover rebuilds the table from
the metadata's table and a replay of the ledger. So the table handles no failures: a failed owner is
dropped with its table.

An unknown producer need not be new (rule 26a). The table is bounded, so an unknown producer may be
a forgotten one, and its retries must not be appended. `forgotten_end` is the
offset after the last record of all forgotten producers. `Producer-Since` of a request is the log's
end before its producer's first request. An unknown producer is new only if
`since >= forgotten_end`, and a request with a `since` above the log's end is rejected:

    p reads next_offset 8, its since, and its request p/0 is appended at 8;
    others append 9 to 20, and p is forgotten: forgotten_end is 9, the end and not the last offset;
    p/0 is retried, and expired, as 8 < 9 (with the last offset, 8, the test would need `>`);
    q has read next_offset 9, so p's last record was there: q is new, as 9 >= 9;
    r has read 8 like p, and sends only now: r is rejected, because r could be p.

In general, an appended request with `since` s has an offset o >= s (checked when offsets are
assigned). After its producer is forgotten, forgotten_end >= o + 1 > s, so a retry with the same s
is always rejected. The inequality holds for any s that a client sends. A request with too low an s
is rejected at worst. A request with too high an s is rejected until the log has reached s, and then
o >= s again. Offsets in flight when an owner died may be assigned again: a request that was not
appended left no record, and a request that is appended again is checked again. Without the header,
s is 0, so no producer is new once any producer was forgotten.

Invariants:
  - `next_seq` of a producer counts begun requests; `answers` has only acknowledged requests;
  - the table has at most PRODUCERS_MAX producers; the producer that was silent longest is forgotten
    first, but no producer with a request in flight;
  - a producer with an acknowledged request is in the table, or all its records are below
    `forgotten_end`, which never decreases.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from quorumlog import header
from quorumlog.errors import ExpiredProducer, InvalidRequest, SequenceGap, StaleProducer
from quorumlog.protocol.batch import ProducerSeq
from quorumlog.protocol.log.row import ANSWERS_MAX, PRODUCERS_MAX, Answer, Producer, bounded

EXPIRY_MS: Final = 7 * 24 * 3600 * 1000
"""Time after which a silent producer is forgotten, by append times (Kafka's default)."""

P = TypeVar("P")


@dataclass(slots=True)
class _State(Generic[P]):
    epoch: int
    next_seq: int = 0
    seen_ms: int = 0
    answers: OrderedDict[int, Answer] = field(default_factory=OrderedDict)
    in_flight: OrderedDict[int, tuple[str, P]] = field(default_factory=OrderedDict)


class ProducerTable(Generic[P]):
    """The producers of a log. `P`: the owner's type of a request in flight."""

    def __init__(self, producers: Iterable[Producer] = (), *, forgotten_end: int = 0) -> None:
        """Begin with `producers` (longest silent first) and `forgotten_end` from LogMetadata."""
        self.forgotten_end = forgotten_end
        self._states: OrderedDict[str, _State[P]] = OrderedDict()
        for producer in producers:
            state = _State[P](producer.epoch, producer.next_seq, producer.seen_ms)
            state.answers.update((answer.seq, answer) for answer in producer.answers)
            self._states[producer.id] = state

    def __len__(self) -> int:
        """The number of known producers."""
        return len(self._states)

    def find(
        self, request: ProducerSeq, content: str | None, *, since: int = 0
    ) -> Answer | P | None:
        """Return the first answer to this request, or its first copy in flight. Returns None if the
        request is its producer's next request and may begin. `since` must not be above the log's
        end. Without `content`, the producer's numbers alone identify a retry.

        Raises: StaleProducer, SequenceGap, ExpiredProducer; InvalidRequest if the first request
        with this seq had different content.
        """
        state = self._states.get(request.id)
        if state is None and since < self.forgotten_end:
            raise ExpiredProducer(
                f"producer {request.id} is unknown, and may be one that the log has forgotten. A new"
                " producer must send Producer-Since (the log's next_offset, read before its first"
                f" request) of at least {self.forgotten_end}"
            )
        if state is not None and request.epoch < state.epoch:
            raise StaleProducer(
                f"epoch {request.epoch} of producer {request.id} has ended: use epoch {state.epoch}"
                " or a higher epoch",
                producer_epoch=state.epoch,
            )
        if state is None or request.epoch > state.epoch:
            if request.seq == 0:
                return None
            raise _gap(request, 0, None if state is None else state.epoch)
        if request.seq >= state.next_seq:
            if request.seq == state.next_seq:
                return None
            raise _gap(request, state.next_seq, None)
        return _repeated(state, request, content)

    def begin(self, request: ProducerSeq, content: str, pending: P) -> object:
        """Record a request in flight, after `find` returned None. Returns a value for `undo`."""
        before = self._states.get(request.id)
        state = self._state(request)
        assert request.seq == state.next_seq, "find() must have returned None"
        state.in_flight[request.seq] = (content, pending)
        state.next_seq += 1
        return None if before is state else before

    def undo(self, request: ProducerSeq, before: object) -> None:
        """Undo the last `begin`, whose request was rejected after all."""
        state = self._states[request.id]
        del state.in_flight[request.seq]
        state.next_seq -= 1
        if isinstance(before, _State):
            self._states[request.id] = before
        elif request.seq == 0:
            del self._states[request.id]

    def done(self, request: ProducerSeq, answer: Answer, *, now_ms: int) -> None:
        """Record that a request, appended at the log's time `now_ms`, is acknowledged. A replayed
        request, which was never begun, is accepted without checks.
        """
        state = self._states.get(request.id)
        if state is not None and (request.epoch, request.seq) < (state.epoch, state.next_seq):
            if not state.in_flight:
                # A replay in log order shows that the owner had forgotten this producer, and
                # accepted a new producer of the same name.
                del self._states[request.id]
            elif request.epoch < state.epoch:
                return
        state = self._state(request)
        state.in_flight.pop(request.seq, None)
        state.next_seq = max(state.next_seq, request.seq + 1)
        state.seen_ms = max(state.seen_ms, now_ms)
        state.answers[request.seq] = answer
        while len(state.answers) > ANSWERS_MAX:
            state.answers.popitem(last=False)
        self._states.move_to_end(request.id)

    def forget(self, *, now_ms: int) -> None:
        """Forget producers that were silent for too long, and producers beyond the limit."""
        while self._states:
            name, oldest = next(iter(self._states.items()))
            is_old = oldest.seen_ms < now_ms - EXPIRY_MS
            if oldest.in_flight or not (is_old or len(self._states) > PRODUCERS_MAX):
                return
            self._drop(name)

    def highest(self, name: str) -> int | None:
        """The highest acknowledged number in a producer's epoch; None if there is none."""
        state = self._states.get(name)
        return max(state.answers, default=None) if state is not None else None

    def lost(self, end: int) -> None:
        """Record that requests below an offset are lost, and their producers unknown (rule 31)."""
        self.forgotten_end = max(self.forgotten_end, end)

    def snapshot(self) -> tuple[Producer, ...]:
        """The acknowledged requests, in the form for metadata. No request may be in flight. Forgets
        producers beyond the limit, so `forgotten_end` must be read afterwards.
        """
        while len(self._states) > PRODUCERS_MAX:
            self._drop(next(iter(self._states)))
        return bounded(
            tuple(
                Producer(name, state.epoch, state.seen_ms, tuple(state.answers.values()))
                for name, state in self._states.items()
                if state.answers
            )
        )

    def _drop(self, name: str) -> None:
        state = self._states.pop(name)
        assert not state.in_flight, "a producer with a request in flight is not forgotten"
        seen = (answer.last_offset for answer in state.answers.values())
        self.lost(max(seen, default=-1) + 1)

    def _state(self, request: ProducerSeq) -> _State[P]:
        state = self._states.get(request.id)
        if state is None or state.epoch < request.epoch:
            seen = 0 if state is None else state.seen_ms
            state = self._states[request.id] = _State(request.epoch, seen_ms=seen)
        return state


def _gap(request: ProducerSeq, expected: int, epoch: int | None) -> SequenceGap:
    """The error for a gap. `epoch`: the present epoch if the request would begin another epoch."""
    return SequenceGap(
        f"Producer-Seq {request.seq} of producer {request.id} leaves a gap: send {expected} first"
        f" (epoch {request.epoch})",
        producer_expected_seq=expected,
        producer_epoch=epoch,
    )


def _repeated(state: _State[P], request: ProducerSeq, content: str | None) -> Answer | P:
    answer = state.answers.get(request.seq)
    pending = state.in_flight.get(request.seq)
    if answer is None and pending is None:
        raise ExpiredProducer(
            f"request {request.seq} of producer {request.id} was appended before, but its answer is"
            " no longer stored: read the log to find the records"
        )
    if answer is not None:
        first, found = answer.content, answer
        if content in (None, first):
            return found
    else:
        assert pending is not None
        if content in (None, pending[0]):
            return pending[1]
    raise InvalidRequest(
        f"request {request.seq} of producer {request.id} was sent before with other records: send a"
        " retry unchanged, or use the next number",
        errors=[{"pointer": header.PRODUCER_SEQ, "detail": "was used for other records"}],
    )
