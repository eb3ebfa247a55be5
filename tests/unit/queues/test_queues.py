"""Work queues, a request at a time: the claims of rule 33, and bounds."""

from typing import Any, TypeVar

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quorumlog import errors
from quorumlog.protocol import offset_store, queues
from quorumlog.protocol.offset_set import NONE, Offsets
from quorumlog.protocol.offset_store import (
    AppendBatch,
    Appended,
    Asked,
    BatchesRead,
    OffsetStore,
    Overtaken,
    ReadLog,
    Reported,
    Truncate,
)
from quorumlog.protocol.queue_requests import (
    BeginMove,
    DeleteQueue,
    EndMove,
    FailMove,
    LookQueue,
    PutQueue,
    Redrive,
    Settle,
    Settled,
    Settlement,
    Take,
    Taken,
)
from quorumlog.protocol.queue_state import Queue, QueueSettings
from quorumlog.protocol.queues import Queues
from quorumlog.protocol.rows import Batch, FreeLog, List, Stamp
from quorumlog.wire.position_bodies import QUEUE_BODIES
from quorumlog.wire.row_bodies import BadRows

T = TypeVar("T")
LEASE_S = 10.0
NAME = ("log", "q")


class Keeper:
    """A keeper whose appends are acknowledged at once, its clock, and a log that ends at `end`."""

    def __init__(self, batches: list[Batch[Queue]] | None = None, now_s: float = 100.0) -> None:
        self.batches = [] if batches is None else batches
        self.now_s, self.end, self.first = now_s, 100, 0
        self.truncated = 0
        self.machine = OffsetStore(kind=Queues)

    def ask(self, *requests: Any, stamp: Stamp | None = None) -> list[Any]:
        reported: dict[Any, Any] = {}
        events: list[Any] = [Asked(at, request, stamp) for at, request in enumerate(requests)]
        while events:
            for effect in self.machine.step(events.pop(0), self.now_s, 5000):
                match effect:
                    case Reported(key, answer):
                        reported[key] = answer
                    case ReadLog(start):
                        found = self.batches[start or 0 :]
                        batches = tuple(enumerate(found, start or 0))
                        events.append(BatchesRead(batches, len(self.batches)))
                    case AppendBatch(expect, batch):
                        is_end = expect == len(self.batches)
                        if is_end:
                            stored = QUEUE_BODIES.decode_batch(QUEUE_BODIES.encode_batch(batch))
                            assert stored == batch
                            self.batches.append(batch)
                        events.append(Appended() if is_end else Overtaken(is_owner=True))
                    case Truncate(before):
                        self.truncated = before
                    case _:
                        raise AssertionError(effect)
        return [reported[at] for at in range(len(requests))]

    def done(self, kind: type[T], request: Any) -> T:
        (answer,) = self.ask(request)
        assert isinstance(answer, kind), answer
        return answer

    def put(self, **settings: Any) -> Queue:
        wanted = QueueSettings(int(LEASE_S * 1000), **settings)
        return self.done(Queue, PutQueue(*NAME, "1", wanted, 0))

    def take(self, count: int = 10, keys: Any = ()) -> Taken:
        return self.done(Taken, Take(*NAME, "1", self.first, self.end, count, keys))

    def settle(self, kind: str, token: int, *offsets: int, **more: Any) -> Settled:
        return self.done(Settled, Settle(*NAME, kind, ((token, Offsets.of(offsets)),), **more))

    def look(self) -> Queue:
        return self.done(Queue, LookQueue(*NAME))


def given_by(taken: Taken) -> dict[int, int]:
    """Each record, and how often it was given."""
    return {at: count for count, each in taken.records for at in each}


def reasons(settled: Settled) -> list[tuple[str, list[int]]]:
    return [(one.reason, list(one.offsets)) for one in settled.refused]


def test_an_acknowledged_record_is_not_given_again() -> None:
    keeper = Keeper()
    keeper.put()
    first = keeper.take(5)
    assert keeper.settle(Settlement.ACK, first.token, 0, 1, 3).done == 3
    keeper.now_s += LEASE_S
    assert given_by(keeper.take()) == {2: 2, 4: 2} | dict.fromkeys(range(5, 13), 1)
    row = keeper.look()
    assert (row.floor, list(row.acked), row.redelivered) == (2, [3], 2)


def test_a_record_is_given_again_only_after_a_whole_lease_without_an_extension() -> None:
    keeper = Keeper()
    keeper.put()
    keeper.end = 3
    first = keeper.take()
    keeper.now_s += LEASE_S - 1
    keeper.settle(Settlement.EXTEND, first.token)
    keeper.now_s += LEASE_S - 1
    none = keeper.take()
    assert (none.records, none.wait_ms) == ((), 1000)
    keeper.now_s += 1
    again = keeper.take()
    assert given_by(again) == {0: 2, 1: 2, 2: 2}
    assert reasons(keeper.settle(Settlement.ACK, first.token)) == [("claim-ended", [])]


def test_a_claim_beyond_its_time_counts_until_another_worker_has_its_records() -> None:
    keeper = Keeper()
    keeper.put()
    first = keeper.take(3)
    keeper.now_s += 100 * LEASE_S
    assert keeper.settle(Settlement.ACK, first.token, 0).done == 1
    second = keeper.take(1)
    assert given_by(second) == {1: 2}
    late = keeper.settle(Settlement.ACK, first.token, 0, 1, 2)
    assert (late.done, reasons(late)) == (1, [("acknowledged", [0]), ("claim-ended", [1])])


def test_a_stale_token_is_refused_with_its_reason() -> None:
    keeper = Keeper()
    keeper.put()
    first = keeper.take(4)
    keeper.settle(Settlement.NAK, first.token, 1)
    keeper.settle(Settlement.ACK, first.token, 0)
    second = keeper.take(1)
    assert given_by(second) == {1: 2}
    for kind in (Settlement.ACK, Settlement.NAK, Settlement.EXTEND, Settlement.UNREAD):
        refused = keeper.settle(kind, first.token, 0, 1)
        assert reasons(refused) == [("acknowledged", [0]), ("claim-ended", [1])]
        assert reasons(keeper.settle(kind, 12345, 2)) == [("claim-ended", [2])]
    assert keeper.settle(Settlement.ACK, second.token).done == 1


def test_a_new_keeper_knows_all_claims_and_waits_a_whole_lease() -> None:
    keeper = Keeper()
    keeper.put()
    first = keeper.take(3)
    keeper.settle(Settlement.NAK, first.token, 0, delay_ms=60_000)
    heir = Keeper(keeper.batches, now_s=7.0)
    heir.end = 3
    assert heir.look() == keeper.machine.state.rows[NAME]
    heir.now_s += LEASE_S - 0.5
    assert given_by(heir.take()) == {}
    assert heir.settle(Settlement.ACK, first.token, 1).done == 1
    heir.now_s += 0.5
    assert given_by(heir.take()) == {2: 2}
    heir.now_s += 50
    assert given_by(heir.take(1)) == {0: 2}
    # The keeper of before reads what it has missed, and decides by that.
    keeper.end = 3
    assert given_by(keeper.take()) == {}
    assert reasons(keeper.settle(Settlement.ACK, first.token, 2)) == [("claim-ended", [2])]


def test_records_of_a_key_are_given_in_order_one_at_a_time_also_again() -> None:
    keeper = Keeper()
    keeper.put(order="key")
    keys = tuple((at, (at % 2) + 1 if at != 4 else 0) for at in range(8))
    assert given_by(keeper.take()) == {}  # no key is known
    first = keeper.take(keys=keys)
    assert given_by(first) == {0: 1, 1: 1, 4: 1}
    assert given_by(keeper.take(keys=keys)) == {}
    keeper.settle(Settlement.NAK, first.token, 0, delay_ms=1000)
    keeper.settle(Settlement.ACK, first.token, 1)
    second = keeper.take(keys=keys)
    assert given_by(second) == {3: 1}  # the key of 0 waits with it
    assert list(second.acked) == [1]
    keeper.now_s += 1
    assert given_by(keeper.take(keys=keys[2:])) == {}  # the key of 0 is not known
    assert given_by(keeper.take(keys=keys)) == {0: 2}


def test_a_record_that_fails_too_often_is_moved_and_then_done() -> None:
    keeper = Keeper()
    keeper.put(max_attempts=2, dead_letter_log="dead")
    keeper.end = 3
    for _ in range(2):
        token = keeper.take().token
        keeper.settle(Settlement.NAK, token, 1, reason="no")
        keeper.now_s += LEASE_S
    row = keeper.look()
    assert [(list(each.offsets), each.reason, each.since) for each in row.moves] == [
        ([1], "no", -1),
        ([0, 2], "the lease ended without an acknowledgement", -1),
    ]
    assert given_by(keeper.take()) == {}
    (one, two) = row.moves
    # Of two keepers that begin, one does.
    keeper.done(Queue, BeginMove(*NAME, two.id, (-1, ""), 7, Offsets.of((0,)), "d"))
    row = keeper.done(Queue, BeginMove(*NAME, two.id, (-1, ""), 9, Offsets.of((0, 2)), "d"))
    assert [(list(each.offsets), each.since) for each in row.moves] == [
        ([1], -1),
        ([0], 7),
        ([2], -1),
    ]
    row = keeper.done(Queue, EndMove(*NAME, two.id))
    row = keeper.done(Queue, EndMove(*NAME, two.id))
    assert (row.floor, row.dead) == (1, 1)
    row = keeper.done(Queue, EndMove(*NAME, one.id, 1))
    assert (row.floor, row.dead, row.lost) == (2, 1, 1)
    row = keeper.done(Queue, Redrive(*NAME, "1", "d", (0, ""), 4, Offsets.of((1, 3))))
    assert (row.redriven, row.moves[-1].is_back) == (4, True)
    assert keeper.done(Queue, Redrive(*NAME, "1", "d", (0, ""), 9, Offsets.of((5,)))) == row


def test_dead_letters_beyond_the_most_moves_join_one_that_was_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queues, "MOVES_MAX", 2)
    keeper = Keeper()
    keeper.put(max_attempts=1, dead_letter_log="dead")
    token = keeper.take().token
    for at in (0, 1):
        keeper.settle(Settlement.NAK, token, at, reason=str(at))
    (first, _) = keeper.look().moves
    keeper.done(Queue, BeginMove(*NAME, first.id, (-1, ""), 7, first.offsets, "d"))
    for at in (2, 3):
        keeper.settle(Settlement.NAK, token, at, reason=str(at))
    moves = keeper.look().moves
    assert [(list(each.offsets), each.reason) for each in moves] == [([0], "0"), ([1, 2, 3], "1")]
    assert keeper.done(Queue, Redrive(*NAME, "1", "d", (0, ""), 4, Offsets.of((1,)))).redriven == 0


def test_a_late_request_does_not_replace_the_queue_of_a_later_log() -> None:
    keeper = Keeper()
    keeper.put()
    later = PutQueue(*NAME, "2", QueueSettings(), 5)
    row = keeper.done(Queue, later)
    assert (row.created, row.floor) == ("2", 5)
    keeper.done(errors.LogReplaced, PutQueue(*NAME, "1", QueueSettings(), 0))
    assert keeper.done(Queue, later) == row


def test_a_move_begins_anew_for_a_log_that_was_made_again_also_at_the_same_end() -> None:
    keeper = Keeper()
    keeper.put(max_attempts=1, dead_letter_log="dead")
    keeper.settle(Settlement.NAK, keeper.take(1).token)
    (move,) = keeper.look().moves
    keeper.done(Queue, BeginMove(*NAME, move.id, (-1, ""), 7, move.offsets, "d"))
    keeper.done(Queue, BeginMove(*NAME, move.id, (7, "d"), 7, move.offsets, "e"))
    late = keeper.done(Queue, BeginMove(*NAME, move.id, (7, "d"), 9, move.offsets, "d"))
    assert [(each.since, each.created) for each in late.moves] == [(7, "e")]


def test_a_move_that_no_log_accepted_begins_anew_with_another_dead_letter_log() -> None:
    keeper = Keeper()
    keeper.put(max_attempts=1, dead_letter_log="dead")
    keeper.settle(Settlement.NAK, keeper.take(2).token)
    (move,) = keeper.look().moves
    keeper.done(Queue, BeginMove(*NAME, move.id, (-1, ""), 7, move.offsets, "d"))
    row = keeper.done(Queue, BeginMove(*NAME, move.id, (7, "d"), -1, move.offsets, ""))
    assert row.moves == (move,)
    row = keeper.put(max_attempts=1, dead_letter_log="other")
    late = keeper.done(Queue, BeginMove(*NAME, move.id, (7, "d"), 9, move.offsets, "d"))
    assert late.moves == row.moves == (move,)
    assert (late.dead, late.floor, list(late.given)) == (0, 0, [0, 1])


def test_the_dead_letter_log_stays_while_records_may_be_in_it() -> None:
    keeper = Keeper()
    keeper.put(max_attempts=1, dead_letter_log="dead")
    keeper.settle(Settlement.NAK, keeper.take(1).token)
    (move,) = keeper.look().moves
    keeper.done(Queue, FailMove(*NAME, "log-fenced"))
    row = keeper.put(max_attempts=1, dead_letter_log="other")
    assert (row.settings.dead_letter_log, row.failed) == ("other", "")
    keeper.done(Queue, BeginMove(*NAME, move.id, (-1, ""), 7, move.offsets, "d"))
    wanted = QueueSettings(max_attempts=1, dead_letter_log="dead")
    keeper.done(errors.QueueExists, PutQueue(*NAME, "1", wanted, 0))
    assert keeper.done(Queue, FailMove(*NAME, "log-fenced")).failed == "log-fenced"
    assert keeper.done(Queue, EndMove(*NAME, move.id)).failed == ""
    assert keeper.done(Queue, FailMove(*NAME, "log-fenced")).failed == ""
    assert keeper.done(Queue, PutQueue(*NAME, "1", wanted, 0)).settings == wanted


def test_dead_letters_go_back_to_no_later_log() -> None:
    keeper = Keeper()
    keeper.put(dead_letter_log="dead")
    keeper.done(errors.LogReplaced, Redrive(*NAME, "2", "d", (0, ""), 4, Offsets.of((1,))))
    assert keeper.look().moves == ()


def test_records_that_a_gateway_could_not_send_count_no_attempt() -> None:
    keeper = Keeper()
    keeper.put(max_in_flight=3, max_attempts=1, dead_letter_log="dead")
    first = keeper.take()
    keeper.settle(Settlement.UNREAD, first.token, 1, 2)
    assert given_by(keeper.take()) == {1: 1, 2: 1}
    assert keeper.look().moves == ()


def test_what_the_log_dropped_is_counted_and_the_rest_is_given() -> None:
    keeper = Keeper()
    keeper.put()
    first = keeper.take(4)
    keeper.settle(Settlement.ACK, first.token, 1)
    keeper.first = 90
    assert given_by(keeper.take(2)) == {90: 1, 91: 1}
    row = keeper.look()
    assert (row.lost, row.floor, len(row.claims)) == (89, 90, 1)
    assert reasons(keeper.settle(Settlement.ACK, first.token, 0)) == [("acknowledged", [0])]
    keeper.settle(Settlement.LOST, row.claims[0].token, 90)
    assert keeper.look().lost == 90
    keeper.first, keeper.end = 10**15, 10**15 + 5
    assert list(given_by(keeper.take())) == list(range(10**15, 10**15 + 5))


def test_a_queue_gives_no_record_beyond_its_bounds_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queues, "WINDOW", 6)
    keeper = Keeper()
    keeper.put(max_in_flight=4)
    first = keeper.take()
    assert (list(given_by(first)), first.limit) == ([0, 1, 2, 3], "max-in-flight")
    assert keeper.take().limit == "max-in-flight"
    keeper.settle(Settlement.ACK, first.token, 1, 2, 3)
    second = keeper.take()
    assert (list(given_by(second)), second.limit) == ([4, 5], "window")
    keeper.settle(Settlement.ACK, first.token, 0)
    assert list(given_by(keeper.take())) == [6, 7]


def test_one_queue_more_than_the_most_is_not_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "LOG_QUEUES_MAX", 2)
    monkeypatch.setattr(queues, "QUEUES_MAX", 3)
    keeper = Keeper()

    def put(log: str, name: str) -> Any:
        return PutQueue(log, name, "1", QueueSettings(), 0)

    answers = keeper.ask(put("a", "1"), put("a", "2"), put("a", "3"), put("b", "1"), put("b", "2"))
    kinds = [type(answer) for answer in answers]
    assert kinds == [Queue, Queue, errors.TooManyQueues, Queue, errors.TooManyQueues]
    keeper.done(Queue, DeleteQueue("a", "1"))
    keeper.done(Queue, put("b", "2"))
    assert [each.key for each in keeper.ask(List("b", "1", 2))[0]] == [("b", "2")]
    keeper.ask(FreeLog("b", "1"))
    assert keeper.ask(List("b", "", 9)) == [()]
    assert list(keeper.machine.state.rows) == [("a", "2")]


def test_a_change_is_remembered_without_the_records_of_the_queue() -> None:
    keeper = Keeper()
    keeper.put()
    tokens = [keeper.take(1).token for _ in range(50)]
    change = PutQueue(*NAME, "1", QueueSettings(5000), 0)
    stamp = Stamp("a", seen=keeper.look().version)
    (changed,) = keeper.ask(change, stamp=stamp)
    (decided,) = keeper.batches[-1].decided
    assert isinstance(decided.answer, Queue)
    assert (decided.answer.claims, decided.answer.settings.lease_ms) == ((), 5000)
    keeper.settle(Settlement.ACK, tokens[0])
    (again,) = keeper.ask(change, stamp=stamp)
    assert (again, len(again.claims)) == (keeper.look(), 49)
    assert again.settings_version == changed.settings_version
    delete = DeleteQueue(*NAME)
    stamp = Stamp("b", seen=keeper.look().version)
    for _ in range(2):
        (deleted,) = keeper.ask(delete, stamp=stamp)
        assert isinstance(deleted, Queue)


def test_a_late_redrive_does_nothing_after_one_of_another_dead_letter_log() -> None:
    keeper = Keeper()
    keeper.put(dead_letter_log="dead")
    keeper.done(Queue, Redrive(*NAME, "1", "d", (0, ""), 5, NONE))
    keeper.done(Queue, Redrive(*NAME, "1", "e", (5, "d"), 5, NONE))
    late = keeper.done(Queue, Redrive(*NAME, "1", "d", (5, "d"), 9, Offsets.of((7,))))
    assert (late.redriven, late.dead_created, late.moves) == (5, "e", ())


def test_large_queues_do_not_make_a_batch_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper()
    keeper.put()
    size, before = keeper.look().size, len(keeper.batches)
    monkeypatch.setattr(queues, "_BATCH_CHARS", 3 * size)
    names = [PutQueue("log", f"n{at}", "1", QueueSettings(), 0) for at in range(10)]
    assert all(isinstance(answer, Queue) for answer in keeper.ask(*names))
    assert len(keeper.batches) - before == 1 + 3


def test_claims_in_vain_look_at_the_held_records_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper()
    keeper.put()
    token = [keeper.take(1).token for _ in range(100)][-1]
    looked: list[int] = []
    original = Queues.held_until

    def counted(self: Queues, row: Queue, claim: Any) -> float:
        looked.append(claim.token)
        return original(self, row, claim)

    monkeypatch.setattr(Queues, "held_until", counted)
    in_vain = Take(*NAME, "1", 0, 100, 1)
    ack = Settle(*NAME, Settlement.ACK, ((token, NONE),))
    answers = keeper.ask(ack, *[in_vain] * 500)
    assert not any(answer.records for answer in answers[1:])
    assert len(looked) == 99


def test_requests_for_a_queue_of_many_claims_are_more_than_one_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeper = Keeper()
    keeper.put()
    tokens = [keeper.take(1).token for _ in range(50)]
    monkeypatch.setattr(queues, "_BATCH_CLAIMS", 100)
    before = len(keeper.batches)
    acks = [Settle(*NAME, Settlement.ACK, ((token, NONE),)) for token in tokens[:9]]
    assert [answer.done for answer in keeper.ask(*acks)] == [1] * 9
    assert len(keeper.batches) - before == 4


def test_claims_with_many_keys_are_more_than_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Keeper()
    keeper.put(order="key")
    keys = tuple((at, 7) for at in range(80))
    assert given_by(keeper.take(keys=keys)) == {0: 1}
    monkeypatch.setattr(queues, "_BATCH_CLAIMS", 10)
    before = len(keeper.batches)
    answers = keeper.ask(*[Take(*NAME, "1", 0, 100, 10, keys)] * 9)
    assert not any(answer.records for answer in answers)
    assert len(keeper.batches) - before == 5


def test_a_log_of_few_large_rows_is_kept_short_in_bytes_and_says_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounds = (("_SLACK", 200_000), ("_KEPT", 200_000), ("_TRUNCATE", 50_000))
    for name, chars in bounds:
        monkeypatch.setattr(offset_store, f"{name}_CHARS", chars)
    keeper = Keeper()
    for number in range(20):
        keeper.done(Queue, PutQueue("log", f"idle{number}", "1", QueueSettings(), 0))
    keeper.put(max_in_flight=200)
    keeper.end = 10_000
    tokens = [keeper.take(1).token for _ in range(200)]
    for token in tokens * 2:
        keeper.settle(Settlement.NAK, token)
        keeper.take(1)
    kept = keeper.batches[keeper.truncated :]
    assert sum(len(QUEUE_BODIES.encode_batch(batch)) for batch in kept) < 500_000
    assert len(kept) < len(keeper.batches) / 2
    fresh = Queues()
    for offset, batch in enumerate(kept, keeper.truncated):
        fresh.fold(offset, batch)
    assert dict(fresh.rows) == dict(keeper.machine.state.rows)
    assert fresh.known_from == keeper.truncated


def test_a_claim_of_many_records_is_one_short_row() -> None:
    keeper = Keeper()
    keeper.put(max_in_flight=10_000)
    keeper.end = 10_000
    for _ in range(64):
        keeper.take(100)
    assert len(QUEUE_BODIES.encode_batch(keeper.batches[-1])) < 4000


def test_requests_and_answers_come_back_as_they_were() -> None:
    keeper = Keeper()
    row = keeper.put()
    taken = keeper.take(keys=((1, 2), (3, 4)))
    settled = keeper.settle(Settlement.ACK, taken.token, 0, 99)
    asked = [
        (Take(*NAME, "1", 0, 5, 3, ((1, 2),)), None),
        (Settle(*NAME, "ack", ((1, Offsets.of((3, 5))), (2, NONE)), 5, "why"), None),
        (PutQueue(*NAME, "1", QueueSettings(), 0), None),
    ]
    assert QUEUE_BODIES.decode_requests(QUEUE_BODIES.encode_requests(asked)) == asked
    document = orjson.dumps(QUEUE_BODIES.encode_answers([row, (row,), taken, settled, ()], 17))
    assert QUEUE_BODIES.decode_answers(document) == ([row, (row,), taken, settled, ()], 17)
    with pytest.raises(BadRows):
        QUEUE_BODIES.decode_batch(b'{"v":1,"rows":[["log"]]}')
    more = orjson.dumps({"v": 1, "rows": [[*range(30)]]})
    with pytest.raises(BadRows):
        QUEUE_BODIES.decode_batch(more)


OFFSETS = st.sets(st.integers(0, 300)) | st.sets(st.integers(10**15, 10**15 + 90))


@given(OFFSETS, OFFSETS, st.integers(0, 400))
def test_sets_of_offsets_are_sets(one: set[int], two: set[int], number: int) -> None:
    first, second = Offsets.of(one), Offsets.of(two)
    assert (set(first), len(first), list(first)) == (one, len(one), sorted(one))
    assert first & second == Offsets.of(one & two)
    assert first - second == Offsets.of(one - two)
    assert Offsets.union((first, NONE)) == first
    if not one or not two or max(one | two) - min(one | two) < 1000:
        assert first | second == Offsets.union((first, second)) == Offsets.of(one | two)
    assert list(first.lowest(number)) == sorted(one)[:number]
    assert set(first.below(number)) == {at for at in one if at < number}
    assert (number in first) == (number in one)
    assert Offsets.unpacked(orjson.loads(orjson.dumps(first.packed()))) == first
    assert len(orjson.dumps(first.packed())) <= first.packed_size
