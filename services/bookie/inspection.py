"""Verification of a stopped bookie's log and index. It continues behind damage, so that the report
is complete.

The end of the log is judged by the code of a normal start, so that a log that passes also starts.
"""

import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import google_crc32c

from quorumlog.protocol.record import BadRun, Run
from services.bookie.cookie import CookieRefused, read_cookie
from services.bookie.index import Index
from services.bookie.log import KEY_BYTES, SEGMENT_HEAD, Kind, LogBatch, LogDamaged, read_batches
from services.bookie.parts import Part
from services.bookie.records import deleted_in
from services.bookie.replay import read_tail
from services.bookie.scan import is_blank, scan
from services.bookie.segments import Segments

SegmentProgress = Callable[[Sequence[int]], Iterable[int]]
"""Iterates over segment numbers, and may display progress."""

PartProgress = Callable[[Iterator[tuple[int, Part]]], Iterable[tuple[int, Part]]]
"""The same for the parts of the index."""


@dataclass
class LogReport:
    """The result of verifying log and index."""

    segments: int = 0
    batches: int = 0
    records: dict[str, int] = field(default_factory=dict)
    log_bytes: int = 0
    entries_in_index: int = 0
    deleted_ledgers: int = 0
    """Ids in deletion records; an interrupted compaction may leave an id twice."""
    problems: list[str] = field(default_factory=list)
    tail: str = ""
    """How the log ends: cleanly or not."""


def batches_of(
    segments: Segments, progress: SegmentProgress
) -> Iterator[tuple[int, LogBatch | str]]:
    """The whole log in order, with segment numbers: valid batches, and problems as text."""
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
                yield from ((number, item) for item in _sealed_segment(segments, number))
            elif number not in gone:
                yield number, f"{segments.path(number)} is missing"
        except (OSError, LogDamaged) as error:
            yield number, str(error)


def _sealed_segment(segments: Segments, number: int) -> Iterator[LogBatch | str]:
    for start, end, batch in scan(segments, number):
        if batch is not None:
            yield batch
        elif not is_blank(segments, number, start, end):
            yield f"segment {number}, {start} to {end}: a CRC is wrong, or it can't be read"


def _last_segment(segments: Segments, number: int) -> Iterator[LogBatch]:
    """Raises LogDamaged after the last valid batch if a start would refuse the log."""
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
    """Read the whole log and index, and check each part of the index against the log."""
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
            f"{segments.directory} is missing: a salvage was interrupted; run it again"
        )
    try:
        read_cookie(directory)
    except CookieRefused as error:
        report.problems.append(str(error))
    if (directory / "index").exists():
        _verify_index(directory, segments, report, deleted, part_progress)
    return report


def _tail(segments: Segments) -> str:
    """How the log ends, in words."""
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
    """`deleted`: the ids in deletion records, by segment."""
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
                f"{segments.path(at.segment)} is missing: the index covers it up to offset {at.offset}"
            )
        for number, ledger_ids in deleted.items():
            if at is not None and number < at.segment:
                report.problems += [
                    f"ledger {ledger_id} was deleted, and the index does not know it"
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
    """The problem of a part of the index, or ""."""
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
        return f"{place} holds no run"
    if run.ledger_id != ledger_id or any(run.index(e) is None for e in part.ids()):
        return f"{place} holds another run"
    return ""


def dump_records(directory: Path, progress: SegmentProgress = iter) -> Iterator[dict[str, Any]]:
    """Each record of the log without its payload, and each problem at its place."""
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
