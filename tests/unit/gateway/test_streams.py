"""NDJSON both ways, and Server-Sent Events."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest

from quorumlog.errors import LedgerFenced
from services.gateway.edge.http.limits import Limits
from services.gateway.interface import LedgerOptions
from tests.support.events import after_retry
from tests.support.waiting import until, within
from tests.unit.gateway.conftest import (
    Answer,
    Gateway,
    received,
    running,
    until_held,
    until_nothing_held,
)
from tests.unit.gateway.conftest import gateway_with_ledger as gateway

__all__ = ("gateway",)

ENTRIES = "/v1/ledgers/1/entries"
NDJSON = {"Content-Type": "application/x-ndjson"}
LINES = {"Accept": "application/x-ndjson"}
EVENTS = {"Accept": "text/event-stream"}
SEED = 20_261_122


def lines(answer: Answer) -> list[Any]:
    return [orjson.loads(line) for line in answer.body.splitlines()]


def is_cumulative(acknowledged: list[dict[str, int]], count: int) -> bool:
    """Whether the runs follow one another from 0 to count."""
    following = 0
    for run in acknowledged:
        if run.keys() != {"first_entry", "last_entry"} or run["first_entry"] != following:
            return False
        following = run["last_entry"] + 1
    return following == count


async def test_lines_are_appended_in_order_however_they_arrive(gateway: Gateway) -> None:
    rng = random.Random(SEED)
    texts = [f"entry {n} " + "x" * rng.randrange(300) for n in range(2000)]
    body = b"".join(orjson.dumps({"text": text}) + b"\n" for text in texts) + b"\r\n\n"

    async def pieces() -> AsyncIterator[bytes]:
        at = 0
        while at < len(body):
            size = rng.choice((1, 7, 1000, 50_000))
            yield body[at : at + size]
            at += size

    async with gateway.session.post(
        gateway.url + ENTRIES, data=pieces(), headers=NDJSON
    ) as response:
        answer = Answer(response.status, response.headers, await response.read())

    assert answer.status == 200, f"seed {SEED}"
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    assert is_cumulative(lines(answer), len(texts)), f"seed {SEED}"
    assert gateway.engine.entries[1] == [text.encode() for text in texts], f"seed {SEED}"


async def test_the_last_line_needs_no_end_and_each_may_have_its_form(gateway: Gateway) -> None:
    answer = await gateway.ask(
        "POST", ENTRIES, '{"text":"a"}\n\n{"data":"Yg=="}\n{"json":{"c":1}}', headers=NDJSON
    )

    assert (answer.status, is_cumulative(lines(answer), 3)) == (200, True)
    assert gateway.engine.entries[1] == [b"a", b"b", b'{"c":1}']


async def test_a_stream_without_lines_is_answered_without_lines(gateway: Gateway) -> None:
    answer = await gateway.ask("POST", ENTRIES, "\n\n", headers=NDJSON)

    assert (answer.status, answer.body) == (200, b"")


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("nonsense", 400),
        ('{"text":"a","text":"b"}', 400),
        ('{"txt":"a"}', 422),
        ('{"text":1}', 422),
        ("[]", 422),
        ('{"entries":[{"text":"a"}]}', 422),
    ],
)
async def test_a_wrong_line_ends_the_stream_there(gateway: Gateway, line: str, status: int) -> None:
    first = await gateway.ask("POST", ENTRIES, f'{line}\n{{"text":"a"}}\n', headers=NDJSON)
    assert (first.status, gateway.engine.entries[1]) == (status, [])
    assert "/lines/0" in first.json["detail"]
    later = await gateway.ask(
        "POST", ENTRIES, f'{{"text":"a"}}\n{{"text":"b"}}\n{line}\n{{"text":"c"}}\n', headers=NDJSON
    )

    *acknowledged, problem = lines(later)
    assert later.status == 200
    assert is_cumulative(acknowledged, 2)
    assert (problem["status"], problem["outcome"]) == (status, "not-done")
    assert "/lines/2" in problem["detail"]
    assert gateway.engine.entries[1] == [b"a", b"b"]


async def test_an_error_of_the_ledger_is_the_last_line(gateway: Gateway) -> None:
    more = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b'{"text":"a"}\n'
        await more.wait()
        yield b'{"text":"b"}\n'

    async with (
        within("the server answers"),
        gateway.session.post(gateway.url + ENTRIES, data=body(), headers=NDJSON) as response,
    ):
        first = orjson.loads(await response.content.readline())
        gateway.engine.fails = LedgerFenced("recovered", ledger_id=1, outcome="unknown")
        more.set()
        problem = orjson.loads(await response.content.readline())

    assert first == {"first_entry": 0, "last_entry": 0}
    assert (problem["code"], problem["outcome"]) == ("ledger-fenced", "unknown")


async def test_an_error_before_the_first_line_is_a_status(gateway: Gateway) -> None:
    missing = await gateway.ask("POST", "/v1/ledgers/9/entries", '{"text":"a"}', headers=NDJSON)
    other = await gateway.ask("POST", ENTRIES + "?expect=1", '{"text":"a"}', headers=NDJSON)
    expected = await gateway.ask(
        "POST", ENTRIES + "?expect=0", '{"text":"a"}\n' * 3, headers=NDJSON
    )

    assert (missing.status, missing.code) == (404, "no-such-ledger")
    assert (other.status, other.code) == (412, "unexpected-entry-id")
    assert is_cumulative(lines(expected), 3)


async def test_a_line_that_does_not_end_is_a_408() -> None:
    async with running(limits=Limits(body_timeout_s=0.2)) as gateway:
        await gateway.engine.create(LedgerOptions())
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.listener.port)
        writer.write(
            b"POST /v1/ledgers/1/entries HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
            b'Content-Type: application/x-ndjson\r\n\r\n{"te'
        )
        async with within("the server answers"):
            head = await reader.readuntil(b"\r\n\r\n")
        writer.close()

        assert head.startswith(b"HTTP/1.1 408")


async def test_a_line_that_is_too_long_is_a_413() -> None:
    async with running(limits=Limits(entry_bytes_max=10)) as gateway:
        await gateway.create()
        escaped = '{"text":"' + "\\u0041" * 10 + '"}'

        good = await gateway.ask("POST", ENTRIES, escaped, headers=NDJSON)
        large = await gateway.ask("POST", ENTRIES, '{"text":"' + "x" * 11, headers=NDJSON)
        larger = await gateway.ask("POST", ENTRIES, '{"text":"' + "x" * 3000, headers=NDJSON)

        assert (good.status, gateway.engine.entries[1]) == (200, [b"A" * 10])
        assert (large.status, larger.status) == (400, 413)


async def test_a_range_is_read_as_lines(gateway: Gateway) -> None:
    gateway.engine.entries[1] = [b"%d" % n for n in range(25_000)]

    everything = await gateway.ask("GET", ENTRIES + "?encoding=text", headers=LINES)
    some = await gateway.ask("GET", ENTRIES + "?from=5&to=7&encoding=json", headers=LINES)
    few = await gateway.ask("GET", ENTRIES + "?from=24999&limit=5&encoding=text", headers=LINES)
    none = await gateway.ask("GET", ENTRIES + "?from=25000", headers=LINES)
    head = await gateway.ask("HEAD", ENTRIES, headers=LINES)

    assert everything.headers["Content-Type"] == "application/x-ndjson"
    assert [entry["entry_id"] for entry in lines(everything)] == list(range(25_000))
    assert lines(everything)[24_999] == {"entry_id": 24_999, "text": "24999"}
    assert [entry["json"] for entry in lines(some)] == [5, 6, 7]
    assert [entry["entry_id"] for entry in lines(few)] == [24_999]
    assert (none.status, none.body, none.headers["Last-Add-Confirmed"]) == (200, b"", "24999")
    assert (head.status, head.body) == (200, b"")


async def test_an_entry_stays_one_line_however_it_was_stored(gateway: Gateway) -> None:
    gateway.engine.entries[1] = [b'{\n "n": 1\n}', b"a\nb"]

    json = await gateway.ask("GET", ENTRIES + "?to=0&encoding=json", headers=LINES)
    text = await gateway.ask("GET", ENTRIES + "?from=1&encoding=text", headers=LINES)

    assert lines(json) == [{"entry_id": 0, "json": {"n": 1}}]
    assert lines(text) == [{"entry_id": 1, "text": "a\nb"}]


class Events:
    """A client of Server-Sent Events."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def next(self) -> dict[str, str]:
        """The next event; signs of life are passed over."""
        while not (event := await self.next_or_sign()):
            pass
        return event

    async def next_or_sign(self) -> dict[str, str]:
        """The next event; a sign of life is an empty one."""
        event: dict[str, str] = {}
        async with within("the server answers"):
            while line := (await self._response.content.readuntil(b"\n")).decode().rstrip("\n"):
                name, _, value = line.partition(":")
                if name and name != "retry":
                    event[name] = value.strip()
        return event

    async def ended(self) -> bool:
        async with within("the server answers"):
            return await self._response.content.read() == b""


async def test_events_follow_the_tail_to_the_end(gateway: Gateway) -> None:
    gateway.engine.entries[1] = [b"a"]

    async with gateway.session.get(
        gateway.url + ENTRIES + "?encoding=text", headers=EVENTS
    ) as response:
        events = Events(response)
        assert response.headers["Content-Type"] == "text/event-stream"
        assert await events.next() == {"id": "0", "data": '{"entry_id":0,"text":"a"}'}
        await until(lambda: gateway.engine.waiting == 1, "the tail waits")
        await gateway.ask("POST", ENTRIES, json={"entries": [{"text": "b"}, {"text": "c"}]})
        assert [(await events.next())["id"] for _ in range(2)] == ["1", "2"]
        await gateway.ask("POST", "/v1/ledgers/1/close")
        assert await events.next() == {"event": "end", "data": '{"last_entry":2}'}
        assert await events.ended()


async def test_events_go_on_after_the_last_one_that_was_seen(gateway: Gateway) -> None:
    gateway.engine.entries[1] = [b"a", b"b", b"c"]
    await gateway.engine.close(1)

    answer = await gateway.ask("GET", ENTRIES, headers=EVENTS | {"Last-Event-ID": "1"})
    over = await gateway.ask("GET", ENTRIES + "?from=3", headers=EVENTS)
    bad = await gateway.ask("GET", ENTRIES, headers=EVENTS | {"Last-Event-ID": "x"})
    part = await gateway.ask("GET", ENTRIES + "?to=0&encoding=text", headers=EVENTS)

    assert after_retry(answer.body).startswith(b"id: 2\n")
    assert answer.body.endswith(b'event: end\ndata: {"last_entry":2}\n\n')
    assert after_retry(over.body) == b'event: end\ndata: {"last_entry":2}\n\n'
    assert (bad.status, bad.code) == (400, "bad-request")
    assert after_retry(part.body) == b'id: 0\ndata: {"entry_id":0,"text":"a"}\n\n'


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ("x", 400), ("", 400), ("01", 400), ("1.", 400), ("1.x", 400), ("1.5", 400), (".", 400),
        ("-2", 422), (str(2**63 - 1), 422), ("9" * 400, 422), ("1.0123456789abcd", 422),
    ],
)  # fmt: skip
async def test_what_is_no_event_id_is_refused(gateway: Gateway, seen: str, expected: int) -> None:
    answer = await gateway.ask("GET", ENTRIES, headers=EVENTS | {"Last-Event-ID": seen})

    assert answer.status == expected, answer


async def test_a_reader_of_events_that_resumes_at_a_final_end_gets_204(gateway: Gateway) -> None:
    gateway.engine.entries[1] = [b"a", b"b"]
    before = await gateway.ask("GET", ENTRIES + "?limit=2", headers=EVENTS | {"Last-Event-ID": "0"})
    await gateway.engine.close(1)

    more = await gateway.ask("GET", ENTRIES, headers=EVENTS | {"Last-Event-ID": "0"})
    over = await gateway.ask("GET", ENTRIES, headers=EVENTS | {"Last-Event-ID": "1"})

    assert after_retry(before.body).startswith(b"id: 1\n")
    assert after_retry(more.body).endswith(b'event: end\ndata: {"last_entry":1}\n\n')
    assert (over.status, over.body) == (204, b"")


async def test_a_reader_of_events_gets_its_limit_once_however_it_resumes(gateway: Gateway) -> None:
    gateway.engine.entries[1] = [bytes([n]) for n in range(10)]

    async def ids(query: str, seen: str) -> list[bytes] | int:
        headers = EVENTS | {"Last-Event-ID": seen}
        answer = await gateway.ask("GET", ENTRIES + query, headers=headers)
        lines = answer.body.split(b"\n")
        return (
            [line for line in lines if line.startswith(b"id: ")]
            if answer.status == 200
            else answer.status
        )

    assert await ids("?limit=3", "-1") == [b"id: 0", b"id: 1", b"id: 2"]
    assert await ids("?limit=3", "0") == [b"id: 1", b"id: 2"]
    assert await ids("?from=4&limit=3", "5") == [b"id: 6"]
    assert await ids("?from=4&limit=3", "1") == [b"id: 2", b"id: 3", b"id: 4"]
    # 204 ends a browser's attempts.
    assert await ids("?limit=3", "2") == 204
    assert await ids("?limit=3", "7") == 204
    assert await ids("?to=3", "3") == 204
    assert await ids("?max_bytes=1", "0") == 422


async def test_readers_of_events_are_told_different_times_to_come_again(gateway: Gateway) -> None:
    gateway.engine.entries[1] = [b"a"]

    heads = [
        (await gateway.ask("GET", ENTRIES + "?limit=1", headers=EVENTS)).body.split(b"\n")[0]
        for _ in range(20)
    ]

    assert all(after_retry(head) == b"" for head in heads)
    assert len(set(heads)) > 1


async def test_events_end_at_the_limits_that_are_given(gateway: Gateway) -> None:
    gateway.engine.entries[1] = [b"a", b"b", b"c"]

    two = await gateway.ask("GET", ENTRIES + "?limit=2", headers=EVENTS)
    one = await gateway.ask("GET", ENTRIES + "?max_bytes=1", headers=EVENTS)

    assert [line for line in two.body.splitlines() if line.startswith(b"id")] == [
        b"id: 0",
        b"id: 1",
    ]
    assert [line for line in one.body.splitlines() if line.startswith(b"id")] == [b"id: 0"]


async def test_a_tail_at_rest_gives_signs_of_life() -> None:
    async with running(limits=Limits(comment_every_s=0.05)) as gateway:
        await gateway.create()
        async with gateway.session.get(gateway.url + ENTRIES, headers=EVENTS) as response:
            events = Events(response)

            assert [await events.next_or_sign() for _ in range(3)] == [{}, {}, {}]


async def test_an_error_in_a_tail_is_an_event_and_a_missing_ledger_a_404() -> None:
    async with running(limits=Limits(comment_every_s=0.05)) as gateway:
        await gateway.create()
        gateway.engine.entries[1] = [b"a"]

        async with gateway.session.get(
            gateway.url + ENTRIES + "?encoding=text", headers=EVENTS
        ) as response:
            events = Events(response)
            assert (await events.next())["id"] == "0"
            await gateway.ask("DELETE", "/v1/ledgers/1")
            problem = await events.next()
            assert problem["event"] == "problem"
            assert orjson.loads(problem["data"])["code"] == "no-such-ledger"
            assert await events.ended()
        missing = await gateway.ask("GET", "/v1/ledgers/9/entries", headers=EVENTS)
        assert (missing.status, missing.code) == (404, "no-such-ledger")


async def test_tails_and_polls_end_when_the_gateway_is_about_to_end(gateway: Gateway) -> None:
    async with gateway.session.get(gateway.url + ENTRIES, headers=EVENTS) as response:
        async with asyncio.TaskGroup() as group:
            poll = group.create_task(gateway.ask("GET", ENTRIES + "?wait_ms=60000"))
            await until(lambda: gateway.engine.waiting == 2, "the tail and the poll wait")
            await gateway.drain()
        assert (poll.result().status, poll.result().json["entries"]) == (200, [])
        async with within("the server answers"):
            assert set(after_retry(await response.content.read()).split()) == {b":"}
    refused = await gateway.ask("POST", ENTRIES, json={"text": "a"})
    assert (refused.status, refused.code) == (503, "shutting-down")
    assert (await gateway.ask("GET", ENTRIES)).status == 200


async def test_what_came_of_a_line_is_counted_until_its_stream_ends(gateway: Gateway) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.listener.port)
    head = f"POST {ENTRIES} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
    writer.write(f"{head}Content-Length: {8 << 20}\r\n\r\n".encode() + b" " * (3 << 20))
    await until_held(gateway, 3 << 20, "what came is counted")
    writer.close()
    await until_nothing_held(gateway)


def test_a_line_that_came_while_this_process_stood_still_came_in_time() -> None:
    line = b'{"text":"' + b"x" * 1000 + b'"}'

    async def story(gateway: Gateway) -> None:
        await gateway.create()
        loop = asyncio.get_running_loop()
        time, standstill_s = loop.time, 0.0
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.listener.port)
        head = f"POST {ENTRIES} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson"
        length = f"Content-Length: {len(line)}"
        writer.write(f"{head}\r\n{length}\r\n\r\n".encode() + line[:500])
        await until_held(gateway, 500, "half of the line came")
        loop.time = lambda: time() + standstill_s  # type: ignore[method-assign]
        writer.write(line[500:])
        standstill_s = 3600.0
        async with within("the line is acknowledged"):
            reported = await reader.readuntil(b"\r\n\r\n")
        writer.close()

        assert reported.startswith(b"HTTP/1.1 200 ")
        assert gateway.engine.entries[1] == [b"x" * 1000]

    async def on_this_loop() -> None:
        async with running() as gateway:
            await story(gateway)

    # asyncio's own loop, whose clock can be moved.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(on_this_loop())


async def test_what_streams_took_is_given_back(gateway: Gateway) -> None:
    for _ in range(3):
        await gateway.ask("POST", ENTRIES, '{"text":"a"}\n{"text":1}\n', headers=NDJSON)
        await gateway.ask("POST", ENTRIES, '{"text":"a"}\n' * 100, headers=NDJSON)
        async with gateway.session.ws_connect(gateway.url + "/v1/ledgers/1/ws") as socket:
            await socket.send_str('{"text":"a"}')
            assert "last_entry" in await received(socket)

    async def is_all_given_back() -> bool:
        text = (await gateway.ask("GET", "/metrics")).body.decode()
        wanted = ("held_bytes 0.0", "waiters 0.0", "requests_in_work 1.0")
        return all(f"quorumlog_http_{line}\n" in text for line in wanted)

    await until(is_all_given_back, "nothing is held any more")
