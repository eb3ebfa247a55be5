"""Reads that begin at a time, or so many offsets before the end: over HTTP, events, lines, a socket, Arrow, the SDK."""

from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from loadtest.cluster import Cluster, running
from loadtest.stores import Stores
from quorumlog.client import Client
from services.gateway.edge.log_models import LogRecords
from tests.support.events import after_retry
from tests.unit.gateway.conftest import received
from tests.unit.logs.support import Http
from tests.unit.logs.test_http import LOG, RECORDS, appended, code, http, log
from tests.unit.logs.test_latest import FUTURE, first_block
from tests.unit.logs.test_streams import lines_of
from tests.unit.transactions.support import begin, end, write

__all__ = ["http", "log"]

LINES = {"Accept": "application/x-ndjson"}
EVENTS = {"Accept": "text/event-stream"}
PAST = "1999-01-01T00:00:00Z"


async def page(http: Http, start: str, *, at: int = 0, more: str = "") -> Any:
    found = await http.done("GET", f"{RECORDS}?from={quote(start)}&encoding=text{more}", at=at)
    LogRecords.model_validate(found)
    return found


async def offsets(http: Http, start: str, *, at: int = 0) -> list[int]:
    return [entry["offset"] for entry in (await page(http, start, at=at))["records"]]


async def test_minus_n_is_n_offsets_before_the_end_and_stops_where_the_log_begins(
    log: Http,
) -> None:
    assert (await page(log, "-1"))["next"] == 0
    await appended(log, {"records": [{"text": str(n)} for n in range(5)]})

    assert await offsets(log, "-2") == [3, 4]
    assert await offsets(log, "-5") == [0, 1, 2, 3, 4]
    assert await offsets(log, f"-{2**63 - 1}") == [0, 1, 2, 3, 4]
    for wrong in ("-0", "-x", "--1"):
        answer = await log.ask("GET", f"{RECORDS}?from={wrong}")
        assert code(answer) == (400, "bad-request")
    assert code(await log.ask("GET", f"{RECORDS}?from=-{2**63}")) == (422, "invalid")


async def test_an_empty_log_begins_at_its_end_at_every_time(log: Http) -> None:
    for start in (PAST, FUTURE, "-3"):
        found = await page(log, start)
        assert (found["records"], found["next"], found["first_offset"]) == ([], 0, 0)


async def test_a_time_of_the_future_is_the_end_and_one_before_the_log_its_beginning(
    log: Http,
) -> None:
    await appended(log, {"records": [{"text": "a"}, {"text": "b"}]})

    future, past = await page(log, FUTURE), await page(log, PAST)

    assert (future["records"], future["next"]) == ([], 2)
    assert [entry["text"] for entry in past["records"]] == ["a", "b"]


async def test_a_records_own_time_is_not_what_is_looked_for(log: Http) -> None:
    await appended(log, {"text": "old", "timestamp": PAST})
    await appended(log, {"text": "new", "timestamp": FUTURE})

    assert await offsets(log, "1999-06-01T00:00:00Z") == [0, 1]
    assert await offsets(log, "2998-06-01T00:00:00Z") == []


@pytest.mark.parametrize("zone", ["+02:00", "-02:00", "Z"])
async def test_a_plus_that_became_a_space_is_told_how_to_be_written(log: Http, zone: str) -> None:
    await appended(log, {"text": "a"})
    raw = await log.ask("GET", f"{RECORDS}?from=2020-01-01T00:00:00{zone}")
    escaped = await log.ask("GET", f"{RECORDS}?from=2020-01-01T00:00:00{quote(zone)}")

    assert escaped.status == 200
    if zone.startswith("+"):
        assert code(raw) == (422, "invalid")
        assert "%2B" in raw.json["errors"][0]["detail"]
        assert raw.json["errors"][0]["pointer"] == "/query/from"
    else:
        assert raw.status == 200


async def test_below_what_was_truncated_a_time_is_where_the_log_begins(log: Http) -> None:
    await appended(log, {"records": [{"text": "a"}, {"text": "b"}]})
    await log.done("POST", f"{LOG}/roll")
    await appended(log, {"text": "c"})
    await log.done("POST", f"{LOG}/truncate", {"before": 2})

    for start in (PAST, "-3"):
        found = await page(log, start)
        assert [entry["text"] for entry in found["records"]] == ["c"]
        assert found["first_offset"] == 2


@pytest.mark.parametrize("start", ["-2", PAST])
async def test_events_begin_there_and_resume_where_they_were_cut(log: Http, start: str) -> None:
    await appended(log, {"records": [{"text": "a"}, {"text": "b"}]})

    first = await log.ask("GET", f"{RECORDS}?from={start}&limit=1", headers=EVENTS)
    resumed = await first_block(log, start, {"Last-Event-ID": "0"})
    again = await log.ask(
        "GET", f"{RECORDS}?from={start}&limit=1", headers=EVENTS | {"Last-Event-ID": "0"}
    )

    assert after_retry(first.body).startswith(b"id: -1.")
    assert b"\nid: 0." in first.body
    assert resumed.startswith(b"id: 1.")
    # What came before can't be counted.
    assert code(again) == (422, "invalid")


async def test_lines_and_arrow_begin_there_too(log: Http) -> None:
    await appended(log, {"records": [{"text": "a"}, {"text": "b"}, {"text": "c"}]})

    lines = await log.ask("GET", f"{RECORDS}?from=-2", headers=LINES)
    none = await log.ask("GET", f"{RECORDS}?from={FUTURE}", headers=LINES)
    arrow = await log.ask(
        "GET", f"{RECORDS}?from=-1", headers={"Accept": "application/vnd.apache.arrow.stream"}
    )

    assert [line["offset"] for line in lines_of(lines.body)] == [1, 2]
    assert (none.body, none.headers["Next-Offset"]) == (b"", "3")
    assert (arrow.status, arrow.headers["Next-Offset"]) == (200, "3")


@pytest.mark.parametrize("encoding", ["text", "frames"])
@pytest.mark.parametrize(("start", "first"), [("latest", 3), (-2, 1), (PAST, 0), (FUTURE, 3)])
async def test_a_socket_is_told_first_where_its_tail_begins(
    log: Http, start: object, first: int, encoding: str
) -> None:
    await appended(log, {"records": [{"text": "a"}, {"text": "b"}, {"text": "c"}]})
    async with log.session.ws_connect(f"{log.urls[0]}{LOG}/ws") as socket:
        await socket.send_json({"tail": {"from": start, "encoding": encoding}})
        assert await received(socket) == {"tail": {"from": first}}
        if first == 3:
            await appended(log, {"text": "d"})
        if encoding == "text":
            assert (await received(socket))["records"][0]["offset"] == first


async def test_the_sdk_reads_from_a_time_and_from_before_the_end(log: Http) -> None:
    await appended(log, {"records": [{"text": "a"}, {"text": "b"}, {"text": "c"}]})
    async with Client(*log.urls) as client:
        found = client.log("log")
        past, future = datetime.fromisoformat(PAST), datetime.fromisoformat(FUTURE)

        assert [record.offset for record in (await found.read(-2)).records] == [1, 2]
        assert [record.offset async for record in found.records(-2)] == [1, 2]
        assert [record.offset async for record in found.records(past)] == [0, 1, 2]
        assert [record.offset async for record in found.records(future)] == []
        assert (await found.read(future)).next == 3
        assert (await anext(found.tail(past.astimezone(UTC)))).offset == 0
        with pytest.raises(ValueError, match="time zone"):
            await found.read(past.replace(tzinfo=None))
        with pytest.raises(ValueError, match=r"2\*\*63"):
            await found.read(-(2**63))


async def check_times(http: Http, *, at: int) -> None:
    """Times never go back, and a read from each begins with the first record of it."""
    whole = (await page(http, "earliest", at=at, more="&limit=1000"))["records"]
    times = [entry["timestamp"] for entry in whole]
    assert times == sorted(times)
    for time in set(times):
        first = next(entry["offset"] for entry in whole if entry["timestamp"] == time)
        assert (await offsets(http, time, at=at))[0] == first
    assert await offsets(http, "-2", at=at) == [entry["offset"] for entry in whole[-2:]]


async def test_times_are_found_over_rolls_takeovers_and_publications(stores: Stores) -> None:
    """On real processes. A transaction writes before what is appended ahead of its publication."""
    cluster: Cluster
    async with running(stores) as cluster, aiohttp.ClientSession() as session:
        http = Http(session, cluster.gateways)
        await http.done("PUT", LOG, {})
        transaction = await begin(http)
        parts = [await write(http, transaction, [[f"t{n}", "t"], ["t"]]) for n in range(2)]
        for number in range(3):
            await http.append_once(RECORDS, {"text": f"before {number}"})
        await http.done("POST", f"{LOG}/roll")
        await http.append_once(RECORDS, {"records": [{"text": "a"}, {"text": "b"}]})
        await check_times(http, at=1)
        assert (await end(http, transaction, "commit", {"ledgers": parts})).status == 200
        await http.append_once(RECORDS, {"text": "after the commit"})
        await check_times(http, at=1)
        await cluster.kill("gateway-1")
        await http.append_once(RECORDS, {"text": "taken over"}, at=1)
        await check_times(http, at=1)

        published = (await page(http, "5", at=1, more="&limit=6"))["records"]
        assert [entry["text"] for entry in published] == ["t0", "t", "t", "t1", "t", "t"]
        assert len({entry["timestamp"] for entry in published}) == 1
