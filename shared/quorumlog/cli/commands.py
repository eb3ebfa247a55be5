"""The tree of commands under `quorumlog`."""

from typing import Annotated

import typer

from quorumlog import __version__
from quorumlog.cli import bookies, clusters, credentials, ledgers, logs, queues, serve
from quorumlog.cli.output import COMMON_OPTIONS, CommonOptions, print_line
from quorumlog.cli.session import with_common_options

app = typer.Typer(
    no_args_is_help=True,
    help="A replicated log over HTTP.",
    epilog="Exit status: 0 done; 1 error, and nothing more was done; 2 wrong usage; 3 error, and"
    " the outcome is unknown; 4 no such log, ledger, entry or bookie; 5 a wait timed out; 130 Ctrl-C; 141 the"
    " reader of the output closed it.",
)
app.add_typer(ledgers.app, name="ledger")
app.add_typer(logs.app, name="log")
app.add_typer(queues.app, name="queue")
app.add_typer(clusters.app, name="cluster")
app.add_typer(bookies.app, name="bookie")
app.add_typer(bookies.repair_app, name="repair")
app.add_typer(credentials.token_app, name="token")
app.add_typer(clusters.metadata_app, name="metadata")
app.command()(serve.doctor)
with_common_options(app)
app.add_typer(credentials.certificates_app, name="certificates")
app.command(
    context_settings={
        "ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": [],
    }
)(serve.serve)  # fmt: skip


def _print_version(*, asked: bool) -> None:
    if asked:
        print_line(f"quorumlog {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=lambda asked: _print_version(asked=asked),
            help="Print the version.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print results and errors as JSON.")
    ] = False,
) -> None:
    """Store the options that precede the command."""
    del version
    COMMON_OPTIONS.set(CommonOptions(as_json=as_json))
