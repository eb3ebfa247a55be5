"""Appends rows exactly once through a UDF: `append_batches(df, log="events")`.

Each partition appends its rows to its own ledgers and returns a receipt. Spark returns the rows of
exactly one successful attempt of each partition, so the receipts name the ledgers to publish, and the
driver publishes them once.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from quorumlog.spark import writing
from quorumlog.spark.options import WriteOptions
from quorumlog.spark.rows import check_schema


def append_batches(
    df: DataFrame,
    *,
    log: str | None = None,
    app: str | None = None,
    version: int | None = None,
    overwrite: bool = False,
    **options: object,
) -> list[writing.Published]:
    """Append the rows of a DataFrame to a log: all of them exactly once, or none.

    `log`: the target. Without `log`, the column `topic` names each row's log, and each log gets its
    rows atomically. `app` and `version`: a repeat of the same version is a no-op. `options`: the
    format's options, with `_` instead of `.`, such as gateway_url and maxLedgersPerCommit.

    Receipts are collected at once: a lazy DataFrame of receipts would append again for each action.
    """
    given = {name.replace("_", "."): str(value) for name, value in options.items()}
    named = {"topic": log, "txnAppId": app, "txnVersion": version}
    given |= {name: str(value) for name, value in named.items() if value is not None}
    parsed = WriteOptions.of(given, is_stream=False)
    check_schema(df.schema, has_log=log is not None)
    whose = writing.batch_of(parsed)
    try:
        rows = df.mapInArrow(partial(_post, parsed, whose), "receipt string").collect()
        parts = [writing.part_of(row.receipt) for row in rows]
        return writing.publish(parsed, whose, parts, overwrite=overwrite, even_if_empty=True)
    except BaseException:
        if whose.transaction is not None:
            # The abort does nothing if the commit succeeded and only the response was lost.
            writing.abort(parsed, [whose.transaction])
        raise


def _post(options: WriteOptions, whose: writing.Whose, batches: Iterator[Any]) -> Iterator[Any]:
    """Called in a task: write a partition's rows and yield its receipts."""
    written = writing.write_task(options, whose, batches)
    receipts = [writing.receipt(part) for part in written.parts]
    yield pa.RecordBatch.from_pydict({"receipt": pa.array(receipts, pa.string())})
