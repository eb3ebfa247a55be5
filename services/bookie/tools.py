"""Commands for the data directory of a stopped bookie: verify, dump, rebuild-index, salvage."""

import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Final, TypeVar

import orjson
import typer
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table
from rich.text import Text

from quorumlog.net.settings import command_line
from services.bookie import inspection
from services.bookie.config import Config, StoreOptions
from services.bookie.cookie import CookieRefused, LocalCookie, read_cookie
from services.bookie.directory import DirectoryInUse, DirectoryTooNew, lock_directory
from services.bookie.log import LogDamaged
from services.bookie.segments import Segments
from services.bookie.store import Store

T = TypeVar("T")

app = typer.Typer(
    help="Inspect and mend a bookie's data directory. The bookie must be stopped.",
    no_args_is_help=True,
    add_completion=False,
)
DirectoryArgument = Annotated[
    Path, typer.Argument(help="the bookie's DATA_DIR", exists=True, file_okay=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="for programs: JSON instead of tables")]


def _with_progress(items: Iterable[T], what: str) -> Iterable[T]:
    """Iterate with a progress bar on standard error; an unknown total shows only activity."""
    console = Console(stderr=True)
    return track(items, what, console=console, transient=True, disable=not console.is_terminal)


_with_bar: Final = partial(_with_progress, what="segments")
_parts_with_bar: Final = partial(_with_progress, what="parts of the index")


def _lock_or_exit(directory: Path) -> int:
    """Lock the directory. If the directory has no log or is in use, exit without writing."""
    if not any((directory / name).is_dir() for name in ("log", "log.damaged")):
        typer.echo(f"{directory} does not contain a bookie's log", err=True)
        raise typer.Exit(2)
    try:
        return lock_directory(directory)
    except (DirectoryInUse, DirectoryTooNew) as error:
        hint = ": stop the bookie first" if isinstance(error, DirectoryInUse) else ""
        typer.echo(f"{error}{hint}", err=True)
        raise typer.Exit(2) from None


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    lock = _lock_or_exit(directory)
    try:
        yield
    finally:
        os.close(lock)


def _cookie(directory: Path) -> LocalCookie | None:
    try:
        return read_cookie(directory)
    except CookieRefused as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


@app.command()
def verify(directory: DirectoryArgument, *, json: AsJson = False) -> None:
    """Read the whole log and check each part of the index. Exits with 1 if there are problems."""
    with _locked(directory):
        report = inspection.verify_directory(directory, _with_bar, _parts_with_bar)
    if json:
        typer.echo(orjson.dumps(asdict(report), option=orjson.OPT_INDENT_2))
    else:
        table = Table(title=str(directory), min_width=40)
        table.add_column("what")
        table.add_column("found", justify="right")
        for what, count in (
            ("segments", report.segments),
            ("batches", report.batches),
            ("bytes of log", report.log_bytes),
            *((f"records {kind}", count) for kind, count in sorted(report.records.items())),
            ("deleted ledgers in the log", report.deleted_ledgers),
            ("entries in the index", report.entries_in_index),
        ):
            table.add_row(what, f"{count:,}")
        table.add_row("end of the log", report.tail)
        console = Console()
        console.print(table)
        for problem in report.problems:
            console.print(Text.assemble(("problem ", "bold red"), problem))
        if not report.problems:
            console.print("[green]nothing is wrong[/]")
    if report.problems:
        raise typer.Exit(1)


@app.command()
def dump(directory: DirectoryArgument, *, json: AsJson = False) -> None:
    """List the log's records without payloads, and problems. Exits with 1 on problems."""
    with _locked(directory):
        is_right = True
        # A progress bar among the output lines would garble them.
        shown = iter if sys.stdout.isatty() else _with_bar
        for line in inspection.dump_records(directory, shown):
            is_right = is_right and "problem" not in line
            if json:
                typer.echo(orjson.dumps(line))
            else:
                typer.echo("  ".join(f"{name}={value}" for name, value in line.items()))
    if not is_right:
        raise typer.Exit(1)


@app.command("rebuild-index")
def rebuild_index(directory: DirectoryArgument, *, json: AsJson = False) -> None:
    """Rebuild the index from the log. If the log is damaged, exits with 1 and keeps the index."""
    lock = _lock_or_exit(directory)
    numbers = Segments(directory / "log", 0).numbers()
    cookie = _cookie(directory)
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
        store.holdings.write_index(store.position)
    counts = Counter(segments=len(numbers), ledgers=0, entries=0, deleted_ledgers=0)
    for _, row in store.holdings.ledgers():
        counts["ledgers"] += 1
        counts["entries"] += row.entry_count
    counts["deleted_ledgers"] = sum(1 for _ in store.index.deleted())
    store.close()
    if json:
        typer.echo(orjson.dumps(dict(counts)))
    else:
        typer.echo(
            f"the index is rebuilt: {counts['ledgers']:,} ledgers, {counts['entries']:,} entries,"
            f" {counts['deleted_ledgers']:,} deleted ledgers"
        )


@contextmanager
def _index_aside(directory: Path) -> Iterator[None]:
    """Move the index aside, and back if the rebuild fails: a bookie can start with the old one."""
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
    directory: DirectoryArgument,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    json: AsJson = False,
) -> None:
    """Keep the readable records of a log that is too damaged to start. The bookie continues as a
    new incarnation, and the old log stays as log.damaged.
    """
    with _locked(directory):
        _cookie(directory)  # the salvage marks the cookie, so it must be readable
        inspection.undo_salvage(directory)
        if not yes:
            typer.confirm(
                "Give up unreadable records here, and have the peers restore them?", abort=True
            )
        numbers = Segments(directory / "log", 0).numbers()
        try:
            report = inspection.salvage_log(
                directory, StoreOptions().segment_bytes, _with_bar(numbers)
            )
        except OSError as error:
            typer.echo(error.strerror or str(error), err=True)
            raise typer.Exit(1) from None
    if json:
        typer.echo(orjson.dumps(asdict(report), option=orjson.OPT_INDENT_2))
        return
    typer.echo(f"kept {report.records:,} records of {report.ledgers:,} ledgers")
    for place in report.unreadable:
        typer.echo(f"given up: {place}")


def run() -> None:
    """Run the command that the arguments name, or print the settings."""
    command_line("services.bookie", Config, app)(prog_name="python -m services.bookie")
