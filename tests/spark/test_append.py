"""Batches posted from a UDF, with receipts that the driver publishes once."""

from collections.abc import Iterator
from typing import Any

import pytest

from loadtest.spark_cluster import SparkCluster

pytest.importorskip("pyspark", reason="PySpark is not installed: make setup-spark")

from pyspark.sql import SparkSession

from quorumlog.spark.append import append_batches


def test_batches_of_a_frame_come_onto_the_log_once(
    spark: SparkSession, cluster: SparkCluster
) -> None:
    log = cluster.create("appended")

    def fails_at_first(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        yield from batches
        context = TaskContext.get()
        if context is not None and context.attemptNumber() + context.partitionId() == 0:
            raise RuntimeError("the first attempt of the first task dies")

    frame = spark.range(2_000, numPartitions=2).selectExpr("cast(id AS string) AS value")
    failing = frame.mapInArrow(fails_at_first, "value string")
    done = [
        append_batches(failing, log=log, app="a", version=1, gateway_url=cluster.urls)[0]
        for _ in range(2)
    ]

    assert [(found.rows, found.is_duplicate) for found in done] == [(2_000, False), (0, True)]
    assert (done[0].first_offset, done[0].last_offset) == (0, 1_999)
    assert sorted(map(int, cluster.values(log))) == list(range(2_000))


def test_rows_that_can_not_be_posted_leave_nothing(
    spark: SparkSession, cluster: SparkCluster
) -> None:
    log = cluster.create("appended-not")
    frame = spark.range(10, numPartitions=2).selectExpr("if(id = 9, NULL, 'x') AS value")

    with pytest.raises(Exception, match="has null in the column"):
        append_batches(frame, log=log, gateway_url=cluster.urls)

    assert cluster.values(log) == []
