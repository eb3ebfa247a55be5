"""Commits on the fast path, and which gateway answers a question about consumers."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from quorumlog.errors import NOT_DONE, NotTheOwner
from quorumlog.protocol.log.messages import (
    HERE,
    Consult,
    DrainAsked,
    Forward,
    LogRequest,
    OwnerLost,
    Wait,
)
from services.gateway.edge.direct import DirectRequests
from tests.unit.gateway.test_direct import Client
from tests.unit.logs.support import Http
from tests.unit.positions.test_http import LOG, ME, acquire, append, code, commit, served
from tests.unit.protocol.test_log_route import Hand


class Ways:
    """A connection to a gateway, and which way its requests went."""

    def __init__(self, http: Http, client: Client, taken: list[bool]) -> None:
        self.http, self.client, self.taken = http, client, taken

    async def answer(self, body: bytes, token: str | None, more: str = "") -> tuple[bool, bytes]:
        """Whether a commit was answered directly, and the answer."""
        self.taken.clear()
        self.client.send(_head(body, token, more) + body)
        answer = await self.client.answer()
        assert len(self.taken) <= 1
        return self.taken == [True], answer

    async def regular(self, body: bytes, token: str | None) -> bytes:
        """The answer to a commit that comes in two pieces, which is never answered directly."""
        self.taken.clear()
        self.client.send(_head(body, token, ""))
        await self.http.ask("GET", "/health/live")  # the head has come by now
        self.client.send(body)
        answer = await self.client.answer()
        assert True not in self.taken
        return answer


def _head(body: bytes, token: str | None, more: str) -> bytes:
    fencing = "" if token is None else f"Fencing-Token: {token}\r\n"
    return (
        f"PUT {ME} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{fencing}{more}\r\n"
    ).encode()


def plain(answer: bytes) -> bytes:
    """Without the time, ids of requests, and versions and times of rows."""
    answer = re.sub(rb"Date: [^\r]*", b"", answer)
    answer = re.sub(rb"X-Request-Id: [^\r]*|\"instance\":\"[^\"]*\"", b"", answer)
    return re.sub(rb'ETag: "\d+"|"version":\d+|"committed_at":"[^"]*"', b"", answer)


@pytest.fixture
async def ways(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ways]:
    taken: list[bool] = []
    original = DirectRequests.begin

    def begin(self: DirectRequests, *args: object) -> bool:
        taken.append(original(self, *args))  # type: ignore[arg-type]
        return taken[-1]

    monkeypatch.setattr(DirectRequests, "begin", begin)
    async with served() as (http, _), _connected(http, taken) as found:
        yield found


@asynccontextmanager
async def _connected(http: Http, taken: list[bool]) -> AsyncIterator[Ways]:
    at = urlsplit(http.urls[0])
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    client = Client(reader, writer)
    client.send(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await client.answer()).startswith(b"HTTP/1.1 200 ")
    try:
        yield Ways(http, client, taken)
    finally:
        writer.close()


async def held(http: Http) -> str:
    """The token of a lease. The gateway has the log's row in memory, and the positions."""
    token = str((await acquire(http, "w1")).json["lease"]["fencing_token"])
    assert (await commit(http, 1, Fencing_Token=token)).status == 200
    return token


async def test_a_direct_commit_is_answered_as_a_usual_one(ways: Ways) -> None:
    token = await held(ways.http)
    is_direct, direct = await ways.answer(b'{"offset":4}', token)
    regular = await ways.regular(b'{"offset": 4}', token)

    assert is_direct
    assert direct.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b'"offset":4,' in direct
    assert plain(direct) == plain(regular)
    shown = await ways.http.ask("GET", ME, at=1)
    assert shown.json["offset"] == 4
    assert shown.headers["ETag"].encode() in direct


async def test_a_direct_commit_is_refused_as_a_usual_one(ways: Ways) -> None:
    token = await held(ways.http)
    assert (await ways.answer(b'{"offset":4}', token))[0]
    behind = await ways.answer(b'{"offset":3}', token)
    assert behind[0]
    assert b'"code":"position-behind"' in behind[1]
    assert plain(behind[1]) == plain(await ways.regular(b'{"offset":3}', token))
    await ways.http.done("POST", f"{ME}/reset", {"to": 2})
    fenced = await ways.answer(b'{"offset":9}', token)
    assert fenced[0]
    assert b'"code":"lease-lost"' in fenced[1]
    assert plain(fenced[1]) == plain(await ways.regular(b'{"offset":9}', token))


async def test_a_direct_commit_reaches_records_that_were_appended_since(ways: Ways) -> None:
    token = await held(ways.http)
    assert (await ways.answer(b'{"offset":10}', token))[0]
    await append(ways.http, 5)
    is_direct, answer = await ways.answer(b'{"offset":15}', token)
    assert is_direct
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(
    ("body", "has_token", "more", "status"),
    [
        (b'{"offset":11}', True, "", 422),
        (b'{"offset":-1}', True, "", 422),
        (b'{"offset":04}', True, "", 400),
        (b'{"offset":4,"x":1}', True, "", 422),
        (b'{"offset":99999999999999999999}', True, "", 400),
        (b'{"offset":4}', False, "", 428),
        (b'{"offset":4}', True, 'If-Match: "1"\r\n', 412),
        (b'{"offset":4}', True, "If-None-Match: *\r\n", 412),
        (b'{"offset":4}', True, "Accept: text/html\r\n", 406),
        (b'{ "offset":4}', True, "", 200),
        (b'{"offset":4}', True, "Expect: 100-continue\r\n", 200),
    ],
)
async def test_what_is_not_plain_goes_the_usual_way(
    ways: Ways, body: bytes, has_token: bool, more: str, status: int
) -> None:
    token = await held(ways.http)
    is_direct, answer = await ways.answer(body, token if has_token else None, more)

    assert not is_direct
    assert f"HTTP/1.1 {status} ".encode() in answer


async def test_the_row_of_the_log_is_read_again_in_time(ways: Ways) -> None:
    """A commit of a log that was made again goes the usual way in the end, whose word it is."""
    token = await held(ways.http)
    assert (await ways.http.ask("DELETE", LOG)).status == 204
    assert (await ways.http.ask("PUT", LOG, {})).status == 201
    await append(ways.http, 3)
    assert (await ways.http.ask("POST", f"{ME}/reset", {"to": "earliest"})).status == 200
    old = await commit(ways.http, 2, Fencing_Token=token)
    assert code(old) == (409, "lease-lost")
    token = str((await acquire(ways.http, "w1")).json["lease"]["fencing_token"])
    assert b"HTTP/1.1 200 OK" in (await ways.answer(b'{"offset":2}', token))[1]


async def test_a_gateway_with_logs_answers_appends_directly_too(ways: Ways) -> None:
    """The headers of streams are no headers of all answers."""
    ledger = (await ways.http.ask("POST", "/v1/ledgers", {})).json["ledger_id"]
    ways.taken.clear()
    head = (
        f"POST /v1/ledgers/{ledger}/entries HTTP/1.1\r\nHost: localhost\r\n"
        "Content-Type: application/octet-stream\r\nContent-Length: 1\r\n\r\n"
    )
    ways.client.send(head.encode() + b"x")

    assert (await ways.client.answer()).startswith(b"HTTP/1.1 201 Created\r\n")
    assert ways.taken == [True]


def asked(hand: Hand, name: str, *, is_forwarded: bool = False) -> None:
    hand.hear(LogRequest(name, Consult(b"?"), is_forwarded=is_forwarded))


def remote(hand: Hand, name: str, **more: Any) -> None:
    """Asked where another process owns the log."""
    asked(hand, name, **more)
    hand.find_other()


def test_who_is_asked_without_an_owner_takes_the_log_over_and_answers_here() -> None:
    hand = Hand()
    asked(hand, "a")
    hand.own()
    asked(hand, "b", is_forwarded=True)
    assert hand.answers == {"a": HERE, "b": HERE}


def test_a_question_is_forwarded_to_the_owner_and_its_answer_relayed() -> None:
    hand = Hand()
    remote(hand, "a")
    assert hand.answer(Forward, b"!").call == Consult(b"?")
    assert hand.answers == {"a": b"!"}


def test_a_forwarded_question_goes_no_further() -> None:
    hand = Hand()
    remote(hand, "a")
    asked(hand, "b", is_forwarded=True)
    assert isinstance(hand.answers["b"], NotTheOwner)


def test_the_question_of_one_who_was_taken_for_the_owner_is_asked_again() -> None:
    hand = Hand()
    remote(hand, "a")
    hand.answer(Forward, NotTheOwner("no"))
    hand.answer(Wait, None)
    assert "a" not in hand.answers
    hand.own()
    assert hand.answers == {"a": HERE}


def test_a_question_is_asked_again_where_the_owner_was_lost_with_it() -> None:
    hand = Hand()
    remote(hand, "a")
    hand.answer(Forward, OwnerLost("broke", sent=True))
    assert "a" not in hand.answers


def test_a_gateway_that_ends_refuses_as_not_done() -> None:
    hand = Hand()
    hand.hear(DrainAsked("drain"))
    asked(hand, "a")
    assert isinstance(hand.answers["a"], NotTheOwner)
    assert hand.answers["a"].outcome == NOT_DONE
