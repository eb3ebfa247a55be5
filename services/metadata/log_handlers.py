"""The routes of logs, of transactions, and of ledgers that no log names."""

from typing import Final
from uuid import UUID

from aiohttp import web

from quorumlog.errors import InvalidRequest
from quorumlog.net import audit
from quorumlog.net.bodies import answer
from quorumlog.net.identity import GATEWAYS
from quorumlog.net.operations import Routes
from quorumlog.net.parameters import Given, path_text, query_integer, query_text
from quorumlog.protocol.ids import ID_MAX
from quorumlog.protocol.log import LogMetadata
from quorumlog.protocol.once import Once
from quorumlog.protocol.transaction import TRANSACTION_ID, Transaction
from quorumlog.protocol.values import ATTEMPT, LOG_NAME
from quorumlog.wire.bodies import RowDelete
from quorumlog.wire.log_bodies import (
    Done,
    LedgerIds,
    LogChange,
    LogCreateBody,
    LogHeads,
    LogHeadsAsk,
    LogListBody,
    SharedAsk,
    TransactionAlive,
    TransactionBeginBody,
    TransactionCommitBody,
    TransactionDone,
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


_LOG: Final = "/v1/logs/{name}"
ROUTES: Final = Routes()


@ROUTES.add("GET /v1/requests/{token}", TOKEN, CONTENT, roles=GATEWAYS, gives=Done)
async def find_request(request: web.Request, given: Given) -> web.Response:
    """Whether a client's request was carried out; 422 if that was another request."""
    once = Once(token=given[TOKEN], content=given[CONTENT] or "0" * 32)
    return answer(Done(done=await request.app[PARTS].logs.is_done(once)))


@ROUTES.add(
    "POST /v1/logs",
    roles=GATEWAYS,
    takes=LogCreateBody,
    gives=LogMetadata,
    status=201,
    is_audited=True,
)
async def create_log(request: web.Request, _given: Given) -> web.Response:
    """Create a log; a repeat of the attempt gets the first row."""
    body = await parsed(request, LogCreateBody)
    audit.name_target(f"logs/{body.row.name}")
    row = await request.app[PARTS].logs.create(body)
    return row_answer(row, 201, Location=f"/v1/logs/{row.name}")


@ROUTES.add(f"GET {_LOG}", NAME, roles=GATEWAYS, gives=LogMetadata)
async def get_log(request: web.Request, given: Given) -> web.Response:
    """A log's row, read from the primary."""
    row = await request.app[PARTS].logs.get(given[NAME])
    return row_answer(row)


@ROUTES.add("GET /v1/logs", LIMIT, AFTER, PREFIX, SHOWN, roles=GATEWAYS, gives=LogListBody)
async def list_logs(request: web.Request, given: Given) -> web.Response:
    """Logs by name."""
    rows, following = await request.app[PARTS].logs.page(
        after=given[AFTER] or "", limit=given[LIMIT], prefix=given[PREFIX] or "", shown=given[SHOWN]
    )
    return page_answer("logs", rows, following)


@ROUTES.add(
    f"PUT {_LOG}",
    NAME,
    IF_MATCH,
    roles=GATEWAYS,
    takes=LogChange,
    gives=LogMetadata,
    is_audited_for_clients=True,
)
async def change_log(request: web.Request, given: Given) -> web.Response:
    """Compare-and-swap a log's row; a repeat of an applied attempt succeeds."""
    change = await parsed(request, LogChange)
    if change.row.name != given[NAME]:
        raise InvalidRequest("the row is of another log than the path")
    if given[IF_MATCH] not in {None, change.row.version}:
        raise InvalidRequest("If-Match names another version than the row")
    row = await request.app[PARTS].logs.change(change)
    return row_answer(row)


@ROUTES.add(f"DELETE {_LOG}", NAME, roles=GATEWAYS, takes=RowDelete, status=204, is_audited=True)
async def delete_log(request: web.Request, given: Given) -> web.Response:
    """Delete a log and free its name; its ledgers become orphans."""
    await request.app[PARTS].logs.delete(given[NAME], await parsed(request, RowDelete))
    return web.Response(status=204)


@ROUTES.add("POST /v1/log-heads", roles=GATEWAYS, takes=LogHeadsAsk, gives=LogHeads)
async def log_heads(request: web.Request, _given: Given) -> web.Response:
    """The versions and writers of many logs, read from the primary."""
    asked = await parsed(request, LogHeadsAsk)
    return answer(LogHeads(logs=tuple(await request.app[PARTS].logs.heads(asked.logs))))


@ROUTES.add("GET /v1/orphans", OLDER_THAN_S, ABOVE, OF_LOG, LIMIT, roles=GATEWAYS, gives=LedgerIds)
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


@ROUTES.add("DELETE /v1/orphans/{ledger_id}", LEDGER_ID, roles=GATEWAYS, status=204)
async def delete_orphan(request: web.Request, given: Given) -> web.Response:
    """Delete a ledger that was created for a log, unless a log names it."""
    await request.app[PARTS].logs.delete_orphan(given[LEDGER_ID])
    return web.Response(status=204)


@ROUTES.add("POST /v1/shared-ledgers", roles=GATEWAYS, takes=SharedAsk, gives=LedgerIds)
async def shared_ledgers(request: web.Request, _given: Given) -> web.Response:
    """Which of some ledgers forks name, read from the primary."""
    asked = await parsed(request, SharedAsk)
    found = await request.app[PARTS].logs.shared(asked.ledgers)
    return answer(LedgerIds(ledgers=tuple(found)))


ID: Final = path_text("id", TRANSACTION_ID, "The transaction.")


_ONE: Final = "/v1/transactions/{id}"


@ROUTES.add(
    "POST /v1/transactions",
    roles=GATEWAYS,
    takes=TransactionBeginBody,
    gives=Transaction,
    status=201,
    repeat_status=200,
)
async def begin_transaction(request: web.Request, _given: Given) -> web.Response:
    """Begin a transaction, or get the existing one of this app and version."""
    row, is_new = await request.app[PARTS].transactions.begin(
        await parsed(request, TransactionBeginBody)
    )
    return answer(row, 201 if is_new else 200, Location=f"/v1/transactions/{row.id}")


@ROUTES.add(f"GET {_ONE}", ID, roles=GATEWAYS, gives=Transaction)
async def get_transaction(request: web.Request, given: Given) -> web.Response:
    """A transaction, read from the primary."""
    return answer(await request.app[PARTS].transactions.get(given[ID]))


@ROUTES.add(
    f"POST {_ONE}/commit",
    ID,
    roles=GATEWAYS,
    takes=TransactionCommitBody,
    gives=TransactionDone,
    is_audited_for_clients=True,
)
async def commit_transaction(request: web.Request, given: Given) -> web.Response:
    """Publish ledgers onto the log and end the transaction; a repeat gets the same answer."""
    body = await parsed(request, TransactionCommitBody)
    return answer(await request.app[PARTS].transactions.commit(given[ID], body))


@ROUTES.add(
    f"POST {_ONE}/abort", ID, roles=GATEWAYS, gives=Transaction, is_audited_for_clients=True
)
async def abort_transaction(request: web.Request, given: Given) -> web.Response:
    """Abort a transaction: none of its ledgers is published."""
    return answer(await request.app[PARTS].transactions.abort(given[ID]))


@ROUTES.add(f"POST {_ONE}/renew", ID, roles=GATEWAYS, gives=TransactionAlive)
async def renew_transaction(request: web.Request, given: Given) -> web.Response:
    """Put off a transaction's expiry, and get its state."""
    return answer(await request.app[PARTS].transactions.renew(given[ID]))
