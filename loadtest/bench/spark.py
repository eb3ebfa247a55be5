"""Rows per second that Spark writes to a log in each possible way, and reads back, on one machine.
ROWS= sets the number.

The same Parquet file is written by a row writer, the Arrow writer and `append_batches`, and read
back. It is also written to a sink that drops all rows in Python, whose rate is an upper bound for
the other writers. If this rate is far above the others, the cluster is the bottleneck, not Spark.
The report has the rates, and the CPU of each kind of process per million rows.
"""

import argparse
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
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

from loadtest.bench.measure import Figures
from loadtest.bench.plan import Columns, Plan, Work
from loadtest.program import Teller
from loadtest.spark_cluster import SparkCluster, spark_cluster
from loadtest.stores import scratch
from quorumlog.spark import config
from quorumlog.spark.append import append_batches
from quorumlog.spark.source import BatchWriter, QuorumLogSource

_PARTITIONS: Final = 2
_BATCH_ROWS: Final = 10_000
_WARM_ROWS: Final = 10_000
_KINDS: Final = ("gateway", "bookie", "others", "Spark")
"""Kinds of processes. `others` are the metadata service, Postgres, Redis and autorecovery."""


@dataclass(frozen=True)
class Nothing(WriterCommitMessage):
    """The commit message of a task that stores nothing."""

    rows: int


class NullWriter(DataSourceArrowWriter):
    """A writer that gets all rows in Python and drops them."""

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """Count the rows and drop them."""
        return Nothing(sum(batch.num_rows for batch in iterator))


class NullSource(DataSource):
    """A data source whose writer drops all rows: the upper bound for all writers."""

    @classmethod
    def name(cls) -> str:
        """The data source's name for `format`."""
        return "null-sink"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer, which is the same for all schemas."""
        del schema, overwrite
        return NullWriter()


class RowWriter(DataSourceWriter):
    """A writer that gets rows one by one, and passes them to the Arrow writer in batches."""

    def __init__(self, inner: BatchWriter) -> None:
        self._inner = inner

    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        """Gather rows into batches."""
        return self._inner.write(_batches(iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Commit like the Arrow writer."""
        self._inner.commit(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Abort like the Arrow writer."""
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
    """The data source of quorumlog as it would be without Arrow."""

    @classmethod
    def name(cls) -> str:
        """The data source's name for `format`."""
        return "quorumlog-rows"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A writer that gets rows one by one."""
        return RowWriter(BatchWriter(self.options, schema, overwrite=overwrite))


@dataclass(frozen=True, slots=True)
class Ways:
    """A Spark session, a cluster, and rows. Methods block, since Spark needs the main thread."""

    spark: SparkSession
    cluster: SparkCluster
    frame: DataFrame
    rows: int

    @classmethod
    @contextlib.asynccontextmanager
    async def running(
        cls, _folder: Path, _seconds: float, *, rows: int, teller: Teller
    ) -> "AsyncIterator[Ways]":
        """Start a cluster and a Spark session, and warm up each way with a few rows."""
        with scratch("ql-spark-") as folder, spark_cluster(None, bookies=4, gateways=2) as cluster:
            teller.say("Java: " + config.prepare())
            spark = (
                SparkSession.builder.master("local[2]")
                .config("spark.ui.enabled", "false")
                .config("spark.ui.showConsoleProgress", "false")
                .config("spark.log.level", "ERROR")
                .getOrCreate()
            )
            for source in (QuorumLogSource, RowSource, NullSource):
                spark.dataSource.register(source)
            warm = cls(spark, cluster, _frame(spark, folder / "warm", _WARM_ROWS), _WARM_ROWS)
            warm._create_logs()
            for name in WAYS:
                figures = await warm.measure(name)
                teller.say(f"{_WARM_ROWS:,} rows, {name}: {figures['rows/s']:,.0f} rows/s")
            for log in _LOGS:
                cluster.http.request("DELETE", f"/v1/logs/{log}", is_repeatable=False)
            ways = cls(spark, cluster, _frame(spark, folder / "rows", rows), rows)
            ways._create_logs()
            yield ways
            spark.stop()

    def _create_logs(self) -> None:
        for log in _LOGS:
            self.cluster.create(log)

    async def measure(self, name: str) -> Figures:
        """Measure one way: rows per second, and CPU seconds by kind per million rows."""
        before, began = _cpu_s(self.cluster), time.perf_counter()
        WAYS[name](self)
        seconds, after = time.perf_counter() - began, _cpu_s(self.cluster)
        spent = {kind: after[kind] - before[kind] for kind in _KINDS}
        return {
            "rows/s": self.rows / seconds,
            **{f"{kind} CPU s/M": taken * 1e6 / self.rows for kind, taken in spent.items()},
            "cores busy": sum(spent.values()) / seconds,
        }

    def write(self, format_: str, log: str) -> None:
        """Write the rows to a log with a data source."""
        writer = self.frame.write.format(format_).option("gateway.url", self.cluster.urls)
        writer.option("topic", log).mode("append").save()

    def append(self) -> None:
        """Write the rows to a log by `append_batches`."""
        append_batches(self.frame, log="mapInArrow", gateway_url=self.cluster.urls)

    def read(self) -> None:
        """Read back the log that the Arrow writer wrote."""
        reader = self.spark.read.format("quorumlog").option("gateway.url", self.cluster.urls)
        frame = reader.options(subscribe="arrow", minPartitions=_PARTITIONS).load()
        assert frame.selectExpr("count(value)").first()[0] == self.rows  # type: ignore[index]


_LOGS: Final = ("row", "arrow", "mapInArrow")
WAYS: Final[dict[str, Callable[[Ways], None]]] = {
    "row": lambda ways: ways.write("quorumlog-rows", "row"),
    "arrow": lambda ways: ways.write("quorumlog", "arrow"),
    "mapInArrow": Ways.append,
    "read": Ways.read,
    "null sink": lambda ways: ways.write("null-sink", "row"),
}


def _cpu_s(cluster: SparkCluster) -> dict[str, float]:
    """CPU seconds by kind of process: this process and its descendants, even ended ones."""
    me, theirs = psutil.Process(), psutil.Process(cluster.pid)
    servers = {theirs, *theirs.children(recursive=True)}
    spent = dict.fromkeys(_KINDS, 0.0)
    for process in (me, *me.children(recursive=True)):
        # Once a process has ended, its CPU time counts in its parent.
        with contextlib.suppress(psutil.NoSuchProcess):
            kind = _kind(process) if process in servers else "Spark"
            spent[kind] += sum(process.cpu_times()[:4])
    return spent


def _kind(server: psutil.Process) -> str:
    """The kind of a process of the cluster."""
    words = " ".join(server.cmdline())
    return next((kind for kind in ("gateway", "bookie") if f"services.{kind}" in words), "others")


def _frame(spark: SparkSession, path: Path, rows: int) -> DataFrame:
    """Write rows of 39 bytes, as in the design's measurements, to Parquet and return the frame."""
    made = spark.range(rows, numPartitions=_PARTITIONS)
    made.selectExpr("lpad(CAST(id AS string), 39, '0') AS value").write.parquet(str(path))
    return spark.read.parquet(str(path)).coalesce(_PARTITIONS)


OPTIONS: Final = {"rows": (1_000_000, "number of rows, of 39 bytes each")}
_FIGURES: Final = ("rows/s", *(f"{kind} CPU s/M" for kind in _KINDS), "cores busy")


def plan(asked: argparse.Namespace, teller: Teller) -> Plan:
    """Plan each way once."""
    rows: int = asked.rows
    return Plan(
        [Work("Spark", name, Ways.measure, (name,)) for name in WAYS],
        {"Spark": partial(Ways.running, rows=rows, teller=teller)},
        (Columns("rows, and CPU seconds for a million", _FIGURES),),
        conditions=f"{rows:,} rows of 39 bytes, {_PARTITIONS} partitions",
    )
