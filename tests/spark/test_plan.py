"""Plans of reads while a log changes between two requests: what is released or new is no data loss."""

import json
from typing import Any, cast

import pytest

pytest.importorskip("pyspark", reason="PySpark is not installed: make setup-spark")

from quorumlog.errors import (
    EntryLost,
    LogReplaced,
    NoSuchLog,
    OffsetBeyondEnd,
    OffsetTruncated,
    QuorumLogError,
)
from quorumlog.protocol.offset_set import Offsets
from quorumlog.spark.http import Gateways
from quorumlog.spark.options import ReadOptions
from quorumlog.spark.plan import (
    DataLoss,
    LogExtent,
    TaskRange,
    batch_plan,
    by_fragment,
    next_offsets,
    offset_of_time,
    stream_plan,
)
from quorumlog.spark.rows import rows

LOG = "/v1/logs/log"
NOW = "2026-01-02T03:04:05.678Z"


class Answering:
    """A gateway whose answers depend on the path alone. An error is raised."""

    speaks_arrow = False

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.listed: list[Any] = []

    def get(self, path: str, params: Any = None) -> Any:
        answer = self.answers[path.rpartition("/")[2].replace("-", "_")]
        found = answer(params) if callable(answer) else answer
        if isinstance(found, QuorumLogError):
            raise found
        return found

    def pages(self, _path: str, _name: str, **_only: str) -> list[Any]:
        return self.listed


def gateways(**answers: Any) -> Gateways:
    return cast("Gateways", Answering(**answers))


def shown(end: int, first: int = 0) -> dict[str, Any]:
    ledgers = [{"first_offset": first, "ledger_id": 1}]
    return {"first_offset": first, "next_offset": end, "created_at": NOW, "ledgers": ledgers}


def options(**more: str) -> ReadOptions:
    subject = {} if "subscribePattern" in more else {"subscribe": "log"}
    return ReadOptions.of({"gateway.url": "http://127.0.0.1:1", **subject, **more})


def at(offset: int) -> dict[str, Any]:
    return {"log": {"0": offset, "created_at": NOW}}


def test_an_end_that_only_one_gateway_knows_yet_is_no_loss() -> None:
    """An earlier end of another gateway: the reader got records that are not acknowledged yet."""
    behind = gateways(log=shown(10), records={"records": [], "next": 13})

    assert next_offsets(options(), behind, {"log": 13})["log"].end == 13
    (part,) = stream_plan(options(), behind, at(5), at(13))
    assert (part.first, part.end) == (5, 13)


@pytest.mark.parametrize("error", [OffsetBeyondEnd(), LogReplaced()])
def test_an_end_that_no_read_confirms_is_a_loss(error: QuorumLogError) -> None:
    behind = gateways(log=shown(10), records=error)

    assert next_offsets(options(), behind, {"log": 13})["log"].end == 10
    with pytest.raises(DataLoss, match="created again"):
        stream_plan(options(), behind, at(5), at(13))


def test_a_consumer_that_advanced_while_a_batch_was_planned_is_no_loss() -> None:
    ends = iter((10, 13))
    changing = gateways(
        log=lambda _params: shown(next(ends)), billing={"state": "ok", "offset": 12}
    )

    (part,) = batch_plan(options(startingOffsets=json.dumps({"consumer": "billing"})), changing)

    assert (part.first, part.end) == (12, 13)


def test_a_log_that_was_deleted_while_a_pattern_was_matched_is_no_loss() -> None:
    deleted = Answering(log=NoSuchLog())
    deleted.listed = [{"name": "log"}]
    found = cast("Gateways", deleted)

    assert next_offsets(options(subscribePattern="l.*"), found, {}) == {}
    for each, known in ((options(subscribePattern="l.*"), {"log": 1}), (options(), {})):
        with pytest.raises(DataLoss, match="the log log is gone"):
            next_offsets(each, found, known)


def test_a_search_by_time_goes_on_above_records_that_were_dropped_meanwhile() -> None:
    def record(params: Any) -> Any:
        if params["from"] < 60:
            return OffsetTruncated(first_offset=60)
        return {"records": [{"timestamp": NOW}], "next": params["from"] + 1}

    whole = LogExtent("log", 0, 100, ((0, 1),), NOW)
    assert offset_of_time(gateways(records=record), whole, 0) == 60


def test_a_fragment_that_begins_with_a_lost_entry_is_planned() -> None:
    lost = Answering(last_add_confirmed={"last_add_confirmed": 9}, entries=EntryLost())
    lost.listed = [{"ledger_id": 1, "fragments": [{"first_entry": 0}, {"first_entry": 5}]}]
    whole = LogExtent("log", 0, 10, ((0, 1),), NOW)
    part = TaskRange("log", 1, 0, 10)

    assert list(by_fragment(cast("Gateways", lost), whole, [part])) == [part]


@pytest.mark.parametrize("is_needed", [False, True])
def test_lost_records_between_those_of_a_queues_batch_are_no_loss(*, is_needed: bool) -> None:
    """The queue gave the lost records to no consumer, and counted them as lost."""

    def page(params: Any) -> Any:
        if params["from"] == 1:
            return EntryLost(next_offset=3)
        record = {"timestamp": NOW, "ledger_id": 1, "entry_id": 0, "key": None, "headers": {}}
        found = record | {"offset": params["from"], "data": "YQ=="}
        return {"records": [found], "next": params["from"] + 1}

    given = (0, 2, 3) if is_needed else (0, 3)
    part = TaskRange("log", -1, 0, 4, records=Offsets.of(given))

    def read(*, fails_on_loss: bool) -> list[int]:
        found = rows(gateways(records=page), part, ("offset",), fails_on_loss=fails_on_loss)
        return [each for batch in found for each in batch.column("offset").to_pylist()]

    assert read(fails_on_loss=False) == [0, 3]
    if is_needed:
        with pytest.raises(DataLoss, match="records 1 to 3 of log are gone"):
            read(fails_on_loss=True)
    else:
        assert read(fails_on_loss=True) == [0, 3]
