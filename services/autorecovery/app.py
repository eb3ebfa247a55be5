"""Builds autorecovery: an auditor, a checker, workers, and the routes for operators."""

from collections.abc import AsyncIterator

from aiohttp import web

from quorumlog.net.audit import audited
from quorumlog.net.openapi import describe
from quorumlog.net.operations import add_routes
from quorumlog.net.service import METRICS, add_shared_routes, answers_problems
from quorumlog.wire.versions import CHANNEL, RELEASE, shown
from services.autorecovery.config import Config
from services.autorecovery.handlers import ROUTES
from services.autorecovery.measures import Measures
from services.autorecovery.parts import PARTS, running


def build(config: Config) -> web.Application:
    """Build the application, which runs its background work from startup to cleanup."""
    app = web.Application(middlewares=[answers_problems])

    async def work(app: web.Application) -> AsyncIterator[None]:
        async with running(config) as parts:
            app[PARTS] = parts
            yield

    async def ready() -> None:
        return

    operations = [route.operation for route in ROUTES]
    add_shared_routes(
        app,
        ready=ready,
        openapi=lambda: describe(operations, title="quorumlog autorecovery", version=RELEASE),
        hosts=config.hosts,
        authenticator=config.authenticator,
        formats={"channel": shown(CHANNEL)},
        audited=audited(operations),
    )
    add_routes(app, ROUTES)
    app.cleanup_ctx.append(work)
    app[METRICS].register(Measures(app))
    return app
