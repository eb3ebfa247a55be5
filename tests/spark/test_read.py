"""Batch reads of logs and ledgers by Spark, against a cluster."""

from typing import TYPE_CHECKING, Any

import pytest

from loadtest.spark_cluster import SparkCluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture
def load(spark: "SparkSession", cluster: SparkCluster) -> Any:
    def read(**options: Any) -> "DataFrame":
        reader = spark.read.format("quorumlog").option("gateway.url", cluster.urls)
        return reader.options(**options).load()

    return read


def texts(frame: "DataFrame") -> list[str]:
    return [row.value.decode() for row in frame.select("value").collect()]


def test_a_log_is_read_in_order_with_kafkas_columns(cluster: SparkCluster, load: Any) -> None:
    log = cluster.create("columns")
    cluster.http.request(
        "POST",
        f"/v1/logs/{log}/records",
        value={
            "records": [
                {"text": "a", "key": "k", "headers": {"h": "1"}},
                {"text": "b", "timestamp": "2026-01-02T03:04:05.678Z"},
            ]
        },
        is_repeatable=False,
    )
    cluster.http.request("POST", f"/v1/logs/{log}/roll", is_repeatable=True)
    cluster.append(log, "c")

    frame = load(subscribe=log, includeHeaders="true")
    rows = frame.collect()

    assert frame.columns == [
        *("key", "value", "topic", "partition", "offset"),
        *("timestamp", "timestampType", "headers", "ledger", "entry"),
    ]
    assert [(bytes(row.value), row.offset) for row in rows] == [(b"a", 0), (b"b", 1), (b"c", 2)]
    assert [row.key for row in rows] == [b"k", None, None]
    assert {(row.topic, row.partition, row.timestampType) for row in rows} == {(log, 0, 0)}
    assert [(pair.key, bytes(pair.value)) for pair in rows[0].headers] == [("h", b"1")]
    assert rows[1].headers is None
    assert rows[1].timestamp.timestamp() == 1767323045.678
    assert rows[0].ledger == rows[1].ledger != rows[2].ledger


def test_a_frame_is_a_snapshot_and_a_read_fences_nobody(cluster: SparkCluster, load: Any) -> None:
    log = cluster.create("snapshot")
    cluster.append(log, "a", "b")
    frame = load(subscribe=log)
    before = frame.count()
    cluster.append(log, "c")

    shown = cluster.http.get(f"/v1/logs/{log}")

    assert (before, frame.count(), load(subscribe=log).count()) == (2, 2, 3)
    assert len(shown["ledgers"]) == 1


def test_offsets_times_and_columns_choose_what_is_read(cluster: SparkCluster, load: Any) -> None:
    log = cluster.create("chosen")
    for hour in range(4):
        entries = [
            {"text": f"{hour}-{n}", "timestamp": f"2026-01-02T0{hour}:00:00Z"} for n in range(3)
        ]
        cluster.http.request(
            "POST", f"/v1/logs/{log}/records", value={"records": entries}, is_repeatable=False
        )

    by_offset = load(
        subscribe=log,
        startingOffsets=f'{{"{log}":{{"0":2}}}}',
        endingOffsets=f'{{"{log}":{{"0":5}}}}',
        columns="value,offset",
    )
    by_time = load(
        subscribe=log,
        startingTimestamp="2026-01-02T01:00:00Z",
        endingTimestamp="2026-01-02T03:00:00Z",
    )

    assert [tuple(row) for row in by_offset.collect()] == [
        (b"0-2", 2),
        (b"1-0", 3),
        (b"1-1", 4),
    ]
    assert texts(by_time) == [f"{hour}-{n}" for hour in (1, 2) for n in range(3)]


def test_many_logs_and_small_parts_miss_nothing(cluster: SparkCluster, load: Any) -> None:
    for name in ("many-a", "many-b"):
        cluster.create(name, roll_entries=2)
        for n in range(5):
            cluster.append(name, *(f"{name}-{n}-{m}" for m in range(7)))

    found = load(subscribePattern="many-.*", maxEntriesPerPartition="5", columns="value,topic")

    assert found.rdd.getNumPartitions() >= 14
    assert texts(found) == cluster.values("many-a") + cluster.values("many-b")


def test_no_part_of_a_log_spans_ledgers_or_fragments(cluster: SparkCluster, load: Any) -> None:
    log = cluster.create("fragments")
    cluster.append(log, *(f"a{n}" for n in range(7)))
    (first,) = cluster.on_log(log)
    ensemble = cluster.http.get(f"/v1/ledgers/{first}")["fragments"][0]["bookies"]
    killed = ensemble[0].partition("@")[0]
    cluster.kill(killed)

    def is_changed() -> bool:
        cluster.append(log, "b", "c", "d")
        return len(_fragments(cluster, first)) > 1

    cluster.until(is_changed, "the ensemble changes")
    cluster.restart(killed)
    cluster.http.request("POST", f"/v1/logs/{log}/roll", is_repeatable=True)
    cluster.append(log, "e")

    parts = (
        load(subscribe=log)
        .selectExpr("spark_partition_id() AS part", "ledger", "entry", "value", "offset")
        .collect()
    )

    starts = {ledger: _fragments(cluster, ledger) for ledger in cluster.on_log(log)}
    by_part: dict[int, set[tuple[int, int]]] = {}
    for row in parts:
        fragment = sum(row.entry >= start for start in starts[row.ledger])
        by_part.setdefault(row.part, set()).add((row.ledger, fragment))
    assert len(starts[first]) > 1
    assert all(len(seen) == 1 for seen in by_part.values()), by_part
    assert len(by_part) == len(set.union(*by_part.values())) >= 3
    assert [row.value.decode() for row in parts] == cluster.values(log)
    assert [row.offset for row in parts] == list(range(len(parts)))


def _fragments(cluster: SparkCluster, ledger: int) -> list[int]:
    """Where the fragments of a ledger begin."""
    shown = cluster.http.get(f"/v1/ledgers/{ledger}")
    return [int(fragment["first_entry"]) for fragment in shown["fragments"]]


def test_what_is_truncated_is_an_error_unless_loss_is_accepted(
    cluster: SparkCluster, load: Any
) -> None:
    log = cluster.create("truncated")
    cluster.append(log, "a", "b")
    cluster.http.request("POST", f"/v1/logs/{log}/roll", is_repeatable=True)
    cluster.append(log, "c")
    cluster.http.request(
        "POST", f"/v1/logs/{log}/truncate", value={"before": 2}, is_repeatable=True
    )
    start = f'{{"{log}":{{"0":1}}}}'

    assert texts(load(subscribe=log)) == ["c"]
    assert texts(load(subscribe=log, startingOffsets=start, failOnDataLoss="false")) == ["c"]
    with pytest.raises(Exception, match="failOnDataLoss=false"):
        load(subscribe=log, startingOffsets=start).count()


def test_an_open_ledger_is_read_up_to_what_is_confirmed(cluster: SparkCluster, load: Any) -> None:
    ledgers = []
    for n in range(2):
        shown = cluster.http.request("POST", "/v1/ledgers", is_repeatable=False).json()
        entries = [{"text": f"{n}-{m}"} for m in range(5)]
        path = f"/v1/ledgers/{shown['ledger_id']}/entries"
        cluster.http.request("POST", path, value={"entries": entries}, is_repeatable=False)
        ledgers.append(shown["ledger_id"])

    frame = load(ledgers=",".join(map(str, ledgers)), maxEntriesPerPartition="2")

    rows = frame.collect()
    assert [row.value.decode() for row in rows] == [f"{n}-{m}" for n in (0, 1) for m in range(5)]
    assert [(row.ledger, row.entry) for row in rows] == [
        (id_, m) for id_ in ledgers for m in range(5)
    ]
    assert {(row.topic, row.timestamp, row.key) for row in rows} == {(None, None, None)}
    for ledger_id in ledgers:
        assert cluster.http.get(f"/v1/ledgers/{ledger_id}")["state"] == "OPEN"


def test_an_empty_log_has_no_rows(cluster: SparkCluster, load: Any) -> None:
    assert load(subscribe=cluster.create("empty")).collect() == []


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"subscribe": "columns", "startingOffset": "earliest"}, "did you mean startingOffsets"),
        ({"subscribe": "columns", "startingOffsets": "latest"}, "can't be used in a batch"),
        ({"subscribe": "columns", "startingOffsets": '{"columns":{"0":-1}}'}, "can't be used in"),
        ({"subscribe": "gone"}, "NoSuchLog: there is no log gone"),
        ({"ledgers": "987654"}, "NoSuchLedger: there is no ledger 987654"),
    ],
)
def test_a_read_that_means_nothing_is_refused_at_the_driver(
    load: Any, options: dict[str, str], what: str
) -> None:
    with pytest.raises(Exception, match=what):
        load(**options).count()
