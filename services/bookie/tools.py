"""What a person can ask of a data directory while its bookie is stopped: verify, dump, rebuild."""

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import google_crc32c
import orjson
import typer
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

from quorumlog.protocol.record import Run
from services.bookie.cookie import read_cookie
from services.bookie.directory import DirectoryInUse, locked
from services.bookie.index import Index
from services.bookie.log import (
    KEY_BYTES,
    SEGMENT_HEAD,
    Batch,
    Kind,
    LogDamaged,
    Stop,
    read_batches,
)
from services.bookie.options import StoreOptions
from services.bookie.salvage import restored, salvaged
from services.bookie.segments import Segments
from services.bookie.store import Store

app = typer.Typer(
    help="Look into a bookie's data directory. The bookie must be stopped.",
    no_args_is_help=True,
    add_completion=False,
)
Directory = Annotated[Path, typer.Argument(help="the bookie's DATA_DIR", exists=True)]
AsJson = Annotated[bool, typer.Option("--json", help="for programs: JSON instead of tables")]


@dataclass
class Report:
    """What a look through log and index found."""

    segments: int = 0
    batches: int = 0
    records: dict[str, int] = field(default_factory=dict)
    log_bytes: int = 0
    entries_in_index: int = 0
    problems: list[str] = field(default_factory=list)
    tail: str = ""
    """How the log ends: in order, or not."""


def segment_batches(segments: Segments) -> Iterator[tuple[int, Batch | Stop, bool]]:
    """Segment, batch or stop, and whether it is the last segment; all of the log."""
    numbers = segments.numbers()
    for number in _with_bar(numbers):
        head = segments.head(number)
        is_last = number == numbers[-1]
        end = None if is_last else segments.head(number + 1).previous_end
        data = segments.read_from(number, SEGMENT_HEAD.size)
        for item in read_batches(head, data, SEGMENT_HEAD.size, end):
            yield number, item, is_last


def _with_bar(numbers: list[int]) -> Iterator[int]:
    """Segments one after another, with a bar on standard error."""
    console = Console(stderr=True)
    yield from track(
        numbers, "segments", console=console, transient=True, disable=not console.is_terminal
    )


def verified(directory: Path) -> Report:
    """Read all of log and index, and check that each part of the index is what it says."""
    report = Report()
    segments = Segments(directory / "log", 0)
    report.segments = len(segments.numbers())
    kinds: Counter[str] = Counter()
    report.tail = "not in order: the next start copies what is above the last sync point"
    try:
        for number, item, is_last in segment_batches(segments):
            if isinstance(item, Stop):
                place = f"segment {number}, offset {item.offset}: {item.reason}"
                if not is_last or not (item.is_blank or item.looks_torn):
                    report.problems.append(place)
                elif not item.is_blank:
                    report.tail = f"torn at {place}"
                continue
            report.batches += 1
            report.log_bytes += item.end - item.offset
            kinds.update(record.kind.name for record in item.records)
            if is_last and item.flags:
                report.tail = "in order"
    except LogDamaged as error:
        report.problems.append(str(error))
    report.records = dict(kinds)
    if (directory / "index").exists():
        _verify_index(directory, segments, report)
    return report


def _verify_index(directory: Path, segments: Segments, report: Report) -> None:
    try:
        index = Index(directory / "index")
    except Exception as error:  # noqa: BLE001 - whatever RocksDB finds wrong
        report.problems.append(f"the index is damaged, and will be built anew: {error}")
        return
    try:
        for ledger_id, part in index.all_parts():
            place = f"ledger {ledger_id}, entries {part.first}..{part.last}"
            try:
                with segments.path(part.segment).open("rb") as file:
                    file.seek(part.offset)
                    body = file.read(part.size)
            except FileNotFoundError:
                report.problems.append(f"{place}: segment {part.segment} is missing")
                continue
            if google_crc32c.value(body) != part.crc:
                report.problems.append(f"{place}: damaged at {part.segment}:{part.offset}")
                continue
            run = Run(body[KEY_BYTES:])
            if run.ledger_id != ledger_id or any(run.index(e) is None for e in part.ids()):
                report.problems.append(f"{place}: {part.segment}:{part.offset} holds another run")
                continue
            report.entries_in_index += part.count
    finally:
        index.close()


def dumped(directory: Path) -> Iterator[dict[str, Any]]:
    """Each record of the log, without payloads."""
    for number, item, _ in segment_batches(Segments(directory / "log", 0)):
        if isinstance(item, Stop):
            if not item.is_blank:
                yield {"segment": number, "offset": item.offset, "stop": item.reason}
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
            if record.kind is Kind.RUN:
                run = Run(record.body[KEY_BYTES:])
                line |= {"first": run.first, "last": run.last, "count": run.count}
            yield line


def _taken(directory: Path) -> int:
    try:
        return locked(directory)
    except DirectoryInUse as error:
        typer.echo(f"{error}: stop the bookie first", err=True)
        raise typer.Exit(2) from None


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    lock = _taken(directory)
    try:
        yield
    finally:
        os.close(lock)


@app.command()
def verify(directory: Directory, *, json: AsJson = False) -> None:
    """Read all of the log and check each part of the index. Exit status 1: something is wrong."""
    with _alone(directory):
        report = verified(directory)
    if json:
        typer.echo(orjson.dumps(asdict(report), option=orjson.OPT_INDENT_2))
    else:
        cookie = read_cookie(directory)
        table = Table(title=cookie.member if cookie is not None else str(directory), min_width=40)
        table.add_column("what")
        table.add_column("found", justify="right")
        table.add_row("segments", f"{report.segments:,}")
        table.add_row("batches", f"{report.batches:,}")
        table.add_row("bytes of log", f"{report.log_bytes:,}")
        for kind, count in sorted(report.records.items()):
            table.add_row(f"records {kind}", f"{count:,}")
        table.add_row("entries in the index", f"{report.entries_in_index:,}")
        table.add_row("end of the log", report.tail)
        console = Console()
        console.print(table)
        for problem in report.problems:
            console.print(f"[bold red]problem[/] {problem}")
        if not report.problems:
            console.print("[green]nothing is wrong[/]")
    if report.problems:
        raise typer.Exit(1)


@app.command()
def dump(directory: Directory, *, json: AsJson = False) -> None:
    """List the records of the log, without payloads."""
    with _alone(directory):
        for line in dumped(directory):
            if json:
                typer.echo(orjson.dumps(line))
            else:
                typer.echo("  ".join(f"{name}={value}" for name, value in line.items()))


@app.command("rebuild-index")
def rebuild_index(directory: Directory, *, json: AsJson = False) -> None:
    """Throw the index away and build it anew from the log. Exit status 1: the log is damaged, and
    the index is as it was.
    """
    lock = _taken(directory)
    numbers = Segments(directory / "log", 0).numbers()
    cookie = read_cookie(directory)
    member = cookie.member if cookie else "bookie@0"
    console = Console(stderr=True)
    progress = Progress(console=console, transient=True, disable=not console.is_terminal)
    task = progress.add_task("segments", total=len(numbers))
    with _index_aside(directory), progress:
        try:
            store = Store(
                directory,
                member,
                StoreOptions(),
                lock_held=lock,
                on_segment=lambda: progress.advance(task),
            )
        except LogDamaged as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from None
        store.write_index()
    entries = ledgers = 0
    for _, row in store.ledgers():
        ledgers += 1
        entries += row.entry_count
    store.close()
    if json:
        made = {"segments": len(numbers), "ledgers": ledgers, "entries": entries}
        typer.echo(orjson.dumps(made))
    else:
        typer.echo(f"the index is built anew: {ledgers:,} ledgers, {entries:,} entries")


@contextmanager
def _index_aside(directory: Path) -> Iterator[None]:
    """Put the index away, for good where all goes well. A log that is damaged below the checkpoint
    can't give another one, and the bookie starts with this one still.
    """
    index, aside = directory / "index", directory / "index.aside"
    shutil.rmtree(aside, ignore_errors=True)
    if index.exists():
        index.rename(aside)
    try:
        yield
    except BaseException:
        if aside.exists():
            shutil.rmtree(index, ignore_errors=True)
            aside.rename(index)
        raise
    shutil.rmtree(aside, ignore_errors=True)


@app.command()
def salvage(
    directory: Directory,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    json: AsJson = False,
) -> None:
    """Keep what can be read of a log that is damaged and does not start; the bookie comes back as a
    new incarnation. The old log stays as log.damaged.
    """
    with _alone(directory):
        restored(directory)
        if not yes:
            typer.confirm(
                "What can't be read is given up here, and asked of the peers?", abort=True
            )
        numbers = Segments(directory / "log", 0).numbers()
        try:
            report = salvaged(directory, StoreOptions().segment_bytes, _with_bar(numbers))
        except OSError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from None
    if json:
        typer.echo(orjson.dumps(asdict(report), option=orjson.OPT_INDENT_2))
        return
    typer.echo(f"kept {report.records:,} records of {report.ledgers:,} ledgers")
    for place in report.unreadable:
        typer.echo(f"given up: {place}")
