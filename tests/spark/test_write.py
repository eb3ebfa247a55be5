"""Batch writes by Spark: all rows come onto a log once, or none, whatever happens on the way."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from loadtest.spark_cluster import SparkCluster
from quorumlog.spark.http import Gateways
from quorumlog.spark.options import WriteOptions
from quorumlog.spark.writing import Whose, begin, publish

pytest.importorskip("pyspark", reason="PySpark is not installed: make setup-spark")

from pyspark.sql import DataFrame, SparkSession


def write(cluster: SparkCluster, frame: DataFrame, mode: str = "append", **options: Any) -> None:
    writer = frame.write.format("quorumlog").option("gateway.url", cluster.urls)
    writer.options(**options).mode(mode).save()


def numbers(spark: SparkSession, count: int, parts: int = 2, start: int = 0) -> DataFrame:
    return spark.range(start, start + count, numPartitions=parts).selectExpr(
        "cast(id AS string) AS value"
    )


def test_rows_come_onto_the_log_in_the_order_of_the_frame(
    spark: SparkSession, cluster: SparkCluster
) -> None:
    log = cluster.create("written")
    cluster.append(log, "before")

    write(cluster, numbers(spark, 25_000), topic=log)
    cluster.append(log, "after")

    assert cluster.values(log) == ["before", *map(str, range(25_000)), "after"]


def test_keys_headers_times_and_logs_are_columns(
    spark: SparkSession, cluster: SparkCluster
) -> None:
    logs = [cluster.create(name) for name in ("by-column-a", "by-column-b")]
    frame = spark.range(10).selectExpr(
        "cast(id AS string) AS value",
        "if(id % 2 = 0, cast(cast(id AS string) AS binary), NULL) AS key",
        "concat('by-column-', if(id < 5, 'a', 'b')) AS topic",
        "if(id = 3, map('h', 'x'), NULL) AS headers",
        "timestamp_millis(id * 1000) AS timestamp",
    )

    write(cluster, frame.coalesce(1))

    assert [cluster.values(log) for log in logs] == [list("01234"), list("56789")]
    page = cluster.http.get(f"/v1/logs/{logs[0]}/records", {"from": 2})["records"]
    assert [entry["headers"] for entry in page] == [{}, {"h": "x"}, {}]
    assert [entry["key"] is None for entry in page] == [False, True, False]
    assert page[1]["timestamp"] == "1970-01-01T00:00:03.000Z"


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_odd_rows_are_read_as_they_were_written(
    spark: SparkSession, cluster: SparkCluster, compression: str
) -> None:
    log = cluster.create(f"odd-rows-{compression}", batch_compression=compression)
    when = datetime(2026, 1, 2, 3, 4, 5, 678000)  # noqa: DTZ001 - in Spark's time zone
    pairs = [("h", bytearray("ü".encode())), ("", bytearray())]
    rows = [
        (bytearray(), None, None, when),
        (bytearray(b"\0\xff"), bytearray(), [], when),
        (bytearray("ü€😀".encode()), bytearray(b"k" * 70_000), pairs, when),
        (bytearray(b"x" * (3 << 20)), None, pairs[1:], when),
        *(
            (bytearray(b"v" * (n % 7)), bytearray(b"k") if n % 3 else None, [], when)
            for n in range(50)
        ),
        (bytearray(range(256)), bytearray(range(256)), pairs[:1], when),
    ]
    schema = (
        "value binary, key binary, headers array<struct<key: string, value: binary>>,"
        " timestamp timestamp"
    )
    frame = spark.createDataFrame(rows, schema).coalesce(1)

    write(cluster, frame, topic=log)
    write(cluster, frame.selectExpr("value", "key"), topic=log)
    write(cluster, frame.selectExpr("value"), topic=log)

    read = spark.read.format("quorumlog").options(**{"gateway.url": cluster.urls})
    found = read.options(subscribe=log, includeHeaders=True).load().orderBy("offset").collect()
    assert [row.value for row in found] == 3 * [value for value, *_ in rows]
    assert [row.key for row in found[: 2 * len(rows)]] == 2 * [key for _, key, *_ in rows]
    headers = [row.headers and [(h.key, h.value) for h in row.headers] for row in found]
    assert headers == [pairs or None for _, _, pairs, _ in rows] + 2 * len(rows) * [None]
    assert {row.timestamp for row in found[: len(rows)]} == {when}
    assert when not in {row.timestamp for row in found[len(rows) :]}
    assert {row.key for row in found[2 * len(rows) :]} == {None}


def test_a_task_that_fails_and_runs_again_doubles_nothing(
    spark: SparkSession, cluster: SparkCluster
) -> None:
    log = cluster.create("failing")

    def fails_at_first(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        yield from batches
        if context.attemptNumber() == 0:
            raise RuntimeError("a task that dies after its last row")

    frame = numbers(spark, 30_000, parts=3).mapInArrow(fails_at_first, "value string")
    write(cluster, frame, topic=log)

    assert sorted(map(int, cluster.values(log))) == list(range(30_000))


def test_a_job_that_fails_leaves_nothing(spark: SparkSession, cluster: SparkCluster) -> None:
    log = cluster.create("failed")
    before = cluster.ledgers()

    def fails(batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        raise RuntimeError("a task that always dies")

    with pytest.raises(Exception, match="always dies"):
        write(
            cluster,
            numbers(spark, 1000).mapInArrow(fails, "value string"),
            topic=log,
        )

    assert cluster.values(log) == []
    cluster.until(lambda: cluster.ledgers() <= before, "what was not published is deleted")


def test_the_same_version_of_an_app_is_written_once(
    spark: SparkSession, cluster: SparkCluster
) -> None:
    log = cluster.create("versions")

    for version in (1, 1, 2, 1):
        frame = numbers(spark, 100, start=100 * version)
        write(cluster, frame, topic=log, txnAppId="nightly", txnVersion=str(version))

    assert cluster.values(log) == [str(n) for n in range(100, 300)]


def test_a_commit_whose_answer_is_lost_is_not_undone_by_the_abort_that_follows(
    spark: SparkSession, cluster: SparkCluster
) -> None:
    """The driver asks again: here the same commit is asked for twice, and then an abort."""
    from pyspark.sql.types import StringType, StructField, StructType

    from quorumlog.spark.source import BatchWriter

    log = cluster.create("ambiguous")
    options = {"gateway.url": cluster.urls, "topic": log}
    writer = BatchWriter(options, StructType([StructField("value", StringType())]), overwrite=False)
    messages = numbers(spark, 1000).mapInArrow(_post(writer), "message binary").collect()
    found = [_loaded(row.message) for row in messages]

    writer.commit(found)
    writer.commit(found)
    writer.abort([None for _ in found])

    assert sorted(map(int, cluster.values(log))) == list(range(1000))
    assert len(cluster.on_log(log)) == 3


def _post(writer: Any) -> Any:
    def post(batches: Iterator[Any]) -> Iterator[Any]:
        import pickle

        import pyarrow as pa

        message = pickle.dumps(writer.write(batches))
        yield pa.RecordBatch.from_pydict({"message": pa.array([message], pa.binary())})

    return post


def _loaded(message: bytes) -> Any:
    import pickle

    return pickle.loads(bytes(message))


def test_overwrite_puts_new_rows_in_the_place_of_the_old_ones(
    spark: SparkSession, cluster: SparkCluster
) -> None:
    log = cluster.create("overwritten")
    write(cluster, numbers(spark, 10), topic=log)

    write(cluster, numbers(spark, 5, start=90), "overwrite", topic=log)

    shown = cluster.http.get(f"/v1/logs/{log}")
    assert cluster.values(log) == ["90", "91", "92", "93", "94"]
    assert (shown["first_offset"], shown["next_offset"]) == (10, 15)


def test_many_small_partitions_are_refused_with_the_number_that_would_do(
    spark: SparkSession, cluster: SparkCluster
) -> None:
    log = cluster.create("tiny")

    with pytest.raises(Exception, match=r"write df\.coalesce\([15]\)"):
        write(cluster, numbers(spark, 100, parts=6), topic=log, maxLedgersPerCommit="5")

    assert cluster.values(log) == []


def test_a_write_of_too_many_partitions_fails_before_it_writes_the_first_of_the_rest(
    spark: SparkSession, cluster: SparkCluster
) -> None:
    log, before = cluster.create("many-parts"), cluster.ledgers()

    with pytest.raises(Exception, match=r"and partition \d+ needs one, too; .*coalesce\(2\)"):
        write(cluster, numbers(spark, 100, parts=12), topic=log, maxLedgersPerCommit="2")

    # Two tasks at once, each of which may look before the other one has created its ledger.
    assert len(cluster.ledgers() - before) <= 4
    assert cluster.values(log) == []


def test_an_empty_frame_and_empty_partitions_make_no_ledgers(
    spark: SparkSession, cluster: SparkCluster
) -> None:
    log = cluster.create("empty-parts")

    write(cluster, numbers(spark, 0), topic=log)
    write(cluster, numbers(spark, 1, parts=4), topic=log, maxLedgersPerCommit="1")

    assert cluster.values(log) == ["0"]


def test_rows_larger_than_a_request_are_cut_and_all_arrive(
    spark: SparkSession, cluster: SparkCluster
) -> None:
    log = cluster.create("large")
    frame = spark.range(12, numPartitions=1).selectExpr(
        "cast(repeat(cast(id % 10 AS string), 900000) AS binary) AS value"
    )

    write(cluster, frame, topic=log, bytesPerRequest="2000000")

    assert [value[0] + str(len(value)) for value in cluster.values(log)] == [
        f"{n % 10}900000" for n in range(12)
    ]


def test_a_row_of_the_size_that_the_guide_names_fits(
    spark: SparkSession, cluster: SparkCluster
) -> None:
    log = cluster.create("largest")
    row = ("repeat('x', 8379000) AS value", "'k' AS key", "map('h', repeat('y', 998)) AS headers")

    write(cluster, spark.range(1).selectExpr(*row), topic=log)

    assert cluster.http.get(f"/v1/logs/{log}")["next_offset"] == 1


@pytest.mark.parametrize(
    ("columns", "options", "what"),
    [
        (["id"], {"topic": "written"}, r"to_json\(struct\(\*\)\)"),
        (["'x' AS value"], {"topic": "written", "txnApp": "a"}, "did you mean txnAppId"),
        (["'x' AS value"], {"topic": "gone"}, "NoSuchLog: there is no log gone"),
        (["cast(NULL AS string) AS value"], {"topic": "written"}, "has null in the column"),
    ],
)
def test_what_can_not_be_written_is_refused(
    spark: SparkSession,
    cluster: SparkCluster,
    columns: list[str],
    options: dict[str, str],
    what: str,
) -> None:
    cluster.create("written")

    with pytest.raises(Exception, match=what):
        write(cluster, spark.range(3).selectExpr(*columns), **options)


def test_an_attempt_that_outlives_the_transaction_writes_no_more(cluster: SparkCluster) -> None:
    log = cluster.create("zombie")
    options = WriteOptions.of({"gateway.url": cluster.urls, "topic": log}, is_stream=False)
    gateways = Gateways(cluster.urls)
    transaction, _ = begin(gateways, options, log, Whose())
    made = gateways.request(
        "POST", "/v1/ledgers", value={"transaction": transaction}, is_repeatable=True
    ).json()
    gateways.request("POST", f"/v1/transactions/{transaction}/abort", is_repeatable=True)

    with pytest.raises(Exception, match=r"abort|no-such-ledger|fenced|transaction"):
        gateways.request(
            "POST",
            f"/v1/ledgers/{made['ledger_id']}/entries",
            value={"text": "late"},
            is_repeatable=False,
        )
    gateways.close()

    assert cluster.values(log) == []


def test_an_empty_commit_of_a_version_counts(cluster: SparkCluster) -> None:
    log = cluster.create("nothing")
    options = WriteOptions.of(
        {"gateway.url": cluster.urls, "topic": log, "txnAppId": "a", "txnVersion": "3"},
        is_stream=False,
    )

    first = publish(options, Whose("a", 3), [], even_if_empty=True)
    second = publish(options, Whose("a", 3), [], even_if_empty=True)

    assert [done.is_duplicate for done in (*first, *second)] == [False, True]
