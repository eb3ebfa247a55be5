"""Spark in ten minutes: write to a log exactly once, read the log, copy it as a stream.

    make spark FILE=examples/spark_quickstart.py

This command starts a cluster if none is running, chooses a Java runtime, and runs this program.
"""

import shutil
import tempfile
import uuid

from pyspark.sql import SparkSession

from quorumlog.spark.config import gateways
from quorumlog.spark.http import Gateways
from quorumlog.spark.source import QuorumLogSource


def main() -> None:
    """Write a log, read it as a DataFrame, and copy it as a stream."""
    spark = SparkSession.builder.appName("quickstart").getOrCreate()
    spark.dataSource.register(QuorumLogSource)

    # Create two logs. Any HTTP client can create, write and read logs too.
    name = f"quickstart-{uuid.uuid4().hex[:8]}"
    with_http = Gateways(gateways())
    for log in (name, f"{name}-copy"):
        with_http.request("PUT", f"/v1/logs/{log}", value={}, is_repeatable=True)

    # All rows are written, or none. The second write has the same app and version, so it adds nothing.
    orders = spark.range(100_000, numPartitions=2).selectExpr(
        "to_json(struct(id AS order, id % 7 AS customer)) AS value"
    )
    for _ in range(2):
        (
            orders.write.format("quorumlog")
            .option("topic", name)
            .option("txnAppId", "quickstart")
            .option("txnVersion", 1)
            .mode("append")
            .save()
        )

    # Read all current records as a DataFrame with Kafka's columns.
    frame = spark.read.format("quorumlog").option("subscribe", name).load()
    customers = frame.selectExpr("get_json_object(CAST(value AS string), '$.customer') AS customer")
    customers.groupBy("customer").count().orderBy("customer").show()

    # Copy the log to another log as a stream, which ends once it has copied all current records.
    checkpoint = tempfile.mkdtemp(prefix="quickstart-")
    query = (
        spark.readStream.format("quorumlog")
        .option("subscribe", name)
        .option("startingOffsets", "earliest")
        .load()
        .select("key", "value")
        .writeStream.format("quorumlog")
        .option("topic", f"{name}-copy")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    shutil.rmtree(checkpoint)

    copied = spark.read.format("quorumlog").option("subscribe", f"{name}-copy").load().count()
    print(f"{frame.count()} rows in {name}, {copied} in its copy")
    spark.stop()


if __name__ == "__main__":
    main()
