"""`python -m services.… --help`: the settings of a process on the screen."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

Rows = Iterable[tuple[str, str, str, str]]
"""The name, type, default and meaning of each setting."""


def app_of(program: str, settings: Rows, app: typer.Typer | None = None) -> typer.Typer:
    """The command line of a service: `--help` and `--version`, and an `app`'s commands."""

    class Page(TyperGroup):
        def format_help(self, ctx: Any, formatter: Any) -> None:
            super().format_help(ctx, formatter)
            Console(highlight=False).print(_table(settings))

    has_commands = app is not None
    app = app or typer.Typer(add_completion=False)

    @app.callback(
        cls=Page,
        invoke_without_command=True,
        subcommand_metavar=None if has_commands else "",
        help=f"Run {program} with the settings of the environment, which are below."
        f" A secret may also stand in a file, which NAME_FILE names.\n\n{app.info.help or ''}",
    )
    def main(
        _version: Annotated[
            bool,
            typer.Option(
                "--version", is_eager=True, callback=_show_version, help="Print the version."
            ),
        ] = False,
    ) -> None:
        pass

    return app


def _show_version(asked: bool) -> None:
    if not asked:
        return
    try:
        text = version("quorumlog")
    except PackageNotFoundError:
        text = "from a folder, not installed"
    typer.echo(f"quorumlog {text}")
    raise typer.Exit


def _table(settings: Rows) -> Table:
    table = Table("setting", "type", "default", "what", title="Settings", title_justify="left")
    for name, kind, default, what in settings:
        table.add_row(Text(name), kind, Text(default), Text(what.replace("`", "")))
    table.columns[0].no_wrap = True
    return table
