"""The routes for other services, on the internal listener only.

A gateway passes a client's request on to the gateway that writes the ledger: the same path below `/internal`, with the same
query and body, for the same handler. The other routes answer questions that gateways and autorecovery have of their own.

A request names the instance that it is for; another instance answers `writer-lost`, not done (rule 11). Passwords and
bodies are checked here again: who has the cluster's secret need not be a gateway.
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
from quorumlog.net.operations import Route, Routes
from quorumlog.net.parameters import Given, header_text, path_text, query_integer, query_text
from quorumlog.protocol import batch, packed
from quorumlog.protocol.batch import ProducerSeq
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.ids import ID_MAX, NO_ENTRY
from quorumlog.protocol.log import Expiry, LogState
from quorumlog.protocol.log.messages import Append, Publish
from quorumlog.protocol.values import LOG_NAME, MEMBER_OR_NAME
from quorumlog.wire.position_bodies import POSITIONS_LOG, BadPositions
from services.gateway.edge import body, entries, ledgers
from services.gateway.edge.answers import json_value
from services.gateway.edge.operations import EXPECT, LEDGER_ID
from services.gateway.edge.room import Room
from services.gateway.engine import Engine
from services.gateway.logs.manager import LogManager
from services.gateway.logs.peers import EndsBody
from services.gateway.logs.values import CREATED_AT

_WAIT_S_MAX: Final = 60.0
_WAIT_MS_MAX: Final = 3_600_000
"""What a gateway may ask for, with the longest COMMENT_EVERY_S; it is answered sooner."""
_ID_CHARS_MAX: Final = 200
_BATCH_BODY_BYTES_MAX: Final = 2 * batch.BATCH_BYTES_MAX
"""Above what a batch may have as an entry, which is checked where it becomes one."""
_BODY_BYTES_MAX: Final = 64 << 20
"""Any other body."""

FORWARDED: Final = (entries.APPEND, ledgers.CLOSE)
"""The operations whose requests are passed on to a ledger's writer."""

WRITER: Final = header_text(
    header.FORWARDED_WRITER,
    "The instance that is meant; another one answers 409.",
    chars_max=_ID_CHARS_MAX,
)
AFTER: Final = query_integer("after", NO_ENTRY, ID_MAX, "Wait for an LAC above this one.")
WAIT_MS: Final = query_integer("wait_ms", 0, _WAIT_MS_MAX, "For how long, 60 s at most.", 0)
MEMBER: Final = query_text("member", MEMBER_OR_NAME, "The bookie to replace.")
NAME: Final = path_text("name", LOG_NAME, "The log.")
TOKEN: Final = query_integer("token", 0, ID_MAX, "The writer token.")
CREATED: Final = query_text("created", CREATED_AT, "The log's `created_at`, as its row has it.")
TERM: Final = query_text("term", "[0-9a-f-]{1,36}", "Of the appointment of the log's keeper.")
IDLE_S: Final = query_integer("idle_s", 0, ID_MAX, "Seconds without use after which it expires.", 0)
COUNTS: Final = query_integer("counts", 0, 1, "1: this is an access; 0: a question.", 0)
SINCE: Final = query_integer("since", 0, ID_MAX, "The log's end before the producer began.", 0)


def ledger_routes(engine: Engine, instance: str, public: Sequence[Route]) -> list[Route]:
    """The routes about ledgers of this instance. `public`: the public routes, of which some serve other gateways too."""
    inner, ledger, routes, named = (
        _LedgerRoutes(engine),
        "/internal/ledgers/{ledger_id}",
        Routes(),
        Routes(),
    )
    routes.add("GET /internal/instance", roles=WRITERS)(inner.instance)
    named.add(f"GET {ledger}/lac", LEDGER_ID, AFTER, WAIT_MS, roles=GATEWAYS)(
        inner.last_add_confirmed
    )
    named.add(f"POST {ledger}/replace", LEDGER_ID, MEMBER, roles=HEALERS)(inner.replace)
    named += [inner.forwarded(one) for one in public if one.operation in FORWARDED]
    return [*routes, *(_for_instance(instance, one) for one in named)]


def log_routes(logs: LogManager, instance: str, room: Room) -> list[Route]:
    """The routes about logs of this instance, which take room for bodies as the public ones do."""
    inner, log, routes = _LogRoutes(logs, room), "/internal/logs/{name}", Routes()
    asks = partial(routes.add, roles=GATEWAYS)
    asks("POST /internal/log-ends")(inner.ends)
    asks(f"POST {log}/append", NAME, EXPECT, TOKEN, SINCE, CREATED)(inner.append)
    asks(f"POST {log}/roll", NAME)(inner.roll)
    asks(f"POST {log}/publish", NAME)(inner.publish)
    asks(f"POST {log}/consult", NAME)(inner.consult)
    asks(f"POST {log}/access", NAME, TERM, IDLE_S, COUNTS)(inner.access)
    return [_for_instance(instance, one) for one in routes]


def _for_instance(instance: str, inner: Route) -> Route:
    """A route for requests that name this process, whose responses name it too."""

    async def handle(request: web.Request, given: Given) -> web.StreamResponse:
        if given[WRITER] != instance:
            raise WriterLost(
                "another process listens here now",
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
        """Which process this is."""
        me = self._engine.writer.id
        return json_value({"id": me}, headers={header.FORWARDED_WRITER: me})

    def forwarded(self, public: Route) -> Route:
        """A public route for requests that another gateway passes on, which go no further: one hop (rule 11)."""

        async def handle(request: web.Request, given: Given) -> web.StreamResponse:
            engine, ledger_id = self._engine, given[LEDGER_ID]
            if not engine.writes(ledger_id):
                writer = (await engine.row(ledger_id)).writer
                if writer is None or writer.id != engine.writer.id:
                    raise WriterLost("no write handle", ledger_id=ledger_id, outcome=NOT_DONE)
            request[entries.FORWARDED] = True
            return await public.handler(request, given)

        method, path = public.operation.method, public.operation.path
        inside = replace(public.operation, key=f"{method} /internal{path}", roles=GATEWAYS)
        return Route(inside, handle)

    async def last_add_confirmed(self, _request: web.Request, given: Given) -> web.Response:
        """The writer's LAC; with `after` and `wait_ms`, once it is above `after`."""
        wait_s = min(given[WAIT_MS] / 1000, _WAIT_S_MAX)
        known, version = await self._engine.reading.writers_lac(
            given[LEDGER_ID], after=given[AFTER], wait_s=wait_s
        )
        return json_value(
            {
                "last_add_confirmed": known.last_add_confirmed,
                "closed": known.closed,
                "version": version,
            }
        )

    async def replace(self, _request: web.Request, given: Given) -> web.Response:
        """Replace a bookie in the open fragment (rule 21)."""
        member = given[MEMBER]
        if member is None:
            raise InvalidRequest("names no member")
        self._engine.handles.get(given[LEDGER_ID]).replace(member)
        return json_value({})


class _LogRoutes:
    def __init__(self, logs: LogManager, room: Room) -> None:
        self._logs, self._room = logs, room

    async def append(self, request: web.Request, given: Given) -> web.Response:
        """Append to a log that this process owns."""
        data = await body.read(request, self._room, _BATCH_BODY_BYTES_MAX)
        head = _checked(data)
        call = Append(
            data,
            head.count,
            head.producer,
            given[EXPECT],
            given[TOKEN],
            given[SINCE],
            created_at=given[CREATED],
        )
        return json_value(await self._logs.append_here(given[NAME], call))

    async def ends(self, request: web.Request, _given: Given) -> web.Response:
        """The ends of those of the named logs that this process owns."""
        asked = parsed(await self._body(request), EndsBody)
        heads = (LogHead(name, 0, LogState.OPEN, token, last) for name, last, token in asked.logs)
        return json_value({"ends": self._logs.ends_here(heads)})

    async def roll(self, _request: web.Request, given: Given) -> web.Response:
        """Roll a log that this process owns."""
        await self._logs.roll_here(given[NAME])
        return json_value({})

    async def publish(self, request: web.Request, given: Given) -> web.Response:
        """Publish a transaction onto a log that this process owns."""
        call = parsed(await self._body(request), Publish)
        done = await self._logs.publish_here(given[NAME], call)
        return json_value(done)

    async def consult(self, request: web.Request, given: Given) -> web.Response:
        """Decide requests about positions, whose log this process owns."""
        if given[NAME] != POSITIONS_LOG:
            raise InvalidRequest("nothing can be asked of this log")
        try:
            answers = await self._logs.positions.answer_here(await self._body(request))
        except BadPositions as error:
            raise BadRequest(str(error)) from error
        return json_value(answers)

    async def access(self, _request: web.Request, given: Given) -> web.Response:
        """Count an access to a log whose keeper this process is, and say whether the log lives."""
        term = given[TERM]
        if term is None:
            raise InvalidRequest("a keeper is asked by its term")
        expiry = Expiry(given[IDLE_S], self._logs.me, term)
        verdict = await self._logs.accesses.here(given[NAME], expiry, is_access=given[COUNTS] == 1)
        return json_value({"verdict": verdict})

    async def _body(self, request: web.Request) -> bytes:
        return await body.read(request, self._room, _BODY_BYTES_MAX)


def _checked(data: bytes) -> batch.BatchHead:
    """The head of a batch whose records can be decoded, with a producer within the bounds of the public headers: a log's row
    can keep no other. Raises: BadRequest, InvalidRequest, TooLarge.
    """
    try:
        if batch.decode_head(data).count > batch.RECORDS_MAX:
            raise TooLarge(f"a batch of more than {batch.RECORDS_MAX} records")
        head = batch.check(packed.unpack(data))
    except batch.BadBatch as error:
        raise BadRequest(str(error)) from error
    match head.producer:
        case ProducerSeq(id=name) if not name or "\0" in name:
            raise InvalidRequest("a producer's id must have 1 to 255 bytes, and no NUL")
        case ProducerSeq(epoch=epoch, seq=seq) if epoch < 0 or seq < 0:
            raise InvalidRequest("a producer's epoch and sequence number must not be negative")
    return head
