"""One SparkSession for all tests, and a cluster for each file of them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from loadtest.spark_cluster import SparkCluster, spark_cluster
from loadtest.stores import StoreServers
from quorumlog.spark import config
from tests.support.waiting import UNHURRIED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="package")
def cluster(servers: StoreServers) -> Iterator[SparkCluster]:
    """One cluster for all tests that hurt nobody; a bookie may be killed and started again."""
    settings = {"bookies": 4, "gateways": 2, "environment": dict(UNHURRIED)}
    with spark_cluster(servers.fresh(), **settings) as started:
        yield started


@pytest.fixture
def spark(session: "SparkSession") -> "SparkSession":
    """The session, made the active one again: a fork in a thread of another test may have ended
    the connection on which it was that.
    """
    session.createDataFrame([], "value string")
    return session


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[SparkSession]":
    """A small local session; a JVM takes 10 s to start, so there is one."""
    pytest.importorskip("pyspark", reason="PySpark is not installed: make setup-spark")
    from pyspark.sql import SparkSession

    from quorumlog.spark.source import QuorumLogSource

    config.prepare()
    # Spark leaves folders behind where Java has its temporary files.
    folder = tmp_path_factory.mktemp("spark")
    made = (
        SparkSession.builder.master("local[2,4]")
        .appName("quorumlog-tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "512m")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.default.parallelism", "2")
        .config("spark.log.level", "ERROR")
        # The tables are small: compiling a class for each query would take longer than the query.
        .config("spark.sql.codegen.wholeStage", "false")
        .config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
        # Quick to start: nothing here lives long enough for the second compiler.
        .config(
            "spark.driver.extraJavaOptions",
            f"-XX:TieredStopAtLevel=1 -Xlog:disable -Djava.io.tmpdir={folder}",
        )
        .getOrCreate()
    )
    # Found by its name, too; but where the machine is slow Spark gives up on looking, for good.
    made.dataSource.register(QuorumLogSource)
    yield made
    made.stop()
