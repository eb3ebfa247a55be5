"""Routes for the other gateways, on the internal listener only: requests about logs that this process owns."""

from typing import Final

from aiohttp import web

from quorumlog.errors import BadRequest, InvalidRequest
from quorumlog.net.identity import GATEWAYS
from quorumlog.net.json_bodies import parsed
from quorumlog.net.operations import Routes
from quorumlog.net.parameters import Given, path_text, query_integer, query_text
from quorumlog.protocol.batch import ProducerSeq
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.ids import ID_MAX
from quorumlog.protocol.log import Expiry, LogState
from quorumlog.protocol.log.messages import Append, Publish
from quorumlog.wire.bodies import LOG_NAME
from quorumlog.wire.position_bodies import POSITIONS_LOG, BadPositions
from quorumlog.wire.transaction_bodies import TransactionRow
from services.gateway.engine.internal import (
    EXPECT,
    WRITER,
    InternalBodies,
    InternalRoutes,
    read_batch,
)
from services.gateway.logs.manager import LogManager
from services.gateway.logs.peers import EndsBody, PublishBody
from services.gateway.logs.values import CREATED_AT

NAME: Final = path_text("name", LOG_NAME, "The log.")
TOKEN: Final = query_integer("token", 0, ID_MAX, "The writer token.")
CREATED: Final = query_text("created", CREATED_AT, "The log's `created_at`, as its row has it.")
TERM: Final = query_text("term", "[0-9a-f-]{1,36}", "Of the appointment of the log's keeper.")
IDLE_S: Final = query_integer("idle_s", 0, ID_MAX, "Seconds without use after which it expires.", 0)
COUNTS: Final = query_integer("counts", 0, 1, "1: this is an access; 0: a question.", 0)
SINCE: Final = query_integer("since", 0, ID_MAX, "The log's end before the producer began.", 0)


def routes(logs: LogManager, instance: str, bodies: InternalBodies) -> Routes:
    """The routes for other gateways; the application's middleware handles errors."""
    inner = _InternalLogRoutes(logs, instance, bodies)
    log = "/internal/logs/{name}"
    asked = (NAME, WRITER)
    routes = Routes()
    routes.add("POST /internal/log-ends", WRITER, roles=GATEWAYS)(inner.ends)
    routes.add(f"POST {log}/append", *asked, EXPECT, TOKEN, SINCE, CREATED, roles=GATEWAYS)(
        inner.append
    )
    routes.add(f"POST {log}/roll", *asked, roles=GATEWAYS)(inner.roll)
    routes.add(f"POST {log}/publish", *asked, roles=GATEWAYS)(inner.publish)
    routes.add(f"POST {log}/consult", *asked, roles=GATEWAYS)(inner.consult)
    routes.add(f"POST {log}/access", *asked, TERM, IDLE_S, COUNTS, roles=GATEWAYS)(inner.access)
    return routes


class _InternalLogRoutes(InternalRoutes):
    def __init__(self, logs: LogManager, instance: str, bodies: InternalBodies) -> None:
        super().__init__(instance, bodies)
        self._logs = logs

    async def append(self, request: web.Request, given: Given) -> web.Response:
        """Append to a log that this process owns."""
        self.check_instance(given)
        data, head = await read_batch(request, self.bodies)
        producer = _checked(head.producer)
        call = Append(
            data,
            head.count,
            producer,
            given[EXPECT],
            given[TOKEN],
            given[SINCE],
            created_at=given[CREATED],
        )
        return self.answer(await self._logs.append_here(given[NAME], call))

    async def ends(self, request: web.Request, given: Given) -> web.Response:
        """The ends of those of the named logs that this process owns."""
        self.check_instance(given)
        body = parsed(await self.bodies.read(request, self.bodies.bytes_max), EndsBody)
        heads = (LogHead(name, 0, LogState.OPEN, token, last) for name, last, token in body.logs)
        return self.answer({"ends": self._logs.ends_here(heads)})

    async def roll(self, _request: web.Request, given: Given) -> web.Response:
        """Roll a log that this process owns."""
        self.check_instance(given)
        await self._logs.roll_here(given[NAME])
        return self.answer({})

    async def publish(self, request: web.Request, given: Given) -> web.Response:
        """Publish a transaction onto a log that this process owns."""
        self.check_instance(given)
        body = parsed(await self.bodies.read(request, self.bodies.bytes_max), PublishBody)
        ledgers = tuple(sealed.to_core() for sealed in body.ledgers)
        call = Publish(body.transaction, ledgers, body.overwrite, body.token)
        done = await self._logs.publish_here(given[NAME], call)
        return self.answer(TransactionRow.from_core(done).model_dump(mode="json"))

    async def consult(self, request: web.Request, given: Given) -> web.Response:
        """Decide requests about positions, whose log this process owns."""
        self.check_instance(given)
        if given[NAME] != POSITIONS_LOG:
            raise InvalidRequest("nothing can be asked of this log")
        data = await self.bodies.read(request, self.bodies.bytes_max)
        try:
            answers = await self._logs.positions.answer_here(data)
        except BadPositions as error:
            raise BadRequest(str(error)) from error
        return self.answer(answers)

    async def access(self, _request: web.Request, given: Given) -> web.Response:
        """Count an access to a log whose keeper this process is, and say whether the log lives."""
        self.check_instance(given)
        term = given[TERM]
        if term is None:
            raise InvalidRequest("a keeper is asked by its term")
        expiry = Expiry(given[IDLE_S], self._logs.me, term)
        verdict = await self._logs.accesses.here(given[NAME], expiry, is_access=given[COUNTS] == 1)
        return self.answer({"verdict": verdict})


def _checked(producer: ProducerSeq | None) -> ProducerSeq | None:
    """A producer within the bounds of the public headers: a log's row can keep no other."""
    if producer is not None:
        if not producer.id or "\0" in producer.id:
            raise InvalidRequest("a producer's id must have 1 to 255 bytes, and no NUL")
        if producer.epoch < 0 or producer.seq < 0:
            raise InvalidRequest("a producer's epoch and sequence number must not be negative")
    return producer
