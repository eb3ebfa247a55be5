"""The producer table of one log at its owner: what makes a retry harmless (rules 26 and 26a).

It holds what was acknowledged, and what is in flight. Each takeover rebuilds it from the row's table
and a replay of the ledger. So it never hears of a failure: an owner that fails is dropped with its
table.

Unknown is not new (rule 26a). A table is bounded, so a producer that is not in it may be one that
was forgotten, whose repeat must not be appended. `forgotten_end` is the offset after the last record
of everybody that was ever forgotten, and a request says in `Producer-Since` where the log ended
before its producer had sent anything. An unknown producer is new only with
`since >= forgotten_end`, and no request is taken with a `since` above the log's end:

    p reads next_offset 8, its since; p/0 is appended at 8, and nothing was in between;
    others append 9 to 20, and p is forgotten: forgotten_end is 9, the end and not the last offset;
    p/0 comes again: 8 < 9, expired. (Against the last offset, 8, it would have to be `>`.)
    q has read next_offset 9: 9 >= 9, q is new. Who read 9 began after p's last record was there.
    r has read 8 as p did, and sends only now: it is refused, for nobody can tell it from p.

In general: a request of `since` s that was appended got an offset o >= s (checked where offsets are
given out), so who is forgotten after it leaves forgotten_end >= o + 1 > s, and a repeat with the same s
is refused for ever. That holds whatever route, gateway or crash the reading of s came from: too low is
refused at worst, too high is not taken until the log has got there, and then o >= s again. Offsets that
were in flight when an owner died, and are given out anew, change nothing: what was not appended left no
record, and what is appended again is checked again. Without the header s is 0, so that nobody is new
once anybody was forgotten.

Invariants:
  - `next_seq` of a producer counts what was begun; its answers count what was acknowledged;
  - at most PRODUCERS_MAX producers, the one that was silent longest goes first, but none that has
    a request in flight;
  - a producer with an acknowledged request is in the table, or all its records are below
    `forgotten_end`, which never goes back.
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
"""A producer that was silent for so long, by the log's append times, is forgotten (Kafka's default)."""

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

    def __init__(self, producers: Iterable[Producer] = (), *, forgotten_end: int = 0) -> None:
        """`producers`, the one that was silent longest first, and `forgotten_end`: of the log's row
        (LogMetadata).
        """
        self.forgotten_end = forgotten_end
        self._states: OrderedDict[str, _State[P]] = OrderedDict()
        for producer in producers:
            state = _State[P](producer.epoch, producer.next_seq, producer.seen_ms)
            state.answers.update((answer.seq, answer) for answer in producer.answers)
            self._states[producer.id] = state

    def __len__(self) -> int:
        """Producers that are known."""
        return len(self._states)

    def find(
        self, request: ProducerSeq, content: str | None, *, since: int = 0
    ) -> Answer | P | None:
        """The first answer to this request, or the one in flight; None when the request is the
        next of its producer and may begin. `since` is not above the log's end. Without `content` a repeat is known
        by its numbers alone.

        Raises: StaleProducer, SequenceGap, ExpiredProducer; InvalidRequest when the first request
        of this seq had another content.
        """
        state = self._states.get(request.id)
        if state is None and since < self.forgotten_end:
            raise ExpiredProducer(
                f"nothing is known of producer {request.id}, and the log has forgotten producers up"
                f" to offset {self.forgotten_end}: only one whose Producer-Since (the log's"
                " next_offset, read before the producer's first request) is not below that is new"
            )
        if state is not None and request.epoch < state.epoch:
            raise StaleProducer(
                f"producer {request.id} is in epoch {state.epoch}", producer_epoch=state.epoch
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
        """A request that `find` knew nothing of is in flight from now on. Gives what `undo` needs."""
        before = self._states.get(request.id)
        state = self._state(request)
        assert request.seq == state.next_seq, "find() comes first"
        state.in_flight[request.seq] = (content, pending)
        state.next_seq += 1
        return None if before is state else before

    def undo(self, request: ProducerSeq, before: object) -> None:
        """The request that was begun last was not taken after all."""
        state = self._states[request.id]
        del state.in_flight[request.seq]
        state.next_seq -= 1
        if isinstance(before, _State):
            self._states[request.id] = before
        elif request.seq == 0:
            del self._states[request.id]

    def done(self, request: ProducerSeq, answer: Answer, *, now_ms: int) -> None:
        """A request is acknowledged, appended at the log's `now_ms`. One that was never begun (a
        replay) is taken as it comes.
        """
        state = self._states.get(request.id)
        if state is not None and (request.epoch, request.seq) < (state.epoch, state.next_seq):
            if not state.in_flight:
                # A replay, in the log's order: its owner had forgotten this producer, and took one
                # of the same name for new.
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
        """Drop the producers that were silent for too long, and those beyond the limit."""
        while self._states:
            name, oldest = next(iter(self._states.items()))
            is_old = oldest.seen_ms < now_ms - EXPIRY_MS
            if oldest.in_flight or not (is_old or len(self._states) > PRODUCERS_MAX):
                return
            self._drop(name)

    def highest(self, name: str) -> int | None:
        """The highest number of a producer's epoch that is acknowledged."""
        state = self._states.get(name)
        return max(state.answers, default=None) if state is not None else None

    def lost(self, end: int) -> None:
        """Requests below an offset are lost (rule 31), and their producers with them."""
        self.forgotten_end = max(self.forgotten_end, end)

    def snapshot(self) -> tuple[Producer, ...]:
        """What is acknowledged, as a row keeps it; nothing is in flight. Producers
        that it leaves out are forgotten: read `forgotten_end` afterwards.
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
        assert not state.in_flight, "who has a request in flight is not forgotten"
        seen = (answer.last_offset for answer in state.answers.values())
        self.lost(max(seen, default=-1) + 1)

    def _state(self, request: ProducerSeq) -> _State[P]:
        state = self._states.get(request.id)
        if state is None or state.epoch < request.epoch:
            seen = 0 if state is None else state.seen_ms
            state = self._states[request.id] = _State(request.epoch, seen_ms=seen)
        return state


def _gap(request: ProducerSeq, expected: int, epoch: int | None) -> SequenceGap:
    """`epoch`: the one that the request would end, where it begins another."""
    return SequenceGap(
        f"producer {request.id} sent {request.seq}, but {expected} is the next of epoch"
        f" {request.epoch}",
        producer_expected_seq=expected,
        producer_epoch=epoch,
    )


def _repeated(state: _State[P], request: ProducerSeq, content: str | None) -> Answer | P:
    answer = state.answers.get(request.seq)
    pending = state.in_flight.get(request.seq)
    if answer is None and pending is None:
        raise ExpiredProducer(
            f"request {request.seq} of producer {request.id} was appended; its answer is no longer"
            " kept"
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
        f"request {request.seq} of producer {request.id} had another content",
        errors=[{"pointer": header.PRODUCER_SEQ, "detail": "was used for other records"}],
    )
