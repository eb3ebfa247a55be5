"""Subscriptions in virtual time: owners that stand still, die, are overtaken; receivers and workers that are late.

The world is that of `tests/model/positions`: gateways that repeat requests, keepers that each take themselves for
the owner, appends whose answers are lost. Two streams grow, are deleted and created again. A webhook subscription and
a pull-wake subscription follow them, and are deleted and created again themselves. Each keeper brings the wakes forward
by what it knows, which may be long ago, and learns of streams once or from a list of all. Workers claim what is
announced. `judge` reads what the log of subscriptions says, and what receivers and workers were told.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Final
from unittest.mock import patch

from quorumlog.errors import QuorumLogError, QuorumTimeout
from quorumlog.protocol import offset_store, rows
from quorumlog.protocol.subscriptions import (
    AckWake,
    ClaimWake,
    DeleteSubscription,
    Delivered,
    Discovery,
    Ends,
    Expire,
    Failed,
    Kind,
    Link,
    Phase,
    PutSubscription,
    Subscription,
    Subscriptions,
    SubscriptionSettings,
    Wake,
    discovered,
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
        self.absent: set[str] = set()
        """Streams that are deleted, and not created again yet."""
        self.lengths: dict[tuple[str, str], int] = {}
        self.has_missed = False
        """Whether an announcement was missed since nothing is wrong."""
        self.drivers: list[Driver] = []
        self.workers: list[Worker] = []

    def stream(self, name: str) -> tuple[str, str]:
        """A stream as links name it."""
        return name, f"{self.creations[name]:05d}"

    def ends(self) -> Ends:
        """What a gateway learns of the streams' ends, a while ago."""
        late = 0 if self.is_calm else self.random.choice((0, 0, 1, 4))
        found = (self.stream(name) for name in STREAMS)
        return tuple((*each, max(0, self.lengths.get(each, 0) - late)) for each in found)

    def is_read(self, draw: float) -> bool:
        """Whether a worker reads an announcement. Also where nothing is wrong, none reads the first."""
        if not self.is_calm:
            return draw < 0.5
        has_missed, self.has_missed = self.has_missed, True
        return has_missed

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
        secret = f"{name}{self.unique()}"
        self.ask(PutSubscription(name, settings, secret, "", tuple(links)), answered)

    def remake(self, row: Subscription) -> None:
        """Delete a subscription, and create it again: its generations begin again too."""
        self.ask(DeleteSubscription(row.id, row.secret), lambda _answer: self.make(row.id))

    def live(self) -> None:
        """Streams grow, are deleted and created again."""
        for name in STREAMS:
            stream = self.stream(name)
            if name in self.absent:
                continue
            if not self.is_calm:
                grown = self.random.choice((0, 0, 1, 3))
                self.lengths[stream] = self.lengths.get(stream, 0) + grown
                if self.random.random() < 0.03:
                    self.delete(name)
        self.after(self.random.uniform(0.1, 2.0), self.live)

    def delete(self, name: str) -> None:
        """Delete a stream, for a while."""
        if name not in self.absent:
            self.absent.add(name)
            self.tell(name)
            self.after(self.random.choice((0.0, 0.2, 3.0)), partial(self.recreate, name))

    def recreate(self, name: str) -> None:
        """Create a deleted stream again."""
        self.creations[name] += 1
        self.absent.discard(name)
        self.tell(name)

    def tell(self, name: str) -> None:
        """Let the owners hear that a stream has changed, or that they may have missed it."""
        for driver in self.drivers:
            is_missed = self.random.random() < 0.1
            note = driver.discovery.gap if is_missed else partial(driver.discovery.heard, name)
            self.after(self.soon_s(), note)


class Driver:
    """Brings wakes forward as the owner does, by what one keeper knows."""

    def __init__(self, world: SubscriptionWorld, keeper: base.Keeper) -> None:
        self.world, self.keeper = world, keeper
        self.discovery = Discovery()
        self.seen: Any = None
        world.drivers.append(self)
        world.after(world.random.uniform(0, 2), self.work)

    def work(self) -> None:
        world, state = self.world, self.keeper.machine.state
        if self.keeper not in world.keepers:
            return  # it is the owner no more
        world.after(world.random.uniform(0.05, 0.8), self.work)
        rows = [row for row in state.rows.values() if isinstance(row, Subscription)]
        seen = self.keeper.life, state.since_s, frozenset(row.secret for row in rows)
        if seen != self.seen:  # a new owner, or a new subscription
            self.seen = seen
            self.discovery.gap()
        names, is_all = self.discovery.take()
        for name in STREAMS if is_all else sorted(names):
            world.after(world.soon_s(), partial(self.discover, name))
        for row in rows:
            if world.random.random() < 0.7:
                self.step(row)

    def discover(self, name: str) -> None:
        """Let all rows that this keeper knows learn of a stream as it is now."""
        created = "" if name in self.world.absent else self.world.stream(name)[1]
        for row in list(self.keeper.machine.state.rows.values()):
            request = discovered(row, name, created, is_match=True)
            if request is not None:
                self.ask(name, request)

    def ask(self, name: str, request: Any) -> None:
        answers: list[Any] = []

        def answered(answer: Any) -> None:
            if not answers:
                self.discovery.answered(name, answer)
            answers.append(answer)

        is_settled = self.world.now_s > END_S + 20
        if is_settled or self.world.random.random() < 0.6:  # else it does not arrive
            late_s = 0.0 if is_settled else self.world.random.choice((0.0, 0.0, 4.0))
            self.world.after(late_s, lambda: self.world.ask(request, answered))
        self.world.after(8.0, lambda: answered(QuorumTimeout("no answer")))

    def step(self, row: Subscription) -> None:
        world = self.world
        match row.phase:
            case Phase.IDLE:
                world.ask(Wake(row.id, row.secret, world.wake_id(), world.ends()))
            case Phase.HELD:
                world.ask(Expire(row.id, row.secret, row.generation, world.wake_id()))
            case _ if row.sends_in_ms(self.keeper.wall_ms()) == 0:
                world.after(world.soon_s(), lambda: self.deliver(row))
            case _:
                pass

    def deliver(self, row: Subscription) -> None:
        world = self.world
        draw = world.random.random()
        wake = row.id, row.secret, row.generation
        if row.id == "pull":
            if world.is_read(draw):
                world.after(world.soon_s(), world.random.choice(world.workers).claim)
            world.ask(Delivered(*wake, is_done=False))
        elif world.is_calm:
            world.ask(Delivered(*wake, is_done=True))
        elif draw < 0.3:
            world.ask(Failed(*wake, 0))
        elif draw < 0.6:
            # A gateway that stands still notes it long after.
            late_s = world.random.choice((0.0, 0.0, 2 * LEASE_S))
            world.after(late_s, lambda: world.ask(Delivered(*wake, is_done=True)))
        else:
            worker = Holder(world, row)
            world.after(world.random.uniform(0.05, 2.0), worker.work)
            if draw < 0.9:  # else the gateway does not hear of it
                world.ask(Delivered(*wake, is_done=False))


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
        wake = row.id, row.secret, row.generation, row.wake_id
        asked = AckWake(*wake, tuple(acks), is_done, world.wake_id(), ends)
        world.ask(asked)
        if not is_done or world.random.random() < 0.2:
            world.after(world.random.choice((0.5, 1.0, 2.0, 2 * LEASE_S)), self.work)


class Worker:
    """Claims the pull-wake subscription: what was announced, and at times what was not."""

    def __init__(self, world: SubscriptionWorld, name: str) -> None:
        self.world, self.name = world, name
        world.workers.append(self)
        world.after(world.random.uniform(0, 2), self.work)

    def work(self) -> None:
        if not self.world.is_calm:
            self.world.after(self.world.random.uniform(4.0, 30.0), self.work)
            self.claim()

    def claim(self) -> None:
        world = self.world
        rows = [
            row
            for keeper in world.keepers
            for row in keeper.machine.state.rows.values()
            if row.id == "pull"
        ]
        if rows:
            claim = rows[0].id, rows[0].secret, self.name, world.wake_id(), world.ends()
            world.ask(ClaimWake(*claim), self.claimed)
            if not world.is_calm and world.random.random() < 0.2:  # its gateway sends a copy late
                late_s = world.random.uniform(0.5, 2.0) * LEASE_S
                world.after(late_s, lambda: world.ask(ClaimWake(*claim), self.claimed))

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
    elif draw < 0.7:
        for row in list(keeper.machine.state.rows.values())[:1]:
            world.remake(row)


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
        for name in ("x", "y"):
            Worker(world, name)
        for keeper in world.keepers:
            Driver(world, keeper)
        world.live()
        trouble(world)
        world.run(END_S)
        world.is_calm = True
        del world.keepers[1:]  # whoever is overtaken all the time waits whole leases all the time
        for name in NAMES:
            world.make(name)
        for name in STREAMS:
            world.delete(name)
        world.run(END_S + 90 + 20 * LEASE_S)
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
        acked: dict[tuple[str, str, str], int] = {}
        for at_s, row in states:
            for each in row.links:
                known = acked.setdefault((row.secret, each.log, each.created), each.acked)
                if each.acked < known and not _is_gone(world, each):
                    raise Violation(f"what was acknowledged goes back: {known} {row}")
                acked[row.secret, each.log, each.created] = max(known, each.acked)
            if before is not None and before.secret == row.secret:
                _judge_change(world, at_s, before, row)
            before = row
        _judge_claims(world, name, {(row.secret, row.generation) for _, row in states})
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
        and getattr(op.request, "secret", "") == row.secret
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
        if each.acked > world.lengths.get((each.log, each.created), 0):
            raise Violation(f"more was acknowledged than there is: {row}")
        if each.acked > acked and not _is_acked(before, each, ops):
            raise Violation(f"nobody acknowledged {each}: {before} {row}")


def _is_gone(world: SubscriptionWorld, link: Link) -> bool:
    """Whether a stream was deleted: a late discovery may link it once more, with nothing to read."""
    return (link.log, link.created) != world.stream(link.log)


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
        if not is_told or not isinstance(answer, Subscription) or answer.secret != row.secret:
            continue
        is_held = answer.generation == row.generation and answer.phase == Phase.HELD
        is_new = isinstance(op.request, ClaimWake) and answer.last == op.request.wake_id
        if is_held and (is_new or isinstance(op.request, AckWake)):
            found.append(op.asked_s + LEASE_S)
    return max(found)


def _judge_claims(world: SubscriptionWorld, name: str, generations: set[tuple[str, int]]) -> None:
    """A generation is claimed once, and the log says so, unless the same record deletes it."""
    claims: dict[tuple[str, int], str] = {}
    deleted = {
        op.request.secret for op in world.history.ops if isinstance(op.request, DeleteSubscription)
    }
    for op in world.history.ops:
        if (
            isinstance(op.request, ClaimWake)
            and op.request.id == name
            and isinstance(op.answer, Subscription)
        ):
            generation = op.answer.secret, op.answer.generation
            if claims.setdefault(generation, op.request.wake_id) != op.request.wake_id:
                raise Violation(f"two claims of the generation {generation}: {op}")
            if generation not in generations and op.request.secret not in deleted:
                raise Violation(f"told what the log does not say: {op}")


def _judge_end(world: SubscriptionWorld, row: Subscription) -> None:
    """Once nothing is wrong, all is acknowledged."""
    acked = {(each.log, each.created): each.acked for each in row.links}
    wanted = {world.stream(name) for name in STREAMS}
    left = {each: (acked.get(each), world.lengths.get(each, 0)) for each in wanted}
    if any(done != end for done, end in left.values()) or row.phase != Phase.IDLE:
        raise Violation(f"work is left where nothing is wrong: {left} {row}")
