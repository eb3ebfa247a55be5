"""`quorumlog cluster …`."""

from typing import Annotated, Any

import typer

from quorumlog.cli.cookies import MetadataOption
from quorumlog.cli.operator import ask, bare
from quorumlog.cli.printing import (
    WatchOption,
    print_answer,
    print_json,
    print_line,
    print_rows,
    show_repeatedly,
)
from quorumlog.cli.session import common_options, parse_urls, run_async

app = typer.Typer(no_args_is_help=True, help="The state of the cluster.")

WitnessesArgument = Annotated[
    list[str], typer.Argument(help="The witnesses that the database lacks (GET /v1/witnesses).")
]
LostOption = Annotated[
    list[str] | None,
    typer.Option("--lost", help="A bookie that never returns, so that it need not answer."),
]


@app.command()
def status(
    watch: WatchOption = None,
) -> None:
    """Print every service with its state, and how much is under-replicated."""
    show_repeatedly(lambda client: client.cluster(), _print_cluster, watch)


def _print_cluster(found: dict[str, Any]) -> None:
    if common_options().as_json:
        print_json(found)
        return
    print_rows(found["bookies"], ("id", "state", "url", "zone", "free_bytes"))
    print_rows(found["services"], ("kind", "state", "url", "id"))
    for missing in found.get("missing_witnesses", []):
        print_line(
            f"THE DATABASE WENT BACK: it lacks {missing['witness']}, told by {missing['holder']}"
        )
    print_line(f"under-replicated ledgers: {found['under_replicated_count']}")
    print_line(f"quarantined by this gateway: {found.get('quarantined', [])}")
    print_line(f"degraded ledgers: {found['degraded_ledgers']}")


@app.command()
def accept(witnesses: WitnessesArgument, metadata: MetadataOption, lost: LostOption = None) -> None:
    """Go on with a database that went back: the changes of these witnesses are lost. See the runbook first.
    Every registered bookie has to answer, but for those named with --lost.
    """
    url = f"{','.join(parse_urls(metadata))}/v1/witnesses/accept"
    body = {"witnesses": witnesses, "lost": [bare(name) for name in lost or ()]}
    state = run_async(lambda: ask("POST", url, body))
    print_answer(
        state, f"accepted as lost: {len(witnesses)}; still missing: {len(state['missing'])}"
    )
