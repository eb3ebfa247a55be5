"""A look through the log and the index of a stopped bookie. It does not stop where something is wrong:
who looks wants to know of all of it.

The end of the log is judged by the code that a start uses, so that what is called right here starts.
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
from services.bookie.log import KEY_BYTES, SEGMENT_HEAD, Batch, Kind, LogDamaged, read_batches
from services.bookie.parts import Part
from services.bookie.records import deleted_in
from services.bookie.replay import read_tail
from services.bookie.scan import is_blank, scan
from services.bookie.segments import Segments

Shown = Callable[[Sequence[int]], Iterable[int]]
"""Gives segments one after another, and may show how far it is."""

ShownParts = Callable[[Iterator[tuple[int, Part]]], Iterable[tuple[int, Part]]]
"""The same for the parts of the index."""


@dataclass
class Report:
    """What a look through log and index found."""

    segments: int = 0
    batches: int = 0
    records: dict[str, int] = field(default_factory=dict)
    log_bytes: int = 0
    entries_in_index: int = 0
    deleted_ledgers: int = 0
    """As the log names them; one may be named twice where a compaction was cut off."""
    problems: list[str] = field(default_factory=list)
    tail: str = ""
    """How the log ends: in order, or not."""


def batches_of(segments: Segments, shown: Shown) -> Iterator[tuple[int, Batch | str]]:
    """All of the log in order, by segment: right batches, and what is wrong, as text."""
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
    for number in shown(range(first, last + 1)):
        try:
            if number == last:
                yield from ((number, batch) for batch in _last(segments, number))
            elif number in present:
                yield from ((number, item) for item in _sealed(segments, number))
            elif number not in gone:
                yield number, f"{segments.path(number)} is missing"
        except (OSError, LogDamaged) as error:
            yield number, str(error)


def _sealed(segments: Segments, number: int) -> Iterator[Batch | str]:
    for start, end, batch in scan(segments, number):
        if batch is not None:
            yield batch
        elif not is_blank(segments, number, start, end):
            yield f"segment {number}, {start} to {end}: a CRC is wrong, or it can't be read"


def _last(segments: Segments, number: int) -> Iterator[Batch]:
    """Raises LogDamaged behind the last right one, where a start would refuse the log."""
    head = segments.head(number)
    for item in read_batches(
        head, segments.read_from(number, SEGMENT_HEAD.size), SEGMENT_HEAD.size
    ):
        if isinstance(item, Batch):
            yield item
    read_tail(segments, number, None)


def verified(directory: Path, shown: Shown = iter, shown_parts: ShownParts = iter) -> Report:
    """Read all of log and index, and check that each part of the index is what it says."""
    report = Report()
    segments = Segments(directory / "log", 0)
    report.segments = len(segments.numbers())
    kinds: Counter[str] = Counter()
    deleted: dict[int, array[int]] = {}
    for number, item in batches_of(segments, shown):
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
            f"{segments.directory} is missing: a salvage was cut off; start it anew"
        )
    try:
        read_cookie(directory)
    except CookieRefused as error:
        report.problems.append(str(error))
    if (directory / "index").exists():
        _verify_index(directory, segments, report, deleted, shown_parts)
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
    return "not in order: the next start copies what is above the last sync point"


def _verify_index(
    directory: Path,
    segments: Segments,
    report: Report,
    deleted: "dict[int, array[int]]",
    shown_parts: ShownParts,
) -> None:
    """`deleted`: by segment, whom the log says are deleted."""
    try:
        index = Index(directory / "index")
    except Exception as error:  # noqa: BLE001 - whatever RocksDB finds wrong
        report.problems.append(f"the index is damaged, and will be built anew: {error}")
        return
    try:
        at = index.checkpoint()
        numbers = segments.numbers()
        if at is not None and numbers and at.segment > numbers[-1]:
            report.problems.append(
                f"{segments.path(at.segment)} is missing: the index stands at offset {at.offset} of it"
            )
        for number, ledger_ids in deleted.items():
            if at is not None and number < at.segment:
                report.problems += [
                    f"ledger {ledger_id} was deleted, and the index does not know it"
                    for ledger_id in sorted(ledger_ids)
                    if not index.is_deleted(ledger_id)
                ]
        for ledger_id, part in shown_parts(index.all_parts()):
            problem = _wrong_with(segments, ledger_id, part)
            if problem:
                place = f"ledger {ledger_id}, entries {part.first}..{part.last}"
                report.problems.append(f"{place}: {problem}")
            else:
                report.entries_in_index += part.count
    except Exception as error:  # noqa: BLE001 - whatever RocksDB finds wrong
        report.problems.append(f"the index can't be read, and will be built anew: {error}")
    finally:
        index.close()
        segments.close()


def _wrong_with(segments: Segments, ledger_id: int, part: Part) -> str:
    """What is wrong with a part of the index, or ""."""
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


def dumped(directory: Path, shown: Shown = iter) -> Iterator[dict[str, Any]]:
    """Each record of the log, without payloads, and each place where something is wrong."""
    for number, item in batches_of(Segments(directory / "log", 0), shown):
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
