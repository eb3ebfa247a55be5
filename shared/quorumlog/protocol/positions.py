"""Decides requests about consumers: their committed offsets and leases (ADR 37).

Consumers are rows of the log of committed offsets (`rows.py`). The version of the change that
granted a lease is the lease's fencing token.

Invariants (checked by the simulation in tests/model/positions):
  - only a reset, which raises the token, moves a committed offset back;
  - a commit with a token counts only while no higher token was granted, whatever any clock says;
  - a held lease is granted to another holder only after the owner was awake for a whole lease
    without a request from the lease's holder.
"""

from collections import Counter
from dataclasses import dataclass, replace
from heapq import nsmallest
from typing import Final

from quorumlog.errors import (
    LeaseHeld,
    LeaseLost,
    LogReplaced,
    NoSuchConsumer,
    OffsetTruncated,
    PositionBehind,
    QuorumLogError,
    TooManyConsumers,
)
from quorumlog.protocol.rows import FreeLog, Key, List, RowDraft, Rows

CONSUMERS_MAX: Final = 50_000
"""Maximum consumers of all logs, which the owner keeps in memory. Chosen by judgement."""
LOG_CONSUMERS_MAX: Final = 20_000
"""Maximum consumers of one log, which leaves room for other logs. Chosen by judgement."""
CALLER_CONSUMERS_MAX: Final = 20_000
"""Maximum consumers created by one caller, if tokens are required. Chosen by judgement."""

USE_STEP_MS: Final = 86_400_000
"""A request that changes nothing but the time of use is stored only if the stored time is off by
more than this step, or by more than a quarter of the expiry time."""

GRACE_S: Final = 3600.0
"""Time for which no consumer expires after the offset store has read the log, so that users can
return after an outage. The expiry time counts instead if it is shorter. Chosen by judgement."""


@dataclass(frozen=True, slots=True)
class Position:
    """A consumer's committed offset and lease. `offset`: the first unprocessed record."""

    log: str
    consumer: str
    created: str
    """The log's creation time, which distinguishes the log from later namesakes."""
    offset: int
    version: int
    token: int = 0
    """The highest fencing token that was granted; 0 before the first lease."""
    holder: str = ""
    """The holder of the newest lease, even if the lease has expired; empty if there is none."""
    lease_ms: int = 0
    committed_ms: int = 0
    """The time of the commit, by the clock of the gateway that decided it. Only for display."""
    used_ms: int = 0
    """The database's time at the last use, within `USE_STEP_MS`; 0 if that time was unknown."""
    caller: str = ""
    """The caller that created the consumer; empty if no access tokens are required."""
    started: int = 0
    """The start time of the holder (`Acquire.started`)."""

    @property
    def key(self) -> Key:
        """The log and the consumer."""
        return self.log, self.consumer


@dataclass(frozen=True, slots=True)
class Look:
    """Return one consumer. Answered by Position."""

    log: str
    consumer: str


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
    """Acquire the lease. A new consumer begins at `offset`. While the lease is held, only a worker
    with the same `holder` name and a later start gets the lease.
    """

    log: str
    consumer: str
    created: str
    holder: str
    lease_ms: int
    offset: int
    first_offset: int
    """The log's first offset, below which records were dropped."""
    caller: str = ""
    started: int = 0
    """The worker's start time, in any unit; 0 if unknown."""


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
    """Set the committed offset, and bind the consumer to the current log of this name. Ends the
    lease and makes its fencing token invalid.
    """

    log: str
    consumer: str
    created: str
    offset: int
    version: int | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the consumer. Answered by its last Position."""

    log: str
    consumer: str
    version: int | None = None


@dataclass(frozen=True, slots=True)
class Expire:
    """Delete a consumer that was unused for the expiry time. A consumer with a held lease or an
    unknown last use counts as used now. Answered by an empty tuple.
    """

    log: str
    consumer: str


_OfOne = Look | Commit | Acquire | Renew | Release | Reset | Delete | Expire
Request = _OfOne | List | FreeLog
Answer = Position | tuple[Position, ...] | QuorumLogError


def counts_once(request: Request) -> bool:
    """Whether a request needs a `Stamp`. Requests by fencing token need no stamp, because they are
    rejected once another worker has the lease, and a commit moves an offset only forwards.
    """
    if isinstance(request, Commit):
        return request.token is None
    return isinstance(request, Acquire | Release | Reset | Delete)


class Positions(Rows[Position]):
    """All consumers that the log of committed offsets contains, and the ends of their leases."""

    noun, absent = "consumer", NoSuchConsumer

    def __init__(self) -> None:
        super().__init__()
        self.callers: Counter[str] = Counter()
        """The number of consumers that each caller has created."""

    def draft(
        self, *, end: int, now_s: float, wall_ms: int, database_ms: int = 0, expiry_ms: int = 0
    ) -> "Draft":
        """Begin a draft of the batch for the offset `end`. See `Draft` for the times."""
        return Draft(
            self,
            end=end,
            now_s=now_s,
            wall_ms=wall_ms,
            database_ms=database_ms,
            expiry_ms=expiry_ms,
        )

    def _add(self, row: Position) -> None:
        super()._add(row)
        self.callers[row.caller] += 1

    def _drop(self, key: Key, *, keeps_lease: bool = False) -> Position | None:
        row = super()._drop(key, keeps_lease=keeps_lease)
        if row is not None:
            self.callers[row.caller] -= 1
            if not self.callers[row.caller]:
                del self.callers[row.caller]
        return row

    def held_until(self, row: Position) -> float:
        """The time when a consumer's lease ends, in seconds of time awake."""
        end: float = self._held_until.get(row.key, self.since_s + row.lease_ms / 1000)
        return end


class Draft(RowDraft[Position]):
    """The consumers after the changes of a batch, which count once the batch is in the log."""

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
        """Begin a batch for the offset `end`. `database_ms`: 0 if the database's time is unknown or
        in doubt. `expiry_ms`: the time without use after which a consumer expires; 0: never.
        """
        super().__init__(state, end=end, now_s=now_s)
        self._state, self._wall_ms = state, wall_ms
        self._database_ms, self._expiry_ms = database_ms, expiry_ms
        self._more: Counter[str] = Counter()
        """Created minus deleted consumers of this batch: in total, by log and by caller."""

    def _perform(self, request: _OfOne) -> Answer:
        match request:
            case Expire():
                self._expire(request)
                return ()
            case Commit():
                return self._commit(request)
            case Acquire():
                return self._acquire(request)
            case _:
                return self._decide(self._found(request), request)

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
                self._check_version(row, version)
                version = self._version
                fenced = replace(row, created=created, offset=offset, token=version, holder="")
                return self._put(replace(fenced, committed_ms=self._wall_ms))
            case Delete(version=version):
                self._check_version(row, version)
                self._check_free(row)
                self._forget(row)
                return row

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
        super()._forget(row)
        self._count(row, -1)

    def _count(self, row: Position, more: int) -> None:
        for what in ("all", f"log {row.log}", f"caller {row.caller}"):
            self._more[what] += more

    def _list(self, log: str, after: str, limit: int) -> tuple[Position, ...]:
        if log:
            return super()._list(log, after, limit)
        rows = {**self._state.rows, **self._changed}
        first = tuple(after.split("/"))
        keys = nsmallest(limit, (key for key, row in rows.items() if row and key > first))
        return tuple(row for key in keys if (row := rows[key]))

    def _commit(self, request: Commit) -> Position:
        row = self._row((request.log, request.consumer))
        if row is None:
            if not request.is_new:
                raise self._missing(request)
            return self._new(request, committed_ms=self._wall_ms)
        if request.is_new:
            raise self._conflict(row, row.version, offset=row.offset)
        _check_log(row, request.created)
        if request.token is not None:
            _check_token(row, request.token)
        else:
            self._check_free(row)
        self._check_version(row, request.version)
        if request.offset < row.offset:
            raise PositionBehind(
                f"offset {request.offset} is below the committed {row.offset}: reset the consumer",
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
            # Two workers with one name must not take the lease from each other for ever.
            if row.holder != request.holder or request.started <= row.started:
                self._check_free(row)
        at = request.offset if row is None else row.offset
        if at < request.first_offset:
            raise OffsetTruncated(
                f"records {at} to {request.first_offset - 1} were truncated: reset the consumer",
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
            (of_caller, CALLER_CONSUMERS_MAX, "this caller has created"),
        ):
            if count >= bound:
                detail = f"{whose} {bound} consumers, the maximum: delete some"
                raise TooManyConsumers(detail, log=row.log)

    def _put(self, row: Position) -> Position:
        row = replace(row, version=self._version, used_ms=self._database_ms)
        self._changed[row.key] = row
        return row

    def _used(self, row: Position) -> Position:
        """Return the consumer, with the present time of use if the stored one is off by a step."""
        step_ms = min(USE_STEP_MS, self._expiry_ms // 4 or USE_STEP_MS)
        return self._put(row) if abs(self._database_ms - row.used_ms) > step_ms else row

    def _check_version(self, row: Position, version: int | None) -> None:
        if version is not None and version != row.version:
            raise self._conflict(row, row.version, offset=row.offset)

    def _held_until(self, row: Position) -> float:
        end: float = self.held_until.get(row.key, self._state.held_until(row))
        return end

    def _hold(self, row: Position) -> Position:
        self.held_until[row.key] = self._now_s + row.lease_ms / 1000
        return row

    def _check_free(self, row: Position) -> None:
        """Raise LeaseHeld while the lease is held."""
        until_s = self._held_until(row)
        if row.holder and self._now_s < until_s:
            left_ms = max(1, round((until_s - self._now_s) * 1000))
            raise LeaseHeld(
                f"{row.holder} holds the lease for {left_ms} ms, or longer if renewed: retry later",
                log=row.log,
                consumer=row.consumer,
                holder=row.holder,
                expires_in_ms=left_ms,
            )


def _check_log(row: Position, created: str) -> None:
    if row.created != created:
        raise LogReplaced(
            f"the committed offset belongs to a deleted log {row.log}: reset the consumer",
            log=row.log,
            consumer=row.consumer,
        )


def _check_token(row: Position, token: int) -> None:
    if token != row.token or not row.holder:
        raise LeaseLost(
            f"fencing token {token} is no longer valid (the last is {row.token}, held by "
            f"{row.holder or 'no worker'}): acquire the lease again",
            log=row.log,
            consumer=row.consumer,
            fencing_token=row.token,
        )
