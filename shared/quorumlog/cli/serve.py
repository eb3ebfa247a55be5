"""`quorumlog serve`: runs a whole cluster on this machine. The services need the extra `server`.

The command line does not import the services: it replaces its own process with theirs (`exec`).
"""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated, Final, Never

import typer

import quorumlog
from quorumlog.cli.output import ExitStatus, print_error

_NEEDED: Final = ("pydantic", "asyncpg", "redis", "uvloop", "rocksdict")
"""Packages of the extra `server`. If one of them is missing, the extra is not installed."""


def serve(
    ctx: typer.Context,
    show_help: Annotated[
        bool, typer.Option("--help", help="Print all options and settings.")
    ] = False,
) -> None:
    """Run a whole cluster on this machine until Ctrl-C: databases, bookies, gateways, autorecovery."""
    if sys.platform != "linux":
        _fail(
            "`quorumlog serve` needs Linux, because it ends its processes by features of the Linux"
            " kernel. Run the container image instead, or use a cluster on another machine."
        )
    home = _home()
    if home is None or missing_packages():
        _fail("`quorumlog serve` needs the services: pip install 'quorumlog[server]'")
    # Replace PYTHONPATH and ignore the working directory (-P): both may contain another folder
    # `services`. An installed package needs no PYTHONPATH, which precedes the standard library.
    installed = Path(quorumlog.__file__).parents[1]
    paths = [] if home == installed else [str(home), str(installed)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    options = [*ctx.args, *(["--help"] if show_help else [])]
    command = [sys.executable, "-P", "-m", "services.local", *options]
    os.execve(sys.executable, command, environ)  # noqa: S606


def missing_packages() -> list[str]:
    """The packages of the extra `server` that are not installed."""
    services = [] if _home() else ["quorumlog's services"]
    return services + [name for name in _NEEDED if not importlib.util.find_spec(name)]


def _fail(why: str) -> Never:
    print_error(why)
    raise typer.Exit(ExitStatus.FAILED)


def _home() -> Path | None:
    """The folder of the package `services`: `site-packages` of a wheel, or a clone's root."""
    installed = Path(quorumlog.__file__).parents[1]
    folders = (installed, installed.parent)
    return next((each for each in folders if (each / "services" / "local").is_dir()), None)
