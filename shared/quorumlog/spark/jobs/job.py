"""Common parts of all jobs: report, session, command line, exit status."""

import inspect
import json
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import orjson
import typer
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from rich.console import Console
from rich.table import Table

from quorumlog.spark import config
from quorumlog.spark.http import Gateways
from quorumlog.spark.options import BadOption, ClusterAccess
from quorumlog.spark.source import QuorumLogSource
from quorumlog.wire import secret

_RAISED: Final = re.compile(r"(?:[a-z_]\w*\.)*[A-Z]\w*: \S")
"""The last line of a traceback: an exception's class and message."""

DONE: Final = 0
FOUND: Final = 1
FAILED: Final = 3


def _checked_urls(text: str | None) -> str | None:
    if text is not None and not _are_urls(text):
        raise typer.BadParameter(f"{text!r} is not a list of URLs: use http://host:port,…")
    return text


def _are_urls(text: str) -> bool:
    return all(url.strip().startswith(("http://", "https://")) for url in text.split(","))


GatewayOption = Annotated[
    str,
    typer.Option(
        "--gateway",
        envvar="QUORUMLOG_GATEWAY",
        help="URLs of gateways, separated by commas.",
        callback=_checked_urls,
    ),
]
RepairOption = Annotated[
    str | None,
    typer.Option(
        "--repair",
        metavar="METADATA_URLS",
        help="URLs of metadata services that queue repairs of missing and corrupt copies.",
        callback=_checked_urls,
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only report changes.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


class JobFailed(Exception):
    """A job can't continue; the message says why."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """A job's result: rows for Spark, a report for people and programs, an exit status."""

    frame: DataFrame
    report: dict[str, Any]
    status: int = DONE
    notes: list[str] = field(default_factory=list)
    plan: DataFrame | None = None
    """The candidates for deletion; only `retention_stats` sets it."""


def gateways(urls: str | Sequence[str]) -> Gateways:
    """A gateway connection with the environment's token and certificates. Raises: JobFailed."""
    try:
        return ClusterAccess.of({"gateway.url": urls_of(urls)}).connect()
    except BadOption as error:
        raise JobFailed(str(error)) from None


def services(urls: str) -> Gateways:
    """A connection to services behind the gateways, without a token. Raises: JobFailed."""
    return Gateways(urls_of(urls), headers=operator_headers(urls.split(",")))


def urls_of(urls: str | Sequence[str]) -> str:
    """URLs in the form of the option `gateway.url`. Raises: JobFailed."""
    text = urls if isinstance(urls, str) else ",".join(urls)
    if not _are_urls(text):
        raise JobFailed(f"{text!r} is not a list of URLs: use http://host:port,…")
    return text


def operator_headers(urls: Iterable[str]) -> dict[str, str]:
    """The headers that authenticate a job to services behind the gateways. Raises: JobFailed."""
    try:
        return secret.operator_headers(config.secret_file(), urls)
    except secret.SecretUnusable as error:
        raise JobFailed(f"CLUSTER_SECRET_FILE: {error}") from None


def context_of(spark: SparkSession) -> SparkContext | None:
    """The session's context; None under Spark Connect, whose sessions are remote."""
    try:
        return spark.sparkContext
    except PySparkException:
        return None


def parallelism(spark: SparkSession) -> int:
    """The number of tasks that run at once, according to the session."""
    context = context_of(spark)
    return 8 if context is None else max(1, context.defaultParallelism)


def frame_of(spark: SparkSession, items: Iterable[Any], schema: str) -> DataFrame:
    """Dataclass instances as a DataFrame."""
    return spark.createDataFrame([astuple(item) for item in items], schema)


def write_lines(file: Path, items: Iterable[Mapping[str, Any]]) -> None:
    """Write items as lines of JSON."""
    file.write_text("".join(f"{json.dumps(item)}\n" for item in items))


def say(text: str) -> None:
    """Print a line of progress on standard error: standard output is for the report."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def program(
    name: str,
    run: Callable[..., JobResult],
    help_text: str | None,
    check: Callable[[Mapping[str, Any]], object] = lambda _given: None,
) -> typer.Typer:
    """Make a job's command line: --gateway, the parameters of `run` as options, and --json.
    `check` raises BadParameter for options that can't be combined.
    """

    def called(gateway: str, *, as_json: bool, **given: Any) -> None:
        check(given)
        main(name, lambda spark: run(spark, gateway, **given), as_json=as_json)

    _spark, gateway, *own = inspect.signature(run).parameters.values()
    as_json = inspect.Parameter(
        "as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=JsonOption
    )
    parameters = [gateway.replace(annotation=GatewayOption), *own, as_json]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    app = typer.Typer(add_completion=False)
    app.command(name, help=help_text)(called)
    return app


def main(name: str, work: Callable[[SparkSession], JobResult], *, as_json: bool) -> None:
    """Run a job in its own session, print the report, exit with the job's status.

    The arguments are checked before the session starts, so exit status 2 needs no Java.
    """

    def call() -> JobResult:
        say(f"{name}: {config.prepare()}")
        spark = (
            SparkSession.builder.appName(f"quorumlog {name}")
            .config("spark.ui.showConsoleProgress", str(sys.stderr.isatty()).lower())
            .getOrCreate()
        )
        try:
            # Spark would find the format by its name, but on a slow machine it gives up searching.
            spark.dataSource.register(QuorumLogSource)
            return work(spark)
        finally:
            spark.stop()

    result = attempt(name, call)
    if as_json:
        sys.stdout.write(orjson.dumps(result.report, option=orjson.OPT_INDENT_2).decode() + "\n")
    else:
        _print(result.report)
    for note in result.notes:
        say(f"{name}: {note}")
    raise typer.Exit(result.status)


def attempt(name: str, call: Callable[[], JobResult]) -> JobResult:
    """Run a job. Print any error and exit with FAILED, which differs from the status FOUND."""
    try:
        return call()
    except (JobFailed, config.NoJava) as error:
        say(f"{name}: {error}")
    except KeyboardInterrupt:
        say(f"{name}: interrupted")
        raise typer.Exit(130) from None
    except PySparkException as error:
        say(f"{name}: {cause_of(error)}")
    except Exception:  # noqa: BLE001 - of any kind
        say(f"{name}: {traceback.format_exc()}")
    raise typer.Exit(FAILED)


def cause_of(error: Exception) -> str:
    """The last Python exception's line in the long text in which Spark wraps exceptions."""
    lines = [line for line in str(error).splitlines() if _RAISED.match(line)]
    return lines[-1] if lines else first_line(error)


def first_line(error: Exception) -> str:
    """The first line of an error that is not empty: a parser's error begins with an empty line."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next(filter(None, lines), type(error).__name__)


def _print(report: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None)
    for name, value in report.items():
        shown = value if isinstance(value, str) else orjson.dumps(value).decode()
        table.add_row(name.replace("_", " "), shown)
    Console(highlight=False).print(table)
