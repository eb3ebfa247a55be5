"""Subscriptions, a request at a time: the claims of rule 34, and bounds."""

from typing import Any, TypeVar

import pytest

from quorumlog import errors
from quorumlog.protocol import subscriptions
from quorumlog.protocol.offset_store import (
    AppendBatch,
    Appended,
    Asked,
    BatchesRead,
    OffsetStore,
    ReadLog,
    Reported,
)
from quorumlog.protocol.rows import Batch, List, Stamp
from quorumlog.protocol.subscriptions import (
    AckWake,
    ClaimWake,
    DeleteSubscription,
    Delivered,
    Discovery,
    Expire,
    Failed,
    Kind,
    Link,
    LinkStreams,
    LookSubscription,
    Phase,
    PutSubscription,
    SigningKey,
    StreamGone,
    Subscription,
    Subscriptions,
    SubscriptionSettings,
    UnlinkStream,
    Wake,
    discovered,
    is_counted_once,
)
from quorumlog.wire.position_bodies import SUBSCRIPTION_BODIES
from services.gateway.logs import subscriptions as service
from services.gateway.logs.subscriptions import is_matching, literal
from services.gateway.logs.values import STREAM_PREFIX, stream_name

T = TypeVar("T")
LEASE_S = 10.0


class Keeper:
    """A keeper whose appends are acknowledged at once, and its clocks."""

    def __init__(self, batches: list[Batch[Subscription]] | None = None) -> None:
        self.batches = [] if batches is None else batches
        self.now_s, self.wall_ms, self.ids = 100.0, 1_000_000, 0
        self.machine = OffsetStore(kind=Subscriptions)

    def ask(self, request: Any) -> Any:
        answer: Any = None
        (again,) = SUBSCRIPTION_BODIES.decode_requests(
            SUBSCRIPTION_BODIES.encode_requests([(request, None)])
        )
        assert again == (request, None)
        events: list[Any] = [Asked(0, request)]
        while events:
            for effect in self.machine.step(events.pop(0), self.now_s, self.wall_ms):
                match effect:
                    case Reported(_, answer):
                        pass
                    case ReadLog(start):
                        found = tuple(enumerate(self.batches[start or 0 :], start or 0))
                        events.append(BatchesRead(found, len(self.batches)))
                    case AppendBatch(_, batch):
                        data = SUBSCRIPTION_BODIES.encode_batch(batch)
                        assert SUBSCRIPTION_BODIES.decode_batch(data) == batch
                        self.batches.append(batch)
                        events.append(Appended())
                    case _:
                        raise AssertionError(effect)
        return answer

    def done(self, request: Any) -> Subscription:
        answer = self.ask(request)
        assert isinstance(answer, Subscription), answer
        return answer

    def put(self, kind: Kind = Kind.WEBHOOK, name: str = "s", *links: Link) -> Subscription:
        settings = SubscriptionSettings(kind, "*", (), "u", "w", int(LEASE_S * 1000), "")
        links = links or (Link("a", "1", 5, is_explicit=True),)
        return self.done(PutSubscription(name, settings, f"secret of {name}", "", links))

    def wake_id(self) -> str:
        self.ids += 1
        return f"w{self.ids}"

    def wake(self, *ends: tuple[str, str, int]) -> Subscription:
        return self.done(Wake("s", "secret of s", self.wake_id(), ends))

    def ack(self, row: Subscription, *acks: tuple[str, str, int], is_done: bool = True) -> Any:
        ends = tuple((log, created, end) for log, created, end in acks)
        asked = AckWake(
            "s", "secret of s", row.generation, row.wake_id, acks, is_done, self.wake_id(), ends
        )
        return self.ask(asked)

    def look(self) -> Subscription:
        return self.done(LookSubscription("s"))


def acked(row: Subscription) -> dict[str, int]:
    return {each.log: each.acked for each in row.links}


def test_pending_work_gets_one_wake_at_a_time() -> None:
    keeper = Keeper()
    keeper.put()
    assert keeper.wake(("a", "1", 5)).phase == Phase.IDLE
    assert keeper.wake(("a", "other", 9)).phase == Phase.IDLE
    row = keeper.wake(("a", "1", 7))
    assert (row.phase, row.generation, row.wake_id, row.links[0].tail) == (Phase.DUE, 1, "w3", 7)
    assert keeper.wake(("a", "1", 8)) == row


def test_a_receiver_that_is_done_acknowledges_what_the_wake_showed() -> None:
    keeper = Keeper()
    keeper.put()
    row = keeper.wake(("a", "1", 7))
    row = keeper.done(Delivered("s", "secret of s", row.generation, is_done=True))
    assert (row.phase, acked(row)) == (Phase.IDLE, {"a": 7})
    row = keeper.wake(("a", "1", 9))
    assert keeper.done(Delivered("s", "secret of s", 1, is_done=True)) == row, (
        "it was an earlier wake's"
    )


def test_an_accepted_wake_is_held_for_a_lease_which_acknowledgements_extend() -> None:
    keeper = Keeper()
    keeper.put()
    row = keeper.done(
        Delivered("s", "secret of s", keeper.wake(("a", "1", 9)).generation, is_done=False)
    )
    assert row.phase == Phase.HELD
    keeper.now_s += LEASE_S - 1
    row = keeper.ack(row, ("a", "1", 6), is_done=False)
    keeper.now_s += LEASE_S - 1
    assert keeper.done(Expire("s", "secret of s", 1, "w")).generation == 1
    keeper.now_s += 1
    row = keeper.done(Expire("s", "secret of s", 1, "w"))
    assert (row.phase, row.generation, acked(row)) == (Phase.DUE, 2, {"a": 6})


def test_a_new_owner_waits_a_whole_lease() -> None:
    keeper = Keeper()
    keeper.put()
    keeper.done(Delivered("s", "secret of s", keeper.wake(("a", "1", 9)).generation, is_done=False))
    other = Keeper(keeper.batches)
    other.now_s = 500.0
    assert other.done(Expire("s", "secret of s", 1, "w")).generation == 1
    other.now_s += LEASE_S
    assert other.done(Expire("s", "secret of s", 1, "w")).generation == 2


def test_failures_are_retried_later_and_later_up_to_a_minute() -> None:
    keeper = Keeper()
    keeper.put()
    row = keeper.wake(("a", "1", 9))
    pauses = []
    for _ in range(9):
        row = keeper.done(Failed("s", "secret of s", row.generation, 0))
        pauses.append(row.sends_in_ms(keeper.wall_ms))
        keeper.wall_ms = row.next_ms
    assert pauses == [1000, 2000, 4000, 8000, 16000, 32000, 60000, 60000, 60000]
    assert (row.generation, row.phase) == (1, Phase.DUE), "it is still the same wake"
    jitter = subscriptions.JITTER_PERMILLE
    assert keeper.done(Failed("s", "secret of s", 1, jitter)).sends_in_ms(keeper.wall_ms) == 72000
    assert keeper.done(Failed("s", "secret of s", 1, -jitter)).sends_in_ms(keeper.wall_ms) == 48000
    assert keeper.look().sends_in_ms(keeper.wall_ms - 10**9) == 0, "the clock was set"
    row = keeper.done(Delivered("s", "secret of s", 1, is_done=True))
    assert (row.attempts, row.next_ms) == (0, 0)
    assert keeper.done(Failed("s", "secret of s", 1, 0)) == row


@pytest.mark.parametrize("ack", [("a", "1", 4), ("a", "1", 10), ("a", "2", 9), ("b", "1", 9)])
def test_an_offset_that_is_not_of_the_stream_is_refused(ack: tuple[str, str, int]) -> None:
    keeper = Keeper()
    keeper.put()
    row = keeper.wake(("a", "1", 9))
    asked = AckWake("s", "secret of s", 1, row.wake_id, (("a", "1", 8), ack), True, "x", ())
    assert isinstance(keeper.ask(asked), errors.InvalidOffset)
    assert keeper.look() == row


def test_a_stale_wake_is_fenced() -> None:
    keeper = Keeper()
    keeper.put()
    first = keeper.wake(("a", "1", 9))
    row = keeper.ack(first, ("a", "1", 9))
    assert (row.phase, acked(row)) == (Phase.IDLE, {"a": 9})
    for stale in (first, row):
        assert isinstance(keeper.ack(stale, ("a", "1", 9)), errors.WakeFenced)


def test_a_copy_of_an_acknowledgement_gets_its_answer() -> None:
    keeper = Keeper()
    keeper.put()
    row = keeper.wake(("a", "1", 9))
    asked = AckWake(
        "s", "secret of s", 1, row.wake_id, (("a", "1", 8),), True, "x", (("a", "1", 9),)
    )
    row = keeper.done(asked)
    assert (row.phase, row.generation, row.wake_id) == (Phase.DUE, 2, "x")
    assert keeper.ask(asked) == row


def test_a_pull_wake_is_claimed_once() -> None:
    keeper = Keeper()
    keeper.put(Kind.PULL)
    ends = (("a", "1", 9),)
    assert isinstance(
        keeper.ask(ClaimWake("s", "secret of s", "x", "c0", ())), errors.NoPendingWork
    )
    row = keeper.wake(*ends)
    assert keeper.done(Delivered("s", "secret of s", 1, is_done=False)).phase == Phase.OPEN
    assert isinstance(keeper.ack(row, ("a", "1", 9)), errors.WakeFenced), "nobody has claimed it"
    row = keeper.done(ClaimWake("s", "secret of s", "x", "c1", ends))
    assert (row.phase, row.holder, row.generation) == (Phase.HELD, "x", 1)
    assert keeper.ask(ClaimWake("s", "secret of s", "x", "c1", ends)) == row, "a copy"
    busy = keeper.ask(ClaimWake("s", "secret of s", "y", "c2", ends))
    assert isinstance(busy, errors.AlreadyClaimed)
    assert (busy.members["current_holder"], busy.members["generation"]) == ("x", 1)
    keeper.now_s += LEASE_S
    row = keeper.done(ClaimWake("s", "secret of s", "y", "c2", ends))
    assert (row.holder, row.generation, row.wake_id) == ("y", 2, "c2")
    assert isinstance(
        keeper.ask(AckWake("s", "secret of s", 1, "w1", (), True, "z", ())), errors.WakeFenced
    )


def test_a_late_copy_of_a_claim_gets_no_wake_that_others_may_claim() -> None:
    keeper = Keeper()
    keeper.put(Kind.PULL)
    ends = (("a", "1", 9),)
    late = ClaimWake("s", "secret of s", "x", "c1", ends)
    keeper.done(late)
    for phase in (Phase.DUE, Phase.OPEN):
        keeper.now_s += LEASE_S
        row = keeper.look()
        row = keeper.done(Expire("s", "secret of s", row.generation, keeper.wake_id()))
        if phase == Phase.OPEN:
            row = keeper.done(Delivered("s", "secret of s", row.generation, is_done=False))
        assert row.phase == phase

        held = keeper.done(late)
        assert (held.phase, held.holder, held.generation) == (Phase.HELD, "x", row.generation)
        busy = keeper.ask(ClaimWake("s", "secret of s", "y", "c2", ends))
        assert isinstance(busy, errors.AlreadyClaimed)


def test_a_webhook_is_not_claimed() -> None:
    keeper = Keeper()
    keeper.put()
    assert isinstance(
        keeper.ask(ClaimWake("s", "secret of s", "x", "c", ())), errors.InvalidRequest
    )


def test_streams_are_linked_unlinked_and_created_again() -> None:
    keeper = Keeper()
    keeper.put(Kind.WEBHOOK, "s", Link("a", "1", 5, is_explicit=True), Link("m", is_explicit=True))
    row = keeper.done(
        LinkStreams("s", "secret of s", (Link("a", "1", is_glob=True), Link("m", "3")))
    )
    assert [(each.log, each.created, each.acked) for each in row.links] == [
        ("a", "1", 5),
        ("m", "3", 0),
    ]
    assert (row.links[0].is_explicit, row.links[0].is_glob) == (True, True)
    row = keeper.done(UnlinkStream("s", "secret of s", "a"))
    assert not row.links[0].is_explicit
    assert keeper.done(UnlinkStream("s", "secret of s", "nothing")) == row
    assert keeper.done(StreamGone("s", "secret of s", "a", "0")) == row, "that was an earlier one"
    keeper.ask(StreamGone("s", "secret of s", "a", "1"))
    keeper.ask(StreamGone("s", "secret of s", "m", "3"))
    assert keeper.look().links == (Link("m", is_explicit=True),)
    row = keeper.done(LinkStreams("s", "secret of s", (Link("m", "4"),)))
    row = keeper.done(LinkStreams("s", "secret of s", (Link("m", "3"),)))
    assert row.links[0].created == "4", "a late copy"


def test_a_subscription_is_confirmed_deleted_and_created_anew() -> None:
    keeper = Keeper()
    first = keeper.put()
    assert keeper.put() == first
    assert isinstance(
        keeper.ask(
            PutSubscription("s", SubscriptionSettings("x", "", (), "", "", 1, ""), "", "", ())
        ),
        errors.SubscriptionExists,
    )
    keeper.done(DeleteSubscription("s", "secret of s"))
    for request in (
        LookSubscription("s"),
        DeleteSubscription("s", "secret of s"),
        LookSubscription(""),
    ):
        assert isinstance(keeper.ask(request), errors.NoSuchSubscription)


def test_the_signing_key_is_made_once_and_is_no_subscription() -> None:
    keeper = Keeper()
    assert keeper.done(SigningKey("one")).secret == "one"
    assert keeper.done(SigningKey("two")).secret == "one"
    keeper.put(Kind.WEBHOOK, "b")
    keeper.put(Kind.WEBHOOK, "a")
    assert [row.id for row in keeper.ask(List("", "", 10))] == ["a", "b"]
    assert [row.id for row in keeper.ask(List("", "a", 10))] == ["b"]


def test_one_subscription_or_stream_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions, "SUBSCRIPTIONS_MAX", 2)
    monkeypatch.setattr(subscriptions, "STREAMS_MAX", 3)
    monkeypatch.setattr(subscriptions, "LINKS_MAX", 4)
    keeper = Keeper()
    keeper.done(SigningKey("key"))
    keeper.put()
    keeper.put(Kind.WEBHOOK, "other")
    settings = keeper.look().settings
    third = keeper.ask(PutSubscription("third", settings, "", "", ()))
    assert isinstance(third, errors.TooManySubscriptions)
    explicit = tuple(Link(f"e{at}", "1", is_explicit=True) for at in range(3))
    assert isinstance(
        keeper.ask(LinkStreams("s", "secret of s", explicit)), errors.TooManySubscriptions
    )
    found = tuple(Link(f"g{at}", "1", is_glob=True) for at in range(3))
    assert len(keeper.done(LinkStreams("s", "secret of s", found)).links) == 3, (
        "the pattern's are left out"
    )
    assert len(keeper.done(LinkStreams("other", "secret of other", found)).links) == 1


def test_a_request_for_an_earlier_creation_changes_nothing() -> None:
    keeper = Keeper()
    keeper.put()
    keeper.done(DeleteSubscription("s", "secret of s"))
    settings = SubscriptionSettings(Kind.WEBHOOK, "*", (), "v", "", 1000, "")
    link = Link("a", "1", 0, is_explicit=True)
    keeper.done(PutSubscription("s", settings, "another", "", (link,)))
    row = keeper.done(Wake("s", "another", "w", (("a", "1", 3),)))
    for request in (
        Delivered("s", "secret of s", 1, is_done=True),
        Failed("s", "secret of s", 1, 0),
        Expire("s", "secret of s", 1, "x"),
        Wake("s", "secret of s", "x", ()),
        ClaimWake("s", "secret of s", "worker", "x", ()),
        AckWake("s", "secret of s", 1, "w", (), True, "x", ()),
        LinkStreams("s", "secret of s", (Link("b", "1"),)),
        UnlinkStream("s", "secret of s", "a"),
        StreamGone("s", "secret of s", "a", "1"),
        DeleteSubscription("s", "secret of s"),
    ):
        assert isinstance(keeper.ask(request), errors.NoSuchSubscription), request
    assert keeper.look() == row


def test_a_wake_that_no_worker_claims_is_announced_again() -> None:
    keeper = Keeper()
    keeper.put(Kind.PULL)
    keeper.wake(("a", "1", 9))
    announced = Delivered("s", "secret of s", 1, is_done=False)
    row = keeper.done(announced)
    assert row.sends_in_ms(keeper.wall_ms) == subscriptions.RETRY_MS_MAX
    keeper.wall_ms += subscriptions.RETRY_MS_MAX
    assert row.sends_in_ms(keeper.wall_ms) == 0
    row = keeper.done(Failed("s", "secret of s", 1, 0))
    assert (row.phase, row.sends_in_ms(keeper.wall_ms)) == (Phase.OPEN, 1000)
    row = keeper.done(announced)
    assert row.sends_in_ms(keeper.wall_ms) == subscriptions.RETRY_MS_MAX
    row = keeper.done(ClaimWake("s", "secret of s", "x", "c", ()))
    assert (row.generation, row.sends_in_ms(keeper.wall_ms)) == (1, None)


def test_a_copy_of_a_change_is_remembered_without_its_links() -> None:
    state = Subscriptions()
    draft = state.draft(end=5, now_s=0, wall_ms=0)
    settings = SubscriptionSettings(Kind.WEBHOOK, "", ("a",), "u", "", 1000, "")
    put = PutSubscription("s", settings, "one", "", (Link("a", is_explicit=True),))
    draft.decide(put, Stamp("t0", seen=1))
    answer = draft.decide(UnlinkStream("s", "one", "b"), Stamp("t1", seen=1))
    assert len(answer.links) == 1
    assert draft.decide(UnlinkStream("s", "one", "b"), Stamp("t1", seen=1)).links == ()
    kept = [each.answer for each in draft.batch.decided]
    rows = [row for row in kept if not isinstance(row, str)]
    assert [(row.links, row.settings.streams) for row in rows] == [((), ()), ((), ())]


def test_what_is_heard_is_taken_once_and_again_if_it_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    discovery = Discovery()
    assert discovery.take() == (set(), True)
    discovery.heard("a")
    assert discovery.take() == ({"a"}, False)
    discovery.answered("a", errors.QuorumTimeout("late"))
    assert discovery.take() == ({"a"}, False)
    for answer in ((), errors.NoSuchSubscription("gone")):
        discovery.answered("a", answer)
        assert discovery.take() == (set(), False)
    monkeypatch.setattr(subscriptions, "HEARD_MAX", 2)
    for name in "abc":
        discovery.heard(name)
    assert discovery.take() == (set(), True)


def test_a_subscription_learns_of_the_present_creation_of_a_stream() -> None:
    keeper = Keeper()
    link = Link("a", "2", 5, is_explicit=True)
    row = keeper.put(Kind.WEBHOOK, "s", link, Link("waits", is_explicit=True))

    def found(name: str, created: str, *, is_match: bool = False) -> Any:
        return discovered(row, name, created, is_match=is_match)

    def linked(name: str, created: str, *, is_glob: bool = False) -> LinkStreams:
        return LinkStreams("s", "secret of s", (Link(name, created, is_glob=is_glob),))

    assert found("a", "2") is None
    assert found("a", "3") == linked("a", "3")
    assert found("a", "2", is_match=True) == linked("a", "2", is_glob=True)
    assert found("a", "") == StreamGone("s", "secret of s", "a", "2")
    assert found("waits", "") is None
    assert found("waits", "1") == linked("waits", "1")
    assert found("new", "1") is None
    assert found("new", "1", is_match=True) == linked("new", "1", is_glob=True)


def test_requests_of_clients_are_counted_once() -> None:
    discovered = LinkStreams("s", "secret of s", (Link("a", "1", is_glob=True),))
    assert not is_counted_once(discovered)
    assert is_counted_once(LinkStreams("s", "secret of s", (Link("a", "1", is_explicit=True),)))
    assert is_counted_once(UnlinkStream("s", "secret of s", "a"))
    assert is_counted_once(DeleteSubscription("s", "secret of s"))


@pytest.mark.parametrize(
    ("pattern", "path", "is_match"),
    [
        ("events/*", "events/a", True),
        ("events/*", "events/a/b", False),
        ("events/*", "events", False),
        ("events/**", "events", True),
        ("events/**", "events/a/b", True),
        ("**", "a/b/c", True),
        ("**/c", "c", True),
        ("**/c", "a/b/c", True),
        ("a/**/c", "a/c", True),
        ("a/**/**/c", "a/b/b/c", True),
        ("a/**/c", "a/b", False),
        ("*/b", "ä ö/b", True),
        ("ev*", "events", False),
        ("events", "events", True),
        ("**/a" * 40, "/".join("a" * 60) + "/b", False),
        ("**", "a", True),
        ("**/**", "a", True),
        ("*/**/*", "a", False),
        ("*/**/*", "a/b", True),
        ("a/**/b/*/**/c", "a/b/x/c", True),
        ("a/**/b/*/**/c", "a/b/c", False),
        ("**/b/c/**/c", "b/b/c/c", True),
        ("**/b/**/b", "b", False),
        ("**/a/b/**", "a/a/b", True),
    ],
)
def test_a_pattern_matches_whole_segments(pattern: str, path: str, is_match: bool) -> None:
    settings = SubscriptionSettings(Kind.WEBHOOK, pattern, (), "", "", 1, "")
    assert is_matching(settings, STREAM_PREFIX + stream_name(path)) is is_match
    assert not is_match or path.startswith(literal(pattern))


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("t1/" + "**/" * 330 + "z", "t1/" + "/".join("a" * 60)),
        ("t1/" + "*/**/" * 30 + "z", "t1/" + "/".join("a" * 60)),
        ("t1/**/" + "/".join("a" * 29) + "/b/**/z", "t1/" + "/".join("a" * 59) + "/z"),
        ("t1/" + "**/a/" * 59 + "z", "t1/" + "/".join("a" * 60)),
    ],
)
def test_a_hostile_pattern_costs_few_comparisons(
    pattern: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = 0
    original = service._is_run

    def is_run(*args: Any) -> bool:
        nonlocal compared
        compared += 1
        return original(*args)

    monkeypatch.setattr(service, "_is_run", is_run)
    settings = SubscriptionSettings(Kind.WEBHOOK, pattern, (), "", "", 1, "")
    assert not is_matching(settings, STREAM_PREFIX + stream_name(path))
    assert compared <= 2 * path.count("/")


def test_a_pattern_does_not_match_its_wake_stream_or_other_logs() -> None:
    wake = STREAM_PREFIX + stream_name("wake")
    settings = SubscriptionSettings(Kind.PULL, "**", (), "", wake, 1, "")
    assert not is_matching(settings, wake)
    assert not is_matching(settings, "events")
