"""A session as tests, `make spark` and users get it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_a_session_runs_python_on_its_workers(spark: "SparkSession") -> None:
    doubled = spark.range(4, numPartitions=2).rdd.map(lambda row: 2 * row.id).collect()

    assert doubled == [0, 2, 4, 6]
