"""WebSockets of the protocol `quorumlog.appends`: each message is one append with one answer."""

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from quorumlog import header
from quorumlog.errors import QuorumTimeout
from quorumlog.wire.token_bodies import TokenQuotas
from services.gateway.edge.access.quotas import Usage
from services.gateway.edge.http.limits import Limits
from tests.support.waiting import turns, until, within
from tests.unit.gateway.conftest import Gateway, received, running, until_nothing_held

PATH = "/v1/ledgers/1/ws"


def frames(*payloads: bytes) -> bytes:
    return b"".join(struct.pack(">I", len(payload)) + payload for payload in payloads)


@asynccontextmanager
async def appending(
    gateway: Gateway, **headers: str
) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    async with gateway.session.ws_connect(
        gateway.url + PATH, protocols=(header.APPENDS_PROTOCOL,), headers=headers
    ) as socket:
        assert socket.protocol == header.APPENDS_PROTOCOL
        yield socket


async def test_each_message_is_one_append_with_the_answer_of_http(gateway: Gateway) -> None:
    await gateway.create()
    # More than one run of a stream without the protocol.
    large = [bytes(1 << 20)] * 3

    async with appending(gateway) as socket:
        await socket.send_bytes(frames(b"a"))
        await socket.send_str('{"entries":[{"text":"b"},{"text":"c"}]}')
        await socket.send_bytes(frames(*large))
        answers = [await received(socket) for _ in range(3)]

    assert answers == [
        {"ledger_id": 1, "first_entry": first, "last_entry": last, "last_add_confirmed": last}
        for first, last in ((0, 0), (1, 2), (3, 5))
    ]
    assert gateway.engine.entries[1] == [b"a", b"b", b"c", *large]
    await until_nothing_held(gateway)


async def test_a_wrong_message_ends_the_socket_before_what_follows_it(gateway: Gateway) -> None:
    await gateway.create()
    gateway.engine.gate = asyncio.Event()

    async with appending(gateway) as socket:
        await socket.send_bytes(frames(b"before"))
        await until(lambda: gateway.engine.appending == 1, "the first one is under way")
        await socket.send_bytes(b"\0\0\0\1")
        await socket.send_bytes(frames(b"behind"))
        gateway.engine.gate.set()
        assert (await received(socket))["last_entry"] == 0
        problem = await received(socket)
        assert await received(socket) == aiohttp.WSCloseCode.POLICY_VIOLATION

    assert (problem["code"], problem["outcome"]) == ("bad-request", "not-done")
    assert gateway.engine.entries[1] == [b"before"]
    await until_nothing_held(gateway)


async def test_an_unknown_outcome_ends_the_socket_before_what_follows_it(gateway: Gateway) -> None:
    await gateway.create()
    gateway.engine.gate = asyncio.Event()

    async with appending(gateway) as socket:
        await socket.send_bytes(frames(b"first"))
        await until(lambda: gateway.engine.appending == 1, "the first one is under way")
        await socket.send_bytes(frames(b"behind"))
        gateway.engine.fails = QuorumTimeout("late")
        gateway.engine.gate.set()
        problem = await received(socket)
        assert await received(socket) == aiohttp.WSCloseCode.POLICY_VIOLATION

    assert (problem["code"], problem["outcome"]) == ("quorum-timeout", "unknown")
    await until_nothing_held(gateway)


async def test_a_gateway_about_to_end_answers_only_what_it_took(gateway: Gateway) -> None:
    await gateway.create()

    async with appending(gateway) as socket:
        gateway.engine.gate = asyncio.Event()
        await socket.send_bytes(frames(b"taken"))
        await until(lambda: gateway.engine.appending == 1, "it is under way")
        await socket.send_bytes(frames(b"behind"))
        async with asyncio.TaskGroup() as group:
            group.create_task(gateway.drain())
            await turns(5)
            gateway.engine.gate.set()
            assert (await received(socket))["last_entry"] == 0
            problem = await received(socket)

    assert (problem["code"], problem["outcome"]) == ("shutting-down", "not-done")
    assert gateway.engine.entries[1] == [b"taken"]


async def test_a_message_beyond_the_room_gets_the_problem_before_it_is_whole() -> None:
    async with running(limits=Limits(held_bytes_max=4 << 20)) as gateway:
        await gateway.create()

        async with appending(gateway) as socket:
            await socket.send_bytes(frames(b"small"))
            assert (await received(socket))["last_entry"] == 0
            sending = asyncio.ensure_future(socket.send_bytes(bytes(7 << 20)))
            problem = await received(socket)
            assert (problem["code"], problem["outcome"]) == ("overloaded", "not-done")
            await asyncio.wait({sending})
            sending.exception()
        assert gateway.engine.entries[1] == [b"small"]
        await until_nothing_held(gateway)


async def test_a_socket_whose_client_leaves_gives_everything_back(gateway: Gateway) -> None:
    await gateway.create()
    gateway.engine.gate = asyncio.Event()

    async with appending(gateway) as socket:
        await socket.send_bytes(frames(b"a" * 1000))
        await until(lambda: gateway.engine.appending == 1, "it is under way")
    gateway.engine.gate.set()

    async with within("the append goes on"):
        await until(lambda: gateway.engine.entries[1] == [b"a" * 1000], "it is there")
    await until_nothing_held(gateway)


async def test_a_wrong_password_is_told_as_by_http(gateway: Gateway) -> None:
    await gateway.create(password="p", digest="hmac-sha256")

    async with appending(gateway, **{header.LEDGER_PASSWORD: "q"}) as socket:
        await socket.send_bytes(frames(b"x"))
        assert (await received(socket))["code"] == "wrong-password"
    async with appending(gateway, **{header.LEDGER_PASSWORD: "p"}) as socket:
        await socket.send_bytes(frames(b"x"))
        assert (await received(socket))["last_entry"] == 0


async def test_the_messages_of_a_socket_wait_for_the_quotas_of_its_token() -> None:
    now = 100.0
    usage = Usage("a token", TokenQuotas(requests_per_s=2, bytes_per_s=1000), lambda: now)

    assert usage.take_message(10) == 0
    assert usage.take_message(3000) == 0
    # The rate has to make up for 2010 bytes and one more.
    assert usage.take_message(10) == 2.011
    now += 3600
    assert [usage.take_message(0) for _ in range(4)] == [0, 0, 0.5, 1.0]
