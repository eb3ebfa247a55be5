"""The resource /v1/logs/{name}/consumers: how far each has read, and who is its active worker."""

import re
from typing import Any, Final

from aiohttp import web

from quorumlog import errors, header
from quorumlog.net import parameters
from quorumlog.net.operations import JSON, Content, Reply, Route
from quorumlog.protocol.positions import Position, Stamp
from quorumlog.protocol.values import LOG_NAME
from services.gateway.edge import consumer_models as models
from services.gateway.edge import operations as op
from services.gateway.edge.access.scopes import EVERYONE, LOOK, Kind, Named, Scope, caller_of, on
from services.gateway.edge.http import body
from services.gateway.edge.http.limits import Room
from services.gateway.edge.http.media import json_value
from services.gateway.edge.logs import TAKING_OVER
from services.gateway.edge.starts import start_of_json
from services.gateway.logs.consumers import Consumers, ConsumerView

PAGE_MAX: Final = 1000
"""Consumers of a page: the lag of each takes some reads (taste)."""

CONSUMER: Final = parameters.path_text("consumer", LOG_NAME, "The consumer.", "billing")
LIMIT: Final = parameters.query_integer("limit", 1, PAGE_MAX, "Consumers of a page.", 100)
AFTER: Final = parameters.query_text("after", LOG_NAME, "Consumers after this name.")
AFTER_ALL: Final = parameters.query_text(
    "after", f"{LOG_NAME}/{LOG_NAME}", "Consumers after this one, as `log/consumer`."
)
LOG: Final = parameters.query_text("log", LOG_NAME, "Consumers of this log, which may be deleted.")
PREFIX: Final = parameters.query_text("prefix", LOG_NAME, "Consumers whose name begins with this.")
FENCING_TOKEN: Final = parameters.header_integer(
    header.FENCING_TOKEN, "Of the lease: the request counts only while no newer one was given out."
)

CONSUMERS_VERSION: Final = parameters.header_integer(
    header.CONSUMERS_VERSION,
    "With `Idempotency-Key`: the highest `Consumers-Version` of the answers that the client had before it sent the change"
    " for the first time. 0, or no header: it had none; the change is then refused with a `version` to send it with. So is"
    " a copy so old that the cluster may have forgotten an earlier copy.",
)
COUNTS_ONCE: Final = (op.IDEMPOTENCY_KEY, CONSUMERS_VERSION)
_VERSION: Final = r'"(0|[1-9][0-9]{0,18})"'


def _version(text: str, pointer: str) -> int:
    if not (found := re.fullmatch(_VERSION, text, re.ASCII)):
        raise parameters.invalid(pointer, 'must be a version in quotes, as "17"')
    return int(found[1])


def _star(text: str, pointer: str) -> bool:
    if text != "*":
        raise parameters.invalid(pointer, "must be *")
    return True


IF_MATCH: Final[parameters.Parameter[int | None]] = parameters.Parameter(
    "If-Match",
    "header",
    _version,
    {"type": "string", "pattern": f"^{_VERSION}$"},
    "The consumer's version, as in `ETag`; another one is 412, and nothing is changed.",
    None,
)
IF_NONE_MATCH: Final[parameters.Parameter[bool]] = parameters.Parameter(
    "If-None-Match",
    "header",
    _star,
    {"enum": ["*"]},
    "`*`: only where there is no such consumer.",
    default=False,
)

_POSITION: Final[dict[str, Any]] = {
    "log": "events",
    "consumer": "billing",
    "offset": 8,
    "version": 9217,
    "log_created_at": "2026-01-02T03:04:05.678901Z",
    "committed_at": "2026-01-02T03:14:05.678Z",
    "lease": {"holder": "worker-1", "fencing_token": 8193, "lease_ms": 30000},
}
_CONSUMER: Final = _POSITION | {"state": "ok", "lag": {"records": 3, "bytes": 210, "ms": 1200}}
_AS_POSITION: Final = (models.PositionModel, {"a position": _POSITION})
_AS_CONSUMER: Final = (models.ConsumerModel, {"a consumer": _CONSUMER})
_KEPT: Final = (*TAKING_OVER, errors.QuorumTimeout, errors.NotTheOwner, errors.WriterLost)
"""Errors of the log of positions, which this gateway may come to own."""
_BODILESS: Final = tuple(
    error for error in _KEPT if error not in (errors.TooLarge, errors.UnsupportedMediaType)
)
_ONE: Final = "/v1/logs/{name}/consumers/{consumer}"

LIST: Final = op.PublicOperation(
    "GET /v1/logs/{name}/consumers",
    "listConsumers",
    "Consumers",
    "List a log's consumers",
    "By name, with what each has not processed yet.",
    (op.NAME, LIMIT, AFTER, PREFIX),
    scope=on(Named.LOG, *LOOK),
    replies=op.gives(
        "A page of consumers.",
        models.ConsumerList,
        {"last page": {"consumers": [_CONSUMER], "next": None}},
    ),
    errors=_BODILESS,
)
LIST_ALL: Final = op.PublicOperation(
    "GET /v1/consumers",
    "listAllConsumers",
    "Consumers",
    "List the consumers of all logs",
    "Sorted by log and name, without lags: the consumers of all logs that the caller may read, deleted logs included.",
    (LOG, LIMIT, AFTER_ALL, PREFIX),
    scope=on(Named.SOME, *LOOK),
    replies=op.gives(
        "A page of consumers.",
        models.PositionList,
        {"last page": {"consumers": [_POSITION], "next": None}},
    ),
    errors=_BODILESS,
)
GET: Final = op.PublicOperation(
    f"GET {_ONE}",
    "getConsumer",
    "Consumers",
    "Look at a consumer",
    scope=on(Named.LOG, *LOOK),
    parameters=(op.NAME, CONSUMER),
    replies=op.gives("The consumer.", *_AS_CONSUMER, op.ETAG),
    errors=(*_BODILESS, errors.NoSuchConsumer),
)
PUT: Final = op.PublicOperation(
    f"PUT {_ONE}",
    "commitConsumer",
    "Consumers",
    "Commit a position",
    "By compare-and-swap: with `If-Match`, with `If-None-Match: *` for a new consumer, or with the `Fencing-Token` of the"
    " lease, which a commit renews. Without one of them: 428. A position goes back by a reset only.",
    (op.NAME, CONSUMER, IF_MATCH, IF_NONE_MATCH, FENCING_TOKEN, *COUNTS_ONCE),
    {JSON: Content(models.ConsumerCommit, {"eight": {"offset": 8}})},
    op.gives("The position.", *_AS_POSITION, op.ETAG),
    (
        *_KEPT,
        errors.NoSuchConsumer,
        errors.TooManyConsumers,
        errors.PreconditionRequired,
        errors.VersionConflict,
        errors.LeaseHeld,
        errors.LeaseLost,
        errors.LogReplaced,
        errors.PositionBehind,
        errors.RequestOutdated,
    ),
    scope=on(Named.LOG, Scope.READ),
    needs_body=True,
)
DELETE: Final = op.PublicOperation(
    f"DELETE {_ONE}",
    "deleteConsumer",
    "Consumers",
    "Forget a consumer",
    "Also one of a log that is no more. Not while its lease is held.",
    (op.NAME, CONSUMER, IF_MATCH, *COUNTS_ONCE),
    scope=on(Named.LOG, Scope.MANAGE),
    replies={204: Reply("It is forgotten.")},
    errors=(
        *op.ALWAYS,
        *op.WITH_METADATA,
        *(
            error
            for error in _BODILESS
            if error not in (*op.ALWAYS, *op.WITH_METADATA, errors.NotAcceptable)
        ),
        errors.NoSuchConsumer,
        errors.VersionConflict,
        errors.LeaseHeld,
        errors.RequestOutdated,
    ),
    is_audited=True,
)
RESET: Final = op.PublicOperation(
    f"POST {_ONE}/reset",
    "resetConsumer",
    "Consumers",
    "Put a consumer somewhere else",
    "Forwards or back, and into the log of this name as it is now. Whoever holds the lease has lost it.",
    (op.NAME, CONSUMER, IF_MATCH, *COUNTS_ONCE),
    {JSON: Content(models.ConsumerReset, {"begin": {"to": "earliest"}, "eight": {"to": 8}})},
    op.gives("The consumer.", *_AS_CONSUMER, op.ETAG),
    (*_KEPT, errors.NoSuchConsumer, errors.VersionConflict, errors.RequestOutdated),
    scope=on(Named.LOG, Scope.MANAGE),
    needs_body=True,
    is_audited=True,
)
ACQUIRE: Final = op.PublicOperation(
    f"POST {_ONE}/lease",
    "acquireLease",
    "Consumers",
    "Become the active worker of a consumer",
    "A consumer that has no position yet begins at `from`. The answer's `fencing_token` is higher than all before it.",
    (op.NAME, CONSUMER, *COUNTS_ONCE),
    {JSON: Content(models.LeaseAcquire, {"worker": {"holder": "worker-1", "lease_ms": 30000}})},
    op.gives("The lease is held.", *_AS_POSITION, op.ETAG),
    (
        *_KEPT,
        errors.TooManyConsumers,
        errors.LeaseHeld,
        errors.LogReplaced,
        errors.OffsetTruncated,
        errors.RequestOutdated,
    ),
    scope=on(Named.LOG, Scope.READ),
    needs_body=True,
)
RENEW: Final = op.PublicOperation(
    f"PUT {_ONE}/lease",
    "renewLease",
    "Consumers",
    "Hold the lease for longer",
    "For another `lease_ms` from now on. A commit with the token does the same.",
    (op.NAME, CONSUMER, FENCING_TOKEN),
    scope=on(Named.LOG, Scope.READ),
    replies=op.gives("The lease is held.", *_AS_POSITION, op.ETAG),
    errors=(
        *_BODILESS,
        errors.NoSuchConsumer,
        errors.PreconditionRequired,
        errors.LeaseLost,
        errors.LogReplaced,
    ),
)
RELEASE: Final = op.PublicOperation(
    f"DELETE {_ONE}/lease",
    "releaseLease",
    "Consumers",
    "Let the lease go",
    "Another worker gets it at once.",
    (op.NAME, CONSUMER, FENCING_TOKEN, *COUNTS_ONCE),
    scope=on(Named.LOG, Scope.READ),
    replies={204: Reply("It is free.")},
    errors=(
        *(error for error in _BODILESS if error is not errors.NotAcceptable),
        errors.NoSuchConsumer,
        errors.PreconditionRequired,
        errors.LeaseLost,
        errors.RequestOutdated,
    ),
)


class ConsumerRoutes:
    """Handlers of consumers."""

    def __init__(self, consumers: Consumers, room: Room) -> None:
        self._consumers, self._room = consumers, room

    async def page(self, _request: web.Request, given: parameters.Given) -> web.Response:
        """GET /v1/logs/{name}/consumers."""
        views, following = await self._consumers.page(
            given[op.NAME], after=given[AFTER] or "", limit=given[LIMIT], prefix=given[PREFIX] or ""
        )
        return json_value(
            {"consumers": [models.consumer_json(view) for view in views], "next": following}
        )

    async def page_of_all(self, request: web.Request, given: parameters.Given) -> web.Response:
        """GET /v1/consumers."""
        caller = caller_of(request)
        rows, following = await self._consumers.page_of_all(
            given[LOG] or "",
            prefix=given[PREFIX] or "",
            after=given[AFTER_ALL] or "",
            limit=given[LIMIT],
            is_shown=lambda log: not LOOK.isdisjoint(caller.scopes(Kind.LOGS, log)),
        )
        return json_value({"consumers": list(map(models.position_json, rows)), "next": following})

    async def get(self, _request: web.Request, given: parameters.Given) -> web.Response:
        """GET /v1/logs/{name}/consumers/{consumer}."""
        return self._viewed(await self._consumers.look(given[op.NAME], given[CONSUMER]))

    async def put(self, request: web.Request, given: parameters.Given) -> web.Response:
        """PUT /v1/logs/{name}/consumers/{consumer}."""
        wanted = await body.read_model(request, self._room, models.ConsumerCommit)
        token, version, is_new = (given[FENCING_TOKEN], given[IF_MATCH], given[IF_NONE_MATCH])
        if token is None and version is None and not is_new:
            raise errors.PreconditionRequired(
                "send If-Match, If-None-Match: *, or Fencing-Token", log=given[op.NAME]
            )
        return _committed(
            await self._consumers.commit(
                given[op.NAME],
                given[CONSUMER],
                wanted.offset,
                token=token,
                version=version,
                is_new=is_new,
                stamp=_stamp(request, given, wanted),
                caller=_maker(request),
            )
        )

    async def delete(self, request: web.Request, given: parameters.Given) -> web.Response:
        """DELETE /v1/logs/{name}/consumers/{consumer}."""
        stamp = _stamp(request, given)
        await self._consumers.delete(given[op.NAME], given[CONSUMER], given[IF_MATCH], stamp)
        return self._done()

    async def reset(self, request: web.Request, given: parameters.Given) -> web.Response:
        """POST /v1/logs/{name}/consumers/{consumer}/reset."""
        wanted = await body.read_model(request, self._room, models.ConsumerReset)
        return self._viewed(
            await self._consumers.reset(
                given[op.NAME],
                given[CONSUMER],
                start_of_json(wanted.to, "/to"),
                given[IF_MATCH],
                _stamp(request, given, wanted),
            )
        )

    async def acquire(self, request: web.Request, given: parameters.Given) -> web.Response:
        """POST /v1/logs/{name}/consumers/{consumer}/lease."""
        wanted = await body.read_model(request, self._room, models.LeaseAcquire)
        return self._positioned(
            await self._consumers.acquire(
                given[op.NAME],
                given[CONSUMER],
                holder=wanted.holder,
                lease_ms=wanted.lease_ms,
                start=start_of_json(wanted.start, "/from"),
                stamp=_stamp(request, given, wanted),
                caller=_maker(request),
                started=wanted.started,
            )
        )

    async def renew(self, _request: web.Request, given: parameters.Given) -> web.Response:
        """PUT /v1/logs/{name}/consumers/{consumer}/lease."""
        token = _token(given)
        return self._positioned(await self._consumers.renew(given[op.NAME], given[CONSUMER], token))

    async def release(self, request: web.Request, given: parameters.Given) -> web.Response:
        """DELETE /v1/logs/{name}/consumers/{consumer}/lease."""
        token, stamp = _token(given), _stamp(request, given)
        await self._consumers.release(given[op.NAME], given[CONSUMER], token, stamp)
        return self._done()

    def _headers(self, position: Position | None = None) -> dict[str, str]:
        # A version that the client may say it has seen, with its next change.
        seen = {header.CONSUMERS_VERSION: str(self._consumers.positions.seen)}
        return seen if position is None else {"ETag": f'"{position.version}"', **seen}

    def _done(self) -> web.Response:
        return web.Response(status=204, headers={"Cache-Control": "no-store", **self._headers()})

    def _positioned(self, position: Position) -> web.Response:
        return json_value(models.position_json(position), headers=self._headers(position))

    def _viewed(self, view: ConsumerView) -> web.Response:
        return json_value(models.consumer_json(view), headers=self._headers(view.position))

    def routes(self) -> list[Route]:
        """The operations with their handlers."""
        return [
            Route(LIST, self.page),
            Route(LIST_ALL, self.page_of_all),
            Route(GET, self.get),
            Route(PUT, self.put),
            Route(DELETE, self.delete),
            Route(RESET, self.reset),
            Route(ACQUIRE, self.acquire),
            Route(RENEW, self.renew),
            Route(RELEASE, self.release),
        ]


def _token(given: parameters.Given) -> int:
    token = given[FENCING_TOKEN]
    if token is None:
        raise errors.PreconditionRequired("send the Fencing-Token of the lease", log=given[op.NAME])
    return token


def _committed(position: Position) -> web.Response:
    """The answer to a commit, most of which `edge/direct.py` answers."""
    return json_value(models.position_json(position), headers={"ETag": f'"{position.version}"'})


def _maker(request: web.Request) -> str:
    """Whose share of consumers a new one takes; empty where no tokens are required."""
    caller = caller_of(request)
    return "" if caller is EVERYONE else caller.identity


def _stamp(request: web.Request, given: parameters.Given, body: Any = None) -> Stamp | None:
    """By what the keeper recognises copies of a change; None without `Idempotency-Key`."""
    once = op.once_of(request, given, body)
    if once is None:
        return None
    return Stamp(once.token, once.content, given[CONSUMERS_VERSION] or 0)
