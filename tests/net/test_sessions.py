"""Connections of a burst do not stay in use by turns."""

import asyncio

from aiohttp import web
from aiohttp.test_utils import TestServer

from quorumlog.net.sessions import service_session
from tests.support.waiting import within

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
            async with session.get(server.make_url(path)) as answer:
                await answer.read()

        async with within("the burst is answered"):
            await asyncio.gather(*(ask("/at-once") for _ in range(BURST)))
        for _ in range(2 * BURST):
            await ask("/one")

    assert len(ports) == 1
