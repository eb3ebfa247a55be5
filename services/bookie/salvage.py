"""Salvage: make a log that is damaged below its tail startable again.

Readable records are copied in order to a new log; the old log is kept as `log.damaged`. Unreadable
records may have been acknowledged, so the cookie is marked before the new log takes its place: the
next start is a new incarnation, which denies nothing that older ones were asked to keep (rule 15).
"""

import contextlib
import errno
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

from services.bookie.cookie import read_cookie, write_cookie
from services.bookie.log import LogDamaged, QueuedRecord
from services.bookie.scan import is_blank, scan
from services.bookie.segments import Segments, sync_directory
from services.bookie.writer import BATCH_BYTES_MAX, LogWriter, Position

IN_FLIGHT_BYTES: Final = 2 * BATCH_BYTES_MAX
"""Given to the writer and not on disk: the next batch gathers while one is synced."""

_LOOK_S: Final = 0.5


@dataclass
class Salvaged:
    """The result of a salvage."""

    records: int = 0
    ledgers: int = 0
    unreadable: list[str] = field(default_factory=list)
    """Places of the old log, as segment and offsets."""


def undo_salvage(directory: Path) -> None:
    """Undo an interrupted salvage: the damaged log is still complete."""
    log, damaged = directory / "log", directory / "log.damaged"
    if not log.exists() and damaged.exists():
        damaged.rename(log)
    shutil.rmtree(directory / "log.salvaged", ignore_errors=True)


def salvage_log(directory: Path, segment_bytes: int, numbers: Iterable[int]) -> Salvaged:
    """Copy the readable records of these segments in order, and replace the log by the copy.

    The caller owns the directory. Raises: OSError; FileExistsError if `log.damaged` of an earlier
    salvage exists.
    """
    report = Salvaged()
    damaged, made = directory / "log.damaged", directory / "log.salvaged"
    if damaged.exists():
        raise FileExistsError(f"{damaged} is left by an earlier salvage: move it away first")
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
    # Before the new log is in place: a start must not take it for the complete log.
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
                # Batch many records per sync, and keep memory flat.
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
    """How many bytes reached the disk. Raises OSError on a full disk: the writer would wait for
    room, but nobody makes any here.
    """
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
            f"a salvage makes a second log: it needs {needed:,} bytes in {directory}, where"
            f" {free:,} are free. Nothing was changed",
        )


def _records(segments: Segments, number: int, report: Salvaged) -> Iterable[QueuedRecord]:
    with contextlib.ExitStack() as stack:
        try:
            batches = stack.enter_context(contextlib.closing(scan(segments, number)))
            for start, end, batch in batches:
                if batch is None:
                    if not is_blank(segments, number, start, end):
                        report.unreadable.append(f"segment {number}, {start} to {end}")
                    continue
                yield from (record.again() for record in batch.records)
        except (OSError, LogDamaged) as error:
            report.unreadable.append(f"segment {number}: {error}")
