"""The resource /v1/logs: named logs, each as a whole."""

from typing import Any, Final

from aiohttp import web

from quorumlog import errors
from quorumlog.net.operations import JSON, Content, Reply, Route
from quorumlog.net.parameters import Given, Parameter, invalid, query_integer, query_text
from quorumlog.protocol.values import LOG_NAME
from services.gateway.edge import log_models as models
from services.gateway.edge import operations as op
from services.gateway.edge.access.scopes import LOOK, Access, Named, Scope, caller_of, on
from services.gateway.edge.http import body
from services.gateway.edge.http.limits import BATCH_ENTRIES_MAX, Room
from services.gateway.edge.http.media import json_value, no_content
from services.gateway.edge.starts import created_at_of
from services.gateway.logs.manager import LogManager
from services.gateway.logs.values import CREATED_AT, STREAM_PREFIX

LIMIT: Final = query_integer("limit", 1, BATCH_ENTRIES_MAX, "Logs of a page.", 100)
AFTER: Final = query_text("after", LOG_NAME, "Logs after this name.")
PREFIX: Final = query_text("prefix", LOG_NAME, "Logs whose name begins with this.")

CREATED: Final[Parameter[str | None]] = Parameter(
    "created",
    "query",
    created_at_of,
    {"type": "string", "pattern": f"^{CREATED_AT}$"},
    "Which log the request is for: its `created_at` from an earlier response, or the part behind the point in an event id. If"
    " the log was deleted and created again since, the response is 409 `log-replaced`, and nothing is done.",
    None,
)

_EXAMPLE: Final[dict[str, Any]] = {
    "name": "events",
    "settings": {
        "ensemble_size": 3,
        "write_quorum": 3,
        "ack_quorum": 2,
        "digest": "crc32c",
        "metadata": {},
        "roll_bytes": 268435456,
        "roll_entries": 0,
        "roll_seconds": 0,
        "retention_bytes": 0,
        "retention_seconds": 0,
        "batch_compression": "none",
    },
    "state": "OPEN",
    "first_offset": 0,
    "next_offset": 8,
    "archived_through": None,
    "deletion_protection": False,
    "ledgers": [
        {"ledger_id": 1, "first_offset": 0, "last_offset": 4, "state": "CLOSED"},
        {"ledger_id": 2, "first_offset": 5, "last_offset": None, "state": "OPEN"},
    ],
    "owner": {
        "id": "b1946ac9",
        "url": "http://127.0.0.1:8080",
        "internal_url": "http://127.0.0.1:34567",
    },
    "version": 4,
    "created_at": "2026-01-02T03:04:05.678901Z",
}
_LOG: Final = (models.Log, {"a log": _EXAMPLE})
TAKING_OVER: Final = (
    *op.USUAL,
    *op.WITH_BODY,
    errors.NoSuchLog,
    errors.LogReplaced,
    errors.NotEnoughBookies,
    errors.RecoveryBlocked,
    errors.EntryUnavailable,
    errors.LogFull,
)
"""Errors of a request to a log's owner, which this gateway may become."""


def _order(
    verb: str, name: str, summary: str, text: str = "", *, scope: Access, **more: Any
) -> op.PublicOperation:
    """A POST to a log that answers with the log."""
    return op.PublicOperation(
        f"POST /v1/logs/{{name}}/{verb}",
        name,
        "Logs",
        summary,
        text,
        (op.NAME, *more.get("parameters", ())),
        more.get("body", op.NOTHING),
        op.gives("Done.", *more.get("content", _LOG)),
        (*TAKING_OVER, *more.get("errors", ())),
        needs_body="body" in more,
        scope=scope,
        is_audited=more.get("is_audited", False),
    )


LIST: Final = op.PublicOperation(
    "GET /v1/logs",
    "listLogs",
    "Logs",
    "List logs",
    "By name. `next` is the next `after`, null at the end.",
    (LIMIT, AFTER, PREFIX),
    scope=on(Named.SOME, Scope.READ),
    replies=op.gives(
        "A page of logs.", models.LogList, {"last page": {"logs": [_EXAMPLE], "next": None}}
    ),
    errors=(*op.USUAL, errors.EntryUnavailable, errors.RecoveryBlocked),
)
PUT: Final = op.PublicOperation(
    "PUT /v1/logs/{name}",
    "putLog",
    "Logs",
    "Create a log",
    "A repeat with the same settings gets the same log; with other settings 409.",
    (op.NAME, op.IDEMPOTENCY_KEY),
    {JSON: Content(models.LogCreate, {"default": {}, "small": {"roll_entries": 1000}})},
    {
        **op.gives("The new log.", *_LOG, {"Location": "The log's path."}, status=201),
        **op.gives("The log that was there.", *_LOG),
    },
    (*TAKING_OVER, errors.LogExists),
    scope=on(Named.LOG, Scope.MANAGE),
    is_audited=True,
)
GET: Final = op.PublicOperation(
    "GET /v1/logs/{name}",
    "getLog",
    "Logs",
    "Look at a log",
    scope=on(Named.LOG, *LOOK),
    parameters=(op.NAME,),
    replies=op.gives("The log.", *_LOG, op.ETAG),
    errors=(*op.USUAL, errors.NoSuchLog, errors.EntryUnavailable, errors.RecoveryBlocked),
)
PATCH: Final = op.PublicOperation(
    "PATCH /v1/logs/{name}",
    "patchLog",
    "Logs",
    "Change a log's limits, or its protection from deletion",
    "Limits that are named get new values, and hold within seconds for its owner and its retention. With `If-Match` "
    "only if the log has this `version` (its `ETag`): else 412 `version-conflict`, whose `version` is the log's; a roll or a "
    "new owner changes it too. "
    "A protected log can't be deleted, truncated or overwritten: 409 `log-protected`. Its retention goes on.",
    (op.NAME, op.IF_MATCH, CREATED, op.IDEMPOTENCY_KEY),
    {
        JSON: Content(
            models.LogPatch,
            {"a week": {"retention_seconds": 604800}, "on": {"deletion_protection": True}},
        )
    },
    op.gives("The log.", *_LOG, op.ETAG),
    (
        *op.USUAL,
        *op.WITH_BODY,
        errors.NoSuchLog,
        errors.LogReplaced,
        errors.VersionConflict,
        errors.EntryUnavailable,
        errors.RecoveryBlocked,
    ),
    scope=on(Named.LOG, Scope.MANAGE),
    needs_body=True,
    is_audited=True,
)
DELETE: Final = op.PublicOperation(
    "DELETE /v1/logs/{name}",
    "deleteLog",
    "Logs",
    "Delete a log with its ledgers",
    "With `created` only that log is deleted. If another log has the name since, the response is 404 `no-such-log`.",
    (op.NAME, CREATED),
    scope=on(Named.LOG, Scope.MANAGE),
    replies={204: Reply("It is deleted, and the name is free.")},
    errors=(
        *op.ALWAYS,
        *op.WITH_METADATA,
        errors.NoSuchLog,
        errors.LogProtected,
        errors.RecoveryBlocked,
    ),
    is_audited=True,
)
OPEN: Final = _order(
    "open",
    "openLog",
    "Open a log for one writer",
    "Earlier writers are fenced off. From then on appends need `Writer-Token`.",
    scope=on(Named.LOG, Scope.APPEND),
    body={JSON: Content(models.LogOpen, {"me": {"owner": "me"}})},
    content=(models.LogOpened, {"first": {"writer_token": 1, "next_offset": 0}}),
    errors=(errors.LogClosed, errors.NotTheOwner, errors.WriterLost),
    parameters=(CREATED,),
    is_audited=True,
)
ROLL: Final = _order(
    "roll",
    "rollLog",
    "Go on in a new ledger",
    scope=on(Named.LOG, Scope.MANAGE),
    errors=(errors.LogClosed, errors.NotTheOwner, errors.QuorumTimeout, errors.WriterLost),
)
TRUNCATE: Final = _order(
    "truncate",
    "truncateLog",
    "Drop old ledgers",
    "Whole ledgers that end below `before`; `first_offset` tells the result.",
    scope=on(Named.LOG, Scope.MANAGE),
    body={JSON: Content(models.LogTruncate, {"ten": {"before": 10}})},
    errors=(errors.LogProtected,),
    parameters=(CREATED, op.IDEMPOTENCY_KEY),
    is_audited=True,
)
ARCHIVED: Final = _order(
    "archived",
    "markLogArchived",
    "Note that records are archived",
    "By compare-and-swap on `archived_through`. From then on retention keeps what is not archived.",
    scope=on(Named.LOG, Scope.MANAGE),
    body={JSON: Content(models.LogArchived, {"first": {"through": 10, "expect": None}})},
    errors=(errors.VersionConflict, errors.InvalidRequest),
    parameters=(CREATED, op.IDEMPOTENCY_KEY),
    is_audited=True,
)
CLOSE: Final = _order(
    "close",
    "closeLog",
    "Close a log for good",
    scope=on(Named.LOG, Scope.MANAGE),
    errors=(errors.NotTheOwner, errors.WriterLost),
    parameters=(CREATED, op.IDEMPOTENCY_KEY),
    is_audited=True,
)


class LogRoutes:
    """Handlers of logs."""

    def __init__(self, logs: LogManager, room: Room) -> None:
        self._logs = logs
        self._room = room

    async def put(self, request: web.Request, given: Given) -> web.Response:
        """PUT /v1/logs/{name}."""
        if given[op.NAME].startswith(STREAM_PREFIX):
            raise invalid(
                op.NAME.pointer, f"{STREAM_PREFIX} begins the names of streams: PUT /v1/stream/…"
            )
        wanted = await body.read_model(request, self._room, models.LogCreate)
        view, is_new = await self._logs.put(
            given[op.NAME],
            wanted.settings(),
            deletion_protection=wanted.deletion_protection,
            once=op.once_of(request, given, wanted),
        )
        headers = {"ETag": f'"{view.log.version}"'}
        if is_new:
            headers["Location"] = f"/v1/logs/{given[op.NAME]}"
        return json_value(models.log_json(view), 201 if is_new else 200, headers)

    async def get(self, _request: web.Request, given: Given) -> web.Response:
        """GET /v1/logs/{name}."""
        view = await self._logs.get(given[op.NAME])
        return json_value(models.log_json(view), headers={"ETag": f'"{view.log.version}"'})

    async def page(self, request: web.Request, given: Given) -> web.Response:
        """GET /v1/logs."""
        views, following = await self._logs.views.page(
            after=given[AFTER],
            limit=given[LIMIT],
            prefix=given[PREFIX] or "",
            shown=caller_of(request).listed(Scope.READ),
        )
        return json_value({"logs": [models.log_json(view) for view in views], "next": following})

    async def patch(self, request: web.Request, given: Given) -> web.Response:
        """PATCH /v1/logs/{name}."""
        wanted = await body.read_model(request, self._room, models.LogPatch)
        view = await self._logs.change(
            given[op.NAME],
            wanted.limits,
            deletion_protection=wanted.deletion_protection,
            expect=given[op.IF_MATCH],
            created_at=given[CREATED],
            once=op.once_of(request, given, wanted, given[op.IF_MATCH], given[CREATED]),
        )
        return json_value(models.log_json(view), headers={"ETag": f'"{view.log.version}"'})

    async def delete(self, _request: web.Request, given: Given) -> web.Response:
        """DELETE /v1/logs/{name}."""
        await self._logs.delete(given[op.NAME], created_at=given[CREATED])
        return no_content()

    async def close(self, request: web.Request, given: Given) -> web.Response:
        """POST /v1/logs/{name}/close."""
        once = op.once_of(request, given, given[CREATED])
        view = await self._logs.close(given[op.NAME], created_at=given[CREATED], once=once)
        return json_value(models.log_json(view))

    async def roll(self, _request: web.Request, given: Given) -> web.Response:
        """POST /v1/logs/{name}/roll."""
        return json_value(models.log_json(await self._logs.roll(given[op.NAME])))

    async def truncate(self, request: web.Request, given: Given) -> web.Response:
        """POST /v1/logs/{name}/truncate."""
        wanted = await body.read_model(request, self._room, models.LogTruncate)
        once = op.once_of(request, given, wanted, given[CREATED])
        view = await self._logs.truncate(
            given[op.NAME], wanted.before, created_at=given[CREATED], once=once
        )
        return json_value(models.log_json(view))

    async def archived(self, request: web.Request, given: Given) -> web.Response:
        """POST /v1/logs/{name}/archived."""
        wanted = await body.read_model(request, self._room, models.LogArchived)
        once = op.once_of(request, given, wanted, given[CREATED])
        view = await self._logs.archived(
            given[op.NAME],
            wanted.through,
            expect=wanted.expect,
            created_at=given[CREATED],
            once=once,
        )
        return json_value(models.log_json(view))

    async def open(self, request: web.Request, given: Given) -> web.Response:
        """POST /v1/logs/{name}/open."""
        wanted = await body.read_model(request, self._room, models.LogOpen)
        token, next_offset = await self._logs.open(
            given[op.NAME], wanted.owner, created_at=given[CREATED]
        )
        return json_value({"writer_token": token, "next_offset": next_offset})

    def routes(self) -> list[Route]:
        """The operations with their handlers."""
        return [
            Route(LIST, self.page),
            Route(PUT, self.put),
            Route(GET, self.get),
            Route(PATCH, self.patch),
            Route(DELETE, self.delete),
            Route(OPEN, self.open),
            Route(ROLL, self.roll),
            Route(TRUNCATE, self.truncate),
            Route(ARCHIVED, self.archived),
            Route(CLOSE, self.close),
        ]
