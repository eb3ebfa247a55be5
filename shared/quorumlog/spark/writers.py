"""The writers that Spark calls: in tasks, then once at the driver."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from quorumlog.spark.options import WriteOptions
from quorumlog.spark.rows import check_schema
from quorumlog.spark.versions import DataSourceStreamArrowWriter
from quorumlog.spark.writing import (
    TaskMessage,
    Whose,
    WrittenPart,
    abort,
    batch_of,
    publish,
    query_of,
    write_task,
)


class BatchWriter(DataSourceArrowWriter):
    """One batch write: all of its rows are published to the log, or none.

    Spark pickles this object once for all tasks, the commit and the abort, so all of them share the
    transaction that is chosen here.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        parsed = WriteOptions.of(options, is_stream=False)
        check_schema(schema, has_log=parsed.log is not None)
        self._options, self._overwrite = parsed, overwrite
        self._whose = batch_of(parsed)

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """In a task: its rows into ledgers of its own."""
        return write_task(self._options, self._whose, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """At the driver: publish what the tasks have written."""
        publish(
            self._options,
            self._whose,
            _parts(messages),
            overwrite=self._overwrite,
            even_if_empty=True,
        )

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """At the driver: abort. Does nothing if the commit was done and only its answer was lost."""
        abort(self._options, _transactions(messages, self._whose))


class StreamWriter(DataSourceStreamArrowWriter):
    """A streaming write: each batch is published once.

    A new object in a new process commits each batch; the messages hold everything that it needs.
    """

    def __init__(self, options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> None:
        parsed = WriteOptions.of(options, is_stream=True)
        check_schema(schema, has_log=parsed.log is not None)
        self._options, self._overwrite = parsed, overwrite

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        """In a task: its rows into ledgers of its own."""
        return write_task(self._options, query_of(self._options), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's
        """At the driver: publish the batch, unless it is published already."""
        del batchId
        publish(self._options, Whose(), _parts(messages), overwrite=self._overwrite)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's
        """At the driver: abort the batch's transactions that are known here; others expire."""
        del batchId
        abort(self._options, _transactions(messages, Whose()))


def _parts(messages: Sequence[WriterCommitMessage | None]) -> list[WrittenPart]:
    return [part for found in messages if isinstance(found, TaskMessage) for part in found.parts]


def _transactions(messages: Sequence[WriterCommitMessage | None], whose: Whose) -> set[str]:
    own = {whose.transaction} if whose.transaction is not None else set()
    return own | {part.transaction for part in _parts(messages)}
