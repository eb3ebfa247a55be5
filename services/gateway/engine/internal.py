"""Requests between gateways: one hop, to the ledger's writer. On the internal listener only.

A request names the instance that it is for; another instance answers `writer-lost`, not done (rule
11). Passwords are checked here again: who has the cluster's secret need not be a gateway.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

import orjson
from aiohttp import web

from quorumlog.errors import NOT_DONE, BadRequest, InvalidRequest, TooLarge, WriterLost
from quorumlog.net.identity import GATEWAYS, HEALERS, WRITERS
from quorumlog.net.operations import Routes
from quorumlog.net.parameters import (
    Given,
    Parameter,
    header_text,
    path_id,
    query_integer,
    query_text,
)
from quorumlog.protocol import batch, packed
from quorumlog.protocol.ids import ID_MAX, NO_ENTRY
from quorumlog.wire.bodies import MEMBER_OR_NAME
from services.gateway.engine.engine import Engine
from services.gateway.engine.peers import INSTANCE, PASSWORD

_WAIT_S_MAX: Final = 60.0
_WAIT_MS_MAX: Final = 3_600_000
"""What a gateway may ask for, with the longest COMMENT_EVERY_S; it is answered sooner."""
_ID_CHARS_MAX: Final = 200
_BATCH_BODY_BYTES_MAX: Final = 2 * batch.BATCH_BYTES_MAX
"""Above what a batch may have as an entry, which is checked where it becomes one."""


def _unquoted(text: str, pointer: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError as error:
        raise BadRequest(f"{pointer}: is not UTF-8, percent-encoded") from error


LEDGER_ID: Final = path_id("ledger_id", "The ledger.")
WRITER: Final = header_text(
    INSTANCE, "The instance that is meant; another one answers 409.", chars_max=_ID_CHARS_MAX
)
SECRET: Final[Parameter[str | None]] = Parameter(
    PASSWORD, "header", _unquoted, {"type": "string"}, "The password, percent-encoded.", None
)
EXPECT: Final = query_integer("expect", 0, ID_MAX, "The id that the first item must get.")
AFTER: Final = query_integer("after", NO_ENTRY, ID_MAX, "Wait for an LAC above this one.")
WAIT_MS: Final = query_integer("wait_ms", 0, _WAIT_MS_MAX, "For how long, 60 s at most.", 0)
MEMBER: Final = query_text("member", MEMBER_OR_NAME, "The bookie to replace.")


@dataclass(frozen=True, slots=True)
class InternalBodies:
    """The bounds of bodies: those of the public routes, from which gateways pass them on."""

    read: Callable[[web.Request, int], Awaitable[bytes]]
    """Reads a body of at most so many bytes, in time and within the room for all bodies."""
    decode: Callable[[bytes], list[bytes]]
    """The payloads of a public append's frames, which are the body of an append between gateways too."""
    bytes_max: int


def routes(engine: Engine, instance: str, bodies: InternalBodies) -> Routes:
    """The routes of an engine; the application's middleware handles errors."""
    inner = _InternalLedgerRoutes(engine, instance, bodies)
    ledger = "/internal/ledgers/{ledger_id}"
    asked = (LEDGER_ID, WRITER)
    routes = Routes()
    routes.add("GET /internal/instance", roles=WRITERS)(inner.instance)
    routes.add(f"GET {ledger}/lac", *asked, AFTER, WAIT_MS, roles=GATEWAYS)(
        inner.last_add_confirmed
    )
    routes.add(f"POST {ledger}/append", *asked, SECRET, EXPECT, roles=GATEWAYS)(inner.append)
    routes.add(f"POST {ledger}/records", *asked, EXPECT, roles=GATEWAYS)(inner.append_records)
    routes.add(f"POST {ledger}/close", *asked, SECRET, roles=GATEWAYS)(inner.close)
    routes.add(f"POST {ledger}/replace", *asked, MEMBER, roles=HEALERS)(inner.replace)
    return routes


class InternalRoutes:
    """Routes that answer other gateways for one process."""

    def __init__(self, instance: str, bodies: InternalBodies) -> None:
        """`instance` is this process."""
        self._instance, self.bodies = instance, bodies

    def check_instance(self, given: Given) -> None:
        """Raise WriterLost if another process is meant."""
        if given[WRITER] != self._instance:
            raise WriterLost(
                "another process listens here now",
                outcome=NOT_DONE,
                headers={INSTANCE: self._instance},
            )

    def answer(self, document: object) -> web.Response:
        """An answer with the instance's id; `document` is JSON or a dataclass."""
        return web.Response(
            body=orjson.dumps(document),
            content_type="application/json",
            headers={INSTANCE: self._instance},
        )


class _InternalLedgerRoutes(InternalRoutes):
    def __init__(self, engine: Engine, instance: str, bodies: InternalBodies) -> None:
        super().__init__(instance, bodies)
        self._engine = engine

    async def instance(self, _request: web.Request, _given: Given) -> web.Response:
        """Which process this is."""
        return self.answer({"id": self._instance})

    async def append(self, request: web.Request, given: Given) -> web.Response:
        """Append to a ledger of this process."""
        ledger_id, bodies = self._ledger_of(given), self.bodies
        payloads = bodies.decode(await bodies.read(request, bodies.bytes_max))
        done = await self._engine.appends.append_here(
            ledger_id, payloads, password=given[SECRET], expect=given[EXPECT]
        )
        return self.answer(done)

    async def append_records(self, request: web.Request, given: Given) -> web.Response:
        """Append a record batch to a transaction's ledger of this process."""
        ledger_id = self._ledger_of(given)
        data, head = await read_batch(request, self.bodies)
        if head.producer is not None:
            raise InvalidRequest("a transaction's ledger has no producers")
        return self.answer(
            await self._engine.appends.append_batch_here(ledger_id, data, expect=given[EXPECT])
        )

    async def last_add_confirmed(self, _request: web.Request, given: Given) -> web.Response:
        """The writer's LAC; with `after` and `wait_ms`, once it is above `after`."""
        ledger_id = self._ledger_of(given)
        wait_s = min(given[WAIT_MS] / 1000, _WAIT_S_MAX)
        known, version = await self._engine.reading.writers_lac(
            ledger_id, after=given[AFTER], wait_s=wait_s
        )
        return self.answer(
            {
                "last_add_confirmed": known.last_add_confirmed,
                "closed": known.closed,
                "version": version,
            }
        )

    async def close(self, _request: web.Request, given: Given) -> web.Response:
        """The writer's close; the caller reads the row from the metadata service."""
        ledger_id = self._ledger_of(given)
        row = await self._engine.close_here(ledger_id, password=given[SECRET])
        return self.answer({"version": row.version})

    async def replace(self, _request: web.Request, given: Given) -> web.Response:
        """Replace a bookie in the open fragment (rule 21)."""
        ledger_id, member = self._ledger_of(given), given[MEMBER]
        if member is None:
            raise InvalidRequest("names no member")
        self._engine.handles.get(ledger_id).replace(member)
        return self.answer({})

    def _ledger_of(self, given: Given) -> int:
        self.check_instance(given)
        return given[LEDGER_ID]


async def read_batch(request: web.Request, bodies: InternalBodies) -> tuple[bytes, batch.BatchHead]:
    """A request's record batch, whose records can be decoded. Raises: BadRequest, TooLarge."""
    data = await bodies.read(request, _BATCH_BODY_BYTES_MAX)
    try:
        if batch.decode_head(data).count > batch.RECORDS_MAX:
            raise TooLarge(f"a batch of more than {batch.RECORDS_MAX} records")
        return data, batch.check(packed.unpack(data))
    except batch.BadBatch as error:
        raise BadRequest(str(error)) from error
