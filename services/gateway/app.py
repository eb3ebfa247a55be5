"""Build the gateway's application around an engine."""

from collections.abc import Iterable

from aiohttp import web

from quorumlog.errors import QuorumLogError
from quorumlog.net.service import DRAINING, METRICS, add_shared_routes
from services.gateway.edge.body import Room, ignore_expect
from services.gateway.edge.cluster import SHARED, Cluster
from services.gateway.edge.entries import Entries
from services.gateway.edge.ledgers import Ledgers
from services.gateway.edge.limits import Limits
from services.gateway.edge.middleware import Metrics, edge_middleware
from services.gateway.edge.openapi import describe
from services.gateway.edge.operations import Route
from services.gateway.interface import EngineInterface

VERSION = "0.1.0"


def build_app(
    engine: EngineInterface, limits: Limits, *, cors_origins: Iterable[str] = ()
) -> web.Application:
    """The application that serves an engine. The caller starts and ends the engine itself."""
    app = web.Application()
    room = Room(limits)
    routes: list[Route] = [
        *Ledgers(engine, room).routes(),
        *Entries(engine, room).routes(),
        *Cluster(engine).routes(),
    ]
    description = describe([*(operation for operation, _ in routes), *SHARED], version=VERSION)

    async def ready() -> None:
        error: QuorumLogError | None = await engine.ready()
        if error is not None:
            raise error

    add_shared_routes(app, ready=ready, openapi=lambda: description, drain=engine.drain)
    app.middlewares.append(
        edge_middleware(
            room,
            Metrics(app[METRICS], room),
            is_draining=app[DRAINING].is_set,
            cors_origins=frozenset(cors_origins),
        )
    )
    for operation, handler in routes:
        app.router.add_route(
            operation.method, operation.path, handler, expect_handler=ignore_expect
        )
        if operation.method == "GET":
            app.router.add_route("HEAD", operation.path, handler, expect_handler=ignore_expect)
    return app
