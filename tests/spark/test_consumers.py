"""Queries and consumers: a query begins where a consumer is, and publishes as one what Spark has committed."""

import json
from pathlib import Path
from typing import Any, cast

import pytest

from loadtest.spark_cluster import SparkCluster
from quorumlog import header

pytest.importorskip("pyspark", reason="PySpark is not installed: make setup-spark")

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadMaxRows

from quorumlog.errors import NoSuchConsumer, QuorumTimeout
from quorumlog.spark import publishing
from quorumlog.spark.http import Gateways
from quorumlog.spark.options import BadOption, ClusterAccess, ReadOptions
from quorumlog.spark.plan import DataLoss, LogExtent, start_of
from quorumlog.spark.publishing import ProgressPublisher
from quorumlog.spark.streaming import StreamReader, published

EVERYTHING = ReadMaxRows(1000)


def path(log: str, consumer: str) -> str:
    return f"/v1/logs/{log}/consumers/{consumer}"


def place(cluster: SparkCluster, log: str, consumer: str, offset: int) -> None:
    """Make a consumer."""
    new = {"If-None-Match": "*"}
    cluster.http.request(
        "PUT", path(log, consumer), value={"offset": offset}, headers=new, is_repeatable=False
    )


def lease(cluster: SparkCluster, log: str, consumer: str) -> str:
    """Become the active worker: the fencing token."""
    wanted = {"holder": "worker", "lease_ms": 600_000}
    held = cluster.http.request(
        "POST", f"{path(log, consumer)}/lease", value=wanted, is_repeatable=False
    )
    return str(held.json()["lease"]["fencing_token"])


def let_go(cluster: SparkCluster, log: str, consumer: str, token: str) -> None:
    cluster.http.request(
        "DELETE",
        f"{path(log, consumer)}/lease",
        headers={header.FENCING_TOKEN: token},
        is_repeatable=False,
    )


def reset(cluster: SparkCluster, log: str, consumer: str, to: int | str) -> None:
    cluster.http.request(
        "POST", f"{path(log, consumer)}/reset", value={"to": to}, is_repeatable=False
    )


def position(cluster: SparkCluster, log: str, consumer: str) -> int:
    return int(cluster.http.get(path(log, consumer))["offset"])


def made(cluster: SparkCluster, name: str, records: int) -> str:
    cluster.create(name)
    cluster.append(name, *map(str, range(records)))
    return name


def reader(cluster: SparkCluster, **options: str) -> StreamReader:
    return StreamReader({"gateway.url": cluster.urls, **options})


def from_consumer(name: str, **more: str) -> str:
    return json.dumps({"consumer": name, **more})


# --- beginning at a consumer -----------------------------------------------------------------------


def test_a_batch_begins_at_the_position_of_a_consumer_in_each_log(
    spark: SparkSession, cluster: SparkCluster
) -> None:
    first, second = made(cluster, "begin-a", 10), made(cluster, "begin-b", 10)
    place(cluster, first, "billing", 7)

    frame = (
        spark.read.format("quorumlog")
        .option("gateway.url", cluster.urls)
        .option("subscribe", f"{first},{second}")
        .option("startingOffsets", from_consumer("billing"))
        .load()
    )
    taken = frame.select("topic", "offset").collect()

    # Where the consumer has no position yet it begins at the beginning, as a worker would.
    assert sorted(taken) == [
        *((first, at) for at in range(7, 10)),
        *((second, at) for at in range(10)),
    ]


def test_a_stream_begins_at_a_consumer_or_where_the_option_says(cluster: SparkCluster) -> None:
    first, second = made(cluster, "start-a", 10), made(cluster, "start-b", 10)
    place(cluster, first, "billing", 4)
    both = {"subscribe": f"{first},{second}"}
    early = reader(cluster, **both, startingOffsets=from_consumer("billing"))
    late = reader(cluster, **both, startingOffsets=from_consumer("billing", **{"from": "latest"}))

    assert early.initialOffset() == cluster.offset({first: 4, second: 0})
    assert late.initialOffset() == cluster.offset({first: 4, second: 10})
    early.stop()
    late.stop()


def test_a_position_in_a_log_that_was_deleted_is_refused_unless_loss_is_accepted() -> None:
    options = {
        "gateway.url": "http://127.0.0.1:1",
        "subscribe": "events",
        "startingOffsets": from_consumer("billing"),
    }
    found = LogExtent("events", 2, 8, ((0, 1),), "2026-01-01T00:00:00Z")

    class Answering:
        """A cluster frees the consumer some time after the deletion: no real answer stays like this."""

        def get(self, path: str) -> dict[str, Any]:
            assert path == "/v1/logs/events/consumers/billing"
            return {"state": "log-replaced", "offset": 4}

    def start(**more: str) -> int:
        return start_of(
            ReadOptions.of(options | more), cast("Gateways", Answering()), found, "earliest"
        )

    with pytest.raises(DataLoss, match="was deleted: reset the consumer"):
        start()
    assert start(failOnDataLoss="false") == 2


def test_where_loss_is_accepted_a_read_begins_at_the_beginning_of_a_log_that_was_made_again(
    cluster: SparkCluster,
) -> None:
    """Whether the consumer is there still, or was freed with its log already."""
    log = made(cluster, "begin-replaced", 5)
    place(cluster, log, "billing", 4)
    cluster.http.request("DELETE", f"/v1/logs/{log}", is_repeatable=True)
    made(cluster, log, 8)
    options = {"subscribe": log, "startingOffsets": from_consumer("billing")}
    lax = reader(cluster, **options, failOnDataLoss="false")

    assert lax.initialOffset() == cluster.offset({log: 0})
    lax.stop()
    reset(cluster, log, "billing", 3)
    strict = reader(cluster, **options)
    assert strict.initialOffset() == cluster.offset({log: 3})
    strict.stop()


def test_a_position_below_what_was_truncated_is_told_before_anything_is_skipped(
    cluster: SparkCluster,
) -> None:
    log = made(cluster, "begin-truncated", 5)
    place(cluster, log, "billing", 2)
    cluster.http.request("POST", f"/v1/logs/{log}/roll", is_repeatable=True)
    cluster.append(log, "more")
    cluster.http.request(
        "POST", f"/v1/logs/{log}/truncate", value={"before": 5}, is_repeatable=True
    )
    options = {"subscribe": log, "startingOffsets": from_consumer("billing")}
    strict, lax = reader(cluster, **options), reader(cluster, **options, failOnDataLoss="false")

    start = strict.initialOffset()
    assert start == cluster.offset({log: 2})
    with pytest.raises(DataLoss, match="which has 5 to 5"):
        strict.partitions(start, strict.latestOffset(start, EVERYTHING))
    (part,) = lax.partitions(start, lax.latestOffset(start, EVERYTHING))
    assert (part.first, part.end) == (5, 6)
    strict.stop()
    lax.stop()


def test_a_consumer_that_read_on_while_the_read_was_planned_is_not_taken_for_data_loss(
    cluster: SparkCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = made(cluster, "begin-late", 3)
    stream = reader(cluster, subscribe=log, startingOffsets=from_consumer("billing"))
    get = stream._gateways.get

    def late(asked: str, params: Any = None) -> Any:
        if asked.endswith("/consumers/billing"):
            cluster.append(log, "more")
            place(cluster, log, "billing", 4)
        return get(asked, params)

    monkeypatch.setattr(stream._gateways, "get", late)
    assert stream.initialOffset() == cluster.offset({log: 4})
    stream.stop()


# --- publishing ------------------------------------------------------------------------------------


def run(
    spark: SparkSession, cluster: SparkCluster, checkpoint: Path, each: Any, **options: str
) -> StreamingQueryException | None:
    """Process what there is now by `each`; returns why the query failed."""
    query = (
        spark.readStream.format("quorumlog")
        .option("gateway.url", cluster.urls)
        .options(startingOffsets="earliest", **options)
        .load()
        .writeStream.foreachBatch(each)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    try:
        query.awaitTermination(300)
    except StreamingQueryException as error:
        return error
    assert not query.isActive
    return None


def test_what_spark_has_committed_is_published_and_nothing_else(
    spark: SparkSession, cluster: SparkCluster, tmp_path: Path
) -> None:
    log, other = made(cluster, "published-a", 25), made(cluster, "published-b", 3)
    options = {
        "subscribe": f"{log},{other}",
        "maxOffsetsPerTrigger": "14",
        "publishProgressAs": "query",
    }
    seen: list[tuple[str, int]] = []
    committed: dict[str, int] = {}

    def fail_in_the_second(rows: DataFrame, batch_id: int) -> None:
        taken = [(row.topic, row.offset) for row in rows.collect()]
        if batch_id == 1:
            raise RuntimeError("not this one")
        seen.extend(taken)
        for name, offset in taken:
            committed[name] = max(committed.get(name, 0), offset + 1)

    failed = run(spark, cluster, tmp_path, fail_in_the_second, **options)
    assert failed is not None
    assert 0 < committed[log] < 25
    assert {name: position(cluster, name, "query") for name in committed} == committed

    # From the checkpoint the query goes on, whatever the position says.
    reset(cluster, log, "query", "earliest")

    def take(rows: DataFrame, _batch: int) -> None:
        seen.extend((row.topic, row.offset) for row in rows.collect())

    assert run(spark, cluster, tmp_path, take, **options) is None
    everything = [*((log, at) for at in range(25)), *((other, at) for at in range(3))]
    assert sorted(seen) == everything
    # The last batch too, though no batch comes after it.
    assert position(cluster, log, "query") == 25
    assert position(cluster, other, "query") == 3


def test_a_query_whose_progress_can_not_be_published_does_its_work_and_publishes_later(
    spark: SparkSession, cluster: SparkCluster, tmp_path: Path
) -> None:
    log = made(cluster, "held", 5)
    token = lease(cluster, log, "query")
    options = {"subscribe": log, "publishProgressAs": "query"}
    seen: list[int] = []

    def take(rows: DataFrame, _batch: int) -> None:
        seen.extend(row.offset for row in rows.collect())

    assert run(spark, cluster, tmp_path, take, **options) is None
    assert seen == [0, 1, 2, 3, 4]
    assert position(cluster, log, "query") == 0

    let_go(cluster, log, "query", token)
    assert run(spark, cluster, tmp_path, take, **options) is None
    assert seen == [0, 1, 2, 3, 4]
    assert position(cluster, log, "query") == 5


def publisher(cluster: SparkCluster, consumer: str = "query") -> ProgressPublisher:
    return ProgressPublisher(ClusterAccess(cluster.urls), consumer)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was refused is tried again with the next batch."""
    monkeypatch.setattr(publishing, "_RETRY_S", 0.0)


def test_where_a_query_begins_is_no_progress(cluster: SparkCluster) -> None:
    log = made(cluster, "begins", 3)
    stream = reader(cluster, subscribe=log, startingOffsets="latest", publishProgressAs="query")

    start = stream.initialOffset()
    stream.latestOffset(start, EVERYTHING)
    with pytest.raises(NoSuchConsumer):
        position(cluster, log, "query")

    cluster.append(log, "more")
    end = stream.latestOffset(start, EVERYTHING)
    stream.latestOffset(end, EVERYTHING)
    assert position(cluster, log, "query") == 4
    reported = stream.reportLatestOffset()
    assert published({"sources": [{"latestOffset": json.dumps(reported)}]}) == {log: 4}
    stream.stop()


def test_a_position_never_goes_back_and_is_passed_in_time(cluster: SparkCluster) -> None:
    log = made(cluster, "ahead", 10)
    place(cluster, log, "query", 6)
    mine = publisher(cluster)

    mine.publish({log: 4})
    assert position(cluster, log, "query") == 6
    mine.publish({log: 8})
    assert position(cluster, log, "query") == 8
    mine.close()


@pytest.mark.usefixtures("at_once")
def test_a_worker_that_took_over_is_not_overtaken_by_the_query(
    cluster: SparkCluster, caplog: pytest.LogCaptureFixture
) -> None:
    log = made(cluster, "taken-over", 10)
    mine = publisher(cluster)
    mine.publish({log: 3})

    token = lease(cluster, log, "query")
    mine.publish({log: 5})
    assert mine.shown(log) == {"published": 3, "unpublished": "lease-held"}
    assert "is not published as consumer query: lease-held" in caplog.text
    let_go(cluster, log, "query", token)
    mine.publish({log: 6})
    mine.publish({log: 7})
    assert mine.shown(log) == {"published": 3, "unpublished": "taken-over"}
    assert position(cluster, log, "query") == 3

    # A start is somebody's decision.
    again = publisher(cluster)
    again.publish({log: 7})
    assert position(cluster, log, "query") == 7
    mine.close()
    again.close()


@pytest.mark.usefixtures("at_once")
def test_an_operators_reset_is_not_undone_by_the_query_that_runs(cluster: SparkCluster) -> None:
    log = made(cluster, "reset", 10)
    mine = publisher(cluster)
    mine.publish({log: 8})
    reset(cluster, log, "query", 2)

    mine.publish({log: 9})

    assert position(cluster, log, "query") == 2
    assert mine.shown(log)["unpublished"] == "taken-over"
    mine.close()


@pytest.mark.usefixtures("at_once")
def test_a_position_of_a_log_that_was_deleted_is_told_until_it_is_reset(
    cluster: SparkCluster,
) -> None:
    log, other = made(cluster, "publish-replaced", 5), made(cluster, "publish-whole", 5)
    place(cluster, log, "query", 4)
    cluster.http.request("DELETE", f"/v1/logs/{log}", is_repeatable=True)
    made(cluster, log, 5)
    mine = publisher(cluster)

    mine.publish({log: 2, other: 3})
    assert mine.shown(log) == {"unpublished": "log-replaced"}
    assert mine.shown(other) == {"published": 3}
    reset(cluster, log, "query", "earliest")
    mine.publish({log: 2, other: 3})
    assert mine.shown(log) == {"published": 2}
    mine.close()


@pytest.mark.usefixtures("at_once")
def test_an_answer_that_was_lost_is_no_takeover(
    cluster: SparkCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = made(cluster, "lost-answer", 10)
    mine = publisher(cluster)
    mine.publish({log: 2})
    request = mine._gateways.request

    def lost(method: str, *args: Any, **more: Any) -> Any:
        request(method, *args, **more)
        raise QuorumTimeout("the answer was lost")

    monkeypatch.setattr(mine._gateways, "request", lost)
    mine.publish({log: 5})
    assert mine.shown(log) == {"published": 2, "unpublished": "quorum-timeout"}
    monkeypatch.setattr(mine._gateways, "request", request)
    mine.publish({log: 7})

    assert mine.shown(log) == {"published": 7}
    assert position(cluster, log, "query") == 7
    mine.close()


def test_gateways_that_are_away_are_asked_once_for_all_logs(
    cluster: SparkCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_RETRY_S", 3600.0)
    logs = {made(cluster, f"away-{at}", 2): 2 for at in range(3)}
    mine = publisher(cluster)
    asked: list[str] = []

    def away(*parts: Any) -> Any:
        asked.append(parts[0])
        raise QuorumTimeout("nobody answers").replace(retryable=True)

    monkeypatch.setattr(mine._gateways, "get", away)
    mine.publish(logs)
    mine.publish(logs)

    assert len(asked) == 1
    mine.close()


def test_two_queries_of_one_consumer_do_not_push_each_other(cluster: SparkCluster) -> None:
    log = made(cluster, "two", 10)
    one, two = publisher(cluster), publisher(cluster)
    one.publish({log: 2})
    two.publish({log: 4})
    one.publish({log: 9})

    assert one.shown(log)["unpublished"] == "taken-over"
    two.publish({log: 6})
    assert position(cluster, log, "query") == 6
    one.close()
    two.close()


@pytest.mark.usefixtures("at_once")
def test_what_a_query_began_behind_the_consumer_is_told(
    cluster: SparkCluster, caplog: pytest.LogCaptureFixture
) -> None:
    log = made(cluster, "gap", 10)
    place(cluster, log, "query", 2)
    mine = publisher(cluster)
    mine.begun = {log: 6}

    mine.publish({log: 8})

    assert "query was at 2 of gap, but the query began at 6" in caplog.text
    assert position(cluster, log, "query") == 8
    mine.close()


def test_a_log_that_was_made_again_under_the_query_is_begun_anew(cluster: SparkCluster) -> None:
    log = made(cluster, "anew", 10)
    mine = publisher(cluster)
    mine.publish({log: 8})
    cluster.http.request("DELETE", f"/v1/logs/{log}", is_repeatable=True)
    made(cluster, log, 10)

    mine.publish({log: 3})

    assert mine.shown(log) == {"unpublished": "log-replaced"}
    mine.close()


def test_nothing_is_published_in_a_log_that_was_made_again_before_the_query_reads_it(
    cluster: SparkCluster,
) -> None:
    log = made(cluster, "unread", 5)
    options = {"subscribe": log, "publishProgressAs": "query", "failOnDataLoss": "false"}
    stream = reader(cluster, **options)
    end = stream.latestOffset(stream.initialOffset(), EVERYTHING)
    cluster.http.request("DELETE", f"/v1/logs/{log}", is_repeatable=True)
    made(cluster, log, 10)

    anew = stream.latestOffset(end, EVERYTHING)

    assert anew == cluster.offset({log: 0})
    with pytest.raises(NoSuchConsumer):
        position(cluster, log, "query")
    stream.stop()


def test_a_batch_publishes_nothing(spark: SparkSession, cluster: SparkCluster) -> None:
    log = made(cluster, "no-batch", 1)
    frame = spark.read.format("quorumlog").option("gateway.url", cluster.urls)

    with pytest.raises(Exception, match="publishProgressAs is for streams"):
        frame.option("subscribe", log).option("publishProgressAs", "query").load().count()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"startingOffsets": '{"consumer":"a b"}'}, "not a valid name of a consumer"),
        ({"startingOffsets": '{"consumer":"a","to":"b"}'}, "must name a consumer as"),
        ({"startingOffsets": '{"consumer":"a","log":{"0":1}}'}, "must name a consumer as"),
        ({"startingOffsets": '{"consumer":"a","from":"now"}'}, "from must be earliest or latest"),
        ({"startingOffsets": '{"from":"latest"}'}, "must name a consumer as"),
        ({"endingOffsets": '{"consumer":"a"}'}, "endingOffsets must be"),
        ({"publishProgressAs": "a b"}, "not a valid name of a consumer"),
        ({"publishProgresAs": "a"}, "did you mean publishProgressAs"),
    ],
)
def test_what_can_not_be_meant_of_consumers_is_refused(options: dict[str, str], what: str) -> None:
    with pytest.raises(BadOption, match=what):
        # A log may be named consumer: its offsets are no text.
        StreamReader({"subscribe": "log", "startingOffsets": "earliest", **options})


def test_ledgers_have_no_consumers() -> None:
    with pytest.raises(BadOption, match="ledgers have no consumers"):
        StreamReader({"ledgers": "1", "publishProgressAs": "a"})


def test_a_log_named_consumer_has_offsets_like_others(cluster: SparkCluster) -> None:
    made(cluster, "consumer", 5)
    stream = reader(cluster, subscribe="consumer", startingOffsets='{"consumer":{"0":3}}')
    assert stream.initialOffset() == cluster.offset({"consumer": 3})
    stream.stop()
