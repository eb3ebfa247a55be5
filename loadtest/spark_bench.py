"""`make bench-spark ROWS=…`: rows a second through each way onto a log and back, on one machine.

The same Parquet file goes through the row writer, the Arrow writer and `append_batches`, is read
back, and goes into a sink that drops what Spark brings to Python: the most that any of them could
reach here. Where that is far above the others, the cluster is the bound, and not Spark's side: what
each kind of process spends on a million rows stands beside the rates.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType
from rich.console import Console
from rich.table import Table

from loadtest.spark_cluster import SparkCluster, spark_cluster
from loadtest.stores import scratch
from quorumlog.spark import config
from quorumlog.spark.append import append_batches
from quorumlog.spark.source import BatchWriter, QuorumLogSource

_PARTITIONS: Final = 2
_BATCH_ROWS: Final = 10_000
_WARM_ROWS: Final = 10_000
_KINDS: Final = ("gateway", "bookie", "others", "Spark")
"""Of processes; the others are the metadata service, Postgres, Redis and autorecovery."""


@dataclass(frozen=True)
class Nothing(WriterCommitMessage):
    """What a task that stores nothing has to say."""

    rows: int


class NullWriter(DataSourceArrowWriter):
    """Takes all rows to Python and drops them."""

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Count them."""
        return Nothing(sum(batch.num_rows for batch in iterator))


class NullSource(DataSource):
    """The ceiling."""

    @classmethod
    def name(cls) -> str:
        """What `format` takes."""
        return "null-sink"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """The same for all."""
        del schema, overwrite
        return NullWriter()


class RowWriter(DataSourceWriter):
    """The Arrow writer's work for rows that come one by one."""

    def __init__(self, inner: BatchWriter) -> None:
        self._inner = inner

    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        """Gather rows into batches."""
        return self._inner.write(_batches(iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """As ever."""
        self._inner.commit(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """As ever."""
        self._inner.abort(messages)


def _batches(rows: Iterator[Row]) -> Iterator[Any]:
    values: list[str] = []
    for row in rows:
        values.append(row[0])
        if len(values) == _BATCH_ROWS:
            yield pa.RecordBatch.from_pydict({"value": pa.array(values, pa.string())})
            values = []
    if values:
        yield pa.RecordBatch.from_pydict({"value": pa.array(values, pa.string())})


class RowSource(DataSource):
    """The data source as it would be without Arrow."""

    @classmethod
    def name(cls) -> str:
        """What `format` takes."""
        return "quorumlog-rows"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Row by row."""
        return RowWriter(BatchWriter(self.options, schema, overwrite=overwrite))


@dataclass(frozen=True, slots=True)
class Result:
    """How one way went."""

    name: str
    rows: int
    seconds: float
    cpu_s: Mapping[str, float]
    """Seconds of processor time, by kind of process."""

    @property
    def rate(self) -> str:
        """As the last line has it."""
        return f"{self.name} {self.rows / self.seconds:.0f}/s"


def measure(
    spark: SparkSession, cluster: SparkCluster, frame: DataFrame, rows: int
) -> list[Result]:
    """Each way once."""

    def write(format_: str, log: str) -> None:
        writer = frame.write.format(format_).option("gateway.url", cluster.urls)
        writer.option("topic", log).mode("append").save()

    def read() -> None:
        reader = spark.read.format("quorumlog").option("gateway.url", cluster.urls)
        frame = reader.options(subscribe="arrow", minPartitions=_PARTITIONS).load()
        assert frame.selectExpr("count(value)").first()[0] == rows  # type: ignore[index]

    for log in ("row", "arrow", "mapInArrow"):
        cluster.create(log)
    ways: dict[str, Callable[[], Any]] = {
        "row": lambda: write("quorumlog-rows", "row"),
        "arrow": lambda: write("quorumlog", "arrow"),
        "mapInArrow": lambda: append_batches(frame, log="mapInArrow", gateway_url=cluster.urls),
        "read": read,
        "null sink": lambda: write("null-sink", "row"),
    }
    results = []
    for name, way in ways.items():
        before, began = _cpu_s(cluster), time.perf_counter()
        way()
        seconds, after = time.perf_counter() - began, _cpu_s(cluster)
        spent = {kind: after[kind] - before[kind] for kind in _KINDS}
        results.append(Result(name, rows, seconds, spent))
        print(f"{seconds:.1f} s: {results[-1].rate}", file=sys.stderr, flush=True)
    return results


def _cpu_s(cluster: SparkCluster) -> dict[str, float]:
    """Seconds of processor time until now, of us, of all below us, and of those that have ended."""
    me, theirs = psutil.Process(), psutil.Process(cluster.pid)
    servers = {theirs, *theirs.children(recursive=True)}
    spent = dict.fromkeys(_KINDS, 0.0)
    for process in (me, *me.children(recursive=True)):
        # Its time is its parent's when it has ended.
        with contextlib.suppress(psutil.NoSuchProcess):
            kind = _kind(process) if process in servers else "Spark"
            spent[kind] += sum(process.cpu_times()[:4])
    return spent


def _kind(server: psutil.Process) -> str:
    """What a process of the cluster counts as."""
    words = " ".join(server.cmdline())
    return next((kind for kind in ("gateway", "bookie") if f"services.{kind}" in words), "others")


def _table(results: Sequence[Result]) -> Table:
    """Rates, and CPU seconds by kind of process for a million rows."""
    table = Table("", "rows/s", *(f"{kind} CPU s/M" for kind in _KINDS), "cores busy", box=None)
    for result in results:
        by_kind = (f"{result.cpu_s[kind] * 1e6 / result.rows:.2f}" for kind in _KINDS)
        busy = sum(result.cpu_s.values()) / result.seconds
        table.add_row(result.name, f"{result.rows / result.seconds:,.0f}", *by_kind, f"{busy:.1f}")
    return table


def main() -> None:
    """Warm everything up, measure, print the line last."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.spark_bench")
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows: int = parser.parse_args().rows
    with scratch("ql-spark-") as folder, spark_cluster(None, bookies=4, gateways=2) as cluster:
        print("Java: " + config.prepare())
        spark = (
            SparkSession.builder.master("local[2]")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.log.level", "ERROR")
            .getOrCreate()
        )
        for source in (QuorumLogSource, RowSource, NullSource):
            spark.dataSource.register(source)
        results: list[Result] = []
        for count in (_WARM_ROWS, rows):
            print(f"{count} rows of 39 bytes, {_PARTITIONS} partitions", flush=True)
            frame = _frame(spark, folder / str(count), count)
            results = measure(spark, cluster, frame, count)
            for log in ("row", "arrow", "mapInArrow"):
                cluster.http.request("DELETE", f"/v1/logs/{log}", is_repeatable=False)
        spark.stop()
    Console(width=100).print(_table(results))
    print("bench-spark: " + ", ".join(result.rate for result in results))


def _frame(spark: SparkSession, path: Path, rows: int) -> DataFrame:
    """Rows of 39 bytes in a file of Parquet, as the design's measurements had them."""
    made = spark.range(rows, numPartitions=_PARTITIONS)
    made.selectExpr("lpad(CAST(id AS string), 39, '0') AS value").write.parquet(str(path))
    return spark.read.parquet(str(path)).coalesce(_PARTITIONS)


if __name__ == "__main__":
    main()
