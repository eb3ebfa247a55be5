"""The offset store: decides requests about consumers or queues, in batches of one log record each.

    IDLE -> READING -> IDLE        read the log at first, or records of other gateways
    IDLE -> APPENDING -> IDLE      append a batch exactly where the store has read the log's end
    APPENDING -> READING           another gateway appended: read, and decide again
    READING -> PAUSING -> READING  another gateway's append can't be read yet

An append succeeds only if the log still ends where this store has read its end. So a store that was
overtaken, because it hung or lost the log, decides nothing. An append of unknown outcome does no
harm: if it succeeded, the next append fails; if not, the next append prevents it from succeeding
later. If a store was overtaken and its process does not own the log, the store hands all requests
back (rule 32), because the owner may have decided other copies of these requests.

The store waits for one append, read or pause at a time. It answers requests only after an
acknowledged append, so no answer depends on memory alone.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from quorumlog.errors import NOT_DONE, EntryUnavailable, NotTheOwner, QuorumLogError
from quorumlog.protocol.positions import Positions
from quorumlog.protocol.rows import Batch, Rows, Stamp

_CARRIED: Final = 64
"""Minimum number of old rows that an append writes again if the log is long."""
_SLACK: Final = 10_000
"""Rows and records that the log may have beyond four times the number of current rows."""
_TRUNCATE_EVERY: Final = 1000
"""Number of unneeded records after which the log is truncated. Only whole ledgers are dropped."""
_KEPT_RECORDS: Final = 10_000
"""Number of newest records that stay in the log: their tokens identify retries (rule 32)."""
_SLACK_CHARS: Final = 64 << 20
"""Characters that the log may have beyond four times the characters of the current rows. Matters
only for large rows, such as rows of queues."""
_TRUNCATE_CHARS: Final = 16 << 20
"""Characters of new rows after which the log is truncated, even if few records are unneeded."""
_KEPT_CHARS: Final = 64 << 20
"""Maximum characters of records that stay in the log for their tokens. Chosen by judgement."""
_TRIES: Final = 20
"""Maximum tries to decide a request. A try fails if another gateway appends first."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request has arrived. `key` identifies the request to the driver."""

    key: Any
    request: Any
    stamp: Stamp | None = None
    """The stamp of a change (`counts_once`)."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """Requests that arrived together and share an append."""

    requests: tuple[Asked, ...]


@dataclass(frozen=True, slots=True)
class Appended:
    """The batch is in the log, at the expected end."""


@dataclass(frozen=True, slots=True)
class Overtaken:
    """The log did not end at the expected offset, so nothing was appended."""

    is_owner: bool = False
    """Whether this process owns the log now."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The append or the read failed. The outcome of an append may be unknown."""

    error: QuorumLogError


@dataclass(frozen=True, slots=True)
class BatchesRead:
    """Batches of the log up to `next`, where more may follow. If empty, the log ends at `next`."""

    batches: tuple[tuple[int, Batch[Any]], ...]
    next: int


@dataclass(frozen=True, slots=True)
class Truncated:
    """The offset to read from was truncated, so the store reads from the log's beginning."""


@dataclass(frozen=True, slots=True)
class Paused:
    """The pause has ended."""


Event = Asked | Gathered | Appended | Overtaken | Failed | BatchesRead | Truncated | Paused


@dataclass(frozen=True, slots=True)
class AppendBatch:
    """Append a record if the log ends at `expect`. Answered by Appended, Overtaken or Failed."""

    expect: int
    batch: Batch[Any]


@dataclass(frozen=True, slots=True)
class ReadLog:
    """Read from `start`; None: the log's beginning. Answered by BatchesRead, Truncated, Failed."""

    start: int | None


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait briefly. Answered by Paused."""


@dataclass(frozen=True, slots=True)
class Reported:
    """The answer to a request."""

    key: Any
    answer: Any


@dataclass(frozen=True, slots=True)
class Truncate:
    """Truncate the log below `before`, because no record there is needed. Not answered."""

    before: int


Effect = AppendBatch | ReadLog | Pause | Reported | Truncate


class Phase(Enum):
    """The event that the store waits for."""

    IDLE = "idle"
    READING = "reading"
    APPENDING = "appending"
    PAUSING = "pausing"


@dataclass(slots=True)
class _Waiting:
    key: Any
    request: Any
    stamp: Stamp | None
    tries: int = 0


class OffsetStore:
    """One gateway's state of one rows log, for example the log of consumers or the log of queues."""

    def __init__(self, expiry_ms: int = 0, kind: Callable[[], Rows[Any]] = Positions) -> None:
        """Start without having read the log. `expiry_ms`: the time without use after which a row
        expires; 0: never. `kind`: creates a state without rows.
        """
        self._expiry_ms, self._kind = expiry_ms, kind
        self.phase = Phase.IDLE
        self.state = kind()
        self.end: int | None = None
        """The offset up to which records were applied; None before the first read."""
        self._queue: deque[_Waiting] = deque()
        self._decided: list[tuple[_Waiting, Any]] = []
        self._batch: Batch[Any] = Batch()
        self._held_until: dict[tuple[str, str], Any] = {}
        self._truncated = 0
        self._truncated_chars = 0
        self._has_read = False
        """Whether an append may follow the current reads without a pause."""
        self._out: list[Effect] = []

    def step(self, event: Event, now_s: float, wall_ms: int, database_ms: int = 0) -> list[Effect]:
        """Process an event and return the effects. `now_s`: a clock that may stand still, but is
        never fast. `database_ms`: the database's time; 0 if unknown or in doubt.
        """
        match event:
            case Asked(key, request, stamp):
                self._queue.append(_Waiting(key, request, stamp))
            case Gathered(requests):
                self._queue.extend(_Waiting(one.key, one.request, one.stamp) for one in requests)
            case Appended():
                self._appended()
            case Overtaken(is_owner):
                self._overtaken(is_owner=is_owner)
            case Failed(error):
                self._failed(error)
            case BatchesRead(batches, following):
                self._read(batches, following, now_s)
            case Truncated():
                self.state, self.end, self._truncated_chars = self._kind(), None, 0
                self._ask_read()
            case Paused():
                self._ask_read()
        if self.phase is Phase.IDLE and self._queue:
            if self.end is None:
                self._has_read = True
                self._ask_read()
            else:
                self._append(self.end, now_s, wall_ms, database_ms)
        out, self._out = self._out, []
        return out

    def _ask_read(self) -> None:
        self.phase = Phase.READING
        self._out.append(ReadLog(self.end))

    def _append(self, end: int, now_s: float, wall_ms: int, database_ms: int) -> None:
        draft = self.state.draft(
            end=end,
            now_s=now_s,
            wall_ms=wall_ms,
            database_ms=database_ms,
            expiry_ms=self._expiry_ms,
        )
        while self._queue and not draft.is_full:
            waiting = self._queue.popleft()
            self._decided.append((waiting, draft.decide(waiting.request, waiting.stamp)))
        batch = draft.batch
        changed = {row.key for row in batch.rows} | set(batch.gone)
        carried = [
            row
            for row in self.state.oldest(
                _CARRIED + len(changed), slack=_SLACK, slack_chars=_SLACK_CHARS
            )
            if row.key not in changed
        ]
        self._batch = replace(batch, rows=(*carried, *batch.rows))
        self._held_until = draft.held_until
        self.phase = Phase.APPENDING
        self._out.append(AppendBatch(end, self._batch))

    def _appended(self) -> None:
        assert self.end is not None, "an append must follow a read"
        self.phase = Phase.IDLE
        self.state.fold(self.end, self._batch)
        self.state.hold(self._held_until)
        self.end += 1
        self._out.extend(Reported(waiting.key, answer) for waiting, answer in self._decided)
        self._decided = []
        kept = max(self.end - _KEPT_RECORDS, self.state.kept_from(_KEPT_CHARS))
        begin = min(self.state.begin(self.end), kept)
        is_large = self.state.chars >= self._truncated_chars + _TRUNCATE_CHARS
        if begin >= self._truncated + (1 if is_large else _TRUNCATE_EVERY):
            self._truncated, self._truncated_chars = begin, self.state.chars
            self._out.append(Truncate(begin))

    def _overtaken(self, *, is_owner: bool) -> None:
        if not is_owner:
            self._hand_back()
            return
        for waiting, _ in reversed(self._decided):
            waiting.tries += 1
            if waiting.tries < _TRIES:
                self._queue.appendleft(waiting)
            else:
                busy = EntryUnavailable("other gateways kept changing the log of these rows: retry")
                self._out.append(Reported(waiting.key, busy))
        self._decided = []
        self._has_read = False
        self._ask_read()

    def _hand_back(self) -> None:
        lost = [*(waiting for waiting, _ in self._decided), *self._queue]
        self._decided, self._queue, self.phase = [], deque(), Phase.IDLE
        away = NotTheOwner("another gateway now owns the log that stores these rows: retry")
        self._out.extend(Reported(waiting.key, away) for waiting in lost)

    def _failed(self, error: QuorumLogError) -> None:
        if self.phase is Phase.READING:
            error = error.with_outcome(NOT_DONE)
            lost, self._queue = list(self._queue), deque()
        else:
            lost = [waiting for waiting, _ in self._decided]
            self._decided = []
        self.phase = Phase.IDLE
        self._out.extend(Reported(waiting.key, error) for waiting in lost)

    def _read(
        self, batches: tuple[tuple[int, Batch[Any]], ...], following: int, now_s: float
    ) -> None:
        for offset, batch in batches:
            self.state.fold(offset, batch)
        self.state.reach(following)
        is_first, self.end = self.end is None, following
        if batches or is_first:
            self.state.learned(now_s)
        if batches:
            self._has_read = True
            self._ask_read()
        elif self._has_read:
            self.phase = Phase.IDLE
        else:
            self._has_read = True  # one pause is enough, as the next append checks the log's end
            self.phase = Phase.PAUSING
            self._out.append(Pause())
