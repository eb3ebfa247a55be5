"""Output of all commands (lines, tables and JSON), their errors and exit statuses.

With --json every error is one line of JSON on standard error. All errors have the same members
(`_print`), whether the arguments, the input, the network or a server caused them. Standard output
has results only.
"""

import contextlib
import os
import re
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Any, Final, TypeVar

import orjson
import typer
from rich import progress as bars
from rich.console import Console
from rich.table import Table

from quorumlog.errors import NOT_DONE, UNKNOWN, NotFound, QuorumLogError

T = TypeVar("T")

GATEWAY: Final = "http://127.0.0.1:8080"
TIMEOUT_S: Final = 30.0
"""Default timeout: longer than a log's takeover, but not too long for a person to wait."""


@dataclass(frozen=True, slots=True)
class CommonOptions:
    """The values of the options that every command has (`session.with_common_options`)."""

    gateway: str = GATEWAY
    as_json: bool = False
    timeout_s: float = TIMEOUT_S
    is_quiet: bool = False
    operator_headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Headers with the cluster's secret, for requests to the services behind the gateways."""
    token: str | Callable[[], str] | None = field(default=None, repr=False)
    """The caller's access token, for gateways that require one."""
    compression: str | None = None
    """The content coding of requests to gateways and of their responses."""
    operator_context: ssl.SSLContext | None = None
    """The TLS context for requests to the services behind the gateways."""

    @property
    def shows_notices(self) -> bool:
        """Whether notices may be printed on standard error, in addition to errors."""
        return not self.is_quiet and not self.as_json


COMMON_OPTIONS: Final[ContextVar[CommonOptions]] = ContextVar(
    "options",
    default=CommonOptions(),  # noqa: B039  (frozen)
)


def common_options() -> CommonOptions:
    """The common options of the running command."""
    return COMMON_OPTIONS.get()


# --- how a command ends ----------------------------------------------------------------------------


class ExitStatus(IntEnum):
    """The exit statuses of all commands (docs/guides/cli.md)."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    UNKNOWN = 3
    MISSING = 4
    WAITED = 5
    INTERRUPTED = 130
    """The status that a shell reports for a process ended by SIGINT (Ctrl-C)."""
    PIPE_CLOSED = 141
    """The status that a shell reports for a process ended by SIGPIPE."""


class CutShort(Exception):
    """The input is malformed; for example, it ends within a record."""


class EndedEarly(Exception):
    """An error or Ctrl-C ended a long command early. The message says how far the command got."""

    def __init__(self, said: str, members: Mapping[str, Any], why: BaseException | None) -> None:
        super().__init__(said)
        self.members = members
        self.why = why if isinstance(why, Exception) else None  # None for Ctrl-C


_WRONG_USAGE: Final[type[Exception]] = typer.BadParameter.__mro__[2]
"""click's base class for wrong usage. Some versions of typer export only BadParameter."""


def is_json(arguments: Sequence[str]) -> bool:
    """Whether errors are printed as JSON. Reads unparsed arguments, since parsing may fail."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options


def run_command(command: Callable[..., Any], arguments: Sequence[str]) -> int:
    """Run the command that the arguments name, and return its exit status."""
    if not is_json(arguments):
        try:
            command(args=list(arguments), prog_name="quorumlog")
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(bool(end.code))
        except OSError as error:  # standard output on a full disk
            print_error(str(error))
            return ExitStatus.FAILED
        return ExitStatus.DONE
    try:
        # The call returns the status of typer.Exit, or the command's result, which is None.
        return command(args=list(arguments), prog_name="quorumlog", standalone_mode=False) or 0
    except _WRONG_USAGE as error:
        return _print(ExitStatus.USAGE, "usage", error.format_message())  # type: ignore[attr-defined]
    except typer.Abort:
        return _print(ExitStatus.FAILED, "aborted", "nothing was done")
    except Exception as error:  # noqa: BLE001  (a defect of quorumlog, also printed as JSON)
        return _print(ExitStatus.FAILED, "internal-error", f"{type(error).__name__}: {error}")


def finished(work: Callable[[], T]) -> T:
    """Run `work` and return its result, or print its error and raise typer.Exit with its status."""
    try:
        return work()
    except KeyboardInterrupt:
        raise typer.Exit(_notify(EndedEarly("", {}, None))) from None
    except BrokenPipeError:
        raise typer.Exit(pipe_closed()) from None
    except UnicodeEncodeError as error:
        raise typer.BadParameter(f"{os.fsencode(error.object)!r} must be valid UTF-8") from None
    except orjson.JSONDecodeError:  # a ValueError caused by a server, not by the user
        raise
    except ValueError as error:  # the SDK rejects an argument
        raise typer.BadParameter(str(error)) from None
    except (EndedEarly, CutShort, OSError, QuorumLogError) as error:
        raise typer.Exit(_notify(error)) from None


def pipe_closed() -> int:
    """Discard unflushed output, and return the status for a closed standard output."""
    _drop_output()
    return ExitStatus.PIPE_CLOSED


def flush_output() -> None:
    """Flush standard output at exit. Ignores a failure, which was already reported."""
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _notify(error: Exception) -> int:
    """Print an error, preceded by the command's progress, and return the exit status."""
    why = error.why if isinstance(error, EndedEarly) else error
    status, code, detail = _named(why)
    so_far = str(error) if isinstance(error, EndedEarly) else ""
    if not common_options().as_json:
        if so_far:
            print_error(so_far)
        print_error(f"{code}: {detail}" if isinstance(why, QuorumLogError) else detail)
        return status
    members = dict(error.members) if isinstance(error, EndedEarly) else {}
    if isinstance(why, QuorumLogError):
        named = {"ledger_id": why.ledger_id, "entry_id": why.entry_id, "bookie": why.bookie}
        members |= {name: value for name, value in named.items() if value is not None}
        members |= {"retryable": why.retryable, "outcome": why.outcome}
    detail = "; ".join(part for part in (so_far, detail) if part)
    return _print(status, code, detail, **members)


def _named(why: Exception | None) -> tuple[ExitStatus, str, str]:
    """The exit status, code and detail of a command's error. `why` is None for Ctrl-C."""
    if why is None:
        return ExitStatus.INTERRUPTED, "interrupted", "interrupted"
    if not isinstance(why, QuorumLogError):
        return ExitStatus.FAILED, "input" if isinstance(why, CutShort) else "os-error", str(why)
    named = {"bookie": why.bookie, "entry": why.entry_id}
    where = ", ".join(f"{name} {value}" for name, value in named.items() if value is not None)
    detail = why.detail + (f" ({where})" if where else "")
    if why.outcome == UNKNOWN:
        return ExitStatus.UNKNOWN, why.code, detail
    return ExitStatus.MISSING if isinstance(why, NotFound) else ExitStatus.FAILED, why.code, detail


def _print(status: ExitStatus, code: str, detail: str, **members: Any) -> int:
    """Print an error as JSON, like a problem document of the API, with the exit status."""
    outcome = UNKNOWN if status in (ExitStatus.UNKNOWN, ExitStatus.INTERRUPTED) else NOT_DONE
    shown = {
        "code": code,
        "detail": detail,
        "retryable": False,
        "outcome": outcome,
        "exit_status": int(status),
        **members,
    }
    sys.stderr.write(orjson.dumps(shown, default=str).decode() + "\n")
    return status


def print_error(line: str) -> None:
    """Print a line on standard error."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(line, markup=False)


# --- what a command prints -----------------------------------------------------------------------

YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


def confirm_on_terminal(question: str, *, yes: bool) -> None:
    """Ask for confirmation on a terminal; scripts are not asked. Raises: typer.Abort."""
    if not yes and sys.stdin.isatty():
        typer.confirm(question, abort=True, err=True)


class StandardOutput(Console):
    """Standard output. The command ends if the reader of the output closes it."""

    def __init__(self) -> None:
        super().__init__(highlight=False)

    def on_broken_pipe(self) -> None:
        """End the command without a message, as other programs in a pipe do."""
        raise typer.Exit(pipe_closed())


def print_line(text: str) -> None:
    """Print one line, without markup or wrapping."""
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise typer.Exit(pipe_closed()) from None


def print_json(value: Any) -> None:
    """Print one line of JSON."""
    print_line(orjson.dumps(value).decode())


def print_value(value: T, show: Callable[[T], None]) -> None:
    """Print a value: as JSON with --json, otherwise with `show`."""
    (print_json if common_options().as_json else show)(value)


def print_answer(value: Any, text: str | None = None) -> None:
    """Print a value as JSON with --json, otherwise the text unless it is None."""
    if common_options().as_json:
        print_json(value)
    elif text is not None:
        print_line(text)


def text_of(name: str, value: Any) -> str:
    """Format a member of the API for people: sizes, durations and times in short form, and "" for
    null. The member's `name` determines its unit.
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {text_of(key, item)}" for key, item in value.items())
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
    """Format a number with the largest unit in which it is at least 1."""
    for unit in units[:-1]:
        if value < step:
            return f"{value:.4g} {unit}"
        value /= step
    return f"{value:.4g} {units[-1]}"


def print_object(value: Mapping[str, Any]) -> None:
    """Print an object as a table of names and values, or with --json as JSON."""
    if common_options().as_json:
        print_json(value)
        return
    table = Table(show_header=False, box=None)
    table.add_column(no_wrap=True)
    # Wide values are wrapped, because a truncated value is of no use.
    table.add_column(overflow="fold")
    for name, item in value.items():
        table.add_row(name, text_of(name, item))
    StandardOutput().print(table)


def print_rows(rows: Sequence[Mapping[str, Any]], columns: tuple[str, ...]) -> None:
    """Print rows as a table, or with --json each row as a line of JSON."""
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


# --- progress --------------------------------------------------------------------------------------

Progressed = Callable[[int, int], None]
"""Updates a progress bar. Arguments: the number of records, and of bytes, so far."""


def is_progress_shown() -> bool:
    """Whether standard error is a terminal, and the options do not forbid a progress bar."""
    return sys.stderr.isatty() and common_options().shows_notices


def bar_of(*columns: bars.ProgressColumn, is_hidden: bool = False) -> bars.Progress:
    """A progress bar on standard error, which is erased at its end."""
    console = Console(stderr=True, highlight=False)
    hidden = is_hidden or not is_progress_shown()
    return bars.Progress(*columns, console=console, transient=True, disable=hidden)


@contextlib.contextmanager
def progress(
    what: str, size: int | None, unit: str = "bytes", *, is_hidden: bool = False
) -> Iterator[Progressed]:
    """Show a progress bar on standard error if it is a terminal. Without `size`, show a counter.

    `size`: the total in `unit`, which is bytes or items.
    """
    counter = bars.TextColumn("{task.fields[count]:,} " + what)
    known = (bars.BarColumn(), bars.TaskProgressColumn(), counter, bars.TimeRemainingColumn())
    columns = (bars.SpinnerColumn(), counter, bars.TimeElapsedColumn()) if size is None else known
    with bar_of(*columns, is_hidden=is_hidden) as bar:
        task = bar.add_task(what, total=size, count=0)

        def show(count: int, done_bytes: int) -> None:
            bar.update(task, completed=done_bytes if unit == "bytes" else count, count=count)

        yield show
