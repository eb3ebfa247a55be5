"""Search of everything that can happen to one log in a small world: `make explore`.

The machines are those that ship (`protocol/log/route.py` and what it steps), of two gateways. What is
asked and answered stays in flight for as long as it likes. A gateway that dies starts again, as
another process. A gateway whose log was deleted goes on with its machine, where the gateway that
ships begins a new one for the namesake.

Judged at each transition: rules 22 to 28 and I32 to I34 (`log_judge.py`, `log_parts.py`), the machines'
own `check`, and the legality of each row (`protocol/changes.py`).
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final
from unittest import mock

from quorumlog.errors import NoSuchLedger, NoSuchLog, QuorumLogError, UnexpectedEntryId
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.log import PRODUCERS_MAX, LogMetadata, producers
from quorumlog.protocol.log.handover import same
from quorumlog.protocol.log.messages import (
    Answered,
    Append,
    AppendsAsked,
    Ask,
    CloseLedger,
    Commit,
    Committed,
    CreateLedger,
    DeleteLedger,
    DeleteLog,
    DeletionAsked,
    Event,
    ForceAsked,
    Forward,
    HeadLearned,
    LogRequest,
    OwnerEnded,
    OwnerLost,
    Publish,
    ReadLog,
    RecordsAppended,
    RecoverLedger,
    Relay,
    Resolve,
    RowTaken,
    Submit,
    SwapLog,
    TakeoverDone,
)
from quorumlog.protocol.transaction import Sealed
from tests.model.explore.log_parts import LogParts
from tests.model.explore.log_world import GATEWAYS, PUBLISHED, Life, World, call_of, life_of
from tests.model.explore.parts import Broken
from tests.model.explore.scope import LogScope
from tests.model.explore.search import FOREVER, Result, Space, search

FORCE, FORWARDED = "force", "forwarded"
ROLL, PUBLISH, TRUNCATE, DELETE, HEAD = "roll", "publish", "truncate", "delete", "head"
FULL: Final = "full"
LOST: Final = "lost"

CLIENT: Final = -1
"""The number of a question that the gateway's manager asks for a client, and no machine."""

_CHANGES: Final = (SwapLog, Commit, RecoverLedger, CloseLedger, DeleteLedger, DeleteLog)
"""Questions that change something: these arrive although nobody waits for the answer any more."""

_ANSWERED_LATE: Final = (ReadLog, SwapLog, Commit, RecoverLedger, CloseLedger, DeleteLog)
"""Questions whose answers stay in flight: what happens meanwhile changes what they mean."""

Transition = tuple[str, Callable[[], World]]


class LogExplorer:
    """One scope's search."""

    def __init__(self, scope: LogScope) -> None:
        self.scope = scope
        self._parts = LogParts(scope)
        self._judge = self._parts.judge

    def run(self, until_s: float = FOREVER) -> Result:
        """Search the scope to its end, to the first violation, or until a time (`search`)."""
        with mock.patch.object(producers, "PRODUCERS_MAX", self.scope.remembers):
            return search(self.scope, Space(self._parts.start(), self.next), until_s)

    # --- transitions -------------------------------------------------------------------------------

    def next(self, world: World) -> Iterator[tuple[str, World | Broken]]:
        """(label, what follows) of all that can happen now."""
        for label, step in self._possible(world):
            try:
                after = step()
                self._judge.log(world, after)
                self._check_answered(after)
            except (Broken, AssertionError, QuorumLogError) as broken:
                yield label, Broken(str(broken))
            else:
                yield label, after

    def _check_answered(self, world: World) -> None:
        """Where nothing is under way any more, everybody was answered."""
        parts = self._parts
        if world.flight or any(
            number >= 0 and parts.ledgers.values[number].in_flight for number in world.ledgers
        ):
            return
        for hand in world.hands:
            if not parts.machines.values[hand.machine].is_idle:
                raise Broken("liveness: a request is never answered")

    def _possible(self, world: World) -> Iterator[Transition]:
        for index in range(GATEWAYS):
            yield from self._requests(world, index)
            yield from self._mishaps(world, index)
        if world.is_deleted:
            yield "the log is created again", lambda: self._parts.created(world)
        for message in world.flight:
            yield from self._arrivals(world, message)
        for ledger_id, number in enumerate(world.ledgers, 1):
            if number >= 0 and self._parts.ledger(world, ledger_id).in_flight:
                yield (
                    f"ledger {ledger_id} confirms its next entry",
                    partial(self._parts.confirm, world, ledger_id),
                )

    def _requests(self, world: World, index: int) -> Iterator[Transition]:
        """What clients ask of a gateway."""
        scope = self.scope
        for name in self._sendable(world):
            yield f"{name} to g{index}", partial(self._send, world, index, name)
        if (count := world.count(ROLL)) < scope.rolls:
            roll = LogRequest(f"{ROLL}{count}")
            yield f"g{index} rolls", lambda: self._hear(world.counted(ROLL), index, roll)
        if (count := world.count(PUBLISH)) < scope.publishes:
            call = Publish("t", (Sealed(PUBLISHED),), overwrite=scope.overwrites)
            asked = LogRequest(f"{PUBLISH}{count}", call, ((PUBLISHED, 1, 1),))
            yield f"g{index} publishes", lambda: self._hear(world.counted(PUBLISH), index, asked)
        if world.count(DELETE) < scope.deletions and not world.is_deleted:
            deletion = DeletionAsked((DELETE, index))
            yield f"g{index} deletes", lambda: self._hear(world.counted(DELETE), index, deletion)
        if world.count(TRUNCATE) < scope.truncations:
            yield from self._truncations(world, index)

    def _mishaps(self, world: World, index: int) -> Iterator[Transition]:
        """What a gateway does without a client, and what befalls it."""
        if sum(one.forces for one in world.hands) < self.scope.forces:
            yield f"g{index} takes over", lambda: self._force(world, index)
        if world.count(HEAD) < self.scope.heads:
            yield f"g{index} rereads the row's head", lambda: self._reread(world, index)
        if world.kills < self.scope.kills:
            yield f"g{index} dies", lambda: self._kill(world, index)
        if index == 0 and world.count(LOST) < self.scope.losses and self._parts.may_lose(world):
            yield "the database goes back", lambda: self._parts.lost(world.counted(LOST))
        if index == 0 and world.room is None and world.count(FULL) < self.scope.refusals:
            for room in range(2):
                less = world.counted(FULL)._replace(room=room)
                yield f"there is room for {room} entries", partial(_same, less)

    def _sendable(self, world: World) -> Iterator[str]:
        acked = {name for name, _ in world.acked}
        for name in self.scope.requests:
            times = 1 + (self.scope.repeats if name.startswith("p") else 0)
            if world.count(name) < times and (name != "p1" or "p0" in acked):
                yield name

    def _arrivals(self, world: World, message: int) -> Iterator[Transition]:
        life, what = self._parts.messages.values[message]
        without = world.without(message)
        if not isinstance(what, Ask):
            for event in (what, *self._late(world, what)):
                yield (
                    f"g{life[0]} hears {_short(event)}",
                    partial(self._notify, without, life, event),
                )
            return
        question, kept = what.question, 0
        if isinstance(question, CreateLedger) and len(world.ledgers) > self.scope.ledgers:
            return
        if isinstance(question, RecoverLedger) and world.ledgers[question.ledger_id - 1] >= 0:
            kept = len(self._parts.ledger(world, question.ledger_id).in_flight)
        for count in range(kept + 1):
            label = f"g{life[0]} asks {_short(question)}" + (f", {count} kept" if kept else "")
            yield label, partial(self._done, without, life, what, count)

    def _late(self, world: World, what: Any) -> Iterator[Event]:
        """A request that was repeated is answered with the row as it is by then."""
        if not isinstance(what, Answered) or world.is_deleted:
            return
        row = self._parts.row(world)
        if isinstance(what.value, LogMetadata) and what.value.version < row.version:
            yield replace(what, value=row)
        if isinstance(what.value, Committed) and what.value.log not in (None, row):
            yield replace(what, value=replace(what.value, log=row))

    # --- clients -----------------------------------------------------------------------------------

    def _send(self, world: World, index: int, name: str) -> World:
        """A client sends a request. Its producer read the log's end before it first sent one."""
        since = dict(world.since)
        if self.scope.remembers < PRODUCERS_MAX and name[0] not in since:
            since[name[0]] = len(self._judge.present(world))
            world = world._replace(since=tuple(sorted(since.items())))
        if world.is_deleted:
            world = world._replace(absent=world.absent | {name})
        call = call_of(name, since.get(name[0], 0))
        return self._hear(world.counted(name), index, AppendsAsked(((name, call),)))

    def _truncations(self, world: World, index: int) -> Iterator[Transition]:
        """A gateway's manager swaps the row as it read it (`LogManager.truncate`)."""
        if world.is_deleted:
            return
        row = self._parts.row(world)
        truncated = row.truncated(row.known_end)
        if truncated != row:
            swap = Ask(CLIENT, SwapLog(truncated))
            life = (index, world.hands[index].life)
            asked = world.counted(TRUNCATE)
            yield f"g{index} truncates", lambda: self._parts.with_message(asked, life, swap)

    def _truncated(self, before: World, world: World, life: Life) -> World:
        """The manager tells the machine, and deletes what the row no longer names."""
        row = self._parts.row(world)
        world = self._parts.with_message(world, life, RowTaken(row))
        for item in self._parts.row(before).items:
            if row.item_of(item.ledger_id) is None:
                drop = Ask(CLIENT, DeleteLedger(item.ledger_id))
                world = self._parts.with_message(world, life, drop)
        return world

    # --- gateways ----------------------------------------------------------------------------------

    def _force(self, world: World, index: int) -> World:
        hand = world.hands[index]
        world = world.with_hand(index, hand._replace(forces=hand.forces + 1))
        event = ForceAsked((FORCE, index, hand.forces), creates=True, finish=same)
        return self._hear(world, index, event)

    def _reread(self, world: World, index: int) -> World:
        """A gateway reads the row's head after a gap of its stream (rule 16a)."""
        row = self._parts.row(world)
        head = LogHead("log", row.version + 1, None) if world.is_deleted else LogHead.of(row)
        life = (index, world.hands[index].life)
        return self._parts.with_message(world.counted(HEAD), life, HeadLearned(head))

    def _kill(self, world: World, index: int) -> World:
        """What a process has changed may still arrive; whom it was to answer learns that it is gone."""
        hand = world.hands[index]
        life = (index, hand.life)
        kept = frozenset(number for number in world.flight if self._outlives(number, life))
        world = world._replace(flight=kept, kills=world.kills + 1)
        machine = self._parts.new_machine((index, hand.life + 1))
        world = world.with_hand(index, hand._replace(machine=machine, life=hand.life + 1))
        lost = [forward for forward in world.forwards if forward[2] == life]
        mine = {forward for forward in world.forwards if forward[0] == life}
        world = world._replace(forwards=world.forwards - mine - set(lost))
        for asker, number, _ in sorted(lost):
            gone = Answered(number, OwnerLost("it died", sent=True))
            world = self._parts.with_message(world, asker, gone)
        return world

    def _outlives(self, number: int, life: Life) -> bool:
        whose, what = self._parts.messages.values[number]
        return whose != life or (isinstance(what, Ask) and isinstance(what.question, _CHANGES))

    def _notify(self, world: World, life: Life, event: Event) -> World:
        """A process hears of something, unless it died."""
        return self._hear(world, life[0], event) if world.lives(life) else world

    def _hear(self, world: World, index: int, event: Event) -> World:
        """A gateway's machine takes a step."""
        heard = deque([event])
        while heard:
            hand = world.hands[index]
            after, effects = self._parts.step(hand.machine, heard.popleft())
            world = world.with_hand(index, hand._replace(machine=after))
            for effect in effects:
                if isinstance(effect, Submit):
                    # A refusal is heard before anything else happens, as in `LogDriver`.
                    world, refused = self._parts.submit(world, effect, is_behind=bool(heard))
                    heard += [] if refused is None else [refused]
                else:
                    world = self._perform(world, (index, hand.life), effect)
        return world

    def _perform(self, world: World, life: Life, effect: Any) -> World:
        match effect:
            case Ask():
                return self._parts.with_message(world, life, effect)
            case OwnerEnded(UnexpectedEntryId()):
                raise Broken("rule 24a: an owner has ended, and its ledger has not")
            case Resolve(request, answer) | Relay(request, answer):
                return self._resolve(world, life, request, answer)
            case TakeoverDone(NoSuchLedger() | NoSuchLog()):
                return world
            case TakeoverDone(QuorumLogError() as error):
                raise Broken(f"nothing fails here, and a takeover did: {error!r}")
            case _:
                return world

    def _resolve(self, world: World, life: Life, request: Any, answer: Any) -> World:
        if isinstance(request, tuple) and request[0] == FORWARDED:
            asker, number = request[1:]
            world = world._replace(forwards=world.forwards - {(asker, number, life)})
            return self._parts.with_message(world, asker, Answered(number, answer))
        self._judge.answer(world, request, answer)
        if isinstance(answer, RecordsAppended):
            reported = replace(answer, is_duplicate=False)
            return world._replace(acked=world.acked | {(request, reported)})
        if self._judge.is_refused(request, answer):
            return world._replace(refused=world.refused | {request})
        return world

    # --- what is asked -----------------------------------------------------------------------------

    def _done(self, world: World, life: Life, ask: Ask, kept: int) -> World:
        """A question arrives and is done; its answer is on its way, or is there at once."""
        question = ask.question
        if isinstance(question, Forward):
            return self._forward(world, life, ask.number, question)
        after, value = self._parts.answer(world, life, question, kept)
        if ask.number != CLIENT:
            event = Answered(ask.number, value)
            is_late = isinstance(question, _ANSWERED_LATE)
            do = self._parts.with_message if is_late else self._notify
            return do(after, life, event)
        if isinstance(question, SwapLog) and isinstance(value, LogMetadata):
            return self._truncated(world, after, life)
        return after

    def _forward(self, world: World, life: Life, number: Any, asked: Forward) -> World:
        """A request reaches the process that it is for, or nobody."""
        target = life_of(asked.owner)
        if not world.lives(target):
            return self._notify(world, life, Answered(number, OwnerLost("it died", sent=False)))
        if world.lives(life):
            world = world._replace(forwards=world.forwards | {(life, number, target)})
        request = (FORWARDED, life, number)
        event: Event
        if asked.call is None:
            event = LogRequest(request, is_forwarded=True)
        elif isinstance(asked.call, Publish):
            event = LogRequest(request, asked.call, ((PUBLISHED, 1, 1),), is_forwarded=True)
        else:
            assert isinstance(asked.call, Append), "nobody consults here"
            event = AppendsAsked(((request, replace(asked.call, is_forwarded=True)),))
        return self._hear(world, target[0], event)


def _same(world: World) -> World:
    return world


def _short(what: Any) -> str:
    if isinstance(what, Answered):
        return f"the answer {what.number}: {type(what.value).__name__}"
    return f"{type(what).__name__}({getattr(what, 'ledger_id', '')})"
