"""The commands `quorumlog cluster …`, and `quorumlog metadata …` for the metadata service."""

import asyncio
import base64
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from quorumlog.cli.operator import MetadataOption, WorkEnded, ask_metadata, bare, follow_work
from quorumlog.cli.output import (
    EndedEarly,
    ExitStatus,
    common_options,
    print_answer,
    print_json,
    print_line,
    print_rows,
    print_value,
    text_of,
)
from quorumlog.cli.session import WatchOption, parse_urls, run, run_async, show_repeatedly
from quorumlog.client import Client
from quorumlog.errors import QuorumLogError, by_code

_AUDIT_COLUMNS = ("at", "operation", "target", "who", "remote", "via")

app = typer.Typer(no_args_is_help=True, help="The state of the cluster.")
metadata_app = typer.Typer(
    no_args_is_help=True,
    help="The metadata database. Sends requests to the metadata service.",
)


@app.command()
def status(watch: WatchOption = None) -> None:
    """Print every service with its state, and the number of under-replicated ledgers."""
    show_repeatedly(lambda client: client.cluster(), _print_cluster, watch)


def _print_cluster(found: Mapping[str, Any]) -> None:
    print_rows(found["bookies"], ("id", "state", "url", "zone", "free_bytes"))
    print_rows(found["services"], ("kind", "state", "url", "id"))
    for missing in found.get("missing_witnesses", []):
        print_line(
            f"THE DATABASE WENT BACK: it lacks {missing['witness']}, held by {missing['holder']}"
        )
    if found.get("kept_count"):
        some = "; ".join(
            f"{kept['ledger_id']} at {', '.join(kept['holders'])}" for kept in found["kept_ledgers"]
        )
        print_line(
            f"ledgers that bookies keep because the database lacks their metadata: {found['kept_count']} ({some})"
        )
    print_line(f"under-replicated ledgers: {found['under_replicated_count']}")
    for title, name in (
        ("quarantined by this gateway", "quarantined"),
        ("degraded ledgers", "degraded_ledgers"),
    ):
        print_line(f"{title}: {text_of(name, found.get(name, [])) or 'none'}")


@app.command()
def audit(
    since: Annotated[
        str | None,
        typer.Option(help="Print only changes from this time on, such as 2026-01-02T03:04:05Z."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Print only changes of this object: logs/NAME, ledgers/ID or tokens/ID."),
    ] = None,
) -> None:
    """Print who changed what: deletions, recoveries, accepted losses, changes of logs, tokens, bookies and settings."""

    async def show(client: Client) -> None:
        async for row in client.audit(since=since, target=target):
            if common_options().as_json:
                print_json(row)
            else:
                print_line("  ".join(text_of(name, row[name]) for name in _AUDIT_COLUMNS))

    run(show)


@app.command()
def witnesses(
    metadata: MetadataOption,
    limit: Annotated[
        int, typer.Option(min=1, max=10_000, help="Print at most this many kept ledgers.")
    ] = 20,
) -> None:
    """Print whether the database lacks acknowledged changes. Lists the witnesses that the metadata
    service checks, the missing witnesses with their holders, and the ledgers whose entries bookies
    keep because only bookies have the metadata. Exit status 1 if any witness is missing or any
    ledger is kept.
    """
    state = ask_metadata("GET", metadata, "/v1/witnesses")
    kept = ask_metadata("GET", metadata, f"/v1/kept-ledgers?limit={limit}")
    found = {**state, "kept_count": kept["count"], "kept_ledgers": kept["ledgers"]}
    print_value(found, _print_witnesses)
    if found["missing"] or found["kept_count"]:
        raise typer.Exit(ExitStatus.FAILED)


def _print_witnesses(found: dict[str, Any]) -> None:
    print_line(f"held witnesses: {len(found['held'])}")
    for witness in found["held"]:
        print_line(f"  {witness}")
    print_line(f"missing witnesses: {len(found['missing'])}")
    if found["missing"]:
        print_rows(found["missing"], ("witness", "holder"))
    print_line(f"kept ledgers: {found['kept_count']}")
    if found["kept_ledgers"]:
        rows = [
            {**ledger, "holders": ", ".join(ledger["holders"])} for ledger in found["kept_ledgers"]
        ]
        print_rows(rows, ("ledger_id", "holders"))


@app.command()
def accept(
    metadata: MetadataOption,
    witnesses: Annotated[
        list[str] | None,
        typer.Argument(help="The witnesses that the database lacks (GET /v1/witnesses)."),
    ] = None,
    lost: Annotated[
        list[str] | None,
        typer.Option(help="A bookie that never returns. The command does not wait for it."),
    ] = None,
    ledger: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="A ledger whose recovery or deletion fails with copy-lost: complete it with the database's metadata."
            " The ledger may lack entries for ever.",
        ),
    ] = None,
) -> None:
    """Continue with a database that was set back to an earlier state, and accept that the changes of
    these witnesses are lost. Read the runbook first. Every registered bookie must respond, except
    those named with --lost. Run `quorumlog metadata rebuild` first: the command fails while bookies
    have copies of metadata that a rebuild would write.
    """
    given, names = witnesses or [], [bare(name) for name in lost or ()]
    body = {"witnesses": given, "lost": names, "ledgers": ledger or []}

    async def work() -> dict[str, Any]:
        last = await follow_work(parse_urls(metadata), "/v1/witnesses/accept", body)
        if "error" in last:
            raise by_code(last.get("code", ""))(last["error"])
        state: dict[str, Any] = last["state"]
        return state

    state = run_async(work)
    print_answer(state, f"accepted as lost: {len(given)}; still missing: {len(state['missing'])}")


# --- the metadata's database -----------------------------------------------------------------------


@metadata_app.command(name="new-key")
def new_key(
    file: Annotated[Path, typer.Argument(help="The key file. It is created if it does not exist.")],
) -> None:
    """Append a new key to a key file. The first key in the file encrypts (docs/guides/keys.md)."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w") as keys:
        keys.write(base64.b64encode(secrets.token_bytes(32)).decode() + "\n")


@metadata_app.command()
def reseal(
    metadata: MetadataOption,
    after: Annotated[
        int,
        typer.Option(min=-1, help="Continue an earlier run: only ledgers with ids above this one."),
    ] = -1,
) -> None:
    """Encrypt all ledgers' keys with KEY_FILE's first key. Other keys are then not needed."""
    count, above = 0, after
    while above is not None:
        query = "" if above < 0 else f"?after={above}"
        done = ask_metadata("POST", metadata, f"/v1/keys/reseal{query}")
        count, above = count + int(done["resealed"]), done["next"]
    print_answer({"resealed": count}, f"resealed: {count}")


@metadata_app.command()
def rebuild(
    metadata: MetadataOption,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be written.")
    ] = False,
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over",
            help="If the lost database never comes back: give an empty database the bookies' cluster id, and accept the"
            " loss of changes that bookies know of, but have no copies of.",
        ),
    ] = False,
    bookie: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of a further bookie to query, besides those that are registered or waiting to register."
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without",
            help="A bookie that is gone for ever, or that lost its earlier directory. The rebuild of open ledgers does not wait"
            " for it.",
        ),
    ] = None,
    after: Annotated[
        int | None,
        typer.Option(
            min=0, help="Continue an earlier run: write only ledgers with ids above this one."
        ),
    ] = None,
) -> None:
    """Rebuild the database's missing metadata from copies on bookies (docs/guides/rebuild.md)."""
    asked = {
        "dry_run": dry_run,
        "take_over": take_over,
        "bookies": bookie or [],
        "without": without or [],
        "after": after,
    }
    report = run_async(lambda: _rebuild(parse_urls(metadata)[0], asked))
    print_value(report, _print_report)


async def _rebuild(url: str, ask: dict[str, Any]) -> dict[str, Any]:
    """Run a rebuild, show its progress, return its report. Raises: EndedEarly, QuorumLogError."""
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
            said += f": ledgers up to {through} are written; continue with --after {through}"
        raise EndedEarly(said, {"through": through}, error) from None
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
            f"CLOSED ledgers that may have been deleted (only silent or emptied bookies would know): {report['may_be_deleted']}"
        )
    if report["sealed_passwords"]:
        print_line(
            f"ledgers with a password: {report['sealed_passwords']}; only the passwords can recover their keys"
        )
    if report["holes"]:
        print_line(f"holes in logs: {report['holes']} ledgers without metadata; reads fail there")
    if any(report[kind].get("write") for kind in ("ledgers", "logs")):
        print_line(f"not rebuilt, because no bookie has copies: {', '.join(report['not_rebuilt'])}")
    print_line(f"new ledgers get ids from {report['next_ledger_id']} on")
    rows = [
        {"subject": f"ledger {row['ledger_id']}" if "ledger_id" in row else f"log {row['log']}"}
        | row
        for row in report["findings"]
    ]
    if rows:
        print_rows(rows, ("subject", "action", "why"))
    if left_out := report.get("findings_left_out"):
        print_line(f"and {left_out} more")
