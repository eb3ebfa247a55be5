"""`quorumlog metadata …`: commands for the metadata's database. They ask the metadata service itself."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Final

import aiohttp
import orjson
import typer
from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn

from quorumlog.cli.cookies import MetadataOption
from quorumlog.cli.ends import EndedEarly
from quorumlog.cli.pipes import bar_of
from quorumlog.cli.printing import print_json, print_line, print_rows
from quorumlog.cli.session import common_options, parse_urls, run_async
from quorumlog.errors import NOT_DONE, UNKNOWN, ConnectionLost, QuorumLogError
from quorumlog.wire.problems import from_answer

app = typer.Typer(no_args_is_help=True, help="The metadata's database. Asks the metadata service.")

_LINE_BYTES: Final = 1 << 22
"""A report has up to 1,000 findings."""

_PHASES: Final = {"survey": "ledgers counted", "ledgers": "ledgers"}


class RebuildEnded(
    QuorumLogError, code="rebuild-ended", title="The rebuild ended early", travels=False
):
    """A rebuild ended before its report. What it wrote stays, and a repeat changes nothing of it."""

    outcome = UNKNOWN


@app.callback()
def group() -> None:
    """Keep `rebuild` a command of the group, though it is the only one."""


@app.command()
def rebuild(
    metadata: MetadataOption,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what would be written.")] = False,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="The lost database never comes back: an empty one becomes that of the bookies' cluster, and what"
            " bookies know of changes that nobody has is accepted as lost.",
        ),
    ] = False,
    bookie: Annotated[
        list[str] | None,
        typer.Option("--bookie", help="A bookie's URL, beside those that are registered or wait."),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without", help="A bookie that is gone for ever: open ledgers do not wait for it."
        ),
    ] = None,
    after: Annotated[
        int | None,
        typer.Option("--after", min=0, help="Go on: write only ledgers with ids above this one."),
    ] = None,
) -> None:
    """Make the rows that the database lacks again from what the bookies hold (docs/guides/rebuild.md)."""
    ask = {
        "dry_run": dry_run,
        "take_over": take_over,
        "bookies": bookie or [],
        "without": without or [],
        "after": after,
    }
    report = run_async(lambda: _rebuild(parse_urls(metadata)[0], ask))
    if common_options().as_json:
        print_json(report)
    else:
        _print_report(report)


async def _rebuild(url: str, ask: dict[str, Any]) -> dict[str, Any]:
    """The report; progress goes to standard error. Raises: EndedEarly, QuorumLogError."""
    through: int | None = None
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    try:
        with bar_of(*columns) as bar:
            task = bar.add_task("asking the bookies", total=None)
            async with aclosing(_lines(url, ask)) as lines:
                async for line in lines:
                    if "error" in line:
                        raise RebuildEnded(line["error"])
                    if "report" in line:
                        report: dict[str, Any] = line["report"]
                        return report
                    through = line.get("through", through)
                    done, phase = line.get("done", 0), _PHASES.get(line.get("phase", ""), "")
                    text = f"{done:,} {phase}"
                    bar.update(task, description=text, completed=done, total=line.get("of"))
        raise RebuildEnded("the metadata service ended the answer without a report; see its log")
    except (asyncio.CancelledError, QuorumLogError) as error:
        if through is None and isinstance(error, QuorumLogError):
            raise
        said = "the rebuild ended early"
        if through is not None:
            said += f": ledgers up to {through} are written; go on with --after {through}"
        why = error if isinstance(error, QuorumLogError) else None
        raise EndedEarly(said, {"through": through}, why) from None


async def _lines(url: str, ask: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=common_options().timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, read_bufsize=_LINE_BYTES) as session,
            session.post(f"{url.rstrip('/')}/v1/rebuild", json=ask) as answer,
        ):
            if answer.status != 200:
                raise from_answer(answer.status, await answer.read(), answer.headers)
            async for line in answer.content:
                yield orjson.loads(line)
    except aiohttp.ClientConnectorError as error:
        raise ConnectionLost(f"{url}: {error}", outcome=NOT_DONE) from error
    except (aiohttp.ClientError, OSError) as error:
        raise RebuildEnded(f"{url} does not answer: {error!r}") from error


def _print_report(report: dict[str, Any]) -> None:
    tense = "would be done" if report["dry_run"] else "done"
    print_line(f"cluster {report['cluster_id']}, {len(report['bookies'])} bookies answered")
    if report["silent"]:
        print_line(f"silent: {', '.join(report['silent'])}")
    for kind in ("ledgers", "logs"):
        found = ", ".join(f"{count} {action}" for action, count in report[kind].items())
        print_line(f"{kind} ({tense}): {found or 'none'}")
    if report["open_ledgers"]:
        print_line(f"open ledgers: {report['open_ledgers']}; autorecovery recovers them")
    if report["sealed_passwords"]:
        print_line(
            f"ledgers with a password: {report['sealed_passwords']}; only their passwords give their keys"
        )
    if report["holes"]:
        print_line(f"holes in logs: {report['holes']} ledgers without rows; reads fail there")
    if any(report[kind].get("write") for kind in ("ledgers", "logs")):
        print_line(f"on no bookie, and not rebuilt: {', '.join(report['not_rebuilt'])}")
    print_line(f"new ledgers have ids from {report['next_ledger_id']} on")
    rows = [
        {"subject": f"ledger {row['ledger_id']}" if "ledger_id" in row else f"log {row['log']}"}
        | row
        for row in report["findings"]
    ]
    if rows:
        print_rows(rows, ("subject", "action", "why"))
    if left_out := report.get("findings_left_out"):
        print_line(f"and {left_out} more")
