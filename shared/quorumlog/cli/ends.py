"""How a command ends: the exit status, and what standard error says.

Under --json every error is one line of JSON on standard error, of one shape (`_document`), whoever found the
error: the shell's arguments, the input, the network or a server. Standard output has results only.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, TypeVar

import orjson
import typer
from rich.console import Console

from quorumlog.errors import NOT_DONE, UNKNOWN, NotFound, QuorumLogError

T = TypeVar("T")


class ExitStatus(IntEnum):
    """The exit statuses of all commands (docs/guides/cli.md)."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    UNKNOWN = 3
    MISSING = 4
    WAITED = 5
    INTERRUPTED = 130
    """As a shell reports a process that SIGINT ended."""
    PIPE_CLOSED = 141
    """As a shell reports a process that SIGPIPE ended."""


class CutShort(Exception):
    """The input is not what it should be: it ends within a record, say."""


class EndedEarly(Exception):
    """A long command was ended early, by an error or by Ctrl-C; the message says how far it came."""

    def __init__(self, said: str, members: Mapping[str, Any], why: Exception | None) -> None:
        super().__init__(said)
        self.members = members
        self.why = why


_WRONG_USAGE: Final[type[Exception]] = typer.BadParameter.__mro__[2]
"""click's base class of what is wrong with the arguments; typer has a click of its own in some versions,
and exports only this subclass."""


def is_json(arguments: Sequence[str]) -> bool:
    """Whether errors shall be JSON. Reads the unparsed arguments, since they may be what is wrong."""
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
        # Returns the status of typer.Exit, or what the command returns: None.
        return command(args=list(arguments), prog_name="quorumlog", standalone_mode=False) or 0
    except _WRONG_USAGE as error:
        return _print(ExitStatus.USAGE, "usage", error.format_message())  # type: ignore[attr-defined]
    except typer.Abort:
        return _print(ExitStatus.FAILED, "aborted", "nothing was done")
    except Exception as error:  # noqa: BLE001  (a defect of ours, which a program must still be able to read)
        return _print(ExitStatus.FAILED, "internal-error", f"{type(error).__name__}: {error}")


def finished(work: Callable[[], T], *, as_json: bool) -> T:
    """Do work and return its result; print an error and raise typer.Exit with the error's status."""
    try:
        return work()
    except KeyboardInterrupt:
        raise typer.Exit(tell_interrupted(as_json=as_json)) from None
    except BrokenPipeError:
        raise typer.Exit(pipe_closed()) from None
    except UnicodeEncodeError as error:
        raise typer.BadParameter(f"{os.fsencode(error.object)!r} is not UTF-8") from None
    except orjson.JSONDecodeError:  # a ValueError of a server's, not of the user's
        raise
    except ValueError as error:  # what the SDK refuses to send
        raise typer.BadParameter(str(error)) from None
    except (EndedEarly, CutShort, OSError, QuorumLogError) as error:
        raise typer.Exit(_tell(error, as_json=as_json)) from None


def tell_interrupted(*, as_json: bool) -> int:
    """Print that Ctrl-C ended the command, and return the exit status."""
    return _tell(EndedEarly("", {}, None), as_json=as_json)


def pipe_closed() -> int:
    """The status after the reader of our output has closed it; nothing is flushed to it at exit."""
    _drop_output()
    return ExitStatus.PIPE_CLOSED


def flush_output() -> None:
    """Flush standard output at exit; a failure was reported before, and Python must not report it again."""
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell(error: Exception, *, as_json: bool) -> int:
    """Print an error with what was done before it, and return the exit status."""
    why = error.why if isinstance(error, EndedEarly) else error
    status, code, detail = _named(why)
    so_far = str(error) if isinstance(error, EndedEarly) else ""
    if not as_json:
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
    """The status, the code and the sentence of what ended a command; None: Ctrl-C."""
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
    """Print the one shape of all errors: after the API's problem documents, with the exit status."""
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
