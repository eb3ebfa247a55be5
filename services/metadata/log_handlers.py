"""The routes of logs, of transactions, and of ledgers that no log names."""

from typing import Final
from uuid import UUID

from aiohttp import web

from quorumlog.net.identity import GATEWAYS
from quorumlog.net.parameters import Given, path_text, query_integer, query_text
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.transaction import TRANSACTION_ID
from quorumlog.protocol.values import ATTEMPT, LOG_NAME
from quorumlog.wire.log_bodies import LogChange, LogListBody
from services.metadata.http import (
    AFTER,
    IF_MATCH,
    LEDGER_ID,
    LIMIT,
    LOG,
    PARTS,
    SHOWN,
    StoreRoutes,
    answer,
    check_changed,
    page_answer,
    parsed,
)

_AGE_S_MAX: Final = 10 * 365 * 24 * 3600

AFTER_LOG: Final = query_text("after", LOG_NAME, "Only logs after this name.")
PREFIX: Final = query_text("prefix", LOG_NAME, "Only logs whose name begins with this.")
OF_LOG: Final = query_text("log", LOG_NAME, "Only ledgers that had a place in a log of this name.")
TOKEN: Final = path_text("token", ATTEMPT, "The request of a client.", str(UUID(int=0)))
CONTENT: Final = query_text("content", "[0-9a-f]{32}", "A digest of what it asks for.")
OLDER_THAN_S: Final = query_integer(
    "older_than_s", 0, _AGE_S_MAX, "Only ledgers that no log has named for so long.", 0
)
ID: Final = path_text("id", TRANSACTION_ID, "The transaction.")

_LOG: Final = "/v1/logs/{name}"
_ONE: Final = "/v1/transactions/{id}"
ROUTES: Final = StoreRoutes()


@ROUTES.add("GET /v1/logs", LIMIT, AFTER_LOG, PREFIX, SHOWN, roles=GATEWAYS, gives=LogListBody)
async def list_logs(request: web.Request, given: Given) -> web.Response:
    """Logs by name."""
    page = await request.app[PARTS].logs.page(
        after=given[AFTER_LOG] or "",
        limit=given[LIMIT],
        prefix=given[PREFIX] or "",
        shown=given[SHOWN],
    )
    return page_answer("logs", page)


@ROUTES.add(
    f"PUT {_LOG}",
    LOG,
    IF_MATCH,
    roles=GATEWAYS,
    takes=LogChange,
    gives=LogMetadata,
    is_audited_for_clients=True,
)
async def change_log(request: web.Request, given: Given) -> web.Response:
    """Compare-and-swap a log's row; a repeat of an applied attempt succeeds."""
    change = await parsed(request, LogChange)
    check_changed(given, change.row, change.row.name == given[LOG])
    return answer(await request.app[PARTS].logs.change(change))


ROUTES.serve(
    "POST /v1/logs",
    lambda of: of.logs.create,
    roles=GATEWAYS,
    creates=lambda body: f"logs/{body.row.name}",
    name="create_log",
    is_audited=True,
)
ROUTES.serve("POST /v1/transactions", lambda of: of.transactions.begin, roles=GATEWAYS)
ROUTES.serve("GET /v1/requests/{token}", lambda of: of.logs.is_done, TOKEN, CONTENT, roles=GATEWAYS)
ROUTES.serve(f"GET {_LOG}", lambda of: of.logs.get, LOG, roles=GATEWAYS)
ROUTES.serve(
    f"DELETE {_LOG}",
    lambda of: of.logs.delete,
    LOG,
    roles=GATEWAYS,
    name="delete_log",
    is_audited=True,
)
ROUTES.serve("POST /v1/log-heads", lambda of: of.logs.heads, roles=GATEWAYS)
ROUTES.serve(
    "GET /v1/orphans",
    lambda of: of.logs.orphans,
    OLDER_THAN_S,
    AFTER,
    OF_LOG,
    LIMIT,
    roles=GATEWAYS,
)
ROUTES.serve(
    "DELETE /v1/orphans/{ledger_id}", lambda of: of.logs.delete_orphan, LEDGER_ID, roles=GATEWAYS
)
ROUTES.serve("POST /v1/shared-ledgers", lambda of: of.logs.shared, roles=GATEWAYS)
ROUTES.serve(f"GET {_ONE}", lambda of: of.transactions.get, ID, roles=GATEWAYS)
ROUTES.serve(
    f"POST {_ONE}/commit",
    lambda of: of.transactions.commit,
    ID,
    roles=GATEWAYS,
    is_audited_for_clients=True,
)
ROUTES.serve(
    f"POST {_ONE}/abort",
    lambda of: of.transactions.abort,
    ID,
    roles=GATEWAYS,
    is_audited_for_clients=True,
)
ROUTES.serve(f"POST {_ONE}/renew", lambda of: of.transactions.renew, ID, roles=GATEWAYS)
