"""Logs over HTTP: forms in and out, headers, codes. The ledgers behind are the model's."""

import base64
import contextlib
import functools
import re
import struct
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from loadtest.ports import free_ports
from quorumlog.net.listen import listening
from quorumlog.protocol.log import producers
from services.gateway.app import build_app
from services.gateway.edge.http.limits import Limits
from services.gateway.edge.log_models import Log, LogAppendedModel, LogList, LogRecords
from services.gateway.logs import handle
from tests.model.logs.model import Cluster
from tests.unit.gateway.fake_engine import FakeEngine
from tests.unit.logs.support import Answer, Http

LOG = "/v1/logs/log"
RECORDS = f"{LOG}/records"
PRODUCER = {"Producer-Id": "p", "Producer-Epoch": "0", "Producer-Seq": "0"}


@functools.cache
def port() -> int:
    return free_ports(1)[0]


@contextlib.asynccontextmanager
async def served(
    *, limits: Limits | None = None, cors_origins: tuple[str, ...] = ()
) -> AsyncIterator[Http]:
    """A gateway with ledgers and logs in memory."""
    gateway = Cluster(1).gateway()
    app = build_app(
        FakeEngine(),
        limits or Limits(comment_every_s=0.5),
        logs=gateway.logs,
        cors_origins=cors_origins,
    )
    async with (
        listening(app, host="127.0.0.1", port=port()) as listener,
        aiohttp.ClientSession() as session,
    ):
        yield Http(session, [f"http://127.0.0.1:{listener.port}"])
    await gateway.end()


@pytest.fixture
async def http() -> AsyncIterator[Http]:
    async with served() as found:
        yield found


@pytest.fixture
async def log(http: Http) -> Http:
    assert (await http.ask("PUT", LOG, {})).status == 201
    return http


def code(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.json["code"]


async def appended(http: Http, json: Any) -> Any:
    answer = await http.ask("POST", RECORDS, json)
    assert answer.status == 201, answer
    LogAppendedModel.model_validate(answer.json)
    return answer.json


async def test_a_log_is_made_once_shown_listed_and_deleted(http: Http) -> None:
    made = await http.ask("PUT", LOG, {"roll_entries": 7, "metadata": {"k": "v"}})
    again = await http.ask("PUT", LOG, {"roll_entries": 7, "metadata": {"k": "v"}})
    other = await http.ask("PUT", LOG, {"roll_entries": 8})
    listed = await http.ask("GET", "/v1/logs?limit=1")
    deleted = await http.ask("DELETE", LOG)

    assert (made.status, again.status, deleted.status) == (201, 200, 204)
    assert made.headers["Location"] == LOG
    shown = Log.model_validate(made.json)
    assert (shown.name, shown.next_offset, shown.ledgers, shown.owner) == ("log", 0, [], None)
    assert shown.settings.roll_entries == 7
    assert code(other) == (409, "log-exists")
    assert [entry.name for entry in LogList.model_validate(listed.json).logs] == ["log"]
    assert code(await http.ask("GET", LOG)) == (404, "no-such-log")
    assert code(await http.ask("DELETE", LOG)) == (404, "no-such-log")


async def test_records_come_back_as_they_were_sent_in_each_encoding(log: Http) -> None:
    first = await appended(
        log,
        {
            "text": "grün",
            "key": "ключ",
            "headers": {"a": "b"},
            "timestamp": "2026-01-02T04:04:05.678+01:00",
        },
    )
    second = await appended(
        log, {"records": [{"data": "/w==", "key": "/g=="}, {"json": {"n": [1, None]}}]}
    )
    assert (first["first_offset"], second["first_offset"], second["last_offset"]) == (0, 1, 2)

    text = (await log.ask("GET", f"{RECORDS}?encoding=text&limit=1")).json
    plain = (await log.ask("GET", f"{RECORDS}?from=1&limit=1")).json
    value = (await log.ask("GET", f"{RECORDS}?from=2&encoding=json")).json

    for page in (text, plain, value):
        LogRecords.model_validate(page)
    assert text["records"][0] == {
        "offset": 0,
        "timestamp": "2026-01-02T03:04:05.678Z",
        "ledger_id": first["ledger_id"],
        "entry_id": first["entry_id"],
        "key": "ключ",
        "headers": {"a": "b"},
        "text": "grün",
    }
    assert (plain["records"][0]["data"], plain["records"][0]["key"]) == ("/w==", "/g==")
    assert value["records"][0]["json"] == {"n": [1, None]}
    assert (text["next"], plain["next"], value["next"], value["closed"]) == (1, 2, 3, False)


async def test_octets_are_one_record_and_frames_are_a_batch_both_ways(log: Http) -> None:
    one = await log.ask(
        "POST", RECORDS, body=b"\x00\xff", headers={"Content-Type": "application/octet-stream"}
    )
    frames = b"".join(struct.pack(">I", len(v)) + v for v in (b"a", b"", b"ccc"))
    kind = {"Content-Type": "application/vnd.quorumlog.frames"}
    batch = await log.ask("POST", RECORDS, body=frames, headers=kind)

    assert (one.status, batch.status) == (201, 201)
    assert (batch.json["first_offset"], batch.json["last_offset"]) == (1, 3)
    found = await log.ask("GET", RECORDS, headers={"Accept": kind["Content-Type"]})
    assert found.headers["Next-Offset"] == "4"
    assert found.body == b"".join(
        struct.pack(">QI", offset, len(value)) + value
        for offset, value in enumerate((b"\x00\xff", b"a", b"", b"ccc"))
    )


async def test_a_page_has_as_many_bytes_as_are_asked_for(log: Http) -> None:
    for _ in range(3):
        await log.ask("POST", RECORDS, {"text": "x" * 700_000})

    regular = (await log.ask("GET", RECORDS)).json
    large = (await log.ask("GET", RECORDS + "?max_bytes=4000000")).json

    assert (regular["next"], large["next"], len(large["records"])) == (2, 3, 3)


async def test_a_repeat_of_a_producer_is_told_apart_by_a_header(log: Http) -> None:
    first = await log.ask("POST", RECORDS, {"text": "a"}, headers=PRODUCER)
    again = await log.ask("POST", RECORDS, {"text": "a"}, headers=PRODUCER)
    other = await log.ask("POST", RECORDS, {"text": "b"}, headers=PRODUCER)
    gap = await log.ask("POST", RECORDS, {"text": "c"}, headers=PRODUCER | {"Producer-Seq": "2"})
    newer = PRODUCER | {"Producer-Epoch": "3"}
    assert (await log.ask("POST", RECORDS, {"text": "d"}, headers=newer)).status == 201
    stale = await log.ask("POST", RECORDS, {"text": "e"}, headers=PRODUCER | {"Producer-Seq": "1"})

    assert "Producer-Duplicate" not in first.headers
    assert again.headers["Producer-Duplicate"] == "true"
    assert again.json == first.json
    assert code(other) == (422, "invalid")
    assert (*code(gap), gap.headers["Producer-Expected-Seq"]) == (409, "sequence-gap", "1")
    assert gap.json["retryable"]
    assert (*code(stale), stale.headers["Producer-Epoch"]) == (403, "stale-producer", "3")


@pytest.mark.parametrize("missing", PRODUCER)
async def test_a_producer_without_one_of_its_headers_is_refused(log: Http, missing: str) -> None:
    headers = {name: value for name, value in PRODUCER.items() if name != missing}

    answer = await log.ask("POST", RECORDS, {"text": "a"}, headers=headers)

    assert code(answer) == (422, "invalid")
    assert answer.json["errors"][0]["pointer"] == f"/header/{missing}"


async def test_a_producer_that_was_forgotten_is_expired_and_one_that_was_made_since_is_new(
    log: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producers, "PRODUCERS_MAX", 2)

    async def send(
        name: str, text: str, since: int | None = None, *, epoch: int = 0, seq: int = 0
    ) -> Answer:
        headers = {"Producer-Id": name, "Producer-Epoch": str(epoch), "Producer-Seq": str(seq)}
        headers |= {} if since is None else {"Producer-Since": str(since)}
        return await log.ask("POST", RECORDS, {"text": text}, headers=headers)

    for name in "abc":
        assert (await send(name, name)).status == 201
    refused = [
        await send("a", "a"),
        await send("a", "a", 0),
        await send("d", "d"),
        await send("a", "A", epoch=1),
        await send("a", "a2", seq=1),
    ]
    above = await send("d", "d", 4)
    new = await send("d", "d", 3)
    again = await send("d", "d", 3)

    for answer in refused:
        assert code(answer) == (409, "expired-producer")
        assert (answer.json["retryable"], answer.json["outcome"]) == (False, "unknown")
        assert "Producer-Since" in answer.json["detail"]
    assert (*code(above), above.json["outcome"]) == (422, "invalid", "not-done")
    assert above.json["errors"][0]["pointer"] == "/header/Producer-Since"
    assert new.json["first_offset"] == again.json["first_offset"] == 3
    assert await log.contents("log") == ["a", "b", "c", "d"]


@pytest.mark.parametrize("since", ["-1", "x", "", "1.5", "01", str(2**63)])
async def test_a_since_that_is_no_offset_is_refused_and_changes_nothing(
    log: Http, since: str
) -> None:
    answer = await log.ask(
        "POST", RECORDS, {"text": "a"}, headers=PRODUCER | {"Producer-Since": since}
    )

    assert code(answer) in ((400, "bad-request"), (422, "invalid"))
    assert "/header/Producer-Since" in answer.body.decode()
    assert await log.contents("log") == []


async def test_a_since_without_a_producer_is_refused(log: Http) -> None:
    answers = [
        await log.ask("POST", RECORDS, {"text": "a"}, headers={"Producer-Since": "0"}),
        await log.ask(
            "POST",
            RECORDS,
            body=b'{"text":"a"}\n',
            headers={"Producer-Since": "0", "Content-Type": "application/x-ndjson"},
        ),
    ]

    assert [code(answer) for answer in answers] == [(422, "invalid")] * 2
    assert {a.json["errors"][0]["pointer"] for a in answers} == {"/header/Producer-Since"}


async def test_expect_and_tokens_are_honoured(log: Http) -> None:
    await appended(log, {"text": "a"})
    wrong = await log.ask("POST", f"{RECORDS}?expect=0", {"text": "b"})
    opened = await log.ask("POST", f"{LOG}/open", {"owner": "me"})
    without = await log.ask("POST", RECORDS, {"text": "b"})
    token = {"Writer-Token": str(opened.json["writer_token"])}
    with_it = await log.ask("POST", f"{RECORDS}?expect=1", {"text": "b"}, headers=token)

    assert (*code(wrong), wrong.headers["Next-Offset"]) == (412, "unexpected-offset", "1")
    assert opened.json["next_offset"] == 1
    assert code(without) == (409, "log-fenced")
    assert (with_it.status, with_it.json["first_offset"]) == (201, 1)


async def test_rolls_truncations_and_the_end_show_in_the_log(log: Http) -> None:
    await appended(log, {"records": [{"text": "a"}, {"text": "b"}]})
    rolled = Log.model_validate((await log.ask("POST", f"{LOG}/roll")).json)
    await appended(log, {"text": "c"})
    cut = Log.model_validate((await log.ask("POST", f"{LOG}/truncate", {"before": 2})).json)
    gone = await log.ask("GET", f"{RECORDS}?from=1")
    closed = Log.model_validate((await log.ask("POST", f"{LOG}/close")).json)
    end = LogRecords.model_validate((await log.ask("GET", f"{RECORDS}?from=latest")).json)

    assert [(item.first_offset, item.last_offset) for item in rolled.ledgers] == [(0, 1), (2, None)]
    assert (cut.first_offset, cut.next_offset, len(cut.ledgers)) == (2, 3, 1)
    assert (*code(gone), gone.json["first_offset"]) == (410, "offset-truncated", 2)
    assert (closed.state, closed.next_offset, closed.owner) == ("CLOSED", 3, None)
    assert (end.records, end.next, end.closed) == ([], 3, True)
    assert code(await log.ask("POST", RECORDS, {"text": "d"})) == (409, "log-closed")
    assert (await log.ask("POST", f"{LOG}/close")).status == 200


@pytest.mark.parametrize(
    ("json", "pointer"),
    [
        ({}, ""),
        ({"records": []}, "/records"),
        ({"records": [{"text": "a"}, {"text": 1}]}, "/records/1/text"),
        ({"text": "a", "data": "YQ=="}, ""),
        ({"text": "a", "id": 1}, "/id"),
        ({"data": "YQ="}, "/data"),
        ({"data": "YQ==", "key": "no base64"}, "/key"),
        ({"text": "a", "headers": {"h": 1}}, "/headers/h"),
        ({"text": "a", "headers": []}, "/headers"),
        ({"text": "a", "timestamp": "yesterday"}, "/timestamp"),
        ({"text": "a", "timestamp": "2026-01-02T03:04:05"}, "/timestamp"),
        ({"text": "a", "timestamp": 5}, "/timestamp"),
    ],
)
async def test_a_record_that_is_not_valid_is_refused_and_told_where(
    log: Http, json: Any, pointer: str
) -> None:
    answer = await log.ask("POST", RECORDS, json)

    assert code(answer) == (422, "invalid"), answer
    assert answer.json["errors"][0]["pointer"] == pointer
    assert (await log.ask("GET", LOG)).json["next_offset"] == 0


async def test_requests_that_make_no_sense_are_4xx(log: Http) -> None:
    big = base64.b64encode(b"x" * (8 << 20)).decode()
    form = {"Content-Type": "application/x-www-form-urlencoded"}

    assert code(await log.ask("PUT", "/v1/logs/.hidden", {})) == (422, "invalid")
    assert code(await log.ask("PUT", f"/v1/logs/{'x' * 201}", {})) == (422, "invalid")
    assert code(await log.ask("PUT", LOG, {"ack_quorum": 5})) == (422, "invalid")
    assert code(await log.ask("PUT", LOG, {"roll_bytes": "1"})) == (422, "invalid")
    assert code(await log.ask("PUT", LOG, {"digest": "hmac-sha256"})) == (422, "invalid")
    assert code(await log.ask("POST", "/v1/logs/none/records", {"text": "a"}))[1] == "no-such-log"
    assert code(await log.ask("GET", "/v1/logs/none/records"))[1] == "no-such-log"
    assert code(await log.ask("POST", "/v1/logs/none/roll"))[1] == "no-such-log"
    assert code(await log.ask("POST", "/v1/logs/none/open", {"owner": "a"}))[1] == "no-such-log"
    assert code(await log.ask("POST", "/v1/logs/none/close"))[1] == "no-such-log"
    assert code(await log.ask("POST", f"{LOG}/open", {})) == (422, "invalid")
    assert code(await log.ask("POST", f"{LOG}/truncate", {"before": -1})) == (422, "invalid")
    assert code(await log.ask("GET", f"{RECORDS}?from=sometime")) == (400, "bad-request")
    assert code(await log.ask("GET", f"{RECORDS}?from=-0")) == (400, "bad-request")
    assert code(await log.ask("GET", f"{RECORDS}?to=1")) == (422, "invalid")
    assert code(await log.ask("POST", RECORDS, {"data": big})) == (413, "too-large")
    assert code(await log.ask("POST", RECORDS, body=b"a=b", headers=form))[0] == 415
    assert (await log.ask("HEAD", LOG)).status == 200
    assert (await log.ask("OPTIONS", LOG)).headers[
        "Allow"
    ] == "DELETE, GET, HEAD, OPTIONS, PATCH, PUT"


async def test_a_wait_at_the_tail_ends_by_time_with_no_records(log: Http) -> None:
    await appended(log, {"text": "a"})

    empty = await log.ask("GET", f"{RECORDS}?from=1&wait_ms=50")
    full = await log.ask("GET", f"{RECORDS}?from=0&wait_ms=60000&encoding=text")

    assert (empty.json["records"], empty.json["next"]) == ([], 1)
    assert [entry["text"] for entry in full.json["records"]] == ["a"]


async def test_the_metrics_count_what_was_acknowledged(log: Http) -> None:
    for _ in range(2):
        await log.ask(
            "POST", RECORDS, {"records": [{"text": "a"}, {"text": "b"}]}, headers=PRODUCER
        )

    lines = (await log.ask("GET", "/metrics")).body.decode().splitlines()

    for line in (
        "quorumlog_logs_owned 1.0",
        "quorumlog_log_requests_total 2.0",
        "quorumlog_log_records_total 2.0",
        "quorumlog_log_duplicates_total 1.0",
        "quorumlog_log_takeovers_total 1.0",
        'quorumlog_log_appended_records_total{log="log"} 2.0',
    ):
        assert line in lines


async def test_the_description_names_every_route_of_logs(log: Http) -> None:
    paths = (await log.ask("GET", "/openapi.json")).json["paths"]

    assert paths.keys() >= {
        "/v1/logs",
        "/v1/logs/{name}",
        "/v1/logs/{name}/records",
        "/v1/logs/{name}/open",
        "/v1/logs/{name}/roll",
        "/v1/logs/{name}/truncate",
        "/v1/logs/{name}/close",
    }


async def test_what_is_archived_is_noted_by_compare_and_swap_and_never_goes_back(log: Http) -> None:
    await appended(log, {"records": [{"text": str(i)} for i in range(10)]})

    async def note(**body: Any) -> Answer:
        return await log.ask("POST", f"{LOG}/archived", body)

    assert (await log.ask("GET", LOG)).json["archived_through"] is None
    assert code(await note(through=11)) == (422, "invalid")
    assert code(await note(through=4, expect=3)) == (412, "version-conflict")
    done = await note(through=4, expect=None)
    again = await note(through=4, expect=None)
    assert (done.status, done.json["archived_through"]) == (200, 4)
    assert (again.status, again.json["archived_through"]) == (200, 4)
    assert code(await note(through=5)) == (412, "version-conflict")
    assert code(await note(through=3, expect=4)) == (422, "invalid")
    assert (await note(through=10, expect=4)).json["archived_through"] == 10
    # Its owner goes on: the row that it writes next has this in it.
    await appended(log, {"text": "on"})
    assert (await log.ask("POST", f"{LOG}/roll")).json["archived_through"] == 10


async def test_a_protected_log_is_neither_deleted_nor_truncated_until_that_is_off(
    log: Http,
) -> None:
    await appended(log, {"text": "kept"})
    assert (await log.ask("GET", LOG)).json["deletion_protection"] is False

    for _ in range(2):
        on = await log.ask("PATCH", LOG, {"deletion_protection": True})
        assert (on.status, on.json["deletion_protection"]) == (200, True)
    await appended(log, {"text": "on"})
    await log.ask("POST", f"{LOG}/roll")

    assert code(await log.ask("DELETE", LOG)) == (409, "log-protected")
    assert code(await log.ask("POST", f"{LOG}/truncate", {"before": 1})) == (409, "log-protected")
    assert code(await log.ask("PATCH", LOG, {})) == (422, "invalid")
    shown = (await log.ask("GET", LOG)).json
    assert (shown["first_offset"], shown["next_offset"]) == (0, 2)

    off = await log.ask("PATCH", LOG, {"deletion_protection": False})
    assert (off.status, off.json["deletion_protection"]) == (200, False)
    assert (await log.ask("DELETE", LOG)).status == 204


async def test_limits_are_changed_one_by_one_and_checked_as_at_creation(log: Http) -> None:
    before = (await log.ask("GET", LOG)).json["settings"]

    one = await log.ask("PATCH", LOG, {"retention_seconds": 60})
    two = await log.ask("PATCH", LOG, {"roll_entries": 5, "retention_seconds": 0})
    three = await log.ask("PATCH", LOG, {"merge_below_bytes": 0})
    four = await log.ask("PATCH", LOG, {"merge_below_bytes": before["merge_below_bytes"]})

    assert one.json["settings"] == before | {"retention_seconds": 60}
    assert two.json["settings"] == before | {"roll_entries": 5}
    assert three.json["settings"] == two.json["settings"] | {"merge_below_bytes": 0}
    assert (four.json["settings"], before["merge_below_bytes"]) == (two.json["settings"], 64 << 20)
    Log.model_validate(two.json)
    assert (await log.ask("GET", LOG)).json["settings"] == two.json["settings"]
    assert code(await log.ask("PUT", LOG, {})) == (409, "log-exists")
    assert (await log.ask("PUT", LOG, {"roll_entries": 5})).status == 200
    refused: tuple[dict[str, Any], ...] = (
        {},
        {"roll_bytes": None},
        {"roll_bytes": -1},
        {"roll_bytes": 1.5},
        {"roll_bytes": "1"},
        {"retention_seconds": 2**63},
        {"digest": "none"},
        {"ensemble_size": 5},
        {"metadata": {}},
    )
    for wrong in refused:
        assert code(await log.ask("PATCH", LOG, wrong)) == (422, "invalid"), wrong
    assert (await log.ask("GET", LOG)).json["settings"] == two.json["settings"]
    assert code(await log.ask("PATCH", "/v1/logs/none", {"roll_bytes": 1}))[1] == "no-such-log"


async def test_a_change_is_made_from_the_version_that_its_caller_saw(log: Http) -> None:
    seen = (await log.ask("GET", LOG)).headers["ETag"]

    first = await log.ask("PATCH", LOG, {"roll_bytes": 1}, headers={"If-Match": seen})
    late = await log.ask("PATCH", LOG, {"roll_bytes": 2}, headers={"If-Match": seen})
    again = await log.ask(
        "PATCH", LOG, {"roll_bytes": 2}, headers={"If-Match": f'"{late.json["version"]}"'}
    )

    assert (first.status, again.status) == (200, 200)
    assert code(late) == (412, "version-conflict")
    assert late.json["outcome"] == "not-done"
    assert late.json["version"] == first.json["version"]
    assert first.headers["ETag"] == f'"{first.json["version"]}"' != seen
    assert again.json["settings"]["roll_bytes"] == 2
    for wrong in ("3", "*", 'W/"3"', '"03"', '"x"', '"1", "2"'):
        answer = await log.ask("PATCH", LOG, {"roll_bytes": 3}, headers={"If-Match": wrong})
        assert code(answer) == (422, "invalid"), wrong


async def test_logs_are_listed_by_the_beginning_of_their_names(http: Http) -> None:
    for name in ("a", "a-1", "a-2", "b"):
        await http.ask("PUT", f"/v1/logs/{name}", {})

    first = (await http.ask("GET", "/v1/logs?prefix=a-&limit=1")).json
    second = (await http.ask("GET", f"/v1/logs?prefix=a-&limit=1&after={first['next']}")).json

    assert [found["name"] for found in first["logs"] + second["logs"]] == ["a-1", "a-2"]
    assert (first["next"], second["next"]) == ("a-1", None)
    assert (await http.ask("GET", "/v1/logs?prefix=c")).json == {"logs": [], "next": None}
    for wrong in ("", "-", "%2F", "a b", "a" * 201):
        assert code(await http.ask("GET", f"/v1/logs?prefix={wrong}")) == (422, "invalid")


async def test_logs_beyond_the_bound_are_counted_together(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle, "LOGS_COUNTED_MAX", 2)
    for name in ("a", "b", "c", "d"):
        await http.ask("PUT", f"/v1/logs/{name}", {})
        await http.ask("POST", f"/v1/logs/{name}/records", {"records": [{"text": "xyz"}] * 2})

    async def counted() -> dict[str, float]:
        text = (await http.ask("GET", "/metrics")).body.decode()
        found = re.findall(
            r'^quorumlog_log_appended_records_total\{log="(.+)"\} (.+)$', text, re.MULTILINE
        )
        sizes = re.findall(
            r'^quorumlog_log_appended_bytes_total\{log="(.+)"\} (.+)$', text, re.MULTILINE
        )
        assert all(float(size) >= 3 for _, size in sizes)
        assert len(sizes) == len(found)
        return {name: float(value) for name, value in found}

    assert await counted() == {"a": 2, "b": 2, "_other": 4}
    await http.ask("DELETE", "/v1/logs/a")
    await http.ask("POST", "/v1/logs/d/records", {"text": "x"})
    assert await counted() == {"b": 2, "_other": 4, "d": 1}


async def test_a_log_is_created_with_its_protection(http: Http) -> None:
    path = "/v1/logs/protected"
    made = await http.ask("PUT", path, {"deletion_protection": True})

    assert (made.status, made.json["deletion_protection"]) == (201, True)
    assert (await http.ask("PUT", path, {})).json["deletion_protection"] is True
    other = await http.ask("PUT", path, {"deletion_protection": False})
    assert code(other) == (409, "log-exists")
