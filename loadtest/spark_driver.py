"""A Spark driver for chaos tests, which kill it: it writes numbers to a log, and copies that log
with a stream, or writes numbers to a log with a stream that commits at an interval.

`loadtest/spark_chaos.py` runs it with a JSON object as its only argument. After a kill it runs the
driver again from the start, as a scheduler would. The result must be the same.
"""

import json
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from quorumlog.spark import config
from quorumlog.spark.source import QuorumLogSource

ROWS_PER_S: Final = 1000
"""Rows of a stream that commits at an interval."""
EXPIRES_IN_S: Final = 60
"""Expiry of an abandoned transaction: short, since the test waits for its cleanup."""


def main() -> None:
    """Run the batch job and the stream, if the argument asks for them."""
    asked = json.loads(sys.argv[1])
    config.prepare()
    spark = (
        SparkSession.builder.master("local[2,8]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config(
            "spark.driver.extraJavaOptions",
            # A killed driver leaves its temporary files in the folder of the run, which is deleted.
            f"-XX:TieredStopAtLevel=1 -Xlog:disable -Djava.io.tmpdir={asked['folder']}",
        )
        .getOrCreate()
    )
    spark.dataSource.register(QuorumLogSource)
    if asked["writes"]:
        _batch(spark, asked)
    if every_s := asked.get("every_s"):
        _to_log(_ticks(spark, asked), asked).trigger(
            processingTime=f"{every_s} seconds"
        ).start().awaitTermination()
    elif asked["target"]:
        _to_log(_copied(spark, asked), asked).trigger(availableNow=True).start().awaitTermination()
    spark.stop()


def _batch(spark: SparkSession, asked: dict[str, Any]) -> None:
    """Write numbers to the log, with tasks whose first attempts often fail."""
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
    """A function for tasks that makes two of three first attempts fail at a random point."""

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
                raise RuntimeError("injected failure of a task between rows")
        if is_doomed:
            raise RuntimeError("injected failure of a task after its last row")

    return fail


def _copied(spark: SparkSession, asked: dict[str, Any]) -> DataFrame:
    """A stream of the whole log, in many batches."""
    return (
        spark.readStream.format("quorumlog")
        .option("gateway.url", asked["urls"])
        .option("subscribe", asked["source"])
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", asked["rows_per_batch"])
        .load()
        .select("value")
    )


def _ticks(spark: SparkSession, asked: dict[str, Any]) -> DataFrame:
    """A stream of ascending numbers, which begins at 0 and never ends."""
    ticks = spark.readStream.format("rate").option("rowsPerSecond", ROWS_PER_S)
    numbers = ticks.option("numPartitions", asked["partitions"]).load()
    return numbers.selectExpr("CAST(value AS string) AS value")


def _to_log(rows: DataFrame, asked: dict[str, Any]) -> DataStreamWriter:
    """The stream's writer to the other log."""
    return (
        rows.writeStream.format("quorumlog")
        .option("gateway.url", asked["urls"])
        .option("topic", asked["target"])
        .option("txnExpiresInSeconds", EXPIRES_IN_S)
        .option("checkpointLocation", asked["checkpoint"])
    )


if __name__ == "__main__":
    main()
