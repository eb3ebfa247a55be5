"""`quorumlog cluster …`."""

from typing import Final

import typer
from rich.console import Console

from quorumlog.cli.common import (
    DEFAULT_GATEWAY,
    GatewayOption,
    JsonOption,
    print_json,
    print_rows,
    run,
)

app = typer.Typer(no_args_is_help=True, help="How the cluster is.")

_SHOWN_MAX: Final = 100
"""Of what is under-replicated the gateway names so many."""


@app.command()
def status(gateway: GatewayOption = DEFAULT_GATEWAY, as_json: JsonOption = False) -> None:
    """Print every service with its state, and how much is under-replicated."""
    found = run(gateway, lambda client: client.cluster())
    if as_json:
        print_json(found)
        return
    console = Console(highlight=False)
    print_rows(found["bookies"], ("id", "state", "url", "zone", "free_bytes"), as_json=False)
    print_rows(found["services"], ("kind", "state", "url", "id"), as_json=False)
    lacking = len(found["under_replicated"])
    more = " or more" if lacking >= _SHOWN_MAX else ""
    console.print(f"under-replicated: {lacking}{more}", markup=False)
    console.print(f"degraded ledgers: {found['degraded_ledgers']}", markup=False)
