"""Named positions of consumers, and their leases: the state, and what each request does to it (ADR 37).

The state is a fold over the log of positions: the last row of a consumer counts. A request is decided on a
`Draft` of the state; what it changes counts once the draft's record is in the log (`position_keeper.py`).

A version is the place of its change in the log, so it rises for ever, also over a deletion. The version of the
row by which a lease was granted is its fencing token.

Invariants (checked by the simulation in tests/unit/positions):
  - a position of one creation of a log goes back by a reset only, which raises the token;
  - a commit with a token counts only while no higher one was given out, whatever any clock says;
  - a held lease is granted to another holder only after a whole lease of time awake without a word of its holder.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import Final

from quorumlog.errors import (
    NOT_DONE,
    UNKNOWN,
    InvalidRequest,
    LeaseHeld,
    LeaseLost,
    LogReplaced,
    NoSuchConsumer,
    OffsetTruncated,
    PositionBehind,
    QuorumLogError,
    RequestOutdated,
    TooManyConsumers,
    VersionConflict,
    by_code,
)

CONSUMERS_MAX: Final = 50_000
"""Consumers of all logs together, chosen by judgement: each gateway that owns their log holds them in memory."""
LOG_CONSUMERS_MAX: Final = 20_000
"""Consumers of one log, chosen by judgement: one log does not take the room of all others."""
CALLER_CONSUMERS_MAX: Final = 20_000
"""Consumers that one caller has made, where tokens are required; chosen by judgement."""

CHANGES_MAX: Final = 1024
"""Requests of one batch; versions count in it."""

USE_STEP_MS: Final = 86_400_000
"""A use that changes nothing else of a row is written only where the last use that the row has is as long ago as this,
or as long as a quarter of the time after which consumers expire."""

GRACE_S: Final = 3600.0
"""No consumer expires before the keeper has known the rows for so long, or for as long as consumers take to expire: users
come back after the cluster stood still. Chosen by judgement."""

REMEMBERED_MAX: Final = 20_000
"""Decided changes whose tokens a keeper remembers (rule 32); chosen by judgement: some megabytes."""

Key = tuple[str, str]
"""(log, consumer)"""


@dataclass(frozen=True, slots=True)
class Position:
    """How far a consumer has read a log: `offset` is the first record that it has not processed."""

    log: str
    consumer: str
    created: str
    """The creation of the log: one that was made again under its name is another one."""
    offset: int
    version: int
    token: int = 0
    """The highest fencing token that was given out; 0: none was."""
    holder: str = ""
    """Who holds the lease with that token, perhaps beyond its time; empty: nobody."""
    lease_ms: int = 0
    committed_ms: int = 0
    """For people: the time by the clock of the gateway that took the commit."""
    used_ms: int = 0
    """The database's time of the last use, give or take `USE_STEP_MS`; 0: the database's time was not known then."""
    caller: str = ""
    """Who made the consumer; empty where no tokens are required."""
    started: int = 0
    """`Acquire.started` of the holder."""

    @property
    def key(self) -> Key:
        """Whose position this is."""
        return self.log, self.consumer


@dataclass(frozen=True, slots=True)
class Stamp:
    """Marks all copies of one change, so that at most one copy is ever performed (rule 32)."""

    token: str
    """Drawn by the first sender of the change."""
    content: str = ""
    """A digest of what is asked for: the same token with another content is a mistake of the sender."""
    seen: int = 0
    """A version that the first sender knew before it sent any copy; 0: it knew none, and must ask for one."""


@dataclass(frozen=True, slots=True)
class Decided:
    """How the change with a token was decided: a row, or the code of a refusal."""

    token: str
    content: str
    answer: "Position | str"


@dataclass(frozen=True, slots=True)
class Batch:
    """One record of the log of positions: rows that are so from then on, consumers that are no more, and the changes
    that were decided.
    """

    rows: tuple[Position, ...] = ()
    gone: tuple[Key, ...] = ()
    decided: tuple[Decided, ...] = ()


@dataclass(frozen=True, slots=True)
class Look:
    """Answer: Position."""

    log: str
    consumer: str


@dataclass(frozen=True, slots=True)
class List:
    """Consumers of a log by name, or of all logs. Answer: a tuple of at most `limit` Positions."""

    log: str
    """Empty: all logs. Then `after` is `log/consumer`."""
    after: str
    limit: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Move a position on. It needs a fencing token, or the row's version, or that there is none (`is_new`)."""

    log: str
    consumer: str
    created: str
    offset: int
    token: int | None = None
    version: int | None = None
    is_new: bool = False
    caller: str = ""


@dataclass(frozen=True, slots=True)
class Acquire:
    """Take the lease. A consumer that is not there begins at `offset`. While the lease is held, only a worker of the same
    `holder` that was started later gets it.
    """

    log: str
    consumer: str
    created: str
    holder: str
    lease_ms: int
    offset: int
    first_offset: int
    """Of the log: records below it were dropped."""
    caller: str = ""
    started: int = 0
    """When the worker was started, in any unit; 0: not known."""


@dataclass(frozen=True, slots=True)
class Renew:
    """Hold the lease for another whole lease."""

    log: str
    consumer: str
    created: str
    token: int


@dataclass(frozen=True, slots=True)
class Release:
    """Let the lease go."""

    log: str
    consumer: str
    token: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Put the position anywhere, for the log as it is now. Ends the lease, and fences its holder."""

    log: str
    consumer: str
    created: str
    offset: int
    version: int | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Forget the consumer. Answer: the Position as it was."""

    log: str
    consumer: str
    version: int | None = None


@dataclass(frozen=True, slots=True)
class FreeLog:
    """Forget the consumers of a log that was deleted, of this creation (rule 32a). Answer: an empty tuple."""

    log: str
    created: str


@dataclass(frozen=True, slots=True)
class Expire:
    """Forget a consumer if nobody has used it for long. A consumer whose lease is held, or whose last use is not known,
    counts as used now. Answer: an empty tuple.
    """

    log: str
    consumer: str


Request = Look | List | Commit | Acquire | Renew | Release | Reset | Delete | FreeLog | Expire
Answer = Position | tuple[Position, ...] | QuorumLogError


def counts_once(request: Request) -> bool:
    """Whether a request needs `Stamp`. A commit or a renewal by fencing token does not: it is refused once the lease has
    changed hands, and a commit moves a position forwards only.
    """
    if isinstance(request, Commit):
        return request.token is None
    return isinstance(request, Acquire | Release | Reset | Delete)


class Positions:
    """The rows as the log says, and for how long their leases hold."""

    def __init__(self) -> None:
        self.rows: OrderedDict[Key, Position] = OrderedDict()
        """The one that was written longest ago comes first."""
        self._logs: dict[str, dict[str, Position]] = {}
        self.callers: Counter[str] = Counter()
        """How many consumers each caller has made."""
        self._places: dict[Key, tuple[int, int]] = {}
        """Offset of the record with the row, and how much had been written before."""
        self._held_until: dict[Key, float] = {}
        """Leases that were granted or renewed here since `since_s`."""
        self.since_s = 0.0
        """When rows were read last that somebody else may have written."""
        self._written = 0
        self._next = 0
        self._decided: dict[str, Decided] = {}
        self._tokens: deque[tuple[int, str]] = deque()
        """With the offset of the record: the oldest first."""
        self.known_from = 0
        """The tokens of all records from this offset on are remembered."""

    def reach(self, offset: int) -> None:
        """The next record is the one at this offset. The tokens of records that were passed over are not known."""
        if offset != self._next:
            self._next = self.known_from = offset

    def decided(self, token: str) -> Decided | None:
        """How the change with a token was decided, where that is remembered."""
        return self._decided.get(token)

    def _remember(self, offset: int, batch: Batch) -> None:
        for one in batch.decided:
            self._decided[one.token] = one
            self._tokens.append((offset, one.token))
        while len(self._tokens) > REMEMBERED_MAX:
            oldest, _ = self._tokens[0]
            self.known_from = max(self.known_from, oldest + 1)
            while self._tokens and self._tokens[0][0] == oldest:
                self._decided.pop(self._tokens.popleft()[1], None)

    def fold(self, offset: int, batch: Batch) -> None:
        """Take the record at an offset."""
        self.reach(offset)
        self._next += 1
        self._remember(offset, batch)
        self._written += 1
        for key in batch.gone:
            self._drop(key)
        for row in batch.rows:
            self._drop(row.key, keeps_lease=True)
            self.rows[row.key] = row
            self.callers[row.caller] += 1
            self._logs.setdefault(row.log, {})[row.consumer] = row
            self._places[row.key] = (offset, self._written)
            self._written += 1

    def learned(self, now_s: float) -> None:
        """What was folded was read from the log. Another keeper may have promised whole leases until just now."""
        self._held_until.clear()
        self.since_s = now_s

    def hold(self, held_until: Mapping[Key, float]) -> None:
        """Leases that this keeper has granted or renewed."""
        self._held_until.update((key, end) for key, end in held_until.items() if key in self.rows)

    def _drop(self, key: Key, *, keeps_lease: bool = False) -> None:
        if (row := self.rows.pop(key, None)) is not None:
            self.callers[row.caller] -= 1
            if not self.callers[row.caller]:
                del self.callers[row.caller]
            del self._places[key]
            of_log = self._logs[key[0]]
            del of_log[key[1]]
            if not of_log:
                del self._logs[key[0]]
        if not keeps_lease:
            self._held_until.pop(key, None)

    def held_until(self, row: Position) -> float:
        """When the lease of a row with a holder is over."""
        return self._held_until.get(row.key, self.since_s + row.lease_ms / 1000)

    def of_log(self, log: str) -> Mapping[str, Position]:
        """The consumers of a log, by name."""
        return self._logs.get(log, {})

    def oldest(self, count: int, *, slack: int) -> Iterable[Position]:
        """Rows to be written again: the log has more than four times the rows, and `slack`, since the oldest."""
        for row, _ in zip(self.rows.values(), range(count), strict=False):
            if self._written - self._places[row.key][1] <= 4 * len(self.rows) + slack:
                return
            yield row

    def begin(self, end: int) -> int:
        """The offset below which no record counts, of a log that ends at `end`."""
        for key in self.rows:
            return self._places[key][0]
        return end


class Draft:
    """The state with what some requests change, which is no truth yet."""

    def __init__(
        self,
        state: Positions,
        *,
        end: int,
        now_s: float,
        wall_ms: int,
        database_ms: int = 0,
        expiry_ms: int = 0,
    ) -> None:
        """The record goes to the offset `end`. `database_ms`: 0 where the database's time is not known, or in doubt.
        `expiry_ms`: after how long without use a consumer expires, 0: never.
        """
        self._database_ms, self._expiry_ms = database_ms, expiry_ms
        self._state, self._end, self._now_s, self._wall_ms = state, end, now_s, wall_ms
        self._changed: dict[Key, Position | None] = {}
        self._decided: dict[str, Decided] = {}
        self._asked = 0
        self._more: Counter[str] = Counter()
        """Consumers that the requests make, less those that they delete: of all, of a log, of a caller."""
        self.held_until: dict[Key, float] = {}

    @property
    def batch(self) -> Batch:
        """What the requests change."""
        return Batch(
            tuple(row for row in self._changed.values() if row is not None),
            tuple(key for key, row in self._changed.items() if row is None),
            tuple(self._decided.values()),
        )

    def _row(self, key: Key) -> Position | None:
        return self._changed[key] if key in self._changed else self._state.rows.get(key)

    def decide(self, request: Request, stamp: Stamp | None = None) -> Answer:
        """What a request gets, once the record is in the log. A copy of a change that was decided before gets the first
        answer; a copy that may be one, since the answer would be forgotten by now, is refused (rule 32).
        """
        assert self._asked < CHANGES_MAX, "versions are unique"
        self._asked += 1
        if stamp is None:
            return self._answer(request)
        first = self._decided.get(stamp.token) or self._state.decided(stamp.token)
        if first is not None:
            return _again(first, stamp)
        if not self._is_remembered(stamp):
            return _outdated(stamp, self._end)
        answer = self._answer(request)
        assert not isinstance(answer, tuple), "lists are not changes"
        kept = answer.code if isinstance(answer, QuorumLogError) else answer
        self._decided[stamp.token] = Decided(stamp.token, stamp.content, kept)
        return answer

    def _is_remembered(self, stamp: Stamp) -> bool:
        """Whether a change would be remembered if another copy of it had been decided: in a record after the one that
        the first sender knew.
        """
        earliest = (stamp.seen - 1) // CHANGES_MAX + 1
        return stamp.seen > 0 and self._state.known_from <= earliest <= self._end

    def _answer(self, request: Request) -> Answer:
        try:
            match request:
                case List(log, after, limit):
                    return self._list(log, after, limit)
                case FreeLog(log, created):
                    self._free(log, created)
                    return ()
                case Expire():
                    self._expire(request)
                    return ()
                case Commit():
                    return self._commit(request)
                case Acquire():
                    return self._acquire(request)
                case _:
                    row = self._row((request.log, request.consumer))
                    if row is None:
                        raise _missing(request)
                    return self._decide(row, request)
        except QuorumLogError as error:
            return error

    def _decide(self, row: Position, request: Look | Renew | Release | Reset | Delete) -> Position:
        match request:
            case Look():
                return row
            case Renew(created=created, token=token):
                _check_log(row, created)
                _check_token(row, token)
                return self._hold(self._used(row))
            case Release(token=token):
                _check_token(row, token)
                return self._put(replace(row, holder=""))
            case Reset(created=created, offset=offset, version=version):
                _check_version(row, version)
                version = self._version
                fenced = replace(row, created=created, offset=offset, token=version, holder="")
                return self._put(replace(fenced, committed_ms=self._wall_ms))
            case Delete(version=version):
                _check_version(row, version)
                self._check_free(row)
                self._forget(row)
                return row

    def _free(self, log: str, created: str) -> None:
        for row in self._of_log(log).values():
            if row.created == created:
                self._forget(row)

    def _expire(self, request: Expire) -> None:
        row = self._row((request.log, request.consumer))
        grace_s = min(GRACE_S, self._expiry_ms / 1000)
        if row is None or self._now_s < self._state.since_s + grace_s:
            return
        if (row.holder and self._now_s < self._held_until(row)) or not row.used_ms:
            self._put(row)
        elif self._database_ms - row.used_ms >= self._expiry_ms > 0:
            self._forget(row)

    def _forget(self, row: Position) -> None:
        self._changed[row.key] = None
        self._count(row, -1)

    def _count(self, row: Position, more: int) -> None:
        for what in ("all", f"log {row.log}", f"caller {row.caller}"):
            self._more[what] += more

    def _list(self, log: str, after: str, limit: int) -> tuple[Position, ...]:
        if log:
            known = self._of_log(log)
            names = sorted(name for name in known if name > after)
            return tuple(known[name] for name in names[:limit])
        rows = {**self._state.rows, **self._changed}
        first = tuple(after.split("/"))
        keys = nsmallest(limit, (key for key, row in rows.items() if row and key > first))
        return tuple(row for key in keys if (row := rows[key]))

    def _of_log(self, log: str) -> Mapping[str, Position]:
        known = dict(self._state.of_log(log))
        for (name, consumer), row in self._changed.items():
            if name == log:
                known.pop(consumer, None)
                if row is not None:
                    known[consumer] = row
        return known

    def _commit(self, request: Commit) -> Position:
        row = self._row((request.log, request.consumer))
        if row is None:
            if not request.is_new:
                raise _missing(request)
            return self._new(request, committed_ms=self._wall_ms)
        if request.is_new:
            raise _conflict(row)
        _check_log(row, request.created)
        if request.token is not None:
            _check_token(row, request.token)
        else:
            self._check_free(row)
        _check_version(row, request.version)
        if request.offset < row.offset:
            raise PositionBehind(
                f"the position is {row.offset}, and goes back by a reset only",
                log=row.log,
                consumer=row.consumer,
                offset=row.offset,
            )
        moved = row
        if request.token is None:
            moved = replace(moved, holder="")  # one whose lease is over must not go on
        if moved != row or request.offset > row.offset:
            moved = self._put(replace(moved, offset=request.offset, committed_ms=self._wall_ms))
        else:
            moved = self._used(moved)
        return moved if request.token is None else self._hold(moved)

    def _acquire(self, request: Acquire) -> Position:
        row = self._row((request.log, request.consumer))
        if row is not None:
            _check_log(row, request.created)
            # Two workers with one name must not take the lease from each other for ever.
            if row.holder != request.holder or request.started <= row.started:
                self._check_free(row)
        at = request.offset if row is None else row.offset
        if at < request.first_offset:
            raise OffsetTruncated(
                f"the log begins at {request.first_offset}, and the consumer is at {at}: reset it",
                log=request.log,
                consumer=request.consumer,
                offset=at,
                first_offset=request.first_offset,
            )
        if row is None:
            row = self._new(request)
        held = replace(row, token=self._version, holder=request.holder, lease_ms=request.lease_ms)
        return self._hold(self._put(replace(held, started=request.started)))

    def _new(self, request: Commit | Acquire, committed_ms: int = 0) -> Position:
        row = Position(
            request.log,
            request.consumer,
            request.created,
            request.offset,
            self._version,
            committed_ms=committed_ms,
            caller=request.caller,
        )
        self._check_room(row)
        self._count(row, 1)
        return self._put(row)

    def _check_room(self, row: Position) -> None:
        state, more = self._state, self._more
        of_log = len(state.of_log(row.log)) + more[f"log {row.log}"]
        of_caller = (state.callers[row.caller] + more[f"caller {row.caller}"]) * bool(row.caller)
        for count, bound, whose in (
            (len(state.rows) + more["all"], CONSUMERS_MAX, "the cluster has"),
            (of_log, LOG_CONSUMERS_MAX, f"the log {row.log} has"),
            (of_caller, CALLER_CONSUMERS_MAX, "this token's bearer has made"),
        ):
            if count >= bound:
                raise TooManyConsumers(f"{whose} {bound} consumers: delete some", log=row.log)

    @property
    def _version(self) -> int:
        return self._end * CHANGES_MAX + self._asked

    def _put(self, row: Position) -> Position:
        row = replace(row, version=self._version, used_ms=self._database_ms)
        self._changed[row.key] = row
        return row

    def _used(self, row: Position) -> Position:
        """The row, written once more where the last use that it has is another one than this."""
        step_ms = min(USE_STEP_MS, self._expiry_ms // 4 or USE_STEP_MS)
        return self._put(row) if abs(self._database_ms - row.used_ms) > step_ms else row

    def _held_until(self, row: Position) -> float:
        return self.held_until.get(row.key, self._state.held_until(row))

    def _hold(self, row: Position) -> Position:
        self.held_until[row.key] = self._now_s + row.lease_ms / 1000
        return row

    def _check_free(self, row: Position) -> None:
        """Raise LeaseHeld while somebody holds the lease."""
        until_s = self._held_until(row)
        if row.holder and self._now_s < until_s:
            left_ms = max(1, round((until_s - self._now_s) * 1000))
            raise LeaseHeld(
                f"{row.holder} holds the lease for another {left_ms} ms, unless it renews it",
                log=row.log,
                consumer=row.consumer,
                holder=row.holder,
                expires_in_ms=left_ms,
            )


def _again(first: Decided, stamp: Stamp) -> Position | QuorumLogError:
    """What a copy of a change gets that was decided."""
    if first.content != stamp.content:
        detail = "is the key of another request: a request has a key of its own"
        return InvalidRequest(
            detail, errors=[{"pointer": "/header/Idempotency-Key", "detail": detail}]
        )
    if isinstance(first.answer, str):
        return by_code(first.answer)("the request was refused, as the first copy of it was")
    return first.answer


def _outdated(stamp: Stamp, end: int) -> RequestOutdated:
    """The refusal of a change of which another copy may have been decided. No copy that knew no version ever was."""
    version = end * CHANGES_MAX + 1
    if not stamp.seen:
        detail = (
            f"send this request again with Consumers-Version: {version}, the same in all retries"
        )
        return RequestOutdated(detail, outcome=NOT_DONE, version=version)
    detail = "more changes were made since than are remembered: look whether this one was made"
    return RequestOutdated(detail, outcome=UNKNOWN, version=version)


def _check_log(row: Position, created: str) -> None:
    if row.created != created:
        raise LogReplaced(
            f"the position is one of a log {row.log} that was deleted; the log of this name is another one: reset it",
            log=row.log,
            consumer=row.consumer,
        )


def _check_token(row: Position, token: int) -> None:
    if token != row.token or not row.holder:
        raise LeaseLost(
            f"the last fencing token is {row.token}, held by {row.holder or 'nobody'}",
            log=row.log,
            consumer=row.consumer,
            fencing_token=row.token,
        )


def _check_version(row: Position, version: int | None) -> None:
    if version is not None and version != row.version:
        raise _conflict(row)


def _missing(request: Look | Commit | Renew | Release | Reset | Delete) -> NoSuchConsumer:
    return NoSuchConsumer(
        f"the log {request.log} has no consumer {request.consumer}",
        log=request.log,
        consumer=request.consumer,
    )


def _conflict(row: Position) -> VersionConflict:
    return VersionConflict(
        f"the consumer's version is {row.version}",
        log=row.log,
        consumer=row.consumer,
        current={"offset": row.offset, "version": row.version},
    )
