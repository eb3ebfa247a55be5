"""A peer that a test answers for: a real server with one handler."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from loadtest.ports import free_ports
from quorumlog.net.connections import ListenLimits
from quorumlog.net.listen import listening

HOST = "127.0.0.1"


@asynccontextmanager
async def answering(
    handle: Callable[[web.Request], Awaitable[web.StreamResponse]], path: str = "/{any:.*}"
) -> AsyncIterator[str]:
    """The URL of a server that answers requests of any method for a path, until the end of the block."""
    app = web.Application()
    app.router.add_route("*", path, handle)
    port = free_ports(1)[0]
    async with listening(app, host=HOST, port=port, limits=ListenLimits()):
        yield f"http://{HOST}:{port}"
