"""`quorumlog …`: ledgers, logs and the cluster from a shell.

Exit status: 0 done; 1 an error, and nothing was done; 2 wrong usage; 3 an error after which nobody
can say whether it was done; 4 what was asked for is not there; 5 what was waited for has not come;
130 Ctrl-C; 141 whoever read the output has closed it.
"""

import typer

from quorumlog.cli import bookies, clusters, ledgers, logs, repairs

app = typer.Typer(no_args_is_help=True, help="A replicated log over HTTP.")
app.add_typer(ledgers.app, name="ledger")
app.add_typer(logs.app, name="log")
app.add_typer(clusters.app, name="cluster")
app.add_typer(bookies.app, name="bookie")
app.add_typer(repairs.app, name="repair")


def main() -> None:
    """Run the command line."""
    app()
