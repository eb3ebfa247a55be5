"""Subscriptions in virtual time: owners that stand still, die, are overtaken; receivers and workers that are late.

The world is that of `tests/model/positions`: gateways that repeat requests, keepers that each take themselves for
the owner, appends whose answers are lost. Two streams grow, are deleted and created again. A webhook subscription and
a pull-wake subscription follow them. Each keeper brings the wakes forward by what it knows, which may be long ago.
`judge` reads what the log of subscriptions says, and what receivers and workers were told.
"""

from collections.abc import Iterator
from typing import Any, Final
from unittest.mock import patch

from quorumlog.errors import QuorumLogError
from quorumlog.protocol import offset_store, rows
from quorumlog.protocol.subscriptions import (
    AckWake,
    ClaimWake,
    Delivered,
    Ends,
    Expire,
    Failed,
    Kind,
    Link,
    LinkStreams,
    Phase,
    PutSubscription,
    StreamGone,
    Subscription,
    Subscriptions,
    SubscriptionSettings,
    Wake,
    is_counted_once,
)
from tests.model.positions import simulation as base
from tests.model.positions.simulation import Violation

LEASE_S: Final = 3.0
END_S: Final = 45.0
NAMES: Final = ("hook", "pull")
STREAMS: Final = ("a", "b")


class SubscriptionWorld(base.World):
    """The log of subscriptions, and the streams that they follow."""

    kind = Subscriptions
    counts_once = staticmethod(is_counted_once)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.creations = dict.fromkeys(STREAMS, 1)
        self.lengths: dict[tuple[str, str], int] = {}

    def stream(self, name: str) -> tuple[str, str]:
        """A stream as links name it."""
        return name, f"{self.creations[name]:05d}"

    def ends(self) -> Ends:
        """What a gateway learns of the streams' ends, a while ago."""
        late = 0 if self.is_calm else self.random.choice((0, 0, 1, 4))
        found = (self.stream(name) for name in STREAMS)
        return tuple((*each, max(0, self.lengths.get(each, 0) - late)) for each in found)

    def wake_id(self) -> str:
        return f"w{self.unique()}"

    def make(self, name: str) -> None:
        """Create a subscription; again if the request is too old to tell whether it was done."""

        def answered(answer: Any) -> None:
            if isinstance(answer, QuorumLogError):
                self.after(1.0, lambda: self.make(name))

        kind = Kind.WEBHOOK if name == "hook" else Kind.PULL
        settings = SubscriptionSettings(kind, "*", (), "u", "w", int(LEASE_S * 1000), "")
        links = [Link(*self.stream(STREAMS[0]), 0, is_explicit=name == "hook", is_glob=True)]
        self.ask(PutSubscription(name, settings, name, "", tuple(links)), answered)

    def live(self) -> None:
        """Streams grow, are deleted and created again, and are discovered."""
        for name in STREAMS:
            stream = self.stream(name)
            if not self.is_calm:
                grown = self.random.choice((0, 0, 1, 3))
                self.lengths[stream] = self.lengths.get(stream, 0) + grown
                if self.random.random() < 0.02:
                    self.creations[name] += 1
                    gone = StreamGone(*stream)
                    self.after(self.random.uniform(0, 2), lambda gone=gone: self.ask(gone))  # type: ignore[misc]
            link = Link(*self.stream(name), is_glob=True)
            for subscription in NAMES:
                self.ask(LinkStreams(subscription, (link,)))
        self.after(self.random.uniform(0.1, 2.0), self.live)


class Driver:
    """Brings wakes forward as the owner does, by what one keeper knows."""

    def __init__(self, world: SubscriptionWorld, keeper: base.Keeper) -> None:
        self.world, self.keeper = world, keeper
        world.after(world.random.uniform(0, 2), self.work)

    def work(self) -> None:
        world = self.world
        world.after(world.random.uniform(0.05, 0.8), self.work)
        for row in list(self.keeper.machine.state.rows.values()):
            if isinstance(row, Subscription) and world.random.random() < 0.7:
                self.step(row)

    def step(self, row: Subscription) -> None:
        world = self.world
        match row.phase:
            case Phase.IDLE:
                world.ask(Wake(row.id, world.wake_id(), world.ends()))
            case Phase.DUE:
                world.after(world.soon_s(), lambda: self.deliver(row))
            case Phase.HELD:
                world.ask(Expire(row.id, row.generation, world.wake_id()))
            case _:
                pass

    def deliver(self, row: Subscription) -> None:
        world = self.world
        draw = world.random.random()
        if world.is_calm or row.id == "pull":
            world.ask(Delivered(row.id, row.generation, is_done=row.id == "hook"))
        elif draw < 0.3:
            world.ask(Failed(row.id, row.generation, 0))
        elif draw < 0.6:
            world.ask(Delivered(row.id, row.generation, is_done=True))
        else:
            worker = Holder(world, row)
            world.after(world.random.uniform(0.05, 2.0), worker.work)
            if draw < 0.9:  # else the gateway does not hear of it
                world.ask(Delivered(row.id, row.generation, is_done=False))


class Holder:
    """Acknowledges a wake part by part; goes on beyond its lease where it does not know better."""

    def __init__(self, world: SubscriptionWorld, row: Subscription) -> None:
        self.world, self.row = world, row
        self.left = {each.log: each for each in row.links if each.tail > each.acked}

    def work(self) -> None:
        world, row, draw = self.world, self.row, self.world.random.random()
        if draw < 0.1 and not world.is_calm:
            return  # it dies
        acks, is_done = [], world.is_calm or draw < 0.4
        for each in list(self.left.values()):
            if is_done or draw < 0.7:
                offset = each.tail
                if draw < 0.3:
                    offset = world.random.randrange(0, each.tail + 2)
                acks.append((each.log, each.created, offset))
        ends = world.ends()
        asked = AckWake(
            row.id, row.generation, row.wake_id, tuple(acks), is_done, world.wake_id(), ends
        )
        world.ask(asked)
        if not is_done or world.random.random() < 0.2:
            world.after(world.random.choice((0.5, 1.0, 2.0, 2 * LEASE_S)), self.work)


class Worker:
    """Claims the pull-wake subscription."""

    def __init__(self, world: SubscriptionWorld, name: str) -> None:
        self.world, self.name = world, name
        world.after(world.random.uniform(0, 2), self.work)

    def work(self) -> None:
        world = self.world
        world.after(world.random.uniform(0.2, 2.0 if world.is_calm else 6.0), self.work)
        world.ask(ClaimWake("pull", self.name, world.wake_id(), world.ends()), self.claimed)

    def claimed(self, answer: Any) -> None:
        if isinstance(answer, Subscription):
            Holder(self.world, answer).work()


def trouble(world: SubscriptionWorld) -> None:
    """Something happens to a keeper."""
    if world.is_calm:
        return
    world.after(world.random.uniform(0.05, 2.0), lambda: trouble(world))
    keeper, draw = world.random.choice(world.keepers), world.random.random()
    if draw < 0.3:
        keeper.hang(world.random.uniform(0.1, 2 * LEASE_S))
    elif draw < 0.5:
        keeper.die()
    elif draw < 0.65:
        keeper.skew_ms = world.random.randrange(-10_000_000, 10_000_000)


def run(seed: int) -> SubscriptionWorld:
    """One history, judged. Raises: Violation."""
    with (
        patch.multiple(offset_store, _SLACK=10, _TRUNCATE_EVERY=5, _CARRIED=2, _KEPT_RECORDS=10),
        patch.object(rows, "REMEMBERED_MAX", 30),
    ):
        world = SubscriptionWorld(seed)
        if seed % 3 == 0:
            del world.keepers[1:]  # none is overtaken: leases end by what this one remembers
        for name in NAMES:
            world.make(name)
        for keeper in world.keepers:
            Driver(world, keeper)
        for name in ("x", "y"):
            Worker(world, name)
        world.live()
        trouble(world)
        world.run(END_S)
        world.is_calm = True
        del world.keepers[1:]  # whoever is overtaken all the time waits whole leases all the time
        for name in NAMES:
            world.make(name)
        world.run(END_S + 70 + 20 * LEASE_S)
        judge(world)
        return world


# --- the judge ---------------------------------------------------------------------------------------


def judge(world: SubscriptionWorld) -> None:
    """Raises: Violation."""
    for name in NAMES:
        states = list(_states(world, name))
        if not states:
            raise Violation(f"the subscription {name} was never made where nothing is wrong")
        before: Subscription | None = None
        for at_s, row in states:
            if before is not None:
                _judge_change(world, at_s, before, row)
            before = row
        _judge_claims(world, name, {row.generation for _, row in states})
        _judge_end(world, states[-1][1])


def _states(world: SubscriptionWorld, name: str) -> Iterator[tuple[float, Subscription]]:
    """The states of a subscription, with the time of each."""
    last: Subscription | None = None
    for at_s, batch in world.history.batches:
        for row in batch.rows:
            if row.id == name and row != last:
                if last is not None and row.version <= last.version:
                    raise Violation(f"a version goes back: {row}")
                last = row
                yield at_s, row


def _ops(world: SubscriptionWorld, row: Subscription, at_s: float) -> list[Any]:
    """The requests about the current wake that were sent before a time."""
    return [
        op.request
        for op in world.history.ops
        if op.asked_s <= at_s
        and getattr(op.request, "id", "") == row.id
        and getattr(op.request, "generation", -1) == row.generation
    ]


def _is_let_go(request: Any) -> bool:
    return isinstance(request, AckWake | Delivered) and request.is_done


def _judge_change(
    world: SubscriptionWorld, at_s: float, before: Subscription, row: Subscription
) -> None:
    ops = _ops(world, before, at_s)
    if row.generation < before.generation:
        raise Violation(f"a generation goes back: {row}")
    if row.generation == before.generation and row.wake_id not in (before.wake_id, ""):
        raise Violation(f"two wakes have one generation: {before} {row}")
    is_over = row.generation != before.generation or row.phase == Phase.IDLE
    if before.phase != Phase.IDLE and is_over and not any(map(_is_let_go, ops)):
        if before.phase != Phase.HELD:
            raise Violation(f"a wake was lost that nobody had accepted: {before} {row}")
        if at_s < (until := _held_until(world, before, at_s)):
            raise Violation(f"a wake that is held until {until} ended at {at_s}: {before} {row}")
    links = {(each.log, each.created): each.acked for each in before.links}
    for each in row.links:
        acked = links.get((each.log, each.created), 0)
        if each.acked < acked and not _is_gone(world, each, at_s):
            raise Violation(f"what was acknowledged goes back: {before} {row}")
        if each.acked > world.lengths.get((each.log, each.created), 0):
            raise Violation(f"more was acknowledged than there is: {row}")
        if each.acked > acked and not _is_acked(before, each, ops):
            raise Violation(f"nobody acknowledged {each}: {before} {row}")


def _is_gone(world: SubscriptionWorld, link: Link, at_s: float) -> bool:
    """Whether a stream was deleted: a late discovery may link it once more, with nothing to read."""
    gone = StreamGone(link.log, link.created)
    return any(op.request == gone and op.asked_s <= at_s for op in world.history.ops)


def _is_acked(before: Subscription, link: Link, ops: list[Any]) -> bool:
    wanted = (link.log, link.created, link.acked)
    if any(isinstance(each, AckWake) and wanted in each.acks for each in ops):
        return True
    tails = {(each.log, each.created, each.tail) for each in before.links}
    return wanted in tails and any(isinstance(each, Delivered) and each.is_done for each in ops)


def _held_until(world: SubscriptionWorld, row: Subscription, at_s: float) -> float:
    """Until when a receiver or a worker may count on a wake, by what it was told before a time."""
    found = [0.0]
    for op in world.history.ops:
        is_told = op.answered_s is not None and op.answered_s <= at_s
        answer = op.answer
        if not is_told or not isinstance(answer, Subscription) or answer.id != row.id:
            continue
        is_held = answer.generation == row.generation and answer.phase == Phase.HELD
        is_new = isinstance(op.request, ClaimWake) and answer.last == op.request.wake_id
        if is_held and (is_new or isinstance(op.request, AckWake)):
            found.append(op.asked_s + LEASE_S)
    return max(found)


def _judge_claims(world: SubscriptionWorld, name: str, generations: set[int]) -> None:
    """A generation is claimed once, and the log says so."""
    claims: dict[int, str] = {}
    for op in world.history.ops:
        if (
            isinstance(op.request, ClaimWake)
            and op.request.id == name
            and isinstance(op.answer, Subscription)
        ):
            generation = op.answer.generation
            if claims.setdefault(generation, op.request.wake_id) != op.request.wake_id:
                raise Violation(f"two claims of the generation {generation}: {op}")
            if generation not in generations:
                raise Violation(f"told what the log does not say: {op}")


def _judge_end(world: SubscriptionWorld, row: Subscription) -> None:
    """Once nothing is wrong, all is acknowledged."""
    acked = {(each.log, each.created): each.acked for each in row.links}
    wanted = {world.stream(name) for name in STREAMS}
    left = {each: (acked.get(each), world.lengths.get(each, 0)) for each in wanted}
    if any(done != end for done, end in left.values()) or row.phase != Phase.IDLE:
        raise Violation(f"work is left where nothing is wrong: {left} {row}")
