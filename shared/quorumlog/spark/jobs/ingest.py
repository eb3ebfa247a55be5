"""Append files, a table or a query's rows to a log: all of them exactly once, or none.

Two SQL expressions turn rows into records: `--value` (by default the row as JSON) and `--key`. The
files of `--path` are appended in the order of their names, or in the order that `--order` sets (Spark would begin
with the largest file). With `--app` and `--version` a second run of the same version is a no-op, so
a scheduler may repeat the run. `--stream` appends the files that are new since the last run, as
recorded in `--checkpoint`, and ends.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Final

import typer
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from quorumlog.errors import NoSuchLog, QuorumLogError
from quorumlog.spark.append import append_batches
from quorumlog.spark.jobs import job
from quorumlog.spark.options import LEDGERS_PER_COMMIT_MAX
from quorumlog.spark.rows import BadRows
from quorumlog.spark.writing import LEDGER_BYTES, TooManyLedgers, WriteOver

RECEIPTS: Final = (
    "log string, transaction string, part int, ledger long, first_offset long, last_offset long,"
    " rows long, bytes long, crc32 long"
)
"""The schema of receipts. Each published ledger has a row with the task that wrote the ledger, the
offsets of its records, and the CRC32 of their concatenated values."""
AS_JSON: Final = "to_json(struct(*))"


class FileOrder(Enum):
    """The order in which the files of a path are appended to the log."""

    NAME = "name"
    """Sorted by path, as text."""
    MODIFIED = "modified"
    """Sorted by the time of the last change, then by path."""
    NONE = "none"
    """In Spark's own order: largest file first. No sort is needed unless `partitions` is given."""


_PLACES: Final = {
    FileOrder.NAME: ("_metadata.file_path", "_metadata.file_block_start"),
    FileOrder.MODIFIED: (
        "_metadata.file_modification_time",
        "_metadata.file_path",
        "_metadata.file_block_start",
    ),
}
"""Spark's metadata columns by which the blocks of files are sorted."""
_SETTING: Final = re.compile(r"([a-z_]+)=([A-Za-z0-9-]+)")


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Turn expected errors in the block into JobFailed with a message of one line."""
    try:
        yield
    except AnalysisException as error:
        raise job.JobFailed(job.first_line(error)) from None
    except PySparkException as error:
        raise job.JobFailed(job.cause_of(error)) from None
    except QuorumLogError as error:
        raise job.JobFailed(f"{error.code}: {error.detail}") from None
    except TooManyLedgers as error:
        raise job.JobFailed(f"{error}, or --partitions") from None
    except (BadRows, WriteOver) as error:
        raise job.JobFailed(str(error)) from None


@_one_line_errors()
def run(
    spark: SparkSession,
    gateway: str | Sequence[str],
    *,
    log: str,
    frame: DataFrame | None = None,
    path: str | None = None,
    query: str | None = None,
    kind: str = "parquet",
    options: Mapping[str, str] | None = None,
    value: str = AS_JSON,
    key: str | None = None,
    app: str | None = None,
    version: int | None = None,
    partitions: int | None = None,
    order: FileOrder = FileOrder.NAME,
    create: Mapping[str, Any] | None = None,
    dry_run: bool = False,
) -> job.JobResult:
    """Ingest a DataFrame, the files of `path` (of the format `kind`), or the rows of a SQL `query`.

    `partitions`: maximum number of ledgers, up to `LEDGERS_PER_COMMIT_MAX`. `order`: sorts files;
    rows of a DataFrame or a query are not sorted. `create`: settings for a log that does not exist
    yet. The result has a row per ledger (`RECEIPTS`), and no row for a retry. Raises: JobFailed.
    """
    most = min(partitions or LEDGERS_PER_COMMIT_MAX, LEDGERS_PER_COMMIT_MAX)
    if frame is None:
        frame = _read(spark, path, query, kind, options or {})
    columns = _columns(value, key)
    if path is not None and order is not FileOrder.NONE:
        count = min(most, _ledgers_of(spark, path, options or {}))
        records = _in_order(frame, columns, _PLACES[order], count)
    elif partitions is not None:
        records = _in_order(frame, columns, (), most)
    else:
        records = frame.select(*columns)
    report: dict[str, Any] = {"job": "ingest", "dry_run": dry_run, "log": log}
    if path is not None:
        report["order"] = order.value
    if dry_run:
        _ensure(gateway, log, create, dry_run=True)
        counts = records.groupBy(f.spark_partition_id()).count().collect()
        report |= {"rows": sum(row["count"] for row in counts), "ledgers": len(counts)}
        return job.JobResult(spark.createDataFrame([], RECEIPTS), report)
    _ensure(gateway, log, create)
    job.say(f"ingest: appending to {log}")
    urls = job.urls_of(gateway)
    done = append_batches(records, log=log, app=app, version=version, gateway_url=urls)
    rows = [(item.log, item.transaction, *ledger) for item in done for ledger in item.ledgers]
    report |= {
        "rows": sum(item.rows for item in done),
        "ledgers": len(rows),
        "bytes": sum(ledger.bytes for item in done for ledger in item.ledgers),
        "is_duplicate": any(item.is_duplicate for item in done),
        "first_offset": done[0].first_offset if done else None,
        "last_offset": done[-1].last_offset if done else None,
    }
    return job.JobResult(spark.createDataFrame(rows, RECEIPTS), report)


@_one_line_errors()
def stream(
    spark: SparkSession,
    gateway: str | Sequence[str],
    *,
    log: str,
    path: str,
    checkpoint: str,
    kind: str = "text",
    schema: str | None = None,
    options: Mapping[str, str] | None = None,
    value: str = AS_JSON,
    key: str | None = None,
    create: Mapping[str, Any] | None = None,
    dry_run: bool = False,
) -> job.JobResult:
    """Ingest the files of a folder that are new since the last run, then end.

    `checkpoint`: a folder that only this stream uses. `schema`: for files without a schema.
    Raises: JobFailed.
    """
    reader = spark.readStream.format(kind).options(**(options or {}))
    report: dict[str, Any] = {"job": "ingest", "dry_run": dry_run, "log": log}
    frame = (reader.schema(schema) if schema else reader).load(path)
    records = frame.select(*_columns(value, key))
    _ensure(gateway, log, create, dry_run=dry_run)
    if dry_run:
        return job.JobResult(spark.createDataFrame([], RECEIPTS), report)
    running = (
        records.writeStream.format("quorumlog")
        .option("gateway.url", job.urls_of(gateway))
        .option("topic", log)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    running.awaitTermination()
    progress = running.recentProgress
    report |= {
        "batches": sum(item["numInputRows"] > 0 for item in progress),
        "rows": sum(item["numInputRows"] for item in progress),
    }
    return job.JobResult(spark.createDataFrame([], RECEIPTS), report)


def _read(
    spark: SparkSession,
    path: str | None,
    query: str | None,
    kind: str,
    options: Mapping[str, str],
) -> DataFrame:
    if (path is None) == (query is None):
        raise job.JobFailed("give either --path or --query")
    if query is not None:
        return spark.sql(query)
    return spark.read.format(kind).options(**options).load(path)


def _columns(value: str, key: str | None) -> list[Column]:
    columns = [f.expr(value).alias("value")]
    return columns if key is None else [*columns, f.expr(key).alias("key")]


def _ledgers_of(spark: SparkSession, path: str, options: Mapping[str, str]) -> int:
    """How many ledgers of about `LEDGER_BYTES` the files of a path fill."""
    files = spark.read.format("binaryFile").options(**options).load(path)
    total = files.agg(f.sum("length")).first()
    return max(1, -(-int(total[0] or 0) // LEDGER_BYTES)) if total else 1


def _in_order(
    frame: DataFrame, columns: Sequence[Column], places: Sequence[str], count: int
) -> DataFrame:
    """The records in at most `count` partitions, ordered by `places`, then by the frame's
    partitions and rows. `coalesce` alone would group partitions by the location of their data.

    A row's partition does not depend on the order in which a shuffle delivers rows, so a task that
    runs twice neither loses nor repeats rows.
    """
    order = [f.col(place).alias(f"_{at}") for at, place in enumerate(places)]
    part, row = f.spark_partition_id(), f.monotonically_increasing_id()
    numbered = frame.select(*columns, *order, part.alias("_part"), row.alias("_row"))
    keys = [f"_{at}" for at in range(len(places))]
    ranges = numbered.repartitionByRange(count, *keys, "_part")
    gathered = numbered.coalesce(1) if count == 1 else ranges
    return gathered.sortWithinPartitions(*keys, "_row").drop(*keys, "_part", "_row")


def _ensure(
    gateway: str | Sequence[str],
    log: str,
    create: Mapping[str, Any] | None,
    *,
    dry_run: bool = False,
) -> None:
    """Make sure that the log exists; create it if settings are given. Raises: NoSuchLog."""
    with job.gateways(gateway) as gateways:
        try:
            gateways.get(f"/v1/logs/{log}")
        except NoSuchLog:
            if create is None:
                raise
            if not dry_run:
                gateways.request("PUT", f"/v1/logs/{log}", value=dict(create), is_repeatable=True)


def _settings(texts: Sequence[str]) -> dict[str, Any]:
    """Parse a log's settings, each as `name=value`. Raises: BadParameter."""
    found: dict[str, Any] = {}
    for text in texts:
        parts = _SETTING.fullmatch(text)
        if parts is None:
            raise typer.BadParameter(f"{text!r} is not a setting: write name=value")
        found[parts[1]] = int(parts[2]) if parts[2].isdecimal() else parts[2]
    return found


def _asked(
    spark: SparkSession,
    gateway: str | Sequence[str],
    *,
    log: Annotated[str, typer.Option(help="The log.")],
    path: Annotated[str | None, typer.Option(help="Files to read.")] = None,
    query: Annotated[
        str | None, typer.Option(help="SQL query to read from, instead of --path.")
    ] = None,
    kind: Annotated[str, typer.Option("--format", help="The format of the files.")] = "parquet",
    option: Annotated[
        list[str] | None, typer.Option(help="name=value for the reader; may be repeated.")
    ] = None,
    value: Annotated[str, typer.Option(help="SQL expression for a record's value.")] = AS_JSON,
    key: Annotated[str | None, typer.Option(help="SQL expression for a record's key.")] = None,
    app: Annotated[
        str | None, typer.Option(help="The name of the app that ingests; with --version.")
    ] = None,
    version: Annotated[
        int | None, typer.Option(min=0, help="The app's version; its second run is a no-op.")
    ] = None,
    partitions: Annotated[
        int | None, typer.Option(min=1, help="The maximum number of ledgers.")
    ] = None,
    order: Annotated[
        FileOrder | None,
        typer.Option(
            help="The order of files: by name (default), by modification time, or as Spark reads."
        ),
    ] = None,
    create: Annotated[
        bool, typer.Option("--create", help="Create the log if it does not exist, with --setting.")
    ] = False,
    setting: Annotated[
        list[str] | None, typer.Option(help="name=value of a new log, such as write_quorum=3.")
    ] = None,
    is_stream: Annotated[bool, typer.Option("--stream", help="Only new files in --path.")] = False,
    checkpoint: Annotated[
        str | None, typer.Option(help="The folder in which a stream stores its progress.")
    ] = None,
    schema: Annotated[
        str | None, typer.Option(help="Schema for a stream's files without one: a string, …")
    ] = None,
    dry_run: job.DryRunOption = False,
) -> job.JobResult:
    """Call `run`, or `stream` if --stream is given."""
    given: dict[str, Any] = {"log": log, "path": path, "kind": kind, "value": value, "key": key}
    given |= {"create": _settings(setting or ()) if create else None, "dry_run": dry_run}
    given["options"] = {
        name: text for name, _, text in (one.partition("=") for one in option or ())
    }
    if is_stream:
        return stream(spark, gateway, checkpoint=checkpoint or "", schema=schema, **given)
    given |= {"query": query, "app": app, "version": version, "partitions": partitions}
    return run(spark, gateway, order=order or FileOrder.NAME, **given)


def _check(given: Mapping[str, Any]) -> None:
    """Raise BadParameter for options that can't be combined."""
    is_stream, path = given["is_stream"], given["path"]
    of_batches, of_streams = (
        ("query", "app", "version", "partitions", "order"),
        ("checkpoint", "schema"),
    )
    for name in of_batches if is_stream else of_streams:
        if given[name] is not None:
            raise typer.BadParameter(
                f"--{name} {'conflicts with' if is_stream else 'needs'} --stream"
            )
    if is_stream and (path is None or given["checkpoint"] is None):
        raise typer.BadParameter("--stream needs --path and --checkpoint")
    if not is_stream and (path is None) == (given["query"] is None):
        raise typer.BadParameter("give either --path or --query")
    if given["setting"] and not given["create"]:
        raise typer.BadParameter("--setting needs --create")
    if (given["app"] is None) != (given["version"] is None):
        raise typer.BadParameter("set both --app and --version, or neither")
    if not all("=" in text for text in given["option"] or ()):
        raise typer.BadParameter("--option must be name=value")
    _settings(given["setting"] or ())


app = job.program("ingest", _asked, __doc__, _check)

if __name__ == "__main__":
    app()
