"""The producer table: a retry gets the first answer, and nothing is taken twice or out of order."""

import random

import pytest

from quorumlog.errors import UNKNOWN, ExpiredProducer, InvalidRequest, SequenceGap, StaleProducer
from quorumlog.protocol.batch import ProducerSeq
from quorumlog.protocol.log import ANSWERS_MAX, PRODUCERS_MAX, ROW_ANSWERS_MAX, Answer
from quorumlog.protocol.log.producers import EXPIRY_MS, ProducerTable


def seq(number: int, epoch: int = 0, name: str = "p") -> ProducerSeq:
    return ProducerSeq(name, epoch, number)


def answer(number: int, content: str = "x") -> Answer:
    return Answer(number, number * 10, number * 10 + 9, 7, number, content)


def filled(count: int, epoch: int = 0) -> ProducerTable[str]:
    table = ProducerTable[str]()
    for number in range(count):
        assert table.find(seq(number, epoch), "x") is None
        table.begin(seq(number, epoch), "x", f"in flight {number}")
        table.done(seq(number, epoch), answer(number), now_ms=number)
    return table


def test_a_repeat_gets_the_first_answer() -> None:
    assert filled(3).find(seq(1), "x") == answer(1)


def test_a_repeat_of_a_request_in_flight_finds_that() -> None:
    table = filled(1)
    table.begin(seq(1), "x", "the first")

    assert table.find(seq(1), "x") == "the first"


def test_other_content_under_a_used_seq_is_refused_in_flight_or_not() -> None:
    table = filled(1)
    table.begin(seq(1), "x", "the first")

    for used in (0, 1):
        with pytest.raises(InvalidRequest):
            table.find(seq(used), "y")


def test_a_gap_names_the_seq_that_is_missing() -> None:
    table = filled(2)

    with pytest.raises(SequenceGap) as known:
        table.find(seq(3), "x")
    with pytest.raises(SequenceGap) as unknown:
        table.find(seq(3, name="new"), "x")

    assert known.value.headers["Producer-Expected-Seq"] == "2"
    assert unknown.value.headers["Producer-Expected-Seq"] == "0"


def test_a_higher_epoch_begins_at_zero_and_ends_the_lower_one() -> None:
    table = filled(2, epoch=4)

    with pytest.raises(SequenceGap):
        table.find(seq(2, epoch=5), "x")
    assert table.find(seq(0, epoch=5), "y") is None
    table.begin(seq(0, epoch=5), "y", "first of the epoch")
    with pytest.raises(StaleProducer) as stale:
        table.find(seq(2, epoch=4), "x")

    assert stale.value.headers["Producer-Epoch"] == "5"


def test_a_late_answer_of_an_older_epoch_changes_nothing() -> None:
    table = filled(1, epoch=4)
    table.begin(seq(1, epoch=4), "x", "late")
    table.begin(seq(0, epoch=5), "y", "new")

    table.done(seq(1, epoch=4), answer(1), now_ms=9)

    assert table.find(seq(0, epoch=5), "y") == "new"


def test_an_answer_that_is_no_longer_kept_is_expired_and_not_appended_again() -> None:
    table = filled(ANSWERS_MAX + 1)

    with pytest.raises(ExpiredProducer):
        table.find(seq(0), "x")


def test_a_forgotten_producer_is_never_new_again_and_one_that_was_made_since_is() -> None:
    table = filled(3)  # up to offset 29
    table.forget(now_ms=EXPIRY_MS + 10)

    assert (len(table), table.forgotten_end) == (0, 30)
    for number in (0, 1, 2, 3, 5000):
        for since in (0, 20, 29):
            with pytest.raises(ExpiredProducer) as expired:
                table.find(seq(number), "x", since=since)
            assert (expired.value.outcome, expired.value.retryable) == (UNKNOWN, False)
            assert "Producer-Since" in expired.value.detail
    # Its next epoch too, unless that was made since.
    with pytest.raises(ExpiredProducer):
        table.find(seq(0, epoch=1), "x", since=29)
    assert table.find(seq(0, epoch=1), "x", since=30) is None
    assert table.find(seq(0, name="q"), "x", since=30) is None
    with pytest.raises(SequenceGap) as gap:
        table.find(seq(1, name="q"), "x", since=30)
    assert gap.value.headers["Producer-Expected-Seq"] == "0"


def test_while_nobody_was_forgotten_nobody_needs_to_say_since_when() -> None:
    table = filled(2)

    assert table.forgotten_end == 0
    assert table.find(seq(0, name="q"), "x") is None


def test_what_was_forgotten_stays_so_over_a_snapshot() -> None:
    table = filled(3)
    table.forget(now_ms=EXPIRY_MS + 10)
    rebuilt = ProducerTable[str](table.snapshot(), forgotten_end=table.forgotten_end)

    with pytest.raises(ExpiredProducer):
        rebuilt.find(seq(0), "x", since=29)


def test_whom_a_snapshot_has_no_room_for_is_forgotten() -> None:
    table = ProducerTable[str]()
    for number in range(PRODUCERS_MAX + 2):
        table.done(seq(0, name=str(number)), answer(number), now_ms=0)

    kept = table.snapshot()

    assert (len(kept), table.forgotten_end) == (PRODUCERS_MAX, 20)
    with pytest.raises(ExpiredProducer):
        table.find(seq(0, name="1"), "x", since=19)


def test_answers_that_a_row_has_no_room_for_are_expired_and_their_producer_is_known() -> None:
    table = ProducerTable[str]()
    for number in range(PRODUCERS_MAX):
        for at in range(ROW_ANSWERS_MAX // PRODUCERS_MAX + 1):
            table.done(seq(at, name=str(number)), answer(at), now_ms=0)

    rebuilt = ProducerTable[str](table.snapshot())

    assert rebuilt.find(seq(4, name="7"), "x") == answer(4)
    with pytest.raises(ExpiredProducer):
        rebuilt.find(seq(0, name="7"), "x", since=10**9)


@pytest.mark.parametrize("epoch", [0, 4, 7])
def test_a_replay_follows_an_owner_that_had_forgotten_a_producer_and_took_it_for_new(
    epoch: int,
) -> None:
    table = filled(5, epoch=4)
    for number in range(2):
        table.done(seq(number, epoch), answer(number, "later"), now_ms=9)

    assert table.find(seq(1, epoch), "later") == answer(1, "later")
    assert table.find(seq(2, epoch), "x") is None


def test_beyond_the_limit_the_longest_silent_goes_but_none_in_flight() -> None:
    table = ProducerTable[str]()
    for number in range(PRODUCERS_MAX + 5):
        producer = seq(0, name=str(number))
        table.begin(producer, "x", "")
        table.done(producer, answer(0), now_ms=number)
    table.begin(seq(1, name="2"), "x", "")

    table.forget(now_ms=PRODUCERS_MAX)

    with pytest.raises(ExpiredProducer):
        table.find(seq(0, name="0"), "x", since=9)
    assert table.find(seq(0, name="0"), "x", since=table.forgotten_end) is None
    assert table.find(seq(1, name="2"), "x") == ""
    table.done(seq(1, name="2"), answer(1), now_ms=PRODUCERS_MAX)
    assert len(table.snapshot()) == PRODUCERS_MAX


def test_a_table_rebuilt_from_its_snapshot_and_a_replay_answers_as_the_first_one_did() -> None:
    for number in range(50):
        rng = random.Random(number)
        table = ProducerTable[str]()
        log: list[tuple[ProducerSeq, Answer]] = []
        cut = rng.randint(0, 40)
        snapshot = table.snapshot()
        next_seqs: dict[tuple[str, int], int] = {}
        epochs: dict[str, int] = {}
        for step in range(60):
            if step == cut:
                snapshot, log = table.snapshot(), []
            name = rng.choice("abc")
            if rng.random() < 0.1:
                epochs[name] = epochs.get(name, 0) + 1
            epoch = epochs.setdefault(name, 0)
            at = next_seqs.get((name, epoch), 0)
            next_seqs[name, epoch] = at + 1
            request = ProducerSeq(name, epoch, at)
            assert table.find(request, "x") is None
            table.begin(request, "x", "")
            first = Answer(at, step, step, 1, step, "x")
            table.done(request, first, now_ms=step)
            log.append((request, first))
        rebuilt = ProducerTable[str](snapshot)
        for step, (request, first) in enumerate(log):
            rebuilt.done(request, first, now_ms=60 - len(log) + step)

        assert rebuilt.snapshot() == table.snapshot(), f"seed {number}"
