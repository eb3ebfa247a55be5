"""A Spark driver that is there to be killed: writes numbers onto a log, copies that log as a stream.

Run by `loadtest/spark_chaos.py` with a JSON object as its only argument. Doing all of it again is
what a scheduler does with a driver that died: the result is the same.
"""

import json
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from pyspark import TaskContext
from pyspark.sql import SparkSession

from quorumlog.spark import config
from quorumlog.spark.source import QuorumLogSource

EXPIRES_IN_S: Final = 60
"""Of a transaction that nobody ends: short, so that what it leaves can be seen to go."""


def main() -> None:
    """The batch, then the stream."""
    asked = json.loads(sys.argv[1])
    config.prepare()
    spark = (
        SparkSession.builder.master("local[2,8]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config(
            "spark.driver.extraJavaOptions",
            # What a killed driver leaves is where the run's own files are.
            f"-XX:TieredStopAtLevel=1 -Xlog:disable -Djava.io.tmpdir={asked['folder']}",
        )
        .getOrCreate()
    )
    spark.dataSource.register(QuorumLogSource)
    if asked["writes"]:
        _batch(spark, asked)
    if asked["target"]:
        _stream(spark, asked)
    spark.stop()


def _batch(spark: SparkSession, asked: dict[str, Any]) -> None:
    """Numbers onto the log, by tasks of which many fail at first."""
    rows: int = asked["rows"]
    numbers = spark.range(rows, numPartitions=asked["partitions"])
    (
        numbers.selectExpr("CAST(id AS string) AS value")
        .mapInArrow(_failing(asked["seed"]), "value string")
        .write.format("quorumlog")
        .option("gateway.url", asked["urls"])
        .option("topic", asked["source"])
        .option("txnAppId", "chaos")
        .option("txnVersion", 1)
        .option("txnExpiresInSeconds", EXPIRES_IN_S)
        .mode("append")
        .save()
    )


def _failing(seed: int) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Tasks whose first attempts die somewhere, two of three."""

    def fail(batches: Iterator[Any]) -> Iterator[Any]:
        context = TaskContext.get()
        assert context is not None
        chance = random.Random(f"{seed}-{context.partitionId()}")
        is_doomed = context.attemptNumber() == 0 and chance.random() < 2 / 3
        left = chance.randrange(1, 10)
        for batch in batches:
            yield batch
            left -= 1
            if is_doomed and left == 0:
                raise RuntimeError("a task that dies on its way")
        if is_doomed:
            raise RuntimeError("a task that dies after its last row")

    return fail


def _stream(spark: SparkSession, asked: dict[str, Any]) -> None:
    """All that is on the log onto another one, in many batches."""
    query = (
        spark.readStream.format("quorumlog")
        .option("gateway.url", asked["urls"])
        .option("subscribe", asked["source"])
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", asked["rows_per_batch"])
        .load()
        .select("value")
        .writeStream.format("quorumlog")
        .option("gateway.url", asked["urls"])
        .option("topic", asked["target"])
        .option("txnExpiresInSeconds", EXPIRES_IN_S)
        .option("checkpointLocation", asked["checkpoint"])
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main()
