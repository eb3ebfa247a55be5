"""Filters that prune the plan of a read: only where asked for, and never a row of the result."""

import base64
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from loadtest.spark_cluster import SparkCluster

pytest.importorskip("pyspark", reason="PySpark is not installed: make setup-spark")

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
    Not,
)

from quorumlog.spark.filters import pruning_of
from quorumlog.spark.options import ReadOptions
from quorumlog.spark.plan import EVERYTHING, DataLoss, LogExtent, Pruning, TaskRange
from quorumlog.spark.source import BatchReader, PruningReader

CONF = "spark.sql.python.filterPushdown.enabled"
LOGS = ("pruned-a", "pruned-b")


@pytest.fixture
def pushing(spark: SparkSession) -> Iterator[SparkSession]:
    """A session whose readers may be given filters."""
    spark.conf.set(CONF, "true")
    yield spark
    spark.conf.unset(CONF)


@pytest.fixture(scope="module")
def logs(cluster: SparkCluster) -> dict[str, list[int]]:
    """Two logs of three ledgers with four records each; the ledgers of each log."""
    found = {}
    for name in LOGS:
        cluster.create(name)
        for n in range(3):
            cluster.append(name, *(f"{name}-{n}-{m}" for m in range(4)))
            if n < 2:
                cluster.http.request("POST", f"/v1/logs/{name}/roll", is_repeatable=True)
        items = cluster.http.get(f"/v1/logs/{name}")["ledgers"]
        found[name] = [int(item["ledger_id"]) for item in items]
    return found


def load(session: SparkSession, cluster: SparkCluster, **options: Any) -> DataFrame:
    reader = session.read.format("quorumlog").option("gateway.url", cluster.urls)
    options = {"subscribe": ",".join(LOGS), **options}
    return reader.options(**options).load()


@pytest.fixture(scope="module")
def everything(
    session: SparkSession, cluster: SparkCluster, logs: dict[str, list[int]]
) -> DataFrame:
    """All records of both logs, read once without filters: Spark alone filters this frame."""
    assert len(logs) == 2
    whole = load(session, cluster)
    assert whole.rdd.getNumPartitions() == 6
    return session.createDataFrame(whole.collect(), whole.schema)


def plan_of(frame: DataFrame) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())


# Each with how many ranges of the six are left, and whether Spark still has something to filter.
@pytest.mark.parametrize(
    ("condition", "parts", "is_left"),
    [
        ("offset >= 5 AND offset < 7", 2, False),
        ("offset = 4", 2, False),
        ("offset <=> 4", 2, False),
        ("offset > 8 AND topic = 'pruned-b'", 1, False),
        ("topic IN ('pruned-b', 'none')", 3, False),
        ("topic = 'none'", 0, False),
        ("offset > 100", 0, False),
        ("offset IN (1, 9)", 6, True),
        ("offset IN (1, 2)", 2, True),
        ("entry = 0", 6, True),
        ("offset = 1 OR offset = 9", 6, True),
        ("offset IS NOT NULL AND topic IS NOT NULL AND ledger IS NOT NULL", 6, False),
        ("offset <> 3 AND offset < 4", 2, True),
        ("offset < 2.5", 2, False),
        ("topic LIKE '%b'", 6, True),
        ("offset < 4 AND CAST(value AS string) = 'pruned-a-0-1'", 2, True),
        ("partition = 0", 6, True),
        ("timestamp IS NOT NULL", 6, True),
    ],
)
def test_a_pruned_read_has_the_rows_of_a_whole_one(
    pushing: SparkSession,
    cluster: SparkCluster,
    everything: DataFrame,
    condition: str,
    parts: int,
    is_left: bool,
) -> None:
    pruned = load(pushing, cluster, pushFilters="true").filter(condition)

    rows = pruned.collect()
    # Spark makes an empty part of an empty plan.
    assert pruned.rdd.getNumPartitions() == max(parts, 1)
    assert rows == everything.filter(condition).collect()
    assert (parts == 0) <= (rows == [])
    assert ("Filter " in plan_of(pruned)) == is_left, plan_of(pruned)


def test_ledgers_prune_and_the_open_one_stays(
    pushing: SparkSession,
    cluster: SparkCluster,
    logs: dict[str, list[int]],
    everything: DataFrame,
) -> None:
    for condition, parts in (
        (f"ledger = {logs[LOGS[0]][1]}", 1 + 2),
        (f"ledger IN ({logs[LOGS[0]][0]}, {logs[LOGS[1]][1]})", 2 + 2),
        (f"ledger < {min(logs[LOGS[0]])}", 2),
    ):
        pruned = load(pushing, cluster, pushFilters="true").filter(condition)

        assert pruned.collect() == everything.filter(condition).collect()
        assert pruned.rdd.getNumPartitions() == parts


def test_entries_of_plain_ledgers_prune(pushing: SparkSession, cluster: SparkCluster) -> None:
    ledger = cluster.http.request("POST", "/v1/ledgers", is_repeatable=False).json()["ledger_id"]
    entries = [{"text": str(n)} for n in range(30)]
    path = f"/v1/ledgers/{ledger}/entries"
    cluster.http.request("POST", path, value={"entries": entries}, is_repeatable=False)

    def read(**options: Any) -> DataFrame:
        reader = pushing.read.format("quorumlog").option("gateway.url", cluster.urls)
        options = {"ledgers": str(ledger), "maxEntriesPerPartition": "5", **options}
        return reader.options(**options).load().filter("entry >= 10 AND entry < 20")

    pruned = read(pushFilters="true")
    assert [row.entry for row in pruned.collect()] == list(range(10, 20))
    assert pruned.rdd.getNumPartitions() == 2
    assert pruned.collect() == read().collect()


def test_without_the_conf_only_who_asks_for_pruning_is_refused(
    spark: SparkSession, cluster: SparkCluster, logs: dict[str, list[int]]
) -> None:
    assert len(logs) == 2
    spark.conf.unset(CONF)

    assert load(spark, cluster).filter("offset < 2").count() == 4
    with pytest.raises(Exception, match=CONF):
        load(spark, cluster, pushFilters="true").filter("offset < 2").count()
    assert "pushFilters" not in vars(BatchReader)
    assert "pushFilters" in vars(PruningReader)


def test_a_load_is_read_with_one_filter_because_spark_keeps_one_plan_for_it(
    pushing: SparkSession, cluster: SparkCluster, logs: dict[str, list[int]]
) -> None:
    """PySpark 4.3 would read both sides of this union by the plan of one of them."""
    assert len(logs) == 2
    frame = load(pushing, cluster, pushFilters="true")
    low, high = frame.filter("offset < 2"), frame.filter("offset >= 10")

    with pytest.raises(Exception, match="call load for each filter"):
        low.union(high).count()
    whole = load(pushing, cluster, pushFilters="true")
    assert whole.count() == 24
    with pytest.raises(Exception, match="call load for each filter"):
        whole.filter("offset < 2").count()

    again = load(pushing, cluster, pushFilters="true").filter("offset < 2")
    assert again.count() == again.filter("value IS NOT NULL").count() == 4
    assert again.union(load(pushing, cluster).filter("offset >= 10")).count() == 8


def test_what_a_stream_asks_is_not_pruned(
    pushing: SparkSession, cluster: SparkCluster, logs: dict[str, list[int]], tmp_path: Any
) -> None:
    assert len(logs) == 2
    stream = (
        pushing.readStream.format("quorumlog")
        .options(**{"gateway.url": cluster.urls, "subscribe": LOGS[0]})
        .options(startingOffsets="earliest", pushFilters="true")
        .load()
        .filter("offset < 2")
    )
    query = (
        stream.writeStream.format("memory")
        .queryName("pruned_stream")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()

    assert pushing.table("pruned_stream").count() == 2


@pytest.mark.parametrize(
    "filters",
    [
        [EqualTo(("offset",), None)],
        [EqualNullSafe(("topic",), None)],
        [In(("offset",), (1, None))],
        [In(("topic",), ("a", None))],
        [In(("ledger",), ())],
        [EqualTo(("offset",), True)],
        [LessThan(("topic",), "b")],
        [Not(EqualTo(("offset",), 1))],
        [EqualTo(("headers", "offset"), 1)],
    ],
)
def test_what_can_not_be_told_in_numbers_and_names_stays_with_spark(filters: list[Filter]) -> None:
    pruning, left = pruning_of(filters, of_logs=True)

    assert left == filters
    assert pruning in (EVERYTHING, Pruning(ledgers=()))


def test_the_topic_of_a_plain_ledger_is_null_and_its_offset_the_entry() -> None:
    filters = [EqualTo(("topic",), "a"), EqualTo(("offset",), 3), LessThan(("entry",), 9)]

    assert pruning_of(filters, of_logs=False) == (Pruning(first=3, last=3), filters[:1])
    assert pruning_of(filters, of_logs=True) == (Pruning(("a",), 3, 3), filters[2:])


def test_the_last_ledgers_range_may_reach_into_a_ledger_that_came_since() -> None:
    whole = LogExtent("a", 0, 30, ((0, 7), (10, 8)), "now")

    parts = list(whole.ranges(0, 30))

    first = TaskRange("a", 7, 0, 10, created_at="now")
    assert parts == [first, TaskRange("a", 8, 10, 30, is_sealed=False, created_at="now")]
    assert list(Pruning(ledgers=(9,)).of(parts)) == parts[1:]


def test_a_batch_from_beyond_the_end_is_a_loss_unless_loss_is_accepted(
    cluster: SparkCluster,
) -> None:
    cluster.append(cluster.create("short"), "a", "b")
    asked = {"gateway.url": cluster.urls, "subscribe": "short"}
    beyond = {**asked, "startingOffsets": '{"short":{"0":3}}'}

    with pytest.raises(DataLoss, match="offsets 3 to 3 of short, which has 0 to 1"):
        BatchReader(ReadOptions.of(beyond)).partitions()
    lax = {**beyond, "failOnDataLoss": "false"}
    assert BatchReader(ReadOptions.of(lax)).partitions() == []
    at_the_end = {**asked, "startingOffsets": '{"short":{"0":2}}'}
    assert BatchReader(ReadOptions.of(at_the_end)).partitions() == []


def test_a_pruned_load_warns_that_it_stays_pruned(
    cluster: SparkCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.append(cluster.create("warned"), "a", "b")
    options = ReadOptions.of({"gateway.url": cluster.urls, "subscribe": "warned"})
    for filters, warnings in ([], 0), ([EqualTo(("offset",), 1)], 1):
        reader = PruningReader(options, None)
        assert reader.pushFilters(filters) == []
        assert [part.first for part in reader.partitions()] == [warnings]
        assert caplog.text.count("load again for other queries") == warnings


def test_pushing_is_off_by_default() -> None:
    assert not ReadOptions.of({"subscribe": "a"}).pushes_filters
    assert json.dumps(ReadOptions.of({"subscribe": "a", "pushFilters": "TRUE"}).pushes_filters) == (
        "true"
    )


KEYS = (b"ada", b"adb", b"bob", None, b"\xff\xfe", b"ada-1")


@pytest.fixture(scope="module")
def keyed(session: SparkSession, cluster: SparkCluster) -> tuple[str, DataFrame]:
    """A log with keys and ascending timestamps in three ledgers, and all of its records."""
    log = cluster.create("keyed")
    path = f"/v1/logs/{log}"
    for n in range(60):
        key = KEYS[n % 6]
        record = {
            "data": base64.b64encode(b"%d" % n).decode(),
            "timestamp": f"2026-01-01T00:00:{n:02}Z",
        }
        if key is not None:
            record["key"] = base64.b64encode(key).decode()
        cluster.http.request("POST", f"{path}/records", value=record, is_repeatable=False)
        if n in (19, 39):
            cluster.http.request("POST", f"{path}/roll", is_repeatable=True)
    whole = load(session, cluster, subscribe=log)
    return log, session.createDataFrame(whole.collect(), whole.schema)


def at(second: float) -> str:
    return f"timestamp '2026-01-01 00:00:{second}Z'"


# Each with how many ranges are left of three. Ranges of a read by key are joined.
@pytest.mark.parametrize(
    ("condition", "parts"),
    [
        ("key = X'616461'", 1),
        ("key <=> X'616461' AND offset >= 30", 1),
        ("key = X'FFFE'", 3),
        ("key = X''", 1),
        ("key >= X'6164' AND key < X'6165'", 1),
        ("key > X'616461' AND key <= X'616462'", 1),
        ("key < X'62'", 3),
        ("key IN (X'616461', X'626F62')", 3),
        ("key <> X'616461'", 3),
        ("key IS NULL", 3),
        ("CAST(key AS string) LIKE 'ad%'", 3),
        (f"timestamp >= {at(15)} AND timestamp < {at(30.001)}", 2),
        (f"timestamp = {at(20)} OR timestamp = {at(40)}", 3),
        (f"timestamp > {at(59)}", 0),
        (f"timestamp <= {at(3)} AND key = X'616461'", 1),
        (f"timestamp = {at(12.5)}", 0),
        ("timestamp < timestamp '1969-01-01 00:00:00Z'", 0),
    ],
)
def test_a_read_pruned_by_keys_and_times_has_the_rows_of_a_whole_one(
    pushing: SparkSession,
    cluster: SparkCluster,
    keyed: tuple[str, DataFrame],
    condition: str,
    parts: int,
) -> None:
    log, everything = keyed
    options = {"subscribe": log, "pushFilters": "true", "timestampsAscend": "true"}
    pruned = load(pushing, cluster, **options).filter(condition)

    assert pruned.collect() == everything.filter(condition).collect()
    assert pruned.rdd.getNumPartitions() == max(parts, 1)


@pytest.mark.parametrize(
    ("filters", "asked"),
    [
        ([EqualTo(("key",), b"ada")], ("key", "ada")),
        ([EqualTo(("key",), b"")], ("key", "")),
        ([GreaterThanOrEqual(("key",), b"ad"), LessThan(("key",), b"ae")], ("key_prefix", "ad")),
        ([GreaterThan(("key",), b"adx"), LessThan(("key",), b"afy")], ("key_prefix", "a")),
        ([EqualTo(("key",), b"ad\xff")], ("key_prefix", "ad")),
        ([EqualTo(("key",), b"\xff")], None),
        ([GreaterThanOrEqual(("key",), b"ad")], None),
        ([LessThan(("key",), b"ad")], None),
        ([GreaterThan(("key",), b"adx"), LessThanOrEqual(("key",), b"adz")], ("key_prefix", "ad")),
        ([In(("key",), (b"ada",))], None),
        ([EqualTo(("key",), None)], None),
    ],
)
def test_gateways_select_keys_and_spark_checks_them(
    filters: list[Filter], asked: tuple[str, str] | None
) -> None:
    pruning, left = pruning_of(filters, of_logs=True)

    assert left == filters
    assert pruning.filters == (() if asked is None else (asked,))
    assert pruning_of(filters, of_logs=False)[0] == EVERYTHING


def test_tasks_of_a_read_by_key_get_its_records_only(
    cluster: SparkCluster, keyed: tuple[str, DataFrame]
) -> None:
    log, _ = keyed
    options = ReadOptions.of({"gateway.url": cluster.urls, "subscribe": log, "minPartitions": "2"})
    reader = PruningReader(options, None)
    reader.pushFilters([EqualTo(("key",), b"bob"), LessThan(("offset",), 50)])

    parts = reader.partitions()

    assert [(part.first, part.end, part.filters) for part in parts] == [
        (0, 25, (("key", "bob"),)),
        (25, 50, (("key", "bob"),)),
    ]
    found = [
        [row for page in reader.read(part) for row in page.column("offset").to_pylist()]
        for part in parts
    ]
    assert found == [[2, 8, 14, 20], [26, 32, 38, 44]]


def test_times_prune_only_where_the_option_says_that_they_ascend(
    cluster: SparkCluster, keyed: tuple[str, DataFrame]
) -> None:
    log, _ = keyed
    for ascends, ranges in (
        ("true", [(15, 20), (20, 31)]),
        ("false", [(0, 20), (20, 40), (40, 60)]),
    ):
        given = {"gateway.url": cluster.urls, "subscribe": log, "timestampsAscend": ascends}
        reader = PruningReader(ReadOptions.of(given), None)
        first, last = (datetime(2026, 1, 1, 0, 0, second, tzinfo=UTC) for second in (15, 30))
        filters = [GreaterThanOrEqual(("timestamp",), first), LessThanOrEqual(("timestamp",), last)]

        assert reader.pushFilters(filters) == filters
        assert [(part.first, part.end) for part in reader.partitions()] == ranges
