"""Routes of the internal listener, which only other services of the cluster may call.

A gateway forwards a client's append or close to the gateway that writes the ledger. The forwarded request has the same
path below `/internal`, the same query and the same body, and the same handler. The other routes serve requests that
gateways and autorecovery make for their own purposes.

Each request names the gateway instance that must serve it. Any other instance rejects the request with `writer-lost`
and the outcome not done (rule 11). The routes check passwords and bodies again, because any program that has the
cluster's secret can call them.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from aiohttp import web

from quorumlog import header
from quorumlog.errors import NOT_DONE, BadRequest, InvalidRequest, TooLarge, WriterLost
from quorumlog.net.bodies import parsed
from quorumlog.net.identity import GATEWAYS, HEALERS, WRITERS
from quorumlog.net.operations import Reply, Route, Routes
from quorumlog.net.parameters import (
    Given,
    header_text,
    path_text,
    query_choice,
    query_integer,
    query_text,
)
from quorumlog.protocol import batch, packed
from quorumlog.protocol.batch import ProducerSeq
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.ids import ID_MAX
from quorumlog.protocol.log import Expiry, LogState
from quorumlog.protocol.log.messages import Append, Consult, Publish
from quorumlog.protocol.values import LOG_NAME, MEMBER_OR_NAME
from quorumlog.wire.position_bodies import OWN_LOGS
from quorumlog.wire.row_bodies import BadRows
from services.gateway.edge import entries
from services.gateway.edge.entries import EntryRoutes
from services.gateway.edge.http import body
from services.gateway.edge.http.limits import Room
from services.gateway.edge.http.media import json_value
from services.gateway.edge.ledgers import LedgerRoutes
from services.gateway.edge.logs import CREATED
from services.gateway.edge.operations import EXPECT, LEDGER_ID, WAIT_MS
from services.gateway.engine import Engine
from services.gateway.logs.manager import LogManager
from services.gateway.logs.peers import EndsBody
from services.gateway.rates import Rates

_ID_CHARS_MAX: Final = 200
_BODY_BYTES_MAX: Final = 2 * batch.BATCH_BYTES_MAX
"""Limit of a request's body: three times a page of logs. A record batch has a lower limit, which is
checked when the batch becomes an entry."""

FORWARDED: Final = (
    EntryRoutes.operations["append_entries"],
    LedgerRoutes.operations["close_ledger"],
)
"""The public operations that gateways forward to a ledger's writer."""

WRITER: Final = header_text(
    header.FORWARDED_WRITER,
    "The gateway instance that the request is for. Any other instance responds with 409.",
    chars_max=_ID_CHARS_MAX,
)
MEMBER: Final = query_text("member", MEMBER_OR_NAME, "The bookie to replace.")
NAME: Final = path_text("name", LOG_NAME, "The log.")
CALL: Final = query_choice(
    "call",
    ("append", "publish", "consult", "roll"),
    "The operation that the log's owner is to perform.",
    "roll",
)
TOKEN: Final = query_integer("token", 0, ID_MAX, "The writer token.")
TERM: Final = query_text(
    "term", "[0-9a-f-]{1,36}", "The term for which the receiver counts the log's accesses."
)
IDLE_S: Final = query_integer(
    "idle_s", 0, ID_MAX, "Seconds without an access after which the log expires.", 0
)
COUNTS: Final = query_integer("counts", 0, 1, "1: counts as an access to the log; 0: doesn't.", 0)
SINCE: Final = query_integer("since", 0, ID_MAX, "The log's end before the producer began.", 0)


def ledger_routes(engine: Engine, instance: str, public: Sequence[Route]) -> list[Route]:
    """Returns the routes for this instance's ledgers, with those of `FORWARDED` operations."""
    inner, routes, ledger = _LedgerRoutes(engine), Routes(), "/internal/ledgers/{ledger_id}"
    asked = (LEDGER_ID, entries.AFTER, WAIT_MS)
    routes.add(f"GET {ledger}/lac", *asked, roles=GATEWAYS)(inner.last_add_confirmed)
    routes.add(f"POST {ledger}/replace", LEDGER_ID, MEMBER, roles=HEALERS)(inner.replace)
    routes += [inner.forwarded(one) for one in public if one.operation in FORWARDED]
    anybodys = Routes()
    anybodys.add("GET /internal/instance", roles=WRITERS)(inner.instance)
    return [*anybodys, *(_for_instance(instance, one) for one in routes)]


def log_routes(logs: LogManager, instance: str, room: Room) -> list[Route]:
    """Returns the routes for logs that this instance owns. `room` limits the memory of bodies."""
    inner, log, routes = _LogRoutes(logs, room), "/internal/logs/{name}", Routes()
    asks = partial(routes.add, roles=GATEWAYS)
    asks("POST /internal/log-ends")(inner.ends)
    asks(f"POST {log}/forwarded", NAME, CALL, EXPECT, TOKEN, SINCE, CREATED)(inner.forwarded)
    asks(f"POST {log}/access", NAME, TERM, IDLE_S, COUNTS)(inner.access)
    return [_for_instance(instance, one) for one in routes]


def rate_routes(rates: Rates, instance: str) -> list[Route]:
    """Returns the route by which other gateways collect this instance's rates."""
    routes = Routes()

    @routes.add("GET /internal/rates", roles=GATEWAYS)
    async def rates_of_instance(_request: web.Request, _given: Given) -> web.Response:
        """Returns this gateway's rates of the last hour."""
        return json_value(rates.own())

    return [_for_instance(instance, one) for one in routes]


def _for_instance(instance: str, inner: Route) -> Route:
    """Returns a route that rejects requests for other instances, and adds this instance's id to responses."""

    async def handle(request: web.Request, given: Given) -> web.StreamResponse:
        if given[WRITER] != instance:
            raise WriterLost(
                "the gateway instance of this request no longer listens at this URL",
                outcome=NOT_DONE,
                headers={header.FORWARDED_WRITER: instance},
            )
        response = await inner.handler(request, given)
        response.headers[header.FORWARDED_WRITER] = instance
        return response

    asked = replace(inner.operation, parameters=(*inner.operation.parameters, WRITER))
    return Route(asked, handle)


class _LedgerRoutes:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def instance(self, _request: web.Request, _given: Given) -> web.Response:
        """Returns the id of this gateway process."""
        me = self._engine.writer.id
        return json_value({"id": me}, headers={header.FORWARDED_WRITER: me})

    def forwarded(self, public: Route) -> Route:
        """Returns the internal route for a public route's requests that another gateway forwarded.
        A forwarded request is never forwarded again (rule 11).
        """

        async def handle(request: web.Request, given: Given) -> web.StreamResponse:
            engine, ledger_id = self._engine, given[LEDGER_ID]
            if not engine.writes(ledger_id):
                writer = (await engine.rows.row(ledger_id)).writer
                if writer is None or writer.id != engine.writer.id:
                    detail = "this gateway is not the ledger's writer"
                    raise WriterLost(detail, ledger_id=ledger_id, outcome=NOT_DONE)
            request[entries.FORWARDED] = True
            return await public.handler(request, given)

        method, path = public.operation.method, public.operation.path
        # The internal listener may also reject a request before it reaches the handler.
        replies = {**public.operation.replies, "default": Reply("A problem.")}
        key = f"{method} /internal{path}"
        inside = replace(public.operation, key=key, roles=GATEWAYS, replies=replies)
        return Route(inside, handle)

    async def last_add_confirmed(self, _request: web.Request, given: Given) -> web.Response:
        """Returns the writer's LAC. With `after`, first waits up to `wait_ms` for a higher LAC."""
        known, version = await self._engine.reads.writers_lac(
            given[LEDGER_ID], after=given[entries.AFTER], wait_s=given[WAIT_MS] / 1000
        )
        return json_value(
            {
                "last_add_confirmed": known.last_add_confirmed,
                "closed": known.closed,
                "version": version,
            }
        )

    async def replace(self, _request: web.Request, given: Given) -> web.Response:
        """Requests the replacement of a bookie in the open fragment (rule 21)."""
        member = given[MEMBER]
        if member is None:
            raise InvalidRequest("query parameter `member` is required: name the bookie to replace")
        self._engine.handles.get(given[LEDGER_ID]).replace(member)
        return json_value({})


class _LogRoutes:
    def __init__(self, logs: LogManager, room: Room) -> None:
        self._logs, self._room = logs, room

    async def forwarded(self, request: web.Request, given: Given) -> web.Response:
        """Performs an append, publication, consultation or roll that another gateway forwarded."""
        data = await body.read(request, self._room, _BODY_BYTES_MAX)
        call: Append | Publish | Consult | None = None
        match given[CALL]:
            case "append":
                head, expect, token = _checked(data), given[EXPECT], given[TOKEN]
                since, created_at = given[SINCE], given[CREATED]
                call = Append(
                    data, head.count, head.producer, expect, token, since, created_at=created_at
                )
            case "publish":
                call = parsed(data, Publish)
            case "consult" if given[NAME] in OWN_LOGS:
                call = Consult(data)
            case other if other != "roll":
                raise InvalidRequest("`call=consult` is allowed only for the cluster's own logs")
            case _:
                pass
        try:
            return json_value(await self._logs.forwarded(given[NAME], call))
        except BadRows as error:
            raise BadRequest(str(error)) from error

    async def ends(self, request: web.Request, _given: Given) -> web.Response:
        """Returns the end of each requested log that this process owns."""
        asked = parsed(await body.read(request, self._room, _BODY_BYTES_MAX), EndsBody)
        heads = (LogHead(name, 0, LogState.OPEN, token, last) for name, last, token in asked.logs)
        return json_value({"ends": self._logs.views.ends_here(heads)})

    async def access(self, _request: web.Request, given: Given) -> web.Response:
        """Counts an access at the log's expiry keeper, and returns whether the log expires."""
        term = given[TERM]
        if term is None:
            raise InvalidRequest("query parameter `term` is required: send the owner's term")
        expiry = Expiry(given[IDLE_S], self._logs.me, term)
        verdict = await self._logs.accesses.here(given[NAME], expiry, is_access=given[COUNTS] == 1)
        return json_value({"verdict": verdict})


def _checked(data: bytes) -> batch.BatchHead:
    """Validates a whole record batch and returns its head. All records must be decodable. The
    producer must be within the bounds of the public headers, which also bound the log's metadata.

    Raises: BadRequest, InvalidRequest, TooLarge.
    """
    try:
        if batch.decode_head(data).count > batch.RECORDS_MAX:
            raise TooLarge(f"the batch has more than {batch.RECORDS_MAX} records")
        head = batch.opened(packed.unpack(data)).head
    except batch.BadBatch as error:
        raise BadRequest(str(error)) from error
    if head.has_gaps:
        raise BadRequest("the batch has gaps between offsets: only a compaction writes gaps")
    match head.producer:
        case ProducerSeq(id=name) if not name or "\0" in name:
            raise InvalidRequest("the producer's id must have 1 to 255 bytes, and no NUL")
        case ProducerSeq(epoch=epoch, seq=seq) if epoch < 0 or seq < 0:
            raise InvalidRequest("the producer's epoch and sequence number must not be negative")
    return head
