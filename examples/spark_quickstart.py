"""Spark in ten minutes: write a log exactly once, read it, copy it as a stream.

    make spark FILE=examples/spark_quickstart.py

starts a cluster where none runs, finds a Java or brings one, and runs this.
"""

import shutil
import tempfile
import uuid

from pyspark.sql import SparkSession

from quorumlog.spark.config import gateways
from quorumlog.spark.http import Gateways
from quorumlog.spark.source import QuorumLogSource


def main() -> None:
    """Three ways over one log."""
    spark = SparkSession.builder.appName("quickstart").getOrCreate()
    spark.dataSource.register(QuorumLogSource)

    # Two logs of our own; anything that speaks HTTP can make, write and read them too.
    name = f"quickstart-{uuid.uuid4().hex[:8]}"
    with_http = Gateways(gateways())
    for log in (name, f"{name}-copy"):
        with_http.request("PUT", f"/v1/logs/{log}", value={}, is_repeatable=True)

    # All rows come onto the log, or none; the same version of the same app comes once.
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

    # What there is now, as a DataFrame with Kafka's columns.
    frame = spark.read.format("quorumlog").option("subscribe", name).load()
    customers = frame.selectExpr("get_json_object(CAST(value AS string), '$.customer') AS customer")
    customers.groupBy("customer").count().orderBy("customer").show()

    # The same log as a stream into another one, until all of it is there.
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
