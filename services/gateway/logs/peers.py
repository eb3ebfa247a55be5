"""Requests to the gateway that owns a log, and the routes that answer them: one hop (rule 11)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import orjson
from aiohttp import web
from pydantic import Field

from quorumlog.errors import NOT_DONE, UNKNOWN, InvalidRequest, WriterLost
from quorumlog.net.json_bodies import parsed
from quorumlog.net.operations import Route, route
from quorumlog.net.parameters import Given, path_text, query_integer
from quorumlog.protocol import batch
from quorumlog.protocol.batch import ProducerSeq
from quorumlog.protocol.heads import LogHead
from quorumlog.protocol.ids import ID_MAX
from quorumlog.protocol.log import LOG_LEDGERS_MAX, LogState
from quorumlog.protocol.metadata import Writer
from quorumlog.protocol.transaction import Transaction
from quorumlog.wire.bodies import LOG_NAME, Body, LedgerId, LogName
from quorumlog.wire.log_bodies import Number
from quorumlog.wire.transaction_bodies import SealedBody, TransactionId, TransactionRow
from services.gateway.engine.internal import EXPECT, WRITER, Bodies, read_batch
from services.gateway.engine.peers import INSTANCE, Peers
from services.gateway.logs.manager import LogManager
from services.gateway.logs.ports import Append, LogAppended, PeerLost, Publish

NAME: Final = path_text("name", LOG_NAME, "The log.")
TOKEN: Final = query_integer("token", 0, ID_MAX, "The writer token.")
SINCE: Final = query_integer("since", 0, ID_MAX, "The log's end before the producer began.", 0)
_APPEND_S: Final = 60.0
"""Whether the owner lives is asked beside; this only ends what nobody waits for any more."""
_ALIVE_S: Final = 2.0
_ENDS_S: Final = 2.0
"""A list of logs waits for that long for a gateway; then the bookies are asked about its logs."""


class PublishBody(Body):
    """A commit, as it travels between gateways."""

    transaction: TransactionId
    ledgers: tuple[SealedBody, ...] = Field(max_length=LOG_LEDGERS_MAX)
    overwrite: bool
    token: Number | None


class EndsBody(Body):
    """Of which logs the ends are asked: name, last ledger, writer token."""

    logs: tuple[tuple[LogName, LedgerId, Number], ...]


class LogPeers(Peers):
    """The other gateways, for logs (`ports.Peers`)."""

    async def append_to_log(self, owner: Writer, name: str, call: Append) -> LogAppended:
        """Let the owner append."""
        query = {
            key: str(value)
            for key, value in (
                ("expect", call.expect),
                ("token", call.token),
                ("since", call.since or None),
            )
            if value is not None
        }
        told = await self._ask_owner(owner, name, "append", query, encode_call(call))
        return LogAppended(
            int(told["first_offset"]),
            int(told["last_offset"]),
            int(told["ledger_id"]),
            int(told["entry_id"]),
            is_duplicate=told["is_duplicate"] is True,
        )

    async def roll(self, owner: Writer, name: str) -> None:
        """Let the owner roll."""
        await self._ask_owner(owner, name, "roll", {}, b"")

    async def publish(self, owner: Writer, name: str, call: Publish) -> Transaction:
        """Let the owner publish a transaction."""
        body = PublishBody(
            transaction=call.transaction,
            ledgers=tuple(
                SealedBody(ledger_id=sealed.ledger_id, last_entry=sealed.last_entry)
                for sealed in call.ledgers
            ),
            overwrite=call.overwrite,
            token=call.token,
        )
        data = body.model_dump_json().encode()
        told = await self._ask_owner(owner, name, "publish", {}, data)
        return TransactionRow.model_validate_json(orjson.dumps(told)).to_core()

    async def ends(self, owner: Writer, heads: Sequence[LogHead]) -> Mapping[str, int]:
        """Where those of these logs end that a gateway owns."""
        asked = [(head.name, head.last_ledger, head.writer_token) for head in heads]
        data = orjson.dumps({"logs": asked})
        try:
            told = await self._ask(owner, "POST", "/internal/log-ends", _ENDS_S, data=data)
        except (WriterLost, TimeoutError) as error:
            raise PeerLost(f"it did not answer: {error!r}", sent=True) from error
        return {str(name): int(end) for name, end in told["ends"].items()}

    async def is_alive(self, owner: Writer) -> bool:
        """Whether that very process answers at its URL."""
        try:
            await self._ask(owner, "GET", "/internal/instance", _ALIVE_S)
        except (WriterLost, TimeoutError):
            return False
        return True

    async def _ask_owner(
        self, owner: Writer, name: str, verb: str, query: dict[str, str], data: bytes
    ) -> dict[str, Any]:
        options = "&".join(f"{key}={value}" for key, value in query.items())
        path = f"/internal/logs/{quote(name, safe='')}/{verb}?{options}"
        try:
            return await self._ask(owner, "POST", path.rstrip("?"), _APPEND_S, data=data)
        except WriterLost as error:
            if error.log is not None:
                raise
            raise PeerLost(error.detail, sent=error.outcome == UNKNOWN) from error
        except TimeoutError as error:
            raise PeerLost("it did not answer", sent=True) from error


class Gateways:
    """`ports.Peers` on LogPeers, whose names must differ from those of ledgers."""

    def __init__(self, peers: LogPeers) -> None:
        self.append = peers.append_to_log
        self.roll = peers.roll
        self.publish = peers.publish
        self.ends = peers.ends
        self.is_alive = peers.is_alive


def encode_call(call: Append) -> bytes:
    """A request's records and producer, as they travel between gateways: a batch of no place."""
    return batch.encode(call.records, append_time_ms=0, records_before=0, producer=call.producer)


def routes(logs: LogManager, instance: str, bodies: Bodies) -> Iterable[Route]:
    """The routes that other gateways ask; errors are left to the application's middleware."""
    inner = _Internal(logs, instance, bodies)
    log = "/internal/logs/{name}"
    asked = (NAME, WRITER)
    return (
        route("POST", "/internal/log-ends", inner.ends, WRITER),
        route("POST", log + "/append", inner.append, *asked, EXPECT, TOKEN, SINCE),
        route("POST", log + "/roll", inner.roll, *asked),
        route("POST", log + "/publish", inner.publish, *asked),
    )


class _Internal:
    def __init__(self, logs: LogManager, instance: str, bodies: Bodies) -> None:
        self._logs, self._instance, self._bodies = logs, instance, bodies

    async def append(self, request: web.Request, given: Given) -> web.Response:
        """Append to a log that this process owns."""
        name = self._name_of(given)
        head, records = await read_batch(request, self._bodies)
        done = await self._logs.append_here(
            name,
            Append(
                tuple(records), _checked(head.producer), given[EXPECT], given[TOKEN], given[SINCE]
            ),
        )
        return self._answer(
            {
                "first_offset": done.first_offset,
                "last_offset": done.last_offset,
                "ledger_id": done.ledger_id,
                "entry_id": done.entry_id,
                "is_duplicate": done.is_duplicate,
            }
        )

    async def ends(self, request: web.Request, given: Given) -> web.Response:
        """Where those of the named logs end that this process owns."""
        self._check_instance(given)
        body = parsed(await self._bodies.read(request, self._bodies.bytes_max), EndsBody)
        heads = (LogHead(name, 0, LogState.OPEN, token, last) for name, last, token in body.logs)
        return self._answer({"ends": self._logs.ends_here(heads)})

    async def roll(self, _request: web.Request, given: Given) -> web.Response:
        """Roll a log that this process owns."""
        await self._logs.roll_here(self._name_of(given))
        return self._answer({})

    async def publish(self, request: web.Request, given: Given) -> web.Response:
        """Publish a transaction onto a log that this process owns."""
        name = self._name_of(given)
        body = parsed(await self._bodies.read(request, self._bodies.bytes_max), PublishBody)
        ledgers = tuple(sealed.to_core() for sealed in body.ledgers)
        call = Publish(body.transaction, ledgers, body.overwrite, body.token)
        done = await self._logs.publish_here(name, call)
        return self._answer(TransactionRow.from_core(done).model_dump(mode="json"))

    def _name_of(self, given: Given) -> str:
        self._check_instance(given)
        return given[NAME]

    def _check_instance(self, given: Given) -> None:
        if given[WRITER] != self._instance:
            raise WriterLost(
                "another process listens here now",
                outcome=NOT_DONE,
                headers={INSTANCE: self._instance},
            )

    def _answer(self, document: dict[str, object]) -> web.Response:
        return web.Response(
            body=orjson.dumps(document),
            content_type="application/json",
            headers={INSTANCE: self._instance},
        )


def _checked(producer: ProducerSeq | None) -> ProducerSeq | None:
    """A producer as the public headers allow it: what else a log had could not be kept in its row."""
    if producer is not None:
        if not producer.id or "\0" in producer.id:
            raise InvalidRequest("a producer's id must have 1 to 255 bytes, and no NUL")
        if producer.epoch < 0 or producer.seq < 0:
            raise InvalidRequest("a producer's epoch and sequence number must not be negative")
    return producer
