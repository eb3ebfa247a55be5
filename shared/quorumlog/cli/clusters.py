"""`quorumlog cluster …`."""

from typing import Any

import typer

from quorumlog.cli.common import (
    DEFAULT_GATEWAY,
    GatewayOption,
    JsonOption,
    Out,
    WatchOption,
    print_json,
    print_rows,
    watched,
)

app = typer.Typer(no_args_is_help=True, help="The state of the cluster.")


@app.command()
def status(
    gateway: GatewayOption = DEFAULT_GATEWAY,
    as_json: JsonOption = False,
    watch: WatchOption = None,
) -> None:
    """Print every service with its state, and how much is under-replicated."""

    def show(found: dict[str, Any]) -> None:
        if as_json:
            print_json(found)
        else:
            _print_cluster(found)

    watched(gateway, lambda client: client.cluster(), show, watch)


def _print_cluster(found: dict[str, Any]) -> None:
    console = Out()
    print_rows(found["bookies"], ("id", "state", "url", "zone", "free_bytes"), as_json=False)
    print_rows(found["services"], ("kind", "state", "url", "id"), as_json=False)
    console.print(f"under-replicated ledgers: {found['under_replicated_count']}", markup=False)
    console.print(f"quarantined by this gateway: {found.get('quarantined', [])}", markup=False)
    console.print(f"degraded ledgers: {found['degraded_ledgers']}", markup=False)
