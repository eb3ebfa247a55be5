"""`quorumlog metadata …`: commands for the metadata's database. They ask the metadata service itself."""

import asyncio
import base64
import os
import secrets
from pathlib import Path
from typing import Annotated, Any

import typer

from quorumlog.cli.bookies import MetadataOption
from quorumlog.cli.ends import EndedEarly
from quorumlog.cli.operator import WorkEnded, ask, follow_work
from quorumlog.cli.printing import print_answer, print_json, print_line, print_rows
from quorumlog.cli.session import common_options, parse_urls, run_async
from quorumlog.errors import QuorumLogError

app = typer.Typer(no_args_is_help=True, help="The metadata's database. Asks the metadata service.")


@app.command(name="new-key")
def new_key(
    file: Annotated[Path, typer.Argument(help="The key file, which is made where there is none.")],
) -> None:
    """Add a key to a key file, behind its other keys: the first one of the file encrypts (docs/guides/keys.md)."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w") as keys:
        keys.write(base64.b64encode(secrets.token_bytes(32)).decode() + "\n")


@app.command()
def reseal(
    metadata: MetadataOption,
    after: Annotated[
        int, typer.Option(min=-1, help="Go on: only ledgers with ids above this one.")
    ] = -1,
) -> None:
    """Encrypt the keys of all ledgers under the first key of KEY_FILE. Afterwards its other keys are needed no more."""
    urls = ",".join(parse_urls(metadata))

    async def work() -> int:
        resealed, above = 0, after
        while True:
            query = "" if above < 0 else f"?after={above}"
            done: dict[str, Any] = await ask("POST", f"{urls}/v1/keys/reseal{query}")
            resealed += int(done["resealed"])
            if done["next"] is None:
                return resealed
            above = done["next"]

    count = run_async(work)
    print_answer({"resealed": count}, f"resealed: {count}")


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
    asked = {
        "dry_run": dry_run,
        "take_over": take_over,
        "bookies": bookie or [],
        "without": without or [],
        "after": after,
    }
    report = run_async(lambda: _rebuild(parse_urls(metadata)[0], asked))
    if common_options().as_json:
        print_json(report)
    else:
        _print_report(report)


async def _rebuild(url: str, ask: dict[str, Any]) -> dict[str, Any]:
    """The report; progress goes to standard error. Raises: EndedEarly, QuorumLogError."""
    through: int | None = None

    def note(line: dict[str, Any]) -> None:
        nonlocal through
        through = line.get("through", through)

    try:
        last = await follow_work([url], "/v1/rebuild", ask, note)
        if "error" in last:
            raise WorkEnded(last["error"])
        report: dict[str, Any] = last["report"]
    except (asyncio.CancelledError, QuorumLogError) as error:
        if through is None and isinstance(error, QuorumLogError):
            raise
        said = "the rebuild ended early"
        if through is not None:
            said += f": ledgers up to {through} are written; go on with --after {through}"
        why = error if isinstance(error, QuorumLogError) else None
        raise EndedEarly(said, {"through": through}, why) from None
    return report


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
    if report.get("may_be_deleted"):
        print_line(
            f"CLOSED ledgers of which only silent bookies may know a deletion: {report['may_be_deleted']}"
        )
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
