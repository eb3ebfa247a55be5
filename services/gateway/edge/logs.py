"""The resource /v1/logs: create, read, change, roll, truncate, close and delete named logs."""

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
from services.gateway.edge.models import WRITER_EXAMPLE
from services.gateway.edge.starts import created_at_of
from services.gateway.logs.manager import LogManager
from services.gateway.logs.values import CREATED_AT, STREAM_PREFIX

LIMIT: Final = query_integer("limit", 1, BATCH_ENTRIES_MAX, "Maximum logs of a page.", 100)
AFTER: Final = query_text("after", LOG_NAME, "List logs after this name.")
PREFIX: Final = query_text("prefix", LOG_NAME, "List logs whose names have this prefix.")

CREATED: Final[Parameter[str | None]] = Parameter(
    "created",
    "query",
    created_at_of,
    {"type": "string", "pattern": f"^{CREATED_AT}$"},
    "The log's `created_at` from an earlier response, or the part of an event id after the dot. If "
    "the log has been deleted and created again, the response is 409 `log-replaced`, and nothing "
    "changes.",
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
        "merge_below_bytes": 67108864,
        "cleanup_policy": "delete",
        "min_compaction_lag_s": 0,
        "delete_retention_s": 86400,
        "max_dirty_percent": 50,
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
    "owner": WRITER_EXAMPLE,
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
"""Errors of a request to a log's owner, including errors of a takeover by this gateway."""
WRITING: Final = (
    *TAKING_OVER,
    errors.LogClosed,
    errors.NotTheOwner,
    errors.QuorumTimeout,
    errors.WriterLost,
)
"""Errors of a request that appends to a log, or that makes the log's owner begin a ledger."""


class LogRoutes(op.Handlers, tag="Logs"):
    """HTTP handlers for whole logs."""

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

        The logs are sorted by name. `next` is the `after` of the next page, or null at the end.
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
            **op.gives("The existing log.", *_LOG),
        },
        errors=(*TAKING_OVER, errors.LogExists),
        scope=on(Named.LOG, Scope.MANAGE),
        is_audited=True,
    )
    async def put_log(self, request: web.Request, given: Given) -> web.Response:
        """Create a log.

        If the log exists, the response is 200 for equal settings, and 409 for other settings.
        """
        if given[op.NAME].startswith(STREAM_PREFIX):
            raise invalid(
                op.NAME.pointer, f"must not begin with {STREAM_PREFIX}: use PUT /v1/stream/…"
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
        """Get a log."""
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

        Only the named limits change, and take effect within seconds. If the log's `version` (its
        `ETag`) differs from `If-Match`, the response is 412 `version-conflict` with the current
        `version`. A roll or a new owner also changes the version. A protected log can't be deleted,
        truncated or overwritten (409 `log-protected`), but retention still applies.
        """
        wanted = await body.read_model(request, self._room, models.LogPatch)
        policy = wanted.limits.get("cleanup_policy", "delete")
        if policy != "delete" and given[op.NAME].startswith(STREAM_PREFIX):
            raise invalid("/cleanup_policy", "must be `delete` for a stream, which has no keys")
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
        replies={204: Reply("The log is deleted, and its name is free.")},
        errors=(errors.NoSuchLog, errors.LogProtected, errors.RecoveryBlocked),
        scope=on(Named.LOG, Scope.MANAGE),
        is_audited=True,
    )
    async def delete_log(self, _request: web.Request, given: Given) -> web.Response:
        """Delete a log with its ledgers.

        `created` identifies the log to delete. If another log has the name now, the response is 404
        `no-such-log`.
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

        Earlier writers are fenced. Afterwards, appends must send `Writer-Token`.
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
        """Start a new ledger for a log."""
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
        """Truncate a log.

        Drops ledgers that end below the offset `before`. The response has the new `first_offset`.
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
        """Record that a log is archived up to an offset.

        The change is a compare-and-swap on `archived_through`. Afterwards, retention keeps records
        that are not archived.
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
        """Close a log permanently."""
        once = op.once_of(request, given, given[CREATED])
        view = await self._logs.close(given[op.NAME], created_at=given[CREATED], once=once)
        return json_value(models.log_json(view))
