"""Batches posted from a UDF with the guarantee of a write: `append_batches(df, log="events")`.

Each partition posts its rows into ledgers of its own and gives back a receipt. Spark returns the
rows of exactly one successful attempt of each partition, so the receipts name what to publish, and
the driver publishes them once.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from quorumlog.spark.options import WriteOptions
from quorumlog.spark.rows import check_schema
from quorumlog.spark.writing import (
    Published,
    Whose,
    abort,
    batch_of,
    part_of,
    publish,
    receipt,
    write_task,
)


def append_batches(
    df: DataFrame,
    *,
    log: str | None = None,
    app: str | None = None,
    version: int | None = None,
    overwrite: bool = False,
    **options: str,
) -> list[Published]:
    """Put the rows of a DataFrame onto a log, all of them once, or none.

    `log`: where to; without it the column `topic` says so, and each log gets its rows at once.
    `app` and `version`: a repeat of the same ones is a no-op. `options`: those of the format, with
    `_` for `.`: gateway_url, maxLedgersPerCommit.

    The receipts are collected here, once: a DataFrame of receipts would post anew for each action.
    """
    given = {name.replace("_", "."): value for name, value in options.items()}
    named = {"topic": log, "txnAppId": app, "txnVersion": version}
    given |= {name: str(value) for name, value in named.items() if value is not None}
    parsed = WriteOptions.of(given, is_stream=False)
    check_schema(df.schema, has_log=log is not None)
    whose = batch_of(parsed)
    try:
        rows = df.mapInArrow(partial(_post, parsed, whose), "receipt string").collect()
        parts = [part_of(row.receipt) for row in rows]
        return publish(parsed, whose, parts, overwrite=overwrite, even_if_empty=True)
    except BaseException:
        if whose.transaction is not None:
            # It does nothing where the commit was done and only its answer was lost.
            abort(parsed, [whose.transaction])
        raise


def _post(options: WriteOptions, whose: Whose, batches: Iterator[Any]) -> Iterator[Any]:
    """In a task: write the partition, give back its receipts."""
    written = write_task(options, whose, batches)
    receipts = [receipt(part) for part in written.parts]
    yield pa.RecordBatch.from_pydict({"receipt": pa.array(receipts, pa.string())})
