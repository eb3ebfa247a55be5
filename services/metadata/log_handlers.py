"""The routes of logs, and of ledgers that no log names."""

from typing import Final

from aiohttp import web

from quorumlog.errors import InvalidRequest
from quorumlog.wire.bodies import LOG_NAME
from quorumlog.wire.log_bodies import (
    LedgerIds,
    LogChange,
    LogCreate,
    LogDelete,
    LogHeads,
    LogHeadsAsk,
    LogList,
    LogRow,
)
from services.metadata.handlers import PARTS
from services.metadata.http import (
    answer,
    header_version,
    integer,
    ledger_id_of,
    limit_of,
    matching,
    parsed,
    query_of,
)
from services.metadata.routes import Route

_AGE_S_MAX: Final = 10 * 365 * 24 * 3600


async def create_log(request: web.Request) -> web.Response:
    """Create a log; the same attempt again gets the same row."""
    query_of(request, ())
    row = await request.app[PARTS].logs.create(await parsed(request, LogCreate))
    return answer(row, 201, Location=f"/v1/logs/{row.name}", ETag=f'"{row.version}"')


async def get_log(request: web.Request) -> web.Response:
    """A log's row as the primary has it."""
    query_of(request, ())
    row = await request.app[PARTS].logs.get(_name(request))
    return answer(row, ETag=f'"{row.version}"')


async def list_logs(request: web.Request) -> web.Response:
    """Logs by name."""
    query = query_of(request, ("limit", "after"))
    after = query.get("after", "")
    if after:
        matching(after, "after", LOG_NAME)
    rows, following = await request.app[PARTS].logs.page(after=after, limit=limit_of(query))
    return answer(LogList(logs=tuple(rows), next=following))


async def change_log(request: web.Request) -> web.Response:
    """Compare-and-swap a log's row; the same attempt again is answered as done."""
    query_of(request, ())
    change = await parsed(request, LogChange)
    if change.row.name != _name(request):
        raise InvalidRequest("the row is of another log than the path")
    if header_version(request) not in {None, change.row.version}:
        raise InvalidRequest("If-Match names another version than the row")
    row = await request.app[PARTS].logs.change(change)
    return answer(row, ETag=f'"{row.version}"')


async def delete_log(request: web.Request) -> web.Response:
    """Free a log's name; no log then names its ledgers."""
    query_of(request, ())
    await request.app[PARTS].logs.delete(_name(request), await parsed(request, LogDelete))
    return web.Response(status=204)


async def log_heads(request: web.Request) -> web.Response:
    """Of many logs at once, who may write to them, as the primary has it."""
    query_of(request, ())
    asked = await parsed(request, LogHeadsAsk)
    return answer(LogHeads(logs=tuple(await request.app[PARTS].logs.heads(asked.logs))))


async def list_orphans(request: web.Request) -> web.Response:
    """Ledgers above `after` that were made for a log and that no log has named for `older_than_s`."""
    query = query_of(request, ("older_than_s", "after", "limit"))
    age_s = integer(query.get("older_than_s", "0"), "older_than_s", most=_AGE_S_MAX)
    after = integer(query["after"], "after") if "after" in query else -1
    found = await request.app[PARTS].logs.orphans(
        older_than_s=age_s, after=after, limit=limit_of(query)
    )
    return answer(LedgerIds(ledgers=tuple(found)))


async def delete_orphan(request: web.Request) -> web.Response:
    """Delete a ledger that was made for a log, if no log names it in that very transaction."""
    query_of(request, ())
    await request.app[PARTS].logs.delete_orphan(ledger_id_of(request))
    return web.Response(status=204)


def _name(request: web.Request) -> str:
    return matching(request.match_info["name"], "name", LOG_NAME)


ROUTES: Final = (
    Route("POST", "/v1/logs", create_log, LogCreate, LogRow, 201),
    Route("GET", "/v1/logs", list_logs, None, LogList, query=("limit", "after")),
    Route("GET", "/v1/logs/{name}", get_log, None, LogRow),
    Route("PUT", "/v1/logs/{name}", change_log, LogChange, LogRow),
    Route("DELETE", "/v1/logs/{name}", delete_log, LogDelete, None, 204),
    Route("POST", "/v1/log-heads", log_heads, LogHeadsAsk, LogHeads),
    Route(
        "GET",
        "/v1/orphans",
        list_orphans,
        None,
        LedgerIds,
        query=("older_than_s", "after", "limit"),
    ),
    Route("DELETE", "/v1/orphans/{ledger_id}", delete_orphan, None, None, 204),
)
