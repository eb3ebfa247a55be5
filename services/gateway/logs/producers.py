"""The producer table of one log at its owner: what makes a retry harmless (rule 26).

It holds what was acknowledged and, beside it, what is in flight. It is rebuilt at each takeover from
the row's table and a replay of the ledger, so it is never told of a failure: an owner that fails
is thrown away, table and all.

Invariants:
  - `next_seq` of a producer counts what was begun; its answers count what was acknowledged;
  - at most PRODUCERS_MAX producers, the one that was silent longest goes first, but none that has
    a request in flight.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from quorumlog.errors import ExpiredProducer, InvalidRequest, SequenceGap, StaleProducer
from quorumlog.protocol.batch import ProducerSeq
from quorumlog.protocol.log import ANSWERS_MAX, PRODUCERS_MAX, Answer, Producer, bounded

EXPIRY_MS: Final = 7 * 24 * 3600 * 1000
"""A producer that was silent for so long is forgotten (Kafka's default for a producer's state)."""

NEW_SEQ_MAX: Final = 1000
"""Up to this seq an unknown producer is taken for a new one whose first requests were overtaken,
even on a log that has forgotten some: requests that one client has in flight."""

P = TypeVar("P")


@dataclass(slots=True)
class _State(Generic[P]):
    epoch: int
    next_seq: int = 0
    seen_ms: int = 0
    answers: OrderedDict[int, Answer] = field(default_factory=OrderedDict)
    in_flight: OrderedDict[int, tuple[str, P]] = field(default_factory=OrderedDict)


class ProducerTable(Generic[P]):
    """The producers of a log. `P` is what a request in flight is for its owner."""

    def __init__(self, producers: Iterable[Producer] = (), *, forgotten: bool = False) -> None:
        """`forgotten`: a producer of this log was dropped before (LogMetadata)."""
        self.forgotten = forgotten
        self._states: OrderedDict[str, _State[P]] = OrderedDict()
        for producer in sorted(producers, key=lambda producer: producer.seen_ms):
            state = _State[P](producer.epoch, producer.next_seq, producer.seen_ms)
            state.answers.update((answer.seq, answer) for answer in producer.answers)
            self._states[producer.id] = state

    def __len__(self) -> int:
        """Producers that are known."""
        return len(self._states)

    def find(self, request: ProducerSeq, content: str) -> Answer | P | None:
        """The first answer to this request, or the one in flight; None when the request is the
        next of its producer and may begin.

        Raises: StaleProducer, SequenceGap, ExpiredProducer; InvalidRequest when the first request
        of this seq had another content.
        """
        state = self._states.get(request.id)
        if state is not None and request.epoch < state.epoch:
            raise StaleProducer(
                f"producer {request.id} is in epoch {state.epoch}", producer_epoch=state.epoch
            )
        if state is None or request.epoch > state.epoch:
            if request.seq == 0:
                return None
            if state is None and self.forgotten and request.seq > NEW_SEQ_MAX:
                raise ExpiredProducer(f"nothing is known of producer {request.id} any more")
            raise _gap(request, 0)
        if request.seq >= state.next_seq:
            if request.seq == state.next_seq:
                return None
            raise _gap(request, state.next_seq)
        return _repeated(state, request, content)

    def begin(self, request: ProducerSeq, content: str, pending: P) -> None:
        """A request that `find` knew nothing of is in flight from now on."""
        state = self._state(request)
        assert request.seq == state.next_seq, "find() comes first"
        state.in_flight[request.seq] = (content, pending)
        state.next_seq += 1

    def done(self, request: ProducerSeq, answer: Answer, *, now_ms: int) -> None:
        """A request is acknowledged. One that was never begun (a replay) is taken as it comes."""
        state = self._states.get(request.id)
        if state is not None and request.epoch < state.epoch:
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
        """Drop the producers that were silent for too long, and those beyond the limit."""
        while self._states:
            name, oldest = next(iter(self._states.items()))
            is_old = oldest.seen_ms < now_ms - EXPIRY_MS
            if oldest.in_flight or not (is_old or len(self._states) > PRODUCERS_MAX):
                return
            del self._states[name]
            self.forgotten = True

    def snapshot(self) -> tuple[Producer, ...]:
        """What is acknowledged, as a row keeps it."""
        return bounded(
            tuple(
                Producer(name, state.epoch, state.seen_ms, tuple(state.answers.values()))
                for name, state in self._states.items()
                if state.answers
            )[-PRODUCERS_MAX:]
        )

    def _state(self, request: ProducerSeq) -> _State[P]:
        state = self._states.get(request.id)
        if state is None or state.epoch < request.epoch:
            seen = 0 if state is None else state.seen_ms
            state = self._states[request.id] = _State(request.epoch, seen_ms=seen)
        return state


def _gap(request: ProducerSeq, expected: int) -> SequenceGap:
    return SequenceGap(
        f"producer {request.id} sent {request.seq}, but {expected} is the next of epoch"
        f" {request.epoch}",
        producer_expected_seq=expected,
    )


def _repeated(state: _State[P], request: ProducerSeq, content: str) -> Answer | P:
    answer = state.answers.get(request.seq)
    pending = state.in_flight.get(request.seq)
    if answer is None and pending is None:
        raise ExpiredProducer(
            f"request {request.seq} of producer {request.id} was appended; its answer is no longer"
            " kept"
        )
    if answer is not None:
        first, found = answer.content, answer
        if first == content:
            return found
    else:
        assert pending is not None
        if pending[0] == content:
            return pending[1]
    raise InvalidRequest(
        f"request {request.seq} of producer {request.id} had another content",
        errors=[{"pointer": "Producer-Seq", "detail": "was used for other records"}],
    )
