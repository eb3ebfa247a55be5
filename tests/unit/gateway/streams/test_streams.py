"""Streams over HTTP: what the protocol's own suite (tests/outside/conformance) does not ask. The ledgers are the model's."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

import aiohttp
import pytest

from loadtest.ports import free_ports
from quorumlog.errors import BadRequest
from quorumlog.net.listen import listening
from services.gateway.app import build_app
from services.gateway.edge.http.limits import Limits
from services.gateway.streams.config import StreamConfig
from services.gateway.streams.operations import log_of, offset_text
from tests.model.logs.model import Cluster, Gateway
from tests.unit.gateway.fake_engine import FakeEngine
from tests.unit.logs.support import Answer, Http

STREAM = "/v1/stream/chat/42"
LOG = "durable-stream.chat_2F42"
TEXT = {"Content-Type": "text/plain"}
JSON = {"Content-Type": "application/json"}
CLOSED = {"Stream-Closed": "true"}


class Served(Http):
    """A gateway whose logs the tests reach too."""

    def __init__(self, session: aiohttp.ClientSession, url: str, gateway: Gateway) -> None:
        super().__init__(session, [url])
        self.gateway = gateway

    async def put(self, headers: Mapping[str, str], body: bytes = b"") -> Answer:
        return await self.ask("PUT", STREAM, body=body, headers=headers)

    async def post(self, headers: Mapping[str, str], body: bytes = b"") -> Answer:
        return await self.ask("POST", STREAM, body=body, headers=headers)


@contextlib.asynccontextmanager
async def served(**limits: float) -> AsyncIterator[Served]:
    gateway = Cluster(1).gateway()
    app = build_app(FakeEngine(), Limits.model_validate(limits), logs=gateway.logs)
    async with (
        listening(app, host="127.0.0.1", port=free_ports(1)[0]) as listener,
        aiohttp.ClientSession() as session,
    ):
        yield Served(session, f"http://127.0.0.1:{listener.port}", gateway)
    await gateway.end()


@pytest.fixture
async def http() -> AsyncIterator[Served]:
    async with served() as found:
        yield found


def place(offset: int, creation: int = 1) -> str:
    """An offset as the stream of a name gives it out that is the first, second, … one of the model."""
    return offset_text(offset, f"2026-01-02T03:04:05.{creation:06}Z")


def producer(seq: int, epoch: int = 0) -> dict[str, str]:
    return TEXT | {"Producer-Id": "p", "Producer-Epoch": str(epoch), "Producer-Seq": str(seq)}


def test_two_paths_never_have_one_log() -> None:
    paths = ["a/b", "a_b", "a_2Fb", "a%2Fb", "a.b", "a-b", "a", "A", "é", "a b"]
    assert log_of("chat/42") == LOG
    assert len({log_of(path) for path in paths}) == len(paths)
    with pytest.raises(BadRequest):
        log_of("x" * 186)


@pytest.mark.parametrize(
    "headers",
    [
        {"Stream-Seq": "s" * 256},
        {**producer(0), "Producer-Id": "p" * 256},
        {**producer(0), "Producer-Seq": str(2**53)},
        {"Content-Type": f"text/{'x' * 255}"},
    ],
    ids=["seq", "id", "number", "type"],
)
async def test_what_is_beyond_a_bound_is_400_and_changes_nothing(
    http: Served, headers: dict[str, str]
) -> None:
    assert (await http.put(TEXT)).status == 201

    assert (await http.post(TEXT | headers, b"x")).status == 400
    assert (await http.ask("GET", STREAM)).body == b""


async def test_json_comes_back_byte_by_byte(http: Served) -> None:
    await http.put(JSON)
    await http.post(JSON, b' [ {"a" : 1e400}, 123456789012345678901234567890,"\\u00e9" ] ')
    await http.post(JSON, b'{"a":1,"a":2}')

    found = await http.ask("GET", STREAM)
    assert found.body == b'[{"a" : 1e400},123456789012345678901234567890,"\\u00e9",{"a":1,"a":2}]'
    for broken in (b"NaN", b"[1,]", b"[1] 2", b"{", b"\xff", b"[" * 100_000):
        assert (await http.post(JSON, broken)).status == 400


async def test_a_creation_that_broke_off_is_found_by_nobody_and_is_finished_or_deleted(
    http: Served,
) -> None:
    await http.gateway.logs.create(LOG, StreamConfig("text/plain").settings("records"))

    assert (await http.ask("GET", STREAM)).status == 404
    assert (await http.post(TEXT, b"too early")).status == 404
    assert (await http.put(TEXT)).status == 409
    assert (await http.put(TEXT, b"first")).status == 201
    assert (await http.ask("GET", STREAM)).body == b"first"
    assert (await http.put(TEXT, b"again")).status == 200
    assert (await http.ask("GET", STREAM)).body == b"first"

    assert (await http.ask("DELETE", STREAM)).status == 204
    await http.gateway.logs.create(LOG, StreamConfig("text/plain").settings("records"))
    assert (await http.ask("DELETE", STREAM)).status == 204
    assert (await http.put(TEXT)).status == 201


async def test_of_creations_at_once_one_is_new_and_its_body_stays(http: Served) -> None:
    bodies = [b"%d" % n for n in range(8)]
    done = await asyncio.gather(*(http.put(TEXT, body) for body in bodies))

    assert sorted(answer.status for answer in done) == [200] * 7 + [201]
    new = next(n for n, answer in enumerate(done) if answer.status == 201)
    assert (await http.ask("GET", STREAM)).body == bodies[new]


async def test_a_stream_that_has_expired_is_gone_and_its_path_is_free(http: Served) -> None:
    past = {"Stream-Expires-At": "2020-01-02T03:04:05Z"}
    assert (await http.put(TEXT | past, b"old")).status == 201
    assert (await http.ask("GET", STREAM)).status == 404
    assert (await http.put(TEXT | past, b"old")).status == 201
    assert (await http.put(TEXT, b"new")).status == 201
    assert (await http.ask("GET", STREAM)).body == b"new"


async def test_a_sliding_ttl_is_told_and_a_repeat_has_the_same(http: Served) -> None:
    ttl = {"Stream-TTL": "3600"}
    assert (await http.put(TEXT | ttl, b"a")).status == 201
    assert (await http.put(TEXT | ttl, b"a")).status == 200
    for others in ({"Stream-TTL": "60"}, {"Stream-Expires-At": "2120-01-02T03:04:05Z"}, {}):
        assert (await http.put(TEXT | others, b"a")).status == 409
    assert (await http.ask("HEAD", STREAM)).headers["Stream-TTL"] == "3600"
    # Of what a cache answers nobody here knows.
    cached = (await http.ask("GET", STREAM)).headers["Cache-Control"]
    assert cached == "public, max-age=60"
    for wrong in ("-1", "01", "1.5", "x", str(2**53)):
        refused = await http.ask("PUT", "/v1/stream/other", headers={"Stream-TTL": wrong})
        assert refused.status == 400, wrong


async def test_a_stream_of_no_ttl_is_gone_once_it_is_made(http: Served) -> None:
    for _ in range(2):
        assert (await http.put(TEXT | {"Stream-TTL": "0"}, b"a")).status == 201
        assert (await http.ask("GET", STREAM)).status == 404
    assert (await http.put(TEXT)).status == 201


@pytest.mark.parametrize(
    "over", [{"Stream-TTL": "0"}, {"Stream-Expires-At": "2020-01-02T03:04:05Z"}], ids=["ttl", "at"]
)
async def test_a_protected_stream_does_not_expire(http: Served, over: dict[str, str]) -> None:
    assert (await http.put(TEXT | over)).status == 201
    await http.gateway.logs.change(LOG, {}, deletion_protection=True)
    assert (await http.ask("GET", STREAM)).status == 200
    await http.gateway.logs.change(LOG, {}, deletion_protection=False)
    assert (await http.ask("GET", STREAM)).status == 404


async def test_native_appends_are_refused_after_the_end(http: Served) -> None:
    await http.put(TEXT, b"a")
    done = await http.post(TEXT | CLOSED, b"z")
    assert (done.status, done.headers["Stream-Closed"]) == (204, "true")

    native = await http.ask("POST", f"/v1/logs/{LOG}/records", {"text": "after"})
    assert (native.status, native.json["code"]) == (409, "log-closed")
    read = await http.ask("GET", f"/v1/logs/{LOG}/records?encoding=text")
    assert [entry["text"] for entry in read.json["records"]] == ["a", "z"]
    assert read.json["closed"] is True


async def test_no_other_log_has_the_prefix_of_streams(http: Served) -> None:
    refused = await http.ask("PUT", f"/v1/logs/{LOG}", {})
    assert refused.status == 422
    assert (await http.put(TEXT)).status == 201


async def test_a_producer_is_told_what_the_protocol_says(http: Served) -> None:
    await http.put(TEXT)
    first = await http.post(producer(0), b"a")
    assert (first.status, first.headers["Producer-Seq"]) == (200, "0")
    assert (await http.post(producer(1), b"b")).status == 200
    again = await http.post(producer(0), b"another body")
    assert (again.status, again.headers["Producer-Seq"]) == (204, "1")
    gap = await http.post(producer(5), b"x")
    expected = gap.headers["Producer-Expected-Seq"], gap.headers["Producer-Received-Seq"]
    assert (gap.status, *expected) == (409, "2", "5")
    assert (await http.post(producer(1, epoch=1), b"x")).status == 400
    assert (await http.post(producer(0, epoch=1), b"c")).status == 200
    stale = await http.post(producer(2), b"x")
    assert (stale.status, stale.headers["Producer-Epoch"]) == (403, "1")
    assert (await http.ask("GET", STREAM)).body == b"abc"


async def test_events_tell_each_place_once_and_keep_an_idle_connection_open() -> None:
    async with served(comment_every_s=0.02) as http:
        await http.put(TEXT, b"a")
        async with http.session.get(http.urls[0] + STREAM + "?offset=-1&live=sse") as response:
            seen = b""
            while seen.count(b"\n:\n") < 3:
                seen += await response.content.readany()
            await http.post(TEXT | CLOSED, b"z")
            seen += await response.content.read()
    places = [line for line in seen.splitlines() if b"streamNextOffset" in line]
    assert len(places) == len(set(places)) == 2
    assert b'"streamClosed":true' in places[-1]
