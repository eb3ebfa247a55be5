"""The resource /v1/logs/{name}/consumers: how far each has read, and who is its active worker."""

from aiohttp import web

from quorumlog.errors import PreconditionRequired
from quorumlog.net.operations import Route
from quorumlog.net.parameters import Given
from quorumlog.protocol.positions import Position
from services.gateway.edge import body
from services.gateway.edge import consumer_operations as op
from services.gateway.edge.answers import json_value, no_content
from services.gateway.edge.consumer_models import (
    ConsumerCommit,
    ConsumerReset,
    LeaseAcquire,
    consumer_json,
    position_json,
)
from services.gateway.edge.operations import NAME
from services.gateway.edge.room import Room
from services.gateway.edge.starts import start_of_json
from services.gateway.logs.consumers import Consumers, ConsumerView


class ConsumerRoutes:
    """Handlers of consumers."""

    def __init__(self, consumers: Consumers, room: Room) -> None:
        self._consumers, self._room = consumers, room

    async def page(self, _request: web.Request, given: Given) -> web.Response:
        """GET /v1/logs/{name}/consumers."""
        views, following = await self._consumers.page(
            given[NAME],
            after=given[op.AFTER] or "",
            limit=given[op.LIMIT],
            prefix=given[op.PREFIX] or "",
        )
        return json_value({"consumers": [consumer_json(view) for view in views], "next": following})

    async def get(self, _request: web.Request, given: Given) -> web.Response:
        """GET /v1/logs/{name}/consumers/{consumer}."""
        return _viewed(await self._consumers.look(given[NAME], given[op.CONSUMER]))

    async def put(self, request: web.Request, given: Given) -> web.Response:
        """PUT /v1/logs/{name}/consumers/{consumer}."""
        wanted = await body.read_model(request, self._room, ConsumerCommit)
        token, version, is_new = (
            given[op.FENCING_TOKEN],
            given[op.IF_MATCH],
            given[op.IF_NONE_MATCH],
        )
        if token is None and version is None and not is_new:
            raise PreconditionRequired(
                "send If-Match, If-None-Match: *, or Fencing-Token", log=given[NAME]
            )
        return _positioned(
            await self._consumers.commit(
                given[NAME],
                given[op.CONSUMER],
                wanted.offset,
                token=token,
                version=version,
                is_new=is_new,
            )
        )

    async def delete(self, _request: web.Request, given: Given) -> web.Response:
        """DELETE /v1/logs/{name}/consumers/{consumer}."""
        await self._consumers.delete(given[NAME], given[op.CONSUMER], given[op.IF_MATCH])
        return no_content()

    async def reset(self, request: web.Request, given: Given) -> web.Response:
        """POST /v1/logs/{name}/consumers/{consumer}/reset."""
        wanted = await body.read_model(request, self._room, ConsumerReset)
        return _viewed(
            await self._consumers.reset(
                given[NAME],
                given[op.CONSUMER],
                start_of_json(wanted.to, "/to"),
                given[op.IF_MATCH],
            )
        )

    async def acquire(self, request: web.Request, given: Given) -> web.Response:
        """POST /v1/logs/{name}/consumers/{consumer}/lease."""
        wanted = await body.read_model(request, self._room, LeaseAcquire)
        return _positioned(
            await self._consumers.acquire(
                given[NAME],
                given[op.CONSUMER],
                holder=wanted.holder,
                lease_ms=wanted.lease_ms,
                start=start_of_json(wanted.start, "/from"),
            )
        )

    async def renew(self, _request: web.Request, given: Given) -> web.Response:
        """PUT /v1/logs/{name}/consumers/{consumer}/lease."""
        token = _token(given)
        return _positioned(await self._consumers.renew(given[NAME], given[op.CONSUMER], token))

    async def release(self, _request: web.Request, given: Given) -> web.Response:
        """DELETE /v1/logs/{name}/consumers/{consumer}/lease."""
        await self._consumers.release(given[NAME], given[op.CONSUMER], _token(given))
        return no_content()

    def routes(self) -> list[Route]:
        """The operations with their handlers."""
        return [
            Route(op.LIST, self.page),
            Route(op.GET, self.get),
            Route(op.PUT, self.put),
            Route(op.DELETE, self.delete),
            Route(op.RESET, self.reset),
            Route(op.ACQUIRE, self.acquire),
            Route(op.RENEW, self.renew),
            Route(op.RELEASE, self.release),
        ]


def _token(given: Given) -> int:
    token = given[op.FENCING_TOKEN]
    if token is None:
        raise PreconditionRequired("send the Fencing-Token of the lease", log=given[NAME])
    return token


def _etag(position: Position) -> dict[str, str]:
    return {"ETag": f'"{position.version}"'}


def _positioned(position: Position) -> web.Response:
    return json_value(position_json(position), headers=_etag(position))


def _viewed(view: ConsumerView) -> web.Response:
    return json_value(consumer_json(view), headers=_etag(view.position))
