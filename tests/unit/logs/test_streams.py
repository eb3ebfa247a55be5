"""Logs as streams: NDJSON both ways, and events that follow the tail."""

import orjson

from tests.support.waiting import within
from tests.unit.logs.support import Http
from tests.unit.logs.test_http import LOG, PRODUCER, RECORDS, appended, code, http, log

__all__ = ["http", "log"]

LINES = {"Content-Type": "application/x-ndjson", "Accept": "application/x-ndjson"}
EVENTS = {"Accept": "text/event-stream"}


def lines_of(body: bytes) -> list[dict[str, object]]:
    return [orjson.loads(line) for line in body.splitlines()]


async def test_lines_are_appended_in_order_and_acknowledged_without_a_gap(log: Http) -> None:
    sent = b"".join(b'{"text":"%d","key":"k"}\n' % number for number in range(500))

    answer = await log.ask("POST", RECORDS, body=sent, headers=LINES)

    assert answer.status == 200
    following: object = 0
    for line in lines_of(answer.body):
        assert line["first_offset"] == following
        assert isinstance(line["last_offset"], int)
        following = line["last_offset"] + 1
    assert following == 500
    found = lines_of((await log.ask("GET", f"{RECORDS}?encoding=text", headers=LINES)).body)
    assert [(line["offset"], line["text"], line["key"]) for line in found] == [
        (number, str(number), "k") for number in range(500)
    ]


async def test_a_line_that_is_wrong_is_the_last_one_and_what_came_before_it_is_there(
    log: Http,
) -> None:
    first = await log.ask("POST", RECORDS, body=b'{"text":"a"}\n{"text":1}\n', headers=LINES)
    at_once = await log.ask("POST", RECORDS, body=b'{"no":1}\n', headers=LINES)

    reported = lines_of(first.body)
    assert (first.status, reported[0]) == (200, {"first_offset": 0, "last_offset": 0})
    assert reported[-1]["code"] == "invalid"
    assert code(at_once) == (422, "invalid")
    assert (await log.ask("GET", LOG)).json["next_offset"] == 1


async def test_a_stream_keeps_to_what_it_expects_and_takes_no_sequence(log: Http) -> None:
    wrong = await log.ask("POST", f"{RECORDS}?expect=3", body=b'{"text":"a"}\n', headers=LINES)
    right = await log.ask("POST", f"{RECORDS}?expect=0", body=b'{"text":"a"}\n', headers=LINES)
    producer = await log.ask("POST", RECORDS, body=b'{"text":"a"}\n', headers=LINES | PRODUCER)

    assert code(wrong) == (412, "unexpected-offset")
    assert lines_of(right.body) == [{"first_offset": 0, "last_offset": 0}]
    assert code(producer) == (422, "invalid")


async def test_lines_end_at_the_limit_or_at_what_is_acknowledged(log: Http) -> None:
    for number in range(5):
        await appended(log, {"text": str(number)})

    some = await log.ask("GET", f"{RECORDS}?from=1&limit=3&encoding=text", headers=LINES)
    rest = await log.ask("GET", f"{RECORDS}?from=3&encoding=text", headers=LINES)
    none = await log.ask("GET", f"{RECORDS}?from=latest", headers=LINES)

    assert [line["offset"] for line in lines_of(some.body)] == [1, 2, 3]
    assert [line["offset"] for line in lines_of(rest.body)] == [3, 4]
    assert (none.status, none.body, none.headers["Next-Offset"]) == (200, b"", "5")


async def test_events_follow_the_tail_and_end_with_the_log(log: Http) -> None:
    await appended(log, {"text": "a"})
    session, url = log.session, log.urls[0]
    async with (
        within("the events come"),
        session.get(url + f"{RECORDS}?encoding=text", headers=EVENTS) as response,
    ):
        assert response.status == 200
        seen = b""
        while b"id: 0." not in seen:
            seen += await response.content.readline()
        await appended(log, {"text": "b"})
        while b"id: 1." not in seen:
            seen += await response.content.readline()
        await log.ask("POST", f"{LOG}/close")
        seen += await response.content.read()

    assert seen.endswith(b'event: end\ndata: {"next_offset":2}\n\n')
    assert seen.index(b'"text":"a"') < seen.index(b'"text":"b"')
    resumed = await log.ask("GET", RECORDS, headers=EVENTS | {"Last-Event-ID": "0"})
    assert b"id: 0." not in resumed.body
    assert b"id: 1." in resumed.body
