"""Rows in one of the cluster's own logs: the state that records define, and how requests change it.

The state is a fold over the log, where the last row of a key counts. A request is decided on a
draft; its changes count once the draft's batch is in the log (`offset_store.py`). A version is made
of its change's offset in the log, so it always grows, even over a deletion. `positions.py` has the
rows of consumers, and `queues.py` those of work queues.
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
"""Maximum requests of one batch. A version is the batch's offset times this, plus an index."""
REMEMBERED_MAX: Final = 20_000
"""Decided changes whose tokens are remembered (rule 32): some megabytes. Chosen by judgement."""

_CARRIED_CHARS: Final = 1 << 20
"""Characters of old rows that one append writes again; chosen by judgement."""

Key = tuple[str, str]
"""(log, consumer) or (log, queue)"""


class Row(Protocol):
    """The whole state of one consumer or queue."""

    @property
    def key(self) -> Key:
        """The log, and the name within it."""

    @property
    def created(self) -> str:
        """The log's creation time: a later log of the same name has another one."""


R = TypeVar("R", bound=Row)


@dataclass(frozen=True, slots=True)
class List:
    """List rows by name. Answer: a tuple of at most `limit` rows."""

    log: str
    """The log; for consumers empty for all logs, and then `after` is `log/consumer`."""
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
    """A random token, made by the first sender of the change."""
    content: str = ""
    """A digest of the request: the same token with another content is an error of the sender."""
    seen: int = 0
    """A version that the sender knew before it sent any copy; 0: it knew none."""


@dataclass(frozen=True, slots=True)
class Decided(Generic[R]):
    """The decision about the change with a token: its result (`Rows.remembered`), or the code of a
    refusal.
    """

    token: str
    content: str
    answer: R | str


@dataclass(frozen=True, slots=True)
class Batch(Generic[R]):
    """One record of the log: changed rows, keys of deleted ones (`gone`), and decided changes."""

    rows: tuple[R, ...] = ()
    gone: tuple[Key, ...] = ()
    decided: tuple[Decided[R], ...] = ()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a row was last written."""

    offset: int
    written: int
    """How many rows and records were before it."""
    chars: int
    """How many characters were before it."""
    size: int
    """Its characters."""


class Rows(Generic[R]):
    """All rows according to the log, and when the leases that they grant end."""

    noun: ClassVar[str]
    """What a row is: the name of its field in requests and errors."""
    absent: ClassVar[type[QuorumLogError]]
    """The error of a request about a row that does not exist."""

    def __init__(self) -> None:
        self.rows: OrderedDict[Key, R] = OrderedDict()
        """All rows, ordered by when they were last written, oldest first."""
        self._logs: dict[str, dict[str, R]] = {}
        self._places: dict[Key, _Place] = {}
        self._held_until: dict[Key, Any] = {}
        """By key, what `hold` was given since `since_s`."""
        self.since_s = 0.0
        """When records that another gateway may have written were last read."""
        self._written = 0
        self.chars = 0
        """Characters of all rows that were written."""
        self._chars_now = 0
        """Characters of the rows."""
        self._sized: deque[tuple[int, int]] = deque()
        """Records with characters, oldest first: the offset, and the characters before it."""
        self._kept_from = 0
        self._next = 0
        self._decided: dict[str, Decided[R]] = {}
        self._tokens: deque[tuple[int, str]] = deque()
        """Tokens with the offsets of their records, oldest first."""
        self.known_from = 0
        """The offset from which on the tokens of all records are remembered."""

    @abstractmethod
    def draft(
        self, *, end: int, now_s: float, wall_ms: int, database_ms: int = 0, expiry_ms: int = 0
    ) -> "RowDraft[R]":
        """A draft of the batch for the offset `end`. `database_ms`: 0 if the database's time is
        unknown or in doubt. `expiry_ms`: the time without use after which a row expires; 0: never.
        """

    def reach(self, offset: int) -> None:
        """Continue at this offset. Tokens of skipped records are unknown."""
        if offset != self._next:
            self._next = self.known_from = offset

    def decided(self, token: str) -> Decided[R] | None:
        """The decision about the change with a token; None if it is not remembered."""
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
        """Note that records were read: another gateway may have granted whole leases until now."""
        self._held_until.clear()
        self.since_s = now_s

    def hold(self, held_until: Mapping[Key, Any]) -> None:
        """Note the ends of leases that were granted or renewed here."""
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
        """The oldest rows that must be written again, because since then the log has grown by over
        four times the number of rows, plus `slack`, or by over four times their characters, plus
        `slack_chars`.
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
        """The result of a change as it is remembered: short."""
        return row

    def begin(self, end: int) -> int:
        """The offset below which no record of the log is needed. The log ends at `end`."""
        for key in self.rows:
            return self._places[key].offset
        return end

    def kept_from(self, chars: int) -> int:
        """The lowest offset from which all records have at most `chars` characters together."""
        while self._sized and self.chars - self._sized[0][1] > chars:
            self._kept_from = self._sized.popleft()[0] + 1
        return self._kept_from


class RowDraft(Generic[R]):
    """The state with the changes of some requests, which count once they are in the log."""

    def __init__(self, state: Rows[R], *, end: int, now_s: float) -> None:
        """The batch is for the offset `end`."""
        self._rows, self._end, self._now_s = state, end, now_s
        self._changed: dict[Key, R | None] = {}
        self._decided: dict[str, Decided[R]] = {}
        self._asked = 0
        self.held_until: dict[Key, Any] = {}
        """What `Rows.hold` gets once the batch is in the log."""

    @property
    def is_full(self) -> bool:
        """Whether the batch takes no more requests."""
        return self._asked >= CHANGES_MAX

    @property
    def batch(self) -> Batch[R]:
        """The changes of the requests."""
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
        """Decide a request; the answer counts once the batch is in the log. A copy of a decided
        change gets the first answer, or is rejected if that answer may be forgotten (rule 32).
        """
        assert self._asked < CHANGES_MAX, "versions are unique"
        self._asked += 1
        if stamp is None:
            return self._answer(request)
        first = self._decided.get(stamp.token) or self._rows.decided(stamp.token)
        if first is not None:
            return _again(first, stamp)
        if not self._is_remembered(stamp):
            return _outdated(stamp, self._end)
        answer = self._answer(request)
        assert not isinstance(answer, tuple), "lists are not changes"
        is_error = isinstance(answer, QuorumLogError)
        kept = answer.code if is_error else self._rows.remembered(answer)
        self._decided[stamp.token] = Decided(stamp.token, stamp.content, kept)
        return answer

    def _answer(self, request: Any) -> Any:
        """Decide a request by the rows. Returns errors."""
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
        """Decide a request about one row. Raises: the reason of a refusal."""

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
        """The row that a request is about. Raises: `Rows.absent`."""
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
        detail = f"the {self._rows.noun}'s version is {version}"
        return VersionConflict(detail, **of_row, current={**current, "version": version})

    def _is_remembered(self, stamp: Stamp) -> bool:
        """Whether a decision about another copy would be remembered: it would be in a record after
        the version that the first sender knew.
        """
        earliest = (stamp.seen - 1) // CHANGES_MAX + 1
        return stamp.seen > 0 and self._rows.known_from <= earliest <= self._end


def _again(first: Decided[R], stamp: Stamp) -> R | QuorumLogError:
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
    """The rejection of a change of which a copy may have been decided. If `seen` is 0, none was."""
    version = end * CHANGES_MAX + 1
    if not stamp.seen:
        detail = (
            f"send this request again with Consumers-Version: {version}, the same in all retries"
        )
        return RequestOutdated(detail, outcome=NOT_DONE, version=version)
    detail = "too many changes were made since to know whether this one was: GET what it changes to find out"
    return RequestOutdated(detail, outcome=UNKNOWN, version=version)
