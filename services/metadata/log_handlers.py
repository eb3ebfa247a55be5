"""The routes of logs, and of ledgers that no log names."""

from typing import Final
from uuid import UUID

from aiohttp import web

from quorumlog.errors import InvalidRequest
from quorumlog.net import audit
from quorumlog.net.json_bodies import answer
from quorumlog.net.operations import route
from quorumlog.net.parameters import Given, path_text, query_integer, query_text
from quorumlog.protocol.ids import ID_MAX
from quorumlog.wire.bodies import ATTEMPT, LOG_NAME, OnceBody
from quorumlog.wire.log_bodies import (
    Done,
    LedgerIds,
    LogChange,
    LogCreateBody,
    LogDelete,
    LogHeads,
    LogHeadsAsk,
    LogListBody,
    LogRow,
    SharedAsk,
)
from services.metadata.handlers import PARTS
from services.metadata.http import (
    IF_MATCH,
    LEDGER_ID,
    LIMIT,
    SHOWN,
    page_answer,
    parsed,
    row_answer,
)

_AGE_S_MAX: Final = 10 * 365 * 24 * 3600

NAME: Final = path_text("name", LOG_NAME, "The log.", "events")
AFTER: Final = query_text("after", LOG_NAME, "Only logs after this name.")
PREFIX: Final = query_text("prefix", LOG_NAME, "Only logs whose name begins with this.")
ABOVE: Final = query_integer("after", 0, ID_MAX, "Only ledgers with ids above this one.")
OF_LOG: Final = query_text("log", LOG_NAME, "Only ledgers that had a place in a log of this name.")
TOKEN: Final = path_text("token", ATTEMPT, "The request of a client.", str(UUID(int=0)))
CONTENT: Final = query_text("content", "[0-9a-f]{32}", "A digest of what it asks for.")
OLDER_THAN_S: Final = query_integer(
    "older_than_s", 0, _AGE_S_MAX, "Only ledgers that no log has named for so long.", 0
)


async def find_request(request: web.Request, given: Given) -> web.Response:
    """Whether a client's request was carried out; 422 if that was another request."""
    once = OnceBody(token=given[TOKEN], content=given[CONTENT] or "0" * 32)
    return answer(Done(done=await request.app[PARTS].logs.is_done(once)))


async def create_log(request: web.Request, _given: Given) -> web.Response:
    """Create a log; a repeat of the attempt gets the first row."""
    body = await parsed(request, LogCreateBody)
    audit.name_target(f"logs/{body.row.name}")
    row = await request.app[PARTS].logs.create(body)
    return row_answer(row, 201, Location=f"/v1/logs/{row.name}")


async def get_log(request: web.Request, given: Given) -> web.Response:
    """A log's row, read from the primary."""
    row = await request.app[PARTS].logs.get(given[NAME])
    return row_answer(row)


async def list_logs(request: web.Request, given: Given) -> web.Response:
    """Logs by name."""
    rows, following = await request.app[PARTS].logs.page(
        after=given[AFTER] or "", limit=given[LIMIT], prefix=given[PREFIX] or "", shown=given[SHOWN]
    )
    return page_answer("logs", rows, following)


async def change_log(request: web.Request, given: Given) -> web.Response:
    """Compare-and-swap a log's row; a repeat of an applied attempt succeeds."""
    change = await parsed(request, LogChange)
    if change.row.name != given[NAME]:
        raise InvalidRequest("the row is of another log than the path")
    if given[IF_MATCH] not in {None, change.row.version}:
        raise InvalidRequest("If-Match names another version than the row")
    row = await request.app[PARTS].logs.change(change)
    return row_answer(row)


async def delete_log(request: web.Request, given: Given) -> web.Response:
    """Delete a log and free its name; its ledgers become orphans."""
    await request.app[PARTS].logs.delete(given[NAME], await parsed(request, LogDelete))
    return web.Response(status=204)


async def log_heads(request: web.Request, _given: Given) -> web.Response:
    """The versions and writers of many logs, read from the primary."""
    asked = await parsed(request, LogHeadsAsk)
    return answer(LogHeads(logs=tuple(await request.app[PARTS].logs.heads(asked.logs))))


async def list_orphans(request: web.Request, given: Given) -> web.Response:
    """Ledgers above `after`, created for a log, that no log has named for `older_than_s`; with `log`: those that had
    a place in a log of this name.
    """
    after = given[ABOVE]
    found = await request.app[PARTS].logs.orphans(
        older_than_s=given[OLDER_THAN_S],
        after=-1 if after is None else after,
        limit=given[LIMIT],
        log=given[OF_LOG],
    )
    return answer(LedgerIds(ledgers=tuple(found)))


async def delete_orphan(request: web.Request, given: Given) -> web.Response:
    """Delete a ledger that was created for a log, unless a log names it."""
    await request.app[PARTS].logs.delete_orphan(given[LEDGER_ID])
    return web.Response(status=204)


async def shared_ledgers(request: web.Request, _given: Given) -> web.Response:
    """Which of some ledgers forks name, read from the primary."""
    asked = await parsed(request, SharedAsk)
    found = await request.app[PARTS].logs.shared(asked.ledgers)
    return answer(LedgerIds(ledgers=tuple(found)))


_LOG: Final = "/v1/logs/{name}"

ROUTES: Final = (
    route("GET", "/v1/requests/{token}", find_request, TOKEN, CONTENT, gives=Done),
    route("POST", "/v1/logs", create_log, takes=LogCreateBody, gives=LogRow, status=201),
    route("GET", "/v1/logs", list_logs, LIMIT, AFTER, PREFIX, SHOWN, gives=LogListBody),
    route("GET", _LOG, get_log, NAME, gives=LogRow),
    route("PUT", _LOG, change_log, NAME, IF_MATCH, takes=LogChange, gives=LogRow),
    route("DELETE", _LOG, delete_log, NAME, takes=LogDelete, status=204),
    route("POST", "/v1/log-heads", log_heads, takes=LogHeadsAsk, gives=LogHeads),
    route("POST", "/v1/shared-ledgers", shared_ledgers, takes=SharedAsk, gives=LedgerIds),
    route("GET", "/v1/orphans", list_orphans, OLDER_THAN_S, ABOVE, OF_LOG, LIMIT, gives=LedgerIds),
    route("DELETE", "/v1/orphans/{ledger_id}", delete_orphan, LEDGER_ID, status=204),
)
