"""The tree of commands under `quorumlog`."""

import typer

from quorumlog.cli import bookies, clusters, ledgers, logs, repairs

app = typer.Typer(no_args_is_help=True, help="A replicated log over HTTP.")
app.add_typer(ledgers.app, name="ledger")
app.add_typer(logs.app, name="log")
app.add_typer(clusters.app, name="cluster")
app.add_typer(bookies.app, name="bookie")
app.add_typer(repairs.app, name="repair")
