"""The resource /v1/logs/{name}/queues: work queues, which share a log's records among workers."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import orjson
from aiohttp import web

from quorumlog import errors
from quorumlog.net import parameters
from quorumlog.net.operations import Reply
from quorumlog.protocol.queue_requests import PutQueue, Settle, Settlement
from quorumlog.protocol.queue_state import Queue
from quorumlog.protocol.values import LOG_NAME
from services.gateway.edge import operations as op
from services.gateway.edge import queue_models as models
from services.gateway.edge.access.scopes import LOOK, Kind, Named, Scope, caller_of, on
from services.gateway.edge.consumers import KEPT
from services.gateway.edge.http import body
from services.gateway.edge.http.limits import Room
from services.gateway.edge.http.media import json_bytes, json_value, no_content
from services.gateway.edge.pages import records_json
from services.gateway.edge.starts import start_of_json
from services.gateway.logs.queues import Claimed, QueueService

PAGE_MAX: Final = 100
"""Maximum queues of a page, equal to the maximum queues of a log."""
CLAIM_BYTES_MAX: Final = 8 << 20
"""Maximum `max_bytes` of a claim. Chosen by judgement."""

QUEUE: Final = parameters.path_text("queue", LOG_NAME, "The queue.", "mail")
LIMIT: Final = parameters.query_integer("limit", 1, PAGE_MAX, "Maximum queues of a page.", 100)
AFTER: Final = parameters.query_text("after", LOG_NAME, "List queues after this name.")
MAX_BYTES: Final = parameters.query_integer(
    "max_bytes",
    1,
    CLAIM_BYTES_MAX,
    "Approximate maximum of bytes. One record is always returned.",
    op.PAGE_BYTES,
)

IF_MATCH: Final = parameters.header_version(
    "The expected version of the queue's settings, as in `ETag`. For any other version: 412, and "
    "nothing changes."
)
IF_NONE_MATCH: Final = parameters.header_star("`*`: create the queue only if it does not exist.")

_ONE: Final = "/v1/logs/{name}/queues/{queue}"
_EXAMPLE: Final[dict[str, Any]] = {
    "log": "mails",
    "queue": "mail",
    "state": "ok",
    "log_created_at": "2026-01-02T03:04:05.678901Z",
    "version": 9217,
    "lease_ms": 30000,
    "max_attempts": 5,
    "dead_letter_log": "mails.dead",
    "order": "none",
    "max_in_flight": 1000,
    "floor": 8,
    "next": 12,
    "depth": 5,
    "in_flight": 2,
    "unsettled": 2,
    "redelivered": 1,
    "dead": 0,
    "dying": 0,
    "dead_letter_error": None,
    "lost": 0,
}
_RECORD: Final[dict[str, Any]] = {
    "offset": 9,
    "timestamp": "2026-01-02T03:04:05.678Z",
    "ledger_id": 1,
    "entry_id": 4,
    "key": None,
    "headers": {},
    "data": "aGVsbG8=",
    "attempt": 1,
    "claim": 9217,
}
_CLAIMED: Final = {
    "log": "mails",
    "queue": "mail",
    "records": [_RECORD],
    "lease_ms": 30000,
    "limit": None,
    "refused": [],
}
_SETTLED: Final = {
    "done": 1,
    "refused": [{"claim": 9218, "offsets": [10], "reason": "claim-ended"}],
}
_PARTS: Final = {"claims": [{"claim": 9217, "offsets": [9]}, {"claim": 9218}]}
_ERRORS: Final = (*KEPT, errors.NoSuchQueue)
_AS_QUEUE: Final = (models.QueueModel, {"a queue": _EXAMPLE})
_AS_SETTLED: Final = (models.QueueSettled, {"one is refused": _SETTLED})
_WORK: Final = on(Named.LOG, Scope.WORK)
_settlement: Final = partial(
    op.operation, given=(op.NAME, QUEUE), errors=_ERRORS, scope=_WORK, needs_body=True
)
"""Declares an operation that settles claimed records."""


class QueueRoutes(op.Handlers, tag="Queues"):
    """HTTP handlers for work queues."""

    def __init__(self, queues: QueueService, room: Room) -> None:
        self._queues, self._room = queues, room

    @op.operation(
        "GET /v1/logs/{name}/queues",
        (op.NAME, LIMIT, AFTER),
        replies=op.gives(
            "A page of queues.",
            models.QueueList,
            {"last page": {"queues": [_EXAMPLE], "next": None}},
        ),
        errors=_ERRORS,
        scope=on(Named.LOG, *LOOK, Scope.WORK),
    )
    async def list_queues(self, _request: web.Request, given: parameters.Given) -> web.Response:
        """List a log's queues.

        The queues are sorted by name.
        """
        limit = given[LIMIT]
        found = await self._queues.views(given[op.NAME], after=given[AFTER] or "", limit=limit + 1)
        shown = [models.queue_json(row, end) for row, end in found[:limit]]
        following = shown[-1]["queue"] if len(found) > limit else None
        return json_value({"queues": shown, "next": following})

    @op.operation(
        f"GET {_ONE}",
        (op.NAME, QUEUE),
        replies=op.gives("The queue.", *_AS_QUEUE, op.ETAG),
        errors=_ERRORS,
        scope=on(Named.LOG, *LOOK, Scope.WORK),
    )
    async def get_queue(self, _request: web.Request, given: parameters.Given) -> web.Response:
        """Get a queue."""
        return _viewed(await self._queues.look(given[op.NAME], given[QUEUE]))

    @op.operation(
        f"PUT {_ONE}",
        (op.NAME, QUEUE, IF_MATCH, IF_NONE_MATCH),
        body=op.takes(
            models.QueuePut,
            {"usual": {}, "dead letters": {"max_attempts": 5, "dead_letter_log": "mails.dead"}},
        ),
        replies=op.gives("The queue.", *_AS_QUEUE, op.ETAG),
        errors=(
            *_ERRORS,
            errors.QueueExists,
            errors.TooManyQueues,
            errors.VersionConflict,
            errors.LogReplaced,
            errors.RequestOutdated,
        ),
        scope=on(Named.LOG, Scope.MANAGE),
        is_audited=True,
    )
    async def put_queue(self, request: web.Request, given: parameters.Given) -> web.Response:
        """Create a queue, or change its settings.

        A queue delivers each record of the log from `from` on to one worker at a time, until a
        worker acknowledges the record. If the log was deleted and created again, the request
        replaces the queue. The dead-letter log must exist. To set a dead-letter log, an access token
        also needs `append` on that log and `read` on the queue's log.
        """
        wanted = await body.read_model(request, self._room, models.QueuePut)
        name, dead = given[op.NAME], wanted.dead_letter_log
        if dead is not None:
            if dead == name:
                raise parameters.invalid("/dead_letter_log", "must not be the queue's log")
            op.NAME.parse(dead, "/dead_letter_log")  # rejects reserved names
            caller_of(request).check(Scope.APPEND, Kind.LOGS, dead)
            caller_of(request).check(Scope.READ, Kind.LOGS, name)
        start = start_of_json(wanted.start, "/from")
        asked = PutQueue(name, given[QUEUE], "", wanted.settings)
        asked = replace(asked, version=given[IF_MATCH], is_new=given[IF_NONE_MATCH])
        return _viewed(await self._queues.put(asked, start))

    @op.operation(
        f"DELETE {_ONE}",
        (op.NAME, QUEUE, IF_MATCH),
        replies={204: Reply("The queue is deleted.")},
        errors=(*_ERRORS, errors.VersionConflict, errors.RequestOutdated),
        scope=on(Named.LOG, Scope.MANAGE),
        is_audited=True,
    )
    async def delete_queue(self, _request: web.Request, given: parameters.Given) -> web.Response:
        """Delete a queue.

        The queue's claims end, and its progress is lost. Records that the queue is still moving to
        the dead-letter log may never arrive there. The log and the dead letters are kept. With
        `If-Match`, a late copy of the request does not delete a later queue with the same name.
        """
        await self._queues.delete(given[op.NAME], given[QUEUE], given[IF_MATCH])
        return no_content()

    @op.operation(
        f"POST {_ONE}/claim",
        (op.NAME, QUEUE, MAX_BYTES, op.ENCODING),
        body=op.takes(
            models.QueueClaim,
            {"usual": {"max": 100, "wait_ms": 30000}, "next": {"ack": [{"claim": 9217}]}},
        ),
        replies=op.gives("The records.", models.QueueClaimed, {"one": _CLAIMED}),
        errors=(
            *_ERRORS,
            errors.LogReplaced,
            errors.EntryUnavailable,
            errors.RecoveryBlocked,
        ),
        scope=_WORK,
    )
    async def claim_records(self, request: web.Request, given: parameters.Given) -> web.Response:
        """Claim records.

        The worker has the records until it settles them, or until the claim ends. Without an
        extension, a claim ends `lease_ms` after the request. Records for redelivery come first. With
        `ack`, the request first acknowledges records of earlier claims, at no extra cost.
        """
        wanted = await body.read_model(request, self._room, models.QueueClaim)
        name, queue = given[op.NAME], given[QUEUE]
        claiming = self._queues.claim(
            name,
            queue,
            wanted.max,
            wait_s=wanted.wait_ms / 1000,
            max_bytes=given[MAX_BYTES],
            acked=wanted.acked,
        )
        claimed = await (self._room.wait(claiming) if wanted.wait_ms else claiming)
        if claimed is None:  # the client has disconnected, or this gateway stops
            claimed = Claimed(0, (), {}, 0, "")
        try:
            size = sum(found.columns.size for page in claimed.pages for found in page.batches)
            self._room.keep(request, size)
        except errors.Overloaded:
            await self._queues.give_back(name, queue, claimed)
            raise
        head: dict[str, Any] = {"log": name, "queue": queue, "lease_ms": claimed.lease_ms}
        head |= {"limit": claimed.limit or None, "refused": models.refused_json(claimed.refused)}
        items = b",".join(_records(claimed, given[op.ENCODING]))
        return json_bytes(b'%b,"records":[%b]}' % (orjson.dumps(head)[:-1], items))

    @_settlement(
        f"POST {_ONE}/ack",
        body=op.takes(models.QueueSettle, {"two claims": _PARTS}),
        replies=op.gives("The result.", *_AS_SETTLED),
    )
    async def ack_records(self, request: web.Request, given: parameters.Given) -> web.Response:
        """Acknowledge records.

        Acknowledged records are never delivered again. `refused` lists records whose claim has
        ended, and records that are already acknowledged, possibly by an earlier copy of the request.
        """
        wanted = await body.read_model(request, self._room, models.QueueSettle)
        return await self._settled(given, Settlement.ACK, wanted)

    @_settlement(
        f"POST {_ONE}/nak",
        body=op.takes(models.QueueNak, {"in a minute": _PARTS | {"delay_ms": 60000}}),
        replies=op.gives("The result.", *_AS_SETTLED),
    )
    async def nak_records(self, request: web.Request, given: parameters.Given) -> web.Response:
        """Return records to the queue.

        After `delay_ms`, any worker may claim the records. A record that was delivered `max_attempts`
        times goes to the dead-letter log instead.
        """
        wanted = await body.read_model(request, self._room, models.QueueNak)
        return await self._settled(given, Settlement.NAK, wanted, wanted.delay_ms, wanted.reason)

    @_settlement(
        f"POST {_ONE}/extend",
        body=op.takes(models.QueueSettle, {"two claims": _PARTS}),
        replies=op.gives("The result.", *_AS_SETTLED),
    )
    async def extend_claims(self, request: web.Request, given: parameters.Given) -> web.Response:
        """Extend claims.

        Each claim that still has any of these records is extended to a full lease from now on.
        """
        wanted = await body.read_model(request, self._room, models.QueueSettle)
        return await self._settled(given, Settlement.EXTEND, wanted)

    @op.operation(
        f"POST {_ONE}/redrive",
        (op.NAME, QUEUE),
        body=op.takes(models.QueueRedrive, {"usual": {"max": 100}}),
        replies=op.gives("The result.", models.QueueRedriven, {"three": {"redriven": 3}}),
        errors=(
            *_ERRORS,
            errors.LogReplaced,
            errors.LogClosed,
            errors.LogFenced,
            errors.EntryUnavailable,
        ),
        scope=on(Named.LOG, Scope.MANAGE),
        is_audited=True,
    )
    async def redrive_queue(self, request: web.Request, given: parameters.Given) -> web.Response:
        """Move dead letters back to the queue's log.

        Appends the queue's oldest dead letters to the queue's log, each once, as new records. If the
        request fails, the cluster still finishes appends that it began. An access token also needs
        `append` on the log.
        """
        wanted = await body.read_model(request, self._room, models.QueueRedrive)
        caller_of(request).check(Scope.APPEND, Kind.LOGS, given[op.NAME])
        sent = await self._queues.redrive(given[op.NAME], given[QUEUE], wanted.max)
        return json_value({"redriven": sent})

    async def _settled(
        self,
        given: parameters.Given,
        kind: Settlement,
        wanted: models.QueueSettle,
        delay_ms: int = 0,
        reason: str = "",
    ) -> web.Response:
        asked = Settle(given[op.NAME], given[QUEUE], kind, wanted.items, delay_ms, reason)
        settled = await self._queues.settle(asked)
        return json_value({"done": settled.done, "refused": models.refused_json(settled.refused)})


def _viewed(view: tuple[Queue, int]) -> web.Response:
    headers = {"ETag": f'"{view[0].settings_version}"'}
    return json_value(models.queue_json(*view), headers=headers)


def _records(claimed: Claimed, encoding: str) -> Iterator[bytes]:
    """Encode claimed records, each with the attempt and the claim."""
    for page in claimed.pages:
        for found in page.batches:
            for offset, item in enumerate(records_json(found, encoding), found.first_offset):
                yield b'%b,"attempt":%d,"claim":%d}' % (
                    item[:-1],
                    claimed.attempts[offset],
                    claimed.token,
                )
