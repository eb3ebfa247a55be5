"""Streams from a work queue: a batch is claimed, and acknowledged once Spark has committed it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.spark_cluster import SparkCluster
from quorumlog.errors import NoSuchQueue

pytest.importorskip("pyspark", reason="PySpark is not installed: make setup-spark")

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable

from quorumlog.protocol.offset_set import Offsets
from quorumlog.spark.plan import DataLoss, TaskRange
from quorumlog.spark.queue import QueueReader, _parts
from quorumlog.spark.rows import rows
from quorumlog.spark.streaming import lag
from tests.support.waiting import LOST_WORKER

ANY = ReadAllAvailable()


def made(cluster: SparkCluster, log: str, records: int, lease_ms: int = 60_000) -> str:
    """A log with numbers from 0 on, and its queue `mail`. Returns the queue's path."""
    cluster.create(log)
    cluster.append(log, *map(str, range(records)))
    path = f"/v1/logs/{log}/queues/mail"
    cluster.http.request("PUT", path, value={"lease_ms": lease_ms}, is_repeatable=False)
    return path


def shown(cluster: SparkCluster, path: str) -> tuple[int, int]:
    """How many records are not done, and how many of them workers have."""
    found = cluster.http.get(path)
    return found["depth"], found["in_flight"]


def claimed(cluster: SparkCluster, path: str, wait_ms: int = 0, most: int = 100) -> list[int]:
    """What another worker gets."""
    found = cluster.http.post(f"{path}/claim", {"max": most, "wait_ms": wait_ms})
    return [one["offset"] for one in found["records"]]


@pytest.fixture
def started(cluster: SparkCluster) -> Iterator[Any]:
    """Readers of queues as Spark makes them, each for one run of a query."""
    readers = []

    def start(log: str, **options: str) -> QueueReader:
        given = {"gateway.url": cluster.urls, "subscribe": log, "queue": "mail", **options}
        readers.append(QueueReader(given))
        return readers[-1]

    yield start
    for each in readers:
        each.stop()


def read(cluster: SparkCluster, parts: list[TaskRange]) -> list[int]:
    """The records that the tasks of a batch return."""
    pages = (
        page for part in parts for page in rows(cluster.http, part, ("value",), fails_on_loss=True)
    )
    return [int(value) for page in pages for value in page.column("value").to_pylist()]


def query(
    spark: SparkSession, cluster: SparkCluster, log: str, checkpoint: Path, work: Any
) -> dict[str, Any]:
    """Run a query until the queue is empty. Returns its last progress."""
    frame = spark.readStream.format("quorumlog").option("gateway.url", cluster.urls)
    frame = frame.options(subscribe=log, queue="mail", maxOffsetsPerTrigger=10)
    sink = frame.load().writeStream.foreachBatch(work)
    sink = sink.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    for _ in range(10):
        running = sink.start()
        try:
            running.awaitTermination(300)
        except StreamingQueryException as error:
            if LOST_WORKER not in str(error):
                raise
            continue
        assert running.lastProgress is not None
        return dict(running.lastProgress)
    pytest.fail(f"ten times: {LOST_WORKER}")


def test_a_query_works_a_queue_off_in_batches_and_acknowledges_each(
    spark: SparkSession, cluster: SparkCluster, tmp_path: Path
) -> None:
    path = made(cluster, "worked-off", 25)
    batches: dict[int, list[int]] = {}

    def work(frame: DataFrame, number: int) -> None:
        batches[number] = [int(row.value) for row in frame.collect()]

    progress = query(spark, cluster, "worked-off", tmp_path, work)

    assert max(map(len, batches.values())) <= 10
    assert sorted(at for batch in batches.values() for at in batch) == [*range(25)]
    assert shown(cluster, path) == (0, 0)
    assert set(lag(progress)) == {"worked-off"}


def test_a_query_that_failed_gets_its_batch_again(
    spark: SparkSession, cluster: SparkCluster, tmp_path: Path
) -> None:
    path = made(cluster, "retried", 5)
    seen: list[list[int]] = []

    def work(frame: DataFrame, _number: int) -> None:
        seen.append([int(row.value) for row in frame.collect()])
        if len(seen) == 1:
            raise ZeroDivisionError("the first batch")

    with pytest.raises(StreamingQueryException, match="the first batch"):
        query(spark, cluster, "retried", tmp_path, work)
    assert shown(cluster, path) == (5, 5)
    query(spark, cluster, "retried", tmp_path, work)

    assert len(seen) > 1
    assert all(each == [*range(5)] for each in seen)
    assert shown(cluster, path) == (0, 0)
    assert cluster.http.get(path)["redelivered"] == 0


def test_a_batch_is_acknowledged_when_spark_asks_for_the_next_one(
    cluster: SparkCluster, started: Any
) -> None:
    path = made(cluster, "steps", 5)
    first = started("steps", maxOffsetsPerTrigger="3")
    start = first.initialOffset()
    end = first.latestOffset(start, ANY)

    assert first.latestOffset(start, ANY) == end  # Spark asks again before it begins the batch
    assert read(cluster, first.partitions(start, end)) == [0, 1, 2]
    assert shown(cluster, path) == (5, 3)
    following = first.latestOffset(end, ANY)
    assert shown(cluster, path) == (2, 2)
    assert first.reportLatestOffset() == {"steps": {"0": 2, "lag": 2, "ended": 0}}
    first.stop()

    second = started("steps")  # Spark had not committed the second batch
    assert read(cluster, second.partitions(end, following)) == [3, 4]
    assert second.latestOffset(following, ANY) == following
    assert shown(cluster, path) == (0, 0)
    third = started("steps")  # Spark had committed it
    assert third.latestOffset(following, ANY) == following
    assert third.reportLatestOffset()["steps"]["ended"] == 0


def test_claims_are_extended_while_a_batch_runs(cluster: SparkCluster, started: Any) -> None:
    path = made(cluster, "extended", 2, lease_ms=1000)
    stream = started("extended")
    end = stream.latestOffset(stream.initialOffset(), ANY)

    assert claimed(cluster, path, wait_ms=3000) == []
    assert stream.latestOffset(end, ANY) == end
    assert shown(cluster, path) == (0, 0)


def test_records_of_ended_claims_are_left_out_of_a_repeated_batch_and_reported(
    cluster: SparkCluster, started: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = made(cluster, "overdue", 3, lease_ms=1000)
    first = started("overdue")
    start = first.initialOffset()
    end = first.latestOffset(start, ANY)
    first.stop()  # as if its process had died
    assert claimed(cluster, path, wait_ms=30_000, most=1) == [0]

    second = started("overdue")
    assert read(cluster, second.partitions(start, end)) == [1, 2]
    assert "1 records" in caplog.text
    assert second.latestOffset(end, ANY) == end
    assert second.reportLatestOffset()["overdue"]["ended"] == 1
    assert cluster.http.get(path)["floor"] == 0  # the other worker has not acknowledged it


def test_a_batch_whose_claims_ended_while_it_ran_is_reported(
    cluster: SparkCluster, started: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = made(cluster, "stalled", 2, lease_ms=1000)
    stream = started("stalled")
    end = stream.latestOffset(stream.initialOffset(), ANY)
    stream._claims.close()  # as if the process had stalled
    assert claimed(cluster, path, wait_ms=30_000) == [0, 1]

    assert stream.latestOffset(end, ANY) == end
    assert "another worker gets them too" in caplog.text
    assert stream.reportLatestOffset()["stalled"]["ended"] == 2
    assert shown(cluster, path) == (2, 2)


def test_tasks_return_claimed_records_only(cluster: SparkCluster, started: Any) -> None:
    path = made(cluster, "shared", 9)
    found = cluster.http.post(f"{path}/claim", {"max": 9})["records"]
    given_back = {"claims": [{"claim": found[0]["claim"], "offsets": [0, 3, 4, 8]}]}
    cluster.http.post(f"{path}/nak", given_back)
    stream = started("shared", maxEntriesPerPartition="3")
    start = stream.initialOffset()

    parts = stream.partitions(start, stream.latestOffset(start, ANY))

    assert [(part.first, part.end) for part in parts] == [(0, 5), (8, 9)]
    assert read(cluster, parts) == [0, 3, 4, 8]


def test_parts_have_no_large_gaps() -> None:
    assert list(_parts(Offsets.of([1, 3, 2000, 2001]), 10)) == [[1, 3], [2000, 2001]]
    assert list(_parts(Offsets.of([1, 3, 4]), 2)) == [[1, 3], [4]]


def test_a_queue_that_is_gone_or_of_another_log_ends_the_query(
    cluster: SparkCluster, started: Any
) -> None:
    path = made(cluster, "replaced", 2)
    strict, lax = started("replaced"), started("replaced", failOnDataLoss="false")
    start = strict.initialOffset()
    cluster.http.request("DELETE", "/v1/logs/replaced", is_repeatable=True)
    cluster.create("replaced")
    cluster.append("replaced", "7")
    cluster.http.request("PUT", path, value={}, is_repeatable=False)

    with pytest.raises(DataLoss, match="created again"):
        strict.latestOffset(start, ANY)
    assert read(cluster, lax.partitions(start, lax.latestOffset(start, ANY))) == [7]
    cluster.http.request("DELETE", path, is_repeatable=False)
    with pytest.raises(NoSuchQueue):
        strict.latestOffset(start, ANY)
