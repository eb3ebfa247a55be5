"""Requests between gateways: one hop, to the ledger's writer. Not in the public OpenAPI document.

A request names the instance that it is for; another instance answers `writer-lost`, not done (rule
11). Passwords are checked here again, since anybody can reach these routes.
"""

from collections.abc import Iterable
from typing import Final
from urllib.parse import unquote

import orjson
from aiohttp import web

from quorumlog.errors import NOT_DONE, BadRequest, InvalidRequest, WriterLost
from quorumlog.protocol import batch
from services.gateway.engine.engine import Engine
from services.gateway.engine.peers import INSTANCE, PASSWORD, decode_payloads
from services.gateway.interface import Appended

_WAIT_S_MAX: Final = 60.0


def routes(engine: Engine) -> Iterable[web.RouteDef]:
    """The routes of an engine; the application's middleware handles errors."""
    inner = _Internal(engine)
    ledger = "/internal/ledgers/{ledger_id:[0-9]{1,19}}"
    return (
        web.get("/internal/instance", inner.instance),
        web.get(ledger + "/lac", inner.last_add_confirmed, allow_head=False),
        web.post(ledger + "/append", inner.append),
        web.post(ledger + "/records", inner.append_records),
        web.post(ledger + "/close", inner.close),
        web.post(ledger + "/replace", inner.replace),
    )


class _Internal:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def instance(self, _request: web.Request) -> web.Response:
        """Which process this is."""
        return self._answer({"id": self._engine.writer.id})

    async def append(self, request: web.Request) -> web.Response:
        """Append to a ledger of this process."""
        ledger_id = self._ledger_of(request)
        try:
            payloads = decode_payloads(await request.read())
        except ValueError as error:
            raise BadRequest(str(error)) from error
        if not payloads:
            raise InvalidRequest("there is nothing to append")
        done = await self._engine.append_here(
            ledger_id,
            payloads,
            password=_password(request),
            expect=_integer(request, "expect"),
        )
        return self._appended(done)

    async def append_records(self, request: web.Request) -> web.Response:
        """Append a record batch to a transaction's ledger of this process."""
        ledger_id = self._ledger_of(request)
        try:
            _, records = batch.decode(await request.read())
        except batch.BadBatch as error:
            raise BadRequest(str(error)) from error
        expect = _integer(request, "expect")
        return self._appended(
            await self._engine.records.append_here(ledger_id, records, expect=expect)
        )

    def _appended(self, done: Appended) -> web.Response:
        return self._answer(
            {
                "first": done.first,
                "last": done.last,
                "last_add_confirmed": done.last_add_confirmed,
            }
        )

    async def last_add_confirmed(self, request: web.Request) -> web.Response:
        """The writer's LAC; with `after` and `wait_ms`, once it is above `after`."""
        ledger_id = self._ledger_of(request)
        wait_s = min((_integer(request, "wait_ms") or 0) / 1000, _WAIT_S_MAX)
        known, version = await self._engine.reading.writers_lac(
            ledger_id, after=_integer(request, "after"), wait_s=wait_s
        )
        return self._answer(
            {
                "last_add_confirmed": known.last_add_confirmed,
                "closed": known.closed,
                "version": version,
            }
        )

    async def close(self, request: web.Request) -> web.Response:
        """The writer's close; the caller reads the row from the metadata service."""
        ledger_id = self._ledger_of(request)
        row = await self._engine.close_here(ledger_id, password=_password(request))
        return self._answer({"version": row.version})

    async def replace(self, request: web.Request) -> web.Response:
        """Replace a bookie in the open fragment (rule 21)."""
        ledger_id = self._ledger_of(request)
        member = request.query.get("member", "")
        if not member:
            raise InvalidRequest("names no member")
        self._engine.replace(ledger_id, member)
        return self._answer({})

    def _ledger_of(self, request: web.Request) -> int:
        meant = request.headers.get(INSTANCE)
        if meant != self._engine.writer.id:
            raise WriterLost(
                "another process listens here now",
                outcome=NOT_DONE,
                headers={INSTANCE: self._engine.writer.id},
            )
        return int(request.match_info["ledger_id"])

    def _answer(self, document: dict[str, object]) -> web.Response:
        return web.Response(
            body=orjson.dumps(document),
            content_type="application/json",
            headers={INSTANCE: self._engine.writer.id},
        )


def _password(request: web.Request) -> str | None:
    given = request.headers.get(PASSWORD)
    return None if given is None else unquote(given)


def _integer(request: web.Request, name: str) -> int | None:
    text = request.query.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError as error:
        raise InvalidRequest(f"{name} is no integer") from error
