"""Plans of reads: immutable ranges of logs and ledgers. The driver makes each plan once.

A plan ends at the last record that was confirmed when the plan was made. Entries up to that record
never change. So a repeated task reads the same rows, and so does a batch that a restarted query
repeats. Planning does not fence, recover or close any ledger.
"""

import base64
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from pyspark.sql.datasource import InputPartition

from quorumlog.errors import (
    EntryLost,
    LogReplaced,
    NoSuchConsumer,
    NoSuchLedger,
    NoSuchLog,
    OffsetBeyondEnd,
    OffsetTruncated,
)
from quorumlog.protocol.batch import decode_head
from quorumlog.protocol.offset_set import Offsets
from quorumlog.spark.http import Gateways
from quorumlog.spark.options import (
    LATEST,
    BadOption,
    ConsumerStart,
    OffsetChoice,
    ReadOptions,
    ReadSubject,
    StartChoice,
)

log = logging.getLogger(__name__)

OFFSET_MAX: Final = (1 << 63) - 1
"""The maximum value of Spark's `long`."""


Offset = dict[str, dict[str, Any]]
"""An offset of a stream: `{"log":{"0":next,"created_at":…}}`, where `next` is exclusive."""

CREATED: Final = "created_at"
"""Key in an offset, next to "0": the creation time of the log."""


class DataLoss(RuntimeError):
    """Records that a query should read are gone; `failOnDataLoss=false` continues without them."""


@dataclass(frozen=True)
class TaskRange(InputPartition):
    """A task's offsets in a log's ledger, or entries in a plain ledger; `end` is exclusive."""

    log: str | None
    ledger_id: int
    first: int
    end: int
    is_sealed: bool = True
    """Whether the whole range is certainly in this ledger."""
    created_at: str | None = None
    """Creation time of the planned log. Another log of the same name is not read."""
    records: Offsets | None = None
    """The records of the range to return; None: all."""
    filters: tuple[tuple[str, str], ...] = ()
    """Query parameters of the read, by which the gateway filters records."""

    @property
    def rows(self) -> int:
        """The number of rows in the range."""
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class LogExtent:
    """A log's offsets when the plan was made: from `first` up to, not including, `end`."""

    name: str
    first: int
    end: int
    ledgers: tuple[tuple[int, int], ...]
    """(first offset, id) of each ledger, ascending."""
    created_at: str
    """Distinguishes this log from earlier and later logs of the same name."""

    def ranges(self, first: int, end: int) -> Iterator[TaskRange]:
        """Cut a range of offsets at the boundaries of ledgers.

        The end was read after the list of ledgers, so records after the start of the last ledger
        may be in a ledger that was added in between.
        """
        starts = [*(start for start, _ in self.ledgers[1:]), end]
        last = self.ledgers[-1][1] if self.ledgers else None
        for (own, ledger_id), following in zip(self.ledgers, starts, strict=False):
            low, high = max(first, own), min(end, following)
            if low < high:
                yield TaskRange(self.name, ledger_id, low, high, ledger_id != last, self.created_at)


@dataclass(frozen=True, slots=True)
class Pruning:
    """The logs and ranges that a plan keeps; by default all."""

    names: tuple[str, ...] | None = None
    """Names of logs, sorted; None for all."""
    first: int = 0
    last: int = OFFSET_MAX
    """Bounds of offsets, or of entry ids of plain ledgers; inclusive."""
    ledgers: tuple[int, ...] | None = None
    ledger_first: int = 0
    ledger_last: int = OFFSET_MAX
    key: bytes | None = None
    """The only key that the query needs; None: all keys."""
    key_low: bytes = b""
    key_high: bytes | None = None
    """Keys are at or above `key_low`, and below `key_high`; None: no upper bound."""
    from_us: int = 0
    to_us: int = OFFSET_MAX
    """Bounds of timestamps in microseconds; inclusive."""

    @property
    def filters(self) -> tuple[tuple[str, str], ...]:
        """Query parameters that limit a read to records with keys that the query may need. The
        parameters are text, so a key that is not UTF-8 is selected by its valid prefix.
        """
        name, value = "key", self.key
        if value is None:
            name, value = "key_prefix", _prefix(self.key_low, self.key_high)
        try:
            text = value.decode()
        except UnicodeDecodeError as error:
            name, text = "key_prefix", value[: error.start].decode()
        return ((name, text),) if text or name == "key" else ()

    def has_log(self, name: str) -> bool:
        """Whether the query may need rows of a log."""
        return self.names is None or name in self.names

    def has_ledger(self, ledger_id: int) -> bool:
        """Whether the query may need rows of a ledger."""
        return (self.ledgers is None or ledger_id in self.ledgers) and (
            self.ledger_first <= ledger_id <= self.ledger_last
        )

    def of(self, parts: Iterable[TaskRange]) -> Iterator[TaskRange]:
        """Cut the ranges to the parts that the query may need."""
        for part in parts:
            low, high = max(part.first, self.first), min(part.end, self.last + 1)
            # An open ledger's range may end in a later ledger: see `LogExtent.ranges`.
            if low < high and (not part.is_sealed or self.has_ledger(part.ledger_id)):
                yield replace(part, first=low, end=high)


EVERYTHING: Final = Pruning()


def _prefix(low: bytes, high: bytes | None) -> bytes:
    """The longest common prefix of all keys at or above `low` and below `high`."""
    if high is None:
        return b""
    differ = (at for at, (a, b) in enumerate(zip(low, high, strict=False)) if a != b)
    size = next(differ, min(len(low), len(high)))
    is_next = high[size:] and low[size : size + 1] == bytes([max(high[size] - 1, 0)])
    # For example, all keys at or above b"ab" and below b"ac" begin with b"ab".
    return low[: size + 1] if is_next and len(high) == size + 1 else low[:size]


def extent(gateways: Gateways, name: str, known: int = 0) -> LogExtent:
    """A log's current extent. `known`: an end that the query has already seen. Raises: NoSuchLog."""
    shown = gateways.get(f"/v1/logs/{name}")
    ledgers = tuple(
        (int(item["first_offset"]), int(item["ledger_id"]))
        for item in shown["ledgers"]
        if item["first_offset"] is not None
    )
    first, end, made = int(shown["first_offset"]), int(shown["next_offset"]), shown["created_at"]
    if end < known and _reaches(gateways, name, known, made):
        end = known
    return LogExtent(name, first, end, ledgers, str(made))


def _reaches(gateways: Gateways, name: str, offset: int, created_at: str) -> bool:
    """Whether a log's end is at or beyond an offset, according to a read, which verifies the end
    (rule 27b). The end in a log's description may be behind the end that another gateway described:
    readers may get records of a new ledger before the log's owner acknowledges these records, and
    a displaced owner does not know the end of its ledger.
    """
    params: dict[str, str | int] = {"from": offset, "limit": 1, "created": created_at}
    try:
        gateways.get(f"/v1/logs/{name}/records", params)
    except (OffsetBeyondEnd, LogReplaced):
        return False
    return True


def logs_of(gateways: Gateways, subject: ReadSubject) -> list[str]:
    """The names of the logs to read, sorted."""
    if subject.pattern is None:
        return sorted(set(subject.names))
    wanted = re.compile(subject.pattern)
    names = (str(log["name"]) for log in gateways.pages("/v1/logs", "logs"))
    return sorted(name for name in names if wanted.fullmatch(name))


def offset_at(place: OffsetChoice, found: LogExtent, default: int) -> int:
    """The offset in a log that `place` selects; `default` if `place` does not name the log."""
    if place == "earliest":
        return found.first
    if place == "latest":
        return found.end
    given = place.get(found.name)
    if given is None:
        return default
    if given < 0:
        return found.end if given == LATEST else found.first
    return given


def start_of(
    options: ReadOptions, gateways: Gateways, found: LogExtent, default: OffsetChoice
) -> int:
    """The first offset to read from a log, according to the options or else `default`.

    Raises: BadOption if no record is as late as `startingTimestamp`, unless the options allow the
    end as the start; DataLoss if the consumer's offset is of an earlier log of this name.
    """
    if options.starting_ms is None:
        if isinstance(options.starting, ConsumerStart):
            return _position(options, gateways, found, options.starting)
        return offset_at(options.starting or default, found, found.first)
    by_time = offset_of_time(gateways, found, options.starting_ms)
    if by_time is None and not options.starts_late:
        raise BadOption(f"{found.name} has no records since startingTimestamp: set an earlier time")
    return found.end if by_time is None else by_time


def beginning(
    options: ReadOptions, gateways: Gateways, found: LogExtent, default: OffsetChoice
) -> tuple[LogExtent, int]:
    """The first offset to read (`start_of`), and the log's extent, which is read again if it ends
    below that offset, because a consumer may have advanced since. Raises: the errors of `start_of`;
    NoSuchLog.
    """
    start = start_of(options, gateways, found, default)
    return (found if start <= found.end else extent(gateways, found.name, start)), start


def _position(
    options: ReadOptions, gateways: Gateways, found: LogExtent, start: ConsumerStart
) -> int:
    """The first offset that a consumer has not processed, which may be outside of `found`."""
    try:
        shown = gateways.get(f"/v1/logs/{found.name}/consumers/{start.consumer}")
    except NoSuchConsumer:
        log.warning(
            "quorumlog: the log %s has no consumer %s: the read begins at %s",
            found.name,
            start.consumer,
            start.otherwise,
        )
        return offset_at(start.otherwise, found, found.first)
    if shown["state"] != "log-replaced":
        return int(shown["offset"])
    if options.fails_on_loss:
        raise DataLoss(
            f"the committed offset of {start.consumer} belongs to a log {found.name} that was deleted: reset the consumer, or "
            "set failOnDataLoss=false to begin at the beginning of the current log"
        )
    return found.first


def offset_of_time(gateways: Gateways, found: LogExtent, at_ms: int) -> int | None:
    """The first offset whose record is at or after a time, or None. The result is correct only if
    timestamps ascend, which clients that set timestamps may violate.
    """
    low, high = found.first, found.end
    while low < high:
        middle = (low + high) // 2
        try:
            page = gateways.get(f"/v1/logs/{found.name}/records", {"from": middle, "limit": 1})
        except OffsetTruncated as error:  # the log has dropped records since `found` was read
            low = int(error.members["first_offset"])
            continue
        if page["next"] == middle:
            raise OffsetTruncated(f"there is no record at offset {middle}", log=found.name)
        if not page["records"]:  # compaction has removed all records from `middle` on
            high = middle
            continue
        at = datetime.fromisoformat(page["records"][0]["timestamp"])
        if at.timestamp() * 1000 < at_ms:
            low = middle + 1
        else:
            high = middle
    return low if low < found.end else None


def batch_plan(
    options: ReadOptions, gateways: Gateways, pruning: Pruning = EVERYTHING
) -> list[TaskRange]:
    """The ranges of a batch read, without ranges that have no rows for the query."""
    if options.subject.ledgers:
        found = [part for id_ in options.subject.ledgers for part in _ledger(gateways, id_)]
        return cut(list(pruning.of(found)), options)
    _check_start(options.starting)
    ranges: list[TaskRange] = []
    for name in filter(pruning.has_log, logs_of(gateways, options.subject)):
        whole, first = beginning(options, gateways, extent(gateways, name), "earliest")
        end = offset_at(options.ending, whole, whole.end)
        if options.ending_ms is not None:
            until = offset_of_time(gateways, whole, options.ending_ms)
            end = whole.end if until is None else until
        asked = checked(whole, first, end, fails=options.fails_on_loss)
        if options.timestamps_ascend:
            asked = _within_times(gateways, whole, asked, pruning)
        parts = list(pruning.of(whole.ranges(*asked)))
        filters = pruning.filters
        ranges += _joined(parts, filters) if filters else by_fragment(gateways, whole, parts)
    return cut(ranges, options)


def _within_times(
    gateways: Gateways, whole: LogExtent, asked: tuple[int, int], pruning: Pruning
) -> tuple[int, int]:
    """Cut a range to the query's bounds of timestamps. Records have whole milliseconds."""
    first, end = asked
    if pruning.from_us > 0:
        found = offset_of_time(gateways, whole, -(-pruning.from_us // 1000))
        first = max(first, whole.end if found is None else found)
    if pruning.to_us < OFFSET_MAX:
        found = offset_of_time(gateways, whole, pruning.to_us // 1000 + 1)
        end = min(end, whole.end if found is None else found)
    return first, end


def _joined(parts: Iterable[TaskRange], filters: tuple[tuple[str, str], ...]) -> list[TaskRange]:
    """Join a log's adjacent ranges. A filtered page may scan records beyond the end of a range,
    so with short ranges gateways would read the same records several times.
    """
    found: list[TaskRange] = []
    for part in parts:
        if found and found[-1].end == part.first:
            found[-1] = replace(found[-1], end=part.end)
        else:
            found.append(replace(part, filters=filters))
    return found


def _check_start(start: StartChoice | None) -> None:
    """Raise BadOption if a batch would begin at the end."""
    if start == "latest" or (isinstance(start, Mapping) and LATEST in start.values()):
        raise BadOption("startingOffsets=latest (or -1) can't be used in a batch: use offsets")
    if isinstance(start, ConsumerStart) and start.otherwise == "latest":
        raise BadOption("startingOffsets: from=latest can't be used in a batch: use earliest")


def by_fragment(
    gateways: Gateways, whole: LogExtent, parts: Sequence[TaskRange]
) -> Iterator[TaskRange]:
    """Cut ranges of a log at the boundaries of fragments, so that a task reads from one ensemble.

    The cut needs one request per thousand ledgers, and two per ensemble change: the first entry of
    a fragment shows how many records precede the fragment. The ranges of streams are not cut,
    because their batches begin often.
    """
    if not parts:
        return
    found = gateways.pages("/v1/ledgers", "ledgers", log=whole.name)
    fragments = {int(ledger["ledger_id"]): ledger["fragments"][1:] for ledger in found}
    starts = {ledger_id: first for first, ledger_id in whole.ledgers}
    for part in parts:
        low = part.first
        for fragment in fragments.get(part.ledger_id, ()):
            before = _records_before(gateways, part.ledger_id, int(fragment["first_entry"]))
            at = None if before is None else starts[part.ledger_id] + before
            if at is not None and low < at < part.end:
                yield replace(part, first=low, end=at)
                low = at
        yield replace(part, first=low)


def _records_before(gateways: Gateways, ledger_id: int, entry_id: int) -> int | None:
    """How many records of a log's ledger precede an entry; None if there is no such entry (yet), or
    if the entry is lost.
    """
    path = f"/v1/ledgers/{ledger_id}"
    try:
        known = gateways.get(f"{path}/last-add-confirmed")
        if int(known["last_add_confirmed"]) < entry_id:
            return None
        page = gateways.get(f"{path}/entries", {"from": entry_id, "limit": 1})
    except (NoSuchLedger, EntryLost):
        return None
    return decode_head(base64.b64decode(page["entries"][0]["data"])).records_before


def checked(whole: LogExtent, first: int, end: int, *, fails: bool) -> tuple[int, int]:
    """Cut a range to the log's records. Raises: DataLoss if `fails` is set and records are gone."""
    if fails and (first > whole.end or (first < end and (first < whole.first or end > whole.end))):
        raise DataLoss(
            f"the read needs offsets {first} to {max(first, end - 1)} of {whole.name}, which has "
            f"{whole.first} to {whole.end - 1}: set failOnDataLoss=false to skip lost records"
        )
    return max(first, whole.first), min(end, whole.end)


def stream_plan(
    options: ReadOptions, gateways: Gateways, start: Offset, end: Offset
) -> list[TaskRange]:
    """The ranges of one batch of a stream; the same for a repeated batch. Raises: DataLoss."""
    ranges: list[TaskRange] = []
    fails = options.fails_on_loss
    if fails and (gone := sorted(start.keys() - end.keys())):
        raise DataLoss(_gone(gone[0]))
    for name, place in sorted(end.items()):
        begun = start.get(name)
        if begun is not None and begun[CREATED] == place[CREATED] and begun["0"] >= place["0"]:
            continue
        try:
            whole = extent(gateways, name, place["0"])
        except NoSuchLog:
            if fails:
                raise DataLoss(_gone(name)) from None
            continue
        if fails and (is_other(whole, place) or (begun and is_other(whole, begun))):
            raise DataLoss(replaced(whole, begun or place))
        if is_other(whole, place):
            continue
        is_begun = begun is not None and not is_other(whole, begun)
        first = begun["0"] if begun is not None and is_begun else whole.first
        ranges += whole.ranges(*checked(whole, first, place["0"], fails=fails))
    return cut(ranges, options)


def is_other(whole: LogExtent, place: Mapping[str, Any]) -> bool:
    """Whether an offset belongs to an earlier log of this name: the creation times differ, or the
    log ends below the offset.
    """
    return bool(whole.created_at != place[CREATED] or whole.end < place["0"])


def replaced(whole: LogExtent, place: Mapping[str, Any]) -> str:
    """The error message for an offset of another log (`is_other`)."""
    return (
        f"{whole.name} has the offsets {whole.first} to {whole.end - 1} and was created at {whole.created_at}; the "
        f"query is at {place['0']} of a log that was created at {place[CREATED]}: the log was deleted and created "
        "again. Set failOnDataLoss=false to read the new log from its beginning"
    )


def _gone(name: str) -> str:
    return f"the log {name} is gone: set failOnDataLoss=false to continue without it"


def _ledger(gateways: Gateways, ledger_id: int) -> Iterator[TaskRange]:
    """A ledger up to the last add confirmed, cut at the boundaries of fragments."""
    path = f"/v1/ledgers/{ledger_id}"
    shown = gateways.get(path)
    if shown["log"] is not None:
        raise BadOption(f"ledger {ledger_id} is of the log {shown['log']}: subscribe to the log")
    end = int(gateways.get(f"{path}/last-add-confirmed")["last_add_confirmed"]) + 1
    starts = [int(fragment["first_entry"]) for fragment in shown["fragments"]]
    for first, following in zip(starts, [*starts[1:], end], strict=True):
        if first < min(following, end):
            yield TaskRange(None, ledger_id, first, min(following, end))


def cut(ranges: Sequence[TaskRange], options: ReadOptions) -> list[TaskRange]:
    """Cut ranges into at least `minPartitions` parts of at most `maxEntriesPerPartition` rows."""
    rows = sum(part.rows for part in ranges)
    most = min(options.rows_per_partition_max, max(1, -(-rows // options.partitions_min)))
    found: list[TaskRange] = []
    for part in ranges:
        pieces = -(-part.rows // most)
        for piece in range(pieces):
            low = part.first + part.rows * piece // pieces
            high = part.first + part.rows * (piece + 1) // pieces
            found.append(replace(part, first=low, end=high))
    return found


def next_offsets(
    options: ReadOptions, gateways: Gateways, known: Mapping[str, int]
) -> dict[str, LogExtent]:
    """The current extent of each existing log that a stream reads. `known`: the offset of the query in
    each log that it has begun. Raises: DataLoss if a known log, or a log that an option names, is gone.
    """
    found: dict[str, LogExtent] = {}
    for name in sorted({*logs_of(gateways, options.subject), *known}):
        try:
            found[name] = extent(gateways, name, known.get(name, 0))
        except NoSuchLog:
            is_loss = name in known or options.subject.pattern is None
            if options.fails_on_loss and is_loss:
                raise DataLoss(_gone(name)) from None
    return found
