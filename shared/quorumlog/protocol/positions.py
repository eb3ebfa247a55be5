"""Committed offsets of consumers, and their leases: the state, and how requests change it (ADR 37).

The state is a fold over the log of committed offsets, where the last record of a consumer counts. A
request is decided on a `Draft`; its changes count once the draft's batch is in the log
(`offset_store.py`). A version is made of its change's offset in the log, so it always grows,
even over a deletion. The version of the change that granted a lease is the lease's fencing token.

Invariants (checked by the simulation in tests/model/positions):
  - only a reset, which raises the token, moves a committed offset back;
  - a commit with a token counts only while no higher token was granted, whatever any clock says;
  - a held lease is granted to another holder only after a whole lease of time awake without a
    request of its holder.
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
"""Maximum consumers of all logs, which the owner holds in memory. Chosen by judgement."""
LOG_CONSUMERS_MAX: Final = 20_000
"""Maximum consumers of one log, so that it leaves room for others. Chosen by judgement."""
CALLER_CONSUMERS_MAX: Final = 20_000
"""Maximum consumers created by one caller, with access tokens. Chosen by judgement."""

CHANGES_MAX: Final = 1024
"""Maximum requests of one batch. A version is the batch's offset times this, plus an index."""

USE_STEP_MS: Final = 86_400_000
"""A use that changes nothing else is stored only if the stored time of use differs by more than
this, or by more than a quarter of the time after which consumers expire."""

GRACE_S: Final = 3600.0
"""No consumer expires until the offset store has known the consumers for so long, or for their
expiry time if that is shorter: users return after an outage. Chosen by judgement."""

REMEMBERED_MAX: Final = 20_000
"""Decided changes whose tokens are remembered (rule 32): some megabytes. Chosen by judgement."""

Key = tuple[str, str]
"""(log, consumer)"""


@dataclass(frozen=True, slots=True)
class Position:
    """A consumer's committed offset and lease. `offset`: the first unprocessed record."""

    log: str
    consumer: str
    created: str
    """The log's creation time: a later log of the same name has another one."""
    offset: int
    version: int
    token: int = 0
    """The highest fencing token that was granted; 0 if none was."""
    holder: str = ""
    """The holder of the lease with that token, even if expired; empty if there is none."""
    lease_ms: int = 0
    committed_ms: int = 0
    """The time of the commit by the clock of the gateway that decided it; only for people."""
    used_ms: int = 0
    """The database's time of the last use, within `USE_STEP_MS`; 0 if it was unknown then."""
    caller: str = ""
    """The caller that created the consumer; empty if no access tokens are required."""
    started: int = 0
    """The start time of the holder (`Acquire.started`)."""

    @property
    def key(self) -> Key:
        """The log and the consumer."""
        return self.log, self.consumer


@dataclass(frozen=True, slots=True)
class Stamp:
    """Identifies all copies of one change, so that at most one copy is ever performed (rule 32)."""

    token: str
    """A random token, made by the first sender of the change."""
    content: str = ""
    """A digest of the request: the same token with another content is an error of the sender."""
    seen: int = 0
    """A version that the sender knew before it sent any copy; 0: it knew none."""


@dataclass(frozen=True, slots=True)
class Decided:
    """The decision about the change with a token: its result, or the code of a refusal."""

    token: str
    content: str
    answer: "Position | str"


@dataclass(frozen=True, slots=True)
class Batch:
    """One record of the log of committed offsets: changed consumers (`rows`), deleted ones
    (`gone`), and decided changes.
    """

    rows: tuple[Position, ...] = ()
    gone: tuple[Key, ...] = ()
    decided: tuple[Decided, ...] = ()


@dataclass(frozen=True, slots=True)
class Look:
    """Return one consumer. Answer: Position."""

    log: str
    consumer: str


@dataclass(frozen=True, slots=True)
class List:
    """List consumers of one or all logs by name. Answer: a tuple of at most `limit` Positions."""

    log: str
    """The log; empty for all logs, and then `after` is `log/consumer`."""
    after: str
    limit: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Commit an offset: by fencing token, by version, or for a new consumer (`is_new`)."""

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
    """Take the lease. A new consumer begins at `offset`. While the lease is held, only a worker
    with the same `holder` name that started later gets it.
    """

    log: str
    consumer: str
    created: str
    holder: str
    lease_ms: int
    offset: int
    first_offset: int
    """The log's first offset: earlier records were dropped."""
    caller: str = ""
    started: int = 0
    """When the worker started, in any unit; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class Renew:
    """Extend the lease by its whole duration from now on."""

    log: str
    consumer: str
    created: str
    token: int


@dataclass(frozen=True, slots=True)
class Release:
    """Release the lease."""

    log: str
    consumer: str
    token: int


@dataclass(frozen=True, slots=True)
class Reset:
    """Set the committed offset, for the present log. Ends the lease, and fences its holder."""

    log: str
    consumer: str
    created: str
    offset: int
    version: int | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the consumer. Answer: its last Position."""

    log: str
    consumer: str
    version: int | None = None


@dataclass(frozen=True, slots=True)
class FreeLog:
    """Delete the consumers of a deleted log (rule 32a). Answer: an empty tuple."""

    log: str
    created: str


@dataclass(frozen=True, slots=True)
class Expire:
    """Delete a consumer that was unused for the expiry time. A consumer with a held lease or an
    unknown last use counts as used now. Answer: an empty tuple.
    """

    log: str
    consumer: str


Request = Look | List | Commit | Acquire | Renew | Release | Reset | Delete | FreeLog | Expire
Answer = Position | tuple[Position, ...] | QuorumLogError


def counts_once(request: Request) -> bool:
    """Whether a request needs a `Stamp`. A commit or renewal by fencing token does not: it is
    rejected once the lease has changed hands, and a commit only moves an offset forwards.
    """
    if isinstance(request, Commit):
        return request.token is None
    return isinstance(request, Acquire | Release | Reset | Delete)


class Positions:
    """All consumers by the log, and how long their leases are held."""

    def __init__(self) -> None:
        self.rows: OrderedDict[Key, Position] = OrderedDict()
        """All consumers, ordered by when they were last written, oldest first."""
        self._logs: dict[str, dict[str, Position]] = {}
        self.callers: Counter[str] = Counter()
        """How many consumers each caller has created."""
        self._places: dict[Key, tuple[int, int]] = {}
        """By consumer, its last record's offset, and how many rows and records were before it."""
        self._held_until: dict[Key, float] = {}
        """Ends of leases that were granted or renewed here since `since_s`."""
        self.since_s = 0.0
        """When records that another gateway may have written were last read."""
        self._written = 0
        self._next = 0
        self._decided: dict[str, Decided] = {}
        self._tokens: deque[tuple[int, str]] = deque()
        """Tokens with the offsets of their records, oldest first."""
        self.known_from = 0
        """The offset from which on the tokens of all records are remembered."""

    def reach(self, offset: int) -> None:
        """Continue at this offset. Tokens of skipped records are unknown."""
        if offset != self._next:
            self._next = self.known_from = offset

    def decided(self, token: str) -> Decided | None:
        """The decision about the change with a token; None if not remembered."""
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
        """Apply the record at an offset."""
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
        """Note that records were read: another gateway may have granted whole leases until now."""
        self._held_until.clear()
        self.since_s = now_s

    def hold(self, held_until: Mapping[Key, float]) -> None:
        """Note the ends of leases that were granted or renewed here."""
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
        """When a consumer's lease ends, in seconds of time awake."""
        return self._held_until.get(row.key, self.since_s + row.lease_ms / 1000)

    def of_log(self, log: str) -> Mapping[str, Position]:
        """The consumers of a log, by name."""
        return self._logs.get(log, {})

    def oldest(self, count: int, *, slack: int) -> Iterable[Position]:
        """The oldest rows, to be written again once the log has grown by over four times the number
        of rows, plus `slack`, since them.
        """
        for row, _ in zip(self.rows.values(), range(count), strict=False):
            if self._written - self._places[row.key][1] <= 4 * len(self.rows) + slack:
                return
            yield row

    def begin(self, end: int) -> int:
        """The offset below which no record is needed, of a log that ends at `end`."""
        for key in self.rows:
            return self._places[key][0]
        return end


class Draft:
    """The state with the changes of some requests, which count once they are in the log."""

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
        """The batch is for the offset `end`. `database_ms`: 0 if the database's time is unknown or
        in doubt. `expiry_ms`: the time without use after which a consumer expires; 0: never.
        """
        self._database_ms, self._expiry_ms = database_ms, expiry_ms
        self._state, self._end, self._now_s, self._wall_ms = state, end, now_s, wall_ms
        self._changed: dict[Key, Position | None] = {}
        self._decided: dict[str, Decided] = {}
        self._asked = 0
        self._more: Counter[str] = Counter()
        """Consumers created minus deleted by the requests: of all logs, of a log, of a caller."""
        self.held_until: dict[Key, float] = {}

    @property
    def batch(self) -> Batch:
        """The changes of the requests."""
        return Batch(
            tuple(row for row in self._changed.values() if row is not None),
            tuple(key for key, row in self._changed.items() if row is None),
            tuple(self._decided.values()),
        )

    def _row(self, key: Key) -> Position | None:
        return self._changed[key] if key in self._changed else self._state.rows.get(key)

    def decide(self, request: Request, stamp: Stamp | None = None) -> Answer:
        """Decide a request; the answer counts once the batch is in the log. A copy of a decided
        change gets the first answer, or is rejected if that may be forgotten (rule 32).
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
        """Whether a decision about another copy would be remembered: it would be in a record after
        the version that the first sender knew.
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
                f"the committed offset is {row.offset}, and only a reset moves it back",
                log=row.log,
                consumer=row.consumer,
                offset=row.offset,
            )
        moved = row
        if request.token is None:
            moved = replace(moved, holder="")  # a holder whose lease has ended must not continue
        if moved != row or request.offset > row.offset:
            moved = self._put(replace(moved, offset=request.offset, committed_ms=self._wall_ms))
        else:
            moved = self._used(moved)
        return moved if request.token is None else self._hold(moved)

    def _acquire(self, request: Acquire) -> Position:
        row = self._row((request.log, request.consumer))
        if row is not None:
            _check_log(row, request.created)
            # Two workers with one name must not take the lease from each other without end.
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
        """Return the consumer; its time of use is updated if it is off by more than a step."""
        step_ms = min(USE_STEP_MS, self._expiry_ms // 4 or USE_STEP_MS)
        return self._put(row) if abs(self._database_ms - row.used_ms) > step_ms else row

    def _held_until(self, row: Position) -> float:
        return self.held_until.get(row.key, self._state.held_until(row))

    def _hold(self, row: Position) -> Position:
        self.held_until[row.key] = self._now_s + row.lease_ms / 1000
        return row

    def _check_free(self, row: Position) -> None:
        """Raise LeaseHeld while the lease is held."""
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
    """The answer to a copy of a decided change."""
    if first.content != stamp.content:
        detail = "is the key of another request: give each request its own key"
        return InvalidRequest(
            detail, errors=[{"pointer": "/header/Idempotency-Key", "detail": detail}]
        )
    if isinstance(first.answer, str):
        return by_code(first.answer)("the request was rejected, like its first copy")
    return first.answer


def _outdated(stamp: Stamp, end: int) -> RequestOutdated:
    """The rejection of a change of which a copy may have been decided; none was if `seen` is 0."""
    version = end * CHANGES_MAX + 1
    if not stamp.seen:
        detail = (
            f"send this request again with Consumers-Version: {version}, the same in all retries"
        )
        return RequestOutdated(detail, outcome=NOT_DONE, version=version)
    detail = "too many changes were made since to know whether this one was: read the consumer to find out"
    return RequestOutdated(detail, outcome=UNKNOWN, version=version)


def _check_log(row: Position, created: str) -> None:
    if row.created != created:
        raise LogReplaced(
            f"the committed offset is of an earlier log {row.log}, which was deleted: reset the consumer",
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
