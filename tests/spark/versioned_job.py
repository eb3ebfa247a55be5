"""A program for a PySpark of another version: writes, reads, streams; prints what it saw as JSON."""

import json
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import pyspark
from pyspark.sql import DataFrame, SparkSession

asked = json.loads(sys.argv[1])
spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", "false")
    .config("spark.log.level", "ERROR")
    .config("spark.sql.shuffle.partitions", "2")
    .config("spark.driver.extraJavaOptions", asked["java"])
    .getOrCreate()
)


def on(side: Any) -> Any:
    return side.format("quorumlog").option("gateway.url", asked["urls"])


def records(log: str, **options: str) -> DataFrame:
    found: DataFrame = on(spark.read).option("subscribe", log).options(**options).load()
    return found


def write(rows: DataFrame, log: str, version: int) -> None:
    sink = on(rows.write).option("topic", log).option("txnAppId", "versions")
    sink.option("txnVersion", version).mode("append").save()


def copy(checkpoint: str, **options: str) -> None:
    stream = on(spark.readStream).option("subscribe", asked["one"]).options(**options)
    sink = stream.option("startingOffsets", "earliest").load().select("key", "value").writeStream
    query = on(sink).option("topic", asked["other"]).option("checkpointLocation", checkpoint)
    assert query.trigger(availableNow=True).start().awaitTermination(300)


def patiently(call: Callable[[], Any]) -> Any:
    """Repeat what fails because a Python process did not start within Spark's 10 s: each step may be repeated."""
    for _ in range(10):
        try:
            return call()
        except Exception as error:
            if "to connect back" not in str(error):
                raise
    raise TimeoutError("ten times")


def refused(call: Any) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - of whichever class Spark makes of it
        return str(error)
    return ""


# The sources are found by the names of their modules: ours, and the one of somebody else.
others = patiently(lambda: spark.read.format("other").load().count())
rows = spark.range(100, numPartitions=2).selectExpr("CAST(id AS string) AS value", "'k' AS key")
for _ in range(2):
    patiently(lambda: write(rows, asked["one"], 1))
folder = tempfile.mkdtemp()
patiently(lambda: copy(folder))
patiently(lambda: write(rows.limit(5), asked["one"], 2))
for _ in range(2):
    patiently(lambda: copy(folder))
counts = [patiently(records(log).count) for log in (asked["one"], asked["other"])]
sys.stdout.write(
    json.dumps(
        {
            "version": pyspark.__version__,
            "others": others,
            "counts": counts,
            "limited": refused(lambda: copy(tempfile.mkdtemp(), maxOffsetsPerTrigger="40")),
            "filtered": refused(lambda: records(asked["one"], pushFilters="true").count()),
        }
    )
    + "\n"
)
spark.stop()
