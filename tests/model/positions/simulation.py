"""Gateways and their keepers of positions in virtual time: they stand still, die, are overtaken; answers are lost,
clocks jump.

The shipped `OffsetStore` decides; the world is a log that appends where it is expected to end, and clients that
go on with leases they have lost. Clients repeat a change at the next gateway, and gateways repeat it at the next
keeper. Every copy may be carried out long after another one was answered: gateways stand still with it before they
pass it on, and with it in their keeper. Requests go to any keeper, as if each took itself for the owner: worse than
the logs' ownership ever is. `judge` reads the history.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from unittest.mock import patch

from quorumlog.errors import (
    UNKNOWN,
    EntryUnavailable,
    NotTheOwner,
    QuorumLogError,
    QuorumTimeout,
    RequestOutdated,
)
from quorumlog.protocol import offset_store, positions, rows
from quorumlog.protocol.offset_store import (
    AppendBatch,
    Appended,
    Asked,
    BatchesRead,
    Effect,
    Event,
    Failed,
    Gathered,
    OffsetStore,
    Overtaken,
    Pause,
    Paused,
    Phase,
    ReadLog,
    Reported,
    Truncate,
    Truncated,
)
from quorumlog.protocol.positions import (
    Acquire,
    Answer,
    Commit,
    Delete,
    Expire,
    Look,
    Position,
    Release,
    Renew,
    Request,
    Reset,
    counts_once,
)
from quorumlog.protocol.rows import CHANGES_MAX, Batch, FreeLog, Key, List, Rows, Stamp

LEASE_MS: Final = 3_000
EXPIRY_MS: Final = 2_000
"""Shorter than a lease: a consumer whose lease is held does not expire all the same."""
END_S: Final = 60.0
LOG: Final = "log"
_COPIES_MAX: Final = 4
"""Copies of one request that a client sends, and copies of each of them that a gateway sends."""
_AGAIN: Final = (NotTheOwner, EntryUnavailable, QuorumTimeout)
"""Answers after which clients and gateways repeat a request."""


class Violation(AssertionError):
    """The history breaks a promise."""


@dataclass(slots=True)
class Op:
    """A request, and its answer where there was one."""

    request: Any
    asked_s: float
    answered_s: float | None = None
    answer: Any = None


@dataclass(slots=True)
class History:
    """Every batch that the log ever had, with its time, and every request."""

    batches: list[tuple[float, Batch[Any]]] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)


class World:
    """The log, and time."""

    kind: type[Rows[Any]] = positions.Positions
    counts_once: Callable[[Any], bool] = staticmethod(counts_once)

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.history = History()
        self.first = 0
        self.created = "1"
        self.is_calm = False
        self.told_versions = [0]
        """Versions that answers had: clients know them, and gateways."""
        self.ids = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self.names = ["a", "b"]
        self._written: dict[Key, int] = {}
        """By row, the offset of the last of the first `_judged` batches that has it."""
        self._judged = 0
        self.keepers = [Keeper(self) for _ in range(3)]

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._number, what))

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, what = heapq.heappop(self._events)
            what()
        self.now_s = until_s

    def soon_s(self) -> float:
        """Mostly quick, at times as long as a lease."""
        if not self.is_calm and self.random.random() < 0.03:
            return self.random.uniform(0, 2 * LEASE_MS / 1000)
        return self.random.uniform(0.001, 0.05)

    def append(self, expect: int, batch: Batch[Any]) -> bool:
        """Whether the log ended there, and has the batch now."""
        if expect != len(self.history.batches):
            return False
        self.history.batches.append((self.now_s, batch))
        return True

    def truncate(self, before: int) -> None:
        """Drop a prefix, perhaps less than was allowed: ledgers go as a whole."""
        kept = before - self.random.randrange(3)
        if kept <= self.first:
            return
        while self._judged < len(self.history.batches):
            _, batch = self.history.batches[self._judged]
            for key in batch.gone:
                self._written.pop(key, None)
            self._written.update((row.key, self._judged) for row in batch.rows)
            self._judged += 1
        if any(offset < before for offset in self._written.values()):
            raise Violation("a record was dropped that still counts")
        self.first = kept

    def unique(self) -> int:
        """A number that no other request has: by it, what a request did is known from what others did."""
        self.ids += 1
        return self.ids

    def stamp(self) -> Stamp:
        """Of a new change: its sender knows a version that was told, perhaps long ago."""
        reported = self.told_versions
        seen = self.random.choice((0, *(reported[-1],) * 6, self.random.choice(reported)))
        return Stamp(f"t{self.unique()}", "", seen)

    def ask(self, request: Any, then: Callable[[Any], None] | None = None) -> None:
        """Ask any gateway, as a client that repeats a request, or as one that does not, whose gateway stamps it."""
        op = Op(request, self.now_s)
        self.history.ops.append(op)

        def reported(answer: Answer) -> None:
            if op.answer is None:
                op.answered_s, op.answer = self.now_s, answer
                if then is not None:
                    then(answer)

        repeats = self.is_calm or self.random.random() < 0.7
        stamp = self.stamp() if repeats and self.counts_once(request) else None
        Sender(self, request, stamp, reported, self.keepers, repeats=repeats).send()

    def saw(self, version: int) -> None:
        self.told_versions.append(max(version, self.told_versions[-1]))


class Sender:
    """Sends copies of one request until one is answered: a client to gateways (`receive`), or a gateway to keepers."""

    def __init__(
        self,
        world: World,
        request: Request,
        stamp: Stamp | None,
        reported: Callable[[Answer], None],
        to: Sequence["Keeper"],
        *,
        repeats: bool = True,
        is_gateway: bool = False,
        is_first: bool = True,
    ) -> None:
        """`is_first`: no other sender made the stamp."""
        self.world, self.request, self.stamp, self.reported, self.to = (
            world,
            request,
            stamp,
            reported,
            to,
        )
        self.left = _COPIES_MAX if repeats else 1
        self.is_gateway, self.is_first = is_gateway, is_first
        self.is_over = False

    def send(self) -> None:
        world = self.world
        if self.is_over or not self.left:
            return
        self.left -= not world.is_calm
        keeper, stamp = world.random.choice(self.to), self.stamp
        asked = Asked(lambda answer: self.answered(answer, stamp), self.request, stamp)
        world.after(world.soon_s(), lambda: keeper.take(asked, is_passed_on=self.is_gateway))
        if self.left:
            world.after(world.random.choice((0.2, 1.0, 3.0)), self.again)

    def again(self) -> None:
        if not self.is_over:
            self.send()

    def answered(self, answer: Answer, stamp: Stamp | None) -> None:
        if self.is_over or stamp is not self.stamp:
            return
        is_unseen = stamp is not None and not stamp.seen
        if isinstance(answer, RequestOutdated) and self.is_first and is_unseen:
            # No copy of it is ever done: the next ones are of another change.
            self.stamp = Stamp(f"t{self.world.unique()}", "", answer.members["version"])
            self.left += 1
            self.send()
        elif isinstance(answer, _AGAIN) and self.left:
            self.send()
        else:
            self.is_over = True
            if isinstance(answer, NotTheOwner) and self.left != _COPIES_MAX - 1:
                answer = QuorumTimeout("a copy before this one may be done", outcome=UNKNOWN)
            self.reported(answer)


class Keeper:
    """A gateway with a keeper, and its clocks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.machine = OffsetStore(EXPIRY_MS, world.kind)
        self.life = 0
        self.stands_until_s = 0.0
        self._stood_s = 0.0
        self.skew_ms = 0
        self._gathered: list[Asked] = []

    def awake_s(self) -> float:
        """Time, less what it stood still, as `net/timers.py` counts it."""
        return 1000.0 + self.world.now_s - self._stood_s

    def wall_ms(self) -> int:
        return 1_000_000 + int(self.world.now_s * 1000) + self.skew_ms

    def hang(self, for_s: float) -> None:
        self.stands_until_s = max(self.stands_until_s, self.world.now_s + for_s)
        self._stood_s += for_s

    def die(self) -> None:
        """What it has sent goes on; nobody hears of it."""
        self.machine = OffsetStore(EXPIRY_MS, self.world.kind)
        self.life += 1
        self.stands_until_s, self._gathered = 0.0, []

    def take(self, asked: Asked, *, is_passed_on: bool) -> None:
        """A request of a client, which is passed on to any keeper, or of a gateway, which this keeper decides."""
        if is_passed_on:
            self.gather(asked)
        elif self.stands_until_s > self.world.now_s:
            life = self.life
            self.world.after(
                self.stands_until_s - self.world.now_s,
                lambda: self._pass_on(asked) if life == self.life else None,
            )
        else:
            self._pass_on(asked)

    def _pass_on(self, asked: Asked) -> None:
        world, stamp = self.world, asked.stamp
        is_first = stamp is None and world.counts_once(asked.request)
        if is_first:
            stamp = world.stamp()
        to = world.keepers
        Sender(
            world, asked.request, stamp, asked.key, to, is_gateway=True, is_first=is_first
        ).send()

    def gather(self, asked: Asked) -> None:
        """Post it at once, or with the next one."""
        self._gathered.append(asked)
        if self.world.is_calm or self.world.random.random() < 0.8:
            gathered, self._gathered = self._gathered, []
            self.post(Gathered(tuple(gathered)))

    def post(self, event: Event) -> None:
        if self.stands_until_s > self.world.now_s:
            life = self.life
            self.world.after(
                self.stands_until_s - self.world.now_s,
                lambda: self.post(event) if life == self.life else None,
            )
            return
        database_ms = 1_000_000 + int(self.world.now_s * 1000)
        database_ms *= self.world.random.random() < 0.9  # else it is not known
        effects = self.machine.step(event, self.awake_s(), self.wall_ms(), database_ms)
        if event == Overtaken(is_owner=False) and self.machine.phase is not Phase.IDLE:
            raise Violation("a keeper that was overtaken, and is not the owner, decides anew")
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        world, life = self.world, self.life
        match effect:
            case Reported(then, answer):
                world.after(world.soon_s(), lambda: then(answer))
            case Pause():
                self._later(life, Paused())
            case Truncate(before):
                world.after(world.soon_s(), lambda: world.truncate(before))
            case ReadLog(start):
                world.after(world.soon_s(), lambda: self._read(life, start))
            case AppendBatch(expect, batch):
                self._append(life, expect, batch)

    def _later(self, life: int, event: Event) -> None:
        self.world.after(
            self.world.soon_s(), lambda: self.post(event) if life == self.life else None
        )

    def _read(self, life: int, start: int | None) -> None:
        world = self.world
        if start is not None and start < world.first:
            self._later(life, Truncated())
            return
        at = world.first if start is None else start
        found = world.history.batches[at : at + world.random.randrange(1, 6)]
        batches = tuple((offset, batch) for offset, (_, batch) in enumerate(found, at))
        self._later(life, BatchesRead(batches, at + len(batches)))

    def _append(self, life: int, expect: int, batch: Batch[Any]) -> None:
        world, fate = self.world, self.world.random.random()
        if not world.is_calm and fate < 0.05:
            # The answer is lost: it may be in the log, or come there later, or never.
            if fate < 0.04:
                world.after(world.soon_s(), lambda: _ignored(world.append(expect, batch)))
            self._later(life, Failed(QuorumTimeout("no answer", outcome=UNKNOWN)))
            return

        def arrive() -> None:
            if world.append(expect, batch):
                world.saw(expect * CHANGES_MAX + 1)
                self._later(life, Appended())
            else:
                is_owner = world.is_calm or world.random.random() < 0.5
                self._later(life, Overtaken(is_owner))

        world.after(world.soon_s(), arrive)


def _ignored(_value: Any) -> None:
    pass


class Worker:
    """Works as a consumer; goes on beyond its lease where it does not know better, or does not care."""

    def __init__(self, world: World, name: str, consumer: str, started: int) -> None:
        self.world, self.name, self.consumer, self.started = world, name, consumer, started
        self.token: int | None = None
        self.offset = 0
        world.after(world.random.uniform(0, 2), self.work)

    def work(self) -> None:
        world = self.world
        if world.is_calm:
            return
        world.after(world.random.uniform(0.05, 1.5), self.work)
        if self.token is None:
            lease_ms = LEASE_MS + world.unique()
            lease = Acquire(LOG, self.consumer, world.created, self.name, lease_ms, 0, 0)
            world.ask(replace(lease, started=self.started), self._acquired)
            return
        token, draw = self.token, world.random.random()
        if draw < 0.55:
            self.offset += world.random.choice((0, 1, 5))
            world.ask(Commit(LOG, self.consumer, world.created, self.offset, token), self._answered)
        elif draw < 0.62:  # a mistake: it is refused
            behind = max(0, self.offset - 3)
            world.ask(Commit(LOG, self.consumer, world.created, behind, token))
        elif draw < 0.85:
            world.ask(Renew(LOG, self.consumer, world.created, token), self._answered)
        elif draw < 0.92:
            self.token = None
            world.ask(Release(LOG, self.consumer, token))

    def _acquired(self, answer: Answer) -> None:
        if isinstance(answer, Position):
            self.token, self.offset = answer.token, answer.offset

    def _answered(self, answer: Answer) -> None:
        # Some go on all the same: zombies.
        if isinstance(answer, QuorumLogError) and self.world.random.random() < 0.3:
            self.token = None


def trouble(world: World) -> None:
    """Something happens to a keeper, or to the consumers."""
    if world.is_calm:
        return
    world.after(world.random.uniform(0.05, 2.0), lambda: trouble(world))
    keeper, consumer = world.random.choice(world.keepers), world.random.choice(world.names)
    draw = world.random.random()
    if draw < 0.25:
        keeper.hang(world.random.uniform(0.1, 2 * LEASE_MS / 1000))
    elif draw < 0.4:
        keeper.die()
    elif draw < 0.55:
        keeper.skew_ms = world.random.randrange(-10_000_000, 10_000_000)
    elif draw < 0.65:
        world.ask(Look(LOG, consumer))
    elif draw < 0.68:
        world.ask(List(LOG, "", 10))
    elif draw < 0.76:
        offset = 1_000_000 * world.random.randrange(2) + world.unique()
        world.ask(Reset(LOG, consumer, world.created, offset))
    elif draw < 0.86:
        world.ask(Delete(LOG, consumer))
    elif draw < 0.89:
        old, world.created = world.created, str(int(world.created) + 1)
        world.after(world.random.uniform(0, 5), lambda: world.ask(FreeLog(LOG, old)))
    elif draw < 0.94:
        world.ask(Expire(LOG, world.random.choice(world.names)))
    else:
        name = f"c{len(world.names)}"
        world.names.append(name)
        world.ask(Commit(LOG, name, world.created, 0, is_new=True))


def run(seed: int) -> History:
    """One history, judged. Raises: Violation."""
    with (
        patch.multiple(offset_store, _SLACK=10, _TRUNCATE_EVERY=5, _CARRIED=2, _KEPT_RECORDS=10),
        patch.object(rows, "REMEMBERED_MAX", 30),
        patch.object(positions, "GRACE_S", 2.0),
    ):
        world = World(seed)
        for consumer in "ab":
            for name, started in ("w1", 0), ("w2", 0), ("w3", 1), ("w3", 2):
                Worker(world, f"{name}{consumer}", consumer, started)
        trouble(world)
        world.run(END_S)
        world.is_calm = True
        world.run(END_S + 10 * LEASE_MS / 1000)
        for _ in range(3):
            world.ask(Look(LOG, world.random.choice("ab")))
        world.run(world.now_s + 60)
        if any(op.answer is None for op in world.history.ops[-3:]):
            raise Violation("a request is not answered where nothing is wrong")
        judge(world.history)
        return world.history


def judge(history: History) -> None:
    """Raises: Violation."""
    rows = _judge_log(history)
    _judge_answers(history, rows)
    _judge_leases(history)
    _judge_once(history)


def _judge_once(history: History) -> None:
    """A change counts once, at its answer's version: no copy is done later, nor one of what was refused."""
    resets = {op.request.offset: op for op in history.ops if isinstance(op.request, Reset)}
    leases = {op.request.lease_ms: op for op in history.ops if isinstance(op.request, Acquire)}
    deletions: dict[Key, list[Op]] = {}
    for op in history.ops:
        if isinstance(op.request, Delete):
            deletions.setdefault((op.request.log, op.request.consumer), []).append(op)
    done: dict[int, int] = {}
    before: dict[Key, Position] = {}
    made: set[Key] = set()
    freed = {op.request.created for op in history.ops if isinstance(op.request, FreeLog)}
    for offset, (at_s, batch) in enumerate(history.batches):
        for key in batch.gone:
            old = before.pop(key, None)
            # One that was made in this very record is in no row.
            end = (offset + 1) * CHANGES_MAX + 1
            if old is not None and not (old.created in freed or _is_idle(history, old, at_s, end)):
                _judge_deletion(old, deletions.get(key, []), offset)
        for row in batch.rows:
            if row.key not in before and row.consumer not in ("a", "b"):
                if row.key in made:
                    raise Violation(f"a consumer was made twice by one request: {row}")
                made.add(row.key)
            is_written_again, before[row.key] = before.get(row.key) == row, row
            if is_written_again or row.token != row.version:
                continue
            op = leases[row.lease_ms] if row.holder else resets[row.offset]
            if done.setdefault(id(op), row.version) != row.version:
                raise Violation(f"done twice: {op} {row}")
            if isinstance(op.answer, Position) and op.answer.version != row.version:
                raise Violation(f"done beside its answer: {op} {row}")
            if isinstance(op.answer, QuorumLogError) and op.answer.outcome != UNKNOWN:
                raise Violation(f"refused, and done: {op} {row}")


def _is_idle(history: History, row: Position, at_s: float, end: int) -> bool:
    """Whether a consumer may expire: somebody asked for that, and nobody has used it for long. What was carried out
    at the version `end` or later was carried out after the expiry (seeds 300195, 301239).
    """
    asked = Expire(row.log, row.consumer)
    return any(op.request == asked and op.asked_s <= at_s for op in history.ops) and not any(
        isinstance(op.answer, Position)
        and op.answer.key == row.key
        and op.answer.version < end
        and not isinstance(op.request, Look | Delete)
        and op.asked_s <= at_s < op.asked_s + EXPIRY_MS * 0.75 / 1000
        for op in history.ops
    )


def _judge_deletion(before: Position, asked: list[Op], offset: int) -> None:
    """Each request deletes what its answer says, or once where it has no answer: here in the record at an offset."""
    for op in asked:
        if isinstance(op.answer, Position):
            is_it = op.answer.version == before.version
            is_it |= (op.answer.version - 1) // CHANGES_MAX == offset
        else:
            is_it = op.answer is None or getattr(op.answer, "outcome", None) == UNKNOWN
        if is_it:
            asked.remove(op)
            return
    raise Violation(f"a consumer was deleted once more: {before}")


def _judge_log(history: History) -> dict[Key, dict[int, Position]]:
    """What the log says: positions go on, versions and tokens rise. Returns the rows by version."""
    last: dict[Key, Position] = {}
    versions: dict[Key, int] = {}
    tokens: dict[Key, int] = {}
    rows: dict[Key, dict[int, Position]] = {}
    for at_s, batch in history.batches:
        for key in batch.gone:
            last.pop(key, None)
        for row in batch.rows:
            before = last.get(row.key)
            last[row.key] = row
            if row == before:
                continue  # written again by a snapshot
            rows.setdefault(row.key, {})[row.version] = row
            if row.version <= versions.get(row.key, -1):
                raise Violation(f"a version goes back: {row}")
            if row.token and row.token < tokens.get(row.key, 0):
                raise Violation(f"a token goes back: {row}")
            versions[row.key] = row.version
            tokens[row.key] = max(row.token, tokens.get(row.key, 0))
            if before is None or row.offset >= before.offset:
                continue
            if not _is_ended(history, before, row, at_s, (Reset, Delete)):
                raise Violation(f"a position goes back without a reset: {before} {row}")
    return rows


def _is_ended(
    history: History,
    before: Position,
    row: Position,
    at_s: float,
    kinds: tuple[type[Request], ...],
) -> bool:
    """Whether one of these was done, or may have been, between two rows: perhaps in one batch with others."""
    for op in history.ops:
        request: Request = op.request
        if op.asked_s > at_s or isinstance(request, List):
            continue
        if isinstance(request, FreeLog):
            if Delete in kinds and request.created == before.created:
                return True
            continue
        if not isinstance(request, (*kinds, Expire) if Delete in kinds else kinds):
            continue
        if (request.log, request.consumer) != row.key:
            continue
        if isinstance(request, Release) and request.token != before.token:
            continue
        if isinstance(request, Expire):
            if _is_idle(history, before, at_s, row.version):
                return True
        elif isinstance(op.answer, Position):
            if before.version <= op.answer.version <= row.version:
                return True
        elif op.answer is None or getattr(op.answer, "outcome", None) == UNKNOWN:
            return True
    return False


def _judge_answers(history: History, rows: dict[Key, dict[int, Position]]) -> None:
    """Who was told a state was told one that the log has, and not an older one than was told before."""
    reported: list[tuple[float, Key, int]] = []
    for op in sorted(history.ops, key=lambda op: op.asked_s):
        if not isinstance(op.answer, Position):
            continue
        key, row = op.answer.key, op.answer
        if not _is_said(history, row, rows.get(key, {})):
            raise Violation(f"told what the log does not say: {row}")
        if isinstance(op.request, Commit):
            if op.request.token is not None and op.request.token != row.token:
                raise Violation(f"a fenced holder committed: {op.request} {row}")
            if op.request.offset != row.offset:
                raise Violation(f"another offset was committed: {op.request} {row}")
        assert op.answered_s is not None
        # What comes after a deletion is newer than what was deleted.
        reported.append((op.answered_s, key, row.version + isinstance(op.request, Delete)))
    resets = [op.answer for op in history.ops if isinstance(op.request, Reset)]
    for op in history.ops:
        if not isinstance(op.request, Commit) or not isinstance(op.answer, Position):
            continue
        token = op.request.token
        for reset in resets:
            if not isinstance(reset, Position) or reset.key != op.answer.key or token is None:
                continue
            if token < reset.version < op.answer.version:
                raise Violation(f"a holder committed after a reset: {op} {reset}")
    reported.sort()
    newest: dict[Key, list[tuple[float, int]]] = {}
    for answered_s, key, version in reported:
        so_far = newest.setdefault(key, [(0.0, -1)])
        so_far.append((answered_s, max(version, so_far[-1][1])))
    for op in history.ops:
        if not isinstance(op.answer, Position):
            continue
        before = [v for at, v in newest.get(op.answer.key, ()) if at < op.asked_s]
        if before and op.answer.version < before[-1]:
            raise Violation(f"told an older state than before: {op.request} {op.answer}")


def _is_said(history: History, row: Position, known: dict[int, Position]) -> bool:
    """Whether the log has a row, or one that a later request of the same batch has made of it."""
    if row.version in known:
        return known[row.version] == row
    at = row.version // CHANGES_MAX
    if at >= len(history.batches):
        return False
    _, batch = history.batches[at]
    later = [each for each in batch.rows if each.key == row.key and each.version > row.version]
    return bool(later) or row.key in batch.gone


def _is_freed(history: History, row: Position, at_s: float) -> bool:
    """Whether the log of a position was deleted: its consumers are freed, and perhaps made again in the same record."""
    freed = FreeLog(row.log, row.created)
    return any(op.request == freed and op.asked_s <= at_s for op in history.ops)


def _judge_leases(history: History) -> None:
    """Nobody gets a lease while its holder may count on it: for a lease from when it asked, by true time."""
    held: dict[Key, list[tuple[int, float]]] = {}
    for op in history.ops:
        row = op.answer
        if not isinstance(row, Position) or not row.holder:
            continue
        is_hold = isinstance(op.request, Acquire | Renew)
        is_hold |= isinstance(op.request, Commit) and op.request.token is not None
        if is_hold:
            until_s = op.asked_s + row.lease_ms / 1000
            held.setdefault(row.key, []).append((row.token, until_s))
    before: dict[Key, Position] = {}
    for offset, (at_s, batch) in enumerate(history.batches):
        for key in batch.gone:
            gone = before.pop(key, None)
            if gone is None or not gone.holder or _is_freed(history, gone, at_s):
                continue
            last = replace(gone, version=(offset + 1) * CHANGES_MAX)
            if _is_ended(history, gone, last, at_s, (Reset, Release)):
                continue
            for token, until_s in held.get(key, ()):
                if token == gone.token and at_s < until_s:
                    raise Violation(f"{gone} is forgotten at {at_s}, and was held until {until_s}")
        for row in batch.rows:
            old = before.get(row.key)
            before[row.key] = row
            if old is None or not old.holder:
                continue
            is_later = row.token == old.token or row.started > old.started
            if row.holder == old.holder and is_later:
                continue
            if _is_freed(history, old, at_s) or _is_ended(
                history, old, row, at_s, (Reset, Release)
            ):
                continue
            for token, until_s in held.get(row.key, ()):
                if token == old.token and at_s < until_s:
                    raise Violation(f"{row} at {at_s} while {old} was held until {until_s}")
