"""The resource /v1/logs: named logs, each as a whole."""

from aiohttp import web

from quorumlog.net.operations import Route
from quorumlog.net.parameters import Given, invalid
from services.gateway.edge import body
from services.gateway.edge import log_operations as op
from services.gateway.edge.access import Scope, caller_of
from services.gateway.edge.answers import json_value, no_content
from services.gateway.edge.log_models import (
    LogArchived,
    LogCreate,
    LogOpen,
    LogPatch,
    LogTruncate,
    log_json,
)
from services.gateway.edge.once import once_of
from services.gateway.edge.operations import IF_MATCH, NAME
from services.gateway.edge.room import Room
from services.gateway.logs.manager import LogManager
from services.gateway.logs.values import STREAM_PREFIX


class LogRoutes:
    """Handlers of logs."""

    def __init__(self, logs: LogManager, room: Room) -> None:
        self._logs = logs
        self._room = room

    async def put(self, request: web.Request, given: Given) -> web.Response:
        """PUT /v1/logs/{name}."""
        if given[NAME].startswith(STREAM_PREFIX):
            raise invalid(
                NAME.pointer, f"{STREAM_PREFIX} begins the names of streams: PUT /v1/stream/…"
            )
        wanted = await body.read_model(request, self._room, LogCreate)
        view, is_new = await self._logs.put(
            given[NAME],
            wanted.settings(),
            deletion_protection=wanted.deletion_protection,
            once=once_of(request, given, wanted),
        )
        headers = {"ETag": f'"{view.log.version}"'}
        if is_new:
            headers["Location"] = f"/v1/logs/{given[NAME]}"
        return json_value(log_json(view), 201 if is_new else 200, headers)

    async def get(self, _request: web.Request, given: Given) -> web.Response:
        """GET /v1/logs/{name}."""
        view = await self._logs.get(given[NAME])
        return json_value(log_json(view), headers={"ETag": f'"{view.log.version}"'})

    async def page(self, request: web.Request, given: Given) -> web.Response:
        """GET /v1/logs."""
        views, following = await self._logs.page(
            after=given[op.AFTER],
            limit=given[op.LIMIT],
            prefix=given[op.PREFIX] or "",
            shown=caller_of(request).listed(Scope.READ),
        )
        return json_value({"logs": [log_json(view) for view in views], "next": following})

    async def patch(self, request: web.Request, given: Given) -> web.Response:
        """PATCH /v1/logs/{name}."""
        wanted = await body.read_model(request, self._room, LogPatch)
        view = await self._logs.change(
            given[NAME],
            wanted.limits,
            deletion_protection=wanted.deletion_protection,
            expect=given[IF_MATCH],
            created_at=given[op.CREATED],
            once=once_of(request, given, wanted, given[IF_MATCH], given[op.CREATED]),
        )
        return json_value(log_json(view), headers={"ETag": f'"{view.log.version}"'})

    async def delete(self, _request: web.Request, given: Given) -> web.Response:
        """DELETE /v1/logs/{name}."""
        await self._logs.delete(given[NAME], created_at=given[op.CREATED])
        return no_content()

    async def close(self, request: web.Request, given: Given) -> web.Response:
        """POST /v1/logs/{name}/close."""
        once = once_of(request, given, given[op.CREATED])
        view = await self._logs.close(given[NAME], created_at=given[op.CREATED], once=once)
        return json_value(log_json(view))

    async def roll(self, _request: web.Request, given: Given) -> web.Response:
        """POST /v1/logs/{name}/roll."""
        return json_value(log_json(await self._logs.roll(given[NAME])))

    async def truncate(self, request: web.Request, given: Given) -> web.Response:
        """POST /v1/logs/{name}/truncate."""
        wanted = await body.read_model(request, self._room, LogTruncate)
        once = once_of(request, given, wanted, given[op.CREATED])
        view = await self._logs.truncate(
            given[NAME], wanted.before, created_at=given[op.CREATED], once=once
        )
        return json_value(log_json(view))

    async def archived(self, request: web.Request, given: Given) -> web.Response:
        """POST /v1/logs/{name}/archived."""
        wanted = await body.read_model(request, self._room, LogArchived)
        once = once_of(request, given, wanted, given[op.CREATED])
        view = await self._logs.archived(
            given[NAME],
            wanted.through,
            expect=wanted.expect,
            created_at=given[op.CREATED],
            once=once,
        )
        return json_value(log_json(view))

    async def open(self, request: web.Request, given: Given) -> web.Response:
        """POST /v1/logs/{name}/open."""
        wanted = await body.read_model(request, self._room, LogOpen)
        token, next_offset = await self._logs.open(
            given[NAME], wanted.owner, created_at=given[op.CREATED]
        )
        return json_value({"writer_token": token, "next_offset": next_offset})

    def routes(self) -> list[Route]:
        """The operations with their handlers."""
        return [
            Route(op.LIST, self.page),
            Route(op.PUT, self.put),
            Route(op.GET, self.get),
            Route(op.PATCH, self.patch),
            Route(op.DELETE, self.delete),
            Route(op.OPEN, self.open),
            Route(op.ROLL, self.roll),
            Route(op.TRUNCATE, self.truncate),
            Route(op.ARCHIVED, self.archived),
            Route(op.CLOSE, self.close),
        ]
