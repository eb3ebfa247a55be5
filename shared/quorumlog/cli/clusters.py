"""`quorumlog cluster …`."""

from typing import Any

import typer

from quorumlog.cli.printing import (
    WatchOption,
    print_json,
    print_line,
    print_rows,
    show_repeatedly,
)
from quorumlog.cli.session import common_options

app = typer.Typer(no_args_is_help=True, help="The state of the cluster.")


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
    print_line(f"under-replicated ledgers: {found['under_replicated_count']}")
    print_line(f"quarantined by this gateway: {found.get('quarantined', [])}")
    print_line(f"degraded ledgers: {found['degraded_ledgers']}")
