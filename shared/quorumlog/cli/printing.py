"""Standard output of all commands: lines, tables and JSON."""

import re
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import orjson
import typer
from rich.console import Console
from rich.table import Table

from quorumlog.cli.ends import pipe_closed
from quorumlog.cli.pipes import Places
from quorumlog.cli.session import common_options, run
from quorumlog.client import Client

T = TypeVar("T")

WatchOption = Annotated[
    float | None,
    typer.Option("--watch", min=0.1, help="Repeat at this interval (seconds) until Ctrl-C."),
]


def show_repeatedly(
    work: Callable[[Client], Awaitable[T]],
    show: Callable[[T], None],
    every_s: float | None,
) -> None:
    """Show what `work` returns: once, or repeatedly until Ctrl-C."""
    while True:
        found = run(work)
        if every_s is not None and sys.stdout.isatty():
            StandardOutput().clear()
        show(found)
        if every_s is None:
            return
        time.sleep(every_s)


YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


def confirm_on_terminal(question: str, *, yes: bool) -> None:
    """Ask a person before what can't be undone. A script has no terminal, and is not asked. Raises: typer.Abort."""
    if not yes and sys.stdin.isatty():
        typer.confirm(question, abort=True, err=True)


class StandardOutput(Console):
    """Standard output, whose reader may close it."""

    def __init__(self) -> None:
        super().__init__(highlight=False)

    def on_broken_pipe(self) -> None:
        """End without a word, as other programs in a pipe do."""
        raise typer.Exit(pipe_closed())


def print_line(text: str) -> None:
    """Print one line, as it is."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise typer.Exit(pipe_closed()) from None


def print_json(value: Any) -> None:
    """Print one line of JSON."""
    print_line(orjson.dumps(value).decode())


def print_answer(value: Any, text: str | None = None) -> None:
    """Print a value as JSON under --json, else the text, where there is any."""
    if common_options().as_json:
        print_json(value)
    elif text is not None:
        print_line(text)


def print_places(place: str, subject: dict[str, Any], done: Places | None) -> None:
    """Print the first and the last place of what was appended; `place` is the API's word for it."""
    first, last = (done.first, done.last) if done else (None, None)
    text = f"{first}..{last}" if done else None
    print_answer({**subject, f"first_{place}": first, f"last_{place}": last}, text)


def text_of(name: str, value: Any) -> str:
    """A value as people read it, by its name in the API: sizes, durations and times in few letters, nothing for null."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {text_of(key, field)}" for key, field in value.items())
    if isinstance(value, list | tuple):
        return ("\n" if any(map(_is_nested, value)) else ", ").join(
            text_of("", item) for item in value
        )
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    if isinstance(value, int) and (name.endswith("bytes") or name == "length"):
        return _with_unit(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
    if isinstance(value, int) and name.endswith("_ms"):
        return _with_unit(value, 1000, ("ms", "s")) if value < 60_000 else f"{value // 60_000} min"
    if name.endswith("_at") or name == "at":
        return re.sub(r"T([\d:]{8})(\.\d+)?Z$", r" \1Z", str(value))
    return str(value)


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple)


def _with_unit(value: float, step: int, units: Sequence[str]) -> str:
    """A number with the largest unit of which there is one at least."""
    for unit in units[:-1]:
        if value < step:
            return f"{value:.4g} {unit}"
        value /= step
    return f"{value:.4g} {units[-1]}"


def print_object(value: Mapping[str, Any]) -> None:
    """Print a table of names and values, or JSON."""
    if common_options().as_json:
        print_json(value)
        return
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    # Wide values are wrapped: a truncated value helps nobody.
    table.add_column(overflow="fold")
    for name, field in value.items():
        table.add_row(name, text_of(name, field))
    StandardOutput().print(table)


def print_rows(rows: Sequence[Mapping[str, Any]], columns: tuple[str, ...]) -> None:
    """Print rows as a table, or as a line of JSON each."""
    if common_options().as_json:
        for row in rows:
            print_json(row)
        return
    table = Table(box=None)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(text_of(column, row.get(column)) for column in columns))
    StandardOutput().print(table)
