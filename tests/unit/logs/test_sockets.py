"""A log over one WebSocket: appends with cumulative acknowledgements, and the tail."""

import struct

import aiohttp
import pytest

from tests.unit.gateway.conftest import received
from tests.unit.logs.support import Http
from tests.unit.logs.test_http import LOG, RECORDS, appended, code, http, log

__all__ = ["http", "log"]


async def test_a_socket_appends_and_tells_what_is_acknowledged(log: Http) -> None:
    async with log.session.ws_connect(log.urls[0] + LOG + "/ws") as socket:
        await socket.send_str('{"text":"a","key":"k"}')
        first = await received(socket)
        await socket.send_bytes(struct.pack(">I", 1) + b"b" + struct.pack(">I", 0))
        await socket.send_str('{"records":[{"text":"d"},{"text":"e"}]}')
        last = first["last_offset"]
        while last < 4:
            reported = await received(socket)
            assert reported["first_offset"] == last + 1
            last = reported["last_offset"]

    assert first == {"first_offset": 0, "last_offset": 0}
    found = (await log.ask("GET", f"{RECORDS}?encoding=text")).json["records"]
    assert [record["text"] for record in found] == ["a", "b", "", "d", "e"]
    assert [record["key"] for record in found] == ["k", None, None, None, None]


async def test_a_socket_follows_the_tail_to_the_end(log: Http) -> None:
    await appended(log, {"records": [{"text": "a"}, {"text": "b"}]})

    async with log.session.ws_connect(log.urls[0] + LOG + "/ws") as socket:
        await socket.send_str('{"tail":{"from":1,"encoding":"text"}}')
        page = await received(socket)
        assert ([record["text"] for record in page["records"]], page["next"]) == (["b"], 2)
        await appended(log, {"text": "c"})
        assert [record["offset"] for record in (await received(socket))["records"]] == [2]
        assert (await log.ask("POST", f"{LOG}/close")).status == 200
        assert await received(socket) == {"end": {"next_offset": 3}}


async def test_a_socket_follows_the_tail_as_frames(log: Http) -> None:
    await appended(log, {"records": [{"text": "a"}, {"text": ""}]})

    async with log.session.ws_connect(log.urls[0] + LOG + "/ws") as socket:
        await socket.send_str('{"tail":{"from":"earliest","encoding":"frames"}}')

        expected = struct.pack(">QI", 0, 1) + b"a" + struct.pack(">QI", 1, 0)
        assert await received(socket) == expected


@pytest.mark.parametrize(
    "message",
    ['{"text":1}', '{"tail":{"from":"x"}}', '{"tail":{"from":-1.5}}', '{"tail":[]}', "{}"],
)
async def test_a_wrong_message_is_a_problem_that_ends_the_socket(log: Http, message: str) -> None:
    async with log.session.ws_connect(log.urls[0] + LOG + "/ws") as socket:
        await socket.send_str(message)

        assert (await received(socket))["code"] == "invalid"
        assert await received(socket) == aiohttp.WSCloseCode.POLICY_VIOLATION
    assert (await log.ask("GET", LOG)).json["next_offset"] == 0


async def test_only_logs_that_are_there_have_sockets(log: Http) -> None:
    assert code(await log.ask("GET", LOG + "/ws")) == (400, "bad-request")
    assert code(await log.ask("GET", "/v1/logs/other/ws")) == (404, "no-such-log")


async def test_a_socket_follows_some_records_and_tells_how_far_it_looked(log: Http) -> None:
    keys = ("a", "b", "ab", "a")
    records = [{"text": f"{n}", "key": key, "headers": {"h": key}} for n, key in enumerate(keys)]
    await appended(log, {"records": records})

    for asked, offsets in (
        ('"key":"a"', [0, 3]),
        ('"key_prefix":"a"', [0, 2, 3]),
        ('"header":{"h":"b"}', [1]),
        ('"key":"none"', []),
    ):
        async with log.session.ws_connect(log.urls[0] + LOG + "/ws") as socket:
            await socket.send_str(f'{{"tail":{{"encoding":"text",{asked}}}}}')
            page = await received(socket)
            assert ([each["offset"] for each in page["records"]], page["next"]) == (offsets, 4)


@pytest.mark.parametrize("asked", ['"key":1', '"header":[]', '"header":{"h":1}', '"keys":"a"'])
async def test_a_wrong_filter_is_a_problem(log: Http, asked: str) -> None:
    async with log.session.ws_connect(log.urls[0] + LOG + "/ws") as socket:
        await socket.send_str(f'{{"tail":{{"from":0,{asked}}}}}')

        assert (await received(socket))["code"] == "invalid"
