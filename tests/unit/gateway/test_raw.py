"""Requests as no library writes them, byte by byte: each is answered, none with a 5xx."""

import asyncio
import random

import orjson
import pytest

from quorumlog.net.connections import ListenLimits
from services.gateway.edge.http.limits import Limits
from services.gateway.interface import LedgerOptions
from tests.support.waiting import within
from tests.unit.gateway.conftest import Gateway, running

SEED = 20_261_122

CASES: list[tuple[int, bytes, bytes]] = [
    (204, b"OPTIONS * HTTP/1.1\r\nHost: localhost", b""),
    (421, b"GET http://other/v1/bookies HTTP/1.1\r\nHost: localhost", b""),
    (200, b"GET http://127.0.0.1/v1/bookies HTTP/1.1\r\nHost: localhost", b""),
    (400, b"GET http:///v1/bookies HTTP/1.1\r\nHost: localhost", b""),
    (404, b"CONNECT h:80 HTTP/1.1\r\nHost: localhost", b""),
    (404, b"GET // HTTP/1.1\r\nHost: localhost", b""),
    (400, b"GET /v1/ledgers/%zz HTTP/1.1\r\nHost: localhost", b""),
    (400, b"GET /v1/ledgers/1%00 HTTP/1.1\r\nHost: localhost", b""),
    (422, b"GET /v1/ledgers?%zz=1 HTTP/1.1\r\nHost: localhost", b""),
    (400, b"GET /v1/ledgers?limit=%zz HTTP/1.1\r\nHost: localhost", b""),
    (400, b"GET /v1/ledgers?limit=%ff HTTP/1.1\r\nHost: localhost", b""),
    (
        422,
        b"GET /v1/ledgers?"
        + b"&".join(b"a%d=1" % n for n in range(900))
        + b" HTTP/1.1\r\nHost: localhost",
        b"",
    ),
    (200, b"GET /v1/ledgers?metadata[%ff]=1 HTTP/1.1\r\nHost: localhost", b""),
    (200, b"GET /v1/ledgers?metadata[]= HTTP/1.1\r\nHost: localhost", b""),
    (422, b"GET /v1/ledgers?= HTTP/1.1\r\nHost: localhost", b""),
    (200, b"GET /v1/ledgers?&&& HTTP/1.1\r\nHost: localhost", b""),
    (200, b"GET /v1/ledgers? HTTP/1.1\r\nHost: localhost", b""),
    (200, b"GET /v1/ledgers# HTTP/1.1\r\nHost: localhost", b""),
    (404, b"GET /v1/ledgers;x HTTP/1.1\r\nHost: localhost", b""),
    (404, b"GET /v1/../v1/bookies HTTP/1.1\r\nHost: localhost", b""),
    (404, b"GET /v1/%2e%2e/bookies HTTP/1.1\r\nHost: localhost", b""),
    (421, b"GET /v1/bookies HTTP/1.1\r\nHost: ", b""),
    (421, b"GET /v1/bookies HTTP/1.1\r\nHost: a b", b""),
    (400, b"GET /v1/bookies HTTP/1.1\r\nHost: localhost\r\nHost: i", b""),
    (421, b"GET /v1/bookies HTTP/1.1\r\nHost: \xff\xfe", b""),
    (406, b"GET /v1/bookies HTTP/1.1\r\nHost: localhost\r\nAccept: \xff", b""),
    (406, b"GET /v1/bookies HTTP/1.1\r\nHost: localhost\r\nAccept: ,,;q=,a;q=nan", b""),
    (200, b"GET /v1/bookies HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: \xff", b""),
    (200, b"GET /v1/bookies HTTP/1.1\r\nHost: localhost\r\nCookie: a=\xff;;=;", b""),
    (400, b"GET /v1/ledgers/1/entries HTTP/1.1\r\nHost: localhost\r\nLedger-Password: \xff", b""),
    (
        400,
        b"GET /v1/ledgers/1/entries HTTP/1.1\r\nHost: localhost\r\nLedger-Password: a\r\nLedger-Password: b",
        b"",
    ),
    (
        415,
        b"POST /v1/ledgers HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Type: \xff",
        b"{}",
    ),
    (
        415,
        b"POST /v1/ledgers HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Type: application/json; charset=nonsense",
        b"{}",
    ),
    (
        201,
        b'POST /v1/ledgers HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Type: application/json; Charset="UTF-8"',
        b"{}",
    ),
    (
        501,
        b"POST /v1/ledgers HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: gzip, chunked",
        b"2\r\n{}\r\n0\r\n\r\n",
    ),
    (
        201,
        b"POST /v1/ledgers HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: Chunked",
        b"2\r\n{}\r\n0\r\n\r\n",
    ),
    *(
        (
            400,
            b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 0002"
            % path,
            b"{}",
        )
        for path in (b"/v1/ledgers", b"/v1/ledgers/1/entries", b"/v1/nothing")
    ),
    (
        200,
        b"GET /v1/bookies HTTP/1.1\r\nHost: localhost\r\nRange: bytes=0-1\r\nIf-Match: x\r\nIf-Modified-Since: x",
        b"",
    ),
    (200, b"GET /v1/bookies HTTP/1.0", b""),
    (
        200,
        b"GET /v1/bookies HTTP/1.1\r\nHost: localhost\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
        b"",
    ),
    (
        400,
        b"GET /v1/ledgers/1/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 99\r\nSec-WebSocket-Key: x",
        b"",
    ),
    (
        400,
        b"GET /v1/ledgers/1/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade",
        b"",
    ),
    (
        200,
        b"GET /v1/bookies HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade",
        b"",
    ),
    (400, b"PRI * HTTP/2.0", b"SM\r\n\r\n"),
    (400, b"GET /v1/bookies HTTP/2.0\r\nHost: localhost", b""),
    (400, b"GET /v1/bookies HTTP/0.9\r\nHost: localhost", b""),
    (400, b"GET /v1/bookies", b""),
    (400, b"GET /v1/ledgers/\xd9\xa1 HTTP/1.1\r\nHost: localhost", b""),
    (400, b"GET /\xff\xff HTTP/1.1\r\nHost: localhost", b""),
    (
        422,
        b"GET /v1/ledgers/1/entries?from=0&encoding=text HTTP/1.1\r\nHost: localhost\r\nLast-Event-ID: -2\r\nAccept: text/event-stream",
        b"",
    ),
    (
        200,
        b"HEAD /v1/ledgers/1/entries HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream",
        b"",
    ),
    (
        415,
        b"POST /v1/ledgers HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nTrailer: x",
        b"2\r\n{}\r\n0\r\nx: y\r\n\r\n",
    ),
    (200, b"GET /v1/bookies HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5", b"hello"),
    (400, b"DELETE /v1/ledgers/1 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2", b"{}"),
    (404, b"GET /internal/instance HTTP/1.1\r\nHost: localhost", b""),
    (201, b"POST /v1/ledgers HTTP/1.1\r\nHost: localhost\r\nExpect: x\r\nContent-Length: 0", b""),
    (400, b"GET /nope HTTP/1.1\r\nHost: localhost\r\nExpect: x", b""),
    (400, b"GET http://[::1/v1/bookies HTTP/1.1\r\nHost: localhost", b""),
    (400, b"GET http://a:99999/v1 HTTP/1.1\r\nHost: localhost", b""),
    (400, b"GET http:///v1/bookies HTTP/1.1\r\nHost: localhost", b""),
    (421, b"GET ftp://x/v1/bookies HTTP/1.1\r\nHost: localhost", b""),
    (400, b"CONNECT :::: HTTP/1.1\r\nHost: localhost", b""),
    (400, b"CONNECT ", b""),
    (400, b"CONNECT \r\n\r\nh:1 HTTP/1.1\r\nHost: localhost", b""),
    (400, b"CONNECT  HTTP/1.1\r\nHost: localhost", b""),
    (400, b"OPTIONS h HTTP/1.1\r\nHost: localhost", b""),
]
"""Status, head without its last two line ends, body."""

VALID = (
    b"POST /v1/ledgers/1/entries?expect=0 HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Content-Length: 12\r\nAccept: */*\r\nX-Request-Id: a\r\nLedger-Password: p\r\n\r\n{"text":"a"}'
)


async def _ask(gateway: Gateway, sent: bytes) -> tuple[int, bytes, bytes] | None:
    """Status, head and body of the answer; None where the connection ends without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.listener.port)
    try:
        writer.write(sent)
        async with within("the server answers"):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = [line for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
            wants_body = length and not sent.startswith(b"HEAD")
            body = await reader.readexactly(int(length[0].split()[1])) if wants_body else b""
        return int(head.split()[1]), head, body
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    finally:
        writer.close()


async def test_odd_requests_are_answered_in_order(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    await gateway.engine.create(LedgerOptions())

    for status, head, body in CASES:
        answer = await _ask(gateway, head + b"\r\n\r\n" + body)

        assert answer is not None, head
        assert answer[0] == status, (head, answer)
        assert b"x-request-id" in answer[1], head
        if status >= 400:
            assert orjson.loads(answer[2])["status"] == status, head
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_broken_requests_are_answered_or_cut(caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(SEED)
    limits = Limits(body_timeout_s=0.5)
    listen = ListenLimits(head_timeout_s=0.5, drain_timeout_s=0.5)
    async with running(limits=limits, listen=listen) as gateway:
        await gateway.engine.create(LedgerOptions())
        for _ in range(5):
            sent = [_broken(rng) for _ in range(40)]
            answers = await asyncio.gather(*(_ask(gateway, data) for data in sent))

            for data, answer in zip(sent, answers, strict=True):
                assert answer is None or answer[0] < 500, (SEED, data, answer)

        # Whatever came before, the next client is served.
        assert await _ask(gateway, b"GET /v1/bookies HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def _broken(rng: random.Random) -> bytes:
    """The valid request with some bytes changed, dropped, doubled or cut off."""
    data = bytearray(VALID)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.choice(b"\0\r\n :/%0Az\xff" + bytes([rng.randrange(256)]))
            case 1:
                del data[at : at + rng.randrange(1, 10)]
            case 2:
                data[at:at] = data[at : at + rng.randrange(1, 30)]
            case _:
                data[at:at] = rng.choice((b"\r\n", b"\r\n\r\n", b"\0", b"chunked", b"9" * 30))
        if not data:
            return b"\r\n"
    return bytes(data)
