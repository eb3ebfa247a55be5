"""Verifies a stopped bookie's log and index, and salvages a log that is damaged below its tail.

Verification continues after damage, so that the report is complete. The log's end is checked by the
same code as at a normal start. So a bookie whose log passes verification also starts.

A salvage copies readable records in order to a new log, and keeps the old one as `log.damaged`.
Unreadable records may have been acknowledged, so the cookie is marked before the new log takes its
place. The next start is then a new incarnation, which denies no entry that older incarnations may
have stored (rule 15).
"""

import errno
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

import google_crc32c

from quorumlog.protocol.record import BadRun, Run
from services.bookie.cookie import CookieRefused, read_cookie, write_cookie
from services.bookie.index import Index
from services.bookie.log import (
    KEY_BYTES,
    SEGMENT_HEAD,
    Kind,
    LogBatch,
    LogDamaged,
    QueuedRecord,
    read_batches,
)
from services.bookie.parts import Part
from services.bookie.records import deleted_in
from services.bookie.replay import is_blank, read_tail, scan
from services.bookie.segments import Segments, sync_directory
from services.bookie.writer import BATCH_BYTES_MAX, LogWriter, Position

IN_FLIGHT_BYTES: Final = 2 * BATCH_BYTES_MAX
"""Maximum size of records queued in the writer: one batch fills while another is synced."""

_LOOK_S: Final = 0.5

SegmentProgress = Callable[[Sequence[int]], Iterable[int]]
"""A function that iterates over segment numbers and may display progress."""

PartProgress = Callable[[Iterator[tuple[int, Part]]], Iterable[tuple[int, Part]]]
"""A function that iterates over the parts of the index and may display progress."""


@dataclass
class LogReport:
    """The result of a verification of log and index."""

    segments: int = 0
    batches: int = 0
    records: dict[str, int] = field(default_factory=dict)
    log_bytes: int = 0
    entries_in_index: int = 0
    deleted_ledgers: int = 0
    """Number of ids in deletion records. After an interrupted compaction, an id may occur twice."""
    problems: list[str] = field(default_factory=list)
    tail: str = ""
    """The state of the log's end, such as clean or torn."""


def batches_of(
    segments: Segments, progress: SegmentProgress
) -> Iterator[tuple[int, LogBatch | str]]:
    """Yields the log in order, as pairs of a segment's number and a valid batch or a problem."""
    present, gone = segments.numbers(), segments.gone()
    try:
        first = segments.first()
    except LogDamaged as error:
        first = min([*present, *gone], default=1)
        yield first, str(error)
    if not present:
        if gone or first > 1:
            yield first, f"{segments.directory}: the log's segments are missing"
        return
    last = present[-1]
    for number in progress(range(first, last + 1)):
        try:
            if number == last:
                yield from ((number, batch) for batch in _last_segment(segments, number))
            elif number in present:
                for item in _stretches(segments, number):
                    is_text = isinstance(item, str)
                    yield (
                        number,
                        f"{item}: a CRC is wrong, or the file can't be read" if is_text else item,
                    )
            elif number not in gone:
                yield number, f"{segments.path(number)} is missing"
        except (OSError, LogDamaged) as error:
            yield number, str(error)


def _stretches(segments: Segments, number: int) -> Iterator[LogBatch | str]:
    """Yields the valid batches of a segment, and the places of unreadable stretches."""
    for start, end, batch in scan(segments, number):
        if batch is not None:
            yield batch
        elif not is_blank(segments, number, start, end):
            yield f"segment {number}, {start} to {end}"


def _last_segment(segments: Segments, number: int) -> Iterator[LogBatch]:
    """Yield the last segment's valid batches. Raises LogDamaged if a start would refuse the log."""
    head = segments.head(number)
    for item in read_batches(
        head, segments.read_from(number, SEGMENT_HEAD.size), SEGMENT_HEAD.size
    ):
        if isinstance(item, LogBatch):
            yield item
    read_tail(segments, number, None)


def verify_directory(
    directory: Path, progress: SegmentProgress = iter, part_progress: PartProgress = iter
) -> LogReport:
    """Read the whole log and the index, and check each part of the index against the log."""
    report = LogReport()
    segments = Segments(directory / "log", 0)
    report.segments = len(segments.numbers())
    kinds: Counter[str] = Counter()
    deleted: dict[int, array[int]] = {}
    for number, item in batches_of(segments, progress):
        if isinstance(item, str):
            report.problems.append(item)
            continue
        report.batches += 1
        report.log_bytes += item.end - item.offset
        kinds.update(record.kind.name for record in item.records)
        for record in item.records:
            deleted.setdefault(number, array("q")).extend(deleted_in(record))
    report.records = dict(kinds)
    report.deleted_ledgers = sum(map(len, deleted.values()))
    report.tail = _tail(segments)
    if not segments.directory.exists():
        report.problems.append(
            f"{segments.directory} is missing, because a salvage was interrupted: run the salvage again"
        )
    try:
        read_cookie(directory)
    except CookieRefused as error:
        report.problems.append(str(error))
    if (directory / "index").exists():
        _verify_index(directory, segments, report, deleted, part_progress)
    return report


def _tail(segments: Segments) -> str:
    """The state of the log's end, in words."""
    numbers = segments.numbers()
    if not numbers:
        return "there is no segment"
    try:
        tail = read_tail(segments, numbers[-1], None)
    except (OSError, LogDamaged):
        return "damaged"
    if tail.was_clean:
        return "in order"
    if tail.cut_bytes:
        place = f"segment {numbers[-1]}, offset {tail.end}"
        return f"torn at {place}: the next start cuts {tail.cut_bytes} bytes off"
    return "not in order: the next start copies the batches above the last sync point"


def _verify_index(
    directory: Path,
    segments: Segments,
    report: LogReport,
    deleted: "dict[int, array[int]]",
    part_progress: PartProgress,
) -> None:
    """Check the index against the log. `deleted`: the ids in deletion records, by segment."""
    try:
        index = Index(directory / "index")
    except Exception as error:  # noqa: BLE001 - whatever RocksDB finds wrong
        report.problems.append(f"the index is damaged; the next start rebuilds it: {error}")
        return
    try:
        at = index.checkpoint()
        numbers = segments.numbers()
        if at is not None and numbers and at.segment > numbers[-1]:
            report.problems.append(
                f"{segments.path(at.segment)} is missing, but is indexed to offset {at.offset}"
            )
        for number, ledger_ids in deleted.items():
            if at is not None and number < at.segment:
                report.problems += [
                    f"the index does not list ledger {ledger_id} as deleted, but the log does"
                    for ledger_id in sorted(ledger_ids)
                    if not index.is_deleted(ledger_id)
                ]
        for ledger_id, part in part_progress(index.all_parts()):
            problem = _part_problem(segments, ledger_id, part)
            if problem:
                place = f"ledger {ledger_id}, entries {part.first}..{part.last}"
                report.problems.append(f"{place}: {problem}")
            else:
                report.entries_in_index += part.count
    except Exception as error:  # noqa: BLE001 - whatever RocksDB finds wrong
        report.problems.append(f"the index is unreadable; the next start rebuilds it: {error}")
    finally:
        index.close()
        segments.close()


def _part_problem(segments: Segments, ledger_id: int, part: Part) -> str:
    """The problem with a part of the index, or ""."""
    place = f"{part.segment}:{part.offset}"
    try:
        body = os.pread(segments.reader(part.segment).fd, part.size, part.offset)
    except FileNotFoundError:
        return f"segment {part.segment} is missing"
    except OSError as error:
        return f"{place} can't be read: {error.strerror}"
    if google_crc32c.value(body) != part.crc:
        return f"damaged at {place}"
    try:
        run = Run(body[KEY_BYTES:])
    except BadRun:
        return f"{place} contains no run"
    if run.ledger_id != ledger_id or any(run.index(e) is None for e in part.ids()):
        return f"{place} contains another run"
    return ""


def dump_records(directory: Path, progress: SegmentProgress = iter) -> Iterator[dict[str, Any]]:
    """Yields each record of the log without its payload, and each problem at its place."""
    for number, item in batches_of(Segments(directory / "log", 0), progress):
        if isinstance(item, str):
            yield {"segment": number, "problem": item}
            continue
        for record in item.records:
            line: dict[str, Any] = {
                "segment": number,
                "offset": record.offset,
                "sequence": item.sequence,
                "kind": record.kind.name,
                "ledger": record.ledger_id,
                "bytes": record.size,
            }
            if record.kind is Kind.DELETED:
                line |= {"ledgers": list(deleted_in(record))}
            if record.kind is Kind.RUN:
                run = Run(record.body[KEY_BYTES:])
                line |= {"first": run.first, "last": run.last, "count": run.count}
            yield line


@dataclass
class Salvaged:
    """The result of a salvage."""

    records: int = 0
    ledgers: int = 0
    unreadable: list[str] = field(default_factory=list)
    """Unreadable places of the old log, as segment and offsets."""


def undo_salvage(directory: Path) -> None:
    """Undo an interrupted salvage by restoring the damaged log, which is still complete."""
    log, damaged = directory / "log", directory / "log.damaged"
    if not log.exists() and damaged.exists():
        damaged.rename(log)
    shutil.rmtree(directory / "log.salvaged", ignore_errors=True)


def salvage_log(directory: Path, segment_bytes: int, numbers: Iterable[int]) -> Salvaged:
    """Copy the readable records of these segments in order, and replace the log by the copy.

    The caller must hold the directory's lock. Raises: OSError; FileExistsError if `log.damaged` of
    an earlier salvage exists.
    """
    report = Salvaged()
    damaged, made = directory / "log.damaged", directory / "log.salvaged"
    if damaged.exists():
        raise FileExistsError(f"{damaged} exists from an earlier salvage: move it away first")
    _check_room(directory, Segments(directory / "log", 0), segment_bytes)
    made.mkdir()
    try:
        ledgers = _copy(
            Segments(directory / "log", 0), Segments(made, segment_bytes), numbers, report
        )
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    report.ledgers = len(ledgers)
    # Mark the cookie first, so that no start takes the new log for a complete log.
    cookie = read_cookie(directory)
    if cookie is not None:
        write_cookie(directory, cookie.model_copy(update={"salvaged": True}))
    (directory / "log").rename(damaged)
    made.rename(directory / "log")
    sync_directory(directory)
    shutil.rmtree(directory / "index", ignore_errors=True)
    return report


def _copy(old: Segments, new: Segments, numbers: Iterable[int], report: Salvaged) -> set[int]:
    ledgers: set[int] = set()
    failed: list[BaseException] = []
    written: SimpleQueue[int] = SimpleQueue()

    def on_fatal(error: BaseException) -> None:
        failed.append(error)
        written.put(0)

    head, fd, end = new.create(1, 1, 0)
    writer = LogWriter(
        new,
        head,
        fd,
        Position(1, end, 1),
        reserve=new.directory / "reserve",
        on_synced=lambda records, _: written.put(sum(record.size for record in records)),
        on_fatal=on_fatal,
    )
    writer.start()
    in_flight = 0
    try:
        for number in numbers:
            for record in _records(old, number, report):
                # Batch many records per sync, and bound memory.
                while in_flight > IN_FLIGHT_BYTES and not failed:
                    in_flight -= _wait_written(written, writer)
                if failed:
                    break
                ledgers.add(record.ledger_id)
                report.records += 1
                writer.append(record)
                in_flight += record.size
    finally:
        writer.stop()
    if failed:
        raise failed[0]
    return ledgers


def _wait_written(written: SimpleQueue[int], writer: LogWriter) -> int:
    """Wait until a batch is on disk; returns its size. Raises OSError on a full disk."""
    while True:
        try:
            return written.get(timeout=_LOOK_S)
        except Empty:
            if writer.is_full:
                raise OSError(errno.ENOSPC, "the disk is full: nothing was changed") from None


def _check_room(directory: Path, segments: Segments, segment_bytes: int) -> None:
    """Check that the disk has room for a second log. Raises OSError."""
    size = sum(segments.path(number).stat().st_size for number in segments.numbers())
    needed, free = size + segment_bytes, shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(
            errno.ENOSPC,
            f"a salvage writes a second log, which needs {needed:,} bytes in {directory}, but only"
            f" {free:,} are free: free some space and retry; nothing was changed",
        )


def _records(segments: Segments, number: int, report: Salvaged) -> Iterator[QueuedRecord]:
    try:
        for item in _stretches(segments, number):
            if isinstance(item, str):
                report.unreadable.append(item)
            else:
                yield from (record.again() for record in item.records)
    except (OSError, LogDamaged) as error:
        report.unreadable.append(f"segment {number}: {error}")
