"""`quorumlog cluster …`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from quorumlog.cli.bookies import MetadataOption
from quorumlog.cli.ends import ExitStatus
from quorumlog.cli.operator import ask, bare, follow_work
from quorumlog.cli.printing import (
    WatchOption,
    print_answer,
    print_json,
    print_line,
    print_rows,
    show_repeatedly,
    text_of,
)
from quorumlog.cli.session import common_options, parse_urls, run, run_async
from quorumlog.client import Client
from quorumlog.errors import by_code

_AUDIT_COLUMNS = ("at", "operation", "target", "who", "remote", "via")

app = typer.Typer(no_args_is_help=True, help="The state of the cluster.")

WitnessesArgument = Annotated[
    list[str] | None,
    typer.Argument(help="The witnesses that the database lacks (GET /v1/witnesses)."),
]
LostOption = Annotated[
    list[str] | None,
    typer.Option("--lost", help="A bookie that never returns, so that it need not answer."),
]

LedgerOption = Annotated[
    list[int] | None,
    typer.Option(
        "--ledger",
        min=0,
        help="A ledger that is refused with copy-lost: end it by the database's row. It may lack entries for ever.",
    ),
]


@app.command()
def status(
    watch: WatchOption = None,
) -> None:
    """Print every service with its state, and how much is under-replicated."""
    show_repeatedly(lambda client: client.cluster(), _print_cluster, watch)


def _print_cluster(found: Mapping[str, Any]) -> None:
    if common_options().as_json:
        print_json(found)
        return
    print_rows(found["bookies"], ("id", "state", "url", "zone", "free_bytes"))
    print_rows(found["services"], ("kind", "state", "url", "id"))
    for missing in found.get("missing_witnesses", []):
        print_line(
            f"THE DATABASE WENT BACK: it lacks {missing['witness']}, told by {missing['holder']}"
        )
    if found.get("kept_count"):
        some = "; ".join(
            f"{kept['ledger_id']} at {', '.join(kept['holders'])}" for kept in found["kept_ledgers"]
        )
        print_line(
            f"ledgers that bookies keep for rows that the database lacks: {found['kept_count']} ({some})"
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
        typer.Option(help="Only from this time on: 2026-01-02T03:04:05Z."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Only what was done to this: logs/NAME, ledgers/ID, tokens/ID."),
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
        int, typer.Option(min=1, max=10_000, help="Print at most so many kept ledgers.")
    ] = 20,
) -> None:
    """Print whether the database lacks changes that it had answered: the changes that the metadata service looks for,
    those that are missing and who told of them, and the ledgers of which bookies hold copies of lost rows and
    therefore drop nothing. Status 1 if any are missing or kept.
    """
    urls = ",".join(parse_urls(metadata))

    async def work() -> dict[str, Any]:
        state = await ask("GET", f"{urls}/v1/witnesses")
        kept = await ask("GET", f"{urls}/v1/kept-ledgers?limit={limit}")
        return {**state, "kept_count": kept["count"], "kept_ledgers": kept["ledgers"]}

    found = run_async(work)
    _print_witnesses(found)
    if found["missing"] or found["kept_count"]:
        raise typer.Exit(ExitStatus.FAILED)


def _print_witnesses(found: dict[str, Any]) -> None:
    if common_options().as_json:
        print_json(found)
        return
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
    witnesses: WitnessesArgument = None,
    lost: LostOption = None,
    ledger: LedgerOption = None,
) -> None:
    """Go on with a database that went back: the changes of these witnesses are lost. See the runbook first.
    Every registered bookie has to answer, but for those named with --lost. Run `quorumlog metadata rebuild` before:
    the loss is not accepted while bookies hold copies of rows that a rebuild would write.
    """
    given, names = witnesses or [], [bare(name) for name in lost or ()]
    body = {"witnesses": given, "lost": names, "ledgers": ledger or []}
    state = run_async(lambda: _accept(parse_urls(metadata), body))
    print_answer(state, f"accepted as lost: {len(given)}; still missing: {len(state['missing'])}")


async def _accept(urls: Sequence[str], body: dict[str, Any]) -> dict[str, Any]:
    last = await follow_work(urls, "/v1/witnesses/accept", body)
    if "error" in last:
        raise by_code(last.get("code", ""))(last["error"])
    state: dict[str, Any] = last["state"]
    return state
