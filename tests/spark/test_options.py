"""Options that can't be meant are refused before anything runs, and the error says what is meant."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="PySpark is not installed: make setup-spark")

from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from quorumlog.spark.options import BadOption, ClusterAccess, ReadOptions, WriteOptions
from quorumlog.spark.rows import BadRows, check_schema
from quorumlog.spark.source import QuorumLogSource
from quorumlog.spark.streaming import StreamReader


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, "exactly one of"),
        ({"subscribe": "a", "ledgers": "1"}, "exactly one of"),
        ({"subscribe": "a b"}, "not a valid name of a log"),
        ({"subscribePattern": "[a"}, "not a valid regular expression"),
        ({"assign": '{"a":[1]}'}, "only partition 0"),
        ({"ledgers": "x"}, "ids separated by commas"),
        ({"subscribe": "a", "columns": "values"}, "columns may contain"),
        ({"subscribe": "a", "failOnDataLoss": "yes"}, "true or false"),
        ({"subscribe": "a", "startingOffsets": '{"a":3}'}, "startingOffsets must be"),
        ({"subscribe": "a", "startingOffsets": '{"b":{"0":3}}'}, "names the log b"),
        ({"subscribePattern": "a.*", "endingOffsets": '{"b":{"0":3}}'}, "names the log b"),
        ({"subscribe": "a", "endingOffsets": "earliest"}, "can't be earliest"),
        ({"subscribe": "a", "endingOffsets": '{"a":{"0":-2}}'}, "can't be -2"),
        ({"ledgers": "1", "startingOffsets": "earliest"}, "is for logs"),
        ({"ledgers": "1", "endingTimestamp": "2026-01-01"}, "is for logs"),
        ({"subscribe": "a", "startingTimestamp": "yesterday"}, "Unix ms"),
        ({"subscribe": "a", "startingOffset": "latest"}, "did you mean startingOffsets"),
        ({"subscribe": "a", "maxOffsetPerTrigger": "1"}, "did you mean maxOffsetsPerTrigger"),
        ({"subscribe": "a", "kafka.bootstrap.servers": "x:1"}, "the options are gateway.url"),
        ({"subscribe": "a", "topic": "b"}, "topic is an option for writes"),
        ({"subscribe": "a", "path": "b"}, "take no path"),
        ({"subscribe": "a", "gateway.url": "localhost:8080"}, "http://host:port"),
        ({"subscribe": "a", "gateway.url": ""}, "http://host:port"),
        ({"subscribe": "a", "gateway.url": "http://a:1,b:2"}, "http://host:port"),
        ({"subscribe": "a,b", "queue": "mail"}, "queue needs exactly one log"),
        ({"subscribePattern": "a.*", "queue": "mail"}, "queue needs exactly one log"),
        ({"ledgers": "1", "queue": "mail"}, "queue needs exactly one log"),
        ({"subscribe": "a", "queue": "no such name"}, "not a valid name of a queue"),
        (
            {"subscribe": "a", "queue": "b", "startingOffsets": "latest"},
            "can't be combined with queue",
        ),
        (
            {"subscribe": "a", "queue": "b", "publishProgressAs": "c"},
            "can't be combined with queue",
        ),
    ],
)
def test_what_a_read_can_not_mean_is_refused(options: dict[str, str], what: str) -> None:
    with pytest.raises(BadOption, match=what):
        ReadOptions.of(options)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"topic": "no such name"}, "not a valid name of a log"),
        ({"topic": "a", "txnAppId": "x"}, "or neither"),
        ({"topic": "a", "txnAppId": "x", "txnVersion": "seven"}, "must be a number"),
        ({"topic": "a", "maxLedgersPerCommit": "0"}, "at least 1"),
        ({"topik": "a"}, "did you mean topic"),
        ({"topic": "a", "txnapp": "x"}, "did you mean txnAppId"),
        ({"topic": "a", "subscribe": "b"}, "subscribe is an option for reads"),
    ],
)
def test_what_a_write_can_not_mean_is_refused(options: dict[str, str], what: str) -> None:
    with pytest.raises(BadOption, match=what):
        WriteOptions.of(options, is_stream=False)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"ledgers": "1"}, "can't read ledgers"),
        ({"subscribe": "a", "endingOffsets": "latest"}, "has no end"),
        ({"subscribe": "a", "maxTriggerDelay": "soon"}, "a duration such as 15m"),
        (
            {"subscribe": "a", "minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"},
            "must not be above",
        ),
    ],
)
def test_what_a_stream_can_not_mean_is_refused(options: dict[str, str], what: str) -> None:
    with pytest.raises(BadOption, match=what):
        StreamReader(options)
    with pytest.raises(BadOption, match="txnVersion is the batch number"):
        WriteOptions.of({"topic": "a", "txnVersion": "1"}, is_stream=True)


def test_options_are_named_in_any_case_and_sparks_own_may_be_among_them() -> None:
    sparks = {"checkpointlocation": "/c", "queryname": "q"}

    read = ReadOptions.of({"SUBSCRIBE": "a", "subscribe": "a", **sparks})
    write = WriteOptions.of({"topic": "a", **sparks}, is_stream=True)

    assert (read.subject.names, write.log) == (("a",), "a")


def test_the_gateways_of_the_environment_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUORUMLOG_GATEWAY", "http://a:1, http://b:2/")
    assert ClusterAccess.of({}).urls == "http://a:1, http://b:2/"

    monkeypatch.setenv("QUORUMLOG_GATEWAY", "a:1")
    with pytest.raises(BadOption, match="http://host:port"):
        ClusterAccess.of({})


def source(**options: str) -> QuorumLogSource:
    return QuorumLogSource({"gateway.url": "http://127.0.0.1:1", "subscribe": "a", **options})


def test_a_schema_of_ones_own_is_refused() -> None:
    chosen = StructType([StructField("value", BinaryType()), StructField("offset", LongType())])
    renamed = StructType([StructField("value", StringType())])

    source(columns="value,offset").reader(chosen)
    for given in (renamed, StructType()):
        with pytest.raises(BadOption, match="the schema is fixed"):
            source(columns="value,offset").reader(given)
        with pytest.raises(BadOption, match="the schema is fixed"):
            source().streamReader(given)


@pytest.mark.parametrize(
    ("names", "kind", "what"),
    [
        (["value", "value"], StringType(), "two columns have the same name"),
        (["Value"], StringType(), "Value: a row needs value"),
        (["key"], StringType(), "value is missing"),
        (["value"], LongType(), r"to_json\(struct\(\*\)\)"),
        (["value"], StringType(), "no log is named"),
    ],
)
def test_columns_that_make_no_records_are_refused(names: list[str], kind: Any, what: str) -> None:
    with pytest.raises(BadRows, match=what):
        check_schema(StructType([StructField(name, kind) for name in names]), has_log=False)


def test_a_token_is_of_the_option_or_the_environment_and_is_shown_nowhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("QUORUMLOG_TOKEN", raising=False)
    monkeypatch.delenv("QUORUMLOG_TOKEN_FILE", raising=False)
    assert ClusterAccess.of({}).token is None

    monkeypatch.setenv("QUORUMLOG_TOKEN", "qlt_environment")
    assert ClusterAccess.of({}).token == "qlt_environment"
    (tmp_path / "token").write_text("qlt_file\n")
    monkeypatch.setenv("QUORUMLOG_TOKEN_FILE", str(tmp_path / "token"))
    assert ClusterAccess.of({}).token == "qlt_file"

    given = {"token": "qlt_option", "ledger.password": "a password", "topic": "a"}
    options = WriteOptions.of(given, is_stream=False)
    assert options.connection.token == "qlt_option"
    assert "qlt_" not in repr(options)
    assert "a password" not in repr(options)
    for wrong in ("qlt_option\n", "qlt_ option", "qlt_\u00f6", ""):
        with pytest.raises(BadOption, match="token must be non-empty ASCII") as refused:
            ClusterAccess.of({"token": wrong})
        assert "qlt_" not in str(refused.value)
    (tmp_path / "token").write_text("\n")
    with pytest.raises(BadOption, match="token must be non-empty ASCII"):
        ClusterAccess.of({})
    (tmp_path / "token").unlink()
    assert WriteOptions.of(given, is_stream=False) == options, "the file is not needed"
