"""A session as tests, `make spark` and users get it."""

import importlib
import pkgutil

import pytest

pytest.importorskip("pyspark", reason="PySpark is not installed: make setup-spark")

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource


def test_spark_finds_the_format_by_the_name_of_a_module() -> None:
    module = importlib.import_module("pyspark_quorumlog")

    assert "pyspark_quorumlog" in {found.name for found in pkgutil.iter_modules()}
    assert issubclass(module.DefaultSource, DataSource)
    assert module.DefaultSource.name() == "quorumlog"


def test_a_session_runs_python_on_its_workers(spark: SparkSession) -> None:
    doubled = spark.range(4, numPartitions=2).rdd.map(lambda row: 2 * row.id).collect()

    assert doubled == [0, 2, 4, 6]
