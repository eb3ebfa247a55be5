"""The resource /v1/logs: named logs, each as a whole."""

from typing import Any, Final

from aiohttp import web

from quorumlog import errors
from quorumlog.net.operations import Reply
from quorumlog.net.parameters import Given, Parameter, invalid, query_integer, query_text
from quorumlog.protocol.values import LOG_NAME
from services.gateway.edge import log_models as models
from services.gateway.edge import operations as op
from services.gateway.edge.access.scopes import LOOK, Named, Scope, caller_of, on
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
_DONE: Final = op.gives("Done.", *_LOG)
TAKING_OVER: Final = (
    errors.NoSuchLog,
    errors.LogReplaced,
    errors.NotEnoughBookies,
    errors.RecoveryBlocked,
    errors.EntryUnavailable,
    errors.LogFull,
)
"""Errors of a request to a log's owner, which this gateway may become."""
WRITING: Final = (
    *TAKING_OVER,
    errors.LogClosed,
    errors.NotTheOwner,
    errors.QuorumTimeout,
    errors.WriterLost,
)
"""Errors of a request that appends to a log, or has the owner begin a ledger."""


class LogRoutes(op.Handlers, tag="Logs"):
    """Handlers of logs."""

    def __init__(self, logs: LogManager, room: Room) -> None:
        self._logs = logs
        self._room = room

    @op.operation(
        "GET /v1/logs",
        (LIMIT, AFTER, PREFIX),
        replies=op.gives(
            "A page of logs.", models.LogList, {"last page": {"logs": [_EXAMPLE], "next": None}}
        ),
        errors=(errors.EntryUnavailable, errors.RecoveryBlocked),
        scope=on(Named.SOME, Scope.READ),
    )
    async def list_logs(self, request: web.Request, given: Given) -> web.Response:
        """List logs.

        By name. `next` is the next `after`, null at the end.
        """
        views, following = await self._logs.views.page(
            after=given[AFTER],
            limit=given[LIMIT],
            prefix=given[PREFIX] or "",
            shown=caller_of(request).listed(Scope.READ),
        )
        return json_value({"logs": [models.log_json(view) for view in views], "next": following})

    @op.operation(
        "PUT /v1/logs/{name}",
        (op.NAME, op.IDEMPOTENCY_KEY),
        body=op.takes(models.LogCreate, {"default": {}, "small": {"roll_entries": 1000}}),
        replies={
            **op.gives("The new log.", *_LOG, {"Location": "The log's path."}, status=201),
            **op.gives("The log that was there.", *_LOG),
        },
        errors=(*TAKING_OVER, errors.LogExists),
        scope=on(Named.LOG, Scope.MANAGE),
        is_audited=True,
    )
    async def put_log(self, request: web.Request, given: Given) -> web.Response:
        """Create a log.

        A repeat with the same settings gets the same log; with other settings 409.
        """
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

    @op.operation(
        "GET /v1/logs/{name}",
        (op.NAME,),
        replies=op.gives("The log.", *_LOG, op.ETAG),
        errors=(errors.NoSuchLog, errors.EntryUnavailable, errors.RecoveryBlocked),
        scope=on(Named.LOG, *LOOK),
    )
    async def get_log(self, _request: web.Request, given: Given) -> web.Response:
        """Look at a log."""
        view = await self._logs.get(given[op.NAME])
        return json_value(models.log_json(view), headers={"ETag": f'"{view.log.version}"'})

    @op.operation(
        "PATCH /v1/logs/{name}",
        (op.NAME, op.IF_MATCH, CREATED, op.IDEMPOTENCY_KEY),
        body=op.takes(
            models.LogPatch,
            {"a week": {"retention_seconds": 604800}, "on": {"deletion_protection": True}},
        ),
        replies=op.gives("The log.", *_LOG, op.ETAG),
        errors=(
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
    async def patch_log(self, request: web.Request, given: Given) -> web.Response:
        """Change a log's limits, or its protection from deletion.

        Limits that are named get new values, and hold within seconds for its owner and its
        retention. With `If-Match` only if the log has this `version` (its `ETag`): else 412
        `version-conflict`, whose `version` is the log's; a roll or a new owner changes it too. A
        protected log can't be deleted, truncated or overwritten: 409 `log-protected`. Its retention
        goes on.
        """
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

    @op.operation(
        "DELETE /v1/logs/{name}",
        (op.NAME, CREATED),
        replies={204: Reply("It is deleted, and the name is free.")},
        errors=(errors.NoSuchLog, errors.LogProtected, errors.RecoveryBlocked),
        scope=on(Named.LOG, Scope.MANAGE),
        is_audited=True,
    )
    async def delete_log(self, _request: web.Request, given: Given) -> web.Response:
        """Delete a log with its ledgers.

        With `created` only that log is deleted. If another log has the name since, the response is
        404 `no-such-log`.
        """
        await self._logs.delete(given[op.NAME], created_at=given[CREATED])
        return no_content()

    @op.operation(
        "POST /v1/logs/{name}/open",
        (op.NAME, CREATED),
        body=op.takes(models.LogOpen, {"me": {"owner": "me"}}),
        replies=op.gives(
            "Done.", models.LogOpened, {"first": {"writer_token": 1, "next_offset": 0}}
        ),
        errors=(*TAKING_OVER, errors.LogClosed, errors.NotTheOwner, errors.WriterLost),
        scope=on(Named.LOG, Scope.APPEND),
        needs_body=True,
        is_audited=True,
    )
    async def open_log(self, request: web.Request, given: Given) -> web.Response:
        """Open a log for one writer.

        Earlier writers are fenced off. From then on appends need `Writer-Token`.
        """
        wanted = await body.read_model(request, self._room, models.LogOpen)
        token, next_offset = await self._logs.open(
            given[op.NAME], wanted.owner, created_at=given[CREATED]
        )
        return json_value({"writer_token": token, "next_offset": next_offset})

    @op.operation(
        "POST /v1/logs/{name}/roll",
        (op.NAME,),
        body=op.NOTHING,
        replies=_DONE,
        errors=WRITING,
        scope=on(Named.LOG, Scope.MANAGE),
    )
    async def roll_log(self, _request: web.Request, given: Given) -> web.Response:
        """Go on in a new ledger."""
        return json_value(models.log_json(await self._logs.roll(given[op.NAME])))

    @op.operation(
        "POST /v1/logs/{name}/truncate",
        (op.NAME, CREATED, op.IDEMPOTENCY_KEY),
        body=op.takes(models.LogTruncate, {"ten": {"before": 10}}),
        replies=_DONE,
        errors=(*TAKING_OVER, errors.LogProtected),
        scope=on(Named.LOG, Scope.MANAGE),
        needs_body=True,
        is_audited=True,
    )
    async def truncate_log(self, request: web.Request, given: Given) -> web.Response:
        """Drop old ledgers.

        Whole ledgers that end below `before`; `first_offset` tells the result.
        """
        wanted = await body.read_model(request, self._room, models.LogTruncate)
        once = op.once_of(request, given, wanted, given[CREATED])
        view = await self._logs.truncate(
            given[op.NAME], wanted.before, created_at=given[CREATED], once=once
        )
        return json_value(models.log_json(view))

    @op.operation(
        "POST /v1/logs/{name}/archived",
        (op.NAME, CREATED, op.IDEMPOTENCY_KEY),
        body=op.takes(models.LogArchived, {"first": {"through": 10, "expect": None}}),
        replies=_DONE,
        errors=(*TAKING_OVER, errors.VersionConflict),
        scope=on(Named.LOG, Scope.MANAGE),
        needs_body=True,
        is_audited=True,
    )
    async def mark_log_archived(self, request: web.Request, given: Given) -> web.Response:
        """Note that records are archived.

        By compare-and-swap on `archived_through`. From then on retention keeps what is not
        archived.
        """
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

    @op.operation(
        "POST /v1/logs/{name}/close",
        (op.NAME, CREATED, op.IDEMPOTENCY_KEY),
        body=op.NOTHING,
        replies=_DONE,
        errors=(*TAKING_OVER, errors.NotTheOwner, errors.WriterLost),
        scope=on(Named.LOG, Scope.MANAGE),
        is_audited=True,
    )
    async def close_log(self, request: web.Request, given: Given) -> web.Response:
        """Close a log for good."""
        once = op.once_of(request, given, given[CREATED])
        view = await self._logs.close(given[op.NAME], created_at=given[CREATED], once=once)
        return json_value(models.log_json(view))
