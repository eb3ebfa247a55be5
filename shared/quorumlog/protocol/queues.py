"""Decides requests about work queues, which give each record of a log to one worker (ADR 55).

A queue is a row of the log of queues (`rows.py`). The row has a floor (all records below it are
done), the acknowledged records above the floor, and claims (each gives some records to one
worker). A claim's token is the version of the change that granted the claim. A decision counts once
it is in the log.

Invariants (checked by the simulation in tests/model/queues):
  - a record that was acknowledged is never given again;
  - a record is in one claim at most, and only that claim's token settles the record;
  - a record is given again only after its worker gave it back, or after the owner was awake for a
    whole lease without an extension of the claim;
  - with the order `key`, a record is given only if all earlier records of its key are done;
  - a record leaves the queue only by an acknowledgement, an append to the dead-letter log, or the
    loss of the record itself, which is counted.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import ceil, inf
from typing import Any, Final

from quorumlog.errors import LogReplaced, NoSuchQueue, QueueExists, TooManyQueues
from quorumlog.protocol import queue_requests as asks
from quorumlog.protocol.offset_set import NONE, Offsets
from quorumlog.protocol.queue_state import Claim, Move, Order, Queue
from quorumlog.protocol.rows import Key, RowDraft, Rows, Stamp

QUEUES_MAX: Final = 10_000
"""Maximum queues of all logs, which the owner keeps in memory. Chosen by judgement."""
LOG_QUEUES_MAX: Final = 100
"""Maximum queues of one log, which leaves room for other logs. Chosen by judgement."""
WINDOW: Final = 100_000
"""A queue gives only records at less than this distance above its floor. So a queue's set of
acknowledged records above the floor has at most this many offsets."""
IN_FLIGHT_MAX: Final = 10_000
"""Maximum of `max_in_flight`. Keeps a queue's row, which each change writes, below a megabyte."""
MOVES_MAX: Final = 100
"""Maximum moves of a queue. Further dead letters join a move that was not sent yet, and get that
move's reason. Chosen by judgement."""
KEYS_MAX: Final = 2000
"""Maximum unfinished records that one claim examines with the order `key`."""
_BATCH_CHARS: Final = 2 << 20
"""A batch accepts no more requests once its changed rows have this many characters. An entry has
room for these rows, for one more row, and for old rows that are written again."""
_BATCH_CLAIMS: Final = 20_000
"""A batch accepts no more requests once it has processed this many claims, so that a batch blocks
the event loop for at most about 0.1 s. Chosen by judgement."""
_KEYS_PER_CLAIM: Final = 16
"""The number of keys that a batch processes in the time of one claim. Chosen by experiment."""


class Queues(Rows[Queue]):
    """All queues that the log of queues contains, and the ends of their claims' leases."""

    noun, absent = "queue", NoSuchQueue

    def draft(
        self, *, end: int, now_s: float, wall_ms: int, database_ms: int = 0, expiry_ms: int = 0
    ) -> "QueueDraft":
        """Begin a draft of the batch for the offset `end`. Uses only `now_s`, the time awake."""
        del wall_ms, database_ms, expiry_ms
        return QueueDraft(self, end=end, now_s=now_s)

    def hold(self, held_until: Any) -> None:
        """Record, by token, the ends of leases and delays that this gateway started or extended."""
        for key, ends in held_until.items():
            if (row := self.rows.get(key)) is not None:
                known = {**self._held_until.get(key, {}), **ends}
                tokens = [claim.token for claim in row.claims if claim.token in known]
                self._held_until[key] = {token: known[token] for token in tokens}

    def held_until(self, row: Queue, claim: Claim) -> float:
        """The time when a claim's lease or delay ends, in seconds of time awake."""
        end: float = self._held_until.get(row.key, {}).get(
            claim.token, self.since_s + claim.hold_ms / 1000
        )
        return end

    def size_of(self, row: Queue) -> int:
        """A rough upper bound of a row's characters."""
        return row.size

    def remembered(self, row: Queue) -> Queue:
        """The short form in which the result of a change is remembered."""
        return row.outline


class QueueDraft(RowDraft[Queue]):
    """The queues after the changes of a batch, which count once the batch is in the log."""

    def __init__(self, state: Queues, *, end: int, now_s: float) -> None:
        """Begin a batch for the offset `end`."""
        super().__init__(state, end=end, now_s=now_s)
        self._state = state
        self._size = 0
        """Characters of all changed rows."""
        self._sizes: dict[Key, int] = {}
        """Characters of each changed row."""
        self._work = 0
        """Number of claims in changed rows, and in rows whose held records were computed."""
        self._held_by: dict[Key, tuple[Queue, Offsets, float]] = {}
        """For each key, the row, its held records, and the end of the first lease or delay."""

    @property
    def is_full(self) -> bool:
        """Whether the batch accepts no more requests."""
        is_large = self._size > _BATCH_CHARS or self._work >= _BATCH_CLAIMS
        return super().is_full or is_large

    def decide(self, request: Any, stamp: Stamp | None = None) -> Any:
        """Decide a request. The answer counts once the batch is in the log (`RowDraft.decide`). A
        copy of a decided change gets the queue's current state if the queue still exists.
        """
        answer = super().decide(request, stamp)
        is_change = stamp is not None and isinstance(answer, Queue)
        return (self._row(answer.key) or answer) if is_change else answer

    def _perform(self, request: asks.PutQueue | asks.OfQueue) -> Queue | asks.Taken | asks.Settled:
        if isinstance(request, asks.PutQueue):
            return self._put_queue(request)
        row = self._found(request)
        match request:
            case asks.LookQueue():
                return self._put(self._exhausted(row), row)
            case asks.DeleteQueue(version=version):
                self._check_version(row, version)
                self._forget(row)
                return row
            case asks.Take():
                return self._take(row, request)
            case asks.Settle():
                return self._settle(row, request)
            case asks.Redrive():
                return self._redriven(row, request)
            case asks.BeginMove():
                return self._put(self._begun(row, request), row)
            case asks.FailMove(code=code):
                return self._put(replace(row, failed=code if row.moves else ""), row)
            case asks.EndMove(id=number, lost=lost):
                return self._put(row.moved(number, lost), row)

    # --- settings --------------------------------------------------------------------------------

    def _put_queue(self, request: asks.PutQueue) -> Queue:
        known = self._row((request.log, request.queue))
        if known is None:
            if request.version is not None:
                raise self._missing(request)
            self._check_room(request.log)
            return self._created(request)
        self._check_version(known, request.version)
        if request.created == known.created:
            if request.is_new:
                raise self._conflict(known, known.settings_version)
            return self._with_settings(known, request)
        if request.created < known.created:
            # The request may be a late copy, and workers of the later log may use the queue.
            raise LogReplaced(
                f"the queue is of a later log named {request.log}: delete the queue first",
                log=request.log,
                queue=request.queue,
            )
        return self._created(request)

    def _created(self, request: asks.PutQueue) -> Queue:
        new = Queue(
            request.log,
            request.queue,
            request.created,
            self._version,
            request.settings,
            floor=request.start,
            next=request.start,
            redriven=request.dead_end,
            dead_created=request.dead_created,
            settings_version=self._version,
        )
        return self._put(new)

    def _with_settings(self, known: Queue, request: asks.PutQueue) -> Queue:
        row, settings, wanted = known, known.settings, request.settings
        if wanted == settings:
            return known
        if wanted.order != settings.order:
            raise QueueExists(
                f"order can't be changed from {settings.order}: delete the queue first",
                log=row.log,
                queue=row.queue,
            )
        if wanted.dead_letter_log != settings.dead_letter_log:
            # Records of a move that was sent may be in the present dead-letter log, and must not be
            # added to another log.
            is_sent = any(move.since >= 0 or move.is_back for move in row.moves)
            if is_sent or (row.moves and not wanted.dead_letter_log):
                raise QueueExists(
                    "dead_letter_log can't be changed while records are being moved to or from "
                    f"{settings.dead_letter_log}: retry later",
                    log=row.log,
                    queue=row.queue,
                )
            row = replace(
                row, redriven=request.dead_end, dead_created=request.dead_created, failed=""
            )
        return self._put(replace(row, settings=wanted, settings_version=self._version), known)

    def _check_version(self, row: Queue, version: int | None) -> None:
        if version is not None and version != row.settings_version:
            raise self._conflict(row, row.settings_version)

    def _check_room(self, log: str) -> None:
        rows: Iterable[Queue | None] = {**self._state.rows, **self._changed}.values()
        for count, bound, whose in (
            (sum(row is not None for row in rows), QUEUES_MAX, "the cluster has"),
            (len(self._of_log(log)), LOG_QUEUES_MAX, f"the log {log} has"),
        ):
            if count >= bound:
                raise TooManyQueues(f"{whose} {bound} queues, the maximum: delete some", log=log)

    def _put(self, row: Queue, before: Queue | None = None) -> Queue:
        """Write a row, unless it equals `before`."""
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
        """The records that can't be given yet, because their lease or delay has not ended."""
        return self._holds(row)[0]

    def _holds(self, row: Queue) -> tuple[Offsets, float]:
        """The held records, and the time when the first of their leases or delays ends. The result
        is cached until the row changes.
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

    def _take(self, before: Queue, request: asks.Take) -> asks.Taken:
        _check_log(before, request.created)
        row = self._exhausted(before.trimmed(request.first_offset))
        given = row.given
        busy = self._held(row) | row.moving
        limit = max(row.next, min(request.end, row.floor + WINDOW))
        room = row.settings.max_in_flight - len(given)
        if row.settings.order == Order.KEY:
            self._work += len(request.keys) // _KEYS_PER_CLAIM
            chosen = _in_order(row, request, busy, limit, room)
        else:
            left = Offsets.span(row.floor, row.next) - row.acked - busy
            again = (left & given).lowest(request.count)
            room = min(request.count - len(again), room)
            new = (left - given).lowest(room)
            end = min(limit, row.next + room - len(new))
            chosen = again | new | Offsets.span(row.next, end)
        row = self._granted(row, chosen)
        self._put(row, before)
        is_bounded = len(chosen) < request.count and request.end > row.next
        return asks.Taken(
            self._version,
            tuple((count, part) for count, each in row.attempts if (part := each & chosen)),
            row.settings.lease_ms,
            limit=_bound(row, request) if is_bounded else "",
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
        left = row.without(again).counted(chosen, 1)
        return replace(
            left,
            next=max(row.next, chosen.end),
            claims=(*left.claims, Claim(self._version, chosen, lease_ms)),
            redelivered=row.redelivered + len(again),
        )

    def _wait_ms(self, row: Queue) -> int:
        _, first = self._holds(row)
        return max(1, ceil((first - self._now_s) * 1000)) if first < inf else -1

    def _exhausted(self, row: Queue) -> Queue:
        """The queue after records whose last attempt has ended were added to a move."""
        most = row.settings.max_attempts
        if not most:
            return row
        over = Offsets.union(offsets for count, offsets in row.attempts if count >= most)
        over = over - self._held(row) - row.moving
        return self._doomed(row.without(over), over, "the lease ended without an acknowledgement")

    def _doomed(self, row: Queue, offsets: Offsets, reason: str) -> Queue:
        if not offsets:
            return row
        if len(row.moves) >= MOVES_MAX:
            for move in row.moves:
                is_near = abs(offsets.first - move.offsets.first) <= WINDOW
                if move.since < 0 and not move.is_back and is_near:
                    joined = replace(move, offsets=move.offsets | offsets)
                    moves = (joined if each is move else each for each in row.moves)
                    return replace(row, moves=tuple(moves))
        move = Move(self._version, offsets, reason=reason)
        return replace(row, moves=(*row.moves, move))

    def _settle(self, before: Queue, request: asks.Settle) -> asks.Settled:
        kind = asks.Settlement(request.kind)
        row, claims = before, {claim.token: claim for claim in before.claims if claim.is_valid}
        settled, refused = NONE, []
        for token, offsets in request.items:
            claim = claims.get(token)
            held = NONE if claim is None else claim.offsets - settled
            part = offsets & held if offsets else held
            if not part or offsets - part:
                refused += _refused(row, token, offsets - part)
            if kind is asks.Settlement.EXTEND and part and claim is not None:
                self._hold(row, token, claim.hold_ms)
            settled |= part
        if kind is not asks.Settlement.EXTEND:
            row = row.without(settled)
        match kind:
            case asks.Settlement.ACK:
                row = row.acknowledged(settled)
            case asks.Settlement.LOST:
                row = replace(row.acknowledged(settled), lost=row.lost + len(settled))
            case asks.Settlement.NAK:
                row = self._given_back(row, settled, request)
            case asks.Settlement.UNREAD:
                row = row.counted(settled, -1)
            case asks.Settlement.EXTEND:
                pass
        self._put(row, before)
        return asks.Settled(len(settled), tuple(refused))

    def _given_back(self, row: Queue, offsets: Offsets, request: asks.Settle) -> Queue:
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

    def _begun(self, row: Queue, request: asks.BeginMove) -> Queue:
        moves: list[Move] = []
        for move in row.moves:
            if move.id != request.id or (move.since, move.created) != request.seen:
                moves.append(move)
                continue
            # A move that was sent keeps its records, because the other log may already have them.
            kept = move.offsets & request.offsets if move.since < 0 else move.offsets
            begun = replace(move, offsets=kept, since=request.since, created=request.created)
            moves.append(begun)
            if rest := move.offsets - kept:
                moves.append(replace(move, id=self._version, offsets=rest))
        return replace(row, moves=tuple(moves))

    def _redriven(self, row: Queue, request: asks.Redrive) -> Queue:
        _check_log(row, request.created)
        seen = row.redriven, row.dead_created
        if request.seen != seen or len(row.moves) >= MOVES_MAX:
            return row
        move = Move(self._version, request.offsets, is_back=True, created=request.dead_created)
        moves = (*row.moves, move) if request.offsets else row.moves
        sent = replace(row, redriven=request.end, dead_created=request.dead_created, moves=moves)
        return self._put(sent, row)


def _bound(row: Queue, request: asks.Take) -> str:
    """The name of the bound that keeps a queue from giving further records; empty: none."""
    if len(row.given) >= row.settings.max_in_flight:
        return "max-in-flight"
    if row.next >= row.floor + WINDOW:
        return "window"
    return "keys" if len(request.keys) >= KEYS_MAX else ""


def _in_order(row: Queue, request: asks.Take, busy: Offsets, limit: int, room: int) -> Offsets:
    """The records to give with the order `key`. Each is the first unfinished record of its key. The
    search ends at the first record whose key is unknown.
    """
    keys, waiting, chosen = dict(request.keys), set[int](), list[int]()
    left = Offsets.span(row.floor, min(limit, max(keys, default=0) + 1)) - row.acked
    held, given = set(left & busy), set(left & row.given)
    for offset in left:
        key = keys.get(offset)
        if key is None or len(chosen) == request.count:
            break
        if key not in waiting and offset not in held and (offset in given or room > 0):
            chosen.append(offset)
            room -= offset not in given
        if key:
            waiting.add(key)
    return Offsets.of(chosen)


def _refused(row: Queue, token: int, offsets: Offsets) -> list[asks.Refused]:
    """Why a token does not settle these records. Empty `offsets`: all records of its claim."""
    done = offsets.below(row.floor) | (offsets & row.acked)
    ended = offsets - done
    refused = [asks.Refused(token, done, "acknowledged")] if done else []
    return refused if done and not ended else [*refused, asks.Refused(token, ended, "claim-ended")]


def _check_log(row: Queue, created: str) -> None:
    if row.created != created:
        raise LogReplaced(
            f"the queue belongs to a deleted log {row.log}: create the queue again",
            log=row.log,
            queue=row.queue,
        )
