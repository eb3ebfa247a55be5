"""Sessions with other services: connections of a burst do not stay in use by turns, and no answer leads elsewhere, and each
request says who must answer.
"""

import asyncio
from functools import partial

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from quorumlog.net.identity import Role
from quorumlog.net.sessions import ExpectedServer, service_session
from tests.support.waiting import within

BOOKIE = ExpectedServer(Role.BOOKIE, "bookie-1")
BURST = 8


async def test_requests_one_after_another_use_one_connection_of_those_that_a_burst_opened() -> None:
    ports: set[object] = set()
    all_are_there = asyncio.Barrier(BURST)

    async def at_once(_request: web.Request) -> web.Response:
        await all_are_there.wait()
        return web.Response()

    async def one(request: web.Request) -> web.Response:
        assert request.transport is not None
        ports.add(request.transport.get_extra_info("peername"))
        return web.Response()

    app = web.Application()
    app.router.add_get("/at-once", at_once)
    app.router.add_get("/one", one)
    async with TestServer(app) as server, service_session() as session:

        async def ask(path: str) -> None:
            async with session.get(server.make_url(path), ssl=BOOKIE) as answer:
                await answer.read()

        async with within("the burst is answered"):
            await asyncio.gather(*(ask("/at-once") for _ in range(BURST)))
        for _ in range(2 * BURST):
            await ask("/one")

    assert len(ports) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("method", ["GET", "POST", "socket"])
async def test_a_service_that_redirects_sends_nobody_elsewhere(method: str, status: int) -> None:
    """A bookie that was taken over could have a gateway ask others, with the gateway's certificate."""
    reached: list[str] = []

    async def redirect(_request: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": "/elsewhere"})

    async def elsewhere(request: web.Request) -> web.Response:
        reached.append(request.path)
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/here", redirect)
    app.router.add_route("*", "/elsewhere", elsewhere)
    async with TestServer(app) as server, service_session() as session:
        url = server.make_url("/here")
        is_socket = method == "socket"
        asked = session.ws_connect if is_socket else partial(session.request, method)
        with pytest.raises(aiohttp.ClientResponseError) as refused:
            await asked(url, ssl=BOOKIE)

    assert refused.value.status == status
    assert reached == []


async def test_a_request_that_does_not_say_who_must_answer_is_not_sent() -> None:
    async with service_session() as session:
        with pytest.raises(TypeError, match="must answer"):
            await session.get("http://127.0.0.1:1/")
