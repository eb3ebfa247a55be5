"""Builds autorecovery: one auditor, some workers, and what an operator may ask of them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final
from uuid import uuid4

import aiohttp
from aiohttp import web
from prometheus_client import Gauge
from pydantic import Field, ValidationError

from quorumlog.errors import InvalidRequest, QuorumLogError
from quorumlog.net.bookie_client import BookieClient
from quorumlog.net.directory import Directory
from quorumlog.net.metadata_client import MetadataClient
from quorumlog.net.ports import Ports
from quorumlog.net.repair_client import RepairClient
from quorumlog.net.service import METRICS, add_shared_routes, answers_problems
from quorumlog.net.timers import Tasks, Timers
from quorumlog.wire.bodies import Body, ServiceHeartbeat
from services.autorecovery.auditor import Auditor
from services.autorecovery.config import Config
from services.autorecovery.drains import decommissioned, drain_of
from services.autorecovery.worker import Done, Worker

_HEARTBEAT_S: Final = 1.0


class Delay(Body):
    """`PUT /v1/lost-bookie-delay`: the same value again means: look now."""

    seconds: float = Field(ge=0, le=86_400, strict=False)


def build(config: Config) -> web.Application:
    """The application; its work begins with it and ends with it."""
    app = web.Application(middlewares=[answers_problems])
    parts: dict[str, Auditor] = {}
    found: dict[str, MetadataClient] = {}
    done = Done()

    async def work(_app: web.Application) -> AsyncIterator[None]:
        name = str(uuid4())
        tasks, timers = Tasks(), Timers(asyncio.get_running_loop())
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            metadata = found["metadata"] = MetadataClient(config.metadata_urls, session)
            directory = Directory(metadata.bookies)
            bookies = BookieClient(directory.address, session)
            ports = Ports(bookies, metadata, directory, timers, tasks)
            repairs = RepairClient(metadata, name)
            auditor = parts["auditor"] = Auditor(name, config, metadata, repairs, ports, session)
            tasks.start(directory.follow())
            tasks.start(auditor.run())
            for _ in range(config.workers):
                tasks.start(Worker(repairs, directory, ports, session, done).run())
            tasks.start(_tell_that_it_lives(metadata, name, config.url))
            yield
            await tasks.close()
            timers.close()
            await bookies.close()

    async def ready() -> None:
        return

    async def status(_request: web.Request) -> web.Response:
        auditor = parts["auditor"]
        return web.json_response(
            {
                "auditor": auditor.is_auditor,
                "lost": list(auditor.lost),
                "draining": list(auditor.draining),
                "lost_bookie_delay_s": auditor.lost_bookie_delay_s,
                "repaired": done.repaired,
                "failed": done.failed,
            }
        )

    async def get_drain(request: web.Request) -> web.Response:
        drain = await drain_of(request.match_info["bookie"], found["metadata"])
        return web.json_response(drain.model_dump(mode="json"))

    async def decommission(request: web.Request) -> web.Response:
        await decommissioned(request.match_info["bookie"], found["metadata"])
        return web.Response(status=204)

    async def trigger(_request: web.Request) -> web.Response:
        parts["auditor"].trigger()
        return web.json_response({}, status=202)

    async def put_delay(request: web.Request) -> web.Response:
        try:
            delay = Delay.model_validate_json(await request.read())
        except ValidationError as error:
            raise InvalidRequest(str(error.errors()[0]["msg"])) from error
        parts["auditor"].set_delay(delay.seconds)
        return web.json_response({"seconds": delay.seconds})

    add_shared_routes(app, ready=ready, openapi=_description)
    app.router.add_get("/v1/status", status)
    app.router.add_get("/v1/drains/{bookie}", get_drain)
    app.router.add_delete("/v1/bookies/{bookie}", decommission)
    app.router.add_post("/v1/audits", trigger)
    app.router.add_put("/v1/lost-bookie-delay", put_delay)
    app.cleanup_ctx.append(work)
    registry = app[METRICS]
    gauges = {
        "quorumlog_autorecovery_is_auditor": ("This process audits", lambda: parts_auditor(parts)),
        "quorumlog_autorecovery_repaired": ("Items mended", lambda: done.repaired),
        "quorumlog_autorecovery_failed": ("Items put off", lambda: done.failed),
    }
    for metric, (text, value) in gauges.items():
        Gauge(metric, text, registry=registry).set_function(value)
    return app


def parts_auditor(parts: dict[str, Auditor]) -> int:
    """1 where this process audits."""
    return int("auditor" in parts and parts["auditor"].is_auditor)


async def _tell_that_it_lives(metadata: MetadataClient, name: str, url: str) -> None:
    while True:
        with contextlib.suppress(QuorumLogError):  # its own log line says that it is away
            await metadata.service_lives("autorecovery", name, ServiceHeartbeat(url=url))
        await asyncio.sleep(_HEARTBEAT_S)


def _description() -> dict[str, Any]:
    paths = {
        "/v1/status": {"get": "What this process does and has done"},
        "/v1/drains/{bookie}": {"get": "What still names a bookie, and why"},
        "/v1/bookies/{bookie}": {"delete": "Decommission a dead bookie that nothing names"},
        "/v1/audits": {"post": "Look at everything now"},
        "/v1/lost-bookie-delay": {"put": "How long a bookie may be away"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "quorumlog autorecovery", "version": "0.1.0"},
        "paths": {
            path: {
                method: {"summary": text, "responses": {"default": {"description": "JSON"}}}
                for method, text in methods.items()
            }
            for path, methods in paths.items()
        },
    }
