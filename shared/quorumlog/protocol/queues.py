"""Work queues: which records of a log workers hold, and how requests change that (ADR 55).

A queue is a row of the log of queues (`rows.py`): a floor, below which all records are done; the
acknowledged records above it; and claims, each of which gives some records to one worker. A claim's
token is the version of the change that granted it. A decision counts once it is in the log.

Invariants (checked by the simulation in tests/model/queues):
  - a record that was acknowledged is never given again;
  - a record is in one claim at most, and only that claim's token settles the record;
  - a record is given again only after its claim was given back, or after a whole lease of time
    awake without an extension;
  - with the order `key`, a record is given only if all earlier records of its key are done;
  - a record leaves the queue only by an acknowledgement, an append to the dead-letter log, or the
    loss of the record itself, which is counted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from heapq import nsmallest
from math import ceil, inf
from typing import Any, Final

from quorumlog.errors import (
    LogReplaced,
    NoSuchQueue,
    QueueExists,
    QuorumLogError,
    TooManyQueues,
)
from quorumlog.protocol.offset_set import NONE, Offsets
from quorumlog.protocol.rows import Key, RowDraft, Rows, Stamp

QUEUES_MAX: Final = 10_000
"""Maximum queues of all logs, which the owner holds in memory. Chosen by judgement."""
LOG_QUEUES_MAX: Final = 100
"""Maximum queues of one log, so that it leaves room for others. Chosen by judgement."""
WINDOW: Final = 100_000
"""A queue gives no record at or beyond its floor plus this. So it keeps at most this many
acknowledged records above the floor."""
IN_FLIGHT_MAX: Final = 10_000
"""Maximum of `max_in_flight`: a row, which each change writes, stays below a megabyte."""
MOVES_MAX: Final = 100
"""Moves of a queue. With so many, further dead letters join one that was not sent yet, and get its
reason. Chosen by judgement."""
KEYS_MAX: Final = 2000
"""With the order `key`, how many records that are not done a claim may look at."""
_BATCH_CHARS: Final = 2 << 20
"""Characters of changed rows after which a batch takes no more requests: an entry has room for
them, for one more row, and for the old rows that are written again."""
_BATCH_CLAIMS: Final = 20_000
"""Claims looked at after which a batch takes no more requests, so that the event loop does not
stand still: some 0.1 s. Chosen by judgement."""


class Order(StrEnum):
    """In which order a queue gives records."""

    NONE = "none"
    """Any order; about the log's."""
    KEY = "key"
    """In the log's order for each key, one record of a key at a time."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The settings of a queue."""

    lease_ms: int = 30_000
    max_attempts: int = 0
    """How often a record is given before it goes to the dead-letter log; 0: without limit."""
    dead_letter_log: str = ""
    order: str = Order.NONE
    max_in_flight: int = 1000
    """The most records that were given and are not done."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Records that one worker has, until it settles them or its lease ends."""

    token: int
    offsets: Offsets
    hold_ms: int
    """The lease, or the delay of records that were given back."""
    is_valid: bool = True
    """False: the records were given back, and wait; no token settles them."""


@dataclass(frozen=True, slots=True)
class Move:
    """Records on their way to another log, by one append with the producer id `id`."""

    id: int
    offsets: Offsets
    """Of the queue's log; of the dead-letter log if `is_back`."""
    is_back: bool = False
    """Whether dead letters go back to the queue's log."""
    since: int = -1
    """The end of the other log before the first append was sent; -1: none was."""
    reason: str = ""
    created: str = ""
    """The creation time of the log that the append is sent to; if `is_back`, of the dead-letter
    log that the records are read from."""


@dataclass(frozen=True, slots=True)
class Queue:
    """A queue's whole state."""

    log: str
    queue: str
    created: str
    """The log's creation time: a later log of the same name has another one."""
    version: int
    settings: QueueSettings
    floor: int
    """All records below are done."""
    next: int
    """No record from here on was ever given."""
    acked: Offsets = NONE
    """The done records above the floor."""
    claims: tuple[Claim, ...] = ()
    attempts: tuple[tuple[int, Offsets], ...] = ()
    """The records that were given and are not done, by how often they were given."""
    moves: tuple[Move, ...] = ()
    redriven: int = 0
    """The offset in the dead-letter log below which dead letters were sent back, or are not this
    queue's."""
    dead_created: str = ""
    """The creation time of the dead-letter log that `redriven` is about."""
    redelivered: int = 0
    """How often records were given again."""
    dead: int = 0
    """How many records went to the dead-letter log."""
    lost: int = 0
    """How many records were gone before they were done: by truncation, retention or a loss."""
    failed: str = ""
    """The code of the error for which records can't be sent to the dead-letter log now."""

    @property
    def key(self) -> Key:
        """The log and the queue."""
        return self.log, self.queue

    @property
    def given(self) -> Offsets:
        """The records that were given and are not done."""
        return Offsets.union(offsets for _, offsets in self.attempts)

    @property
    def moving(self) -> Offsets:
        """The records above the floor on their way to the dead-letter log."""
        moving = (move.offsets for move in self.moves if not move.is_back)
        return Offsets.union(each - each.below(self.floor) for each in moving)

    @property
    def in_flight(self) -> int:
        """How many records workers have."""
        return sum(len(claim.offsets) for claim in self.claims if claim.is_valid)

    def depth(self, end: int) -> int:
        """How many records are not done, of a log that ends at `end`."""
        return max(end, self.next) - self.floor - len(self.acked)

    @property
    def size(self) -> int:
        """An upper bound of the row's characters, roughly."""
        sets = [offsets.packed_size for _, offsets in self.attempts]
        sets += [64 + claim.offsets.packed_size for claim in self.claims]
        # JSON takes up to six bytes for a character of a reason.
        sets += [64 + 6 * len(move.reason) + move.offsets.packed_size for move in self.moves]
        return 1000 + self.acked.packed_size + sum(sets)


@dataclass(frozen=True, slots=True)
class PutQueue:
    """Create a queue, or change its settings. A queue of a deleted log begins anew."""

    log: str
    queue: str
    created: str
    settings: QueueSettings
    start: int
    """The first record of a new queue."""
    dead_end: int = 0
    """The end of the dead-letter log: earlier dead letters are not a new queue's."""
    dead_created: str = ""


@dataclass(frozen=True, slots=True)
class LookQueue:
    """Return one queue."""

    log: str
    queue: str


@dataclass(frozen=True, slots=True)
class ListQueues:
    """List queues of one log, by name. Answer: a tuple."""

    log: str
    after: str
    limit: int


@dataclass(frozen=True, slots=True)
class DeleteQueue:
    """Delete a queue. Answer: its last state."""

    log: str
    queue: str


@dataclass(frozen=True, slots=True)
class FreeQueues:
    """Delete the queues of a deleted log. Answer: an empty tuple."""

    log: str
    created: str


@dataclass(frozen=True, slots=True)
class Take:
    """Claim records below `end`, the log's acknowledged end. Answer: Taken."""

    log: str
    queue: str
    created: str
    first_offset: int
    """The log's first offset: earlier records were dropped."""
    end: int
    count: int
    keys: tuple[tuple[int, int], ...] = ()
    """With the order `key`: offsets, each with a number of its key, or 0 for a record without."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The records of a new claim, by how often they were given. Without records: why."""

    token: int
    records: tuple[tuple[int, Offsets], ...]
    lease_ms: int
    limit: str = ""
    """The bound that keeps the queue from giving further records."""
    wait_ms: int = -1
    """When the next lease or delay ends; -1: there is none."""
    order: str = Order.NONE
    floor: int = 0
    acked: Offsets = NONE
    """With the order `key`: the done records above the floor."""


class Settlement(StrEnum):
    """What becomes of claimed records."""

    ACK = "ack"
    NAK = "nak"
    EXTEND = "extend"
    UNREAD = "unread"
    """Given back by a gateway that could not send them: the attempt does not count."""
    LOST = "lost"
    """The records can't be read any more."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Settle records of claims. Answer: Settled."""

    log: str
    queue: str
    kind: str
    items: tuple[tuple[int, Offsets], ...]
    """Tokens, each with offsets of its claim; no offsets: all that the claim still has."""
    delay_ms: int = 0
    """When records that are given back may be given again."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """Records that a token does not settle, and why."""

    token: int
    offsets: Offsets
    reason: str
    """`acknowledged`: they are done. `claim-ended`: the lease ended or the records were given back,
    and another worker may have them."""


@dataclass(frozen=True, slots=True)
class Settled:
    """How many records were settled, and those that were not."""

    done: int
    refused: tuple[Refused, ...] = ()


@dataclass(frozen=True, slots=True)
class Sweep:
    """Find records that were given too often. Answer: the queue."""

    log: str
    queue: str


@dataclass(frozen=True, slots=True)
class Redrive:
    """Send dead letters back: `offsets` of the dead-letter log, all of this queue from `redriven`
    to `end`. Changes nothing unless `begin` is `redriven`, or with too many moves. Answer: the queue.

    `created`: of the queue's log. `dead_created`: of the dead-letter log; `begin` is `redriven` of
    the log before, if that was another one.
    """

    log: str
    queue: str
    created: str
    dead_created: str
    begin: int
    end: int
    offsets: Offsets


@dataclass(frozen=True, slots=True)
class BeginMove:
    """Allow the append of a move, unless its `since` and `created` are not those of `seen` any
    more. Answer: the queue.

    `offsets`: what the append will have; the rest becomes another move. `created`: as a move's.
    """

    log: str
    queue: str
    id: int
    seen: tuple[int, str]
    since: int
    offsets: Offsets
    created: str


@dataclass(frozen=True, slots=True)
class EndMove:
    """Note that a move's append is done, without records that were `lost`. Answer: the queue."""

    log: str
    queue: str
    id: int
    lost: int = 0


@dataclass(frozen=True, slots=True)
class FailMove:
    """Note why records can't be sent to the dead-letter log, by the code of the error. Answer: the
    queue.
    """

    log: str
    queue: str
    code: str


_OfMoves = Sweep | Redrive | BeginMove | EndMove | FailMove
_OfOne = LookQueue | DeleteQueue | Take | Settle | _OfMoves
QueueRequest = PutQueue | ListQueues | FreeQueues | _OfOne
QueueAnswer = Queue | Taken | Settled | tuple[Queue, ...] | QuorumLogError


def is_counted_once(request: QueueRequest) -> bool:
    """Whether a request needs a `Stamp`. A claim does not: a copy takes further records, which are
    given again after a lease. The others change nothing twice: they name a token, or a move.
    """
    return isinstance(request, PutQueue | DeleteQueue)


class Queues(Rows[Queue]):
    """All queues by the log, and how long their claims are held."""

    def draft(
        self, *, end: int, now_s: float, wall_ms: int, database_ms: int = 0, expiry_ms: int = 0
    ) -> "QueueDraft":
        """A draft of the batch for the offset `end`. Only time awake counts."""
        del wall_ms, database_ms, expiry_ms
        return QueueDraft(self, end=end, now_s=now_s)

    def hold(self, held_until: Any) -> None:
        """Note the ends of leases and delays that began or were extended here, by token."""
        for key, ends in held_until.items():
            if (row := self.rows.get(key)) is not None:
                known = {**self._held_until.get(key, {}), **ends}
                tokens = [claim.token for claim in row.claims if claim.token in known]
                self._held_until[key] = {token: known[token] for token in tokens}

    def held_until(self, row: Queue, claim: Claim) -> float:
        """When a claim's lease or delay ends, in seconds of time awake."""
        end: float = self._held_until.get(row.key, {}).get(
            claim.token, self.since_s + claim.hold_ms / 1000
        )
        return end

    def size_of(self, row: Queue) -> int:
        """An upper bound of a row's characters, roughly."""
        return row.size


class QueueDraft(RowDraft[Queue]):
    """The queues with the changes of some requests, which count once they are in the log."""

    def __init__(self, state: Queues, *, end: int, now_s: float) -> None:
        """The batch is for the offset `end`."""
        super().__init__(state, end=end, now_s=now_s)
        self._state = state
        self._size = 0
        """Characters of changed rows, and of rows that are answers of stamped requests."""
        self._sizes: dict[Key, int] = {}
        """Characters of each changed row."""
        self._work = 0
        """Claims of changed rows, and of rows whose held records were collected."""
        self._held_by: dict[Key, tuple[Queue, Offsets, float]] = {}
        """By key a row, its held records, and when the first of their leases or delays ends."""

    @property
    def is_full(self) -> bool:
        """Whether the batch takes no more requests."""
        is_large = self._size > _BATCH_CHARS or self._work >= _BATCH_CLAIMS
        return super().is_full or is_large

    def decide(self, request: Any, stamp: Stamp | None = None) -> Any:
        """Decide a request; the answer counts once the batch is in the log (`RowDraft.decide`)."""
        answer = super().decide(request, stamp)
        if stamp is not None and isinstance(answer, Queue):
            self._size += answer.size
        return answer

    def _answer(self, request: QueueRequest) -> QueueAnswer:
        try:
            match request:
                case ListQueues(log, after, limit):
                    return self._list(log, after, limit)
                case FreeQueues(log, created):
                    for each in self._of_log(log).values():
                        if each.created == created:
                            self._changed[each.key] = None
                    return ()
                case PutQueue():
                    return self._put_queue(request)
                case _:
                    row = self._row((request.log, request.queue))
                    if row is None:
                        raise _missing(request)
                    return self._of_one(row, request)
        except QuorumLogError as error:
            return error

    def _of_one(self, row: Queue, request: _OfOne) -> Queue | Taken | Settled:
        match request:
            case LookQueue():
                return row
            case DeleteQueue():
                self._changed[row.key] = None
                return row
            case Take():
                return self._take(row, request)
            case Settle():
                return self._settle(row, request)
            case Sweep():
                return self._put(self._exhausted(row), row)
            case Redrive():
                return self._redriven(row, request)
            case BeginMove():
                return self._put(self._begun(row, request), row)
            case FailMove(code=code):
                return self._put(replace(row, failed=code if row.moves else ""), row)
            case EndMove(id=number, lost=lost):
                return self._put(_moved(row, number, lost), row)

    def _list(self, log: str, after: str, limit: int) -> tuple[Queue, ...]:
        known = self._of_log(log)
        names = nsmallest(limit, (name for name in known if name > after))
        return tuple(known[name] for name in names)

    # --- settings --------------------------------------------------------------------------------

    def _put_queue(self, request: PutQueue) -> Queue:
        known, wanted = self._row((request.log, request.queue)), request.settings
        if known is None or known.created != request.created:
            if known is None:
                self._check_room(request.log)
            elif request.created < known.created:
                # The request may be late, and the queue in use by the later log.
                raise LogReplaced(
                    f"the queue is of another log {request.log}: delete the queue first",
                    log=request.log,
                    queue=request.queue,
                )
            new = Queue(
                request.log,
                request.queue,
                request.created,
                self._version,
                wanted,
                floor=request.start,
                next=request.start,
                redriven=request.dead_end,
                dead_created=request.dead_created,
            )
            return self._put(new)
        row, settings = known, known.settings
        if wanted.order != settings.order:
            raise _differs(row, f"the order is {settings.order}")
        if wanted.dead_letter_log != settings.dead_letter_log:
            # What was sent may be in that log, so no other log may get it.
            is_sent = any(move.since >= 0 or move.is_back for move in row.moves)
            if is_sent or (row.moves and not wanted.dead_letter_log):
                raise QueueExists(
                    f"records are on their way to or from {settings.dead_letter_log}: retry later",
                    log=row.log,
                    queue=row.queue,
                )
            row = replace(
                row, redriven=request.dead_end, dead_created=request.dead_created, failed=""
            )
        return self._put(replace(row, settings=wanted), known)

    def _check_room(self, log: str) -> None:
        rows: Iterable[Queue | None] = {**self._state.rows, **self._changed}.values()
        for count, bound, whose in (
            (sum(row is not None for row in rows), QUEUES_MAX, "the cluster has"),
            (len(self._of_log(log)), LOG_QUEUES_MAX, f"the log {log} has"),
        ):
            if count >= bound:
                raise TooManyQueues(f"{whose} {bound} queues: delete some", log=log)

    def _put(self, row: Queue, before: Queue | None = None) -> Queue:
        """Write a row, unless it is as `before`."""
        if row == before:
            return row
        row = replace(row, version=self._version)
        size = row.size
        self._size += size - self._sizes.get(row.key, 0)
        self._sizes[row.key] = size
        self._work += len(row.claims)
        self._changed[row.key] = row
        return row

    # --- claims ----------------------------------------------------------------------------------

    def _until(self, row: Queue, claim: Claim) -> float:
        ends = self.held_until.get(row.key, {})
        end: float = ends.get(claim.token) or self._state.held_until(row, claim)
        return end

    def _hold(self, row: Queue, token: int, hold_ms: int) -> None:
        self._held_by.pop(row.key, None)
        self.held_until.setdefault(row.key, {})[token] = self._now_s + hold_ms / 1000

    def _held(self, row: Queue) -> Offsets:
        """The records that are not to be given now: their lease or delay has not ended."""
        return self._holds(row)[0]

    def _holds(self, row: Queue) -> tuple[Offsets, float]:
        """The held records, and when the first of their leases or delays ends. Collected once for
        each state of a row.
        """
        known = self._held_by.get(row.key)
        if known is None or known[0] is not row:
            ends = [(self._until(row, claim), claim.offsets) for claim in row.claims]
            held = [(end, offsets) for end, offsets in ends if self._now_s < end]
            first = min((end for end, _ in held), default=inf)
            known = row, Offsets.union(offsets for _, offsets in held), first
            self._held_by[row.key] = known
            self._work += len(row.claims)
        return known[1], known[2]

    def _take(self, before: Queue, request: Take) -> Taken:
        _check_log(before, request.created)
        row = self._exhausted(_trimmed(before, request.first_offset))
        given = row.given
        busy = self._held(row) | row.moving
        limit = max(row.next, min(request.end, row.floor + WINDOW))
        room = row.settings.max_in_flight - len(given)
        if row.settings.order == Order.KEY:
            chosen = _in_order(row, request, busy, limit, room)
        else:
            left = Offsets.span(row.floor, limit) - row.acked - busy
            again = (left & given).lowest(request.count)
            new = (left - given).lowest(min(request.count - len(again), room))
            chosen = again | new
        row = self._granted(row, chosen)
        self._put(row, before)
        is_bounded = len(chosen) < request.count and request.end > row.next
        return Taken(
            self._version,
            tuple((count, part) for count, each in row.attempts if (part := each & chosen)),
            row.settings.lease_ms,
            limit=_bound(row) if is_bounded else "",
            wait_ms=-1 if chosen else self._wait_ms(row),
            order=row.settings.order,
            floor=row.floor,
            acked=row.acked if row.settings.order == Order.KEY else NONE,
        )

    def _granted(self, row: Queue, chosen: Offsets) -> Queue:
        """The queue with a new claim of these records, which leave their ended claims."""
        if not chosen:
            return row
        again, lease_ms = row.given & chosen, row.settings.lease_ms
        self._hold(row, self._version, lease_ms)
        row = _without(row, chosen)
        return replace(
            row,
            next=max(row.next, chosen.end),
            claims=(*row.claims, Claim(self._version, chosen, lease_ms)),
            attempts=_counted(row.attempts, chosen, 1),
            redelivered=row.redelivered + len(again),
        )

    def _wait_ms(self, row: Queue) -> int:
        _, first = self._holds(row)
        return max(1, ceil((first - self._now_s) * 1000)) if first < inf else -1

    def _exhausted(self, row: Queue) -> Queue:
        """The queue with records that were given too often on their way to the dead-letter log."""
        most = row.settings.max_attempts
        if not most:
            return row
        over = Offsets.union(offsets for count, offsets in row.attempts if count >= most)
        over = over - self._held(row) - row.moving
        return self._doomed(row, over, "the lease ended without an acknowledgement")

    def _doomed(self, row: Queue, offsets: Offsets, reason: str) -> Queue:
        if not offsets:
            return row
        row = _without(row, offsets)
        if len(row.moves) >= MOVES_MAX:
            for move in row.moves:
                is_near = abs(offsets.first - move.offsets.first) <= WINDOW
                if move.since < 0 and not move.is_back and is_near:
                    joined = replace(move, offsets=move.offsets | offsets)
                    moves = (joined if each is move else each for each in row.moves)
                    return replace(row, moves=tuple(moves))
        move = Move(self._version, offsets, reason=reason)
        return replace(row, moves=(*row.moves, move))

    def _settle(self, before: Queue, request: Settle) -> Settled:
        kind = Settlement(request.kind)
        row, claims = before, {claim.token: claim for claim in before.claims if claim.is_valid}
        settled, refused = NONE, []
        for token, offsets in request.items:
            claim = claims.get(token)
            held = NONE if claim is None else claim.offsets - settled
            part = offsets & held if offsets else held
            if not part or offsets - part:
                refused += _refused(row, token, offsets - part)
            if kind is Settlement.EXTEND and part and claim is not None:
                self._hold(row, token, claim.hold_ms)
            settled |= part
        if kind is not Settlement.EXTEND:
            row = _without(row, settled)
        match kind:
            case Settlement.ACK:
                row = _acknowledged(row, settled)
            case Settlement.LOST:
                row = replace(_acknowledged(row, settled), lost=row.lost + len(settled))
            case Settlement.NAK:
                row = self._given_back(row, settled, request)
            case Settlement.UNREAD:
                row = replace(row, attempts=_counted(row.attempts, settled, -1))
            case Settlement.EXTEND:
                pass
        self._put(row, before)
        return Settled(len(settled), tuple(refused))

    def _given_back(self, row: Queue, offsets: Offsets, request: Settle) -> Queue:
        most, over = row.settings.max_attempts, NONE
        if most:
            over = offsets & Offsets.union(each for count, each in row.attempts if count >= most)
            row = self._doomed(row, over, request.reason or "a worker gave the record back")
        later = offsets - over
        if not (later and request.delay_ms):
            return row
        self._hold(row, self._version, request.delay_ms)
        delay = Claim(self._version, later, request.delay_ms, is_valid=False)
        return replace(row, claims=(*row.claims, delay))

    # --- moves -----------------------------------------------------------------------------------

    def _begun(self, row: Queue, request: BeginMove) -> Queue:
        moves: list[Move] = []
        for move in row.moves:
            if move.id != request.id or (move.since, move.created) != request.seen:
                moves.append(move)
                continue
            # What was sent once stays as it is: a copy may be in the other log.
            kept = move.offsets & request.offsets if move.since < 0 else move.offsets
            begun = replace(move, offsets=kept, since=request.since, created=request.created)
            moves.append(begun)
            if rest := move.offsets - kept:
                moves.append(replace(move, id=self._version, offsets=rest))
        return replace(row, moves=tuple(moves))

    def _redriven(self, row: Queue, request: Redrive) -> Queue:
        _check_log(row, request.created)
        if request.begin != row.redriven or len(row.moves) >= MOVES_MAX:
            return row
        move = Move(self._version, request.offsets, is_back=True, created=request.dead_created)
        moves = (*row.moves, move) if request.offsets else row.moves
        sent = replace(row, redriven=request.end, dead_created=request.dead_created, moves=moves)
        return self._put(sent, row)


def _bound(row: Queue) -> str:
    """The bound that keeps a queue from giving further records."""
    if len(row.given) >= row.settings.max_in_flight:
        return "max-in-flight"
    return "window" if row.next >= row.floor + WINDOW else ""


def _in_order(row: Queue, request: Take, busy: Offsets, limit: int, room: int) -> Offsets:
    """The records to give with the order `key`: none whose key has an earlier record that is not
    done. Ends at the first record whose key is unknown.
    """
    keys, waiting, chosen = dict(request.keys), set[int](), list[int]()
    held, given = set(busy), set(row.given)
    for offset in Offsets.span(row.floor, limit) - row.acked:
        key = keys.get(offset)
        if key is None or len(chosen) == request.count:
            break
        if key not in waiting and offset not in held and (offset in given or room > 0):
            chosen.append(offset)
            room -= offset not in given
        if key:
            waiting.add(key)
    return Offsets.of(chosen)


def _without(row: Queue, offsets: Offsets) -> Queue:
    """The queue without these records in any claim."""
    begin, end = offsets.first, offsets.end
    kept: list[Claim] = []
    for claim in row.claims:
        if claim.offsets.first >= end or claim.offsets.end <= begin:
            kept.append(claim)
        elif left := claim.offsets - offsets:
            kept.append(claim if left == claim.offsets else replace(claim, offsets=left))
    return replace(row, claims=tuple(kept))


def _counted(
    attempts: Sequence[tuple[int, Offsets]], offsets: Offsets, more: int
) -> tuple[tuple[int, Offsets], ...]:
    """The attempts after these records were given once more (1), or once less (-1)."""
    counts = {count: each - offsets for count, each in attempts}
    new = offsets
    for count, each in attempts:
        part = each & offsets
        new = new - part
        if count + more:
            counts[count + more] = counts.get(count + more, NONE) | part
    if more > 0:
        counts[1] = counts.get(1, NONE) | new
    return tuple((count, each) for count, each in sorted(counts.items()) if each)


def _acknowledged(row: Queue, offsets: Offsets) -> Queue:
    """The queue with these records done; the floor moves up to the first one that is not."""
    offsets -= offsets.below(row.floor)
    attempts = tuple((count, left) for count, each in row.attempts if (left := each - offsets))
    return _raised(replace(row, acked=row.acked | offsets, attempts=attempts), row.floor)


def _raised(row: Queue, floor: int) -> Queue:
    acked = row.acked - row.acked.below(floor)
    if acked and acked.first == floor:
        floor = acked.run_end
        acked -= acked.below(floor)
    return replace(row, floor=floor, acked=acked)


def _trimmed(row: Queue, first_offset: int) -> Queue:
    """The queue without records that the log has dropped. Unfinished records are lost."""
    if first_offset <= row.floor:
        return row
    done = len(row.acked.below(first_offset)) + len(row.moving.below(first_offset))
    lost = first_offset - row.floor - done
    claims = (
        replace(one, offsets=one.offsets - one.offsets.below(first_offset)) for one in row.claims
    )
    attempts = ((count, each - each.below(first_offset)) for count, each in row.attempts)
    kept = replace(
        row,
        next=max(row.next, first_offset),
        claims=tuple(claim for claim in claims if claim.offsets),
        attempts=tuple((count, left) for count, left in attempts if left),
        lost=row.lost + lost,
    )
    return _raised(kept, first_offset)


def _moved(row: Queue, number: int, lost: int) -> Queue:
    for move in row.moves:
        if move.id == number:
            row = replace(row, moves=tuple(each for each in row.moves if each is not move))
            if not move.is_back:
                dead = row.dead + len(move.offsets) - lost
                row = replace(_acknowledged(row, move.offsets), dead=dead, lost=row.lost + lost)
                row = replace(row, failed="")
    return row


def _refused(row: Queue, token: int, offsets: Offsets) -> list[Refused]:
    """The reasons why a token does not settle these records; none: of its claim."""
    done = offsets.below(row.floor) | (offsets & row.acked)
    ended = offsets - done
    refused = [Refused(token, done, "acknowledged")] if done else []
    return refused if done and not ended else [*refused, Refused(token, ended, "claim-ended")]


def _check_log(row: Queue, created: str) -> None:
    if row.created != created:
        raise LogReplaced(
            f"the queue is of an earlier log {row.log}, which was deleted: create the queue again",
            log=row.log,
            queue=row.queue,
        )


def _missing(request: _OfOne) -> NoSuchQueue:
    return NoSuchQueue(
        f"the log {request.log} has no queue {request.queue}",
        log=request.log,
        queue=request.queue,
    )


def _differs(row: Queue, detail: str) -> QueueExists:
    return QueueExists(
        f"{detail}, and can't be changed: delete the queue first", log=row.log, queue=row.queue
    )
