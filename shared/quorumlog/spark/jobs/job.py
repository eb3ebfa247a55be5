"""What all jobs share: their report, their session, how they end."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import orjson
import typer
from pyspark.sql import DataFrame, SparkSession
from rich.console import Console
from rich.table import Table

from quorumlog.spark import config
from quorumlog.spark.http import Gateways

DONE: Final = 0
FOUND: Final = 1
FAILED: Final = 3

GatewayOption = Annotated[
    str,
    typer.Option("--gateway", envvar="QUORUMLOG_GATEWAY", help="URLs of gateways, with commas."),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Change nothing, say what would be.")]
JsonOption = Annotated[bool, typer.Option("--json", help="The report as JSON.")]


class JobFailed(Exception):
    """A job that can't do what it was asked for; says why."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a job gives: rows for Spark, a report for people and programs, an exit status."""

    frame: DataFrame
    report: dict[str, Any]
    status: int = DONE
    notes: list[str] = field(default_factory=list)


def gateways(urls: str | Sequence[str]) -> Gateways:
    """A connection to the services of an option, or of a list of URLs. Raises: JobFailed."""
    text = urls if isinstance(urls, str) else ",".join(urls)
    found = [url.strip() for url in text.split(",") if url.strip()]
    if not found or not all(url.startswith(("http://", "https://")) for url in found):
        raise JobFailed(f"{text!r} is no list of URLs: --gateway http://…")
    return Gateways(",".join(found))


def say(text: str) -> None:
    """A line of progress, on standard error: standard output is for the report."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main(name: str, work: Callable[[SparkSession], Result], *, as_json: bool) -> None:
    """Run a job in a session of its own, print its report, end with its status."""
    try:
        say(f"{name}: {config.prepare()}")
        spark = (
            SparkSession.builder.appName(f"quorumlog {name}")
            .config("spark.ui.showConsoleProgress", str(sys.stderr.isatty()).lower())
            .getOrCreate()
        )
        try:
            result = work(spark)
        finally:
            spark.stop()
    except (JobFailed, config.NoJava) as error:
        say(f"{name}: {error}")
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        say(f"{name}: interrupted")
        raise typer.Exit(130) from None
    if as_json:
        sys.stdout.write(orjson.dumps(result.report, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        _print(result.report)
    for note in result.notes:
        say(f"{name}: {note}")
    raise typer.Exit(result.status)


def _print(report: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None)
    for name, value in report.items():
        shown = value if isinstance(value, str) else orjson.dumps(value).decode()
        table.add_row(name.replace("_", " "), shown)
    Console(highlight=False).print(table)
