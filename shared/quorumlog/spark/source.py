"""The data source `quorumlog`: logs and ledgers as DataFrames, in batches and streams."""

from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import StructType

from quorumlog.spark import options as opt
from quorumlog.spark.http import Gateways
from quorumlog.spark.options import ReadOptions
from quorumlog.spark.plan import Range, batch_plan
from quorumlog.spark.reading import read_range
from quorumlog.spark.streaming import StreamReader
from quorumlog.spark.writers import BatchWriter, StreamWriter


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

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's
        """A streaming read."""
        del schema
        return StreamReader(self.options)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """A batch write: append, or overwrite."""
        return BatchWriter(self.options, schema, overwrite=overwrite)

    def streamWriter(  # noqa: N802 - Spark's
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        """A streaming write; `complete` mode overwrites."""
        return StreamWriter(self.options, schema, overwrite=overwrite)


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
