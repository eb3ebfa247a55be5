"""The data source `quorumlog`: logs and ledgers as DataFrames, in batches and streams."""

# Imported first, because its error names the required PySpark.
from quorumlog.spark.versions import DataSourceStreamArrowWriter, check

# isort: split

import hashlib
import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pyspark import SparkFiles
from pyspark.sql import datasource
from pyspark.sql.types import StructType

from quorumlog.spark import options as opt
from quorumlog.spark import writing
from quorumlog.spark.options import ReadOptions, WriteOptions
from quorumlog.spark.plan import EVERYTHING, Pruning, TaskRange, batch_plan
from quorumlog.spark.queue import QueueReader
from quorumlog.spark.rows import check_schema, read_range
from quorumlog.spark.streaming import StreamReader


class _LogWriter:
    """A write: each batch is published to the log exactly once and completely, or not at all."""

    _is_stream: ClassVar[bool]

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        parsed = WriteOptions.of(options, is_stream=self._is_stream)
        check_schema(schema, has_log=parsed.log is not None)
        self._options, self._overwrite = parsed, overwrite
        self._whose = writing.Whose() if self._is_stream else writing.batch_of(parsed)

    def write(self, iterator: Iterator[Any]) -> datasource.WriterCommitMessage:
        """Called in a task: write the task's rows to its own ledgers."""
        whose = writing.query_of(self._options) if self._is_stream else self._whose
        return writing.write_task(self._options, whose, iterator)

    def commit(
        self,
        messages: Sequence[datasource.WriterCommitMessage | None],
        batchId: int | None = None,  # noqa: ARG002, N803 - Spark's
    ) -> None:
        """Called on the driver: publish the tasks' ledgers, unless they are published already."""
        writing.publish(
            self._options,
            self._whose,
            _parts(messages),
            overwrite=self._overwrite,
            even_if_empty=not self._is_stream,
        )

    def abort(
        self,
        messages: Sequence[datasource.WriterCommitMessage | None],
        batchId: int | None = None,  # noqa: ARG002, N803 - Spark's
    ) -> None:
        """Called on the driver: abort the known transactions; all others expire. Has no effect if
        the commit succeeded and only its response was lost.
        """
        known = {self._whose.transaction, *(part.transaction for part in _parts(messages))}
        writing.abort(self._options, filter(None, known))


class BatchWriter(_LogWriter, datasource.DataSourceArrowWriter):
    """One batch write.

    Spark pickles this object once for all tasks, the commit and the abort, so all of them share the
    transaction that is chosen here.
    """

    _is_stream = False


class StreamWriter(_LogWriter, DataSourceStreamArrowWriter):
    """A streaming write.

    A new object in a new process commits each batch; the messages contain everything that it needs.
    """

    _is_stream = True


def _parts(messages: Sequence[datasource.WriterCommitMessage | None]) -> list[writing.WrittenPart]:
    return [
        part for found in messages if isinstance(found, writing.TaskMessage) for part in found.parts
    ]


log = logging.getLogger(__name__)


class QuorumLogSource(datasource.DataSource):
    """The data source `quorumlog`, which the module `pyspark_quorumlog` registers."""

    _load: str | None = None
    """The id of one `load`: Spark calls `schema`, and then uses pickled copies of this object."""

    @classmethod
    def name(cls) -> str:
        """The name to pass to `format`."""
        return "quorumlog"

    def schema(self) -> str:
        """The schema is fixed, like Kafka's; `columns` and `includeHeaders` select its columns."""
        self._load = uuid.uuid4().hex
        names = opt.columns_of(self.options)
        return ", ".join(f"{name} {opt.COLUMNS[name]}" for name in names)

    def reader(self, schema: StructType) -> datasource.DataSourceReader:
        """A batch read, planned by the DataFrame's first action; later actions use this plan."""
        self._check_schema(schema)
        check(self.options)
        options = ReadOptions.of(self.options)
        if options.published_as is not None:
            raise opt.BadOption("publishProgressAs is for streams only: a batch commits no offsets")
        if options.queue is not None:
            raise opt.BadOption("queue is for streams only: a batch acknowledges no records")
        if options.pushes_filters:
            return PruningReader(options, self._load)
        return BatchReader(options)

    def streamReader(self, schema: StructType) -> datasource.DataSourceStreamReader:  # noqa: N802 - Spark's
        """A streaming read of logs, or of a queue."""
        self._check_schema(schema)
        check(self.options)
        return (QueueReader if "queue" in self.options else StreamReader)(self.options)

    def _check_schema(self, given: StructType) -> None:
        """Raise BadOption if the user gave a schema other than the reader's."""
        own = [(name, opt.COLUMNS[name]) for name in opt.columns_of(self.options)]
        spelled = {"bigint": "long"}
        kinds = [(field.name, field.dataType.simpleString()) for field in given.fields]
        if [(name, spelled.get(kind, kind)) for name, kind in kinds] != own:
            raise opt.BadOption(
                "the schema is fixed: omit schema(), and select columns with the option columns"
            )

    def writer(self, schema: StructType, overwrite: bool) -> datasource.DataSourceWriter:
        """A batch write: append, or overwrite."""
        return BatchWriter(self.options, schema, overwrite=overwrite)

    def streamWriter(  # noqa: N802 - Spark's
        self, schema: StructType, overwrite: bool
    ) -> datasource.DataSourceStreamWriter:
        """A streaming write; `complete` mode overwrites."""
        return StreamWriter(self.options, schema, overwrite=overwrite)


class OneFilter(RuntimeError):
    """A DataFrame that was loaded with `pushFilters` was read with a second, different filter."""


class BatchReader(datasource.DataSourceReader):
    """Reads the records that are confirmed when the read is planned."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    def partitions(self) -> list[TaskRange]:
        """The ranges of all tasks."""
        return self._plan(EVERYTHING)

    def _plan(self, pruning: Pruning) -> list[TaskRange]:
        with self._options.connection.connect() as gateways:
            return batch_plan(self._options, gateways, pruning)

    def read(self, partition: datasource.InputPartition) -> Iterator[Any]:
        """One task's rows as Arrow batches."""
        return read_range(self._options, partition)


class PruningReader(BatchReader):
    """A batch reader whose plan omits the ranges that a query's filters exclude.

    The class is separate because Spark refuses any reader that has the method `pushFilters`,
    unless `spark.sql.python.filterPushdown.enabled` is set.

    PySpark 4.3 keeps only the last plan of each `load`, and uses the plan for every query of that
    DataFrame, even with another filter. Rows would be missing silently. Therefore, a load can be
    read with one filter only. The driver records that filter in a file of its session.
    """

    def __init__(self, options: ReadOptions, load: str | None) -> None:
        super().__init__(options)
        self._load = load
        self._pruning = EVERYTHING

    def pushFilters(self, filters: Sequence[Any]) -> list[Any]:  # noqa: N802 - Spark's
        """Use filters to prune the plan; returns the filters that Spark still has to apply."""
        from quorumlog.spark.filters import pruning_of  # noqa: PLC0415 - PySpark 4.0 has no filters

        of_logs = not self._options.subject.ledgers
        self._pruning, left = pruning_of(filters, of_logs=of_logs)
        return left

    def partitions(self) -> list[TaskRange]:
        """The ranges of all tasks. Raises: OneFilter."""
        if self._load is not None:
            _note(self._load, self._pruning)
        if self._pruning != EVERYTHING:
            log.warning(
                "quorumlog: pushFilters: from now on this load returns only rows that match this query's filter,"
                " even to other queries: call load again for other queries (filter: %s)",
                self._pruning,
            )
        return self._plan(self._pruning)


def _note(load: str, pruning: Pruning) -> None:
    """Record a load's pruning in a file that all planning processes of the driver see."""
    place = Path(SparkFiles.getRootDirectory()) / f"quorumlog-{load}"
    digest = hashlib.sha256(repr(pruning).encode()).hexdigest()
    try:
        # A symbolic link: it exists with its whole text or not at all.
        place.symlink_to(digest)
    except FileExistsError:
        if str(place.readlink()) != digest:
            raise OneFilter(
                "this DataFrame was read with another filter, and Spark keeps one plan for each load: "
                "call load for each filter, or do not set pushFilters"
            ) from None
