"""Shared by all commands: options, errors as exit statuses, tables and JSON."""

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final, TypeVar

import orjson
import typer
from rich.console import Console
from rich.table import Table

from quorumlog.cli.pipes import BATCHING, CutShort
from quorumlog.client import Client
from quorumlog.errors import UNKNOWN, NotFound, QuorumLogError

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
_INTERRUPTED: Final = 130
_PIPE_CLOSED: Final = 141
"""The statuses that a shell reports for a process that SIGINT or SIGPIPE ended."""
DEFAULT_GATEWAY = "http://127.0.0.1:8080"


def run(gateway: str, work: Callable[[Client], Awaitable[T]]) -> T:
    """Do work with a client; an error ends the process with the error's exit status."""

    async def in_session() -> T:
        async with Client(*gateway.split(","), batching=BATCHING) as client:
            return await work(client)

    try:
        return asyncio.run(in_session())
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of our output has closed it, so nothing may be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(_PIPE_CLOSED) from None
    except (CutShort, OSError) as error:
        Console(stderr=True, highlight=False).print(str(error), markup=False)
        raise typer.Exit(1) from None
    except QuorumLogError as error:
        raise failed(error) from None


def failed(error: QuorumLogError) -> typer.Exit:
    """Print an error, and return the exit status that tells programs what happened."""
    named = {"bookie": error.bookie, "entry": error.entry_id}
    where = ", ".join(f"{name} {value}" for name, value in named.items() if value is not None)
    message = f"{error.code}: {error.detail}" + (f" ({where})" if where else "")
    Console(stderr=True, highlight=False).print(message, markup=False)
    if error.outcome == UNKNOWN:
        return typer.Exit(3)
    return typer.Exit(4 if isinstance(error, NotFound) else 1)


def watched(
    gateway: str,
    work: Callable[[Client], Awaitable[T]],
    show: Callable[[T], None],
    every_s: float | None,
) -> None:
    """Show what `work` returns: once, or repeatedly until Ctrl-C."""
    try:
        while True:
            found = run(gateway, work)
            if every_s is not None and sys.stdout.isatty():
                Console().clear()
            show(found)
            if every_s is None:
                return
            time.sleep(every_s)
    except KeyboardInterrupt:
        return


def print_json(value: Any) -> None:
    """Print one line of JSON."""
    sys.stdout.write(orjson.dumps(value).decode() + "\n")
    sys.stdout.flush()


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
    Console(highlight=False).print(table)


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
    Console(highlight=False).print(table)
