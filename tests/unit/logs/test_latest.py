"""Whoever follows a log from `latest` learns at once where that is: one that is cut off before its first
record resumes there, not at another end.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from quorumlog.client import Client
from tests.support.events import after_retry
from tests.support.waiting import until, within
from tests.unit.gateway.conftest import received
from tests.unit.logs.support import Http
from tests.unit.logs.test_http import LOG, RECORDS, appended, http, log
from tests.unit.logs.test_streams import lines_of

__all__ = ["http", "log"]

LINES = {"Accept": "application/x-ndjson"}
EVENTS = {"Accept": "text/event-stream"}
FUTURE = "2999-01-01T00:00:00Z"


async def first_block(http: Http, start: str, seen: Mapping[str, str] | None = None) -> bytes:
    """What an EventSource gets before it is cut off."""
    async with (
        within("the stream begins"),
        http.session.get(
            f"{http.urls[0]}{RECORDS}?from={start}", headers={**EVENTS, **(seen or {})}
        ) as response,
    ):
        return after_retry(await response.content.readuntil(b"\n\n"))


@pytest.mark.parametrize(("start", "count"), [("latest", 0), ("latest", 3), ("-2", 0), (FUTURE, 0)])
async def test_an_event_source_that_is_cut_off_before_its_first_event_misses_nothing(
    log: Http, start: str, count: int
) -> None:
    for number in range(count):
        await appended(log, {"text": str(number)})

    block = await first_block(log, start)
    await appended(log, {"text": "meanwhile"})
    seen = {"Last-Event-ID": block.decode().removeprefix("id: ").strip()}
    resumed = await first_block(log, start, seen)

    assert block.startswith(b"id: %d." % (count - 1))
    assert b'"offset":%d,' % count in resumed


async def test_from_earliest_no_id_comes_before_the_first_record(log: Http) -> None:
    """Who saw nothing begins at what is the earliest then: an id could be truncated by that time."""
    await appended(log, {"records": [{"text": "a"}, {"text": "b"}]})

    whole = await log.ask("GET", f"{RECORDS}?from=earliest&limit=2", headers=EVENTS)
    at_offset = await log.ask("GET", f"{RECORDS}?from=0&limit=2", headers=EVENTS)

    assert after_retry(whole.body) == after_retry(at_offset.body)


async def test_a_socket_that_is_cut_off_goes_on_with_what_it_was_told(log: Http) -> None:
    async with log.session.ws_connect(f"{log.urls[0]}{LOG}/ws") as socket:
        await socket.send_json({"tail": {"from": "latest"}})
        reported = await received(socket)
    await appended(log, {"text": "meanwhile"})

    async with log.session.ws_connect(f"{log.urls[0]}{LOG}/ws") as socket:
        await socket.send_json(reported)
        assert [record["offset"] for record in (await received(socket))["records"]] == [0]


@pytest.mark.parametrize("start", ["latest", FUTURE])
async def test_lines_that_wait_at_the_end_say_at_once_where_that_is(log: Http, start: str) -> None:
    await appended(log, {"text": "a"})
    async with (
        within("the head comes, and then the line"),
        log.session.get(
            f"{log.urls[0]}{RECORDS}?from={start}&wait_ms=60000", headers=LINES
        ) as response,
    ):
        assert response.headers["Next-Offset"] == "1"
        await appended(log, {"text": "b"})
        assert [line["offset"] for line in lines_of(await response.read())] == [1]


async def test_lines_from_the_end_come_without_waiting_where_there_is_time_for_none(
    log: Http,
) -> None:
    await appended(log, {"text": "a"})

    async with within("the answer ends"):
        none = await log.ask("GET", f"{RECORDS}?from=latest&wait_ms=1", headers=LINES)
        some = await log.ask("GET", f"{RECORDS}?from=earliest&wait_ms=60000", headers=LINES)

    assert (none.status, none.body) == (200, b"")
    assert [line["offset"] for line in lines_of(some.body)] == [0]


@pytest.mark.parametrize("seen", ["-2", "x", "01", ""])
async def test_only_an_offset_or_minus_one_was_seen(log: Http, seen: str) -> None:
    answer = await log.ask("GET", RECORDS, headers=EVENTS | {"Last-Event-ID": seen})

    assert answer.status in (400, 422)


async def test_the_client_follows_from_the_end_that_it_found_first(log: Http) -> None:
    """A request for the end that is sent again would find another end."""
    asked: list[dict[str, Any]] = []
    await appended(log, {"text": "a"})

    async with Client(*log.urls) as client:
        follower = client.log("log")
        transport = follower._transport
        request = transport.request

        async def noted(method: str, path: str, **options: Any) -> Any:
            asked.append(options.get("params") or {})
            return await request(method, path, **options)

        transport.request = noted  # type: ignore[method-assign]
        tail = follower.tail("latest")
        found = asyncio.ensure_future(anext(tail))
        async with within("the first record comes"):
            await until(lambda: len(asked) == 2, "the client waits at the end")
            await appended(log, {"text": "b"})
            record = await found
        await tail.aclose()

    assert (record.offset, record.value) == (1, b"b")
    assert [params["wait_ms"] for params in asked if params["from"] == "latest"] == [0]
    assert asked[1]["from"] == 1
