"""The data source `quorumlog`: logs and ledgers as DataFrames, in batches and streams."""

from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from quorumlog.spark import options as opt
from quorumlog.spark.http import Gateways
from quorumlog.spark.options import ReadOptions
from quorumlog.spark.plan import Range, batch_plan
from quorumlog.spark.reading import rows


class QuorumLogSource(DataSource):
    """Registered by the module `pyspark_quorumlog`, which PySpark finds by its name."""

    @classmethod
    def name(cls) -> str:
        """What `format` takes."""
        return "quorumlog"

    def schema(self) -> str:
        """Fixed, as Kafka's: `columns` and `includeHeaders` choose among its columns."""
        names = opt.columns_of(self.options)
        return ", ".join(f"{name} {opt.COLUMNS[name]}" for name in names)

    def reader(self, schema: StructType) -> DataSourceReader:
        """A batch read, planned at its first action and the same for the DataFrame's life."""
        del schema
        return Reader(self.options)


class Reader(DataSourceReader):
    """Reads what there is when it is planned."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = ReadOptions.of(options)

    def partitions(self) -> list[Range]:
        """The ranges of all tasks."""
        connection = self._options.connection
        gateways = Gateways(connection.urls, headers=connection.headers)
        try:
            return batch_plan(self._options, gateways)
        finally:
            gateways.close()

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """One task's rows as Arrow batches."""
        return read_range(self._options, partition)


def read_range(options: ReadOptions, partition: InputPartition) -> Iterator[Any]:
    """The rows of one range; none of the empty partition that Spark makes of an empty plan."""
    if not isinstance(partition, Range):
        return
    connection = options.connection
    gateways = Gateways(connection.urls, headers=connection.headers)
    try:
        yield from rows(gateways, partition, options.columns, fails_on_loss=options.fails_on_loss)
    finally:
        gateways.close()
