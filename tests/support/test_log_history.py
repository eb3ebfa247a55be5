"""The checker of logs' histories is checked: no alarm on good ones, an alarm on each damaged one."""

import random
from collections import Counter

import pytest

from tests.support.log_history import (
    Content,
    End,
    Event,
    Fetched,
    Produce,
    Produced,
    Refused,
    check,
)

LOG = 1


def good(seed: int) -> list[Event]:
    """Two producers with numbers and a plain client on one log, as a correct system may show it."""
    rng = random.Random(seed)
    events: list[Event] = []
    stored: list[bytes] = []
    waiting: list[tuple[int, int]] = []
    seqs = {"a": 0, "b": 0}
    for op in range(rng.randint(15, 40)):
        records = tuple(b"%d-%d" % (op, n) for n in range(rng.randint(1, 3)))
        name = rng.choice(("a", "b", None))
        sent = 1
        if name is None:
            sent = rng.choice((1, 2))
            events.append(Produce(op, LOG, records, sent=sent))
        else:
            events.append(Produce(op, LOG, records, producer=(name, 1), seq=seqs[name]))
            seqs[name] += 1
        fate = rng.random()
        if fate < 0.1:
            events.append(Refused(op))
        elif fate < 0.95:
            waiting.append((op, len(stored)))
            stored.extend(records)
            if sent == 2 and rng.random() < 0.5:
                stored.extend(records)  # the first try was done as well
        if waiting and rng.random() < 0.7:
            done, first = waiting.pop(0)
            events.append(Produced(done, first))
        if stored and rng.random() < 0.5:
            first = rng.randrange(len(stored))
            known = max((e.first + 1 for e in events if isinstance(e, Produced)), default=0)
            found = tuple(enumerate(stored))[first:]
            events.append(Fetched(LOG, first, found, acknowledged=known))
            events.append(End(LOG, len(stored)))
    events.append(Content(LOG, 0, tuple(enumerate(stored))))
    return events


def damage(events: list[Event], kind: str, rng: random.Random) -> bool:
    """Break one rule in a good history; False where this history has no place for it."""
    requests = {event.op: event for event in events if isinstance(event, Produce)}
    acked = [event for event in events if isinstance(event, Produced)]
    content = events[-1]
    assert isinstance(content, Content)
    entries = [record for _, record in content.entries]
    numbered = [event for event in acked if requests[event.op].producer is not None]
    if not acked or not numbered or len(entries) < 4:
        return False
    some = rng.choice(numbered)
    records = requests[some.op].records

    def rewrite(changed: list[bytes], start: int = 0) -> None:
        events[-1] = Content(LOG, start, tuple(enumerate(changed, start)))

    match kind:
        case "lose-tail":
            rewrite(entries[: some.first])
        case "lose-one":
            rewrite(entries[: some.first] + entries[some.first + 1 :])
        case "alter":
            entries[some.first] = b"other"
            rewrite(entries)
        case "duplicate":
            rewrite([*entries, *records])
        case "swap":
            a, b = some.first, (some.first + 1) % len(entries)
            if entries[a] == entries[b]:
                return False
            entries[a], entries[b] = entries[b], entries[a]
            rewrite(entries)
        case "phantom-read":
            events.append(Fetched(LOG, len(entries), ((len(entries), b"never produced"),)))
        case "refused-but-there":
            events.append(Refused(some.op))
        case "end-too-high":
            events.append(End(LOG, len(entries) + 100))
        case "ack-of-another-offset":
            events[events.index(some)] = Produced(some.op, some.first + 1)
        case "late-request-early-offset":
            events[-1:] = [Produce(10_000, LOG, (b"late",)), Produced(10_000, some.first), content]
        case "read-skips":
            two = (some.first, some.first + 2)
            if two[1] >= len(entries):
                return False
            events.insert(-1, Fetched(LOG, two[0], tuple((o, entries[o]) for o in two)))
        case "read-sees-nothing":
            events.insert(-1, Fetched(LOG, some.first, (), acknowledged=some.first + 1))
        case "half-a-batch":
            if len(records) < 2:
                return False
            events[:] = [e for e in events if isinstance(e, Produce)]
            rewrite_from = entries[: some.first + 1] + entries[some.first + len(records) :]
            events.append(Content(LOG, 0, tuple(enumerate(rewrite_from))))
        case _:
            raise AssertionError(kind)
    return True


KINDS = (
    "lose-tail",
    "lose-one",
    "alter",
    "duplicate",
    "swap",
    "phantom-read",
    "refused-but-there",
    "end-too-high",
    "ack-of-another-offset",
    "late-request-early-offset",
    "read-skips",
    "half-a-batch",
    "read-sees-nothing",
)


def test_no_alarm_on_a_thousand_good_histories_of_a_log() -> None:
    for seed in range(1000):
        assert check(good(seed)) == [], f"seed {seed}"


def test_each_of_a_thousand_damaged_histories_of_a_log_is_flagged() -> None:
    flagged: Counter[str] = Counter()
    seed = 0
    while flagged.total() < 1000:
        events, kind = good(seed), KINDS[seed % len(KINDS)]
        if damage(events, kind, random.Random(seed)):
            assert check(events), f"{kind} was not seen, seed {seed}"
            flagged[kind] += 1
        seed += 1
    assert set(flagged) == set(KINDS)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("lose-tail", "lost"),
        ("alter", "divergent"),
        ("duplicate", "duplicate"),
        ("phantom-read", "phantom"),
        ("end-too-high", "end"),
        ("read-skips", "gap"),
        ("half-a-batch", "torn"),
        ("read-sees-nothing", "unseen"),
        ("late-request-early-offset", "divergent"),
    ],
)
def test_a_damage_of_a_log_is_named_after_what_it_is(kind: str, expected: str) -> None:
    for seed in range(50):
        events = good(seed)
        if damage(events, kind, random.Random(seed)):
            assert expected in {violation.kind for violation in check(events)}
            return
    pytest.fail("no history has a place for it")


def test_a_request_that_began_after_an_acknowledgement_may_not_have_a_lower_offset() -> None:
    early, late = Produce(1, LOG, (b"a",)), Produce(2, LOG, (b"b",))

    found = check([early, Produced(1, 1), late, Produced(2, 0)])

    assert [violation.kind for violation in found] == ["reordered"]


def test_a_producers_requests_in_another_order_are_flagged() -> None:
    first = Produce(1, LOG, (b"a",), producer=("p", 1), seq=0)
    second = Produce(2, LOG, (b"b",), producer=("p", 1), seq=1)
    content = Content(LOG, 0, ((0, b"b"), (1, b"a")))

    assert [v.kind for v in check([first, second, content])] == ["reordered"]


def test_a_hundred_thousand_events_are_one_pass() -> None:
    events: list[Event] = []
    for op in range(50_000):
        events += [Produce(op, LOG, (b"%d" % op,)), Produced(op, op)]

    assert check(events) == []
