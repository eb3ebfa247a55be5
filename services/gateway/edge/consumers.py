"""The resource /v1/logs/{name}/consumers: each consumer's committed offset and its lease."""

import re
from typing import Any, Final

from aiohttp import web

from quorumlog import errors, header
from quorumlog.net import parameters
from quorumlog.net.operations import Reply
from quorumlog.protocol.positions import Position
from quorumlog.protocol.rows import Stamp
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
"""Maximum consumers of a page, since each lag needs several reads (chosen by judgement)."""

CONSUMER: Final = parameters.path_text("consumer", LOG_NAME, "The consumer.", "billing")
LIMIT: Final = parameters.query_integer("limit", 1, PAGE_MAX, "Maximum consumers of a page.", 100)
AFTER: Final = parameters.query_text("after", LOG_NAME, "List consumers after this name.")
AFTER_ALL: Final = parameters.query_text(
    "after", f"{LOG_NAME}/{LOG_NAME}", "List consumers after this consumer (`log/consumer`)."
)
LOG: Final = parameters.query_text(
    "log", LOG_NAME, "List the consumers of this log, which may have been deleted."
)
PREFIX: Final = parameters.query_text(
    "prefix", LOG_NAME, "List consumers whose names have this prefix."
)
FENCING_TOKEN: Final = parameters.header_integer(
    header.FENCING_TOKEN, "The lease's token. The request is refused once a newer token exists."
)

CONSUMERS_VERSION: Final = parameters.header_integer(
    header.CONSUMERS_VERSION,
    "With `Idempotency-Key`: the highest `Consumers-Version` that a response had before the "
    "client first sent this change. If the header is missing or 0, the change is refused with a "
    "`version` to send. A retry so old that the cluster may have forgotten the first request is "
    "refused too.",
)
COUNTS_ONCE: Final = (op.IDEMPOTENCY_KEY, CONSUMERS_VERSION)
_VERSION: Final = r'"(0|[1-9][0-9]{0,18})"'


def _version(text: str, pointer: str) -> int:
    if not (found := re.fullmatch(_VERSION, text, re.ASCII)):
        raise parameters.invalid(pointer, 'must be a version in quotes, such as "17"')
    return int(found[1])


IF_MATCH: Final[parameters.Parameter[int | None]] = parameters.Parameter(
    "If-Match",
    "header",
    _version,
    {"type": "string", "pattern": f"^{_VERSION}$"},
    "The consumer's expected version, as in `ETag`. For any other version, the response is 412.",
    None,
)
IF_NONE_MATCH: Final = parameters.header_star("`*`: commit only if the consumer does not exist.")

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
KEPT: Final = (*TAKING_OVER, errors.QuorumTimeout, errors.NotTheOwner, errors.WriterLost)
"""Errors of requests to the log of committed offsets, which this gateway may have to take over."""
_ONE: Final = "/v1/logs/{name}/consumers/{consumer}"


class ConsumerRoutes(op.Handlers, tag="Consumers"):
    """HTTP handlers for consumers."""

    def __init__(self, consumers: Consumers, room: Room) -> None:
        self._consumers, self._room = consumers, room

    @op.operation(
        "GET /v1/logs/{name}/consumers",
        (op.NAME, LIMIT, AFTER, PREFIX),
        replies=op.gives(
            "A page of consumers.",
            models.ConsumerList,
            {"last page": {"consumers": [_CONSUMER], "next": None}},
        ),
        errors=KEPT,
        scope=on(Named.LOG, *LOOK),
    )
    async def list_consumers(self, _request: web.Request, given: parameters.Given) -> web.Response:
        """List a log's consumers.

        The consumers are sorted by name, each with its lag.
        """
        views, following = await self._consumers.page(
            given[op.NAME], after=given[AFTER] or "", limit=given[LIMIT], prefix=given[PREFIX] or ""
        )
        return json_value(
            {"consumers": [models.consumer_json(view) for view in views], "next": following}
        )

    @op.operation(
        "GET /v1/consumers",
        (LOG, LIMIT, AFTER_ALL, PREFIX),
        replies=op.gives(
            "A page of consumers.",
            models.PositionList,
            {"last page": {"consumers": [_POSITION], "next": None}},
        ),
        errors=KEPT,
        scope=on(Named.SOME, *LOOK),
    )
    async def list_all_consumers(
        self, request: web.Request, given: parameters.Given
    ) -> web.Response:
        """List the consumers of all logs.

        Lists the consumers of all logs that the caller may read, including deleted logs. The
        consumers are sorted by log and name, and have no lags.
        """
        caller = caller_of(request)
        rows, following = await self._consumers.page_of_all(
            given[LOG] or "",
            prefix=given[PREFIX] or "",
            after=given[AFTER_ALL] or "",
            limit=given[LIMIT],
            is_shown=lambda log: not LOOK.isdisjoint(caller.scopes(Kind.LOGS, log)),
        )
        return json_value({"consumers": list(map(models.position_json, rows)), "next": following})

    @op.operation(
        f"GET {_ONE}",
        (op.NAME, CONSUMER),
        replies=op.gives("The consumer.", *_AS_CONSUMER, op.ETAG),
        errors=(*KEPT, errors.NoSuchConsumer),
        scope=on(Named.LOG, *LOOK),
    )
    async def get_consumer(self, _request: web.Request, given: parameters.Given) -> web.Response:
        """Get a consumer."""
        return self._viewed(await self._consumers.look(given[op.NAME], given[CONSUMER]))

    @op.operation(
        f"PUT {_ONE}",
        (op.NAME, CONSUMER, IF_MATCH, IF_NONE_MATCH, FENCING_TOKEN, *COUNTS_ONCE),
        body=op.takes(models.ConsumerCommit, {"eight": {"offset": 8}}),
        replies=op.gives("The committed offset.", *_AS_POSITION, op.ETAG),
        errors=(
            *KEPT,
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
    async def commit_consumer(self, request: web.Request, given: parameters.Given) -> web.Response:
        """Commit an offset.

        A commit is a compare-and-swap. One of these headers is required (otherwise 428): `If-Match`,
        or `If-None-Match: *` for a new consumer, or `Fencing-Token` with the token of the lease. A
        commit with the token renews the lease. Only a reset can lower a committed offset.
        """
        wanted = await body.read_model(request, self._room, models.ConsumerCommit)
        token, version, is_new = (given[FENCING_TOKEN], given[IF_MATCH], given[IF_NONE_MATCH])
        if token is None and version is None and not is_new:
            raise errors.PreconditionRequired(
                "send a condition: If-Match, If-None-Match: *, or Fencing-Token", log=given[op.NAME]
            )
        position = await self._consumers.commit(
            given[op.NAME],
            given[CONSUMER],
            wanted.offset,
            token=token,
            version=version,
            is_new=is_new,
            stamp=_stamp(request, given, wanted),
            caller=_maker(request),
        )
        # The fast path in `edge/direct.py` handles most commits, and must send the same response.
        return json_value(models.position_json(position), headers={"ETag": f'"{position.version}"'})

    @op.operation(
        f"DELETE {_ONE}",
        (op.NAME, CONSUMER, IF_MATCH, *COUNTS_ONCE),
        replies={204: Reply("The consumer is deleted.")},
        errors=(
            *KEPT,
            errors.NoSuchConsumer,
            errors.VersionConflict,
            errors.LeaseHeld,
            errors.RequestOutdated,
        ),
        scope=on(Named.LOG, Scope.MANAGE),
        is_audited=True,
    )
    async def delete_consumer(self, request: web.Request, given: parameters.Given) -> web.Response:
        """Delete a consumer.

        The request is refused while a worker holds the lease. The log may already be deleted.
        """
        stamp = _stamp(request, given)
        await self._consumers.delete(given[op.NAME], given[CONSUMER], given[IF_MATCH], stamp)
        return self._done()

    @op.operation(
        f"POST {_ONE}/reset",
        (op.NAME, CONSUMER, IF_MATCH, *COUNTS_ONCE),
        body=op.takes(models.ConsumerReset, {"begin": {"to": "earliest"}, "eight": {"to": 8}}),
        replies=op.gives("The consumer.", *_AS_CONSUMER, op.ETAG),
        errors=(*KEPT, errors.NoSuchConsumer, errors.VersionConflict, errors.RequestOutdated),
        scope=on(Named.LOG, Scope.MANAGE),
        needs_body=True,
        is_audited=True,
    )
    async def reset_consumer(self, request: web.Request, given: parameters.Given) -> web.Response:
        """Reset a consumer to another offset.

        Moves the committed offset forwards or backwards, in the log that now has the name. The
        lease's holder loses the lease.
        """
        wanted = await body.read_model(request, self._room, models.ConsumerReset)
        start, stamp = start_of_json(wanted.to, "/to"), _stamp(request, given, wanted)
        return self._viewed(
            await self._consumers.reset(
                given[op.NAME], given[CONSUMER], start, given[IF_MATCH], stamp
            )
        )

    @op.operation(
        f"POST {_ONE}/lease",
        (op.NAME, CONSUMER, *COUNTS_ONCE),
        body=op.takes(models.LeaseAcquire, {"worker": {"holder": "worker-1", "lease_ms": 30000}}),
        replies=op.gives("The lease is held.", *_AS_POSITION, op.ETAG),
        errors=(
            *KEPT,
            errors.TooManyConsumers,
            errors.LeaseHeld,
            errors.LogReplaced,
            errors.OffsetTruncated,
            errors.RequestOutdated,
        ),
        scope=on(Named.LOG, Scope.READ),
        needs_body=True,
    )
    async def acquire_lease(self, request: web.Request, given: parameters.Given) -> web.Response:
        """Acquire a consumer's lease.

        The holder is the consumer's only active worker. A consumer without a committed offset
        begins at `from`. The response has a higher `fencing_token` than all earlier tokens.
        """
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

    @op.operation(
        f"PUT {_ONE}/lease",
        (op.NAME, CONSUMER, FENCING_TOKEN),
        replies=op.gives("The lease is held.", *_AS_POSITION, op.ETAG),
        errors=(
            *KEPT,
            errors.NoSuchConsumer,
            errors.PreconditionRequired,
            errors.LeaseLost,
            errors.LogReplaced,
        ),
        scope=on(Named.LOG, Scope.READ),
    )
    async def renew_lease(self, _request: web.Request, given: parameters.Given) -> web.Response:
        """Renew a consumer's lease.

        The lease now ends `lease_ms` after the renewal. A commit with the token also renews it.
        """
        token = _token(given)
        return self._positioned(await self._consumers.renew(given[op.NAME], given[CONSUMER], token))

    @op.operation(
        f"DELETE {_ONE}/lease",
        (op.NAME, CONSUMER, FENCING_TOKEN, *COUNTS_ONCE),
        replies={204: Reply("The lease is free.")},
        errors=(
            *KEPT,
            errors.NoSuchConsumer,
            errors.PreconditionRequired,
            errors.LeaseLost,
            errors.RequestOutdated,
        ),
        scope=on(Named.LOG, Scope.READ),
    )
    async def release_lease(self, request: web.Request, given: parameters.Given) -> web.Response:
        """Release a consumer's lease.

        Another worker can acquire the lease at once.
        """
        token, stamp = _token(given), _stamp(request, given)
        await self._consumers.release(given[op.NAME], given[CONSUMER], token, stamp)
        return self._done()

    def _headers(self, position: Position | None = None) -> dict[str, str]:
        # The client sends this version as `Consumers-Version` with its next change.
        seen = {header.CONSUMERS_VERSION: str(self._consumers.positions.seen)}
        return seen if position is None else {"ETag": f'"{position.version}"', **seen}

    def _done(self) -> web.Response:
        return web.Response(status=204, headers={"Cache-Control": "no-store", **self._headers()})

    def _positioned(self, position: Position) -> web.Response:
        return json_value(models.position_json(position), headers=self._headers(position))

    def _viewed(self, view: ConsumerView) -> web.Response:
        return json_value(models.consumer_json(view), headers=self._headers(view.position))


def _token(given: parameters.Given) -> int:
    token = given[FENCING_TOKEN]
    if token is None:
        detail = "Fencing-Token is required: send the token of the lease"
        raise errors.PreconditionRequired(detail, log=given[op.NAME])
    return token


def _maker(request: web.Request) -> str:
    """The caller whose quota includes a new consumer. Empty if no tokens are required."""
    caller = caller_of(request)
    return "" if caller is EVERYONE else caller.identity


def _stamp(request: web.Request, given: parameters.Given, body: Any = None) -> Stamp | None:
    """The stamp that identifies retries for the log's owner. None without `Idempotency-Key`."""
    once = op.once_of(request, given, body)
    if once is None:
        return None
    return Stamp(once.token, once.content, given[CONSUMERS_VERSION] or 0)
