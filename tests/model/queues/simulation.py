"""Work queues in virtual time: keepers that stand still, die, are overtaken; workers that are late, or zombies.

The world is that of `tests/model/positions`: gateways that repeat requests, keepers that each take themselves for
the owner, appends whose answers are lost. Two queues give the records of one log, which grows and is truncated: one
in any order, one in order by key. Records that fail too often go to a log of dead letters, which forgets producers;
several gateways carry out each move at once. `judge` reads what the log of queues says, and what workers were told.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final
from unittest.mock import patch

from quorumlog.errors import QuorumLogError
from quorumlog.protocol import offset_store, queues, rows
from quorumlog.protocol.offset_set import NONE, Offsets
from quorumlog.protocol.queue_requests import (
    BeginMove,
    DeleteQueue,
    EndMove,
    LookQueue,
    PutQueue,
    Settle,
    Settled,
    Settlement,
    Take,
    Taken,
    is_counted_once,
)
from quorumlog.protocol.queue_state import Move, Queue, QueueSettings
from quorumlog.protocol.queues import Queues
from quorumlog.protocol.rows import CHANGES_MAX
from tests.model.positions import simulation as base
from tests.model.positions.simulation import Violation

LEASE_S: Final = 3.0
DELAY_S: Final = 2.0
ATTEMPTS: Final = 3
IN_FLIGHT: Final = 12
WINDOW: Final = 24
END_S: Final = 45.0
_LETS_GO: Final = (Settlement.ACK, Settlement.NAK, Settlement.UNREAD)
NAMES: Final = ("any", "key")
LOG: Final = "log"


class QueueWorld(base.World):
    """The log of queues; the log whose records they give, by `keys`; and the dead letters of each queue."""

    kind = Queues
    counts_once = staticmethod(is_counted_once)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.keys: list[int] = []
        self.first_record = 0
        self.dead: dict[str, list[tuple[int, int]]] = {name: [] for name in NAMES}
        """Of each queue, (move, offset)."""
        self.known: set[int] = set()
        """Producers that the log of dead letters remembers, by move."""
        self.forgotten = dict.fromkeys(NAMES, 0)

    def make(self, name: str) -> None:
        """Create a queue; again if the request is too old to tell whether it was done."""

        def answered(answer: Any) -> None:
            if isinstance(answer, QuorumLogError):
                self.after(1.0, lambda: self.make(name))

        self.ask(PutQueue(LOG, name, self.created, settings(name), 0), answered)

    def grow(self) -> None:
        if not self.is_calm:
            count = self.random.choice((0, 1, 1, 2, 6))
            self.keys += [self.random.randrange(4) for _ in range(count)]
            self.after(self.random.uniform(0.1, 1.5), self.grow)

    def append_dead(self, queue: str, move: Move, offsets: Offsets) -> str:
        """Append a move's records once: `done`, or `expired` if it is unknown whether that was done."""
        if move.id in self.known:
            return "done"
        if move.since < self.forgotten[queue]:
            return "expired"
        self.known.add(move.id)
        self.dead[queue] += [(move.id, offset) for offset in offsets]
        return "done"

    def forget(self) -> None:
        """Forget all producers, as a log does that has had many others since."""
        self.known.clear()
        self.forgotten = {name: len(found) for name, found in self.dead.items()}


class Worker:
    """Claims and settles records; goes on beyond its lease where it does not know better, or does not care."""

    def __init__(self, world: QueueWorld, queue: str) -> None:
        self.world, self.queue = world, queue
        self.claims: list[tuple[int, Offsets]] = []
        self.seen: Taken | None = None
        world.after(world.random.uniform(0, 2), self.work)

    def work(self) -> None:
        world = self.world
        is_slow = not world.is_calm and world.random.random() < 0.3
        world.after(world.random.uniform(0.05, 4.0 if is_slow else 1.0), self.work)
        draw = world.random.random()
        if not self.claims or draw < 0.3:
            self.take()
            return
        index = world.random.randrange(len(self.claims))
        token, offsets = self.claims[index]
        if world.is_calm:
            self.claims.pop(index)
            self.settle(Settlement.ACK, token, offsets)
        elif draw < 0.6:
            part = Offsets.of(at for at in offsets if world.random.random() < 0.7)
            self.settle(Settlement.ACK, token, part or offsets)
            if world.random.random() < 0.8:  # else it acknowledges once more
                left = offsets - part
                self.claims[index] = token, left
                if not (part and left):
                    self.claims.pop(index)
        elif draw < 0.75:
            self.settle(Settlement.NAK, token, offsets, int(DELAY_S * 1000) * (draw < 0.7))
            if world.random.random() < 0.8:
                self.claims.pop(index)
        elif draw < 0.8:
            self.settle(Settlement.UNREAD, token, offsets)
            self.claims.pop(index)
        elif draw < 0.95:
            self.settle(Settlement.EXTEND, token, NONE)
        else:
            self.claims.pop(index)  # it dies

    def settle(self, kind: str, token: int, offsets: Offsets, delay_ms: int = 0) -> None:
        self.world.ask(Settle(LOG, self.queue, kind, ((token, offsets),), delay_ms))

    def take(self) -> None:
        world = self.world
        late = 0 if world.is_calm else world.random.choice((0, 0, 1, 5))
        end = max(len(world.keys) - late, 0)
        first = world.first_record if world.random.random() < 0.7 or world.is_calm else 0
        keys: list[tuple[int, int]] = []
        if self.seen is not None and self.seen.order == "key":
            known = Offsets.span(self.seen.floor, end) - self.seen.acked
            keys = [(at, world.keys[at]) for at in known.lowest(WINDOW)]
        count = world.random.choice((1, 3, 20))
        asked = Take(LOG, self.queue, world.created, first, end, count, tuple(keys))
        world.ask(asked, self.taken)

    def taken(self, answer: Any) -> None:
        if not isinstance(answer, Taken):
            return
        self.seen = answer
        offsets = NONE
        for _, each in answer.records:
            offsets |= each
        gone = offsets.below(self.world.first_record)
        if gone:
            self.settle(Settlement.UNREAD, answer.token, gone)
        if offsets - gone:
            self.claims.append((answer.token, offsets - gone))


class Mover:
    """Carries out moves by what one keeper knows, which may be long ago."""

    def __init__(self, world: QueueWorld, keeper: base.Keeper) -> None:
        self.world, self.keeper = world, keeper
        world.after(world.random.uniform(0, 2), self.work)

    def work(self) -> None:
        world = self.world
        world.after(world.random.uniform(0.2, 1.5), self.work)
        state = self.keeper.machine.state.rows
        for row in list(state.values()):
            if isinstance(row, Queue):
                if world.random.random() < 0.3:
                    world.ask(LookQueue(*row.key))
                for move in row.moves:
                    if world.random.random() < 0.7:
                        self.carry_out(row.queue, move)

    def carry_out(self, queue: str, move: Move) -> None:
        world = self.world
        if move.since < 0:
            kept = move.offsets.lowest(world.random.choice((1, 2, 50)))
            since = len(world.dead[queue])
            world.after(
                world.soon_s(),
                lambda: world.ask(BeginMove(LOG, queue, move.id, (-1, ""), since, kept, "d")),
            )
            return
        offsets = move.offsets - move.offsets.below(world.first_record)
        world.after(world.soon_s(), lambda: self.append(queue, move, offsets))

    def append(self, queue: str, move: Move, offsets: Offsets) -> None:
        world = self.world
        lost = len(move.offsets) - len(offsets)
        result = world.append_dead(queue, move, offsets) if offsets else "done"
        if not world.is_calm and world.random.random() < 0.2:
            return  # the answer is lost
        end = len(world.dead[queue])
        is_there = any(number == move.id for number, _ in world.dead[queue][move.since : end])
        if result == "done" or is_there:
            # A copy before this one may have had records that are gone by now.
            world.after(world.soon_s(), lambda: world.ask(EndMove(LOG, queue, move.id, lost)))
        else:
            seen = move.since, move.created
            since, created = world.random.choice(((end, "d"), (-1, "")))
            begin = BeginMove(LOG, queue, move.id, seen, since, move.offsets, created)
            world.after(world.soon_s(), lambda: world.ask(begin))


def trouble(world: QueueWorld) -> None:
    """Something happens to a keeper, or to the logs."""
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
    elif draw < 0.75:
        world.ask(LookQueue(LOG, world.random.choice(NAMES)))
    elif draw < 0.91:
        world.forget()
    elif draw < 0.97 and world.keys:
        before = world.first_record + world.random.randrange(6)
        world.first_record = min(before, len(world.keys))
    else:
        world.ask(DeleteQueue(LOG, world.random.choice(NAMES), 0))  # late, of an earlier queue


def settings(queue: str) -> QueueSettings:
    return QueueSettings(
        int(LEASE_S * 1000), ATTEMPTS, "dead", "none" if queue == "any" else "key", IN_FLIGHT
    )


def run(seed: int) -> QueueWorld:
    """One history, judged. Raises: Violation."""
    with (
        patch.multiple(offset_store, _SLACK=10, _TRUNCATE_EVERY=5, _CARRIED=2, _KEPT_RECORDS=10),
        patch.multiple(offset_store, _SLACK_CHARS=9000, _TRUNCATE_CHARS=4000, _KEPT_CHARS=9000),
        patch.object(rows, "REMEMBERED_MAX", 30),
        patch.multiple(queues, WINDOW=WINDOW, MOVES_MAX=3),
    ):
        world = QueueWorld(seed)
        if seed % 3 == 0:
            del world.keepers[1:]  # none is overtaken: leases end by what this one remembers
        for name in NAMES:
            world.make(name)
            for _ in range(4):
                Worker(world, name)
        for keeper in world.keepers:
            Mover(world, keeper)
        world.grow()
        trouble(world)
        world.run(END_S)
        world.is_calm = True
        del world.keepers[1:]  # whoever is overtaken all the time waits whole leases all the time
        for name in NAMES:
            world.make(name)
        while world.now_s < END_S + 60 + 20 * LEASE_S and not is_over(world):
            world.run(world.now_s + LEASE_S)
        world.run(world.now_s + 2 * LEASE_S)  # nothing is given after the end
        judge(world)
        return world


def is_over(world: QueueWorld) -> bool:
    """Whether all records of both queues are done."""
    rows = {row.queue: row for _, batch in world.history.batches for row in batch.rows}
    return len(rows) == len(NAMES) and all(
        row.floor >= len(world.keys) and not row.moves for row in rows.values()
    )


# --- the judge ---------------------------------------------------------------------------------------


def done(row: Queue, at: int) -> bool:
    return at < row.floor or at in row.acked


def judge(world: QueueWorld) -> None:
    """Raises: Violation."""
    for name in NAMES:
        states = list(_states(world, name))
        if not states:
            raise Violation(f"the queue {name} was never made where nothing is wrong")
        _judge_answers(world, name, states)
        _judge_states(world, name, states)
        _judge_end(world, name, states[-1][1])


def _states(world: QueueWorld, name: str) -> Iterator[tuple[float, Queue]]:
    """The states of a queue, with the time of each."""
    last: Queue | None = None
    for at_s, batch in world.history.batches:
        if batch.gone:
            raise Violation(f"a late request has deleted a queue: {batch.gone}")
        for row in batch.rows:
            if row.queue == name and row != last:
                if last is not None and row.version <= last.version:
                    raise Violation(f"a version goes back: {row}")
                last = row
                yield at_s, row


def _settlements(world: QueueWorld, name: str) -> dict[int, list[base.Op]]:
    """The requests to settle records, by the token."""
    found: dict[int, list[base.Op]] = {}
    for op in world.history.ops:
        if isinstance(op.request, Settle) and op.request.queue == name:
            found.setdefault(op.request.items[0][0], []).append(op)
    return found


def _covers(op: base.Op, at: int, at_s: float, *kinds: str) -> bool:
    """Whether a request to settle a record in one of these ways was sent before a time."""
    request: Any = op.request
    offsets = request.items[0][1]
    return request.kind in kinds and op.asked_s <= at_s and (not offsets or at in offsets)


def _held_until(world: QueueWorld, name: str) -> dict[int, list[tuple[float, float]]]:
    """By token: when a worker was told that it holds its records, and until when it may count on that."""
    held: dict[int, list[tuple[float, float]]] = {}
    for op in world.history.ops:
        answer, request = op.answer, op.request
        if isinstance(request, Take) and request.queue == name and isinstance(answer, Taken):
            held.setdefault(answer.token, []).append((0.0, op.asked_s + LEASE_S))
        elif isinstance(request, Settle) and request.queue == name and isinstance(answer, Settled):
            token = request.items[0][0]
            if request.kind == Settlement.EXTEND and answer.done:
                assert op.answered_s is not None
                held.setdefault(token, []).append((op.answered_s, op.asked_s + LEASE_S))
    return held


def _judge_states(world: QueueWorld, name: str, states: list[tuple[float, Queue]]) -> None:
    held, settled = _held_until(world, name), _settlements(world, name)
    before: Queue | None = None
    waits: dict[int, float] = {}
    for at_s, row in states:
        taken = NONE
        for claim in row.claims:
            if taken & claim.offsets:
                raise Violation(f"two claims have a record: {row}")
            taken |= claim.offsets
        if any(done(row, at) for at in taken) or taken & row.moving:
            raise Violation(f"a claim has a record that is done: {row}")
        if len(row.given) > IN_FLIGHT or row.next > row.floor + WINDOW:
            raise Violation(f"a bound is exceeded: {row}")
        if any(count > ATTEMPTS for count, _ in row.attempts):
            raise Violation(f"a record was given too often: {row}")
        if before is not None:
            _judge_change(world, name, at_s, before, row, held, settled, waits)
        before = row


def _judge_change(
    world: QueueWorld,
    name: str,
    at_s: float,
    before: Queue,
    row: Queue,
    held: dict[int, list[tuple[float, float]]],
    settled: dict[int, list[base.Op]],
    waits: dict[int, float],
) -> None:
    """`waits`: until when records that were given back with a delay wait."""
    last, now = _by_offset(before), _by_offset(row)
    for at in range(before.floor, max(row.floor, row.next)):
        if done(before, at) and not done(row, at):
            raise Violation(f"a record that was done is not: {at} {row}")
        if done(before, at):
            continue
        ops = [op for token in {last.get(at), now.get(at)} for op in settled.get(token or 0, ())]
        if (
            at in last
            and last[at] != now.get(at)
            and last[at] > 0
            and at not in _dropped(world, name, at_s)
        ):
            token = last[at]
            is_let_go = any(_covers(op, at, at_s, *_LETS_GO) for op in settled.get(token, ()))
            if not is_let_go and any(since <= at_s < until for since, until in held.get(token, ())):
                raise Violation(f"{at} left its claim {token} at {at_s}: {held[token]} {row}")
        if now.get(at, 0) > 0:
            if at_s < waits.pop(at, 0.0) and now[at] != last.get(at):
                raise Violation(f"{at} was given again at {at_s}, before its delay: {row}")
        elif last.get(at, 0) > 0:
            back = [op for op in settled.get(last[at], ()) if _covers(op, at, at_s, *_LETS_GO)]
            if back and all(op.request.delay_ms for op in back if isinstance(op.request, Settle)):
                waits[at] = min(op.asked_s for op in back) + DELAY_S
        if done(row, at):
            is_acked = any(_covers(op, at, at_s, Settlement.ACK) for op in ops)
            is_moved = at in before.moving and at not in row.moving
            if not (is_acked or is_moved or at in _dropped(world, name, at_s)):
                raise Violation(f"a record is done that nobody acknowledged: {at} {row}")
        elif at in now and now[at] > 0 and now[at] != last.get(at) and name == "key":
            key = world.keys[at]
            for other in range(before.floor, at):
                if key and world.keys[other] == key and not done(row, other):
                    raise Violation(f"{at} was given before {other} of its key: {row}")


@lru_cache(len(NAMES))
def _firsts(world: QueueWorld, name: str) -> tuple[list[float], list[int]]:
    """The times of the claims of a queue, and up to each the highest first offset that one named."""
    takes = [
        (op.asked_s, op.request.first_offset)
        for op in world.history.ops
        if isinstance(op.request, Take) and op.request.queue == name
    ]
    return [at_s for at_s, _ in takes], list(accumulate((first for _, first in takes), max))


def _dropped(world: QueueWorld, name: str, at_s: float) -> range:
    """The records that a claim before a time has said the log no longer has."""
    times, firsts = _firsts(world, name)
    count = bisect_right(times, at_s)
    return range(firsts[count - 1] if count else 0)


def _by_offset(row: Queue) -> dict[int, int]:
    """The token of each record's claim; negative for a delay."""
    return {
        at: claim.token if claim.is_valid else -claim.token
        for claim in row.claims
        for at in claim.offsets
    }


def _judge_answers(world: QueueWorld, name: str, states: Sequence[tuple[float, Queue]]) -> None:
    """Workers were told what the log says."""
    by_batch = {(row.version - 1) // CHANGES_MAX: row for _, row in states}
    for op in world.history.ops:
        request, answer = op.request, op.answer
        if isinstance(answer, QuorumLogError) or getattr(request, "queue", "") != name:
            continue
        if isinstance(answer, Taken) and answer.records:
            number = (answer.token - 1) // CHANGES_MAX
            row = by_batch.get(number)
            told = NONE
            for count, each in answer.records:
                told |= each
                if count > ATTEMPTS:
                    raise Violation(f"told too many attempts: {answer}")
            if row is None or any(not _is_known(row, answer.token, at) for at in told):
                raise Violation(f"told what the log does not say: {answer} {row}")
        if isinstance(answer, Settled) and isinstance(request, Settle):
            assert op.answered_s is not None
            refused = NONE
            for one in answer.refused:
                refused |= one.offsets
                last = _state_at(states, op.answered_s)
                if one.reason == "acknowledged" and any(not done(last, at) for at in one.offsets):
                    raise Violation(f"told as acknowledged: {op} {last}")
            if request.kind == Settlement.ACK and answer.done:
                last = _state_at(states, op.answered_s)
                if any(not done(last, at) for at in request.items[0][1] - refused):
                    raise Violation(f"told as done: {op} {last}")


def _state_at(states: Sequence[tuple[float, Queue]], at_s: float) -> Queue:
    return states[bisect_right(states, at_s, key=lambda state: state[0]) - 1][1]


def _is_known(row: Queue, token: int, at: int) -> bool:
    """Whether the log has a record in a claim, or a later request of the same batch has settled it."""
    claim = next((claim for claim in row.claims if claim.token == token), None)
    return row.version > token or (claim is not None and at in claim.offsets)


def _judge_end(world: QueueWorld, name: str, row: Queue) -> None:
    """Once nothing is wrong, all records are done, each dead letter is there once, and the loss is counted."""
    if row.floor < len(world.keys) or row.moves:
        raise Violation(f"records are left where nothing is wrong: {row} of {len(world.keys)}")
    letters = [at for _, at in world.dead[name]]
    if len(set(letters)) != len(letters):
        raise Violation(f"a dead letter is there twice: {world.dead[name]}")
    acked = {
        at
        for op in world.history.ops
        if isinstance(op.request, Settle)
        and op.request.queue == name
        and op.request.kind == Settlement.ACK
        and isinstance(op.answer, Settled)
        and op.answer.done
        for at in op.request.items[0][1]
        if not any(at in one.offsets for one in op.answer.refused)
    }
    if acked & set(letters):
        raise Violation(f"a record is a dead letter and was acknowledged: {acked & set(letters)}")
    asked = {
        at
        for op in world.history.ops
        if isinstance(op.request, Settle)
        and op.request.queue == name
        and op.request.kind == Settlement.ACK
        for at in op.request.items[0][1]
    }
    left = [at for at in range(len(world.keys)) if at not in asked and at not in letters]
    if len(left) > row.lost:
        raise Violation(f"{left} were lost, and {row.lost} were counted")
    if row.lost > len(world.keys) - len(acked):
        raise Violation(f"{row.lost} were counted as lost, and {len(acked)} were acknowledged")
