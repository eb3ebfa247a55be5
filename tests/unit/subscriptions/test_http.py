"""Subscriptions over HTTP: what the protocol's own suite (tests/outside/conformance) does not ask. The ledgers are the model's."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from ipaddress import ip_network
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from loadtest.ports import free_ports
from quorumlog import errors
from quorumlog.net.listen import listening
from quorumlog.protocol import subscriptions as protocol
from quorumlog.protocol.log import LogMetadata
from services.gateway.app import build_app
from services.gateway.edge.http.limits import Limits
from services.gateway.logs import subscriptions as service
from services.gateway.logs.consumers import Consumers
from services.gateway.logs.values import STREAM_PREFIX
from services.gateway.streams import subscriptions as routes
from tests.model.logs.model import Cluster, Gateway
from tests.support.waiting import until
from tests.unit.gateway.fake_engine import FakeEngine
from tests.unit.logs.support import Answer, Http

ROOT = "/v1/stream/__ds"
SUB = f"{ROOT}/subscriptions/sub"
JSON = {"Content-Type": "application/json"}
CLOSES = JSON | {"Stream-Closed": "true"}
_SETTINGS = protocol.SubscriptionSettings("webhook", "*", (), "u", "", 1000, "")


@functools.cache
def ports() -> list[int]:
    return free_ports(3)


class Served(Http):
    """Two gateways whose logs the tests reach too, and a receiver."""

    def __init__(
        self, session: aiohttp.ClientSession, urls: list[str], gateways: list[Gateway]
    ) -> None:
        super().__init__(session, urls)
        self.gateways = gateways
        self.got: list[Any] = []
        self.status, self.answer = 200, b'{"done":true}'
        self.handler: Callable[[web.Request], Awaitable[web.Response]] | None = None
        self.url = f"http://127.0.0.1:{ports()[2]}/hook"

    async def receive(self, request: web.Request) -> web.Response:
        if self.handler is not None:
            return await self.handler(request)
        self.got.append(orjson.loads(await request.read()))
        return web.Response(status=self.status, body=self.answer)

    async def wake(self, count: int = 1) -> Any:
        """The last of so many wakes."""
        await until(lambda: _later(len(self.got) >= count), f"{count} wakes")
        return self.got[count - 1]

    async def append(self, path: str, *, at: int = 0) -> str:
        """Create a stream or append to it. Returns its end."""
        answer = await self.ask("POST", f"/v1/stream/{path}", {"n": 1}, at=at)
        if answer.status == 404:
            answer = await self.ask("PUT", f"/v1/stream/{path}", {"n": 1}, at=at)
        assert answer.status < 300, answer
        return str(answer.headers["Stream-Next-Offset"])

    async def put(self, **settings: Any) -> Answer:
        hook = {"type": "webhook", "webhook": {"url": self.url}, "pattern": "events/*"}
        return await self.ask("PUT", SUB, hook | settings)

    async def acked(self, path: str, offset: str) -> Any:
        async def is_acked() -> bool:
            shown = await self.done("GET", SUB)
            return {"path": path, "acked_offset": offset}.items() <= next(
                (each for each in shown["streams"] if each["path"] == path), {}
            ).items()

        return await until(is_acked, f"{path} is acknowledged up to {offset}")


async def _later(value: Any) -> Any:
    return value


@pytest.fixture
async def http() -> AsyncIterator[Served]:
    cluster = Cluster(1)
    gateways = [cluster.gateway(), cluster.gateway()]
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        urls, networks = [], (ip_network("127.0.0.0/8"),)
        for gateway, port in zip(gateways, ports(), strict=False):
            app = build_app(FakeEngine(), Limits(), logs=gateway.logs, webhook_networks=networks)
            listener = await stack.enter_async_context(listening(app, host="127.0.0.1", port=port))
            urls.append(f"http://127.0.0.1:{listener.port}")
            _ = gateway.logs.ownership.task(gateway.logs.subscriptions.run())
        served = Served(session, urls, gateways)
        receiver = web.Application()
        receiver.router.add_post("/hook", served.receive)
        await stack.enter_async_context(listening(receiver, host="127.0.0.1", port=ports()[2]))
        yield served
    for gateway in gateways:
        await gateway.end()


def spoken(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.json["error"]["code"]


def ack_of(wake: Any, offset: str, **more: Any) -> Any:
    acks = [{"stream": "events/a", "offset": offset}]
    return {"wake_id": wake["wake_id"], "generation": wake["generation"], "acks": acks} | more


async def test_a_wake_shows_what_is_pending_and_done_acknowledges_it(http: Served) -> None:
    before = await http.append("events/old")
    assert (await http.put()).status == 201
    assert (await http.put()).status == 200
    end = await http.append("events/a", at=1)
    wake = await http.wake()
    assert (wake["subscription_id"], wake["generation"]) == ("sub", 1)
    assert wake["callback_url"] == f"{http.urls[0]}{SUB}/callback"
    (old, new) = sorted(wake["streams"], key=lambda each: not each["path"].endswith("old"))
    assert (old["acked_offset"], old["has_pending"]) == (before, False)
    assert new == {
        "path": "events/a",
        "link_type": "glob",
        "acked_offset": "-1",
        "tail_offset": end,
        "has_pending": True,
    }
    await http.acked("events/a", end)
    end = await http.append("events/a", at=1)
    assert (await http.wake(2))["generation"] == 2
    await http.acked("events/a", end)


async def test_a_failed_delivery_is_retried_with_the_same_wake(http: Served) -> None:
    http.status = 503
    await http.put()
    end = await http.append("events/a")
    first = await http.wake()
    assert (await http.done("GET", SUB))["status"] == "failed"
    http.status = 200
    again = await http.wake(2)
    assert (again["wake_id"], again["generation"]) == (first["wake_id"], first["generation"])
    await http.acked("events/a", end)
    assert (await http.done("GET", SUB))["status"] == "active"


async def test_a_receiver_that_never_calls_back_gets_another_wake(http: Served) -> None:
    http.answer = b""
    await http.put(lease_ttl_ms=1000)
    end = await http.append("events/a")
    first = await http.wake()
    second = await http.wake(2)
    assert second["generation"] == first["generation"] + 1
    path = f"{SUB}/callback"
    stale = {"Authorization": f"Bearer {first['callback_token']}"}
    fresh = {"Authorization": f"Bearer {second['callback_token']}"}
    for headers, asked in ((stale, first), (stale, second), (fresh, first)):
        answer = await http.ask("POST", path, ack_of(asked, end), headers=headers)
        assert spoken(answer) == (409, "FENCED")
    for headers in ({}, {"Authorization": "Basic x"}, {"Authorization": "Bearer x"}):
        answer = await http.ask("POST", path, ack_of(second, end), headers=headers)
        assert spoken(answer) == (401, "TOKEN_INVALID")
    for offset in ("-1", "now", end.replace("1_", "9_")):
        answer = await http.ask("POST", path, ack_of(second, offset), headers=fresh)
        assert spoken(answer) == (409, "INVALID_OFFSET")
    answer = await http.ask("POST", path, ack_of(second, end), headers=fresh, at=1)
    assert answer.json == {"ok": True, "next_wake": False}
    answer = await http.ask("POST", path, ack_of(second, end, done=True), headers=fresh, at=1)
    assert answer.json == {"ok": True, "next_wake": False}
    assert spoken(await http.ask("POST", f"{SUB}/ack", ack_of(second, end), headers=fresh)) == (
        400,
        "INVALID_REQUEST",
    )


async def test_workers_claim_what_a_wake_stream_announces(http: Served) -> None:
    pull = {"type": "pull-wake", "streams": ["events/a"], "wake_stream": "wake/pool"}
    assert (await http.ask("PUT", SUB, pull)).status == 201
    end = await http.append("events/a")
    await asyncio.sleep(0.1)  # there is no wake stream yet
    assert (await http.ask("PUT", "/v1/stream/wake/pool", body=b"[]", headers=JSON)).status == 201

    async def announced() -> Any:
        return (await http.ask("GET", "/v1/stream/wake/pool")).json

    (event,) = await until(announced, "the wake is announced")
    assert event.items() >= {"type": "wake", "subscription_id": "sub", "stream": "events/a"}.items()
    claimed = await http.done("POST", f"{SUB}/claim", {"worker": "one"}, at=1)
    assert (claimed["generation"], claimed["streams"][0]["tail_offset"]) == (1, end)
    busy = await http.ask("POST", f"{SUB}/claim", {"worker": "two"})
    assert (
        busy.json["error"].items() >= {"code": "ALREADY_CLAIMED", "current_holder": "one"}.items()
    )
    token = {"Authorization": f"Bearer {claimed['token']}"}
    assert (
        await http.ask("POST", f"{SUB}/release", ack_of(claimed, end), headers=token)
    ).status == 204
    shown = (await http.done("GET", SUB))["streams"]
    assert shown[0]["acked_offset"] == "-1", "a release acknowledges nothing"
    claimed = await http.done("POST", f"{SUB}/claim", {"worker": "two"})
    token = {"Authorization": f"Bearer {claimed['token']}"}
    done = ack_of(claimed, end, done=True)
    assert (await http.ask("POST", f"{SUB}/ack", done, headers=token)).status == 200
    answer = await http.ask("POST", f"{SUB}/claim", {"worker": "two"})
    assert spoken(answer) == (409, "NO_PENDING_WORK")


async def test_streams_are_added_removed_deleted_and_created_again(http: Served) -> None:
    await http.put(pattern=None, streams=["/manual/a/"])
    assert (await http.ask("POST", f"{SUB}/streams", {"streams": ["events/a"]})).status == 204
    shown = (await http.done("GET", SUB))["streams"]
    assert [each["path"] for each in shown] == ["manual/a", "events/a"]
    end = await http.append("manual/a")
    await http.acked("manual/a", end)
    assert (await http.ask("DELETE", "/v1/stream/manual/a")).status == 204
    end = await http.append("manual/a")
    await http.acked("manual/a", end)
    for path in ("events%2Fa", "events/a"):
        assert (await http.ask("DELETE", f"{SUB}/streams/{path}")).status == 204
    assert [each["path"] for each in (await http.done("GET", SUB))["streams"]] == ["manual/a"]


async def test_a_deleted_subscription_is_not_told_and_takes_no_callback(http: Served) -> None:
    http.answer = b""
    await http.put()
    end = await http.append("events/a")
    wake = await http.wake()
    for _ in range(2):
        assert (await http.ask("DELETE", SUB)).status == 204
    token = {"Authorization": f"Bearer {wake['callback_token']}"}
    answer = await http.ask("POST", f"{SUB}/callback", ack_of(wake, end), headers=token)
    assert spoken(answer) == (404, "SUBSCRIPTION_NOT_FOUND")
    assert spoken(await http.ask("GET", SUB)) == (404, "SUBSCRIPTION_NOT_FOUND")
    await http.put()
    answer = await http.ask("POST", f"{SUB}/callback", ack_of(wake, end), headers=token)
    assert spoken(answer) == (409, "FENCED"), "that was another subscription of this name"


async def test_bad_requests_are_refused(http: Served) -> None:
    settings: dict[str, Any]
    for settings in (
        {"pattern": None},
        {"pattern": "", "streams": []},
        {"type": "push"},
        {"webhook": None},
        {"webhook": {}},
        {"type": "pull-wake"},
        {"type": "pull-wake", "wake_stream": "events/a", "streams": ["events/a"]},
        {"lease_ttl_ms": 999},
        {"lease_ttl_ms": 600_001},
        {"lease_ttl_ms": "1000"},
        {"streams": ["a"] * (protocol.STREAMS_MAX + 1)},
        {"streams": ["__ds/a"]},
        {"streams": ["a" * 300]},
        {"description": "a" * (routes.DESCRIPTION_CHARS_MAX + 1)},
        {"pattern": "a" * (routes.PATTERN_CHARS_MAX + 1)},
        {"pattern": "a\x01"},
        {"description": "a\nb"},
        {"webhook": {"url": "https://worker.example/\x7f"}},
    ):
        assert spoken(await http.put(**settings)) == (400, "INVALID_REQUEST"), settings
    for url in ("http://10.0.0.1/", "https://192.168.0.1/", "https://[::1]/", "nothing"):
        answer = await http.put(webhook={"url": url})
        assert spoken(answer) == (400, "WEBHOOK_URL_REJECTED")
    assert spoken(await http.ask("POST", f"{SUB}/claim", {"worker": "x"})) == (
        404,
        "SUBSCRIPTION_NOT_FOUND",
    )
    long = {"worker": "x" * (routes.WORKER_CHARS_MAX + 1)}
    assert spoken(await http.ask("POST", f"{SUB}/claim", long)) == (400, "INVALID_REQUEST")
    assert (await http.ask("GET", f"{ROOT}/jwks.json")).json == {"keys": []}
    answer = await http.ask("POST", f"{SUB}/callback", {}, headers={"Authorization": "Bearer x"})
    assert spoken(answer) == (401, "TOKEN_INVALID")
    await http.put()
    assert spoken(await http.put(description="another")) == (409, "SUBSCRIPTION_ALREADY_EXISTS")
    assert spoken(await http.ask("POST", f"{SUB}/streams", {"streams": []})) == (
        400,
        "INVALID_REQUEST",
    )
    assert spoken(await http.ask("POST", f"{SUB}/claim", {"worker": "x"})) == (
        400,
        "INVALID_REQUEST",
    )
    for path in (ROOT, f"{ROOT}/anything", f"{SUB}/else"):
        assert (await http.ask("PUT", path, {})).status in (400, 404, 405)


async def test_subscriptions_are_listed_in_pages(http: Served) -> None:
    assert await http.done("GET", f"{ROOT}/subscriptions") == {"subscriptions": [], "next": None}
    hook = {"type": "webhook", "webhook": {"url": http.url}, "pattern": "events/*"}
    for name in ("b", "a", "c"):
        assert (await http.ask("PUT", f"{ROOT}/subscriptions/{name}", hook)).status == 201
    page = await http.done("GET", f"{ROOT}/subscriptions?limit=2")
    assert ([each["id"] for each in page["subscriptions"]], page["next"]) == (["a", "b"], "b")
    page = await http.done("GET", f"{ROOT}/subscriptions?limit=2&after=b")
    assert ([each["id"] for each in page["subscriptions"]], page["next"]) == (["c"], None)
    assert (await http.ask("GET", f"{ROOT}/subscriptions?limit=101")).status in (400, 422)


async def test_a_stream_of_which_no_gateway_heard_is_found_in_the_list(
    http: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_ALL_S", 0.0)
    for gateway in http.gateways:
        monkeypatch.setattr(gateway.logs.subscriptions, "heard", lambda _name: None)
    await http.put(streams=["elsewhere"])
    await http.append("events/a")
    await http.append("elsewhere")
    await http.acked("events/a", await http.append("events/a"))
    await http.acked("elsewhere", await http.append("elsewhere"))


async def test_a_deleted_stream_is_unlinked_and_its_name_linked_anew_though_closed(
    http: Served,
) -> None:
    await http.put(streams=["events/a"])
    first = await http.append("events/a")
    await http.acked("events/a", first)
    closed = await http.ask("POST", "/v1/stream/events/a", headers=CLOSES)
    assert closed.status < 300, closed
    assert (await http.ask("DELETE", "/v1/stream/events/a")).status == 204
    second = await http.append("events/a")
    assert second != first
    await http.acked("events/a", second)


async def test_a_stream_without_an_open_ledger_is_not_polled(
    http: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for gateway in http.gateways:
        reader = gateway.logs.subscriptions._reader
        original = reader.fresh

        async def fresh(name: str, created: str | None, original: Any = original) -> Any:
            asked.append(name)
            return await original(name, created)

        monkeypatch.setattr(reader, "fresh", fresh)
    await http.put()
    made = await http.ask("PUT", "/v1/stream/events/a", headers=JSON)
    assert made.status == 201

    async def is_linked() -> bool:
        return bool((await http.done("GET", SUB))["streams"])

    async def is_quiet() -> bool:
        asked.clear()
        await asyncio.sleep(1.0)
        return not any(name.endswith("events_2Fa") for name in asked)

    await until(is_linked, "the stream is linked")
    await until(is_quiet, "the stream's row is not read again")
    await http.acked("events/a", await http.append("events/a"))


async def test_a_stream_that_is_added_keeps_its_pattern_and_its_beginning(
    http: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    for gateway in http.gateways:
        monkeypatch.setattr(gateway.logs.subscriptions, "heard", lambda _name: None)
    http.status = 503
    await http.put()
    await http.append("events/a")
    assert (await http.ask("POST", f"{SUB}/streams", {"streams": ["events/a"]})).status == 204
    assert (await http.ask("DELETE", f"{SUB}/streams/events/a")).status == 204
    (shown,) = (await http.done("GET", SUB))["streams"]
    assert (shown["link_type"], shown["acked_offset"]) == ("glob", "-1")


async def test_slow_receivers_and_deleted_subscriptions_keep_no_places(http: Served) -> None:
    slow = asyncio.Event()

    async def hang(request: web.Request) -> web.Response:
        http.got.append(orjson.loads(await request.read()))
        await slow.wait()
        return web.Response(body=b'{"done":true}')

    owner = next(each.logs.subscriptions for each in http.gateways)
    http.handler = hang
    await http.put()
    await http.append("events/a")
    await http.wake()
    rooms = [each.logs.subscriptions._room for each in http.gateways]
    full = service.DELIVERIES_MAX
    assert min(room._value for room in rooms) == full - 1
    assert (await http.ask("DELETE", SUB)).status == 204

    async def is_free() -> bool:
        return all(room._value == full for room in rooms)

    await until(is_free, "the delivery is cancelled")
    slow.set()
    row = protocol.Subscription("s", 1, _SETTINGS, "secret")
    assert owner._room_of(row) is owner._room
    assert owner._room_of(replace(row, attempts=1)) is owner._slow_room
    owner._slow.add("secret")
    assert owner._room_of(row) is owner._slow_room
    pull = replace(row, settings=replace(_SETTINGS, kind="pull-wake"))
    assert owner._room_of(pull) not in (owner._room, owner._slow_room)


async def test_the_deletion_of_a_stream_asks_nothing_by_itself(http: Served) -> None:
    await http.put()
    for gateway in http.gateways:
        gateway.logs.subscriptions.log_deleted(f"{STREAM_PREFIX}other", "1")
        assert gateway.logs.subscriptions.take_deleted() == {}


async def test_an_acknowledgement_whose_end_is_unknown_is_refused_as_retryable(
    http: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    http.answer = b""
    await http.put()
    end = await http.append("events/a")
    wake = await http.wake()
    token = {"Authorization": f"Bearer {wake['callback_token']}"}

    async def away(*_: Any, **__: Any) -> Any:
        raise errors.EntryUnavailable("its owner is away")

    for gateway in http.gateways:
        monkeypatch.setattr(gateway.logs.subscriptions._consumers, "end", away)
    done = ack_of(wake, end, done=True)
    answer = await http.ask("POST", f"{SUB}/callback", done, headers=token)
    assert (answer.status, answer.json["code"]) == (503, "entry-unavailable")


async def test_a_displaced_owner_limits_no_acknowledgement(
    http: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recovery has closed the stream's ledger above the end that the owner knows (rule 27b)."""
    http.answer = b""
    await http.put()
    await http.append("events/a")
    wake = await http.wake()
    token = {"Authorization": f"Bearer {wake['callback_token']}"}
    end, (gateway, _) = await http.append("events/a"), http.gateways
    item = (await gateway.logs.rows.row(f"{STREAM_PREFIX}events_2Fa")).last_item
    assert item is not None
    await gateway.recover(item.ledger_id)
    end_of = Consumers.end

    async def earlier(consumers: Consumers, row: LogMetadata) -> int:
        return await end_of(consumers, row) - 1

    monkeypatch.setattr(Consumers, "end", earlier)
    done = ack_of(wake, end, done=True)
    answer = await http.ask("POST", f"{SUB}/callback", done, headers=token)

    assert answer.status == 200, answer


async def test_no_more_deliveries_are_under_way_than_the_bound(http: Served) -> None:
    rooms = [gateway.logs.subscriptions._room for gateway in http.gateways]
    for room in rooms:
        while not room.locked():
            await room.acquire()
    await http.put()
    await http.append("events/a")
    await asyncio.sleep(0.3)
    assert not http.got
    for room in rooms:
        room.release()
    await http.wake()
    assert not any(gateway.logs.subscriptions.failures for gateway in http.gateways)


async def test_an_owner_reads_its_subscriptions_again_after_a_defect_of_its_store(
    http: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await http.put()
    await http.acked("events/a", await http.append("events/a"))
    mine = [gateway.logs.subscriptions for gateway in http.gateways]
    (owner,) = [each for each in mine if each.is_here]

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(owner._keeper, "step", broken)
    with pytest.raises(errors.QuorumLogError, match="internal error"):
        await owner.page("", after="", limit=1)
    assert not owner.kept
    http.got.clear()
    await http.append("events/a")  # no request about the subscription makes the owner read it
    await http.wake()


async def test_a_claim_without_keys_leaves_the_wake_to_others(
    http: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull = {"type": "pull-wake", "streams": ["events/a"], "wake_stream": "wake/pool"}
    assert (await http.ask("PUT", SUB, pull)).status == 201
    assert (await http.ask("PUT", "/v1/stream/wake/pool", body=b"[]", headers=JSON)).status == 201
    await http.append("events/a")

    async def away(_self: Any, **_: Any) -> Any:
        raise errors.EntryUnavailable("the keys can't be read now")

    with monkeypatch.context() as patched:
        patched.setattr(routes.SubscriptionRoutes, "_keys", away)
        answer = await http.ask("POST", f"{SUB}/claim", {"worker": "one"})
        assert (answer.status, answer.json["code"]) == (503, "entry-unavailable")
    claimed = await http.ask("POST", f"{SUB}/claim", {"worker": "two"})
    assert (claimed.status, claimed.json["generation"]) == (200, 1), claimed
