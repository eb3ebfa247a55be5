"""One SparkSession for all tests, and a cluster for each file of them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from quorumlog.spark import config

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> "Iterator[SparkSession]":
    """A small local session; a JVM takes 10 s to start, so there is one."""
    pytest.importorskip("pyspark", reason="PySpark is not installed: make setup-spark")
    from pyspark.sql import SparkSession

    config.prepare()
    session = (
        SparkSession.builder.master("local[2,4]")
        .appName("quorumlog-tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "512m")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.default.parallelism", "2")
        .config("spark.log.level", "ERROR")
        # Quick to start: nothing here lives long enough for the second compiler.
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -Xlog:disable")
        .getOrCreate()
    )
    yield session
    session.stop()
