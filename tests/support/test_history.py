"""The checker of histories is checked: no alarm on good histories, an alarm on each damaged one."""

import random
from collections import Counter

import pytest

from tests.support.history import Acked, Append, Closed, Content, Event, History, check


def good(seed: int) -> History:
    """A history of three clients on two ledgers, as a correct system may show it."""
    rng = random.Random(seed)
    history = History()
    stored: dict[int, list[bytes]] = {1: [], 2: []}
    confirmed = {1: -1, 2: -1}
    open_ops: list[tuple[int, int, tuple[bytes, ...], int | None]] = []
    for turn in range(rng.randint(20, 60)):
        ledger = rng.choice((1, 2))
        choice = rng.random()
        if choice < 0.4:
            payloads = tuple(b"%d-%d-%d" % (ledger, turn, n) for n in range(rng.randint(1, 3)))
            op = history.append(ledger, *payloads)
            kept = rng.random()
            if kept < 0.1:
                history.failed(op)
            else:
                first = len(stored[ledger])
                if kept < 0.9:
                    stored[ledger].extend(payloads)
                    open_ops.append((ledger, op, payloads, first))
        elif choice < 0.7 and open_ops:
            ledger, op, payloads, at = open_ops.pop(0)
            assert at is not None
            confirmed[ledger] = max(confirmed[ledger], at + len(payloads) - 1)
            if rng.random() < 0.9:
                history.acked(op, at)
        elif choice < 0.9:
            op = history.read(ledger)
            if confirmed[ledger] >= 0:
                first = rng.randint(0, confirmed[ledger])
                history.found(
                    op, *((n, stored[ledger][n]) for n in range(first, confirmed[ledger] + 1))
                )
        else:
            history.lac(ledger, confirmed[ledger])
    for ledger, entries in stored.items():
        history.closed(ledger, len(entries) - 1)
        op = history.read(ledger)
        history.absent(op, len(entries))
        history.content(ledger, *enumerate(entries))
    return history


def damage(history: History, kind: str, rng: random.Random) -> bool:
    """Break one rule in a good history; False where this history has no place for it."""
    events = history.events
    acked = [n for n, event in enumerate(events) if isinstance(event, Acked)]
    contents = [n for n, event in enumerate(events) if isinstance(event, Content) and event.entries]
    appends = {event.op: event for event in events if isinstance(event, Append)}

    def first_payload(at: int) -> tuple[int, int, bytes]:
        event = events[at]
        assert isinstance(event, Acked)
        return appends[event.op].ledger, event.first, appends[event.op].payloads[0]

    def replace_content(ledger: int, entries: list[tuple[int, bytes]]) -> None:
        for n, event in enumerate(events):
            if isinstance(event, Content) and event.ledger == ledger:
                events[n] = Content(ledger, tuple(entries))

    def content_of(ledger: int) -> list[tuple[int, bytes]]:
        return next(
            list(event.entries)
            for event in events
            if isinstance(event, Content) and event.ledger == ledger
        )

    if not acked or not contents:
        return False
    at = rng.choice(acked)
    ledger, entry_id, payload = first_payload(at)
    entries = content_of(ledger)
    match kind:
        case "lose-tail":
            replace_content(ledger, entries[:entry_id])
        case "lose-one":
            replace_content(ledger, [entry for entry in entries if entry[0] != entry_id])
        case "early-end":
            for n, event in enumerate(events):
                if isinstance(event, Closed) and event.ledger == ledger:
                    events[n] = Closed(ledger, entry_id - 1)
        case "second-end":
            history.closed(ledger, len(entries) + 3)
        case "alter":
            entries[entry_id] = (entry_id, b"other")
            replace_content(ledger, entries)
        case "duplicate":
            replace_content(ledger, [*entries, (len(entries), payload)])
        case "swap":
            if len(entries) < 2:
                return False
            other = (entry_id + 1) % len(entries)
            a, b = entries[entry_id][1], entries[other][1]
            entries[entry_id], entries[other] = (entry_id, b), (other, a)
            replace_content(ledger, entries)
        case "phantom-read":
            history.found(history.read(ledger), (len(entries) + 5, b"never appended"))
        case "failed-but-there":
            op = appends_of(events, payload)
            history.failed(op)
        case "absent-acked":
            history.absent(history.read(ledger), entry_id)
        case "absent-after-read":
            history.found(history.read(ledger), (entry_id, payload))
            history.absent(history.read(ledger), entry_id)
        case "lac-too-high":
            history.lac(ledger, len(entries) + 100)
        case "ack-of-another-id":
            events[at] = Acked(events[at].op, entry_id + 1)  # type: ignore[union-attr]
        case "late-append-early-id":
            op = history.append(ledger, b"late")
            history.acked(op, entry_id)
        case _:
            raise AssertionError(kind)
    return True


def appends_of(events: list[Event], payload: bytes) -> int:
    return next(
        event.op for event in events if isinstance(event, Append) and payload in event.payloads
    )


KINDS = (
    "lose-tail",
    "lose-one",
    "early-end",
    "second-end",
    "alter",
    "duplicate",
    "swap",
    "phantom-read",
    "failed-but-there",
    "absent-acked",
    "absent-after-read",
    "lac-too-high",
    "ack-of-another-id",
    "late-append-early-id",
)


def test_no_alarm_on_a_thousand_good_histories() -> None:
    for seed in range(1000):
        assert check(good(seed)) == [], f"seed {seed}"


def test_each_of_a_thousand_damaged_histories_is_flagged() -> None:
    flagged: Counter[str] = Counter()
    seed = 0
    while flagged.total() < 1000:
        rng = random.Random(seed)
        history = good(seed)
        kind = KINDS[seed % len(KINDS)]
        if damage(history, kind, rng):
            assert check(history), f"{kind} was not seen, seed {seed}"
            flagged[kind] += 1
        seed += 1
    assert set(flagged) == set(KINDS)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("lose-tail", "lost"),
        ("early-end", "lost"),
        ("alter", "divergent"),
        ("duplicate", "duplicate"),
        ("phantom-read", "phantom"),
        ("absent-after-read", "gone"),
        ("lac-too-high", "lac"),
    ],
)
def test_a_damage_is_named_after_what_it_is(kind: str, expected: str) -> None:
    history = good(3)
    assert damage(history, kind, random.Random(3))

    assert expected in {violation.kind for violation in check(history)}


def test_an_append_that_began_after_an_acknowledgement_may_not_have_a_lower_id() -> None:
    history = History()
    op = history.append(1, b"a")
    unknown = history.append(1, b"u")
    history.acked(op, 1)
    late = history.append(1, b"b")
    history.acked(late, 0)

    assert [violation.kind for violation in check(history)] == ["reordered"]
    assert unknown
