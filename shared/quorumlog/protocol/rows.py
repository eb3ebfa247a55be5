"""Rows that are stored as records of one of the cluster's own logs, and the requests on these rows.

The state is a fold over the log: the last row of each key counts. Requests are decided on
a draft. Their changes count once the draft's batch is in the log (`offset_store.py`). A version
contains the change's offset in the log, so versions always grow, even after a deletion.
`positions.py` defines the rows of consumers, and `queues.py` the rows of work queues.
"""

from abc import abstractmethod
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

from quorumlog.errors import (
    NOT_DONE,
    UNKNOWN,
    InvalidRequest,
    QuorumLogError,
    RequestOutdated,
    VersionConflict,
    by_code,
)

CHANGES_MAX: Final = 1024
"""Maximum requests of one batch. A version is the batch's offset times this number, plus the index
of the change in the batch."""
REMEMBERED_MAX: Final = 20_000
"""Maximum remembered tokens of changes (rule 32), which take some megabytes. Chosen by judgement."""

_CARRIED_CHARS: Final = 1 << 20
"""Characters of old rows that one append writes again. Chosen by judgement."""

Key = tuple[str, str]
"""(log, consumer) or (log, queue)"""


class Row(Protocol):
    """The whole state of one consumer or queue."""

    @property
    def key(self) -> Key:
        """The log, and the row's name within the log."""

    @property
    def created(self) -> str:
        """The log's creation time, which distinguishes the log from later namesakes."""


R = TypeVar("R", bound=Row)


@dataclass(frozen=True, slots=True)
class List:
    """List a log's rows, sorted by name. Answer: a tuple of at most `limit` rows."""

    log: str
    """The log. If empty, consumers of all logs are listed, and `after` is `log/consumer`."""
    after: str
    limit: int


@dataclass(frozen=True, slots=True)
class FreeLog:
    """Delete the rows of a deleted log (rule 32a). Answer: an empty tuple."""

    log: str
    created: str


@dataclass(frozen=True, slots=True)
class Stamp:
    """Identifies all copies of one change, so that at most one copy is ever performed (rule 32)."""

    token: str
    """A random token that the first sender of the change created."""
    content: str = ""
    """A digest of the request. Using one token for requests with different digests is an error."""
    seen: int = 0
    """A version that the sender had read before it sent the first copy; 0 if it had read none."""


@dataclass(frozen=True, slots=True)
class Decided(Generic[R]):
    """The decision about the change with this token. `answer` is the change's result
    (`Rows.remembered`), or the code of the error with which the change was rejected.
    """

    token: str
    content: str
    answer: R | str


@dataclass(frozen=True, slots=True)
class Batch(Generic[R]):
    """One record of the log: changed rows, keys of deleted rows (`gone`), and decided changes."""

    rows: tuple[R, ...] = ()
    gone: tuple[Key, ...] = ()
    decided: tuple[Decided[R], ...] = ()


@dataclass(frozen=True, slots=True)
class _Place:
    """The place in the log where a row was last written."""

    offset: int
    written: int
    """The number of rows and records in the log before the row."""
    chars: int
    """The number of characters in the log before the row."""
    size: int
    """The row's number of characters."""


class Rows(Generic[R]):
    """All rows that the log contains, and the ends of the leases that the rows grant."""

    noun: ClassVar[str]
    """The kind of row, such as `consumer`. Requests and errors have a field of this name."""
    absent: ClassVar[type[QuorumLogError]]
    """The error for a request about a row that does not exist."""

    def __init__(self) -> None:
        self.rows: OrderedDict[Key, R] = OrderedDict()
        """All rows, ordered by when they were last written, oldest first."""
        self._logs: dict[str, dict[str, R]] = {}
        self._places: dict[Key, _Place] = {}
        self._held_until: dict[Key, Any] = {}
        """For each key, the value that `hold` has received since `since_s`."""
        self.since_s = 0.0
        """The time of the last read of records that another gateway may have written."""
        self._written = 0
        self.chars = 0
        """Characters of all rows that were ever written to the log."""
        self._chars_now = 0
        """Characters of the current rows."""
        self._sized: deque[tuple[int, int]] = deque()
        """The offset of each record with large rows, and `chars` before it, oldest first."""
        self._kept_from = 0
        self._next = 0
        self._decided: dict[str, Decided[R]] = {}
        self._tokens: deque[tuple[int, str]] = deque()
        """Tokens with the offsets of their records, oldest first."""
        self.known_from = 0
        """The tokens of all records at or above this offset are remembered."""

    @abstractmethod
    def draft(
        self, *, end: int, now_s: float, wall_ms: int, database_ms: int = 0, expiry_ms: int = 0
    ) -> "RowDraft[R]":
        """Begin a draft of the batch for the offset `end`. `database_ms`: 0 if the database's time
        is unknown or in doubt. `expiry_ms`: the time until an unused row expires; 0: never.
        """

    def reach(self, offset: int) -> None:
        """Continue with the record at this offset. The tokens of skipped records are unknown."""
        if offset != self._next:
            self._next = self.known_from = offset

    def decided(self, token: str) -> Decided[R] | None:
        """The decision about the change with a token; None if no decision is remembered."""
        return self._decided.get(token)

    def _remember(self, offset: int, batch: Batch[R]) -> None:
        for one in batch.decided:
            self._decided[one.token] = one
            self._tokens.append((offset, one.token))
        while len(self._tokens) > REMEMBERED_MAX:
            oldest, _ = self._tokens[0]
            self.known_from = max(self.known_from, oldest + 1)
            while self._tokens and self._tokens[0][0] == oldest:
                self._decided.pop(self._tokens.popleft()[1], None)

    def fold(self, offset: int, batch: Batch[R]) -> None:
        """Apply the record at an offset."""
        self.reach(offset)
        self._next += 1
        self._remember(offset, batch)
        self._written += 1
        before = self.chars
        for key in batch.gone:
            self._drop(key)
        for row in batch.rows:
            self._drop(row.key, keeps_lease=True)
            self._add(row)
            size = self.size_of(row)
            self._places[row.key] = _Place(offset, self._written, self.chars, size)
            self._written += 1
            self.chars += size
            self._chars_now += size
        if self.chars > before:
            self._sized.append((offset, before))

    def learned(self, now_s: float) -> None:
        """Let all leases begin again now, because records of another gateway were read."""
        self._held_until.clear()
        self.since_s = now_s

    def hold(self, held_until: Mapping[Key, Any]) -> None:
        """Record the ends of leases that this gateway granted or renewed."""
        self._held_until.update((key, end) for key, end in held_until.items() if key in self.rows)

    def _add(self, row: R) -> None:
        self.rows[row.key] = row
        self._logs.setdefault(row.key[0], {})[row.key[1]] = row

    def _drop(self, key: Key, *, keeps_lease: bool = False) -> R | None:
        row = self.rows.pop(key, None)
        if row is not None:
            self._chars_now -= self._places.pop(key).size
            of_log = self._logs[key[0]]
            del of_log[key[1]]
            if not of_log:
                del self._logs[key[0]]
        if not keeps_lease:
            self._held_until.pop(key, None)
        return row

    def of_log(self, log: str) -> Mapping[str, R]:
        """The rows of a log, by name."""
        return self._logs.get(log, {})

    def oldest(self, count: int, *, slack: int, slack_chars: int) -> Iterable[R]:
        """The oldest rows that must be written again, because the log has grown too much since they
        were written. A log may grow by four times the number of rows plus `slack`, and by four
        times the characters of all rows plus `slack_chars`.
        """
        size = 0
        written = self._written - 4 * len(self.rows) - slack
        chars = self.chars - 4 * self._chars_now - slack_chars
        for row, _ in zip(self.rows.values(), range(count), strict=False):
            place = self._places[row.key]
            if (place.written >= written and place.chars >= chars) or size > _CARRIED_CHARS:
                return
            size += place.size
            yield row

    def size_of(self, _row: R) -> int:
        """A rough upper bound of a row's characters; 0 if all rows are short."""
        return 0

    def remembered(self, row: R) -> R:
        """The short form in which the result of a change is remembered."""
        return row

    def begin(self, end: int) -> int:
        """The offset below which no record of the log is needed; without rows, the log's `end`."""
        for key in self.rows:
            return self._places[key].offset
        return end

    def kept_from(self, chars: int) -> int:
        """The lowest offset from which all records together have at most `chars` characters."""
        while self._sized and self.chars - self._sized[0][1] > chars:
            self._kept_from = self._sized.popleft()[0] + 1
        return self._kept_from


class RowDraft(Generic[R]):
    """The state after the changes of a batch, which count once the batch is in the log."""

    def __init__(self, state: Rows[R], *, end: int, now_s: float) -> None:
        """Begin a batch for the offset `end`."""
        self._rows, self._end, self._now_s = state, end, now_s
        self._changed: dict[Key, R | None] = {}
        self._decided: dict[str, Decided[R]] = {}
        self._asked = 0
        self.held_until: dict[Key, Any] = {}
        """The argument for `Rows.hold` after the batch is in the log."""

    @property
    def is_full(self) -> bool:
        """Whether the batch accepts no more requests."""
        return self._asked >= CHANGES_MAX

    @property
    def batch(self) -> Batch[R]:
        """The changes that the decided requests make."""
        return Batch(
            tuple(row for row in self._changed.values() if row is not None),
            tuple(key for key, row in self._changed.items() if row is None),
            tuple(self._decided.values()),
        )

    def _row(self, key: Key) -> R | None:
        return self._changed[key] if key in self._changed else self._rows.rows.get(key)

    def _of_log(self, log: str) -> Mapping[str, R]:
        known = dict(self._rows.of_log(log))
        for (name, within), row in self._changed.items():
            if name == log:
                known.pop(within, None)
                if row is not None:
                    known[within] = row
        return known

    @property
    def _version(self) -> int:
        return self._end * CHANGES_MAX + self._asked

    def decide(self, request: Any, stamp: Stamp | None = None) -> Any:
        """Decide a request. The answer counts once the batch is in the log. A copy of a decided
        change gets the first answer, or is rejected if the first answer may be forgotten (rule 32).
        """
        assert self._asked < CHANGES_MAX, "a full batch must not get requests"
        self._asked += 1
        if stamp is None:
            return self._answer(request)
        first = self._decided.get(stamp.token) or self._rows.decided(stamp.token)
        if first is not None:
            return _again(first, stamp)
        if not self._is_remembered(stamp):
            return _outdated(stamp, self._end)
        answer = self._answer(request)
        assert not isinstance(answer, tuple), "a request for a list must not have a stamp"
        is_error = isinstance(answer, QuorumLogError)
        kept = answer.code if is_error else self._rows.remembered(answer)
        self._decided[stamp.token] = Decided(stamp.token, stamp.content, kept)
        return answer

    def _answer(self, request: Any) -> Any:
        """Decide a request, ignoring its stamp. Returns errors instead of raising them."""
        try:
            match request:
                case List(log, after, limit):
                    return self._list(log, after, limit)
                case FreeLog(log, created):
                    self._free(log, created)
                    return ()
                case _:
                    return self._perform(request)
        except QuorumLogError as error:
            return error

    @abstractmethod
    def _perform(self, request: Any) -> Any:
        """Decide a request about one row. Raises: the error with which the request is rejected."""

    def _list(self, log: str, after: str, limit: int) -> tuple[R, ...]:
        known = self._of_log(log)
        names = nsmallest(limit, (name for name in known if name > after))
        return tuple(known[name] for name in names)

    def _free(self, log: str, created: str) -> None:
        for row in self._of_log(log).values():
            if row.created == created:
                self._forget(row)

    def _forget(self, row: R) -> None:
        self._changed[row.key] = None

    def _found(self, request: Any) -> R:
        """The row that a request names. Raises: `Rows.absent`."""
        row = self._row((request.log, getattr(request, self._rows.noun)))
        if row is None:
            raise self._missing(request)
        return row

    def _missing(self, request: Any) -> QuorumLogError:
        noun = self._rows.noun
        name = getattr(request, noun)
        detail = f"the log {request.log} has no {noun} {name}"
        return self._rows.absent(detail, log=request.log, **{noun: name})

    def _conflict(self, row: R, version: int, **current: int) -> VersionConflict:
        log, name = row.key
        of_row: dict[str, Any] = {"log": log, self._rows.noun: name}
        detail = f"the {self._rows.noun} now has version {version}: read it, and decide again"
        return VersionConflict(detail, **of_row, current={**current, "version": version})

    def _is_remembered(self, stamp: Stamp) -> bool:
        """Whether a decision about another copy would be remembered. The decision's record would
        come after the version that the first sender had read.
        """
        earliest = (stamp.seen - 1) // CHANGES_MAX + 1
        return stamp.seen > 0 and self._rows.known_from <= earliest <= self._end


def _again(first: Decided[R], stamp: Stamp) -> R | QuorumLogError:
    """The answer to a copy of a decided change."""
    if first.content != stamp.content:
        detail = "the key was used for another request: give each request its own key"
        return InvalidRequest(
            detail, errors=[{"pointer": "/header/Idempotency-Key", "detail": detail}]
        )
    if isinstance(first.answer, str):
        return by_code(first.answer)("an earlier copy of this request was rejected with this code")
    return first.answer


def _outdated(stamp: Stamp, end: int) -> RequestOutdated:
    """The error for a change that may have been decided. With `seen` 0, the change is new."""
    version = end * CHANGES_MAX + 1
    if not stamp.seen:
        detail = f"Consumers-Version is required: send {version}, also in each retry"
        return RequestOutdated(detail, outcome=NOT_DONE, version=version)
    detail = "the change may have been made, but its record is gone: GET its target to find out"
    return RequestOutdated(detail, outcome=UNKNOWN, version=version)
