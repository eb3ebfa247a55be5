"""The channel's version 1, a WebSocket, which the release before speaks."""

import asyncio
from collections.abc import Callable

import aiohttp
import pytest

from quorumlog.protocol.messages import Status
from quorumlog.wire import frames
from services.bookie.channel import Peer
from tests.bookie.support import KEY, ME, run_of
from tests.bookie.test_channel import Served, served
from tests.support.waiting import until, within

__all__ = ["served"]


@pytest.mark.parametrize("offered", [(), ("quorumlog.1",)])
async def test_requests_of_the_release_before_are_answered(
    served: Served, offered: tuple[str, ...]
) -> None:
    url = f"{served.url}/v1/channel"
    async with (
        within("it is answered"),
        served.session.ws_connect(url, protocols=offered) as socket,
    ):
        await socket.send_bytes(b"".join(frames.add_request(1, ME, KEY, run_of(7, range(9)))))
        ((added,),) = (frames.parse_answers(await socket.receive_bytes())[1],)
        await socket.send_bytes(b"".join(frames.read_request(2, ME, 7, 0, 9, bytes_max=1 << 20)))
        ((read,),) = (frames.parse_answers(await socket.receive_bytes())[1],)

    assert (added.status, added.request_id) == (Status.OK, 1)
    run, absent = frames.parse_read_body(read.body, read.run)
    assert run is not None
    assert (list(run.ids), absent) == (list(range(9)), ((9, 9),))
    assert socket.protocol == (offered[0] if offered else None)


async def test_a_peer_of_the_release_before_that_does_not_read_is_not_read_from(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.bookie.channel.IN_FLIGHT_BYTES_MAX", 4 << 20)
    waiting: list[Callable[[], None]] = []
    take = Peer._receive

    def held(peer: Peer, request: frames.Request, size: int) -> None:
        if request.op is not frames.Op.READ:
            take(peer, request, size)
            return
        peer._in_flight += 1
        peer._in_flight_bytes += size
        waiting.append(lambda: peer._answer(request, size, Status.UNKNOWN, -1, b"", b""))

    monkeypatch.setattr(Peer, "_receive", held)
    async with served.session.ws_connect(f"{served.url}/v1/channel") as socket:
        for number in range(20):
            message = frames.read_request(number, ME, 7, 0, 0, bytes_max=1 << 20)
            await socket.send_bytes(b"".join(message))
        await until(lambda: len(waiting) == 4, "as many as there is room for are taken")
        assert await served.add(run_of(8, [0])) is Status.OK, "others are served"
        assert len(waiting) == 4
        while waiting:
            waiting.pop()()
        await until(lambda: waiting, "an answer makes room for the next one")
        # It reads on, up to the goodbye.
        monkeypatch.setattr(Peer, "_receive", take)
        while waiting:
            waiting.pop()()


async def test_a_malformed_message_of_the_release_before_ends_its_channel(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        within("the channel ends"),
        served.session.ws_connect(f"{served.url}/v1/channel") as socket,
    ):
        await socket.send_bytes(b"x" * 100)
        message = await socket.receive()

    assert message.type in {aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED}
    await until(lambda: "channel-bad-frame" in caplog.text, "the bookie says why")


async def test_stopping_a_bookie_ends_the_channels_of_the_release_before(served: Served) -> None:
    async with (
        within("the channel ends"),
        served.session.ws_connect(f"{served.url}/v1/channel") as socket,
    ):
        await until(lambda: served.bookie.channels, "the channel is there")
        stopping = asyncio.ensure_future(served.bookie.stop())
        message = await socket.receive()
        await stopping

    assert message.type in {aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED}
