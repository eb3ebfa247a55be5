"""Streams from a log to a log: nothing is lost or doubled, however often the query begins again."""

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.spark_cluster import SparkCluster

pytest.importorskip("pyspark", reason="PySpark is not installed: make setup-spark")

from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadMaxBytes, ReadMaxRows
from pyspark.sql.streaming.query import StreamingQuery

from quorumlog.spark.plan import DataLoss
from quorumlog.spark.rows import rows
from quorumlog.spark.streaming import StreamReader, lag
from tests.support.waiting import LOST_WORKER


def copy(
    spark: SparkSession,
    cluster: SparkCluster,
    source: dict[str, Any],
    target: str,
    checkpoint: Path,
) -> StreamingQuery:
    """Copy what there is now, and wait for the end."""
    stream = spark.readStream.format("quorumlog").option("gateway.url", cluster.urls)
    sink = (
        stream.options(startingOffsets="earliest", **source)
        .load()
        .select("key", "value")
        .writeStream.format("quorumlog")
        .option("gateway.url", cluster.urls)
        .options(topic=target, checkpointLocation=str(checkpoint))
    )
    for _ in range(10):
        query = sink.trigger(availableNow=True).start()
        try:
            query.awaitTermination(300)
        except StreamingQueryException as error:
            if LOST_WORKER not in str(error):
                raise
            continue
        assert query.exception() is None
        assert not query.isActive
        return query
    pytest.fail(f"ten times: {LOST_WORKER}")


def test_batches_of_a_stream_take_no_more_than_they_may_and_all_arrives_once(
    spark: SparkSession, cluster: SparkCluster, tmp_path: Path
) -> None:
    source, target = cluster.create("stream-a", roll_entries=2), cluster.create("stream-b")
    for n in range(5):
        cluster.append(source, *(f"{n}-{m}" for m in range(20)))

    options = {"subscribe": source, "maxOffsetsPerTrigger": "40"}
    query = copy(spark, cluster, options, target, tmp_path)
    assert cluster.values(target) == cluster.values(source)
    sizes = [progress["numInputRows"] for progress in query.recentProgress]
    assert max(sizes) <= 40
    assert lag(query.recentProgress[-1]) == {source: 0}

    cluster.append(source, "late")
    copy(spark, cluster, options, target, tmp_path)
    assert cluster.values(target) == cluster.values(source)


def test_a_batch_that_is_repeated_after_its_commit_is_not_there_twice(
    spark: SparkSession, cluster: SparkCluster, tmp_path: Path
) -> None:
    """As after a driver that was killed between the sink's commit and Spark's own log."""
    source, target = cluster.create("repeat-a"), cluster.create("repeat-b")
    cluster.append(source, "1", "2", "3")
    copy(spark, cluster, {"subscribe": source}, target, tmp_path)

    for file in (tmp_path / "commits").iterdir():
        file.unlink()
    cluster.append(source, "4")
    copy(spark, cluster, {"subscribe": source}, target, tmp_path)

    assert cluster.values(target) == ["1", "2", "3", "4"]


def reader(cluster: SparkCluster, **options: str) -> StreamReader:
    return StreamReader({"gateway.url": cluster.urls, "startingOffsets": "earliest", **options})


def test_a_stream_shares_its_batch_among_logs_and_finds_new_ones(cluster: SparkCluster) -> None:
    cluster.create("found-a")
    cluster.append("found-a", *map(str, range(30)))
    stream = reader(cluster, subscribePattern="found-.*")
    start = stream.initialOffset()
    cluster.create("found-b")
    cluster.append("found-b", *map(str, range(10)))

    first = stream.latestOffset(start, ReadMaxRows(20))
    behind = stream.reportLatestOffset()
    second = stream.latestOffset(first, ReadMaxRows(1000))

    assert start == cluster.offset({"found-a": 0})
    assert first == cluster.offset({"found-a": 15, "found-b": 5})
    assert {name: places["lag"] for name, places in behind.items()} == {"found-a": 15, "found-b": 5}
    assert second == cluster.offset({"found-a": 30, "found-b": 10})
    covered = [(part.log, part.first, part.end) for part in stream.partitions(start, first)]
    assert covered == [("found-a", 0, 15), ("found-b", 0, 5)]
    stream.stop()


def test_a_stream_that_is_asked_without_a_start_goes_on_where_its_last_batch_ended(
    cluster: SparkCluster,
) -> None:
    """PySpark before 4.2 calls `latestOffset` without arguments."""
    log = cluster.create("no-start")
    cluster.append(log, "a", "b")
    stream = reader(cluster, subscribe=log)
    start = stream.initialOffset()

    first = stream.latestOffset()
    cluster.append(log, "c")
    second = stream.latestOffset()

    assert (start, first, second) == tuple(cluster.offset({log: at}) for at in (0, 2, 3))
    (part,) = stream.partitions(first, second)
    assert (part.first, part.end) == (2, 3)
    stream.stop()


def test_a_batch_may_be_limited_by_bytes(cluster: SparkCluster) -> None:
    cluster.create("bytes")
    cluster.append("bytes", *["x" * 1000] * 50)
    stream = reader(cluster, subscribe="bytes", maxBytesPerTrigger="10000")

    limit = stream.getDefaultReadLimit()
    taken = stream.latestOffset(stream.initialOffset(), limit)["bytes"]["0"]

    assert limit == ReadMaxBytes(10_000)
    assert 1 <= taken <= 10
    stream.stop()


def test_a_stream_waits_for_the_least_that_a_batch_should_have(cluster: SparkCluster) -> None:
    cluster.create("least")
    stream = reader(cluster, subscribe="least", minOffsetsPerTrigger="5", maxTriggerDelay="1d")
    start = stream.initialOffset()
    cluster.append("least", *map(str, range(6)))
    first = stream.latestOffset(start, ReadMaxRows(1000))
    cluster.append("least", "more")

    assert first == cluster.offset({"least": 6})
    assert stream.latestOffset(first, ReadMaxRows(1000)) == first
    stream.stop()


def test_what_a_run_reads_is_fixed_when_it_is_to_read_what_there_is(cluster: SparkCluster) -> None:
    cluster.create("frozen")
    cluster.append("frozen", "1", "2")
    stream = reader(cluster, subscribe="frozen")
    stream.prepareForTriggerAvailableNow()
    cluster.append("frozen", "3")

    taken = stream.latestOffset(stream.initialOffset(), ReadMaxRows(1000))

    assert taken == cluster.offset({"frozen": 2})
    stream.stop()


def test_a_batch_with_two_limits_obeys_both(cluster: SparkCluster) -> None:
    cluster.create("limits")
    cluster.append("limits", *["x" * 1000] * 50)

    def taken(rows_max: int, bytes_max: int) -> int:
        limits = {"maxOffsetsPerTrigger": str(rows_max), "maxBytesPerTrigger": str(bytes_max)}
        stream = reader(cluster, subscribe="limits", **limits)
        end = stream.latestOffset(stream.initialOffset(), stream.getDefaultReadLimit())
        stream.stop()
        return int(end["limits"]["0"])

    assert taken(7, 1 << 20) == 7
    assert 1 <= taken(40, 10_000) <= 10


def test_what_is_truncated_under_a_stream_is_an_error_unless_loss_is_accepted(
    cluster: SparkCluster,
) -> None:
    log = cluster.create("truncated-under")
    cluster.append(log, "a", "b")
    strict = reader(cluster, subscribe=log, maxBytesPerTrigger="1000")
    lax = reader(cluster, subscribe=log, maxBytesPerTrigger="1000", failOnDataLoss="false")
    start = strict.initialOffset()
    (planned,) = strict.partitions(start, cluster.offset({log: 2}))
    cluster.http.request("POST", f"/v1/logs/{log}/roll", is_repeatable=True)
    cluster.append(log, "c")
    before = {"before": 2}
    cluster.http.request("POST", f"/v1/logs/{log}/truncate", value=before, is_repeatable=True)

    end = lax.latestOffset(start, lax.getDefaultReadLimit())
    assert start == cluster.offset({log: 0})
    assert end == cluster.offset({log: 3})
    assert [(part.first, part.end) for part in lax.partitions(start, end)] == [(2, 3)]
    with pytest.raises(DataLoss, match="which has 2 to 2: set failOnDataLoss=false"):
        strict.partitions(start, strict.latestOffset(start, strict.getDefaultReadLimit()))

    # And in a task that was planned before.
    def read(*, fails_on_loss: bool) -> int:
        pages = rows(cluster.http, planned, ("value",), fails_on_loss=fails_on_loss)
        return sum(page.num_rows for page in pages)

    assert read(fails_on_loss=False) == 0
    dropped = "offset 0 was dropped: the log begins at offset 2"
    with pytest.raises(DataLoss, match=f"0 to 1 of {log} are gone: {dropped}; set failOnDataLoss"):
        read(fails_on_loss=True)
    cluster.http.request("DELETE", f"/v1/logs/{log}", is_repeatable=True)
    assert read(fails_on_loss=False) == 0
    with pytest.raises(DataLoss, match=f"there is no log {log}"):
        read(fails_on_loss=True)
    for stream in (strict, lax):
        stream.stop()


def test_a_log_that_was_made_again_is_not_taken_for_the_one_that_a_query_has_read(
    cluster: SparkCluster,
) -> None:
    """The new log is longer than the old one was: only its creation tells it."""
    log = cluster.create("made-again")
    cluster.append(log, "a", "b")
    strict = reader(cluster, subscribe=log)
    lax = reader(cluster, subscribe=log, failOnDataLoss="false")
    start, old = strict.initialOffset(), cluster.offset({log: 2})
    (planned_before,) = strict.partitions(start, old)
    cluster.http.request("DELETE", f"/v1/logs/{log}", is_repeatable=True)
    cluster.create(log)
    cluster.append(log, "c", "d", "e")
    new = cluster.offset({log: 3})

    with pytest.raises(DataLoss, match=r"the query is at 2 of a log .* created again"):
        strict.latestOffset(old, ReadMaxRows(1000))
    # A batch without rows goes back, and the next one has all that the log has.
    first = lax.latestOffset(old, ReadMaxRows(1000))
    assert first == cluster.offset({log: 0})
    assert lax.partitions(old, first) == []
    assert lax.latestOffset(first, ReadMaxRows(1000)) == new

    def planned(stream: StreamReader, start: Any, end: Any) -> list[tuple[int, int]]:
        return [(part.first, part.end) for part in stream.partitions(start, end)]

    # Where a task reads by a plan that was made before.
    def read(*, fails_on_loss: bool) -> int:
        pages = rows(cluster.http, planned_before, ("value",), fails_on_loss=fails_on_loss)
        return sum(page.num_rows for page in pages)

    assert read(fails_on_loss=False) == 0
    with pytest.raises(DataLoss, match=f"0 to 1 of {log} are gone: .*failOnDataLoss"):
        read(fails_on_loss=True)

    # Where Spark plans a batch of the old log, or one across both (PySpark before 4.2).
    for begun, end in ((start, old), (old, new)):
        with pytest.raises(DataLoss, match="created again"):
            strict.partitions(begun, end)
    assert planned(lax, start, old) == []
    assert planned(lax, old, new) == [(0, 3)]

    beyond = {"subscribe": log, "startingOffsets": json.dumps({log: {"0": 9}})}
    refused = reader(cluster, **beyond)
    with pytest.raises(DataLoss, match="ends at 3"):
        refused.initialOffset()
    clipped = reader(cluster, **beyond, failOnDataLoss="false")
    assert clipped.initialOffset() == new
    for stream in (strict, lax, refused, clipped):
        stream.stop()
