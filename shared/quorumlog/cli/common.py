"""Shared by all commands: options, tables and JSON."""

import sys
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import orjson
import typer
from rich.console import Console
from rich.table import Table

from quorumlog.cli.ends import Status, pipe_closed
from quorumlog.cli.session import run
from quorumlog.client import Client

T = TypeVar("T")

GatewayOption = Annotated[
    str,
    typer.Option(
        "--gateway", envvar="QUORUMLOG_GATEWAY", help="URLs of gateways, separated by commas."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
WatchOption = Annotated[
    float | None,
    typer.Option("--watch", min=0.1, help="Repeat at this interval (seconds) until Ctrl-C."),
]
DEFAULT_GATEWAY = "http://127.0.0.1:8080"


def watched(
    gateway: str,
    work: Callable[[Client], Awaitable[T]],
    show: Callable[[T], None],
    every_s: float | None,
) -> None:
    """Show what `work` returns: once, or repeatedly until Ctrl-C."""
    while True:
        found = run(gateway, work)
        if every_s is not None and sys.stdout.isatty():
            Out().clear()
        show(found)
        if every_s is None:
            return
        try:
            time.sleep(every_s)
        except KeyboardInterrupt:
            raise typer.Exit(Status.INTERRUPTED) from None


class Out(Console):
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


def print_object(value: dict[str, Any], *, as_json: bool) -> None:
    """Print a table of names and values, or JSON."""
    if as_json:
        print_json(value)
        return
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    # Wide values are wrapped: a truncated value helps nobody.
    table.add_column(overflow="fold")
    for name, field in value.items():
        text = field if isinstance(field, str) else orjson.dumps(field).decode()
        table.add_row(name, text)
    Out().print(table)


def print_rows(rows: list[dict[str, Any]], columns: tuple[str, ...], *, as_json: bool) -> None:
    """Print rows as a table, or as a line of JSON each."""
    if as_json:
        for row in rows:
            print_json(row)
        return
    table = Table(box=None)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    Out().print(table)
