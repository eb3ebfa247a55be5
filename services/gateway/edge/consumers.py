"""The resource /v1/logs/{name}/consumers: how far each has read, and who is its active worker."""

from typing import Any

from aiohttp import web

from quorumlog import header
from quorumlog.errors import PreconditionRequired
from quorumlog.net.operations import Route
from quorumlog.net.parameters import Given
from quorumlog.protocol.positions import Position, Stamp
from services.gateway.edge import body
from services.gateway.edge import consumer_operations as op
from services.gateway.edge.access import EVERYONE, LOOK, Kind, caller_of
from services.gateway.edge.answers import json_value
from services.gateway.edge.consumer_models import (
    ConsumerCommit,
    ConsumerReset,
    LeaseAcquire,
    consumer_json,
    position_json,
)
from services.gateway.edge.once import once_of
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

    async def page_of_all(self, request: web.Request, given: Given) -> web.Response:
        """GET /v1/consumers."""
        caller = caller_of(request)
        rows, following = await self._consumers.page_of_all(
            given[op.LOG] or "",
            prefix=given[op.PREFIX] or "",
            after=given[op.AFTER_ALL] or "",
            limit=given[op.LIMIT],
            is_shown=lambda log: not LOOK.isdisjoint(caller.scopes(Kind.LOGS, log)),
        )
        return json_value({"consumers": list(map(position_json, rows)), "next": following})

    async def get(self, _request: web.Request, given: Given) -> web.Response:
        """GET /v1/logs/{name}/consumers/{consumer}."""
        return self._viewed(await self._consumers.look(given[NAME], given[op.CONSUMER]))

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
        return _committed(
            await self._consumers.commit(
                given[NAME],
                given[op.CONSUMER],
                wanted.offset,
                token=token,
                version=version,
                is_new=is_new,
                stamp=_stamp(request, given, wanted),
                caller=_maker(request),
            )
        )

    async def delete(self, request: web.Request, given: Given) -> web.Response:
        """DELETE /v1/logs/{name}/consumers/{consumer}."""
        stamp = _stamp(request, given)
        await self._consumers.delete(given[NAME], given[op.CONSUMER], given[op.IF_MATCH], stamp)
        return self._done()

    async def reset(self, request: web.Request, given: Given) -> web.Response:
        """POST /v1/logs/{name}/consumers/{consumer}/reset."""
        wanted = await body.read_model(request, self._room, ConsumerReset)
        return self._viewed(
            await self._consumers.reset(
                given[NAME],
                given[op.CONSUMER],
                start_of_json(wanted.to, "/to"),
                given[op.IF_MATCH],
                _stamp(request, given, wanted),
            )
        )

    async def acquire(self, request: web.Request, given: Given) -> web.Response:
        """POST /v1/logs/{name}/consumers/{consumer}/lease."""
        wanted = await body.read_model(request, self._room, LeaseAcquire)
        return self._positioned(
            await self._consumers.acquire(
                given[NAME],
                given[op.CONSUMER],
                holder=wanted.holder,
                lease_ms=wanted.lease_ms,
                start=start_of_json(wanted.start, "/from"),
                stamp=_stamp(request, given, wanted),
                caller=_maker(request),
                started=wanted.started,
            )
        )

    async def renew(self, _request: web.Request, given: Given) -> web.Response:
        """PUT /v1/logs/{name}/consumers/{consumer}/lease."""
        token = _token(given)
        return self._positioned(await self._consumers.renew(given[NAME], given[op.CONSUMER], token))

    async def release(self, request: web.Request, given: Given) -> web.Response:
        """DELETE /v1/logs/{name}/consumers/{consumer}/lease."""
        token, stamp = _token(given), _stamp(request, given)
        await self._consumers.release(given[NAME], given[op.CONSUMER], token, stamp)
        return self._done()

    def _headers(self, position: Position | None = None) -> dict[str, str]:
        seen = {header.CONSUMERS_VERSION: str(self._consumers.seen)}
        return seen if position is None else {"ETag": f'"{position.version}"', **seen}

    def _done(self) -> web.Response:
        return web.Response(status=204, headers={"Cache-Control": "no-store", **self._headers()})

    def _positioned(self, position: Position) -> web.Response:
        return json_value(position_json(position), headers=self._headers(position))

    def _viewed(self, view: ConsumerView) -> web.Response:
        return json_value(consumer_json(view), headers=self._headers(view.position))

    def routes(self) -> list[Route]:
        """The operations with their handlers."""
        return [
            Route(op.LIST, self.page),
            Route(op.LIST_ALL, self.page_of_all),
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


def _committed(position: Position) -> web.Response:
    """The answer to a commit, most of which `edge/direct.py` answers."""
    return json_value(position_json(position), headers={"ETag": f'"{position.version}"'})


def _maker(request: web.Request) -> str:
    """Whose share of consumers a new one takes; empty where no tokens are required."""
    caller = caller_of(request)
    return "" if caller is EVERYONE else caller.identity


def _stamp(request: web.Request, given: Given, body: Any = None) -> Stamp | None:
    """By what the keeper recognises copies of a change; None without `Idempotency-Key`."""
    once = once_of(request, given, body)
    if once is None:
        return None
    return Stamp(once.token, once.content, given[op.CONSUMERS_VERSION] or 0)
